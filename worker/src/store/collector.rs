//! What the directories take and have, for whoever gathers metrics.

use std::sync::Arc;

use cavern_proto::master::DiskReport;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;

use super::table::BlockTable;

/// Sizes of the directories, read when somebody asks for metrics.
#[derive(Debug)]
pub struct StoreCollector(pub Arc<BlockTable>);

impl Collector for StoreCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let usage = self.0.usage();
        type Read = fn(&DiskReport) -> u64;
        let gauges: [(&str, &str, Read); 5] = [
            ("cavern_worker_used_bytes", "Bytes of blocks, in units of 4 KiB", |disk| disk.used_bytes),
            ("cavern_worker_data_bytes", "Bytes of blocks of fs-mode files, which are never evicted", |disk| {
                disk.data_bytes
            }),
            ("cavern_worker_capacity_bytes", "Bytes that blocks may take", |disk| disk.capacity_bytes),
            ("cavern_worker_blocks", "Blocks in the store", |disk| disk.blocks),
            ("cavern_worker_directory_healthy", "1 while the directory works", |disk| u64::from(disk.healthy)),
        ];
        for (name, help, read) in gauges {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for disk in &usage {
                let labels = [("directory", disk.path.as_str()), ("tier", disk.tier.as_str())];
                ConstGauge::new(read(disk)).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}
