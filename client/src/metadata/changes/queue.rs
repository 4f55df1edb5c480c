//! The changes that wait to be sent, in their order.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use cavern_proto::bounded::MAX_CHANGES;
use cavern_proto::locks::overlap;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{LockType, SetLock};
use parking_lot::Mutex;
use prost::Message;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, TryAcquireError, oneshot};
use tokio::time::Instant;

use super::super::held::Gain;
use super::{Answer, Pending, numbered};
use crate::error::ClientError;

/// What the master is given in one call at most.
const CALL_BYTES_MAX: usize = 512 << 10;
/// Changes that wait at a time; who comes later waits for room.
const WAITING_MAX: usize = 4096;

/// What was answered before it is sent gathers for so long, unless somebody waits,
const GATHER: Duration = Duration::from_millis(10);
/// or for longer while it is about bytes and locks alone, of which nothing is lost with this host's processes,
const GATHER_BYTES: Duration = Duration::from_millis(100);
/// or so many have.
const GATHERED_MAX: usize = 256;
/// Changes that are looked at for locks which an unlock makes useless, and for what another commit adds to.
const LOOKED_AT: usize = 64;

/// What a call has of the changes and bytes that it may have.
#[derive(Default)]
pub(in super::super) struct CallSize {
    changes: usize,
    bytes: usize,
}

impl CallSize {
    /// Counts one more change; false, and it is not counted, when the call has no room for it. One that is too long for
    /// any call is the master's to refuse.
    pub(in super::super) fn admit(&mut self, pending: &Pending) -> bool {
        let bytes = self.bytes + numbered(pending, u64::MAX).encoded_len() + 8;
        let has_room = self.changes < MAX_CHANGES && bytes <= CALL_BYTES_MAX || self.changes == 0;
        if has_room {
            (self.changes, self.bytes) = (self.changes + 1, bytes);
        }
        has_room
    }
}

/// See the module.
pub(in super::super) struct ChangeQueue {
    state: Mutex<State>,
    /// Something is to be looked at anew.
    pub(super) filled: Notify,
    room: Arc<Semaphore>,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Pending>,
    /// Somebody waits for what is in the queue.
    is_urgent: bool,
    /// Something in it is about more than bytes and locks.
    has_names: bool,
    /// When the first of what is in the queue came, if nobody waits for it. It may have been taken back: whoever sends
    /// comes to look nevertheless, and need not be told of those that come until then.
    since: Option<Instant>,
    closed: bool,
}

impl State {
    fn push(&mut self, pending: Pending) {
        if pending.predicted.is_none() || pending.asker.is_some() {
            self.is_urgent = true;
        }
        self.has_names |= !pending.is_overwrite;
        self.since.get_or_insert_with(Instant::now);
        self.waiting.push_back(pending);
    }

    /// When what is in the queue is to be sent; `None` for nothing.
    fn due(&self) -> Option<Instant> {
        let since = self.since?;
        let is_due = self.is_urgent || self.waiting.len() >= GATHERED_MAX;
        let gathered = if self.has_names { GATHER } else { GATHER_BYTES };
        Some(if is_due { since } else { since + gathered })
    }
}

impl Default for ChangeQueue {
    fn default() -> Self {
        Self { state: Mutex::default(), filled: Notify::new(), room: Arc::new(Semaphore::new(WAITING_MAX)) }
    }
}

impl ChangeQueue {
    /// Room for one more change, if there is some at once.
    pub(in super::super) fn room(&self) -> Result<OwnedSemaphorePermit, TryAcquireError> {
        self.room.clone().try_acquire_owned()
    }

    /// The same, when there is some.
    pub(super) async fn wait_for_room(&self) -> Result<OwnedSemaphorePermit, ClientError> {
        self.room.clone().acquire_owned().await.map_err(|_closed| ClientError::Shutdown)
    }

    pub(in super::super) fn push(&self, pending: Pending) {
        if let Err(pending) = self.try_push(pending) {
            let _gone = pending.answer(Err(ClientError::Shutdown));
        }
    }

