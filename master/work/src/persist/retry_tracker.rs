//! What is under way, and what has failed: in memory, since a new leader may begin anew.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use cavern_conf::backoff::{self, Profile};
use parking_lot::Mutex;
use tokio::time::Instant;

/// Failures that are remembered one by one. Beyond it things are tried again at the pace of their bucket.
const REMEMBERED: usize = 10_000;
/// Who waits for something gives up when it was refused so often, or has failed in another way for so long. It is tried
/// again nevertheless.
const REFUSALS: u32 = 5;
pub(super) const GIVE_UP_AFTER: Duration = Duration::from_secs(60);

/// Something to be done.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Item {
    Inode(u64),
    Key(u32, String),
}

/// Whose fault it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FailureKind {
    /// Other things of the same bucket may go well.
    Item,
    /// It concerns this item alone, and a person has to mend it.
    NeedsOperator,
    /// Of a file as it was after this change: blocks of it are lost, and a person has to give them up.
    Lost {
        change: u64,
    },
    Bucket,
    /// It concerns the whole bucket, and a person has to mend it.
    Denied,
}

impl FailureKind {
    pub(super) fn is_of_bucket(self) -> bool {
        matches!(self, Self::Bucket | Self::Denied)
    }

    fn is_transient(self) -> bool {
        matches!(self, Self::Item | Self::Bucket)
    }
}

/// How soon something is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Priority {
    Normal,
    /// Somebody has been waiting for it since then: failures before that keep nothing waiting.
    Expedited(Instant),
}

/// What is known of something that failed.
#[derive(Clone, Debug)]
struct Failure {
    count: u32,
    until: Instant,
    /// Empty for what only has to wait.
    error: String,
    /// The first and the last time without a success between them.
    first: Instant,
    at: Instant,
    /// The last failure may pass by itself.
    is_transient: bool,
}

impl Failure {
    fn new(before: Option<&Self>, kind: FailureKind, error: &str, pauses: Profile) -> Self {
        let now = Instant::now();
        let before = before.filter(|before| before.count > 0);
        let failed_before = before.map_or(0, |before| before.count);
        Self {
            count: failed_before + 1,
            until: now + pauses.pause(failed_before),
            error: error.to_owned(),
            first: before.map_or(now, |before| before.first),
            at: now,
            is_transient: kind.is_transient(),
        }
    }

    /// Whether somebody who has been waiting since then should not wait any longer.
    fn is_given_up(&self, since: Instant) -> bool {
        let is_refused = !self.is_transient && self.count >= REFUSALS;
        self.first >= since && self.count > 0 && (is_refused || self.first.elapsed() >= GIVE_UP_AFTER)
    }
}

#[derive(Default)]
struct State {
    /// Inodes and keys that are being worked on.
    busy: HashSet<Item>,
    failures: HashMap<Item, Failure>,
    /// Files that have lost blocks, each with its last change of then. All of them, as long as they are not written:
    /// whoever waits must be told when nothing else is left.
    lost: HashMap<u64, u64>,
    /// Buckets (by mount) that failed last.
    buckets: HashMap<u32, Failure>,
    /// Of these, those that are being asked whether they are back.
    probed: HashSet<u32>,
}

/// Keeps the books. Cheap to clone.
#[derive(Clone, Default)]
pub(super) struct RetryTracker(Arc<Mutex<State>>);

/// A right to work on an item of a mount; ends when it is dropped.
pub(super) struct WorkPermit {
    retries: RetryTracker,
    item: Item,
    mount_id: u32,
    probes: bool,
}

/// A right to change an object; ends when it is dropped.
pub(super) struct KeyClaim {
    retries: RetryTracker,
    item: Item,
}

impl RetryTracker {
    /// A turn, unless the item is being worked on, or it or its bucket is to be left alone for now.
    pub(super) fn begin(&self, item: &Item, mount_id: u32, pace: Priority) -> Option<WorkPermit> {
        let now = Instant::now();
        let mut state = self.0.lock();
        if let Priority::Expedited(since) = pace {
            state.reset_backoff(item, mount_id, since);
        }
        let waits = |failure: Option<&Failure>| failure.is_some_and(|failure| now < failure.until);
        if state.busy.contains(item) || waits(state.failures.get(item)) || waits(state.buckets.get(&mount_id)) {
            return None;
        }
        let probes = state.buckets.contains_key(&mount_id);
        if probes && !state.probed.insert(mount_id) {
            return None;
        }
        state.busy.insert(item.clone());
        Some(WorkPermit { retries: self.clone(), item: item.clone(), mount_id, probes })
    }

