//! What `/metrics` shows of the mount: requests by kind and path, latencies, what waits, invalidations.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use crate::filesystem::Usage;
use crate::invalidation::Invalidations;
use crate::kernel::in_flight::InFlight;
use crate::kernel::request_stats::{KindCounts, LATENCY_BOUNDS_US, RequestKind};

/// Reads the counters of a session when they are asked for.
pub struct MountCollector {
    pub in_flight: Arc<InFlight>,
    pub invalidations: Arc<Invalidations>,
    pub usage: Box<dyn Fn() -> Usage + Send + Sync>,
}

impl fmt::Debug for MountCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MountCollector").finish_non_exhaustive()
    }
}

impl MountCollector {
    fn of_kinds(
        &self,
        mut metric: MetricEncoder<'_>,
        mut encode: impl FnMut(MetricEncoder<'_>, &KindCounts) -> fmt::Result,
    ) -> fmt::Result {
        for kind in RequestKind::ALL {
            encode(metric.encode_family(&[("operation", kind.name())])?, self.in_flight.observation.kind(kind))?;
        }
        Ok(())
    }

    fn requests(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let help = "Requests of the kernel by operation and by where they were answered: on the event loop (fast) or \
            by a task (deferred)";
        let mut metric = encoder.encode_descriptor("cavern_fuse_requests", help, None, MetricType::Counter)?;
        for kind in RequestKind::ALL {
            let counts = self.in_flight.observation.kind(kind);
            for (path, count) in [("fast", &counts.fast), ("deferred", &counts.deferred)] {
                let labels = [("operation", kind.name()), ("path", path)];
                ConstCounter::new(count.load(Relaxed)).encode(metric.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }

    fn latencies(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let help = "Time from reading a request to answering it";
        let metric = encoder.encode_descriptor("cavern_fuse_request_seconds", help, None, MetricType::Histogram)?;
        self.of_kinds(metric, |mut metric, counts| {
            let bounds = LATENCY_BOUNDS_US.iter().map(|bound| *bound as f64 / 1e6).chain([f64::INFINITY]);
            let classes = counts.latency.iter().map(|class| class.load(Relaxed));
            let buckets: Vec<(f64, u64)> = bounds.zip(classes).collect();
            let count = buckets.iter().map(|(_, count)| count).sum();
            let seconds = counts.nanos.load(Relaxed) as f64 / 1e9;
            metric.encode_histogram::<NoLabelSet>(seconds, count, &buckets, None)
        })
    }

    fn totals(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let invalidation_counts = self.invalidations.counts();
        let seen = &self.in_flight.observation;
        for (name, help, count) in [
            ("cavern_fuse_read_bytes", "Bytes answered to reads of the kernel", &seen.read_bytes),
            ("cavern_fuse_written_bytes", "Bytes of writes of the kernel that were carried out", &seen.written_bytes),
            ("cavern_fuse_copied_bytes", "Bytes copied from file to file by copy_file_range", &seen.copied_bytes),
            ("cavern_fuse_malformed_requests", "Requests that could not be decoded", &seen.malformed),
            ("cavern_fuse_invalidations_sent", "Invalidations that the kernel took", &invalidation_counts.sent),
            (
                "cavern_fuse_invalidations_unknown",
                "Invalidations of what the kernel did not know",
                &invalidation_counts.unknown,
            ),
            ("cavern_fuse_invalidations_failed", "Invalidations that the kernel refused", &invalidation_counts.failed),
            ("cavern_fuse_resets", "Times that everything in the kernel was invalidated", &invalidation_counts.resets),
        ] {
            let metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            ConstCounter::new(count.load(Relaxed)).encode(metric)?;
        }
        Ok(())
    }

    fn levels(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let usage = (self.usage)();
        for (name, help, count) in [
            (
                "cavern_fuse_passthrough_opens",
                "Opens of files that the kernel reads by itself",
                usage.passthrough_opens,
            ),
            ("cavern_fuse_registered_files", "Files that were registered with the kernel", usage.registered_files),
        ] {
            let metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            ConstCounter::new(count).encode(metric)?;
        }
        for (name, help, level) in [
            ("cavern_fuse_waiting_requests", "Requests that wait for something now", self.in_flight.waiting()),
            ("cavern_fuse_queued_invalidations", "Invalidations not passed on yet", self.invalidations.queued()),
            ("cavern_fuse_open_files", "Files open now", usage.files),
            ("cavern_fuse_open_directories", "Directories open now", usage.directories),
        ] {
            let metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            ConstGauge::new(i64::try_from(level).unwrap_or(i64::MAX)).encode(metric)?;
        }
        Ok(())
    }
}

impl Collector for MountCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.requests(&mut encoder)?;
        for (name, help) in [
            ("cavern_fuse_request_errors", "Requests that failed, but for names and attributes that do not exist"),
            ("cavern_fuse_interrupted_requests", "Requests that a signal ended"),
        ] {
            let metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            self.of_kinds(metric, |metric, counts| {
                let count = if name.contains("interrupted") { &counts.interrupted } else { &counts.errors };
                ConstCounter::new(count.load(Relaxed)).encode(metric)
            })?;
        }
        self.latencies(&mut encoder)?;
        self.totals(&mut encoder)?;
        self.levels(&mut encoder)
    }
}
