//! The log of operations as a state machine: every operation is queued, sent, or at its end.
//!
//! ```text
//!   push ──▶ queued ─────── take_departing ─────▶ sent ───── take_answered ───▶ at its end
//!             │  ▲ (perhaps answered here already) │ │
//!             │  └──── broken: it was not made ────┘ └─ broken, follow: nobody will ever know
//!             └─ take_back, expire, broken: it is not made
//! ```
//!
//! Operations get their numbers in the order in which they were pushed, and go to the master in that order, in calls.
//! What may have been made keeps its number, comes before all others, and is sent under it until it is answered or the
//! session is over, also when nobody waits for it any more. What was not made goes back to the front of the queue.
//!
//! Functions that end operations give them with what whoever waits is told: see [`Done`].

use std::collections::VecDeque;
use std::time::Duration;

use cavern_net::NetError;
use cavern_proto::locks::overlap;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{LockType, SetLock};
use tokio::time::Instant;

use super::affected_inodes::AffectedInodes;
use super::call::{AHEAD, Call, Departing};
use super::delegations::{Delegations, NUMBERS};
use super::known_locks::{Asking, LockUpgrade};
use super::operation::{Answer, CallSize, Done, Operation};
use crate::error::ClientError;
use crate::metadata::recent_invalidations::InvalidationMark;

/// What was answered before it is sent gathers for so long, unless somebody waits,
const GATHER: Duration = Duration::from_millis(10);
/// or for longer while it is about bytes and locks alone, of which nothing is lost with this host's processes,
const GATHER_BYTES: Duration = Duration::from_millis(100);
/// or so many have.
const GATHERED_MAX: usize = 256;
/// Operations that are looked at for locks which an unlock makes useless, and for what another commit adds to.
const LOOKED_AT: usize = 64;

/// How a stream came to its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::metadata) enum StreamEnd {
    /// It was open.
    Broken,
    /// It could not be opened, and nothing was sent on it.
    NotOpened,
}

/// What the end of a stream says about the operations that it left without an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::metadata) enum Verdict {
    /// None was made: the session is not (yet) alive there.
    NotMade,
    /// They may have been made.
    Unknown,
    /// Those of the first call, or those for which the stream was to be opened, were not made, nor ever will be.
    Refused,
}

/// What is known of the queue as a whole.
#[derive(Debug, Default)]
struct Gathering {
    /// Somebody waits for what is in it.
    is_urgent: bool,
    /// Something in it is about more than bytes and locks.
    has_names: bool,
    /// When the first of what is in it came. It may have been taken back: whoever sends comes to look nevertheless, and
    /// need not be told of those that come until then.
    since: Option<Instant>,
}

impl Gathering {
    fn add(&mut self, operation: &Operation) {
        self.is_urgent |= operation.answered.is_none() || operation.waiter.is_some();
        self.has_names |= !operation.is_overwrite();
        self.since.get_or_insert_with(Instant::now);
    }
}

/// The operations of the log, each queued, sent or at its end.
#[derive(Debug, Default)]
pub(in crate::metadata) struct State {
    /// The session whose numbers those of the calls are.
    session: u64,
    /// Every number up to this one has been answered.
    answered: u64,
    /// Numbers up to this one were used by a process before.
    used: u64,
    sent: VecDeque<Call>,
    queued: VecDeque<Operation>,
    gathering: Gathering,
    /// Operations that let go of closed inodes.
    releases: u32,
    pub is_closed: bool,
    pub affected: AffectedInodes,
    pub delegations: Delegations,
}

impl State {
    /// Takes over what the process before has left, in its order: what it had sent, under its numbers, and behind that
    /// what it had answered. Before all that is in the queue.
    pub fn load(&mut self, (session, used): (u64, u64), operations: Vec<Operation>, mark: InvalidationMark) {
        (self.session, self.used) = (session, used);
        let later = std::mem::take(&mut self.queued);
        let mut size = CallSize::default();
        for operation in operations {
            self.enter(&operation);
            let number = operation.mutation.seq;
            if number == 0 {
                self.gathering.add(&operation);
                self.queued.push_back(operation);
                continue;
            }
            let last = self.sent.back_mut().filter(|call| call.last() + 1 == number && size.admit(&operation));
            match last {
                Some(call) => call.operations.push(operation),
                None => {
                    size = CallSize::default();
                    size.admit(&operation);
                    let operations = vec![operation];
                    self.sent.push_back(Call { operations, first: number, mark, is_sent: false, was_sent: true });
                }
            }
        }
        self.queued.extend(later);
        self.answered = self.sent.front().map_or(used, |call| call.first - 1);
    }

