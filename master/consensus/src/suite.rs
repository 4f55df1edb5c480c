//! openraft's own tests of a storage, run against ours.

use std::sync::Arc;
use std::thread::JoinHandle;

use cavern_conf::process::Metrics;
use cavern_state::feature_version::FEATURE_VERSION;
use cavern_state::{Changes, CurrentDatabase, Lock, Resources};
use openraft::StorageError;
use openraft::testing::log::{StoreBuilder, Suite};
use tempfile::TempDir;

use super::log_store::LogStore;
use super::snapshot::Snapshots;
use super::state_machine::{ChangeListener, StateMachine};
use super::types::Types;
use crate::metrics::ConsensusMetrics;

struct NullListener;

impl ChangeListener for NullListener {
    fn changed(&self, _: Changes) -> u64 {
        0
    }
    fn replaced(&self) {}
}

/// Where a store is; it is gone with this. The thread of its log has the database open until then, and one that is open
/// writes into its directory once more.
struct Place {
    dir: TempDir,
    log: Option<JoinHandle<()>>,
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.log.take().is_some_and(|log| log.join().is_err()) {
            panic!("the log in {} panicked", self.dir.path().display());
        }
    }
}

struct Builder;

impl StoreBuilder<Types, LogStore, StateMachine, Place> for Builder {
    async fn build(&self) -> Result<(Place, LogStore, StateMachine), StorageError<Types>> {
        let dir = tempfile::tempdir().unwrap();
        let database =
            CurrentDatabase::open(dir.path(), Resources::of_cache(1 << 20), Lock::take(dir.path()).unwrap()).unwrap();
        let database = Arc::new(database);
        let snapshots = Snapshots::open(dir.path().join("snapshots")).unwrap();
        let metrics = ConsensusMetrics::register(&Metrics::new("master"));
        let (log, thread) = LogStore::start(database.clone(), 1 << 10, metrics.clone()).unwrap();
        let machine =
            StateMachine::open(database, snapshots, Arc::new(NullListener), metrics, FEATURE_VERSION).unwrap();
        Ok((Place { dir, log: Some(thread) }, log, machine))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_storage_keeps_what_consensus_expects_of_it() {
    Suite::test_all(Builder).await.unwrap();
}
