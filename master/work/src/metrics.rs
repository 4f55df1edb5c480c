//! The master's metrics.

use std::sync::Arc;
use std::time::Duration;

use cavern_conf::process::Metrics;
use cavern_consensus::ConsensusMetrics;
use cavern_proto::master::{JobKind, JobState};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

cavern_conf::metrics! {
    /// What the listing of buckets counts.
    ListingMetrics {
        pub pages: Counter = counter("master_list_pages", "LIST requests answered by buckets");
        pub page_seconds: Histogram = latency("master_list_page_seconds", "Time of one LIST request, retries included");
        pub failures: Counter = counter("master_list_failures", "Listings that failed");
        pub directories: Counter = counter("master_directories_listed", "Directories listed to their end");
        pub running: Gauge = gauge("master_listings", "Directories being listed or waiting for it");
        pub unlisted: Gauge =
            gauge("master_unlisted_directories", "Directories of fs-mode mounts that are still to be indexed");
        pub one_name_checks: Counter = counter("master_one_name_checks", "Single names asked of buckets");
    }
    /// What the persistence of fs-mode mounts counts.
    PersistMetrics {
        pub uploads: Counter = counter("master_persist_uploads", "Objects of fs-mode files written to buckets");
        pub upload_bytes: Counter = counter("master_persist_upload_bytes", "Bytes of these objects");
        pub busy_uploads: Counter = counter(
            "master_persist_busy_uploads",
            "Files whose writing to buckets was begun while clients made many changes, though nobody waited for them"
        );
        pub deletions: Counter = counter("master_persist_deletions", "Objects of fs-mode files deleted from buckets");
        pub failures: Counter = counter("master_persist_failures", "Attempts at writing or deleting that failed");
        pub freed_blocks: Counter =
            counter("master_persist_freed_blocks", "Blocks that no file has any more, freed at workers");
        pub dropped_bytes: Counter = counter(
            "master_persist_dropped_bytes",
            "Bytes of blocks that buckets have, dropped where workers were nearly full"
        );
        pub changing_files: Gauge = gauge(
            "master_persist_changing_files",
            "Files whose last upload was in vain, since they were written to meanwhile"
        );
        backlog_files: Gauge = gauge("master_persist_backlog_files", "Files with changes that their bucket lacks");
        backlog_bytes: Gauge = gauge("master_persist_backlog_bytes", "Bytes of files whose content their bucket lacks");
        backlog_deletions: Gauge =
            gauge("master_persist_backlog_deletions", "Objects that are to be deleted from buckets");
        oldest_seconds: Gauge = gauge("master_persist_oldest_seconds", "Age of the oldest change that a bucket lacks");
    }
    /// What the repair of replicas counts.
    RepairMetrics {
        pub repaired_blocks: Counter =
            counter("master_repaired_blocks", "Blocks of fs-mode files that were given another replica");
        pub failures: Counter = counter("master_repair_failures", "Attempts at that which failed");
        pub unavailable_files: Gauge =
            gauge("master_unavailable_files", "Files with content that is at lost workers only and in no bucket");
        pub unavailable_blocks: Gauge = gauge("master_unavailable_blocks", "Blocks of these files that nobody has");
    }
    /// Files whose time to live was over.
    ExpiryMetrics {
        pub freed: Counter =
            counter("master_ttl_freed_files", "Files whose blocks were dropped since their time was over");
        pub removed: Counter = counter("master_ttl_removed_files", "Files that were removed since their time was over");
    }
    /// Views, and what only they have.
    ViewMetrics {
        pub views: Gauge = gauge("master_views", "Views that are recorded, by the leader's last look");
        pub kept_blocks: Gauge =
            gauge("master_kept_blocks", "Blocks that no file has any more and views have, by the leader's last look");
    }
    /// Values that are set from time to time.
    Gauges {
        pub inodes: Gauge = gauge("master_inodes", "Inodes of the namespace, those about to be deleted included");
        pub applied_index: Gauge = gauge("master_applied_index", "Last applied entry of the log");
        pub sessions: Gauge = gauge("master_sessions", "Clients with a live session");
        pub workers_live: Gauge = gauge("master_workers_live", "Workers in the placement table");
        pub workers_lost: Gauge = gauge("master_workers_lost", "Workers that stopped sending heartbeats");
    }
}

