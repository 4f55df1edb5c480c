//! Opening blocks at their workers, to read and to write, and what becomes of a replica that fails.

use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use cavern_conf::{Failpoint, backoff, host};
use cavern_net::{NetError, Route};
use cavern_proto::chunk::{chunk_count, chunk_range, chunks_touching};
use cavern_proto::data::{BlockRef, Status, WriteRequest, open_request};
use cavern_proto::{ChunkMap, ContentId};
use futures::future::join_all;
use tokio::time::Instant;

use super::block::{OpenBlock, Replica, block_name, reservation, reserve};
use super::file::FsFile;
use super::layout::LocatedBlock;
use super::state::{Known, State};
use crate::error::ClientError;
use crate::read::fetch::{bad_answer, check_status, only_item, status_error};
use crate::stages::Stage;

/// Chunks that are reserved ahead of a writer: so many times as many as are reserved already, up to 32 MiB.
const AHEAD: u32 = 3;
const AHEAD_CHUNKS: u32 = 256;

/// Whether the failure is the worker's: another one may be able to.
pub(super) fn is_worker_failure(error: &ClientError) -> bool {
    match error {
        ClientError::Net(
            NetError::WorkerConnection { .. } | NetError::WorkerDeadline { .. } | NetError::UnknownWorker(_),
        ) => true,
        ClientError::Net(NetError::WorkerStatus { status, .. }) => {
            !matches!(status, Status::BadRequest | Status::Frozen)
        }
        _ => false,
    }
}

/// What a block that is made has from its first moment on.
#[derive(Clone, Debug)]
enum InitialContent {
    Zeros,
    /// The first bytes of a block of the origin, which its worker fetches; or of one that a view has, which it has.
    Origin(BlockRef, u32),
    /// Bytes that are written over all that the origin has.
    Bytes(Bytes),
}

fn no_space(error: &ClientError) -> bool {
    matches!(error, ClientError::Net(NetError::WorkerStatus { status: Status::NoSpace, .. }))
}

impl Known {
    /// A block with room is the file's, unless its place is another one's meanwhile. `before` is what was there.
    fn take_in(&mut self, index: u32, before: Option<&LocatedBlock>, made: &Arc<OpenBlock>, failed: &[u64]) {
        let layout = &mut self.layout;
        match before {
            Some(before) if before.generation == made.generation => layout.gave_up(index, before.generation, failed),
            Some(frozen) => {
                if !layout.replaced(index, frozen.generation, made, host::wall_ns()) {
                    return;
                }
            }
            None if layout.block(index).is_none() && layout.takes(made.generation) => {
                layout.made(index, made.generation, made.workers());
            }
            // Somebody else has made it meanwhile, or has cut the file.
            None => return,
        }
        if layout.block(index).is_some_and(|known| known.is_at(made.generation, &made.replicas)) {
            self.blocks.insert(index, made.clone());
        }
    }
}

impl FsFile {
    pub(super) fn name_of(&self, index: u32, generation: u32) -> BlockRef {
        block_name(&self.shared.pool, &self.mount, (self.inode, generation, index))
    }

    /// A block to read from; `None` for a hole. Workers that cannot be reached now are asked again until the deadline.
    pub(super) async fn block_to_read(
        &self,
        index: u32,
        deadline: Instant,
    ) -> Result<Option<Arc<OpenBlock>>, ClientError> {
        loop {
            let opened = self.open_to_read(index).await;
            let may_go_better = opened.as_ref().is_err_and(ClientError::is_transient_at_worker);
            if !may_go_better || !backoff::BLOCK.begin().wait_before(deadline).await {
                return opened;
            }
        }
    }

    pub(super) async fn open_to_read(&self, index: u32) -> Result<Option<Arc<OpenBlock>>, ClientError> {
        let look = |known: &mut Known| match known.blocks.get(&index) {
            Some(open) => (Some(open.clone()), None),
            None => (None, known.layout.block(index).cloned()),
        };
        let known = match self.use_known(look).await? {
            (Some(open), _) => return Ok(Some(open)),
            (None, None) => return Ok(None),
            (None, Some(known)) => known,
        };
        let name = self.name_of(index, known.generation);
        let (mut replicas, mut failure): (Vec<Replica>, _) = (Vec::new(), None);
        for (worker, joined) in self.reachable_first(&known) {
            // One descriptor will do.
            if replicas.iter().any(|replica| replica.file.is_some()) {
                replicas.push(Replica { worker, joined, incarnation: 0, file: None, allocated: None });
                continue;
            }
            match self.asking(worker, self.open_replica(worker, &name)).await {
                Ok(replica) => replicas.push(Replica { joined, ..replica }),
                Err(error) => failure = Some(error),
            }
        }
        if replicas.is_empty() {
            let none = || ClientError::Invalid(format!("block {index} of inode {} has no worker", self.inode));
            return Err(self.unavailable_if_lost(index, failure.unwrap_or_else(none)));
        }
        let open = Arc::new(OpenBlock::to_read(name, known.generation, replicas));
        self.remember(index, &open);
        Ok(Some(open))
    }

