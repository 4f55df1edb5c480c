//! The master of a Cavern cluster: it owns the namespace, the mounts, the worker table and the jobs.
//!
//! - [`cavern_state`]: the tables in RocksDB, and what each command does to them.
//! - [`cavern_consensus`]: the replicated log that commands go through, and its clock.
//! - [`cavern_work`]: what the master that leads does: for clients, with buckets and with workers.
//! - [`bootstrap`]: how a master gets its place among several; [`leader_election`]: whether it leads; [`rotation`]: how
//!   the key of the cluster's secrets is changed for all of them.
//! - [`leader_state`]: all that a leader has, made when it begins to lead and ended with that; [`leader_tasks`]: its
//!   work begins and ends.
//! - [`services`]: what of this a leader has; [`service`]: the gRPC face of all that; [`server`]: the process.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod announce;
mod blocking;
mod bootstrap;
mod error;
mod feature_version;
mod leader_election;
mod leader_state;
mod leader_tasks;
mod rollback_detector;
mod rotation;
mod server;
mod service;
mod services;
#[cfg(test)]
mod tests;

pub use error::MasterError;
pub use server::run;
