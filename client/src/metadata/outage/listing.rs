//! Directories as their bucket lists them, page by page.
//!
//! A bucket goes on only where it stopped, so whoever reads a large directory leaves the state of its listing behind,
//! by the last name that he was given, and the next page begins with it. Who comes from a listing of the master has no
//! such state: for him the directory is listed from its beginning, without the names that he has passed.
//!
//! Where a bucket turns out to list in no order the listing begins anew, and names that were given already come again.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;
use cavern_ufs::{ListMode, Listed, Lister, Ufs, Windows};
use parking_lot::Mutex;
use tokio::time::timeout;

use crate::error::ClientError;

/// Listings that are remembered at a time. Each has the names of a page or two.
const KEPT_MAX: usize = 64;

/// Where readers stopped, the oldest first.
#[derive(Default)]
pub(super) struct BucketListings(Mutex<VecDeque<Stopped>>);

struct Stopped {
    directory: u64,
    last: Box<[u8]>,
    /// What comes after that name.
    rest: BucketListing,
}

impl Stopped {
    fn is_at(&self, directory: u64, last: &[u8]) -> bool {
        self.directory == directory && *self.last == *last
    }
}

impl BucketListings {
    /// The listing of a directory after a name, where somebody stopped.
    pub(super) fn going_on(&self, directory: u64, after: &[u8]) -> Option<BucketListing> {
        let kept = self.0.lock();
        kept.iter().rev().find(|stopped| stopped.is_at(directory, after)).map(|stopped| stopped.rest.clone())
    }

    pub(super) fn keep(&self, directory: u64, last: &[u8], rest: BucketListing) {
        let mut kept = self.0.lock();
        kept.retain(|stopped| !stopped.is_at(directory, last));
        if kept.len() == KEPT_MAX {
            kept.pop_front();
        }
        kept.push_back(Stopped { directory, last: last.into(), rest });
    }

    pub(super) fn clear(&self) {
        self.0.lock().clear();
    }
}

/// A listing in progress.
#[derive(Clone, Debug)]
pub(super) struct BucketListing {
    prefix: String,
    lister: Lister,
    windows: Windows,
    /// Names up to this one are left out.
    after: Box<[u8]>,
    ready: VecDeque<(Bytes, Listed)>,
    is_read: bool,
}

impl BucketListing {
    /// From the beginning, without names up to `after`.
    pub(super) fn new(ufs: &Ufs, prefix: &str, after: &[u8]) -> Self {
        Self {
            prefix: prefix.to_owned(),
            lister: ufs.list(prefix, ListMode::Directory),
            windows: Windows::new(prefix.to_owned()),
            after: after.into(),
            ready: VecDeque::new(),
            is_read: false,
        }
    }

    /// Whether the bucket must be asked to have so many names ready.
    pub(super) fn has_less_than(&self, names: usize) -> bool {
        !self.is_read && self.ready.len() < names
    }

    /// Asks for the next page.
    pub(super) async fn read_on(&mut self, wait: Duration) -> Result<(), ClientError> {
        let page = match timeout(wait, self.lister.next_page()).await {
            Ok(page) => page?,
            Err(_elapsed) => {
                let waited_ms = wait.as_millis() as u64;
                return Err(ClientError::BucketSilent { key: self.prefix.clone(), waited_ms });
            }
        };
        self.is_read = page.is_none();
        if page.as_ref().is_some_and(|page| page.restarts) {
            self.ready.clear();
        }
        let window = self.windows.page(page.as_ref(), self.is_read);
        self.ready.extend(window.names.into_iter().filter(|(name, _)| **name > *self.after));
        Ok(())
    }

    /// The next names.
    pub(super) fn take(&mut self, names: usize) -> Vec<(Bytes, Listed)> {
        self.ready.drain(..names.min(self.ready.len())).collect()
    }

    /// Names that were taken are the next again.
    pub(super) fn give_back(&mut self, names: Vec<(Bytes, Listed)>) {
        for name in names.into_iter().rev() {
            self.ready.push_front(name);
        }
    }

    /// Whether all names were taken.
    pub(super) fn is_over(&self) -> bool {
        self.is_read && self.ready.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, HashMap};

    use cavern_conf::schema;
    use cavern_ufs::MemoryBucket;

    use super::*;

    const WAIT: Duration = Duration::from_secs(10);

    async fn rest(mut listing: BucketListing, page: usize) -> Vec<String> {
        let mut names = Vec::new();
        while !listing.is_over() {
            while listing.has_less_than(page) {
                listing.read_on(WAIT).await.unwrap();
            }
            let taken = listing.take(page);
            names.extend(taken.into_iter().map(|(name, _)| String::from_utf8(name.to_vec()).unwrap()));
        }
        names
    }

    #[tokio::test]
    async fn a_long_listing_has_every_name_once_wherever_it_goes_on() {
        let bucket = MemoryBucket::named("outage-listing");
        let mut expected = BTreeSet::new();
        for number in 0..2500 {
            bucket.put(&format!("d/a-{number:05}"), "x");
            expected.insert(format!("a-{number:05}"));
        }
        for key in ["d/a/below", "d/a", "d/b.txt", "d/b/x/y", "d/.", "d/"] {
            bucket.put(key, "x");
        }
        expected.extend(["a", "b", "b.txt"].map(str::to_owned));
        let ufs = Ufs::open("memory://outage-listing", &HashMap::new(), &schema::Ufs::default()).unwrap();
        let whole = rest(BucketListing::new(&ufs, "d/", b""), 700).await;
        assert_eq!(whole.len(), expected.len());
        assert_eq!(whole.iter().cloned().collect::<BTreeSet<_>>(), expected);

        // Where a reader stopped, all go on who stopped there.
        let kept = BucketListings::default();
        let mut listing = BucketListing::new(&ufs, "d/", b"");
        listing.read_on(WAIT).await.unwrap();
        let first = listing.take(100);
        let last = first.last().unwrap().0.clone();
        kept.keep(7, &last, listing);
        assert!(kept.going_on(8, &last).is_none() && kept.going_on(7, b"a").is_none());
        for _ in 0..2 {
            let going_on = kept.going_on(7, &last).unwrap();
            assert_eq!(rest(going_on, 1000).await, whole[100..]);
        }
        kept.clear();
        assert!(kept.going_on(7, &last).is_none());

        // In no order, which shows before a name was given.
        bucket.list_in_shards(2, 1000);
        let unordered = rest(BucketListing::new(&ufs, "d/", b""), 5000).await;
        assert_eq!(
            (unordered.len(), unordered.into_iter().collect::<BTreeSet<_>>()),
            (expected.len(), expected.clone())
        );
        bucket.list_in_shards(1, 1000);

        // From a listing in the order of names.
        let after = rest(BucketListing::new(&ufs, "d/", b"a-02000"), 300).await;
        let behind: BTreeSet<_> = expected.iter().filter(|name| name.as_str() > "a-02000").cloned().collect();
        assert_eq!((after.len(), after.into_iter().collect::<BTreeSet<_>>()), (behind.len(), behind));
    }
}
