//! Locks of files, which the master keeps for our session.
//!
//! A lock that must be waited for is asked for under a number of its own; the master notifies the client when it has
//! been granted. A grant while no stream is open is missed, so the lock is asked for again: the master knows the
//! number, and answers with how things stand.
//!
//! Locks end with the session. An owner that had one gets `EIO` when it locks or unlocks that file, until it has
//! unlocked or closed it. What a closed file leaves locked is unlocked sooner or later: the log has the unlock until it
//! is made, or the session is over, before whatever the same owner locks of that file anew.
//!
//! Where nobody but this session can have a lock, requests that need not wait are answered here, as other changes are
//! (`lock_locally`).

use std::collections::HashMap;

use cavern_proto::locks::LAST_BYTE;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{GetLockRequest, Lock, LockKind, LockType, SetLock};
use parking_lot::Mutex;
use rustix::io::Errno;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::log::{Answer, Changed, Operation};
use super::parts::{Inner, Metadata};
use crate::error::ClientError;
use crate::journal::{EPOCH_BITS, RequestContext};

/// The last byte of a lock that reaches to the end of the file, whatever its length.
pub const LOCK_TO_END: u64 = LAST_BYTE;

/// Who has answered a request for a lock, or an unlock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnsweredBy {
    /// No other host can have locked the file before, or changed anything under a lock of it.
    Us,
    /// What others did before they unlocked it is known here after this event: see [`Metadata::wait_applied`].
    Master { event_seq: u64 },
}

/// An owner and a file that it has locked.
type Key = (u64, i32, u64);

/// What is locked here. Bounded by the open files of the host, and by its threads that wait.
#[derive(Default)]
pub(super) struct Locks {
    /// The session that has the locks of an owner; 0 before the first is granted.
    owners: Mutex<HashMap<Key, u64>>,
    waiting: Mutex<Waiting>,
}

/// Requests that wait, by their numbers, and what the master has sent to each of them last.
#[derive(Default)]
struct Waiting {
    last: u64,
    requests: HashMap<u64, watch::Sender<LockEvent>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LockEvent {
    /// By this session.
    Granted(u64),
    /// The stream of events began anew: the grant may have been lost.
    Resend,
}

/// A place among those who wait, given up when dropped.
struct Place<'l> {
    locks: &'l Locks,
    number: u64,
    events: watch::Receiver<LockEvent>,
}

impl Place<'_> {
    /// The next event, or the last of several that have come.
    async fn event(&mut self) -> LockEvent {
        // Its sender is there as long as the place.
        let _there = self.events.changed().await;
        *self.events.borrow_and_update()
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.locks.waiting.lock().requests.remove(&self.number);
    }
}

impl Locks {
    /// Numbers of those who wait are others than those of processes before.
    pub(super) fn begin_epoch(&self, epoch: u64) {
        self.waiting.lock().last = epoch << EPOCH_BITS;
    }

    /// A place with a number of its own, or with the one that the same request had in a process before.
    fn place(&self, earlier: Option<u64>) -> Place<'_> {
        let mut waiting = self.waiting.lock();
        waiting.last += 1;
        let number = earlier.unwrap_or(waiting.last);
        let (sender, events) = watch::channel(LockEvent::Resend);
        waiting.requests.insert(number, sender);
        drop(waiting);
        Place { locks: self, number, events }
    }

    /// The master has given `session` what it waited for.
    pub(super) fn granted(&self, waiter: u64, session: u64) {
        if let Some(request) = self.waiting.lock().requests.get(&waiter) {
            request.send_replace(LockEvent::Granted(session));
        }
    }

    /// Events may have been lost.
    pub(super) fn ask_again(&self) {
        for request in self.waiting.lock().requests.values() {
            request.send_replace(LockEvent::Resend);
        }
    }

    /// Notes that an owner may get a lock; refuses it when the ones that it had are lost.
    fn begin(&self, key: Key, kind: LockType, session: u64) -> Result<(), ClientError> {
        let mut owners = self.owners.lock();
        let known = owners.get(&key).copied().unwrap_or_default();
        if known != 0 && known != session {
            if kind == LockType::Unlocked {
                owners.remove(&key);
            }
            return Err(ClientError::LocksLost { inode: key.0 });
        }
        if kind != LockType::Unlocked {
            owners.entry(key).or_default();
        }
        Ok(())
    }

    /// What an owner had locked is lost, though the session is not.
    pub(super) fn lost(&self, set: &SetLock) {
        let owner = set.lock.unwrap_or_default().owner;
        if let Some(session) = self.owners.lock().get_mut(&(set.inode, set.kind, owner)) {
            *session = u64::MAX;
        }
    }

    /// The unlock of all that an owner may have locked; `None` when that is nothing.
    fn take_owner(&self, inode: u64, kind: LockKind, owner: u64) -> Option<SetLock> {
        self.owners.lock().remove(&(inode, kind.into(), owner))?;
        Some(unlock(inode, kind, owner, (0, LOCK_TO_END)))
    }

    /// The owner has locked something, or unlocked all that it had.
    fn made(&self, key: Key, lock: &Lock, session: u64) -> Result<(), ClientError> {
        let mut owners = self.owners.lock();
        if lock.r#type() == LockType::Unlocked {
            if lock.start == 0 && lock.end == LOCK_TO_END {
                owners.remove(&key);
            }
            return Ok(());
        }
        match owners.entry(key).or_default() {
            known if *known == 0 || *known == session => {
                *known = session;
                Ok(())
            }
            // The session has ended meanwhile, and with it what the owner had before.
            _ => Err(ClientError::LocksLost { inode: key.0 }),
        }
    }
}

