//! What every master does all the time, whether it leads or not: the high-water mark, gauges, and keys that are of no
//! use any more.

use std::sync::Arc;
use std::time::Duration;

use cavern_consensus::Consensus;
use cavern_consensus::recovery::HighWater;
use cavern_state::{CurrentDatabase, Tables};
use cavern_work::metrics::MasterMetrics;
use cavern_work::mounts::SecretSealer;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::rotation;

/// Period of the mark and of the gauges.
const PERIOD: Duration = Duration::from_secs(1);

/// Runs until `stop`, and raises the mark once more then.
pub async fn run(
    consensus: Arc<Consensus>,
    database: Arc<CurrentDatabase>,
    sealer: Arc<SecretSealer>,
    metrics: MasterMetrics,
    high_water: HighWater,
    stop: CancellationToken,
) {
    let high_water = Arc::new(Mutex::new(high_water));
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let (mut goes_on, mut has_keys) = (true, true);
    while goes_on {
        goes_on = tokio::select! {
            _ = ticks.tick() => true,
            () = stop.cancelled() => false,
        };
        if let Ok(counters) = Tables::new(&database.get()).counters() {
            metrics.gauges.inodes.set(i64::try_from(counters.inodes).unwrap_or(i64::MAX));
        }
        match rotation::settle(&sealer, &database).await {
            Ok(_) => has_keys = true,
            // Once is enough.
            Err(error) if std::mem::take(&mut has_keys) => tracing::error!("the key of the cluster's secrets: {error}"),
            Err(_) => {}
        }
        // Not the other way round: a later database has all that an earlier one had.
        let applied = consensus.progress().0;
        metrics.gauges.applied_index.set(i64::try_from(applied).unwrap_or(i64::MAX));
        let (mark, database) = (high_water.clone(), database.clone());
        // Without it the next start checks less, that is all.
        let raised = tokio::task::spawn_blocking(move || mark.lock().raise(applied, database.get().directory()));
        let _ = raised.await;
    }
}
