//! Changes of names and inodes of fs-mode mounts, for those who ask for them.
//!
//! A change that cannot be answered here goes into the log, and whoever makes it waits there; one task
//! ([`sender`](super::sender)) takes what has gathered and sends it in one call, so that many changes share a message
//! and a sync of the master's log.
//!
//! Each change has a number of its session and is sent again under it until it is answered, over broken connections and
//! a restart of the master: the master answers a number that it knows with the result that it had. When the session is
//! over while nobody knows whether the change was made, the answer says so. When the time of a change is up before its
//! answer came, the asker gets an error that says so, and the change goes on being sent: the session lives on, and its
//! caches must know what became of it.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use cavern_net::master::RetryPolicy;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{
    AcquireDelegation, Attr, Kind, MakeListedRequest, MutateReply, MutationResult, RecallRequest, User,
};
use rustix::io::Errno;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use super::cache::Found;
use super::log::{Answer, Call, Changed, Operation, State, Waiter, late};
use super::node::Node;
use super::open_files::ChangedContents;
use super::parts::{Inner, Metadata};
use super::recent_invalidations::InvalidationMark;
use crate::error::ClientError;
use crate::journal::RequestContext;

/// Directories that are listed for one change, one after the other: its own, and those that come to be in its way
/// meanwhile.
const LISTINGS_MAX: usize = 16;

impl Metadata {
    /// Makes a change, in the name of the user and the group that own what it creates. What is refused is
    /// [`ClientError::Refused`] with the errno. The caches know of the change when this returns. Bounded by
    /// `client.change_timeout`, and longer only in a strict mount, by two leases, and while a directory that must be
    /// listed first is; a call that is dropped may be carried out or not.
    pub async fn change(&self, change: Change, uid: u32, gid: u32) -> Result<Changed, ClientError> {
        self.change_by(change, (uid, gid), None).await
    }

    /// Makes a change on behalf of a user whose permission is checked, where the mount limits users.
    pub async fn change_by(
        &self,
        change: Change,
        owner: (u32, u32),
        user: Option<User>,
    ) -> Result<Changed, ClientError> {
        for _listing in 0..LISTINGS_MAX {
            match self.change_once(change.clone(), owner, user.clone()).await {
                Err(ClientError::Unlisted { directory, below }) => self.list_first(directory, below).await?,
                Err(ClientError::DelegatedElsewhere { directory }) => self.recall_first(directory, &change).await?,
                answer => return answer,
            }
        }
        self.change_once(change, owner, user).await
    }

    async fn change_once(&self, change: Change, owner: (u32, u32), user: Option<User>) -> Answer {
        let inner = &self.inner;
        if let Some(answer) = inner.log.replayed.answer_to(&change).await {
            return answer;
        }
        let context = RequestContext::current();
        let change = match inner.apply_locally(change, owner, context.as_ref()) {
            Ok(answer) => return answer,
            Err(change) => inner.requesting_delegation(change),
        };
        let mut patience = inner.change_timeout;
        if inner.affected_by(&change).first().is_some_and(|inode| inner.names.is_strict(*inode)) {
            // The answer waits for other clients: for a lease of those that an earlier leader had, and for one of those
            // that do not let go.
            patience += inner.lease.length() * 2;
        }
        let deadline = Instant::now() + patience;
        let room = timeout_at(deadline, inner.log.wait_for_room()).await.map_err(|_elapsed| late(patience))??;
        let mut operation = Operation { room: Some(room), ..Operation::new(change, owner) };
        operation.mutation.user = user;
        inner.push_and_wait(operation, deadline).await.unwrap_or(Err(ClientError::Shutdown))
    }

