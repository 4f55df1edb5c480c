//! A master in memory, for tests of the mount alone: it shows one directory tree as a bucket, and changes when a test
//! asks for it.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use cavern_conf::schema;
use cavern_proto::master::cluster_server::{Cluster, ClusterServer};
use cavern_proto::master::mutation::Change;
use cavern_proto::master::namespace_server::{Namespace, NamespaceServer};
use cavern_proto::master::watch_event::Event;
use cavern_proto::master::{self as wire, Attr, Entry, EntryChanged, Kind, LockType, WatchEvent};
use cavern_ufs::{ListMode, ObjectMeta, Ufs};
use futures::{Stream, StreamExt};
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::sync::{Notify, broadcast, watch};
use tokio_stream::wrappers::{BroadcastStream, TcpListenerStream};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

pub const MOUNT: u32 = 7;
const MOUNT_ROOT: u64 = 10;
/// Entries of one page of ReadDir.
const PAGE: usize = 500;

/// Handle of the running master.
#[derive(Clone)]
pub struct Master {
    state: Arc<State>,
}

struct State {
    uri: String,
    ufs: Ufs,
    tree: Mutex<Tree>,
    events: broadcast::Sender<WatchEvent>,
    seq: AtomicU64,
    acknowledged: watch::Sender<u64>,
    invalidated: watch::Sender<u64>,
    /// Whether the bucket can be written to.
    is_writable: bool,
    /// Whether the mount is one in fs-mode, with locks that everybody gets.
    is_fs_mode: AtomicBool,
    /// Those that were asked for.
    locks: Mutex<Vec<wire::SetLock>>,
    /// Nothing is answered while set.
    hung: AtomicBool,
    released: Notify,
    calls: AtomicU64,
}

#[derive(Default)]
struct Tree {
    entries: HashMap<u64, Entry>,
    children: HashMap<u64, BTreeMap<Vec<u8>, u64>>,
    next: u64,
}

impl Tree {
    fn add(&mut self, parent: u64, name: &[u8], kind: Kind, object: Option<&ObjectMeta>) -> u64 {
        if let Some(inode) = self.children.get(&parent).and_then(|children| children.get(name))
            && kind == Kind::Directory
        {
            return *inode;
        }
        self.next += 1;
        let inode = MOUNT_ROOT + self.next;
        let attr = Attr {
            inode,
            kind: kind.into(),
            mode: 0o644,
            size: object.map_or(0, |object| object.size),
            mtime_ns: object.map_or(0, |object| object.mtime_ns),
            nlink: 1,
            ..Attr::default()
        };
        let key = match object {
            Some(object) => object.key.clone(),
            None => format!("{}{}/", self.entries[&parent].key, String::from_utf8_lossy(name)),
        };
        let entry = Entry {
            name: name.to_vec().into(),
            attr: Some(attr),
            parent,
            mount_id: MOUNT,
            key,
            etag: object.map(|object| object.etag.clone()).unwrap_or_default(),
            listing_age_ms: 0,
            ..Entry::default()
        };
        self.entries.insert(inode, entry);
        self.children.entry(parent).or_default().insert(name.to_vec(), inode);
        inode
    }

    fn directory(&mut self, inode: u64, parent: u64, name: &str, mount_id: u32) {
        let attr = Attr { inode, kind: Kind::Directory.into(), mode: 0o755, nlink: 2, ..Attr::default() };
        let listing_age_ms = if mount_id == 0 { -1 } else { 0 };
        let name = name.as_bytes().to_vec();
        let entry =
            Entry { name: name.clone().into(), attr: Some(attr), parent, mount_id, listing_age_ms, ..Entry::default() };
        self.entries.insert(inode, entry);
        self.children.entry(inode).or_default();
        if inode != parent {
            self.children.entry(parent).or_default().insert(name, inode);
        }
    }

    fn object(&mut self, object: &ObjectMeta) -> (u64, Vec<u8>, u64, u64) {
        let (mut parent, mut names) = (MOUNT_ROOT, object.key.split('/').peekable());
        while let Some(name) = names.next() {
            if names.peek().is_none() {
                let old = self.children.get(&parent).and_then(|children| children.get(name.as_bytes()).copied());
                if let Some(old) = old {
                    self.entries.remove(&old);
                }
                let new = self.add(parent, name.as_bytes(), Kind::File, Some(object));
                return (parent, name.as_bytes().to_vec(), old.unwrap_or(0), new);
            }
            parent = self.add(parent, name.as_bytes(), Kind::Directory, None);
        }
        unreachable!("a key has a name")
    }
}

