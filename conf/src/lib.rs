//! What every Cavern process shares before it does its own work: the typed configuration and the plumbing of a
//! process (logs, signals, ports, the HTTP port with metrics and health).
//!
//! One TOML file describes a whole cluster, and the same file serves every process on every host; [`schema`] is its
//! shape, [`units`] its sizes and durations.

pub mod process;
pub mod schema;
mod units;

pub use schema::Config;
pub use units::{ByteSize, Interval, UnitError};
