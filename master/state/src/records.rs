//! Keys of the tables, and the compact spelling of their values.
//!
//! A file that was never opened costs one `inode` and one `dentry` record, about a hundred bytes together for a name of
//! ordinary length. What nearly every record would repeat is left out and put back on reading: mode 0644 (0755 for a
//! directory), owner 0:0, one link, and a change time that equals the modification time. In fs-mode mounts, where a
//! mode may be 0, every mode carries [`MODE_CHOSEN`].

use bytes::Bytes;
use cavern_posix::mode::MODE_BITS;
use cavern_proto::master::{Attr, Kind, LockKind, OwnAttributes};
use cavern_proto::record::{InodeRecord, ListedEntry, Stray};
use prost::Message;

use crate::error::StateError;

/// In the mode of a record: the permission bits are what they are, none left out.
pub const MODE_CHOSEN: u32 = 1 << 16;

/// Key of an inode, and prefix of the keys of a directory's entries.
pub fn inode_key(inode: u64) -> [u8; 8] {
    inode.to_be_bytes()
}

/// Key of a directory's entry: parent id ‖ name.
pub fn dentry_key(parent: u64, name: &[u8]) -> Vec<u8> {
    let mut key = Vec::with_capacity(8 + name.len());
    key.extend_from_slice(&parent.to_be_bytes());
    key.extend_from_slice(name);
    key
}

/// Key of an extended attribute: inode ‖ name.
pub fn xattr_key(inode: u64, name: &[u8]) -> Vec<u8> {
    [inode_key(inode).as_slice(), name].concat()
}

/// Key of a block of a file: inode ‖ index.
pub fn extent_key(inode: u64, index: u32) -> [u8; 12] {
    let mut key = [0; 12];
    key[..8].copy_from_slice(&inode_key(inode));
    key[8..].copy_from_slice(&index.to_be_bytes());
    key
}

/// Key of a replica of a block: worker ‖ inode ‖ index.
pub fn replica_key(worker: u64, inode: u64, index: u32) -> [u8; 20] {
    let mut key = [0; 20];
    key[..8].copy_from_slice(&worker.to_be_bytes());
    key[8..].copy_from_slice(&extent_key(inode, index));
    key
}

/// Inode and index of the key of a block.
pub fn parse_extent_key(key: &[u8]) -> Option<(u64, u32)> {
    let (inode, index) = key.split_first_chunk()?;
    Some((u64::from_be_bytes(*inode), u32::from_be_bytes(index.try_into().ok()?)))
}

/// Key of what a worker may have of a block that is none of its replicas: worker ‖ inode ‖ generation ‖ index.
pub fn stray_key(worker: u64, stray: &Stray) -> [u8; 24] {
    let mut key = [0; 24];
    key[..8].copy_from_slice(&worker.to_be_bytes());
    key[8..16].copy_from_slice(&inode_key(stray.inode));
    key[16..20].copy_from_slice(&stray.generation.to_be_bytes());
    key[20..].copy_from_slice(&stray.index.to_be_bytes());
    key
}

/// Worker and block of such a key.
pub fn parse_stray_key(key: &[u8]) -> Option<(u64, Stray)> {
    let (worker, rest) = key.split_first_chunk()?;
    let (inode, rest) = rest.split_first_chunk()?;
    let (generation, index) = rest.split_first_chunk()?;
    let stray = Stray {
        inode: u64::from_be_bytes(*inode),
        generation: u32::from_be_bytes(*generation),
        index: u32::from_be_bytes(index.try_into().ok()?),
    };
    Some((u64::from_be_bytes(*worker), stray))
}

/// Key of the result of a mutation: session ‖ number.
pub fn result_key(session: u64, seq: u64) -> [u8; 16] {
    let mut key = [0; 16];
    key[..8].copy_from_slice(&session.to_be_bytes());
    key[8..].copy_from_slice(&seq.to_be_bytes());
    key
}

/// Key of what the bucket has of an inode: inode ‖ key of the object.
pub fn object_key(inode: u64, key: &str) -> Vec<u8> {
    [inode_key(inode).as_slice(), key.as_bytes()].concat()
}

/// Key of an object that is to be deleted: mount ‖ key of the object.
pub fn deletion_key(mount_id: u32, key: &str) -> Vec<u8> {
    [mount_id.to_be_bytes().as_slice(), key.as_bytes()].concat()
}

/// Key of a directory of which the bucket has names that the namespace lacks: mount ‖ path below its root.
pub fn unlisted_key(mount_id: u32, path: &[u8]) -> Vec<u8> {
    [mount_id.to_be_bytes().as_slice(), path].concat()
}

/// What keys in `meta` begin with that are about directories which sessions hold.
const HELD: &[u8] = b"held";
const HELD_BY: &[u8] = b"of-session";
const HELD_COUNT: &[u8] = b"session-holds";

/// Key of a session's hold of an inode: inode ‖ session.
pub fn hold_key(inode: u64, session: u64) -> [u8; 16] {
    let mut key = [0; 16];
    key[..8].copy_from_slice(&inode_key(inode));
    key[8..].copy_from_slice(&session.to_be_bytes());
    key
}