    /// Takes an operation in, behind all others; whether whoever sends them is to look anew.
    pub fn push(&mut self, mut operation: Operation) -> bool {
        if operation.must_deliver && operation.asked_lock().is_some() {
            // Whoever looks for locks waits for an unlock that nobody waits for.
            operation.number = Some(self.affected.next_number());
        }
        self.enter(&operation);
        let (is_first, had_names) = (self.gathering.since.is_none(), self.gathering.has_names);
        self.gathering.add(&operation);
        self.queued.push_back(operation);
        // He has looked at the first, and comes back when that is due.
        let Gathering { is_urgent, has_names, .. } = self.gathering;
        is_urgent || is_first || has_names && !had_names || self.queued.len() >= GATHERED_MAX
    }

    fn enter(&mut self, operation: &Operation) {
        self.affected.enter(operation);
        self.delegations.enter(operation);
        self.releases += u32::from(operation.is_release());
        if let Some(set) = operation.asked_lock() {
            self.delegations.locks.begin_asking(set, Asking::Once);
        }
    }

    /// An operation is at its end: what it was about is certain again.
    pub fn leave(&mut self, operation: &Operation, answer: &Answer) {
        self.affected.lose(operation, answer);
        self.affected.leave(operation);
        self.delegations.leave(operation);
        self.releases = self.releases.saturating_sub(u32::from(operation.is_release()));
        // What is asked for once is answered in its order, or was not made.
        if let Some(set) = operation.asked_lock() {
            self.delegations.locks.end_asking(set, Asking::Once, true);
        }
    }

    /// Whether closed inodes are being let go of.
    pub fn is_releasing(&self) -> bool {
        self.releases > 0
    }

    /// Sees to it that there are numbers for what is made here; whether whoever sends is to look anew.
    pub fn reserve_numbers(&mut self) -> bool {
        self.delegations.wants_numbers() && self.push(Operation::must_deliver(Change::ReserveInodes(NUMBERS)))
    }

