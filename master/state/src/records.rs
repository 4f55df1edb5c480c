//! What records say, and the compact spelling of it.
//!
//! A file that was never opened costs one `inode` and one `dentry` record, some 115 bytes together for a name of 30
//! bytes, and less than 100 on disk. What nearly every record would repeat is left out and put back on reading: mode
//! 0644 (0755 for a directory), owner 0:0, one link, and a change time that equals the modification time; and, in what
//! is stored, more ([`compact`]). In fs-mode mounts, where a mode may be 0, every mode carries [`MODE_CHOSEN`].

pub mod compact;

use bytes::Bytes;
use cavern_posix::mode::MODE_BITS;
use cavern_proto::master::{Attr, Extent, Kind, OwnAttributes};
use cavern_proto::record::{Counters, Cut, ExtentRecord, InodeRecord, InodeVersion, ListedEntry};

/// In the mode of a record: the permission bits are what they are, none left out.
pub const MODE_CHOSEN: u32 = 1 << 16;
/// No history, and no view, begins with later generations than this: each file has a quarter of all left.
pub const GENERATIONS_MAX: u32 = 3 << 30;

/// The id in the first eight bytes of a key.
pub fn leading_id(key: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(key.get(..8)?.try_into().ok()?))
}

/// A file's record for an object of a listing.
pub fn file_record(parent: u64, mount_id: u32, listed: &ListedEntry) -> InodeRecord {
    let (etag_md5, etag_text) = match parse_md5(&listed.etag) {
        Some(md5) => (Bytes::copy_from_slice(&md5), String::new()),
        None => (Bytes::new(), listed.etag.clone()),
    };
    InodeRecord {
        kind: Kind::File as i32,
        size: listed.size,
        mtime_ns: listed.mtime_ns,
        parent,
        name: listed.name.clone(),
        mount_id,
        etag_md5,
        etag_text,
        ..InodeRecord::default()
    }
}

/// A directory's record; its times are those of its first appearance.
pub fn directory_record(parent: u64, name: Bytes, mount_id: u32, now_ns: i64) -> InodeRecord {
    InodeRecord { kind: Kind::Directory as i32, mtime_ns: now_ns, parent, name, mount_id, ..InodeRecord::default() }
}

/// The ETag as the bucket spells it.
pub fn etag(record: &InodeRecord) -> String {
    match <[u8; 16]>::try_from(&record.etag_md5[..]) {
        Ok(md5) => format!("{:032x}", u128::from_be_bytes(md5)),
        Err(_) => record.etag_text.clone(),
    }
}

/// The attributes that a record stands for.
pub fn attributes(inode: u64, record: &InodeRecord) -> Attr {
    let own = record.stored.as_ref().filter(|kept| kept.own);
    let (own_mode, uid, gid) =
        own.map_or((mode(record), record.uid, record.gid), |kept| (kept.mode & MODE_BITS, kept.uid, kept.gid));
    Attr {
        inode,
        kind: record.kind,
        mode: own_mode,
        uid,
        gid,
        size: record.size,
        mtime_ns: own.and_then(|kept| kept.mtime_ns).unwrap_or(record.mtime_ns),
        ctime_ns: changed_ns(record),
        nlink: if record.unlinked { 0 } else { links(record) },
        atime_ns: record.atime_ns.unwrap_or(record.mtime_ns),
        rdev: record.rdev,
        version: record.version,
        generation: record.generation,
        has_xattrs: record.xattr_bytes > 0,
        own: if own.is_some() { OwnAttributes::Stored.into() } else { OwnAttributes::None.into() },
        has_capability: record.has_capability,
        allocated: record.allocated,
        btime_ns: record.btime_ns,
        next_generation: 0,
    }
}

/// Has a rule of POSIX change the attributes of a record of an fs-mode mount: all but generation, blocks and extended
/// attributes, and what an inode has from its first moment on.
pub fn change<T>(record: &mut InodeRecord, rule: impl FnOnce(&mut Attr) -> T) -> T {
    let mut attr = attributes(0, record);
    let done = rule(&mut attr);
    record.mode = attr.mode | MODE_CHOSEN;
    (record.uid, record.gid) = (attr.uid, attr.gid);
    (record.size, record.version) = (attr.size, attr.version);
    (record.mtime_ns, record.ctime_ns, record.atime_ns) = (attr.mtime_ns, attr.ctime_ns, Some(attr.atime_ns));
    record.unlinked = attr.nlink == 0;
    if ![0, links(record)].contains(&attr.nlink) {
        record.nlink = attr.nlink;
    }
    done
}

