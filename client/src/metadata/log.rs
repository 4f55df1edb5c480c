//! The log of operations: every change of names and inodes of fs-mode mounts, from when it is asked for, or answered,
//! until the master has made it.
//!
//! One lock guards all of it ([`State`]): the operations in their order, what they are about ([`AffectedInodes`]), and
//! the directories delegated to the session ([`delegations`]), which are read to answer an operation and give it its
//! place in one piece. No I/O happens under it but that of the journal, which is memory, for one answer: a call is
//! taken out while its records are written. Nothing is dropped under it that may close a file: who lets go of a closed
//! file asks for that here, with what is open locked.
//!
//! The journal is the durable form of the log: an operation is entered before it is answered, and before it is sent,
//! and its record goes with its end. A process that goes on loads the same log from there, and the kernel's requests of
//! before find their answers in it ([`Replayed`]).

mod affected_inodes;
mod call;
mod delegations;
mod known_locks;
mod operation;
mod replayed;
mod state;
#[cfg(test)]
mod tests;
mod wishes;

use std::sync::Arc;
use std::time::Duration;

use cavern_conf::Failpoint;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{ReturnDelegations, SetLock};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, TryAcquireError};
use tokio::time::{Instant, timeout};

use affected_inodes::AffectedInodes;
pub(super) use call::{AHEAD, Call, Outgoing};
pub(super) use known_locks::{Asking, LockPrediction, LockUpgrade};
pub use operation::Changed;
pub(super) use operation::{Answer, Done, LocalResult, Operation, Waiter};
pub(super) use replayed::Earlier;
use replayed::Replayed;
pub(super) use state::{State, StreamEnd, Verdict, late, unknown};

use super::recent_invalidations::InvalidationMark;
use crate::error::ClientError;
use crate::journal::Journal;

/// Changes that wait at a time; who comes later waits for room.
const WAITING_MAX: usize = 4096;
/// When a directory is recalled, so are those that have been idle for this long: whoever looks into one looks into
/// others.
const RECENTLY: Duration = Duration::from_secs(1);
/// Directories of one message.
const RETURN_MAX: usize = 10_000;

/// The changes of a client that the master has not made yet, in their order.
pub(super) struct OperationLog {
    state: Mutex<State>,
    /// Something is to be looked at anew by whoever sends.
    pub filled: Notify,
    /// An operation is at its end.
    ended: Notify,
    room: Arc<Semaphore>,
    /// For the process that goes on when this one has died.
    pub journal: Option<Arc<Journal>>,
    /// What the process before had asked for.
    pub replayed: Replayed,
    /// Whether directories that are made here are to be held.
    pub delegates_directories: bool,
}

/// A request for a lock that waits at the master, as long as it is not known here what has become of it: until then,
/// nothing is certain of the locks of its file.
pub(super) struct AskedLock<'l> {
    log: &'l OperationLog,
    set: SetLock,
    is_clear: bool,
}

impl AskedLock<'_> {
    /// What became of it is entered.
    pub fn end(mut self) {
        self.is_clear = true;
    }
}

impl Drop for AskedLock<'_> {
    fn drop(&mut self) {
        self.log.lock().delegations.locks.end_asking(&self.set, Asking::Waiting, self.is_clear);
    }
}

