//! End-to-end tests, one file for each promise. The harness is `cavern_tests`.

mod command_line;
mod deleted;
mod first_read;
mod local_cluster;
mod odd_objects;
mod posix;
mod replaced;
