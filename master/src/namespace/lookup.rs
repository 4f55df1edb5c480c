//! Reading the namespace for clients: names, inodes, pages of directories, each after whatever listing it needs.
//!
//! Nothing here sends a HEAD for a name that a listing knows, except in mounts whose buckets keep attributes, for each
//! name that is looked at for the first time. A directory that was never listed is listed first; a name in a huge one
//! is checked alone. What is known goes on being served while a bucket does not answer.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cavern_posix::check_name;
use cavern_proto::ROOT_INODE;
use cavern_proto::master::{Consistency, Entry, Kind, MakeListedReply, OwnAttributes};
use cavern_proto::record::InodeRecord;
use cavern_security::MountDebt;
use cavern_state::{Directory, StateError, Tables, Whereabouts};
use futures::{StreamExt, stream};
use tokio::time::Instant;

use crate::error::MasterError;
use crate::listing::{ListPolicy, Listings, Progress, Started, Walk, Why};
use crate::mounts::{Mounts, OpenMount};
use crate::reader::StateReader;
use crate::sessions::{Recalls, WatchHub};

/// Longest path, in bytes, and its deepest nesting.
const PATH_MAX: usize = 4096;
const COMPONENTS_MAX: usize = 1024;
/// Directories of one `touch` that are looked after at a time.
const TOUCH_CONCURRENCY: usize = 64;

/// The namespace as clients see it. Cheap to clone.
#[derive(Clone)]
pub struct Lookups {
    pub reader: StateReader,
    pub listings: Listings,
    pub mounts: Arc<Mounts>,
    pub watch: Arc<WatchHub>,
    pub recalls: Arc<Recalls>,
    pub refresh_wait: Duration,
    /// The session that asks, and is notified of what it was answered when that changes; 0 for whoever keeps nothing.
    pub asker: u64,
    /// The name of the client that asks, if there may be mounts that are not there for all; `None` for whoever sees all
    /// of them.
    pub client: Option<Arc<str>>,
    /// What the call owes for what it does in mounts.
    pub debt: Option<Arc<MountDebt>>,
}

/// What a directory's listing is worth now.
#[derive(Clone, Debug)]
pub struct Touched {
    pub inode: u64,
    pub age_ms: i64,
    pub gone: bool,
}

impl Lookups {
    /// The namespace as a session is answered.
    pub fn asked_by(&self, asker: u64) -> Self {
        Self { asker, ..self.clone() }
    }

    /// The entry that a path leads to.
    ///
    /// # Errors
    /// [`MasterError::Invalid`] for a path that is not absolute or has `.`, `..`, a NUL, or a name that is too long;
    /// [`MasterError::NotFound`] naming the first component that is missing.
    pub async fn resolve(&self, path: &str) -> Result<Entry, MasterError> {
        let names = components(path)?;
        let mut entry = self.get_inode(ROOT_INODE).await?;
        for (depth, name) in names.iter().enumerate() {
            let attr = entry.attr.unwrap_or_default();
            let so_far = || format!("/{}", names[..depth].join("/"));
            if attr.kind() != Kind::Directory {
                return Err(MasterError::NotFound(format!("{} is not a directory, so {path} is not there", so_far())));
            }
            let name = Bytes::copy_from_slice(name.as_bytes());
            entry = match self.lookup(attr.inode, &name).await {
                Err(error) if error.is_not_found() => {
                    let missing = names[..=depth].join("/");
                    return Err(MasterError::NotFound(format!("/{missing} is not there")));
                }
                found => found?,
            };
        }
        Ok(entry)
    }

    /// The entry of a name in a directory.
    pub async fn lookup(&self, parent: u64, name: &Bytes) -> Result<Entry, MasterError> {
        self.entry_let_go(parent, || async { self.looked_at(self.lookup_listed(parent, name).await?).await }).await
    }

