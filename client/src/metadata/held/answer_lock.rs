//! Answering a request for a lock before the master has it, where nobody but this session can have any.

use std::sync::Arc;

use cavern_proto::locks::place;
use cavern_proto::master::{Kind, Lock, LockKind, LockType, MutationResult, SetLock};
use rustix::io::Errno;
use tokio::time::Instant;

use super::super::changes::{Answer, Changed, Pending};
use super::super::{Inner, Node};
use super::known_locks::{Asking, Gain, LockPrediction, LockedFile};
use super::{HeldDirectories, State};
use crate::error::ClientError;

/// What an answer needs of a request for a lock.
pub(super) enum LockAnswer {
    /// There is nothing to be sent.
    Now(Box<Answer>),
    /// It is sent.
    Made(Option<Gain>),
}

/// A request for a lock, as long as it is not known here what the master makes of it.
#[derive(Debug)]
pub(in super::super) struct AskedLock {
    held: Arc<HeldDirectories>,
    file: LockedFile,
    owner: u64,
    asking: Asking,
    is_clear: bool,
}

impl AskedLock {
    /// What became of it is entered.
    pub(in super::super) fn end(mut self) {
        self.is_clear = true;
    }
}

impl Drop for AskedLock {
    fn drop(&mut self) {
        let Self { file, owner, asking, is_clear, .. } = *self;
        self.held.state.lock().locks.end_asking(file, owner, asking, is_clear);
    }
}

impl HeldDirectories {
    /// The master is about to be asked for a lock. Of a request that waits all that it asks for is one.
    pub(in super::super) fn ask_lock(self: &Arc<Self>, set: &SetLock, asking: Asking) -> Option<AskedLock> {
        let (file, owner) = ((set.inode, set.kind), set.lock.unwrap_or_default().owner);
        let is_known = self.state.lock().locks.begin_asking(file, owner, asking);
        // What is asked for once is answered in its order, or was not made.
        let is_clear = asking == Asking::Once;
        is_known.then(|| AskedLock { held: self.clone(), file, owner, asking, is_clear })
    }

    /// The master has given a lock that was waited for.
    pub(in super::super) fn lock_granted(&self, set: &SetLock) {
        self.state.lock().locks.enter(set);
    }

    /// The master has answered a request.
    pub(in super::super) fn lock_answered(&self, set: &SetLock, result: &MutationResult) {
        self.state.lock().locks.enter_answer(set, result);
    }

    /// A file was made by way of the master.
    pub(in super::super) fn was_created(&self, directory: u64, inode: u64, session: u64) {
        let mut state = self.state.lock();
        if state.session == session && state.directories.contains_key(&directory) {
            state.locks.made(inode);
        }
    }

    /// Others may have locked a file, or may come to do so.
    pub(in super::super) fn strayed(&self, inode: u64) {
        self.state.lock().locks.stray(inode);
    }
}

impl Inner {
    /// Answers a request for a lock; `None` when that is the master's to do. What is no longer to be sent goes to
    /// `undone`, to be dropped when the state is not locked any more.
    pub(super) fn answer_lock(
        &self,
        state: &mut State,
        set: &SetLock,
        undone: &mut Vec<Pending>,
    ) -> Option<LockAnswer> {
        let file = self.lockable(state, set.inode)?;
        let prediction = state.locks.predict(set)?;
        if let Some(changed) = state.directories.get_mut(&file.parent) {
            *changed = Instant::now();
        }
        let answer = match prediction {
            LockPrediction::Nothing => Ok(locked(set, state.session)),
            LockPrediction::InTheWay => {
                let reason = "a lock of another process of this host stands in the way".to_owned();
                Err(ClientError::Refused { errno: Errno::AGAIN.raw_os_error(), reason })
            }
            LockPrediction::Made(None) if self.is_undone(state, set, undone) => {
                state.locks.enter(set);
                Ok(locked(set, state.session))
            }
            LockPrediction::Made(gain) => return Some(LockAnswer::Made(gain)),
        };
        Some(LockAnswer::Now(Box::new(answer)))
    }

    /// Takes back what an unlock makes useless of the locks that are not sent yet, and says whether nothing is left to
    /// be unlocked by then.
    fn is_undone(&self, state: &State, unlock: &SetLock, undone: &mut Vec<Pending>) -> bool {
        let mut left = state.locks.owned(unlock);
        let taken = self.changes.take_back(unlock);
        for pending in &taken {
            let (Some(slot), Some(set)) = (&pending.slot, pending.lock()) else { continue };
            // Before the unlock is answered: a successor must not make it.
            slot.erase();
            if pending.gain == Some(Gain::All) {
                let lock = Lock { session: 0, r#type: LockType::Unlocked.into(), ..set.lock.unwrap_or_default() };
                place(&mut left, lock);
            }
        }
        self.stats.undone_changes.inc_by(taken.len() as u64);
        undone.extend(taken);
        left.is_empty()
    }

    /// A file that is held, and has no other name.
    fn lockable(&self, state: &State, inode: u64) -> Option<Arc<Node>> {
        let file = self.complete_node(inode)?;
        let is_held = matches!(file.kind, Kind::File) && !file.is_removed() && file.nlink == 1;
        let is_held = is_held && state.directories.contains_key(&file.parent);
        (is_held && state.is_in_place(&[inode, file.parent])).then_some(file)
    }

    /// The first lock that stands in the way of another; `None` when only the master knows.
    pub(in super::super) fn known_lock_in_way(&self, inode: u64, kind: LockKind, lock: &Lock) -> Option<Option<Lock>> {
        let (state, session) = self.state_that_holds()?;
        self.lockable(&state, inode)?;
        let found = state.locks.in_the_way(inode, kind, lock)?;
        Some(found.map(|found| Lock { session, ..found }))
    }
}

fn locked(set: &SetLock, session: u64) -> Changed {
    let result = MutationResult { inode: set.inode, ..MutationResult::default() };
    Changed { answered_here: true, ..Changed::new(result, None, session, 0) }
}
