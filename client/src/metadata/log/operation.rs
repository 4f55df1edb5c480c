//! One change on its way to the master: what it is, who waits for it, and what it was answered with.

use std::sync::Arc;

use cavern_proto::bounded::MAX_CHANGES;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{Attr, Kind, Mutation, MutationResult, Naming, SetLock};
use prost::Message;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::Instant;

use super::known_locks::LockUpgrade;
use crate::error::ClientError;
use crate::journal::{ChangeSlot, Journal, RequestContext};
use crate::metadata::node::Node;

/// Bytes of the mutations of one call at most.
const CALL_BYTES_MAX: usize = 512 << 10;
/// Bytes that a mutation takes beside its own: a number, its length and two keys.
const FRAME_BYTES: usize = 20;

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
    pub applied_locally: bool,
    /// Directories whose listings look otherwise now.
    pub listings: Vec<u64>,
}

impl Changed {
    pub(in crate::metadata) fn new(
        result: MutationResult,
        node: Option<Arc<Node>>,
        session: u64,
        event_seq: u64,
    ) -> Self {
        let directories = result.attributes.iter().filter(|attr| attr.kind() == Kind::Directory);
        let listings = directories.map(|attr| attr.inode).collect();
        Self { result, node, session, event_seq, applied_locally: false, listings }
    }

    /// What an inode's attributes are now, if the change was about them.
    pub fn attr_of(&self, inode: u64) -> Option<&Attr> {
        self.result.attributes.iter().find(|attr| attr.inode == inode)
    }
}

pub(in crate::metadata) type Answer = Result<Changed, ClientError>;

/// An operation at its end, with what whoever waits is told.
pub(in crate::metadata) type Done = (Operation, Answer);

/// Who waits for an operation, and until when.
#[derive(Debug)]
pub(in crate::metadata) struct Waiter {
    pub answer: oneshot::Sender<Answer>,
    pub deadline: Instant,
}

/// What an operation was answered with before the master has it.
#[derive(Debug)]
pub(in crate::metadata) struct LocalResult {
    /// What the master will make of it.
    pub result: MutationResult,
    /// It is about bytes or locks alone.
    pub is_overwrite: bool,
    /// What an owner gains by it, if it is a lock.
    pub upgrade: Option<LockUpgrade>,
}

/// One change on its way to the master.
#[derive(Debug, Default)]
pub(in crate::metadata) struct Operation {
    /// As it is sent: without a number (0) until then.
    pub mutation: Mutation,
    pub waiter: Option<Waiter>,
    /// It is made though nobody waits for it.
    pub must_deliver: bool,
    /// It was in a call that the master refused, and goes into one of its own: that shows whether it was for its sake.
    pub is_suspect: bool,
    /// A process before has asked for it.
    pub is_inherited: bool,
    /// Its place among all whose end a sync waits for.
    pub number: Option<u64>,
    /// By this process.
    pub answered: Option<Box<LocalResult>>,
    /// Inodes that it is about; 0 for any.
    pub inodes: Vec<u64>,
    /// The request of the kernel that it is made for, which has no answer yet.
    pub context: Option<Arc<RequestContext>>,
    /// It is in the journal.
    pub slot: Option<Arc<ChangeSlot>>,
    pub room: Option<OwnedSemaphorePermit>,
}

impl Operation {
    pub fn new(change: Change, (uid, gid): (u32, u32)) -> Self {
        Self { mutation: Mutation { uid, gid, change: Some(change), ..Mutation::default() }, ..Self::default() }
    }

    /// One that must reach the master, though nobody waits for it.
    pub fn must_deliver(change: Change) -> Self {
        Self { must_deliver: true, ..Self::new(change, (0, 0)) }
    }

    /// The lock that it is about.
    pub fn lock(&self) -> Option<&SetLock> {
        match &self.mutation.change {
            Some(Change::SetLock(set)) => Some(set),
            _ => None,
        }
    }

    /// The lock that it is about, where the master says what becomes of it. Of one that waits, whoever waits has noted
    /// that.
    pub fn asked_lock(&self) -> Option<&SetLock> {
        self.lock().filter(|set| self.answered.is_none() && set.waiter == 0)
    }

    /// Whether this process returns all directories by it.
    pub fn returns_all(&self) -> bool {
        let is_of_all = matches!(&self.mutation.change, Some(Change::ReturnDelegations(let_go)) if let_go.all);
        is_of_all && !self.is_inherited
    }

    /// Whether the session lets go by it of inodes that were closed.
    pub fn is_release(&self) -> bool {
        matches!(&self.mutation.change, Some(Change::SetOpenRefs(set)) if self.must_deliver && set.opened.is_empty())
    }

    pub fn is_overwrite(&self) -> bool {
        self.answered.as_ref().is_some_and(|answered| answered.is_overwrite)
    }

    /// Whether it takes names from what is there, or gives it others, and the master says so.
    pub fn is_moving(&self) -> bool {
        let change = self.mutation.change.as_ref().filter(|_| self.answered.is_none());
        matches!(change, Some(Change::Link(_) | Change::Remove(_) | Change::Rename(_) | Change::RenameWhiteout(_)))
    }

    /// Whether it changes something in a directory, and the master says what becomes of it.
    pub fn is_change_in_directory(&self) -> bool {
        let change = self.mutation.change.as_ref().filter(|_| self.answered.is_none() && !self.is_inherited);
        match change {
            Some(Change::Create(create)) => create.naming() == Naming::Named,
            Some(Change::SetAttr(_) | Change::SetXattr(_) | Change::RemoveXattr(_) | Change::Commit(_)) => true,
            Some(_) => self.is_moving(),
            None => false,
        }
    }