    /// The sole right to an object, unless somebody has it.
    pub(super) fn claim(&self, mount_id: u32, key: &str) -> Option<KeyClaim> {
        let item = Item::Key(mount_id, key.to_owned());
        let claimed = self.0.lock().busy.insert(item.clone());
        claimed.then(|| KeyClaim { retries: self.clone(), item })
    }

    /// Why an item failed last, and when; `None` for one that did not.
    pub(super) fn error(&self, item: &Item) -> Option<(Instant, String)> {
        let state = self.0.lock();
        let failure = state.failures.get(item).filter(|failure| !failure.error.is_empty())?;
        Some((failure.at, failure.error.clone()))
    }

    /// Why a bucket failed last, and when; `None` while it works.
    pub(super) fn bucket_error(&self, mount_id: u32) -> Option<(Instant, String)> {
        self.0.lock().buckets.get(&mount_id).map(|failure| (failure.at, failure.error.clone()))
    }

    /// Whether an inode is known to have lost blocks, and has not been changed since.
    pub(super) fn is_lost(&self, inode: u64, change: u64) -> bool {
        self.0.lock().lost.get(&inode) == Some(&change)
    }

    /// The inodes that have, each with its last change of then.
    pub(super) fn lost(&self) -> Vec<(u64, u64)> {
        self.0.lock().lost.iter().map(|(inode, change)| (*inode, *change)).collect()
    }

    /// Whether somebody who has been waiting for an item since then should not wait any longer, be it for what is wrong
    /// with the item or with its bucket.
    pub(super) fn is_given_up(&self, item: &Item, mount_id: u32, since: Instant) -> bool {
        let state = self.0.lock();
        let failures = [state.failures.get(item), state.buckets.get(&mount_id)];
        failures.into_iter().flatten().any(|failure| failure.is_given_up(since))
    }
}

impl WorkPermit {
    /// The bucket did what it was asked to.
    pub(super) fn succeeded(&self) {
        let mut state = self.retries.0.lock();
        state.forget(&self.item);
        state.buckets.remove(&self.mount_id);
    }

    /// The item needs nothing, or its bucket was not asked.
    pub(super) fn ended(&self) {
        self.retries.0.lock().forget(&self.item);
    }

    /// Nothing is wrong, but now is not the time.
    pub(super) fn later(&self, pause: Duration) {
        let now = Instant::now();
        let waits =
            Failure { count: 0, until: now + pause, error: String::new(), first: now, at: now, is_transient: true };
        self.retries.0.lock().remember(&self.item, waits);
    }

    pub(super) fn failed(&self, kind: FailureKind, error: &str) {
        let mut state = self.retries.0.lock();
        let pauses = if kind.is_of_bucket() { backoff::PERSIST_BLAMELESS } else { backoff::PERSIST };
        let failure = Failure::new(state.failures.get(&self.item), kind, error, pauses);
        state.remember(&self.item, failure);
        if let Item::Inode(inode) = &self.item {
            match kind {
                FailureKind::Lost { change } => drop(state.lost.insert(*inode, change)),
                // Its blocks were not asked for.
                FailureKind::Bucket | FailureKind::Denied => {}
                FailureKind::Item | FailureKind::NeedsOperator => drop(state.lost.remove(inode)),
            }
        }
        if kind.is_of_bucket() {
            let known = state.buckets.get(&self.mount_id);
            // What was under way when it failed for the first time says nothing new.
            if known.is_none() || self.probes {
                let failure = Failure::new(known, kind, error, backoff::PERSIST_BUCKET);
                state.buckets.insert(self.mount_id, failure);
            }
        }
    }
}

