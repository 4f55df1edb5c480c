//! The gRPC face of the master. The services translate; `master.proto` says what they promise.

mod call;
mod changes;
mod cluster;
mod guard;
mod leader_only;
mod limits;
mod masters;
mod messages;
mod namespace;
mod peer;
mod roles;
mod session;
mod views;

pub use call::{ANSWER_MAX, REQUEST_MAX};
pub use guard::Guarded;
pub use leader_only::LeaderOnly;
pub use limits::tenants;
pub use masters::RaftService;
pub use peer::{Peer, PeerAddress};
#[cfg(test)]
pub use roles::documented;