    /// The same, with attributes that the bucket keeps only if it has been asked for them.
    async fn lookup_listed(&self, parent: u64, name: &Bytes) -> Result<Entry, MasterError> {
        check_name(name)?;
        // Before the read: the session is notified of what changes after it.
        self.watch.see_name(self.asker, parent, name);
        let looked_up = name.clone();
        let (directory, found) = self
            .reader
            .look(move |tables| {
                let directory = tables.directory(parent)?;
                let found = if directory.is_some() { find(tables, parent, &looked_up)? } else { None };
                Ok((directory, found))
            })
            .await?;
        let directory = directory.ok_or(MasterError::Gone(parent))?;
        if directory.mount_id == 0 {
            return match found {
                Some((inode, record)) => self.entry(&directory, name.clone(), inode, &record),
                None => self.absent_or_entry(parent, name).await,
            };
        }
        let mount = self.mounts.get(directory.mount_id)?;
        if let (Some((inode, record)), true) = (&found, mount.is_fs_mode()) {
            return self.entry(&directory, name.clone(), *inode, record);
        }
        if directory.record.listed_ns == 0 {
            return self.lookup_unlisted(&directory, name, found).await;
        }
        if let Some((inode, record)) = found {
            return self.entry(&directory, name.clone(), inode, &record);
        }
        match mount.mount.consistency() {
            Consistency::Never | Consistency::Strict => {}
            Consistency::Always => self.listings.check_name(parent, name, Why::Unknown).await?,
            _ => self.refresh_if_older(&directory, &mount, mount.ttl().unwrap_or_default()).await,
        }
        self.absent_or_entry(parent, name).await
    }

    /// A name in a directory that was never listed. The listing begins now; a name that its first page does not decide
    /// is checked alone.
    async fn lookup_unlisted(
        &self,
        directory: &Directory,
        name: &Bytes,
        found: Option<(u64, InodeRecord)>,
    ) -> Result<Entry, MasterError> {
        let flight = match self.listings.start(directory.inode, None) {
            Ok(started) => started.flight(),
            Err(error) => return self.serve_or(directory, name, found, error),
        };
        match flight.first_page().await {
            Progress::Ended(Ok(_)) => {}
            Progress::Ended(Err(error)) => return self.serve_or(directory, name, found, error.into()),
            Progress::Running(_) => {
                let (parent, looked_up) = (directory.inode, name.clone());
                let known = self.reader.read(move |tables| find(tables, parent, &looked_up)).await?;
                if known.is_none() {
                    self.listings.check_name(directory.inode, name, Why::Unknown).await?;
                }
            }
        }
        self.absent_or_entry(directory.inode, name).await
    }

    /// What was known before a listing failed, or the failure.
    fn serve_or(
        &self,
        directory: &Directory,
        name: &Bytes,
        found: Option<(u64, InodeRecord)>,
        error: MasterError,
    ) -> Result<Entry, MasterError> {
        match found {
            Some((inode, record)) if !error.is_not_found() => self.entry(directory, name.clone(), inode, &record),
            _ => Err(error),
        }
    }

    /// Has a directory of an fs-mode mount listed, and perhaps all below it, as far as they never were. When that takes
    /// longer than the configuration allows, the answer says so, and it goes on.
    pub async fn make_listed(&self, inode: u64, recursive: bool) -> Result<MakeListedReply, MasterError> {
        let listed = async {
            let mut walk = Walk::new(self.listings.clone(), inode, ListPolicy::Known, recursive);
            while let Some(visited) = walk.next().await {
                visited.map_err(|(_, error)| error)?;
            }
            Ok::<_, MasterError>(())
        };
        let done = match tokio::time::timeout(self.refresh_wait, listed).await {
            Ok(listed) => {
                listed?;
                true
            }
            Err(_) => false,
        };
        let entries = self.reader.read(move |tables| {
            let mount_id = tables.inode(inode)?.map_or(0, |record| record.mount_id);
            Ok(tables.index(mount_id)?.unwrap_or_default().entries)
        });
        Ok(MakeListedReply { done, entries: entries.await? })
    }