/// Key of the same among what a session holds: session ‖ inode.
pub fn hold_session_key(session: u64, inode: u64) -> [u8; 16] {
    hold_key(session, inode)
}

/// The inode of such a key.
pub fn held_by_session(key: &[u8]) -> Option<u64> {
    leading_id(key.get(8..)?)
}

/// Key in `meta` of a directory that a session holds: mount ‖ directory.
pub fn held_key(mount_id: u32, directory: u64) -> Vec<u8> {
    [HELD, &mount_id.to_be_bytes(), &directory.to_be_bytes()].concat()
}

/// The mount and the directory of such a key.
pub fn parse_held_key(key: &[u8]) -> Option<(u32, u64)> {
    let (mount_id, directory) = key.strip_prefix(HELD)?.split_first_chunk::<4>()?;
    Some((u32::from_be_bytes(*mount_id), leading_id(directory)?))
}

/// Key in `meta` of the same among what a session holds: session ‖ directory.
pub fn held_by_key(session: u64, directory: u64) -> Vec<u8> {
    [HELD_BY, &session.to_be_bytes(), &directory.to_be_bytes()].concat()
}

/// The directory of such a key.
pub fn parse_held_by_key(key: &[u8]) -> Option<u64> {
    leading_id(key.strip_prefix(HELD_BY)?.get(8..)?)
}

/// Key in `meta` of how many directories a session holds.
pub fn held_count_key(session: u64) -> Vec<u8> {
    [HELD_COUNT, &session.to_be_bytes()].concat()
}

/// Key of the locks of one kind of a file: inode ‖ kind.
pub fn lock_key(inode: u64, kind: LockKind) -> [u8; 9] {
    let mut key = [kind as u8; 9];
    key[..8].copy_from_slice(&inode_key(inode));
    key
}

/// Key of a session among the locks of a file: session ‖ kind ‖ inode.
pub fn lock_session_key(session: u64, kind: LockKind, inode: u64) -> [u8; 17] {
    let mut key = [kind as u8; 17];
    key[..8].copy_from_slice(&session.to_be_bytes());
    key[9..].copy_from_slice(&inode_key(inode));
    key
}

/// Kind and inode of such a key.
pub fn locked_by_session(key: &[u8]) -> Option<(LockKind, u64)> {
    Some((LockKind::try_from(i32::from(*key.get(8)?)).ok()?, leading_id(key.get(9..)?)?))
}

/// The id in the first eight bytes of a key.
pub fn leading_id(key: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(key.get(..8)?.try_into().ok()?))
}

/// Decodes a value; `what` names it in the error.
pub fn decode<M: Message + Default>(bytes: &[u8], what: impl FnOnce() -> String) -> Result<M, StateError> {
    M::decode(bytes).map_err(|_| StateError::Corrupt(what()))
}

/// What distinguishes one version of an object from another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntryVersion {
    pub etag: String,
    pub size: u64,
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
    if record.etag_md5.is_empty() {
        return record.etag_text.clone();
    }
    record
        .etag_md5
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 15])
        .map(|digit| char::from(HEX[usize::from(digit)]))
        .collect()
}

/// The attributes that a record stands for.
pub fn attributes(inode: u64, record: &InodeRecord) -> Attr {
    let own = record.kept.as_ref().filter(|kept| kept.own);
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
        has_xattrs: record.has_xattrs,
        own: if own.is_some() { OwnAttributes::Kept.into() } else { OwnAttributes::None.into() },
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

/// The version that a file's record stands for.
pub fn version(record: &InodeRecord) -> EntryVersion {
    EntryVersion { etag: etag(record), size: record.size }
}

const HEX: &[u8; 16] = b"0123456789abcdef";

/// 32 lower-case hexadecimal digits as 16 bytes; any other spelling must be kept as it is, since `If-Match` compares
/// text.
fn parse_md5(text: &str) -> Option<[u8; 16]> {
    let digits: &[u8; 32] = text.as_bytes().try_into().ok()?;
    let mut md5 = [0; 16];
    for (byte, pair) in md5.iter_mut().zip(digits.chunks_exact(2)) {
        let digit = |character: u8| HEX.iter().position(|hex| *hex == character);
        *byte = u8::try_from(digit(pair[0])? << 4 | digit(pair[1])?).ok()?;
    }
    Some(md5)
}

#[cfg(test)]
mod tests {
    use cavern_proto::record::DentryRecord;

    use super::*;

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
        }
        assert_eq!(file_record(1, 1, &listed("a", "d41d8cd98f00b204e9800998ecf8427e")).etag_md5.len(), 16);
    }

    #[test]
    fn an_unopened_file_costs_less_than_two_hundred_bytes() {
        let name = "ILSVRC2012_val_00012345_n02123045.JPEG";
        let parent = 100_000_000;
        let record = file_record(parent, 7, &listed(name, "d41d8cd98f00b204e9800998ecf8427e"));
        let dentry = DentryRecord { inode: 99_000_000, kind: Kind::File as i32 };
        let bytes = inode_key(99_000_000).len()
            + record.encoded_len()
            + dentry_key(parent, name.as_bytes()).len()
            + dentry.encoded_len();
        assert!(bytes <= 200, "{bytes} bytes");
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
