use std::collections::BTreeMap;
use std::fs::File;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt as _;
use std::process::Command;
use std::sync::mpsc::sync_channel;

use bytes::Bytes;
use cavern_erofs::{Attributes, Extent, Image, Inode, Kind as ImageKind, Place, Timestamp};
use cavern_proto::ROOT_INODE;
use cavern_proto::master::{CreateViewRequest, Kind, Origin, View, WriteType};
use cavern_proto::record::{DentryRecord, ExtentRecord, InodeRecord, ObjectRecord, StoredAttributes, ViewFile};
use cavern_proto::record::{ViewIndex, ViewManifest, ViewPage};
use cavern_proto::view_file::{BLOCK_BYTES, PageIndex, RUN_BYTES_MAX, runs};
use cavern_state::records::{MODE_CHOSEN, directory_record, xattr_size};
use cavern_state::schema::{self, Table, encode_key};
use cavern_state::{Database, Family, Tables};
use proptest::prelude::*;
use proptest::sample::Index;
use prost::Message as _;
use rocksdb::WriteBatch;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::image::{allocate, hash_of, write_view};
use super::tree::{PAGES_AHEAD, ReadEnd, TreeReader, TreeSource};
use super::{MakingProgress, check_view_name};
use crate::error::WorkError;

const MOUNT: u32 = 7;
const MOUNT_ROOT: u64 = 2;
const MIB: u64 = 1 << 20;
const TIME_NS: i64 = 1_700_000_000_000_000_000;

/// The tables of a mount at `p/` of its bucket.
struct Fixture {
    database: Database,
    directory: tempfile::TempDir,
    batch: WriteBatch,
}

impl Fixture {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let database = Database::open(directory.path(), 8 << 20).unwrap();
        let mut fixture = Self { database, directory, batch: WriteBatch::default() };
        fixture.put(schema::Inodes, ROOT_INODE, &directory_record(0, Bytes::new(), 0, TIME_NS));
        let root = InodeRecord { listed_ns: 1, ..directory_record(ROOT_INODE, "m".into(), MOUNT, TIME_NS) };
        fixture.put(schema::Inodes, MOUNT_ROOT, &root);
        fixture
    }

    fn put<T: Table>(&mut self, _: T, key: T::Key<'_>, value: &T::Value) {
        self.batch.put_cf(self.database.family(T::FAMILY), encode_key::<T>(&key), T::encode(value));
    }

    fn write(&mut self) {
        self.database.write(std::mem::take(&mut self.batch)).unwrap();
    }

    /// Gives an inode a name.
    fn name(&mut self, parent: u64, name: &[u8], inode: u64, kind: Kind) {
        self.put(schema::Dentries, (parent, name), &DentryRecord { inode, kind: kind as i32 });
    }

    /// Makes an inode with one name.
    fn make(&mut self, inode: u64, record: &InodeRecord) {
        self.name(record.parent, &record.name.clone(), inode, record.kind());
        self.put(schema::Inodes, inode, record);
    }

    fn blocks(&mut self, inode: u64, blocks: &[(u32, u32)]) {
        for (index, generation) in blocks {
            let record = ExtentRecord { generation: *generation, workers: vec![1], ..ExtentRecord::default() };
            self.put(schema::Extents, (inode, *index), &record);
        }
    }

    /// What is below a directory, in a file.
    fn frozen(&mut self, source: &TreeSource) -> (Result<ReadEnd, WorkError>, Result<(File, View), WorkError>) {
        self.write();
        let (pages, received) = sync_channel(PAGES_AHEAD);
        let (progress, directory) = (MakingProgress::default(), self.directory.path().join("views"));
        let view = View { name: "v".to_owned(), path: "/m".to_owned(), ..View::default() };
        let (uri, write_type) = ("memory://bucket/p".to_owned(), WriteType::FsMode as i32);
        let manifest = ViewManifest { view: Some(view), uri, write_type, ..ViewManifest::default() };
        let tables = Tables::new(&self.database);
        std::thread::scope(|scope| {
            let written = scope.spawn(|| write_view(received, &directory, manifest));
            let reader = TreeReader::new(tables, source, pages, &progress, CancellationToken::new());
            let read = reader.run(oneshot::channel().0);
            (read, written.join().unwrap())
        })
    }

    fn object(&mut self, source: &TreeSource) -> Object {
        let (read, written) = self.frozen(source);
        assert_eq!(read.unwrap(), ReadEnd::All);
        let (file, view) = written.unwrap();
        Object::new(file, view)
    }
}

