//! The other workers, for blocks that this one lacks.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cavern_net::master::Stubs;
use cavern_net::{NetError, WorkerPool};
use cavern_proto::data::{BlockRef, Range, Status, SyncRequest, query_reply, read_request};
use cavern_proto::master::ListWorkersRequest;
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::parts::WorkerParts;
use crate::request_error::Refusal;

/// The master is asked for the table at most this often.
const ASK_INTERVAL: Duration = Duration::from_secs(1);
/// For one read of at most [`READ_BYTES`].
const READ_TIMEOUT: Duration = Duration::from_secs(20);
/// Bytes of one read: less than a connection may have in flight.
pub(super) const READ_BYTES: u32 = 8 << 20;

/// The way to the other workers of the cluster.
pub(super) struct Peers {
    pub(super) pool: Arc<WorkerPool>,
    parts: WorkerParts,
    /// When the master was last asked for the table.
    asked: Mutex<Option<Instant>>,
}

impl Peers {
    pub(super) fn new(pool: Arc<WorkerPool>, parts: WorkerParts) -> Self {
        Self { pool, parts, asked: Mutex::new(None) }
    }

    /// When each of these blocks of a worker was last written to, and which file it is.
    pub(super) async fn query(&self, worker: u64, blocks: Vec<BlockRef>) -> Result<Vec<query_reply::Item>, Refusal> {
        let count = blocks.len();
        let ask = async || self.pool.query(worker, blocks.clone()).await;
        let reply = match ask().await {
            Err(error) if self.renew(&error).await => ask().await,
            reply => reply,
        };
        let reply = reply.map_err(unreachable)?;
        if reply.items.len() != count {
            return Err(Refusal::new(Status::IoError, format!("worker {worker} answered another question")));
        }
        Ok(reply.items)
    }

    /// Returns when blocks of a worker are on its disk.
    pub(super) async fn sync(&self, worker: u64, blocks: Vec<BlockRef>) -> Result<(), Refusal> {
        let request = SyncRequest { blocks, failed: Vec::new() };
        self.pool.sync(worker, request, READ_TIMEOUT).await.map_err(unreachable)
    }

    /// A range of a block of a worker, of at most [`READ_BYTES`].
    pub(super) async fn read(&self, worker: u64, block: BlockRef, range: Range) -> Result<Bytes, Refusal> {
        let items = vec![read_request::Item { block: Some(block), range: Some(range), part: None }];
        let (reply, payload) = self.pool.read(worker, items, READ_TIMEOUT).await.map_err(unreachable)?;
        let item = reply.items.into_iter().next().unwrap_or_default();
        match item.status() {
            Status::Ok if payload.len() == range.length as usize => Ok(payload),
            Status::Ok => Err(Refusal::new(Status::IoError, format!("worker {worker} sent too little of a block"))),
            status => Err(Refusal::new(status, format!("worker {worker}: {}", item.message))),
        }
    }

    /// Fetches the table when the error says that it may be out of date.
    async fn renew(&self, error: &NetError) -> bool {
        if !matches!(error, NetError::UnknownWorker(_) | NetError::WorkerConnection { .. }) {
            return false;
        }
        let mut asked = self.asked.lock().await;
        if asked.is_some_and(|last| last.elapsed() < ASK_INTERVAL) {
            // Another caller has asked a moment ago: the answer that it got is there to be used.
            return true;
        }
        *asked = Some(Instant::now());
        let ask = |mut stubs: Stubs| async move { stubs.cluster.list_workers(ListWorkersRequest {}).await };
        match self.parts.master.try_call("ListWorkers", ask).await {
            Ok(table) => {
                self.pool.set_table(&self.parts.membership.now().1, &table);
                true
            }
            Err(_) => false,
        }
    }
}

/// A peer that does not answer is like a disk that does not.
fn unreachable(error: NetError) -> Refusal {
    let status = match &error {
        NetError::WorkerStatus { status, .. } => *status,
        _ => Status::IoError,
    };
    Refusal::new(status, error.to_string())
}
