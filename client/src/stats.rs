//! Counters of the steps of a read and of the metadata cache, as `/metrics` shows them.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

macro_rules! stats {
    ($( $(#[doc = $help:literal])+ $field:ident: $kind:ty = $name:literal, )+) => {
        /// What this client did so far. Every field may be read and incremented from any thread.
        #[derive(Debug, Default)]
        pub struct Stats { $( $(#[doc = $help])+ pub $field: $kind, )+ }

        impl Stats {
            /// Registers every counter under the registry's prefix.
            pub fn register(&self, registry: &mut Registry) {
                $( registry.register($name, concat!($($help),+).trim(), self.$field.clone()); )+
            }
        }
    };
}

impl Stats {
    /// A read was answered from a descriptor of a local block.
    pub(crate) fn read_by_descriptor(&self, bytes: usize) {
        self.descriptor_reads.inc();
        self.descriptor_bytes.inc_by(bytes as u64);
    }

    /// A read was answered from buffers in memory.
    pub(crate) fn read_by_buffer(&self, bytes: usize) {
        self.buffer_reads.inc();
        self.buffer_bytes.inc_by(bytes as u64);
    }
}

stats! {
    /// Reads answered from an open descriptor of a local block
    descriptor_reads: Counter = "client_descriptor_reads",
    /// Bytes read through descriptors of local blocks
    descriptor_bytes: Counter = "client_descriptor_bytes",
    /// Reads answered from buffers in memory
    buffer_reads: Counter = "client_buffer_reads",
    /// Bytes read from buffers in memory
    buffer_bytes: Counter = "client_buffer_bytes",
    /// Requests to a worker on this host for a descriptor or a fill, for reads that waited
    local_opens: Counter = "client_local_opens",
    /// Times that the master was asked where the bytes of a file of an fs-mode mount are
    layout_misses: Counter = "client_layout_misses",
    /// Requests to a worker on this host to fill chunks, for reads that waited
    local_fills: Counter = "client_local_fills",
    /// Requests to workers over the network, for reads that waited
    remote_reads: Counter = "client_remote_reads",
    /// Bytes received from workers over the network
    remote_bytes: Counter = "client_remote_bytes",
    /// Reads from the bucket itself, because no worker could serve them
    bucket_reads: Counter = "client_bucket_reads",
    /// Bytes received from the bucket itself
    bucket_bytes: Counter = "client_bucket_bytes",
    /// Reads of devices and files of views
    view_reads: Counter = "client_view_reads",
    /// Bytes read of devices and files of views
    view_bytes: Counter = "client_view_bytes",
    /// Such reads that nobody could answer
    view_errors: Counter = "client_view_errors",
    /// Objects of views that were fetched to this host
    view_fetches: Counter = "client_view_fetches",
    /// Requests to write behind their writers
    write_behind_requests: Counter = "client_write_behind_requests",
    /// Bytes written to workers behind their writers
    write_behind_bytes: Counter = "client_write_behind_bytes",
    /// Reads and opens that failed
    read_errors: Counter = "client_read_errors",
    /// Reads and opens that found their version gone
    stale_reads: Counter = "client_stale_reads",
    /// Attempts at a worker that failed
    worker_errors: Counter = "client_worker_errors",
    /// Chunks whose bytes did not match their checksum
    corrupt_chunks: Counter = "client_corrupt_chunks",
    /// Second requests sent because the first was slow
    hedges: Counter = "client_hedges",
    /// Second requests that answered first
    hedges_won: Counter = "client_hedges_won",
    /// Bytes asked for by read-ahead
    readahead_bytes: Counter = "client_readahead_bytes",
    /// Bytes of read-ahead buffers that a read used
    readahead_used_bytes: Counter = "client_readahead_used_bytes",
    /// Bytes of read-ahead buffers dropped unused
    readahead_wasted_bytes: Counter = "client_readahead_wasted_bytes",
    /// Descriptors of local blocks held
    descriptors: Gauge = "client_descriptors",
    /// Files of local blocks that the kernel keeps open by itself, with or without a descriptor
    backing_files: Gauge = "client_backing_files",
    /// Bytes of the memory budget in use
    budget_used_bytes: Gauge = "client_budget_used_bytes",
    /// Lookups and attributes answered from the cache
    metadata_hits: Counter = "client_metadata_hits",
    /// Lookups, attributes and listings that asked the master
    metadata_misses: Counter = "client_metadata_misses",
    /// Entries served although the master could not be reached
    metadata_stale_served: Counter = "client_metadata_stale_served",
    /// Inodes in the metadata cache
    metadata_entries: Gauge = "client_metadata_entries",
    /// Changes of delegated directories that were answered before the master had them
    write_back_changes: Counter = "client_write_back_changes",
    /// Of these, locks that were unlocked before they were sent
    undone_changes: Counter = "client_undone_changes",
    /// Of these, commits that became part of one of the same file that was not sent yet
    merged_changes: Counter = "client_merged_changes",
    /// Of these, those that were not made, since the session had ended
    lost_changes: Counter = "client_lost_changes",
    /// Invalidations taken in
    invalidations: Counter = "client_invalidations",
    /// Times that everything cached was forgotten
    watch_resets: Counter = "client_watch_resets",
    /// Times that a stream of events went on where it was, with all that was cached
    watch_resumptions: Counter = "client_watch_resumptions",
    /// 1 while no master answers, after a time that no election takes
    outage: Gauge = "client_master_outage",
    /// Times that this began
    outages: Counter = "client_master_outages",
    /// Names and listings that were asked of buckets while no master answered
    outage_lookups: Counter = "client_outage_lookups",
    /// Calls that the master did not answer
    master_errors: Counter = "client_master_errors",
    /// Files of cache-mode mounts that are being written, or were a moment ago
    staged_files: Gauge = "client_staged_files",
    /// Bytes of such files on the disk of this host, out of client.staging_size
    staged_bytes: Gauge = "client_staged_bytes",
    /// Such files that are closed or synced at the moment: the bucket has not taken them yet
    staged_uploads: Gauge = "client_staged_uploads",
    /// Bytes of such files that the bucket has taken, in parts or whole
    uploaded_bytes: Counter = "client_uploaded_bytes",
    /// Objects written to buckets of cache-mode mounts
    uploads: Counter = "client_uploads",
    /// Files that a bucket did not take when they were closed or synced
    upload_errors: Counter = "client_upload_errors",
    /// Directories of cache-mode mounts that are being renamed
    directory_renames: Gauge = "client_directory_renames",
    /// Objects copied by renames of directories
    renamed_copies: Counter = "client_renamed_copies",
    /// Objects that such renames have copied and then deleted under their old keys
    renamed_deletions: Counter = "client_renamed_deletions",
}

/// Counts something that is under way, until it is dropped.
pub(crate) struct InFlightGauge(Gauge);

impl InFlightGauge {
    pub(crate) fn new(gauge: &Gauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for InFlightGauge {
    fn drop(&mut self) {
        self.0.dec();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_counter_is_registered_with_its_value() {
        let (stats, mut registry) = (Stats::default(), Registry::default());
        stats.register(&mut registry);
        stats.hedges.inc_by(3);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        assert!(text.contains("client_hedges_total 3\n"), "{text}");
        assert!(text.contains("client_descriptors 0\n"), "{text}");
    }
}
