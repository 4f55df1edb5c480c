//! Questions to the buckets themselves: a name, the version that a name leads to now, a page of a directory.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bytes::Bytes;
use cavern_conf::host;
use cavern_proto::master::{Attr, Entry, Kind};
use cavern_ufs::{ListMode, Listed, UfsError, is_name};
use tokio::time::{Instant, timeout};

use super::super::cache::Found;
use super::super::directory::{DirPage, LISTING_PAGE};
use super::super::node::Node;
use super::super::parts::Metadata;
use super::inodes::is_of_outage;
use super::listing::BucketListing;
use crate::error::ClientError;
use crate::mounts::MountView;

/// Key of an object at most, in bytes.
const KEY_BYTES_MAX: usize = 1024;

/// A directory of a mount whose bucket is asked now.
#[derive(Clone, Debug)]
pub(in crate::metadata) struct BucketDirectory {
    inode: u64,
    mount: Arc<MountView>,
    /// Key prefix of what is in it.
    prefix: Arc<str>,
}

impl Metadata {
    /// Where to ask about names of a directory, if not a master.
    pub(in crate::metadata) fn bucket_directory(&self, directory: u64) -> Option<BucketDirectory> {
        let inner = &self.inner;
        if !inner.outage.is_active() {
            return None;
        }
        let known = inner.names.directories.get(directory);
        let known = known.and_then(|known| Some((known.mount.clone()?, known.location.clone())));
        let (mount, prefix) = known.or_else(|| {
            let node = inner.outage.inodes.get(directory).or_else(|| inner.names.cache.node(directory))?;
            let mount = node.mount.clone().filter(|_| node.is_directory())?;
            Some((mount, node.key().into()))
        })?;
        inner.outage.covers(&mount).then_some(BucketDirectory { inode: directory, mount, prefix })
    }

