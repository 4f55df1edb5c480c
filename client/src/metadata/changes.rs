//! Changes of names and inodes of fs-mode mounts, on their way to the master.
//!
//! Whoever makes a change waits in a queue; one task ([`sender`]) takes what has gathered there and sends it in one
//! call, so that many changes share a message and a sync of the log.
//!
//! Each change has a number of its session and is sent again under it until it is answered, over broken connections and
//! a restart of the master: the master answers a number that it knows with the result that it had. When the session is
//! over while nobody knows whether the change was made, the answer says so. When the time of a change is up before its
//! answer came, the asker gets an error that says so, and the change goes on being sent: the session lives on, and its
//! caches must know what became of it.

mod sender;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use cavern_net::NetError;
use cavern_net::master::Stubs;
use cavern_proto::locks::overlap;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{
    Attr, CreateInode, Kind, LockType, MakeListedRequest, MutateReply, Mutation, MutationResult, Naming, RecallRequest,
    SetLock,
};
use parking_lot::Mutex;
use prost::Message;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, TryAcquireError, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::sender::Sender;
use super::held::{AskedLock, Asking, Gain, Subject};
use super::{Inner, Metadata, Node};
use crate::error::ClientError;
use crate::journal::{ChangeRecord, ChangeSlot, Journal, RequestContext};

/// What the master takes in one call, and what it is given at most.
const MUTATIONS_MAX: usize = 1000;
const CALL_BYTES_MAX: usize = 512 << 10;
/// Directories that are listed for one change, one after the other: its own, and those that come to be in its way
/// meanwhile.
const LISTINGS_MAX: usize = 16;
/// Changes that wait at a time; who comes later waits for room.
const WAITING_MAX: usize = 4096;

/// What was answered before it is sent gathers for so long, unless somebody waits,
const GATHER: Duration = Duration::from_millis(10);
/// or so many have.
const GATHERED_MAX: usize = 256;
/// Changes that are looked at for locks which an unlock makes useless.
const LOOKED_AT: usize = 64;

/// A change that was made.
#[derive(Clone, Debug)]
pub struct Changed {
    pub result: MutationResult,
    /// The node of `result.inode` as it is now; `None` where too little is known to make one.
    pub node: Option<Arc<Node>>,
    /// The session that made it, and the last event that it had been sent by then.
    pub session: u64,
    pub event_seq: u64,
    /// The master does not have it yet, and nobody else can know of it.
    pub answered_here: bool,
    /// Directories whose listings look otherwise now.
    pub listings: Vec<u64>,
}

impl Changed {
    pub(super) fn new(result: MutationResult, node: Option<Arc<Node>>, session: u64, event_seq: u64) -> Self {
        let directories = result.attributes.iter().filter(|attr| attr.kind() == Kind::Directory);
        let listings = directories.map(|attr| attr.inode).collect();
        Self { result, node, session, event_seq, answered_here: false, listings }
    }

    /// What an inode's attributes are now, if the change was about them.
    pub fn attr_of(&self, inode: u64) -> Option<&Attr> {
        self.result.attributes.iter().find(|attr| attr.inode == inode)
    }
}

pub(super) type Answer = Result<Changed, ClientError>;

/// A change that waits to be answered.
pub(super) struct Pending {
    pub(super) change: Change,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) deadline: Instant,
    /// `None`: nobody waits.
    pub(super) asker: Option<oneshot::Sender<Answer>>,
    pub(super) room: Option<OwnedSemaphorePermit>,
    /// The request of the kernel that it is made for, which waits for the answer,
    pub(super) context: Option<Arc<RequestContext>>,
    /// or has it; 0 for none.
    pub(super) unique: u64,
    /// It is in the journal.
    pub(super) slot: Option<Arc<ChangeSlot>>,
    /// It is sent until it is answered, though nobody waits.
    pub(super) is_owed: bool,
    /// See `Mutation.made_ns`.
    pub(super) made_ns: i64,
    /// A process before has asked for it.
    pub(super) is_inherited: bool,
    /// It had its answer here already, before it was sent.
    pub(super) is_answered: bool,
    /// That answer, unless a process before gave it.
    pub(super) predicted: Option<Box<MutationResult>>,
    /// What it is about, as long as it is not made.
    pub(super) subject: Option<Subject>,
    /// What an owner gains by a lock that was answered here.
    pub(super) gain: Option<Gain>,
    /// A lock that is asked for, until it has been entered what the master says.
    pub(super) asked_lock: Option<AskedLock>,
}

