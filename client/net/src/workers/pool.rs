//! The connections to every worker of the table, made when first needed and shared.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use cavern_conf::backoff::{Jitter, Profile};
use cavern_conf::schema;
use cavern_proto::frame::{Call, FrameKind, MAX_WRITE_BYTES};
use cavern_proto::master::{Worker, WorkerTable};
use cavern_proto::{BlockId, CHUNK_BYTES, ChunkMap, data};
use cavern_security::{Role, TlsSocket, Transport};
use parking_lot::{Mutex, RwLock};
use tokio::net::TcpStream;
use tokio::sync::futures::Notified;
use tokio::sync::{Notify, OnceCell};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::breaker::{Attempt, Breaker};
use super::connection::{Connection, EvictionListener, greet};
use super::receive_buffers::ReceiveBuffers;
use crate::error::NetError;
use crate::local_socket;
use crate::placement::Placement;
use crate::socket::Socket;

/// TCP connections to one worker: the first for small answers, so that they do not queue behind bulk.
const SLOTS: usize = 4;
/// Payloads from this size on are bulk.
const BULK_BYTES: u32 = 256 * 1024;
/// A worker whose socket could not be used counts as remote for this long.
const REMOTE_FOR: Duration = Duration::from_secs(10);
/// What an answer may take beyond the deadline that the worker was given.
const GRACE: Duration = Duration::from_millis(250);

/// How a worker is reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Route {
    /// Over its Unix socket: it hands out descriptors.
    Local,
    /// Over TCP.
    Remote,
}

/// Room in a block of an fs-mode file.
#[derive(Debug)]
pub struct Reserved {
    /// Names the block's file: another one means that the block was freed, or lost, and made anew.
    pub incarnation: u64,
    /// The file, open for reading and writing; from a worker on this host only.
    pub descriptor: Option<OwnedFd>,
    /// Bytes that the file takes.
    pub allocated: Option<u64>,
}

/// Connections to the workers of the current table, made when needed and shared by everyone.
pub struct WorkerPool {
    conf: schema::Client,
    /// How workers are spoken to over TCP.
    transport: Transport,
    peer: String,
    /// Of a master: the term in which it leads; 0 for others.
    term: u64,
    table: RwLock<Table>,
    changed: Notify,
    payloads: Arc<ReceiveBuffers>,
    evicted: RwLock<Option<EvictionListener>>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

#[derive(Default)]
struct Table {
    cluster_id: String,
    placement: Arc<Placement>,
    links: HashMap<u64, Arc<Link>>,
}

/// What is kept of one worker at one address.
struct Link {
    id: u64,
    address: String,
    socket_path: String,
    slots: [ConnectionSlot; SLOTS],
    next_bulk: AtomicUsize,
    local: ConnectionSlot,
    remote_until: Mutex<Option<Instant>>,
    breaker: Arc<Breaker>,
    /// Cancelled when the worker leaves the table or moves.
    stop: CancellationToken,
}

/// One connection, made by the first who needs it while the others wait for it.
#[derive(Default)]
struct ConnectionSlot(Mutex<Arc<OnceCell<Arc<Connection>>>>);

impl ConnectionSlot {
    /// The live connection, if there is one.
    fn current(&self) -> Option<Arc<Connection>> {
        self.0.lock().get().filter(|connection| connection.is_open()).cloned()
    }

    async fn get<F>(&self, connect: impl FnOnce() -> F) -> io::Result<Arc<Connection>>
    where
        F: Future<Output = io::Result<Arc<Connection>>>,
    {
        let cell = {
            let mut cell = self.0.lock();
            if cell.get().is_some_and(|connection| !connection.is_open()) {
                *cell = Arc::default();
            }
            cell.clone()
        };
        cell.get_or_try_init(connect).await.cloned()
    }
}

impl WorkerPool {
    /// A pool without workers; `set_table` brings them. `peer` names this process to the workers.
    pub fn new(config: &schema::Client, transport: Transport, peer: &str) -> Arc<Self> {
        Self::of_term(config, transport, peer, 0)
    }

    /// That of a master, for the term in which it leads: workers that know of a later one do nothing for it.
    pub fn of_master(config: &schema::Client, transport: Transport, term: u64) -> Arc<Self> {
        Self::of_term(config, transport, "master", term)
    }