    /// The directory that the session wants to hold by it.
    pub fn asked_directory(&self) -> Option<u64> {
        match &self.mutation.change {
            Some(Change::AcquireDelegation(asked)) => Some(asked.inode),
            _ => None,
        }
    }

    /// Whether the session holds the inode that it makes.
    fn is_open_when_made(&self) -> bool {
        match &self.mutation.change {
            Some(Change::Create(create)) => create.naming() != Naming::Named || self.mutation.user.is_some(),
            _ => false,
        }
    }

    pub fn is_late(&self, now: Instant) -> bool {
        self.waiter.as_ref().is_some_and(|waiter| waiter.deadline <= now)
    }

    /// Enters it in the journal as it is now.
    pub fn note(&mut self, journal: &Arc<Journal>, session: u64) {
        match &self.slot {
            Some(slot) => drop(slot.write(session, self.number, &self.mutation)),
            None => {
                let unique = self.context.as_ref().map_or(0, |context| context.unique());
                self.slot = journal.note_change(session, unique, self.number, &self.mutation);
            }
        }
    }

    /// It is left to a successor, if there is one: in a journal that is frozen its record stays.
    pub fn without_record(mut self) -> Self {
        drop((self.context.take(), self.slot.take()));
        self
    }

    /// It is known not to be made: no successor makes it, nor finds its number, which another operation gets.
    pub fn undone(mut self) -> Self {
        if let Some(slot) = self.slot.take() {
            slot.erase();
        }
        self
    }

    /// Tells whoever waits. Gives the inode that the session holds by it, and that nobody has waited for.
    pub fn deliver(mut self, answer: Answer) -> Option<u64> {
        // It was not made, and is asked for under another number when nothing is in its way any more: minutes later,
        // perhaps. A successor asks for it anew.
        let is_retried = matches!(&answer, Err(ClientError::Unlisted { .. } | ClientError::DelegatedElsewhere { .. }));
        match (self.context.take().filter(|_| !is_retried), self.slot.take()) {
            (Some(context), Some(slot)) => {
                // One that waits for a lock may do so for days.
                if self.lock().is_some_and(|set| set.waiter != 0) {
                    slot.answered();
                }
                context.keep(slot);
            }
            // The request may have kept it, and be on its way to be answered.
            (None, Some(slot)) => drop(Arc::into_inner(slot).map(ChangeSlot::forget)),
            (_, None) => {}
        }
        let is_held = self.is_open_when_made();
        let unclaimed = match self.waiter {
            Some(waiter) => waiter.answer.send(answer).err(),
            None => Some(answer),
        };
        unclaimed?.ok().filter(|_| is_held).map(|made| made.result.inode)
    }
}

/// What a call has of the operations and bytes that it may have.
#[derive(Default)]
pub(super) struct CallSize {
    operations: usize,
    bytes: usize,
    /// Its first operation is to be its only one.
    is_full: bool,
}

impl CallSize {
    /// Counts one more; false, and it is not counted, when the call has no room for it. One that is too long for any
    /// call is the master's to refuse.
    pub fn admit(&mut self, operation: &Operation) -> bool {
        let bytes = self.bytes + operation.mutation.encoded_len() + FRAME_BYTES;
        let is_alone = self.is_full || operation.is_suspect;
        let has_room = !is_alone && self.operations < MAX_CHANGES && bytes <= CALL_BYTES_MAX || self.operations == 0;
        if has_room {
            self.is_full = operation.is_suspect;
            (self.operations, self.bytes) = (self.operations + 1, bytes);
        }
        has_room
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, memfd_create};
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn a_change_that_was_not_made_is_left_to_no_successor_and_an_answer_is() {
        let refused = ClientError::Refused { errno: Errno::EXIST.raw_os_error(), reason: String::new() };
        let cases = [
            (ClientError::Unlisted { directory: 5, below: false }, false),
            (ClientError::DelegatedElsewhere { directory: 5 }, false),
            (refused, true),
        ];
        for (error, is_kept) in cases {
            let memory = memfd_create("journal", MemfdFlags::CLOEXEC).unwrap();
            let journal = Journal::open(memory.try_clone().unwrap()).unwrap();
            let context = RequestContext::new(1);
            let mut operation =
                Operation { context: Some(context.clone()), ..Operation::must_deliver(Change::AddOpenRef(1)) };
            operation.mutation.seq = 3;
            operation.note(&journal, 7);
            assert_eq!(journal.first_unanswered(), Some(3));
            assert_eq!(operation.deliver(Err(error)), None);
            assert_eq!(journal.first_unanswered(), is_kept.then_some(3));
            let successor = Journal::open(memory).unwrap();
            assert_eq!(successor.changes.take_all().len(), usize::from(is_kept));
            drop(context);
        }
    }

    #[test]
    fn a_file_that_nobody_waits_for_any_more_is_let_go_of() {
        let nameless = cavern_proto::master::CreateInode {
            naming: Naming::Nameless.into(),
            ..cavern_proto::master::CreateInode::default()
        };
        let made = || {
            let result = MutationResult { inode: 9, ..MutationResult::default() };
            Ok(Changed::new(result, None, 1, 0))
        };
        let operation = || Operation::must_deliver(Change::Create(nameless.clone()));
        assert_eq!(operation().deliver(made()), Some(9));
        let (answer, waiting) = oneshot::channel();
        let waited_for = Operation { waiter: Some(Waiter { answer, deadline: Instant::now() }), ..operation() };
        assert_eq!(waited_for.deliver(made()), None);
        drop(waiting);
        assert_eq!(Operation::must_deliver(Change::AddOpenRef(1)).deliver(made()), None, "it has a name");
    }
}