fn source(top: u64, is_fs_mode: bool) -> TreeSource {
    let looks = CreateViewRequest { uid: 11, gid: 12, file_mode: 0o640, directory_mode: 0o750, ..Default::default() };
    let (mount_id, root_inode, prefix) = (MOUNT, MOUNT_ROOT, "p/".to_owned());
    TreeSource { top, mount_id, root_inode, is_fs_mode, block_size: MIB, prefix, looks }
}

/// A file as it is stored for a view.
struct Object {
    file: File,
    view: View,
    image: Image<File>,
    index: PageIndex,
}

impl Object {
    fn new(file: File, view: View) -> Self {
        let hashed = view.image_bytes + view.pages_bytes + view.index_bytes;
        assert_eq!(hash_of(&file, hashed).unwrap()[..], view.hash[..]);
        assert_eq!(file.metadata().unwrap().len(), view.object_bytes);
        let image = Image::open(file.try_clone().unwrap()).unwrap();
        assert_eq!(image.size(), view.image_bytes);
        assert!(image.devices().iter().map(|device| device.blocks).eq(view.device_blocks.iter().copied()));
        let read = |start: u64, bytes: u64| {
            let mut read = vec![0; bytes as usize];
            file.read_exact_at(&mut read, start).unwrap();
            read
        };
        let index = ViewIndex::decode(&read(view.image_bytes + view.pages_bytes, view.index_bytes)[..]).unwrap();
        let index = PageIndex::new(index, view.pages_bytes).unwrap();
        Self { file, view, image, index }
    }

    fn look_up(&self, path: &[&[u8]]) -> Inode {
        let root = self.image.root().unwrap();
        path.iter().fold(root, |directory, name| self.image.lookup(&directory, name).unwrap().unwrap())
    }

    fn names(&self, directory: &Inode) -> Vec<Vec<u8>> {
        let mut names = Vec::new();
        let mut each = |entry: &cavern_erofs::DirectoryEntry<'_>| {
            names.push(entry.name.to_vec());
            ControlFlow::Continue(())
        };
        self.image.read_directory(directory, 0, &mut each).unwrap();
        names.retain(|name| name != b"." && name != b"..");
        names
    }

    /// The parts of a file: bytes of each, and the run that it is with the key of its directory; `None` for a hole.
    fn parts(&self, file: &Inode) -> Vec<(u64, Option<(String, ViewFile)>)> {
        let extents = self.image.extents(file, 0..u64::MAX).unwrap();
        let mut parts = Vec::new();
        for Extent { mut length, place } in extents {
            let Place::Device { device, mut offset } = place else {
                parts.push((length, None));
                continue;
            };
            // Runs that follow each other in a device are one extent.
            while length > 0 {
                assert_eq!(offset % BLOCK_BYTES, 0);
                let (key, run) = self.run_at(u32::from(device) - 1, u32::try_from(offset / BLOCK_BYTES).unwrap());
                let here = run.size.min(length);
                (length, offset) = (length - here, offset + here);
                parts.push((here, Some((key, ViewFile { gap: 0, ..run }))));
            }
        }
        parts
    }

    fn run_at(&self, device: u32, block: u32) -> (String, ViewFile) {
        let bytes = self.index.find(device, block).unwrap().1;
        let mut page = vec![0; (bytes.end - bytes.start) as usize];
        self.file.read_exact_at(&mut page, self.view.image_bytes + bytes.start).unwrap();
        let page = ViewPage::decode(&page[..]).unwrap();
        let (_, key, run) = runs(&page).find(|(first, ..)| *first == block).unwrap();
        (key.to_owned(), run.clone())
    }
}

#[derive(Clone, Debug)]
struct Thing {
    parent: usize,
    record: InodeRecord,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    blocks: Vec<(u32, u32)>,
}

/// Numbers that are in no order, and each once.
fn inode_of(index: usize) -> u64 {
    if index == 0 { MOUNT_ROOT } else { 3 + index as u64 * 379 % 1009 }
}

