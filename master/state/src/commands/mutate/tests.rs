//! The namespace against a file system of this host: the same changes, the same answers, the same tree.

use std::collections::{BTreeMap, HashMap};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use cavern_proto::NAME_MAX;
use cavern_proto::bounded::{MAX_CACHED_RESULT_BYTES, MAX_CACHED_RESULTS, MAX_REASON_BYTES};
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{
    CheckOpenRefsRequest, CommitContent, CreateInode, Extent, Kind as InodeKind, LinkInode, Mount, Naming, RemoveXattr,
    RenameMode, RenameName, SetAttr, SetOpenRefs, SetXattr, Worker, WriteType, XattrMode,
};
use cavern_proto::record::command::Command as Kind;
use cavern_proto::record::{AttachMount, Command, EndSessionStep, InitCluster, PutWorker, RemoveWorker};
use proptest::prelude::*;
use prost::Message as _;
use rustix::fs::{AtFlags, CWD, FileType, Mode, RenameFlags, XattrFlags};

use super::super::results::ANSWERED_TIMES;
use super::*;
use crate::records::{self, links};
use crate::{Database, Tables, apply, schema};

/// A name: a directory, by its number among those there are, and a letter.
type Place = (usize, u8);

#[derive(Clone, Debug)]
enum Step {
    Create { at: Place, kind: u8, mode: u32 },
    Symlink { at: Place },
    Link { from: Place, to: Place },
    Remove { at: Place, directory: bool },
    Rename { from: Place, to: Place, mode: u8 },
    Chmod { at: Place, mode: u32 },
    SetXattr { at: Place, name: u8, mode: u8 },
    RemoveXattr { at: Place, name: u8 },
    SetAcl { at: Place, default: bool, permissions: [u8; 5], names: u8 },
    RemoveAcl { at: Place, default: bool },
}

fn step() -> impl Strategy<Value = Step> {
    let place = || (0usize..6, 0u8..4);
    prop_oneof![
        4 => (place(), 0u8..3, 0u32..0o2000).prop_map(|(at, kind, mode)| Step::Create { at, kind, mode }),
        1 => place().prop_map(|at| Step::Symlink { at }),
        2 => (place(), place()).prop_map(|(from, to)| Step::Link { from, to }),
        3 => (place(), any::<bool>()).prop_map(|(at, directory)| Step::Remove { at, directory }),
        4 => (place(), place(), 0u8..5).prop_map(|(from, to, mode)| Step::Rename { from, to, mode }),
        1 => (place(), 0u32..0o2000).prop_map(|(at, mode)| Step::Chmod { at, mode }),
        1 => (place(), 0u8..3, 0u8..3).prop_map(|(at, name, mode)| Step::SetXattr { at, name, mode }),
        1 => (place(), 0u8..3).prop_map(|(at, name)| Step::RemoveXattr { at, name }),
        3 => (place(), any::<bool>(), proptest::array::uniform5(0u8..8), 0u8..5)
            .prop_map(|(at, default, permissions, names)| Step::SetAcl { at, default, permissions, names }),
        1 => (place(), any::<bool>()).prop_map(|(at, default)| Step::RemoveAcl { at, default }),
    ]
}

const ACLS: [&str; 2] = ["system.posix_acl_access", "system.posix_acl_default"];

/// An access list with entries for this many users and groups; the last variant lacks a mask where one is needed.
fn acl([owner, user, group, mask, others]: [u8; 5], names: u8) -> Vec<u8> {
    const NO_ID: u32 = u32::MAX;
    let mut entries = vec![(1, owner, NO_ID)];
    entries.extend((0..names.min(2)).map(|id| (2, user, u32::from(id))));
    entries.push((4, group, NO_ID));
    entries.extend((names > 2).then_some((8, user, 7)));
    entries.extend((1..4).contains(&names).then_some((0x10, mask, NO_ID)));
    entries.push((0x20, others, NO_ID));
    let mut value = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        value.extend(u16::to_le_bytes(tag));
        value.extend(u16::from(permissions).to_le_bytes());
        value.extend(id.to_le_bytes());
    }
    value
}

/// What both sides must show of one name.
#[derive(Debug, PartialEq, Eq)]
struct Shown {
    kind: InodeKind,
    mode: u32,
    links: u32,
    target: Vec<u8>,
    xattrs: BTreeMap<String, Vec<u8>>,
    /// The first path, in their order, of the same inode.
    first: PathBuf,
}

