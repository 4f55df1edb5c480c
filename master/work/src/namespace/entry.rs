//! What is read of the namespace, as the entries that clients are told of.

use bytes::Bytes;
use cavern_proto::master::{Entry, Kind, OwnAttributes};
use cavern_proto::record::InodeRecord;
use cavern_state::{Directory, Tables, records};

use super::Lookups;
use super::read_after_recall::DirectoryId;
use crate::error::WorkError;
use crate::listing::CheckReason;
use crate::mounts::OpenMount;

impl Lookups {
    /// A directory, and what a name in it leads to.
    ///
    /// # Errors
    /// [`WorkError::Gone`] where the directory is not there.
    pub(super) async fn read_name(
        &self,
        parent: u64,
        name: &Bytes,
    ) -> Result<(Directory, Option<(u64, InodeRecord)>), WorkError> {
        let looked_up = name.clone();
        let read = self.reader.look(move |tables| {
            let Some(directory) = tables.directory(parent)? else { return Ok(None) };
            let found = find(tables, parent, &looked_up)?;
            Ok(Some((directory, found)))
        });
        read.await?.ok_or(WorkError::Gone(parent))
    }

    /// An entry with the attributes that the bucket keeps, which is asked for them if they are unknown or somebody has
    /// just written it; and the directory that counts for the entry. While the bucket does not answer, the entry stays
    /// as it is.
    pub(super) async fn with_attributes(
        &self,
        entry: Entry,
        why: Option<CheckReason>,
    ) -> Result<(Entry, DirectoryId), WorkError> {
        let is_asked = match why {
            _ if self.listings_only => false,
            // Times of objects are too coarse to show whether what is kept with one has changed.
            Some(CheckReason::Written | CheckReason::WrittenBelow) => true,
            Some(CheckReason::Unknown) | None => entry.attr.unwrap_or_default().own() == OwnAttributes::Unknown,
        };
        let entry = if is_asked { Box::pin(self.look_at(entry)).await? } else { entry };
        let shown_in = self.directory_of(&entry).await?;
        Ok((entry, shown_in))
    }

    /// An entry after the bucket has been asked, in mounts that have it keep attributes.
    async fn look_at(&self, entry: Entry) -> Result<Entry, WorkError> {
        let (parent, name) = (entry.parent, entry.name.clone());
        let looked_up = name.clone();
        let read = self.reader.read(move |tables| Ok(tables.directory(parent)?.zip(find(tables, parent, &looked_up)?)));
        let Some((directory, (inode, record))) = read.await?.filter(|(directory, _)| directory.mount_id != 0) else {
            return Ok(entry);
        };
        let mount = self.mounts.get(directory.mount_id)?;
        if !mount.keeps_attributes() {
            return Ok(entry);
        }
        if self.listings.look_at(&mount, &directory, &name, (inode, &record)).await.is_err() {
            // Noted where it happened.
            return Ok(entry);
        }
        let (directory, found) = self.read_name(parent, &name).await?;
        let (inode, record) = found.ok_or_else(|| name_not_found(&name))?;
        self.entry(&directory, name, inode, &record)
    }

    /// The entry of a directory itself.
    pub fn directory_entry(&self, directory: &Directory) -> Result<Entry, WorkError> {
        let mut entry =
            plain_entry(directory.record.parent, directory.record.name.clone(), directory.inode, &directory.record);
        entry.listing_age_ms = self.age_of(&directory.record);
        if directory.mount_id != 0 {
            let mount = self.mount_of(directory.mount_id, directory.inode)?;
            if mount.is_fs_mode() {
                return Ok(entry);
            }
            mark_unknown(&mount, &mut entry, &directory.record);
            entry.key = directory.key_prefix(mount.ufs.prefix()).ok_or(WorkError::Gone(directory.inode))?;
        }
        Ok(entry)
    }

    /// The entry of something in a directory.
    pub(super) fn entry(
        &self,
        directory: &Directory,
        name: Bytes,
        inode: u64,
        record: &InodeRecord,
    ) -> Result<Entry, WorkError> {
        let is_directory = record.kind() == Kind::Directory;
        let mut entry = plain_entry(directory.inode, name, inode, record);
        entry.listing_age_ms = self.age_of(if is_directory { record } else { &directory.record });
        if record.mount_id != 0 {
            let mount = self.mount_of(record.mount_id, inode)?;
            if mount.is_fs_mode() {
                return Ok(entry);
            }
            mark_unknown(&mount, &mut entry, record);
            let is_mount_root = directory.mount_id == 0;
            entry.key = if is_mount_root {
                mount.ufs.prefix().to_owned()
            } else {
                let prefix = directory.key_prefix(mount.ufs.prefix()).ok_or(WorkError::Gone(inode))?;
                let slash = if is_directory { "/" } else { "" };
                format!("{prefix}{}{slash}", String::from_utf8_lossy(&entry.name))
            };
        }
        Ok(entry)
    }

    /// Age of a directory's listing; -1 for none.
    fn age_of(&self, directory: &InodeRecord) -> i64 {
        if directory.mount_id == 0 { -1 } else { self.reader.age_ms(directory.listed_ns) }
    }

    /// An entry of a page: without its key, which is that of the directory and the name. `None` when it is not there
    /// for the client.
    pub fn page_entry(&self, directory: &Directory, name: Bytes, inode: u64, record: &InodeRecord) -> Option<Entry> {
        // What is in a mount is there as its directory is.
        if record.mount_id != directory.mount_id && !self.can_see(record.mount_id) {
            return None;
        }
        let mut entry = plain_entry(0, name, inode, record);
        let is_directory = record.kind() == Kind::Directory;
        entry.listing_age_ms = self.age_of(if is_directory { record } else { &directory.record });
        if let Ok(mount) = self.mounts.get(record.mount_id) {
            mark_unknown(&mount, &mut entry, record);
        }
        Some(entry)
    }
}

/// Says so where the bucket may keep attributes that nobody has asked for.
fn mark_unknown(mount: &OpenMount, entry: &mut Entry, record: &InodeRecord) {
    if let Some(attr) = &mut entry.attr
        && mount.keeps_attributes()
        && record.stored.is_none()
        && attr.inode != mount.mount.root_inode
    {
        attr.set_own(OwnAttributes::Unknown);
    }
}

fn plain_entry(parent: u64, name: Bytes, inode: u64, record: &InodeRecord) -> Entry {
    Entry {
        name,
        attr: Some(records::attributes(inode, record)),
        parent,
        mount_id: record.mount_id,
        key: String::new(),
        etag: records::etag(record),
        listing_age_ms: -1,
        target: record.target.clone(),
    }
}

fn find(tables: Tables<'_>, parent: u64, name: &[u8]) -> Result<Option<(u64, InodeRecord)>, WorkError> {
    let Some(dentry) = tables.dentry(parent, name)? else { return Ok(None) };
    Ok(tables.inode(dentry.inode)?.map(|record| (dentry.inode, record)))
}

/// What is answered about a name that leads nowhere.
pub(super) fn name_not_found(name: &[u8]) -> WorkError {
    WorkError::NotFound(format!("{} is not there", String::from_utf8_lossy(name)))
}
