//! What a connection does with each kind of frame: one function for one kind.

use bytes::{Bytes, BytesMut};
use cavern_proto::bounded::MAX_ITEMS;
use cavern_proto::data::{
    BlockRef, Cancel, CopyRequest, CorruptRequest, FillRequest, FreeRequest, Hello, InspectRequest, OpenRequest,
    PersistRequest, QueryRequest, ReadRequest, ReserveRequest, Status, SyncRequest, WriteReply, WriteRequest,
};
use cavern_proto::frame::{FrameHeader, FrameKind, PROTOCOL_VERSION};
use prost::Message;
use tokio::time::Instant;

use super::{Connection, REQUEST_MEMORY, Released, decode};
use crate::memory::Share;
use crate::request_error::{Refusal, on_disk};
use crate::reserved::{Reservation, ReserveResult};
use crate::server::block_access::{OfBlocks, Verdict};
use crate::server::frame_buffer::FrameBuffer;
use crate::server::outgoing::{PassedFile, Segment};
use crate::server::requests::{ContentRequest, MAX_INFLIGHT_BYTES, Service, deadline_of};
use crate::server::roles;
use crate::server::upload::{Buffer, MEMORY_TIMEOUT, Upload};
use crate::server::writes::{Write, kept};

/// Payloads up to this size are read and answered in the loop, if they are in the page cache. What a kernel's FUSE asks
/// for at a time is at most this.
const INLINE_BYTES: usize = 1 << 20;
/// Requests for more blocks are answered by tasks, so that other connections of the thread come in between.
const INLINE_ITEMS: usize = 1024;

impl Connection {
    /// Does what a frame asks for, or begins to.
    ///
    /// # Errors
    /// The frame is malformed: the connection cannot go on.
    pub(super) fn handle(&mut self, header: &FrameHeader, message: Bytes) -> Result<(), Refusal> {
        if let Err(refusal) = self.caller.peer.check_role(header.kind) {
            self.deny(header, refusal);
            return Ok(());
        }
        let membership = &self.shared.service.parts.membership;
        if roles::is_order(header.kind)
            && let Some(term) = self.caller.term.filter(|term| membership.is_over(*term))
        {
            let message = format!("the master of term {term} leads no more");
            self.refuse(header.request_id, Refusal::new(Status::Deposed, message));
            return Ok(());
        }
        self.shared.service.uploads.pacing.note(header.kind);
        match header.kind {
            FrameKind::Hello => self.greet(header.request_id, &decode(message)?)?,
            FrameKind::Read => self.on(header, message, Self::read)?,
            FrameKind::Open => self.on(header, message, Self::open)?,
            FrameKind::Fill => self.on(header, message, Self::fill)?,
            FrameKind::Query => self.on(header, message, Self::query)?,
            FrameKind::Corrupt => self.on(header, message, Self::corrupt)?,
            FrameKind::Reserve => self.on(header, message, Self::reserve)?,
            FrameKind::Write => self.on(header, message, Self::write)?,
            FrameKind::Sync => self.on(header, message, Self::sync)?,
            FrameKind::Free => self.free(header, decode(message)?),
            FrameKind::Persist => self.persist(header, decode(message)?),
            FrameKind::Copy => self.copy(header, decode(message)?),
            FrameKind::Inspect => self.inspect(header, decode(message)?),
            FrameKind::Cancel => self.cancel(&decode(message)?),
            _ => return Err(Refusal::bad_request("a client sends requests, not answers")),
        }
        Ok(())
    }

    fn greet(&mut self, request_id: u64, hello: &Hello) -> Result<(), Refusal> {
        if hello.protocol != PROTOCOL_VERSION {
            let message =
                format!("protocol {} is not spoken here, {PROTOCOL_VERSION} is: use a matching cv", hello.protocol);
            return Err(Refusal::bad_request(message));
        }
        let membership = &self.shared.service.parts.membership;
        let (worker_id, cluster_id) = membership.now();
        if !hello.cluster_id.is_empty() && !cluster_id.is_empty() && hello.cluster_id != cluster_id {
            let message = format!("this worker belongs to cluster {cluster_id}, not to {}", hello.cluster_id);
            return Err(Refusal::bad_request(message));
        }
        self.greeted = true;
        if hello.term != 0 && self.caller.peer.may_lead() {
            membership.heard_of(hello.term);
            self.caller.term = Some(hello.term);
        }
        // A master has nothing done before one has confirmed who this is.
        let is_known = hello.term == 0 || membership.confirmed().is_some();
        let reply = Hello {
            protocol: PROTOCOL_VERSION,
            cluster_id,
            peer: format!("cv worker {}", env!("CARGO_PKG_VERSION")),
            worker_id: if is_known { worker_id } else { 0 },
            max_inflight_bytes: MAX_INFLIGHT_BYTES,
            term: 0,
        };
        self.outgoing.push(Segment::of(FrameKind::Hello, request_id, &reply));
        Ok(())
    }

