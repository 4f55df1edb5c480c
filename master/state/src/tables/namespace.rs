//! Names, inodes, and the way from an inode up to the root.

use std::ops::ControlFlow;

use bytes::Bytes;
use cavern_posix::acl::{ACCESS, Acl};
use cavern_proto::ROOT_INODE;
use cavern_proto::master::User;
use cavern_proto::record::{DentryRecord, InodeRecord, InodeVersion};
use rocksdb::DBRawIterator;

use super::{DEPTH_MAX, Found, Listed, Tables};
use crate::error::{Result, StateError};
use crate::records::compact::decode_version;
use crate::records::{attributes, is_directory, links};
use crate::schema::{self, Family, decode_key, decode_record, encode_key, end_of};

/// From one inode to the next that lies no further behind it, steps are cheaper than a search.
const NEAR: u64 = 8;
/// Inodes for each such search at least, where one batched read of all would cost more.
const FOR_A_SEARCH: usize = 8;

/// A directory, found in the namespace.
#[derive(Clone, Debug)]
pub struct Directory {
    pub inode: u64,
    pub record: InodeRecord,
    /// 0 for directories above any mount.
    pub mount_id: u32,
    /// Names from the mount's root (or from the namespace's root, above mounts) down to this directory.
    pub path: Vec<Bytes>,
}

impl Directory {
    /// Whether this is the root of its mount.
    pub fn is_mount_root(&self) -> bool {
        self.mount_id != 0 && self.path.is_empty()
    }

    /// The key prefix of the directory's objects in a mount whose own prefix is `mount_prefix`; `None` where a name is
    /// not UTF-8, which no listing makes.
    pub fn key_prefix(&self, mount_prefix: &str) -> Option<String> {
        let mut key = mount_prefix.to_owned();
        for name in &self.path {
            key.push_str(std::str::from_utf8(name).ok()?);
            key.push('/');
        }
        Some(key)
    }
}

impl<'a> Tables<'a> {
    /// Many inodes in one batched read, in the order asked for.
    pub fn inodes(&self, inodes: impl Iterator<Item = u64>) -> Result<Vec<Option<InodeRecord>>> {
        self.batched(inodes, decode_record::<schema::Inodes>)
    }

    /// What a listing is compared by, of many inodes that have names, in the order asked for. Names that were listed
    /// together have inodes that lie behind each other: those are read in a row.
    pub fn versions(&self, inodes: &[u64]) -> Result<Vec<Option<InodeVersion>>> {
        let decode = |bytes: &[u8]| {
            decode_version(bytes).map_err(|_| StateError::Corrupt(format!("a record of {:?}", Family::Inode)))
        };
        let mut order: Vec<usize> = (0..inodes.len()).collect();
        order.sort_unstable_by_key(|at| inodes[*at]);
        let searches = 1 + order.windows(2).filter(|pair| inodes[pair[1]] - inodes[pair[0]] > NEAR).count();
        let is_changing = self.unwritten.is_some() || self.changing.is_some();
        if is_changing || searches * FOR_A_SEARCH > inodes.len() {
            return self.batched(inodes.iter().copied(), decode);
        }
        let mut rows = self.raw_rows(Family::Inode, None);
        let mut versions = vec![None; inodes.len()];
        let mut before: Option<u64> = None;
        for at in order {
            let (inode, key) = (inodes[at], inodes[at].to_be_bytes());
            if before.is_some_and(|before| inode - before <= NEAR) {
                while rows.key().is_some_and(|other| other[..] < key[..]) {
                    rows.next();
                }
            } else {
                rows.seek(key);
            }
            before = Some(inode);
            match rows.item() {
                Some((other, value)) if other[..] == key[..] => versions[at] = Some(decode(value)?),
                Some(_) => {}
                None => rows.status()?,
            }
        }
        Ok(versions)
    }

    fn batched<R>(
        &self,
        inodes: impl Iterator<Item = u64>,
        decode: impl Fn(&[u8]) -> Result<R>,
    ) -> Result<Vec<Option<R>>> {
        if self.unwritten.is_some() || self.changing.is_some() {
            return inodes.map(|inode| self.read(Family::Inode, &inode.to_be_bytes(), &decode)).collect();
        }
        let keys: Vec<[u8; 8]> = inodes.map(u64::to_be_bytes).collect();
        let family = self.database.family(Family::Inode);
        let values = self.database.raw().batched_multi_get_cf_opt(family, &keys, false, &self.options());
        values.into_iter().map(|value| value?.map(|bytes| decode(&bytes)).transpose()).collect()
    }