    /// The replicas of a block; those whose workers failed lately come last.
    fn reachable_first(&self, known: &LocatedBlock) -> Vec<(u64, u32)> {
        let mut replicas: Vec<(u64, u32)> = known.replicas().collect();
        replicas.sort_by_key(|(worker, _)| self.shared.pool.rests(*worker));
        replicas
    }

    /// Asks a worker, and remembers whether it answered: while there are others, one that did not is left alone for a
    /// while.
    pub(super) async fn asking<T, E: Into<ClientError>>(
        &self,
        worker: u64,
        answer: impl Future<Output = Result<T, E>>,
    ) -> Result<T, ClientError> {
        let attempt = self.shared.pool.admit(worker);
        let answer = answer.await.map_err(Into::into);
        if let Some(attempt) = attempt {
            match &answer {
                Err(ClientError::Net(NetError::WorkerConnection { .. } | NetError::WorkerDeadline { .. })) => {
                    attempt.failed();
                }
                _ => attempt.answered(),
            }
        }
        answer
    }

    /// A failure of the workers of a block, or that all of them are lost, if that is so.
    pub(super) fn unavailable_if_lost(&self, index: u32, failure: ClientError) -> ClientError {
        if !is_worker_failure(&failure) {
            return failure;
        }
        let known = self.state.lock().layout().and_then(|layout| layout.block(index).cloned());
        match known.filter(|known| self.is_lost(known)) {
            Some(known) => ClientError::Unavailable { inode: self.inode, index, workers: known.workers },
            None => failure,
        }
    }

    /// Whether all workers of a block are lost.
    pub(super) fn is_lost(&self, known: &LocatedBlock) -> bool {
        let placement = self.shared.pool.placement();
        !known.workers.iter().any(|worker| placement.is_live(*worker))
    }

    async fn open_replica(&self, worker: u64, name: &BlockRef) -> Result<Replica, ClientError> {
        let _worker = match self.shared.pool.known_route(worker) {
            Route::Local => Stage::Descriptor.begin(),
            Route::Remote => Stage::Network.begin(),
        };
        if self.shared.pool.route(worker).await? == Route::Remote {
            return Ok(Replica { worker, joined: 0, incarnation: 0, file: None, allocated: None });
        }
        self.shared.stats.local_opens.inc();
        let item = open_request::Item { block: Some(name.clone()), want: Vec::new() };
        let (reply, files) = self.shared.pool.open(worker, vec![item], self.shared.worker_timeout()).await?;
        let item = only_item(reply.items, worker)?;
        check_status(worker, item.status(), &item.message)?;
        let file = files.into_iter().next().ok_or_else(|| bad_answer(worker, "the answer has no descriptor"))?;
        let file = Some(Arc::new(File::from(file)));
        Ok(Replica { worker, joined: 0, incarnation: item.incarnation, file, allocated: None })
    }