    /// Reads the name once more and says what it leads to, or that it leads nowhere.
    async fn absent_or_entry(&self, parent: u64, name: &Bytes) -> Result<Entry, MasterError> {
        let looked_up = name.clone();
        let (directory, found) =
            self.reader.look(move |tables| Ok((tables.directory(parent)?, find(tables, parent, &looked_up)?))).await?;
        let directory = directory.ok_or(MasterError::Gone(parent))?;
        match found {
            Some((inode, record)) => self.entry(&directory, name.clone(), inode, &record),
            None => Err(MasterError::NotFound(format!("{} is not there", String::from_utf8_lossy(name)))),
        }
    }

    /// The current entry of an inode.
    ///
    /// # Errors
    /// [`MasterError::NotFound`] when it was replaced or deleted.
    pub async fn get_inode(&self, inode: u64) -> Result<Entry, MasterError> {
        self.entry_let_go(inode, || async { self.looked_at(self.known_inode(inode).await?).await }).await
    }

    async fn known_inode(&self, inode: u64) -> Result<Entry, MasterError> {
        let found = self.see_inode_with(inode, move |tables, record| {
            Ok(tables.directory(if record.kind() == Kind::Directory { inode } else { record.parent })?)
        });
        let (record, directory) = found.await?.ok_or(MasterError::Gone(inode))?;
        let directory = directory.ok_or(MasterError::Gone(inode))?;
        match record.kind() {
            Kind::Directory => self.directory_entry(&directory),
            _ => self.entry(&directory, record.name.clone(), inode, &record),
        }
    }

    /// Has the session notified of what changes about an inode from now on; gives the inode as it is, if it is there,
    /// and what `more` reads of it at the same moment.
    pub async fn see_inode_with<T: Send + 'static>(
        &self,
        inode: u64,
        more: impl Fn(Tables<'_>, &InodeRecord) -> Result<T, MasterError> + Clone + Send + 'static,
    ) -> Result<Option<(InodeRecord, T)>, MasterError> {
        self.check_visible(inode).await?;
        let read = || {
            let more = more.clone();
            self.reader.look(move |tables| {
                let Some(record) = tables.inode(inode)? else { return Ok(None) };
                let more = more(tables, &record)?;
                Ok(Some((record, more)))
            })
        };
        if self.asker == 0 {
            return read().await;
        }
        let known = self.reader.look(move |tables| Ok(tables.inode(inode)?.as_ref().map(Whereabouts::of))).await?;
        let Some(before) = known else { return Ok(None) };
        match &before {
            Whereabouts::Named { parent, name, .. } => self.watch.see_name(self.asker, *parent, name),
            _ => self.watch.see_inodes(self.asker, [inode]),
        }
        // Again, now that the session would be notified of a change.
        let now = read().await?;
        if now.as_ref().is_none_or(|(now, _)| Whereabouts::of(now) == before) {
            return Ok(now);
        }
        // It has another name meanwhile, and may have more of them.
        self.watch.see_inodes(self.asker, [inode]);
        read().await
    }

    /// Asks the bucket about a name now, and answers its entry then.
    pub async fn revalidate(&self, parent: u64, name: &Bytes, why: Why) -> Result<Entry, MasterError> {
        check_name(name)?;
        let revalidate = || async {
            self.watch.see_name(self.asker, parent, name);
            self.listings.check_name(parent, name, why).await?;
            let entry = self.absent_or_entry(parent, name).await?;
            match why {
                // Times of objects are too coarse to show whether what is kept with one has changed.
                Why::Written | Why::WrittenBelow => self.look_at(entry).await,
                Why::Unknown => self.looked_at(entry).await,
            }
        };
        self.entry_let_go(parent, revalidate).await
    }

    /// An entry with the attributes that the bucket keeps. While the bucket does not answer, it says that they are not
    /// known.
    async fn looked_at(&self, entry: Entry) -> Result<Entry, MasterError> {
        match entry.attr.unwrap_or_default().own() {
            OwnAttributes::Unknown => self.look_at(entry).await,
            _ => Ok(entry),
        }
    }

    /// The same after the bucket has been asked, in mounts that have it keep attributes.
    async fn look_at(&self, entry: Entry) -> Result<Entry, MasterError> {
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
        match self.listings.look_at(&mount, &directory, &name, (inode, &record)).await {
            Ok(()) => self.absent_or_entry(parent, &name).await,
            // Noted where it happened.
            Err(_) => Ok(entry),
        }
    }