impl Master {
    /// Starts a master whose namespace shows the directory `bucket` at `/data`.
    pub async fn start(bucket: &std::path::Path, is_writable: bool, stop: CancellationToken) -> (Self, SocketAddr) {
        let uri = format!("file://{}", bucket.display());
        let conf = schema::Ufs { file_roots: vec!["/".into()], ..schema::Ufs::default() };
        let ufs = Ufs::open(&uri, &HashMap::new(), &conf).unwrap();
        let state = State {
            uri,
            ufs,
            tree: Mutex::default(),
            events: broadcast::channel(4096).0,
            seq: AtomicU64::new(1),
            acknowledged: watch::channel(0).0,
            invalidated: watch::channel(0).0,
            is_writable,
            is_fs_mode: AtomicBool::new(false),
            locks: Mutex::default(),
            hung: AtomicBool::new(false),
            released: Notify::new(),
            calls: AtomicU64::new(0),
        };
        {
            let mut tree = state.tree.lock();
            tree.directory(1, 1, "", 0);
            tree.directory(MOUNT_ROOT, 1, "data", MOUNT);
        }
        let master = Self { state: Arc::new(state) };
        let mut lister = master.state.ufs.list("", ListMode::Recursive);
        while let Some(page) = lister.next_page().await.unwrap() {
            let mut tree = master.state.tree.lock();
            for object in &page.objects {
                tree.object(object);
            }
        }
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tonic::transport::Server::builder()
            .add_service(NamespaceServer::new(master.clone()))
            .add_service(ClusterServer::new(master.clone()))
            .serve_with_incoming_shutdown(TcpListenerStream::new(listener), async move { stop.cancelled().await });
        tokio::spawn(server);
        (master, address)
    }

    /// Takes the object's present version in, and returns when the client has acknowledged the invalidation.
    pub async fn take_in(&self, key: &str) {
        let changed = self.take_in_silently(key).await;
        self.send_event(Event::Entry(changed)).await;
    }

    /// Takes the object's present version in, while the client does not know of it yet.
    pub async fn take_in_silently(&self, key: &str) -> EntryChanged {
        let object = self.state.ufs.head(key).await.unwrap();
        let (parent, name, old_inode, new_inode) = self.state.tree.lock().object(&object);
        EntryChanged { parent, name: name.into(), old_inode, new_inode }
    }

    /// Takes in that the object is gone.
    pub async fn take_out(&self, name: &str) {
        let old_inode = {
            let mut tree = self.state.tree.lock();
            let old = tree.children.get_mut(&MOUNT_ROOT).unwrap().remove(name.as_bytes()).unwrap();
            tree.entries.remove(&old);
            old
        };
        let name = name.as_bytes().to_vec().into();
        self.send_event(Event::Entry(EntryChanged { parent: MOUNT_ROOT, name, old_inode, new_inode: 0 })).await;
    }

    async fn send_event(&self, event: Event) {
        let seq = self.announce(event);
        self.acknowledged(seq).await;
    }

    /// Sends an event; its number.
    pub fn announce(&self, event: Event) -> u64 {
        let seq = self.state.seq.fetch_add(1, Ordering::SeqCst) + 1;
        self.state.events.send(WatchEvent { seq, heard: 0, event: Some(event), ..WatchEvent::default() }).unwrap();
        seq
    }

    /// Returns when the client has acknowledged an event.
    pub async fn acknowledged(&self, seq: u64) {
        Self::reached(&self.state.acknowledged, seq).await;
    }

    /// Returns when the client has let go of what an event made untrue.
    pub async fn invalidated(&self, seq: u64) {
        Self::reached(&self.state.invalidated, seq).await;
    }

    async fn reached(number: &watch::Sender<u64>, seq: u64) {
        let mut number = number.subscribe();
        let reached = number.wait_for(|number| *number >= seq);
        tokio::time::timeout(Duration::from_secs(30), reached).await.unwrap().unwrap();
    }

