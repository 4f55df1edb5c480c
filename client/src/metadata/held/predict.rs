//! What the master will make of a change, for the attributes of what it touches. Each function does what the change of
//! its name does at the master, for the plain case; whatever is not plain is not predicted.

use cavern_proto::block_id::block_length;
use cavern_proto::master::{Attr, CommitContent, CreateInode, Extent, Kind, OwnAttributes, SetAttr, Time};

const SET_USER_ID: u32 = 0o4000;
const SET_GROUP_ID: u32 = 0o2000;
const GROUP_EXECUTES: u32 = 0o0010;
/// Longest target of a symlink.
const TARGET_MAX: usize = 4095;

/// What is made in a directory without access lists, under a name that is free; its number is for the caller to give.
pub(super) fn created(create: &CreateInode, owner: (u32, u32), directory: &Attr, now_ns: i64) -> Option<Attr> {
    let kind = create.kind();
    let target = create.target.len();
    let is_plain = match kind {
        Kind::File | Kind::Directory => target == 0,
        Kind::Symlink => (1..=TARGET_MAX).contains(&target),
        _ => false,
    };
    if !is_plain || directory.has_xattrs {
        return None;
    }
    let (uid, mut gid) = owner;
    let mut mode = if kind == Kind::Symlink { 0o777 } else { create.mode & 0o7777 & !(create.umask & 0o777) };
    if directory.mode & SET_GROUP_ID != 0 {
        gid = directory.gid;
        mode |= if kind == Kind::Directory { SET_GROUP_ID } else { 0 };
    }
    Some(Attr {
        kind: create.kind,
        mode,
        uid,
        gid,
        size: target as u64,
        mtime_ns: now_ns,
        ctime_ns: now_ns,
        nlink: if kind == Kind::Directory { 2 } else { 1 },
        atime_ns: now_ns,
        own: OwnAttributes::None.into(),
        allocated: (kind == Kind::File).then_some(0),
        btime_ns: Some(now_ns),
        ..Attr::default()
    })
}

/// A directory that got names, or lost some; `directories` of them led to directories.
pub(super) fn directory_changed(directory: &Attr, directories: i32, now_ns: i64) -> Attr {
    let nlink = directory.nlink.saturating_add_signed(directories);
    Attr { mtime_ns: now_ns, ctime_ns: now_ns, nlink, ..*directory }
}

/// What has lost its last name.
pub(super) fn unlinked(attr: &Attr, now_ns: i64) -> Attr {
    Attr { ctime_ns: now_ns, nlink: 0, ..*attr }
}

/// What has another name.
pub(super) fn moved(attr: &Attr, now_ns: i64) -> Attr {
    Attr { ctime_ns: now_ns, ..*attr }
}

/// Other attributes for what has no access list and no capability, and keeps its length.
pub(super) fn attributes_set(attr: &Attr, set: &SetAttr, now_ns: i64) -> Option<Attr> {
    if set.size.is_some() || attr.has_xattrs {
        return None;
    }
    let time = |time: Time| if time.now { now_ns } else { time.ns };
    let mut changed = *attr;
    let is_given_away = set.uid.is_some() || set.gid.is_some();
    if (set.kill_privileges || is_given_away) && attr.kind() != Kind::Directory {
        changed.mode &= !SET_USER_ID;
        if changed.mode & GROUP_EXECUTES != 0 || set.kill_set_group_id {
            changed.mode &= !SET_GROUP_ID;
        }
    }
    changed.mode = set.mode.map_or(changed.mode, |mode| mode & 0o7777);
    changed.uid = set.uid.unwrap_or(attr.uid);
    changed.gid = set.gid.unwrap_or(attr.gid);
    changed.atime_ns = set.atime.map_or(attr.atime_ns, time);
    changed.mtime_ns = set.mtime.map_or(attr.mtime_ns, time);
    changed.ctime_ns = now_ns;
    Some(changed)
}

/// Content of a file that nobody but this client has changed since: its first, of which the master knows no block, or
/// what is written later to the only one.
pub(super) fn committed(attr: &Attr, commit: &CommitContent, block_size: u64, now_ns: i64) -> Option<Attr> {
    let size = attr.size.max(commit.grow_to);
    let changes = commit.grow_to > attr.size || commit.changed || !commit.made.is_empty();
    let is_plain = commit.made.iter().all(|made| made.generation >= attr.generation && made.joined.is_empty());
    if !changes || !is_plain || attr.kind() != Kind::File {
        return None;
    }
    let reported = |made: &Extent| made.allocated.map(|bytes| bytes.min(block_size));
    let is_first = (attr.version, attr.generation, attr.size, attr.allocated) == (0, 0, 0, Some(0));
    let allocated = match commit.made.as_slice() {
        made if is_first => {
            let length = |made: &Extent| u64::from(block_length(size, block_size, made.index));
            Some(made.iter().map(|made| reported(made).unwrap_or_else(|| length(made))).sum())
        }
        // Of several blocks it is not known here how much each of them took before.
        _ if size > block_size || attr.allocated.is_none() => return None,
        [] => attr.allocated,
        [made] if made.index == 0 => Some(reported(made)?),
        _ => return None,
    };
    let version = attr.version + 1;
    Some(Attr { size, version, mtime_ns: now_ns, ctime_ns: now_ns, allocated, ..*attr })
}

