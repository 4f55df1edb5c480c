//! What a tree has is what its image has.

use std::collections::BTreeMap;
use std::fs::File;

use cavern_erofs::{Attributes, EntryFault, Error, Extent, Image, Place, Times, Timestamp};
use proptest::prelude::*;
use proptest::sample::Index;

use super::model::{Model, TIME, Thing, What};

const KIB_4: u64 = 4096;

fn any_name() -> impl Strategy<Value = Vec<u8>> {
    let readable = "[a-z!~.-]{1,12}".prop_map(String::into_bytes);
    let wild = prop::collection::vec(1..=255_u8, 1..=255);
    prop_oneof![4 => readable, 1 => wild]
        .prop_map(|name| name.into_iter().map(|byte| if byte == b'/' { b'_' } else { byte }).collect::<Vec<_>>())
        .prop_filter("dots", |name| name != b"." && name != b"..")
}

/// Whole blocks, but for what `cut` takes from the last one.
fn any_extents() -> impl Strategy<Value = Vec<Extent>> {
    let place = prop_oneof![
        1 => Just(Place::Hole),
        2 => (0..32_u64).prop_map(|block| Place::Device { device: 1, offset: block * KIB_4 }),
        4 => (0..1000_u64).prop_map(|block| Place::Device { device: 2, offset: block * KIB_4 }),
    ];
    let small = prop::collection::vec((1..=32_u64, place), 0..6);
    let large = (1_u64 << 19..1 << 23).prop_map(|blocks| vec![(blocks, Place::Device { device: 2, offset: 0 })]);
    (prop_oneof![9 => small.boxed(), 1 => large.boxed()], 0..KIB_4).prop_map(|(pieces, cut)| {
        let mut extents: Vec<_> =
            pieces.into_iter().map(|(blocks, place)| Extent { length: blocks * KIB_4, place }).collect();
        if let Some(last) = extents.last_mut() {
            last.length -= cut;
        }
        extents
    })
}

fn any_what() -> impl Strategy<Value = What> {
    let target = prop_oneof![3 => 1..40_usize, 1 => 1..=4095_usize];
    prop_oneof![
        3 => Just(What::Directory(BTreeMap::new())),
        8 => any_extents().prop_map(What::File),
        2 => target.prop_map(|length| What::Symlink(vec![b't'; length])),
        1 => any::<u32>().prop_map(What::CharacterDevice),
        1 => any::<u32>().prop_map(What::BlockDevice),
        1 => Just(What::Fifo),
        1 => Just(What::Socket),
    ]
}

fn any_thing() -> impl Strategy<Value = Thing> {
    let time = prop_oneof![
        2 => Just(TIME),
        1 => (any::<i64>(), 0..1_000_000_000_u32)
            .prop_map(|(seconds, nanoseconds)| Timestamp { seconds, nanoseconds }),
    ];
    let id = prop_oneof![3 => 0..2000_u32, 1 => any::<u32>()];
    let name = prop_oneof![
        "user[.][a-z]{1,20}",
        "trusted[.][a-z]{1,3}",
        "security[.][a-z]{1,3}",
        Just("system.posix_acl_access".to_owned()),
        Just("system.posix_acl_default".to_owned()),
    ];
    let value = prop_oneof![5 => 0..30_usize, 1 => 0..6000_usize].prop_map(|length| vec![b'v'; length]);
    let xattrs = prop::collection::btree_map(name.prop_map(String::into_bytes), value, 0..3);
    let xattrs = prop_oneof![3 => Just(BTreeMap::new()).boxed(), 1 => xattrs.boxed()];
    (any_what(), 0..=0o7777_u16, id.clone(), id, time, xattrs).prop_map(
        |(what, permissions, uid, gid, mtime, xattrs)| {
            let mut thing = Thing::new(permissions, what);
            thing.attributes = Attributes { uid, gid, mtime, ..thing.attributes };
            thing.xattrs = xattrs;
            thing
        },
    )
}