impl PersistMetrics {
    pub fn set_backlog(&self, files: u64, bytes: u64, deletions: u64, oldest: Duration) {
        let shown = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        self.backlog_files.set(shown(files));
        self.backlog_bytes.set(shown(bytes));
        self.backlog_deletions.set(shown(deletions));
        self.oldest_seconds.set(shown(oldest.as_secs()));
    }
}

/// Names and values of what distinguishes jobs.
type JobLabels<const COUNT: usize> = [(&'static str, &'static str); COUNT];

/// Jobs that run, and how they ended since the process started.
#[derive(Clone, Debug)]
pub struct JobMetrics {
    running: Family<JobLabels<1>, Gauge>,
    ended: Family<JobLabels<2>, Counter>,
}

impl JobMetrics {
    fn register(metrics: &Metrics) -> Self {
        let jobs = Self {
            running: metrics.family("master_jobs_running", "Jobs at work, by kind"),
            ended: metrics.family("master_jobs_ended", "Jobs that have ended, by kind and how"),
        };
        for kind in [JobKind::Load, JobKind::LoadMetadata, JobKind::Export] {
            drop(jobs.running.get_or_create(&[of_kind(kind)]));
            for state in [JobState::Done, JobState::Failed, JobState::Cancelled] {
                drop(jobs.ended.get_or_create(&[of_kind(kind), in_state(state)]));
            }
        }
        jobs
    }

    pub fn began(&self, kind: JobKind) {
        self.running.get_or_create(&[of_kind(kind)]).inc();
    }

    /// With the state that it ended in, or without one if it only pauses for a restart.
    pub fn ended(&self, kind: JobKind, state: Option<JobState>) {
        self.running.get_or_create(&[of_kind(kind)]).dec();
        if let Some(state) = state {
            self.ended.get_or_create(&[of_kind(kind), in_state(state)]).inc();
        }
    }
}

fn of_kind(kind: JobKind) -> (&'static str, &'static str) {
    let name = match kind {
        JobKind::Export => "export",
        JobKind::LoadMetadata => "load_metadata",
        JobKind::Load | JobKind::Check | JobKind::Unspecified => "load",
    };
    ("kind", name)
}

fn in_state(state: JobState) -> (&'static str, &'static str) {
    let name = match state {
        JobState::Done => "done",
        JobState::Failed => "failed",
        JobState::Cancelled => "cancelled",
        JobState::Running | JobState::Unspecified => "running",
    };
    ("state", name)
}

/// All of it.
#[derive(Clone, Debug)]
pub struct MasterMetrics {
    pub registry: Arc<Metrics>,
    pub consensus: ConsensusMetrics,
    pub listing: ListingMetrics,
    pub persist: PersistMetrics,
    pub repair: RepairMetrics,
    pub expiry: ExpiryMetrics,
    pub jobs: JobMetrics,
    pub views: ViewMetrics,
    pub gauges: Gauges,
    pub events: Counter,
    pub resets: Counter,
}

impl Default for MasterMetrics {
    fn default() -> Self {
        let registry = Metrics::new("master");
        Self {
            consensus: ConsensusMetrics::register(&registry),
            listing: ListingMetrics::register(&registry),
            persist: PersistMetrics::register(&registry),
            repair: RepairMetrics::register(&registry),
            expiry: ExpiryMetrics::register(&registry),
            jobs: JobMetrics::register(&registry),
            views: ViewMetrics::register(&registry),
            gauges: Gauges::register(&registry),
            events: registry.counter("master_events", "Events sent to sessions"),
            resets: registry.counter("master_session_resets", "Sessions that had to forget everything"),
            registry,
        }
    }
}
