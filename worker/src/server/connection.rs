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
//! connection. The payload of a write is taken before the next frame is looked at (see `upload`), and nothing is while
//! the connection is held ([`Released`]).

mod frames;

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use cavern_conf::process::LogLimit;
use cavern_net::Socket;
use cavern_proto::bounded::MAX_ITEMS;
use cavern_proto::data::WriteReply;
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

use super::block_access::BlockAccess;
use super::cores::CoreSlot;
use super::frame_buffer::FrameBuffer;
use super::outgoing::{Outgoing, Segment};
use super::pacing::Pacing;
use super::requests::{MAX_INFLIGHT_BYTES, Service};
use super::roles::{self, Peer};
use super::upload::Upload;
use super::writes::Write;
use crate::memory::{Budget, FREE_BYTES, RequestMemory, RequestShare, Share};
use crate::request_error::Refusal;

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
pub(super) struct Shared {
    pub service: Arc<Service>,
    pub admission: Admission,
    /// Whose requests were refused.
    pub refusals: LogLimit<Option<Identity>>,
    /// Connections that were.
    pub refused_connections: LogLimit<()>,
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

/// What has arrived and is not handled. Frames are taken one by one from `bytes`, unless the payload of a write comes
/// before the next. What `hold` brings is waited for before anything else is taken.
struct Input {
    bytes: BytesMut,
    upload: Option<Upload>,
    hold: Option<BoxFuture<'static, Released>>,
    /// When the frame that is incomplete began to arrive, or more of a payload came.
    frame_began: Instant,
}

/// What a connection was held for.
enum Released {
    /// A frame is handled now that the worker has heard what mounts there are for whom, with its share of the memory
    /// for requests.
    Frame(FrameHeader, Bytes, Option<Share>),
    /// The next frame has a share of that memory, or will never have one.
    NextFrame(Option<Share>),
    /// The payload of a write has memory, or had none in time.
    Payload { request_id: u64, missing: usize, write: Box<Result<(Write, Share), WriteReply>> },
    /// The tenant was too fast at that moment, and is not any more.
    Pause(Instant),
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
    slot: CoreSlot,
    input: Input,
    outgoing: Outgoing,
    in_flight: InFlight,
    greeted: bool,
    closing: bool,
}

impl Connection {
    /// To be served where the slot is.
    pub(super) fn new(
        socket: Socket,
        (peer, from): (Peer, String),
        pacing: Pacing,
        shared: Arc<Shared>,
        slot: CoreSlot,
    ) -> Self {
        let outgoing = Outgoing::new(shared.service.spares.clone());
        let parts = &shared.service.parts;
        let access = BlockAccess::of(&peer, parts.mounts.clone(), parts.membership.clone());
        let tenant = pacing.tenant().map(|tenant| &**tenant);
        let (budget, requests) = (shared.service.budget(tenant), shared.service.budget_of_requests(tenant));
        Self {
            socket,
            caller: Caller { peer, access, from, refusal_told: false, term: None },
            pacing,
            budget,
            memory: RequestMemory::new(requests),
            shared,
            slot,
            input: Input { bytes: BytesMut::new(), upload: None, hold: None, frame_began: Instant::now() },
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
            let interest = match (self.wants_input() && drain_until.is_none(), self.outgoing.wants_socket()) {
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
                () = self.outgoing.take_read() => {}
                released = when_released(&mut self.input.hold) => self.go_on(released),
                frame = next_eviction(&mut evictions) => {
                    if self.greeted && self.outgoing.bytes() < FLUSH_BYTES {
                        self.outgoing.push(Segment { bytes: frame.to_vec().into(), ..Segment::default() });
                    }
                }
                () = stop.cancelled(), if drain_until.is_none() => {
                    drain_until = Some(Instant::now() + DRAIN_TIMEOUT);
                }
                _ = watch.tick() => {
                    self.socket.check()?;
                    self.check_patience()?;
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
        let is_begun = self.input.upload.is_some() || !self.input.bytes.is_empty() && self.may_read();
        if (is_begun || !self.greeted) && self.input.frame_began.elapsed() > FRAME_TIMEOUT {
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
            && self.input.hold.is_none()
            && self.in_flight.pending.len() < MAX_PENDING
            && self.outgoing.bytes() < FLUSH_BYTES
            && self.in_flight.bytes + self.outgoing.bytes() < MAX_INFLIGHT_BYTES as usize
    }

    /// Whether what arrives is taken: frames, or the rest of a payload.
    fn wants_input(&self) -> bool {
        if self.input.upload.is_some() { !self.closing } else { self.may_read() }
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
                if upload.missing > 0 {
                    return true;
                }
                self.uploaded();
            }
            if !self.may_read() || self.is_too_fast() {
                return false;
            }
            match self.next_frame() {
                Ok(Some((header, message))) => {
                    self.pacing.count();
                    self.handle_frame(header, message);
                }
                // Where it is held there is memory for the frame first.
                Ok(None) => return self.input.hold.is_none(),
                Err(refusal) => self.refuse_and_close(0, refusal),
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
                self.hold_for_memory(most);
                return Ok(None);
            }
            self.input.bytes.reserve(total - self.input.bytes.len());
            return Ok(None);
        }
        let cost = cost_of(&self.input.bytes[HEADER_BYTES..total]);
        // What cancels others gives memory back.
        if header.kind != FrameKind::Cancel && !self.memory.admits(cost) {
            self.hold_for_memory(cost);
            return Ok(None);
        }
        self.memory.cost = cost;
        self.input.bytes.advance(HEADER_BYTES);
        Ok(Some((header, self.input.bytes.split_to(message_bytes).freeze())))
    }

    fn handle_frame(&mut self, header: FrameHeader, message: Bytes) {
        if let Err(refusal) = self.handle(&header, message) {
            self.refuse_and_close(header.request_id, refusal);
        }
        // It does not wait, or has taken its share along.
        self.memory.share = None;
        self.input.frame_began = Instant::now();
    }

    fn hold(&mut self, until: impl Future<Output = Released> + Send + 'static) {
        self.input.hold = Some(Box::pin(until));
    }

    /// Waits for so much of the memory for requests.
    fn hold_for_memory(&mut self, bytes: usize) {
        let share = self.memory.budget.clone().take(bytes);
        self.hold(async move { Released::NextFrame(share.await.ok()) });
    }

    /// Whether the tenant takes no further frame for now.
    fn is_too_fast(&mut self) -> bool {
        let pause = self.pacing.pause();
        if let Some(until) = pause {
            let now = Instant::now();
            self.hold(async move {
                tokio::time::sleep_until(until).await;
                Released::Pause(now)
            });
        }
        pause.is_some()
    }

    /// Goes on with what it was held for.
    fn go_on(&mut self, released: Released) {
        self.input.frame_began = Instant::now();
        match released {
            Released::Frame(header, message, share) => {
                self.memory.share = share;
                self.handle_frame(header, message);
            }
            Released::NextFrame(share) => {
                self.closing |= share.is_none();
                self.memory.share = share;
            }
            Released::Payload { request_id, missing, write } => self.take_payload(request_id, missing, *write),
            Released::Pause(since) => self.pacing.paused(since.elapsed()),
        }
    }

    /// Begins to wait for an answer; the request is counted with `bytes` until then.
    fn begin(&mut self, request_id: u64, bytes: usize, answer: impl Future<Output = Segment> + Send + 'static) {
        if self.in_flight.pending.contains_key(&request_id) {
            let refusal = Refusal::bad_request(format!("request id {request_id} is in flight already"));
            return self.refuse_and_close(request_id, refusal);
        }
        self.in_flight.bytes += bytes;
        let (runtime, counted) = self.slot.for_request();
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

    fn answered(&mut self, request_id: u64, segment: Segment) {
        // Nobody waits for a request that was cancelled while its answer was on its way.
        if self.waits_no_more(request_id).is_some() {
            self.send(segment);
        }
    }

    fn send(&mut self, segment: Segment) {
        if segment.descriptors.is_empty() && segment.memory.is_none() && segment.payload.is_none() {
            let append = |out: &mut FrameBuffer| {
                out.extend(&segment.bytes);
                Ok::<(), std::convert::Infallible>(())
            };
            let Ok(()) = self.outgoing.append(None, append);
        } else {
            self.outgoing.push(segment);
        }
    }

    /// Answers a request that cannot be served at all.
    fn refuse(&mut self, request_id: u64, refusal: Refusal) {
        self.outgoing.push(Segment::failure(request_id, refusal));
    }

    /// What this peer has asked for, and what came of it.
    fn audit(&self, kind: FrameKind, subject: &str, result: Result<(), &str>, suppressed: u64) {
        let (identity, peer, operation) = (self.caller.peer.identity(), &self.caller.from, &format!("{kind:?}"));
        self.shared.admission.audit.record(Audited { identity, peer, operation, subject, result, suppressed });
    }

    /// Does not do what this peer may not ask for. The connection goes on, but for what nobody asks for.
    fn deny(&mut self, header: &FrameHeader, refusal: Refusal) {
        if !std::mem::replace(&mut self.caller.refusal_told, true)
            && let Some(suppressed) = self.shared.refusals.admit(self.caller.peer.identity().cloned())
        {
            warn!(peer = %self.caller.peer, suppressed, "a request is refused: {}", refusal.message);
            self.audit(header.kind, "", Err(&refusal.message), suppressed);
        }
        if roles::senders(header.kind).is_empty() {
            self.refuse_and_close(header.request_id, refusal);
        } else if header.kind == FrameKind::Write {
            // Its payload comes next, and is thrown away.
            self.begin_upload(header.request_id, header.payload_bytes, Err(refusal));
        } else {
            self.refuse(header.request_id, refusal);
        }
    }

    /// Says what was wrong with a frame, and ends: whatever follows cannot be distinguished from the middle of it.
    fn refuse_and_close(&mut self, request_id: u64, refusal: Refusal) {
        debug!(%refusal, "a malformed frame");
        self.shared.service.parts.metrics.malformed_frames.inc();
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

/// What the connection was held for; waits for ever when it is not held.
async fn when_released(hold: &mut Option<BoxFuture<'static, Released>>) -> Released {
    let Some(until) = hold else { return std::future::pending().await };
    let released = until.await;
    *hold = None;
    released
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