    /// Answers nothing until `release`.
    pub fn hang(&self) {
        self.state.hung.store(true, Ordering::SeqCst);
    }

    pub fn release(&self) {
        self.state.hung.store(false, Ordering::SeqCst);
        self.state.released.notify_waiters();
    }

    /// The mount is one in fs-mode. To be called before anybody asks.
    pub fn fs_mode(&self) {
        self.state.is_fs_mode.store(true, Ordering::SeqCst);
    }

    /// The locks that were asked for so far.
    pub fn locks(&self) -> Vec<LockType> {
        self.state.locks.lock().iter().map(|set| set.lock.unwrap().r#type()).collect()
    }

    /// Calls of the namespace so far.
    pub fn calls(&self) -> u64 {
        self.state.calls.load(Ordering::SeqCst)
    }

    async fn called(&self) {
        self.state.calls.fetch_add(1, Ordering::SeqCst);
        while self.state.hung.load(Ordering::SeqCst) {
            let released = self.state.released.notified();
            if self.state.hung.load(Ordering::SeqCst) {
                released.await;
            }
        }
    }

    fn entry(&self, inode: u64) -> Result<Response<Entry>, Status> {
        let tree = self.state.tree.lock();
        tree.entries.get(&inode).cloned().map(Response::new).ok_or_else(|| Status::not_found("no such inode"))
    }

    fn child(&self, parent: u64, name: &[u8]) -> Option<u64> {
        self.state.tree.lock().children.get(&parent)?.get(name).copied()
    }
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Namespace for Master {
    async fn resolve(&self, request: Request<wire::ResolveRequest>) -> Result<Response<Entry>, Status> {
        self.called().await;
        let path = request.into_inner().path;
        let mut inode = 1;
        for name in path.split('/').filter(|name| !name.is_empty()) {
            inode = self.child(inode, name.as_bytes()).ok_or_else(|| Status::not_found(name))?;
        }
        self.entry(inode)
    }

    async fn lookup(&self, request: Request<wire::LookupRequest>) -> Result<Response<Entry>, Status> {
        self.called().await;
        let request = request.into_inner();
        self.entry(self.child(request.parent, &request.name).ok_or_else(|| Status::not_found("no such name"))?)
    }

    async fn get_inode(&self, request: Request<wire::GetInodeRequest>) -> Result<Response<Entry>, Status> {
        self.called().await;
        self.entry(request.into_inner().inode)
    }

    async fn make_listed(
        &self,
        _: Request<wire::MakeListedRequest>,
    ) -> Result<Response<wire::MakeListedReply>, Status> {
        Ok(Response::new(wire::MakeListedReply { done: true, entries: 0 }))
    }

    async fn recall(&self, _: Request<wire::RecallRequest>) -> Result<Response<wire::RecallReply>, Status> {
        Ok(Response::new(wire::RecallReply {}))
    }

    async fn get_ttls(&self, _: Request<wire::GetTtlsRequest>) -> Result<Response<wire::Ttls>, Status> {
        Ok(Response::new(wire::Ttls::default()))
    }

    async fn get_quotas(&self, _: Request<wire::GetQuotasRequest>) -> Result<Response<wire::Quotas>, Status> {
        Ok(Response::new(wire::Quotas::default()))
    }

    type ReadDirStream = Answers<wire::ReadDirPage>;
    async fn read_dir(&self, request: Request<wire::ReadDirRequest>) -> Result<Response<Self::ReadDirStream>, Status> {
        self.called().await;
        let request = request.into_inner();
        let directory = self.entry(request.inode)?.into_inner();
        let limit = if request.limit == 0 { usize::MAX } else { request.limit as usize };
        let tree = self.state.tree.lock();
        let mut entries = Vec::new();
        let mut more = false;
        for (name, inode) in tree.children.get(&request.inode).into_iter().flatten() {
            if name.as_slice() <= &request.after_name[..] {
                continue;
            }
            if entries.len() == limit {
                more = true;
                break;
            }
            entries.push(Entry { key: String::new(), ..tree.entries[inode].clone() });
        }
        let event_seq = self.state.seq.load(Ordering::SeqCst);
        let count = entries.len().div_ceil(PAGE).max(1);
        let pages: Vec<_> = (0..count)
            .map(|page| {
                let slice = entries.iter().skip(page * PAGE).take(PAGE).cloned().collect();
                Ok(wire::ReadDirPage {
                    directory: (page == 0).then(|| directory.clone()),
                    entries: slice,
                    end: page + 1 == count && !more,
                    event_seq,
                })
            })
            .collect();
        Ok(Response::new(Box::pin(futures::stream::iter(pages))))
    }

    async fn refresh_listings(
        &self,
        request: Request<wire::RefreshListingsRequest>,
    ) -> Result<Response<wire::RefreshListingsReply>, Status> {
        self.called().await;
        let directories = request.into_inner().directories.into_iter();
        let directories = directories
            .map(|inode| wire::refresh_listings_reply::Directory { inode, listing_age_ms: 0, gone: false })
            .collect();
        let event_seq = self.state.seq.load(Ordering::SeqCst);
        Ok(Response::new(wire::RefreshListingsReply { directories, event_seq }))
    }

    async fn revalidate(&self, request: Request<wire::RevalidateRequest>) -> Result<Response<Entry>, Status> {
        self.called().await;
        let request = request.into_inner();
        let inode = self.child(request.parent, &request.name).ok_or_else(|| Status::not_found("no such name"))?;
        let key = self.entry(inode)?.into_inner().key;
        match self.state.ufs.head(&key).await {
            Ok(object) if object.etag != self.entry(inode)?.into_inner().etag => self.take_in(&key).await,
            Ok(_) => {}
            Err(_) => {
                self.take_out(&String::from_utf8_lossy(&request.name)).await;
                return Err(Status::not_found("no such object"));
            }
        }
        self.entry(self.child(request.parent, &request.name).ok_or_else(|| Status::not_found("no such name"))?)
    }

    type RefreshStream = Answers<wire::RefreshProgress>;
    async fn refresh(&self, _: Request<wire::RefreshRequest>) -> Result<Response<Self::RefreshStream>, Status> {
        Err(Status::unimplemented("refresh"))
    }

    type UsageStream = Answers<wire::UsageProgress>;
    async fn usage(&self, _: Request<wire::UsageRequest>) -> Result<Response<Self::UsageStream>, Status> {
        Err(Status::unimplemented("usage"))
    }

    type MutateStream = Answers<wire::MutateReply>;
    async fn mutate(
        &self,
        requests: Request<Streaming<wire::MutateRequest>>,
    ) -> Result<Response<Self::MutateStream>, Status> {
        let state = Arc::clone(&self.state);
        let replies = requests.into_inner().map(move |request| {
            let made = |mutation: wire::Mutation| match mutation.change {
                Some(Change::SetLock(set)) => {
                    state.locks.lock().push(set);
                    Ok(wire::MutationResult { inode: set.inode, ..wire::MutationResult::default() })
                }
                _ => Err(Status::unimplemented("another change")),
            };
            let results = request?.mutations.into_iter().map(made).collect::<Result<_, _>>()?;
            Ok(wire::MutateReply { results, event_seq: state.seq.load(Ordering::SeqCst) })
        });
        Ok(Response::new(Box::pin(replies)))
    }

    async fn get_xattrs(&self, _: Request<wire::GetXattrsRequest>) -> Result<Response<wire::Xattrs>, Status> {
        Err(Status::unimplemented("get_xattrs"))
    }

    async fn get_lock(&self, _: Request<wire::GetLockRequest>) -> Result<Response<wire::GetLockReply>, Status> {
        Err(Status::unimplemented("get_lock"))
    }

    async fn restore_watches(
        &self,
        _: Request<wire::RestoreWatchesRequest>,
    ) -> Result<Response<wire::RestoreWatchesReply>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn check_open_refs(
        &self,
        _: Request<wire::CheckOpenRefsRequest>,
    ) -> Result<Response<wire::CheckOpenRefsReply>, Status> {
        Ok(Response::new(wire::CheckOpenRefsReply::default()))
    }

    async fn free_content(
        &self,
        _: Request<wire::FreeContentRequest>,
    ) -> Result<Response<wire::FreeContentReply>, Status> {
        Err(Status::unimplemented("free_content"))
    }

    async fn check_access(
        &self,
        _: Request<wire::CheckAccessRequest>,
    ) -> Result<Response<wire::CheckAccessReply>, Status> {
        Err(Status::unimplemented("check_access"))
    }

    async fn get_layout(&self, _: Request<wire::GetLayoutRequest>) -> Result<Response<wire::Layout>, Status> {
        Err(Status::unimplemented("get_layout"))
    }
}

#[tonic::async_trait]
impl Cluster for Master {
    type WatchStream = Answers<WatchEvent>;
    type FsckStream = Answers<wire::FsckProgress>;
    async fn watch(
        &self,
        request: Request<Streaming<wire::WatchRequest>>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let mut requests = request.into_inner();
        let (acknowledged, invalidated) = (self.state.acknowledged.clone(), self.state.invalidated.clone());
        let heard = Arc::new(AtomicU64::new(1));
        let received = Arc::clone(&heard);
        tokio::spawn(async move {
            while let Some(Ok(request)) = requests.next().await {
                acknowledged.send_replace(request.acknowledged_seq);
                invalidated.send_replace(request.invalidated_seq);
                received.fetch_add(1, Ordering::SeqCst);
            }
        });
        // Before the number: no event is missed in between.
        let events = BroadcastStream::new(self.state.events.subscribe());
        let seq = self.state.seq.load(Ordering::SeqCst);
        let reset = wire::Reset { session: 1, lease_ms: 5000, cluster_id: "test".to_owned() };
        let first = futures::stream::iter([Ok(WatchEvent {
            seq,
            heard: 1,
            event: Some(Event::Reset(reset)),
            ..WatchEvent::default()
        })]);
        // A tick names the last event before it in the stream: whoever acknowledges it has taken that in.
        let passed = Arc::new(AtomicU64::new(seq));
        let passing = Arc::clone(&passed);
        let events = events.map(move |event| {
            let event = event.map_err(|_| Status::data_loss("events were lost"));
            event.inspect(|event| passing.store(event.seq, Ordering::SeqCst))
        });
        let ticks = futures::stream::unfold((), move |()| {
            let (passed, heard) = (Arc::clone(&passed), Arc::clone(&heard));
            async move {
                tokio::time::sleep(Duration::from_millis(500)).await;
                let (seq, heard) = (passed.load(Ordering::SeqCst), heard.load(Ordering::SeqCst));
                Some((Ok(WatchEvent { seq, heard, event: Some(Event::Tick(true)), ..WatchEvent::default() }), ()))
            }
        });
        Ok(Response::new(Box::pin(first.chain(futures::stream::select(events, ticks)))))
    }

    async fn list_mounts(&self, _: Request<wire::ListMountsRequest>) -> Result<Response<wire::MountTable>, Status> {
        Err(Status::unimplemented("list_mounts"))
    }

    async fn get_credentials(&self, _: Request<wire::ListMountsRequest>) -> Result<Response<wire::MountTable>, Status> {
        let access = if self.state.is_writable { wire::AccessMode::ReadWrite } else { wire::AccessMode::ReadOnly };
        let is_fs_mode = self.state.is_fs_mode.load(Ordering::SeqCst);
        let write_type = if is_fs_mode { wire::WriteType::FsMode } else { wire::WriteType::CacheMode };
        let mount = wire::Mount {
            id: MOUNT,
            path: "/data".to_owned(),
            uri: self.state.uri.clone(),
            write_type: write_type.into(),
            block_size: 64 << 20,
            replicas: 1,
            metadata_ttl_ms: 3_600_000,
            consistency: wire::Consistency::Ttl.into(),
            access_mode: access.into(),
            root_inode: MOUNT_ROOT,
            ..wire::Mount::default()
        };
        Ok(Response::new(wire::MountTable { epoch: 1, mounts: vec![mount], status: Vec::new() }))
    }

    async fn vend_keys(&self, _: Request<wire::VendKeysRequest>) -> Result<Response<wire::VendedKeys>, Status> {
        Err(Status::unimplemented("vend_keys"))
    }

    async fn list_workers(&self, _: Request<wire::ListWorkersRequest>) -> Result<Response<wire::WorkerTable>, Status> {
        // None: every read goes to the bucket.
        Ok(Response::new(wire::WorkerTable { epoch: 1, workers: Vec::new() }))
    }

    async fn register_worker(
        &self,
        _: Request<wire::RegisterWorkerRequest>,
    ) -> Result<Response<wire::RegisterWorkerReply>, Status> {
        Err(Status::unimplemented("register_worker"))
    }
    async fn heartbeat(&self, _: Request<wire::HeartbeatRequest>) -> Result<Response<wire::HeartbeatReply>, Status> {
        Err(Status::unimplemented("heartbeat"))
    }
    async fn mount(&self, _: Request<wire::MountRequest>) -> Result<Response<wire::MountReply>, Status> {
        Err(Status::unimplemented("mount"))
    }
    async fn unmount(&self, _: Request<wire::UnmountRequest>) -> Result<Response<wire::UnmountReply>, Status> {
        Err(Status::unimplemented("unmount"))
    }
    async fn update_mount(&self, _: Request<wire::UpdateMountRequest>) -> Result<Response<wire::MountReply>, Status> {
        Err(Status::unimplemented("update_mount"))
    }
    async fn index_mount(&self, _: Request<wire::IndexMountRequest>) -> Result<Response<wire::MountReply>, Status> {
        Err(Status::unimplemented("index_mount"))
    }
    async fn submit_load(&self, _: Request<wire::SubmitLoadRequest>) -> Result<Response<wire::Job>, Status> {
        Err(Status::unimplemented("submit_load"))
    }
    type LoadFilesStream = Answers<wire::Job>;
    async fn load_files(&self, _: Request<wire::LoadFilesRequest>) -> Result<Response<Self::LoadFilesStream>, Status> {
        Err(Status::unimplemented("load_files"))
    }
    async fn submit_export(&self, _: Request<wire::SubmitExportRequest>) -> Result<Response<wire::Job>, Status> {
        Err(Status::unimplemented("submit_export"))
    }
    async fn retry_job(&self, _: Request<wire::GetJobRequest>) -> Result<Response<wire::Job>, Status> {
        Err(Status::unimplemented("retry_job"))
    }
    async fn get_job(&self, _: Request<wire::GetJobRequest>) -> Result<Response<wire::Job>, Status> {
        Err(Status::unimplemented("get_job"))
    }

    async fn get_persist_status(
        &self,
        _: Request<wire::PersistStatusRequest>,
    ) -> Result<Response<wire::PersistStatus>, Status> {
        Err(Status::unimplemented("get_persist_status"))
    }
    async fn resolve_lost(
        &self,
        _: Request<wire::ResolveLostRequest>,
    ) -> Result<Response<wire::ResolveLostReply>, Status> {
        Err(Status::unimplemented("resolve_lost"))
    }
    async fn list_unavailable(
        &self,
        _: Request<wire::ListUnavailableRequest>,
    ) -> Result<Response<wire::UnavailableFiles>, Status> {
        Err(Status::unimplemented("list_unavailable"))
    }
    async fn drain_worker(&self, _: Request<wire::DrainWorkerRequest>) -> Result<Response<wire::WorkerBlocks>, Status> {
        Err(Status::unimplemented("drain_worker"))
    }
    async fn get_worker_blocks(
        &self,
        _: Request<wire::WorkerBlocksRequest>,
    ) -> Result<Response<wire::WorkerBlocks>, Status> {
        Err(Status::unimplemented("get_worker_blocks"))
    }
    async fn remove_worker(
        &self,
        _: Request<wire::RemoveWorkerRequest>,
    ) -> Result<Response<wire::RemoveWorkerReply>, Status> {
        Err(Status::unimplemented("remove_worker"))
    }
    async fn list_claims(&self, _: Request<wire::ListClaimsRequest>) -> Result<Response<wire::ClaimList>, Status> {
        Err(Status::unimplemented("list_claims"))
    }
    async fn list_jobs(&self, _: Request<wire::ListJobsRequest>) -> Result<Response<wire::JobList>, Status> {
        Err(Status::unimplemented("list_jobs"))
    }
    async fn cancel_job(&self, _: Request<wire::GetJobRequest>) -> Result<Response<wire::Job>, Status> {
        Err(Status::unimplemented("cancel_job"))
    }
    async fn fsck(&self, _: Request<wire::FsckRequest>) -> Result<Response<Self::FsckStream>, Status> {
        Err(Status::unimplemented("fsck"))
    }
    async fn status(&self, _: Request<wire::StatusRequest>) -> Result<Response<wire::ClusterStatus>, Status> {
        Err(Status::unimplemented("status"))
    }
}