    /// Does what a request asks for, if this peer may ask for it; it may have to be looked at once more.
    ///
    /// # Errors
    /// The frame is malformed.
    fn on<R: OfBlocks + Message + Default>(
        &mut self,
        header: &FrameHeader,
        message: Bytes,
        act: impl FnOnce(&mut Self, &FrameHeader, R),
    ) -> Result<(), Refusal> {
        let request = decode::<R>(message.clone())?;
        self.pacing.comes_to(None);
        match self.caller.access.check(&request) {
            Verdict::Allowed => {
                self.pacing.comes_to(self.caller.access.rate(&request));
                act(self, header, request);
            }
            Verdict::Refused(refusal) => self.deny(header, refusal),
            Verdict::Later => {
                let (header, share, renewed) = (*header, self.memory.share.take(), self.caller.access.renew());
                self.hold(async move {
                    renewed.await;
                    Released::Frame(header, message, share)
                });
            }
        }
        Ok(())
    }

    fn cancel(&mut self, cancel: &Cancel) {
        if let Some(task) = self.waits_no_more(cancel.request_id) {
            task.abort();
        }
    }

    fn read(&mut self, header: &FrameHeader, request: ReadRequest) {
        let prepared = self.shared.service.prepare_read(header.request_id, request);
        self.content(header.request_id, prepared);
    }

    fn open(&mut self, header: &FrameHeader, request: OpenRequest) {
        let prepared = if self.socket.passes_descriptors() {
            let OpenRequest { items, deadline_ms } = request;
            self.shared.service.prepare(header.kind, header.request_id, items, deadline_ms)
        } else {
            Err(Refusal::bad_request("descriptors are handed out over the Unix socket only"))
        };
        self.content(header.request_id, prepared);
    }

    fn fill(&mut self, header: &FrameHeader, FillRequest { items, deadline_ms }: FillRequest) {
        let prepared = self.shared.service.prepare(header.kind, header.request_id, items, deadline_ms);
        self.content(header.request_id, prepared);
    }

    fn query(&mut self, header: &FrameHeader, request: QueryRequest) {
        let with_paths = self.caller.peer.may_see_paths();
        self.look_up(header, FrameKind::QueryReply, move |service| service.query(request, with_paths));
    }

    fn free(&mut self, header: &FrameHeader, request: FreeRequest) {
        if let Err(refusal) = self.caller.peer.check_free(&request) {
            return self.deny(header, refusal);
        }
        if self.shared.admission.audit.is_on() {
            self.audit(header.kind, &format!("{} blocks", request.blocks.len()), Ok(()), 0);
        }
        self.look_up(header, FrameKind::FreeReply, move |service| service.free(request));
    }

    fn corrupt(&mut self, header: &FrameHeader, request: CorruptRequest) {
        // No block has as many. A list of numbers is one field, whatever it takes while it waits.
        if request.chunks.len() > MAX_ITEMS {
            let message = format!("{} chunks of a block, {MAX_ITEMS} are the most", request.chunks.len());
            return self.refuse(header.request_id, Refusal::bad_request(message));
        }
        self.look_up(header, FrameKind::CorruptReply, move |service| service.corrupt(request));
    }

