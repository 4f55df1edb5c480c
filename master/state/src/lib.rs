//! The replicated state: one RocksDB that holds the Raft log and what applying the log makes of it.
//!
//! [`database`] opens it, [`current`] has another one take its place, [`tables`] reads it, [`transaction`] collects
//! what one command changes, [`unwritten`] what those of a log entry do, and [`apply`] turns a command into changes and
//! an [`outcome`]: [`namespace`] for names and inodes, [`mount`] for the mount table, [`registry`] for workers and
//! jobs, [`posix`] for what programs change in fs-mode mounts, [`intent`] for what the bucket is to learn of that,
//! [`extent`] for where its blocks are, [`held`] for directories whose changes a session answers itself, [`origin`] for
//! content that only the bucket has, [`existing`] for what was in the bucket of such a mount before (and [`restored`]
//! for what it was there), [`orphans`] for what was taken out of the namespace and is deleted in bounded steps,
//! [`usage`] for how much there is below directories, [`requests`] for commands that are asked for again. Which
//! commands there may be, [`feature_version`] says.
//!
//! Everything under `apply` is deterministic: no clock, no random number, no hash-map order decides what is written.
//! Nothing here waits for anything but the disk.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod allocated;
pub mod apply;
pub mod current;
pub mod database;
mod error;
mod existing;
mod extent;
pub mod feature_version;
pub mod held;
mod intent;
mod kept;
mod lost;
mod mount;
pub mod namespace;
mod origin;
mod orphans;
pub mod outcome;
mod posix;
pub mod records;
mod registry;
pub mod requests;
mod restored;
pub mod tables;
pub mod transaction;
pub mod unwritten;
pub mod usage;

pub use apply::apply;
pub use current::{CurrentDatabase, Free, Lock};
pub use database::{Database, Family};
pub use error::StateError;
pub use extent::{AT_ONCE, next_generation};
pub use held::{HeldChange, HeldDirectory};
pub use origin::{has_content, is_clean};
pub use orphans::StepProgress;
pub use outcome::{ALL_BEFORE, Outcome, TypedCommand};
pub use posix::{blocking_lock, may_access, may_have_layout, take_in};
pub use records::EntryVersion;
pub use registry::refusal_of_owner;
pub use tables::{Directory, FileBlock, PendingDeletion, StrayReplica, Tables};
pub use transaction::{Change, Changes, RulesChange, Transaction, Whereabouts};
pub use unwritten::Unwritten;
