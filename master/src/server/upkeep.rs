//! What every master does all the time, whether it leads or not: the high-water mark, and gauges.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::metrics::MasterMetrics;
use crate::raft::Consensus;
use crate::recovery::HighWater;
use crate::state::{Database, Tables};

/// Period of the mark and of the gauges.
const PERIOD: Duration = Duration::from_secs(1);

/// Runs until `stop`, and raises the mark once more then.
pub async fn keep(
    consensus: Arc<Consensus>,
    database: Arc<Database>,
    metrics: MasterMetrics,
    high_water: HighWater,
    stop: CancellationToken,
) {
    let high_water = Arc::new(Mutex::new(high_water));
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut goes_on = true;
    while goes_on {
        goes_on = tokio::select! {
            _ = ticks.tick() => true,
            () = stop.cancelled() => false,
        };
        if let Ok(counters) = Tables::new(&database).counters() {
            metrics.gauges.inodes.set(i64::try_from(counters.inodes).unwrap_or(i64::MAX));
        }
        let applied = consensus.progress().0;
        metrics.gauges.applied_index.set(i64::try_from(applied).unwrap_or(i64::MAX));
        let mark = high_water.clone();
        // Without it the next start checks less, that is all.
        let _ = tokio::task::spawn_blocking(move || mark.lock().raise(applied)).await;
    }
}