fn any_tree(is_fs_mode: bool) -> impl Strategy<Value = Vec<Thing>> {
    let plain = "[a-z.-]{1,6}".prop_map(String::into_bytes);
    let wild = prop::collection::vec(1..=255_u8, 1..20);
    let name = if is_fs_mode { prop_oneof![9 => plain, 2 => wild].boxed() } else { plain.boxed() };
    let without_slash = |byte: u8| if byte == b'/' { b'_' } else { byte };
    let name = name.prop_map(move |name| name.into_iter().map(without_slash).collect::<Vec<u8>>());
    let name = name.prop_filter("dots", |name: &Vec<u8>| name != b"." && name != b"..");
    let kind = prop_oneof![3 => Just(Kind::Directory), 8 => Just(Kind::File), 2 => Just(Kind::Symlink)];
    let size = prop_oneof![1 => Just(0), 4 => 1..20_000_u64, 2 => 1..4 * MIB];
    let attributes = (0..=0o7777_u32, any::<u32>(), any::<u32>(), any::<i64>(), any::<bool>());
    let content = (size, any::<[u8; 16]>(), prop::collection::btree_map(0..4_u32, 0..9_u32, 0..3));
    let xattrs = prop::collection::btree_map(
        "user[.][a-z]{1,8}|trusted[.]t|system[.]x".prop_map(String::into_bytes),
        prop::collection::vec(any::<u8>(), 0..9),
        0..3,
    );
    let step = (any::<Index>(), name, kind, attributes, content, xattrs);
    prop::collection::vec(step, 0..120).prop_map(move |steps| {
        let mut things: Vec<Thing> = Vec::new();
        let mut directories = vec![0];
        for (parent, name, kind, (mode, uid, gid, mtime_ns, is_stored), (size, md5, blocks), xattrs) in steps {
            let parent: usize = *parent.get(&directories);
            if things.iter().any(|thing| thing.parent == parent && thing.record.name == name) {
                continue;
            }
            let kind = if is_fs_mode || kind == Kind::Directory { kind } else { Kind::File };
            let (is_directory, is_file) = (kind == Kind::Directory, kind == Kind::File);
            let last = size.div_ceil(MIB) as u32;
            let stored = StoredAttributes { own: true, mode, uid, gid, mtime_ns: None };
            let record = InodeRecord {
                kind: kind as i32,
                parent: inode_of(parent),
                mount_id: MOUNT,
                name: name.into(),
                size: if is_file { size } else { 0 },
                mtime_ns,
                mode: if is_fs_mode { mode | MODE_CHOSEN } else { 0 },
                uid: if is_fs_mode { uid } else { 0 },
                gid: if is_fs_mode { gid } else { 0 },
                listed_ns: i64::from(is_directory),
                etag_md5: if is_file && !is_fs_mode { Bytes::copy_from_slice(&md5) } else { Bytes::new() },
                target: if kind == Kind::Symlink { "a/target".into() } else { Bytes::new() },
                xattr_bytes: if is_fs_mode {
                    xattrs.iter().map(|(name, value)| xattr_size(name, value)).sum()
                } else {
                    0
                },
                stored: (!is_fs_mode && is_stored).then_some(stored),
                ..InodeRecord::default()
            };
            if is_directory {
                directories.push(things.len() + 1);
            }
            let is_kept = |block: &(u32, u32)| is_fs_mode && is_file && block.0 < last;
            let blocks = blocks.into_iter().filter(is_kept).collect();
            things.push(Thing { parent, record, xattrs, blocks });
        }
        things
    })
}

impl Fixture {
    fn of(things: &[Thing]) -> Self {
        let mut fixture = Self::new();
        for (thing, index) in things.iter().zip(1..) {
            let inode = inode_of(index);
            fixture.make(inode, &thing.record);
            fixture.blocks(inode, &thing.blocks);
            if thing.record.xattr_bytes > 0 {
                for (name, value) in &thing.xattrs {
                    fixture.put(schema::Xattrs, (inode, &name[..]), &Bytes::copy_from_slice(value));
                }
            }
        }
        fixture
    }
}

