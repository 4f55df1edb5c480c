//! Images that somebody has changed: an answer or an error, and an end, whatever the bytes are.

use std::collections::HashSet;

use cavern_erofs::{Error, Image, Kind, ReadAt};
use proptest::prelude::*;
use proptest::sample::Index;

use super::golden::small_tree;
use super::model::{Model, listed};
use super::round_trip::any_model;

const SUPERBLOCK: usize = 1024;

/// Asks an image for all it has, and goes on where it can. Says how many directories there were.
fn ask_for_all(bytes: &[u8]) -> Result<usize, Error> {
    let image = Image::open(bytes)?;
    let mut directories = vec![image.root()?];
    let mut seen = HashSet::from([directories[0].nid]);
    while let Some(directory) = directories.pop() {
        let _ = image.xattrs(&directory);
        let Ok(entries) = listed(&image, &directory) else { continue };
        for (name, ..) in entries {
            assert!(!name.is_empty() && !name.contains(&b'/') && !name.contains(&0));
            if name == b"." || name == b".." {
                continue;
            }
            let Ok(Some(inode)) = image.lookup(&directory, &name) else { continue };
            let _ = (image.xattrs(&inode), image.target(&inode));
            // A file of 2^63 bytes in blocks of its own has too many extents to ask for at once.
            for start in [0, inode.size / 2, inode.size.saturating_sub(1 << 20)] {
                let end = start + (1 << 20);
                let Ok(extents) = image.extents(&inode, start..end) else { continue };
                let length: u64 = extents.iter().map(|extent| extent.length).sum();
                let expected = if inode.kind == Kind::File { inode.size.min(end).saturating_sub(start) } else { 0 };
                assert_eq!(length, expected);
            }
            if inode.kind == Kind::Directory && seen.insert(inode.nid) {
                directories.push(inode);
            }
        }
    }
    Ok(seen.len())
}

fn sum(bytes: &mut [u8]) {
    bytes[SUPERBLOCK + 4..SUPERBLOCK + 8].fill(0);
    let sum = !crc32c::crc32c(&bytes[SUPERBLOCK..4096]);
    bytes[SUPERBLOCK + 4..SUPERBLOCK + 8].copy_from_slice(&sum.to_le_bytes());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn changed_bytes_are_answers_or_errors(
        model in any_model(60),
        changes in prop::collection::vec(prop::collection::vec((any::<Index>(), any::<u8>()), 1..40), 20),
        cut in any::<Index>(),
    ) {
        let whole = model.bytes();
        ask_for_all(&whole).unwrap();
        for change in changes {
            let mut bytes = whole.clone();
            for (place, byte) in change {
                bytes[SUPERBLOCK + place.index(whole.len() - SUPERBLOCK)] = byte;
            }
            sum(&mut bytes);
            let _ = ask_for_all(&bytes);
        }
        prop_assert!(ask_for_all(&whole[..cut.index(whole.len())]).is_err());
    }

    #[test]
    fn one_changed_byte_of_a_small_tree(place in 4096..3 * 4096_usize, byte in any::<u8>()) {
        let mut bytes = small_tree().bytes();
        bytes[place] = byte;
        let _ = ask_for_all(&bytes);
    }
}

#[test]
fn every_byte_of_the_first_block_is_summed() {
    let whole = small_tree().bytes();
    for place in (SUPERBLOCK..4096).step_by(37) {
        let mut bytes = whole.clone();
        bytes[place] ^= 1;
        assert!(matches!(Image::open(&bytes), Err(Error::Superblock(_))), "byte {place}");
    }
    assert!(matches!(Image::open(&whole[..100]), Err(Error::Superblock(_))));
}

/// Of `d/e`: its inode number and kind in the end of `d`, behind the inode. Numbers are those of the golden bytes.
fn with_entry(nid: u64, kind: Kind) -> Vec<u8> {
    const ENTRY: usize = 138 * 32 + 32 + 24;
    let mut bytes = small_tree().bytes();
    bytes[ENTRY..ENTRY + 8].copy_from_slice(&nid.to_le_bytes());
    bytes[ENTRY + 10] = kind as u8;
    bytes
}

fn look_up<R: ReadAt>(image: &Image<R>, path: &[&[u8]]) -> Result<Option<u64>, Error> {
    let mut inode = image.root()?;
    for name in path {
        match image.lookup(&inode, name)? {
            Some(found) => inode = found,
            None => return Ok(None),
        }
    }
    Ok(Some(inode.nid))
}

#[test]
fn no_path_is_endless() {
    let path = [&b"d"[..], b"e"];
    assert_eq!(look_up(&Image::open(with_entry(137, Kind::File)).unwrap(), &path).unwrap(), Some(137));
    for (nid, kind) in [(128, Kind::Directory), (138, Kind::Directory), (137, Kind::Directory), (130, Kind::Symlink)] {
        let image = Image::open(with_entry(nid, kind)).unwrap();
        let error = look_up(&image, &path).unwrap_err();
        assert!(matches!(error, Error::Corrupt { nid: named, .. } if named == nid), "{nid}: {error}");
    }
    let image = Image::open(with_entry(u64::MAX, Kind::File)).unwrap();
    assert!(matches!(look_up(&image, &path), Err(Error::Corrupt { .. })));
}

#[test]
fn contents_outside_of_the_devices_are_refused() {
    // The block and the device of the chunk of `a`, and the first block of the root.
    let (device, block, root) = (4160 + 56 + 2, 4160 + 56 + 4, 4096 + 16);
    for (place, value) in [(device, 3), (block, 63)] {
        let mut bytes = small_tree().bytes();
        bytes[place] = value;
        let image = Image::open(bytes).unwrap();
        let a = image.lookup(&image.root().unwrap(), b"a").unwrap().unwrap();
        assert!(matches!(image.extents(&a, 0..5000), Err(Error::Corrupt { .. })), "byte {place}");
    }
    let mut bytes = small_tree().bytes();
    bytes[root] = 3;
    let image = Image::open(bytes).unwrap();
    assert!(matches!(image.lookup(&image.root().unwrap(), b"a"), Err(Error::Corrupt { nid: 128, .. })));
}

#[test]
fn an_empty_tree_has_its_root() {
    assert_eq!(ask_for_all(&Model::new().bytes()).unwrap(), 1);
}
