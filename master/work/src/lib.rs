//! The work of the master that leads: what it does for clients, and with buckets and workers, on behalf of all masters.
//!
//! - [`namespace`]: the namespace as clients see it: names, pages of directories, refreshes. [`StateReader`] reads the
//!   tables of [`cavern_state`] while this master leads.
//! - [`listing`]: from the buckets into the namespace: directories on demand, whole prefixes in the background, single
//!   names; what is fresh and what is not.
//! - [`persist`]: from the namespace into the buckets of fs-mode mounts.
//! - [`repair`]: from worker to worker: replicas that fs-mode files lack.
//! - [`sessions`]: leases of clients, the stream of events of each, and what they leave behind.
//! - [`jobs`]: long work that commands ask for: loads and exports.
//! - [`mounts`]: buckets that are attached, changed and detached; [`workers`]: the worker table, and the way to them.
//! - [`views`]: parts of the namespace that are frozen.
//! - [`maintenance`], [`expiry`]: what is looked at all the time; [`background`]: the frame of all tasks, which notes
//!   how they fare.
//! - [`Request`]: what may be asked for twice, and is done once.
//!
//! Reads are served from RocksDB directly. Everything that changes goes through the log ([`cavern_consensus`]) and is
//! on disk before it is answered; whatever depends on a clock, a random number or a bucket is decided before it is
//! proposed. Nothing here knows of gRPC: errors are values of [`WorkError`], and long answers come in parts through
//! channels.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod background;
mod error;
pub mod expiry;
pub mod jobs;
pub mod listing;
pub mod maintenance;
pub mod metrics;
pub mod mounts;
pub mod namespace;
mod pause_detector;
pub mod persist;
mod reader;
pub mod repair;
mod request;
pub mod sessions;
#[cfg(test)]
mod tests;
pub mod views;
pub mod workers;

pub use error::{WorkError, if_there};
pub use reader::StateReader;
pub use request::Request;
