//! What a leader has workers do, over the data plane: fill blocks, write objects, free and copy blocks. One that does
//! not know any more that it leads has nothing written, freed or copied: its successor may have decided otherwise.

use std::sync::Arc;
use std::time::Duration;

use cavern_consensus::LeaderLease;
use cavern_net::{NetError, Placement, WorkerPool};
use cavern_proto::ChunkMap;
use cavern_proto::chunk::chunk_range;
use cavern_proto::data::{
    self, BlockRef, CopyRequest, InspectReply, InspectRequest, PersistReply, PersistRequest, open_request, query_reply,
};
use cavern_proto::master::Worker;
use futures::future::BoxFuture;

use super::Workers;
use crate::error::WorkError;

/// For one request to fill: its bytes at a rate that any bucket reaches, retries of the worker included.
const FILL_TIMEOUT: Duration = Duration::from_secs(120);
/// For an object: so long, and so long for each MiB, slower than any bucket is.
const OBJECT_TIMEOUT: Duration = Duration::from_secs(120);
const MIB_TIMEOUT: Duration = Duration::from_secs(2);

/// For one request to say what a worker has: tens of MiB of a disk and of a bucket are read for it, or a master is
/// asked for what the worker is to have.
const INSPECT_TIMEOUT: Duration = Duration::from_secs(300);

/// What became of one block.
pub enum Filled {
    /// Present now; so many bytes of it came from the bucket.
    Present {
        fetched_bytes: u64,
    },
    Failed {
        reason: String,
        failure: Failure,
    },
}

/// What to do about a block that was not filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Another attempt may help.
    Transient,
    /// The bucket has another version of the object, or none.
    Replaced,
    /// Another attempt does not help.
    Final,
}

/// Has workers fill blocks, and asks what they have of them; tests have their own.
pub trait BlockFiller: Send + Sync + 'static {
    /// The live workers, for placement.
    fn placement(&self) -> Result<Arc<Placement>, WorkError>;

    /// Has a worker fill blocks; one result per block, in order. An error is about the worker: another try may help.
    fn fill(&self, worker: u64, items: Vec<open_request::Item>) -> BoxFuture<'_, Result<Vec<Filled>, String>>;

    /// Bytes that a worker has of each of these blocks of objects, in order.
    fn cached(&self, worker: u64, blocks: Vec<BlockRef>) -> BoxFuture<'_, Result<Vec<u64>, String>>;
}

/// Has workers write objects, and free and copy blocks; tests have their own.
pub trait ObjectWriter: Send + Sync + 'static {
    /// The workers, live and lost.
    fn placement(&self) -> Result<Arc<Placement>, WorkError>;

    /// All workers, with what their last heartbeats said.
    fn reported(&self) -> Result<Vec<Worker>, WorkError>;

    /// Has a worker write an object. An error is about the worker: nothing is known of the object then.
    fn persist(&self, worker: u64, request: PersistRequest) -> BoxFuture<'_, Result<PersistReply, String>>;

    /// How long after it was begun the write of a worker that went away may still become an object.
    fn arrives_within(&self) -> Duration {
        Duration::from_secs(5)
    }

    /// Has a worker free blocks for good.
    fn free(&self, worker: u64, blocks: Vec<BlockRef>) -> BoxFuture<'_, Result<(), String>>;

    /// Whether a worker has each of these blocks.
    fn has(&self, worker: u64, blocks: Vec<BlockRef>) -> BoxFuture<'_, Result<Vec<bool>, String>>;

    /// Has a worker make a copy of a block of another.
    fn copy(&self, worker: u64, request: CopyRequest, within: Duration) -> BoxFuture<'_, Result<(), String>>;

    /// What a worker has; one item per block.
    fn inspect(&self, worker: u64, request: InspectRequest) -> BoxFuture<'_, Result<InspectReply, String>>;
}

/// The workers over the data plane.
pub struct PooledWorkers {
    pub pool: Arc<WorkerPool>,
    pub workers: Arc<Workers>,
    pub cluster_id: String,
    pub lease: LeaderLease,
}

impl BlockFiller for PooledWorkers {
    fn placement(&self) -> Result<Arc<Placement>, WorkError> {
        let table = self.workers.table()?;
        if table.epoch != self.pool.placement().epoch() {
            self.pool.set_table(&self.cluster_id, &table);
        }
        Ok(self.pool.placement())
    }