/// Compares what an object has below a directory with a tree, and says how many names there are.
fn assert_same(object: &Object, things: &[Thing], at: usize, directory: &Inode, key: Option<&str>) -> u64 {
    let below = things.iter().zip(1..).filter(|(thing, _)| thing.parent == at);
    let below: BTreeMap<Vec<u8>, usize> = below.map(|(thing, index)| (thing.record.name.to_vec(), index)).collect();
    assert_eq!(object.names(directory), below.keys().cloned().collect::<Vec<_>>());
    let is_fs_mode = !things.iter().all(|thing| thing.record.mode == 0);
    let mut names = 0;
    for (name, index) in below {
        names += 1;
        let Thing { record, xattrs, blocks, .. } = &things[index - 1];
        let found = object.image.lookup(directory, &name).unwrap().unwrap();
        let (kind, default) = match record.kind() {
            Kind::Directory => (ImageKind::Directory, 0o750),
            Kind::Symlink => (ImageKind::Symlink, 0),
            _ => (ImageKind::File, 0o640),
        };
        assert_eq!(found.kind, kind);
        let (mode, uid, gid) = match &record.stored {
            _ if is_fs_mode => (record.mode & 0o7777, record.uid, record.gid),
            Some(stored) => (stored.mode, stored.uid, stored.gid),
            None => (default, 11, 12),
        };
        let mtime = Timestamp {
            seconds: record.mtime_ns.div_euclid(1_000_000_000),
            nanoseconds: u32::try_from(record.mtime_ns.rem_euclid(1_000_000_000)).unwrap(),
        };
        let links = if kind == ImageKind::Directory { 2 } else { 1 };
        let permissions = u16::try_from(mode).unwrap();
        assert_eq!(found.attributes, Attributes { permissions, uid, gid, links, mtime });
        let shown = xattrs.iter().filter(|(name, _)| is_fs_mode && !name.starts_with(b"system."));
        let shown: BTreeMap<Vec<u8>, Vec<u8>> = shown.map(|(name, value)| (name.clone(), value.clone())).collect();
        assert_eq!(object.image.xattrs(&found).unwrap().into_iter().collect::<BTreeMap<_, _>>(), shown);
        let text = std::str::from_utf8(&name).ok();
        match record.kind() {
            Kind::Directory => {
                let below = key.zip(text).map(|(key, name)| format!("{key}{name}/"));
                names += assert_same(object, things, index, &found, below.as_deref());
            }
            Kind::Symlink => assert_eq!(object.image.target(&found).unwrap(), b"a/target"),
            _ => {
                assert_eq!(found.size, record.size);
                let mut generations = Vec::new();
                for (index, generation) in blocks {
                    generations.resize(*index as usize, 0);
                    generations.push(generation + 1);
                }
                let has_bytes = !is_fs_mode || !generations.is_empty();
                let run = ViewFile {
                    name: name.into(),
                    size: record.size,
                    md5: record.etag_md5.clone(),
                    inode: if is_fs_mode { inode_of(index) } else { 0 },
                    generations,
                    ..ViewFile::default()
                };
                let expected = has_bytes.then(|| (key.unwrap_or_default().to_owned(), run));
                let expected = if record.size == 0 { vec![] } else { vec![(record.size, expected)] };
                assert_eq!(object.parts(&found), expected);
            }
        }
    }
    names
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn what_is_frozen_is_what_image_and_table_have(
        (is_fs_mode, things) in any::<bool>().prop_flat_map(|is_fs_mode| (Just(is_fs_mode), any_tree(is_fs_mode))),
        top in any::<Index>(),
    ) {
        let mut fixture = Fixture::of(&things);
        let is_directory = |index: &usize| *index == 0 || things[index - 1].record.kind() == Kind::Directory;
        let directories: Vec<usize> = (0..=things.len()).filter(is_directory).collect();
        for top in [0, *top.get(&directories)] {
            let source = source(inode_of(top), is_fs_mode);
            let object = fixture.object(&source);
            let (mut at, mut key) = (top, Some(String::new()));
            while at != 0 {
                let Thing { parent, record, .. } = &things[at - 1];
                let name = std::str::from_utf8(&record.name).ok();
                key = key.zip(name).map(|(below, name)| format!("{name}/{below}"));
                at = *parent;
            }
            let key = key.map(|key| format!("p/{key}"));
            let names = assert_same(&object, &things, top, &object.image.root().unwrap(), key.as_deref());
            prop_assert_eq!(object.view.names, names);
            prop_assert_eq!(object.view.inodes, names + 1);
            let again = fixture.object(&source).view;
            prop_assert_eq!((again.hash, again.image_bytes), (object.view.hash, object.view.image_bytes));
        }
    }
}

