//! What a connection does with each kind of frame: one function for one kind.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use cavern_proto::data::{
    BlockRef, Cancel, CopyRequest, CorruptRequest, Failure, FillRequest, FreeRequest, Hello, OpenRequest,
    PersistRequest, QueryRequest, ReadRequest, ReserveRequest, Status, SyncRequest, WriteRequest,
};
use cavern_proto::frame::{FrameHeader, FrameKind, PROTOCOL_VERSION};
use prost::Message;
use tokio::time::Instant;

use super::{Connection, REQUEST_MEMORY, decode};
use crate::request_error::Refusal;
use crate::reserved::{Room, Taken};
use crate::server::block_access::OfBlocks;
use crate::server::limits::on_disk;
use crate::server::outgoing::{PassedFile, Segment};
use crate::server::requests::{ContentRequest, MAX_INFLIGHT_BYTES, Service, deadline_of};
use crate::server::roles;
use crate::server::upload::{PayloadState, Upload};
use crate::server::writes::{PeerLocality, Write, not_kept, refused_reserve, refused_write};

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
            return self.deny(header, refusal);
        }
        if roles::is_order(header.kind)
            && let Some(term) = self.caller.term.filter(|term| self.shared.membership.is_over(*term))
        {
            let message = format!("the master of term {term} leads no more");
            self.refuse(header.request_id, &Refusal::new(Status::Deposed, message));
            return Ok(());
        }
        match header.kind {
            FrameKind::Hello => self.greet(header.request_id, &decode::<Hello>(message)?),
            FrameKind::Read => self.on(header, message, Self::read),
            FrameKind::Open => self.on(header, message, Self::open),
            FrameKind::Fill => self.on(header, message, Self::fill),
            FrameKind::Query => self.on(header, message, Self::query),
            FrameKind::Free => self.free(header, decode::<FreeRequest>(message)?),
            FrameKind::Corrupt => self.on(header, message, Self::corrupt),
            FrameKind::Reserve => self.on(header, message, Self::reserve),
            FrameKind::Write => self.on(header, message, Self::write),
            FrameKind::Sync => match self.permitted::<SyncRequest>(header, message)? {
                Some(request) => self.sync(header, request),
                None => Ok(()),
            },
            FrameKind::Persist => {
                self.persist(header, decode::<PersistRequest>(message)?);
                Ok(())
            }
            FrameKind::Copy => {
                self.copy(header, decode::<CopyRequest>(message)?);
                Ok(())
            }
            FrameKind::Cancel => {
                if let Some(task) = self.waits_no_more(decode::<Cancel>(message)?.request_id) {
                    task.abort();
                }
                Ok(())
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
            | FrameKind::Failure => Err(Refusal::bad_request("a client sends requests, not answers")),
        }
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
        if hello.term != 0 && self.caller.peer.may_lead() {
            self.shared.membership.heard_of(hello.term);
            self.caller.term = Some(hello.term);
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

    /// Does what a request asks for, if this peer may ask for it.
    ///
    /// # Errors
    /// The frame is malformed.
    fn on<R: OfBlocks + Message + Default>(
        &mut self,
        header: &FrameHeader,
        message: Bytes,
        act: impl FnOnce(&mut Self, &FrameHeader, R),
    ) -> Result<(), Refusal> {
        if let Some(request) = self.permitted(header, message)? {
            act(self, header, request);
        }
        Ok(())
    }

    fn read(&mut self, header: &FrameHeader, request: ReadRequest) {
        let prepared = self.shared.service.prepare_read(header.request_id, request);
        self.content(header.request_id, prepared);
    }

    fn open(&mut self, header: &FrameHeader, request: OpenRequest) {
        let prepared = if self.socket.passes_descriptors() {
            self.shared.service.prepare_open(header.request_id, request)
        } else {
            Err(Refusal::bad_request("descriptors are handed out over the Unix socket only"))
        };
        self.content(header.request_id, prepared);
    }

    fn fill(&mut self, header: &FrameHeader, request: FillRequest) {
        let prepared = self.shared.service.prepare_fill(header.request_id, request);
        self.content(header.request_id, prepared);
    }

    fn query(&mut self, header: &FrameHeader, request: QueryRequest) {
        let with_paths = self.caller.peer.may_see_paths();
        self.look_up(header, move |service, id| {
            Segment::of(FrameKind::QueryReply, id, &service.query(request, with_paths))
        });
    }

    fn free(&mut self, header: &FrameHeader, request: FreeRequest) -> Result<(), Refusal> {
        if let Err(refusal) = self.caller.peer.check_free(&request) {
            return self.deny(header, refusal);
        }
        if self.shared.admission.audit.is_on() {
            self.audit(header.kind, &format!("{} blocks", request.blocks.len()), Ok(()), 0);
        }
        self.look_up(header, move |service, id| Segment::of(FrameKind::FreeReply, id, &service.free(request)));
        Ok(())
    }

    fn corrupt(&mut self, header: &FrameHeader, request: CorruptRequest) {
        self.look_up(header, move |service, id| Segment::of(FrameKind::CorruptReply, id, &service.corrupt(request)));
    }

    fn reserve(&mut self, header: &FrameHeader, request: ReserveRequest) {
        let (id, cost, service) = (header.request_id, self.memory.cost, self.shared.service.clone());
        let asker = if self.socket.passes_descriptors() { PeerLocality::SameHost } else { PeerLocality::Elsewhere };
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
                self.wait_for(id, cost, patience, move || reserve(&service, request, taken));
            }
            room => self.begin(id, cost, async move {
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

    fn write(&mut self, header: &FrameHeader, request: WriteRequest) {
        let room = self.room(request.block.as_ref(), u64::from(header.payload_bytes));
        let write = Write::parse(request, header.payload_bytes).map(|write| write.within(room));
        self.begin_upload(header.request_id, header.payload_bytes, write);
    }

    fn sync(&mut self, header: &FrameHeader, request: SyncRequest) -> Result<(), Refusal> {
        if let Err(refusal) = self.caller.peer.check_sync(&request) {
            return self.deny(header, refusal);
        }
        let (id, service, tenant) = (header.request_id, self.shared.service.clone(), self.pacing.tenant().cloned());
        let answer = async move { Segment::of(FrameKind::SyncReply, id, &service.sync(request, tenant).await) };
        self.begin(id, self.memory.cost, answer);
        Ok(())
    }

    fn persist(&mut self, header: &FrameHeader, request: PersistRequest) {
        let (id, uploads) = (header.request_id, self.shared.service.uploads.clone());
        let answer = async move { Segment::of(FrameKind::PersistReply, id, &uploads.persist(request).await) };
        self.begin(id, self.memory.cost, answer);
    }

    fn copy(&mut self, header: &FrameHeader, request: CopyRequest) {
        let (id, uploads) = (header.request_id, self.shared.service.uploads.clone());
        let answer = async move { Segment::of(FrameKind::CopyReply, id, &uploads.copy(request).await) };
        self.begin(id, self.memory.cost, answer);
    }

    /// Answers a request about blocks that names no deadline, on a thread that may wait for the disk.
    fn look_up(&mut self, header: &FrameHeader, work: impl FnOnce(&Service, u64) -> Segment + Send + 'static) {
        let (id, service) = (header.request_id, self.shared.service.clone());
        self.wait_for(id, self.memory.cost, deadline_of(0), move || work(&service, id));
    }

    /// Answers a request for block content at once, or begins to wait for it.
    fn content(&mut self, request_id: u64, prepared: Result<ContentRequest, Refusal>) {
        let request = match prepared {
            Ok(request) => request,
            Err(refusal) => return self.refuse(request_id, &refusal),
        };
        let wait = self.pacing.charge(request.payload_bytes());
        if wait.is_zero() && self.answer_at_once(&request) {
            return;
        }
        let (service, bytes) = (self.shared.service.clone(), request.payload_bytes() + self.memory.cost);
        let tenant = self.pacing.tenant().cloned();
        self.begin(request_id, bytes, async move {
            if let Some(tenant) = tenant.as_ref().filter(|_| !wait.is_zero()) {
                tokio::time::sleep(wait).await;
                tenant.counts.add_wait(wait);
            }
            service.answer(request, tenant).await
        });
    }

    /// Begins to take the payload of a write, as soon as there is memory for it.
    pub(super) fn begin_upload(&mut self, request_id: u64, payload_bytes: u32, write: Result<Write, Refusal>) {
        let missing = payload_bytes as usize;
        self.pacing.charge_write(missing);
        let fate = match write {
            Ok(write) if write.is_of_object() && !self.caller.peer.is_believed() => {
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
        self.input.upload = Some(Upload { request_id, missing, fate });
    }

    /// Carries out a write whose payload is here.
    pub(super) fn uploaded(&mut self) {
        let Some(Upload { request_id, fate: PayloadState::Buffered { mut write, payload, memory }, .. }) =
            self.input.upload.take()
        else {
            return;
        };
        let (service, tenant) = (self.shared.service.clone(), self.pacing.tenant().cloned());
        // Its message is gone.
        self.memory.cost = REQUEST_MEMORY;
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
        block.map_or(Ok(None), |block| self.shared.reserved.take(self.caller.access.client(), block, bytes))
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
}

/// The room of a request, at once or when enough has been committed.
async fn given(room: Room) -> Result<Option<Taken>, Refusal> {
    match room {
        Ok(taken) => Ok(taken),
        Err(wanted) => wanted.wait().await,
    }
}
