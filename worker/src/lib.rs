//! The worker: caches blocks of objects on local disks and serves them.
//!
//! ```text
//!   clients ── TCP frames, Unix socket ──► server ──► store   (blocks on disk, index, eviction)
//!                                             └─────► fill ──► bucket (single-flight ranged GETs)
//!   master ◄── register, heartbeat, mounts ── heartbeat, mounts
//! ```
//!
//! A worker holds nothing that cannot be fetched again. It keeps serving when the master is away, and what it has on
//! disk is good for every later start: blocks are named by content, so no restart and no re-attached bucket can make
//! them stale.

pub mod error;
mod metrics;
mod store;

pub use error::WorkerError;

use cavern_conf::Config;
use tokio_util::sync::CancellationToken;

/// Runs a worker until `stop` is cancelled; then drains and returns.
pub async fn run(config: Config, stop: CancellationToken) -> Result<(), WorkerError> {
    let _ = config;
    stop.cancelled().await;
    Ok(())
}