struct Fixture {
    database: Database,
    root: u64,
    local: PathBuf,
    seq: u64,
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
        // Not /tmp, which may lack extended attributes.
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let database = Database::open(dir.path(), 1 << 20).unwrap();
        run(&database, Kind::Init(InitCluster { cluster_id: "c".into(), now_ns: 1, feature_version: 1 }));
        let write_type = WriteType::FsMode as i32;
        let mount =
            Mount { path: "/m".into(), uri: "memory://m".into(), write_type, block_size: 1 << 20, ..Mount::default() };
        let attach = AttachMount { mount: Some(mount), mounts_epoch: 0 };
        let Outcome::Mount(mount) = run(&database, Kind::AttachMount(attach)) else { panic!("no mount") };
        let local = dir.path().join("local");
        std::fs::create_dir(&local).unwrap();
        Self { database, root: mount.root_inode, local, seq: 0, _dir: dir }
    }

    /// Puts workers 1 to `count` into the table.
    fn register_workers(&self, count: u8) {
        for number in 1..=count {
            let worker = Some(Worker { data_address: format!("worker{number}:1"), ..Worker::default() });
            let put = PutWorker { uuid: vec![number; 16].into(), worker, ..PutWorker::default() };
            assert!(matches!(run(&self.database, Kind::PutWorker(put)), Outcome::Worker { .. }));
        }
    }

    fn end_session(&self) {
        let step = EndSessionStep { session: 7, limit: 256, part: 0, now_ns: 99 };
        match run(&self.database, Kind::EndSessionStep(step)) {
            Outcome::StepProgress(progress) => assert!(!progress.more),
            other => panic!("{other:?}"),
        }
    }

    fn change(&mut self, change: Change) -> MutationResult {
        self.seq += 1;
        self.repeat(self.seq, change)
    }

    fn repeat(&self, seq: u64, change: Change) -> MutationResult {
        self.ask(seq, seq.saturating_sub(3), change)
    }

    /// Asks for a change, with the results up to `answered`.
    fn ask(&self, seq: u64, answered: u64, change: Change) -> MutationResult {
        self.ask_for(answered, Mutation { seq, change: Some(change), ..Mutation::default() })
    }

    fn ask_for(&self, answered: u64, mutation: Mutation) -> MutationResult {
        let now_ns = i64::try_from(self.seq).unwrap();
        let mutate = Mutate { session: 7, answered, now_ns, mutation: Some(mutation), ..Mutate::default() };
        match run(&self.database, Kind::Mutate(mutate)) {
            Outcome::Mutated(result, _) => *result,
            other => panic!("{other:?}"),
        }
    }

    /// Every path below the mount, with its inode and record.
    fn tree(&self) -> BTreeMap<PathBuf, (u64, InodeRecord)> {
        let (tables, mut tree) = (Tables::new(&self.database), BTreeMap::new());
        let mut waiting = vec![(self.root, PathBuf::new())];
        while let Some((directory, path)) = waiting.pop() {
            let names = tables.page(directory, None, usize::MAX).unwrap().0;
            if directory != self.root {
                let entries = tables.inode(directory).unwrap().unwrap().entries;
                assert_eq!(entries, Some(names.len() as u64));
            }
            for (name, inode, record) in names {
                let path = path.join(std::str::from_utf8(&name).unwrap());
                if is_directory(&record) {
                    waiting.push((inode, path.clone()));
                }
                tree.insert(path, (inode, record));
            }
        }
        tree
    }

    /// The inode and the path of a directory, by number.
    fn directory(&self, number: usize) -> (u64, PathBuf) {
        let tree = self.tree();
        let below = tree.iter().filter(|(_, (_, record))| is_directory(record));
        let all: Vec<_> = std::iter::once((self.root, PathBuf::new()))
            .chain(below.map(|(path, (inode, _))| (*inode, path.clone())))
            .collect();
        all[number % all.len()].clone()
    }

    fn place(&self, (directory, letter): Place) -> (u64, Bytes, PathBuf) {
        let (inode, path) = self.directory(directory);
        let name = ["a", "b", "c", "d"][usize::from(letter)];
        (inode, Bytes::from_static(name.as_bytes()), self.local.join(path).join(name))
    }

    /// The inode of a place, or one that never existed.
    fn inode_at(&self, place: Place) -> u64 {
        let (parent, name, _) = self.place(place);
        Tables::new(&self.database).dentry(parent, &name).unwrap().map_or(0, |dentry| dentry.inode)
    }

    /// Makes a step on both sides; gives both errors.
    fn step(&mut self, step: &Step) -> (i32, i32) {
        let (change, local) = match step {
            Step::Create { at, kind, mode } => {
                let (parent, name, path) = self.place(*at);
                let kinds = [InodeKind::File, InodeKind::Directory, InodeKind::Fifo];
                let kind = kinds[usize::from(*kind)];
                let create = CreateInode { parent, name, kind: kind as i32, mode: *mode, ..CreateInode::default() };
                let mode = Mode::from_raw_mode(*mode);
                let local = match kind {
                    InodeKind::Directory => rustix::fs::mkdirat(CWD, &path, mode),
                    InodeKind::Fifo => rustix::fs::mknodat(CWD, &path, FileType::Fifo, mode, 0),
                    _ => rustix::fs::mknodat(CWD, &path, FileType::RegularFile, mode, 0),
                };
                (Change::Create(create), local)
            }
            Step::Symlink { at } => {
                let (parent, name, path) = self.place(*at);
                let (kind, target) = (InodeKind::Symlink as i32, Bytes::from_static(b"../nowhere"));
                let create = CreateInode { parent, name, kind, target, ..CreateInode::default() };
                (Change::Create(create), rustix::fs::symlinkat("../nowhere", CWD, &path))
            }
            Step::Link { from, to } => {
                let (_, _, source) = self.place(*from);
                let (parent, name, path) = self.place(*to);
                let inode = self.inode_at(*from);
                let local = rustix::fs::linkat(CWD, &source, CWD, &path, AtFlags::empty());
                if inode == 0 {
                    return (libc_noent(), local.map_or_else(|error| error.raw_os_error(), |()| 0));
                }
                (Change::Link(LinkInode { inode, parent, name }), local)
            }
            Step::Remove { at, directory } => {
                let (parent, name, path) = self.place(*at);
                let flags = if *directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
                let remove = RemoveName { parent, name, directory: *directory };
                (Change::Remove(remove), rustix::fs::unlinkat(CWD, &path, flags))
            }
            Step::Rename { from, to, mode } => {
                let (parent, name, source) = self.place(*from);
                let (new_parent, new_name, path) = self.place(*to);
                let (mode, flags) = [
                    (RenameMode::Replace, RenameFlags::empty()),
                    (RenameMode::NoReplace, RenameFlags::NOREPLACE),
                    (RenameMode::Exchange, RenameFlags::EXCHANGE),
                    (RenameMode::Replace, RenameFlags::WHITEOUT),
                    (RenameMode::NoReplace, RenameFlags::WHITEOUT.union(RenameFlags::NOREPLACE)),
                ][usize::from(*mode)];
                let local = rustix::fs::renameat_with(CWD, &source, CWD, &path, flags);
                let rename = RenameName { parent, name, new_parent, new_name, mode: mode as i32 };
                let leaves_whiteout = flags.contains(RenameFlags::WHITEOUT);
                (if leaves_whiteout { Change::RenameWhiteout(rename) } else { Change::Rename(rename) }, local)
            }
            Step::Chmod { at, mode } => {
                let (_, _, path) = self.place(*at);
                let inode = self.inode_at(*at);
                if inode == 0 || path.is_symlink() {
                    return (0, 0);
                }
                let set = SetAttr { inode, mode: Some(*mode), ..SetAttr::default() };
                let local = rustix::fs::chmodat(CWD, &path, Mode::from_raw_mode(*mode), AtFlags::empty());
                (Change::SetAttr(set), local)
            }
            Step::SetXattr { at, name, mode } => {
                let (_, _, path) = self.place(*at);
                let inode = self.inode_at(*at);
                if !path.symlink_metadata().is_ok_and(|data| data.is_dir() || data.is_file()) {
                    return (0, 0);
                }
                let (mode, flags) = [
                    (XattrMode::Any, XattrFlags::empty()),
                    (XattrMode::Create, XattrFlags::CREATE),
                    (XattrMode::Replace, XattrFlags::REPLACE),
                ][usize::from(*mode)];
                let (name, value) = (format!("user.{name}"), vec![b'v'; usize::from(*name) * 10]);
                let local = rustix::fs::setxattr(&path, &name, &value, flags);
                (
                    Change::SetXattr(SetXattr {
                        inode,
                        name: name.into(),
                        value: value.into(),
                        mode: mode as i32,
                        ..SetXattr::default()
                    }),
                    local,
                )
            }
            Step::RemoveXattr { at, name } => {
                let (_, _, path) = self.place(*at);
                let inode = self.inode_at(*at);
                if !path.symlink_metadata().is_ok_and(|data| data.is_dir() || data.is_file()) {
                    return (0, 0);
                }
                let name = format!("user.{name}");
                let local = rustix::fs::removexattr(&path, &name);
                (Change::RemoveXattr(RemoveXattr { inode, name: name.into() }), local)
            }
            Step::SetAcl { at, default, permissions, names } => {
                let (_, _, path) = self.place(*at);
                let inode = self.inode_at(*at);
                if inode == 0 || path.is_symlink() {
                    return (0, 0);
                }
                let (name, value) = (ACLS[usize::from(*default)], acl(*permissions, *names));
                let local = rustix::fs::setxattr(&path, name, &value, XattrFlags::empty());
                let set = SetXattr { inode, name: name.into(), value: value.into(), ..SetXattr::default() };
                (Change::SetXattr(set), local)
            }
            Step::RemoveAcl { at, default } => {
                let (_, _, path) = self.place(*at);
                let inode = self.inode_at(*at);
                if inode == 0 || path.is_symlink() {
                    return (0, 0);
                }
                let name = ACLS[usize::from(*default)];
                let local = rustix::fs::removexattr(&path, name);
                (Change::RemoveXattr(RemoveXattr { inode, name: name.into() }), local)
            }
        };
        let result = self.change(change.clone());
        // As after a lost answer.
        assert_eq!(self.repeat(self.seq, change), result);
        (result.errno, local.map_or_else(|error| error.raw_os_error(), |()| 0))
    }

    fn shown(&self) -> BTreeMap<PathBuf, Shown> {
        let (tree, mut first) = (self.tree(), HashMap::new());
        let shown = tree.into_iter().map(|(path, (inode, record))| {
            let xattrs = Tables::new(&self.database).xattrs(inode).unwrap();
            let takes = xattrs.iter().map(|(name, value)| records::xattr_size(name, value)).sum::<u32>();
            assert_eq!(record.xattr_bytes, takes);
            let shown = Shown {
                kind: record.kind(),
                mode: records::mode(&record),
                links: links(&record),
                target: record.target.to_vec(),
                xattrs: (xattrs.into_iter())
                    .map(|(name, value)| (String::from_utf8(name.to_vec()).unwrap(), value.to_vec()))
                    .collect(),
                first: first.entry(inode).or_insert_with(|| path.clone()).clone(),
            };
            (path, shown)
        });
        shown.collect()
    }
}

