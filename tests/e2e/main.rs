//! End-to-end tests, one file for each promise. The harness is `cavern_tests`.

mod command_line;
mod first_read;
mod local_cluster;
