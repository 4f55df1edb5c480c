//! The way to the workers that fill blocks.

use std::sync::Arc;
use std::time::Duration;

use cavern_net::{Placement, WorkerPool};
use cavern_proto::data::{self, open_request};
use futures::future::BoxFuture;

use crate::error::MasterError;
use crate::workers::Workers;

/// Time for one request: its bytes at a rate that any bucket reaches, retries of the worker included.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(120);

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

/// Has workers fill blocks; tests have their own.
pub trait BlockFiller: Send + Sync + 'static {
    /// The live workers, for placement.
    fn placement(&self) -> Result<Arc<Placement>, MasterError>;

    /// Has a worker fill blocks; one result per block, in order. An error is about the worker: another try may help.
    fn fill(&self, worker: u64, items: Vec<open_request::Item>) -> BoxFuture<'_, Result<Vec<Filled>, String>>;
}

/// The workers over the data plane.
pub struct PooledWorkers {
    pool: Arc<WorkerPool>,
    workers: Arc<Workers>,
    cluster_id: String,
}

impl PooledWorkers {
    pub fn new(pool: Arc<WorkerPool>, workers: Arc<Workers>, cluster_id: String) -> Self {
        Self { pool, workers, cluster_id }
    }

    pub(crate) fn pool(&self) -> &WorkerPool {
        &self.pool
    }

    pub(crate) fn workers(&self) -> &Workers {
        &self.workers
    }
}

impl BlockFiller for PooledWorkers {
    fn placement(&self) -> Result<Arc<Placement>, MasterError> {
        let table = self.workers.table()?;
        if table.epoch != self.pool.placement().epoch() {
            self.pool.set_table(&self.cluster_id, &table);
        }
        Ok(self.pool.placement())
    }

    fn fill(&self, worker: u64, items: Vec<open_request::Item>) -> BoxFuture<'_, Result<Vec<Filled>, String>> {
        Box::pin(async move {
            let reply = self.pool.fill(worker, items, REQUEST_TIMEOUT).await.map_err(|error| error.to_string())?;
            Ok(reply.items.into_iter().map(outcome).collect())
        })
    }
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
