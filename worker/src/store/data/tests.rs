//! Data blocks against a model, with restarts, crashes, descriptors, cached neighbours and a disk that is full.

use std::collections::HashMap;
use std::fs;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use cavern_proto::ContentId;
use cavern_proto::chunk::CHUNK_BYTES;
use proptest::prelude::*;

use super::*;
use crate::store::Stores;
use crate::store::directory::DataName;
use crate::store::tests::{
    MIB, block_files, cases, copy_as_crashed, fill, find, id, open_store, used, with_keys, wrapping,
};

/// Two whole chunks and a short one.
const LENGTH: u32 = 2 * CHUNK_BYTES + 5008;

fn target(value: u64) -> DataTarget {
    let content = ContentId::of_inode("cluster", 7, value, 1);
    DataTarget { id: BlockId { content, index: value as u32 % 3 }, length: LENGTH, mount_id: 7 }
}

fn bytes_of(store: &Stores, target: &DataTarget) -> Vec<u8> {
    let block = store.data.find(target, Touch::Open).unwrap();
    let mut bytes = vec![0; target.length as usize];
    block.read(0, &mut bytes).unwrap();
    bytes
}

fn is_here(store: &Stores, target: &DataTarget) -> bool {
    match store.data.find(target, Touch::None) {
        Ok(_) => true,
        Err(StoreError::NoSuchBlock) => false,
        Err(error) => panic!("{error}"),
    }
}

fn data_files(dir: &Path) -> Vec<PathBuf> {
    let folders = fs::read_dir(dir.join("data")).unwrap().map(|folder| folder.unwrap().path());
    folders.flat_map(|folder| fs::read_dir(folder).unwrap().map(|file| file.unwrap().path())).collect()
}

fn noise(seed: u64, length: usize) -> Vec<u8> {
    (0..length as u64).map(|at| (seed.wrapping_add(at).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 41) as u8 | 1).collect()
}

#[derive(Clone, Debug)]
enum Step {
    Reserve {
        block: u64,
        range: Range<u32>,
    },
    Write {
        block: u64,
        range: Range<u32>,
        zero: Option<Range<u32>>,
    },
    /// Through a descriptor, what was reserved for it.
    Through {
        block: u64,
        range: Range<u32>,
    },
    Sync {
        block: u64,
    },
    Free {
        block: u64,
    },
    /// A cached block comes, and others may have to go.
    Fill {
        block: u64,
    },
    /// What must not touch data.
    Threats {
        block: u64,
    },
    /// With `crash`, the directory as it is at that moment is opened instead, nothing having been flushed.
    Restart {
        crash: bool,
    },
}

fn range() -> impl Strategy<Value = Range<u32>> {
    (0..=LENGTH, 0..=LENGTH).prop_map(|(one, other)| one.min(other)..one.max(other))
}

fn step() -> impl Strategy<Value = Step> {
    let block = 0u64..10;
    prop_oneof![
        2 => (block.clone(), range()).prop_map(|(block, range)| Step::Reserve { block, range }),
        6 => (block.clone(), range(), prop::option::of(range()))
            .prop_map(|(block, range, zero)| Step::Write { block, range, zero }),
        3 => (block.clone(), range()).prop_map(|(block, range)| Step::Through { block, range }),
        1 => block.clone().prop_map(|block| Step::Sync { block }),
        2 => block.clone().prop_map(|block| Step::Free { block }),
        3 => (0u64..20).prop_map(|block| Step::Fill { block }),
        1 => block.prop_map(|block| Step::Threats { block }),
        1 => any::<bool>().prop_map(|crash| Step::Restart { crash }),
    ]
}

/// Whether a store says that there is room; anything else but "no space" is a failure.
fn has_room<T>(result: Result<T, StoreError>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(StoreError::NoSpace) => None,
        Err(error) => panic!("{error}"),
    }
}

