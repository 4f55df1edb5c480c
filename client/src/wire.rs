//! The data plane: connections to workers.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cavern_conf::schema;
use cavern_proto::data;
use cavern_proto::master::WorkerTable;

use crate::error::ClientError;
use crate::placement::Placement;
use crate::stats::Stats;

/// Connections to the workers of the current table, made when needed and shared by everyone.
pub struct WorkerPool {
    placement: Arc<Placement>,
}

impl WorkerPool {
    /// A pool without workers; `set_table` brings them.
    pub fn new(config: &schema::Client, stats: Arc<Stats>) -> Arc<Self> {
        let _ = (config, stats);
        Arc::new(Self { placement: Arc::default() })
    }

    /// The cluster's id and the table as the master gave them. Connections to workers that are gone are closed.
    pub fn set_table(&self, cluster_id: &str, table: &WorkerTable) {
        let _ = (cluster_id, table);
    }

    /// The workers of the current table.
    pub fn placement(&self) -> Arc<Placement> {
        self.placement.clone()
    }

    /// Bytes over the connection: the reply and the concatenated payload.
    pub async fn read(
        &self,
        worker: u64,
        items: Vec<data::read_request::Item>,
        deadline: Duration,
    ) -> Result<(data::ReadReply, Bytes), ClientError> {
        let _ = (items, deadline);
        Err(ClientError::UnknownWorker(worker))
    }

    /// Descriptors of blocks of a worker on this host; one per item with status OK, in order.
    pub async fn open(
        &self,
        worker: u64,
        items: Vec<data::open_request::Item>,
        deadline: Duration,
    ) -> Result<(data::OpenReply, Vec<OwnedFd>), ClientError> {
        let _ = (items, deadline);
        Err(ClientError::UnknownWorker(worker))
    }

    /// Makes ranges present at the worker.
    pub async fn fill(
        &self,
        worker: u64,
        items: Vec<data::open_request::Item>,
        deadline: Duration,
    ) -> Result<data::FillReply, ClientError> {
        let _ = (items, deadline);
        Err(ClientError::UnknownWorker(worker))
    }

    /// What the worker has of these blocks.
    pub async fn query(&self, worker: u64, blocks: Vec<data::BlockRef>) -> Result<data::QueryReply, ClientError> {
        let _ = blocks;
        Err(ClientError::UnknownWorker(worker))
    }

    /// Drops blocks of the worker.
    pub async fn free(&self, worker: u64, blocks: Vec<data::BlockRef>) -> Result<data::FreeReply, ClientError> {
        let _ = blocks;
        Err(ClientError::UnknownWorker(worker))
    }

    /// Closes every connection and waits for their tasks.
    pub async fn shutdown(&self) {}
}
