//! The bits of a mode.

use cavern_proto::master::{Kind, User};

/// Of a mode as `stat` has it: the type of the file.
pub const TYPE_BITS: u32 = 0o170_000;
/// What lets a program run as its owner, or as its group.
pub const SET_USER_ID: u32 = 0o4000;
pub const SET_GROUP_ID: u32 = 0o2000;
/// In such a directory only owners take names away.
pub const STICKY: u32 = 0o1000;
pub const GROUP_EXECUTE: u32 = 0o0010;
/// What chmod sets.
pub const MODE_BITS: u32 = 0o7777;
/// Of these, what owner, group and others may do.
pub const ACCESS_BITS: u32 = 0o777;

/// What one class of users may do, of 0o7.
pub const READ: u32 = 4;
pub const WRITE: u32 = 2;
pub const EXECUTE: u32 = 1;

/// The type of a file in a mode, as `stat` has it.
pub fn type_bits(kind: Kind) -> u32 {
    match kind {
        Kind::Unspecified | Kind::File => 0o100_000,
        Kind::Directory => 0o040_000,
        Kind::Symlink => 0o120_000,
        Kind::Fifo => 0o010_000,
        Kind::Socket => 0o140_000,
        Kind::CharacterDevice => 0o020_000,
        Kind::BlockDevice => 0o060_000,
    }
}

/// The kind of which a mode has the type; `None` for a type that there is not.
pub fn kind_of(mode: u32) -> Option<Kind> {
    let kinds = Kind::File as i32..=Kind::BlockDevice as i32;
    kinds.filter_map(|kind| Kind::try_from(kind).ok()).find(|kind| type_bits(*kind) == mode & TYPE_BITS)
}

/// Whether a file has a set-group-ID bit that no program runs by, since the group may not execute it. A member of the
/// group leaves it when he changes the file.
pub fn is_for_members(mode: u32) -> bool {
    mode & (SET_GROUP_ID | GROUP_EXECUTE) == SET_GROUP_ID
}

/// The mode of a file after a change of its content by one of its group, or of its owner: no program runs as another
/// user any more (`setattr_should_drop_sgid` of Linux).
pub fn without_privileges(mode: u32) -> u32 {
    let kept = if is_for_members(mode) { SET_GROUP_ID } else { 0 };
    mode & !(SET_USER_ID | SET_GROUP_ID) | kept
}

/// A mode as a user may set it: the set-group-ID bit is for members of the group. `None` for a user whose kernel has
/// seen to that.
pub(crate) fn without_foreign_group(mode: u32, group: u32, user: Option<&User>) -> u32 {
    let is_foreign = user.is_some_and(|user| !user.is_root() && !user.is_in(group));
    if is_foreign { mode & !SET_GROUP_ID } else { mode }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_group_id_bit_stays_where_the_group_executes_nothing() {
        assert_eq!([0o6755, 0o6744, 0o1644].map(without_privileges), [0o755, 0o2744, 0o1644]);
        assert_eq!([0o2755, 0o2745, 0o755].map(is_for_members), [false, true, false]);
    }
}