fn run_steps(steps: Vec<Step>) {
    let home = tempfile::tempdir().unwrap();
    // Seven data blocks fit.
    let capacity = 2 * MIB;
    let (mut generation, mut seed) = (0, 0);
    let mut dir = home.path().join("0");
    let mut store = open_store(&dir, capacity);
    let mut model: HashMap<u64, Vec<u8>> = HashMap::new();
    for step in steps {
        seed += 1000;
        match step {
            Step::Reserve { block, range } => {
                if has_room(store.data.reserve(&target(block), std::slice::from_ref(&range))).is_some() {
                    model.entry(block).or_insert_with(|| vec![0; LENGTH as usize]);
                }
            }
            Step::Write { block, range, zero } => {
                let bytes = noise(seed, range.len());
                let zeros = zero.as_slice();
                if has_room(store.data.write(&target(block), range.start, &bytes, zeros)).is_some() {
                    let known = model.entry(block).or_insert_with(|| vec![0; LENGTH as usize]);
                    for zero in zeros {
                        known[zero.start as usize..zero.end as usize].fill(0);
                    }
                    known[range.start as usize..range.end as usize].copy_from_slice(&bytes);
                }
            }
            Step::Through { block, range } => {
                let reserved = has_room(store.data.reserve(&target(block), std::slice::from_ref(&range)));
                if let Some(reserved) = reserved {
                    let bytes = noise(seed, range.len());
                    if reserved.sealed().is_some() {
                        store.data.write(&target(block), range.start, &bytes, &[]).unwrap();
                    } else {
                        let file = reserved.writer().unwrap();
                        file.write_all_at(&bytes, u64::from(range.start)).unwrap();
                    }
                    let known = model.entry(block).or_insert_with(|| vec![0; LENGTH as usize]);
                    known[range.start as usize..range.end as usize].copy_from_slice(&bytes);
                }
            }
            Step::Sync { block } => {
                let synced = store.data.sync(&[target(block)]);
                match model.contains_key(&block) {
                    true => synced.unwrap(),
                    false => assert!(matches!(synced, Err(StoreError::NoSuchBlock))),
                }
            }
            Step::Free { block } => {
                assert_eq!(store.data.free(&target(block).id).is_some(), model.remove(&block).is_some());
            }
            Step::Fill { block } => match fill(&store, &id(block), 2 * CHUNK_BYTES, 0..2) {
                Ok(()) | Err(StoreError::Full | StoreError::Dropped) => {}
                Err(error) => panic!("{error}"),
            },
            Step::Threats { block } => {
                let id = target(block).id;
                assert_eq!(store.cache.remove(&id), None, "only freed by name");
                store.cache.scrub_block(&id);
                assert!(find(&store, &id).is_none(), "nothing that is done to cached blocks is done to it");
                if let Ok(block) = store.data.find(&target(block), Touch::Open) {
                    assert!(matches!(store.cache.get(&id, Touch::Open), Lookup::Other));
                    assert!(matches!(store.cache.create(&id, LENGTH, 7, Touch::None), Err(StoreError::Mismatch(_))));
                    assert!(Block::Data(block).has(0..3));
                }
                store.cache.expire(|_| Some(0));
                while store.cache.relieve() {}
            }
            Step::Restart { crash } => {
                if crash {
                    generation += 1;
                    let next = home.path().join(generation.to_string());
                    copy_as_crashed(&store, &dir, &next);
                    dir = next;
                }
                drop(store);
                store = open_store(&dir, capacity);
            }
        }
        for block in 0..10 {
            match model.get(&block) {
                Some(known) => assert!(bytes_of(&store, &target(block)) == *known, "block {block} has wrong bytes"),
                None => assert!(!is_here(&store, &target(block))),
            }
        }
        let usage = &store.table.usage()[0];
        assert!(used(&store) <= capacity.max(usage.data_bytes), "{usage:?}");
        assert_eq!(data_files(&dir).len(), model.len(), "one file per block");
        assert!(usage.blocks as usize >= model.len());
    }
}

proptest! {
    #![proptest_config(cases(12))]
    #[test]
    fn behaves_like_its_model(steps in prop::collection::vec(step(), 1..50)) {
        run_steps(steps);
    }

    #[test]
    fn behaves_like_its_model_where_it_is_encrypted(steps in prop::collection::vec(step(), 1..50)) {
        with_keys(wrapping(&[1; 32], None), || run_steps(steps));
    }
}