    /// A block with room for bytes at each of its workers, made where it is not there yet. `written` is what is about
    /// to be written to all of the range, if anything is.
    pub(super) async fn block_to_write(
        &self,
        index: u32,
        bytes: &Range<u32>,
        written: Option<&Bytes>,
    ) -> Result<Arc<OpenBlock>, ClientError> {
        let held = || ClientError::BlockHeld { inode: self.inode, index };
        self.pin_blocks().await?;
        // One that is open with room is not written to either while it is copied: the copy would be of no use.
        let open = |known: &mut Known| {
            if known.layout.block(index).is_some_and(|known| known.is_joined) {
                return Err(held());
            }
            let is_fit = |open: &&Arc<OpenBlock>| self.may_write_to(open, bytes) && !self.is_frozen(open.generation);
            Ok(known.blocks.get(&index).filter(is_fit).cloned())
        };
        if let Some(open) = self.use_known(open).await?? {
            return Ok(open);
        }
        self.commit_frozen(index).await?;
        let _one = self.turns.opening.lock().await;
        let granted = |known: &mut Known| {
            let granted = self.use_preallocated(known, index, bytes);
            if self.is_frozen(known.layout.next_generation()) {
                known.layout.makes_from(self.mount.frozen_below());
            }
            let (located, open) = (known.layout.block(index).cloned(), known.blocks.get(&index).cloned());
            let is_frozen = located.as_ref().is_some_and(|located| self.is_frozen(located.generation));
            (granted, located, open.filter(|_| !is_frozen), is_frozen, known.layout.next_generation())
        };
        let (granted, known, open, is_frozen, generation) = self.use_known(granted).await?;
        if let Some(open) = granted.or_else(|| open.clone().filter(|open| self.may_write_to(open, bytes))) {
            return Ok(open);
        }
        if known.as_ref().is_some_and(|known| known.is_joined || is_frozen && !known.is_committed) {
            return Err(held());
        }
        if (is_frozen || known.is_none()) && self.awaits_others() {
            return Err(held());
        }
        let known_reserved = open.as_ref().filter(|open| open.is_reserved()).map(|open| open.reserved.lock().clone());
        let generous = self.with_room_ahead(bytes, known_reserved.as_ref());
        let since = Instant::now();
        let (mut made, failed) = match &known {
            Some(frozen) if is_frozen => (self.replace(index, frozen, generation, bytes).await?, Vec::new()),
            Some(known) => {
                let name = self.name_of(index, known.generation);
                let is_known = open.filter(|open| open.is_writable && known.is_at(open.generation, &open.replicas));
                match self.reserve_all(&name, known, is_known.as_deref(), &generous).await {
                    Err(error) if no_space(&error) && generous != *bytes => {
                        self.reserve_all(&name, known, is_known.as_deref(), bytes).await
                    }
                    made => made,
                }?
            }
            None => {
                let made = self.make(index, generation, bytes, written).await?;
                if index == 0 && generation == 0 {
                    self.shared.prealloc.used(self.mount.id());
                }
                (made, Vec::new())
            }
        };
        if let Some(before) = known_reserved {
            let mut now = made.reserved.lock();
            for chunk in before.iter() {
                now.insert(chunk);
            }
        }
        made.since = since;
        Failpoint::BlockReserved.pass();
        let made = Arc::new(made);
        // Others find it before they may make another in its place, or it is not the file's.
        let _in_place = self.turns.in_place.read().await;
        if known.is_none() && self.is_frozen(made.generation) {
            return Err(held());
        }
        self.use_known(|now| now.take_in(index, known.as_ref(), &made, &failed)).await?;
        Ok(made)
    }

    /// Whether an open block has room for bytes, and may be written to without asking its workers. They know what views
    /// have frozen, and so does this client as long as its lease lives.
    fn may_write_to(&self, open: &OpenBlock, bytes: &Range<u32>) -> bool {
        open.has_room(bytes) && (self.kept.is_watched() || open.file().is_none())
    }

    /// The block that was asked for before the file was made, if this is the first that is written to it, and fits.
    pub(super) fn use_preallocated(&self, known: &mut Known, index: u32, bytes: &Range<u32>) -> Option<Arc<OpenBlock>> {
        let Known { layout, blocks, granted, .. } = known;
        let is_first = index == 0 && layout.generation() == 0 && layout.block(0).is_none() && layout.origin().is_none();
        if !is_first || self.is_frozen(0) {
            return None;
        }
        let granted = Arc::new(granted.take_if(|granted| granted.has_room(bytes))?);
        layout.made(0, 0, granted.workers());
        blocks.insert(0, granted.clone());
        self.shared.prealloc.used(self.mount.id());
        Failpoint::BlockReserved.pass();
        Some(granted)
    }

    /// A multiple of what a writer has reserved already, so that a stream asks ever more rarely.
    fn with_room_ahead(&self, bytes: &Range<u32>, reserved: Option<&ChunkMap>) -> Range<u32> {
        let length = self.block_length();
        let touched = chunks_touching(bytes.start, bytes.len() as u32);
        let ahead = reserved.map_or(0, |reserved| (AHEAD * reserved.count()).min(AHEAD_CHUNKS));
        let last = (touched.end + ahead).min(chunk_count(length)).max(1) - 1;
        bytes.start..chunk_range(last, length).end.max(bytes.end)
    }

