//! What every process that uses a Cavern cluster shares: the way to the master, a coherent metadata cache, the way to
//! the workers, and the ladder of a read.
//!
//! ```text
//!  Metadata ── MasterChannel ── gRPC ──▶ master       names, attributes, listings, invalidations
//!  Files ──┬─ descriptor cache ─ Unix socket ─▶ worker on this host    open descriptors, then pread
//!          ├─ buffers ─ TCP frames ─▶ other workers                     checked chunks, within the budget
//!          └─ Ufs ─────────────────────────────▶ the bucket             when no worker can
//! ```
//!
//! [`Client`] ties them together for a process that reads files. The master and the command line use the parts:
//! [`MasterChannel`] for calls, [`Placement`] and [`WorkerPool`] for blocks.

pub mod content;
pub mod error;
pub mod master_channel;
pub mod metadata;
pub mod mounts;
pub mod placement;
pub mod read;
pub mod staged;
pub mod stats;
pub mod wire;

mod breaker;
mod copies;
mod flights;
mod session;
mod tables;

pub use content::{Content, Contents, Offer, Seek, Unsettled, block_name};
pub use copies::Copies;
pub use error::ClientError;
pub use master_channel::MasterChannel;
pub use metadata::{
    CachedLookup, Changed, DirPage, InvalidationSink, LOCK_TO_END, Metadata, NoSink, Node, OpenInode, Posix,
};
pub use mounts::{MountView, Mounts, ObjectVersion};
pub use placement::Placement;
pub use read::{Files, OpenFile, Reservation};
pub use session::{Client, Identity};
pub use staged::{Creation, OBJECT_BYTES_MAX, StagedFile, StagedFiles};
pub use stats::Stats;
pub use wire::{Reserved, Route, WorkerPool, Written};