    /// Waits until the master knows all names of a directory, for as long as it learns more of them. Other changes are
    /// not kept waiting by that.
    async fn list_first(&self, inode: u64, recursive: bool) -> Result<(), ClientError> {
        let (inner, request) = (&self.inner, MakeListedRequest { inode, recursive });
        let (mut deadline, mut entries) = (Instant::now() + inner.change_timeout, 0);
        loop {
            let asked = ask!(inner, "MakeListed", make_listed, request, RetryPolicy::UntilDeadline, deadline);
            let answer = asked.await?;
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
        let deadline = Instant::now() + inner.change_timeout;
        Ok(ask!(inner, "Recall", recall, request, RetryPolicy::UntilDeadline, deadline).await.map(drop)?)
    }

    /// Returns when everything that was answered here is made by the master, and in its log; bounded by
    /// `client.change_timeout`.
    ///
    /// # Errors
    /// `OutcomeUnknown` when the master is not there, or when something about this inode is lost: that is said once.
    pub async fn settle(&self, inode: u64) -> Result<(), ClientError> {
        self.inner.log.all_made(self.inner.change_timeout).await?;
        self.take_loss(inode)
    }

    /// Waits as [`Self::settle`] does, but not for the bytes of files of which the session's end says that they may
    /// have changed.
    ///
    /// # Errors
    /// Those of [`Self::settle`].
    pub(crate) async fn settle_names(&self, inode: u64) -> Result<(), ClientError> {
        self.inner.log.names_made(self.inner.change_timeout).await?;
        self.take_loss(inode)
    }

    /// Has the master make what was answered here by now, and the unlocks that nobody waits for; what was held for
    /// closed files is in the log then, to be let go of. Bounded by `client.metadata_timeout`.
    pub(crate) async fn flush_write_back(&self) -> Result<(), ClientError> {
        self.inner.release_closed();
        self.inner.log.all_unlocked(self.inner.master.timeout()).await
    }

    /// Whether [`Self::settle`] would wait, or has something to say.
    pub fn is_unsettled(&self, inode: u64) -> bool {
        let state = self.inner.log.lock();
        state.affected.unmade().is_some() || state.affected.has_loss(inode)
    }

    /// Whether something that was answered about this inode is lost, and nobody was told.
    pub fn has_loss(&self, inode: u64) -> bool {
        self.inner.log.lock().affected.has_loss(inode)
    }

    /// Tells that, once.
    ///
    /// # Errors
    /// `OutcomeUnknown` with what happened.
    pub fn take_loss(&self, inode: u64) -> Result<(), ClientError> {
        let loss = self.inner.log.lock().affected.take_loss(inode);
        loss.map_or(Ok(()), |cause| Err(ClientError::OutcomeUnknown { cause }))
    }

    /// Whether what is committed of a file is answered here, as far as can be said.
    pub(crate) fn is_delegated(&self, inode: u64) -> bool {
        let inner = &self.inner;
        inner.names.cache.node(inode).is_some_and(|node| inner.log.lock().delegations.holds(node.parent))
    }

    /// From now on changes are answered when the master has made them.
    pub(crate) fn stop_write_back(&self) {
        self.inner.log.return_all();
    }

    /// Numbers for files that are going to be made here, and the session whose they are; fewer where none are made.
    pub(crate) fn take_numbers(&self, count: u32) -> (u64, Vec<u64>) {
        let log = &self.inner.log;
        let mut state = log.lock();
        let numbers = state.delegations.take_numbers(count);
        if !state.delegations.is_empty() {
            log.wake_if(state.reserve_numbers());
        }
        (state.delegations.session(), numbers)
    }

    /// The next file that is made in a mount is to have this number, or one that was offered before.
    pub(crate) fn offer_file_number(&self, session: u64, mount: u32, number: u64) {
        self.inner.log.lock().delegations.offer_file_number(session, mount, number);
    }

    /// Takes back the offer of these numbers; gives those that no file has, nor ever will have.
    pub(crate) fn withdraw_file_numbers(&self, numbers: &HashSet<u64>) -> HashSet<u64> {
        self.inner.log.lock().delegations.withdraw_file_numbers(numbers)
    }
}

impl Inner {
    /// Puts an operation in the log, for which somebody waits.
    pub(super) fn push_and_wait(&self, operation: Operation, deadline: Instant) -> oneshot::Receiver<Answer> {
        let (answer, waiting) = oneshot::channel();
        self.push(Operation { waiter: Some(Waiter { answer, deadline }), ..operation });
        waiting
    }

    /// Puts an operation in the log, in the name of the request that the task works for.
    pub(super) fn push(&self, mut operation: Operation) {
        operation.context = RequestContext::current();
        let mut state = self.log.lock();
        // Nothing that it is about is answered here before its answer.
        operation.inodes =
            operation.mutation.change.as_ref().map(|change| self.affected_by(change)).unwrap_or_default();
        self.log.push(&mut state, operation);
    }