#[test]
fn cached_blocks_go_first_then_there_is_no_space_and_nothing_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_store(dir.path(), MIB);
    (0..4).for_each(|value| fill(&store, &id(value), 2 * CHUNK_BYTES, 0..2).unwrap());
    let whole = DataTarget { length: CHUNK_BYTES, ..target(0) };
    let block = |value| DataTarget { id: target(value).id, ..whole };
    for value in 0..8 {
        let bytes = noise(value, CHUNK_BYTES as usize);
        store.data.write(&block(value), 0, &bytes, &[]).unwrap();
    }
    assert!(block_files(dir.path()).is_empty(), "cached blocks made room");
    let usage = store.table.usage();
    assert_eq!((usage[0].used_bytes, usage[0].data_bytes), (MIB, MIB));
    // Neither new blocks nor cached ones, and nothing is left behind by the attempt.
    assert!(matches!(store.data.write(&block(8), 0, &[1], &[]), Err(StoreError::NoSpace)));
    assert!(matches!(store.data.reserve(&block(8), std::slice::from_ref(&(0..1))), Err(StoreError::NoSpace)));
    assert!(fill(&store, &id(100), CHUNK_BYTES, 0..1).is_err());
    assert_eq!(data_files(dir.path()).len(), 8);
    // What is there may be written again, and is there after a start.
    store.data.write(&block(3), 10, b"again", &[]).unwrap();
    drop(store);
    let store = open_store(dir.path(), MIB);
    for value in 0..8 {
        let mut bytes = noise(value, CHUNK_BYTES as usize);
        if value == 3 {
            bytes[10..15].copy_from_slice(b"again");
        }
        assert!(bytes_of(&store, &block(value)) == bytes);
    }
    // Room that is given back can be used again: by freeing, or by zeroing.
    assert_eq!(store.data.free(&block(5).id), Some(u64::from(CHUNK_BYTES)));
    store.data.write(&block(8), 0, &[1], &[]).unwrap();
    assert!(matches!(store.data.write(&block(9), 0, &[1], &[]), Err(StoreError::NoSpace)));
    store.data.write(&block(6), 0, &[], std::slice::from_ref(&(0..CHUNK_BYTES))).unwrap();
    store.data.write(&block(9), 0, &[1], &[]).unwrap();
    assert!(bytes_of(&store, &block(6)).iter().all(|byte| *byte == 0));
}

#[test]
fn a_growing_block_that_finds_no_room_stays_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_store(dir.path(), 2 * u64::from(CHUNK_BYTES));
    let big = target(1);
    store.data.write(&big, 0, b"one", &[]).unwrap();
    store.data.write(&big, CHUNK_BYTES, b"two", &[]).unwrap();
    let across = noise(1, 1000);
    let failed = store.data.write(&big, 2 * CHUNK_BYTES - 500, &across, std::slice::from_ref(&(0..10)));
    assert!(matches!(failed, Err(StoreError::NoSpace)));
    let bytes = bytes_of(&store, &big);
    assert_eq!((&bytes[..3], &bytes[CHUNK_BYTES as usize..][..3]), (&b"one"[..], &b"two"[..]));
    assert_eq!(store.table.usage()[0].data_bytes, 2 * u64::from(CHUNK_BYTES));
}

#[test]
fn what_is_reserved_stays_reserved_while_the_block_is_closed() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_store(dir.path(), 64 * MIB);
    store.data.reserve(&target(0), std::slice::from_ref(&(0..LENGTH))).unwrap();
    let charged = store.table.usage()[0].data_bytes;
    // Four blocks are kept open.
    (1..20).for_each(|value| drop(store.data.reserve(&target(value), &[]).unwrap()));
    assert!(matches!(store.data.get(&target(0).id, Touch::None), Lookup::Closed));
    store.data.reserve(&target(0), std::slice::from_ref(&(0..LENGTH))).unwrap();
    assert_eq!(store.table.usage()[0].data_bytes, charged);
}