    fn reserve(&mut self, header: &FrameHeader, request: ReserveRequest) {
        let (id, service, tenant) = (header.request_id, self.shared.service.clone(), self.pacing.tenant().cloned());
        let with_file = self.socket.passes_descriptors();
        let wanted = request.ranges.iter().map(|range| u64::from(range.length)).sum::<u64>();
        let room = self.room(request.block.as_ref(), wanted + u64::from(request.origin_bytes));
        let pause = service.pressure();
        let reserved = async move {
            if !pause.is_zero() {
                service.parts.metrics.throttled_reservations.inc();
                tokio::time::sleep(pause).await;
            }
            let taken = given(room).await?;
            service.begin_with_origin(&request, tenant.as_deref()).await?;
            let until = Instant::now() + deadline_of(request.deadline_ms);
            let reserve = move || {
                let reserved = service.reserve(request, with_file);
                drop(taken);
                reserved
            };
            on_disk(tenant.as_ref().map(|tenant| &tenant.disk_turns), until, reserve).await?
        };
        self.begin(id, self.memory.cost, async move {
            let (reply, file) = reserved.await.unwrap_or_else(|refusal| (refusal.into(), None));
            let mut segment = Segment::of(FrameKind::ReserveReply, id, &reply);
            segment.descriptors.extend(file.map(PassedFile::File));
            segment
        });
    }

    fn write(&mut self, header: &FrameHeader, request: WriteRequest) {
        let room = self.room(request.block.as_ref(), u64::from(header.payload_bytes));
        let write = Write::parse(request, header.payload_bytes).map(|write| write.within(room));
        self.begin_upload(header.request_id, header.payload_bytes, write);
    }

    fn sync(&mut self, header: &FrameHeader, request: SyncRequest) {
        if let Err(refusal) = self.caller.peer.check_sync(&request) {
            return self.deny(header, refusal);
        }
        let (service, tenant) = (self.shared.service.clone(), self.pacing.tenant().cloned());
        let synced = async move { service.sync(request, tenant.as_deref()).await };
        self.answer(header.request_id, self.memory.cost, FrameKind::SyncReply, synced);
    }

    fn persist(&mut self, header: &FrameHeader, request: PersistRequest) {
        let uploads = self.shared.service.uploads.clone();
        let persisted = async move { uploads.persist(request).await };
        self.answer(header.request_id, self.memory.cost, FrameKind::PersistReply, persisted);
    }

    fn copy(&mut self, header: &FrameHeader, request: CopyRequest) {
        let uploads = self.shared.service.uploads.clone();
        let copied = async move { uploads.copy(request).await };
        self.answer(header.request_id, self.memory.cost, FrameKind::CopyReply, copied);
    }

    fn inspect(&mut self, header: &FrameHeader, request: InspectRequest) {
        let service = self.shared.service.clone();
        let inspected = async move { service.inspect(request).await };
        self.answer(header.request_id, self.memory.cost, FrameKind::InspectReply, inspected);
    }

    /// Begins to wait for the answer to a request, which can say why it is refused.
    fn answer<R: Message + From<Refusal>>(
        &mut self,
        request_id: u64,
        bytes: usize,
        kind: FrameKind,
        result: impl Future<Output = Result<R, Refusal>> + Send + 'static,
    ) {
        self.begin(request_id, bytes, async move { Segment::answer(kind, request_id, result.await) });
    }

    /// Answers a request about blocks that names no deadline, on a thread that may wait for the disk. It is refused
    /// when it has no turn for that in time.
    fn look_up<R: Message>(
        &mut self,
        header: &FrameHeader,
        kind: FrameKind,
        work: impl FnOnce(&Service) -> R + Send + 'static,
    ) {
        let (id, service, tenant) = (header.request_id, self.shared.service.clone(), self.pacing.tenant().cloned());
        let until = Instant::now() + deadline_of(0);
        let work = move || Segment::of(kind, id, &work(&service));
        self.begin(id, self.memory.cost, async move {
            let turns = tenant.as_ref().map(|tenant| &tenant.disk_turns);
            on_disk(turns, until, work).await.unwrap_or_else(|refusal| Segment::failure(id, refusal))
        });
    }

    /// Answers a request for block content at once, or begins to wait for it.
    fn content(&mut self, request_id: u64, prepared: Result<ContentRequest, Refusal>) {
        let request = match prepared {
            Ok(request) => request,
            Err(refusal) => return self.refuse(request_id, refusal),
        };
        let wait = self.pacing.charge(request.payload_bytes());
        if wait.is_zero() && self.answer_at_once(&request) {
            return;
        }
        let (service, bytes) = (self.shared.service.clone(), request.payload_bytes() + self.memory.cost);
        let tenant = self.pacing.tenant().cloned();
        self.begin(request_id, bytes, async move {
            if let Some(tenant) = &tenant {
                tenant.counts.wait(wait).await;
            }
            service.answer(request, tenant).await
        });
    }

