//! What a worker counts. Counters are handles into the process's registry; the heartbeat reads the same ones.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

cavern_conf::metrics! {
    /// The worker's metrics; cloning is cheap and gives the same counters.
    WorkerMetrics {
        /// Items of reads and opens that were answered from the store.
        pub hits: Counter = counter("worker_hits", "Requests for block content answered from the store");
        /// Items that had to wait for the bucket.
        pub misses: Counter = counter("worker_misses", "Requests for block content that had to wait for the bucket");
        pub hit_bytes: Counter = counter("worker_hit_bytes", "Bytes asked for that were in the store");
        pub miss_bytes: Counter = counter("worker_miss_bytes", "Bytes asked for that had to be fetched first");
        /// Bytes and requests to buckets.
        pub ufs_bytes: Counter = counter("worker_ufs_bytes", "Bytes received from buckets");
        pub ufs_requests: Counter = counter("worker_ufs_requests", "Ranged GETs sent to buckets");
        pub ufs_errors: Counter = counter("worker_ufs_errors", "Ranged GETs that failed after their retries");
        pub fills_running: Gauge = gauge("worker_fills_running", "Ranged GETs in flight or waiting for their turn");
        pub evicted_blocks: Counter = counter("worker_evicted_blocks", "Blocks evicted to make room");
        pub admissions_rejected: Counter = counter(
            "worker_admissions_rejected",
            "Evicted blocks that were newcomers used no more often than what they would have displaced"
        );
        pub corrupt_chunks: Counter = counter(
            "worker_corrupt_chunks",
            "Chunks of objects dropped because their checksum was wrong or their file gone, and of fs-mode files that \
             clients received otherwise than they were sent"
        );
        pub scrubbed_bytes: Counter = counter("worker_scrubbed_bytes", "Bytes whose checksum the scrubber verified");
        /// Bytes of fs-mode files that were written over the data plane (not those through descriptors).
        pub written_bytes: Counter = counter(
            "worker_written_bytes",
            "Bytes of fs-mode files received and written (not those that clients wrote through descriptors)"
        );
        /// Blocks of fs-mode files that were synced.
        pub syncs: Counter = counter("worker_syncs", "Blocks of fs-mode files synced to disk");
        /// Objects of fs-mode files written to buckets, their bytes, and those that could not be written.
        pub persisted: Counter = counter("worker_persisted_objects", "Objects of fs-mode files written to buckets");
        pub persisted_bytes: Counter =
            counter("worker_persisted_bytes", "Bytes of objects of fs-mode files written to buckets");
        pub persist_failures: Counter = counter(
            "worker_persist_failures",
            "Objects of fs-mode files that could not be written, or not at this time"
        );
        pub persist_waits: Counter = counter(
            "worker_persist_waits",
            "Pieces of objects of fs-mode files that waited before they were sent, since clients were served"
        );
        /// Blocks of fs-mode files copied from other workers.
        pub copied_blocks: Counter =
            counter("worker_copied_blocks", "Blocks of fs-mode files copied from other workers");
        /// Blocks that were freed because no file had them.
        pub orphan_blocks: Counter =
            counter("worker_orphan_blocks", "Blocks of fs-mode files freed because no file had them");
        /// Reservations that waited because the disks are nearly full of what the bucket lacks.
        pub throttled_reservations: Counter = counter(
            "worker_throttled_reservations",
            "Reservations for fs-mode files that waited because the disks are nearly full of what the buckets lack"
        );
        /// Journals of mounts of this host that are kept, and processes that were begun to replay some.
        pub journals: Gauge = gauge("worker_journals", "Journals of mounts of this host that are kept");
        pub replays: Counter =
            counter("worker_replays", "Processes begun to make what a mount had answered whose processes are dead");
        pub connections: Gauge = gauge("worker_connections", "Connections of the data plane");
        pub connections_refused: Counter =
            counter("worker_connections_refused", "Connections refused because there were too many");
        pub malformed_frames: Counter = counter("worker_malformed_frames", "Frames that could not be understood");
        /// From the receipt of a request for block content to its answer, when it could not be answered at once.
        pub slow_requests: Histogram = latency(
            "worker_slow_request_seconds",
            "Time to answer a request that had to wait for the disk or the bucket"
        );
        /// Requests for block content that could be answered at once.
        pub fast_requests: Counter =
            counter("worker_fast_requests", "Requests answered from memory and page cache without waiting");
        /// Bytes of answers that this process did not copy.
        pub sendfile_bytes: Counter =
            counter("worker_sendfile_bytes", "Bytes sent right out of block files, without being copied");
    }
}