fn libc_noent() -> i32 {
    Errno::NOENT.raw_os_error()
}

fn shown_locally(top: &Path) -> BTreeMap<PathBuf, Shown> {
    let (mut paths, mut waiting) = (Vec::new(), vec![top.to_owned()]);
    while let Some(directory) = waiting.pop() {
        for entry in std::fs::read_dir(&directory).unwrap() {
            let entry = entry.unwrap();
            if entry.file_type().unwrap().is_dir() {
                waiting.push(entry.path());
            }
            paths.push(entry.path());
        }
    }
    paths.sort();
    let mut first = HashMap::new();
    let shown = paths.into_iter().map(|path| {
        let data = path.symlink_metadata().unwrap();
        let kind = match data.file_type() {
            kind if kind.is_dir() => InodeKind::Directory,
            kind if kind.is_symlink() => InodeKind::Symlink,
            kind if kind.is_fifo() => InodeKind::Fifo,
            kind if kind.is_char_device() => InodeKind::CharacterDevice,
            _ => InodeKind::File,
        };
        let target = std::fs::read_link(&path)
            .map_or_else(|_| Vec::new(), |target| target.into_os_string().into_encoded_bytes());
        let below = path.strip_prefix(top).unwrap().to_owned();
        let mut xattrs = BTreeMap::new();
        for name in ["user.0", "user.1", "user.2"].into_iter().chain(ACLS) {
            let mut value = [0u8; 128];
            if let Ok(length) = rustix::fs::lgetxattr(&path, name, &mut value[..]) {
                xattrs.insert(name.to_owned(), value[..length].to_vec());
            }
        }
        let shown = Shown {
            kind,
            mode: data.mode() & 0o7777,
            links: u32::try_from(data.nlink()).unwrap(),
            target,
            xattrs,
            first: first.entry(data.ino()).or_insert_with(|| below.clone()).clone(),
        };
        (below, shown)
    });
    shown.collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]
    #[test]
    fn behaves_like_a_local_file_system(steps in prop::collection::vec(step(), 1..120)) {
        // Modes are as asked for on both sides.
        rustix::process::umask(Mode::empty());
        let mut bench = Fixture::new();
        for step in &steps {
            let (ours, theirs) = bench.step(step);
            prop_assert_eq!(ours, theirs, "{:?}", step);
        }
        prop_assert_eq!(bench.shown(), shown_locally(&bench.local));
        // Every inode has a name, or is known to have none.
        let tables = Tables::new(&bench.database);
        let named: std::collections::HashSet<u64> = bench.tree().values().map(|(inode, _)| *inode).collect();
        for inode in bench.root + 1..=tables.counters().unwrap().inode {
            let record = tables.inode(inode).unwrap().unwrap();
            prop_assert_eq!(record.unlinked, !named.contains(&inode), "inode {}", inode);
        }
    }
}

#[test]
fn a_whiteout_is_left_where_a_name_was() {
    let mut bench = Fixture::new();
    let name = |text: &'static str| Bytes::from_static(text.as_bytes());
    let create =
        CreateInode { parent: bench.root, name: name("a"), kind: InodeKind::File as i32, ..CreateInode::default() };
    let file = bench.change(Change::Create(create)).inode;
    let rename =
        RenameName { parent: bench.root, name: name("a"), new_parent: bench.root, new_name: name("b"), mode: 0 };
    let left = bench.change(Change::RenameWhiteout(rename.clone()));
    assert_eq!((left.errno, left.inode), (0, file));
    let tree = bench.tree();
    let whiteout = &tree[Path::new("a")].1;
    assert_eq!((whiteout.kind(), whiteout.rdev, records::mode(whiteout)), (InodeKind::CharacterDevice, 0, 0));
    assert!(left.attributes.iter().any(|attr| attr.inode == tree[Path::new("a")].0), "{left:?}");
    let exchange = RenameName { mode: RenameMode::Exchange as i32, ..rename };
    assert_eq!(bench.change(Change::RenameWhiteout(exchange)).errno, Errno::INVAL.raw_os_error());
    assert_eq!(bench.tree(), tree);
}