    /// Begins to take the payload of a write, as soon as there is memory for it. One that makes no sense, or gets no
    /// memory in time, is answered at once.
    pub(super) fn begin_upload(&mut self, request_id: u64, payload_bytes: u32, write: Result<Write, Refusal>) {
        let missing = payload_bytes as usize;
        self.pacing.charge_write(missing);
        let write = match write {
            // Not kept, as what is here already is not.
            Ok(write) if write.is_of_object() && !self.caller.peer.is_believed() => Err(kept()),
            Ok(write) => match self.budget.try_take(missing) {
                Some(memory) => Ok((write, memory)),
                None => {
                    let share = tokio::time::timeout(MEMORY_TIMEOUT, self.budget.clone().take(missing));
                    return self.hold(async move {
                        let memory = share.await.ok().and_then(Result::ok).ok_or_else(Refusal::no_memory);
                        let write = memory.map(|memory| (write, memory)).map_err(WriteReply::from);
                        Released::Payload { request_id, missing, write: Box::new(write) }
                    });
                }
            },
            Err(refusal) => Err(refusal.into()),
        };
        self.take_payload(request_id, missing, write);
    }

    /// Takes the payload of a write into memory, or throws away that of one which is answered so.
    pub(super) fn take_payload(&mut self, request_id: u64, missing: usize, write: Result<(Write, Share), WriteReply>) {
        let buffer = match write {
            Ok((write, memory)) => Some(Buffer { write, payload: BytesMut::with_capacity(missing), memory }),
            Err(reply) => {
                self.send(Segment::of(FrameKind::WriteReply, request_id, &reply));
                None
            }
        };
        self.input.upload = Some(Upload { request_id, missing, buffer });
    }

    /// Carries out a write whose payload is here.
    pub(super) fn uploaded(&mut self) {
        let Some(Upload { request_id, buffer: Some(buffer), .. }) = self.input.upload.take() else { return };
        let Buffer { mut write, payload, memory } = buffer;
        let (service, tenant) = (self.shared.service.clone(), self.pacing.tenant().cloned());
        // Its message is gone.
        self.memory.cost = REQUEST_MEMORY;
        let length = payload.len();
        let written = async move {
            if write.is_of_object() {
                let kept = service.populate(&write, payload.freeze()).await;
                drop(memory);
                return kept;
            }
            let taken = given(std::mem::replace(&mut write.room, Ok(None))).await?;
            let (turns, until) = (tenant.as_ref().map(|tenant| &tenant.disk_turns), write.until);
            let work = move || {
                let written = service.write(&write, &payload);
                drop((payload, memory, taken));
                written
            };
            on_disk(turns, until, work).await?
        };
        self.answer(request_id, length, FrameKind::WriteReply, written);
    }

    /// Room for what a request may take of the disks for a block that no file has yet.
    fn room(&self, block: Option<&BlockRef>, bytes: u64) -> ReserveResult {
        block.map_or(Ok(None), |block| self.shared.service.reserved.take(self.caller.access.client(), block, bytes))
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
            if self.socket.sends_files()
                && let Some(segment) = service.answer_by_file(request, &blocks)
            {
                self.outgoing.push(segment);
                service.count_hits(request);
                return true;
            }
            // A worker short of memory answers from a task, which can wait for some.
            let Some(memory) = self.budget.try_take(payload) else { return false };
            let write = |out: &mut FrameBuffer| service.read_at_hand(request, &blocks, out).then_some(()).ok_or(());
            if self.outgoing.append(Some(memory), write).is_err() {
                return false;
            }
        } else {
            let segment = service.open_at_hand(request, &blocks);
            self.send(segment);
        }
        service.count_hits(request);
        true
    }
}

/// The room of a request, at once or when enough has been committed.
async fn given(room: ReserveResult) -> Result<Option<Reservation>, Refusal> {
    match room {
        Ok(taken) => Ok(taken),
        Err(wanted) => Box::pin(wanted.wait()).await,
    }
}
