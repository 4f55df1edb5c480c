//! Outages: what this client does while no master answers.
//!
//! What is cached is served as it is, but for strict mounts. In cache-mode the bucket is the truth, so names that are
//! not cached are asked of the bucket itself: `bucket` asks, `listing` reads directories, `inodes` has the numbers of
//! what is found so. An outage begins when no master has answered for longer than an election takes, and ends with the
//! first answer. Whatever was learnt from buckets is forgotten then, by the kernel as well, since no master knows that
//! it was learnt: names lead to the master's inodes from their next lookup on. What is open stays open: an inode of an
//! outage is one version of one object, as any other.

mod bucket;
mod inodes;
mod listing;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use cavern_conf::schema::{self, OutageLookups};
use cavern_net::NetError;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::directory::{Directory, root_location};
use super::node::Node;
use super::parts::{Inner, Metadata};
use super::sink::InvalidationSink;
use crate::error::ClientError;
use crate::mounts::MountView;
use crate::single_flight::SingleFlight;
use inodes::{OutageInodes, is_of_outage};
use listing::BucketListings;

/// An election takes a second or two, and a group that has lost its leader has another one by then.
const ELECTION_MOST: Duration = Duration::from_secs(4);

pub(super) struct Outage {
    which: OutageLookups,
    /// Silence of all masters after which it begins: whoever asked when it began has some of his time left.
    begins_after: Duration,
    /// Since when there is one. `is_active` mirrors that for all who must not wait.
    since: watch::Sender<Option<Instant>>,
    is_active: AtomicBool,
    /// What buckets were asked in this one.
    asked: AtomicU64,
    inodes: OutageInodes,
    listings: BucketListings,
    lookups: SingleFlight<DirectoryAndName, Result<Arc<Node>, ClientError>>,
}

type DirectoryAndName = (u64, Box<[u8]>);

impl Outage {
    pub(super) fn new(conf: &schema::Client) -> Self {
        Self {
            which: conf.outage_lookups,
            begins_after: ELECTION_MOST.min(conf.metadata_timeout.get() * 4 / 5),
            since: watch::Sender::new(None),
            is_active: AtomicBool::new(false),
            asked: AtomicU64::new(0),
            inodes: OutageInodes::new(conf.metadata_cache_entries),
            listings: BucketListings::default(),
            lookups: SingleFlight::default(),
        }
    }

    fn is_active(&self) -> bool {
        self.is_active.load(Relaxed)
    }

    /// Whether names of a mount are asked of its bucket now.
    fn covers(&self, mount: &MountView) -> bool {
        self.is_active() && mount.is_asked_without_masters(self.which)
    }

    fn begin(&self) {
        self.asked.store(0, Relaxed);
        self.since.send_replace(Some(Instant::now()));
        self.is_active.store(true, Relaxed);
    }

    /// How long it was, and how often buckets were asked.
    fn end(&self) -> (Duration, u64) {
        self.is_active.store(false, Relaxed);
        self.listings.clear();
        let since = self.since.send_replace(None);
        (since.map(|since| since.elapsed()).unwrap_or_default(), self.asked.load(Relaxed))
    }
}

impl Inner {
    /// Whether a node of the cache may be shown: one that a bucket told of is as old as that, and is nothing once
    /// masters answer.
    pub(super) fn may_show(&self, node: &Node) -> bool {
        if !is_of_outage(node.inode) {
            return true;
        }
        let ttl = node.mount.as_ref().and_then(|mount| mount.metadata_ttl());
        let age = self.outage.inodes.age(node.inode);
        self.outage.is_active() && age.is_some_and(|age| ttl.is_none_or(|ttl| age < ttl))
    }

    /// Whether the absence of names in a directory may be told from what is cached. While the bucket can be asked, it
    /// is for as long as a listing is fresh.
    pub(super) fn may_tell_absence(&self, directory: u64) -> bool {
        let Some(known) = self.covered(directory) else { return true };
        let age = known.age(Instant::now());
        known.ttl().is_none_or(|ttl| age.is_some_and(|age| age < ttl))
    }

