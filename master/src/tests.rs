//! Tests of the master as a whole, in one process: a real database, a real log, buckets in memory.

mod announce;
mod arbitrary;
mod batches;
mod clients;
mod clock;
mod coherence;
mod delegations;
mod first_listing;
mod group;
pub mod harness;
mod index;
mod jobs;
mod locks;
mod members;
mod model;
mod mutations;
mod namespace;
mod persist;
mod raft_log;
mod repair;
mod replay;
mod requests;
mod restart;
mod rotation;
mod sessions;
mod views;
