//! The whole client of one process.

use std::sync::Arc;

use cavern_conf::Config;

use crate::error::ClientError;
use crate::master_channel::MasterChannel;
use crate::metadata::{InvalidationSink, Metadata};
use crate::mounts::Mounts;
use crate::placement::Placement;
use crate::read::Files;
use crate::stats::Stats;
use crate::wire::WorkerPool;

/// Metadata and files of a cluster, with the tasks that keep them current.
pub struct Client {
    master: MasterChannel,
    metadata: Metadata,
    files: Files,
    pool: Arc<WorkerPool>,
    stats: Arc<Stats>,
}

impl Client {
    /// Connects and returns when the mount table and the worker table are known; fails when no master answers
    /// within `client.metadata_timeout`. `name` tells the master who asks. `sink` hears of every invalidation.
    pub async fn connect(
        config: &Config,
        name: &str,
        sink: Arc<dyn InvalidationSink>,
    ) -> Result<Arc<Self>, ClientError> {
        let _ = (config, name, sink);
        Err(ClientError::Shutdown)
    }

    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    pub fn files(&self) -> &Files {
        &self.files
    }

    pub fn master(&self) -> &MasterChannel {
        &self.master
    }

    pub fn pool(&self) -> &Arc<WorkerPool> {
        &self.pool
    }

    /// The mounts as of the last table.
    pub fn mounts(&self) -> Arc<Mounts> {
        Arc::default()
    }

    /// The workers as of the last table; for `statfs` and placement.
    pub fn workers(&self) -> Arc<Placement> {
        self.pool.placement()
    }

    pub fn stats(&self) -> &Arc<Stats> {
        &self.stats
    }

    /// Stops every task and connection. Calls in flight fail; calls afterwards fail with `Shutdown`.
    pub async fn shutdown(&self) {}
}
