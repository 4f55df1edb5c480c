//! Answering a change of what is held before the master has it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use cavern_conf::{Failpoint, host};
use cavern_posix::{check_name, directory_changed, inode_changed, name_dropped};
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{
    Attr, CommitContent, CreateInode, Kind, Mutation, MutationResult, Naming, RemoveName, RenameMode, RenameName,
};
use parking_lot::MutexGuard;
use tokio::time::Instant;

use super::super::cache::Found;
use super::super::changed_contents::ChangedContents;
use super::super::changes::{Answer, Changed, Pending, numbered};
use super::super::{Inner, Node};
use super::answer_lock::LockAnswer;
use super::predict::after;
use super::{HELD_MAX, State, predict};
use crate::journal::{ChangeRecord, EPOCH_BITS, Journal, RequestContext};

/// What will become of a change.
struct Prediction {
    /// With the number of the inode that it makes.
    change: Change,
    result: MutationResult,
    /// The inodes that it is about, and the directories that these are in: whoever lists one is told of its entries.
    subject: Vec<u64>,
    /// It says that bytes of a file are others, or who has locked some, and nothing else: no sync waits for it.
    is_overwrite: bool,
}

impl Prediction {
    fn new(change: Change, inode: u64, attributes: Vec<Attr>, directories: &[u64]) -> Self {
        let mut subject: Vec<u64> =
            attributes.iter().map(|attr| attr.inode).chain(directories.iter().copied()).collect();
        subject.sort_unstable();
        subject.dedup();
        let result = MutationResult { inode, attributes, ..MutationResult::default() };
        Self { change, result, subject, is_overwrite: false }
    }
}

/// The record of a change that is answered and not sent, which is so many changes behind the first.
fn unsent(journal: &Journal, session: u64, unique: u64, number: u64) -> ChangeRecord {
    let order = (journal.epoch() << EPOCH_BITS) + number;
    ChangeRecord { session, unique, order, ..ChangeRecord::default() }
}

impl Inner {
    /// Answers a change, if all that it is about is held here and its result is certain; else gives it back, to be
    /// asked for. Only a lock may be refused. No I/O but to the journal, no wait.
    pub(in super::super) fn answer_at_once(
        &self,
        change: Change,
        (uid, gid): (u32, u32),
        context: Option<&Arc<RequestContext>>,
    ) -> Result<Answer, Change> {
        // Mostly so.
        if !self.held.any.load(Ordering::Acquire) {
            return Err(change);
        }
        let Some(journal) = &self.journal else { return Err(change) };
        let Ok(room) = self.changes.room() else { return Err(change) };
        // Dropped when the state is not locked any more.
        let mut undone = Vec::new();
        // One after the other: each is predicted from what the ones before have left.
        let Some((mut guard, session)) = self.state_that_holds() else { return Err(change) };
        let state = &mut *guard;
        let mut gain = None;
        if let Change::SetLock(set) = &change {
            match self.answer_lock(state, set, &mut undone) {
                Some(LockAnswer::Made(gained)) => gain = gained,
                Some(LockAnswer::Now(answer)) => {
                    self.stats.answered_changes.inc_by(u64::from(answer.is_ok()));
                    return Ok(*answer);
                }
                None => return Err(change),
            }
        }
        let made_ns = host::wall_ns();
        let Some(predicted) = self.predict(state, &change, (uid, gid), made_ns) else { return Err(change) };
        if let Change::Commit(commit) = &change
            && let Some(result) = self.merge_commit(state, commit, &predicted, made_ns)
        {
            let node = self.take_in_change(&change, &result, self.recent.mark());
            self.follow_held(state, &change, &predicted.subject, result.inode);
            self.stats.answered_changes.inc();
            self.stats.merged_changes.inc();
            return Ok(Ok(Changed { answered_here: true, ..Changed::new(result, node, session, 0) }));
        }
        let unique = context.map_or(0, |context| context.unique());
        let mut pending = Pending { uid, gid, made_ns, room: Some(room), unique, ..Pending::owed(predicted.change) };
        (pending.is_answered, pending.predicted) = (true, Some(Box::new(predicted.result.clone())));
        (pending.gain, pending.is_overwrite) = (gain, predicted.is_overwrite);
        let record = unsent(journal, session, unique, state.begun);
        let Some(slot) = journal.note_change(&record, &numbered(&pending, 0)) else { return Err(change) };
        Failpoint::AnswerNoted.pass();
        pending.slot = Some(slot.clone());
        let result = predicted.result;
        // Before anybody can say what the master makes of it.
        let node = self.take_in_change(&pending.change, &result, self.recent.mark());
        self.follow_held(state, &pending.change, &predicted.subject, result.inode);
        pending.subject = Some(self.held.answer(state, predicted.subject, predicted.is_overwrite));
        if let Err(refused) = self.changes.try_push(pending) {
            // Its end takes the lock as well.
            drop(guard);
            drop(refused);
            return Err(change);
        }
        Failpoint::AnswerQueued.pass();
        self.reserve_more(state);
        if let Some(context) = context {
            context.keep(slot);
        }
        self.stats.answered_changes.inc();
        Ok(Ok(Changed { answered_here: true, ..Changed::new(result, node, session, 0) }))
    }

