//! The master of a Cavern cluster: it owns the namespace, the mounts, the worker table and the jobs.
//!
//! - [`cavern_state`]: the tables in RocksDB, and what each command does to them.
//! - [`cavern_consensus`]: the replicated log that commands go through, and its clock.
//! - [`cavern_work`]: what the master that leads does: for clients, with buckets and with workers.
//! - [`group`]: how a master gets its place among several; [`lead`]: whether it leads; [`rotation`]: how the key of the
//!   cluster's secrets is changed for all of them.
//! - [`term`]: all that a leader has, made when it begins to lead and ended with that; [`leader`]: its work begins and
//!   ends.
//! - [`services`]: what of this a leader has; [`service`]: the gRPC face of all that; [`server`]: the process.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod announce;
mod blocking;
mod error;
mod feature_version;
mod group;
mod lead;
mod leader;
mod lost_pasts;
mod rotation;
mod server;
mod service;
mod services;
mod term;
#[cfg(test)]
mod tests;

pub use error::MasterError;
pub use server::run;
