//! When a certificate ends, and a list of revoked ones is out of date, among the metrics of a process.

use std::fmt;
use std::sync::Arc;

use cavern_conf::process::Metrics;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::gauge::ConstGauge;

use crate::peers;
use crate::transport::{Tls, Transport};

/// Asks when somebody looks: files that are replaced count from then on.
#[derive(Debug)]
struct Expiry(Arc<Tls>);

impl Collector for Expiry {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let end = ConstGauge::new(self.0.certificate().not_after);
        let help = "When the certificate of this process ends, since 1970";
        let metric = encoder.encode_descriptor("cavern_certificate_expires_seconds", help, None, end.metric_type())?;
        end.encode(metric)?;
        let Some(next_update) = self.0.next_update() else { return Ok(()) };
        let next_update = ConstGauge::new(next_update);
        let help = "When the list of revoked certificates was to be replaced, since 1970";
        let name = "cavern_revocations_due_seconds";
        let metric = encoder.encode_descriptor(name, help, None, next_update.metric_type())?;
        next_update.encode(metric)
    }
}

impl Transport {
    /// Adds `cavern_certificate_expires_seconds`, `cavern_revocations_due_seconds` and
    /// `cavern_peer_connections_closed` to the metrics of a process that has a certificate: once for each.
    pub fn register_metrics(&self, metrics: &Metrics) {
        if let Self::Tls(tls) = self {
            peers::register_metrics(metrics);
            metrics.register_collector(Expiry(tls.clone()));
        }
    }
}
