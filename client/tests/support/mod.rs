//! A master and workers in this process, under the tests' control, and a client configured for them.

#![allow(dead_code, unused_imports, reason = "each test binary uses its own part")]

pub mod master;
pub mod mutate;
pub mod views;
pub mod worker;

use std::sync::Arc;
use std::time::{Duration, Instant};

use cavern_client::{Client, InvalidationSink, NoSink};
use cavern_conf::{ByteSize, Config, Interval};

pub use master::FakeMaster;
pub use worker::{FakeWorker, Mood};

/// Short enough that a test of a deadline is quick, long enough for a busy machine.
pub fn config(master: &FakeMaster) -> Config {
    let mut config = Config::default();
    config.cluster.masters = vec![master.address()];
    config.master.refresh_wait = Interval::millis(300);
    config.client.metadata_timeout = Interval::millis(1500);
    config.client.change_timeout = Interval::millis(1500);
    config.client.connect_timeout = Interval::millis(500);
    config.client.worker_timeout = Interval::millis(2000);
    config.client.read_timeout = Interval::millis(3000);
    config.client.bucket_timeout = Interval::millis(3000);
    config.client.worker_backoff = Interval::millis(100);
    config.client.memory_budget = ByteSize::mib(64);
    config
}

/// For what is to succeed: no deadline passes, however busy the machine is.
pub fn patient(master: &FakeMaster) -> Config {
    let mut config = config(master);
    let (client, ample) = (&mut config.client, Interval::secs(30));
    (client.metadata_timeout, client.change_timeout, client.connect_timeout) = (ample, ample, ample);
    (client.worker_timeout, client.read_timeout, client.bucket_timeout) = (ample, ample, ample);
    config
}

pub async fn connect(config: &Config) -> Arc<Client> {
    connect_with(config, Arc::new(NoSink)).await
}

pub async fn connect_with(config: &Config, sink: Arc<dyn InvalidationSink>) -> Arc<Client> {
    Client::connect(config, "test", sink).await.expect("the fake master answers")
}

/// Waits until `condition` holds; fails after thirty seconds.
pub async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Bytes that differ everywhere, the same for the same seed.
pub fn content(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}