    /// Waits until what was answered about an inode is made, so that the master's answer is not older than that.
    /// Bounded by `client.metadata_timeout`.
    pub(super) async fn settled(&self, inode: u64) -> Result<(), ClientError> {
        let is_unsettled = self.log.lock().affected.is_unsettled(inode);
        if is_unsettled { self.all_settled().await } else { Ok(()) }
    }

    /// Waits until everything that was answered is made.
    pub(super) async fn all_settled(&self) -> Result<(), ClientError> {
        self.log.all_made(self.master.timeout()).await
    }

    /// Somebody else wants to know what is in a directory (0: in any).
    pub(super) fn recalled(&self, directory: u64) {
        self.end_close_grace();
        self.log.recalled(directory);
    }

    /// What a change that is asked for is about: directories whose names it changes, and inodes with the directory that
    /// each is in. 0 for what is not known.
    pub(super) fn affected_by(&self, change: &Change) -> Vec<u64> {
        let names = &self.names;
        let with_place = |inode: u64| {
            let parent = names.cache.node(inode).map_or(0, |node| node.parent);
            vec![inode, parent]
        };
        // Of what leads nowhere, the directory is enough.
        let at = |directory: u64, name: &[u8]| match names.cache.lookup(directory, name) {
            Some(Found::Node(node)) => node.inode,
            Some(Found::Absent(_)) => directory,
            None if names.is_without(directory, name) => directory,
            None => 0,
        };
        match change {
            Change::Create(create) => vec![create.parent, create.inode.max(create.parent)],
            Change::Link(link) => [vec![link.parent], with_place(link.inode)].concat(),
            Change::Remove(remove) => vec![remove.parent, at(remove.parent, &remove.name)],
            Change::Rename(rename) | Change::RenameWhiteout(rename) => vec![
                rename.parent,
                rename.new_parent,
                at(rename.parent, &rename.name),
                at(rename.new_parent, &rename.new_name),
            ],
            Change::SetAttr(set) => with_place(set.inode),
            Change::SetXattr(set) => with_place(set.inode),
            Change::RemoveXattr(remove) => with_place(remove.inode),
            Change::Commit(commit) => with_place(commit.inode),
            Change::SetQuota(_) | Change::SetTtl(_) => vec![0],
            Change::AcquireDelegation(asked) => vec![asked.inode],
            Change::AddOpenRef(_)
            | Change::DropOpenRef(_)
            | Change::SetOpenRefs(_)
            | Change::SetLock(_)
            | Change::ReserveInodes(_)
            | Change::ReturnDelegations(_)
            | Change::OpenToWrite(_) => Vec::new(),
        }
    }

    /// A change as it is asked for: whoever makes a directory wants to hold it, if there is a successor who could
    /// finish what is answered there.
    fn requesting_delegation(&self, mut change: Change) -> Change {
        if let (Change::Create(create), true) = (&mut change, self.log.delegates_directories) {
            let mount = self.names.directories.get(create.parent).and_then(|directory| directory.mount.clone());
            create.delegate = create.kind() == Kind::Directory && mount.is_none_or(|mount| !mount.has_synced_names());
        }
        change
    }

    /// The master has answered a call: takes the results into the caches and hands them out.
    pub(super) fn apply_results(&self, call: Call, reply: MutateReply, session: u64) {
        let (Call { operations, mark, .. }, MutateReply { results, event_seq }) = (call, reply);
        // One after the other: each is at its end before the next result, which may be about the same, is taken in.
        let done = operations.into_iter().zip(results).map(|(operation, result)| {
            let mut state = self.log.lock();
            let is_ahead = result.delegated && !operation.is_inherited && self.lease.last_applied() < event_seq;
            match operation.asked_directory().filter(|_| is_ahead) {
                Some(directory) => state.delegations.arrives(directory, event_seq, session),
                None => state.delegations.learn(&operation, &result, session),
            }
            self.follow_wishes(&mut state, &operation, &result);
            if !state.delegations.is_empty() {
                self.log.wake_if(state.reserve_numbers());
            }
            drop(state);
            let taken_in = self.apply_result(&operation, &result, mark);
            (operation, taken_in.map(|node| Changed::new(result, node, session, event_seq)))
        });
        // Whoever wanted them has gone, and nobody will close them.
        self.log.finish(done).into_iter().for_each(|inode| self.open.inodes.never_opened(inode));
    }

