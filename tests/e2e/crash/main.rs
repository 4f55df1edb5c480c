//! What a crash leaves behind: a process dies at each point that `cavern_conf::Failpoint` names, in the middle of
//! programs that create, write, sync, rename and remove; it is started again; and then nothing that was promised is
//! missing, in the namespace or in the bucket.

// A test reports by panicking, and what it has measured on stderr.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stderr)]

mod bucket;
mod delegations;
mod matrix;
mod model;
mod power;
mod powerless;
mod snapshots;
mod workload;
