//! The metrics of a process: one registry, shown in the form that is asked for ([`MetricsFormat`]).
//!
//! Cavern's own metrics carry the prefix `cavern_`; those of the process itself have the names that Prometheus client
//! libraries agree on (`process_resident_memory_bytes` and so on), so that common dashboards find them.

use std::fmt::{self, Debug};
use std::hash::Hash;
use std::sync::Arc;

use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Metric, Registry};
use tokio::time::Instant;

use super::exposition::MetricsFormat;

/// The registry of a process. Metrics are registered once at start and then updated through their own handles (which
/// are cheap to clone, and take no lock); only [`Metrics::encode`] and registration lock the registry.
#[derive(Debug)]
pub struct Metrics {
    registry: Mutex<Registry>,
}

impl Metrics {
    /// A registry that already holds the process's own metrics: resident memory, open descriptors, processor time,
    /// start time, uptime, and `cavern_build_info{role,version}`.
    pub fn new(role: &str) -> Arc<Self> {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(ProcessCollector::new()));
        let labels =
            vec![("role".to_owned(), role.to_owned()), ("version".to_owned(), env!("CARGO_PKG_VERSION").to_owned())];
        registry.register("cavern_build", "What this process is", Info::new(labels));
        Arc::new(Self { registry: Mutex::new(registry) })
    }

    /// Registers any metric under `cavern_{name}` and returns it. Counters gain the suffix `_total` when they are
    /// printed: leave it out of the name. Names are lower case with underscores and end in their unit (`_bytes`,
    /// `_seconds`).
    pub fn register<M: Metric + Clone>(&self, name: &str, help: &str, metric: M) -> M {
        let mut registry = self.registry.lock();
        registry.register(format!("cavern_{name}"), help.trim_end_matches('.'), metric.clone());
        metric
    }

    /// A counter without labels, printed as `cavern_{name}_total`.
    pub fn counter(&self, name: &str, help: &str) -> Counter {
        self.register(name, help, Counter::default())
    }

    /// A gauge of whole numbers without labels.
    pub fn gauge(&self, name: &str, help: &str) -> Gauge {
        self.register(name, help, Gauge::default())
    }

    /// A histogram of seconds, from 10 µs to 40 s in factors of two: wide enough for a memory hit and for a bucket that
    /// stalls.
    pub fn latency(&self, name: &str, help: &str) -> Histogram {
        self.register(name, help, Histogram::new(exponential_buckets(10e-6, 2.0, 23)))
    }

    /// Counters (or gauges) distinguished by labels; `L` derives `EncodeLabelSet`.
    pub fn family<L, M>(&self, name: &str, help: &str) -> Family<L, M>
    where
        L: Clone + Debug + Eq + Hash + EncodeLabelSet + Send + Sync + 'static,
        M: EncodeMetric + prometheus_client::metrics::TypedMetric + Default + Debug + Send + Sync + 'static,
    {
        self.register(name, help, Family::default())
    }

    /// Adds a collector, for values that are read when somebody asks (sizes kept elsewhere). It prints full names.
    pub fn register_collector(&self, collector: impl Collector) {
        self.registry.lock().register_collector(Box::new(collector));
    }

    /// Lets a crate register a set of metrics of its own kind; their names must carry the prefix `cavern_`.
    pub fn with_registry<T>(&self, register: impl FnOnce(&mut Registry) -> T) -> T {
        register(&mut self.registry.lock())
    }

    /// Everything as OpenMetrics: see [`Self::page`].
    ///
    /// # Errors
    /// Only what a collector itself returns.
    pub fn encode(&self) -> Result<String, fmt::Error> {
        self.page(MetricsFormat::OpenMetrics)
    }

    /// Everything in a form. Collectors run under the registry's lock.
    ///
    /// # Errors
    /// Only what a collector itself returns.
    pub fn page(&self, format: MetricsFormat) -> Result<String, fmt::Error> {
        let mut printed = String::with_capacity(16 << 10);
        prometheus_client::encoding::text::encode(&mut printed, &self.registry.lock())?;
        Ok(format.page(&printed))
    }
}

/// Reads the process's own figures from `/proc/self` when they are asked for.
#[derive(Debug)]
struct ProcessCollector {
    started: Instant,
    started_unix: f64,
}