    /// Renews the listings that are past half of their time. With `wait`, waits for them as long as the configuration
    /// allows, but not for buckets that have just failed.
    pub async fn touch(&self, directories: &[u64], wait: bool) -> Result<Vec<Touched>, MasterError> {
        let hidden = self.hidden(directories).await?;
        let is_visible = |inode: &u64| !hidden.contains(inode);
        let visible: Vec<u64> = directories.iter().copied().filter(is_visible).collect();
        let renew = stream::iter(visible).map(|inode| self.touch_one(inode, wait));
        let mut renewed = renew.buffer_unordered(TOUCH_CONCURRENCY);
        let deadline = tokio::time::Instant::now() + self.refresh_wait;
        // What is not renewed in time is answered with the age that it has.
        while let Ok(Some(result)) = tokio::time::timeout_at(deadline, renewed.next()).await {
            match result {
                Err(error) if !error.is_not_found() => return Err(error),
                _ => {}
            }
        }
        let inodes = directories.to_vec();
        let reader = self.reader.clone();
        let touched = move |tables: Tables<'_>| {
            let mut touched = Vec::with_capacity(inodes.len());
            for inode in inodes {
                let directory = match tables.directory(inode) {
                    _ if hidden.contains(&inode) => None,
                    Err(StateError::NotADirectory(_)) => None,
                    directory => directory?,
                };
                let age_ms = directory.as_ref().map_or(-1, |directory| reader.age_ms(directory.record.listed_ns));
                touched.push(Touched { inode, age_ms, gone: directory.is_none() });
            }
            Ok(touched)
        };
        self.reader.read(touched).await
    }

    async fn touch_one(&self, inode: u64, wait: bool) -> Result<(), MasterError> {
        let directory = match self.reader.read(move |tables| Ok(tables.directory(inode)?)).await {
            // Not a directory: answered as gone.
            Err(MasterError::State(StateError::NotADirectory(_))) => return Ok(()),
            directory => directory?,
        };
        let Some(directory) = directory.filter(|directory| directory.mount_id != 0) else { return Ok(()) };
        let mount = self.mounts.get(directory.mount_id)?;
        let Some(ttl) = mount.ttl() else { return Ok(()) };
        let listed_ns = directory.record.listed_ns;
        if listed_ns != 0 && !self.reader.is_older(listed_ns, ttl / 2) || mount.is_failing() {
            return Ok(());
        }
        if wait {
            self.relist_within_wait(inode).await;
        } else {
            // A full queue means that there is enough to do.
            drop(self.listings.start(inode, None));
        }
        Ok(())
    }

    /// Before an absence is answered: a newer listing, if the one there is has reached `ttl` and the bucket answers in
    /// time.
    async fn refresh_if_older(&self, directory: &Directory, mount: &OpenMount, ttl: Duration) {
        if self.reader.is_older(directory.record.listed_ns, ttl) && !mount.is_failing() {
            self.relist_within_wait(directory.inode).await;
        }
    }

    /// Joins or begins a listing and waits for its end, at most until it is `refresh_wait` old: who comes later does
    /// not wait again for a bucket that is slow.
    async fn relist_within_wait(&self, inode: u64) {
        let flight = match self.listings.start(inode, None) {
            Ok(Started::Joined(flight) | Started::Older(flight)) => flight,
            Err(error) => {
                tracing::debug!("a listing is not renewed: {error}");
                return;
            }
        };
        let left = (flight.created + self.refresh_wait).saturating_duration_since(Instant::now());
        // A failure was noted where it happened; here it means that the old listing is served.
        let _ = tokio::time::timeout(left, flight.ended()).await;
    }

    /// The entry of a directory itself.
    pub fn directory_entry(&self, directory: &Directory) -> Result<Entry, MasterError> {
        let mut entry =
            plain_entry(directory.record.parent, directory.record.name.clone(), directory.inode, &directory.record);
        entry.listing_age_ms = self.age_of(&directory.record);
        if directory.mount_id != 0 {
            let mount = self.mount_of(directory.mount_id, directory.inode)?;
            if mount.is_fs_mode() {
                return Ok(entry);
            }
            self.mark_unknown(&mount, &mut entry, &directory.record);
            entry.key = directory.key_prefix(mount.ufs.prefix()).ok_or(MasterError::Gone(directory.inode))?;
        }
        Ok(entry)
    }

    /// The entry of something in a directory.
    fn entry(
        &self,
        directory: &Directory,
        name: Bytes,
        inode: u64,
        record: &InodeRecord,
    ) -> Result<Entry, MasterError> {
        let is_directory = record.kind() == Kind::Directory;
        let mut entry = plain_entry(directory.inode, name, inode, record);
        entry.listing_age_ms = self.age_of(if is_directory { record } else { &directory.record });
        if record.mount_id != 0 {
            let mount = self.mount_of(record.mount_id, inode)?;
            if mount.is_fs_mode() {
                return Ok(entry);
            }
            self.mark_unknown(&mount, &mut entry, record);
            let is_mount_root = directory.mount_id == 0;
            entry.key = if is_mount_root {
                mount.ufs.prefix().to_owned()
            } else {
                let prefix = directory.key_prefix(mount.ufs.prefix()).ok_or(MasterError::Gone(inode))?;
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
            self.mark_unknown(&mount, &mut entry, record);
        }
        Some(entry)
    }

    /// Says so where the bucket may keep attributes that nobody has asked for.
    fn mark_unknown(&self, mount: &OpenMount, entry: &mut Entry, record: &InodeRecord) {
        if let Some(attr) = &mut entry.attr
            && mount.keeps_attributes()
            && record.kept.is_none()
            && attr.inode != mount.mount.root_inode
        {
            attr.set_own(OwnAttributes::Unknown);
        }
    }
}

