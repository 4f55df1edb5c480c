//! The data plane: connections to workers, over TCP and, on the same host, over a Unix socket that hands out
//! descriptors.
//!
//! [`Socket`](crate::Socket) does the system calls, `frames` takes a byte stream apart, `receive_buffers` has memory
//! for payloads, `connection` multiplexes requests over one socket, `pool` keeps the connections to every worker of the
//! table, `breaker` leaves failed workers alone.

mod breaker;
mod connection;
mod frames;
mod pool;
mod receive_buffers;
#[cfg(test)]
mod secured;

pub use breaker::Attempt;
pub use pool::{Reserved, Route, WorkerPool};
