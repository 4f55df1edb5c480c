//! The questions to the master, and what their answers leave in the cache.
//!
//! Whoever asks takes a mark first, and then names the session: an answer to a session that is over when it comes was
//! asked for before the next one began, and is not kept.

use std::sync::Arc;
use std::time::Duration;

use cavern_conf::backoff;
use cavern_net::NetError;
use cavern_net::master::RetryPolicy;
use cavern_posix::mode::READ;
use cavern_proto::ROOT_INODE;
use cavern_proto::master::{
    CheckAccessRequest, Entry, FreeContentRequest, FreeFate, FreedContent, GetInodeRequest, GetLayoutRequest,
    GetQuotasRequest, GetTtlsRequest, GetXattrsRequest, Kind, Layout, LookupRequest, Quotas, ReadDirRequest,
    ResolveRequest, RevalidateRequest, Ttls, User, Xattr,
};
use rustix::io::Errno;
use tokio::time::Instant;
use tokio_stream::StreamExt;
use tonic::Code;

use super::directory::{DirPage, Directory, root_location};
use super::node::Node;
use super::parts::{Inner, Metadata};
use super::recent_invalidations::InvalidationMark;
use crate::error::ClientError;
use crate::mounts::MountView;
use crate::stages::Stage;

/// Longest pause between two pages of a listing, which the master may have to fetch from the bucket.
const PAGE_WAIT: Duration = Duration::from_secs(10);

/// What was changed in a bucket.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Written {
    Name,
    NameAndBelow,
}

/// Files that may be opened next.
pub(crate) struct FilesAfter {
    pub inodes: Vec<u64>,
    pub mark: InvalidationMark,
}

impl Metadata {
    pub(super) async fn ask_lookup(
        &self,
        parent: u64,
        name: &[u8],
        patience: RetryPolicy,
    ) -> Result<Arc<Node>, ClientError> {
        let _asked = Stage::Metadata.begin();
        tokio::select! {
            biased;
            directory = self.bucket_directory_in_outage(parent) => Box::pin(self.bucket_lookup(directory, name)).await,
            answer = self.ask_master_lookup(parent, name, patience) => answer,
        }
    }

    async fn ask_master_lookup(
        &self,
        parent: u64,
        name: &[u8],
        patience: RetryPolicy,
    ) -> Result<Arc<Node>, ClientError> {
        let parent = self.inode_of_master(parent).await?;
        let mark = self.settled_mark(parent).await?;
        let (metadata, name): (_, Box<[u8]>) = (self.clone(), name.into());
        let patience = self.patience_in(parent, patience);
        let key = ((parent, name.clone()), mark, patience);
        let asked = async move {
            let (inner, name) = (&metadata.inner, bytes::Bytes::from(name));
            let request = || LookupRequest { parent, name: name.clone(), session: inner.lease.session() };
            let answer = ask!(inner, "Lookup", lookup, request(), patience, inner.master.deadline());
            match answer.await.map_err(ClientError::from) {
                Ok(entry) => metadata.cache_entry(entry, mark).await,
                Err(ClientError::NotFound(_)) => {
                    inner.names.keep_absence(parent, &name, mark);
                    Err(ClientError::NotFound(String::from_utf8_lossy(&name).into_owned()))
                }
                Err(error) => Err(error),
            }
        };
        self.inner.questions.lookups.join(key, asked).await
    }

    pub(super) async fn ask_node(&self, inode: u64, patience: RetryPolicy) -> Result<Arc<Node>, ClientError> {
        let _asked = Stage::Metadata.begin();
        let mark = self.settled_mark(inode).await?;
        let (metadata, patience) = (self.clone(), self.patience_in(inode, patience));
        let asked = async move {
            let inner = &metadata.inner;
            let request = || GetInodeRequest { inode, session: inner.lease.session() };
            let answer = ask!(inner, "GetInode", get_inode, request(), patience, inner.master.deadline());
            match answer.await.map_err(ClientError::from) {
                Ok(entry) => metadata.cache_entry(entry, mark).await,
                Err(ClientError::NotFound(_) | ClientError::Stale(_)) => {
                    inner.names.cache.forget_inode(inode);
                    Err(ClientError::Stale(format!("inode {inode}")))
                }
                Err(error) => Err(error),
            }
        };
        self.inner.questions.nodes.join((inode, mark, patience), asked).await
    }

    /// Waits until what was answered about an inode is made. The mark is of before: what is answered here from then on
    /// may be missing in the answer to a question that follows.
    pub(super) async fn settled_mark(&self, inode: u64) -> Result<InvalidationMark, ClientError> {
        let mark = self.mark();
        self.inner.settled(inode).await.map(|()| mark)
    }

