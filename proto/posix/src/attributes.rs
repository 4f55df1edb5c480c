//! What changes make of the attributes of inodes. Times are nanoseconds since the epoch, and `now_ns` is that of the
//! change.

use cavern_proto::master::{Attr, CommitContent, CreateInode, Kind, Naming, SetAttr, Time, User};
use rustix::io::Errno;

use crate::acl::{self, Acl, NamedAcl};
use crate::error::{Refusal, refuse};
use crate::mode::{ACCESS_BITS, MODE_BITS, SET_GROUP_ID, without_foreign_group, without_privileges};

/// What is made in a directory, which may have a default access list, for user and group `owner`: its attributes, but
/// for its number, and its access lists. `user` as for [`attributes_set`].
pub fn created(
    create: &CreateInode,
    (directory, default): (&Attr, Option<&Acl>),
    (uid, gid): (u32, u32),
    user: Option<&User>,
    now_ns: i64,
) -> (Attr, Vec<NamedAcl>) {
    let kind = create.kind();
    let is_directory = kind == Kind::Directory;
    let asked = create.mode & MODE_BITS;
    let (mut mode, lists) = match default {
        _ if kind == Kind::Symlink => (ACCESS_BITS, Vec::new()),
        Some(default) => acl::inherited(default, asked, kind),
        None => (asked & !(create.umask & ACCESS_BITS), Vec::new()),
    };
    let hands_group_on = directory.mode & SET_GROUP_ID != 0;
    let gid = if hands_group_on { directory.gid } else { gid };
    if !is_directory {
        mode = without_foreign_group(mode, gid, user);
    } else if hands_group_on {
        mode |= SET_GROUP_ID;
    }
    let is_device = matches!(kind, Kind::CharacterDevice | Kind::BlockDevice);
    let attr = Attr {
        kind: create.kind,
        mode,
        uid,
        gid,
        size: create.target.len() as u64,
        mtime_ns: now_ns,
        ctime_ns: now_ns,
        atime_ns: now_ns,
        btime_ns: Some(now_ns),
        nlink: match create.naming() {
            Naming::Named if is_directory => 2,
            Naming::Named => 1,
            Naming::Nameless | Naming::NamelessForEver => 0,
        },
        rdev: if is_device { create.rdev } else { 0 },
        has_xattrs: !lists.is_empty(),
        allocated: (kind == Kind::File).then_some(0),
        ..Attr::default()
    };
    (attr, lists)
}

/// A directory gets names, or loses some; so many more of them lead to directories.
pub fn directory_changed(attr: &mut Attr, directories: i32, now_ns: i64) {
    (attr.mtime_ns, attr.ctime_ns) = (now_ns, now_ns);
    attr.nlink = attr.nlink.saturating_add_signed(directories);
}

/// What is no directory gets a name, perhaps its first.
pub fn name_added(attr: &mut Attr, now_ns: i64) {
    attr.nlink += 1;
    attr.ctime_ns = now_ns;
}

/// An inode loses a name; an empty directory has no other.
pub fn name_dropped(attr: &mut Attr, now_ns: i64) {
    attr.nlink = if attr.kind() == Kind::Directory { 0 } else { attr.nlink.saturating_sub(1) };
    attr.ctime_ns = now_ns;
}

/// An inode gets another name in the place of one, or another extended attribute.
pub fn inode_changed(attr: &mut Attr, now_ns: i64) {
    attr.ctime_ns = now_ns;
}

/// Whether a commit changes the content of a file of `size` bytes.
pub fn changes_content(commit: &CommitContent, size: u64) -> bool {
    commit.grow_to > size || commit.changed || !commit.made.is_empty()
}

/// A file gets other bytes, or another length.
pub fn content_changed(attr: &mut Attr, size: u64, now_ns: i64) {
    attr.version += 1;
    attr.size = size;
    (attr.mtime_ns, attr.ctime_ns) = (now_ns, now_ns);
}

/// Whether a change of attributes takes away what lets a file run with more rights than its caller has: a write of
/// somebody who may not leave that does, and another owner, whoever gives the file away.
pub fn loses_privileges(kind: Kind, set: &SetAttr) -> bool {
    (set.kill_privileges || set.uid.is_some() || set.gid.is_some()) && kind != Kind::Directory
}

/// Whether an inode can be of this user and group. An id of all ones is none in a kernel, which changes no file of it.
///
/// # Errors
/// `EINVAL`.
pub fn check_owner(uid: u32, gid: u32) -> Result<(), Refusal> {
    match [uid, gid].contains(&u32::MAX) {
        true => refuse(Errno::INVAL, format!("{} is no id of a user or group", u32::MAX)),
        false => Ok(()),
    }
}

