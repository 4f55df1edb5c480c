//! A master that keeps its namespace in memory and counts what it is asked.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cavern_proto::NotLeading;
use cavern_proto::master::cluster_server::{Cluster, ClusterServer};
use cavern_proto::master::namespace_server::{Namespace, NamespaceServer};
use cavern_proto::master::views_server::ViewsServer;
use cavern_proto::master::watch_event::Event;
use cavern_proto::master::*;
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status, Streaming};

use super::mutate::Mutations;
use super::views::FakeViews;

pub const ROOT: u64 = 1;
pub const MOUNT_ROOT: u64 = 2;
/// Longer than a test stands still on a busy machine: no session lapses that is not made to.
const LEASE: Duration = Duration::from_secs(20);
const TICK: Duration = Duration::from_millis(100);

type Pages = Pin<Box<dyn Stream<Item = Result<ReadDirPage, Status>> + Send>>;
type Events = Pin<Box<dyn Stream<Item = Result<WatchEvent, Status>> + Send>>;
type Refreshing = Pin<Box<dyn Stream<Item = Result<RefreshProgress, Status>> + Send>>;
type Changing = Pin<Box<dyn Stream<Item = Result<MutateReply, Status>> + Send>>;
type Loading = Pin<Box<dyn Stream<Item = Result<Job, Status>> + Send>>;
type Checking = Pin<Box<dyn Stream<Item = Result<FsckProgress, Status>> + Send>>;
type Counting = Pin<Box<dyn Stream<Item = Result<UsageProgress, Status>> + Send>>;

/// One mount at `/m` (inode 2), of a `memory://` bucket.
pub struct FakeMaster {
    service: Service,
    pub views: FakeViews,
    port: Port,
    server: Mutex<Option<Server>>,
}

/// A port of this host that nobody else is given while the master is away: the socket itself never listens.
struct Port {
    address: SocketAddr,
    _taken: TcpSocket,
}

impl Port {
    fn take() -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_reuseaddr(true).unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        Self { address: socket.local_addr().unwrap(), _taken: socket }
    }

    fn listen(&self) -> io::Result<std::net::TcpListener> {
        let listener = std::net::TcpListener::bind(self.address)?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    }
}

#[derive(Clone)]
struct Service {
    state: Arc<Mutex<State>>,
    /// Calls are taken and never answered, and no tick is sent.
    hung: Arc<AtomicBool>,
    /// Ticks are sent, and what clients send is not read.
    deaf: Arc<AtomicBool>,
    /// It does not lead, and says so.
    follows: Arc<Mutex<Option<NotLeading>>>,
    /// Taken while listings are renewed.
    touching: Arc<tokio::sync::RwLock<()>>,
    /// Taken while changes are made.
    mutating: Arc<tokio::sync::RwLock<()>>,
    /// What the next answer with the table of workers waits for.
    workers_held: Arc<Mutex<Option<oneshot::Receiver<()>>>>,
    /// What the next answer about a name of the bucket waits for.
    name_held: Arc<Mutex<Option<oneshot::Receiver<()>>>>,
}

