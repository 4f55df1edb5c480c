//! What every process that uses a Cavern cluster shares: the way to the master, a coherent metadata cache, the way to
//! the workers, and the ladder of a read.
//!
//! ```text
//!  Metadata ── MasterChannel ── gRPC ──▶ master      names, attributes, listings, invalidations
//!  File ─┬─ object ────── descriptors, buffers ─┬─▶ worker on this host     Unix socket, then pread
//!        ├─ fs-mode file ─ blocks, layout ──────┼─▶ other workers           TCP frames, within the budget
//!        └─ staged file ─ local disk ───────────┴─▶ the bucket              when no worker can, and to write objects
//! ```
//!
//! [`Client`] ties them together for a process that uses files, and opens a [`File`] of whichever kind. The ways to the
//! other processes are those of [`cavern_net`].

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod error;
pub mod file;
pub mod journal;
pub mod metadata;
pub mod mounts;
pub mod stages;
pub mod stats;
pub mod view;

mod activity;
mod fs_file;
mod identity;
mod memory;
mod orphaned_journal;
mod page_cache_hint;
mod read;
mod session;
mod single_flight;
mod staged;
mod tables;

pub use error::ClientError;
pub use file::{
    Access, Allocation, AttributeChange, BucketDefaults, CreatedFile, Effects, File, NewFile, Opened, Replacement,
};
pub use fs_file::{FileEnd, KernelReads, Seek, UncommittedAttr};
pub use identity::Identity;
pub use journal::{Journal, RequestContext, Unreplayed};
pub use metadata::{
    AnsweredBy, CachedLookup, Changed, DirPage, InvalidationSink, LOCK_TO_END, Metadata, NoSink, Node, OpenInode, Posix,
};
pub use mounts::{MountView, Mounts, ObjectVersion};
pub use orphaned_journal::{Replayed, replay};
pub use page_cache_hint::PageCacheHint;
pub use read::{CachedRead, DiskRead};
pub use session::{Client, Predecessor};
pub use staged::OBJECT_BYTES_MAX;
pub use stages::{Stage, StageTimes, Stages};
pub use stats::Stats;

/// Whether an inode is one of this process alone: of a file that is, or was, being written to a bucket here.
pub fn is_of_this_process(inode: u64) -> bool {
    staged::StagedFiles::is_staged(inode)
}