fn file(parent: u64, name: &'static str, size: u64) -> InodeRecord {
    let (kind, mode) = (Kind::File as i32, 0o644 | MODE_CHOSEN);
    InodeRecord { kind, mode, parent, name: name.into(), size, mount_id: MOUNT, version: 3, ..Default::default() }
}

#[test]
fn blocks_are_found_in_the_part_of_a_file_that_they_begin_in() {
    let mut fixture = Fixture::new();
    // Parts end within blocks, since three MiB are no part of eight TiB.
    let block_size = 3 * MIB;
    let size = 3 * RUN_BYTES_MAX + 5 * MIB;
    fixture.make(10, &file(MOUNT_ROOT, "large", size));
    let across = u32::try_from(RUN_BYTES_MAX / block_size).unwrap();
    let last = u32::try_from(size / block_size).unwrap();
    // One is behind the end.
    fixture.blocks(10, &[(0, 0), (2, 5), (across, 6), (last, 8), (last + 1, 9)]);
    let object = fixture.object(&TreeSource { block_size, ..source(MOUNT_ROOT, true) });
    let parts = object.parts(&object.look_up(&[b"large"]));
    let lengths: Vec<u64> = parts.iter().map(|(length, _)| *length).collect();
    assert_eq!(lengths, [RUN_BYTES_MAX, RUN_BYTES_MAX, RUN_BYTES_MAX, 5 * MIB]);
    let run = |part: usize| parts[part].1.as_ref().map(|(_, run)| run.clone());
    let first = run(0).unwrap();
    assert_eq!((first.offset, first.file_size, first.whole_size()), (0, Some(size), size));
    assert_eq!(first.generations.len(), across as usize + 1);
    assert_eq!([0, 1, 2, across].map(|index| first.generations[index as usize]), [1, 0, 6, 7]);
    // The block that both have, and nothing behind it.
    assert_eq!(run(1).unwrap().generations, [7]);
    assert_eq!(run(2), None, "a part without any block is a hole");
    let end = run(3).unwrap();
    let first_of_end = 3 * RUN_BYTES_MAX / block_size;
    assert_eq!((end.offset, end.size), (3 * RUN_BYTES_MAX, 5 * MIB));
    assert_eq!(end.generations.len() as u64, u64::from(last) - first_of_end + 1);
    assert_eq!(end.generations.last(), Some(&9));
}

#[test]
fn what_no_block_has_is_in_the_object_that_is_noted() {
    let mut fixture = Fixture::new();
    let origin = |key: &str, length, valid| {
        Some(Origin { key: key.to_owned(), etag: "e-1".to_owned(), length, valid, version: 1 })
    };
    fixture.make(10, &InodeRecord { origin: origin("p/cut", 9000, 7000), ..file(MOUNT_ROOT, "cut", 8000) });
    fixture.make(11, &InodeRecord { origin: origin("p/was", 8000, 8000), ..file(MOUNT_ROOT, "renamed", 8000) });
    fixture.make(12, &file(MOUNT_ROOT, "written", 8000));
    fixture.blocks(12, &[(0, 4)]);
    let whole = |version| ObjectRecord { etag: "0123456789abcdef".repeat(2), size: 8000, version, metadata: 0 };
    fixture.put(schema::Objects, (12, "p/written"), &whole(3));
    fixture.make(13, &file(MOUNT_ROOT, "older", 8000));
    fixture.blocks(13, &[(0, 4)]);
    fixture.put(schema::Objects, (13, "p/older"), &whole(2));
    fixture.make(14, &file(MOUNT_ROOT, "zeros", 8000));
    let object = fixture.object(&source(MOUNT_ROOT, true));
    let run = |name: &[u8]| object.parts(&object.look_up(&[name])).remove(0).1.map(|(_, run)| run);
    let cut = run(b"cut").unwrap();
    assert_eq!((cut.object_key("p/"), cut.object_etag()), (Some("p/cut".to_owned()), "e-1".to_owned()));
    assert_eq!((&cut.key[..], cut.object_size, cut.valid, cut.is_whole), ("", Some(9000), Some(7000), false));
    let renamed = run(b"renamed").unwrap();
    assert_eq!((&renamed.key[..], renamed.object_size, renamed.valid), ("p/was", None, None));
    let written = run(b"written").unwrap();
    assert_eq!((written.is_whole, written.object_etag(), written.generations), (true, whole(3).etag, vec![5]));
    let older = run(b"older").unwrap();
    assert_eq!((older.is_whole, older.object_etag(), older.generations), (false, String::new(), vec![5]));
    assert_eq!(run(b"zeros"), None);
}