    /// Nothing that is not cached is known of an fs-mode mount but by the master.
    fn patience_in(&self, directory: u64, patience: RetryPolicy) -> RetryPolicy {
        if self.inner.is_fs_mode(directory) { RetryPolicy::UntilDeadline } else { patience }
    }

    pub(super) async fn ask_path(&self, path: &str) -> Result<Arc<Node>, ClientError> {
        let _asked = Stage::Metadata.begin();
        let (inner, mark) = (&self.inner, self.mark());
        inner.all_settled().await?;
        let request = || ResolveRequest { path: path.to_owned(), session: inner.lease.session() };
        let entry = ask!(inner, "Resolve", resolve, request()).await?;
        self.cache_entry(entry, mark).await
    }

    /// Asks the bucket about the name of one file now: the inode that it leads to, another than `node` when the object
    /// was replaced; `NotFound` when it leads nowhere. For `consistency = always`, and when a version is found to be
    /// gone.
    pub async fn current(&self, node: &Node) -> Result<Arc<Node>, ClientError> {
        let (_asked, mark) = (Stage::Metadata.begin(), self.mark());
        let current = tokio::select! {
            biased;
            directory = self.bucket_directory_in_outage(node.parent) => self.bucket_current(&directory, node).await,
            current = self.ask_master_current(node, mark) => current,
        };
        let gone = match &current {
            Ok(current) => current.inode != node.inode,
            Err(error) => matches!(error, ClientError::NotFound(_) | ClientError::Stale(_)),
        };
        if gone {
            self.inner.names.forget_entry(node.parent, &node.name, node.inode);
            if let Ok(current) = &current {
                self.inner.names.keep_current(current, mark);
            }
        }
        current
    }

    async fn ask_master_current(&self, node: &Node, mark: InvalidationMark) -> Result<Arc<Node>, ClientError> {
        let parent = self.inode_of_master(node.parent).await?;
        let request = RevalidateRequest { parent, name: node.name_bytes(), ..RevalidateRequest::default() };
        self.cache_entry(self.revalidate(request).await?, mark).await
    }

    /// Has the master look what the bucket has under a name that was changed there, and notify all clients; gives what
    /// the name leads to then, `None` for nothing.
    pub(crate) async fn written(&self, parent: u64, name: &[u8]) -> Result<Option<Arc<Node>>, ClientError> {
        self.look_at_written(parent, name, Written::Name).await
    }

    /// As `written`, where all that is below the name has changed, too: nothing that is known of a directory holds.
    pub(crate) async fn written_below(&self, parent: u64, name: &[u8]) -> Result<Option<Arc<Node>>, ClientError> {
        self.look_at_written(parent, name, Written::NameAndBelow).await
    }

    async fn look_at_written(
        &self,
        parent: u64,
        name: &[u8],
        written: Written,
    ) -> Result<Option<Arc<Node>>, ClientError> {
        let parent = self.inode_of_master(parent).await?;
        let (mark, below) = (self.mark(), written == Written::NameAndBelow);
        let request = bytes::Bytes::copy_from_slice(name);
        let request = RevalidateRequest { parent, name: request, written: true, below, session: 0 };
        let current = match self.revalidate(request).await {
            Ok(entry) => self.cache_entry(entry, mark).await.map(Some),
            Err(ClientError::NotFound(_) | ClientError::Stale(_)) => Ok(None),
            Err(error) => Err(error),
        };
        // The master notifies this client of it, too, but perhaps after the next lookup.
        self.inner.names.forget_entry(parent, name, 0);
        if let Ok(Some(current)) = &current {
            self.inner.names.keep_current(current, mark);
        }
        current
    }

    /// In the session that there is.
    async fn revalidate(&self, request: RevalidateRequest) -> Result<Entry, ClientError> {
        let inner = &self.inner;
        let request = || RevalidateRequest { session: inner.lease.session(), ..request.clone() };
        Ok(ask!(inner, "Revalidate", revalidate, request()).await?)
    }

    /// Whether the master knows of any name in a directory but this one.
    pub(crate) async fn has_others(&self, directory: u64, name: &[u8]) -> Result<bool, ClientError> {
        let mut after: Box<[u8]> = Box::default();
        loop {
            let page = self.ask_dir_page(directory, &after, 2, RetryPolicy::UntilDeadline).await?;
            if page.entries.iter().any(|entry| *entry.name != *name) {
                return Ok(true);
            }
            // While a directory is listed for the first time, an answer may have fewer than there are.
            match page.entries.last() {
                Some(last) if !page.end => after = last.name.clone(),
                _ => return Ok(false),
            }
        }
    }