    fn of_term(config: &schema::Client, transport: Transport, peer: &str, term: u64) -> Arc<Self> {
        Arc::new(Self {
            conf: config.clone(),
            transport,
            peer: peer.to_owned(),
            term,
            table: RwLock::default(),
            changed: Notify::new(),
            payloads: Arc::default(),
            evicted: RwLock::default(),
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
        })
    }

    /// The cluster's id and the table as the master gave them.
    pub fn set_table(&self, cluster_id: &str, table: &WorkerTable) {
        self.set_cluster_id(cluster_id);
        self.set_workers(table);
    }

    /// The cluster's id as the master gave it.
    pub fn set_cluster_id(&self, id: &str) {
        id.clone_into(&mut self.table.write().cluster_id);
    }

    /// The table as the master gave it. Connections to workers that left or moved are closed.
    pub fn set_workers(&self, table: &WorkerTable) {
        let (first, longest) = (self.conf.worker_backoff.get(), self.conf.worker_backoff_max.get());
        let pauses = Profile::new(first, longest, Jitter::Quarter);
        let mut current = self.table.write();
        let mut old = std::mem::take(&mut current.links);
        for worker in &table.workers {
            let link = match old.remove(&worker.id) {
                Some(link) if link.is_at(worker) => link,
                moved => {
                    moved.inspect(|link| link.stop.cancel());
                    Arc::new(Link::new(worker, pauses, self.stop.child_token()))
                }
            };
            current.links.insert(worker.id, link);
        }
        old.into_values().for_each(|gone| gone.stop.cancel());
        current.placement = Arc::new(Placement::new(table));
        drop(current);
        self.changed.notify_waiters();
    }

    /// Completes when there is another table.
    pub fn workers_changed(&self) -> Notified<'_> {
        self.changed.notified()
    }

    /// The cluster's id; empty before the master has given it.
    pub fn cluster_id(&self) -> String {
        self.table.read().cluster_id.clone()
    }

    /// The workers of the current table.
    pub fn placement(&self) -> Arc<Placement> {
        self.table.read().placement.clone()
    }

    /// Keeps at most so many bytes of buffers for the payloads that come next; none unless this is called. The caller
    /// has them trimmed now and then.
    pub fn keep_buffers(&self, bytes: usize) {
        self.payloads.set_limit(bytes);
    }

    /// Gives up the buffers that no payload has needed since the last time.
    pub fn trim_buffers(&self) {
        self.payloads.trim();
    }

    /// The listener to notify of what each worker evicts. Connections made earlier do not know it: set it first.
    pub fn on_evicted(&self, listener: impl Fn(u64, data::Evicted) + Send + Sync + 'static) {
        *self.evicted.write() = Some(Arc::new(listener));
    }

    /// Permission to try a worker; `None` while it is left alone after a failure, or when the table lacks it.
    pub fn admit(&self, worker: u64) -> Option<Attempt> {
        self.link(worker).ok()?.breaker.admit(Instant::now())
    }

    /// Whether a worker failed lately, so that another is to be preferred; also when the table lacks it.
    pub fn rests(&self, worker: u64) -> bool {
        self.link(worker).map_or(true, |link| link.breaker.rests(Instant::now()))
    }

    /// How the worker is reached, connecting to find out where that is not known.
    pub async fn route(&self, worker: u64) -> Result<Route, NetError> {
        let link = self.link(worker)?;
        Ok(if self.local(&link).await.is_some() { Route::Local } else { Route::Remote })
    }

    /// How the worker is reached, as far as that is known without I/O: `Local` only while a connection over the Unix
    /// socket is open.
    pub fn known_route(&self, worker: u64) -> Route {
        match self.link(worker) {
            Ok(link) if self.conf.local_descriptors && link.local.current().is_some() => Route::Local,
            _ => Route::Remote,
        }
    }

