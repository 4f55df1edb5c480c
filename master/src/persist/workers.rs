//! The way to the workers.

use std::sync::Arc;
use std::time::Duration;

use cavern_net::Placement;
use cavern_proto::data::{BlockRef, CopyRequest, PersistReply, PersistRequest};
use cavern_proto::master::Worker;
use futures::future::BoxFuture;

use crate::error::MasterError;
use crate::jobs::{BlockFiller, PooledWorkers};

/// For an object: so long, and so long for each MiB, slower than any bucket is.
const OBJECT_TIMEOUT: Duration = Duration::from_secs(120);
const MIB_TIMEOUT: Duration = Duration::from_secs(2);

/// Has workers write objects, and free and copy blocks; tests have their own.
pub trait ObjectWriter: Send + Sync + 'static {
    /// The workers, live and lost.
    fn placement(&self) -> Result<Arc<Placement>, MasterError>;

    /// All workers, with what their last heartbeats said.
    fn reported(&self) -> Result<Vec<Worker>, MasterError>;

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
}

impl ObjectWriter for PooledWorkers {
    fn placement(&self) -> Result<Arc<Placement>, MasterError> {
        BlockFiller::placement(self)
    }

    fn reported(&self) -> Result<Vec<Worker>, MasterError> {
        Ok(self.workers().table()?.workers)
    }

    fn persist(&self, worker: u64, request: PersistRequest) -> BoxFuture<'_, Result<PersistReply, String>> {
        Box::pin(async move {
            let mib = u32::try_from(request.length >> 20).unwrap_or(u32::MAX);
            let deadline = OBJECT_TIMEOUT.saturating_add(MIB_TIMEOUT.saturating_mul(mib));
            self.pool().persist(worker, request, deadline).await.map_err(|error| error.to_string())
        })
    }

    fn free(&self, worker: u64, blocks: Vec<BlockRef>) -> BoxFuture<'_, Result<(), String>> {
        Box::pin(async move { self.pool().free(worker, blocks).await.map(drop).map_err(|error| error.to_string()) })
    }

    fn has(&self, worker: u64, blocks: Vec<BlockRef>) -> BoxFuture<'_, Result<Vec<bool>, String>> {
        Box::pin(async move {
            let count = blocks.len();
            let reply = self.pool().query(worker, blocks).await.map_err(|error| error.to_string())?;
            if reply.items.len() != count {
                return Err(format!("worker {worker} answered another question"));
            }
            Ok(reply.items.into_iter().map(|item| item.known).collect())
        })
    }

    fn copy(&self, worker: u64, request: CopyRequest, within: Duration) -> BoxFuture<'_, Result<(), String>> {
        Box::pin(async move { self.pool().copy(worker, request, within).await.map_err(|error| error.to_string()) })
    }
}