#[test]
fn nothing_gets_an_owner_that_is_none() {
    let bench = Fixture::new();
    let mut seq = 0;
    let mut ask = |(uid, gid), change| {
        seq += 1;
        let mutation = Mutation { seq, uid, gid, change: Some(change), ..Mutation::default() };
        let mutate = Mutate { session: 7, now_ns: 9, mutation: Some(mutation), ..Mutate::default() };
        match run(&bench.database, Kind::Mutate(mutate)) {
            Outcome::Mutated(result, _) => *result,
            other => panic!("{other:?}"),
        }
    };
    let create = |name: &'static str| {
        let (parent, kind) = (bench.root, InodeKind::File as i32);
        Change::Create(CreateInode { parent, name: name.into(), kind, ..CreateInode::default() })
    };
    let file = ask((1, 1), create("f")).inode;
    for (uid, gid) in [(u32::MAX, 0), (0, u32::MAX)] {
        assert_eq!(ask((uid, gid), create("g")).errno, Errno::INVAL.raw_os_error(), "{uid} {gid}");
        let set = SetAttr { inode: file, uid: Some(uid), gid: Some(gid), ..SetAttr::default() };
        assert_eq!(ask((1, 1), Change::SetAttr(set)).errno, Errno::INVAL.raw_os_error(), "{uid} {gid}");
    }
    let tree = bench.tree();
    assert_eq!(tree.len(), 1);
    assert_eq!((tree[Path::new("f")].1.uid, tree[Path::new("f")].1.gid), (1, 1));
    let last = SetAttr { inode: file, uid: Some(u32::MAX - 1), gid: Some(u32::MAX - 1), ..SetAttr::default() };
    assert_eq!(ask((1, 1), Change::SetAttr(last)).errno, 0);
}

#[test]
fn attributes_have_names_as_local_ones() {
    let mut bench = Fixture::new();
    std::fs::write(bench.local.join("file"), "").unwrap();
    let create =
        CreateInode { parent: bench.root, name: "file".into(), kind: InodeKind::File as i32, ..CreateInode::default() };
    let inode = bench.change(Change::Create(create)).inode;
    let long = format!("user.{}", "x".repeat(251));
    for name in ["user.", "system.", "user", "users.x", "", &long, &long[..255], "user.x"] {
        let local = rustix::fs::setxattr(bench.local.join("file"), name, b"v", XattrFlags::empty());
        let set = SetXattr { inode, name: name.to_owned().into(), value: "v".into(), ..SetXattr::default() };
        let errno = local.map_or_else(Errno::raw_os_error, |()| 0);
        assert_eq!(bench.change(Change::SetXattr(set)).errno, errno, "{name}");
    }
    for (name, errno) in [("trusted.", Errno::INVAL), ("security.", Errno::INVAL), ("user.a\0b", Errno::RANGE)] {
        let set = SetXattr { inode, name: name.into(), value: "v".into(), ..SetXattr::default() };
        assert_eq!(bench.change(Change::SetXattr(set)).errno, errno.raw_os_error(), "{name}");
    }
    assert_eq!(Tables::new(&bench.database).xattrs(inode).unwrap().len(), 2);
}

#[test]
fn only_fs_mode_mounts_can_be_changed() {
    let mut bench = Fixture::new();
    let write_type = WriteType::CacheMode as i32;
    let mount = Mount { path: "/c".into(), uri: "memory://c".into(), write_type, ..Mount::default() };
    let attach = AttachMount { mount: Some(mount), mounts_epoch: 1 };
    let Outcome::Mount(mount) = run(&bench.database, Kind::AttachMount(attach)) else { panic!("no mount") };
    let create = |parent| {
        let kind = InodeKind::File as i32;
        Change::Create(CreateInode { parent, name: "a".into(), kind, ..CreateInode::default() })
    };
    for parent in [mount.root_inode, cavern_proto::ROOT_INODE] {
        assert_eq!(bench.change(create(parent)).errno, Errno::ROFS.raw_os_error());
    }
    assert_eq!(bench.change(create(999)).errno, Errno::STALE.raw_os_error());
    assert_eq!(bench.change(create(bench.root)).errno, 0);
}

#[test]
fn a_result_is_kept_until_the_session_has_it_and_no_longer() {
    let mut bench = Fixture::new();
    let create = |name: &str| {
        let (kind, name) = (InodeKind::File as i32, Bytes::copy_from_slice(name.as_bytes()));
        Change::Create(CreateInode { parent: bench.root, name, kind, ..CreateInode::default() })
    };
    let (first, changes) = (create("0"), (1..10).map(|n| create(&n.to_string())).collect::<Vec<_>>());
    let result = bench.change(first.clone());
    assert_eq!((result.errno, bench.repeat(1, first.clone())), (0, result));
    for change in changes {
        bench.change(change);
    }
    // Not applied again, whatever became of the name.
    assert_eq!(bench.repeat(1, first).errno, Errno::STALE.raw_os_error());
    assert_eq!(bench.tree().len(), 10);
    bench.end_session();
    let tables = Tables::new(&bench.database);
    assert!(tables.session(7).unwrap().is_none() && !tables.has(schema::Results, (7, bench.seq)).unwrap());
}

/// Numbers of the results that are kept, and the bytes that they take.
fn cached_results(bench: &Fixture) -> (Vec<u64>, u64) {
    let tables = Tables::new(&bench.database);
    let results = tables.rows(schema::Results, 7_u64).page(usize::MAX, |row| row.entry()).unwrap();
    let bytes = results.iter().map(|(_, result)| 16 + result.encoded_len() as u64).sum();
    (results.into_iter().map(|((_, seq), _)| seq).collect(), bytes)
}

#[test]
fn a_session_that_does_not_say_which_results_it_has_changes_nothing_more_at_a_bound() {
    let bench = Fixture::new();
    let root = bench.root;
    let create = |name: &'static str| {
        let kind = InodeKind::File as i32;
        Change::Create(CreateInode { parent: root, name: name.into(), kind, ..CreateInode::default() })
    };
    assert_eq!(bench.ask(1, 0, create("a")).errno, 0);
    let last = bench.ask(MAX_CACHED_RESULTS, 0, create("b"));
    assert_eq!((last.errno, bench.ask(MAX_CACHED_RESULTS, 0, create("b"))), (0, last));
    // One number too many, also with one result that it has.
    let beyond = MAX_CACHED_RESULTS + 2;
    for answered in [0, 1] {
        let refused = bench.ask(beyond, answered, create("c"));
        assert_eq!(refused.errno, Errno::NOBUFS.raw_os_error());
        assert!(refused.reason.contains("acknowledge those"), "{}", refused.reason);
    }
    assert_eq!(cached_results(&bench).0, [MAX_CACHED_RESULTS], "a refusal is not kept, and what it has is forgotten");
    assert_eq!(bench.tree().len(), 2, "nothing was made");
    // What it has answered for would be lost, and is checked as ever: the session does not hold that directory.
    let answered = |seq| {
        let change = Some(create("c"));
        bench.ask_for(1, Mutation { seq, change, is_write_back: true, ..Mutation::default() })
    };
    assert_ne!(answered(ANSWERED_TIMES * MAX_CACHED_RESULTS + 1).errno, Errno::NOBUFS.raw_os_error());
    let refused = answered(ANSWERED_TIMES * MAX_CACHED_RESULTS + 2);
    assert!(refused.errno == Errno::NOBUFS.raw_os_error() && refused.reason.contains("256 MiB"), "{}", refused.reason);
    assert_eq!(bench.ask(beyond, 2, create("c")).errno, 0, "the same again, with one more that it has");

    // Numbers that are far apart take no more for that.
    for round in 1..5 {
        let seq = round * 10 * MAX_CACHED_RESULTS;
        assert_eq!(bench.ask(seq, seq - 1, create("c")).errno, Errno::EXIST.raw_os_error());
        assert_eq!(cached_results(&bench).0, [seq]);
    }
}