    /// Takes out the locks that an unlock makes useless: their owner has what it had before, or less, without them, and
    /// nobody else can have asked for anything that it has without them only. From the last one back to where that is
    /// not known any more.
    pub fn take_back(&mut self, unlock: &SetLock) -> Vec<Operation> {
        let (mut taken, wanted) = (Vec::new(), unlock.lock.unwrap_or_default());
        let last = self.queued.len();
        for at in (last.saturating_sub(LOOKED_AT)..last).rev() {
            let Some(set) = self.queued[at].lock() else { continue };
            let lock = set.lock.unwrap_or_default();
            let is_own = (set.inode, set.kind, lock.owner) == (unlock.inode, unlock.kind, wanted.owner);
            if !is_own || !overlap(&lock, &wanted) || lock.r#type() == LockType::Unlocked {
                continue;
            }
            let is_within = wanted.start <= lock.start && lock.end <= wanted.end;
            let upgrade = self.queued[at].answered.as_ref().and_then(|answered| answered.upgrade);
            if !is_within || !matches!(upgrade, Some(LockUpgrade::All | LockUpgrade::More)) {
                break;
            }
            taken.extend(self.queued.remove(at));
        }
        taken.iter().for_each(|operation| self.affected.leave(operation));
        self.gathering.is_urgent &= !self.queued.is_empty();
        taken
    }

    /// Has `merge` make another commit part of the last one of its file that is queued, or leave that as it is, if what
    /// came behind it is about bytes and locks alone. Whether whoever sends is to look anew.
    pub fn merge<T>(&mut self, inode: u64, merge: impl FnOnce(&mut Operation) -> Option<T>) -> Option<(T, bool)> {
        let mut latest = self.queued.iter_mut().rev().take(LOOKED_AT);
        let operation = loop {
            let operation = latest.next()?;
            if matches!(&operation.mutation.change, Some(Change::Commit(commit)) if commit.inode == inode) {
                break operation;
            }
            if !operation.is_overwrite() {
                return None;
            }
        };
        // Under its number the journal, or the master, may have it as it was.
        let merged = if operation.mutation.seq == 0 { merge(operation)? } else { return None };
        self.affected.is_named_up_to(operation);
        let is_news = !operation.is_overwrite() && !self.gathering.has_names;
        self.gathering.has_names |= is_news;
        Some((merged, is_news))
    }

    /// Somebody waits for all that is in the queue.
    pub fn hurry(&mut self) {
        self.gathering.is_urgent = !self.queued.is_empty();
    }

    /// When what is in the queue is to be sent: not while so many calls are under way.
    pub fn due(&self) -> Option<Instant> {
        let Gathering { is_urgent, has_names, since } = self.gathering;
        let since = since.filter(|_| self.sent.len() < AHEAD)?;
        let gathered = if has_names { GATHER } else { GATHER_BYTES };
        Some(if is_urgent || self.queued.len() >= GATHERED_MAX { since } else { since + gathered })
    }

    /// Whether nothing is to be sent or answered, nor will be before whoever sends is told of something new.
    pub fn is_idle(&self) -> bool {
        // What is in the queue, or was there, has a time at which it is looked at.
        self.sent.is_empty() && self.gathering.since.is_none()
    }

    /// Whether something is to be sent, or to be answered.
    pub fn has_work(&self, now: Instant) -> bool {
        !self.sent.is_empty() || !self.queued.is_empty() && self.due().is_some_and(|due| due <= now)
    }

    /// When the first of those who wait has waited too long.
    pub fn deadline(&self) -> Option<Instant> {
        let sent = self.sent.iter().flat_map(|call| &call.operations);
        sent.chain(&self.queued).filter_map(|operation| Some(operation.waiter.as_ref()?.deadline)).min()
    }

    /// Takes out the next call that is not on the stream: one that is sent again, or of what is due in the queue, if as
    /// many may be under way. Whoever sends puts it back before he does anything else here.
    pub fn take_departing(&mut self, mark: InvalidationMark, now: Instant) -> Option<Departing> {
        if self.sent.iter().all(|call| call.is_sent) {
            self.begin_call(mark, now);
        }
        let place = self.sent.iter().position(|call| !call.is_sent)?;
        let call = self.sent.remove(place)?;
        Some(Departing { call, place, session: self.session, answered: self.answered })
    }

    /// Puts a call back that is being sent.
    pub fn put_back(&mut self, Departing { call, place, .. }: Departing) {
        self.sent.insert(place, call);
    }

    /// Makes a call of what is in the queue.
    fn begin_call(&mut self, mark: InvalidationMark, now: Instant) {
        if self.due().is_none_or(|due| due > now) {
            return;
        }
        let mut operations = self.take_queued();
        let first = self.sent.back().map_or(self.answered, Call::last).max(self.used) + 1;
        for (operation, number) in operations.iter_mut().zip(first..) {
            operation.mutation.seq = number;
        }
        if !operations.is_empty() {
            self.sent.push_back(Call { operations, first, mark, is_sent: false, was_sent: false });
        }
    }

    /// What goes into one call.
    fn take_queued(&mut self) -> Vec<Operation> {
        let mut size = CallSize::default();
        let count = self.queued.iter().take_while(|operation| size.admit(operation)).count();
        let taken = self.queued.drain(..count).collect();
        if self.queued.is_empty() {
            self.gathering = Gathering::default();
        }
        taken
    }

    /// The master has answered the first call; `None` when it was asked for nothing. Its operations are at their end as
    /// soon as somebody has taken the results in.
    pub fn take_answered(&mut self) -> Option<Call> {
        let call = self.sent.pop_front_if(|call| call.is_sent)?;
        self.answered = call.last();
        Some(call)
    }

    /// Whether the master is to answer anything.
    pub fn awaits_answer(&self) -> bool {
        self.sent.front().is_some_and(|call| call.is_sent)
    }

    /// There is no stream any more. `None` when nobody will ever know what became of the first call: the session must
    /// be given up.
    ///
    /// A master that says that it does not lead says nothing of what was sent to it while it led: its successor may
    /// have that in its log, so the verdict is unknown. If it says so to the opening of a stream, nothing was sent on
    /// that stream yet, and no call is marked: each is as unknown as earlier streams have left it.
    pub fn broken(&mut self, end: StreamEnd, verdict: Verdict, error: &ClientError, now: Instant) -> Option<Vec<Done>> {
        for call in &mut self.sent {
            call.was_sent |= call.is_sent && verdict == Verdict::Unknown;
            call.is_sent = false;
        }
        let is_due = self.due().is_some_and(|due| due <= now);
        let refused = match self.sent.front_mut() {
            _ if verdict != Verdict::Refused => Vec::new(),
            Some(first) if first.was_sent => return None,
            // What was sent after the first call has not been looked at.
            Some(first) => std::mem::take(&mut first.operations),
            None if end == StreamEnd::NotOpened && is_due => {
                // None of them was looked at.
                self.queued.iter_mut().for_each(|operation| operation.is_suspect = false);
                self.take_queued()
            }
            None => Vec::new(),
        };
        // Now it is known that they were not made, and an asker that was answered before (`OutcomeUnknown`) does not
        // count on them.
        let is_kept =
            |operation: &Operation| verdict != Verdict::NotMade || operation.waiter.is_some() || operation.must_deliver;
        let given_up = self.requeue(is_kept);
        // What is owed is sent until the session is over, unless somebody can be told that it is lost or it is known to
        // be what the master refuses, which it would for ever.
        let is_culprit = end == StreamEnd::Broken && refused.len() == 1;
        let is_resent = |one: &Operation| one.must_deliver && !one.mutation.is_write_back && !is_culprit;
        let (mut must_deliver, refused): (Vec<_>, Vec<_>) = refused.into_iter().partition(is_resent);
        must_deliver.iter_mut().for_each(|operation| operation.is_suspect = true);
        self.put_first(must_deliver);
        let not_made = refused.into_iter().chain(given_up);
        Some(not_made.map(|operation| (operation.undone(), Err(error.clone()))).collect())
    }

    /// Puts what was never sent, or was not made, back to the front of the queue; gives what is not to be kept.
    fn requeue(&mut self, is_kept: impl Fn(&Operation) -> bool) -> Vec<Operation> {
        let may_be_made = self.sent.iter().take_while(|call| call.was_sent).count();
        let calls = self.sent.split_off(may_be_made);
        let (kept, given_up): (Vec<_>, Vec<_>) =
            calls.into_iter().flat_map(|call| call.operations).partition(|operation| is_kept(operation));
        self.put_first(kept);
        given_up
    }

    /// Puts operations before all others in the queue, to be sent soon.
    fn put_first(&mut self, operations: Vec<Operation>) {
        if !operations.is_empty() {
            self.gathering.is_urgent = true;
            self.gathering.since.get_or_insert_with(Instant::now);
        }
        operations.into_iter().rev().for_each(|operation| self.queued.push_front(operation));
    }

    /// The session is this one from now on: the numbers of one that is over mean nothing in the next. `None` when it is
    /// the same as before.
    pub fn follow(&mut self, session: u64) -> Option<Vec<Done>> {
        if session == self.session {
            return None;
        }
        let done = self.give_up("the session with the master has ended meanwhile");
        (self.session, self.answered, self.used) = (session, 0, 0);
        Some(done)
    }

    /// It is not known what became of the calls that may have been made. What was not is for the next session.
    pub fn give_up(&mut self, cause: &str) -> Vec<Done> {
        let mut done = Vec::new();
        while let Some(call) = self.sent.pop_front_if(|call| call.is_sent || call.was_sent) {
            done.extend(unknown(call.operations, cause));
        }
        self.requeue(|_| true);
        done
    }

    /// Ends what has waited for too long in the queue; what is owed stays, without those who waited. Of what was sent
    /// those who wait are told that it may be made, and whether there are any.
    pub fn expire(&mut self, now: Instant, patience: Duration) -> (Vec<Done>, bool) {
        if self.queued.is_empty() && self.due().is_some_and(|due| due <= now) {
            // All of it was taken back.
            self.gathering = Gathering::default();
        }
        if self.deadline().is_none_or(|deadline| deadline > now) {
            return (Vec::new(), false);
        }
        let is_over = |operation: &Operation| operation.is_late(now) && !operation.must_deliver;
        let (over, rest): (Vec<_>, Vec<_>) = std::mem::take(&mut self.queued).into_iter().partition(is_over);
        self.queued = rest.into();
        for operation in self.queued.iter_mut().filter(|operation| operation.is_late(now)) {
            tell(operation, late(patience));
        }
        let (mut is_unanswered, waited) = (false, patience.as_millis());
        let of_sent = self.sent.iter_mut().flat_map(|call| &mut call.operations);
        for operation in of_sent.filter(|operation| operation.is_late(now)) {
            is_unanswered = true;
            // Somebody else may wait in its place.
            operation.room = None;
            let cause = format!("the master did not answer within {waited} ms");
            tell(operation, ClientError::OutcomeUnknown { cause });
        }
        (over.into_iter().map(|operation| (operation.undone(), Err(late(patience)))).collect(), is_unanswered)
    }

    /// No operation is taken any more. What may have been made, or was answered, is for the next process, if there is
    /// one.
    pub fn close(&mut self) -> Vec<Done> {
        self.is_closed = true;
        let sent = std::mem::take(&mut self.sent).into_iter().flat_map(|call| call.operations);
        let (answered, queued): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.queued).into_iter().partition(|operation| operation.mutation.is_write_back);
        let all = sent.chain(answered).map(Operation::without_record).chain(queued);
        all.map(|operation| (operation, Err(ClientError::Shutdown))).collect()
    }
}

