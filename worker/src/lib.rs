//! The worker: caches blocks of objects on local disks and serves them.
//!
//! ```text
//!   clients ── TCP frames, Unix socket ──► server ──► store   (blocks on disk, index, eviction)
//!                                             ├─────► fill ──► bucket (single-flight ranged GETs)
//!                                             └─────► persist ──► bucket (objects made of the blocks of fs-mode files)
//!   master ◄── register, heartbeat, mounts ── heartbeat, mounts
//! ```
//!
//! But for the blocks of fs-mode files, a worker holds nothing that cannot be fetched again. It keeps serving when the
//! master is away, and what it has on disk is good for every later start: blocks are named by content, so no restart
//! and no re-attached bucket can make them stale.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod error;
mod fill;
mod heartbeat;
mod journals;
mod local_peers;
mod membership;
mod memory;
mod metrics;
mod mounts;
mod orphan_blocks;
mod parts;
mod persist;
mod request_error;
mod reserved;
mod server;
mod store;
mod worker;

pub use error::WorkerError;
pub use worker::{run, run_with_replays};
