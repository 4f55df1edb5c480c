//! Consensus: openraft on RocksDB.
//!
//! A proposal travels like this. [`Proposer`] collects the commands that arrive while the log is being synced into one
//! entry (openraft syncs one append after the other, so this is where commands come to share a sync). The entry goes to
//! the [`log_store`], whose thread writes and syncs it. Once committed it goes to the [`state_machine`], which turns
//! each command into one write batch; the batch carries the position in the log, so that replay after a crash begins
//! exactly behind it. The watch sessions are notified of changes in applied order before the proposers get their
//! outcomes.
//!
//! Snapshots are RocksDB checkpoints: hard links, made in milliseconds. After one the log is purged.
//!
//! In this version a cluster has one voter; the [`network`] to others says so.

mod log_store;
mod network;
mod node;
mod proposer;
mod snapshot;
mod state_machine;
#[cfg(test)]
mod suite;
mod types;

pub use log_store::purged;
pub use node::{Consensus, ConsensusConfig};
pub use proposer::Proposer;
pub use state_machine::{ChangeListener, read_position};
