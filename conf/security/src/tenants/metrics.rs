//! What tenants have done, for whoever asks for metrics: one value for each of those that are remembered, and one for
//! all others together.

use std::fmt::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use super::{Counts, REMEMBERED, Tenant, Tenants};

/// The label of tenants that are not remembered one by one. No name of a client has such a character.
const OTHERS: &str = "(others)";

/// Shows the counts of tenants when somebody asks for metrics.
#[derive(Debug)]
pub struct TenantCollector {
    tenants: Tenants,
    /// What the names of metrics begin with.
    prefix: &'static str,
}

impl TenantCollector {
    /// `prefix`: as `cavern_master`.
    pub fn new(tenants: Tenants, prefix: &'static str) -> Self {
        Self { tenants, prefix }
    }
}

impl Collector for TenantCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let mut known: Vec<Arc<Tenant>> = self.tenants.0.known.lock().values().cloned().collect();
        // A client keeps its line as long as there is room for those before it in the alphabet.
        known.sort_unstable_by(|one, other| one.identity.name.cmp(&other.identity.name));
        let others = Counts::default();
        others.add(&self.tenants.0.forgotten);
        let shown = &known[..known.len().min(REMEMBERED)];
        known[shown.len()..].iter().for_each(|tenant| others.add(&tenant.counts));
        let name = |what: &str| format!("{}_client_{what}", self.prefix);

        type Read = fn(&Counts) -> &AtomicU64;
        const SECONDS: f64 = 1e-9;
        let counters: [(&str, &str, Read, Option<f64>); 4] = [
            ("operations", "Operations of each client, by the name in its certificate", |of| &of.operations, None),
            ("bytes", "Bytes that each client has read and written over the network", |of| &of.bytes, None),
            ("waited_seconds", "Time that calls of each client waited for its rate", |of| &of.waited_ns, Some(SECONDS)),
            ("refused", "What each client was refused because it had too much at once", |of| &of.refused, None),
        ];
        for (what, help, read, scale) in counters {
            let name = name(what);
            let mut family = encoder.encode_descriptor(&name, help, None, MetricType::Counter)?;
            let all = shown.iter().map(|tenant| (tenant.identity.name.as_str(), &tenant.counts));
            for (client, counts) in all.chain([(OTHERS, &others)]) {
                let value = read(counts).load(Ordering::Relaxed);
                let labels = [("client", client)];
                let metric = family.encode_family(&labels)?;
                match scale {
                    Some(scale) => ConstCounter::new(value as f64 * scale).encode(metric)?,
                    None => ConstCounter::new(value).encode(metric)?,
                }
            }
        }
        let name = name("connections");
        let help = "Connections of each client";
        let mut family = encoder.encode_descriptor(&name, help, None, MetricType::Gauge)?;
        for tenant in shown {
            let labels = [("client", tenant.identity.name.as_str())];
            let connections = i64::try_from(tenant.connections.load(Ordering::Relaxed)).unwrap_or(i64::MAX);
            ConstGauge::new(connections).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}