    /// Where to ask about names of a directory, as soon as no master is to be asked, if ever: at once while an outage
    /// lasts.
    pub(in crate::metadata) async fn bucket_directory_in_outage(&self, directory: u64) -> BucketDirectory {
        let mut since = self.inner.outage.since.subscribe();
        loop {
            if let Some(found) = self.bucket_directory(directory) {
                return found;
            }
            if since.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    /// What a name leads to by what the bucket says. If the bucket says nothing, by what was known.
    pub(in crate::metadata) async fn bucket_lookup(
        &self,
        directory: BucketDirectory,
        name: &[u8],
    ) -> Result<Arc<Node>, ClientError> {
        let (metadata, looked_up) = (self.clone(), Bytes::copy_from_slice(name));
        let key = (directory.inode, name.into());
        let asked = async move {
            let listed = match metadata.ask_bucket(&directory, &looked_up, None).await {
                Ok(listed) => listed,
                Err(error) => {
                    let known = metadata.inner.names.cache.lookup(directory.inode, &looked_up);
                    return if let Some(Found::Node(node)) = known { Ok(node) } else { Err(error) };
                }
            };
            match listed {
                Some(listed) => Ok(metadata.cache_listed(&directory, &looked_up, &listed)),
                None => {
                    metadata.inner.names.cache.forget_name(directory.inode, &looked_up);
                    Err(ClientError::NotFound(String::from_utf8_lossy(&looked_up).into_owned()))
                }
            }
        };
        self.inner.outage.lookups.join(key, asked).await
    }

    /// What the name of a file leads to now.
    pub(in crate::metadata) async fn bucket_current(
        &self,
        directory: &BucketDirectory,
        node: &Node,
    ) -> Result<Arc<Node>, ClientError> {
        let name = node.name_bytes();
        match self.ask_bucket(directory, &name, Some(node.kind)).await? {
            Some(listed) => Ok(self.cache_listed(directory, &name, &listed)),
            None => Err(ClientError::NotFound(node.to_string())),
        }
    }

    /// Up to `limit` entries after the name `after`. Those of a directory that is listed at once are in the order of
    /// names, and cached; those of a larger one come in the order of the bucket.
    pub(in crate::metadata) async fn bucket_page(
        &self,
        directory: BucketDirectory,
        after: &[u8],
        limit: usize,
    ) -> Result<DirPage, ClientError> {
        let inner = &self.inner;
        let listings = &inner.outage.listings;
        let mut listing = match listings.going_on(directory.inode, after) {
            Some(listing) => listing,
            None => BucketListing::new(&directory.mount.ufs()?, &directory.prefix, after),
        };
        let is_beginning = after.is_empty();
        let wanted = if is_beginning { limit.max(LISTING_PAGE) } else { limit };
        let known = inner.names.directories.ensure(directory.inode, Some(&directory.mount), &directory.prefix);
        let epoch = known.listing_epoch();
        while listing.has_less_than(wanted) {
            self.count_question();
            listing.read_on(inner.master.timeout()).await?;
        }
        let (mut names, mut end) = (listing.take(wanted), listing.is_over());
        if is_beginning && end {
            names.sort_by(|one, other| one.0.cmp(&other.0));
        }
        let mut entries: Vec<_> =
            names.iter().map(|(name, listed)| self.node_of_listed(&directory, name, listed)).collect();
        let found: Vec<_> = entries.iter().filter(|node| is_of_outage(node.inode)).cloned().collect();
        if inner.names.caching && inner.outage.is_active() {
            inner.names.keep(&found);
            if is_beginning && end {
                known.set_age(Instant::now(), Duration::ZERO);
                known.record(epoch, after, &entries, true);
            }
        }
        if entries.len() > limit {
            listing.give_back(names.split_off(limit));
            entries.truncate(limit);
            end = false;
        }
        if let (false, Some(last)) = (end, entries.last()) {
            listings.keep(directory.inode, &last.name, listing);
        }
        Ok(DirPage { entries, end })
    }

    /// A HEAD for the object and a LIST for what is below it, at the same time. A directory wins over an object of the
    /// same name; where it is known which of them is there, the other one is not asked for.
    async fn ask_bucket(
        &self,
        directory: &BucketDirectory,
        name: &[u8],
        known: Option<Kind>,
    ) -> Result<Option<Listed>, ClientError> {
        let Some(text) = std::str::from_utf8(name).ok().filter(|_| is_name(name)) else { return Ok(None) };
        let key = format!("{}{text}", directory.prefix);
        if key.len() > KEY_BYTES_MAX {
            return Ok(None);
        }
        self.count_question();
        let ufs = directory.mount.ufs()?;
        let head = || async {
            match ufs.head(&key).await {
                Ok(object) => Ok(Some(Listed::of(&object))),
                Err(UfsError::NotFound { .. }) => Ok(None),
                Err(error) => Err(error),
            }
        };
        let below = format!("{key}/");
        let list = async {
            let mut lister = ufs.list(&below, ListMode::Directory);
            while let Some(page) = lister.next_page().await? {
                if !page.objects.is_empty() || !page.prefixes.is_empty() || page.hidden > 0 {
                    return Ok(Some(Listed::Directory));
                }
            }
            Ok::<_, UfsError>(None)
        };
        let answer = async {
            if known == Some(Kind::File)
                && let Some(file) = head().await?
            {
                return Ok(Some(file));
            }
            let (file, directory) = tokio::try_join!(head(), list)?;
            Ok::<_, UfsError>(directory.or(file))
        };
        let wait = self.inner.master.timeout();
        match timeout(wait, answer).await {
            Ok(answer) => Ok(answer?),
            Err(_elapsed) => Err(ClientError::BucketSilent { key, waited_ms: wait.as_millis() as u64 }),
        }
    }

    fn count_question(&self) {
        self.inner.outage.asked.fetch_add(1, Relaxed);
        self.inner.stats.outage_lookups.inc();
    }

    /// The node of a name that was looked up; in the cache while the outage lasts.
    fn cache_listed(&self, directory: &BucketDirectory, name: &[u8], listed: &Listed) -> Arc<Node> {
        let node = self.node_of_listed(directory, name, listed);
        if is_of_outage(node.inode) && self.inner.outage.is_active() {
            self.inner.names.keep(std::slice::from_ref(&node));
        }
        node
    }

    /// The master's node where that is known and still the same, else one of the outage.
    fn node_of_listed(&self, directory: &BucketDirectory, name: &[u8], listed: &Listed) -> Arc<Node> {
        let BucketDirectory { inode: parent, mount, prefix } = directory;
        if let Some(Found::Node(known)) = self.inner.names.cache.lookup(*parent, name)
            && !is_of_outage(known.inode)
            && known.mount.as_ref().is_some_and(|own| Arc::ptr_eq(own, mount))
            && is_as_listed(&known, listed)
        {
            return known;
        }
        let (kind, size, mtime_ns, etag) = match listed {
            Listed::Directory => (Kind::Directory, 0, host::wall_ns(), ""),
            Listed::File { size, mtime_ns, etag } => (Kind::File, *size, *mtime_ns, etag.as_str()),
        };
        let entry =
            Entry { name: Bytes::copy_from_slice(name), parent: *parent, etag: etag.to_owned(), ..Entry::default() };
        self.inner.outage.inodes.enter(mount, |inode| {
            let nlink = if kind == Kind::Directory { 2 } else { 1 };
            let attr = Attr { inode, kind: kind.into(), size, nlink, mtime_ns, ctime_ns: mtime_ns, ..Attr::default() };
            Node::new(&entry, &attr, Some(mount.clone()), prefix.clone())
        })
    }
}

fn is_as_listed(node: &Node, listed: &Listed) -> bool {
    match listed {
        Listed::Directory => node.is_directory(),
        Listed::File { size, etag, .. } => !node.is_directory() && node.size == *size && node.etag() == *etag,
    }
}