impl ProcessCollector {
    fn new() -> Self {
        Self { started: Instant::now(), started_unix: crate::host::wall_ns() as f64 / 1e9 }
    }
}

impl Collector for ProcessCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let mut gauge = |name: &str, help: &str, value: f64| {
            let value = ConstGauge::new(value);
            value.encode(encoder.encode_descriptor(name, help, None, value.metric_type())?)
        };
        if let Some(bytes) = resident_bytes() {
            gauge("process_resident_memory_bytes", "Resident memory", bytes as f64)?;
        }
        if let Some(count) = open_descriptors() {
            gauge("process_open_fds", "Open descriptors", count as f64)?;
        }
        if let Some(limit) = rustix::process::getrlimit(rustix::process::Resource::Nofile).current {
            gauge("process_max_fds", "Limit of open descriptors", limit as f64)?;
        }
        gauge("process_start_time_seconds", "Start of the process, since 1970", self.started_unix)?;
        gauge("cavern_uptime_seconds", "Time since the process started", self.started.elapsed().as_secs_f64())?;
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        let seconds = ConstCounter::new(time.tv_sec as f64 + time.tv_nsec as f64 / 1e9);
        let help = "Processor time of user and kernel";
        seconds.encode(encoder.encode_descriptor("process_cpu_seconds", help, None, seconds.metric_type())?)
    }
}

fn resident_bytes() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split_ascii_whitespace().nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

fn open_descriptors() -> Option<usize> {
    // The descriptor that reads the directory is in the listing too.
    Some(std::fs::read_dir("/proc/self/fd").ok()?.count().saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
    struct Source {
        source: String,
    }

    /// The value of the sample whose name and labels are exactly `sample`.
    fn value_of(text: &str, sample: &str) -> f64 {
        let line = text.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("{sample} is missing in\n{text}")).parse().unwrap()
    }

    #[test]
    fn own_metrics_carry_the_prefix() {
        let metrics = Metrics::new("worker");
        let hits = metrics.counter("hits", "Reads served from the cache.");
        let depth = metrics.gauge("queue_depth", "Requests waiting");
        let reads = metrics.family::<Source, Counter>("reads", "Reads by source");
        let latency = metrics.latency("read_seconds", "Time of a read");
        hits.inc_by(3);
        depth.set(-2);
        reads.get_or_create(&Source { source: "disk".into() }).inc();
        latency.observe(0.001);
        let text = metrics.encode().unwrap();
        assert_eq!(value_of(&text, "cavern_hits_total"), 3.0);
        assert_eq!(value_of(&text, "cavern_queue_depth"), -2.0);
        assert_eq!(value_of(&text, "cavern_reads_total{source=\"disk\"}"), 1.0);
        assert_eq!(value_of(&text, "cavern_read_seconds_count"), 1.0);
        assert!(text.contains("cavern_build_info{role=\"worker\",version=\""));
        assert!(text.contains("# TYPE cavern_read_seconds histogram\n# UNIT cavern_read_seconds seconds\n"), "{text}");
        assert!(text.ends_with("# EOF\n"));

        let text = metrics.page(MetricsFormat::Text).unwrap();
        assert_eq!(value_of(&text, "cavern_hits_total"), 3.0);
        assert!(text.contains("# TYPE cavern_hits_total counter\n") && !text.contains("# EOF"), "{text}");
        assert!(text.contains("# TYPE cavern_build_info gauge\n") && !text.contains("# UNIT"), "{text}");
    }

    #[test]
    fn the_process_shows_itself() {
        let metrics = Metrics::new("master");
        let text = metrics.encode().unwrap();
        assert!(value_of(&text, "process_resident_memory_bytes") > 1e6);
        assert!(value_of(&text, "process_open_fds") >= 3.0);
        assert!(value_of(&text, "process_max_fds") >= value_of(&text, "process_open_fds"));
        assert!(value_of(&text, "process_cpu_seconds_total") >= 0.0);
        assert!(value_of(&text, "process_start_time_seconds") > 1.6e9);
        assert!(value_of(&text, "cavern_uptime_seconds") < 3600.0);
    }
}
