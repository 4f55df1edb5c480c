//! The gRPC face of the master. The services translate; `master.proto` says what they promise.

mod call;
mod changes;
mod cluster;
mod gate;
mod guard;
mod lanes;
mod limits;
mod masters;
mod messages;
mod namespace;
mod peer;
mod roles;
mod session;

pub use gate::Gate;
pub use guard::Guarded;
pub use lanes::{Lane, Lanes, SlowThreads};
pub use limits::tenants;
pub use masters::RaftService;
pub use peer::{Peer, PeerAddress};
#[cfg(test)]
pub use roles::documented;
