//! Images against a model of a tree: read back, byte by byte, damaged, and mounted.

// Helpers of tests report by panicking, where the test sees it.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod damaged;
mod golden;
mod model;
mod outside;
mod round_trip;