impl OperationLog {
    /// Directories are held only if a process could go on with what is answered there.
    pub fn new(journal: Option<Arc<Journal>>, directory_delegations: bool) -> Self {
        Self {
            delegates_directories: directory_delegations && journal.is_some(),
            state: Mutex::default(),
            filled: Notify::new(),
            ended: Notify::new(),
            room: Arc::new(Semaphore::new(WAITING_MAX)),
            journal,
            replayed: Replayed::default(),
        }
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Room for one more change, if there is some at once.
    pub fn room(&self) -> Result<OwnedSemaphorePermit, TryAcquireError> {
        self.room.clone().try_acquire_owned()
    }

    /// Waits for room for one more change.
    pub async fn wait_for_room(&self) -> Result<OwnedSemaphorePermit, ClientError> {
        self.room.clone().acquire_owned().await.map_err(|_closed| ClientError::Shutdown)
    }

    /// Takes an operation in, or refuses it when none is taken any more.
    pub fn push(&self, state: &mut State, operation: Operation) {
        if state.is_closed {
            operation.deliver(Err(ClientError::Shutdown));
        } else {
            self.wake_if(state.push(operation));
        }
    }

    /// Has whoever sends look anew, if there is news.
    pub fn wake_if(&self, is_news: bool) {
        if is_news {
            self.filled.notify_one();
        }
    }

    /// Has all that is queued sent.
    pub fn hurry(&self) {
        self.lock().hurry();
        self.filled.notify_one();
    }

    /// The next call to be sent, which is in the journal, with its numbers, when this returns; `None` when nothing is
    /// due, or no more may be under way. Only for whoever sends.
    pub fn next_request(&self, mark: InvalidationMark) -> Option<Outgoing> {
        let mut departing = self.lock().take_departing(mark, Instant::now())?;
        let outgoing = departing.enter(self.journal.as_ref());
        self.lock().put_back(departing);
        Some(outgoing)
    }

    /// Operations are at their end, each before the next one is taken from `done`. Gives inodes that the session holds
    /// by them, and that nobody has waited for.
    pub fn finish(&self, done: impl IntoIterator<Item = Done>) -> Vec<u64> {
        let end = |(operation, answer): Done| {
            self.lock().leave(&operation, &answer);
            operation.deliver(answer)
        };
        let unclaimed = done.into_iter().filter_map(end).collect();
        self.ended.notify_waiters();
        unclaimed
    }

    /// Locks were taken back: see [`State::take_back`].
    pub fn taken_back(&self) {
        self.ended.notify_waiters();
    }

    /// Waits until what has begun by now is made, lost or undone: as much as `which` says, for as long as `is_unmade`.
    async fn made_within(
        &self,
        patience: Duration,
        which: impl Fn(&AffectedInodes) -> Option<u64>,
        is_unmade: impl Fn(&AffectedInodes, u64) -> bool,
    ) -> Result<(), ClientError> {
        let begun = which(&self.lock().affected);
        let Some(begun) = begun else { return Ok(()) };
        self.hurry();
        let made = async {
            loop {
                let ended = self.ended.notified();
                if !is_unmade(&self.lock().affected, begun) {
                    return;
                }
                ended.await;
            }
        };
        timeout(patience, made).await.map_err(|_elapsed| late(patience))
    }

    /// Waits until everything that was answered by now is made, lost or undone.
    pub async fn all_made(&self, patience: Duration) -> Result<(), ClientError> {
        self.made_within(patience, AffectedInodes::unmade, AffectedInodes::has_unmade).await
    }

    /// Waits as [`Self::all_made`] does, but not for the bytes of files of which the session's end says that they may
    /// have changed.
    pub async fn names_made(&self, patience: Duration) -> Result<(), ClientError> {
        self.made_within(patience, AffectedInodes::named_unmade, AffectedInodes::has_unmade).await
    }

    /// Waits for the unlocks, too, that nobody waits for otherwise.
    pub async fn all_unlocked(&self, patience: Duration) -> Result<(), ClientError> {
        self.made_within(patience, AffectedInodes::any_unmade, AffectedInodes::has_any_unmade).await
    }

    /// No operation is taken any more.
    pub fn close(&self) {
        let done = self.lock().close();
        self.finish(done);
    }

    /// Somebody waits at the master for a lock.
    pub fn ask_lock(&self, set: SetLock) -> AskedLock<'_> {
        self.lock().delegations.locks.begin_asking(&set, Asking::Waiting);
        AskedLock { log: self, set, is_clear: false }
    }

    /// Somebody else wants to know what is in a directory (0: in any): it is let go of, after all that was answered
    /// there.
    pub fn recalled(&self, directory: u64) {
        if directory == 0 {
            return self.return_all();
        }
        let mut state = self.lock();
        let now = Instant::now();
        let is_idle = |changed: Instant| now.saturating_duration_since(changed) >= RECENTLY;
        let over = match state.delegations.holds(directory) {
            true => state.delegations.take_out(|inode, changed| inode == directory || is_idle(changed)),
            false => state.delegations.recall_unknown(directory),
        };
        self.push_return(&mut state, &over);
    }

    /// Lets go of directories in which nothing was changed for so long.
    pub fn return_idle(&self, idle: Duration) {
        let (mut state, now) = (self.lock(), Instant::now());
        let over = state.delegations.take_out(|_, changed| now.saturating_duration_since(changed) >= idle);
        self.push_return(&mut state, &over);
    }

    /// From now on changes are answered when the master has made them.
    pub fn return_all(&self) {
        let mut state = self.lock();
        let all = state.delegations.take_out_all();
        self.push(&mut state, Operation::must_deliver(Change::ReturnDelegations(all)));
        Failpoint::ReturnQueued.pass();
    }

    fn push_return(&self, state: &mut State, directories: &[u64]) {
        for directories in directories.chunks(RETURN_MAX) {
            let let_go = ReturnDelegations { directories: directories.to_vec(), all: false };
            self.push(state, Operation::must_deliver(Change::ReturnDelegations(let_go)));
            Failpoint::ReturnQueued.pass();
        }
    }

    /// The session holds nothing, nor ever will: it is over, or another one has begun.
    pub fn end_delegations(&self) {
        self.lock().delegations.follow(0);
    }
}