#[test]
fn the_bytes_of_results_that_a_session_does_not_say_it_has_are_bounded() {
    let bench = Fixture::new();
    let set = |first: u64| {
        let hold = (first..first + 100).map(|number| number << 40).collect();
        Change::SetOpenRefs(SetOpenRefs { opened: hold, ..SetOpenRefs::default() })
    };
    let session = || Tables::new(&bench.database).session(7).unwrap().unwrap();
    let counted = || session().cached.iter().map(|kept| kept.bytes).sum::<u64>();
    // Two parts of the numbers.
    for seq in 1020..1030 {
        assert_eq!(bench.ask(seq, 0, set(seq)).gone.len(), 100);
    }
    let (numbers, bytes) = cached_results(&bench);
    assert_eq!((numbers.len(), session().cached.len(), counted()), (10, 2, bytes));
    assert!(bytes > 5000, "{bytes}");
    bench.ask(1030, 1023, set(0));
    assert_eq!((session().cached.len(), counted()), (1, cached_results(&bench).1), "what it has counts no more");

    // As after many of them.
    let mut transaction = Transaction::new(&bench.database).unwrap();
    let mut record = session();
    record.cached[0].bytes = MAX_CACHED_RESULT_BYTES;
    transaction.put(schema::Sessions, 7, &record);
    bench.database.write(transaction.finish().unwrap().0.into_batch(&bench.database)).unwrap();
    let refused = bench.ask(2050, 1030, set(0));
    assert_eq!(refused.errno, Errno::NOBUFS.raw_os_error());
    assert!(refused.reason.contains("64 MiB"), "{}", refused.reason);
    let mutation = Mutation { seq: 2047, change: Some(set(0)), is_write_back: true, ..Mutation::default() };
    assert_ne!(bench.ask_for(1030, mutation).errno, Errno::NOBUFS.raw_os_error());
    assert_eq!(bench.ask(2050, 2049, set(0)).errno, 0);
    assert_eq!((session().cached.len(), counted()), (1, cached_results(&bench).1));
}

#[test]
fn a_refusal_in_a_deep_directory_is_kept_with_the_beginning_of_its_reason() {
    let mut bench = Fixture::new();
    let create = |parent, kind: InodeKind| {
        let (name, kind) = ("é".repeat(NAME_MAX / 2).into(), kind as i32);
        Change::Create(CreateInode { parent, name, kind, ..CreateInode::default() })
    };
    let deepest = (0..20).fold(bench.root, |parent, _| bench.change(create(parent, InodeKind::Directory)).inode);
    let file = bench.change(create(deepest, InodeKind::File)).inode;
    let refused = bench.change(create(file, InodeKind::File));
    assert_eq!(refused.errno, Errno::NOTDIR.raw_os_error());
    assert!(refused.reason.ends_with('…'), "{}", refused.reason);
    assert!(
        (MAX_REASON_BYTES..=MAX_REASON_BYTES + '…'.len_utf8()).contains(&refused.reason.len()),
        "{}",
        refused.reason.len()
    );
    assert!(refused.reason.starts_with("/m/éé"), "{}", refused.reason);
    assert_eq!(bench.repeat(bench.seq, create(file, InodeKind::File)), refused);
}

#[test]
fn what_a_session_holds_is_known_by_session_and_goes_in_steps_of_bounded_size() {
    let mut bench = Fixture::new();
    let inodes: Vec<u64> = (0..100)
        .map(|number: u32| {
            let (kind, name) = (InodeKind::File as i32, number.to_string().into());
            bench.change(Change::Create(CreateInode { parent: bench.root, name, kind, ..CreateInode::default() })).inode
        })
        .collect();
    let (held, gone) = (inodes[1..].to_vec(), 99_999);
    let set =
        |hold: &[u64], let_go: &[u64]| Change::SetOpenRefs(SetOpenRefs { opened: hold.into(), closed: let_go.into() });
    let result = bench.change(set(&[&inodes[..], &[gone]].concat(), &[]));
    assert_eq!((result.errno, result.gone), (0, vec![gone]));
    assert_eq!(bench.change(set(&[], &inodes[..1])).errno, 0);
    assert_eq!(bench.change(set(&vec![gone; 1001], &[])).errno, Errno::INVAL.raw_os_error());
    let remove = RemoveName { parent: bench.root, name: "0".into(), directory: false };
    bench.change(Change::Remove(remove));
    let tables = Tables::new(&bench.database);
    let asked = |session| {
        let (open, held) = (vec![inodes[0], inodes[1], gone], vec![inodes[2]]);
        tables.check_open_refs(&CheckOpenRefsRequest { session, open, referenced: held }).unwrap()
    };
    assert_eq!((asked(7).missing, asked(7).gone), (vec![inodes[0]], vec![gone]), "it has no name, and is not held");
    assert_eq!(asked(8).missing, [inodes[0], inodes[2]], "another session holds nothing");

    assert_eq!(tables.refs_of(7, usize::MAX).unwrap(), held);

    let step = || match run(
        &bench.database,
        Kind::EndSessionStep(EndSessionStep { session: 7, limit: 32, part: 0, now_ns: 99 }),
    ) {
        Outcome::StepProgress(reaped) => reaped,
        other => panic!("{other:?}"),
    };
    let mut steps = 1;
    while step().more {
        assert!(tables.session(7).unwrap().unwrap().is_ending, "nobody takes it up again");
        steps += 1;
        assert_eq!(tables.refs_of(7, usize::MAX).unwrap(), held[(32 * (steps - 1)).min(held.len())..]);
    }
    assert!(steps >= 4, "{steps}");
    assert!(tables.session(7).unwrap().is_none() && !tables.has(schema::Results, (7, bench.seq)).unwrap());
    assert!(!tables.is_open(inodes[5]).unwrap());
}