    pub(super) fn block_length(&self) -> u32 {
        u32::try_from(self.block_size()).unwrap_or(u32::MAX)
    }

    /// Makes a block of which the master knows nothing, at the workers that placement names, or at the next ones.
    async fn make(
        &self,
        index: u32,
        generation: u32,
        bytes: &Range<u32>,
        written: Option<&Bytes>,
    ) -> Result<OpenBlock, ClientError> {
        let beginning = match (self.origin_of(index).await?, written) {
            (None, _) => InitialContent::Zeros,
            // Nothing of it would be left.
            (Some((_, length)), Some(written)) if bytes.start == 0 && bytes.end >= length => {
                InitialContent::Bytes(written.clone())
            }
            (Some((block, length)), _) => InitialContent::Origin(block, length),
        };
        let name = self.name_of(index, generation);
        let content = ContentId::from_slice(&name.content_id).unwrap_or_else(|| unreachable!("it was made above"));
        let wanted = self.mount.replicas();
        let mut candidates = self.shared.pool.placement().ranked(content, index);
        candidates.sort_by_key(|worker| self.shared.pool.rests(*worker));
        let (mut replicas, mut failure) = (Vec::new(), None);
        for worker in candidates {
            // A worker that rests may take long not to answer. The master sees to what is lacking.
            if replicas.len() == wanted || (!replicas.is_empty() && self.shared.pool.rests(worker)) {
                break;
            }
            match self.asking(worker, self.begin(worker, &name, bytes, &beginning)).await {
                Ok(replica) => replicas.push(replica),
                // No other will find in the bucket what is not there.
                Err(error) if is_worker_failure(&error) && !error.is_version_gone() => {
                    tracing::debug!(inode = self.inode, index, "a block goes to another worker: {error}");
                    // That there is no room is what the writer can wait for.
                    failure = failure.filter(no_space).or(Some(error));
                }
                Err(error) => return Err(error),
            }
        }
        if replicas.is_empty() {
            return Err(failure.unwrap_or(ClientError::NoWorkers));
        }
        Ok(OpenBlock::to_write(name, generation, replicas, bytes))
    }

    /// What a view has is known to the master as it is here, before another block takes its place.
    async fn commit_frozen(&self, index: u32) -> Result<(), ClientError> {
        let is_due = |known: &mut Known| {
            let block = known.layout.block(index);
            block.is_some_and(|block| !block.is_committed && self.is_frozen(block.generation))
        };
        if self.use_known(is_due).await? { self.commit_written().await } else { Ok(()) }
    }

    /// Makes a block in the place of one that a view has, with what that has, at each of its workers. Those that fail
    /// are left out, unless all do.
    async fn replace(
        &self,
        index: u32,
        frozen: &LocatedBlock,
        generation: u32,
        bytes: &Range<u32>,
    ) -> Result<OpenBlock, ClientError> {
        let (name, before) = (self.name_of(index, generation), self.name_of(index, frozen.generation));
        let beginning = InitialContent::Origin(before, self.block_length());
        let begun = frozen.replicas().map(|(worker, joined)| {
            let begun = self.asking(worker, self.begin(worker, &name, bytes, &beginning));
            async move { (worker, joined, begun.await) }
        });
        let (mut replicas, mut failure) = (Vec::new(), None);
        for (worker, joined, begun) in join_all(begun).await {
            match begun {
                Ok(replica) => replicas.push(Replica { joined, ..replica }),
                // All have the same bytes to store: the writer waits, or gets the error.
                Err(error) if is_worker_failure(&error) && !no_space(&error) => {
                    tracing::debug!(inode = self.inode, index, worker, "a frozen block is not copied: {error}");
                    failure = Some(error);
                }
                Err(error) => return Err(error),
            }
        }
        match failure {
            Some(error) if replicas.is_empty() => Err(error),
            _ => Ok(OpenBlock::to_write(name, generation, replicas, bytes)),
        }
    }