/// chmod, chown and utimensat. A length that is set as well has been set before, and capabilities are the caller's to
/// remove. `user` is by whom the change is judged here; `None` where a kernel has judged it.
pub fn attributes_set(attr: &mut Attr, set: &SetAttr, user: Option<&User>, now_ns: i64) {
    let time = |time: Time| if time.now { now_ns } else { time.ns };
    if loses_privileges(attr.kind(), set) {
        attr.mode = without_privileges(attr.mode);
        if set.kill_set_group_id {
            attr.mode &= !SET_GROUP_ID;
        }
    }
    attr.uid = set.uid.unwrap_or(attr.uid);
    attr.gid = set.gid.unwrap_or(attr.gid);
    if let Some(mode) = set.mode {
        attr.mode = without_foreign_group(mode & MODE_BITS, attr.gid, user);
    }
    attr.atime_ns = set.atime.map_or(attr.atime_ns, time);
    attr.mtime_ns = set.mtime.map_or(attr.mtime_ns, time);
    attr.ctime_ns = now_ns;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inode(kind: Kind, mode: u32) -> Attr {
        Attr { kind: kind.into(), mode, uid: 1000, gid: 100, nlink: 1, ..Attr::default() }
    }

    #[test]
    fn what_is_made_is_of_its_directory_if_that_hands_its_group_on() {
        let make = |kind: Kind, mode, directory: u32| {
            let create = CreateInode { kind: kind.into(), mode, umask: 0o022, ..CreateInode::default() };
            let (attr, lists) = created(&create, (&inode(Kind::Directory, directory), None), (7, 8), None, 5);
            assert!(lists.is_empty() && !attr.has_xattrs);
            assert_eq!((attr.uid, attr.mtime_ns, attr.ctime_ns, attr.atime_ns), (7, 5, 5, 5));
            (attr.mode, attr.gid, attr.nlink)
        };
        assert_eq!(make(Kind::File, 0o666, 0o755), (0o644, 8, 1));
        assert_eq!(make(Kind::Directory, 0o777, 0o755), (0o755, 8, 2));
        assert_eq!(make(Kind::File, 0o666, 0o2755), (0o644, 100, 1));
        assert_eq!(make(Kind::Directory, 0o777, 0o2755), (0o2755, 100, 2));
        assert_eq!(make(Kind::Symlink, 0, 0o2755), (0o777, 100, 1));
    }

    #[test]
    fn names_count_and_change_the_time_of_change_alone() {
        let mut file = inode(Kind::File, 0o644);
        name_added(&mut file, 3);
        assert_eq!((file.nlink, file.ctime_ns, file.mtime_ns), (2, 3, 0));
        name_dropped(&mut file, 4);
        name_dropped(&mut file, 5);
        assert_eq!((file.nlink, file.ctime_ns, file.mtime_ns), (0, 5, 0));
        let mut directory = Attr { nlink: 3, ..inode(Kind::Directory, 0o755) };
        directory_changed(&mut directory, -1, 6);
        assert_eq!((directory.nlink, directory.ctime_ns, directory.mtime_ns), (2, 6, 6));
        name_dropped(&mut directory, 7);
        assert_eq!((directory.nlink, directory.ctime_ns, directory.mtime_ns), (0, 7, 6));
    }

    #[test]
    fn another_owner_keeps_no_privileges_and_a_chosen_mode_is_kept() {
        let changed = |kind, mode, set: SetAttr| {
            let mut attr = inode(kind, mode);
            attributes_set(&mut attr, &set, None, 9);
            assert_eq!(attr.ctime_ns, 9);
            attr.mode
        };
        let given = SetAttr { uid: Some(7), ..SetAttr::default() };
        assert_eq!(changed(Kind::File, 0o6755, given), 0o755);
        assert_eq!(changed(Kind::File, 0o6745, given), 0o2745, "no program runs by it");
        assert_eq!(changed(Kind::File, 0o6745, SetAttr { kill_set_group_id: true, ..given }), 0o745);
        assert_eq!(changed(Kind::Directory, 0o2755, given), 0o2755);
        assert_eq!(changed(Kind::File, 0o755, SetAttr { mode: Some(0o4755), ..given }), 0o4755);
        let written = SetAttr { kill_privileges: true, ..SetAttr::default() };
        assert_eq!(changed(Kind::File, 0o4755, SetAttr { mode: Some(0o4700), ..written }), 0o4700);
        assert_eq!(changed(Kind::File, 0o4755, SetAttr::default()), 0o4755);
    }

    #[test]
    fn an_id_of_all_ones_owns_nothing() {
        assert_eq!(check_owner(0, u32::MAX - 1), Ok(()));
        let refused = [check_owner(u32::MAX, 0), check_owner(0, u32::MAX)].map(Result::unwrap_err);
        assert_eq!(refused.map(|refusal| refusal.errno), [Errno::INVAL; 2]);
    }

    #[test]
    fn a_time_of_access_stays_when_others_change() {
        let mut attr = Attr { atime_ns: 1, mtime_ns: 2, ..inode(Kind::File, 0o644) };
        content_changed(&mut attr, 10, 3);
        assert_eq!((attr.atime_ns, attr.mtime_ns, attr.ctime_ns, attr.size, attr.version), (1, 3, 3, 10, 1));
        let times = SetAttr { mtime: Some(Time { now: false, ns: -4 }), ..SetAttr::default() };
        attributes_set(&mut attr, &times, None, 5);
        assert_eq!((attr.atime_ns, attr.mtime_ns, attr.ctime_ns), (1, -4, 5));
        attributes_set(&mut attr, &SetAttr { atime: Some(Time { now: true, ns: 0 }), ..times }, None, 6);
        assert_eq!((attr.atime_ns, attr.mtime_ns), (6, -4));
    }
}