    fn fill(&self, worker: u64, items: Vec<open_request::Item>) -> BoxFuture<'_, Result<Vec<Filled>, String>> {
        Box::pin(async move {
            let reply = self.pool.fill(worker, items, FILL_TIMEOUT).await.map_err(|error| error.to_string())?;
            Ok(reply.items.into_iter().map(outcome).collect())
        })
    }

    fn cached(&self, worker: u64, blocks: Vec<BlockRef>) -> BoxFuture<'_, Result<Vec<u64>, String>> {
        Box::pin(async move { Ok(self.query(worker, blocks).await?.iter().map(present_bytes).collect()) })
    }
}

impl PooledWorkers {
    /// What a worker has of blocks: an answer for each.
    async fn query(&self, worker: u64, blocks: Vec<BlockRef>) -> Result<Vec<query_reply::Item>, String> {
        let count = blocks.len();
        let reply = self.pool.query(worker, blocks).await.map_err(|error| error.to_string())?;
        match reply.items.len() == count {
            true => Ok(reply.items),
            false => Err(format!("worker {worker} answered another question")),
        }
    }

    /// Does it if this master leads.
    async fn do_as_leader<T>(&self, work: impl Future<Output = Result<T, NetError>>) -> Result<T, String> {
        self.lease.check().map_err(|error| error.to_string())?;
        work.await.map_err(|error| error.to_string())
    }
}

impl ObjectWriter for PooledWorkers {
    fn placement(&self) -> Result<Arc<Placement>, WorkError> {
        BlockFiller::placement(self)
    }

    fn reported(&self) -> Result<Vec<Worker>, WorkError> {
        Ok(self.workers.table()?.workers)
    }

    fn persist(&self, worker: u64, request: PersistRequest) -> BoxFuture<'_, Result<PersistReply, String>> {
        Box::pin(async move {
            let mib = u32::try_from(request.length >> 20).unwrap_or(u32::MAX);
            let deadline = OBJECT_TIMEOUT.saturating_add(MIB_TIMEOUT.saturating_mul(mib));
            self.do_as_leader(self.pool.persist(worker, request, deadline)).await
        })
    }

    fn free(&self, worker: u64, blocks: Vec<BlockRef>) -> BoxFuture<'_, Result<(), String>> {
        Box::pin(async move { self.do_as_leader(self.pool.free(worker, blocks)).await.map(drop) })
    }

    fn has(&self, worker: u64, blocks: Vec<BlockRef>) -> BoxFuture<'_, Result<Vec<bool>, String>> {
        Box::pin(async move { Ok(self.query(worker, blocks).await?.into_iter().map(|item| item.known).collect()) })
    }

    fn copy(&self, worker: u64, request: CopyRequest, within: Duration) -> BoxFuture<'_, Result<(), String>> {
        Box::pin(self.do_as_leader(self.pool.copy(worker, request, within)))
    }

    fn inspect(&self, worker: u64, request: InspectRequest) -> BoxFuture<'_, Result<InspectReply, String>> {
        Box::pin(self.do_as_leader(self.pool.inspect(worker, request, INSPECT_TIMEOUT)))
    }
}

/// Bytes of the chunks of a block that are there.
fn present_bytes(item: &query_reply::Item) -> u64 {
    ChunkMap::from_bytes(&item.present).iter().map(|chunk| chunk_range(chunk, item.length).len() as u64).sum()
}

fn outcome(item: data::open_reply::Item) -> Filled {
    let failure = match item.status() {
        data::Status::Ok => return Filled::Present { fetched_bytes: item.fetched_bytes },
        data::Status::NotFound | data::Status::VersionChanged => Failure::Replaced,
        data::Status::Denied => Failure::Final,
        _ => Failure::Transient,
    };
    let reason = if item.message.is_empty() { item.status().as_str_name().to_owned() } else { item.message };
    Filled::Failed { reason, failure }
}

#[cfg(test)]
mod tests {
    use cavern_proto::CHUNK_BYTES;

    use super::*;

    #[test]
    fn the_last_chunk_of_a_block_counts_with_the_bytes_that_it_has() {
        let item = |present: &[u8], length| query_reply::Item {
            known: true,
            present: present.to_vec().into(),
            length,
            ..query_reply::Item::default()
        };
        let (chunk, length) = (u64::from(CHUNK_BYTES), 2 * CHUNK_BYTES + 77);
        assert_eq!(present_bytes(&item(&[0b101], length)), chunk + 77);
        assert_eq!(present_bytes(&item(&[0b011], length)), 2 * chunk);
        assert_eq!(present_bytes(&item(&[], length)), 0);
        // What lies behind the end of the block is nothing.
        assert_eq!(present_bytes(&item(&[0xff], length)), 2 * chunk + 77);
    }
}
