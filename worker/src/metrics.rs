//! What a worker counts. Counters are handles into the process's registry; the heartbeat reads the same ones.

use cavern_conf::process::Metrics;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

/// The worker's metrics; cloning is cheap and gives the same counters.
#[derive(Clone, Debug)]
pub struct WorkerMetrics {
    /// Items of reads and opens that were answered from the store.
    pub hits: Counter,
    /// Items that had to wait for the bucket.
    pub misses: Counter,
    pub hit_bytes: Counter,
    pub miss_bytes: Counter,
    /// Bytes and requests to buckets.
    pub ufs_bytes: Counter,
    pub ufs_requests: Counter,
    pub ufs_errors: Counter,
    pub fills_running: Gauge,
    pub evicted_blocks: Counter,
    pub admissions_rejected: Counter,
    pub corrupt_chunks: Counter,
    pub scrubbed_bytes: Counter,
    /// Bytes of fs-mode files that were written over the data plane (not those through descriptors).
    pub written_bytes: Counter,
    /// Blocks of fs-mode files that were synced.
    pub syncs: Counter,
    /// Objects of fs-mode files written to buckets, their bytes, and those that could not be written.
    pub persisted: Counter,
    pub persisted_bytes: Counter,
    pub persist_failures: Counter,
    /// Blocks of fs-mode files copied from other workers.
    pub copied_blocks: Counter,
    /// Blocks that were freed because no file had them.
    pub unclaimed_blocks: Counter,
    /// Reservations that waited because the disks are nearly full of what the bucket lacks.
    pub slowed_reservations: Counter,
    /// Journals of mounts of this host that are kept, and processes that were begun to replay some.
    pub journals: Gauge,
    pub replays: Counter,
    pub connections: Gauge,
    pub connections_refused: Counter,
    pub malformed_frames: Counter,
    /// From the receipt of a request for block content to its answer, when it could not be answered at once.
    pub slow_requests: Histogram,
    /// The same, when it could.
    pub fast_requests: Counter,
}

impl WorkerMetrics {
    /// Registers all of them.
    pub fn new(metrics: &Metrics) -> Self {
        let counter = |name: &str, help: &str| metrics.counter(&format!("worker_{name}"), help);
        let gauge = |name: &str, help: &str| metrics.gauge(&format!("worker_{name}"), help);
        Self {
            hits: counter("hits", "Requests for block content answered from the store"),
            misses: counter("misses", "Requests for block content that had to wait for the bucket"),
            hit_bytes: counter("hit_bytes", "Bytes asked for that were in the store"),
            miss_bytes: counter("miss_bytes", "Bytes asked for that had to be fetched first"),
            ufs_bytes: counter("ufs_bytes", "Bytes received from buckets"),
            ufs_requests: counter("ufs_requests", "Ranged GETs sent to buckets"),
            ufs_errors: counter("ufs_errors", "Ranged GETs that failed after their retries"),
            fills_running: gauge("fills_running", "Ranged GETs in flight or waiting for their turn"),
            evicted_blocks: counter("evicted_blocks", "Blocks evicted to make room"),
            admissions_rejected: counter(
                "admissions_rejected",
                "Evicted blocks that were newcomers used no more often than what they would have displaced",
            ),
            corrupt_chunks: counter(
                "corrupt_chunks",
                "Chunks dropped because their checksum was wrong or their file gone",
            ),
            scrubbed_bytes: counter("scrubbed_bytes", "Bytes whose checksum the scrubber verified"),
            written_bytes: counter(
                "written_bytes",
                "Bytes of fs-mode files received and written (not those that clients wrote through descriptors)",
            ),
            syncs: counter("syncs", "Blocks of fs-mode files synced to disk"),
            persisted: counter("persisted_objects", "Objects of fs-mode files written to buckets"),
            persisted_bytes: counter("persisted_bytes", "Bytes of objects of fs-mode files written to buckets"),
            copied_blocks: counter("copied_blocks", "Blocks of fs-mode files copied from other workers"),
            unclaimed_blocks: counter("unclaimed_blocks", "Blocks of fs-mode files freed because no file had them"),
            slowed_reservations: counter(
                "slowed_reservations",
                "Reservations for fs-mode files that waited because the disks are nearly full of what the buckets lack",
            ),
            persist_failures: counter(
                "persist_failures",
                "Objects of fs-mode files that could not be written, or not at this time",
            ),
            journals: gauge("journals", "Journals of mounts of this host that are kept"),
            replays: counter("replays", "Processes begun to make what a mount had answered whose processes are dead"),
            connections: gauge("connections", "Connections of the data plane"),
            connections_refused: counter("connections_refused", "Connections refused because there were too many"),
            malformed_frames: counter("malformed_frames", "Frames that could not be understood"),
            slow_requests: metrics.latency(
                "worker_slow_request_seconds",
                "Time to answer a request that had to wait for the disk or the bucket",
            ),
            fast_requests: counter("fast_requests", "Requests answered from memory and page cache without waiting"),
        }
    }
}