/// The time of an operation is up.
pub(in crate::metadata) fn late(waited: Duration) -> ClientError {
    ClientError::Net(NetError::MasterDeadline { call: "Mutate", waited_ms: waited.as_millis() as u64 })
}

/// Nobody will ever know what became of them.
pub(in crate::metadata) fn unknown(operations: Vec<Operation>, cause: &str) -> impl Iterator<Item = Done> {
    let told = move |operation| -> Done { (operation, Err(ClientError::OutcomeUnknown { cause: cause.to_owned() })) };
    operations.into_iter().map(told)
}

/// Whoever waits for an operation waits no longer.
fn tell(operation: &mut Operation, error: ClientError) {
    if let Some(waiter) = operation.waiter.take() {
        let _gone = waiter.answer.send(Err(error));
    }
}

#[cfg(test)]
impl State {
    /// What [`OperationLog::next_request`](super::OperationLog::next_request) does without letting go of the lock.
    pub fn next_request(
        &mut self,
        journal: Option<&std::sync::Arc<crate::journal::Journal>>,
        mark: InvalidationMark,
        now: Instant,
    ) -> Option<super::call::Outgoing> {
        let mut departing = self.take_departing(mark, now)?;
        let outgoing = departing.enter(journal);
        self.put_back(departing);
        Some(outgoing)
    }
}

