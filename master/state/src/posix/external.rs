//! What others changed in the bucket of an fs-mode mount, taken into the namespace name by name.
//!
//! Whoever asks for it has compared a name with the bucket, outside of the log. So everything is looked at once more
//! here: that the name still leads where it led, that the object noted of it is the one that it was compared with, and
//! that nothing is on its way to the bucket under its key. What has been changed here and is not in the bucket yet
//! stays as it is.

use std::collections::HashSet;

use cavern_proto::master::{Kind, Origin, RefreshFate, WriteType};
use cavern_proto::record::{
    AdoptListing, DentryRecord, IndexRecord, InodeRecord, ListedEntry, ObjectRecord, TakeInObject,
};

use super::{MutationContext, MutationError};
use crate::error::StateError;
use crate::records::{is_directory, links};
use crate::tables::index_key;
use crate::transaction::{Change, Transaction};
use crate::{Family, existing, extent, intent, origin, records};

/// Takes in what the bucket has under a name now, unless the namespace has something newer.
pub fn take_in(transaction: &mut Transaction<'_>, taken: &TakeInObject) -> Result<RefreshFate, StateError> {
    let mount = transaction.before().mount(taken.mount_id)?.filter(|mount| mount.write_type() == WriteType::FsMode);
    let is_whole = |record: &InodeRecord| {
        is_directory(record) && record.mount_id == taken.mount_id && record.listed_ns != 0 && !record.unlinked
    };
    let directory = transaction.inode(taken.directory)?.filter(is_whole);
    let (Some(mount), Some(directory)) = (mount, directory) else { return Ok(RefreshFate::Nothing) };
    let path = existing::path(transaction, taken.directory, mount.root_inode)?;
    let known = transaction.dentry(taken.directory, &taken.name)?;
    // It lies elsewhere by now, or the name leads elsewhere.
    if path.as_ref().is_none_or(|path| *path != taken.path) || known.map_or(0, |known| known.inode) != taken.inode {
        return Ok(RefreshFate::Nothing);
    }
    if is_held(transaction, taken.directory, &directory, taken.inode)? {
        return Ok(RefreshFate::Pending);
    }
    let Ok(name) = std::str::from_utf8(&taken.name) else { return Ok(RefreshFate::Nothing) };
    let key = format!("{}{name}", taken.key_prefix);
    let mut taking = ExternalChange { transaction, taken, directory, path: path.unwrap_or_default(), key };
    match (known, &taken.there) {
        (None, None) => Ok(RefreshFate::Nothing),
        (None, Some(there)) => taking.add(there),
        (Some(known), there) if known.kind() == Kind::Directory => match there.as_ref().map(ListedEntry::kind) {
            Some(Kind::Directory) => Ok(RefreshFate::Nothing),
            _ => taking.remove_directory(known),
        },
        (Some(known), there) => taking.compare(known, there.as_ref()),
    }
}

/// Whether a session may have answered for other changes of a directory, or of what a name in it leads to.
fn is_held(
    transaction: &mut Transaction<'_>,
    directory: u64,
    record: &InodeRecord,
    known: u64,
) -> Result<bool, StateError> {
    if transaction.counters.held == 0 {
        return Ok(false);
    }
    let tables = transaction.before();
    if tables.held_around(directory, record, |_| true)?.is_some() {
        return Ok(true);
    }
    let Some(record) = transaction.inode(known)? else { return Ok(false) };
    Ok(tables.held_around(known, &record, |_| true)?.is_some())
}

struct ExternalChange<'t, 'd> {
    transaction: &'t mut Transaction<'d>,
    taken: &'t TakeInObject,
    directory: InodeRecord,
    path: Vec<u8>,
    key: String,
}