impl Drop for FakeMaster {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A runtime of its own, so that its end breaks every connection.
type Server = tokio::runtime::Runtime;

#[derive(Default)]
pub struct State {
    pub mount: Mount,
    mounts_epoch: u64,
    /// By which the client goes, as it says.
    mounts_settled: u64,
    workers: Vec<Worker>,
    workers_epoch: u64,
    pub entries: HashMap<u64, Entry>,
    pub names: BTreeMap<(u64, Vec<u8>), u64>,
    ages_ms: HashMap<u64, i64>,
    lease_ms: u32,
    /// A client that has missed nothing goes on with its session.
    resumes: bool,
    /// What a Touch makes of a listing's age; `None` leaves it.
    age_after_refresh_ms: Option<i64>,
    pub next_inode: u64,
    pub seq: u64,
    /// Of the last stream that began without one, or with one that is over.
    pub session: u64,
    pub mutations: Mutations,
    /// Workers of the blocks of files, by inode.
    blocks: HashMap<u64, Vec<Vec<u64>>>,
    /// Of the blocks that are made next, for what views have frozen.
    pub next_generation: u32,
    /// Blocks of files that commits and cuts change.
    pub extents: HashMap<u64, BTreeMap<u32, Extent>>,
    pub watchers: Vec<mpsc::Sender<Result<WatchEvent, Status>>>,
    acknowledged: u64,
    invalidated: u64,
    counts: HashMap<&'static str, u64>,
    /// What listings end with, before they are complete.
    listings_fail: Option<Status>,
}

impl FakeMaster {
    /// A master with an empty mount of `memory://NAME` at /m.
    pub async fn start(bucket: &str) -> Self {
        let mount = Mount {
            id: 1,
            path: "/m".into(),
            uri: format!("memory://{bucket}"),
            write_type: WriteType::CacheMode.into(),
            block_size: 1 << 20,
            replicas: 1,
            metadata_ttl_ms: 60_000,
            consistency: Consistency::Ttl.into(),
            root_inode: MOUNT_ROOT,
            ..Mount::default()
        };
        let directory = |inode, name: &str, mount_id| Entry {
            name: name.as_bytes().to_vec().into(),
            attr: Some(Attr { inode, kind: Kind::Directory.into(), mode: 0o755, nlink: 2, ..Attr::default() }),
            parent: ROOT,
            mount_id,
            ..Entry::default()
        };
        let mut state = State {
            mount,
            mounts_epoch: 1,
            next_inode: 100,
            lease_ms: LEASE.as_millis() as u32,
            age_after_refresh_ms: Some(0),
            ..State::default()
        };
        state.entries.insert(ROOT, directory(ROOT, "", 0));
        state.entries.insert(MOUNT_ROOT, directory(MOUNT_ROOT, "m", 1));
        state.names.insert((ROOT, b"m".to_vec()), MOUNT_ROOT);
        let service = Service {
            state: Arc::new(Mutex::new(state)),
            hung: Arc::default(),
            deaf: Arc::default(),
            follows: Arc::default(),
            touching: Arc::default(),
            mutating: Arc::default(),
            workers_held: Arc::default(),
            name_held: Arc::default(),
        };
        let master = Self { service, views: FakeViews::default(), port: Port::take(), server: Mutex::default() };
        master.serve(master.port.listen().unwrap());
        master
    }

    /// Another master of the same group, which follows this one and names it.
    pub async fn follower(&self) -> Self {
        let service = Service {
            state: self.service.state.clone(),
            hung: Arc::default(),
            deaf: Arc::default(),
            follows: Arc::default(),
            touching: Arc::default(),
            mutating: Arc::default(),
            workers_held: Arc::default(),
            name_held: Arc::default(),
        };
        let master = Self { service, views: self.views.clone(), port: Port::take(), server: Mutex::default() };
        master.follow(Some(self));
        master.serve(master.port.listen().unwrap());
        master
    }

    /// It leads no more: its streams end, and it names the leader, if there is one.
    pub fn follow(&self, leader: Option<&Self>) {
        *self.service.follows.lock() = Some(NotLeading { leader: leader.map(Self::address) });
    }

    pub fn lead(&self) {
        *self.service.follows.lock() = None;
    }

    fn serve(&self, listener: std::net::TcpListener) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let (service, views) = (self.service.clone(), self.views.clone());
        runtime.spawn(async move {
            let listener = TcpListener::from_std(listener).unwrap();
            let server = tonic::transport::Server::builder()
                .add_service(NamespaceServer::new(service.clone()))
                .add_service(ClusterServer::new(service))
                .add_service(ViewsServer::new(views));
            server.serve_with_incoming(TcpListenerStream::new(listener)).await.unwrap();
        });
        *self.server.lock() = Some(runtime);
    }

    pub fn address(&self) -> String {
        self.port.address.to_string()
    }

    /// As kill -9: connections break, later ones are refused.
    pub fn kill(&self) {
        let server = self.server.lock().take();
        server.into_iter().for_each(Server::shutdown_background);
        self.service.state.lock().watchers.clear();
    }

