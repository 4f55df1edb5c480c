//! Whether the attributes that a change leaves are certain here. What they are then, the rules say that the master
//! applies as well ([`cavern_posix`]); whatever takes more than is known here is for the master alone.

use cavern_posix::{
    attributes_set, block_takes, changes_content, check_create, check_owner, content_changed, created as made,
    file_takes,
};
use cavern_proto::master::{Attr, CommitContent, CreateInode, Extent, Kind, SetAttr};
use cavern_proto::record::ExtentRecord;

/// What a rule makes of attributes.
pub(super) fn after(attr: &Attr, rule: impl FnOnce(&mut Attr)) -> Attr {
    let mut attr = *attr;
    rule(&mut attr);
    attr
}

/// What is made in a directory without access lists, under a name that is free; its number is for the caller to give.
pub(super) fn created(create: &CreateInode, owner: (u32, u32), directory: &Attr, now_ns: i64) -> Option<Attr> {
    let is_plain = matches!(create.kind(), Kind::File | Kind::Directory | Kind::Symlink) && !directory.has_xattrs;
    let is_certain = is_plain && check_create(create).is_ok() && check_owner(owner.0, owner.1).is_ok();
    is_certain.then(|| made(create, (directory, None), owner, None, now_ns).0)
}

/// Other attributes for what has no access list and no capability, and keeps its length.
pub(super) fn set(attr: &Attr, set: &SetAttr, now_ns: i64) -> Option<Attr> {
    let has_owner = check_owner(set.uid.unwrap_or_default(), set.gid.unwrap_or_default()).is_ok();
    let is_certain = set.size.is_none() && !attr.has_xattrs && has_owner;
    is_certain.then(|| after(attr, |attr| attributes_set(attr, set, None, now_ns)))
}

/// Content of a file that nobody but this client has changed since: its first, of which the master knows no block, or
/// what is written later to the only one. Whether that takes the place of one that a view has, the master says: the
/// view may be gone by then.
pub(super) fn committed(attr: &Attr, commit: &CommitContent, block_size: u64, now_ns: i64) -> Option<Attr> {
    let size = attr.size.max(commit.grow_to);
    let is_plain =
        |made: &Extent| made.generation >= attr.generation && made.joined.is_empty() && made.replaces.is_none();
    let is_plain = commit.made.iter().all(is_plain);
    if !changes_content(commit, attr.size) || !is_plain || attr.kind() != Kind::File {
        return None;
    }
    let is_first = (attr.version, attr.generation, attr.size, attr.allocated) == (0, 0, 0, Some(0));
    // Of several blocks it is not known here how much each of them took before.
    let is_of_one_block = || match commit.made.as_slice() {
        _ if size > block_size || attr.allocated.is_none() => false,
        [] => true,
        [made] => made.index == 0 && made.allocated.is_some(),
        _ => false,
    };
    if !is_first && !is_of_one_block() {
        return None;
    }
    let known = (!is_first).then(|| ExtentRecord { allocated: attr.allocated, ..ExtentRecord::default() });
    let before = known.as_ref().and_then(|known| known.allocated).unwrap_or_default();
    Some(after(attr, |attr| {
        for made in &commit.made {
            let takes = block_takes(known.as_ref(), made, block_size, size);
            attr.allocated = file_takes(attr.allocated, before, takes);
        }
        content_changed(attr, size, now_ns);
    }))
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
        let mut replacement = wrote(200, &[(0, 5, Some(4096))]);
        replacement.made[0].replaces = Some(0);
        let refused = [
            (known, replacement, "in the place of what a view has"),
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
    fn what_the_master_refuses_is_not_predicted() {
        let directory = Attr { kind: Kind::Directory.into(), mode: 0o755, ..Attr::default() };
        let create = CreateInode { name: "a".into(), kind: Kind::File.into(), ..CreateInode::default() };
        assert!(created(&create, (7, 8), &directory, 1).is_some());
        for owner in [(u32::MAX, 8), (7, u32::MAX)] {
            assert_eq!(created(&create, owner, &directory, 1), None, "{owner:?}");
        }
        let given = |uid| SetAttr { inode: 1, uid: Some(uid), ..SetAttr::default() };
        assert_eq!(set(&file(0, 0, 0), &given(7), 1).map(|attr| attr.uid), Some(7));
        assert_eq!(set(&file(0, 0, 0), &given(u32::MAX), 1), None);
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