impl Pending {
    /// A change for which somebody waits, or nobody.
    pub(super) fn new(change: Change, (uid, gid): (u32, u32), deadline: Instant) -> Self {
        Self {
            change,
            uid,
            gid,
            deadline,
            asker: None,
            room: None,
            context: None,
            unique: 0,
            slot: None,
            is_owed: false,
            made_ns: 0,
            is_inherited: false,
            is_answered: false,
            predicted: None,
            subject: None,
            gain: None,
            asked_lock: None,
        }
    }

    /// A change that must reach the master, though nobody waits for it.
    pub(super) fn owed(change: Change) -> Self {
        Self { is_owed: true, ..Self::new(change, (0, 0), Instant::now()) }
    }

    /// The lock that it is about.
    pub(super) fn lock(&self) -> Option<&SetLock> {
        match &self.change {
            Change::SetLock(set) => Some(set),
            _ => None,
        }
    }

    /// Sends the answer to the asker; gives it back when the asker no longer waits.
    fn answer(mut self, answer: Answer) -> Option<Answer> {
        match (self.context.take(), self.slot.take()) {
            (Some(context), Some(slot)) => {
                // One that waits for a lock may do so for days.
                if matches!(&self.change, Change::SetLock(set) if set.waiter != 0) {
                    slot.answered();
                }
                context.keep(slot);
            }
            // The request may have kept it, and be on its way to be answered.
            (None, Some(slot)) => drop(Arc::into_inner(slot).map(ChangeSlot::forget)),
            (_, None) => {}
        }
        // What whoever waits asks for next is certain again.
        drop(self.asked_lock.take());
        if let (true, Some(subject), Err(error)) = (self.is_answered, &self.subject, &answer) {
            subject.lose(&error.to_string());
        }
        match self.asker {
            Some(asker) => asker.send(answer).err(),
            None => Some(answer),
        }
    }

    /// Enters the change in the journal before it is sent.
    fn note(&mut self, journal: &Arc<Journal>, session: u64, mutation: &Mutation) {
        let unique = self.context.as_ref().map_or(self.unique, |context| context.unique());
        let record = ChangeRecord { session, seq: mutation.seq, unique, ..ChangeRecord::default() };
        match &self.slot {
            Some(slot) => slot.renumber(&record, mutation),
            None => self.slot = journal.note_change(&record, mutation),
        }
    }

    fn is_late(&self, now: Instant) -> bool {
        self.asker.is_some() && self.deadline <= now
    }

    /// Whether it need not be made any more.
    fn is_over(&self, now: Instant) -> bool {
        self.is_late(now) && !self.is_owed
    }
}

/// The changes that wait to be sent, in their order.
pub(super) struct ChangeQueue {
    state: Mutex<State>,
    filled: Notify,
    room: Arc<Semaphore>,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Pending>,
    /// Somebody waits for what is in the queue.
    is_urgent: bool,
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
        self.since.get_or_insert_with(Instant::now);
        self.waiting.push_back(pending);
    }

    /// When what is in the queue is to be sent; `None` for nothing.
    fn due(&self) -> Option<Instant> {
        let since = self.since?;
        let is_due = self.is_urgent || self.waiting.len() >= GATHERED_MAX;
        Some(if is_due { since } else { since + GATHER })
    }
}

impl Default for ChangeQueue {
    fn default() -> Self {
        Self { state: Mutex::default(), filled: Notify::new(), room: Arc::new(Semaphore::new(WAITING_MAX)) }
    }
}

