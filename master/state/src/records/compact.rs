//! How inodes and names are stored: without what nearly every record would repeat.
//!
//! The kind of a file is left out, and a modification time of whole seconds, as buckets have it, takes four bytes. What
//! is read is as it was before; a record that is stored in full is read as well.

use cavern_proto::master::Kind;
use cavern_proto::record::{DentryRecord, InodeRecord, InodeVersion};
use prost::{DecodeError, Message as _};

const SECOND_NS: i64 = 1_000_000_000;

pub fn encode_inode(record: &InodeRecord) -> Vec<u8> {
    let mut stored = record.clone();
    stored.kind = kind_stored(record.kind);
    let seconds = u32::try_from(record.mtime_ns / SECOND_NS);
    if let Ok(seconds) = seconds
        && record.mtime_ns % SECOND_NS == 0
    {
        (stored.mtime_s, stored.mtime_ns) = (seconds, 0);
    }
    stored.encode_to_vec()
}

pub fn decode_inode(bytes: &[u8]) -> Result<InodeRecord, DecodeError> {
    let mut record = InodeRecord::decode(bytes)?;
    record.kind = kind_read(record.kind);
    record.mtime_ns = mtime_read(std::mem::take(&mut record.mtime_s), record.mtime_ns);
    Ok(record)
}

/// What a listing is compared by, of an inode.
///
/// # Errors
/// The bytes are no inode.
pub fn decode_version(bytes: &[u8]) -> Result<InodeVersion, DecodeError> {
    let mut version = InodeVersion::decode(bytes)?;
    version.mtime_ns = mtime_read(std::mem::take(&mut version.mtime_s), version.mtime_ns);
    Ok(version)
}

pub fn encode_dentry(record: &DentryRecord) -> Vec<u8> {
    DentryRecord { inode: record.inode, kind: kind_stored(record.kind) }.encode_to_vec()
}

pub fn decode_dentry(bytes: &[u8]) -> Result<DentryRecord, DecodeError> {
    let record = DentryRecord::decode(bytes)?;
    Ok(DentryRecord { inode: record.inode, kind: kind_read(record.kind) })
}

fn mtime_read(seconds: u32, mtime_ns: i64) -> i64 {
    if seconds == 0 { mtime_ns } else { i64::from(seconds) * SECOND_NS }
}

fn kind_stored(kind: i32) -> i32 {
    if kind == Kind::File as i32 { 0 } else { kind }
}

fn kind_read(stored: i32) -> i32 {
    if stored == 0 { Kind::File as i32 } else { stored }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use cavern_proto::record::{Cut, StoredAttributes};

    use super::*;

    #[test]
    fn records_are_read_as_they_were_and_take_less_room() {
        let second = SECOND_NS;
        let times = [0, 1, -1, second, -second, 1_800_000_000 * second, 1_800_000_000 * second + 1, i64::MAX, i64::MIN];
        let far = (i64::from(u32::MAX) + 1) * second;
        for mtime_ns in times.into_iter().chain([far, far - second]) {
            for kind in [Kind::File, Kind::Directory, Kind::Fifo] {
                let record = InodeRecord { kind: kind as i32, mtime_ns, parent: 7, ..InodeRecord::default() };
                let stored = encode_inode(&record);
                assert_eq!(decode_inode(&stored).unwrap(), record, "{mtime_ns}");
                assert_eq!(decode_inode(&record.encode_to_vec()).unwrap(), record, "in full");
                let is_short = mtime_ns == 1_800_000_000 * second;
                assert!(stored.len() + if is_short { 5 } else { 0 } <= record.encoded_len(), "{mtime_ns}");
                let dentry = DentryRecord { inode: 9, kind: kind as i32 };
                assert_eq!(decode_dentry(&encode_dentry(&dentry)).unwrap(), dentry);
            }
        }
    }

    fn version_of(record: &InodeRecord) -> InodeVersion {
        let InodeRecord { etag_md5, size, mtime_ns, etag_text, .. } = record.clone();
        InodeVersion { etag_md5, size, mtime_s: 0, mtime_ns, etag_text }
    }

    #[test]
    fn a_listing_is_compared_by_what_the_record_says() {
        let other = InodeRecord { size: 7, mtime_ns: 9, etag_text: "e".to_owned(), ..InodeRecord::default() };
        for mtime_ns in [0, 1, -SECOND_NS, 1_800_000_000 * SECOND_NS, 1_800_000_000 * SECOND_NS + 1] {
            for (etag_md5, etag_text) in [(Bytes::from_static(&[7; 16]), ""), (Bytes::new(), "abc-12")] {
                let record = InodeRecord {
                    kind: Kind::File as i32,
                    parent: 1 << 40,
                    mount_id: 3,
                    name: Bytes::from_static(b"\xffname"),
                    etag_md5,
                    etag_text: etag_text.to_owned(),
                    size: 1 << 50,
                    mtime_ns,
                    ctime_ns: 11,
                    atime_ns: Some(12),
                    target: Bytes::from_static(b"../target"),
                    stored: Some(StoredAttributes { own: true, mtime_ns: Some(13), ..StoredAttributes::default() }),
                    cuts: vec![Cut { from: 14, generation: 15 }, Cut { from: 16, generation: 17 }],
                    entries: Some(18),
                    allocated: Some(19),
                    btime_ns: Some(20),
                    ..InodeRecord::default()
                };
                let stored = encode_inode(&record);
                assert_eq!(decode_version(&stored).unwrap(), version_of(&record));
                assert_eq!(decode_version(&record.encode_to_vec()).unwrap(), version_of(&record), "in full");
                // Of a field that is there several times the last counts, as for the record.
                for twice in [[encode_inode(&other), stored.clone()].concat(), [stored, encode_inode(&other)].concat()]
                {
                    let read = decode_inode(&twice).unwrap();
                    assert_eq!(decode_version(&twice).unwrap(), version_of(&read));
                }
            }
        }
        assert!(decode_version(b"\xff").is_err());
    }
}