fn plain_entry(parent: u64, name: Bytes, inode: u64, record: &InodeRecord) -> Entry {
    Entry {
        name,
        attr: Some(cavern_state::records::attributes(inode, record)),
        parent,
        mount_id: record.mount_id,
        key: String::new(),
        etag: cavern_state::records::etag(record),
        listing_age_ms: -1,
        target: record.target.clone(),
    }
}

fn find(tables: Tables<'_>, parent: u64, name: &[u8]) -> Result<Option<(u64, InodeRecord)>, MasterError> {
    let Some(dentry) = tables.dentry(parent, name)? else { return Ok(None) };
    Ok(tables.inode(dentry.inode)?.map(|record| (dentry.inode, record)))
}

/// The components of an absolute path.
pub fn components(path: &str) -> Result<Vec<&str>, MasterError> {
    let shown = || path.chars().take(100).collect::<String>();
    if !path.starts_with('/') {
        return Err(MasterError::Invalid(format!("the path {:?} is not absolute: begin it with /", shown())));
    }
    if path.len() > PATH_MAX {
        return Err(MasterError::Invalid(format!("the path {:?}… is longer than {PATH_MAX} bytes", shown())));
    }
    let names: Vec<&str> = path.split('/').filter(|name| !name.is_empty()).collect();
    if names.len() > COMPONENTS_MAX {
        return Err(MasterError::Invalid(format!("the path {:?}… has more than {COMPONENTS_MAX} components", shown())));
    }
    for name in &names {
        if *name == "." || *name == ".." {
            return Err(MasterError::Invalid(format!(
                "the path {:?} has the component {name}: write it without",
                shown()
            )));
        }
        check_name(name.as_bytes())?;
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn paths_are_absolute_and_plain() {
        assert_eq!(components("/").unwrap(), Vec::<&str>::new());
        assert_eq!(components("/a//b/").unwrap(), ["a", "b"]);
        for bad in ["", "a", "a/b", "/a/../b", "/.", "/a\0b", &format!("/{}", "x".repeat(256)), &"/a".repeat(2500)] {
            assert!(matches!(components(bad), Err(MasterError::Invalid(_))), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn any_path_is_taken_or_refused(path in ".{0,300}") {
            if let Ok(names) = components(&path) {
                prop_assert!(names.iter().all(|name| !name.is_empty() && *name != ".." && !name.contains('\0')));
            }
        }
    }
}