    /// The rows of a family as they are written, up to a key if there is one, of which nothing is copied. Where they
    /// begin is to be sought.
    fn raw_rows(&self, family: Family, until: Option<Vec<u8>>) -> DBRawIterator<'a> {
        let mut options = self.options();
        if let Some(until) = until {
            options.set_iterate_upper_bound(until);
        }
        self.database.raw().raw_iterator_cf_opt(self.database.family(family), options)
    }

    /// Up to `limit` inodes beyond this one, of all mounts, in the order of their ids.
    pub fn inodes_after(&self, after: u64, limit: usize) -> Result<Vec<(u64, InodeRecord)>> {
        self.rows_after(schema::Inodes, (), Some(after)).page(limit, |row| row.entry())
    }

    /// Calls `visit` with the entries of a directory in name order, beginning after `after` (exclusive; `None` for the
    /// first), until it breaks.
    pub fn scan<B>(
        &self,
        directory: u64,
        after: Option<&[u8]>,
        mut visit: impl FnMut(&[u8], DentryRecord) -> Result<ControlFlow<B>>,
    ) -> Result<Option<B>> {
        if self.unwritten.is_some() {
            for row in self.rows_after(schema::Dentries, directory, after.map(|name| (directory, name))) {
                let row = row?;
                let ((_, name), record) = row.entry()?;
                if let ControlFlow::Break(broken) = visit(name, record)? {
                    return Ok(Some(broken));
                }
            }
            return Ok(None);
        }
        let mut start = encode_key::<schema::Dentries>(&directory);
        let mut rows = self.raw_rows(Family::Dentry, end_of(&start));
        if let Some(after) = after {
            start.extend_from_slice(after);
            start.push(0);
        }
        rows.seek(start);
        while let Some((key, value)) = rows.item() {
            let (_, name) = decode_key::<schema::Dentries>(key)?;
            if let ControlFlow::Break(broken) = visit(name, decode_record::<schema::Dentries>(value)?)? {
                return Ok(Some(broken));
            }
            rows.next();
        }
        rows.status()?;
        Ok(None)
    }

    /// Up to `limit` entries of a directory after `after`, and whether these are the last.
    pub fn entries(
        &self,
        directory: u64,
        after: Option<&[u8]>,
        limit: usize,
    ) -> Result<(Vec<(Bytes, DentryRecord)>, bool)> {
        let mut entries = Vec::new();
        let more = self.scan(directory, after, |name, record| {
            if entries.len() == limit {
                return Ok(ControlFlow::Break(()));
            }
            entries.push((Bytes::copy_from_slice(name), record));
            Ok(ControlFlow::Continue(()))
        })?;
        Ok((entries, more.is_none()))
    }

    /// Up to `limit` entries of a directory after `after` with their inode records, and whether these are the last.
    pub fn page(&self, directory: u64, after: Option<&[u8]>, limit: usize) -> Result<(Vec<Listed>, bool)> {
        let (entries, is_last) = self.entries(directory, after, limit)?;
        let records = self.inodes(entries.iter().map(|(_, entry)| entry.inode))?;
        let found = entries.into_iter().zip(records);
        let page = found.filter_map(|((name, entry), record)| Some((name, entry.inode, record?))).collect();
        Ok((page, is_last))
    }

    /// Whether a directory has any entry.
    pub fn is_empty(&self, directory: u64) -> Result<bool> {
        Ok(!self.has_any(schema::Dentries, directory)?)
    }

    /// Whether a directory of an fs-mode mount has no entry: its names may just have been removed, by the hundred
    /// thousand: they cost a scan as much as others, for a time. So it is not a long one where the directory says how
    /// many names it has.
    pub fn is_empty_directory(&self, directory: u64, record: &InodeRecord) -> Result<bool> {
        let Some(entries) = record.entries else { return self.is_empty(directory) };
        let start = encode_key::<schema::Dentries>(&directory);
        Ok(match self.first_unless_removed::<schema::Dentries>(&start, end_of(&start))? {
            Found::Nothing => true,
            Found::Row(_) => false,
            Found::Removed => entries == 0,
        })
    }

    /// Every name of an inode, one by one: its parent, and the name there.
    pub fn names(&self, inode: u64, record: &InodeRecord) -> impl Iterator<Item = Result<(u64, Bytes)>> + use<'a> {
        let has_several = !is_directory(record) && links(record) > 1;
        let only = (!record.unlinked && !has_several).then(|| Ok((record.parent, record.name.clone())));
        let several = (!record.unlinked && has_several).then(|| self.rows(schema::Links, inode));
        let several = several.into_iter().flatten().map(|row| {
            let row = row?;
            let (_, (parent, name)) = row.key()?;
            Ok((parent, Bytes::copy_from_slice(name)))
        });
        only.into_iter().chain(several)
    }

    /// An inode and the directories above it, nearest first, with their records.
    pub fn ancestors(&self, inode: u64) -> impl Iterator<Item = Result<(u64, InodeRecord)>> + use<'a> {
        let (tables, mut next) = (*self, inode);
        let step = move || {
            let at = next;
            let found = if at == 0 { None } else { tables.inode(at).transpose() }?;
            next = found.as_ref().map_or(0, |record| record.parent);
            Some(found.map(|record| (at, record)))
        };
        std::iter::from_fn(step).take(DEPTH_MAX)
    }

    /// A directory and those above it in its mount, nearest first.
    pub fn above(&self, directory: u64) -> Result<Vec<u64>> {
        let is_of_mount = |item: &Result<(u64, InodeRecord)>| !matches!(item, Ok((_, record)) if record.mount_id == 0);
        self.ancestors(directory).take_while(is_of_mount).map(|item| Ok(item?.0)).collect()
    }

    /// Whether an inode is another, or lies somewhere below it.
    pub fn is_below(&self, inode: u64, top: u64) -> Result<bool> {
        for item in self.ancestors(inode) {
            if item?.0 == top {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The names from a directory down to what lies below it, each followed by a `/`; `None` when it is cut off from
    /// there.
    pub fn path_below(&self, inode: u64, top: u64) -> Result<Option<Vec<u8>>> {
        let mut names: Vec<Bytes> = Vec::new();
        for item in self.ancestors(inode) {
            let (at, record) = item?;
            if at == top {
                return Ok(Some(names.iter().rev().flat_map(|name| [name, &b"/"[..]].concat()).collect()));
            }
            names.push(record.name);
        }
        Ok(None)
    }

    /// What people are told of an inode: its path, by the first of its names, as readable as it can be; or its number,
    /// where it has none.
    pub fn shown(&self, inode: u64) -> Result<String> {
        Ok(match self.path_below(inode, ROOT_INODE)? {
            Some(path) => format!("/{}", String::from_utf8_lossy(path.strip_suffix(b"/").unwrap_or_default())),
            None => format!("inode {inode}"),
        })
    }

    /// The directory of this inode id with its place in the namespace; `None` when it is gone, or cut off from the
    /// root.
    ///
    /// # Errors
    /// [`StateError::NotADirectory`] for an inode that is no directory.
    pub fn directory(&self, inode: u64) -> Result<Option<Directory>> {
        let mut chain = self.ancestors(inode).collect::<Result<Vec<_>>>()?;
        let Some((_, record)) = chain.first() else { return Ok(None) };
        if !is_directory(record) {
            return Err(StateError::NotADirectory(self.shown(inode)?));
        }
        if chain.last().is_none_or(|(at, _)| *at != ROOT_INODE) {
            return Ok(None);
        }
        let mount_id = record.mount_id;
        let below = chain.windows(2).filter(|pair| pair[1].1.mount_id == mount_id);
        let mut path: Vec<Bytes> = below.map(|pair| pair[0].1.name.clone()).collect();
        path.reverse();
        let (inode, record) = chain.swap_remove(0);
        Ok(Some(Directory { inode, record, mount_id, path }))
    }

    /// Whether a directory of a mount, or any below it, is unlisted; by its path below the mount's root.
    pub fn has_unlisted(&self, mount_id: u32, path: &[u8]) -> Result<bool> {
        self.has_any(schema::Unlisted, (mount_id, path))
    }

    /// All extended attributes of an inode, names and values, in the order of their names.
    pub fn xattrs(&self, inode: u64) -> Result<Vec<(Bytes, Bytes)>> {
        self.rows(schema::Xattrs, inode).page(usize::MAX, |row| {
            let ((_, name), value) = row.entry()?;
            Ok((Bytes::copy_from_slice(name), value))
        })
    }

    /// One access list of an inode. What is kept there has been checked before.
    pub fn acl(&self, inode: u64, record: &InodeRecord, name: &[u8]) -> Result<Option<Acl>> {
        let value = if record.xattr_bytes > 0 { self.get(schema::Xattrs, (inode, name))? } else { None };
        let Some(value) = value else { return Ok(None) };
        let acl = Acl::decode(&value);
        acl.map(Some).ok_or_else(|| StateError::Corrupt(format!("an access list of inode {inode}")))
    }

    /// Whether mode or access list of an inode allow a user all of this (of 0o7).
    pub fn permits(&self, user: &User, inode: u64, record: &InodeRecord, wanted: u32) -> Result<bool> {
        let list = self.acl(inode, record, ACCESS)?;
        Ok(cavern_posix::permits(user, &attributes(inode, record), list.as_ref(), wanted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::database::Database;
    use crate::transaction::Transaction;
    use crate::write_batch_overlay::WriteBatchOverlay;

    /// What changes write, before it is written.
    fn unwritten(database: &Database, change: impl FnOnce(&mut Transaction<'_>)) -> WriteBatchOverlay {
        let mut transaction = Transaction::new(database).unwrap();
        change(&mut transaction);
        transaction.finish().unwrap().0
    }

    fn write(database: &Database, changes: WriteBatchOverlay) {
        database.write(changes.into_batch(database)).unwrap();
    }

    /// What a listing is compared by, by the records and without them.
    #[track_caller]
    fn versions(tables: Tables<'_>, asked: &[u64]) -> Vec<Option<(u64, String, i64)>> {
        let records = tables.inodes(asked.iter().copied()).unwrap().into_iter();
        let expected: Vec<_> =
            records.map(|found| found.map(|record| (record.size, record.etag_text, record.mtime_ns))).collect();
        let versions = tables.versions(asked).unwrap().into_iter();
        let versions: Vec<_> =
            versions.map(|found| found.map(|version| (version.size, version.etag_text, version.mtime_ns))).collect();
        assert_eq!(versions, expected, "{asked:?}");
        versions
    }

    #[test]
    fn versions_are_those_of_the_inodes_in_the_order_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let database = Database::open(dir.path(), 1 << 20).unwrap();
        let first = unwritten(&database, |transaction| {
            for inode in (1..1000_u64).filter(|inode| !inode.is_multiple_of(7)) {
                // Each other one is of a whole second.
                let mtime_ns = 1_800_000_000_000_000_000 + i64::from(inode.is_multiple_of(2));
                let etag_text = format!("e{inode}");
                transaction.put_inode(inode, InodeRecord { size: inode, mtime_ns, etag_text, ..Default::default() });
            }
        });
        write(&database, first);
        let in_a_row: Vec<u64> = (1..300).rev().collect();
        let scattered: Vec<u64> = (0..40).map(|number| number * 30).collect();
        let runs: Vec<u64> = [500..600, 1..100, 550..560, 980..1020].into_iter().flatten().collect();
        let all = [in_a_row, scattered, runs, vec![2000; 100], vec![5, 7], Vec::new()];
        let snapshot = database.raw().snapshot();
        let (now, then) = (Tables::new(&database), Tables::at(&database, &snapshot));
        let before: Vec<_> = all.iter().map(|asked| versions(now, asked)).collect();
        assert!(before[0][0].as_ref().is_some_and(|(size, etag, _)| (*size, etag.as_str()) == (299, "e299")));
        let second = unwritten(&database, |transaction| {
            (50..80).chain(520..530).for_each(|inode| transaction.delete_inode(inode));
            (90..99).for_each(|inode| transaction.put_inode(inode, InodeRecord { size: 7, ..Default::default() }));
        });
        let changed: Vec<_> = all.iter().map(|asked| versions(Tables::with(&database, &second), asked)).collect();
        assert!(changed[0] != before[0] && changed[2] != before[2]);
        write(&database, second);
        for (asked, (before, changed)) in all.iter().zip(before.iter().zip(&changed)) {
            assert_eq!((&versions(then, asked), &versions(now, asked)), (before, changed), "{asked:?}");
        }
    }

    /// Names of a directory behind one, and whether these are the last.
    fn names(tables: Tables<'_>, directory: u64, after: Option<&str>, limit: usize) -> (Vec<String>, bool) {
        let (entries, is_last) = tables.entries(directory, after.map(str::as_bytes), limit).unwrap();
        let name = |name: &[u8]| String::from_utf8(name.to_vec()).unwrap();
        (entries.iter().map(|(of, _)| name(of)).collect(), is_last)
    }

    #[test]
    fn a_scan_has_the_names_of_one_directory_as_they_are_or_were() {
        let dir = tempfile::tempdir().unwrap();
        let database = Database::open(dir.path(), 1 << 20).unwrap();
        let file = |inode: u64| DentryRecord { inode, ..Default::default() };
        let first = unwritten(&database, |transaction| {
            for (directory, name) in [(254, "z"), (255, "a"), (255, "ab"), (255, "b"), (256, "c")] {
                transaction.put_dentry(directory, name.as_bytes(), file(1000));
            }
        });
        write(&database, first);
        let snapshot = database.raw().snapshot();
        let (now, then) = (Tables::new(&database), Tables::at(&database, &snapshot));
        let said = |shown: &[&str], is_last| (shown.iter().map(ToString::to_string).collect::<Vec<_>>(), is_last);
        assert_eq!(names(now, 255, None, 9), said(&["a", "ab", "b"], true));
        assert_eq!(names(now, 255, None, 2), said(&["a", "ab"], false));
        assert_eq!(names(now, 255, Some("a"), 9), said(&["ab", "b"], true));
        assert_eq!(names(now, 255, Some("aa"), 1), said(&["ab"], false));
        assert_eq!(names(now, 255, Some("b"), 9), said(&[], true));
        assert_eq!((names(now, 253, None, 9), names(now, 257, None, 9)), (said(&[], true), said(&[], true)));
        let second = unwritten(&database, |transaction| {
            transaction.delete_dentry(255, b"ab");
            transaction.put_dentry(255, b"c", file(1001));
        });
        assert_eq!(names(Tables::with(&database, &second), 255, None, 9), said(&["a", "b", "c"], true));
        write(&database, second);
        assert_eq!(names(now, 255, None, 9), said(&["a", "b", "c"], true));
        assert_eq!(names(then, 255, None, 9), said(&["a", "ab", "b"], true));
    }

    /// A look at what is in memory ends where it would have to wait for the disk: nothing must be taken for absent.
    #[test]
    fn an_iteration_that_fails_is_no_end() {
        let dir = tempfile::tempdir().unwrap();
        let database = Database::open(dir.path(), 1 << 20).unwrap();
        let inodes: Vec<u64> = (1..100).collect();
        let all = unwritten(&database, |transaction| {
            for inode in &inodes {
                transaction.put_inode(*inode, InodeRecord { size: *inode, ..Default::default() });
                transaction.put_dentry(1, format!("{inode:04}").as_bytes(), DentryRecord { inode: *inode, kind: 0 });
            }
        });
        write(&database, all);
        for family in [Family::Inode, Family::Dentry] {
            database.raw().flush_cf(database.family(family)).unwrap();
        }
        drop(database);
        let database = Database::open(dir.path(), 1 << 20).unwrap();
        let on_disk = Tables::new(&database);
        let scanned = on_disk.in_memory().entries(1, None, 1000).map(|(entries, _)| entries.len());
        assert!(scanned.as_ref().is_err_and(StateError::needs_disk), "{scanned:?}");
        let read = on_disk.in_memory().versions(&inodes);
        assert!(read.as_ref().is_err_and(StateError::needs_disk), "{read:?}");
        assert_eq!(on_disk.entries(1, None, 1000).unwrap().0.len(), inodes.len());
        assert!(versions(on_disk, &inodes).iter().all(Option::is_some));
    }
}
