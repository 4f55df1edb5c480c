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

mod frames;

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use cavern_conf::process::LogLimit;
use cavern_proto::bounded::MAX_ITEMS;
use cavern_proto::data::{Failure, Status};
use cavern_proto::frame::{FrameHeader, FrameKind, HEADER_BYTES, MAX_WRITE_BYTES};
use cavern_security::{AuditLog, Audited, Identity, Tenants, Transport};
use futures::future::BoxFuture;
use prost::Message;
use tokio::io::Interest;
use tokio::sync::broadcast;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::block_access::{BlockAccess, OfBlocks, Verdict};
use super::cores::Seat;
use super::memory::{Budget, FREE_BYTES, RequestMemory, RequestShare};
use super::outgoing::{Outgoing, Segment};
use super::pacing::Pacing;
use super::requests::{MAX_INFLIGHT_BYTES, Service};
use super::roles::{self, Peer};
use super::socket::Socket;
use super::upload::{PayloadState, Upload, memory_for};
use super::writes::refused_write;
use crate::membership::Membership;
use crate::mounts::Mounts;
use crate::request_error::Refusal;
use crate::reserved::ReservedBlocks;

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

/// What a request takes while it waits, beside its message: its task.
const REQUEST_MEMORY: usize = 4 << 10;
/// What each field of its message takes, decoded and looked up: there may be thousands, of two bytes each.
const FIELD_MEMORY: usize = 1 << 10;
/// A message that is longer is received when there is memory for it.
const SHORT_MESSAGE_BYTES: usize = 64 << 10;

/// Who is let in, and how.
#[derive(Debug)]
pub struct Admission {
    /// How TCP clients are to speak.
    pub transport: Transport,
    pub audit: AuditLog,
    /// Clients, where connections are secured.
    pub tenants: Tenants,
}

/// What all connections share.
#[derive(Debug)]
pub(super) struct Shared {
    pub service: Arc<Service>,
    pub membership: Arc<Membership>,
    /// Their rules say what clients may do.
    pub mounts: Arc<Mounts>,
    pub admission: Admission,
    /// Whose requests were refused.
    pub refusals: LogLimit<Option<Identity>>,
    /// Connections that were.
    pub refused_connections: LogLimit<()>,
    pub reserved: Arc<ReservedBlocks>,
    /// Frames for clients that hold descriptors.
    pub evictions: broadcast::Sender<Bytes>,
    pub stop: CancellationToken,
}

/// The answer of a task, and to which request.
type Answered = (u64, Segment);

/// The requests that wait for the disk or the bucket, each in a task of its own. They belong to the task of the
/// connection: a request is counted from when it begins to wait until its answer is there, or it is cancelled.
struct InFlight {
    tasks: JoinSet<Answered>,
    pending: HashMap<u64, Pending>,
    /// Payload and message bytes of all of them.
    bytes: usize,
}

/// A request that waits for its task.
struct Pending {
    task: AbortHandle,
    /// What it was counted with.
    bytes: usize,
    share: RequestShare,
}

/// Who is at the other end, and what it may do.
struct Caller {
    peer: Peer,
    access: BlockAccess,
    /// Its address; empty for the Unix socket.
    from: String,
    /// A frame of it was refused, and the log has it.
    refusal_told: bool,
    /// Of a master: the term in which it leads.
    term: Option<u64>,
}

/// What has arrived and is not handled. Frames are taken one by one from `bytes`, unless one of two things comes before
/// the next: a frame that is postponed, or the payload of a write.
struct Input {
    bytes: BytesMut,
    postponed: Option<Postponed>,
    upload: Option<Upload>,
    /// When the frame that is incomplete began to arrive, or more of a payload came.
    frame_began: Instant,
}

/// A frame that is handled when the worker has heard what mounts there are for whom.
struct Postponed {
    header: FrameHeader,
    message: Bytes,
    renewed: BoxFuture<'static, ()>,
}