#[test]
fn what_a_session_held_counts_as_changed_when_it_ends() {
    let mut bench = Fixture::new();
    let mut make = |name: &'static str, size| {
        let kind = InodeKind::File as i32;
        let create = CreateInode { parent: bench.root, name: name.into(), kind, ..CreateInode::default() };
        let inode = bench.change(Change::Create(create)).inode;
        let commit = CommitContent { inode, grow_to: size, ..CommitContent::default() };
        bench.change(Change::Commit(commit));
        inode
    };
    let (held, empty, not_held, removed) = (make("held", 10), make("empty", 0), make("other", 10), make("gone", 10));
    let set = SetOpenRefs { opened: vec![held, empty, removed], closed: Vec::new() };
    assert_eq!(bench.change(Change::SetOpenRefs(set)).errno, 0);
    bench.change(Change::Remove(RemoveName { parent: bench.root, name: "gone".into(), directory: false }));
    let state = |bench: &Fixture| {
        [held, empty, not_held, removed].map(|inode| Tables::new(&bench.database).inode(inode).unwrap().unwrap())
    };
    let intent = |bench: &Fixture| Tables::new(&bench.database).intent(held).unwrap().unwrap().change;
    let (before, noted) = (state(&bench), intent(&bench));
    run(&bench.database, Kind::EndSessionStep(EndSessionStep { session: 8, limit: 256, part: 0, now_ns: 77 }));
    assert_eq!((state(&bench), intent(&bench)), (before.clone(), noted), "another session");
    run(&bench.database, Kind::EndSessionStep(EndSessionStep { session: 7, limit: 256, part: 0, now_ns: 99 }));
    let after = state(&bench);
    let expected = InodeRecord { version: before[0].version + 1, mtime_ns: 99, ctime_ns: 99, ..before[0].clone() };
    assert_eq!(after[0], expected);
    assert_eq!(after[1..], before[1..]);
    assert!(intent(&bench) > noted, "the bucket gets it once more");
}

#[test]
fn blocks_come_by_commits_and_go_by_truncation_and_never_get_an_old_name() {
    let mut bench = Fixture::new();
    bench.register_workers(4);
    let kind = InodeKind::File as i32;
    let file = Change::Create(CreateInode { parent: bench.root, name: "f".into(), kind, ..CreateInode::default() });
    let inode = bench.change(file).inode;
    let commit = |grow_to, made: &[(u32, u32)]| {
        let made = made.iter().map(|(index, generation)| Extent {
            index: *index,
            generation: *generation,
            workers: vec![3],
            ..Extent::default()
        });
        Change::Commit(CommitContent { inode, grow_to, made: made.collect(), changed: true })
    };
    let cut = |size| Change::SetAttr(SetAttr { inode, size: Some(size), ..SetAttr::default() });
    let extents = |bench: &Fixture| {
        let extents = Tables::new(&bench.database).extents(inode, 0).unwrap();
        extents.iter().map(|extent| (extent.index, extent.generation)).collect::<Vec<_>>()
    };
    let attributes = |result: &MutationResult| {
        let attributes = &result.attributes[0];
        (attributes.size, attributes.version, attributes.generation)
    };
    // Blocks of 1 MiB.
    let written = bench.change(commit(5 << 19, &[(0, 0), (2, 0)]));
    assert_eq!((attributes(&written), extents(&bench)), ((5 << 19, 1, 0), vec![(0, 0), (2, 0)]));
    assert_eq!(attributes(&bench.change(commit(1, &[]))), (5 << 19, 2, 0));
    assert_eq!(attributes(&bench.change(cut((1 << 20) + 1))), ((1 << 20) + 1, 3, 1));
    assert_eq!(extents(&bench), [(0, 0)]);
    // A writer that has not been notified of the cut.
    assert_eq!(bench.change(commit(5 << 19, &[(2, 0)])).errno, Errno::STALE.raw_os_error());
    bench.change(commit(5 << 19, &[(0, 0), (2, 1)]));
    assert_eq!(extents(&bench), [(0, 0), (2, 1)]);
    // A writer that made a block at another worker than the one that has it.
    let made = vec![Extent { index: 2, generation: 1, workers: vec![4], ..Extent::default() }];
    let elsewhere = Change::Commit(CommitContent { inode, grow_to: 1, made, changed: true });
    assert_eq!(bench.change(elsewhere).errno, Errno::STALE.raw_os_error());
    assert_eq!(attributes(&bench.change(cut(3 << 20))), (3 << 20, 5, 1));
    assert_eq!(attributes(&bench.change(cut(0))), (0, 6, 2));
    assert_eq!(extents(&bench), []);
    assert_eq!(bench.change(cut((1 << 44) + 1)).errno, Errno::FBIG.raw_os_error());
    let root = SetAttr { inode: bench.root, size: Some(0), ..SetAttr::default() };
    assert_eq!(bench.change(Change::SetAttr(root)).errno, Errno::ISDIR.raw_os_error());

    bench.change(commit(1, &[(0, 2)]));
    bench.change(Change::Remove(RemoveName { parent: bench.root, name: "f".into(), directory: false }));
    run(&bench.database, Kind::ReapUnlinked(inode));
    let tables = Tables::new(&bench.database);
    assert!(tables.inode(inode).unwrap().is_none() && extents(&bench).is_empty());
    assert_eq!(tables.counters().unwrap().garbage, 3);
}

#[test]
fn a_file_that_is_emptied_keeps_its_only_block_where_that_is_asked_for() {
    let mut bench = Fixture::new();
    bench.register_workers(3);
    let (inode, commit) = file_with_commits(&mut bench);
    let cut =
        |size, keeps_block| Change::SetAttr(SetAttr { inode, size: Some(size), keeps_block, ..SetAttr::default() });
    let shown = |bench: &Fixture| {
        let tables = Tables::new(&bench.database);
        let extents = tables.extents(inode, 0).unwrap();
        let extents: Vec<_> = extents.iter().map(|extent| (extent.index, extent.generation)).collect();
        let InodeRecord { size, generation, allocated, .. } = tables.inode(inode).unwrap().unwrap();
        (extents, size, generation, allocated)
    };
    assert_eq!(bench.change(commit(&[(0, &[1, 2])])).errno, 0);
    let emptied = bench.change(cut(0, true));
    assert!(emptied.is_alone && emptied.errno == 0);
    assert_eq!(shown(&bench), (vec![(0, 0)], 0, 0, Some(0)));
    assert_eq!(Tables::new(&bench.database).extent(inode, 0).unwrap().unwrap().workers, [1, 2]);
    // What is written to it goes to where it was, and is accounted for.
    let made = vec![Extent { workers: vec![1, 2], allocated: Some(4096), ..Extent::default() }];
    bench.change(Change::Commit(CommitContent { inode, grow_to: 9, made, changed: true }));
    assert_eq!(shown(&bench), (vec![(0, 0)], 9, 0, Some(4096)));
    assert_eq!(bench.change(cut(0, false)).errno, 0);
    assert_eq!(shown(&bench), (vec![], 0, 1, Some(0)), "nobody has asked for it");

    let generation = 1;
    let made = |index| Extent { index, generation, workers: vec![1], ..Extent::default() };
    let write = |made| Change::Commit(CommitContent { inode, grow_to: 9, made, changed: true });
    assert_eq!(bench.change(write(vec![made(0), made(1)])).errno, 0);
    assert_eq!(bench.change(cut(0, true)).errno, 0);
    assert_eq!(shown(&bench).0, [], "it had two");
    let made = Extent { generation: 2, ..made(0) };
    assert_eq!(bench.change(write(vec![made])).errno, 0);
    let hold = Mutation {
        seq: 1,
        change: Some(Change::SetOpenRefs(SetOpenRefs { opened: vec![inode], closed: Vec::new() })),
        ..Mutation::default()
    };
    run(&bench.database, Kind::Mutate(Mutate { session: 8, mutation: Some(hold), ..Mutate::default() }));
    let emptied = bench.change(cut(0, true));
    assert!(!emptied.is_alone && emptied.errno == 0);
    assert_eq!((shown(&bench).0, shown(&bench).2), (vec![], 3), "another session may write to it");
}

