//! Who may do what, as Linux asks on a local file system (`fs/namei.c`, `fs/attr.c`, `fs/xattr.c`). Root may do
//! everything; of other capabilities nothing is known.

use cavern_proto::master::{Attr, Kind, SetAttr, User, UserLimits};
use rustix::io::Errno;

use crate::acl::{Acl, is_acl};
use crate::error::Refusal;
use crate::mode::STICKY;
use crate::xattr::CAPABILITY;

/// What a user must be allowed for a change of an inode, beside what has been looked at already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Right {
    /// To get to the inode.
    Reach,
    /// To write to it.
    Write,
    /// To commit what was written to it.
    Commit,
}

/// What becomes of an extended attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XattrChange {
    Set,
    Remove,
}

/// Whether the mode of an inode, or the access list that it has, allow a user all of `wanted` (of 0o7).
pub fn permits(user: &User, attr: &Attr, list: Option<&Acl>, wanted: u32) -> bool {
    if user.is_root() {
        return true;
    }
    if let Some(list) = list {
        return list.allows(user, (attr.uid, attr.gid), wanted);
    }
    let shift = match () {
        () if user.uid == attr.uid => 6,
        () if user.is_in(attr.gid) => 3,
        () => 0,
    };
    attr.mode >> shift & wanted == wanted
}

/// Whether a user is the owner of an inode, or root.
fn owns(user: &User, attr: &Attr) -> bool {
    user.is_root() || user.uid == attr.uid
}

/// What a user is told who is not the one who does something: `EPERM`.
pub fn not_the_one(user: &User, what: &str) -> Refusal {
    Refusal { errno: Errno::PERM, reason: format!("user {} is not the one who {what}", user.uid) }
}

/// Whether a user who may change names in a directory may take one away from an inode.
///
/// # Errors
/// `EPERM` in a sticky directory.
pub fn check_sticky(user: &User, directory: &Attr, attr: &Attr) -> Result<(), Refusal> {
    if directory.mode & STICKY == 0 || owns(user, attr) || owns(user, directory) {
        return Ok(());
    }
    Err(not_the_one(user, "owns the name in a sticky directory"))
}

/// What it takes to set attributes. The owner of a file may always write to it.
///
/// # Errors
/// `EPERM` of whoever does not own the inode, or gives it to whom he may not.
pub fn right_to_set(set: &SetAttr, attr: &Attr, (user, limits): (&User, &UserLimits)) -> Result<Right, Refusal> {
    let (is_root, is_owner) = (user.is_root(), owns(user, attr));
    let may_have_uid =
        |uid: u32| uid == attr.uid && is_owner || is_root && (limits.has_uid(uid) || uid == limits.nobody());
    let may_have_gid = |gid: u32| match is_root {
        true => gid == attr.gid || limits.has_gid(gid) || gid == limits.nobodys_group(),
        false => is_owner && (gid == attr.gid || user.is_in(gid)),
    };
    let other = |what| Err(not_the_one(user, what));
    let may_own = set.uid.is_none_or(may_have_uid) && set.gid.is_none_or(may_have_gid);
    if !may_own || set.mode.is_some() && !is_owner {
        return other("owns it, or gives it away");
    }
    let times = [set.atime, set.mtime];
    if times.iter().flatten().any(|time| !time.now) && !is_owner {
        return other("owns it, and may choose its times");
    }
    let is_write = set.size.is_some() || times.iter().any(Option::is_some);
    let is_of_owner = set.mode.is_some() || set.uid.is_some() || set.gid.is_some();
    Ok(match () {
        () if is_write && !is_owner => Right::Write,
        () if is_write || is_of_owner => Right::Reach,
        // Nothing but what a write takes away.
        () => Right::Commit,
    })
}

/// What it takes to change an extended attribute.
///
/// # Errors
/// `EPERM` of attributes that only root or the owner sets, and where there can be none.
pub fn right_to_xattr(user: &User, attr: &Attr, name: &[u8], change: XattrChange) -> Result<Right, Refusal> {
    let other = |what| Err(not_the_one(user, what));
    if user.is_root() {
        return Ok(Right::Reach);
    }
    if name == CAPABILITY && change == XattrChange::Remove {
        // As kernels have it, which take it away before a write.
        return Ok(Right::Commit);
    }
    if is_acl(name) {
        return if owns(user, attr) { Ok(Right::Reach) } else { other("owns it, and sets its access lists") };
    }
    if !name.starts_with(b"user.") {
        return other("sets attributes of the system");
    }
    let is_sticky = attr.kind() == Kind::Directory && attr.mode & STICKY != 0;
    if !matches!(attr.kind(), Kind::File | Kind::Directory) || is_sticky && !owns(user, attr) {
        return other("may have attributes there");
    }
    Ok(Right::Write)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(uid: u32, gid: u32, groups: &[u32]) -> User {
        User { uid, gid, groups: groups.to_vec() }
    }

    fn owned(uid: u32, gid: u32, mode: u32) -> Attr {
        Attr { kind: Kind::File.into(), uid, gid, mode, ..Attr::default() }
    }

    #[test]
    fn one_class_of_a_mode_counts_and_root_is_in_none() {
        let attr = owned(1000, 100, 0o461);
        let may = |user: &User| [4, 2, 1].map(|wanted| permits(user, &attr, None, wanted));
        assert_eq!(may(&user(1000, 100, &[])), [true, false, false], "the owner, not as one of the group");
        assert_eq!(may(&user(7, 7, &[100])), [true, true, false]);
        assert_eq!(may(&user(7, 7, &[])), [false, false, true]);
        assert_eq!(may(&user(0, 7, &[])), [true; 3]);
        assert!(permits(&user(7, 100, &[]), &attr, None, 6) && !permits(&user(7, 100, &[]), &attr, None, 7));
    }

    #[test]
    fn in_a_sticky_directory_owners_and_root_take_names_away() {
        let file = owned(1000, 100, 0o666);
        let check = |uid, mode| check_sticky(&user(uid, 100, &[]), &owned(2000, 100, mode), &file);
        assert!([0, 1000, 2000].iter().all(|uid| check(*uid, 0o1777).is_ok()));
        assert_eq!(check(3000, 0o1777).unwrap_err().errno, Errno::PERM);
        assert!(check(3000, 0o777).is_ok());
    }
}
