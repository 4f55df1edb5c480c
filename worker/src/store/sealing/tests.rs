use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};

use proptest::prelude::*;
use xts_mode::Xts128;

use super::*;
use crate::store::tests::{MIB, copy_tree, fill, find, id, open_store, try_open, with_keys, wrapping};
use crate::store::{DataTarget, Stores, Touch};

fn cipher() -> Cipher {
    Cipher::new(&[7; KEY_BYTES])
}

fn noise(length: usize) -> Vec<u8> {
    (0..length as u64).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8).collect()
}

#[test]
fn blocks_are_what_the_standard_says() {
    let cipher = cipher();
    let standard = Xts128::new(cipher.cells.clone(), cipher.tweaks.clone());
    let incarnation = 0x0123_4567_89ab_cdef;
    let tweak = |unit: u128| (u128::from(incarnation) << 64 | unit).to_le_bytes();
    for length in [16, 32, 4096, 4096 + 16, 3 * 4096, 128 << 10, (1 << 20) + 48] {
        let clear = noise(length);
        let (mut ours, mut theirs) = (clear.clone(), clear.clone());
        cipher.cells(Direction::Seal, incarnation, 5 * UNIT, &mut ours);
        standard.encrypt_area(&mut theirs, UNIT as usize, 5, tweak);
        assert!(ours == theirs, "{length}");
        // Each part by itself is the same part.
        for (start, end) in [(0, length), (0, 16), (length - 16, length), (length / 32 * 16, length)] {
            let mut part = ours[start..end].to_vec();
            cipher.cells(Direction::Open, incarnation, 5 * UNIT + start as u32, &mut part);
            assert!(part == clear[start..end], "{start}..{end} of {length}");
        }
    }
}

/// The first vector of IEEE 1619 for AES-256 (its vector 10): by it the other implementation is known to be right.
#[test]
fn what_ours_is_compared_with_has_the_published_result() {
    let hex = |text: &str| -> Vec<u8> {
        (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
    };
    let one = Aes256::new_from_slice(&hex("2718281828459045235360287471352662497757247093699959574966967627")).unwrap();
    let two = Aes256::new_from_slice(&hex("3141592653589793238462643383279502884197169399375105820974944592")).unwrap();
    let mut unit: Vec<u8> = (0..512).map(|at| at as u8).collect();
    Xts128::new(one, two).encrypt_sector(&mut unit, 0xff_u128.to_le_bytes());
    assert_eq!(unit[..16], hex("1c3b3a102f770386e4836c99e370cf9b"));
}

#[test]
fn no_two_places_hold_the_same_for_the_same() {
    let cipher = cipher();
    let mut seen = HashSet::new();
    for incarnation in [1, 2, u64::MAX] {
        let mut zeros = vec![1; 3 * UNIT as usize];
        cipher.cells(Direction::Seal, incarnation, 0, &mut zeros);
        zeros.chunks(16).for_each(|cell| assert!(seen.insert(cell.to_vec())));
        for place in 0..100 {
            assert!(seen.insert(cipher.mask(Masked::Tail, incarnation, place).to_vec()));
            assert!(seen.insert(cipher.mask(Masked::Checksum, incarnation, place).to_vec()));
        }
    }
}

/// Of a block of so many bytes, in a file.
fn sealed(length: u32) -> (Sealed, File) {
    let file = tempfile::tempfile().unwrap();
    file.set_len(u64::from(length)).unwrap();
    (Sealed::new(Arc::new(cipher()), 9, length), file)
}

fn read(sealed: &Sealed, file: &File, range: Range<u32>) -> Vec<u8> {
    let mut bytes = vec![0; range.len()];
    let by = |offset: u32, bytes: &mut [u8]| file.read_exact_at(bytes, u64::from(offset)).map(|()| true);
    assert!(sealed.read(range.start, &mut bytes, by).unwrap());
    bytes
}

const LENGTH: u32 = 3 * UNIT + 5 * CELL;

fn range() -> impl Strategy<Value = Range<u32>> {
    (0..=LENGTH, 0..=LENGTH).prop_map(|(one, other)| one.min(other)..one.max(other))
}

proptest! {
    #[test]
    fn bytes_are_changed_and_read_at_any_place(
        writes in prop::collection::vec((range(), any::<u8>()), 1..20),
        at in range(),
    ) {
        let (sealed, file) = sealed(LENGTH);
        let mut model = vec![0; LENGTH as usize];
        for (range, value) in writes {
            let bytes = vec![value; range.len()];
            sealed.write(&file, range.start, &bytes).unwrap();
            model[range.start as usize..range.end as usize].copy_from_slice(&bytes);
            prop_assert!(read(&sealed, &file, at.clone()) == model[at.start as usize..at.end as usize]);
        }
        prop_assert!(read(&sealed, &file, 0..LENGTH) == model);
        prop_assert_eq!(file.metadata().unwrap().len(), u64::from(LENGTH), "it has the length of the block");
    }

    #[test]
    fn a_block_of_any_length_comes_back_and_is_not_in_its_file(length in 0u32..10_000) {
        let (sealed, file) = sealed(length);
        let clear = noise(length as usize);
        sealed.write(&file, 0, &clear).unwrap();
        prop_assert!(read(&sealed, &file, 0..length) == clear);
        let mut stored = vec![0; length as usize];
        file.read_exact_at(&mut stored, 0).unwrap();
        prop_assert!(length < 8 || stored != clear);
        prop_assert_eq!(file.metadata().unwrap().len(), u64::from(length));
    }
}

fn target() -> DataTarget {
    DataTarget { id: id(1), length: 1 << 20, mount_id: 7 }
}

fn bytes_of(store: &Stores) -> Vec<u8> {
    let mut bytes = vec![0; 1 << 20];
    store.data.find(&target(), Touch::Open).unwrap().read(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn parts_of_a_cell_are_changed_by_many_at_once_and_read_before_or_after() {
    let dir = tempfile::tempdir().unwrap();
    let store = with_keys(wrapping(&[1; 32], None), || open_store(dir.path(), 16 * MIB));
    store.data.write(&target(), 0, &[1; 4096], &[]).unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..4)
            .map(|writer| {
                let store = &store;
                scope.spawn(move || {
                    for round in 0..2_000u32 {
                        // Each has a quarter of each cell.
                        let at = round % 256 * CELL + writer * 4;
                        store.data.write(&target(), at, &[2 + round as u8 % 2; 4], &[]).unwrap();
                    }
                })
            })
            .collect();
        let reader = scope.spawn(|| {
            let (block, mut bytes) = (store.data.find(&target(), Touch::Open).unwrap(), [0; 4096]);
            while !is_over.load(Ordering::Relaxed) {
                block.read(0, &mut bytes).unwrap();
                assert!(bytes.iter().all(|byte| (1..=3).contains(byte)), "nobody has written that");
                if block.read_cached(0, &mut bytes).unwrap() {
                    assert!(bytes.iter().all(|byte| (1..=3).contains(byte)), "nobody has written that");
                }
            }
        });
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        is_over.store(true, Ordering::Relaxed);
        reader.join().unwrap();
    });
    assert!(bytes_of(&store)[..4096].iter().all(|byte| [2, 3].contains(byte)), "nothing that was written is lost");
}

