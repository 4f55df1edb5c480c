//! openraft's own tests of a storage, run against ours.

use std::sync::Arc;

use openraft::StorageError;
use openraft::testing::log::{StoreBuilder, Suite};
use tempfile::TempDir;

use super::log_store::LogStore;
use super::snapshot::Snapshots;
use super::state_machine::{ChangeListener, StateMachine};
use super::types::Types;
use crate::metrics::MasterMetrics;
use crate::state::{Changes, CurrentDatabase, Lock};

struct NullListener;

impl ChangeListener for NullListener {
    fn changed(&self, _: Changes) -> u64 {
        0
    }
    fn replaced(&self) {}
}

struct Builder;

impl StoreBuilder<Types, LogStore, StateMachine, TempDir> for Builder {
    async fn build(&self) -> Result<(TempDir, LogStore, StateMachine), StorageError<Types>> {
        let dir = tempfile::tempdir().unwrap();
        let database = CurrentDatabase::open(dir.path(), 1 << 20, Lock::take(dir.path()).unwrap()).unwrap();
        let database = Arc::new(database);
        let snapshots = Snapshots::open(dir.path().join("snapshots")).unwrap();
        let metrics = MasterMetrics::new().raft;
        let (log, _) = LogStore::start(database.clone(), 1 << 10, metrics.clone()).unwrap();
        let machine = StateMachine::open(database, snapshots, Arc::new(NullListener), metrics).unwrap();
        Ok((dir, log, machine))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_storage_keeps_what_consensus_expects_of_it() {
    Suite::test_all(Builder).await.unwrap();
}
