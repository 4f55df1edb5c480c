//! One connection: requests in, answers out, in one task.
//!
//! ```text
//!   socket ─► incoming bytes ─► frames ─► at hand? ── yes ──────────────► outgoing ─► socket
//!                                            └─ no ─► a task per request ───┘
//! ```
//!
//! What can be answered from memory is answered in the loop that reads the frames: no task, no wake-up, and the answers
//! to a burst leave in one system call. What has to wait for the disk or the bucket gets a task of its own and is
//! answered out of order. The loop reads no further while too many bytes or requests are in flight, so that a client
//! that does not read its answers, or asks for more than its share, slows down itself only. Tasks end with the
//! connection. The payload of a write is taken before the next frame is looked at (see `upload`).

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use cavern_conf::process::LogLimit;
use cavern_proto::bounded::MAX_ITEMS;
use cavern_proto::data::{
    BlockRef, Cancel, CopyRequest, CorruptRequest, Failure, FillRequest, FreeRequest, Hello, OpenRequest,
    PersistRequest, QueryRequest, ReadRequest, ReserveRequest, Status, SyncRequest, WriteRequest,
};
use cavern_proto::frame::{FrameHeader, FrameKind, HEADER_BYTES, MAX_WRITE_BYTES, PROTOCOL_VERSION};
use cavern_security::{AuditLog, Audited, Identity, Tenants, Transport};
use futures::future::BoxFuture;
use prost::Message;
use tokio::io::Interest;
use tokio::sync::{AcquireError, broadcast};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::cores::Seat;
use super::limits::on_disk;
use super::memory::{Budget, Share};
use super::outgoing::{Outgoing, PassedFile, Segment};
use super::pacing::Pacing;
use super::requests::{ContentRequest, MAX_INFLIGHT_BYTES, Service, deadline_of};
use super::rights::{OfBlocks, Rights, Verdict};
use super::roles::{self, Peer};
use super::socket::Socket;
use super::upload::{PayloadState, PendingShare, Upload, memory_for};
use super::writes::{PeerLocality, Write, not_kept, refused_reserve, refused_write};
use crate::membership::Membership;
use crate::mounts::Mounts;
use crate::request_error::Refusal;
use crate::reserved::{ReservedBlocks, Room, Taken};

/// A client must say hello within this time, and finish a frame that it began. Securing the connection takes as long at
/// most.
pub(super) const FRAME_TIMEOUT: Duration = Duration::from_secs(10);
/// A client that takes no bytes for this long is cut off.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// How often the two are looked at.
const WATCH_INTERVAL: Duration = Duration::from_secs(2);
/// After the order to stop, requests in flight may take this long.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(3);
/// Requests of one connection that wait for the disk or the bucket at a time.
const MAX_PENDING: usize = 1024;
/// Answers are sent when this much has gathered, before further requests are looked at.
const FLUSH_BYTES: usize = 1 << 20;
/// Read from the socket at a time, at least: some hundred requests. Each connection has a buffer of this size.
const READ_BYTES: usize = 16 << 10;
/// Longest first message: nothing is known yet about who sends it.
const MAX_HELLO_BYTES: u32 = 4096;
/// Payloads up to this size are read and answered in the loop, if they are in the page cache. What a kernel's FUSE asks
/// for at a time is at most this.
const INLINE_BYTES: usize = 1 << 20;

/// What a request takes while it waits, beside its message: its task.
const REQUEST_MEMORY: usize = 4 << 10;
/// What each field of its message takes, decoded and looked up: there may be thousands, of two bytes each.
const FIELD_MEMORY: usize = 1 << 10;
/// A message that is longer is received when there is memory for it.
const SHORT_MESSAGE_BYTES: usize = 64 << 10;
/// Requests of a connection that take no more than this take nothing of the budget.
const FREE_BYTES: usize = 128 << 10;
/// Requests for more blocks are answered by tasks, so that other connections of the thread come in between.
const INLINE_ITEMS: usize = 1024;

/// What all connections share.
#[derive(Debug)]
pub(super) struct Shared {
    pub service: Arc<Service>,
    pub membership: Arc<Membership>,
    /// Their rules say what clients may do.
    pub mounts: Arc<Mounts>,
    pub transport: Transport,
    pub audit: AuditLog,
    /// Whose requests were refused.
    pub refusals: LogLimit<Option<Identity>>,
    /// Connections that were.
    pub refused_connections: LogLimit<()>,
    pub tenants: Tenants,
    pub reserved: Arc<ReservedBlocks>,
    /// Frames for clients that hold descriptors.
    pub evictions: broadcast::Sender<Bytes>,
    pub stop: CancellationToken,
}

