//! The metrics of the log.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};

cavern_conf::metrics! {
    /// What the consensus counts. Cheap to clone.
    ConsensusMetrics {
        pub(crate) commands: Counter = counter("master_commands", "Commands put into the log");
        pub(crate) batch_commands: Histogram = register(
            "master_log_batch_commands",
            "Commands that shared one entry of the log, and with it one sync",
            Histogram::new(exponential_buckets(1.0, 2.0, 9))
        );
        pub(crate) log_sync_seconds: Histogram =
            latency("master_log_sync_seconds", "Time of one synced write of the log");
        pub(crate) log_bytes: Gauge = gauge("master_log_bytes", "Bytes of the entries that the log has");
        pub(crate) snapshots_installed: Counter =
            counter("master_snapshots_installed", "Snapshots of other masters that this one began anew with");
        pub(crate) apply_seconds: Histogram = latency("master_apply_seconds", "Time to apply one entry");
        pub(crate) command_seconds: Histogram = latency(
            "master_command_seconds",
            "Time to apply one command: nobody else is served by the log meanwhile"
        );
    }
}
