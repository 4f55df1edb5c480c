//! Quotas against a model that counts everything anew after every step, and refuses by what it has counted.

use std::collections::BTreeMap;

use bytes::Bytes;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{
    CommitContent, CreateInode, Kind as InodeKind, LinkInode, Mount, Mutation, MutationResult, RemoveName, RemoveXattr,
    RenameMode, RenameName, SetAttr, SetXattr, WriteType,
};
use cavern_proto::record::command::Command as Kind;
use cavern_proto::record::{AttachMount, Command, CountUsage, InitCluster, Mutate, RemoveMount};
use proptest::prelude::*;

use super::*;
use crate::{Database, Family, Outcome, Tables, Transaction, apply};

#[derive(Clone, Debug)]
enum Step {
    Create(usize, u8, bool),
    Link(usize, usize, u8),
    Remove(usize, u8, bool),
    Rename(usize, u8, usize, u8, u8),
    Grow(usize, u8, u64),
    Cut(usize, u8, u64),
    Attribute(usize, u8, Option<usize>),
    Quota(usize, Option<u64>, Option<u64>),
    Count(u32),
}

fn step() -> impl Strategy<Value = Step> {
    // Few directories and names, so that most steps meet something.
    let (directory, name) = (|| 0usize..6, || 0u8..4);
    let bound = |most: u64| prop::option::of(0..most);
    prop_oneof![
        6 => (directory(), name(), any::<bool>()).prop_map(|(at, name, is_file)| Step::Create(at, name, is_file)),
        2 => (directory(), directory(), name()).prop_map(|(from, to, name)| Step::Link(from, to, name)),
        3 => (directory(), name(), any::<bool>()).prop_map(|(at, name, is_file)| Step::Remove(at, name, is_file)),
        5 => (directory(), name(), directory(), name(), 0u8..3)
            .prop_map(|(a, b, c, d, mode)| Step::Rename(a, b, c, d, mode)),
        5 => (directory(), name(), 0u64..200).prop_map(|(at, name, length)| Step::Grow(at, name, length)),
        2 => (directory(), name(), 0u64..200).prop_map(|(at, name, length)| Step::Cut(at, name, length)),
        3 => (directory(), name(), prop::option::of(0usize..200))
            .prop_map(|(at, name, length)| Step::Attribute(at, name, length)),
        3 => (directory(), bound(400), bound(8)).prop_map(|(at, bytes, inodes)| Step::Quota(at, bytes, inodes)),
        3 => (1u32..6).prop_map(Step::Count),
    ]
}

struct Fixture {
    database: Database,
    root: u64,
    seq: u64,
    /// Changes that were made, for another bench to make them as well.
    made: Vec<Change>,
    _dir: tempfile::TempDir,
}

fn run(database: &Database, command: Kind) -> Outcome {
    let mut transaction = Transaction::new(database).unwrap();
    let outcome = apply(&mut transaction, Command { command: Some(command) }).unwrap();
    database.write(transaction.finish().unwrap().0.into_batch(database)).unwrap();
    outcome
}

