//! One attempt to get chunks of a block from one source.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cavern_net::workers::Attempt;
use cavern_net::{NetError, Route};
use cavern_proto::chunk::{PART_BYTES, chunk_range, part_count};
use cavern_proto::data::{self, Status};
use cavern_proto::{CHUNK_BYTES, ChunkMap};
use tokio::time::Instant;

use super::buffers::Purpose;
use super::descriptor::Descriptor;
use super::location::BlockLocation;
use super::resources::Core;
use super::span::bytes_of_chunks;
use crate::error::ClientError;
use crate::memory::Charge;
use crate::stages::Stages;

/// Chunks of one block that somebody needs.
#[derive(Clone, Debug)]
pub(super) struct ChunkRequest {
    pub at: BlockLocation,
    pub chunks: Range<u32>,
    /// All of them that is wanted from another host, if that is less, as offsets in the block: whole parts of a block
    /// of an object, anything of one of an fs-mode file.
    pub part: Option<Range<u32>>,
    pub purpose: Purpose,
}

impl ChunkRequest {
    /// Whole chunks, for a read.
    pub(super) fn new(at: BlockLocation, chunks: Range<u32>) -> Self {
        Self { at, chunks, part: None, purpose: Purpose::Read }
    }

    /// As offsets in the block.
    fn bytes(&self) -> Range<u32> {
        bytes_of_chunks(&self.chunks, self.at.length())
    }

    /// Bytes that a buffer for them may take.
    fn length(&self) -> u64 {
        match (&self.at, &self.part) {
            (BlockLocation::Replicas(_), Some(part)) => part.len() as u64,
            _ => self.bytes().len() as u64,
        }
    }

    fn range(&self) -> data::Range {
        wire_range(&self.bytes())
    }

    /// The parts that are wanted, if an answer has them in place of the chunks.
    fn parts_of(&self, item: &data::read_reply::Item) -> Option<&Range<u32>> {
        self.part.as_ref().filter(|part| !item.part_crcs.is_empty() && item.part_crcs.len() == part_count(part))
    }

    fn item(&self) -> data::open_request::Item {
        data::open_request::Item { block: Some(self.at.name()), want: vec![self.range()] }
    }
}

/// What a source gave.
#[derive(Debug)]
pub(super) enum Fetched {
    /// The wanted chunks can be read through this.
    Local(Arc<Descriptor>),
    /// The bytes of exactly the wanted chunks.
    Buffer(Bytes),
    /// The bytes of exactly the wanted parts.
    Parts(Bytes),
}

impl Core {
    /// Tries one worker, over whatever way leads to it; of an fs-mode file only over the network. A worker that is left
    /// alone, and asked all the same, has no attempt to be counted.
    pub(super) async fn try_worker(
        &self,
        want: &ChunkRequest,
        worker: u64,
        attempt: Option<Attempt>,
        wait: Duration,
    ) -> Result<Fetched, ClientError> {
        let mut started = Instant::now();
        let route = match &want.at {
            BlockLocation::Object { .. } => self.pool.route(worker).await,
            BlockLocation::Replicas(_) => Ok(Route::Remote),
        };
        let result = match route {
            Ok(Route::Local) => self.try_local(want, worker, wait).await.map(Fetched::Local),
            Ok(Route::Remote) => match self.charge(want.length(), want.purpose, self.memory_wait()).await {
                Ok(charge) => {
                    // Waiting for memory says nothing of the worker.
                    started = Instant::now();
                    self.try_remote(want, worker, charge, wait).await
                }
                Err(error) => Err(error),
            },
            Err(error) => Err(error.into()),
        };
        let is_answered = match &result {
            Ok(_) => {
                if want.purpose == Purpose::Read {
                    self.hedge(&want.at).observe(started.elapsed());
                }
                Some(true)
            }
            Err(ClientError::Net(NetError::WorkerConnection { .. } | NetError::WorkerDeadline { .. })) => Some(false),
            Err(ClientError::Net(NetError::WorkerStatus { .. }) | ClientError::Corrupt { .. }) => Some(true),
            Err(_) => None,
        };
        match (attempt, is_answered) {
            (Some(attempt), Some(true)) => attempt.answered(),
            (Some(attempt), Some(false)) => attempt.failed(),
            // It counts as neither.
            (attempt, _) => drop(attempt),
        }
        // After that: whoever sees it counted finds the worker left alone.
        if result.is_err() && is_answered.is_some() {
            self.stats.worker_errors.inc();
        }
        result
    }

    /// Has the worker on this host make the chunks present, and gives the descriptor to read them through.
    async fn try_local(
        &self,
        want: &ChunkRequest,
        worker: u64,
        wait: Duration,
    ) -> Result<Arc<Descriptor>, ClientError> {
        let block = want.at.id();
        if let Some(known) = self.descriptors.get(&block).filter(|known| known.worker == worker) {
            if want.purpose == Purpose::Read {
                self.stats.local_fills.inc();
            }
            let reply = self.pool.fill(worker, vec![want.item()], wait).await?;
            let item = only_item(reply.items, worker)?;
            check_status(worker, item.status(), &item.message)?;
            Stages::fetched(item.fetch_us);
            if item.incarnation == known.incarnation {
                known.add(&ChunkMap::from_bytes(&item.present));
                if known.contains_all(want.chunks.clone()) {
                    return Ok(known);
                }
            }
            // Evicted and filled again: the old file does not get the new chunks.
            self.descriptors.remove(&block, &known);
        }
        if want.purpose == Purpose::Read {
            self.stats.local_opens.inc();
        }
        let (reply, mut files) = self.pool.open(worker, vec![want.item()], wait).await?;
        let item = only_item(reply.items, worker)?;
        check_status(worker, item.status(), &item.message)?;
        Stages::fetched(item.fetch_us);
        let file = files.pop().ok_or_else(|| bad_answer(worker, "the answer has no descriptor"))?;
        if item.length != want.at.length() {
            return Err(bad_answer(worker, "the block has another length than the object"));
        }
        let present = ChunkMap::from_bytes(&item.present);
        let descriptor = Arc::new(Descriptor::new(file, worker, item.incarnation, item.length, &present));
        if !descriptor.contains_all(want.chunks.clone()) {
            return Err(bad_answer(worker, "the chunks that were asked for are not present"));
        }
        self.descriptors.insert(block, descriptor.clone());
        Ok(descriptor)
    }

