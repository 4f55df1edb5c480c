//! What happens when a part dies or stops answering: processes are killed, stopped with SIGSTOP and started again under
//! readers, and everything but the failed part goes on.
//!
//! They load the machine, and hold system calls against deadlines: few others run beside them (`.config/nextest.toml`).

// A test reports by panicking, and what it has measured on stderr.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stderr)]

mod blocked;
mod bucket_stopped;
mod cluster_stopped;
mod fuse_killed;
mod master_killed;
mod outages;
mod readers;
mod refusals;
mod shutdown;
mod worker_killed;