    /// Up to `limit` entries after `after`, recorded where they continue the listing.
    pub(super) async fn ask_dir_page(
        &self,
        directory: u64,
        after: &[u8],
        limit: usize,
        patience: RetryPolicy,
    ) -> Result<DirPage, ClientError> {
        let directory = self.inode_of_master(directory).await?;
        let mark = self.settled_mark(directory).await?;
        let (metadata, after): (_, Box<[u8]>) = (self.clone(), after.into());
        let patience = self.patience_in(directory, patience);
        let key = ((directory, after.clone()), limit, mark, patience);
        let asked = async move {
            let master = &metadata.inner.master;
            let (deadline, mut backoff) = (master.deadline(), backoff::MASTER.begin());
            loop {
                // A stream that breaks leaves nothing: the page is asked for from its beginning.
                match metadata.fetch_dir_page(directory, &after, limit, mark, patience, deadline).await {
                    Err(error) if patience == RetryPolicy::UntilDeadline && error.is_transient() => {
                        master.wait_after(error, &mut backoff, deadline).await?;
                    }
                    answer => return answer,
                }
            }
        };
        self.inner.questions.pages.join(key, asked).await
    }

    async fn fetch_dir_page(
        &self,
        inode: u64,
        after: &[u8],
        limit: usize,
        mark: InvalidationMark,
        patience: RetryPolicy,
        deadline: Instant,
    ) -> Result<DirPage, ClientError> {
        let inner = &self.inner;
        let (name, session) = (bytes::Bytes::copy_from_slice(after), inner.lease.session());
        let request = || ReadDirRequest { inode, after_name: name.clone(), limit: limit as u64, session };
        let answer = ask!(inner, "ReadDir", read_dir, request(), patience, deadline);
        let mut stream = match answer.await.map_err(ClientError::from) {
            Err(ClientError::NotFound(_)) => return Err(ClientError::Stale(format!("directory inode {inode}"))),
            stream => stream?,
        };
        let (mut entries, mut end, mut seq, mut known) = (Vec::new(), false, 0, None);
        while entries.len() < limit && !end {
            let page = match tokio::time::timeout(PAGE_WAIT, stream.next()).await {
                Ok(Some(page)) => page.map_err(|status| match ClientError::from(inner.master.broken(status)) {
                    // Whoever reads a directory takes ENOENT for its end.
                    ClientError::NotFound(message) => ClientError::Stale(message),
                    error => error,
                })?,
                Ok(None) => break,
                Err(_elapsed) => {
                    let waited_ms = PAGE_WAIT.as_millis() as u64;
                    return Err(ClientError::Net(NetError::MasterDeadline { call: "ReadDir", waited_ms }));
                }
            };
            if let Some(entry) = &page.directory {
                known = Some(self.cache_directory(inode, entry).await?);
            }
            end = page.end;
            seq = seq.max(page.event_seq);
            let Some((directory, mount)) = &known else {
                return Err(ClientError::Invalid(format!("the listing of inode {inode} does not begin with itself")));
            };
            for entry in page.entries {
                entries.push(self.listed_node(inode, entry, mount.as_ref(), &directory.location).await?);
            }
        }
        // An answer that ends without saying so is cut: the next page goes on after it, if there is any.
        let is_whole = end && after.is_empty();
        end |= entries.is_empty();
        let (caught_up, names) = (inner.lease.catch_up(seq).await, &inner.names);
        if let Some((directory, _)) = known.filter(|_| names.caching && caught_up) {
            // Before the look at what has changed: what changes later drops the listing, or is not in the one that is.
            let epoch = directory.listing_epoch();
            names.keep_answer(&entries, mark);
            if names.recent.since(mark).none() {
                directory.record(epoch, after, &entries, end);
            } else if is_whole {
                directory.record_names(&entries, || names.recent.own_names_since(mark, inode));
            }
        }
        Ok(DirPage { entries, end })
    }

    async fn cache_directory(
        &self,
        inode: u64,
        entry: &Entry,
    ) -> Result<(Arc<Directory>, Option<Arc<MountView>>), ClientError> {
        let mount = self.mount_of(entry).await?;
        let directory = self.inner.names.directories.ensure(inode, mount.as_ref(), &entry.key);
        if let Ok(age) = u64::try_from(entry.listing_age_ms) {
            directory.set_age(Instant::now(), Duration::from_millis(age));
        }
        Ok((directory, mount))
    }