    /// Whether the listing of a directory may be shown that is cached: one that the bucket gave, as long as it is
    /// fresh, and an earlier one in any case.
    pub(super) fn may_show_listing(&self, directory: u64) -> bool {
        let Some(known) = self.covered(directory) else { return true };
        let (Some(age), Some(ttl)) = (known.age(Instant::now()), known.ttl()) else { return true };
        let length = self.outage.since.borrow().map(|since| since.elapsed()).unwrap_or_default();
        age >= length || age < ttl
    }

    fn covered(&self, directory: u64) -> Option<Arc<Directory>> {
        if !self.outage.is_active() {
            return None;
        }
        let known = self.names.directories.get(directory)?;
        known.mount.as_ref().is_some_and(|mount| self.outage.covers(mount)).then_some(known)
    }
}

impl Metadata {
    /// An inode that a bucket told of in an outage; `None` for all others.
    pub(super) fn outage_node(&self, inode: u64) -> Option<Result<Arc<Node>, ClientError>> {
        let known = || self.inner.outage.inodes.get(inode);
        is_of_outage(inode).then(|| known().ok_or_else(|| ClientError::Stale(format!("inode {inode} of an outage"))))
    }

    /// The master's inode of a directory: another one if a bucket told of it in an outage.
    pub(super) async fn inode_of_master(&self, directory: u64) -> Result<u64, ClientError> {
        let Some(node) = self.outage_node(directory) else { return Ok(directory) };
        let node = node?;
        let Some(mount) = node.mount.clone() else { return Ok(directory) };
        let key = node.key();
        let below = key.strip_prefix(&*root_location(&mount)).unwrap_or(&key).trim_end_matches('/');
        match self.ask_path(&format!("{}/{below}", mount.path())).await {
            Ok(known) => Ok(known.inode),
            Err(ClientError::NotFound(_)) => Err(ClientError::Stale(node.to_string())),
            Err(error) => Err(error),
        }
    }

    /// Changes of a bucket that is asked for names now are not begun: the master would have to be told of them. Those
    /// on an inode of an outage that is over are `Stale`, so that whoever makes them looks the master's up.
    pub(crate) fn check_change(&self, on: &Node) -> Result<(), ClientError> {
        let is_covered = on.mount.as_ref().is_some_and(|mount| self.inner.outage.covers(mount));
        if !is_covered {
            return if is_of_outage(on.inode) { Err(ClientError::Stale(on.to_string())) } else { Ok(()) };
        }
        let cause = format!("{on} cannot be changed before one does");
        Err(ClientError::Net(NetError::MasterUnavailable { masters: self.inner.master.addresses(), cause }))
    }

    /// Notes when an outage begins and ends, until `stop`.
    pub(crate) async fn follow_outages(&self, sink: Arc<dyn InvalidationSink>, stop: CancellationToken) {
        stop.run_until_cancelled(self.inner.follow_outages(&*sink)).await;
    }
}

impl Inner {
    async fn follow_outages(&self, sink: &dyn InvalidationSink) {
        loop {
            let cause = self.master.silent_for(self.outage.begins_after).await;
            self.outage.begin();
            self.stats.outages.inc();
            self.stats.outage.set(1);
            let mounts = self.tables.mounts();
            let asked = mounts.iter().filter(|mount| self.outage.covers(mount)).count();
            tracing::warn!(
                masters = self.master.addresses(),
                mounts = mounts.iter().count(),
                asked,
                "no master answers ({cause}): what is cached is served, and buckets are asked for other names of \
                 cache-mode mounts (client.outage_lookups)"
            );
            self.master.answering().await;
            let (length, questions) = self.outage.end();
            if questions > 0 {
                self.names.clear();
                sink.reset();
            }
            self.stats.outage.set(0);
            tracing::warn!(seconds = length.as_secs(), questions, "a master answers again: names are asked of it");
        }
    }
}

#[cfg(test)]
mod tests {
    use cavern_conf::Interval;

    use super::*;

    #[test]
    fn an_outage_begins_after_an_election_and_before_who_asked_gives_up() {
        for (timeout_ms, expected_ms) in [(5000, 4000), (60_000, 4000), (2000, 1600)] {
            let conf = schema::Client { metadata_timeout: Interval::millis(timeout_ms), ..schema::Client::default() };
            assert_eq!(Outage::new(&conf).begins_after, Duration::from_millis(expected_ms));
        }
    }
}
