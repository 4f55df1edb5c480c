//! Ways to the other processes of a cluster, for every process that needs one: [`MasterChannel`] to the master,
//! [`WorkerPool`] to the workers, and [`Placement`], which says at which of them a block is.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod descriptors;
pub mod error;
pub mod journals;
mod keys;
mod local_socket;
mod low_water;
pub mod master;
pub mod placement;
mod socket;
pub mod workers;

pub use error::NetError;
pub use keys::key_lender;
pub use master::MasterChannel;
pub use placement::Placement;
pub use socket::{MAX_DESCRIPTORS, Socket};
pub use workers::{Reserved, Route, WorkerPool};
