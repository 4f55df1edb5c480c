//! When a certificate ends, among the metrics of its process.

use std::fmt;
use std::sync::Arc;

use cavern_conf::process::Metrics;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::gauge::ConstGauge;

use crate::transport::{Tls, Transport};

/// Asks when somebody looks: files that are replaced count from then on.
#[derive(Debug)]
struct Expiry(Arc<Tls>);

impl Collector for Expiry {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let end = ConstGauge::new(self.0.certificate().not_after);
        let help = "When the certificate of this process ends, since 1970";
        let metric = encoder.encode_descriptor("cavern_certificate_expires_seconds", help, None, end.metric_type())?;
        end.encode(metric)
    }
}

impl Transport {
    /// Adds `cavern_certificate_expires_seconds` to the metrics of a process that has a certificate: once for each.
    pub fn register_metrics(&self, metrics: &Metrics) {
        if let Self::Tls(tls) = self {
            metrics.register_collector(Expiry(tls.clone()));
        }
    }
}