/// Two contents of a file that are committed at once, as if both had been written before; `None` where the master could
/// make something else of them.
pub(super) fn merged(earlier: &CommitContent, later: &CommitContent) -> Option<CommitContent> {
    // What others take would depend on the length that the file had at each.
    if earlier.made.iter().chain(&later.made).any(|made| made.allocated.is_none()) {
        return None;
    }
    let mut made = earlier.made.clone();
    for block in &later.made {
        match made.iter_mut().find(|known| known.index == block.index) {
            Some(known) if known.generation != block.generation || known.workers != block.workers => return None,
            Some(known) => *known = block.clone(),
            None => made.push(block.clone()),
        }
    }
    let (grow_to, changed) = (earlier.grow_to.max(later.grow_to), earlier.changed || later.changed);
    Some(CommitContent { inode: later.inode, grow_to, made, changed })
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: u64 = 1 << 20;

    fn file(size: u64, version: u64, allocated: u64) -> Attr {
        Attr { kind: Kind::File.into(), size, version, allocated: Some(allocated), nlink: 1, ..Attr::default() }
    }

    fn wrote(grow_to: u64, blocks: &[(u32, u32, Option<u64>)]) -> CommitContent {
        let made = blocks.iter().map(|&(index, generation, allocated)| Extent {
            index,
            generation,
            workers: vec![1],
            allocated,
            ..Extent::default()
        });
        CommitContent { inode: 1, grow_to, changed: true, made: made.collect() }
    }

    #[test]
    fn first_content_may_be_of_several_blocks_and_later_content_of_one() {
        let first =
            committed(&file(0, 0, 0), &wrote(BLOCK + 9, &[(0, 0, None), (1, 0, Some(4096))]), BLOCK, 7).unwrap();
        assert_eq!((first.size, first.version, first.allocated), (BLOCK + 9, 1, Some(BLOCK + 4096)));
        assert_eq!((first.mtime_ns, first.ctime_ns), (7, 7));
        let later = committed(&file(100, 4, 4096), &wrote(200, &[(0, 0, Some(8192))]), BLOCK, 8).unwrap();
        assert_eq!((later.size, later.version, later.allocated), (200, 5, Some(8192)));
        let within = committed(&file(100, 4, 4096), &wrote(50, &[(0, 0, Some(4096))]), BLOCK, 8).unwrap();
        assert_eq!((within.size, within.version, within.allocated), (100, 5, Some(4096)), "it does not become shorter");
        let hole = committed(&file(100, 4, 4096), &wrote(300, &[]), BLOCK, 8).unwrap();
        assert_eq!((hole.size, hole.allocated), (300, Some(4096)));
    }

    #[test]
    fn what_is_not_plain_is_not_predicted() {
        let known = file(100, 4, 4096);
        let refused = [
            (known, wrote(BLOCK + 1, &[(0, 0, Some(4096))]), "several blocks"),
            (known, wrote(200, &[(1, 0, Some(4096))]), "a block behind the end"),
            (Attr { generation: 4, ..known }, wrote(200, &[(0, 3, Some(4096))]), "a block of an earlier generation"),
            (known, wrote(200, &[(0, 0, None)]), "nobody says what it takes"),
            (Attr { allocated: None, ..known }, wrote(200, &[(0, 0, Some(1))]), "nor what it took"),
            (Attr { kind: Kind::Directory.into(), ..known }, wrote(200, &[]), "no file"),
        ];
        for (attr, commit, why) in refused {
            assert_eq!(committed(&attr, &commit, BLOCK, 8), None, "{why}");
        }
        let nothing = CommitContent { inode: 1, grow_to: 100, ..CommitContent::default() };
        assert_eq!(committed(&known, &nothing, BLOCK, 8), None, "nothing is changed");
    }

    #[test]
    fn two_contents_are_one_when_all_blocks_say_what_they_take() {
        let first = wrote(100, &[(0, 0, Some(4096))]);
        let both = merged(&first, &wrote(9000, &[(0, 0, Some(12_288))])).unwrap();
        assert_eq!(both, wrote(9000, &[(0, 0, Some(12_288))]));
        let bytes = CommitContent { inode: 1, changed: true, ..CommitContent::default() };
        assert_eq!(merged(&first, &bytes), Some(first.clone()));
        assert_eq!(merged(&bytes, &first), Some(first.clone()));
        let two = merged(&first, &wrote(BLOCK + 5, &[(1, 0, Some(8192))])).unwrap();
        assert_eq!(two, wrote(BLOCK + 5, &[(0, 0, Some(4096)), (1, 0, Some(8192))]));
        let mut elsewhere = wrote(100, &[(0, 0, Some(4096))]);
        elsewhere.made[0].workers = vec![2];
        let others = [
            (wrote(100, &[(0, 0, None)]), "not what it takes"),
            (wrote(100, &[(0, 1, Some(1))]), "another"),
            (elsewhere, "at another worker"),
        ];
        for (other, why) in others {
            assert_eq!((merged(&first, &other), merged(&other, &first)), (None, None), "{why}");
        }
    }
}