    /// Bytes over the connection: the reply and the concatenated payload of its items. Those of fs-mode files are
    /// compared with the checksums that they were sent with; those of objects are the caller's to compare.
    ///
    /// # Errors
    /// Those of every request, and [`NetError::Corrupt`].
    pub async fn read(
        &self,
        worker: u64,
        items: Vec<data::read_request::Item>,
        deadline: Duration,
    ) -> Result<(data::ReadReply, Bytes), NetError> {
        let link = self.link(worker)?;
        let bytes = items.iter().filter_map(|item| item.range).map(|range| u64::from(range.length)).sum::<u64>();
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let request = data::ReadRequest { items, deadline_ms: milliseconds(deadline) };
        let connection = self.remote(&link, bytes).await?;
        let (reply, payload, _) = connection.call(&request, Bytes::new(), bytes, deadline + GRACE).await?;
        let sent = reply.items.iter().map(|item| u64::from(item.length)).sum::<u64>();
        link.require_fit(reply.items.len() == request.items.len() && sent == payload.len() as u64)?;
        let mut rest = &payload[..];
        for item in &reply.items {
            let (bytes, after) = rest.split_at(item.length as usize);
            rest = after;
            if let Some(at) = first_wrong(bytes, &item.sent_crcs) {
                return Err(NetError::Corrupt { worker, address: link.address.clone(), at });
            }
        }
        Ok((reply, payload))
    }

    /// Descriptors of blocks of a worker on this host; one per item with status OK, in order.
    pub async fn open(
        &self,
        worker: u64,
        items: Vec<data::open_request::Item>,
        deadline: Duration,
    ) -> Result<(data::OpenReply, Vec<OwnedFd>), NetError> {
        let link = self.link(worker)?;
        let connection = self.local(&link).await.ok_or_else(|| link.failed("its Unix socket cannot be reached"))?;
        let request = data::OpenRequest { items, deadline_ms: milliseconds(deadline) };
        let (reply, _, descriptors) = connection.call(&request, Bytes::new(), 0, deadline + GRACE).await?;
        link.require_fit(reply.items.len() == request.items.len())?;
        Ok((reply, descriptors))
    }

    /// Makes ranges present at the worker; the reply has one item per item asked.
    pub async fn fill(
        &self,
        worker: u64,
        items: Vec<data::open_request::Item>,
        deadline: Duration,
    ) -> Result<data::FillReply, NetError> {
        let request = data::FillRequest { items, deadline_ms: milliseconds(deadline) };
        let (link, reply) = self.control(worker, &request, deadline).await?;
        link.require_fit(reply.items.len() == request.items.len())?;
        Ok(reply)
    }

    /// What the worker has of these blocks; one item per block.
    pub async fn query(&self, worker: u64, blocks: Vec<data::BlockRef>) -> Result<data::QueryReply, NetError> {
        Ok(self.control(worker, &data::QueryRequest { blocks, held: None }, self.wait()).await?.1)
    }

    /// Tells a worker of this host which files of its blocks are held here, and whether each was read of late. Gives
    /// the incarnations that it has of them, one for each block, as far as it has any.
    ///
    /// # Errors
    /// Those of every request, and an answer that does not fit it.
    pub async fn confirm(&self, worker: u64, files: &[(BlockId, bool)]) -> Result<Vec<Option<u64>>, NetError> {
        let mut read = ChunkMap::new();
        let blocks = (0..).zip(files).map(|(position, (block, is_read))| {
            if *is_read {
                read.insert(position);
            }
            let content_id = Bytes::copy_from_slice(block.content.as_bytes());
            data::BlockRef { content_id, index: block.index, ..data::BlockRef::default() }
        });
        let request = data::QueryRequest { blocks: blocks.collect(), held: Some(read.to_bytes().into()) };
        let (link, reply) = self.control(worker, &request, self.wait()).await?;
        link.require_fit(reply.items.len() == files.len())?;
        Ok(reply.items.into_iter().map(|item| item.known.then_some(item.incarnation)).collect())
    }

    /// Drops blocks of the worker; those of fs-mode files, which have `data` set, for good.
    pub async fn free(&self, worker: u64, blocks: Vec<data::BlockRef>) -> Result<data::FreeReply, NetError> {
        Ok(self.control(worker, &data::FreeRequest { blocks }, self.wait()).await?.1)
    }

