//! What only the leader does, as one object that begins and ends with its leadership: what runs all the time
//! (maintenance, expiry, persistence, repair, and what is left of views), and what the log says was begun and is not
//! over: jobs, indexes, and taking in what buckets had before.

use std::sync::Arc;

use cavern_proto::record::BeginHistory;
use cavern_proto::record::command::Command;
use cavern_security::random_bytes;
use cavern_state::apply::GENERATIONS_MAX;
use cavern_state::{Database, Tables};
use cavern_work::background::TaskGroup;
use cavern_work::expiry::Expiry;
use cavern_work::maintenance::Maintenance;
use cavern_work::metrics::MasterMetrics;

use crate::error::MasterError;
use crate::feature_version;
use crate::services::Services;

/// A history leaves out at most this part of the generations that are left.
const GENERATIONS_PART: u32 = 512;

/// The work of one leadership of this master.
pub struct LeaderTasks {
    services: Services,
    background: TaskGroup,
}

impl LeaderTasks {
    pub fn new(services: &Services) -> Self {
        let background = TaskGroup { stop: services.stop.child_token(), ..TaskGroup::default() };
        Self { services: services.clone(), background }
    }

    /// Begins with everything that the state says is to be done.
    pub async fn begin(&self, database: &Arc<Database>, metrics: &MasterMetrics) -> Result<(), MasterError> {
        let Self { services, background } = self;
        begin_history(services).await?;
        // The inodes of this term have numbers that no other term has given, though this master may have been restored
        // from a copy and know nothing of that term: workers keep blocks by the numbers of their files.
        services.proposer.propose(Command::SkipInodes(u64::from(u32::from_le_bytes(random()?)))).await?;
        services.jobs.resume().await?;
        let list = &services.background;
        services.persistence.start(list);
        services.repair.start(list);
        services.views.start(list);
        for mount in Tables::new(database).mounts()? {
            match services.mounts.get(mount.id) {
                Ok(open) if open.is_fs_mode() => services.lookups.listings.start_existing(open),
                Ok(open) => services.lookups.listings.start_index(open),
                Err(error) => tracing::error!(mount = mount.path, "the mount cannot be used: {error}"),
            }
        }
        feature_version::start_raising(background, services);
        services.mount_changes.claims.start(background, list);
        let Services { lookups, workers, consensus, proposer, .. } = services.clone();
        let expiry = Expiry::new(lookups.clone(), proposer.clone(), metrics.expiry.clone());
        let (database, metrics) = (database.clone(), metrics.clone());
        Maintenance { lookups, workers, consensus, proposer, database, metrics }.start(background, list);
        expiry.start(background, list);
        Ok(())
    }

    /// Ends it, for good: the next leadership, of whichever master, goes on with what is left. Nothing of it is under
    /// way when this returns.
    pub async fn end(self) {
        let Self { services, background } = self;
        background.stop.cancel();
        services.mount_changes.tasks.shutdown().await;
        services.jobs.shutdown().await;
        services.views.shutdown().await;
        services.persistence.shutdown().await;
        services.repair.shutdown().await;
        services.lookups.listings.shutdown().await;
        background.shutdown().await;
    }
}

/// Begins a history when this master may have been restored from a copy, with all others: when no master has begun one
/// since this process was started. From then on blocks have names that were not given in a past that is not known here.
async fn begin_history(services: &Services) -> Result<(), MasterError> {
    let counters = services.lookups.reader.look(|tables| Ok(tables.counters()?)).await?;
    let began_since_start = counters.history != 0 && counters.history_after >= services.consensus.log_at_start;
    if began_since_start {
        return Ok(());
    }
    let after = services.consensus.progress().0;
    // A part of what is left, so that it is never all.
    let most = (GENERATIONS_MAX.saturating_sub(counters.next_generation) / GENERATIONS_PART).max(1);
    let generations = 1 + u32::from_le_bytes(random()?) % most;
    let begin = BeginHistory { id: u64::from_le_bytes(random()?).max(1), after, generations };
    services.proposer.propose(Command::BeginHistory(begin)).await?;
    Ok(())
}

fn random<const BYTES: usize>() -> Result<[u8; BYTES], MasterError> {
    random_bytes().map_err(MasterError::Failed)
}