    /// A node from a page of a listing, where keys are left out.
    async fn listed_node(
        &self,
        parent: u64,
        mut entry: Entry,
        mount: Option<&Arc<MountView>>,
        location: &Arc<str>,
    ) -> Result<Arc<Node>, ClientError> {
        entry.parent = parent;
        let attr = entry.attr.unwrap_or_default();
        let (mount, location) = match mount {
            Some(mount) => (Some(mount.clone()), location.clone()),
            // Above the mounts: plain directories, and the roots of mounts.
            None => {
                let mount = self.mount_of(&entry).await?;
                let location = mount.as_ref().map_or_else(|| "".into(), |mount| root_location(mount));
                (mount, location)
            }
        };
        Ok(Arc::new(Node::new(&entry, &attr, mount, location)))
    }

    /// A node from an answer about one entry. It stays in the cache unless an invalidation came since `mark`.
    async fn cache_entry(&self, entry: Entry, mark: InvalidationMark) -> Result<Arc<Node>, ClientError> {
        let names = &self.inner.names;
        let mount = self.mount_of(&entry).await?;
        let attr = entry.attr.unwrap_or_default();
        let age = u64::try_from(entry.listing_age_ms).ok().map(Duration::from_millis);
        let now = Instant::now();
        let is_root = |mount: &Arc<MountView>| mount.root_inode() == attr.inode;
        let location: Arc<str> = match &mount {
            None => "".into(),
            Some(mount) if is_root(mount) => entry.key.as_str().into(),
            Some(mount) => {
                let key = entry.key.strip_suffix('/').unwrap_or(&entry.key);
                let location = key.strip_suffix(&*String::from_utf8_lossy(&entry.name)).unwrap_or_default();
                let parent = names.directories.ensure(entry.parent, Some(mount), location);
                if let (Some(age), Kind::File) = (age, attr.kind()) {
                    parent.set_age(now, age);
                }
                parent.location.clone()
            }
        };
        if mount.as_ref().is_none_or(is_root) && attr.inode != ROOT_INODE {
            names.directories.ensure(entry.parent, None, "");
        }
        if attr.kind() == Kind::Directory {
            let own = names.directories.ensure(attr.inode, mount.as_ref(), &entry.key);
            if let Some(age) = age {
                own.set_age(now, age);
            }
        }
        let node = Arc::new(Node::new(&entry, &attr, mount, location));
        // What is removed has no name to be found under.
        if !node.is_removed() {
            names.keep_answer(std::slice::from_ref(&node), mark);
        }
        Ok(node)
    }

    /// Which blocks a file of an fs-mode mount has, and its attributes of the same moment. `Stale` when it is gone.
    /// `prefetch`: files of the same directory of which that is to be answered, too. `user`: who has opened it, where
    /// the mount limits users; `EACCES` where he may not.
    pub async fn layout(&self, inode: u64, prefetch: &[u64], user: Option<&User>) -> Result<Layout, ClientError> {
        let _asked = Stage::Metadata.begin();
        let inner = &self.inner;
        inner.settled(inode).await?;
        let request = || {
            let (session, user) = (inner.lease.session(), user.cloned());
            GetLayoutRequest { inode, session, prefetch: prefetch.to_vec(), user }
        };
        // Whoever has the file open reads and writes it as soon as a master is there.
        let deadline = Instant::now() + inner.change_timeout;
        let answer = ask!(inner, "GetLayout", get_layout, request(), RetryPolicy::UntilDeadline, deadline);
        match answer.await.map_err(ClientError::from) {
            Err(ClientError::NotFound(_)) => Err(ClientError::Stale(format!("inode {inode}"))),
            Err(ClientError::Net(NetError::Master { code: Code::PermissionDenied, message })) => {
                Err(ClientError::Refused { errno: Errno::ACCESS.raw_os_error(), reason: message })
            }
            answer => answer,
        }
    }

    /// The directory that a file is in, with up to `most` of the files that come after it in the order of names, as far
    /// as its listing is known, and what the master knows of them is all there is. With the moment until which no
    /// change is known.
    pub(crate) fn files_after(&self, inode: u64, most: impl FnOnce(u64) -> usize) -> Option<FilesAfter> {
        let (names, log) = (&self.inner.names, &self.inner.log);
        let node = names.cache.node(inode)?;
        let most = most(node.parent);
        let directory = names.directories.get(node.parent).filter(|_| most > 0)?;
        let mark = names.recent.mark();
        let (nodes, _) = directory.page(&names.cache, &node.name, most)?;
        let state = log.lock();
        let is_plain = |node: &Arc<Node>| {
            let is_settled = || !state.affected.is_unsettled(node.inode);
            matches!(node.kind, Kind::File) && node.size > 0 && node.nlink == 1 && is_settled()
        };
        let inodes = nodes.iter().filter(|node| is_plain(node)).map(|node| node.inode).collect();
        Some(FilesAfter { inodes, mark })
    }