    /// The same; gives the change back when none is taken any more.
    pub(in super::super) fn try_push(&self, pending: Pending) -> Result<(), Box<Pending>> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(Box::new(pending));
        }
        let (is_first, had_names) = (state.since.is_none(), state.has_names);
        state.push(pending);
        // Whoever sends them has looked at the first, and comes back when that is due.
        let is_news =
            state.is_urgent || is_first || state.has_names && !had_names || state.waiting.len() >= GATHERED_MAX;
        drop(state);
        if is_news {
            self.filled.notify_one();
        }
        Ok(())
    }

    /// Puts changes before all others.
    pub(super) fn push_front(&self, changes: Vec<Pending>) {
        let mut state = self.state.lock();
        let later = std::mem::take(&mut state.waiting);
        changes.into_iter().chain(later).for_each(|pending| state.push(pending));
    }

    /// Takes out the locks that an unlock makes useless: their owner has what it had before, or less, without them, and
    /// nobody else can have asked for anything that it has without them only. From the last one back to where that is
    /// not known any more.
    pub(in super::super) fn take_back(&self, unlock: &SetLock) -> Vec<Pending> {
        let mut state = self.state.lock();
        let (mut taken, wanted) = (Vec::new(), unlock.lock.unwrap_or_default());
        let last = state.waiting.len();
        for at in (last.saturating_sub(LOOKED_AT)..last).rev() {
            let Some(set) = state.waiting[at].lock() else { continue };
            let lock = set.lock.unwrap_or_default();
            let is_own = (set.inode, set.kind, lock.owner) == (unlock.inode, unlock.kind, wanted.owner);
            if !is_own || !overlap(&lock, &wanted) || lock.r#type() == LockType::Unlocked {
                continue;
            }
            let is_within = wanted.start <= lock.start && lock.end <= wanted.end;
            if !is_within || !matches!(state.waiting[at].gain, Some(Gain::All | Gain::More)) {
                break;
            }
            taken.extend(state.waiting.remove(at));
        }
        state.is_urgent &= !state.waiting.is_empty();
        taken
    }

    /// The last commit of a file that waits, if what came behind it is about bytes and locks alone: another one may
    /// become part of it. `merge` makes it so, or leaves it as it is.
    pub(in super::super) fn merge<T>(&self, inode: u64, merge: impl FnOnce(&mut Pending) -> Option<T>) -> Option<T> {
        let mut state = self.state.lock();
        let mut latest = state.waiting.iter_mut().rev().take(LOOKED_AT);
        let pending = loop {
            let pending = latest.next()?;
            if matches!(&pending.change, Change::Commit(commit) if commit.inode == inode) {
                break pending;
            }
            if !pending.is_overwrite {
                return None;
            }
        };
        let merged = merge(pending)?;
        let is_news = !pending.is_overwrite && !state.has_names;
        state.has_names |= is_news;
        drop(state);
        if is_news {
            self.filled.notify_one();
        }
        Some(merged)
    }

    /// Somebody waits for all that is in the queue.
    pub(in super::super) fn hurry(&self) {
        let mut state = self.state.lock();
        state.is_urgent = !state.waiting.is_empty();
        drop(state);
        self.filled.notify_one();
    }

    /// When what is in the queue is to be sent.
    pub(super) fn due(&self) -> Option<Instant> {
        self.state.lock().due()
    }

    /// What goes into one call, when it is due.
    pub(super) fn take(&self) -> Vec<Pending> {
        let mut state = self.state.lock();
        if state.due().is_none_or(|due| due > Instant::now()) {
            return Vec::new();
        }
        let mut call = CallSize::default();
        let taken = state.waiting.iter().take_while(|pending| call.admit(pending)).count();
        let taken = state.waiting.drain(..taken).collect();
        if state.waiting.is_empty() {
            (state.is_urgent, state.has_names, state.since) = (false, false, None);
        }
        taken
    }

    /// Takes out what has waited too long; what is owed stays, without those who waited.
    pub(super) fn take_late(&self, now: Instant) -> (Vec<Pending>, Vec<oneshot::Sender<Answer>>) {
        let mut state = self.state.lock();
        if !state.waiting.iter().any(|pending| pending.is_late(now)) {
            return (Vec::new(), Vec::new());
        }
        let (late, mut rest): (VecDeque<_>, VecDeque<_>) =
            std::mem::take(&mut state.waiting).into_iter().partition(|pending| pending.is_over(now));
        let askers = rest.iter_mut().filter(|pending| pending.is_late(now)).filter_map(|pending| pending.asker.take());
        let askers = askers.collect();
        state.waiting = rest;
        (late.into(), askers)
    }

    /// Of the first. Those of the others are hardly earlier.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let state = self.state.lock();
        state.waiting.iter().find(|pending| pending.asker.is_some()).map(|pending| pending.deadline)
    }

    pub(super) fn close(&self) {
        let waiting = {
            let mut state = self.state.lock();
            state.closed = true;
            std::mem::take(&mut state.waiting)
        };
        for pending in waiting {
            let _gone = pending.answer(Err(ClientError::Shutdown));
        }
    }
}

