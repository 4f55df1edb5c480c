//! The harness of the end-to-end tests: real processes, a real mount, the real S3 protocol.
//!
//! ```no_run
//! use cavern_tests::{Cluster, Options};
//!
//! let cluster = Cluster::up(Options { workers: 2, ..Options::default() });
//! let tree = cluster.seed("bucket", "prefix/", 200, 50_000);          // key → bytes
//! cluster.mount("s3://bucket/prefix", "/data", &["--metadata-ttl", "5s"]);
//! cluster.s3.reset_stats();
//! cluster.assert_tree("data", "prefix/", &tree);                      // every byte, through the mount
//! assert_eq!(cluster.s3.requests("HEAD"), 0);
//! cluster.kill("worker0");                                            // SIGKILL; start("worker0") brings it back
//! // Dropping the cluster stops every process, unmounts and removes its directory, whatever the test did.
//! ```
//!
//! [`Cluster`] is `cv local up` in a temporary directory; [`Cluster::cv`] runs any other command against it. [`S3`] is
//! the bucket behind it: objects, request counters, injected faults. Of several masters (`masters: 3`)
//! [`Cluster::leader`] finds the one that leads, and [`Cluster::kill_leader`] kills it. [`eventually`] waits for a
//! state with a deadline; nothing here sleeps for a fixed time and hopes. Each test has its own cluster, so tests may
//! run side by side. [`Network`] is several hosts on this machine, and the network between them.
//!
//! The executable is taken from `CV_BIN`, else from beside the test's own (`cargo build --release -p cavern`).
//! Whatever fails here fails the test: the harness panics with what the failing command said.

// A harness reports by panicking, where the test sees it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stderr)]

mod automount;
mod cluster;
mod disk;
mod environment;
mod group;
mod http;
mod masters;
mod network;
mod outside;
mod over;
mod part;
mod process;
mod s3;
mod space;
mod wait;

pub use automount::Automount;
pub use cluster::{COUNTED, Child, Cluster, Finished, Options, Status, cv_path};
pub use disk::Disk;
pub use environment::number;
pub use group::ControlGroup;
pub use http::{HttpAnswer, Https, http_get, http_request, http_request_with};
pub use masters::{ask_masters, leading_master, masters_agree};
pub use network::{Namespace, Network};
pub use outside::{Moto, OutsideStore, outside_command, python};
pub use over::MountedOver;
pub use part::PartMount;
pub use process::Process;
pub use s3::{S3, S3Admin};
pub use wait::{eventually, eventually_or, within};