    /// At the same address, with the same namespace.
    pub async fn restart(&self) {
        loop {
            match self.port.listen() {
                Ok(listener) => return self.serve(listener),
                Err(_in_use) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    }

    /// Waits until every client has taken in every event.
    pub async fn settled(&self) {
        super::until("every event is acknowledged", || self.acknowledged() == self.seq()).await;
    }

    /// As SIGSTOP and SIGCONT.
    pub fn hang(&self, hung: bool) {
        self.service.hung.store(hung, Ordering::Relaxed);
    }

    /// As if all that is read of its stream were of long ago.
    pub fn deafen(&self, deaf: bool) {
        self.service.deaf.store(deaf, Ordering::Relaxed);
    }

    /// Listings of directories break off from now on, behind all of their entries.
    pub fn fail_listings(&self, status: Status) {
        self.service.state.lock().listings_fail = Some(status);
    }

    pub fn configure(&self, change: impl FnOnce(&mut Mount)) {
        change(&mut self.service.state.lock().mount);
    }

    /// Puts workers in the table and announces the new epoch.
    pub fn set_workers(&self, workers: Vec<Worker>) {
        let mut state = self.service.state.lock();
        state.workers = workers;
        state.workers_epoch += 1;
        let epoch = state.workers_epoch;
        state.announce(Event::WorkersEpoch(epoch));
    }

    /// Adds a file to a directory, or replaces one as an object of another version; announces it.
    pub fn put_file(&self, parent: u64, name: &str, etag: &str, size: u64) -> u64 {
        self.service.state.lock().put_announced(parent, name, Kind::File, etag, size)
    }

    /// The same, and no client is notified of it.
    pub fn put_file_unannounced(&self, parent: u64, name: &str, etag: &str, size: u64) -> u64 {
        self.service.state.lock().put(parent, name, Kind::File, etag, size).0
    }

    /// A file of an fs-mode mount, all of it in one block at a worker.
    pub fn put_block(&self, parent: u64, name: &str, worker: u64, size: u64) -> u64 {
        self.put_replicas(parent, name, &[worker], size)
    }

    /// The same at several workers.
    pub fn put_replicas(&self, parent: u64, name: &str, workers: &[u64], size: u64) -> u64 {
        self.put_blocks(parent, name, &[workers], size)
    }

    /// The same in several blocks, each at workers of its own.
    pub fn put_blocks(&self, parent: u64, name: &str, blocks: &[&[u64]], size: u64) -> u64 {
        let inode = self.put_file(parent, name, "", size);
        let blocks = blocks.iter().map(|workers| workers.to_vec()).collect();
        self.service.state.lock().blocks.insert(inode, blocks);
        inode
    }

    /// From now on what is committed of a file, and cut off it, counts.
    pub fn keep_extents(&self, inode: u64) {
        let mut state = self.service.state.lock();
        let extents = state.extents_of(inode).into_iter().map(|extent| (extent.index, extent)).collect();
        state.extents.insert(inode, extents);
        state.entries.get_mut(&inode).unwrap().attr.as_mut().unwrap().generation = 1;
    }

    /// Length and generation of a file, and its blocks.
    pub fn layout(&self, inode: u64) -> (Attr, Vec<Extent>) {
        let state = self.service.state.lock();
        (state.entries[&inode].attr.unwrap(), state.extents_of(inode))
    }

    /// Views have all blocks of earlier generations than this, 0 for none. The client is not told before
    /// [`Self::announce_mounts`].
    pub fn freeze(&self, below: u32) {
        let mut state = self.service.state.lock();
        let inodes = if below == 0 { 0 } else { u64::MAX >> 3 };
        (state.mount.frozen_below, state.mount.frozen_inodes) = (below, inodes);
        state.mount.settled_below = state.mount.settled_below.min(below);
        state.next_generation = state.next_generation.max(below);
        state.mounts_epoch += 1;
    }

    /// All clients go by what is frozen.
    pub fn all_settled(&self) {
        let mut state = self.service.state.lock();
        state.mount.settled_below = state.mount.frozen_below;
        state.mounts_epoch += 1;
    }

    /// Announces the mount table as it is. Its epoch.
    pub fn announce_mounts(&self) -> u64 {
        let mut state = self.service.state.lock();
        let epoch = state.mounts_epoch;
        state.announce(Event::MountsEpoch(epoch));
        epoch
    }

    /// Waits until the client goes by the mount table of an epoch.
    pub async fn settled_by(&self, epoch: u64) {
        let settled = || self.service.state.lock().mounts_settled;
        super::until("the client goes by the mount table", || settled() == epoch).await;
    }

    /// Somebody has changed the content of a file; announces it.
    pub fn change_content(&self, inode: u64) {
        let mut state = self.service.state.lock();
        state.entries.get_mut(&inode).unwrap().attr.as_mut().unwrap().version += 1;
        state.announce(Event::InodeChanged(inode));
    }

    pub fn put_directory(&self, parent: u64, name: &str) -> u64 {
        self.service.state.lock().put_announced(parent, name, Kind::Directory, "", 0)
    }

    pub fn remove(&self, parent: u64, name: &str) {
        let mut state = self.service.state.lock();
        let old = state.names.remove(&(parent, name.into())).unwrap_or(0);
        state.entries.remove(&old);
        let changed = EntryChanged { parent, name: name.as_bytes().to_vec().into(), old_inode: old, new_inode: 0 };
        state.announce(Event::Entry(changed));
    }

    pub fn set_age(&self, directory: u64, age_ms: i64) {
        self.service.state.lock().ages_ms.insert(directory, age_ms);
    }

    /// Of the sessions that begin from now on.
    pub fn set_lease(&self, lease: Duration) {
        self.service.state.lock().lease_ms = lease.as_millis() as u32;
    }

    /// Clients that come back, and have missed nothing, go on from now on. They forget everything otherwise.
    pub fn resume_streams(&self) {
        self.service.state.lock().resumes = true;
    }

    /// Listings are renewed when what this answers has been dropped.
    pub async fn hold_touches(&self) -> impl Drop + use<> {
        self.service.touching.clone().write_owned().await
    }

    /// Changes are made when what this answers has been dropped.
    pub async fn hold_mutations(&self) -> impl Drop + use<> {
        self.service.mutating.clone().write_owned().await
    }

    /// Whoever asks next for the table of workers has it as it is then, and when what this answers has been dropped.
    pub fn hold_workers(&self) -> oneshot::Sender<()> {
        let (release, held) = oneshot::channel();
        *self.service.workers_held.lock() = Some(held);
        release
    }

    /// Whoever asks next what a name of the bucket leads to is told as it is then, and when what this answers has been
    /// dropped.
    pub fn hold_name(&self) -> oneshot::Sender<()> {
        let (release, held) = oneshot::channel();
        *self.service.name_held.lock() = Some(held);
        release
    }

    pub fn set_age_after_refresh(&self, age_ms: Option<i64>) {
        self.service.state.lock().age_after_refresh_ms = age_ms;
    }

    /// Makes the mount one whose names can be changed.
    pub fn fs_mode(&self) {
        self.configure(|mount| {
            mount.write_type = WriteType::FsMode.into();
            mount.consistency = Consistency::Never.into();
        });
    }

    /// Looks at the changes that were asked for, or decides about the next.
    pub fn mutations<T>(&self, look: impl FnOnce(&mut Mutations) -> T) -> T {
        look(&mut self.service.state.lock().mutations)
    }

    pub fn announce(&self, event: Event) {
        self.service.state.lock().announce(event);
    }

    /// How often a call was made.
    pub fn count(&self, call: &str) -> u64 {
        self.service.state.lock().counts.get(call).copied().unwrap_or(0)
    }

    pub fn acknowledged(&self) -> u64 {
        self.service.state.lock().acknowledged
    }

    pub fn invalidated(&self) -> u64 {
        self.service.state.lock().invalidated
    }

    pub fn seq(&self) -> u64 {
        self.service.state.lock().seq
    }
}

impl Service {
    /// Counts a call; never returns while the master hangs.
    async fn enter(&self, call: &'static str) -> Result<(), Status> {
        *self.state.lock().counts.entry(call).or_default() += 1;
        while self.hung.load(Ordering::Relaxed) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        self.check_leads()
    }

    fn check_leads(&self) -> Result<(), Status> {
        self.follows.lock().as_ref().map_or(Ok(()), |answer| Err(answer.to_status()))
    }
}

impl State {
    fn key_of(&self, directory: u64) -> String {
        self.entries.get(&directory).map(|entry| entry.key.clone()).unwrap_or_default()
    }

    /// The new inode, and the event that announces it.
    fn put(&mut self, parent: u64, name: &str, kind: Kind, etag: &str, size: u64) -> (u64, EntryChanged) {
        let inode = self.next_inode;
        self.next_inode += 1;
        let key = format!("{}{name}{}", self.key_of(parent), if kind == Kind::Directory { "/" } else { "" });
        let entry = Entry {
            name: name.as_bytes().to_vec().into(),
            attr: Some(Attr { inode, kind: kind.into(), mode: 0o644, size, nlink: 1, ..Attr::default() }),
            parent,
            mount_id: 1,
            key,
            etag: etag.into(),
            listing_age_ms: 0,
            ..Entry::default()
        };
        self.entries.insert(inode, entry);
        let old = self.names.insert((parent, name.into()), inode).unwrap_or(0);
        self.entries.remove(&old);
        (inode, EntryChanged { parent, name: name.as_bytes().to_vec().into(), old_inode: old, new_inode: inode })
    }

    fn put_announced(&mut self, parent: u64, name: &str, kind: Kind, etag: &str, size: u64) -> u64 {
        let (inode, changed) = self.put(parent, name, kind, etag, size);
        self.announce(Event::Entry(changed));
        inode
    }

    pub fn announce(&mut self, event: Event) {
        self.seq += 1;
        let event = WatchEvent { seq: self.seq, event: Some(event), heard: 0, ..WatchEvent::default() };
        self.watchers.retain(|watcher| watcher.try_send(Ok(event.clone())).is_ok());
    }

    fn extents_of(&self, inode: u64) -> Vec<Extent> {
        if let Some(extents) = self.extents.get(&inode) {
            return extents.values().cloned().collect();
        }
        let block = |(index, workers): (u32, &Vec<u64>)| {
            let workers = workers.clone();
            Extent { index, generation: 1, workers, ..Extent::default() }
        };
        (0..).zip(self.blocks.get(&inode).into_iter().flatten()).map(block).collect()
    }

    fn worker_table(&self) -> WorkerTable {
        WorkerTable { epoch: self.workers_epoch, workers: self.workers.clone() }
    }

    fn age(&self, directory: u64) -> i64 {
        if directory == ROOT { -1 } else { self.ages_ms.get(&directory).copied().unwrap_or(0) }
    }

    fn entry(&self, inode: u64) -> Result<Entry, Status> {
        let entry = self.entries.get(&inode).ok_or_else(|| Status::not_found("no such inode"))?;
        let is_directory = entry.attr.unwrap_or_default().kind() == Kind::Directory;
        let listing_age_ms = self.age(if is_directory { inode } else { entry.parent });
        Ok(Entry { listing_age_ms, ..entry.clone() })
    }

    fn child(&self, parent: u64, name: &[u8]) -> Result<Entry, Status> {
        let inode = self.names.get(&(parent, name.to_vec())).ok_or_else(|| Status::not_found("no such name"))?;
        self.entry(*inode)
    }
}

#[tonic::async_trait]
impl Namespace for Service {
    type ReadDirStream = Pages;
    type RefreshStream = Refreshing;
    type UsageStream = Counting;

    async fn make_listed(&self, _: Request<MakeListedRequest>) -> Result<Response<MakeListedReply>, Status> {
        Ok(Response::new(MakeListedReply { done: true, entries: 0 }))
    }

    async fn recall(&self, _: Request<RecallRequest>) -> Result<Response<RecallReply>, Status> {
        Ok(Response::new(RecallReply {}))
    }

    async fn get_ttls(&self, _: Request<GetTtlsRequest>) -> Result<Response<Ttls>, Status> {
        Ok(Response::new(Ttls::default()))
    }

    async fn get_quotas(&self, _: Request<GetQuotasRequest>) -> Result<Response<Quotas>, Status> {
        Ok(Response::new(Quotas::default()))
    }

    async fn resolve(&self, request: Request<ResolveRequest>) -> Result<Response<Entry>, Status> {
        self.enter("Resolve").await?;
        let (state, path) = (self.state.lock(), request.into_inner().path);
        let mut entry = state.entry(ROOT)?;
        for name in path.split('/').filter(|name| !name.is_empty()) {
            entry = state.child(entry.attr.unwrap_or_default().inode, name.as_bytes())?;
        }
        Ok(Response::new(entry))
    }

    async fn lookup(&self, request: Request<LookupRequest>) -> Result<Response<Entry>, Status> {
        self.enter("Lookup").await?;
        let request = request.into_inner();
        self.state.lock().child(request.parent, &request.name).map(Response::new)
    }

    async fn get_inode(&self, request: Request<GetInodeRequest>) -> Result<Response<Entry>, Status> {
        self.enter("GetInode").await?;
        self.state.lock().entry(request.into_inner().inode).map(Response::new)
    }

    async fn read_dir(&self, request: Request<ReadDirRequest>) -> Result<Response<Pages>, Status> {
        self.enter("ReadDir").await?;
        let request = request.into_inner();
        let state = self.state.lock();
        let directory = state.entry(request.inode)?;
        let from = (request.inode, request.after_name.to_vec());
        let names = state.names.range(from.clone()..(request.inode + 1, Vec::new()));
        let mut inodes: Vec<u64> = names.filter(|(key, _)| **key != from).map(|(_, inode)| *inode).collect();
        let limit = if request.limit == 0 { usize::MAX } else { request.limit as usize };
        let failed = state.listings_fail.clone();
        let end = inodes.len() <= limit && failed.is_none();
        inodes.truncate(limit);
        let entries: Vec<Entry> =
            inodes.into_iter().map(|inode| Entry { key: String::new(), ..state.entry(inode).unwrap() }).collect();
        let pages = entries.chunks(1000).map(<[Entry]>::to_vec).collect::<Vec<_>>();
        let last = pages.len().saturating_sub(1);
        let mut answers: Vec<ReadDirPage> = pages
            .into_iter()
            .enumerate()
            .map(|(number, entries)| ReadDirPage {
                directory: (number == 0).then(|| directory.clone()),
                entries,
                end: end && number == last,
                event_seq: state.seq,
            })
            .collect();
        if answers.is_empty() {
            let event_seq = state.seq;
            answers.push(ReadDirPage { directory: Some(directory), entries: vec![], end, event_seq });
        }
        Ok(Response::new(Box::pin(tokio_stream::iter(answers.into_iter().map(Ok).chain(failed.map(Err))))))
    }

    async fn refresh_listings(
        &self,
        request: Request<RefreshListingsRequest>,
    ) -> Result<Response<RefreshListingsReply>, Status> {
        let _touching = self.touching.read().await;
        self.enter("Touch").await?;
        let mut state = self.state.lock();
        let mut directories = Vec::new();
        for inode in request.into_inner().directories {
            if let Some(age) = state.age_after_refresh_ms {
                state.ages_ms.insert(inode, age);
            }
            let gone = !state.entries.contains_key(&inode);
            let listing_age_ms = state.age(inode);
            directories.push(refresh_listings_reply::Directory { inode, listing_age_ms, gone });
        }
        Ok(Response::new(RefreshListingsReply { directories, event_seq: state.seq }))
    }

    async fn revalidate(&self, request: Request<RevalidateRequest>) -> Result<Response<Entry>, Status> {
        let (request, held) = (request.into_inner(), self.name_held.lock().take());
        // Before the call is counted: who has seen that it was made decides about what is answered next.
        let found = self.state.lock().child(request.parent, &request.name);
        self.enter("Revalidate").await?;
        if let Some(held) = held {
            let _released = held.await;
        }
        found.map(Response::new)
    }

    async fn refresh(&self, _: Request<RefreshRequest>) -> Result<Response<Refreshing>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn usage(&self, _: Request<UsageRequest>) -> Result<Response<Counting>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    type MutateStream = Changing;

    async fn mutate(&self, request: Request<Streaming<MutateRequest>>) -> Result<Response<Changing>, Status> {
        self.check_leads()?;
        let master = self.clone();
        let answer = move |call: Result<MutateRequest, Status>| {
            let master = master.clone();
            async move {
                let call = call?;
                master.enter("Mutate").await?;
                let _mutating = master.mutating.read().await;
                let (answer, late, seq) = {
                    let mut state = master.state.lock();
                    let answer = state.mutate(call);
                    let is_after_events = std::mem::take(&mut state.mutations.after_events);
                    (answer, state.mutations.late.take(), if is_after_events { state.seq } else { 0 })
                };
                super::until("events are acknowledged", || master.state.lock().acknowledged >= seq).await;
                tokio::time::sleep(late.unwrap_or_default()).await;
                answer
            }
        };
        Ok(Response::new(Box::pin(request.into_inner().then(answer))))
    }

    async fn get_xattrs(&self, _: Request<GetXattrsRequest>) -> Result<Response<Xattrs>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn get_lock(&self, request: Request<GetLockRequest>) -> Result<Response<GetLockReply>, Status> {
        self.enter("GetLock").await?;
        Ok(Response::new(self.state.lock().get_lock(&request.into_inner())))
    }

    async fn check_open_refs(
        &self,
        request: Request<CheckOpenRefsRequest>,
    ) -> Result<Response<CheckOpenRefsReply>, Status> {
        self.enter("CheckOpenRefs").await?;
        Ok(Response::new(self.state.lock().check_open_refs(&request.into_inner())))
    }

    async fn restore_watches(
        &self,
        _: Request<RestoreWatchesRequest>,
    ) -> Result<Response<RestoreWatchesReply>, Status> {
        Ok(Response::new(RestoreWatchesReply {}))
    }

    async fn free_content(&self, _: Request<FreeContentRequest>) -> Result<Response<FreeContentReply>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn check_access(&self, _: Request<CheckAccessRequest>) -> Result<Response<CheckAccessReply>, Status> {
        Err(Status::unimplemented("check_access"))
    }

    async fn get_layout(&self, request: Request<GetLayoutRequest>) -> Result<Response<Layout>, Status> {
        self.enter("GetLayout").await?;
        let state = self.state.lock();
        let inode = request.into_inner().inode;
        let (attr, extents) = (state.entry(inode)?.attr, state.extents_of(inode));
        Ok(Response::new(Layout { attr, block_size: state.mount.block_size, extents, ..Layout::default() }))
    }
}

#[tonic::async_trait]
impl Cluster for Service {
    type WatchStream = Events;
    type LoadFilesStream = Loading;
    type FsckStream = Checking;

    async fn watch(&self, request: Request<Streaming<WatchRequest>>) -> Result<Response<Events>, Status> {
        self.enter("Watch").await?;
        let (sender, events) = mpsc::channel(10_000);
        let mut requests = request.into_inner();
        let first = requests.next().await.transpose()?.unwrap_or_default();
        let session = {
            let mut state = self.state.lock();
            let goes_on = first.session != 0 && first.session == state.session;
            if !goes_on {
                state.session += 1;
            }
            let (session, lease_ms) = (state.session, state.lease_ms);
            let begin = match goes_on && state.resumes && first.applied_seq == state.seq {
                true => Event::Resumed(Resumed { session, lease_ms, missed_up_to: 0 }),
                false => Event::Reset(Reset { session, lease_ms, cluster_id: "fake".into() }),
            };
            let begin = WatchEvent { seq: state.seq, heard: 1, event: Some(begin), ..WatchEvent::default() };
            sender.try_send(Ok(begin)).unwrap();
            state.watchers.push(sender.clone());
            session
        };
        let master = self.clone();
        tokio::spawn(async move {
            let (mut tick, mut heard) = (tokio::time::interval(TICK), 1);
            loop {
                tokio::select! {
                    request = requests.next(), if !master.deaf.load(Ordering::Relaxed) => match request {
                        Some(Ok(request)) => {
                            heard += 1;
                            let mut state = master.state.lock();
                            state.acknowledged = state.acknowledged.max(request.acknowledged_seq);
                            state.invalidated = state.invalidated.max(request.invalidated_seq);
                            state.mounts_settled = request.mounts_settled;
                        }
                        _ => return,
                    },
                    _ = tick.tick() => {
                        if let Err(status) = master.check_leads() {
                            let _gone = sender.try_send(Err(status));
                            return;
                        }
                        let event = {
                            let state = master.state.lock();
                            if state.session != session {
                                return;
                            }
                            let event = Some(Event::Tick(true));
                            WatchEvent { seq: state.seq, heard, event, ..WatchEvent::default() }
                        };
                        if !master.hung.load(Ordering::Relaxed) && sender.try_send(Ok(event)).is_err() {
                            return;
                        }
                    }
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(events))))
    }

    async fn list_workers(&self, _: Request<ListWorkersRequest>) -> Result<Response<WorkerTable>, Status> {
        // Before the call is counted: who has seen that it was made decides about the next.
        let held = self.workers_held.lock().take();
        let table = self.state.lock().worker_table();
        self.enter("ListWorkers").await?;
        if let Some(held) = held {
            let _released = held.await;
        }
        Ok(Response::new(table))
    }

    async fn list_mounts(&self, _: Request<ListMountsRequest>) -> Result<Response<MountTable>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn get_credentials(&self, _: Request<ListMountsRequest>) -> Result<Response<MountTable>, Status> {
        self.enter("GetCredentials").await?;
        let state = self.state.lock();
        let (epoch, mounts) = (state.mounts_epoch, vec![state.mount.clone()]);
        Ok(Response::new(MountTable { epoch, mounts, status: vec![] }))
    }

    async fn vend_keys(&self, _: Request<VendKeysRequest>) -> Result<Response<VendedKeys>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn register_worker(
        &self,
        _: Request<RegisterWorkerRequest>,
    ) -> Result<Response<RegisterWorkerReply>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn heartbeat(&self, _: Request<HeartbeatRequest>) -> Result<Response<HeartbeatReply>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn mount(&self, _: Request<MountRequest>) -> Result<Response<MountReply>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn unmount(&self, _: Request<UnmountRequest>) -> Result<Response<UnmountReply>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn update_mount(&self, _: Request<UpdateMountRequest>) -> Result<Response<MountReply>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn index_mount(&self, _: Request<IndexMountRequest>) -> Result<Response<MountReply>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn submit_load(&self, _: Request<SubmitLoadRequest>) -> Result<Response<Job>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn load_files(&self, _: Request<LoadFilesRequest>) -> Result<Response<Loading>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn submit_export(&self, _: Request<SubmitExportRequest>) -> Result<Response<Job>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn retry_job(&self, _: Request<GetJobRequest>) -> Result<Response<Job>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn get_job(&self, _: Request<GetJobRequest>) -> Result<Response<Job>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn get_persist_status(&self, _: Request<PersistStatusRequest>) -> Result<Response<PersistStatus>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn resolve_lost(&self, _: Request<ResolveLostRequest>) -> Result<Response<ResolveLostReply>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn list_unavailable(&self, _: Request<ListUnavailableRequest>) -> Result<Response<UnavailableFiles>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn drain_worker(&self, _: Request<DrainWorkerRequest>) -> Result<Response<WorkerBlocks>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn get_worker_blocks(&self, _: Request<WorkerBlocksRequest>) -> Result<Response<WorkerBlocks>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn remove_worker(&self, _: Request<RemoveWorkerRequest>) -> Result<Response<RemoveWorkerReply>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn list_claims(&self, _: Request<ListClaimsRequest>) -> Result<Response<ClaimList>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn list_jobs(&self, _: Request<ListJobsRequest>) -> Result<Response<JobList>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn cancel_job(&self, _: Request<GetJobRequest>) -> Result<Response<Job>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn fsck(&self, _: Request<FsckRequest>) -> Result<Response<Checking>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }

    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<ClusterStatus>, Status> {
        Err(Status::unimplemented("not in these tests"))
    }
}