impl Fixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let database = Database::open(dir.path(), 1 << 20).unwrap();
        run(&database, Kind::Init(InitCluster { cluster_id: "c".into(), now_ns: 1, feature_version: 1 }));
        let write_type = WriteType::FsMode as i32;
        let mount = Mount {
            path: "/m/fs".into(),
            uri: "memory://m".into(),
            write_type,
            block_size: 1 << 20,
            ..Mount::default()
        };
        let attach = AttachMount { mount: Some(mount), mounts_epoch: 0 };
        let Outcome::Mount(mount) = run(&database, Kind::AttachMount(attach)) else { panic!("no mount") };
        Self { database, root: mount.root_inode, seq: 0, made: Vec::new(), _dir: dir }
    }

    fn tables(&self) -> Tables<'_> {
        Tables::new(&self.database)
    }

    fn change(&mut self, change: Change) -> MutationResult {
        self.seq += 1;
        let mutation = Mutation { seq: self.seq, uid: 0, gid: 0, change: Some(change.clone()), ..Mutation::default() };
        let mutate =
            Mutate { session: 7, answered: self.seq - 1, now_ns: 1, mutation: Some(mutation), ..Mutate::default() };
        let Outcome::Mutated(result, _) = run(&self.database, Kind::Mutate(mutate)) else { panic!("no result") };
        if result.errno == 0 {
            self.made.push(change);
        }
        *result
    }

    fn count(&self, limit: u32) -> bool {
        let outcome = run(&self.database, Kind::CountUsage(CountUsage { limit }));
        let Outcome::Counted { more } = outcome else { panic!("{outcome:?}") };
        more
    }

    /// Every directory of the mount, the root first, in the order of their ids.
    fn directories(&self) -> Vec<u64> {
        let all = self.tables().inodes_after(0, usize::MAX).unwrap();
        let is_shown = |record: &InodeRecord| record.mount_id != 0 && is_directory(record) && !record.unlinked;
        all.into_iter().filter(|(_, record)| is_shown(record)).map(|(inode, _)| inode).collect()
    }

    fn directory(&self, number: usize) -> u64 {
        let all = self.directories();
        all[number % all.len()]
    }

    fn inode(&self, directory: usize, name: u8) -> u64 {
        self.tables().dentry(self.directory(directory), &name_of(name)).unwrap().map_or(0, |dentry| dentry.inode)
    }

    /// What there is below each directory, counted anew.
    fn recounted(&self) -> BTreeMap<u64, UsageDelta> {
        let tables = self.tables();
        let mut usage: BTreeMap<u64, UsageDelta> =
            self.directories().into_iter().map(|at| (at, UsageDelta::default())).collect();
        for (inode, record) in tables.inodes_after(0, usize::MAX).unwrap() {
            if record.mount_id == 0 || record.unlinked || inode == self.root {
                continue;
            }
            let length = if record.kind() == InodeKind::File { usize::try_from(record.size).unwrap() } else { 0 };
            let xattrs = tables.xattrs(inode).unwrap();
            let xattrs = xattrs.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>();
            let bytes = i64::try_from(length + xattrs).unwrap();
            let mut at = record.parent;
            while let Some(weight) = usage.get_mut(&at) {
                *weight += UsageDelta { bytes, inodes: 1 };
                at = tables.inode(at).unwrap().unwrap().parent;
            }
        }
        usage
    }

    /// As it is kept.
    fn kept(&self) -> BTreeMap<u64, UsageDelta> {
        let kept = |inode| {
            let usage = self.tables().usage(inode).unwrap();
            UsageDelta { bytes: usage.bytes.try_into().unwrap(), inodes: usage.inodes.try_into().unwrap() }
        };
        self.directories().into_iter().map(|inode| (inode, kept(inode))).collect()
    }

    /// The change of a step; `None` for those that are none.
    fn change_of(&self, step: &Step) -> Option<Change> {
        Some(match *step {
            Step::Create(at, name, is_file) => {
                let kind = if is_file { InodeKind::File } else { InodeKind::Directory };
                let (parent, name) = (self.directory(at), name_of(name));
                Change::Create(CreateInode { parent, name, kind: kind.into(), ..CreateInode::default() })
            }
            Step::Link(from, to, name) => Change::Link(LinkInode {
                inode: self.inode(from, name),
                parent: self.directory(to),
                name: name_of(name),
            }),
            Step::Remove(at, name, is_file) => {
                Change::Remove(RemoveName { parent: self.directory(at), name: name_of(name), directory: !is_file })
            }
            Step::Rename(from, name, to, new_name, mode) => {
                let mode = [RenameMode::Replace, RenameMode::NoReplace, RenameMode::Exchange][usize::from(mode)].into();
                let (parent, name) = (self.directory(from), name_of(name));
                let (new_parent, new_name) = (self.directory(to), name_of(new_name));
                Change::Rename(RenameName { parent, name, new_parent, new_name, mode })
            }
            Step::Grow(at, name, grow_to) => {
                let inode = self.inode(at, name);
                Change::Commit(CommitContent { inode, grow_to, ..CommitContent::default() })
            }
            Step::Cut(at, name, length) => {
                let inode = self.inode(at, name);
                Change::SetAttr(SetAttr { inode, size: Some(length), ..SetAttr::default() })
            }
            Step::Attribute(at, name, length) => {
                let (inode, name) = (self.inode(at, name), Bytes::from_static(b"user.a"));
                match length {
                    Some(length) => {
                        let value = vec![7_u8; length].into();
                        Change::SetXattr(SetXattr { inode, name, value, ..SetXattr::default() })
                    }
                    None => Change::RemoveXattr(RemoveXattr { inode, name }),
                }
            }
            Step::Quota(at, max_bytes, max_inodes) => {
                Change::SetQuota(SetQuota { inode: self.directory(at), max_bytes, max_inodes })
            }
            Step::Count(_) => return None,
        })
    }

    /// Whether a file loses a name and keeps another, by which it counts then wherever that is: this is never refused.
    fn moves_links(&self, change: &Change) -> bool {
        let (parent, name) = match change {
            Change::Remove(remove) => (remove.parent, &remove.name),
            Change::Rename(rename) => (rename.new_parent, &rename.new_name),
            _ => return false,
        };
        let Some(dentry) = self.tables().dentry(parent, name).unwrap() else { return false };
        let record = self.tables().inode(dentry.inode).unwrap().unwrap();
        !is_directory(&record) && links(&record) > 1
    }

    /// The quotas of which a change from one state to another makes more than they allow.
    fn exceeded(&self, before: &BTreeMap<u64, UsageDelta>, after: &BTreeMap<u64, UsageDelta>) -> Vec<u64> {
        let is_exceeded = |(inode, is): (&u64, &UsageDelta)| {
            let quota = self.tables().get(schema::Quotas, *inode).unwrap()?;
            let was = before.get(inode).copied().unwrap_or_default();
            let over = |max: u64, was: i64, is: i64| max > 0 && is > was && is > i64::try_from(max).unwrap();
            let is_over = over(quota.max_bytes, was.bytes, is.bytes) || over(quota.max_inodes, was.inodes, is.inodes);
            is_over.then_some(*inode)
        };
        after.iter().filter_map(is_exceeded).collect()
    }
}

