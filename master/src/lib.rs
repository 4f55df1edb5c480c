//! The master of a Cavern cluster: it owns the namespace, the mounts, the worker table and the jobs.
//!
//! - [`cavern_state`]: the tables in RocksDB, and what each command does to them; [`reader`] reads them while this
//!   master leads.
//! - [`cavern_consensus`]: the replicated log that commands go through, and its clock.
//! - [`namespace`]: the namespace as clients see it: names, pages of directories, refreshes.
//! - [`listing`]: from the buckets into the namespace: directories on demand, whole prefixes in the background, single
//!   names; what is fresh and what is not.
//! - [`repair`]: from worker to worker: replicas that fs-mode files lack.
//! - [`sessions`]: leases of clients, the stream of events of each, and what they leave behind.
//! - [`jobs`]: long work that commands ask for: loads and exports.
//! - [`mounts`]: buckets that are attached, changed and detached; [`workers`]: the worker table.
//! - [`group`]: how a master gets its place among several; [`lead`]: whether it leads; [`rotation`]: how the key of the
//!   cluster's secrets is changed for all of them.
//! - [`term`]: all that a leader has, made when it begins to lead and ended with that; [`leader`]: what it does all the
//!   time; [`background`]: the frame of its tasks, which notes how they fare.
//! - [`services`]: what of this a leader has; [`service`]: the gRPC face of all that; [`request`]: what may be asked
//!   for twice, and is done once.
//!
//! Reads are served from RocksDB directly. Everything that changes goes through the log and is on disk before it is
//! answered; whatever depends on a clock, a random number or a bucket is decided before it is proposed.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod announce;
mod background;
mod blocking;
mod error;
mod expiry;
mod feature_version;
mod group;
mod jobs;
mod lead;
mod leader;
mod listing;
mod lost_pasts;
mod metrics;
mod mounts;
mod namespace;
mod persist;
mod reader;
mod repair;
mod request;
mod rotation;
mod server;
mod service;
mod services;
mod sessions;
mod silence;
mod term;
#[cfg(test)]
mod tests;
mod upkeep;
mod workers;

pub use error::MasterError;
pub use server::run;
