//! What an inode is beside its content, as metadata of its object. Names and spellings are those of s3fs, which other
//! programs understand; `docs/operations.md` lists them.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use cavern_posix::acl::{Acl, is_acl};
use cavern_posix::mode::{MODE_BITS, kind_of, type_bits};
use cavern_posix::xattr::{has_length, is_bare_prefix};
use cavern_proto::data::MetadataItem;
use cavern_proto::master::{Kind, Xattr};
use cavern_proto::record::{InodeRecord, Restored};
use cavern_state::records;
use cavern_ufs::{ObjectMeta, nanoseconds, seconds};
use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

/// Bytes of all names and values that S3 takes, less those of [`object_tag`](super::object_tag).
const BYTES_MAX: usize = 2048 - super::object_tag::BYTES_MAX;

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
            None => item(LEFT_OUT, xattrs.len().to_string()),
        });
    }
    items
}

/// Names that [`of_inode`] writes.
const NAMES: [&str; 8] = ["atime", "gid", "mode", "mtime", "rdev", "uid", "xattr", LEFT_OUT];
const LEFT_OUT: &str = "xattr-left-out";
/// Bounds of what is believed of an object: those that hold for changes by programs.
const XATTR_VALUE_MAX: usize = 65_536;

/// What the metadata of an object say of it; `None` when they say nothing. The target of a symbolic link is its
/// content.
pub fn read(object: &ObjectMeta) -> Option<Restored> {
    let text = |name: &str| object.metadata.get(name).map(String::as_str);
    let number = |name: &str| text(name).and_then(|text| text.parse::<u32>().ok());
    // All ones are no id: whoever wrote that has left no owner.
    let id = |name: &str| number(name).filter(|id| *id != u32::MAX).unwrap_or_default();
    let mode = number("mode")?;
    let kind = kind_of(mode)?;
    let mtime_ns = text("mtime").and_then(nanoseconds).unwrap_or(object.mtime_ns);
    let (xattrs, are_whole) = match text("xattr") {
        Some(text) => decoded(text).map_or((Vec::new(), false), |xattrs| (xattrs, true)),
        None => (Vec::new(), text(LEFT_OUT).is_none()),
    };
    let items = NAMES.iter().filter_map(|name| {
        let value = text(name)?.to_owned();
        Some(MetadataItem { name: (*name).to_owned(), value })
    });
    Some(Restored {
        kind: kind as i32,
        mode: mode & MODE_BITS,
        uid: id("uid"),
        gid: id("gid"),
        mtime_ns,
        atime_ns: text("atime").and_then(nanoseconds).unwrap_or(mtime_ns),
        rdev: number("rdev").unwrap_or_default(),
        target: Bytes::new(),
        xattrs,
        metadata: hash(&items.collect::<Vec<_>>()),
        identity: if kind == Kind::File { super::object_tag::identity(object) } else { String::new() },
        incomplete: !are_whole,
    })
}

/// Distinguishes one metadata from another.
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

/// Names and base64 values as JSON, percent-encoded; `None` when a name is no UTF-8.
fn encoded(xattrs: &[(Bytes, Bytes)]) -> Option<String> {
    let mut map = serde_json::Map::new();
    for (name, value) in xattrs {
        map.insert(std::str::from_utf8(name).ok()?.to_owned(), BASE64_STANDARD.encode(value).into());
    }
    let json = serde_json::Value::Object(map).to_string();
    Some(utf8_percent_encode(&json, NON_ALPHANUMERIC).to_string())
}

