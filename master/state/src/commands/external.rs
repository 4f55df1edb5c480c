//! What others changed in the bucket of an fs-mode mount, taken into the namespace name by name.
//!
//! Whoever asks for it has compared a name with the bucket, outside of the log. So everything is looked at once more
//! here: that the name still leads where it led, that the object noted of it is the one that it was compared with, and
//! that nothing is on its way to the bucket under its key. What has been changed here and is not in the bucket yet
//! stays as it is.

use std::collections::HashSet;

use cavern_proto::master::{Kind, RefreshFate, WriteType};
use cavern_proto::record::{
    AdoptListing, DentryRecord, ImportExternalChange, IndexRecord, InodeRecord, ListedEntry, ObjectRecord,
};

use super::existing;
use crate::error::Result;
use crate::index::{extents, intents, origins};
use crate::posix::context::MutationContext;
use crate::records::{count_entries, is_directory, links};
use crate::schema;
use crate::transaction::Transaction;

/// Takes in what the bucket has under a name now, unless the namespace has something newer.
pub fn import_external_change(tx: &mut Transaction<'_>, taken: &ImportExternalChange) -> Result<RefreshFate> {
    let Some(listing) = &taken.listing else { return Ok(RefreshFate::Nothing) };
    let mount = tx.before().mount(listing.mount_id)?.filter(|mount| mount.write_type() == WriteType::FsMode);
    let is_whole = |record: &InodeRecord| {
        is_directory(record) && record.mount_id == listing.mount_id && record.listed_ns != 0 && !record.unlinked
    };
    let directory = tx.inode(listing.directory)?.filter(is_whole);
    let (Some(mount), Some(directory)) = (mount, directory) else { return Ok(RefreshFate::Nothing) };
    let path = tx.now().path_below(listing.directory, mount.root_inode)?;
    let known = tx.dentry(listing.directory, &taken.name)?;
    // It lies elsewhere by now, or the name leads elsewhere.
    if path.is_none_or(|path| path != taken.path) || known.map_or(0, |known| known.inode) != taken.inode {
        return Ok(RefreshFate::Nothing);
    }
    if is_held(tx, listing.directory, &directory, taken.inode)? {
        return Ok(RefreshFate::Pending);
    }
    let Ok(name) = std::str::from_utf8(&taken.name) else { return Ok(RefreshFate::Nothing) };
    let key = format!("{}{name}", listing.key_prefix);
    let mut taking = ExternalChange { tx, taken, listing, directory, key };
    match (known, listing.entries.first()) {
        (None, None) => Ok(RefreshFate::Nothing),
        (None, Some(there)) => taking.add(there),
        (Some(known), there) if known.kind() == Kind::Directory => match there.map(ListedEntry::kind) {
            Some(Kind::Directory) => Ok(RefreshFate::Nothing),
            _ => taking.remove_directory(known),
        },
        (Some(known), there) => taking.compare(known, there),
    }
}

/// Whether a session may have answered for other changes of a directory, or of what a name in it leads to.
fn is_held(tx: &Transaction<'_>, directory: u64, record: &InodeRecord, known: u64) -> Result<bool> {
    if tx.counters.delegations == 0 {
        return Ok(false);
    }
    let tables = tx.before();
    if tables.delegation_around(directory, record, |_| true)?.is_some() {
        return Ok(true);
    }
    let Some(record) = tx.inode(known)? else { return Ok(false) };
    Ok(tables.delegation_around(known, &record, |_| true)?.is_some())
}

struct ExternalChange<'t, 'd> {
    tx: &'t mut Transaction<'d>,
    taken: &'t ImportExternalChange,
    listing: &'t AdoptListing,
    directory: InodeRecord,
    key: String,
}

impl ExternalChange<'_, '_> {
    /// A name that the namespace does not have.
    fn add(&mut self, there: &ListedEntry) -> Result<RefreshFate> {
        let (mount_id, key) = (self.listing.mount_id, &self.key);
        let tables = self.tx.before();
        if there.kind() != Kind::Directory {
            // It was moved away or removed here, and the bucket has not followed yet.
            let is_ours = tables.noted(mount_id, key)?.is_some() || tables.origin_of(mount_id, key)?.is_some();
            if is_ours || tables.deletion(mount_id, key)?.is_some() {
                return Ok(RefreshFate::Pending);
            }
            existing::adopt_object(self.tx, self.listing, there, false)?;
            self.count(1, 0);
            return Ok(RefreshFate::Added);
        }
        // The bucket has, may have, or is to lose an object of ours whose key begins so.
        let below = format!("{key}/");
        let within = (mount_id, below.as_str());
        if tables.has_any(schema::Noted, within)?
            || tables.has_any(schema::Deletions, within)?
            || tables.has_any(schema::Origins, within)?
        {
            return Ok(RefreshFate::Pending);
        }
        existing::adopt_directory(self.tx, self.listing, &self.taken.path, there, false)?;
        let index = tables.index(mount_id)?.unwrap_or_default();
        let index = IndexRecord { finished_ns: 0, unlisted: index.unlisted + 1, entries: index.entries + 1, ..index };
        self.tx.put(schema::Indexes, mount_id, &index);
        self.count(1, 1);
        Ok(RefreshFate::Added)
    }

