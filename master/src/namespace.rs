//! The namespace as clients see it: names and inodes ([`lookup`]), directories page by page ([`pages`]), what is below
//! a path ([`usage`]), a path brought up to date with its bucket ([`refresh`]); and what of that is there for whoever
//! asks: the client ([`mount_access`]) and its user ([`user_access`]).

mod entry;
mod let_go;
mod lookup;
mod mount_access;
mod paced;
mod pages;
mod refresh;
mod touch;
mod usage;
mod user_access;

use std::time::Duration;

pub use lookup::{Lookups, components};
pub use pages::Listing;

/// Entries of one page of a directory.
const PAGE_ENTRIES: usize = 1000;
/// How often progress is reported.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);