#[test]
fn names_of_one_inode_are_one_and_count_as_far_as_they_are_in_the_view() {
    let mut fixture = Fixture::new();
    let directory = |name: &'static str| InodeRecord { listed_ns: 1, ..directory_record(2, name.into(), MOUNT, 1) };
    fixture.make(20, &directory("d"));
    fixture.make(21, &directory("e"));
    fixture.put(schema::Inodes, 30, &InodeRecord { nlink: 3, ..file(20, "a", 5000) });
    fixture.blocks(30, &[(0, 0)]);
    for (parent, name) in [(20, &b"a"[..]), (20, &b"b"[..]), (21, &b"c"[..])] {
        fixture.name(parent, name, 30, Kind::File);
        fixture.put(schema::Links, (30, (parent, name)), &());
    }
    fixture.make(31, &file(20, "c", 6000));
    fixture.blocks(31, &[(0, 1)]);
    let in_d: &[&[u8]] = &[b"d"];
    for (top, path, links, names) in [(MOUNT_ROOT, in_d, 3, 6), (20, &in_d[..0], 2, 3), (21, &in_d[..0], 1, 1)] {
        let object = fixture.object(&source(top, true));
        let below = |name: &'static [u8]| object.look_up(&[path, &[name][..]].concat());
        let one = below(if top == 21 { b"c" } else { b"a" });
        assert_eq!((one.attributes.links, one.size, object.view.names), (links, 5000, names));
        if top == MOUNT_ROOT {
            assert_eq!(object.look_up(&[b"e", b"c"]), one);
        }
        if top != 21 {
            assert_eq!(below(b"b"), one);
            assert_eq!((below(b"c").size, object.view.bytes), (6000, 11_000), "it is there once");
        }
    }
}

#[test]
fn what_is_not_known_is_not_frozen() {
    let mut fixture = Fixture::new();
    fixture.make(20, &InodeRecord { listed_ns: 1, ..directory_record(2, "d".into(), MOUNT, 1) });
    fixture.make(21, &directory_record(20, "unlisted".into(), MOUNT, 1));
    assert_eq!(fixture.frozen(&source(MOUNT_ROOT, false)).0.unwrap(), ReadEnd::Unlisted);
    // The namespace is the truth, but for what is still to be listed.
    assert_eq!(fixture.frozen(&source(MOUNT_ROOT, true)).0.unwrap(), ReadEnd::All);
    fixture.put(schema::Unlisted, (MOUNT, &b"d/unlisted/"[..]), &21);
    for (top, end) in [(MOUNT_ROOT, ReadEnd::Unlisted), (20, ReadEnd::Unlisted), (21, ReadEnd::Unlisted)] {
        assert_eq!(fixture.frozen(&source(top, true)).0.unwrap(), end);
    }
    let (read, written) = fixture.frozen(&source(99, false));
    assert!(read.unwrap_err().is_not_found() && written.is_err());
}

#[test]
fn a_name_that_no_image_can_have_is_said() {
    let mut fixture = Fixture::new();
    fixture.make(20, &InodeRecord { listed_ns: 1, ..directory_record(2, "d".into(), MOUNT, 1) });
    fixture.make(21, &InodeRecord { kind: Kind::Symlink as i32, ..file(20, "nowhere", 0) });
    let (read, written) = fixture.frozen(&source(MOUNT_ROOT, true));
    assert!(matches!(read.unwrap(), ReadEnd::All | ReadEnd::GivenUp));
    let error = written.unwrap_err();
    assert!(matches!(error, WorkError::Refused(_)), "{error}");
    assert!(error.to_string().contains("\"p/d/nowhere\" cannot be in a view: a target"), "{error}");
}