pub fn any_model(things: usize) -> impl Strategy<Value = Model> {
    let step = (any::<Index>(), any_name(), any_thing(), prop::option::weighted(0.1, any::<Index>()));
    prop::collection::vec(step, 0..things).prop_map(|steps| {
        let mut model = Model::new();
        let (mut directories, mut others) = (vec![0], Vec::new());
        for (parent, name, thing, link) in steps {
            let parent = *parent.get(&directories);
            if model.names(parent).contains_key(&name) {
                continue;
            }
            match link {
                Some(link) if !others.is_empty() => {
                    let linked: usize = *link.get(&others);
                    model.link(parent, &name, linked);
                    model.things[linked].attributes.links += 1;
                }
                _ => {
                    let is_directory = matches!(thing.what, What::Directory(_));
                    let added = model.add(parent, &name, thing);
                    if is_directory { directories.push(added) } else { others.push(added) }
                }
            }
        }
        model
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_tree_comes_back(model in any_model(300)) {
        let bytes = model.bytes();
        model.assert_same(&Image::open(&bytes).unwrap());
        prop_assert!(bytes == model.bytes(), "two images of a tree differ");
        prop_assert!(bytes == model.growing_bytes(), "devices that are known in the end make another image");
    }
}

/// Blocks of names, directories of every length around the end of a block, and a depth.
#[test]
fn directories_of_many_lengths_come_back() {
    let mut model = Model::new();
    let many = model.add(0, b"many", Thing::new(0o755, What::Directory(BTreeMap::new())));
    for number in 0..20_000 {
        model.add(many, format!("{number:05}").as_bytes(), Thing::new(0o644, What::File(Vec::new())));
    }
    for count in 180..260 {
        let name = format!("of {count}");
        let directory = model.add(0, name.as_bytes(), Thing::new(0o755, What::Directory(BTreeMap::new())));
        for number in 0..count {
            model.add(directory, format!("{number:06}").as_bytes(), Thing::new(0o644, What::Fifo));
        }
    }
    let mut below = 0;
    for _ in 0..100 {
        below = model.add(below, b"below", Thing::new(0o755, What::Directory(BTreeMap::new())));
    }
    model.assert_same(&Image::open(model.bytes()).unwrap());
}

#[test]
fn shared_times_make_inodes_short() {
    let mut model = Model::new();
    for number in 0..1000 {
        let mut thing = Thing::new(0o644, What::File(vec![extent(5000)]));
        thing.attributes.mtime.seconds += number;
        model.add(0, format!("{number:06}").as_bytes(), thing);
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    let write = |times| model.write_with(&File::create(&path).unwrap(), directory.path(), times).unwrap().image_bytes;
    assert!(write(Times::Own) > write(Times::Shared) + 30_000);
    let image = Image::open(File::open(&path).unwrap()).unwrap();
    let file = image.lookup(&image.root().unwrap(), b"000999").unwrap().unwrap();
    assert_eq!(file.attributes.mtime, TIME);
}

fn extent(length: u64) -> Extent {
    Extent { length, place: Place::Device { device: 2, offset: 0 } }
}

#[test]
fn what_has_no_place_is_refused_by_name() {
    let refused = |name: &[u8], thing: Thing| {
        let mut model = Model::new();
        model.add(0, name, thing);
        let directory = tempfile::tempdir().unwrap();
        let image = File::create(directory.path().join("image")).unwrap();
        match model.write(&image, directory.path()).unwrap_err() {
            Error::Entry { directory: 0, name: named, fault } => {
                assert_eq!(named, String::from_utf8_lossy(name));
                fault
            }
            other => panic!("{other}"),
        }
    };
    let file = |extents| Thing::new(0o644, What::File(extents));
    for name in [&b""[..], b".", b"..", b"a/b", b"a\0", &[b'n'; 256]] {
        assert_eq!(refused(name, file(Vec::new())), EntryFault::Name);
    }
    assert_eq!(refused(b"target", Thing::new(0o777, What::Symlink(Vec::new()))), EntryFault::Target);
    assert_eq!(refused(b"target", Thing::new(0o777, What::Symlink(vec![b't'; 4096]))), EntryFault::Target);
    assert_eq!(refused(b"mode", Thing::new(0o10_000, What::Fifo)), EntryFault::Permissions);
    let nowhere = Extent { length: 1, place: Place::Device { device: 3, offset: 0 } };
    assert_eq!(refused(b"device", file(vec![nowhere])), EntryFault::Device);
    assert_eq!(refused(b"end", file(vec![extent(100), extent(1)])), EntryFault::Alignment);
    let mut time = file(Vec::new());
    time.attributes.mtime.nanoseconds = 1_000_000_000;
    assert_eq!(refused(b"time", time), EntryFault::Time);
    let mut xattr = file(Vec::new());
    xattr.xattrs.insert(b"lustre.lov".to_vec(), Vec::new());
    assert_eq!(refused(b"xattr", xattr), EntryFault::Xattr);
}