#[cfg(test)]
mod tests {
    use cavern_proto::master::{CommitContent, Lock, LockKind, RemoveXattr, SetXattr};
    use futures::FutureExt;

    use super::*;

    fn pending(change: Change) -> Pending {
        Pending::new(change, (0, 0), Instant::now())
    }

    #[test]
    fn a_call_has_a_bounded_number_of_changes_and_of_bytes() {
        let queue = ChangeQueue::default();
        let small = |inode| Change::RemoveXattr(RemoveXattr { inode, name: "user.a".into() });
        (0..2500).for_each(|inode| queue.push(pending(small(inode))));
        assert_eq!([queue.take().len(), queue.take().len(), queue.take().len()], [1000, 1000, 500]);
        let value = bytes::Bytes::from(vec![0; 64 << 10]);
        for inode in 0..20 {
            let set = SetXattr { inode, name: "user.a".into(), value: value.clone(), ..SetXattr::default() };
            queue.push(pending(Change::SetXattr(set)));
        }
        assert_eq!([queue.take().len(), queue.take().len(), queue.take().len()], [7, 7, 6]);
        let huge = SetXattr { value: vec![0; 1 << 20].into(), ..SetXattr::default() };
        queue.push(pending(Change::SetXattr(huge)));
        assert_eq!((queue.take().len(), queue.take().len()), (1, 0));
    }

