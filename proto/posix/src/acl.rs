//! POSIX access control lists: `system.posix_acl_access` and `system.posix_acl_default`.
//!
//! They are kept as the kernel spells them (`linux/posix_acl_xattr.h`), beside the other extended attributes, and
//! checked by the kernel of the asker (and by the master, where users are limited). List and permissions are one: the
//! entries of the owner, of the mask (of the group, without a mask) and of others are the permissions of the inode. The
//! rules are those of Linux (`fs/posix_acl.c`).

use cavern_proto::master::{Attr, Kind, SetXattr, User};
use rustix::io::Errno;

use crate::error::{Refusal, refuse};
use crate::mode::{ACCESS_BITS, SET_GROUP_ID, without_foreign_group};

pub const ACCESS: &[u8] = b"system.posix_acl_access";
pub const DEFAULT: &[u8] = b"system.posix_acl_default";

/// The one version of the spelling that there is.
const VERSION: u32 = 2;
/// What fits into the page in which the kernel asks for a list.
const ENTRIES_MAX: usize = (4096 - 4) / 8;
/// The id of nobody, in entries that are about no particular user or group.
const NO_ID: u32 = u32::MAX;

/// Whom an entry is about, as the kernel numbers it, in the order in which entries stand in a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u16)]
enum Tag {
    Owner = 0x01,
    User = 0x02,
    Group = 0x04,
    NamedGroup = 0x08,
    Mask = 0x10,
    Others = 0x20,
}

