//! The replicated state: one RocksDB that holds the Raft log and what applying the log makes of it. Applying is a
//! function: from the tables and a command to what is written, an outcome, and the changes that clients learn of.
//!
//! Each layer uses those above it in this list, and knows nothing of those below:
//! - **records and keys**: [`schema`] says which tables there are, how a key is written and what a record is;
//!   [`records`] what records mean, [`change`] what clients are told.
//! - **tables**: [`database`] opens RocksDB ([`current`]: which one), [`write_batch_overlay`] holds what is not written
//!   yet, [`tables`] reads both, and [`transaction`] collects what one command changes.
//! - **indexes** ([`index`]): what is kept true beside the records.
//! - **POSIX** ([`posix`]): what programs change in fs-mode mounts.
//! - **commands** ([`commands`]), to which [`apply`] leads, each with an [`outcome`]. Which commands there may be,
//!   [`feature_version`] says.
//! - **queries** ([`queries`]): what the masters ask beside that.
//!
//! Everything under `apply` is deterministic: no clock, no random number, no hash-map order decides what is written.
//! Nothing here waits for anything but the disk.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod apply;
mod change;
mod commands;
pub mod current;
mod data_dir;
pub mod database;
mod error;
pub mod feature_version;
mod index;
pub mod outcome;
mod posix;
mod queries;
pub mod records;
pub mod schema;
pub mod tables;
pub mod transaction;
pub mod write_batch_overlay;

pub use apply::apply;
pub use change::{Change, Changes, DelegationChange, DirectoryDelegation, InodeLocation, RulesChange};
pub use commands::external::import_external_change;
pub use commands::registry::refusal_of_owner;
pub use commands::views::VIEWS_MAX;
pub use commands::{namespace, requests};
pub use current::CurrentDatabase;
pub use data_dir::{Free, Lock};
pub use database::{Database, Resources};
pub use error::StateError;
pub use index::extents::AT_ONCE;
pub use index::usage;
pub use index::views::has as view_has;
pub use outcome::{ALL_BEFORE, Outcome, StepProgress, TypedCommand};
pub use queries::{
    PendingDeletion, StrayReplica, blocking_lock, clean_object, has_content, may_access, may_have_layout,
};
pub use records::next_generation;
pub use schema::{Family, FileBlock};
pub use tables::Tables;
pub use tables::namespace::Directory;
pub use transaction::Transaction;
pub use write_batch_overlay::WriteBatchOverlay;
