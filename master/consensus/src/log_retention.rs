//! When a snapshot is made, and what of the log is kept beside it.
//!
//! A snapshot is made when the log has grown by so many bytes since the last one. What it covers is not needed any
//! more, but by a follower that was away for a moment: so entries stay for a while, unless the log becomes too long.
//! What no snapshot covers is never cut; the consensus sees to that itself.

use std::time::Duration;

use cavern_conf::host;
use openraft::async_runtime::watch::WatchReceiver as _;
use tokio_util::sync::CancellationToken;

use super::log_store::LogStore;
use super::state_machine::Raft;
use crate::metrics::ConsensusMetrics;

/// Entries become old without anybody writing.
const PERIOD: Duration = Duration::from_secs(1);
/// Marks of the log per [`LogLimits::snapshot_after`], but for a long one, which has them closer.
const STEPS: u64 = 8;
const STEP_MAX: u64 = 1 << 20;

/// How much of the log is kept.
#[derive(Clone, Copy, Debug)]
pub struct LogLimits {
    /// Bytes of log since the last snapshot after which another one is made.
    pub snapshot_after: u64,
    /// Entries that are younger than this are kept, for followers that are behind,
    pub keep: Duration,
    /// unless they are farther than this from the end of the log, in bytes.
    pub size_max: u64,
}

impl LogLimits {
    /// Bytes between two places of the log whose time is known.
    pub fn mark_bytes(&self) -> u64 {
        self.cut_bytes().min(STEP_MAX)
    }

    /// The log is not cut for less than this.
    fn cut_bytes(&self) -> u64 {
        (self.snapshot_after / STEPS).max(1)
    }
}

/// Makes snapshots and cuts the log, until `stop` or the end of the consensus.
pub async fn run(raft: Raft, log: LogStore, limits: LogLimits, metrics: ConsensusMetrics, stop: CancellationToken) {
    let keep_ns = i64::try_from(limits.keep.as_nanos()).unwrap_or(i64::MAX);
    let size = log.size();
    loop {
        let (applied, snapshot, purged) = {
            let observed = raft.metrics();
            let observed = observed.borrow_watched();
            let index = |id: Option<super::types::LogId>| id.map(|id| id.index);
            (index(observed.last_applied), index(observed.snapshot), index(observed.purged))
        };
        let (bytes, since_snapshot) = {
            let size = size.lock();
            (size.bytes_after(None), size.bytes_after(snapshot))
        };
        metrics.log_bytes.set(i64::try_from(bytes).unwrap_or(i64::MAX));
        let mut goes_on = true;
        if applied > snapshot && since_snapshot >= limits.snapshot_after {
            // One that is being made already is not made twice.
            goes_on = raft.trigger().snapshot().await.is_ok();
        }
        let cut = {
            let size = size.lock();
            let old = size.old(host::wall_ns().saturating_sub(keep_ns), limits.size_max).min(snapshot);
            old.filter(|upto| Some(*upto) > purged && size.bytes_upto(*upto) >= limits.cut_bytes())
        };
        if let Some(upto) = cut {
            goes_on &= raft.trigger().purge_log(upto).await.is_ok();
        }
        let next = async {
            // Many writes are looked at once.
            tokio::time::sleep(PERIOD / 10).await;
            tokio::time::timeout(PERIOD, log.written()).await
        };
        if !goes_on || stop.run_until_cancelled(next).await.is_none() {
            return;
        }
    }
}
