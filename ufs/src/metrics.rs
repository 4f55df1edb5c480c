//! What was sent to the stores: counted per attempt, by store and operation.
//!
//! The families are one per process; [`register`] puts them on a metrics page. Labels hold the store's id (endpoint and
//! bucket), never a key.

use std::sync::LazyLock;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use tokio::time::Instant;

use crate::error::{Operation, UfsError};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StoreLabel {
    store: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OperationLabel {
    store: String,
    operation: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ErrorLabel {
    store: String,
    operation: &'static str,
    kind: &'static str,
}

struct Families {
    requests: Family<OperationLabel, Counter>,
    errors: Family<ErrorLabel, Counter>,
    latency: Family<OperationLabel, Histogram, fn() -> Histogram>,
    bytes: Family<StoreLabel, Counter>,
    written_bytes: Family<StoreLabel, Counter>,
    retries: Family<StoreLabel, Counter>,
    in_flight: Family<StoreLabel, Gauge>,
}

static FAMILIES: LazyLock<Families> = LazyLock::new(|| Families {
    requests: Family::default(),
    errors: Family::default(),
    latency: Family::new_with_constructor(latency_buckets),
    bytes: Family::default(),
    written_bytes: Family::default(),
    retries: Family::default(),
    in_flight: Family::default(),
});

/// 0.5 ms to 16 s, each twice the one before.
fn latency_buckets() -> Histogram {
    Histogram::new((0..16).map(|doubling| 0.0005 * f64::from(1 << doubling)))
}

/// Puts the counters of every store of this process into `registry`.
pub fn register(registry: &mut Registry) {
    let families = &*FAMILIES;
    let registry = registry.sub_registry_with_prefix("cavern_ufs");
    registry.register("requests", "Requests sent, every attempt counted", families.requests.clone());
    registry.register("errors", "Requests and bodies that failed, by kind of error", families.errors.clone());
    registry.register("request_seconds", "Time until the store answered, without the body", families.latency.clone());
    registry.register("read_bytes", "Bytes of bodies received", families.bytes.clone());
    registry.register("written_bytes", "Bytes of bodies that the store took", families.written_bytes.clone());
    registry.register("retries", "Attempts that were repeated", families.retries.clone());
    registry.register("in_flight", "Requests and bodies in flight", families.in_flight.clone());
}

/// What has been sent to one store since the process began, over all its handles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UfsStats {
    /// Attempts, retries included.
    pub lists: u64,
    pub heads: u64,
    pub gets: u64,
    /// Objects and parts sent.
    pub puts: u64,
    pub deletes: u64,
    pub retries: u64,
    /// Bytes of bodies received.
    pub read_bytes: u64,
}

/// The counters of one store.
pub(crate) struct StoreMetrics {
    /// In the order of [`Operation::ALL`].
    operations: [OperationMetrics; Operation::ALL.len()],
    pub(crate) bytes: Counter,
    pub(crate) written_bytes: Counter,
    in_flight: Gauge,
    pub(crate) retries: Counter,
}

pub(crate) struct OperationMetrics {
    store: String,
    operation: &'static str,
    requests: Counter,
    latency: Histogram,
}

impl OperationMetrics {
    fn of(store: &str, operation: Operation) -> Self {
        let label = OperationLabel { store: store.to_owned(), operation: operation.name() };
        Self {
            store: store.to_owned(),
            operation: operation.name(),
            requests: FAMILIES.requests.get_or_create(&label).clone(),
            latency: FAMILIES.latency.get_or_create(&label).clone(),
        }
    }

    pub(crate) fn failed(&self, error: &UfsError) {
        let label = ErrorLabel { store: self.store.clone(), operation: self.operation, kind: error.kind() };
        FAMILIES.errors.get_or_create(&label).inc();
    }

    pub(crate) async fn measure<T>(&self, answer: impl Future<Output = Result<T, UfsError>>) -> Result<T, UfsError> {
        self.requests.inc();
        let began = Instant::now();
        let answer = answer.await;
        self.latency.observe(began.elapsed().as_secs_f64());
        if let Err(error) = &answer {
            self.failed(error);
        }
        answer
    }
}

impl StoreMetrics {
    pub(crate) fn new(store: &str) -> Self {
        let label = StoreLabel { store: store.to_owned() };
        Self {
            operations: Operation::ALL.map(|operation| OperationMetrics::of(store, operation)),
            written_bytes: FAMILIES.written_bytes.get_or_create(&label).clone(),
            bytes: FAMILIES.bytes.get_or_create(&label).clone(),
            in_flight: FAMILIES.in_flight.get_or_create(&label).clone(),
            retries: FAMILIES.retries.get_or_create(&label).clone(),
        }
    }

    pub(crate) fn of(&self, operation: Operation) -> &OperationMetrics {
        &self.operations[operation as usize]
    }

    pub(crate) fn stats(&self) -> UfsStats {
        let sent = |operation: Operation| self.of(operation).requests.get();
        UfsStats {
            lists: sent(Operation::List),
            heads: sent(Operation::Head),
            gets: sent(Operation::Get),
            puts: sent(Operation::Put) + sent(Operation::Part),
            deletes: sent(Operation::Delete),
            retries: self.retries.get(),
            read_bytes: self.bytes.get(),
        }
    }
}

/// Counts one up while it lives.
pub(crate) struct InFlight(Gauge);

impl InFlight {
    pub(crate) fn begin(metrics: &StoreMetrics) -> Self {
        metrics.in_flight.inc();
        Self(metrics.in_flight.clone())
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.dec();
    }
}
