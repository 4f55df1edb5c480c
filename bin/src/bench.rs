//! `cv bench`: what a directory gives to programs, beside a baseline. The directory is a mount or any other one; all
//! of it goes through ordinary system calls of this process.
//!
//! A [`Workload`] is run in rounds on the target and on the baseline in turn, each time the other one first
//! ([`rounds`]). A round has one or several [`tally::Phase`]s: threads that do one kind of operation, each with a
//! buffer and a [`histogram::Histogram`] of its own ([`workers`]). What fails is counted apart, and never as done.
//!
//! What a workload writes is in a directory that it makes ([`scratch`]) and removes, on errors and signals too.

mod cache;
mod close;
mod copy;
mod files;
mod histogram;
mod ingest;
mod list;
mod machine;
mod meta;
mod picture;
mod random;
mod report;
mod rounds;
mod scratch;
mod seed;
mod sides;
mod stop;
mod stream;
mod table;
mod tally;
mod tree;
mod workers;
mod workload;

pub use cache::CachePolicy;
pub use files::Files;
pub use ingest::Ingest;
pub use list::List;
pub use meta::Meta;
pub use picture::{check as check_picture, write as write_picture};
pub use random::{Length, RandomReads};
pub use report::{Heading, Report};
pub use rounds::run as run_rounds;
pub use sides::Sides;
pub use stop::Stop;
pub use stream::{ReadStreams, WriteStreams};
pub use tree::{Match, Tree};
pub use workload::Workload;