    /// Makes a commit part of one of the same file that was answered and is not sent: to the master, the two are one.
    fn merge_commit(
        &self,
        state: &mut State,
        commit: &CommitContent,
        predicted: &Prediction,
        made_ns: i64,
    ) -> Option<MutationResult> {
        let (journal, session) = (self.journal.as_ref()?, state.session);
        let [attr] = predicted.result.attributes[..] else { return None };
        self.changes.merge(commit.inode, |pending| {
            let (Some(before), Some(slot)) = (&pending.predicted, &pending.slot) else { return None };
            let (Some(known), Change::Commit(waiting)) = (before.attributes.first(), &pending.change) else {
                return None;
            };
            let number = pending.subject.as_ref()?.number?;
            if known.version + 1 != attr.version {
                return None;
            }
            let change = Some(Change::Commit(predict::merged(waiting, commit)?));
            let mutation = Mutation { change, made_ns, ..numbered(pending, 0) };
            if !slot.rewrite(&unsent(journal, session, pending.unique, number), &mutation) {
                return None;
            }
            let attributes = vec![Attr { version: known.version, ..attr }];
            let result = MutationResult { attributes, ..predicted.result.clone() };
            pending.change = mutation.change?;
            (pending.made_ns, pending.predicted) = (made_ns, Some(Box::new(result.clone())));
            if !predicted.is_overwrite {
                pending.is_overwrite = false;
                state.named = state.named.max(number + 1);
            }
            Some(result)
        })
    }

    /// What is held, and the session that holds it: nothing while the lease does not live.
    pub(super) fn state_that_holds(&self) -> Option<(MutexGuard<'_, State>, u64)> {
        if !self.held.any.load(Ordering::Acquire) || !self.caching || !self.lease.is_live() {
            return None;
        }
        let state = self.held.state.lock();
        let session = state.session;
        (session == self.lease.session()).then_some((state, session))
    }

    /// What of the change concerns which directories are held.
    fn follow_held(&self, state: &mut State, change: &Change, subject: &[u64], inode: u64) {
        let now = Instant::now();
        for directory in subject {
            if let Some(changed) = state.directories.get_mut(directory) {
                *changed = now;
            }
        }
        match change {
            Change::Create(create) if create.kind() == Kind::Directory => drop(state.directories.insert(inode, now)),
            Change::Remove(remove) if remove.directory => drop(state.directories.remove(&inode)),
            Change::SetLock(set) => state.locks.enter(set),
            _ => {}
        }
    }

    fn predict(&self, state: &mut State, change: &Change, owner: (u32, u32), now_ns: i64) -> Option<Prediction> {
        match change {
            Change::Create(create) => self.predict_create(state, create, owner, now_ns),
            Change::Remove(remove) => self.predict_remove(state, remove, now_ns),
            Change::Rename(rename) => self.predict_rename(state, rename, now_ns),
            Change::SetAttr(set) => {
                let node = self.held_inode(state, set.inode)?;
                let attr = predict::set(&node.attr(), set, now_ns)?;
                Some(Prediction::new(change.clone(), node.inode, vec![attr], &[node.parent]))
            }
            Change::Commit(commit) => {
                let node = self.held_inode(state, commit.inode)?;
                let block_size = node.mount.as_ref()?.block_size();
                let before = node.attr();
                let attr = predict::committed(&before, commit, block_size, now_ns)?;
                // A block that is new takes something.
                let is_overwrite = (attr.size, attr.allocated) == (before.size, before.allocated);
                let prediction = Prediction::new(change.clone(), node.inode, vec![attr], &[node.parent]);
                Some(Prediction { is_overwrite, ..prediction })
            }
            // Of which it is known that it is made.
            Change::SetLock(set) => {
                let prediction = Prediction::new(change.clone(), set.inode, Vec::new(), &[]);
                Some(Prediction { is_overwrite: true, ..prediction })
            }
            _ => None,
        }
    }

    fn predict_create(
        &self,
        state: &mut State,
        create: &CreateInode,
        owner: (u32, u32),
        now_ns: i64,
    ) -> Option<Prediction> {
        let is_directory = create.kind() == Kind::Directory;
        if create.naming() != Naming::Named || is_directory && state.directories.len() >= HELD_MAX {
            return None;
        }
        let directory = self.held_directory(state, create.parent)?;
        if !self.is_free(create.parent, &create.name) {
            return None;
        }
        let above = directory.attr();
        let made = predict::created(create, owner, &above, now_ns)?;
        // Last of all: a number is used once.
        let inode = state.number_for(create.kind(), directory.mount.as_ref()?.id())?;
        let made = Attr { inode, ..made };
        let create = CreateInode { inode, hold: is_directory, ..create.clone() };
        let parent = after(&above, |attr| directory_changed(attr, i32::from(is_directory), now_ns));
        let mut prediction = Prediction::new(Change::Create(create), inode, vec![made, parent], &[directory.parent]);
        prediction.result.held = is_directory;
        Some(prediction)
    }

