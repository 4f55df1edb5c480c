//! `cv bench`: what a directory gives to programs, beside a baseline. The directory is a mount or any other one; all
//! of it goes through ordinary system calls of this process.
//!
//! A workload ([`workloads`]) is run in rounds on the target and on the baseline in turn, each time the other one first
//! ([`rounds`]). A round has one or several [`measure::Phase`]s: threads that do one kind of operation, each with a
//! buffer and a [`histogram::Histogram`] of its own. What fails is counted apart, and never as done.
//!
//! What a workload writes is in a directory that it makes ([`scratch`]) and removes, on errors and signals too.

mod histogram;
mod measure;
mod picture;
mod report;
mod rounds;
mod scratch;
mod tree;
pub mod workloads;

pub use measure::Phase;
pub use picture::{check as check_picture, write as write_picture};
pub use report::{Heading, Report};
pub use rounds::{Sides, Stop, Turn, Workload, run as run_rounds};
pub use tree::{Match, Tree};