    /// Reserves at every worker of a block that is there. Workers that fail are left out, and named, unless all do.
    async fn reserve_all(
        &self,
        name: &BlockRef,
        block: &LocatedBlock,
        open: Option<&OpenBlock>,
        bytes: &Range<u32>,
    ) -> Result<(OpenBlock, Vec<u64>), ClientError> {
        let (mut replicas, mut failed, mut failure) = (Vec::new(), Vec::new(), None);
        for (worker, joined) in block.replicas() {
            let known = open.and_then(|open| open.replicas.iter().find(|replica| replica.worker == worker));
            let incarnation = known.map(|known| known.incarnation);
            match self.asking(worker, self.reserve_existing(worker, incarnation, name, bytes)).await {
                Ok(replica) => replicas.push(Replica { joined, ..replica }),
                // All have the same bytes to store: the writer waits, or gets the error.
                Err(error) if no_space(&error) => return Err(error),
                Err(error) if is_worker_failure(&error) => {
                    tracing::debug!(inode = self.inode, index = name.index, worker, "a replica fails: {error}");
                    failed.push(worker);
                    failure = Some(error);
                }
                Err(error) => return Err(error),
            }
        }
        match failure {
            Some(error) if replicas.is_empty() => Err(error),
            _ => Ok((OpenBlock::to_write(name.clone(), block.generation, replicas, bytes), failed)),
        }
    }

    /// Reserves in a block that must be there, in the file of this incarnation if that is known: one that is made anew
    /// by the request has lost what the file had.
    async fn reserve_existing(
        &self,
        worker: u64,
        incarnation: Option<u64>,
        name: &BlockRef,
        bytes: &Range<u32>,
    ) -> Result<Replica, ClientError> {
        let pool = &self.shared.pool;
        let lost = || self.lost(worker, name.index);
        let before = match incarnation {
            Some(incarnation) => incarnation,
            None => {
                let reply = pool.query(worker, vec![name.clone()]).await?;
                reply.items.first().filter(|item| item.known).map(|item| item.incarnation).ok_or_else(lost)?
            }
        };
        let replica = reserve(pool, worker, reservation(name, bytes), self.shared.worker_timeout()).await?;
        if replica.incarnation == before { Ok(replica) } else { Err(lost()) }
    }

    /// The worker has another file under the name of a block: what the file had is gone there.
    pub(super) fn lost(&self, worker: u64, index: u32) -> ClientError {
        let message = format!("it has lost block {index} of inode {}", self.inode);
        status_error(worker, Status::NoSuchBlock, message)
    }

    /// Reserves in a block that need not be there yet.
    async fn begin(
        &self,
        worker: u64,
        name: &BlockRef,
        bytes: &Range<u32>,
        beginning: &InitialContent,
    ) -> Result<Replica, ClientError> {
        let mut request = reservation(name, bytes);
        let mut wait = self.shared.worker_timeout();
        match beginning {
            InitialContent::Zeros => {}
            InitialContent::Origin(origin, length) => {
                (request.origin, request.origin_bytes) = (Some(origin.clone()), *length);
                // What the bucket has must be fetched first.
                wait = self.shared.timeout();
            }
            // A block without the bytes would be found by the next who writes there, should this client die now.
            InitialContent::Bytes(written) => {
                let write = WriteRequest { block: Some(name.clone()), begins: true, ..WriteRequest::default() };
                self.shared.pool.write(worker, write, written.clone(), wait).await?;
            }
        }
        reserve(&self.shared.pool, worker, request, wait).await
    }

    fn remember(&self, index: u32, open: &Arc<OpenBlock>) {
        if let Some(Known { layout, blocks, .. }) = &mut self.state.lock().known
            && layout.block(index).is_some_and(|known| known.generation == open.generation)
        {
            blocks.entry(index).or_insert_with(|| open.clone());
        }
    }

    /// Goes on without the replicas of a block that have failed. That must be committed before a write is acknowledged.
    pub(super) fn give_up_replicas(&self, index: u32, generation: u32, failed: &[u64]) {
        tracing::warn!(inode = self.inode, index, ?failed, "writing goes on with fewer replicas");
        let mut state = self.state.lock();
        let State { known: Some(Known { layout, blocks, .. }), .. } = &mut *state else { return };
        layout.gave_up(index, generation, failed);
        let Some(open) = blocks.get(&index).filter(|open| open.generation == generation).cloned() else { return };
        let left: Vec<Replica> =
            open.replicas.iter().filter(|replica| !failed.contains(&replica.worker)).cloned().collect();
        if layout.block(index).is_some_and(|known| known.is_at(generation, &left)) {
            blocks.insert(index, Arc::new(open.with_replicas(left)));
        } else {
            // Somebody else has given up others: it is opened anew.
            blocks.remove(&index);
        }
    }
}
