//! Answering a request for a lock before the master has it, where nobody but this session can have any.

use std::sync::Arc;

use cavern_proto::locks::place;
use cavern_proto::master::{Kind, Lock, LockKind, LockType, MutationResult, SetLock};
use rustix::io::Errno;

use super::log::{Answer, Changed, LockPrediction, LockUpgrade, State};
use super::node::Node;
use super::parts::Inner;
use crate::error::ClientError;

/// What an answer needs of a request for a lock.
pub(super) enum LocalLock {
    /// There is nothing to be sent.
    Now(Box<Answer>),
    /// It is sent.
    Made(Option<LockUpgrade>),
}

impl Inner {
    /// Answers a request for a lock; `None` when that is the master's to do.
    pub(super) fn predict_lock(&self, state: &mut State, set: &SetLock) -> Option<LocalLock> {
        let file = self.lockable(state, set.inode)?;
        let prediction = state.delegations.locks.predict(set)?;
        state.delegations.use_now(&[file.parent]);
        let answer = match prediction {
            LockPrediction::Nothing => Ok(locked(set, state.delegations.session())),
            LockPrediction::InTheWay => {
                let reason = "a lock of another process of this host stands in the way".to_owned();
                Err(ClientError::Refused { errno: Errno::AGAIN.raw_os_error(), reason })
            }
            LockPrediction::Made(None) if self.is_undone(state, set) => {
                state.delegations.locks.enter(set);
                Ok(locked(set, state.delegations.session()))
            }
            LockPrediction::Made(upgrade) => return Some(LocalLock::Made(upgrade)),
        };
        Some(LocalLock::Now(Box::new(answer)))
    }

    /// Takes back what an unlock makes useless of the locks that are not sent yet, and says whether nothing is left to
    /// be unlocked by then.
    fn is_undone(&self, state: &mut State, unlock: &SetLock) -> bool {
        let mut left = state.delegations.locks.owned(unlock);
        let taken = state.take_back(unlock);
        for operation in &taken {
            let (Some(slot), Some(set)) = (&operation.slot, operation.lock()) else { continue };
            // Before the unlock is answered: a successor must not make it.
            slot.erase();
            if operation.answered.as_ref().is_some_and(|answered| answered.upgrade == Some(LockUpgrade::All)) {
                let lock = Lock { session: 0, r#type: LockType::Unlocked.into(), ..set.lock.unwrap_or_default() };
                place(&mut left, lock);
            }
        }
        if !taken.is_empty() {
            self.log.taken_back();
            self.stats.undone_changes.inc_by(taken.len() as u64);
        }
        left.is_empty()
    }

    /// A file that is held, has no other name, and is in a directory that was made here: elsewhere others may have
    /// locked it before.
    fn lockable(&self, state: &State, inode: u64) -> Option<Arc<Node>> {
        let file = self.names.complete_node(inode)?;
        let is_held = matches!(file.kind, Kind::File) && !file.is_removed() && file.nlink == 1;
        let is_held = is_held && state.delegations.holds(file.parent) && !state.delegations.is_existing(file.parent);
        (is_held && state.affected.is_in_place(&[inode, file.parent])).then_some(file)
    }

    /// The first lock that stands in the way of another; `None` when only the master knows.
    pub(super) fn known_lock_in_way(&self, inode: u64, kind: LockKind, lock: &Lock) -> Option<Option<Lock>> {
        let state = self.log.lock();
        if !self.holds_any(&state) {
            return None;
        }
        self.lockable(&state, inode)?;
        let found = state.delegations.locks.in_the_way(inode, kind, lock)?;
        let session = state.delegations.session();
        Some(found.map(|found| Lock { session, ..found }))
    }
}

fn locked(set: &SetLock, session: u64) -> Changed {
    let result = MutationResult { inode: set.inode, ..MutationResult::default() };
    Changed { applied_locally: true, ..Changed::new(result, None, session, 0) }
}