/// The answer of a task, and to which request.
type Answered = (u64, Segment);

/// A request that waits for its task.
struct Pending {
    task: AbortHandle,
    /// What it was counted with.
    bytes: usize,
    /// Of the budget for requests; without one it is among those that take nothing of it.
    share: Option<Share>,
    /// What it takes of that, or of what is free.
    cost: usize,
}

/// A frame that is handled when the worker has heard what mounts there are for whom.
struct Postponed {
    header: FrameHeader,
    message: Bytes,
    renewed: BoxFuture<'static, ()>,
}

pub(super) struct Connection {
    socket: Socket,
    peer: Peer,
    rights: Rights,
    /// Its address; empty for the Unix socket.
    from: String,
    pacing: Pacing,
    budget: Budget,
    /// For requests.
    requests: Budget,
    /// Memory for the frame that is next or handled now.
    share: Option<Share>,
    /// The next frame waits for it.
    awaited_share: Option<PendingShare>,
    /// What the frame that is handled now takes while it waits.
    cost: usize,
    /// What those take that wait and have no share.
    free_used: usize,
    /// A frame of this peer was refused, and the log has it.
    refusal_told: bool,
    shared: Arc<Shared>,
    seat: Seat,
    incoming: BytesMut,
    /// What comes before the next frame.
    postponed: Option<Postponed>,
    /// The payload that comes before the next frame.
    upload: Option<Upload>,
    /// When the frame that is incomplete began to arrive, or more of a payload came.
    frame_began: Instant,
    outgoing: Outgoing,
    tasks: JoinSet<Answered>,
    pending: HashMap<u64, Pending>,
    /// Payload and message bytes of the requests that wait.
    pending_bytes: usize,
    greeted: bool,
    /// Of a master: the term in which it leads.
    term: Option<u64>,
    /// Nothing more is read: send what is there and end.
    closing: bool,
}

impl Connection {
    /// To be served where the seat is.
    pub(super) fn new(
        socket: Socket,
        (peer, from): (Peer, String),
        pacing: Pacing,
        shared: Arc<Shared>,
        seat: Seat,
    ) -> Self {
        let outgoing = Outgoing::new(shared.service.spares.clone());
        let rights = Rights::of(&peer, shared.mounts.clone(), shared.membership.clone());
        let tenant = pacing.tenant().map(|tenant| &**tenant);
        let (budget, requests) = (shared.service.budget(tenant), shared.service.budget_of_requests(tenant));
        Self {
            socket,
            peer,
            rights,
            from,
            pacing,
            budget,
            requests,
            share: None,
            awaited_share: None,
            cost: 0,
            free_used: 0,
            refusal_told: false,
            shared,
            seat,
            incoming: BytesMut::new(),
            postponed: None,
            upload: None,
            frame_began: Instant::now(),
            outgoing,
            tasks: JoinSet::new(),
            pending: HashMap::new(),
            pending_bytes: 0,
            greeted: false,
            term: None,
            closing: false,
        }
    }

    /// Serves until the client is gone, or sends what is no frame, or the worker stops.
    pub(super) async fn serve(mut self) {
        if let Err(error) = self.run().await {
            debug!(%error, "a connection ended");
        }
        // Requests that still wait have nobody to answer.
        self.tasks.shutdown().await;
    }