#[test]
fn room_that_was_given_and_not_used_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_store(dir.path(), 64 * MIB);
    let all = std::slice::from_ref(&(0..LENGTH));
    let (unit, rest) = (u64::from(UNIT_BYTES), u64::from(LENGTH.next_multiple_of(UNIT_BYTES) - CHUNK_BYTES));
    let data_bytes = || store.table.usage()[0].data_bytes;
    let block = store.data.reserve(&target(1), all).unwrap();
    let given = Instant::now();
    block.writer().unwrap().write_all_at(b"a few", 0).unwrap();
    assert_eq!(data_bytes(), u64::from(CHUNK_BYTES) + rest);
    store.data.reserve(&target(1), &[]).unwrap();
    store.data.settle_until(Some(given));
    assert_eq!(data_bytes(), u64::from(CHUNK_BYTES) + rest, "more was asked for since");
    store.data.settle_until(Some(Instant::now()));
    assert_eq!(data_bytes(), unit);
    store.data.reserve(&target(1), all).unwrap();
    assert_eq!(data_bytes(), unit + rest, "all but the chunk that is there");

    store.data.allocate(&block, all).unwrap();
    store.data.settle_until(Some(Instant::now()));
    assert!(data_bytes() >= u64::from(LENGTH), "what was set aside stays: {}", data_bytes());
    store.data.write(&target(1), 0, &[], all).unwrap();
    store.data.settle_until(Some(Instant::now()));
    // The disk's block that the end of the file cuts stays, and one in which the file system may keep where the file's
    // blocks are.
    assert!(data_bytes() <= 2 * unit, "nothing is set aside any more: {}", data_bytes());
    store.data.free(&target(1).id).unwrap();
    store.data.settle_until(Some(Instant::now()));
}

#[test]
fn a_damaged_index_takes_no_data_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_store(dir.path(), 4 * MIB);
    let bytes = noise(5, LENGTH as usize);
    store.data.write(&target(1), 0, &bytes, &[]).unwrap();
    (0..3).for_each(|value| fill(&store, &id(value), 200_000, 0..2).unwrap());
    store.table.flush();
    drop(store);
    for file in fs::read_dir(dir.path().join("index")).unwrap().map(|file| file.unwrap().path()) {
        if file.file_name().unwrap().to_str().unwrap().starts_with("MANIFEST") {
            fs::File::options().write(true).open(&file).unwrap().set_len(20).unwrap();
        }
    }
    let store = open_store(dir.path(), 4 * MIB);
    assert!(dir.path().join("index.damaged-1").is_dir());
    assert!(bytes_of(&store, &target(1)) == bytes);
    assert_eq!((block_files(dir.path()).len(), store.table.usage()[0].blocks), (0, 1));
}

#[test]
fn a_start_tells_blocks_from_what_is_left_of_them() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_store(dir.path(), 4 * MIB);
    store.data.write(&target(1), 0, b"one", &[]).unwrap();
    let newer = store.data.find(&target(1), Touch::None).unwrap();
    let (path, incarnation) = (newer.path().to_owned(), newer.incarnation());
    drop(newer);
    drop(store);
    let other = |incarnation| {
        let said = DataName { id: target(1).id, incarnation, mount_id: 7, length: LENGTH };
        let path = crate::store::directory::data_path(dir.path(), &said);
        assert!(!path.exists());
        path
    };
    // A deletion that a power failure undid, and files that are not ours.
    let (older, stray) = (other(incarnation - 1), path.with_file_name("notes.txt"));
    let unsaid = path.with_extension("0");
    fs::copy(&path, &older).unwrap();
    fs::write(&older, vec![9; LENGTH as usize]).unwrap();
    fs::write(&unsaid, b"of no length").unwrap();
    fs::write(&stray, b"mine").unwrap();
    let store = open_store(dir.path(), 4 * MIB);
    assert!(bytes_of(&store, &target(1)).starts_with(b"one"));
    assert!(older.exists() && unsaid.exists() && stray.exists());
    assert_eq!(store.table.usage()[0].data_bytes, u64::from(UNIT_BYTES), "the sum is that of the files");
    let new = store.data.write(&target(2), 0, b"two", &[]).unwrap();
    assert!(new.incarnation() > incarnation);
}

/// Where the file of a block ends, in the store and on the disk.
fn end_of(store: &Stores, target: &DataTarget) -> u64 {
    let block = store.data.find(target, Touch::None).unwrap();
    let on_disk = fs::metadata(block.path()).unwrap().len();
    assert_eq!(u64::from(block.end().unwrap()), on_disk);
    on_disk
}

