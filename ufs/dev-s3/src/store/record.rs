//! Records: what a file says about itself. A record is sealed at the end of its file by its CRC32C, its length and a
//! magic number, so that a file that was cut short is distinguished from a whole one. Keys, times and digits are
//! written as all records and names of files have them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use cavern_conf::host;
use prost::Message;

use crate::error::DevS3Error;

const MAGIC: &[u8; 8] = b"CVDEVS31";
const SEAL_LEN: u64 = 4 + 4 + MAGIC.len() as u64;
/// Records are small (a key, an ETag, a few headers); one read of this size gets nearly all of them.
const TAIL_LEN: u64 = 2048;

/// Longest key, in bytes.
pub const KEY_MAX_BYTES: usize = 1024;

/// Refuses what is no key.
pub(super) fn check_key(key: &str) -> Result<(), DevS3Error> {
    if key.is_empty() || key.len() > KEY_MAX_BYTES { Err(DevS3Error::InvalidKey) } else { Ok(()) }
}

/// Seconds since the epoch. S3 shows times in whole seconds, in headers as in listings.
pub(crate) fn now_s() -> i64 {
    host::wall_ns() / 1_000_000_000
}

/// Lower-case hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        text.push(DIGITS[usize::from(byte >> 4)] as char);
        text.push(DIGITS[usize::from(byte & 15)] as char);
    }
    text
}

/// What an object carries besides its bytes.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Attributes {
    #[prost(string, optional, tag = "1")]
    pub content_type: Option<String>,
    #[prost(string, optional, tag = "2")]
    pub cache_control: Option<String>,
    #[prost(string, optional, tag = "3")]
    pub content_disposition: Option<String>,
    #[prost(string, optional, tag = "4")]
    pub content_encoding: Option<String>,
    #[prost(string, optional, tag = "5")]
    pub content_language: Option<String>,
    /// User metadata, names without `x-amz-meta-`.
    #[prost(btree_map = "string, string", tag = "6")]
    pub metadata: BTreeMap<String, String>,
}

/// The record of an object's file. The sequence number is the file's name.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ObjectRecord {
    #[prost(string, tag = "1")]
    pub key: String,
    #[prost(uint64, tag = "2")]
    pub size: u64,
    #[prost(string, tag = "3")]
    pub etag: String,
    #[prost(int64, tag = "4")]
    pub modified_s: i64,
    #[prost(message, optional, tag = "5")]
    pub attributes: Option<Attributes>,
    /// There is no object: the key was deleted, and is one of the key space, or the bucket kept versions.
    #[prost(bool, tag = "6")]
    pub deleted: bool,
}

/// The record of a bucket.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct BucketRecord {
    #[prost(int64, tag = "1")]
    pub created_s: i64,
    /// The rule of its key space, in JSON.
    #[prost(string, optional, tag = "2")]
    pub key_space: Option<String>,
}

/// The record of a multipart upload.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct UploadRecord {
    #[prost(string, tag = "1")]
    pub key: String,
    #[prost(int64, tag = "2")]
    pub initiated_s: i64,
    #[prost(message, optional, tag = "3")]
    pub attributes: Option<Attributes>,
}

/// The bytes that follow a file's data.
pub(super) fn seal(record: &impl Message) -> Vec<u8> {
    let mut bytes = record.encode_to_vec();
    let (crc, len) = (crc32c::crc32c(&bytes), bytes.len() as u32);
    bytes.extend_from_slice(&crc.to_le_bytes());
    bytes.extend_from_slice(&len.to_le_bytes());
    bytes.extend_from_slice(MAGIC);
    bytes
}

/// Reads the record at the end of `file` and returns it with the length of the data before it; `None` where the file
/// does not end in a whole record.
pub(super) fn unseal<R: Message + Default>(file: &File) -> io::Result<Option<(R, u64)>> {
    let file_len = file.metadata()?.len();
    let mut tail = vec![0; file_len.min(TAIL_LEN) as usize];
    let tail_at = file_len - tail.len() as u64;
    file.read_exact_at(&mut tail, tail_at)?;
    let Some(record_len) = sealed_len(&tail) else { return Ok(None) };
    let Some(data_len) = file_len.checked_sub(SEAL_LEN + record_len) else { return Ok(None) };
    if (tail.len() as u64) < SEAL_LEN + record_len {
        tail.resize((file_len - data_len) as usize, 0);
        file.read_exact_at(&mut tail, data_len)?;
    }
    let end = tail.len() - SEAL_LEN as usize;
    let start = end - record_len as usize;
    let crc = crc32c::crc32c(&tail[start..end]).to_le_bytes();
    if tail[end..end + 4] != crc {
        return Ok(None);
    }
    Ok(R::decode(&tail[start..end]).ok().map(|record| (record, data_len)))
}

/// Length of the record whose seal ends `tail`.
fn sealed_len(tail: &[u8]) -> Option<u64> {
    let rest = tail.strip_suffix(MAGIC)?;
    let (rest, len) = rest.split_last_chunk::<4>()?;
    rest.split_last_chunk::<4>()?;
    Some(u64::from(u32::from_le_bytes(*len)))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;

    fn file_of(parts: &[&[u8]]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        for part in parts {
            file.write_all(part).unwrap();
        }
        file
    }

    proptest! {
        #[test]
        fn records_come_back(
            data in prop::collection::vec(any::<u8>(), 0..3000),
            key in ".{0,1200}",
            etag in "[0-9a-f]{32}",
        ) {
            let size = data.len() as u64;
            let record = ObjectRecord { key, size, etag, modified_s: 7, attributes: None, deleted: false };
            let file = file_of(&[&data, &seal(&record)]);
            prop_assert_eq!(unseal::<ObjectRecord>(&file).unwrap(), Some((record, data.len() as u64)));
        }

        #[test]
        fn a_cut_or_damaged_file_has_no_record(cut in 1usize..40, flip in 0usize..40) {
            let etag = "e".repeat(32);
            let record = ObjectRecord { key: "key".into(), size: 4, etag, modified_s: 7, ..ObjectRecord::default() };
            let whole = [b"data".as_slice(), &seal(&record)].concat();
            let cut_file = file_of(&[&whole[..whole.len() - cut]]);
            prop_assert_eq!(unseal::<ObjectRecord>(&cut_file).unwrap(), None);
            let mut damaged = whole.clone();
            let at = damaged.len() - 1 - flip;
            damaged[at] ^= 0x40;
            prop_assert_eq!(unseal::<ObjectRecord>(&file_of(&[&damaged])).unwrap(), None);
        }

        #[test]
        fn garbage_has_no_record(mut garbage in prop::collection::vec(any::<u8>(), 0..200), with_magic: bool) {
            if with_magic {
                garbage.extend_from_slice(MAGIC);
            }
            let found = unseal::<UploadRecord>(&file_of(&[&garbage])).unwrap();
            // An all-zero seal is a valid empty record only where its checksum (0 for no bytes) and length are zero.
            let empty = garbage.len() >= 16 && with_magic && garbage[garbage.len() - 16..garbage.len() - 8] == [0; 8];
            prop_assert_eq!(found.is_some(), empty);
        }
    }
}
