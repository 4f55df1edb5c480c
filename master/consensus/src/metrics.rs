//! The metrics of the log.

use cavern_conf::process::Metrics;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};

/// What the consensus counts. Cheap to clone.
#[derive(Clone, Debug)]
pub struct ConsensusMetrics {
    pub(crate) commands: Counter,
    pub(crate) batch_commands: Histogram,
    pub(crate) log_sync_seconds: Histogram,
    pub(crate) log_bytes: Gauge,
    pub(crate) snapshots_installed: Counter,
    pub(crate) apply_seconds: Histogram,
    pub(crate) command_seconds: Histogram,
}

impl ConsensusMetrics {
    /// Registers all of it, under names that begin with `master_`.
    pub fn register(metrics: &Metrics) -> Self {
        Self {
            commands: metrics.counter("master_commands", "Commands put into the log"),
            batch_commands: metrics.register(
                "master_log_batch_commands",
                "Commands that shared one entry of the log, and with it one sync",
                Histogram::new(exponential_buckets(1.0, 2.0, 9)),
            ),
            log_sync_seconds: metrics.latency("master_log_sync_seconds", "Time of one synced write of the log"),
            log_bytes: metrics.gauge("master_log_bytes", "Bytes of the entries that the log has"),
            snapshots_installed: metrics
                .counter("master_snapshots_installed", "Snapshots of other masters that this one began anew with"),
            apply_seconds: metrics.latency("master_apply_seconds", "Time to apply one entry"),
            command_seconds: metrics.latency(
                "master_command_seconds",
                "Time to apply one command: nobody else is served by the log meanwhile",
            ),
        }
    }
}