#[test]
fn the_file_of_a_block_ends_where_it_was_written_last_and_a_start_knows_the_block_by_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_store(dir.path(), 4 * MIB);
    let reserved = store.data.reserve(&target(1), std::slice::from_ref(&(0..LENGTH))).unwrap();
    assert_eq!(end_of(&store, &target(1)), 0, "nothing was written");
    reserved.writer().unwrap().write_all_at(&[1; 5000], 0).unwrap();
    assert_eq!(end_of(&store, &target(1)), 5000);
    store.data.write(&target(1), 7000, &[2; 1000], &[]).unwrap();
    assert_eq!(end_of(&store, &target(1)), 8000);
    // Zeros lengthen it, and take no room.
    let before = reserved.allocated_bytes().unwrap();
    store.data.write(&target(1), 0, &[], std::slice::from_ref(&(8000..2 * CHUNK_BYTES))).unwrap();
    assert_eq!(end_of(&store, &target(1)), u64::from(2 * CHUNK_BYTES));
    assert!(reserved.allocated_bytes().unwrap() <= before + 4096);
    let mut expected = vec![0; LENGTH as usize];
    expected[..5000].fill(1);
    expected[7000..8000].fill(2);
    assert!(bytes_of(&store, &target(1)) == expected, "what lies behind is zeros");
    store.data.reserve(&target(2), std::slice::from_ref(&(0..10))).unwrap();
    drop((reserved, store));

    let store = open_store(dir.path(), 4 * MIB);
    assert_eq!((end_of(&store, &target(1)), end_of(&store, &target(2))), (u64::from(2 * CHUNK_BYTES), 0));
    assert!(bytes_of(&store, &target(1)) == expected && bytes_of(&store, &target(2)).iter().all(|byte| *byte == 0));
    let longer = DataTarget { length: LENGTH + 1, ..target(2) };
    assert!(matches!(store.data.find(&longer, Touch::None), Err(StoreError::Mismatch(_))), "its name says how long");
}

#[test]
fn a_cut_drops_what_is_behind_it_unless_somebody_has_written_there_since() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_store(dir.path(), 4 * MIB);
    let bytes = noise(3, LENGTH as usize);
    store.data.write(&target(1), 0, &bytes, &[]).unwrap();
    let full = used(&store);
    store.data.cut(&target(1), &(1000..LENGTH)).unwrap();
    assert_eq!(end_of(&store, &target(1)), 1000);
    assert!(used(&store) < full, "the room of what was cut off is there again");
    // Once more: it has been done already.
    store.data.cut(&target(1), &(1000..LENGTH)).unwrap();
    assert_eq!(end_of(&store, &target(1)), 1000);
    // What was cut off does not come back.
    store.data.write(&target(1), 90_000, b"behind", &[]).unwrap();
    let mut expected = vec![0; LENGTH as usize];
    expected[..1000].copy_from_slice(&bytes[..1000]);
    expected[90_000..90_006].copy_from_slice(b"behind");
    assert!(bytes_of(&store, &target(1)) == expected);

    // A cut that comes late leaves what is behind its range.
    store.data.cut(&target(1), &(500..2000)).unwrap();
    assert_eq!(end_of(&store, &target(1)), 90_006);
    expected[500..1000].fill(0);
    assert!(bytes_of(&store, &target(1)) == expected);
    assert!(matches!(store.data.cut(&target(2), &(0..10)), Err(StoreError::NoSuchBlock)), "it makes no block");

    // One that was not made before the worker died shows in a file that is longer, which is no damage.
    drop(store);
    let store = open_store(dir.path(), 4 * MIB);
    assert!(end_of(&store, &target(1)) == 90_006 && bytes_of(&store, &target(1)) == expected);
    store.data.cut(&target(1), &(500..100_000)).unwrap();
    assert_eq!(end_of(&store, &target(1)), 500);
}