    /// Makes room for ranges of a block of an fs-mode file, and the block where it is not there yet. A worker on this
    /// host hands out the block's file, through which what was reserved may be written.
    ///
    /// The request's own deadline is set from `deadline`.
    ///
    /// # Errors
    /// [`NetError::WorkerStatus`] with `NoSpace`: nothing was changed.
    pub async fn reserve(
        &self,
        worker: u64,
        mut request: data::ReserveRequest,
        deadline: Duration,
    ) -> Result<Reserved, NetError> {
        let link = self.link(worker)?;
        let connection = self.nearest(&link, 0).await?;
        request.deadline_ms = milliseconds(deadline);
        let (reply, _, descriptors) = connection.call(&request, Bytes::new(), 0, deadline + GRACE).await?;
        link.check(reply.status(), reply.message)?;
        let (incarnation, allocated) = (reply.incarnation, reply.allocated);
        Ok(Reserved { incarnation, descriptor: descriptors.into_iter().next(), allocated })
    }

    /// Writes to a block of an fs-mode file, made where it is not there yet. The request's own deadline is set from
    /// `deadline`. The reply names the block's file, as [`Reserved`] does.
    ///
    /// # Errors
    /// A payload over [`MAX_WRITE_BYTES`] is refused here. After any other error the block may hold the bytes, or a
    /// part of them.
    pub async fn write(
        &self,
        worker: u64,
        mut request: data::WriteRequest,
        payload: Bytes,
        deadline: Duration,
    ) -> Result<data::WriteReply, NetError> {
        let bytes = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        if bytes > MAX_WRITE_BYTES {
            let text = format!("a write of {} bytes to a worker, {MAX_WRITE_BYTES} are the most", payload.len());
            return Err(NetError::Invalid(text));
        }
        request.deadline_ms = milliseconds(deadline);
        let link = self.link(worker)?;
        let connection = self.nearest(&link, bytes).await?;
        let (mut reply, _, _) = connection.call(&request, payload, 0, deadline + GRACE).await?;
        link.check(reply.status(), std::mem::take(&mut reply.message))?;
        Ok(reply)
    }

    /// What the certificate of this process says it may do; `None` where connections are not secured, and everybody may
    /// do everything.
    pub fn own_role(&self) -> Option<Role> {
        match &self.transport {
            Transport::Plain => None,
            Transport::Tls(tls) => Some(tls.identity().role),
        }
    }

    /// Whether the worker keeps bytes of objects that it gets from here. Over secured connections it does so for its
    /// own host only.
    pub async fn keeps_objects(&self, worker: u64) -> bool {
        let is_secured = matches!(self.transport, Transport::Tls(_));
        !is_secured || matches!(self.route(worker).await, Ok(Route::Local))
    }

    /// Tells the worker which blocks could not be synced through descriptors of its own, and returns when everything
    /// that was written to the others before, through descriptors too, is on its disk.
    pub async fn sync(&self, worker: u64, request: data::SyncRequest, deadline: Duration) -> Result<(), NetError> {
        let (link, reply) = self.control(worker, &request, deadline).await?;
        link.check(reply.status(), reply.message)
    }

    /// Has the worker write an object to the bucket of an fs-mode mount. The request's own deadline is set from
    /// `deadline`.
    pub async fn persist(
        &self,
        worker: u64,
        mut request: data::PersistRequest,
        deadline: Duration,
    ) -> Result<data::PersistReply, NetError> {
        request.deadline_ms = milliseconds(deadline);
        Ok(self.control(worker, &request, deadline).await?.1)
    }

    /// Has the worker make a copy of a block of an fs-mode file. The request's own deadline is set from `deadline`.
    ///
    /// # Errors
    /// [`NetError::WorkerStatus`] says why the worker has no copy.
    pub async fn copy(&self, worker: u64, mut request: data::CopyRequest, deadline: Duration) -> Result<(), NetError> {
        request.deadline_ms = milliseconds(deadline);
        let (link, reply) = self.control(worker, &request, deadline).await?;
        link.check(reply.status(), reply.message)
    }

    /// What the worker has, for a master that compares it with what it is to have; one item per block.
    ///
    /// # Errors
    /// [`NetError::WorkerStatus`] says why the worker does not tell.
    pub async fn inspect(
        &self,
        worker: u64,
        request: data::InspectRequest,
        deadline: Duration,
    ) -> Result<data::InspectReply, NetError> {
        let (link, mut reply) = self.control(worker, &request, deadline).await?;
        link.check(reply.status(), std::mem::take(&mut reply.message))?;
        link.require_fit(reply.blocks.len() == request.blocks.len())?;
        Ok(reply)
    }

