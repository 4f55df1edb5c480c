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
//! [`Client`] ties them together for a process that reads files. The ways to the other processes are those of
//! [`cavern_net`].

pub mod error;
pub mod fs_file;
pub mod metadata;
pub mod mounts;
pub mod read;
pub mod staged;
pub mod stats;

mod cached_copies;
mod session;
mod single_flight;
mod tables;

pub use cached_copies::Copies;
pub use error::ClientError;
pub use fs_file::{Contents, FsFile, Seek, UncommittedAttr, WriteBehindOutcome};
pub use metadata::{
    CachedLookup, Changed, DirPage, InvalidationSink, LOCK_TO_END, Metadata, NoSink, Node, OpenInode, Posix,
};
pub use mounts::{MountView, Mounts, ObjectVersion};
pub use read::{Files, OpenFile, Reservation};
pub use session::{Client, Identity};
pub use staged::{Creation, OBJECT_BYTES_MAX, StagedFile, StagedFiles};
pub use stats::Stats;
