//! Consensus: openraft on RocksDB, over gRPC between masters.
//!
//! A proposal travels like this. [`Proposer`] collects the commands that arrive while the log is being synced into one
//! entry (openraft syncs one append after the other, so this is where commands come to share a sync). The entry goes to
//! the [`log_store`], whose thread writes and syncs it, and over the [`network`] to the other masters, who do the same.
//! Once a majority has it, it is committed and goes to the [`state_machine`], which turns each command into one write
//! batch; the batch carries the position in the log, so that replay after a crash begins exactly behind it. The watch
//! sessions are notified of changes in applied order before the proposers get their outcomes.
//!
//! A master leads until another does, or until it has not heard of a majority for the time of a lease
//! ([`leader_lease`]): only then it reads its own state for others.
//!
//! Snapshots are RocksDB checkpoints: hard links, made in milliseconds, and sent file by file. After one the log is
//! purged, but for what a master that was away for a moment needs.

mod identity;
mod leader_lease;
mod log_store;
mod membership;
mod network;
mod node;
mod observe;
mod proposer;
mod service;
mod snapshot;
mod state_machine;
#[cfg(test)]
mod suite;
mod types;

pub use identity::{FIRST_NODE, Identity};
pub use leader_lease::LeaderLease;
pub use log_store::{has_log, purged};
pub use network::{MESSAGE_MAX, calls, channel};
pub use node::{Consensus, ConsensusConfig};
pub use observe::until;
pub use proposer::Proposer;
pub use service::RaftService;
pub use state_machine::{ChangeListener, read_position};
pub use types::{LeaderId, NodeId};
