//! What a worker counts. Counters are handles into the process's registry; the heartbeat reads the same ones.

use cavern_conf::process::Metrics;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

/// Declares each metric with its kind, and with the name and the sentence that it is registered with.
macro_rules! worker_metrics {
    ($($(#[$doc:meta])* $field:ident: $kind:ident = $register:ident($name:literal, $help:literal);)+) => {
        /// The worker's metrics; cloning is cheap and gives the same counters.
        #[derive(Clone, Debug)]
        pub struct WorkerMetrics {
            $($(#[$doc])* pub $field: $kind,)+
        }

        impl WorkerMetrics {
            /// Registers all of them.
            pub fn new(metrics: &Metrics) -> Self {
                Self { $($field: metrics.$register(concat!("worker_", $name), $help),)+ }
            }
        }
    };
}

worker_metrics! {
    /// Items of reads and opens that were answered from the store.
    hits: Counter = counter("hits", "Requests for block content answered from the store");
    /// Items that had to wait for the bucket.
    misses: Counter = counter("misses", "Requests for block content that had to wait for the bucket");
    hit_bytes: Counter = counter("hit_bytes", "Bytes asked for that were in the store");
    miss_bytes: Counter = counter("miss_bytes", "Bytes asked for that had to be fetched first");
    /// Bytes and requests to buckets.
    ufs_bytes: Counter = counter("ufs_bytes", "Bytes received from buckets");
    ufs_requests: Counter = counter("ufs_requests", "Ranged GETs sent to buckets");
    ufs_errors: Counter = counter("ufs_errors", "Ranged GETs that failed after their retries");
    fills_running: Gauge = gauge("fills_running", "Ranged GETs in flight or waiting for their turn");
    evicted_blocks: Counter = counter("evicted_blocks", "Blocks evicted to make room");
    admissions_rejected: Counter = counter(
        "admissions_rejected",
        "Evicted blocks that were newcomers used no more often than what they would have displaced"
    );
    corrupt_chunks: Counter = counter(
        "corrupt_chunks",
        "Chunks of objects dropped because their checksum was wrong or their file gone, and of fs-mode files that \
         clients received otherwise than they were sent"
    );
    scrubbed_bytes: Counter = counter("scrubbed_bytes", "Bytes whose checksum the scrubber verified");
    /// Bytes of fs-mode files that were written over the data plane (not those through descriptors).
    written_bytes: Counter = counter(
        "written_bytes",
        "Bytes of fs-mode files received and written (not those that clients wrote through descriptors)"
    );
    /// Blocks of fs-mode files that were synced.
    syncs: Counter = counter("syncs", "Blocks of fs-mode files synced to disk");
    /// Objects of fs-mode files written to buckets, their bytes, and those that could not be written.
    persisted: Counter = counter("persisted_objects", "Objects of fs-mode files written to buckets");
    persisted_bytes: Counter = counter("persisted_bytes", "Bytes of objects of fs-mode files written to buckets");
    persist_failures: Counter = counter(
        "persist_failures",
        "Objects of fs-mode files that could not be written, or not at this time"
    );
    /// Blocks of fs-mode files copied from other workers.
    copied_blocks: Counter = counter("copied_blocks", "Blocks of fs-mode files copied from other workers");
    /// Blocks that were freed because no file had them.
    orphan_blocks: Counter = counter("orphan_blocks", "Blocks of fs-mode files freed because no file had them");
    /// Reservations that waited because the disks are nearly full of what the bucket lacks.
    throttled_reservations: Counter = counter(
        "throttled_reservations",
        "Reservations for fs-mode files that waited because the disks are nearly full of what the buckets lack"
    );
    /// Journals of mounts of this host that are kept, and processes that were begun to replay some.
    journals: Gauge = gauge("journals", "Journals of mounts of this host that are kept");
    replays: Counter = counter("replays", "Processes begun to make what a mount had answered whose processes are dead");
    connections: Gauge = gauge("connections", "Connections of the data plane");
    connections_refused: Counter = counter("connections_refused", "Connections refused because there were too many");
    malformed_frames: Counter = counter("malformed_frames", "Frames that could not be understood");
    /// From the receipt of a request for block content to its answer, when it could not be answered at once.
    slow_requests: Histogram = latency(
        "slow_request_seconds",
        "Time to answer a request that had to wait for the disk or the bucket"
    );
    /// Requests for block content that could be answered at once.
    fast_requests: Counter = counter("fast_requests", "Requests answered from memory and page cache without waiting");
}
