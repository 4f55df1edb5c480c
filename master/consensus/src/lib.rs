//! Consensus: openraft on RocksDB, over gRPC between masters.
//!
//! A proposal travels like this. [`Proposer`] collects the commands that arrive while entries are on their way into one
//! entry. The entry goes to the [`log_store`], whose thread writes it and syncs it with what else has queued up, and at
//! the same time over the [`network`] to the other masters, who do the same. Once a majority has it, it is committed
//! and goes to the [`state_machine`], which turns each command into one write batch; the batch carries the position in
//! the log, so that replay after a crash begins exactly behind it. The watch sessions are notified of changes in
//! applied order before the proposers get their outcomes.
//!
//! All of this but the proposer is on [`threads`] of its own, so that heartbeats are on time whatever else a master has
//! to do.
//!
//! A master leads until another does, or until it has not heard of a majority for the time of a lease
//! ([`leader_lease`]): only then it reads its own state for others.
//!
//! Snapshots are RocksDB checkpoints: hard links, made in milliseconds, and sent file by file. After one the log is
//! purged, but for what a master that was away for a moment needs ([`log_retention`]).
//!
//! Before any of that, [`recovery`] looks whether the database is whole. [`leadership`] tells when a leadership begins
//! and ends; [`clock`] is the time that the log has seen. What a master does as long as it leads is not here, nor who
//! serves its gRPC port: that calls [`Consensus`].

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod blocking;
pub mod clock;
mod error;
mod identity;
mod leader_lease;
pub mod leadership;
mod log_retention;
mod log_store;
mod membership;
mod metrics;
mod network;
mod node;
mod observe;
mod position;
mod proposer;
pub mod recovery;
mod server;
#[cfg(test)]
mod simulation;
mod snapshot;
mod state_machine;
#[cfg(test)]
mod suite;
mod threads;
mod types;

pub use blocking::run_blocking;
pub use clock::Clock;
pub use error::ConsensusError;
pub use identity::{FIRST_NODE, Identity};
pub use leader_lease::LeaderLease;
pub use log_retention::LogLimits;
pub use log_store::has_log;
pub use metrics::ConsensusMetrics;
pub use network::{MESSAGE_MAX, PeerConnector};
pub use node::{Consensus, ConsensusConfig};
pub use observe::{Observed, until};
pub use proposer::{ProposalPermit, Proposer};
pub use server::offer_of;
pub use state_machine::ChangeListener;
pub use types::{LeaderId, LogId, NodeId};