impl ExternalChange<'_, '_> {
    /// A name that the namespace does not have.
    fn add(&mut self, there: &ListedEntry) -> Result<RefreshFate, StateError> {
        let (mount_id, key) = (self.taken.mount_id, &self.key);
        let tables = self.transaction.before();
        if there.kind() != Kind::Directory {
            // It was moved away or removed here, and the bucket has not followed yet.
            let is_ours = tables.noted(mount_id, key)?.is_some() || tables.origin_of(mount_id, key)?.is_some();
            if is_ours || tables.deletion(mount_id, key)?.is_some() {
                return Ok(RefreshFate::Pending);
            }
            existing::adopt_object(self.transaction, &self.listing(), there, false, None)?;
            self.count_entries(1);
            return Ok(RefreshFate::Added);
        }
        if tables.is_used_below(mount_id, &format!("{key}/"))? {
            return Ok(RefreshFate::Pending);
        }
        let inode = existing::adopt_directory(self.transaction, &self.listing(), there, false);
        let below = [&self.path, &*self.taken.name, b"/"].concat();
        existing::mark(self.transaction, mount_id, &below, inode);
        let index = tables.index(mount_id)?.unwrap_or_default();
        let index = IndexRecord { finished_ns: 0, unlisted: index.unlisted + 1, entries: index.entries + 1, ..index };
        self.transaction.put(Family::Meta, &index_key(mount_id), &index);
        self.count_entries(1);
        self.count_directories(1);
        Ok(RefreshFate::Added)
    }

    /// A name of something that is no directory.
    fn compare(&mut self, known: DentryRecord, there: Option<&ListedEntry>) -> Result<RefreshFate, StateError> {
        let (mount_id, key) = (self.taken.mount_id, &self.key);
        let tables = self.transaction.before();
        let Some(record) = self.transaction.inode(known.inode)? else { return Ok(RefreshFate::Nothing) };
        let there = there.filter(|there| there.kind() == Kind::File);
        let note = tables.object(known.inode, key)?.filter(|note| !note.etag.is_empty());
        if there.map(|there| &there.etag) == note.as_ref().map(|note| &note.etag) {
            return Ok(RefreshFate::Nothing);
        }
        let is_noted_by_another = tables.noted(mount_id, key)?.is_some_and(|noted| noted != known.inode);
        if is_noted_by_another || tables.deletion(mount_id, key)?.is_some() {
            return Ok(RefreshFate::Pending);
        }
        let Some(note) = note else { return Ok(RefreshFate::Conflict) };
        if note.etag != self.taken.etag {
            return Ok(RefreshFate::Nothing);
        }
        if tables.intent(known.inode)?.is_some() || tables.is_written_by_others(known.inode, 0)? {
            return Ok(RefreshFate::Conflict);
        }
        match there {
            None => {
                self.remove(known, record)?;
                self.count_entries(-1);
                Ok(RefreshFate::Removed)
            }
            Some(there) if record.kind() == Kind::File && links(&record) == 1 => {
                let counters = &self.transaction.counters;
                let Some(generation) = extent::generation_after(counters, known.inode, &record) else {
                    return Ok(RefreshFate::Conflict);
                };
                self.change(known.inode, record, there, generation)?;
                Ok(RefreshFate::Changed)
            }
            Some(there) => {
                self.remove(known, record)?;
                existing::adopt_object(self.transaction, &self.listing(), there, false, None)?;
                Ok(RefreshFate::Changed)
            }
        }
    }

    /// Gives a file the content of another object under its key.
    fn change(
        &mut self,
        inode: u64,
        mut record: InodeRecord,
        there: &ListedEntry,
        generation: u32,
    ) -> Result<(), StateError> {
        extent::cut(self.transaction, inode, &mut record, 0, generation)?;
        record.version += 1;
        (record.size, record.allocated) = (there.size, Some(there.size));
        record.mtime_ns = there.mtime_ns;
        record.ctime_ns = self.taken.now_ns;
        let (key, etag, version) = (self.key.clone(), there.etag.clone(), record.version);
        let note = ObjectRecord { etag: etag.clone(), size: there.size, version, metadata: 0 };
        intent::put_note(self.transaction, record.mount_id, inode, &key, &note);
        let origin = Origin { key, etag, length: there.size, valid: there.size, version };
        origin::set(self.transaction, inode, &mut record, (there.size > 0).then_some(origin))?;
        self.transaction.put_inode(inode, record);
        self.transaction.changes.push(Change::Inode(inode));
        Ok(())
    }