impl Metadata {
    /// Locks bytes of a file of an fs-mode mount for an owner of this host, or unlocks them. `EAGAIN` when they are
    /// locked by somebody else, `LocksLost` when the owner's locks of the file ended with an earlier session.
    pub async fn set_lock(&self, inode: u64, kind: LockKind, lock: Lock) -> Result<AnsweredBy, ClientError> {
        let inner = &self.inner;
        inner.locks.begin(key(inode, kind, &lock), lock.r#type(), inner.lease.session())?;
        self.send_lock(SetLock { inode, kind: kind.into(), lock: Some(lock), waiter: 0, wait: false }).await
    }

    /// As `set_lock`, but waits for as long as it takes, or until `give_up` (`EINTR`): a caller that loses interest
    /// must say so by that, and go on polling. `EDEADLK` when it would wait for itself.
    pub async fn wait_for_lock(
        &self,
        inode: u64,
        kind: LockKind,
        lock: Lock,
        give_up: &CancellationToken,
    ) -> Result<AnsweredBy, ClientError> {
        let inner = &self.inner;
        inner.locks.begin(key(inode, kind, &lock), lock.r#type(), inner.lease.session())?;
        let set = SetLock { inode, kind: kind.into(), lock: Some(lock), waiter: 0, wait: false };
        let earlier = inner.log.replayed.waiter();
        if let (None, Some(Ok(made))) = (earlier, inner.lock_locally(set)) {
            return self.lock_made(&set, &made).await;
        }
        let asked = inner.log.ask_lock(set);
        let made = self.wait_in_line(set, inner.locks.place(earlier), give_up).await;
        asked.end();
        made
    }

    /// Waits for a lock at the master, at a place of its own.
    async fn wait_in_line(
        &self,
        set: SetLock,
        mut place: Place<'_>,
        give_up: &CancellationToken,
    ) -> Result<AnsweredBy, ClientError> {
        let (inner, lock) = (&self.inner, set.lock.unwrap_or_default());
        let set = SetLock { waiter: place.number, wait: true, ..set };
        let mut is_queued = false;
        loop {
            match self.send_lock(set).await {
                Err(error) if is_would_block(&error) => is_queued = true,
                // Whatever has become of it, it is asked for again under its number.
                Err(error) if is_unanswered(&error) && !give_up.is_cancelled() => {
                    is_queued = true;
                    continue;
                }
                made => {
                    if is_queued {
                        inner.no_longer_waiting(&made);
                    }
                    return made;
                }
            }
            let Some(event) = give_up.run_until_cancelled(place.event()).await else { break };
            match event {
                LockEvent::Granted(session) if session == inner.lease.session() => {
                    inner.log.lock().delegations.locks.enter(&set);
                    inner.locks.made(key(set.inode, set.kind(), &lock), &lock, session)?;
                    // An event itself.
                    return Ok(AnsweredBy::Master { event_seq: 0 });
                }
                LockEvent::Granted(_) | LockEvent::Resend => {}
            }
        }
        // The lock may have been granted meanwhile: the answer says whether it was.
        match self.send_lock(SetLock { wait: false, ..set }).await {
            Err(error) if is_would_block(&error) => {
                let reason = "interrupted while waiting for a lock".to_owned();
                Err(ClientError::Refused { errno: Errno::INTR.raw_os_error(), reason })
            }
            made => {
                inner.no_longer_waiting(&made);
                made
            }
        }
    }

    async fn send_lock(&self, set: SetLock) -> Result<AnsweredBy, ClientError> {
        let made = self.change(Change::SetLock(set), 0, 0).await?;
        self.lock_made(&set, &made).await
    }

    async fn lock_made(&self, set: &SetLock, made: &Changed) -> Result<AnsweredBy, ClientError> {
        let lock = set.lock.unwrap_or_default();
        self.inner.locks.made(key(set.inode, set.kind(), &lock), &lock, made.session)?;
        if made.applied_locally { Ok(AnsweredBy::Us) } else { Ok(AnsweredBy::Master { event_seq: made.event_seq }) }
    }

    /// Waits until an event of the master, and so all before it, has been taken in, for as long as that takes. Whoever
    /// has got a lock must wait, or [`give_up_lock`](Self::give_up_lock).
    pub async fn wait_applied(&self, event_seq: u64) {
        self.inner.lease.wait_applied(event_seq).await;
    }

    /// Unlocks sooner or later what an owner has locked and must not use. If it had locked something of the file
    /// `before`, all that is lost, and the owner told so as where a session ended.
    pub fn give_up_lock(&self, inode: u64, kind: LockKind, lock: &Lock, before: bool) {
        let bytes = (!before).then_some((lock.start, lock.end));
        self.unlock_closed_soon(inode, kind, lock.owner, bytes);
        if before {
            self.inner.locks.owners.lock().insert(key(inode, kind, lock), u64::MAX);
        }
    }

    /// An owner had locked something of a file in the process before this one, whose session that was.
    pub fn restore_lock(&self, inode: u64, kind: LockKind, owner: u64, session: u64) {
        self.inner.locks.owners.lock().insert((inode, kind.into(), owner), session);
    }

    /// Answers [`Self::find_lock`] where the master need not be asked.
    pub fn find_known_lock(&self, inode: u64, kind: LockKind, lock: &Lock) -> Option<Option<Lock>> {
        self.inner.known_lock_in_way(inode, kind, lock)
    }

    /// The first lock of another owner that keeps this one from being had. What this host closed before is unlocked
    /// before the question.
    pub async fn find_lock(&self, inode: u64, kind: LockKind, lock: Lock) -> Result<Option<Lock>, ClientError> {
        if let Some(known) = self.find_known_lock(inode, kind, &lock) {
            return Ok(known);
        }
        self.inner.log.all_unlocked(self.inner.master.timeout()).await?;
        let session = self.inner.lease.session();
        let request = GetLockRequest { inode, kind: kind.into(), lock: Some(Lock { session, ..lock }) };
        // A process of another host has no number here.
        let found = ask!(self.inner, "GetLock", get_lock, request).await?.lock;
        Ok(found.map(|found| if found.session == session { found } else { Lock { pid: 0, ..found } }))
    }

    /// Whether an owner has locks of a file, or has tried to.
    pub fn may_have_locked(&self, inode: u64, kind: LockKind, owner: u64) -> bool {
        self.inner.locks.owners.lock().contains_key(&(inode, kind.into(), owner))
    }

    /// Whether an owner has been given a lock of a file, and may still have it.
    pub fn has_locked(&self, inode: u64, kind: LockKind, owner: u64) -> bool {
        self.inner.locks.owners.lock().get(&(inode, kind.into(), owner)).is_some_and(|session| *session != 0)
    }

    /// The owner has closed the file: whatever it had locked of it is unlocked, later if the master cannot be reached
    /// now.
    pub async fn unlock_closed(&self, inode: u64, kind: LockKind, owner: u64) {
        let inner = &self.inner;
        let Some(unlock) = inner.locks.take_owner(inode, kind, owner) else { return };
        let earlier = inner.log.replayed.answer_to(&Change::SetLock(unlock)).await;
        if earlier.is_some() || inner.lock_locally(unlock).is_some() {
            return;
        }
        let deadline = Instant::now() + inner.change_timeout;
        let unlocked = inner.push_and_wait(Operation::must_deliver(Change::SetLock(unlock)), deadline).await;
        if let Ok(Err(error)) = unlocked {
            tracing::debug!(inode, "a closed file is unlocked later: {error}");
        }
    }

    /// Unlocks what a closed file had locked, without waiting for it; of `bytes`, from the first to the last, where the
    /// owner has others locked.
    pub fn unlock_closed_soon(&self, inode: u64, kind: LockKind, owner: u64, bytes: Option<(u64, u64)>) {
        let inner = &self.inner;
        let unlock = match bytes {
            None => inner.locks.take_owner(inode, kind, owner),
            Some(bytes) => Some(unlock(inode, kind, owner, bytes)),
        };
        if let Some(unlock) = unlock
            && inner.lock_locally(unlock).is_none()
        {
            inner.push(Operation::must_deliver(Change::SetLock(unlock)));
        }
    }
}

impl Inner {
    /// Makes what need not wait, if that can be answered here.
    fn lock_locally(&self, set: SetLock) -> Option<Answer> {
        self.apply_locally(Change::SetLock(set), (0, 0), RequestContext::current().as_ref()).ok()
    }

    /// A request that waits has come to its end. If the master may not know, and grant a lock that nobody takes, the
    /// session must go.
    fn no_longer_waiting<T>(&self, answer: &Result<T, ClientError>) {
        if answer.as_ref().is_err_and(is_unanswered) {
            self.lease.abandon();
        }
    }
}

/// The unlock of bytes of a file.
fn unlock(inode: u64, kind: LockKind, owner: u64, (start, end): (u64, u64)) -> SetLock {
    let lock = Lock { owner, r#type: LockType::Unlocked.into(), start, end, ..Lock::default() };
    SetLock { inode, kind: kind.into(), lock: Some(lock), waiter: 0, wait: false }
}

fn key(inode: u64, kind: LockKind, lock: &Lock) -> Key {
    (inode, kind.into(), lock.owner)
}

fn is_unanswered(error: &ClientError) -> bool {
    error.is_master_silent() || matches!(error, ClientError::OutcomeUnknown { .. })
}

fn is_would_block(error: &ClientError) -> bool {
    matches!(error, ClientError::Refused { errno, .. } if *errno == Errno::AGAIN.raw_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lock(r#type: LockType, start: u64, end: u64) -> Lock {
        Lock { owner: 1, r#type: r#type.into(), start, end, ..Lock::default() }
    }

    #[test]
    fn who_lost_its_locks_is_told_until_it_unlocks() {
        let (locks, key) = (Locks::default(), (5, 1, 1));
        locks.begin(key, LockType::Shared, 7).unwrap();
        locks.made(key, &lock(LockType::Shared, 0, 9), 7).unwrap();
        locks.begin(key, LockType::Unlocked, 7).unwrap();
        locks.made(key, &lock(LockType::Unlocked, 0, 3), 7).unwrap();
        let is_lost = |result| matches!(result, Err(ClientError::LocksLost { inode: 5 }));
        assert!(is_lost(locks.begin(key, LockType::Exclusive, 8)), "the rest of it is lost");
        assert!(is_lost(locks.made(key, &lock(LockType::Shared, 20, 30), 8)));
        assert!(is_lost(locks.begin(key, LockType::Unlocked, 8)));
        locks.begin(key, LockType::Exclusive, 8).unwrap();
        locks.made(key, &lock(LockType::Exclusive, 0, 9), 8).unwrap();
        locks.made(key, &lock(LockType::Unlocked, 0, LOCK_TO_END), 8).unwrap();
        assert!(locks.owners.lock().is_empty());
    }

    #[tokio::test]
    async fn what_is_told_before_somebody_listens_is_not_missed() {
        let locks = Locks::default();
        let mut place = locks.place(None);
        locks.granted(place.number, 7);
        assert_eq!(place.event().await, LockEvent::Granted(7));
        locks.ask_again();
        assert_eq!(place.event().await, LockEvent::Resend);
        let number = place.number;
        drop(place);
        locks.granted(number, 7);
        assert!(locks.waiting.lock().requests.is_empty());
    }
}