    async fn run(&mut self) -> io::Result<()> {
        let stop = self.shared.stop.clone();
        let mut evictions = self.socket.passes_descriptors().then(|| self.shared.evictions.subscribe());
        let mut watch = tokio::time::interval(WATCH_INTERVAL);
        watch.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut drain_until: Option<Instant> = None;
        loop {
            let needs_input = self.take_frames();
            self.outgoing.flush(&self.socket)?;
            if !needs_input && self.may_read() {
                // More frames are here already; other connections of this thread come in between.
                tokio::task::consume_budget().await;
                continue;
            }
            let idle = self.tasks.is_empty() && self.outgoing.is_empty();
            if idle && (self.closing || drain_until.is_some()) {
                return Ok(());
            }
            let interest = match (self.wants_input() && drain_until.is_none(), !self.outgoing.is_empty()) {
                (true, true) => Some(Interest::READABLE | Interest::WRITABLE),
                (true, false) => Some(Interest::READABLE),
                (false, true) => Some(Interest::WRITABLE),
                (false, false) => None,
            };
            tokio::select! {
                ready = self.socket.ready(interest.unwrap_or(Interest::ERROR)), if interest.is_some() => {
                    let ready = ready?;
                    if ready.is_readable() && interest.is_some_and(Interest::is_readable) && !self.receive()? {
                        return Ok(());
                    }
                    if ready.is_error() {
                        return Err(io::ErrorKind::ConnectionReset.into());
                    }
                }
                Some(answered) = self.tasks.join_next() => {
                    // A task that was cancelled has nothing to say.
                    if let Ok((request_id, segment)) = answered {
                        self.answered(request_id, segment);
                    }
                }
                memory = memory_for(&mut self.upload) => {
                    if let (Some(upload), Ok(memory)) = (&mut self.upload, memory) {
                        upload.keep(memory);
                        self.frame_began = Instant::now();
                    }
                }
                share = awaited(&mut self.awaited_share) => {
                    self.awaited_share = None;
                    self.share = share.ok();
                    self.closing |= self.share.is_none();
                    self.frame_began = Instant::now();
                }
                (header, message) = when_renewed(&mut self.postponed) => self.handle_frame(header, message),
                frame = next_eviction(&mut evictions) => {
                    if self.greeted && self.outgoing.bytes() < FLUSH_BYTES {
                        self.outgoing.push(Segment { bytes: frame.to_vec(), ..Segment::default() });
                    }
                }
                () = stop.cancelled(), if drain_until.is_none() => {
                    drain_until = Some(Instant::now() + DRAIN_TIMEOUT);
                }
                () = self.pacing.pause() => {
                    self.pacing.end_pause();
                    self.frame_began = Instant::now();
                }
                _ = watch.tick() => {
                    self.socket.check()?;
                    self.check_patience()?;
                    self.give_up_upload();
                    self.outgoing.rest();
                    if self.incoming.is_empty() {
                        self.incoming = BytesMut::new();
                    }
                    if drain_until.is_some_and(|until| Instant::now() > until) {
                        return Err(io::Error::new(io::ErrorKind::TimedOut, "stopped with requests in flight"));
                    }
                }
            }
        }
    }