    /// A name of something that is no directory.
    fn compare(&mut self, known: DentryRecord, there: Option<&ListedEntry>) -> Result<RefreshFate> {
        let (mount_id, key) = (self.listing.mount_id, &self.key);
        let tables = self.tx.before();
        let Some(record) = self.tx.inode(known.inode)? else { return Ok(RefreshFate::Nothing) };
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
                self.count(-1, 0);
                Ok(RefreshFate::Removed)
            }
            Some(there) if record.kind() == Kind::File && links(&record) == 1 => {
                self.change(known.inode, record, there)
            }
            Some(there) => {
                self.remove(known, record)?;
                existing::adopt_object(self.tx, self.listing, there, false)?;
                Ok(RefreshFate::Changed)
            }
        }
    }

    /// Gives a file the content of another object under its key.
    fn change(&mut self, inode: u64, mut record: InodeRecord, there: &ListedEntry) -> Result<RefreshFate> {
        let Some(generation) = extents::generation_after(&self.tx.counters, inode, &record) else {
            return Ok(RefreshFate::Conflict);
        };
        extents::cut(self.tx, inode, &mut record, 0, generation)?;
        record.version += 1;
        (record.size, record.allocated) = (there.size, Some(there.size));
        (record.mtime_ns, record.ctime_ns) = (there.mtime_ns, self.listing.now_ns);
        let (etag, size, version) = (there.etag.clone(), there.size, record.version);
        let note = ObjectRecord { etag, size, version, metadata: 0 };
        intents::put_note(self.tx, record.mount_id, inode, &self.key, &note);
        let origin = (size > 0).then(|| origins::at(self.key.clone(), &note, size));
        origins::set(self.tx, inode, &mut record, origin)?;
        self.tx.update_inode(inode, record);
        Ok(RefreshFate::Changed)
    }

    /// Takes a name away whose object is gone; the bucket needs nothing of it.
    fn remove(&mut self, known: DentryRecord, record: InodeRecord) -> Result {
        let (parent, name, inode) = (self.listing.directory, &self.taken.name, known.inode);
        self.tx.delete_dentry(parent, name);
        MutationContext::new(self.tx, self.listing.now_ns).drop_name(inode, record, parent, name)?;
        self.tx.name_changed(parent, name, inode, 0);
        let key = match known.kind() {
            Kind::Directory => format!("{}/", self.key),
            _ => self.key.clone(),
        };
        intents::lose_object(self.tx, inode, self.listing.mount_id, &key, self.listing.now_ns)?;
        let Some(record) = self.tx.inode(inode)? else { return Ok(()) };
        if record.unlinked {
            origins::lose(self.tx, &record);
        } else {
            origins::follow(self.tx, inode, &record, &[], &HashSet::from([key.as_str()]))?;
        }
        Ok(())
    }

    /// A directory of which the bucket has nothing, not even its own object.
    fn remove_directory(&mut self, known: DentryRecord) -> Result<RefreshFate> {
        let key = format!("{}/", self.key);
        let tables = self.tx.before();
        let Some(record) = self.tx.inode(known.inode)? else { return Ok(RefreshFate::Nothing) };
        let note = tables.object(known.inode, &key)?.unwrap_or_default();
        if record.listed_ns == 0 || !tables.is_empty_directory(known.inode, &record)? || note.etag != self.taken.etag {
            return Ok(RefreshFate::Nothing);
        }
        if tables.deletion(self.listing.mount_id, &key)?.is_some() {
            return Ok(RefreshFate::Pending);
        }
        if tables.intent(known.inode)?.is_some() {
            // One that the bucket never had is nobody else's affair.
            return Ok(if note.etag.is_empty() { RefreshFate::Nothing } else { RefreshFate::Conflict });
        }
        self.remove(known, record)?;
        self.count(-1, -1);
        Ok(RefreshFate::Removed)
    }

    /// Counts names that the directory got or lost, and those of directories among them.
    fn count(&mut self, names: i64, directories: i32) {
        count_entries(&mut self.directory, names);
        if directories == 0 {
            self.tx.put_inode(self.listing.directory, self.directory.clone());
            return;
        }
        self.directory.nlink = links(&self.directory).saturating_add_signed(directories);
        self.tx.update_inode(self.listing.directory, self.directory.clone());
    }
}
