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

mod queue;
mod sender;

use std::sync::Arc;
use std::time::Duration;

use cavern_net::NetError;
use cavern_net::master::{RetryPolicy, Stubs};
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{
    Attr, CreateInode, Kind, MakeListedRequest, MutateReply, Mutation, MutationResult, Naming, RecallRequest, SetLock,
    User,
};
use rustix::io::Errno;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub(super) use self::queue::{CallSize, ChangeQueue};
use self::sender::Sender;
use super::cache::Found;
use super::held::{AskedLock, Asking, Gain, Subject};
use super::{Inner, Metadata, Node};
use crate::error::ClientError;
use crate::journal::{ChangeRecord, ChangeSlot, Journal, RequestContext};

/// Directories that are listed for one change, one after the other: its own, and those that come to be in its way
/// meanwhile.
const LISTINGS_MAX: usize = 16;

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
    /// See `Mutation.user`.
    pub(super) user: Option<User>,
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
    /// That answer is about bytes or locks alone.
    pub(super) is_overwrite: bool,
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
            user: None,
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
            is_overwrite: false,
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
        // It was not made, and is asked for under another number when nothing is in its way any more: minutes later,
        // perhaps. A successor asks for it anew.
        let is_asked_later = matches!(&answer, Err(ClientError::Unlisted { .. } | ClientError::HeldElsewhere { .. }));
        match (self.context.take().filter(|_| !is_asked_later), self.slot.take()) {
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
            subject.lose(&error.cause());
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

pub(super) fn numbered(pending: &Pending, seq: u64) -> Mutation {
    let (uid, gid, made_ns, is_answered) = (pending.uid, pending.gid, pending.made_ns, pending.is_answered);
    let (change, user) = (Some(pending.change.clone()), pending.user.clone());
    Mutation { seq, uid, gid, made_ns, is_answered, change, user }
}

impl Metadata {
    /// Makes a change, in the name of the user and the group that own what it creates. What is refused is
    /// [`ClientError::Refused`] with the errno. The caches know of the change when this returns. Bounded by
    /// `client.change_timeout`, and longer only in a strict mount, by two leases, and while a directory that must be
    /// listed first is; a call that is dropped may be carried out or not.
    pub async fn change(&self, change: Change, uid: u32, gid: u32) -> Result<Changed, ClientError> {
        self.change_by(change, (uid, gid), None).await
    }

    /// The same on behalf of a user by whom it is judged, where the mount limits users.
    pub async fn change_by(
        &self,
        change: Change,
        owner: (u32, u32),
        user: Option<User>,
    ) -> Result<Changed, ClientError> {
        for _listing in 0..LISTINGS_MAX {
            match self.change_once(change.clone(), owner, user.clone()).await {
                Err(ClientError::Unlisted { directory, below }) => self.list_first(directory, below).await?,
                Err(ClientError::HeldElsewhere { directory }) => self.recall_first(directory, &change).await?,
                answer => return answer,
            }
        }
        self.change_once(change, owner, user).await
    }

    async fn change_once(&self, change: Change, owner: (u32, u32), user: Option<User>) -> Answer {
        let inner = &self.inner;
        if let Some(answer) = inner.earlier_answer(&change).await {
            return answer;
        }
        let context = RequestContext::current();
        let change = match inner.answer_at_once(change, owner, context.as_ref()) {
            Ok(answer) => return answer,
            Err(change) => inner.asking_to_hold(change),
        };
        let mut patience = inner.change_timeout;
        if inner.is_of_strict(&change) {
            // The answer waits for other clients: for a lease of those that an earlier leader had, and for one of those
            // that do not let go.
            patience += inner.lease.length() * 2;
        }
        let deadline = Instant::now() + patience;
        let room = tokio::time::timeout_at(deadline, inner.changes.wait_for_room());
        let room = room.await.map_err(|_elapsed| inner.late(patience))??;
        let answer = inner.push_change_by(change, owner, user, deadline, Some(room));
        answer.await.unwrap_or(Err(ClientError::Shutdown))
    }

    /// Waits until the master knows all names of a directory, for as long as it learns more of them. Other changes are
    /// not kept waiting by that.
    async fn list_first(&self, inode: u64, recursive: bool) -> Result<(), ClientError> {
        let request = MakeListedRequest { inode, recursive };
        let inner = &self.inner;
        let (mut deadline, mut entries) = (Instant::now() + inner.change_timeout, 0);
        loop {
            let ask = |mut stubs: Stubs| async move { stubs.namespace.make_listed(request).await };
            let answer = inner.master.call_as("MakeListed", RetryPolicy::UntilDeadline, deadline, ask).await?;
            if answer.done {
                return Ok(());
            }
            if answer.entries > entries {
                (deadline, entries) = (Instant::now() + inner.change_timeout, answer.entries);
            } else if Instant::now() >= deadline {
                return Err(ClientError::Unlisted { directory: inode, below: recursive });
            }
        }
    }

    /// Waits until nobody else holds a directory, or any in its mount where the change is about all of it.
    async fn recall_first(&self, inode: u64, change: &Change) -> Result<(), ClientError> {
        let whole_mount = matches!(change, Change::SetQuota(_) | Change::SetTtl(_));
        let inner = &self.inner;
        let request = RecallRequest { inode, whole_mount, session: inner.lease.session() };
        let ask = |mut stubs: Stubs| async move { stubs.namespace.recall(request).await };
        let deadline = Instant::now() + inner.change_timeout;
        Ok(inner.master.call_as("Recall", RetryPolicy::UntilDeadline, deadline, ask).await.map(drop)?)
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
        self.push_change_by(change, owner, None, deadline, room)
    }

    fn push_change_by(
        &self,
        change: Change,
        owner: (u32, u32),
        user: Option<User>,
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
        let pending =
            Pending { asker, user, room, context, subject, asked_lock, ..Pending::new(change, owner, deadline) };
        self.changes.push(pending);
        answer
    }

    /// Whether a change is known to be of a strict mount.
    fn is_of_strict(&self, change: &Change) -> bool {
        let inode = match change {
            Change::Create(create) => create.parent,
            Change::Link(link) => link.parent,
            Change::Remove(remove) => remove.parent,
            Change::Rename(rename) | Change::RenameWhiteout(rename) => rename.parent,
            Change::SetAttr(set) => set.inode,
            Change::SetXattr(set) => set.inode,
            Change::RemoveXattr(remove) => remove.inode,
            Change::Commit(commit) => commit.inode,
            _ => return false,
        };
        let directory = self.directories.get(inode).map(|directory| directory.is_strict());
        directory.or_else(|| self.cache.node(inode).map(|node| node.is_strict())).unwrap_or(false)
    }

    pub(super) fn late(&self, waited: Duration) -> ClientError {
        ClientError::Net(NetError::MasterDeadline { call: "Mutate", waited_ms: waited.as_millis() as u64 })
    }

    /// Somebody else has made the name, and the event that says so may be yet to come: whoever hears that it is there
    /// looks at it, as `mkdir -p` does.
    fn forget_taken_name(&self, change: &Change) {
        let (parent, name) = match change {
            Change::Create(create) => (create.parent, &create.name),
            Change::Link(link) => (link.parent, &link.name),
            Change::Rename(rename) | Change::RenameWhiteout(rename) => (rename.new_parent, &rename.new_name),
            _ => return,
        };
        if matches!(self.cache.lookup(parent, name), Some(Found::Node(_))) {
            return;
        }
        self.forget_node(parent, name, 0);
        if let Some(directory) = self.directories.get(parent) {
            directory.foreign_change(name, true);
        }
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
                if result.errno == Errno::EXIST.raw_os_error() {
                    self.forget_taken_name(&pending.change);
                }
                Err(ClientError::Refused { errno: result.errno, reason: result.reason })
            };
            let is_held = match &pending.change {
                Change::Create(create) => create.naming() != Naming::Named || pending.user.is_some(),
                _ => false,
            };
            if let (Some(Ok(made)), true) = (pending.answer(answer), is_held) {
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
            Change::Rename(_) | Change::RenameWhiteout(_) | Change::Link(_) => {
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
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    #[test]
    fn a_change_that_was_not_made_is_left_to_no_successor_and_an_answer_is() {
        let refused = ClientError::Refused { errno: Errno::EXIST.raw_os_error(), reason: String::new() };
        let cases = [
            (ClientError::Unlisted { directory: 5, below: false }, false),
            (ClientError::HeldElsewhere { directory: 5 }, false),
            (refused, true),
        ];
        for (error, is_kept) in cases {
            let memory = memfd_create("journal", MemfdFlags::CLOEXEC).unwrap();
            let journal = Journal::open(memory.try_clone().unwrap()).unwrap();
            let context = RequestContext::new(1);
            let record = ChangeRecord { session: 7, seq: 3, unique: 1, ..ChangeRecord::default() };
            let slot = journal.note_change(&record, &Mutation::default());
            assert_eq!(journal.first_unanswered(), Some(3));
            let (change, context_of_change) = (Change::Hold(1), Some(context.clone()));
            let pending = Pending { slot, context: context_of_change, ..Pending::new(change, (0, 0), Instant::now()) };
            assert!(pending.answer(Err(error)).is_some(), "nobody waits");
            assert_eq!(journal.first_unanswered(), is_kept.then_some(3));
            let successor = Journal::open(memory).unwrap();
            assert_eq!(successor.changes.take_all().len(), usize::from(is_kept));
            drop(context);
        }
    }
}