    fn predict_remove(&self, state: &State, remove: &RemoveName, now_ns: i64) -> Option<Prediction> {
        let directory = self.held_directory(state, remove.parent)?;
        let target = self.at_name(state, remove.parent, &remove.name)?;
        if target.is_directory() != remove.directory {
            return None;
        }
        if remove.directory {
            let is_empty = self.directories.get(target.inode).is_some_and(|directory| directory.is_known_empty());
            if !is_empty || !state.directories.contains_key(&target.inode) {
                return None;
            }
        }
        let attributes = vec![
            after(&target.attr(), |attr| name_dropped(attr, now_ns)),
            after(&directory.attr(), |attr| directory_changed(attr, -i32::from(remove.directory), now_ns)),
        ];
        Some(Prediction::new(Change::Remove(remove.clone()), target.inode, attributes, &[directory.parent]))
    }

    /// Of what is no directory.
    fn predict_rename(&self, state: &State, rename: &RenameName, now_ns: i64) -> Option<Prediction> {
        let from = self.held_directory(state, rename.parent)?;
        let to = self.held_directory(state, rename.new_parent)?;
        let moved = self.at_name(state, rename.parent, &rename.name)?;
        let mut attributes = Vec::with_capacity(4);
        if !self.is_free(rename.new_parent, &rename.new_name) {
            let replaced = self.at_name(state, rename.new_parent, &rename.new_name)?;
            if rename.mode() != RenameMode::Replace || replaced.inode == moved.inode || replaced.is_directory() {
                return None;
            }
            attributes.push(after(&replaced.attr(), |attr| name_dropped(attr, now_ns)));
        }
        // Where an old symlink leads is not in what a change leaves.
        if rename.mode() == RenameMode::Exchange || !matches!(moved.kind, Kind::File) {
            return None;
        }
        attributes.push(after(&moved.attr(), |attr| inode_changed(attr, now_ns)));
        attributes.push(after(&from.attr(), |attr| directory_changed(attr, 0, now_ns)));
        if to.inode != from.inode {
            attributes.push(after(&to.attr(), |attr| directory_changed(attr, 0, now_ns)));
        }
        let above = [from.parent, to.parent];
        Some(Prediction::new(Change::Rename(rename.clone()), moved.inode, attributes, &above))
    }

    /// A directory that is held, whose attributes are certain.
    fn held_directory(&self, state: &State, inode: u64) -> Option<Arc<Node>> {
        let is_held = state.directories.contains_key(&inode) && state.is_certain(&[inode]);
        self.complete_node(inode).filter(|node| is_held && node.is_directory() && !node.is_removed())
    }

    /// An inode in a held directory, or a held directory, whose attributes are certain.
    fn held_inode(&self, state: &State, inode: u64) -> Option<Arc<Node>> {
        let node = self.complete_node(inode)?;
        let is_held = match node.is_directory() {
            true => state.directories.contains_key(&inode),
            false => state.directories.contains_key(&node.parent) && node.nlink == 1,
        };
        (is_held && !node.is_removed() && state.is_certain(&[inode, node.parent])).then_some(node)
    }

    /// What a name of a held directory leads to, if it has no other name.
    fn at_name(&self, state: &State, directory: u64, name: &[u8]) -> Option<Arc<Node>> {
        let Some(Found::Node(node)) = self.cache.lookup(directory, name) else { return None };
        let is_plain = !node.lacks_attributes() && (node.is_directory() || node.nlink == 1);
        (is_plain && state.is_certain(&[node.inode])).then_some(node)
    }

    /// Whether a name is known to lead nowhere, and can be one.
    fn is_free(&self, directory: u64, name: &[u8]) -> bool {
        check_name(name).is_ok() && self.directories.get(directory).is_some_and(|directory| directory.is_without(name))
    }

    /// The master has answered a change that was answered here: as was predicted, and all that is known here is as it
    /// was, or newer; unless the master is of another version, and has other rules. Nobody would be notified of that.
    pub(in super::super) fn was_made(&self, pending: &Pending, result: &MutationResult) {
        let (Some(predicted), Some(subject)) = (&pending.predicted, &pending.subject) else { return };
        if result.errno != 0 {
            tracing::warn!("what was answered is not made: {}", result.reason);
            self.stats.lost_changes.inc();
            if let Change::SetLock(set) = &pending.change {
                self.held.strayed(set.inode);
                self.locks.lost(set);
            }
            return self.forget_change(&pending.change, predicted);
        }
        for attr in &result.attributes {
            if predicted.attributes.contains(attr) {
                continue;
            }
            self.stats.mispredicted_changes.inc();
            tracing::debug!(?attr, ?predicted, "a change was answered otherwise than the master makes it");
            self.forget_contents(ChangedContents::Of(attr.inode));
            // Unless there is something newer.
            if let Some(known) = self.cache.node(attr.inode).filter(|_| subject.is_last_of(attr.inode)) {
                self.recent.own_inode(attr.inode);
                self.cache.insert(&[Arc::new(known.with_attributes(attr))]);
            }
        }
    }
}