#[cfg(test)]
mod tests {
    use cavern_proto::master::{CommitContent, CreateInode, Lock, LockKind, MutationResult, RemoveXattr, SetXattr};
    use tokio::sync::oneshot;

    use super::super::operation::{LocalResult, Waiter};
    use super::*;
    use crate::metadata::recent_invalidations::RecentInvalidations;

    fn asked(change: Change) -> Operation {
        Operation::new(change, (0, 0))
    }

    fn answered(change: Change, is_overwrite: bool, upgrade: Option<LockUpgrade>) -> Operation {
        let answer = LocalResult { result: MutationResult::default(), is_overwrite, upgrade };
        Operation { answered: Some(Box::new(answer)), ..Operation::must_deliver(change) }
    }

    /// Has the next call on the stream; gives the numbers of its operations.
    fn send(state: &mut State) -> Vec<u64> {
        let outgoing = state.next_request(None, RecentInvalidations::default().mark(), Instant::now());
        let mutations = outgoing.map(|outgoing| outgoing.request.mutations).unwrap_or_default();
        mutations.iter().map(|mutation| mutation.seq).collect()
    }

    /// Sends the next call, which the master has answered when this returns.
    fn take(state: &mut State) -> Vec<u64> {
        let numbers = send(state);
        assert_eq!(state.take_answered().is_some(), !numbers.is_empty());
        numbers
    }