fn name_of(name: u8) -> Bytes {
    Bytes::from_static([b"a", b"b", b"c", b"d"][usize::from(name)])
}

fn is_quota(change: &Change) -> bool {
    matches!(change, Change::SetQuota(_))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]
    #[test]
    fn figures_are_exact_and_quotas_hold_exactly(steps in prop::collection::vec(step(), 1..100)) {
        let mut bench = Fixture::new();
        for step in &steps {
            let before = bench.recounted();
            let Some(change) = bench.change_of(step) else {
                let Step::Count(limit) = *step else { unreachable!() };
                bench.count(limit);
                continue;
            };
            let counted = bench.tables().counters().unwrap().counted;
            let moves_links = bench.moves_links(&change);
            let result = bench.change(change.clone());
            let after = bench.recounted();
            // The figures go with the directory that has the last quota.
            let still_counted = bench.tables().counters().unwrap().counted;
            if counted == usage::ALL && still_counted == usage::ALL && !is_quota(&change) {
                prop_assert_eq!(bench.kept(), after.clone(), "{:?}", step);
                if result.errno == 0 && !moves_links {
                    prop_assert_eq!(bench.exceeded(&before, &after), Vec::<u64>::new(), "{:?}", step);
                }
            }
            if result.errno == Errno::DQUOT.raw_os_error() && counted == usage::ALL && !moves_links {
                prop_assert_eq!(&before, &after);
                // Without quotas it would have been made, and made too much.
                let mut other = Fixture::new();
                for earlier in bench.made.clone().into_iter().filter(|change| !is_quota(change)) {
                    prop_assert_eq!(other.change(earlier).errno, 0);
                }
                prop_assert_eq!(other.change(change).errno, 0, "{:?}", step);
                prop_assert_ne!(bench.exceeded(&before, &other.recounted()), Vec::<u64>::new(), "{:?}", step);
            }
        }
        while bench.count(3) {}
        let counters = bench.tables().counters().unwrap();
        if counters.quotas > 0 {
            prop_assert_eq!(counters.counted, usage::ALL);
            prop_assert_eq!(bench.kept(), bench.recounted());
        } else {
            prop_assert_eq!(counters.counted, usage::NOTHING);
            prop_assert!(bench.tables().keys(Family::Usage).next().is_none(), "nothing is kept for nothing");
        }
    }
}