/// What an extended attribute takes of its inode and of quotas: bytes of its name and value.
pub fn xattr_size(name: &[u8], value: &[u8]) -> u32 {
    u32::try_from(name.len() + value.len()).unwrap_or(u32::MAX)
}

/// The time of the last change.
pub fn changed_ns(record: &InodeRecord) -> i64 {
    if record.ctime_ns == 0 { record.mtime_ns } else { record.ctime_ns }
}

/// Permission bits (07777).
pub fn mode(record: &InodeRecord) -> u32 {
    match record.mode {
        0 if record.kind() == Kind::Directory => 0o755,
        0 => 0o644,
        mode => mode & MODE_BITS,
    }
}

pub fn is_directory(record: &InodeRecord) -> bool {
    record.kind() == Kind::Directory
}

/// Counts names that a directory got, or lost.
pub fn count_entries(record: &mut InodeRecord, change: i64) {
    record.entries = record.entries.map(|entries| entries.saturating_add_signed(change));
}

/// Names of an inode; of a directory its own, its `.`, and the `..` of every directory in it.
pub fn links(record: &InodeRecord) -> u32 {
    match record.nlink {
        0 if record.kind() == Kind::Directory => 2,
        0 => 1,
        links => links,
    }
}

/// A block as it is sent, of its record.
pub fn extent_at(index: u32, record: ExtentRecord) -> Extent {
    let ExtentRecord { generation, workers, joined, joining, joins: _, allocated } = record;
    Extent { index, generation, workers, joined, joining, allocated, replaces: None }
}

/// Whether a block has been cut off its file, though its record is there.
pub fn is_truncated(cuts: &[Cut], index: u32, generation: u32) -> bool {
    // The last of those that begin before it is of the latest generation.
    let before = cuts.partition_point(|cut| cut.from <= index);
    cuts[..before].last().is_some_and(|cut| generation < cut.generation)
}

/// Of which generation the blocks are that are made next for a file: none that was there before this history, or before
/// the last view was frozen, has an earlier one (`BeginHistory`, `FreezeView`). Those who made blocks of the file's own
/// meanwhile are right as well.
pub fn next_generation(counters: &Counters, inode: u64, record: &InodeRecord) -> u32 {
    match inode <= counters.old_inodes {
        true => record.generation.max(counters.next_generation),
        false => record.generation,
    }
}

/// Whether there is one way to an inode: what has several names, or none, may have been reached by any.
pub fn has_one_name(record: &InodeRecord) -> bool {
    !record.unlinked && (is_directory(record) || links(record) == 1)
}

/// Whether a file's record stands for this version of an object.
pub fn is_version(record: &InodeRecord, etag: &str, size: u64) -> bool {
    record.size == size && is_etag(&record.etag_md5, &record.etag_text, etag)
}

/// Whether a file stands for an object as it is listed.
pub fn is_listed(version: &InodeVersion, etag: &str, size: u64, mtime_ns: i64) -> bool {
    version.size == size && version.mtime_ns == mtime_ns && is_etag(&version.etag_md5, &version.etag_text, etag)
}

/// Whether a kept ETag is this one.
fn is_etag(kept_md5: &[u8], kept_text: &str, etag: &str) -> bool {
    match parse_md5(etag) {
        Some(md5) => *kept_md5 == md5,
        None => kept_md5.is_empty() && kept_text == etag,
    }
}

/// 32 lower-case hexadecimal digits as 16 bytes; any other spelling must be kept as it is, since `If-Match` compares
/// text.
fn parse_md5(text: &str) -> Option<[u8; 16]> {
    let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    let is_md5 = text.len() == 32 && text.bytes().all(is_digit);
    u128::from_str_radix(text, 16).ok().filter(|_| is_md5).map(u128::to_be_bytes)
}

#[cfg(test)]
mod tests {
    use cavern_proto::record::DentryRecord;

    use super::compact::decode_version;
    use super::*;
    use crate::schema::{Dentries, Inodes, Table as _, encode_key};

    #[test]
    fn a_cut_is_of_the_blocks_behind_it_that_were_made_before() {
        let cuts = [Cut { from: 10, generation: 3 }, Cut { from: 20, generation: 5 }];
        let is_truncated = |index, generation| is_truncated(&cuts, index, generation);
        assert_eq!(
            [(9, 0), (10, 2), (19, 2), (20, 2), (20, 4)].map(|(index, at)| is_truncated(index, at)),
            [false, true, true, true, true]
        );
        assert_eq!([(10, 3), (19, 4), (20, 5), (99, 6)].map(|(index, at)| is_truncated(index, at)), [false; 4]);
    }

