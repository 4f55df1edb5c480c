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
//! purged, but for what a master that was away for a moment needs ([`log_keeper`]).

mod identity;
mod leader_lease;
mod log_keeper;
mod log_store;
mod membership;
mod network;
mod node;
mod observe;
mod proposer;
mod service;
#[cfg(test)]
pub mod simulation;
mod snapshot;
mod state_machine;
#[cfg(test)]
mod suite;
mod threads;
mod types;

pub use identity::{FIRST_NODE, Identity};
pub use leader_lease::LeaderLease;
pub use log_keeper::LogLimits;
#[cfg(test)]
pub use log_store::carry_over;
pub use log_store::{has_log, purged};
pub use network::{MESSAGE_MAX, Ways};
pub use node::{Consensus, ConsensusConfig};
#[cfg(test)]
pub use observe::Observed;
pub use observe::until;
pub use proposer::{Proposer, Room};
pub use service::RaftService;
pub use state_machine::{ChangeListener, read_position};
pub use types::{LeaderId, NodeId};
#[cfg(test)]
pub use types::{LogId, log_id};