fn create(parent: u64, name: &'static str, kind: InodeKind) -> Change {
    Change::Create(CreateInode { parent, name: name.into(), kind: kind.into(), ..CreateInode::default() })
}

fn bound(inode: u64, bytes: u64, inodes: u64) -> Change {
    Change::SetQuota(SetQuota { inode, max_bytes: Some(bytes), max_inodes: Some(inodes) })
}

#[test]
fn a_refusal_says_how_much_there_is_and_leaves_no_trace() {
    let mut bench = Fixture::new();
    let top = bench.change(create(bench.root, "top", InodeKind::Directory)).inode;
    let file = bench.change(create(top, "file", InodeKind::File)).inode;
    assert_eq!(bench.change(bound(top, 100, 1)).errno, 0);
    while bench.count(2) {}
    let refused = bench.change(create(top, "other", InodeKind::Directory));
    assert_eq!((refused.errno, refused.inode), (Errno::DQUOT.raw_os_error(), 0));
    assert!(refused.reason.contains("1 of 1 inodes"), "{}", refused.reason);
    let grow = |grow_to| Change::Commit(CommitContent { inode: file, grow_to, ..CommitContent::default() });
    assert_eq!(bench.change(grow(100)).errno, 0);
    let refused = bench.change(grow(101));
    assert!(refused.errno == Errno::DQUOT.raw_os_error() && refused.reason.contains("100 of 100 bytes"), "{refused:?}");
    assert_eq!(bench.tables().inode(file).unwrap().unwrap().size, 100);
    // What has no name uses nothing, and may grow.
    bench.change(Change::AddOpenRef(file));
    bench.change(Change::Remove(RemoveName { parent: top, name: "file".into(), directory: false }));
    assert_eq!(bench.tables().usage(top).unwrap(), Default::default());
    assert_eq!(bench.change(grow(1000)).errno, 0);
    let file = Change::SetQuota(SetQuota { inode: file, max_bytes: Some(1), max_inodes: None });
    assert_eq!(bench.change(file).errno, Errno::NOTDIR.raw_os_error());
}