    fn lock(owner: u64, r#type: LockType, start: u64, end: u64) -> SetLock {
        let lock = Lock { owner, r#type: r#type.into(), start, end, ..Lock::default() };
        SetLock { inode: 5, kind: LockKind::Posix.into(), lock: Some(lock), ..SetLock::default() }
    }

    #[test]
    fn an_unlock_takes_back_what_nobody_needs_without_it() {
        let queue = ChangeQueue::default();
        let push = |set: SetLock, gain: Gain| {
            let predicted = Some(Box::default());
            queue.push(Pending { gain: Some(gain), predicted, ..pending(Change::SetLock(set)) });
        };
        let taken = |unlock: SetLock| -> Vec<(u64, u64)> {
            let taken = queue.take_back(&unlock);
            taken.iter().filter_map(|one| one.lock()?.lock).map(|lock| (lock.start, lock.end)).collect()
        };
        let unlock = |owner, start, end| lock(owner, LockType::Unlocked, start, end);
        push(lock(1, LockType::Shared, 0, 4), Gain::All);
        push(lock(2, LockType::Shared, 0, 4), Gain::All);
        push(lock(1, LockType::Exclusive, 10, 19), Gain::All);
        push(lock(1, LockType::Exclusive, 5, 9), Gain::More);
        assert_eq!(taken(SetLock { kind: LockKind::Flock.into(), ..unlock(1, 0, 99) }), []);
        assert_eq!(taken(SetLock { inode: 6, ..unlock(1, 0, 99) }), []);
        assert_eq!(taken(unlock(1, 10, 15)), [], "the rest is needed");
        assert_eq!(taken(unlock(1, 10, 19)), [(10, 19)]);
        assert_eq!(taken(unlock(1, 0, 30)), [(5, 9), (0, 4)]);
        // What gives something up lets others have it: what was before stays as well.
        push(lock(2, LockType::Exclusive, 0, 4), Gain::More);
        push(lock(2, LockType::Shared, 0, 2), Gain::Other);
        push(lock(2, LockType::Exclusive, 6, 8), Gain::All);
        assert_eq!(taken(unlock(2, 0, 99)), [(6, 8)]);
        assert_eq!(queue.state.lock().waiting.len(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn what_comes_after_something_that_was_taken_back_is_sent_in_time() {
        let queue = ChangeQueue::default();
        let push = || {
            let predicted = Some(Box::default());
            let set = lock(1, LockType::Exclusive, 0, 9);
            queue.push(Pending { gain: Some(Gain::All), predicted, ..pending(Change::SetLock(set)) });
        };
        let is_told = || queue.filled.notified().now_or_never().is_some();
        push();
        assert!(is_told(), "whoever sends waits for that");
        let due = queue.due().unwrap();
        assert_eq!(queue.take_back(&lock(1, LockType::Unlocked, 0, 9)).len(), 1);
        tokio::time::advance(GATHER / 2).await;
        push();
        assert!(!is_told() && queue.due() == Some(due), "it comes back by itself");
        assert_eq!(queue.take().len(), 0);
        tokio::time::advance(GATHER / 2).await;
        assert_eq!((queue.take().len(), queue.due()), (1, None));
        push();
        assert!(is_told());
        queue.take_back(&lock(1, LockType::Unlocked, 0, 9));
        tokio::time::advance(GATHER).await;
        assert_eq!((queue.take().len(), queue.due()), (0, None));
        push();
        assert!(is_told(), "it has looked, and found nothing");
    }

    fn commit(inode: u64, is_overwrite: bool) -> Pending {
        let change = Change::Commit(CommitContent { inode, changed: true, ..CommitContent::default() });
        Pending { predicted: Some(Box::default()), is_overwrite, ..pending(change) }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_about_bytes_alone_gathers_for_longer_until_something_else_comes() {
        let queue = ChangeQueue::default();
        let begun = Instant::now();
        queue.push(commit(5, true));
        assert_eq!(queue.due(), Some(begun + GATHER_BYTES));
        assert!(queue.filled.notified().now_or_never().is_some());
        tokio::time::advance(GATHER / 2).await;
        queue.push(commit(6, true));
        assert!(queue.filled.notified().now_or_never().is_none(), "whoever sends knows when");
        queue.push(commit(7, false));
        assert!(queue.filled.notified().now_or_never().is_some());
        assert_eq!(queue.due(), Some(begun + GATHER));
        tokio::time::advance(GATHER).await;
        assert_eq!(queue.take().len(), 3);
        queue.push(commit(5, true));
        assert_eq!(queue.due(), Some(Instant::now() + GATHER_BYTES));
    }

    #[tokio::test(start_paused = true)]
    async fn a_commit_becomes_part_of_the_last_one_of_its_file_unless_something_else_came_behind_it() {
        let queue = ChangeQueue::default();
        let grown = |inode: u64, becomes: bool| {
            queue.merge(inode, |pending| {
                let Change::Commit(waiting) = &mut pending.change else { return None };
                waiting.grow_to += 1;
                pending.is_overwrite &= becomes;
                Some(waiting.grow_to)
            })
        };
        assert_eq!(grown(5, true), None, "nothing waits");
        queue.push(commit(5, false));
        queue.push(commit(6, true));
        assert_eq!((grown(5, true), grown(5, true), grown(6, true), grown(7, true)), (Some(1), Some(2), Some(1), None));
        queue.push(commit(6, true));
        assert_eq!(grown(6, true), Some(1), "of the last one");
        queue.push(pending(Change::Hold(1)));
        assert_eq!((grown(6, true), grown(5, true)), (None, None), "it would come before that");
        assert_eq!(queue.take().len(), 4);
        assert_eq!(grown(5, true), None, "they are on their way");

        queue.push(commit(5, true));
        assert!(queue.filled.notified().now_or_never().is_some());
        assert_eq!(grown(5, false), Some(1));
        assert!(queue.filled.notified().now_or_never().is_some(), "it is about more than bytes by now");
        assert_eq!(queue.due(), Some(Instant::now() + GATHER));
        assert_eq!(queue.merge(5, |_| None::<u64>), None);
    }

    #[tokio::test]
    async fn what_waits_at_the_end_and_what_comes_after_it_is_told_so() {
        let queue = ChangeQueue::default();
        let waiting = || {
            let (asker, answer) = oneshot::channel();
            queue.push(Pending { asker: Some(asker), ..pending(Change::Hold(1)) });
            answer
        };
        let before = waiting();
        queue.close();
        for answer in [before, waiting()] {
            assert!(matches!(answer.await, Ok(Err(ClientError::Shutdown))));
        }
    }
}