    /// Asks for directories in which the master has made several changes of this session, and for the names of one that
    /// the session has got by that.
    fn follow_wishes(&self, state: &mut State, operation: &Operation, result: &MutationResult) {
        if let Some(directory) = operation.asked_directory().filter(|directory| state.delegations.holds(*directory)) {
            self.refresh.list_held(directory);
        }
        if !self.log.delegates_directories || result.errno != 0 || !operation.is_change_in_directory() {
            return;
        }
        for inode in operation.inodes.iter().copied().collect::<BTreeSet<u64>>() {
            let node = self.names.cache.node(inode).filter(|node| node.is_directory() && node.is_fs_mode());
            let mount = node.and_then(|node| node.mount.clone()).filter(|mount| !mount.has_synced_names());
            if mount.is_some() && state.delegations.wants(inode) {
                let wish = Change::AcquireDelegation(AcquireDelegation { inode, ..AcquireDelegation::default() });
                self.log.push(state, Operation { inodes: vec![inode], ..Operation::new(wish, (0, 0)) });
            }
        }
    }

    /// Every event up to `seq` has been taken in: what was delegated behind the last of them is held.
    pub(super) fn delegations_arrive(&self, seq: u64) {
        let arrived = self.log.lock().delegations.caught_up(seq);
        arrived.into_iter().for_each(|directory| self.refresh.list_held(directory));
    }

    /// Gives the node of the result's inode, where that is made.
    fn apply_result(
        &self,
        operation: &Operation,
        result: &MutationResult,
        mark: InvalidationMark,
    ) -> Result<Option<Arc<Node>>, ClientError> {
        let Some(change) = &operation.mutation.change else { return Ok(None) };
        match operation.answered.as_deref() {
            Some(answered) if result.errno == 0 => self.take_space(&answered.result, result, mark),
            Some(answered) => self.lose_change(change, &answered.result, &result.reason),
            None => {}
        }
        if result.errno == 0 {
            let mut gone = Vec::new();
            let node = match &operation.answered {
                Some(_) => None,
                None => self.names.apply_to_cache(change, result, mark, &mut gone),
            };
            self.open.forget_gone(&gone);
            return Ok(node);
        }
        if result.unlisted != 0 {
            return Err(ClientError::Unlisted { directory: result.unlisted, below: result.unlisted_below });
        }
        if result.delegated_elsewhere != 0 {
            return Err(ClientError::DelegatedElsewhere { directory: result.delegated_elsewhere });
        }
        if result.errno == Errno::EXIST.raw_os_error() {
            match change {
                Change::Create(create) => self.names.forget_taken_name(create.parent, &create.name),
                Change::Link(link) => self.names.forget_taken_name(link.parent, &link.name),
                Change::Rename(rename) | Change::RenameWhiteout(rename) => {
                    self.names.forget_taken_name(rename.new_parent, &rename.new_name);
                }
                _ => {}
            }
        }
        Err(ClientError::Refused { errno: result.errno, reason: result.reason.clone() })
    }

    /// A change that was answered here is not made: nothing that was known by it counts any longer.
    fn lose_change(&self, change: &Change, answered: &MutationResult, reason: &str) {
        tracing::warn!("what was answered is not made: {reason}");
        self.stats.lost_changes.inc();
        if let Change::SetLock(set) = change {
            self.locks.lost(set);
        }
        self.names.forget_change(change, answered);
        let touched = answered.attributes.iter().map(|attr| ChangedContents::Of(attr.inode));
        touched.for_each(|contents| self.open.forget_contents(contents));
    }