/// A block by its index, and the workers that have it.
type MadeAt<'a> = (u32, &'a [u64]);

/// A file, and what commits these blocks to it at these workers.
fn file_with_commits(bench: &mut Fixture) -> (u64, impl Fn(&[MadeAt<'_>]) -> Change + use<>) {
    let kind = InodeKind::File as i32;
    let file = Change::Create(CreateInode { parent: bench.root, name: "f".into(), kind, ..CreateInode::default() });
    let inode = bench.change(file).inode;
    let commit = move |made: &[MadeAt<'_>]| {
        let at =
            |(index, workers): &MadeAt<'_>| Extent { index: *index, workers: workers.to_vec(), ..Extent::default() };
        let made = made.iter().map(at).collect();
        Change::Commit(CommitContent { inode, grow_to: 1, made, changed: true })
    };
    (inode, commit)
}

#[test]
fn blocks_are_committed_at_workers_of_the_table_alone() {
    let mut bench = Fixture::new();
    bench.register_workers(3);
    let (inode, commit) = file_with_commits(&mut bench);
    let invented: Vec<u64> = (1_000_000..1_000_008).collect();
    let refused = bench.change(commit(&[(0, &[1]), (1, &invented)]));
    assert_eq!(refused.errno, Errno::STALE.raw_os_error());
    assert!(refused.reason.contains("block 1 of /m/f"), "{}", refused.reason);
    let with_replicas = |bench: &Fixture| Tables::new(&bench.database).workers_with_replicas().unwrap();
    let workers = |bench: &Fixture, index| {
        Tables::new(&bench.database).extent(inode, index).unwrap().map_or_else(Vec::new, |extent| extent.workers)
    };
    assert!(with_replicas(&bench).is_empty(), "a refusal leaves no trace");

    // What others have of a block is there without one that was removed meanwhile.
    assert_eq!(bench.change(commit(&[(0, &[1, 2]), (1, &[77, 3])])).errno, 0);
    run(&bench.database, Kind::RemoveWorker(RemoveWorker { worker_id: 2, with_replicas: true }));
    assert_eq!(bench.change(commit(&[(0, &[1, 2]), (2, &[2, 3])])).errno, 0);
    assert_eq!([0, 1, 2].map(|index| workers(&bench, index)), [vec![1, 2], vec![3], vec![3]]);
    // Nor does anybody have to be freed of what it cannot have.
    assert_eq!(bench.change(commit(&[(1, &[3, 78])])).errno, 0);
    assert_eq!(bench.change(commit(&[(1, &[78])])).errno, Errno::STALE.raw_os_error());
    assert_eq!(Tables::new(&bench.database).strays(None, 10).unwrap(), []);
    assert_eq!(with_replicas(&bench), [1, 2, 3]);
    // What only one has that was removed is lost with it, and the blocks beside it are not.
    assert_eq!(bench.change(commit(&[(4, &[3]), (5, &[2, 79])])).errno, 0);
    assert_eq!([4, 5].map(|index| workers(&bench, index)), [vec![3], vec![2]]);
}

#[test]
fn a_commit_names_each_block_and_each_of_its_workers_once() {
    let twice: [&[(u32, &[u64])]; 2] = [&[(0, &[1]), (1, &[1]), (0, &[2])], &[(0, &[1, 2, 1])]];
    for made in twice {
        let mut bench = Fixture::new();
        bench.register_workers(2);
        let (_, commit) = file_with_commits(&mut bench);
        assert_eq!(bench.change(commit(made)).errno, Errno::INVAL.raw_os_error(), "{made:?}");
        assert!(Tables::new(&bench.database).workers_with_replicas().unwrap().is_empty());
    }
}

#[test]
fn a_file_that_was_cut_as_often_as_can_be_is_not_cut_again() {
    let mut bench = Fixture::new();
    let (inode, _) = file_with_commits(&mut bench);
    let sized = |size| Change::SetAttr(SetAttr { inode, size: Some(size), ..SetAttr::default() });
    let mut transaction = Transaction::new(&bench.database).unwrap();
    let record = transaction.inode(inode).unwrap().unwrap();
    transaction.put_inode(inode, InodeRecord { generation: u32::MAX - 2, ..record });
    bench.database.write(transaction.finish().unwrap().0.into_batch(&bench.database)).unwrap();
    assert_eq!(bench.change(sized(10)).errno, 0);
    assert_eq!(bench.change(sized(5)).attributes[0].generation, u32::MAX - 1);
    let refused = bench.change(sized(0));
    assert_eq!(refused.errno, Errno::FBIG.raw_os_error());
    assert!(refused.reason.contains("/m/f"), "{}", refused.reason);
    assert_eq!(bench.change(sized(20)).errno, 0, "it grows");
}

#[test]
fn a_file_without_a_name_is_held_by_who_made_it_and_gets_one_by_a_link() {
    let mut bench = Fixture::new();
    let make = |parent, naming: Naming, kind: InodeKind| {
        let (kind, naming) = (kind as i32, naming as i32);
        Change::Create(CreateInode { parent, kind, naming, mode: 0o640, ..CreateInode::default() })
    };
    let root = bench.root;
    let named = |name: &'static str, inode| Change::Link(LinkInode { inode, parent: root, name: name.into() });
    let refused = |result: &MutationResult| Errno::from_raw_os_error(result.errno);
    let (linkable, other) = (
        bench.change(make(root, Naming::Nameless, InodeKind::File)),
        bench.change(make(root, Naming::NamelessForEver, InodeKind::File)),
    );
    let attributes = linkable.attributes[0];
    assert_eq!((linkable.attributes.len(), attributes.nlink, attributes.mode), (1, 0, 0o640));
    assert_eq!(refused(&bench.change(named("a", other.inode))), Errno::NOENT);
    assert_eq!(refused(&bench.change(make(root, Naming::Nameless, InodeKind::Directory))), Errno::INVAL);
    assert_eq!(refused(&bench.change(make(other.inode, Naming::Nameless, InodeKind::File))), Errno::NOTDIR);
    assert!(bench.tree().is_empty());
    for inode in [linkable.inode, other.inode] {
        run(&bench.database, Kind::ReapUnlinked(inode));
        assert!(Tables::new(&bench.database).inode(inode).unwrap().is_some(), "the session holds it");
    }
    let linked = bench.change(named("a", linkable.inode));
    assert_eq!((linked.errno, linked.attributes[0].nlink), (0, 1));
    assert_eq!(bench.change(named("b", linkable.inode)).attributes[0].nlink, 2);
    for (name, left) in [("a", 1), ("b", 0)] {
        let remove = RemoveName { parent: root, name: name.into(), directory: false };
        let removed = bench.change(Change::Remove(remove));
        assert_eq!(removed.attributes[0].nlink, left);
    }
    assert_eq!(refused(&bench.change(named("a", linkable.inode))), Errno::NOENT, "it has had names");
    bench.end_session();
    for inode in [linkable.inode, other.inode] {
        run(&bench.database, Kind::ReapUnlinked(inode));
        assert!(Tables::new(&bench.database).inode(inode).unwrap().is_none());
    }
}

#[test]
fn a_set_group_id_directory_hands_its_group_on() {
    let mut bench = Fixture::new();
    let make = |parent, name: &'static str, kind: InodeKind, mode| {
        let name = Bytes::from_static(name.as_bytes());
        Change::Create(CreateInode { parent, name, kind: kind as i32, mode, ..CreateInode::default() })
    };
    let top = bench.change(make(bench.root, "top", InodeKind::Directory, 0o2775)).inode;
    bench.change(Change::SetAttr(SetAttr { inode: top, gid: Some(55), ..SetAttr::default() }));
    let directory = bench.change(make(top, "d", InodeKind::Directory, 0o700));
    let file = bench.change(make(top, "f", InodeKind::File, 0o600));
    let attributes = |result: &MutationResult| (result.attributes[0].gid, result.attributes[0].mode);
    assert_eq!(attributes(&directory), (55, 0o2700));
    assert_eq!(attributes(&file), (55, 0o600));
}

#[test]
fn a_default_list_goes_before_the_umask_and_is_handed_on() {
    let mut bench = Fixture::new();
    let make = |parent, name: &'static str, kind: InodeKind| {
        let (name, kind, mode, umask) = (name.into(), kind as i32, 0o1666, 0o027);
        Change::Create(CreateInode { parent, name, kind, mode, umask, ..CreateInode::default() })
    };
    let without = bench.change(make(bench.root, "without", InodeKind::Directory));
    assert_eq!(without.attributes[0].mode, 0o1640);
    let top = without.inode;
    let default: Bytes = acl([7, 6, 5, 7, 4], 1).into();
    let name = Bytes::from_static(ACLS[1].as_bytes());
    let set = SetXattr { inode: top, name: name.clone(), value: default.clone(), ..SetXattr::default() };
    assert_eq!(bench.change(Change::SetXattr(set)).errno, 0);
    let (file, below) = (make(top, "file", InodeKind::File), make(top, "below", InodeKind::Directory));
    let (file, below) = (bench.change(file), bench.change(below));
    let xattrs = |inode| Tables::new(&bench.database).xattrs(inode).unwrap();
    let access = (Bytes::from_static(ACLS[0].as_bytes()), Bytes::from(acl([6, 6, 5, 6, 4], 1)));
    assert_eq!((file.attributes[0].mode, file.attributes[0].has_xattrs), (0o1664, true));
    assert_eq!(xattrs(below.inode), [access.clone(), (name, default)]);
    assert_eq!(xattrs(file.inode), [access]);
}