#[test]
fn runs_fill_devices_one_after_the_other() {
    let mut devices = Vec::new();
    assert_eq!(allocate(&mut devices, 3).unwrap(), (0, 0));
    assert_eq!(allocate(&mut devices, u32::MAX - 3).unwrap(), (0, 3));
    assert_eq!(allocate(&mut devices, 1).unwrap(), (1, 0));
    assert_eq!(allocate(&mut devices, 1 << 31).unwrap(), (1, 1));
    assert_eq!(allocate(&mut devices, 1 << 31).unwrap(), (2, 0));
    assert_eq!(devices, [u32::MAX, (1 << 31) + 1, 1 << 31]);
    devices = vec![u32::MAX; 100];
    assert!(matches!(allocate(&mut devices, 1), Err(WorkError::Refused(_))));
}

#[test]
fn names_of_views_are_plain() {
    for name in ["a", "epoch-1", "2026.12_b", "a..", &"x".repeat(64)] {
        check_view_name(name).unwrap();
    }
    for name in ["", ".", "..", ".hidden", "a/b", "a b", "ä", "a@1", "a\0", &"x".repeat(65)] {
        assert!(matches!(check_view_name(name), Err(WorkError::Invalid(_))), "{name:?}");
    }
}

/// Of `/proc/self/status`, in bytes.
fn status(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

const OWN_PROCESS: &str = "CAVERN_VIEW_MEMORY";

/// In a process of its own, whose memory nobody else has grown.
#[test]
fn a_view_of_many_names_takes_little_memory() {
    if std::env::var_os(OWN_PROCESS).is_some() {
        return freeze_many();
    }
    let name = "views::tests::a_view_of_many_names_takes_little_memory";
    let mut test = Command::new(std::env::current_exe().unwrap());
    let ended = test.args(["--exact", name, "--nocapture"]).env(OWN_PROCESS, "1").status().unwrap();
    assert!(ended.success(), "{ended}");
}

fn freeze_many() {
    const DIRECTORIES: u64 = 100;
    const FILES: u64 = 3000;
    let mut fixture = Fixture::new();
    for directory in 0..DIRECTORIES {
        let name = format!("directory-{directory:05}");
        let inode = 10 + directory * (FILES + 1);
        fixture.make(inode, &InodeRecord { listed_ns: 1, ..directory_record(2, name.into(), MOUNT, 1) });
        for number in 0..FILES {
            let name = Bytes::from(format!("a name of thirty bytes {number:07}"));
            let etag_md5 = Bytes::copy_from_slice(&u128::from(number).to_be_bytes());
            let record = InodeRecord { name, etag_md5, mtime_ns: TIME_NS, ..file(inode, "", 50_000) };
            fixture.make(inode + 1 + number, &record);
        }
        fixture.write();
    }
    for family in [Family::Inode, Family::Dentry] {
        fixture.database.raw().flush_cf(fixture.database.family(family)).unwrap();
    }
    let source = source(MOUNT_ROOT, false);
    // 5 sets the highest amount back to the present one, where the kernel can; else the test asks for more.
    let _ = std::fs::write("/proc/self/clear_refs", "5");
    let before = status("VmRSS:");
    let object = fixture.object(&source);
    let taken = status("VmHWM:").saturating_sub(before);
    assert!(taken < 40 << 20, "{taken} bytes of memory");
    let View { names, object_bytes, .. } = object.view;
    assert_eq!(names, DIRECTORIES * (FILES + 1));
    assert!(object_bytes / names < 200, "{object_bytes} bytes");
    let name = format!("a name of thirty bytes {:07}", FILES - 1);
    let last = object.parts(&object.look_up(&[b"directory-00099", name.as_bytes()])).remove(0);
    let (key, run) = last.1.unwrap();
    assert_eq!((last.0, &key[..], run.object_key(&key)), (50_000, "p/directory-00099/", Some(format!("{key}{name}"))));
    assert_eq!(run.object_etag(), format!("{:032x}", FILES - 1));
}