#[test]
fn an_encrypted_block_has_a_file_of_its_whole_length_and_is_cut_by_zeros() {
    with_keys(wrapping(&[1; 32], None), || {
        let dir = tempfile::tempdir().unwrap();
        let store = open_store(dir.path(), 4 * MIB);
        let mut expected = noise(9, LENGTH as usize);
        store.data.write(&target(1), 0, &expected, &[]).unwrap();
        store.data.cut(&target(1), &(1001..LENGTH)).unwrap();
        expected[1001..].fill(0);
        assert_eq!(end_of(&store, &target(1)), u64::from(LENGTH));
        assert!(bytes_of(&store, &target(1)) == expected);
        // One that had not got its length when the worker died.
        let said = DataName { id: target(2).id, incarnation: 1, mount_id: 7, length: LENGTH };
        let unfinished = crate::store::directory::data_path(dir.path(), &said);
        fs::write(&unfinished, b"").unwrap();
        drop(store);
        let store = open_store(dir.path(), 4 * MIB);
        assert!(!unfinished.exists() && bytes_of(&store, &target(1)) == expected);
    });
}

#[test]
fn a_draft_is_no_block_before_it_is_whole_nor_after_a_crash() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_store(dir.path(), 4 * MIB);
    let draft = |store: &Stores| {
        let draft = store.data.begin_draft(&target(1), 0).unwrap().unwrap();
        store.data.write_draft(&draft, CHUNK_BYTES, b"copied").unwrap();
        assert!(!is_here(store, &target(1)));
        draft
    };
    // A crash drops nothing.
    std::mem::forget(draft(&store));
    drop(store);
    assert_eq!(data_files(dir.path()).len(), 1);
    let store = open_store(dir.path(), 4 * MIB);
    assert!(!is_here(&store, &target(1)) && data_files(dir.path()).is_empty());
    let whole = draft(&store);
    assert!(matches!(store.data.publish_draft_if(&whole, || false), Ok(false)), "it is not wanted");
    assert!(!is_here(&store, &target(1)));
    store.data.sync_draft(&whole).unwrap();
    assert!(matches!(store.data.publish_draft_if(&whole, || true), Ok(true)));
    assert!(matches!(store.data.publish_draft_if(&whole, || true), Ok(false)), "it has come to be");
    drop(whole);
    let mut expected = vec![0; LENGTH as usize];
    expected[CHUNK_BYTES as usize..][..6].copy_from_slice(b"copied");
    assert!(bytes_of(&store, &target(1)) == expected);
    assert_eq!(used(&store), u64::from(CHUNK_BYTES), "the rest is a hole");
    let full = DataTarget { length: 5 * MIB as u32, ..target(2) };
    let draft = store.data.begin_draft(&full, 0).unwrap().unwrap();
    let written = store.data.write_draft(&draft, 0, &vec![1u8; 4 * MIB as usize]);
    assert!(matches!(written, Err(StoreError::NoSpace)));
}

#[test]
fn a_freed_block_goes_on_behind_its_descriptors() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_store(dir.path(), 4 * MIB);
    let block = store.data.reserve(&target(1), std::slice::from_ref(&(0..10))).unwrap();
    let file = block.writer().unwrap();
    file.write_all_at(b"before", 0).unwrap();
    assert!(store.data.free(&target(1).id).is_some());
    assert!(store.data.free(&target(1).id).is_none());
    file.write_all_at(b"after", 0).unwrap();
    let mut bytes = [0; 6];
    block.read(0, &mut bytes).unwrap();
    assert_eq!((&bytes, block.is_dead()), (b"aftere", true));
    assert!(matches!(store.data.sync(&[target(1)]), Err(StoreError::NoSuchBlock)));
    // The same name begins anew.
    let again = store.data.write(&target(1), 1, b"x", &[]).unwrap();
    assert_ne!(again.incarnation(), block.incarnation());
    assert!(bytes_of(&store, &target(1)).starts_with(b"\0x\0"));
}

#[test]
fn requests_that_do_not_fit_the_block_are_told_so() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_store(dir.path(), 4 * MIB);
    store.data.write(&target(1), 0, b"data", &[]).unwrap();
    fill(&store, &id(1), 1000, 0..1).unwrap();
    let cached = DataTarget { id: id(1), length: 1000, mount_id: 7 };
    let longer = DataTarget { length: LENGTH + 1, ..target(1) };
    let elsewhere = DataTarget { mount_id: 8, ..target(1) };
    for wrong in [cached, longer, elsewhere] {
        assert!(matches!(store.data.write(&wrong, 0, b"x", &[]), Err(StoreError::Mismatch(_))));
        assert!(matches!(store.data.reserve(&wrong, &[]), Err(StoreError::Mismatch(_))));
        assert!(matches!(store.data.find(&wrong, Touch::Open), Err(StoreError::Mismatch(_))));
        assert!(matches!(store.data.sync(&[wrong]), Err(StoreError::Mismatch(_))));
        assert!(matches!(store.data.sync_failed_elsewhere(&wrong), Err(StoreError::Mismatch(_))));
    }
    assert_eq!(store.data.free(&id(1)), None);
    assert!(find(&store, &id(1)).is_some());
    assert_eq!(store.data.free_of(&elsewhere), None);
    store.data.sync(&[target(1)]).unwrap();
    assert!(bytes_of(&store, &target(1)).starts_with(b"data\0"), "nothing of it has changed");
    assert!(store.data.free_of(&target(1)).is_some());
}