    /// Takes a name away whose object is gone; the bucket needs nothing of it.
    fn remove(&mut self, known: DentryRecord, record: InodeRecord) -> Result<(), StateError> {
        let (parent, name, inode) = (self.taken.directory, self.taken.name.clone(), known.inode);
        self.transaction.delete_dentry(parent, &name);
        let mut mutating = MutationContext::new(self.transaction, self.taken.now_ns);
        match mutating.after_unlink(inode, record, parent, &name) {
            Ok(()) => {}
            Err(MutationError::Storage(error)) => return Err(error),
            Err(_) => return Err(StateError::Corrupt(format!("inode {inode}, which cannot lose a name,"))),
        }
        self.transaction.changes.push(Change::Entry {
            parent,
            name,
            old_inode: inode,
            new_inode: 0,
            first_fill: false,
            mount_id: 0,
        });
        let key = match known.kind() {
            Kind::Directory => format!("{}/", self.key),
            _ => self.key.clone(),
        };
        intent::lose_object(self.transaction, inode, self.taken.mount_id, &key, self.taken.now_ns)?;
        let Some(record) = self.transaction.inode(inode)? else { return Ok(()) };
        if record.unlinked {
            origin::lose(self.transaction, &record);
        } else {
            origin::follow(self.transaction, inode, &record, &[], &HashSet::from([key.as_str()]))?;
        }
        Ok(())
    }

    /// What an object is that comes in under the name.
    fn listing(&self) -> AdoptListing {
        let TakeInObject { mount_id, directory, key_prefix, uid, gid, file_mode, dir_mode, now_ns, .. } = self.taken;
        AdoptListing {
            mount_id: *mount_id,
            directory: *directory,
            key_prefix: key_prefix.clone(),
            uid: *uid,
            gid: *gid,
            file_mode: *file_mode,
            dir_mode: *dir_mode,
            now_ns: *now_ns,
            ..AdoptListing::default()
        }
    }

    /// A directory of which the bucket has nothing, not even its own object.
    fn remove_directory(&mut self, known: DentryRecord) -> Result<RefreshFate, StateError> {
        let key = format!("{}/", self.key);
        let tables = self.transaction.before();
        let Some(record) = self.transaction.inode(known.inode)? else { return Ok(RefreshFate::Nothing) };
        let note = tables.object(known.inode, &key)?.unwrap_or_default();
        if record.listed_ns == 0 || !tables.is_empty_directory(known.inode, &record)? || note.etag != self.taken.etag {
            return Ok(RefreshFate::Nothing);
        }
        if tables.deletion(self.taken.mount_id, &key)?.is_some() {
            return Ok(RefreshFate::Pending);
        }
        if tables.intent(known.inode)?.is_some() {
            // One that the bucket never had is nobody else's affair.
            return Ok(if note.etag.is_empty() { RefreshFate::Nothing } else { RefreshFate::Conflict });
        }
        self.remove(known, record)?;
        self.count_entries(-1);
        self.count_directories(-1);
        Ok(RefreshFate::Removed)
    }

    fn count_entries(&mut self, change: i64) {
        records::count_entries(&mut self.directory, change);
        self.transaction.put_inode(self.taken.directory, self.directory.clone());
    }

    fn count_directories(&mut self, change: i32) {
        self.directory.nlink = links(&self.directory).saturating_add_signed(change);
        self.transaction.put_inode(self.taken.directory, self.directory.clone());
        self.transaction.changes.push(Change::Inode(self.taken.directory));
    }
}