impl Tag {
    fn of(number: u16) -> Option<Self> {
        let tags = [Self::Owner, Self::User, Self::Group, Self::NamedGroup, Self::Mask, Self::Others];
        tags.into_iter().find(|tag| *tag as u16 == number)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    tag: Tag,
    /// Of 0o7.
    permissions: u16,
    id: u32,
}

/// A list as it may be kept: one entry each for the owner, the group and others, and a mask if anybody is named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acl(Vec<Entry>);

/// A list, and which attribute it is.
pub type NamedAcl = (&'static [u8], Acl);

impl Acl {
    /// `None` for what is no list.
    pub fn decode(value: &[u8]) -> Option<Self> {
        let (version, rest) = value.split_first_chunk::<4>()?;
        let (entries, rest) = rest.as_chunks::<8>();
        if u32::from_le_bytes(*version) != VERSION || !rest.is_empty() || entries.len() > ENTRIES_MAX {
            return None;
        }
        let entry = |[tag0, tag1, permissions0, permissions1, id @ ..]: &[u8; 8]| {
            let tag = Tag::of(u16::from_le_bytes([*tag0, *tag1]))?;
            let permissions = u16::from_le_bytes([*permissions0, *permissions1]);
            let is_named = matches!(tag, Tag::User | Tag::NamedGroup);
            let id = if is_named { u32::from_le_bytes(*id) } else { NO_ID };
            (permissions <= 7 && is_named == (id != NO_ID)).then_some(Entry { tag, permissions, id })
        };
        let acl = Self(entries.iter().map(entry).collect::<Option<_>>()?);
        acl.is_sound().then_some(acl)
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut value = VERSION.to_le_bytes().to_vec();
        for entry in &self.0 {
            value.extend((entry.tag as u16).to_le_bytes());
            value.extend(entry.permissions.to_le_bytes());
            value.extend(entry.id.to_le_bytes());
        }
        value
    }

    fn is_sound(&self) -> bool {
        let count = |tag| self.0.iter().filter(|entry| entry.tag == tag).count();
        let names = count(Tag::User) + count(Tag::NamedGroup);
        [Tag::Owner, Tag::Group, Tag::Others].into_iter().all(|tag| count(tag) == 1)
            && (count(Tag::Mask) == 1 || count(Tag::Mask) == 0 && names == 0)
            && self.0.is_sorted_by_key(|entry| entry.tag)
    }

    /// The entry that stands for the group bits of the permissions.
    fn group_class(&self) -> Tag {
        let has_mask = self.0.iter().any(|entry| entry.tag == Tag::Mask);
        if has_mask { Tag::Mask } else { Tag::Group }
    }

    /// The entries that are permissions, and how far to the left each stands there.
    fn classes(&self) -> [(Tag, u32); 3] {
        [(Tag::Owner, 6), (self.group_class(), 3), (Tag::Others, 0)]
    }

    /// Whether a user may do all of this (of 0o7), as `posix_acl_permission` of Linux says it. `owner`: user and group
    /// of the inode.
    pub fn allows(&self, user: &User, owner: (u32, u32), wanted: u32) -> bool {
        let grants = |entry: &Entry| u32::from(entry.permissions) & wanted == wanted;
        let is_masked_out = || self.0.iter().any(|entry| entry.tag == Tag::Mask && !grants(entry));
        let mut is_in_a_group = false;
        for entry in &self.0 {
            match entry.tag {
                Tag::Owner if user.uid == owner.0 => return grants(entry),
                Tag::User if user.uid == entry.id => return grants(entry) && !is_masked_out(),
                Tag::Group | Tag::NamedGroup => {
                    let group = if entry.tag == Tag::Group { owner.1 } else { entry.id };
                    if user.is_in(group) {
                        is_in_a_group = true;
                        if grants(entry) {
                            return !is_masked_out();
                        }
                    }
                }
                Tag::Others => return !is_in_a_group && grants(entry),
                Tag::Owner | Tag::User | Tag::Mask => {}
            }
        }
        false
    }

    fn permissions_of(&mut self, tag: Tag) -> Option<&mut u16> {
        self.0.iter_mut().find(|entry| entry.tag == tag).map(|entry| &mut entry.permissions)
    }

    /// The permissions ([`ACCESS_BITS`]) that the list stands for.
    pub fn mode(&self) -> u32 {
        let of = |tag| self.0.iter().find(|entry| entry.tag == tag).map_or(0, |entry| u32::from(entry.permissions));
        self.classes().into_iter().map(|(tag, shift)| of(tag) << shift).sum()
    }

    /// Whether permissions alone say the same.
    pub fn is_mode(&self) -> bool {
        self.0.len() == 3
    }

    /// Gives the list the permissions of a chmod.
    pub fn set_mode(&mut self, mode: u32) {
        for (tag, shift) in self.classes() {
            if let Some(permissions) = self.permissions_of(tag) {
                *permissions = (mode >> shift & 7) as u16;
            }
        }
    }

    /// Makes of a default list that of an inode which is created with these permissions; gives those that remain.
    pub fn inherit(&mut self, mode: u32) -> u32 {
        let within = self.mode() & mode;
        self.set_mode(within);
        mode & !ACCESS_BITS | within
    }
}

/// Lists for an inode that is made in a directory with a default list, and the permissions that remain of `mode`.
pub(crate) fn inherited(default: &Acl, mode: u32, kind: Kind) -> (u32, Vec<NamedAcl>) {
    let mut access = default.clone();
    let mode = access.inherit(mode);
    let mut lists = Vec::new();
    if !access.is_mode() {
        lists.push((ACCESS, access));
    }
    if kind == Kind::Directory {
        lists.push((DEFAULT, default.clone()));
    }
    (mode, lists)
}

/// What becomes of a list that is set: the value to keep, or `None` when the mode says all of it. It sets the mode, and
/// leaves a set-group-ID bit to members of the group only (`posix_acl_update_mode` of Linux); `user` as for
/// [`attributes_set`](crate::attributes_set).
///
/// # Errors
/// `EOPNOTSUPP` of symlinks, `EACCES` of default lists of others than directories, `EINVAL`.
pub fn set(attr: &mut Attr, set: &SetXattr, user: Option<&User>) -> Result<Option<Vec<u8>>, Refusal> {
    if attr.kind() == Kind::Symlink {
        return refuse(Errno::OPNOTSUPP, "a symlink has no access list");
    }
    let is_default = *set.name == *DEFAULT;
    if is_default && attr.kind() != Kind::Directory {
        return refuse(Errno::ACCESS, "only a directory has a default access list");
    }
    let Some(acl) = Acl::decode(&set.value) else {
        return refuse(Errno::INVAL, format!("{} is no access list", String::from_utf8_lossy(&set.name)));
    };
    if is_default {
        return Ok(Some(acl.encode()));
    }
    let cleared = if set.clear_set_group_id { SET_GROUP_ID } else { 0 };
    let kept = without_foreign_group(attr.mode, attr.gid, user) & !cleared;
    attr.mode = kept & !ACCESS_BITS | acl.mode();
    Ok((!acl.is_mode()).then(|| acl.encode()))
}

/// Whether an extended attribute is an access list.
pub fn is_acl(name: &[u8]) -> bool {
    name == ACCESS || name == DEFAULT
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
        let mut value = VERSION.to_le_bytes().to_vec();
        for (tag, permissions, id) in entries {
            value.extend(tag.to_le_bytes());
            value.extend(permissions.to_le_bytes());
            value.extend(id.to_le_bytes());
        }
        value
    }

    const OWNER: (u16, u16, u32) = (1, 6, NO_ID);
    const GROUP: (u16, u16, u32) = (4, 4, NO_ID);
    const OTHERS: (u16, u16, u32) = (0x20, 0, NO_ID);

    #[test]
    fn only_sound_lists_are_kept() {
        let named = (2, 7, 1000);
        let mask = (0x10, 5, NO_ID);
        for sound in [
            &[OWNER, GROUP, OTHERS][..],
            &[OWNER, GROUP, mask, OTHERS],
            &[OWNER, named, GROUP, mask, OTHERS],
            &[OWNER, GROUP, (8, 3, 5), (8, 3, 6), mask, OTHERS],
        ] {
            let value = acl(sound);
            assert_eq!(Acl::decode(&value).unwrap().encode(), value);
        }
        for wrong in [
            &[][..],
            &[OWNER, GROUP],
            &[OWNER, OWNER, GROUP, OTHERS],
            &[OWNER, OTHERS, GROUP],
            &[OWNER, named, GROUP, OTHERS],
            &[OWNER, named, GROUP, mask, mask, OTHERS],
            &[OWNER, (2, 7, NO_ID), GROUP, mask, OTHERS],
            &[(1, 8, NO_ID), GROUP, OTHERS],
            &[OWNER, GROUP, OTHERS, (0x40, 7, NO_ID)],
        ] {
            assert_eq!(Acl::decode(&acl(wrong)), None, "{wrong:?}");
        }
        let value = acl(&[OWNER, GROUP, OTHERS]);
        assert_eq!(Acl::decode(&value[..value.len() - 1]), None);
        assert_eq!(Acl::decode(&[&[1], &value[1..]].concat()), None, "another version");
        let named: Vec<_> = (0..600).map(|id| (2, 7, id)).collect();
        assert_eq!(Acl::decode(&acl(&[&[OWNER], &named[..], &[GROUP, mask, OTHERS]].concat())), None, "too many");
    }

    #[test]
    fn permissions_are_those_of_the_owner_the_mask_and_others() {
        let mut plain = Acl::decode(&acl(&[OWNER, GROUP, OTHERS])).unwrap();
        assert_eq!((plain.mode(), plain.is_mode()), (0o640, true));
        plain.set_mode(0o751);
        assert_eq!(plain.mode(), 0o751);
        let mut masked = Acl::decode(&acl(&[OWNER, (2, 7, 9), GROUP, (0x10, 7, NO_ID), OTHERS])).unwrap();
        assert_eq!((masked.mode(), masked.is_mode()), (0o670, false));
        masked.set_mode(0o705);
        assert_eq!(masked.encode(), acl(&[(1, 7, NO_ID), (2, 7, 9), GROUP, (0x10, 0, NO_ID), (0x20, 5, NO_ID)]));
        assert_eq!(masked.inherit(0o4777), 0o4705);
    }

    #[test]
    fn who_may_do_what_is_as_linux_has_it() {
        // The owner reads, and writes; user 9 reads, for all that the mask leaves; group 5 writes, group 6 nothing.
        let entries = [OWNER, (2, 7, 9), (4, 0, NO_ID), (8, 2, 5), (8, 0, 6), (0x10, 6, NO_ID), (0x20, 4, NO_ID)];
        let list = Acl::decode(&acl(&entries)).unwrap();
        let may = |uid, gid, groups: &[u32]| {
            let user = User { uid, gid, groups: groups.to_vec() };
            [4, 2, 1].map(|wanted| list.allows(&user, (1000, 100), wanted))
        };
        assert_eq!(may(1000, 5, &[]), [true, true, false], "the owner, by nothing else");
        assert_eq!(may(9, 1, &[]), [true, true, false], "a named user, within the mask");
        assert_eq!(may(7, 100, &[]), [false, false, false], "the group has nothing, and others do not count then");
        assert_eq!(may(7, 100, &[5]), [false, true, false], "one of his groups is enough");
        assert_eq!(may(7, 7, &[6]), [false, false, false]);
        assert_eq!(may(7, 7, &[]), [true, false, false], "others");
        let user = User { uid: 7, gid: 5, groups: vec![] };
        assert!(!list.allows(&user, (1000, 100), 6), "not by two entries");
    }

    #[test]
    fn a_list_that_is_set_is_the_mode_and_may_take_the_set_group_id_bit() {
        let inode = |kind: Kind| Attr { kind: kind.into(), mode: 0o6755, gid: 100, ..Attr::default() };
        let (mut file, mut directory) = (inode(Kind::File), inode(Kind::Directory));
        let masked = [OWNER, (2, 7, 9), GROUP, (0x10, 4, NO_ID), OTHERS];
        let list = |name: &'static [u8], entries: &[(u16, u16, u32)], clear_set_group_id| SetXattr {
            name: name.into(),
            value: acl(entries).into(),
            clear_set_group_id,
            ..SetXattr::default()
        };
        assert_eq!(set(&mut file, &list(ACCESS, &masked, false), None), Ok(Some(acl(&masked))));
        assert_eq!(file.mode, 0o6640);
        let plain = [OWNER, GROUP, OTHERS];
        let stranger = User { uid: 7, gid: 7, groups: vec![] };
        assert_eq!(set(&mut file, &list(ACCESS, &plain, false), Some(&stranger)), Ok(None), "the mode says all");
        assert_eq!(file.mode, 0o4640);
        assert_eq!(set(&mut directory, &list(ACCESS, &plain, true), None), Ok(None));
        assert_eq!(directory.mode, 0o4640);
        assert_eq!(set(&mut directory, &list(DEFAULT, &plain, true), None), Ok(Some(acl(&plain))));
        let refused = |attr: &mut Attr, name| set(attr, &list(name, &plain, false), None).unwrap_err().errno;
        assert_eq!(refused(&mut file, DEFAULT), Errno::ACCESS);
        assert_eq!(refused(&mut inode(Kind::Symlink), ACCESS), Errno::OPNOTSUPP);
        let nonsense = SetXattr { name: ACCESS.into(), value: b"no".as_slice().into(), ..SetXattr::default() };
        assert_eq!(set(&mut file, &nonsense, None).unwrap_err().errno, Errno::INVAL);
    }

    proptest! {
        #[test]
        fn no_value_panics(value in proptest::collection::vec(any::<u8>(), 0..100)) {
            if let Some(acl) = Acl::decode(&value) {
                prop_assert_eq!(Acl::decode(&acl.encode()), Some(acl));
            }
        }
    }
}
