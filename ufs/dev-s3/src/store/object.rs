//! One version of an object, and where its bytes are read from.

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use rustix::buffer::spare_capacity;

use super::object_file::Draft;
use super::record::{Attributes, ObjectRecord};
use crate::error::DevS3Error;

/// Bytes that are made at a time where generated content is written to a file.
const PIECE: u64 = 1 << 20;
/// The step of the generator: 2⁶⁴ divided by the golden ratio, as in `SplitMix64`.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// A key in the index. `str` and its bytes have the same order, and bounds of ranges (the first key after a common
/// prefix) need not be UTF-8, so the index is asked with bytes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key(Box<str>);

impl Key {
    pub fn new(key: &str) -> Self {
        Self(key.into())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Borrow<[u8]> for Key {
    fn borrow(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

/// Keys of a bucket and the versions they stand for.
pub(super) type Index = BTreeMap<Key, Arc<Object>>;

/// Versions that have lost their place, by key; the newest last.
pub(super) type Replaced = BTreeMap<Key, Vec<Arc<Object>>>;

/// Where a version comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// A file.
    Stored,
    /// A file that hides a key of the bucket's key space, or a version that is kept: there is no such object.
    Deleted,
    /// A key space by rule; the bytes follow from the seed.
    Generated { seed: u64 },
}

/// One version of an object.
#[derive(Debug, PartialEq, Eq)]
pub struct Object {
    pub size: u64,
    /// Without quotes.
    pub etag: String,
    /// Seconds since the epoch.
    pub modified_s: i64,
    /// Boxed, since most objects have none.
    pub(super) attributes: Option<Box<Attributes>>,
    /// Later versions have higher numbers; 0 where there is no file.
    pub(super) sequence: u64,
    pub(super) origin: Origin,
}

impl Object {
    pub(super) fn from_record(record: ObjectRecord, sequence: u64) -> (String, Self) {
        let attributes = record.attributes.filter(|attributes| *attributes != Attributes::default()).map(Box::new);
        let origin = if record.deleted { Origin::Deleted } else { Origin::Stored };
        let ObjectRecord { key, size, etag, modified_s, .. } = record;
        (key, Self { size, etag, modified_s, attributes, sequence, origin })
    }

    /// Content type, user metadata and the like.
    pub fn attributes(&self) -> Option<&Attributes> {
        self.attributes.as_deref()
    }

    /// It is no object: its key was deleted.
    pub fn is_deleted(&self) -> bool {
        self.origin == Origin::Deleted
    }
}

/// The bytes of one version, which stay readable when the object is replaced or deleted.
pub enum Content {
    /// The data begins at byte 0, and the record follows it.
    File(File),
    /// Any range follows from the seed.
    Generated { seed: u64 },
}

impl Content {
    /// Reads a range that lies within the data.
    ///
    /// # Errors
    /// Those of reading the file, `UnexpectedEof` where it is shorter.
    pub fn read(&self, range: Range<u64>) -> io::Result<Bytes> {
        match self {
            Self::File(file) => read_file(file, range),
            Self::Generated { seed } => Ok(generate(*seed, range)),
        }
    }

    /// Appends the first `size` bytes to `draft`; the kernel copies those of a file.
    pub(crate) fn append_to(&self, draft: &mut Draft, size: u64) -> Result<(), DevS3Error> {
        match self {
            Self::File(file) => draft.append(file, 0, size),
            Self::Generated { seed } => {
                for start in (0..size).step_by(PIECE as usize) {
                    draft.write(&generate(*seed, start..size.min(start + PIECE)))?;
                }
                Ok(())
            }
        }
    }
}

/// Reads without clearing the buffer first.
fn read_file(file: &File, range: Range<u64>) -> io::Result<Bytes> {
    let mut data = Vec::with_capacity((range.end - range.start) as usize);
    let mut at = range.start;
    while at < range.end {
        // `spare_capacity` may be larger than asked for, and the record follows the data.
        let read = rustix::io::pread(file, spare_capacity(&mut data), at)?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        at += read as u64;
    }
    data.truncate((range.end - range.start) as usize);
    Ok(data.into())
}

/// The mixing function of `SplitMix64` (Steele, Lea and Flood, 2014): one to one, and each bit of the result depends on
/// all bits of `value`.
pub(super) fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Eight bytes for each number of `SplitMix64`, whose n-th is known without those before it.
fn generate(seed: u64, range: Range<u64>) -> Bytes {
    let words = range.start / 8..range.end.div_ceil(8);
    let mut data = Vec::with_capacity((words.end.saturating_sub(words.start) * 8) as usize);
    for word in words {
        let state = seed.wrapping_add((word + 1).wrapping_mul(STEP));
        data.extend_from_slice(&mix(state).to_le_bytes());
    }
    let skipped = (range.start % 8) as usize;
    let length = range.end.saturating_sub(range.start) as usize;
    Bytes::from(data).slice(skipped..skipped + length)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn generated_ranges_are_those_of_the_whole(seed: u64, size in 0u64..5000, start: u64, length: u64) {
            let whole = generate(seed, 0..size);
            prop_assert_eq!(whole.len() as u64, size);
            let start = start % (size + 1);
            let end = start + length % (size - start + 1);
            prop_assert_eq!(generate(seed, start..end), &whole[start as usize..end as usize]);
        }
    }

    #[test]
    fn generated_bytes_are_far_into_an_object_at_once_and_differ_by_seed() {
        let at = 5u64 << 40;
        assert_eq!(generate(1, at - 3..at + 5)[3..], generate(1, at..at + 5)[..]);
        assert_ne!(generate(1, 0..64), generate(2, 0..64));
        assert_ne!(generate(1, 0..64), generate(1, 64..128));
    }
}
