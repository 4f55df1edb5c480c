//! The master of a Cavern cluster.

mod error;
mod server;

pub use error::MasterError;
pub use server::run;