    #[test]
    fn a_call_has_a_bounded_number_of_changes_and_of_bytes() {
        let mut state = State::default();
        let small = |inode| Change::RemoveXattr(RemoveXattr { inode, name: "user.a".into() });
        for inode in 0..2500 {
            state.push(asked(small(inode)));
        }
        assert_eq!([(); 3].map(|()| take(&mut state).len()), [1000, 1000, 500]);
        let value = bytes::Bytes::from(vec![0; 64 << 10]);
        for inode in 0..20 {
            let set = SetXattr { inode, name: "user.a".into(), value: value.clone(), ..SetXattr::default() };
            state.push(asked(Change::SetXattr(set)));
        }
        assert_eq!([(); 3].map(|()| take(&mut state).len()), [7, 7, 6]);
        let huge = SetXattr { value: vec![0; 1 << 20].into(), ..SetXattr::default() };
        state.push(asked(Change::SetXattr(huge)));
        assert_eq!([(); 2].map(|()| take(&mut state)), [vec![2521], vec![]]);
    }

    fn lock(owner: u64, r#type: LockType, start: u64, end: u64) -> SetLock {
        let lock = Lock { owner, r#type: r#type.into(), start, end, ..Lock::default() };
        SetLock { inode: 5, kind: LockKind::Posix.into(), lock: Some(lock), ..SetLock::default() }
    }

    #[test]
    fn an_unlock_takes_back_what_nobody_needs_without_it() {
        let mut state = State::default();
        let push = |state: &mut State, set: SetLock, upgrade: LockUpgrade| {
            state.push(answered(Change::SetLock(set), false, Some(upgrade)));
        };
        let taken = |state: &mut State, unlock: SetLock| -> Vec<(u64, u64)> {
            let taken = state.take_back(&unlock);
            taken.iter().filter_map(|one| one.lock()?.lock).map(|lock| (lock.start, lock.end)).collect()
        };
        let unlock = |owner, start, end| lock(owner, LockType::Unlocked, start, end);
        push(&mut state, lock(1, LockType::Shared, 0, 4), LockUpgrade::All);
        push(&mut state, lock(2, LockType::Shared, 0, 4), LockUpgrade::All);
        push(&mut state, lock(1, LockType::Exclusive, 10, 19), LockUpgrade::All);
        push(&mut state, lock(1, LockType::Exclusive, 5, 9), LockUpgrade::More);
        assert_eq!(taken(&mut state, SetLock { kind: LockKind::Flock.into(), ..unlock(1, 0, 99) }), []);
        assert_eq!(taken(&mut state, SetLock { inode: 6, ..unlock(1, 0, 99) }), []);
        assert_eq!(taken(&mut state, unlock(1, 10, 15)), [], "the rest is needed");
        assert_eq!(taken(&mut state, unlock(1, 10, 19)), [(10, 19)]);
        assert_eq!(taken(&mut state, unlock(1, 0, 30)), [(5, 9), (0, 4)]);
        // What gives something up lets others have it: what was before stays as well.
        push(&mut state, lock(2, LockType::Exclusive, 0, 4), LockUpgrade::More);
        push(&mut state, lock(2, LockType::Shared, 0, 2), LockUpgrade::Other);
        push(&mut state, lock(2, LockType::Exclusive, 6, 8), LockUpgrade::All);
        assert_eq!(taken(&mut state, unlock(2, 0, 99)), [(6, 8)]);
        assert_eq!(state.queued.len(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn what_comes_after_something_that_was_taken_back_is_sent_in_time() {
        let mut state = State::default();
        let set = lock(1, LockType::Exclusive, 0, 9);
        let locked = || answered(Change::SetLock(set), false, Some(LockUpgrade::All));
        let unlock = lock(1, LockType::Unlocked, 0, 9);
        assert!(state.push(locked()), "whoever sends waits for that");
        let due = state.due().unwrap();
        assert_eq!(state.take_back(&unlock).len(), 1);
        tokio::time::advance(GATHER / 2).await;
        assert!(!state.push(locked()) && state.due() == Some(due), "it comes back by itself");
        assert!(take(&mut state).is_empty());
        tokio::time::advance(GATHER / 2).await;
        assert_eq!((take(&mut state), state.due()), (vec![1], None));
        assert!(state.push(locked()));
        state.take_back(&unlock);
        tokio::time::advance(GATHER).await;
        state.expire(Instant::now(), Duration::ZERO);
        assert_eq!((take(&mut state), state.due()), (vec![], None));
        assert!(state.push(locked()), "it has looked, and found nothing");
    }

    #[tokio::test(start_paused = true)]
    async fn what_gathers_is_to_be_looked_at_though_it_is_not_due() {
        let mut state = State::default();
        assert!(state.is_idle());
        let set = lock(1, LockType::Exclusive, 0, 9);
        state.push(answered(Change::SetLock(set), true, Some(LockUpgrade::All)));
        assert!(!state.is_idle() && !state.has_work(Instant::now()));
        // Of the next one nobody is told before that is due.
        state.take_back(&lock(1, LockType::Unlocked, 0, 9));
        assert!(!state.is_idle());
        tokio::time::advance(GATHER_BYTES).await;
        state.expire(Instant::now(), Duration::ZERO);
        assert!(state.is_idle());
        state.push(asked(Change::AddOpenRef(1)));
        assert_eq!(send(&mut state), [1]);
        assert!(!state.is_idle(), "its answer is to come");
    }

    fn commit(inode: u64, is_overwrite: bool) -> Operation {
        let change = Change::Commit(CommitContent { inode, changed: true, ..CommitContent::default() });
        answered(change, is_overwrite, None)
    }

    fn broken(state: &mut State, end: StreamEnd, verdict: Verdict) -> Option<usize> {
        let error = ClientError::Invalid("the stream is over".to_owned());
        state.broken(end, verdict, &error, Instant::now()).map(|done| end_all(state, done))
    }

    fn end_all(state: &mut State, done: Vec<Done>) -> usize {
        done.iter().for_each(|(operation, answer)| state.leave(operation, answer));
        done.len()
    }

    #[test]
    fn what_was_not_made_when_a_session_is_given_up_is_told_so_when_its_time_is_up() {
        let mut state = State::default();
        state.push(asked(Change::AddOpenRef(1)));
        assert_eq!(send(&mut state), [1]);
        assert_eq!(broken(&mut state, StreamEnd::Broken, Verdict::Unknown), Some(0));
        let (answer, _waiting) = oneshot::channel();
        let waiter = Some(Waiter { answer, deadline: Instant::now() });
        state.push(Operation { waiter, ..asked(Change::AddOpenRef(2)) });
        assert_eq!([send(&mut state), send(&mut state)], [[1], [2]]);
        assert_eq!(broken(&mut state, StreamEnd::Broken, Verdict::Refused), None, "the first may have been made");
        let given_up = state.give_up("nobody knows");
        assert_eq!(end_all(&mut state, given_up), 1);
        let (over, is_unanswered) = state.expire(Instant::now(), Duration::ZERO);
        assert!(matches!(&over[..], [(_, Err(ClientError::Net(_)))]) && !is_unanswered);
        end_all(&mut state, over);
        assert!(state.follow(2).is_some_and(|done| done.is_empty()));
        assert!(take(&mut state).is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_refusal_is_of_what_a_stream_was_opened_for_or_of_its_first_call_but_for_what_is_owed() {
        let mut state = State::default();
        let refused = |state: &mut State, end: StreamEnd| broken(state, end, Verdict::Refused);
        state.push(commit(5, false));
        assert_eq!(refused(&mut state, StreamEnd::NotOpened), Some(0), "it is not due");
        state.push(asked(Change::AddOpenRef(1)));
        assert_eq!(refused(&mut state, StreamEnd::Broken), Some(0), "of an idle stream");
        state.push(Operation::must_deliver(Change::DropOpenRef(1)));
        assert_eq!(send(&mut state), [1, 2, 3]);
        state.push(asked(Change::AddOpenRef(2)));
        assert_eq!(send(&mut state), [4]);
        // Of what was answered there is somebody who can be told.
        state.sent[0].operations[0].mutation.is_write_back = true;
        assert_eq!(refused(&mut state, StreamEnd::Broken), Some(2));
        let must_deliver = |operation: &Operation| operation.must_deliver;
        assert_eq!(state.queued.iter().map(must_deliver).collect::<Vec<_>>(), [true, false], "in their order");
        assert_eq!(refused(&mut state, StreamEnd::NotOpened), Some(1));
        assert_eq!((take(&mut state), state.is_idle()), (vec![1], true), "what is owed is sent until it is made");
    }

    #[test]
    fn what_is_owed_and_was_refused_is_sent_in_a_call_of_its_own_and_ends_when_that_is_refused() {
        let mut state = State::default();
        for change in [Change::DropOpenRef(1), Change::DropOpenRef(2)] {
            state.push(Operation::must_deliver(change));
        }
        state.push(asked(Change::AddOpenRef(1)));
        assert_eq!(send(&mut state), [1, 2, 3]);
        assert_eq!(broken(&mut state, StreamEnd::Broken, Verdict::Refused), Some(1), "nobody knows for whose sake");
        state.push(asked(Change::AddOpenRef(2)));
        assert_eq!([(); 3].map(|()| send(&mut state)), [[1], [2], [3]]);
        assert_eq!(broken(&mut state, StreamEnd::Broken, Verdict::Refused), Some(1));
        let left: Vec<_> = state.queued.iter().filter_map(|operation| operation.mutation.change.clone()).collect();
        assert_eq!(left, [Change::DropOpenRef(2), Change::AddOpenRef(2)]);
        assert_eq!([(); 2].map(|()| take(&mut state)), [[1], [2]], "it is no longer in the way of others");
        assert!(state.is_idle());
    }

    #[test]
    fn all_is_let_go_of_in_one_session_alone() {
        let mut state = State::default();
        let all = state.delegations.take_out_all();
        state.push(Operation::must_deliver(Change::ReturnDelegations(all)));
        state.follow(1);
        assert_eq!(send(&mut state), [1]);
        // Before anything was learnt of the first session.
        let unknown = state.follow(2).unwrap();
        assert_eq!(end_all(&mut state, unknown), 1);
        let made = MutationResult { inode: 7, delegated: true, ..MutationResult::default() };
        state.delegations.learn(&asked(Change::Create(CreateInode::default())), &made, 2);
        assert!(state.delegations.holds(7));
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_about_bytes_alone_gathers_for_longer_until_something_else_comes() {
        let mut state = State::default();
        let begun = Instant::now();
        assert!(state.push(commit(5, true)));
        assert_eq!(state.due(), Some(begun + GATHER_BYTES));
        tokio::time::advance(GATHER / 2).await;
        assert!(!state.push(commit(6, true)), "whoever sends knows when");
        assert!(state.push(commit(7, false)));
        assert_eq!(state.due(), Some(begun + GATHER));
        tokio::time::advance(GATHER).await;
        assert_eq!(take(&mut state).len(), 3);
        state.push(commit(5, true));
        assert_eq!(state.due(), Some(Instant::now() + GATHER_BYTES));
    }

    #[tokio::test(start_paused = true)]
    async fn a_commit_becomes_part_of_the_last_one_of_its_file_unless_something_else_came_behind_it() {
        let mut state = State::default();
        let grown = |state: &mut State, inode: u64, stays: bool| {
            state.merge(inode, |operation| {
                let Some(Change::Commit(waiting)) = &mut operation.mutation.change else { return None };
                waiting.grow_to += 1;
                let grown = waiting.grow_to;
                operation.answered.as_mut()?.is_overwrite &= stays;
                Some(grown)
            })
        };
        assert_eq!(grown(&mut state, 5, true), None, "nothing waits");
        state.push(commit(5, false));
        state.push(commit(6, true));
        let all = [5, 5, 6, 7].map(|inode| grown(&mut state, inode, true));
        assert_eq!(all, [Some((1, false)), Some((2, false)), Some((1, false)), None]);
        state.push(commit(6, true));
        assert_eq!(grown(&mut state, 6, true), Some((1, false)), "of the last one");
        state.push(asked(Change::AddOpenRef(1)));
        assert_eq!([6, 5].map(|inode| grown(&mut state, inode, true)), [None, None], "it would come before that");
        assert_eq!(take(&mut state).len(), 4);
        assert_eq!(grown(&mut state, 5, true), None, "they are on their way");

        assert!(state.push(commit(5, true)));
        assert_eq!(grown(&mut state, 5, false), Some((1, true)), "it is about more than bytes by now");
        assert_eq!(state.due(), Some(Instant::now() + GATHER));
        assert_eq!(state.merge(5, |_| None::<u64>), None);
    }
}