    /// Reads the chunks, or the parts, over the network. Those of an object are compared with its checksums; of an
    /// fs-mode file exactly what is wanted is sent, and has been compared with the checksums of what was sent.
    async fn try_remote(
        &self,
        want: &ChunkRequest,
        worker: u64,
        charge: Charge,
        wait: Duration,
    ) -> Result<Fetched, ClientError> {
        if want.purpose == Purpose::Read {
            self.stats.remote_reads.inc();
        }
        let is_of_object = want.at.is_of_object();
        let (range, part) = match &want.part {
            Some(part) if is_of_object => (want.bytes(), Some(wire_range(part))),
            Some(part) => (part.clone(), None),
            None => (want.bytes(), None),
        };
        let item = data::read_request::Item { block: Some(want.at.name()), range: Some(wire_range(&range)), part };
        let (reply, payload) = match self.pool.read(worker, vec![item], wait).await {
            Err(NetError::Corrupt { at, .. }) => {
                return Err(self.corrupt(want, worker, (range.start + at) / CHUNK_BYTES));
            }
            answer => answer?,
        };
        let item = only_item(reply.items, worker)?;
        check_status(worker, item.status(), &item.message)?;
        Stages::fetched(item.fetch_us);
        let parts = want.parts_of(&item);
        let has_checksums = !is_of_object || parts.is_some() || item.chunk_crcs.len() == want.chunks.len();
        if payload.len() != parts.unwrap_or(&range).len() || !has_checksums {
            return Err(bad_answer(worker, "the answer has fewer bytes or checksums than were asked for"));
        }
        let wrong = match parts {
            Some(parts) => {
                let mut found = payload.chunks(PART_BYTES as usize).zip(&item.part_crcs);
                let wrong = found.position(|(bytes, expected)| crc32c::crc32c(bytes) != *expected);
                wrong.map(|number| (parts.start + number as u32 * PART_BYTES) / CHUNK_BYTES)
            }
            None if is_of_object => want.chunks.clone().zip(&item.chunk_crcs).find_map(|(chunk, expected)| {
                let bytes = chunk_range(chunk, want.at.length());
                let bytes = &payload[(bytes.start - range.start) as usize..(bytes.end - range.start) as usize];
                (crc32c::crc32c(bytes) != *expected).then_some(chunk)
            }),
            None => None,
        };
        if let Some(chunk) = wrong {
            return Err(self.corrupt(want, worker, chunk));
        }
        self.stats.remote_bytes.inc_by(payload.len() as u64);
        let is_part = parts.is_some() || want.part.is_some() && !is_of_object;
        let kind = if is_part { Fetched::Parts } else { Fetched::Buffer };
        Ok(kind(charge.hold(payload)))
    }

    /// A chunk is not what its checksum says: the worker is told.
    fn corrupt(&self, want: &ChunkRequest, worker: u64, chunk: u32) -> ClientError {
        self.report_corrupt(worker, want.at.name(), vec![chunk]);
        ClientError::Corrupt { worker, block: want.at.id().to_string(), chunk }
    }

    /// Reads the chunks from the object itself.
    pub(super) async fn try_bucket(&self, want: &ChunkRequest, wait: Duration) -> Result<Bytes, ClientError> {
        let BlockLocation::Object { object, index } = &want.at else { return Err(ClientError::NoWorkers) };
        let bytes = want.bytes();
        let ufs = object.mount.ufs()?;
        let charge = self.charge(want.length(), want.purpose, wait).await?;
        self.stats.bucket_reads.inc();
        let start = u64::from(*index) * object.mount.block_size();
        let range = start + u64::from(bytes.start)..start + u64::from(bytes.end);
        let payload = if object.is_pinned {
            ufs.get_bytes_pinned(&object.key, &object.etag, range).await?
        } else {
            ufs.get_bytes(&object.key, &object.etag, range).await?
        };
        self.stats.bucket_bytes.inc_by(payload.len() as u64);
        Ok(charge.hold(payload))
    }
}

pub(crate) fn wire_range(bytes: &Range<u32>) -> data::Range {
    data::Range { offset: bytes.start, length: bytes.end - bytes.start }
}

pub(crate) fn check_status(worker: u64, status: Status, message: &str) -> Result<(), ClientError> {
    if status == Status::Ok { Ok(()) } else { Err(status_error(worker, status, message)) }
}

pub(crate) fn only_item<T>(items: Vec<T>, worker: u64) -> Result<T, ClientError> {
    items.into_iter().next().ok_or_else(|| status_error(worker, Status::BadRequest, "the answer is empty"))
}

/// A worker has answered what it cannot mean.
pub(crate) fn bad_answer(worker: u64, message: &str) -> ClientError {
    status_error(worker, Status::IoError, message)
}

pub(crate) fn status_error(worker: u64, status: Status, message: impl Into<String>) -> ClientError {
    ClientError::Net(NetError::WorkerStatus { worker, status, message: message.into() })
}