    fn listed(name: &str, etag: &str) -> ListedEntry {
        ListedEntry {
            name: Bytes::copy_from_slice(name.as_bytes()),
            kind: Kind::File as i32,
            size: 123_456_789,
            mtime_ns: 1_800_000_000_123_456_789,
            etag: etag.to_owned(),
            restored: None,
        }
    }

    #[test]
    fn etags_keep_their_spelling() {
        for text in ["", "d41d8cd98f00b204e9800998ecf8427e", "D41D8CD98F00B204E9800998ECF8427E", "abc-12", "ünicode"] {
            let record = file_record(1, 1, &listed("a", text));
            assert_eq!(etag(&record), text);
            assert!(is_version(&record, text, record.size) && !is_version(&record, text, record.size + 1));
            let version = decode_version(&Inodes::encode(&record)).unwrap();
            let is_as_listed = |etag: &str, more: u64, later: i64| {
                is_listed(&version, etag, record.size + more, record.mtime_ns + later)
            };
            assert!(is_as_listed(text, 0, 0) && !is_as_listed(text, 1, 0) && !is_as_listed(text, 0, 1));
            for other in ["d41d8cd98f00b204e9800998ecf8427f", "abc-13"] {
                assert!(!is_version(&record, other, record.size), "{text:?} {other:?}");
                assert!(!is_as_listed(other, 0, 0), "{text:?} {other:?}");
            }
        }
        assert_eq!(file_record(1, 1, &listed("a", "d41d8cd98f00b204e9800998ecf8427e")).etag_md5.len(), 16);
    }

    /// What is stored for an object of a listing, keys included.
    fn stored_bytes(name: &str, mtime_ns: i64) -> usize {
        let (parent, inode) = (100_000_000_u64, 99_000_000_u64);
        let listed = ListedEntry { mtime_ns, size: 50_000, ..listed(name, "d41d8cd98f00b204e9800998ecf8427e") };
        let dentry = DentryRecord { inode, kind: Kind::File as i32 };
        let keys = encode_key::<Inodes>(&inode).len() + encode_key::<Dentries>(&(parent, name.as_bytes())).len();
        keys + Inodes::encode(&file_record(parent, 7, &listed)).len() + Dentries::encode(&dentry).len()
    }

    #[test]
    fn an_unopened_file_costs_less_than_a_hundred_and_twenty_bytes() {
        let name = "n02123045_val_00012345_01.JPEG";
        assert_eq!(name.len(), 30);
        assert!(stored_bytes(name, 1_800_000_000_000_000_000) <= 118);
        assert!(stored_bytes(name, 1_800_000_000_123_456_789) <= 124);
    }

    #[test]
    fn a_rule_changes_attributes_and_leaves_out_what_was_left_out() {
        let mut record = file_record(1, 1, &listed("a", ""));
        let before = attributes(5, &record);
        change(&mut record, |attr| cavern_posix::content_changed(attr, 7, 9));
        let changed = Attr { size: 7, version: 1, mtime_ns: 9, ctime_ns: 9, ..before };
        assert_eq!((attributes(5, &record), record.nlink), (changed, 0), "the time of access is that of before");
        change(&mut record, |attr| cavern_posix::name_added(attr, 10));
        assert_eq!((attributes(5, &record).nlink, record.nlink), (2, 2));
        for nlink in [1, 0] {
            change(&mut record, |attr| cavern_posix::name_dropped(attr, 11));
            assert_eq!((attributes(5, &record).nlink, record.unlinked), (nlink, nlink == 0));
        }
        change(&mut record, |attr| cavern_posix::name_added(attr, 12));
        assert_eq!((attributes(5, &record).nlink, record.unlinked), (1, false));
    }

    #[test]
    fn defaults_are_put_back() {
        let file = attributes(5, &file_record(1, 1, &listed("a", "")));
        assert_eq!((file.mode, file.nlink, file.ctime_ns), (0o644, 1, file.mtime_ns));
        let directory = attributes(6, &directory_record(1, Bytes::from_static(b"d"), 0, 9));
        assert_eq!((directory.mode, directory.nlink, directory.mtime_ns), (0o755, 2, 9));
    }
}