    fn check_patience(&self) -> io::Result<()> {
        let waits_for_bytes = match &self.upload {
            Some(upload) => !upload.waits_for_memory(),
            None => !self.incoming.is_empty() && self.may_read(),
        };
        let waits_for_frame = !self.greeted || waits_for_bytes;
        if waits_for_frame && self.frame_began.elapsed() > FRAME_TIMEOUT {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "the client did not finish a frame"));
        }
        if self.outgoing.stalled() > WRITE_TIMEOUT {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not take its answers"));
        }
        Ok(())
    }

    /// Whether further requests may be looked at.
    fn may_read(&self) -> bool {
        !self.closing
            && self.postponed.is_none()
            && self.awaited_share.is_none()
            && !self.pacing.is_paused()
            && self.pending.len() < MAX_PENDING
            && self.outgoing.bytes() < FLUSH_BYTES
            && self.pending_bytes + self.outgoing.bytes() < MAX_INFLIGHT_BYTES as usize
    }

    /// Whether what arrives is taken: frames, or the rest of a payload.
    fn wants_input(&self) -> bool {
        match &self.upload {
            Some(upload) => !self.closing && !upload.waits_for_memory(),
            None => self.may_read(),
        }
    }

    /// Reads what has arrived; `false` at the end of the stream.
    fn receive(&mut self) -> io::Result<bool> {
        if self.incoming.is_empty() || self.upload.is_some() {
            self.frame_began = Instant::now();
        }
        let received = match self.upload.as_mut().and_then(|upload| upload.receive(&self.socket)) {
            Some(received) => received,
            None => {
                self.incoming.reserve(READ_BYTES);
                self.socket.try_read(&mut self.incoming)
            }
        };
        match received {
            Ok(0) => Ok(false),
            Ok(_) => Ok(true),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Takes all complete frames, as far as limits allow; says whether there is none left.
    fn take_frames(&mut self) -> bool {
        loop {
            if let Some(upload) = &mut self.upload {
                upload.take(&mut self.incoming);
                if upload.missing > 0 || upload.waits_for_memory() {
                    return true;
                }
                self.uploaded();
            }
            if !self.may_read() || self.pacing.begin_pause() {
                return false;
            }
            match self.next_frame() {
                // It goes on when there is memory for the frame.
                Ok(None) if self.awaited_share.is_some() => return false,
                Ok(Some((header, message))) => {
                    self.pacing.count();
                    self.handle_frame(header, message);
                }
                Ok(None) => return true,
                Err(refusal) => self.refuse_and_close(0, &refusal),
            }
            if self.outgoing.bytes() >= FLUSH_BYTES && self.outgoing.flush(&self.socket).is_err() {
                // The error is met again, and reported, by the caller's flush.
                return false;
            }
        }
    }

    fn next_frame(&mut self) -> Result<Option<(FrameHeader, Bytes)>, Refusal> {
        let Some(head) = self.incoming.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let header = FrameHeader::decode(head).map_err(|error| Refusal::bad_request(error.to_string()))?;
        if header.payload_bytes > 0 && header.kind != FrameKind::Write {
            return Err(Refusal::bad_request("no request but a write has a payload"));
        }
        if header.payload_bytes > MAX_WRITE_BYTES {
            let message = format!("a payload of {} bytes, {MAX_WRITE_BYTES} are the most", header.payload_bytes);
            return Err(Refusal::bad_request(message));
        }
        if !self.greeted && (header.kind != FrameKind::Hello || header.message_bytes > MAX_HELLO_BYTES) {
            return Err(Refusal::bad_request("the first frame of a connection is a hello"));
        }
        let message_bytes = header.message_bytes as usize;
        let total = HEADER_BYTES + message_bytes;
        // Its fields take two bytes at least, and no message has more than it may have items.
        let most = message_bytes + (message_bytes / 2).min(MAX_ITEMS) * FIELD_MEMORY;
        if self.incoming.len() < total {
            if message_bytes > SHORT_MESSAGE_BYTES && !self.has_memory_for(most) {
                return Ok(None);
            }
            self.incoming.reserve(total - self.incoming.len());
            return Ok(None);
        }
        let cost = cost_of(&self.incoming[HEADER_BYTES..total]);
        // What cancels others gives memory back.
        let waits = header.kind != FrameKind::Cancel && self.free_used + cost > FREE_BYTES;
        if waits && !self.has_memory_for(cost) {
            return Ok(None);
        }
        self.cost = cost;
        self.incoming.advance(HEADER_BYTES);
        Ok(Some((header, self.incoming.split_to(message_bytes).freeze())))
    }

    /// Whether the next frame has its share of the memory for requests; if not, it waits for one.
    fn has_memory_for(&mut self, bytes: usize) -> bool {
        if self.share.is_none() {
            self.share = self.requests.try_take(bytes);
        }
        if self.share.is_none() {
            self.awaited_share = Some(Box::pin(self.requests.clone().take(bytes)));
        }
        self.share.is_some()
    }

    fn handle_frame(&mut self, header: FrameHeader, message: Bytes) {
        if let Err(refusal) = self.handle(header, message) {
            self.refuse_and_close(header.request_id, &refusal);
        }
        if self.postponed.is_none() {
            // It does not wait, or has taken its share along.
            self.share = None;
        }
        self.frame_began = Instant::now();
    }

    /// # Errors
    /// The frame is malformed: the connection cannot go on.
    fn handle(&mut self, header: FrameHeader, message: Bytes) -> Result<(), Refusal> {
        let (service, id) = (self.shared.service.clone(), header.request_id);
        // What waits is counted with its message too: a long list of blocks asks for no payload, but takes memory.
        let length = self.cost;
        if let Err(refusal) = self.peer.check(header.kind) {
            return self.deny(&header, refusal);
        }
        if roles::is_order(header.kind)
            && let Some(term) = self.term.filter(|term| self.shared.membership.is_over(*term))
        {
            let message = format!("the master of term {term} leads no more");
            self.refuse(id, &Refusal::new(Status::Deposed, message));
            return Ok(());
        }
        match header.kind {
            FrameKind::Hello => self.greet(id, &decode::<Hello>(message)?)?,
            FrameKind::Read => {
                let Some(request) = self.permitted::<ReadRequest>(&header, message)? else { return Ok(()) };
                self.content(id, length, service.prepare_read(id, request));
            }
            FrameKind::Open => {
                let Some(request) = self.permitted::<OpenRequest>(&header, message)? else { return Ok(()) };
                if self.socket.passes_descriptors() {
                    self.content(id, length, service.prepare_open(id, request));
                } else {
                    self.refuse(id, &Refusal::bad_request("descriptors are handed out over the Unix socket only"));
                }
            }
            FrameKind::Fill => {
                let Some(request) = self.permitted::<FillRequest>(&header, message)? else { return Ok(()) };
                self.content(id, length, service.prepare_fill(id, request));
            }
            FrameKind::Query => {
                let Some(request) = self.permitted::<QueryRequest>(&header, message)? else { return Ok(()) };
                let with_paths = self.peer.may_see_paths();
                self.wait_for(id, length, deadline_of(0), move || {
                    Segment::of(FrameKind::QueryReply, id, &service.query(request, with_paths))
                });
            }
            FrameKind::Free => {
                let request = decode::<FreeRequest>(message)?;
                if let Err(refusal) = self.peer.check_free(&request) {
                    return self.deny(&header, refusal);
                }
                if self.shared.audit.is_on() {
                    self.audit(header.kind, &format!("{} blocks", request.blocks.len()), Ok(()), 0);
                }
                let free = move || Segment::of(FrameKind::FreeReply, id, &service.free(request));
                self.wait_for(id, length, deadline_of(0), free);
            }
            FrameKind::Corrupt => {
                let Some(request) = self.permitted::<CorruptRequest>(&header, message)? else { return Ok(()) };
                let check = move || Segment::of(FrameKind::CorruptReply, id, &service.corrupt(request));
                self.wait_for(id, length, deadline_of(0), check);
            }
            FrameKind::Reserve => {
                let Some(request) = self.permitted::<ReserveRequest>(&header, message)? else { return Ok(()) };
                let asker = self.locality();
                let wanted = request.ranges.iter().map(|range| u64::from(range.length)).sum::<u64>();
                let room = self.room(request.block.as_ref(), wanted + u64::from(request.origin_bytes));
                let reserve = move |service: &Service, request: ReserveRequest, taken: Option<Taken>| {
                    let (reply, file) = service.reserve(request, asker);
                    drop(taken);
                    let mut segment = Segment::of(FrameKind::ReserveReply, id, &reply);
                    segment.descriptors.extend(file.map(PassedFile::File));
                    segment
                };
                let (pause, tenant) = (service.pressure(), self.pacing.tenant().cloned());
                let patience = deadline_of(request.deadline_ms);
                match room {
                    Ok(taken) if request.origin.is_none() && pause.is_zero() => {
                        self.wait_for(id, length, patience, move || reserve(&service, request, taken));
                    }
                    room => self.begin(id, length, async move {
                        if !pause.is_zero() {
                            service.metrics.slowed_reservations.inc();
                            tokio::time::sleep(pause).await;
                        }
                        let refused = |refusal| Segment::of(FrameKind::ReserveReply, id, &refused_reserve(refusal));
                        let taken = match given(room).await {
                            Ok(taken) => taken,
                            Err(refusal) => return refused(refusal),
                        };
                        match service.begin_with_origin(&request).await {
                            Err(refusal) => refused(refusal),
                            Ok(()) => {
                                let turns = tenant.as_ref().map(|tenant| &tenant.disk_turns);
                                let reserve = move || reserve(&service, request, taken);
                                on_disk(turns, Instant::now() + patience, reserve).await.unwrap_or_else(refused)
                            }
                        }
                    }),
                }
            }
            FrameKind::Write => {
                let Some(request) = self.permitted::<WriteRequest>(&header, message)? else { return Ok(()) };
                let room = self.room(request.block.as_ref(), u64::from(header.payload_bytes));
                let write = Write::parse(request, header.payload_bytes).map(|write| write.within(room));
                self.upload(id, header.payload_bytes, write);
            }
            FrameKind::Sync => {
                let Some(request) = self.permitted::<SyncRequest>(&header, message)? else { return Ok(()) };
                if let Err(refusal) = self.peer.check_sync(&request) {
                    return self.deny(&header, refusal);
                }
                let tenant = self.pacing.tenant().cloned();
                let answer = async move { Segment::of(FrameKind::SyncReply, id, &service.sync(request, tenant).await) };
                self.begin(id, length, answer);
            }
            FrameKind::Persist => {
                let request = decode::<PersistRequest>(message)?;
                let uploads = service.uploads.clone();
                let answer = async move { Segment::of(FrameKind::PersistReply, id, &uploads.persist(request).await) };
                self.begin(id, length, answer);
            }
            FrameKind::Copy => {
                let request = decode::<CopyRequest>(message)?;
                let uploads = service.uploads.clone();
                let answer = async move { Segment::of(FrameKind::CopyReply, id, &uploads.copy(request).await) };
                self.begin(id, length, answer);
            }
            FrameKind::Cancel => {
                if let Some(task) = self.waits_no_more(decode::<Cancel>(message)?.request_id) {
                    task.abort();
                }
            }
            FrameKind::ReadReply
            | FrameKind::OpenReply
            | FrameKind::FillReply
            | FrameKind::QueryReply
            | FrameKind::FreeReply
            | FrameKind::CorruptReply
            | FrameKind::ReserveReply
            | FrameKind::WriteReply
            | FrameKind::SyncReply
            | FrameKind::PersistReply
            | FrameKind::CopyReply
            | FrameKind::Evicted
            | FrameKind::Failure => return Err(Refusal::bad_request("a client sends requests, not answers")),
        }
        Ok(())
    }

    fn greet(&mut self, request_id: u64, hello: &Hello) -> Result<(), Refusal> {
        if hello.protocol != PROTOCOL_VERSION {
            let message =
                format!("protocol {} is not spoken here, {PROTOCOL_VERSION} is: use a matching cv", hello.protocol);
            return Err(Refusal::bad_request(message));
        }
        let (worker_id, cluster_id) = self.shared.membership.now();
        if !hello.cluster_id.is_empty() && !cluster_id.is_empty() && hello.cluster_id != cluster_id {
            let message = format!("this worker belongs to cluster {cluster_id}, not to {}", hello.cluster_id);
            return Err(Refusal::bad_request(message));
        }
        self.greeted = true;
        if hello.term != 0 && self.peer.may_lead() {
            self.shared.membership.heard_of(hello.term);
            self.term = Some(hello.term);
        }
        let reply = Hello {
            protocol: PROTOCOL_VERSION,
            cluster_id,
            peer: format!("cv worker {}", env!("CARGO_PKG_VERSION")),
            worker_id,
            max_inflight_bytes: MAX_INFLIGHT_BYTES,
            term: 0,
        };
        self.outgoing.push(Segment::of(FrameKind::Hello, request_id, &reply));
        Ok(())
    }

    /// Answers a request for block content at once, or begins to wait for it.
    fn content(&mut self, request_id: u64, message_bytes: usize, prepared: Result<ContentRequest, Refusal>) {
        let request = match prepared {
            Ok(request) => request,
            Err(refusal) => return self.refuse(request_id, &refusal),
        };
        let wait = self.pacing.charge(request.payload_bytes());
        if wait.is_zero() && self.answer_at_once(&request) {
            return;
        }
        let (service, bytes) = (self.shared.service.clone(), request.payload_bytes() + message_bytes);
        let tenant = self.pacing.tenant().cloned();
        self.begin(request_id, bytes, async move {
            if let Some(tenant) = tenant.as_ref().filter(|_| !wait.is_zero()) {
                tokio::time::sleep(wait).await;
                tenant.counts.add_wait(wait);
            }
            service.answer(request, tenant).await
        });
    }

    /// Begins to wait for an answer; the request is counted with `bytes` until then.
    fn begin(&mut self, request_id: u64, bytes: usize, answer: impl Future<Output = Segment> + Send + 'static) {
        if self.pending.contains_key(&request_id) {
            let refusal = Refusal::bad_request(format!("request id {request_id} is in flight already"));
            return self.refuse_and_close(request_id, &refusal);
        }
        self.pending_bytes += bytes;
        let (runtime, counted) = self.seat.for_request();
        let budget = self.budget.clone();
        let answer = async move {
            let _counted = counted;
            let mut segment = answer.await;
            if segment.memory.is_none() && segment.bytes.len() > FREE_BYTES {
                // The share of the request covers it until there is one for it.
                segment.memory = budget.take(segment.bytes.len()).await.ok();
            }
            (request_id, segment)
        };
        let task = self.tasks.spawn_on(answer, &runtime);
        let (share, cost) = (self.share.take(), self.cost);
        if share.is_none() {
            self.free_used += cost;
        }
        self.pending.insert(request_id, Pending { task, bytes, share, cost });
    }

    /// Counts a request no more; gives its task, if it has waited.
    fn waits_no_more(&mut self, request_id: u64) -> Option<AbortHandle> {
        let Pending { task, bytes, share, cost } = self.pending.remove(&request_id)?;
        self.pending_bytes -= bytes;
        if share.is_none() {
            self.free_used -= cost;
        }
        Some(task)
    }

    fn locality(&self) -> PeerLocality {
        if self.socket.passes_descriptors() { PeerLocality::SameHost } else { PeerLocality::Elsewhere }
    }

    /// Begins to take the payload of a write, as soon as there is memory for it.
    fn upload(&mut self, request_id: u64, payload_bytes: u32, write: Result<Write, Refusal>) {
        let missing = payload_bytes as usize;
        self.pacing.charge_write(missing);
        let fate = match write {
            Ok(write) if write.is_of_object() && !self.peer.is_believed() => {
                // Not kept, as what is here already is not.
                self.send(Segment::of(FrameKind::WriteReply, request_id, &not_kept()));
                PayloadState::Discarded
            }
            Ok(write) => match self.budget.try_take(missing) {
                Some(memory) => PayloadState::Buffered { write, payload: BytesMut::with_capacity(missing), memory },
                None => {
                    let share = Box::pin(self.budget.clone().take(missing));
                    PayloadState::AwaitingMemory { write, share, since: Instant::now() }
                }
            },
            Err(refusal) => {
                self.send(Segment::of(FrameKind::WriteReply, request_id, &refused_write(refusal)));
                PayloadState::Discarded
            }
        };
        self.upload = Some(Upload { request_id, missing, fate });
    }

    /// Carries out a write whose payload is here.
    fn uploaded(&mut self) {
        let Some(Upload { request_id, fate: PayloadState::Buffered { mut write, payload, memory }, .. }) =
            self.upload.take()
        else {
            return;
        };
        let (service, tenant) = (self.shared.service.clone(), self.pacing.tenant().cloned());
        // Its message is gone.
        self.cost = REQUEST_MEMORY;
        if write.is_of_object() {
            return self.begin(request_id, payload.len(), async move {
                let reply = service.keep(&write, payload.freeze()).await;
                drop(memory);
                Segment::of(FrameKind::WriteReply, request_id, &reply)
            });
        }
        let (room, length) = (std::mem::replace(&mut write.room, Ok(None)), payload.len());
        let until = write.until;
        let write = move |taken: Option<Taken>| {
            let reply = service.write(&write, &payload);
            drop((payload, memory, taken));
            Segment::of(FrameKind::WriteReply, request_id, &reply)
        };
        match room {
            Ok(taken) => {
                let patience = until.saturating_duration_since(Instant::now());
                self.wait_for(request_id, length, patience, move || write(taken));
            }
            room => self.begin(request_id, length, async move {
                let refused = |refusal| Segment::of(FrameKind::WriteReply, request_id, &refused_write(refusal));
                match given(room).await {
                    Ok(taken) => {
                        let turns = tenant.as_ref().map(|tenant| &tenant.disk_turns);
                        on_disk(turns, until, move || write(taken)).await.unwrap_or_else(refused)
                    }
                    Err(refusal) => refused(refusal),
                }
            }),
        }
    }

    /// Room for what a request may take of the disks for a block that no file has yet.
    fn room(&self, block: Option<&BlockRef>, bytes: u64) -> Room {
        block.map_or(Ok(None), |block| self.shared.reserved.take(self.rights.client(), block, bytes))
    }

    /// Refuses a write for which there was no memory in time.
    fn give_up_upload(&mut self) {
        let Some(upload) = self.upload.as_mut().filter(|upload| upload.waited_too_long()) else { return };
        upload.fate = PayloadState::Discarded;
        let request_id = upload.request_id;
        let refusal = Refusal::new(Status::Overloaded, "the memory budget of the worker is used up");
        self.frame_began = Instant::now();
        self.send(Segment::of(FrameKind::WriteReply, request_id, &refused_write(refusal)));
    }

    fn answer_at_once(&mut self, request: &ContentRequest) -> bool {
        if request.items.len() > INLINE_ITEMS {
            return false;
        }
        let service = self.shared.service.clone();
        let Some(blocks) = service.all_at_hand(request) else { return false };
        if request.kind == FrameKind::Read {
            let payload = request.payload_bytes();
            if payload > INLINE_BYTES {
                return false;
            }
            // A worker short of memory answers from a task, which can wait for some.
            let Some(memory) = self.budget.try_take(payload) else { return false };
            let written = self
                .outgoing
                .append(Some(memory), |out| if service.read_at_hand(request, &blocks, out) { Ok(()) } else { Err(()) });
            if written.is_err() {
                return false;
            }
        } else {
            let segment = service.open_at_hand(request, &blocks);
            self.send(segment);
        }
        service.count_hits(request);
        true
    }

    /// Carries out a short request that may wait for the disk. It is refused when it has no turn within `patience`.
    fn wait_for(
        &mut self,
        request_id: u64,
        bytes: usize,
        patience: Duration,
        work: impl FnOnce() -> Segment + Send + 'static,
    ) {
        let (tenant, until) = (self.pacing.tenant().cloned(), Instant::now() + patience);
        let task = async move {
            let turns = tenant.as_ref().map(|tenant| &tenant.disk_turns);
            on_disk(turns, until, work).await.unwrap_or_else(|Refusal { status, message }| {
                Segment::of(FrameKind::Failure, request_id, &Failure { status: status.into(), message })
            })
        };
        self.begin(request_id, bytes, task);
    }

    fn answered(&mut self, request_id: u64, segment: Segment) {
        // Nobody waits for a request that was cancelled while its answer was on its way.
        if self.waits_no_more(request_id).is_some() {
            self.send(segment);
        }
    }

    fn send(&mut self, segment: Segment) {
        if segment.descriptors.is_empty() && segment.memory.is_none() {
            let append = |out: &mut Vec<u8>| {
                out.extend_from_slice(&segment.bytes);
                Ok::<(), std::convert::Infallible>(())
            };
            let Ok(()) = self.outgoing.append(None, append);
        } else {
            self.outgoing.push(segment);
        }
    }

    /// Answers a request that cannot be served at all.
    fn refuse(&mut self, request_id: u64, refusal: &Refusal) {
        let failure = Failure { status: refusal.status.into(), message: refusal.message.clone() };
        self.outgoing.push(Segment::of(FrameKind::Failure, request_id, &failure));
    }

    /// What this peer has asked for, and what came of it.
    fn audit(&self, kind: FrameKind, subject: &str, result: Result<(), &str>, suppressed: u64) {
        let (identity, peer, operation) = (self.peer.identity(), &self.from, &format!("{kind:?}"));
        self.shared.audit.record(Audited { identity, peer, operation, subject, result, suppressed });
    }

    /// A request that this peer may make; `None` for what is refused, or postponed.
    ///
    /// # Errors
    /// The frame is malformed.
    fn permitted<R: OfBlocks + Message + Default>(
        &mut self,
        header: &FrameHeader,
        message: Bytes,
    ) -> Result<Option<R>, Refusal> {
        if !self.rights.are_limited() {
            return decode(message).map(Some);
        }
        let request = decode::<R>(message.clone())?;
        self.pacing.comes_to(None);
        match self.rights.judge(&request) {
            Verdict::Allowed => {
                self.pacing.comes_to(self.rights.rate(&request));
                return Ok(Some(request));
            }
            Verdict::Refused(refusal) => self.deny(header, refusal)?,
            Verdict::Later => {
                let renewed = Box::pin(self.rights.renew());
                self.postponed = Some(Postponed { header: *header, message, renewed });
            }
        }
        Ok(None)
    }

    /// Does not do what this peer may not ask for. The connection goes on, but for what nobody asks for.
    ///
    /// # Errors
    /// The frame is no request.
    fn deny(&mut self, header: &FrameHeader, refusal: Refusal) -> Result<(), Refusal> {
        if !std::mem::replace(&mut self.refusal_told, true)
            && let Some(suppressed) = self.shared.refusals.admit(self.peer.identity().cloned())
        {
            warn!(peer = %self.peer, suppressed, "a request is refused: {}", refusal.message);
            self.audit(header.kind, "", Err(&refusal.message), suppressed);
        }
        if roles::senders(header.kind).is_empty() {
            return Err(refusal);
        }
        if header.kind == FrameKind::Write {
            // Its payload comes next, and is thrown away.
            self.upload(header.request_id, header.payload_bytes, Err(refusal));
        } else {
            self.refuse(header.request_id, &refusal);
        }
        Ok(())
    }

    /// Says what was wrong with a frame, and ends: whatever follows cannot be distinguished from the middle of it.
    fn refuse_and_close(&mut self, request_id: u64, refusal: &Refusal) {
        debug!(%refusal, "a malformed frame");
        self.shared.service.metrics.malformed_frames.inc();
        self.refuse(request_id, refusal);
        self.closing = true;
    }
}

/// What a request takes while it waits.
fn cost_of(message: &[u8]) -> usize {
    REQUEST_MEMORY + message.len() + cavern_proto::bounded::count_fields(message) * FIELD_MEMORY
}

fn decode<M: Message + Default>(message: Bytes) -> Result<M, Refusal> {
    cavern_proto::bounded::decode(message).map_err(|error| Refusal::bad_request(error.to_string()))
}

/// The share that the next frame waits for; waits for ever when it does not.
async fn awaited(share: &mut Option<PendingShare>) -> Result<Share, AcquireError> {
    match share {
        Some(share) => share.await,
        None => std::future::pending().await,
    }
}

/// The room of a request, at once or when enough has been committed.
async fn given(room: Room) -> Result<Option<Taken>, Refusal> {
    match room {
        Ok(taken) => Ok(taken),
        Err(wanted) => wanted.wait().await,
    }
}

/// The frame that was postponed, when it can be judged; waits for ever when there is none.
async fn when_renewed(postponed: &mut Option<Postponed>) -> (FrameHeader, Bytes) {
    match postponed {
        Some(Postponed { renewed, .. }) => renewed.await,
        None => std::future::pending().await,
    }
    // It was there a moment ago, and nobody else takes it.
    let Some(Postponed { header, message, .. }) = postponed.take() else { return std::future::pending().await };
    (header, message)
}

/// The next frame about evictions; waits for ever on connections that get none.
async fn next_eviction(evictions: &mut Option<broadcast::Receiver<Bytes>>) -> Bytes {
    let Some(receiver) = evictions else { return std::future::pending().await };
    loop {
        match receiver.recv().await {
            Ok(frame) => return frame,
            // What was missed concerns idle descriptors only, which clients close by themselves.
            Err(broadcast::error::RecvError::Lagged(_)) => {}
            Err(broadcast::error::RecvError::Closed) => return std::future::pending().await,
        }
    }
}
