//! End-to-end tests, one file for each promise. The harness is `cavern_tests`.

// A test reports by panicking, and what it has measured on stderr.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stderr)]

mod bad;
#[path = "crash/bucket.rs"]
mod bucket;
mod cache_attributes;
mod cache_writes;
mod client_restart;
mod coherence;
mod command_line;
mod deleted;
mod epochs;
mod exports;
mod file_trees;
mod first_read;
mod fs_changes;
mod fs_commands;
mod fs_mode_acls;
mod fs_mode_behind;
mod fs_mode_content;
mod fs_mode_copied_blocks;
mod fs_mode_copy;
mod fs_mode_existing;
mod fs_mode_handles;
mod fs_mode_held;
mod fs_mode_lease;
mod fs_mode_locks;
mod fs_mode_names;
mod fs_mode_open;
mod fs_mode_origin;
mod fs_mode_pages;
mod fs_mode_privileges;
mod fs_mode_quotas;
mod fs_mode_random;
mod fs_mode_removed;
mod fs_mode_replicas;
mod fs_mode_signals;
mod fs_mode_stat;
mod fs_mode_tmpfile;
mod fs_mode_ttl;
mod fs_mode_unclaimed;
mod hosts;
mod keeper;
mod loads;
mod local_cluster;
mod lock_ends;
mod masters;
mod memory;
mod mounting;
mod no_open;
mod nodes;
mod odd_objects;
mod outages;
mod persist;
mod plainfs;
mod posix;
mod programs;
mod quiet_logs;
mod random_reads;
mod repeated;
mod replaced;
mod running;
mod s3_clients;
mod secrets;
mod trees;