/// The reverse of [`encoded`]; `None` for what no inode can have.
fn decoded(text: &str) -> Option<Vec<Xattr>> {
    let json = percent_decode_str(text).decode_utf8().ok()?;
    let map: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&json).ok()?;
    let xattr = |(name, value): (String, serde_json::Value)| {
        let value = BASE64_STANDARD.decode(value.as_str()?).ok()?;
        let is_name = has_length(name.as_bytes()) && !is_bare_prefix(name.as_bytes());
        // The state goes by access lists, and takes one that it cannot read for a broken database.
        let is_list = !is_acl(name.as_bytes()) || Acl::decode(&value).is_some();
        let is_sound = is_name && is_list && value.len() <= XATTR_VALUE_MAX;
        is_sound.then(|| Xattr { name: name.into(), value: value.into() })
    };
    map.into_iter().map(xattr).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(items: &[MetadataItem]) -> ObjectMeta {
        let metadata = items.iter().map(|item| (item.name.clone(), item.value.clone())).collect();
        ObjectMeta { key: "k".into(), size: 7, etag: "e".into(), mtime_ns: 5, metadata }
    }

    fn item(name: &str, value: &str) -> MetadataItem {
        MetadataItem { name: name.into(), value: value.into() }
    }

    #[test]
    fn what_is_written_is_read_again() {
        let xattr = |name: &'static str, value: Vec<u8>| (Bytes::from_static(name.as_bytes()), Bytes::from(value));
        // Of owner, group and others.
        let [owner, group, others] = [[1, 0, 7, 0], [4, 0, 5, 0], [32, 0, 5, 0]];
        let list = [[2, 0, 0, 0], owner, [255; 4], group, [255; 4], others, [255; 4]].concat();
        let xattrs = [xattr("user.a", vec![0, 255]), xattr("system.posix_acl_access", list)];
        for kind in [Kind::File, Kind::Directory, Kind::Symlink, Kind::Fifo, Kind::Socket, Kind::BlockDevice] {
            let record = InodeRecord { kind: kind as i32, rdev: 0x801, ..record() };
            let items = of_inode(&record, &xattrs);
            let restored = read(&object(&items)).unwrap();
            assert_eq!((restored.kind(), restored.mode, restored.uid, restored.gid), (kind, 0o4755, 1000, 100));
            assert_eq!((restored.mtime_ns, restored.atime_ns), (record.mtime_ns, -1));
            assert_eq!((restored.metadata, restored.incomplete), (hash(&items), false));
            let mut read: Vec<_> = restored.xattrs.into_iter().map(|xattr| (xattr.name, xattr.value)).collect();
            read.sort_by(|one, other| other.cmp(one));
            assert_eq!(read, xattrs);
        }
        let large = of_inode(&record(), &[xattr("user.a", vec![7; 4000])]);
        assert!(read(&object(&large)).unwrap().incomplete);
    }

    #[test]
    fn what_makes_no_sense_is_not_believed() {
        assert_eq!(read(&object(&[])), None);
        for mode in ["", "-1", "0", "abc", "99999999999", "4095"] {
            assert_eq!(read(&object(&[item("mode", mode)])), None, "{mode}");
        }
        for time in ["", "1.0000000001", "1.x", "99999999999", "--1", "0x1"] {
            let restored = read(&object(&[item("mode", "33188"), item("mtime", time)])).unwrap();
            assert_eq!(restored.mtime_ns, 5, "{time}");
        }
        for xattr in [
            "%",
            "%7B%7D%",
            "[]",
            "%7B%22a%22%3A1%7D",
            "%7B%22user.%22%3A%22%22%7D",
            "%7B%22%22%3A%22%22%7D",
            "%7B%22a%22%3A%22%2A%22%7D",
            "%7B%22system.posix_acl_access%22%3A%22AgAAAA%3D%3D%22%7D",
        ] {
            let restored = read(&object(&[item("mode", "33188"), item("xattr", xattr)])).unwrap();
            assert!(restored.incomplete && restored.xattrs.is_empty(), "{xattr}");
        }
    }

    #[test]
    fn an_owner_that_is_none_is_left() {
        let restored = read(&object(&[item("mode", "33188"), item("uid", "4294967295"), item("gid", "7")])).unwrap();
        assert_eq!((restored.uid, restored.gid), (0, 7));
    }

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