impl State {
    /// Lets what failed before somebody began to wait be tried again at once, and counts anew.
    fn reset_backoff(&mut self, item: &Item, mount_id: u32, since: Instant) {
        if self.failures.get(item).is_some_and(|failure| failure.first < since) {
            self.failures.remove(item);
        }
        // Whether it is back is still asked by one at a time.
        if let Some(bucket) = self.buckets.get_mut(&mount_id).filter(|bucket| bucket.first < since) {
            (bucket.count, bucket.first, bucket.until) = (0, Instant::now(), since);
        }
    }

    fn forget(&mut self, item: &Item) {
        self.failures.remove(item);
        if let Item::Inode(inode) = item {
            self.lost.remove(inode);
        }
    }

    fn remember(&mut self, item: &Item, failure: Failure) {
        if self.failures.len() < REMEMBERED || self.failures.contains_key(item) {
            self.failures.insert(item.clone(), failure);
            return;
        }
        // Make room with what is to be tried again anyway.
        let now = Instant::now();
        self.failures.retain(|_, failure| now < failure.until);
        if self.failures.len() < REMEMBERED {
            self.failures.insert(item.clone(), failure);
        }
    }
}

impl Drop for WorkPermit {
    fn drop(&mut self) {
        let mut state = self.retries.0.lock();
        state.busy.remove(&self.item);
        if self.probes {
            state.probed.remove(&self.mount_id);
        }
    }
}