    /// Reports to the worker which chunks do not match their checksums.
    pub async fn report_corrupt(&self, worker: u64, block: data::BlockRef, chunks: Vec<u32>) -> Result<(), NetError> {
        let request = data::CorruptRequest { block: Some(block), chunks };
        self.control(worker, &request, self.wait()).await.map(drop)
    }

    /// Closes every connection and waits for their tasks. Later requests fail.
    pub async fn shutdown(&self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }

    fn link(&self, worker: u64) -> Result<Arc<Link>, NetError> {
        self.table.read().links.get(&worker).cloned().ok_or(NetError::UnknownWorker(worker))
    }

    /// What a request gets that says nothing of its time.
    fn wait(&self) -> Duration {
        self.conf.worker_timeout.get()
    }

    /// A request without payload, over whichever connection there is.
    async fn control<C: Call>(
        &self,
        worker: u64,
        request: &C,
        deadline: Duration,
    ) -> Result<(Arc<Link>, C::Reply), NetError> {
        let link = self.link(worker)?;
        // Over the Unix socket nobody has shown that he may give orders.
        let is_order = matches!(C::KIND, FrameKind::Free | FrameKind::Persist | FrameKind::Copy | FrameKind::Inspect);
        let connection = match self.transport {
            Transport::Tls(_) if is_order => self.remote(&link, 0).await?,
            Transport::Tls(_) | Transport::Plain => self.nearest(&link, 0).await?,
        };
        let (reply, _, _) = connection.call(request, Bytes::new(), 0, deadline + GRACE).await?;
        Ok((link, reply))
    }

    /// The connection over the Unix socket, or one over TCP that suits the size of the payload.
    async fn nearest(&self, link: &Arc<Link>, payload_bytes: u32) -> Result<Arc<Connection>, NetError> {
        match self.local(link).await {
            Some(connection) => Ok(connection),
            None => self.remote(link, payload_bytes).await,
        }
    }

    async fn remote(&self, link: &Arc<Link>, payload_bytes: u32) -> Result<Arc<Connection>, NetError> {
        let slot = match payload_bytes {
            0..BULK_BYTES => 0,
            _ => 1 + link.next_bulk.fetch_add(1, Ordering::Relaxed) % (SLOTS - 1),
        };
        if let Some(connection) = link.slots[slot].current() {
            return Ok(connection);
        }
        let socket = async {
            let stream = TcpStream::connect(&link.address).await?;
            stream.set_nodelay(true)?;
            Ok::<_, io::Error>(match &self.transport {
                Transport::Plain => Socket::Tcp(stream),
                Transport::Tls(tls) => Socket::Tls(Box::new(TlsSocket::connect(tls, stream, Role::Worker).await?)),
            })
        };
        link.slots[slot]
            .get(|| Box::pin(self.dial(link, socket)))
            .await
            .map_err(|error| link.failed(&error.to_string()))
    }

    /// The connection over the Unix socket; `None` when the worker cannot be reached that way.
    async fn local(&self, link: &Arc<Link>) -> Option<Arc<Connection>> {
        if !self.conf.local_descriptors || link.socket_path.is_empty() {
            return None;
        }
        if let Some(connection) = link.local.current() {
            return Some(connection);
        }
        if link.remote_until.lock().is_some_and(|until| Instant::now() < until) {
            return None;
        }
        let socket =
            async { Ok::<_, io::Error>(Socket::Unix(local_socket::connect(Path::new(&link.socket_path)).await?)) };
        match link.local.get(|| Box::pin(self.dial(link, socket))).await {
            Ok(connection) => Some(connection),
            Err(error) => {
                // Nothing listens there: the worker is down and may be back soon. Anything else: another host.
                let wait = match error.kind() {
                    io::ErrorKind::ConnectionRefused => self.conf.worker_backoff.get(),
                    _ => REMOTE_FOR,
                };
                tracing::debug!(worker = link.id, path = link.socket_path, "not reachable on this host: {error}");
                *link.remote_until.lock() = Some(Instant::now() + wait);
                None
            }
        }
    }