    /// The master has made a change as it was answered here, by the same rules, and all that is known here is as it
    /// was, or newer. But for what the content of a file takes: a block behind its end takes something, too, and is
    /// known to the master alone. Nobody would be notified of that.
    fn take_space(&self, answered: &MutationResult, made: &MutationResult, mark: InvalidationMark) {
        for attr in &made.attributes {
            let is_other = |known: &Attr| known.inode == attr.inode && known.allocated != attr.allocated;
            if !answered.attributes.iter().any(is_other) {
                continue;
            }
            self.open.forget_contents(ChangedContents::Of(attr.inode));
            // Unless there is something newer.
            let state = self.log.lock();
            let known = self.names.cache.node(attr.inode).filter(|_| state.affected.is_last_of(attr.inode));
            if let Some(known) = known {
                self.names.recent.own_inode(attr.inode);
                self.names.keep(&[Arc::new(known.with_attributes(attr))]);
                // After it is in: what comes later than this look takes it out itself.
                if self.names.recent.foreign_since(mark).touch_inode(attr.inode) {
                    self.names.cache.forget_inode(attr.inode);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use cavern_proto::master::{CommitContent, Lock, LockKind, LockType, SetLock};
    use futures::FutureExt;

    use super::super::cache::tests::node;
    use super::super::log::LocalResult;
    use super::super::parts::tests::metadata;
    use super::*;

    #[tokio::test]
    async fn room_behind_the_end_of_a_file_is_learned_with_the_last_answer_of_a_call() {
        let metadata = metadata(None);
        let inner = &metadata.inner;
        inner.names.keep(&[node(7, 1, "a")]);
        // The length shows whose attributes are kept.
        let result = |allocated| {
            let attributes = vec![Attr { inode: 7, size: allocated, allocated: Some(allocated), ..Attr::default() }];
            MutationResult { attributes, ..MutationResult::default() }
        };
        for allocated in [1, 2] {
            let change = Change::Commit(CommitContent { inode: 7, ..CommitContent::default() });
            let answer = LocalResult { result: result(allocated), is_overwrite: false, upgrade: None };
            let answered = Some(Box::new(answer));
            let operation = Operation { answered, inodes: vec![7], ..Operation::must_deliver(change) };
            inner.log.push(&mut inner.log.lock(), operation);
        }
        inner.log.hurry();
        let outgoing = inner.log.next_request(inner.names.recent.mark()).unwrap();
        assert_eq!(outgoing.request.mutations.len(), 2);
        let call = inner.log.lock().take_answered().unwrap();
        inner.apply_results(call, MutateReply { results: vec![result(11), result(12)], event_seq: 0 }, 1);
        assert_eq!(inner.names.cache.node(7).unwrap().size, 12);
        assert!(!inner.log.lock().affected.is_unsettled(7));
    }

    #[tokio::test]
    async fn what_is_answered_while_a_question_waits_for_earlier_answers_is_newer_than_its_mark() {
        let metadata = metadata(None);
        let inner = &metadata.inner;
        let change = Change::Commit(CommitContent { inode: 7, ..CommitContent::default() });
        let result = MutationResult::default();
        let answer = LocalResult { result: result.clone(), is_overwrite: false, upgrade: None };
        let (answered, number) = (Some(Box::new(answer)), Some(inner.log.lock().affected.next_number()));
        let operation = Operation { answered, number, inodes: vec![7], ..Operation::must_deliver(change) };
        inner.log.push(&mut inner.log.lock(), operation);
        let asking = metadata.settled_mark(7);
        tokio::pin!(asking);
        assert!((&mut asking).now_or_never().is_none());
        inner.names.recent.own_inode(7);
        let _sent = inner.log.next_request(inner.names.recent.mark()).unwrap();
        let call = inner.log.lock().take_answered().unwrap();
        inner.apply_results(call, MutateReply { results: vec![result], event_seq: 0 }, 1);
        let mark = asking.now_or_never().unwrap().unwrap();
        assert!(inner.names.recent.since(mark).touch_inode(7));
    }

    #[tokio::test]
    async fn a_handover_waits_for_unlocks_and_has_what_was_closed_let_go_of() {
        let metadata = metadata(None);
        let inner = &metadata.inner;
        let lock = Lock { owner: 1, r#type: LockType::Unlocked.into(), end: 9, ..Lock::default() };
        let set = SetLock { inode: 5, kind: LockKind::Posix.into(), lock: Some(lock), ..SetLock::default() };
        inner.push(Operation::must_deliver(Change::SetLock(set)));
        inner.open.inodes.never_opened(6);
        let answered = metadata.flush_write_back();
        tokio::pin!(answered);
        assert!((&mut answered).now_or_never().is_none());
        let request = inner.log.next_request(inner.names.recent.mark()).unwrap().request;
        let changes: Vec<_> = request.mutations.into_iter().filter_map(|mutation| mutation.change).collect();
        assert!(matches!(&changes[..], [Change::SetLock(_), Change::SetOpenRefs(set)] if set.closed == [6]));
        let call = inner.log.lock().take_answered().unwrap();
        let made = |operation| (operation, Ok(Changed::new(MutationResult::default(), None, 1, 0)));
        inner.log.finish(call.operations.into_iter().map(made));
        assert!(answered.now_or_never().is_some_and(|answered| answered.is_ok()));
    }
}
