//! What an inode is beside its content, as metadata of its object. Names and spellings are those of s3fs, which other programs
//! understand; `docs/semantics.md` lists them.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use cavern_proto::data::MetadataItem;
use cavern_proto::master::Kind;
use cavern_proto::record::InodeRecord;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use crate::state::records;

/// Bytes of all names and values that S3 takes, less those of [`tag`](super::tag).
const BYTES_MAX: usize = 2048 - super::tag::BYTES_MAX;

/// The metadata of an inode, in the order of the names. Extended attributes that do not fit are counted instead.
pub(super) fn of_inode(record: &InodeRecord, xattrs: &[(Bytes, Bytes)]) -> Vec<MetadataItem> {
    let item = |name: &str, value: String| MetadataItem { name: name.to_owned(), value };
    let mut items = vec![
        item("atime", seconds(record.atime_ns.unwrap_or(record.mtime_ns))),
        item("gid", record.gid.to_string()),
        item("mode", (type_bits(record.kind()) | records::mode(record)).to_string()),
        item("mtime", seconds(record.mtime_ns)),
    ];
    if matches!(record.kind(), Kind::CharacterDevice | Kind::BlockDevice) {
        items.push(item("rdev", record.rdev.to_string()));
    }
    items.push(item("uid", record.uid.to_string()));
    if !xattrs.is_empty() {
        let taken: usize = items.iter().map(|item| item.name.len() + item.value.len()).sum();
        let kept = encoded(xattrs).filter(|value| taken + "xattr".len() + value.len() <= BYTES_MAX);
        items.push(match kept {
            Some(value) => item("xattr", value),
            None => item("xattr-left-out", xattrs.len().to_string()),
        });
    }
    items
}

/// Tells one metadata from another.
pub(super) fn hash(items: &[MetadataItem]) -> u64 {
    let mut hasher = ring::digest::Context::new(&ring::digest::SHA256);
    for item in items {
        for text in [&item.name, &item.value] {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
    }
    let digest = hasher.finish();
    digest.as_ref().iter().take(8).fold(0, |hash, byte| hash << 8 | u64::from(*byte))
}

/// The type of a file in a mode, as `stat` has it.
fn type_bits(kind: Kind) -> u32 {
    match kind {
        Kind::Unspecified | Kind::File => 0o100_000,
        Kind::Directory => 0o040_000,
        Kind::Symlink => 0o120_000,
        Kind::Fifo => 0o010_000,
        Kind::Socket => 0o140_000,
        Kind::CharacterDevice => 0o020_000,
        Kind::BlockDevice => 0o060_000,
    }
}

/// A time in seconds, with nine decimals.
fn seconds(ns: i64) -> String {
    let sign = if ns < 0 { "-" } else { "" };
    let ns = ns.unsigned_abs();
    format!("{sign}{}.{:09}", ns / 1_000_000_000, ns % 1_000_000_000)
}

/// Names and base64 values as JSON, percent-encoded; `None` when a name is no UTF-8.
fn encoded(xattrs: &[(Bytes, Bytes)]) -> Option<String> {
    let mut map = serde_json::Map::new();
    for (name, value) in xattrs {
        map.insert(std::str::from_utf8(name).ok()?.to_owned(), BASE64_STANDARD.encode(value).into());
    }
    let json = serde_json::Value::Object(map).to_string();
    Some(utf8_percent_encode(&json, NON_ALPHANUMERIC).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> InodeRecord {
        InodeRecord {
            kind: Kind::File as i32,
            mode: 0o4755 | records::MODE_CHOSEN,
            uid: 1000,
            gid: 100,
            mtime_ns: 1_800_000_000_000_000_007,
            atime_ns: Some(-1),
            ..InodeRecord::default()
        }
    }

    fn text(items: &[MetadataItem]) -> Vec<String> {
        items.iter().map(|item| format!("{}={}", item.name, item.value)).collect()
    }

    #[test]
    fn a_file_is_described_as_stat_does() {
        let items = of_inode(&record(), &[]);
        let expected = ["atime=-0.000000001", "gid=100", "mode=35309", "mtime=1800000000.000000007", "uid=1000"];
        assert_eq!(text(&items), expected);
        let device = InodeRecord { kind: Kind::BlockDevice as i32, rdev: 0x801, ..record() };
        assert!(text(&of_inode(&device, &[])).contains(&"rdev=2049".to_owned()));
        assert!(items.is_sorted_by(|one, next| one.name < next.name));
    }

    #[test]
    fn extended_attributes_come_along_or_are_counted() {
        let xattr = |name: &'static str, value: Vec<u8>| (Bytes::from_static(name.as_bytes()), Bytes::from(value));
        let items = of_inode(&record(), &[xattr("user.a", vec![0, 255]), xattr("user.b", vec![])]);
        let decoded = percent_encoding::percent_decode_str(&items.last().unwrap().value).decode_utf8().unwrap();
        assert_eq!(decoded, r#"{"user.a":"AP8=","user.b":""}"#);
        let large = of_inode(&record(), &[xattr("user.a", vec![7; 4000])]);
        assert_eq!(text(&large).last().unwrap(), "xattr-left-out=1");
        let odd = of_inode(&record(), &[(Bytes::from_static(b"user.\xff"), Bytes::new())]);
        assert_eq!(text(&odd).last().unwrap(), "xattr-left-out=1");
    }

    #[test]
    fn every_difference_changes_the_hash() {
        let one = hash(&of_inode(&record(), &[]));
        assert_eq!(one, hash(&of_inode(&record(), &[])));
        assert_ne!(one, hash(&of_inode(&InodeRecord { mtime_ns: 1, ..record() }, &[])));
        assert_ne!(one, hash(&of_inode(&InodeRecord { uid: 1, ..record() }, &[])));
    }
}
