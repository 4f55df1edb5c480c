//! What every Cavern process shares before it does its own work: the typed configuration and the plumbing of a
//! process (logs, signals, ports, the HTTP port with metrics and health).
//!
//! One TOML file describes a whole cluster, and the same file serves every process on every host. [`schema`] is its
//! shape; [`Effective::load`] finds it, lays the environment over it, and refuses what is unknown, malformed or
//! impossible with the place and what would be right; [`Effective::show`] prints what holds and where it came from.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

#[macro_use]
mod named;

pub mod accounts;
pub mod backoff;
mod budget;
mod check;
mod demand;
mod dirs;
mod endpoint;
mod error;
mod exposure;
mod failpoint;
mod file_usage;
pub mod host;
mod host_limits;
mod load;
mod own_address;
pub mod process;
mod rules;
pub mod schema;
mod settings;
mod show;
mod units;

pub use budget::{Budget, Budgets, Limits};
pub use check::check_master;
pub use dirs::{DirSpec, Tier};
pub use endpoint::AllowedEndpoint;
pub use error::{ConfigError, Problem, SettingSource};
pub use exposure::Role;
pub use failpoint::{FAILPOINTS_VARIABLE, Failpoint, enable_failpoints};
pub use file_usage::FileUsage;
pub use host_limits::{HostLimits, control_groups};
pub use load::Effective;
pub use schema::Config;
pub use units::{ByteSize, Interval, ResourceLimit, counted};
