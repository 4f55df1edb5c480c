//! A whole cluster on this host: `cv local`.
//!
//! ```text
//! cv local up ─┬─ supervisor ── cv dev-s3        D/cluster.json  topology, endpoints, keys (written by up)
//!              ├─ supervisor ── cv master …      D/cluster.toml  the configuration that every child is given
//!              ├─ supervisor ── cv worker …      D/run/NAME.json pid or exit of one child (written by its supervisor)
//!              └─ supervisor ── cv fuse          D/run/NAME.stop this child is stopped on purpose
//!                                            D/log/NAME.log  what the child said
//!                                            D/certificates  with --secure: who is who, and the token of the HTTP
//!                                                            ports (written by up)
//! ```
//!
//! `up` returns when the mount is usable; nothing of it stays behind but the children, each below a supervisor: a small
//! process that waits for its child, writes down how it ended, because only a parent can know that, and starts it again
//! unless it was stopped on purpose. A recorded pid counts only together with the process's start time and the boot id,
//! so that a number that has been given to another process is never signalled.

mod certificates;
mod child;
mod down;
mod files;
mod masters;
pub mod mounted;
pub mod one_host;
mod plan;
mod purge;
mod record;
pub mod seed;
mod start;
mod status;
mod supervisor;
mod up;

pub use child::ChildName;
pub use down::{kill, stop, stop_all};
pub use plan::UpOptions;
pub use purge::purge;
pub use record::{Cluster, DirArgs, default_directory};
pub use status::status;
pub use supervisor::supervise;
pub use up::{start, up};