impl Drop for KeyClaim {
    fn drop(&mut self) {
        self.retries.0.lock().busy.remove(&self.item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_claimed_once_and_an_item_has_one_turn() {
        let retries = RetryTracker::default();
        let claim = retries.claim(1, "k").unwrap();
        assert!(
            retries.claim(1, "k").is_none() && retries.begin(&Item::Key(1, "k".into()), 1, Priority::Normal).is_none()
        );
        assert!(retries.claim(2, "k").is_some());
        drop(claim);
        assert!(retries.claim(1, "k").is_some());
        let turn = retries.begin(&Item::Inode(5), 1, Priority::Normal).unwrap();
        assert!(retries.begin(&Item::Inode(5), 1, Priority::Normal).is_none());
        drop(turn);
        assert!(retries.begin(&Item::Inode(5), 1, Priority::Normal).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_bucket_that_fails_is_asked_by_one_at_a_time() {
        let retries = RetryTracker::default();
        let first = retries.begin(&Item::Inode(1), 1, Priority::Normal).unwrap();
        first.failed(FailureKind::Bucket, "away");
        drop(first);
        assert!(retries.begin(&Item::Inode(2), 1, Priority::Normal).is_none(), "it is left alone");
        assert!(retries.begin(&Item::Inode(3), 2, Priority::Normal).is_some(), "others are not");
        assert_eq!(retries.bucket_error(1).unwrap().1, "away");
        tokio::time::advance(backoff::PERSIST_BUCKET.first).await;
        assert!(retries.begin(&Item::Inode(1), 1, Priority::Normal).is_none(), "another asks next");
        let probe = retries.begin(&Item::Inode(2), 1, Priority::Normal).unwrap();
        assert!(retries.begin(&Item::Inode(4), 1, Priority::Normal).is_none());
        probe.succeeded();
        drop(probe);
        assert!(retries.begin(&Item::Inode(4), 1, Priority::Normal).is_some() && retries.bucket_error(1).is_none());
    }

    #[test]
    fn failures_pause_longer_and_are_forgotten_with_success() {
        let retries = RetryTracker::default();
        let item = Item::Inode(1);
        let turn = retries.begin(&item, 1, Priority::Normal).unwrap();
        turn.failed(FailureKind::Item, "broken");
        drop(turn);
        assert_eq!(retries.error(&item).unwrap().1, "broken");
        assert!(
            retries.begin(&item, 1, Priority::Normal).is_none()
                && retries.begin(&Item::Inode(2), 1, Priority::Normal).is_some()
        );
        std::thread::sleep(backoff::PERSIST.first);
        let turn = retries.begin(&item, 1, Priority::Normal).unwrap();
        turn.succeeded();
        drop(turn);
        assert!(retries.error(&item).is_none() && retries.begin(&item, 1, Priority::Normal).is_some());
    }

    #[test]
    fn a_file_that_has_lost_blocks_is_known_until_it_is_changed_or_written() {
        let retries = RetryTracker::default();
        let item = Item::Inode(1);
        let fail = |kind| {
            retries.begin(&item, 1, Priority::Expedited(Instant::now())).unwrap().failed(kind, "no");
        };
        fail(FailureKind::Lost { change: 5 });
        assert!(retries.is_lost(1, 5) && !retries.is_lost(1, 6) && !retries.is_lost(2, 5));
        fail(FailureKind::Bucket);
        assert!(retries.is_lost(1, 5), "its blocks were not asked for");
        fail(FailureKind::Item);
        assert!(!retries.is_lost(1, 5), "a worker may be away");
        fail(FailureKind::Lost { change: 6 });
        retries.begin(&item, 1, Priority::Expedited(Instant::now())).unwrap().succeeded();
        assert!(!retries.is_lost(1, 6));
    }

    #[test]
    fn what_failed_before_somebody_hurries_is_tried_at_once_and_counted_anew() {
        let retries = RetryTracker::default();
        let item = Item::Inode(1);
        let fail = |pace: Priority, kind: FailureKind| {
            let turn = retries.begin(&item, 1, pace).unwrap();
            turn.failed(kind, "no");
        };
        fail(Priority::Normal, FailureKind::Denied);
        assert!(retries.begin(&item, 1, Priority::Normal).is_none());
        let since = Instant::now();
        fail(Priority::Expedited(since), FailureKind::Denied);
        assert!(retries.begin(&item, 1, Priority::Expedited(since)).is_none(), "once");
        let is_given_up = |since: Instant| [&item, &Item::Inode(2)].map(|item| retries.is_given_up(item, 1, since));
        assert_eq!(is_given_up(since), [false; 2]);
        for count in 1..REFUSALS {
            assert_eq!(is_given_up(since), [false; 2], "{count}");
            let mut state = retries.0.lock();
            let now = Instant::now();
            state.failures.values_mut().for_each(|failure| failure.until = now);
            state.buckets.values_mut().for_each(|failure| failure.until = now);
            drop(state);
            fail(Priority::Normal, FailureKind::Denied);
        }
        assert_eq!(is_given_up(since), [true; 2], "with its bucket, all that is to be done there is");
        let later = Instant::now();
        assert_eq!(is_given_up(later), [false; 2]);
        let turn = retries.begin(&item, 1, Priority::Expedited(later)).unwrap();
        assert!(
            retries.begin(&Item::Inode(2), 1, Priority::Expedited(later)).is_none(),
            "one at a time asks the bucket"
        );
        turn.succeeded();
        drop(turn);
        assert!(retries.begin(&Item::Inode(2), 1, Priority::Normal).is_some());
    }

    #[test]
    fn whoever_waits_gives_up_what_has_failed_for_long() {
        let retries = RetryTracker::default();
        let item = Item::Inode(1);
        let now = Instant::now();
        let before = now.checked_sub(GIVE_UP_AFTER).unwrap();
        for kind in [FailureKind::Item, FailureKind::Bucket] {
            for _ in 0..=REFUSALS {
                retries.0.lock().failures.values_mut().for_each(|failure| failure.until = now);
                retries.0.lock().buckets.values_mut().for_each(|failure| failure.until = now);
                retries.begin(&item, 1, Priority::Normal).unwrap().failed(kind, "no");
            }
            assert!(!retries.is_given_up(&item, 1, before), "it may pass");
        }
        let mut state = retries.0.lock();
        state.failures.get_mut(&item).unwrap().first = before;
        drop(state);
        assert!(retries.is_given_up(&item, 1, before) && !retries.is_given_up(&item, 1, now));
        assert!(!retries.is_given_up(&Item::Inode(2), 1, before));
        retries.0.lock().buckets.get_mut(&1).unwrap().first = before;
        assert!(retries.is_given_up(&Item::Inode(2), 1, before) && !retries.is_given_up(&Item::Inode(2), 2, before));
        assert!(!retries.is_given_up(&item, 2, now));
    }
}