    /// Whether something of an inode has changed since then, by whomever.
    pub(crate) fn has_changed_since(&self, mark: InvalidationMark) -> impl Fn(u64) -> bool + use<> {
        let changes = self.inner.names.recent.since(mark);
        move |inode| changes.touch_inode(inode)
    }

    /// Has the blocks of files of fs-mode mounts dropped that the bucket has; what became of each, in the order of the
    /// inodes.
    pub async fn free_content(&self, inodes: Vec<u64>) -> Result<Vec<FreedContent>, ClientError> {
        if inodes.is_empty() {
            return Ok(Vec::new());
        }
        self.inner.all_settled().await?;
        self.free_content_as(0, inodes).await
    }

    /// Has the blocks of one file dropped, though this session has a reference to it: nobody here writes to it
    /// meanwhile, nor afterwards without having asked for its layout.
    pub(crate) async fn free_own_content(&self, inode: u64) -> Result<FreeFate, ClientError> {
        let freed = self.free_content_as(self.inner.lease.session(), vec![inode]).await?;
        Ok(freed.first().map_or(FreeFate::Dirty, FreedContent::fate))
    }

    async fn free_content_as(&self, session: u64, inodes: Vec<u64>) -> Result<Vec<FreedContent>, ClientError> {
        let request = || FreeContentRequest { inodes: inodes.clone(), session };
        Ok(ask!(self.inner, "FreeContent", free_content, request()).await?.results)
    }

    /// Every extended attribute of an inode of an fs-mode mount. `Stale` when it is gone.
    pub async fn xattrs(&self, inode: u64) -> Result<Vec<Xattr>, ClientError> {
        let inner = &self.inner;
        inner.settled(inode).await?;
        let request = || GetXattrsRequest { inode, session: inner.lease.session() };
        match ask!(inner, "GetXattrs", get_xattrs, request()).await.map_err(ClientError::from) {
            Err(ClientError::NotFound(_)) => Err(ClientError::Stale(format!("inode {inode}"))),
            answer => Ok(answer?.xattrs),
        }
    }

    /// How long files live in a directory of an fs-mode mount, the rule that holds first; of inode 0, all rules there
    /// are.
    pub async fn ttls(&self, directory: u64) -> Result<Ttls, ClientError> {
        Ok(ask!(self.inner, "GetTtls", get_ttls, GetTtlsRequest { inode: directory }).await?)
    }

    /// The quotas that bound what is in a directory of an fs-mode mount, nearest first; of inode 0, all there are.
    pub async fn quotas(&self, directory: u64) -> Result<Quotas, ClientError> {
        Ok(ask!(self.inner, "GetQuotas", get_quotas, GetQuotasRequest { inode: directory }).await?)
    }

    /// Has the master say whether a user may read a file or a directory whom it takes for another one than the kernel
    /// does. Of one who counts as himself, the kernel has said so.
    ///
    /// # Errors
    /// `EACCES` where he may not.
    pub async fn check_readable(&self, node: &Node, user: &User) -> Result<(), ClientError> {
        if !node.squashes(user) {
            return Ok(());
        }
        let _asked = Stage::Metadata.begin();
        let (inner, inode) = (&self.inner, node.inode);
        inner.settled(inode).await?;
        let request = || {
            let (session, user) = (inner.lease.session(), Some(user.clone()));
            CheckAccessRequest { inode, user, wanted: READ, session }
        };
        match ask!(inner, "CheckAccess", check_access, request()).await.map_err(ClientError::from) {
            Err(ClientError::NotFound(_)) => Err(ClientError::Stale(format!("inode {inode}"))),
            Ok(reply) if !reply.allowed => {
                let reason = format!("user {} counts as one who may not open inode {inode}", user.uid);
                Err(ClientError::Refused { errno: Errno::ACCESS.raw_os_error(), reason })
            }
            answer => answer.map(drop),
        }
    }

    async fn mount_of(&self, entry: &Entry) -> Result<Option<Arc<MountView>>, ClientError> {
        match entry.mount_id {
            0 => Ok(None),
            id => self.inner.tables.mount(id).await.map(Some),
        }
    }
}

impl Inner {
    /// Whether a directory is known to be one of an fs-mode mount: there, only the master can say what is not cached.
    fn is_fs_mode(&self, directory: u64) -> bool {
        let known = self.names.directories.get(directory);
        known.is_some_and(|known| known.mount.as_ref().is_some_and(|mount| mount.is_fs_mode()))
    }
}