#[test]
fn a_mount_says_which_attributes_that_programs_ask_each_file_for_it_may_have() {
    let mut bench = Fixture::new();
    let make = |bench: &mut Fixture, name: &'static str| {
        let kind = InodeKind::File as i32;
        let create = CreateInode { parent: bench.root, name: name.into(), kind, mode: 0o644, ..CreateInode::default() };
        bench.change(Change::Create(create)).inode
    };
    let inodes = [make(&mut bench, "a"), make(&mut bench, "b")];
    let before = Tables::new(&bench.database).counters().unwrap().mounts_epoch;
    let steps = [
        ("user.a", vec![1], 0, 0),
        ("security.ima", vec![1], 0, 0),
        ("security.selinux", vec![1], 1, 1),
        ("security.selinux", vec![2], 1, 1),
        (ACLS[0], acl([6, 4, 4, 4, 4], 1), 1, 1),
        ("security.capability", vec![0; 20], 3, 2),
    ];
    let recorded = |bench: &Fixture| {
        let tables = Tables::new(&bench.database);
        (tables.mounts().unwrap()[0].probed_xattrs, tables.counters().unwrap().mounts_epoch - before)
    };
    for (name, value, probed, tables) in steps {
        for inode in inodes {
            let (name, value) = (Bytes::from_static(name.as_bytes()), value.clone().into());
            let set = SetXattr { inode, name, value, ..SetXattr::default() };
            assert_eq!(bench.change(Change::SetXattr(set)).errno, 0);
        }
        assert_eq!(recorded(&bench), (probed, tables), "{name}");
    }
    for inode in inodes {
        let remove = RemoveXattr { inode, name: "security.selinux".into() };
        assert_eq!(bench.change(Change::RemoveXattr(remove)).errno, 0);
    }
    assert_eq!(recorded(&bench), (3, 2), "who was told so goes on asking");
}

#[test]
fn lists_say_what_cannot_be_and_may_take_the_set_group_id_bit() {
    let mut bench = Fixture::new();
    let kind = InodeKind::File as i32;
    let create = CreateInode { parent: bench.root, name: "f".into(), kind, mode: 0o6755, ..CreateInode::default() };
    let inode = bench.change(Change::Create(create)).inode;
    let set = |name: &str, value: Vec<u8>, clear_set_group_id| {
        let (name, value) = (Bytes::copy_from_slice(name.as_bytes()), value.into());
        Change::SetXattr(SetXattr { inode, name, value, clear_set_group_id, ..SetXattr::default() })
    };
    let refused = |bench: &mut Fixture, change| Errno::from_raw_os_error(bench.change(change).errno);
    assert_eq!(refused(&mut bench, set(ACLS[0], b"nonsense".to_vec(), false)), Errno::INVAL);
    assert_eq!(refused(&mut bench, set(ACLS[1], acl([7; 5], 1), false)), Errno::ACCESS);
    assert_eq!(refused(&mut bench, set("system.other", vec![], false)), Errno::OPNOTSUPP);
    assert_eq!(refused(&mut bench, set("plain", vec![], false)), Errno::OPNOTSUPP);
    let kept = bench.change(set(ACLS[0], acl([7, 6, 5, 4, 0], 1), false));
    assert_eq!(kept.attributes[0].mode, 0o6740);
    let cleared = bench.change(set(ACLS[0], acl([7, 6, 5, 4, 0], 0), true));
    assert_eq!((cleared.attributes[0].mode, cleared.attributes[0].has_xattrs), (0o4750, false), "permissions say all");
}
