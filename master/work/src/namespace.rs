//! The namespace as clients see it: names and inodes ([`lookup`]), directories page by page ([`pages`]), what is below
//! a path ([`usage`]), a path brought up to date with its bucket ([`refresh`]); and what of that is there for whoever
//! asks: the client ([`mount_access`]) and its user ([`user_access`]).

mod entry;
mod lookup;
mod mount_access;
mod paced;
pub mod pages;
mod path;
mod read_after_recall;
mod refresh;
mod refresh_listings;
mod usage;
mod user_access;

use std::sync::Arc;
use std::time::Duration;

use cavern_security::RateCharge;

use crate::listing::Listings;
use crate::mounts::Mounts;
use crate::reader::StateReader;
use crate::sessions::{Recalls, WatchHub};

pub use path::components;

/// Entries of one page of a directory.
const PAGE_ENTRIES: usize = 1000;
/// How often progress is reported.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

/// The namespace as clients see it. Cheap to clone.
#[derive(Clone)]
pub struct Lookups {
    pub reader: StateReader,
    pub listings: Listings,
    pub mounts: Arc<Mounts>,
    pub watch: Arc<WatchHub>,
    pub recalls: Arc<Recalls>,
    pub refresh_wait: Duration,
    /// The session that asks, and is notified of what it was answered when that changes; 0 for whoever keeps nothing.
    pub asker: u64,
    /// The name of the client that asks, if there may be mounts that are not there for all; `None` for whoever sees all
    /// of them.
    pub client: Option<Arc<str>>,
    /// What the call owes for what it does in mounts.
    pub charge: Option<Arc<RateCharge>>,
    /// What listings say will do: no bucket is asked about a single name, nor about the attributes that it keeps. A
    /// directory that never was listed is listed to its end.
    pub listings_only: bool,
}