impl ChangeQueue {
    /// Room for one more change, if there is some at once.
    pub(super) fn room(&self) -> Result<OwnedSemaphorePermit, TryAcquireError> {
        self.room.clone().try_acquire_owned()
    }

    pub(super) fn push(&self, pending: Pending) {
        if let Err(pending) = self.try_push(pending) {
            let _gone = pending.answer(Err(ClientError::Shutdown));
        }
    }

    /// The same; gives the change back when none is taken any more.
    pub(super) fn try_push(&self, pending: Pending) -> Result<(), Box<Pending>> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(Box::new(pending));
        }
        let is_first = state.since.is_none();
        state.push(pending);
        // Whoever sends them has looked at the first, and comes back when that is due.
        let is_news = state.is_urgent || is_first || state.waiting.len() >= GATHERED_MAX;
        drop(state);
        if is_news {
            self.filled.notify_one();
        }
        Ok(())
    }

    /// Puts changes before all others.
    fn push_front(&self, changes: Vec<Pending>) {
        let mut state = self.state.lock();
        let later = std::mem::take(&mut state.waiting);
        changes.into_iter().chain(later).for_each(|pending| state.push(pending));
    }

    /// Takes out the locks that an unlock makes useless: their owner has what it had before, or less, without them, and
    /// nobody else can have asked for anything that it has without them only. From the last one back to where that is
    /// not known any more.
    pub(super) fn take_back(&self, unlock: &SetLock) -> Vec<Pending> {
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

    /// Somebody waits for all that is in the queue.
    pub(super) fn hurry(&self) {
        let mut state = self.state.lock();
        state.is_urgent = !state.waiting.is_empty();
        drop(state);
        self.filled.notify_one();
    }

    /// When what is in the queue is to be sent.
    fn due(&self) -> Option<Instant> {
        self.state.lock().due()
    }

    /// What goes into one call, when it is due.
    fn take(&self) -> Vec<Pending> {
        let mut state = self.state.lock();
        if state.due().is_none_or(|due| due > Instant::now()) {
            return Vec::new();
        }
        let (mut taken, mut bytes) = (0, 0);
        for pending in state.waiting.iter().take(MUTATIONS_MAX) {
            bytes += numbered(pending, u64::MAX).encoded_len() + 8;
            // One that is too long for any call is the master's to refuse.
            if bytes > CALL_BYTES_MAX && taken > 0 {
                break;
            }
            taken += 1;
        }
        let taken = state.waiting.drain(..taken).collect();
        if state.waiting.is_empty() {
            (state.is_urgent, state.since) = (false, None);
        }
        taken
    }

    /// Takes out what has waited too long; what is owed stays, without those who waited.
    fn take_late(&self, now: Instant) -> (Vec<Pending>, Vec<oneshot::Sender<Answer>>) {
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
    fn deadline(&self) -> Option<Instant> {
        let state = self.state.lock();
        state.waiting.iter().find(|pending| pending.asker.is_some()).map(|pending| pending.deadline)
    }

    fn close(&self) {
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

pub(super) fn numbered(pending: &Pending, seq: u64) -> Mutation {
    let (uid, gid, made_ns, is_answered) = (pending.uid, pending.gid, pending.made_ns, pending.is_answered);
    Mutation { seq, uid, gid, made_ns, is_answered, change: Some(pending.change.clone()) }
}

impl Metadata {
    /// Makes a change, in the name of the user and the group that own what it creates. What is refused is
    /// [`ClientError::Refused`] with the errno. The caches know of the change when this returns. Bounded by
    /// `client.metadata_timeout`, and longer only in a strict mount, by two leases, and while a directory that must be
    /// listed first is; a call that is dropped may be carried out or not.
    pub async fn change(&self, change: Change, uid: u32, gid: u32) -> Result<Changed, ClientError> {
        for _listing in 0..LISTINGS_MAX {
            match self.change_once(change.clone(), (uid, gid)).await {
                Err(ClientError::Unlisted { directory, below }) => self.list_first(directory, below).await?,
                Err(ClientError::HeldElsewhere { directory }) => self.recall_first(directory, &change).await?,
                answer => return answer,
            }
        }
        self.change_once(change, (uid, gid)).await
    }

    async fn change_once(&self, change: Change, owner: (u32, u32)) -> Answer {
        let inner = &self.inner;
        if let Some(answer) = inner.earlier_answer(&change).await {
            return answer;
        }
        let context = RequestContext::current();
        let change = match inner.answer_at_once(change, owner, context.as_ref()) {
            Ok(answer) => return answer,
            Err(change) => inner.asking_to_hold(change),
        };
        let mut patience = inner.master.timeout();
        if inner.is_of_strict(&change) {
            // The answer waits for other clients: for a lease of those that an earlier leader had, and for one of those
            // that do not let go.
            patience += inner.lease.length() * 2;
        }
        let deadline = Instant::now() + patience;
        let room = tokio::time::timeout_at(deadline, inner.changes.room.clone().acquire_owned());
        let room = match room.await {
            Ok(Ok(room)) => room,
            Ok(Err(_closed)) => return Err(ClientError::Shutdown),
            Err(_elapsed) => return Err(inner.late()),
        };
        let answer = inner.push_change(change, owner, deadline, Some(room));
        answer.await.unwrap_or(Err(ClientError::Shutdown))
    }

    /// Waits until the master knows all names of a directory, for as long as it learns more of them. Other changes are
    /// not kept waiting by that.
    async fn list_first(&self, inode: u64, recursive: bool) -> Result<(), ClientError> {
        let request = MakeListedRequest { inode, recursive };
        let (mut deadline, mut entries) = (Instant::now() + self.inner.master.timeout(), 0);
        loop {
            let answer = self.inner.master.call_patiently("MakeListed", |mut stubs: Stubs| async move {
                stubs.namespace.make_listed(request).await
            });
            let answer = answer.await?;
            if answer.done {
                return Ok(());
            }
            if answer.entries > entries {
                (deadline, entries) = (Instant::now() + self.inner.master.timeout(), answer.entries);
            } else if Instant::now() >= deadline {
                return Err(ClientError::Unlisted { directory: inode, below: recursive });
            }
        }
    }

    /// Waits until nobody else holds a directory, or any in its mount where the change is about all of it.
    async fn recall_first(&self, inode: u64, change: &Change) -> Result<(), ClientError> {
        let whole_mount = matches!(change, Change::SetQuota(_) | Change::SetTtl(_));
        let request = RecallRequest { inode, whole_mount, session: self.inner.lease.session() };
        let ask = |mut stubs: Stubs| async move { stubs.namespace.recall(request).await };
        Ok(self.inner.master.call_patiently("Recall", ask).await.map(drop)?)
    }

    /// Sends what changes until `stop`. What the process before has left comes first: [`Self::replayed`] knows of it
    /// when this has been called, and before anything is sent.
    pub(crate) fn send_changes(&self, stop: CancellationToken) -> impl Future<Output = ()> + Send + use<> {
        let inner = self.inner.clone();
        let sending = Sender::new(inner.clone()).run();
        async move {
            let _stopped = stop.run_until_cancelled(sending).await;
            inner.changes.close();
        }
    }
}

impl Inner {
    pub(super) fn push_change(
        &self,
        change: Change,
        owner: (u32, u32),
        deadline: Instant,
        room: Option<OwnedSemaphorePermit>,
    ) -> oneshot::Receiver<Answer> {
        let (asker, answer) = oneshot::channel();
        let (asker, context) = (Some(asker), RequestContext::current());
        // Before it has its place: what is answered here from now on is about something else.
        let subject = Some(self.ask(&change));
        let asked_lock = match &change {
            // Of one that waits, whoever waits has said so.
            Change::SetLock(set) if set.waiter == 0 => self.held.ask_lock(set, Asking::Once),
            _ => None,
        };
        let pending = Pending { asker, room, context, subject, asked_lock, ..Pending::new(change, owner, deadline) };
        self.changes.push(pending);
        answer
    }

    /// Whether a change is known to be of a strict mount.
    fn is_of_strict(&self, change: &Change) -> bool {
        let inode = match change {
            Change::Create(create) => create.parent,
            Change::Link(link) => link.parent,
            Change::Remove(remove) => remove.parent,
            Change::Rename(rename) => rename.parent,
            Change::SetAttr(set) => set.inode,
            Change::SetXattr(set) => set.inode,
            Change::RemoveXattr(remove) => remove.inode,
            Change::Commit(commit) => commit.inode,
            _ => return false,
        };
        let directory = self.directories.get(inode).map(|directory| directory.is_strict());
        directory.or_else(|| self.cache.node(inode).map(|node| node.is_strict())).unwrap_or(false)
    }

    pub(super) fn late(&self) -> ClientError {
        ClientError::Net(NetError::MasterDeadline {
            call: "Mutate",
            waited_ms: self.master.timeout().as_millis() as u64,
        })
    }

    /// Takes the results into the caches and hands them out.
    fn answer_changes(
        &self,
        batch: Vec<Pending>,
        reply: MutateReply,
        mark: super::recent_invalidations::Mark,
        session: u64,
    ) {
        for (pending, result) in batch.into_iter().zip(reply.results) {
            self.follow_result(&pending, &result, session);
            let answer = if result.errno == 0 {
                let node = match &pending.predicted {
                    Some(_) => None,
                    None => self.take_in_change(&pending.change, &result, mark),
                };
                Ok(Changed::new(result, node, session, reply.event_seq))
            } else if result.unlisted != 0 {
                Err(ClientError::Unlisted { directory: result.unlisted, below: result.unlisted_below })
            } else if result.held_elsewhere != 0 {
                Err(ClientError::HeldElsewhere { directory: result.held_elsewhere })
            } else {
                Err(ClientError::Refused { errno: result.errno, reason: result.reason })
            };
            let is_nameless = matches!(&pending.change, Change::Create(create) if create.naming() != Naming::Named);
            if let (Some(Ok(made)), true) = (pending.answer(answer), is_nameless) {
                // Whoever wanted the file has gone, and nobody will close it.
                self.open.never_opened(made.result.inode);
            }
        }
        self.stats.metadata_entries.set(self.cache.len() as i64);
    }

    /// What of a result concerns which directories are held.
    fn follow_result(&self, pending: &Pending, result: &MutationResult, session: u64) {
        if pending.predicted.is_some() {
            return self.was_made(pending, result);
        }
        match &pending.change {
            // What a process before has made is let go of with all that it held.
            Change::Create(_) if result.held && !pending.is_inherited => {
                self.held.begin(result.inode, session);
                self.reserve_inodes();
            }
            Change::Create(create) if result.errno == 0 && is_named_file(create) => {
                self.held.was_created(create.parent, result.inode, session);
            }
            Change::Rename(_) | Change::Link(_) => {
                let moved = result.attributes.iter().filter(|attr| attr.kind() != Kind::Directory);
                moved.for_each(|attr| self.held.strayed(attr.inode));
            }
            Change::SetLock(set) => self.held.lock_answered(set, result),
            Change::ReserveInodes(count) if result.errno == 0 => self.held.numbers(result.inode, *count, session),
            Change::ReserveInodes(_) => self.held.no_numbers(),
            Change::LetGoDirectories(let_go) => self.has_let_go(let_go),
            _ => {}
        }
    }
}

fn is_named_file(create: &CreateInode) -> bool {
    create.kind() == Kind::File && create.naming() == Naming::Named
}

#[cfg(test)]
mod tests {
    use cavern_proto::master::{Lock, LockKind, RemoveXattr, SetXattr};
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