    /// A connection over a socket that is made, and greeted, in the time for that.
    async fn dial(&self, link: &Link, socket: impl Future<Output = io::Result<Socket>>) -> io::Result<Arc<Connection>> {
        let late = |_| Err(io::Error::new(io::ErrorKind::TimedOut, "connecting timed out"));
        let greeted = async { self.greet(link, socket.await?).await };
        tokio::time::timeout(self.conf.connect_timeout.get(), greeted).await.unwrap_or_else(late)
    }

    async fn greet(&self, link: &Link, socket: Socket) -> io::Result<Arc<Connection>> {
        if link.stop.is_cancelled() {
            return Err(io::Error::other("the worker has left the table"));
        }
        let cluster_id = self.table.read().cluster_id.clone();
        let greeted = greet(socket, self.payloads.clone(), &cluster_id, &self.peer, self.term).await?;
        if greeted.hello.worker_id != link.id {
            let text = format!("worker {} answers there, not {}", greeted.hello.worker_id, link.id);
            return Err(io::Error::other(text));
        }
        let evicted = self.evicted.read().clone();
        let (connection, driver) = Connection::new(greeted, link.id, link.address.clone(), evicted, link.stop.clone());
        self.tasks.spawn(driver);
        Ok(connection)
    }
}

impl Link {
    fn new(worker: &Worker, pauses: Profile, stop: CancellationToken) -> Self {
        Self {
            id: worker.id,
            address: worker.data_address.clone(),
            socket_path: worker.socket_path.clone(),
            slots: Default::default(),
            next_bulk: AtomicUsize::new(0),
            local: ConnectionSlot::default(),
            remote_until: Mutex::default(),
            breaker: Arc::new(Breaker::new(pauses)),
            stop,
        }
    }

    fn is_at(&self, worker: &Worker) -> bool {
        self.address == worker.data_address && self.socket_path == worker.socket_path
    }

    fn failed(&self, cause: &str) -> NetError {
        NetError::WorkerConnection { worker: self.id, address: self.address.clone(), cause: cause.to_owned() }
    }

    /// An answer's status as a result.
    fn check(&self, status: data::Status, message: String) -> Result<(), NetError> {
        match status {
            data::Status::Ok => Ok(()),
            status => Err(NetError::WorkerStatus { worker: self.id, status, message }),
        }
    }

    /// Refuses an answer that is not one to the request.
    fn require_fit(&self, fits: bool) -> Result<(), NetError> {
        if fits { Ok(()) } else { Err(self.failed("its answer does not fit the request")) }
    }
}

fn milliseconds(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}

/// Where bytes of an item begin whose checksum is another, 128 KiB each; `None` where all are right, and where the item
/// came without any.
fn first_wrong(bytes: &[u8], checksums: &[u32]) -> Option<u32> {
    if checksums.is_empty() {
        return None;
    }
    let mut pieces = (0u32..).zip(bytes.chunks(CHUNK_BYTES as usize));
    let is_right = |number: u32, piece: &[u8]| checksums.get(number as usize) == Some(&crc32c::crc32c(piece));
    pieces.find(|(number, piece)| !is_right(*number, piece)).map(|(number, _)| number * CHUNK_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_bit_shows_in_the_checksum_of_its_piece() {
        let mut bytes: Vec<u8> = (0..CHUNK_BYTES * 2 + 77).map(|at| (at % 251) as u8).collect();
        let checksums: Vec<u32> = bytes.chunks(CHUNK_BYTES as usize).map(crc32c::crc32c).collect();
        assert_eq!((checksums.len(), first_wrong(&bytes, &checksums)), (3, None));
        assert_eq!(first_wrong(&bytes, &checksums[..2]), Some(2 * CHUNK_BYTES), "one is missing");
        assert_eq!(first_wrong(&bytes, &[]), None, "the worker knows none");
        for (at, piece) in [(0, 0), (CHUNK_BYTES, 1), (2 * CHUNK_BYTES + 76, 2)] {
            bytes[at as usize] ^= 4;
            assert_eq!(first_wrong(&bytes, &checksums), Some(piece * CHUNK_BYTES));
            bytes[at as usize] ^= 4;
        }
    }
}