/// Whether these bytes are anywhere below a directory.
fn is_below(directory: &Path, bytes: &[u8]) -> bool {
    fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).any(|path| {
        if path.is_dir() {
            return is_below(&path, bytes);
        }
        fs::read(&path).unwrap().windows(bytes.len()).any(|window| window == bytes)
    })
}

#[test]
fn nothing_of_a_block_is_on_disk_in_clear_and_the_former_key_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let (one, two, three) = ([1; 32], [2; 40], [3; 32]);
    let secret = b"nobody finds this on the disk";
    let store = with_keys(wrapping(&one, None), || open_store(dir.path(), 16 * MIB));
    store.data.write(&target(), 5, secret, &[]).unwrap();
    fill(&store, &id(2), 300_001, 0..3).unwrap();
    let crcs = find(&store, &id(2)).unwrap().state().crcs.clone();
    drop(store);
    assert!(!is_below(dir.path(), secret));
    assert!(!crcs.iter().any(|crc| is_below(&dir.path().join("index"), &crc.to_le_bytes())), "nor a checksum of it");

    // With a copy of the directory, and without its key, there is nothing to be had.
    let copy = tempfile::tempdir().unwrap();
    copy_tree(dir.path(), copy.path());
    let refused = |keys: Option<Arc<KeyWrapping>>| {
        let opened = with_keys(keys.unwrap_or_default(), || try_open(copy.path(), 16 * MIB));
        opened.expect_err("it is refused").to_string()
    };
    assert!(refused(None).contains("worker.key_encryption_key"));
    assert!(refused(Some(wrapping(&two, None))).contains("encrypted with another key"));
    fs::remove_file(copy.path().join(KEY_FILE)).unwrap();
    for keys in [None, Some(wrapping(&one, None))] {
        assert!(refused(keys).contains("is gone: restore it"));
    }

    let check = |keys: Arc<KeyWrapping>| {
        let store = with_keys(keys, || open_store(dir.path(), 16 * MIB));
        assert_eq!(&bytes_of(&store)[5..][..secret.len()], secret);
        let block = find(&store, &id(2)).unwrap();
        store.cache.verify(&block, 0..3).unwrap();
        assert!(block.is_complete());
    };
    check(wrapping(&one, None));
    check(wrapping(&two, Some(&one)));
    check(wrapping(&two, None));
    check(wrapping(&two, Some(&three)));
}

#[test]
fn a_directory_with_blocks_in_clear_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_store(dir.path(), 16 * MIB);
    store.data.write(&target(), 0, b"in clear", &[]).unwrap();
    drop(store);
    let refused = with_keys(wrapping(&[1; 32], None), || try_open(dir.path(), 16 * MIB)).err().unwrap().to_string();
    assert!(refused.contains("1 blocks that are not encrypted"), "{refused}");
    assert!(!dir.path().join(KEY_FILE).exists());
    let store = open_store(dir.path(), 16 * MIB);
    assert_eq!(&bytes_of(&store)[..8], b"in clear");
    // Once it is empty it can be given a key; and then it is no directory for those who have none.
    store.data.free(&id(1)).unwrap();
    drop(store);
    with_keys(wrapping(&[1; 32], None), || open_store(dir.path(), 16 * MIB));
    assert!(try_open(dir.path(), 16 * MIB).is_err());
}
