//! The FUSE client: a namespace of Cavern as directories and files of this host.
//!
//! [`kernel`] speaks the FUSE protocol and knows nothing of what is served; [`filesystem`] has the operations, each as
//! thin as it can be above `cavern_client`; [`invalidation`] carries what has changed to the kernel's caches; [`run`]
//! ties them together for the life of a process. [`supervisor`] keeps the connection to the kernel when that life ends
//! early, and [`mount_journal`] what the next process must know. A worker of the host keeps that, too, and starts
//! [`replay`] when there is no next one. [`trace`] has what slow requests waited for.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod aliases;
mod data_set;
mod error;
pub mod filesystem;
pub mod invalidation;
mod journal_at_worker;
pub mod kernel;
mod metrics;
pub mod mount_journal;
mod process;
pub mod root;
pub mod supervisor;
pub mod trace;

pub use error::FuseError;
pub use journal_at_worker::replay;
pub use process::{run, run_supervised};
pub use supervisor::supervise;