#[test]
fn extended_attributes_and_inherited_access_lists_count() {
    let mut bench = Fixture::new();
    let top = bench.change(create(bench.root, "top", InodeKind::Directory)).inode;
    let file = bench.change(create(top, "file", InodeKind::File)).inode;
    let set = |inode, name: &'static str, value: Vec<u8>| {
        Change::SetXattr(SetXattr { inode, name: name.into(), value: value.into(), ..SetXattr::default() })
    };
    assert_eq!(bench.change(bound(top, 1000, 0)).errno, 0);
    while bench.count(2) {}
    assert_eq!(bench.change(set(file, "user.a", vec![1; 900])).errno, 0);
    let refused = bench.change(set(file, "user.b", vec![1; 100]));
    assert!(
        refused.errno == Errno::DQUOT.raw_os_error() && refused.reason.contains("906 of 1000 bytes"),
        "{refused:?}"
    );
    assert_eq!(bench.tables().xattrs(file).unwrap().len(), 1);
    // What becomes less is taken in, and what is gone leaves room.
    assert_eq!(bench.change(set(file, "user.a", vec![1; 800])).errno, 0);
    assert_eq!(bench.change(set(file, "user.b", vec![1; 100])).errno, 0);
    let remove = Change::RemoveXattr(RemoveXattr { inode: file, name: "user.a".into() });
    assert_eq!(bench.change(remove).errno, 0);
    assert_eq!(bench.tables().usage(top).unwrap().bytes, 106);
    // Those of a directory count in the one above it.
    let below = bench.change(create(top, "below", InodeKind::Directory)).inode;
    let entry = |tag: u16, permissions: u16, id: u32| {
        [&tag.to_le_bytes()[..], &permissions.to_le_bytes()[..], &id.to_le_bytes()[..]].concat()
    };
    let none = u32::MAX;
    let entries = [(1, 7, none), (2, 7, 1000), (4, 5, none), (16, 7, none), (32, 5, none)];
    let entries = entries.map(|(tag, permissions, id)| entry(tag, permissions, id)).concat();
    let list = [&2_u32.to_le_bytes()[..], &entries].concat();
    let takes = |name: &str| (name.len() + list.len()) as u64;
    assert_eq!(bench.change(set(below, "system.posix_acl_default", list.clone())).errno, 0);
    let (default, access) = (takes("system.posix_acl_default"), takes("system.posix_acl_access"));
    assert_eq!(bench.tables().usage(top).unwrap().bytes, 106 + default);
    assert_eq!(bench.change(create(below, "heir", InodeKind::Directory)).errno, 0);
    assert_eq!(bench.tables().usage(below).unwrap().bytes, default + access);
    assert_eq!(bench.change(bound(top, 110 + 2 * default + access, 0)).errno, 0);
    let refused = bench.change(create(below, "other", InodeKind::Directory));
    assert_eq!(refused.errno, Errno::DQUOT.raw_os_error());
    // Access lists count in what an inode may have, with a quota or without.
    let full = bench.change(create(bench.root, "full", InodeKind::File)).inode;
    for number in 0..16 {
        let (name, length) = (format!("user.{number:02}"), if number < 15 { 65_536 } else { 65_400 });
        let set = SetXattr { inode: full, name: name.into(), value: vec![1_u8; length].into(), ..SetXattr::default() };
        assert_eq!(bench.change(Change::SetXattr(set)).errno, 0);
    }
    let refused = bench.change(set(full, "system.posix_acl_access", list));
    assert_eq!(refused.errno, Errno::NOSPC.raw_os_error(), "{refused:?}");
    assert_eq!(bench.change(set(full, "user.15", vec![1; 60_000])).errno, 0, "less is taken in");
}

#[test]
fn a_quota_goes_with_its_directory_and_the_figures_with_the_last_quota() {
    let mut bench = Fixture::new();
    let top = bench.change(create(bench.root, "top", InodeKind::Directory)).inode;
    bench.change(bound(top, 0, 5));
    bench.change(bound(bench.root, 1000, 0));
    while bench.count(2) {}
    bench.change(create(bench.root, "other", InodeKind::Directory));
    assert_eq!(bench.tables().usage(bench.root).unwrap().inodes, 2);
    bench.change(Change::Remove(RemoveName { parent: bench.root, name: "top".into(), directory: true }));
    assert_eq!(
        (bench.tables().get(schema::Quotas, top).unwrap(), bench.tables().counters().unwrap().quotas),
        (None, 1)
    );
    bench.change(bound(bench.root, 0, 0));
    let counters = bench.tables().counters().unwrap();
    assert_eq!((counters.quotas, counters.counted), (0, usage::NOTHING));
    assert_eq!(bench.tables().usage(bench.root).unwrap(), Default::default());
    // And an unmounted one takes all of it along.
    bench.change(bound(bench.root, 0, 9));
    while bench.count(100) {}
    run(&bench.database, Kind::RemoveMount(RemoveMount { mount_id: 1, change: 0, discard: true }));
    while let Outcome::StepProgress(reaped) = run(&bench.database, Kind::ReapOrphans(Default::default())) {
        if !reaped.more {
            break;
        }
    }
    let counters = bench.tables().counters().unwrap();
    assert_eq!((counters.quotas, counters.counted), (0, usage::NOTHING));
    assert!(bench.tables().keys(Family::Quota).next().is_none() && bench.tables().keys(Family::Usage).next().is_none());
}