/// A connection, in its task. It is greeted first; then it takes frames and sends answers until the client ends it, or
/// it is `closing`: nothing more is read then, and it ends when all is sent. Nothing here has a lock; what connections
/// share is in `shared`.
pub(super) struct Connection {
    socket: Socket,
    caller: Caller,
    pacing: Pacing,
    /// For answers and payloads.
    budget: Budget,
    /// For requests.
    memory: RequestMemory,
    shared: Arc<Shared>,
    seat: Seat,
    input: Input,
    outgoing: Outgoing,
    in_flight: InFlight,
    greeted: bool,
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
        let access = BlockAccess::of(&peer, shared.mounts.clone(), shared.membership.clone());
        let tenant = pacing.tenant().map(|tenant| &**tenant);
        let (budget, requests) = (shared.service.budget(tenant), shared.service.budget_of_requests(tenant));
        Self {
            socket,
            caller: Caller { peer, access, from, refusal_told: false, term: None },
            pacing,
            budget,
            memory: RequestMemory::new(requests),
            shared,
            seat,
            input: Input { bytes: BytesMut::new(), postponed: None, upload: None, frame_began: Instant::now() },
            outgoing,
            in_flight: InFlight { tasks: JoinSet::new(), pending: HashMap::new(), bytes: 0 },
            greeted: false,
            closing: false,
        }
    }

    /// Serves until the client is gone, or sends what is no frame, or the worker stops.
    pub(super) async fn serve(mut self) {
        if let Err(error) = self.run().await {
            debug!(%error, "a connection ended");
        }
        // Requests that still wait have nobody to answer.
        self.in_flight.tasks.shutdown().await;
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
            let idle = self.in_flight.tasks.is_empty() && self.outgoing.is_empty();
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
                Some(answered) = self.in_flight.tasks.join_next() => {
                    // A task that was cancelled has nothing to say.
                    if let Ok((request_id, segment)) = answered {
                        self.answered(request_id, segment);
                    }
                }
                memory = memory_for(&mut self.input.upload) => {
                    if let (Some(upload), Ok(memory)) = (&mut self.input.upload, memory) {
                        upload.keep(memory);
                        self.input.frame_began = Instant::now();
                    }
                }
                has_share = self.memory.granted() => {
                    self.closing |= !has_share;
                    self.input.frame_began = Instant::now();
                }
                (header, message) = when_renewed(&mut self.input.postponed) => self.handle_frame(header, message),
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
                    self.input.frame_began = Instant::now();
                }
                _ = watch.tick() => {
                    self.socket.check()?;
                    self.check_patience()?;
                    self.give_up_upload();
                    self.outgoing.rest();
                    if self.input.bytes.is_empty() {
                        self.input.bytes = BytesMut::new();
                    }
                    if drain_until.is_some_and(|until| Instant::now() > until) {
                        return Err(io::Error::new(io::ErrorKind::TimedOut, "stopped with requests in flight"));
                    }
                }
            }
        }
    }

    fn check_patience(&self) -> io::Result<()> {
        let waits_for_bytes = match &self.input.upload {
            Some(upload) => !upload.waits_for_memory(),
            None => !self.input.bytes.is_empty() && self.may_read(),
        };
        let waits_for_frame = !self.greeted || waits_for_bytes;
        if waits_for_frame && self.input.frame_began.elapsed() > FRAME_TIMEOUT {
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
            && self.input.postponed.is_none()
            && !self.memory.is_awaited()
            && !self.pacing.is_paused()
            && self.in_flight.pending.len() < MAX_PENDING
            && self.outgoing.bytes() < FLUSH_BYTES
            && self.in_flight.bytes + self.outgoing.bytes() < MAX_INFLIGHT_BYTES as usize
    }

    /// Whether what arrives is taken: frames, or the rest of a payload.
    fn wants_input(&self) -> bool {
        match &self.input.upload {
            Some(upload) => !self.closing && !upload.waits_for_memory(),
            None => self.may_read(),
        }
    }

    /// Reads what has arrived; `false` at the end of the stream.
    fn receive(&mut self) -> io::Result<bool> {
        if self.input.bytes.is_empty() || self.input.upload.is_some() {
            self.input.frame_began = Instant::now();
        }
        let received = match self.input.upload.as_mut().and_then(|upload| upload.receive(&self.socket)) {
            Some(received) => received,
            None => {
                self.input.bytes.reserve(READ_BYTES);
                self.socket.try_read(&mut self.input.bytes)
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
            if let Some(upload) = &mut self.input.upload {
                upload.take(&mut self.input.bytes);
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
                Ok(None) if self.memory.is_awaited() => return false,
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
        let Some(head) = self.input.bytes.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
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
        if self.input.bytes.len() < total {
            if message_bytes > SHORT_MESSAGE_BYTES && !self.memory.has_share_of(most) {
                return Ok(None);
            }
            self.input.bytes.reserve(total - self.input.bytes.len());
            return Ok(None);
        }
        let cost = cost_of(&self.input.bytes[HEADER_BYTES..total]);
        // What cancels others gives memory back.
        if header.kind != FrameKind::Cancel && !self.memory.admits(cost) {
            return Ok(None);
        }
        self.memory.cost = cost;
        self.input.bytes.advance(HEADER_BYTES);
        Ok(Some((header, self.input.bytes.split_to(message_bytes).freeze())))
    }

    fn handle_frame(&mut self, header: FrameHeader, message: Bytes) {
        if let Err(refusal) = self.handle(&header, message) {
            self.refuse_and_close(header.request_id, &refusal);
        }
        if self.input.postponed.is_none() {
            self.memory.end_frame();
        }
        self.input.frame_began = Instant::now();
    }

    /// Begins to wait for an answer; the request is counted with `bytes` until then.
    fn begin(&mut self, request_id: u64, bytes: usize, answer: impl Future<Output = Segment> + Send + 'static) {
        if self.in_flight.pending.contains_key(&request_id) {
            let refusal = Refusal::bad_request(format!("request id {request_id} is in flight already"));
            return self.refuse_and_close(request_id, &refusal);
        }
        self.in_flight.bytes += bytes;
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
        let task = self.in_flight.tasks.spawn_on(answer, &runtime);
        let share = self.memory.take_along();
        self.in_flight.pending.insert(request_id, Pending { task, bytes, share });
    }

    /// Counts a request no more; gives its task, if it has waited.
    fn waits_no_more(&mut self, request_id: u64) -> Option<AbortHandle> {
        let Pending { task, bytes, share } = self.in_flight.pending.remove(&request_id)?;
        self.in_flight.bytes -= bytes;
        self.memory.give_back(&share);
        Some(task)
    }

    /// Refuses a write for which there was no memory in time.
    fn give_up_upload(&mut self) {
        let Some(upload) = self.input.upload.as_mut().filter(|upload| upload.waited_too_long()) else { return };
        upload.fate = PayloadState::Discarded;
        let request_id = upload.request_id;
        let refusal = Refusal::new(Status::Overloaded, "the memory budget of the worker is used up");
        self.input.frame_began = Instant::now();
        self.send(Segment::of(FrameKind::WriteReply, request_id, &refused_write(refusal)));
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
        let (identity, peer, operation) = (self.caller.peer.identity(), &self.caller.from, &format!("{kind:?}"));
        self.shared.admission.audit.record(Audited { identity, peer, operation, subject, result, suppressed });
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
        if self.caller.access.client().is_none() {
            return decode(message).map(Some);
        }
        let request = decode::<R>(message.clone())?;
        self.pacing.comes_to(None);
        match self.caller.access.check(&request) {
            Verdict::Allowed => {
                self.pacing.comes_to(self.caller.access.rate(&request));
                return Ok(Some(request));
            }
            Verdict::Refused(refusal) => self.deny(header, refusal)?,
            Verdict::Later => {
                let renewed = Box::pin(self.caller.access.renew());
                self.input.postponed = Some(Postponed { header: *header, message, renewed });
            }
        }
        Ok(None)
    }

    /// Does not do what this peer may not ask for. The connection goes on, but for what nobody asks for.
    ///
    /// # Errors
    /// The frame is no request.
    fn deny(&mut self, header: &FrameHeader, refusal: Refusal) -> Result<(), Refusal> {
        if !std::mem::replace(&mut self.caller.refusal_told, true)
            && let Some(suppressed) = self.shared.refusals.admit(self.caller.peer.identity().cloned())
        {
            warn!(peer = %self.caller.peer, suppressed, "a request is refused: {}", refusal.message);
            self.audit(header.kind, "", Err(&refusal.message), suppressed);
        }
        if roles::senders(header.kind).is_empty() {
            return Err(refusal);
        }
        if header.kind == FrameKind::Write {
            // Its payload comes next, and is thrown away.
            self.begin_upload(header.request_id, header.payload_bytes, Err(refusal));
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

/// The frame that was postponed, when it can be checked; waits for ever when there is none.
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