#[test]
fn many_writers_of_one_block_and_many_who_make_it() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_store(dir.path(), 16 * MIB);
    std::thread::scope(|scope| {
        for writer in 0..8u32 {
            let store = &store;
            scope.spawn(move || {
                for value in 0..20 {
                    let bytes = vec![writer as u8 + 1; 1000];
                    store.data.write(&target(value), writer * 1000, &bytes, &[]).unwrap();
                }
            });
        }
    });
    for value in 0..20 {
        let bytes = bytes_of(&store, &target(value));
        (0..8).for_each(|writer| assert!(bytes[writer * 1000..][..1000].iter().all(|byte| *byte == writer as u8 + 1)));
    }
    assert_eq!(data_files(dir.path()).len(), 20);
    assert_eq!(used(&store), 20 * u64::from(CHUNK_BYTES));
}

#[test]
fn a_directory_that_is_given_up_says_so_and_forgets_no_data() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_store(dir.path(), 16 * MIB);
    let block = store.data.write(&target(1), 0, b"data", &[]).unwrap();
    for _ in 0..5 {
        store.table.disk_failed(&block, "writing a data block", io::Error::other("the disk is on fire"));
    }
    assert!(!store.table.usage()[0].healthy);
    assert!(bytes_of(&store, &target(1)).starts_with(b"data"), "what can be read is");
    let error = store.data.write(&target(1), 0, b"x", &[]).unwrap_err();
    assert!(error.to_string().contains("the disk is on fire"), "{error}");
    assert!(matches!(store.data.write(&target(2), 0, b"x", &[]), Err(StoreError::NoDirectory)));
    // A file that is gone is no block that never was.
    drop(block);
    drop(store);
    let store = open_store(dir.path(), 16 * MIB);
    fs::remove_file(&data_files(dir.path())[0]).unwrap();
    assert!(matches!(store.data.write(&target(1), 0, b"x", &[]), Err(StoreError::Io { .. })));
    assert!(matches!(store.data.find(&target(1), Touch::Open), Err(StoreError::Io { .. })));
}

#[test]
fn a_sync_that_failed_once_fails_for_good() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_store(dir.path(), 16 * MIB);
    let block = store.data.write(&target(1), 0, b"data", &[]).unwrap();
    store.data.sync(&[target(1)]).unwrap();
    block.state().fail_syncs();
    let error = store.data.sync(&[target(1)]).unwrap_err();
    assert!(error.to_string().contains("earlier sync"), "{error}");
}

#[test]
fn a_sync_that_failed_at_a_client_fails_here_from_then_on() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_store(dir.path(), 16 * MIB);
    for number in [1, 2] {
        store.data.write(&target(number), 0, b"data", &[]).unwrap();
    }
    let failed = store.data.sync_failed_elsewhere(&target(1)).unwrap().unwrap();
    store.data.ask_disk_of(&failed);
    let error = store.data.sync(&[target(1)]).unwrap_err();
    assert!(error.to_string().contains("earlier sync"), "{error}");
    store.data.sync(&[target(2)]).unwrap();
    assert!(matches!(store.data.sync_failed_elsewhere(&target(3)), Err(StoreError::NoSuchBlock)));
    // What a client says of a block is not said of the disk, however often.
    for _ in 0..50 {
        assert!(store.data.sync_failed_elsewhere(&target(1)).unwrap().is_none(), "its disk is asked once");
    }
    store.data.write(&target(4), 0, b"data", &[]).unwrap();
    store.data.sync(&[target(4)]).unwrap();
}
