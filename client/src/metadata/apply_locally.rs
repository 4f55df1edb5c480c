//! Answering a change of what is held before the master has it.
//!
//! A change in a delegated directory whose result is certain ([`predict`](super::predict)) is entered in the journal
//! and in the caches, and waits with others to be sent; the order of changes is what it always is, and the master makes
//! the same of them. Whatever is not certain is asked for as elsewhere, behind them. Questions about what such a change
//! is about wait until it is made, and fsync(2) until all of them are. What the master does not make nevertheless,
//! since the session ended meanwhile, is lost, and that is told by the next fsync(2) or close(2) of whatever it was
//! about.

use std::sync::Arc;

use cavern_conf::{Failpoint, host};
use cavern_posix::{check_name, directory_changed, inode_changed, name_dropped};
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{
    Attr, CommitContent, CreateInode, Kind, Mutation, MutationResult, Naming, RemoveName, RenameMode, RenameName,
};
use cavern_proto::reserved::is_reserved;

use super::cache::Found;
use super::lock_locally::LocalLock;
use super::log::{Answer, Changed, LocalResult, Operation, State};
use super::node::Node;
use super::parts::Inner;
use super::predict::{self, after};
use crate::journal::RequestContext;

/// What will become of a change.
struct Prediction {
    /// With the number of the inode that it makes.
    change: Change,
    result: MutationResult,
    /// The inodes that it is about, and the directories that these are in: whoever lists one is told of its entries.
    inodes: Vec<u64>,
    /// It says that bytes of a file are others, or who has locked some, and nothing else: no sync waits for it.
    is_overwrite: bool,
}

impl Prediction {
    fn new(change: Change, inode: u64, attributes: Vec<Attr>, directories: &[u64]) -> Self {
        let mut inodes: Vec<u64> =
            attributes.iter().map(|attr| attr.inode).chain(directories.iter().copied()).collect();
        inodes.sort_unstable();
        inodes.dedup();
        let result = MutationResult { inode, attributes, ..MutationResult::default() };
        Self { change, result, inodes, is_overwrite: false }
    }
}

impl Inner {
    /// Answers a change, if all that it is about is held here and its result is certain; else gives it back, to be
    /// asked for. Only a lock may be refused. No I/O but to the journal, no wait.
    pub(super) fn apply_locally(
        &self,
        change: Change,
        owner: (u32, u32),
        context: Option<&Arc<RequestContext>>,
    ) -> Result<Answer, Change> {
        let mut gone = Vec::new();
        let answer = {
            // One after the other: each is predicted from what the ones before have left.
            let mut state = self.log.lock();
            match self.apply_in_order(&mut state, &change, owner, context, &mut gone) {
                Some(answer) => answer,
                None => return Err(change),
            }
        };
        self.open.forget_gone(&gone);
        self.stats.write_back_changes.inc_by(u64::from(answer.is_ok()));
        Ok(answer)
    }

    fn apply_in_order(
        &self,
        state: &mut State,
        change: &Change,
        (uid, gid): (u32, u32),
        context: Option<&Arc<RequestContext>>,
        gone: &mut Vec<u64>,
    ) -> Option<Answer> {
        if state.is_closed || !self.holds_any(state) {
            return None;
        }
        let (journal, room) = (self.log.journal.as_ref()?, self.log.room().ok()?);
        let session = state.delegations.session();
        let mut upgrade = None;
        if let Change::SetLock(set) = change {
            match self.predict_lock(state, set)? {
                LocalLock::Made(gained) => upgrade = gained,
                LocalLock::Now(answer) => return Some(*answer),
            }
        }
        let made_ns = host::wall_ns();
        let predicted = self.predict(state, change, (uid, gid), made_ns)?;
        let answered =
            |result, node| Some(Ok(Changed { applied_locally: true, ..Changed::new(result, node, session, 0) }));
        if let Change::Commit(commit) = change
            && let Some(result) = self.merge_commit(state, commit, &predicted, made_ns)
        {
            let node = self.names.apply_to_cache(change, &result, self.names.recent.mark(), gone);
            state.delegations.use_now(&predicted.inodes);
            self.stats.merged_changes.inc();
            return answered(result, node);
        }
        let Prediction { change, result, inodes, is_overwrite } = predicted;
        let mutation = Mutation { uid, gid, made_ns, is_write_back: true, change: Some(change), ..Mutation::default() };
        let number = state.affected.next_number();
        let unique = context.map_or(0, |context| context.unique());
        let slot = journal.note_change(session, unique, Some(number), &mutation)?;
        Failpoint::ChangeJournaled.pass();
        let operation = Operation {
            mutation,
            must_deliver: true,
            number: Some(number),
            answered: Some(Box::new(LocalResult { result: result.clone(), is_overwrite, upgrade })),
            inodes,
            slot: Some(slot.clone()),
            room: Some(room),
            ..Operation::default()
        };
        // Before anybody can say what the master makes of it.
        let mark = self.names.recent.mark();
        let change = operation.mutation.change.as_ref();
        let node = change.and_then(|change| self.names.apply_to_cache(change, &result, mark, gone));
        state.delegations.answered(&operation, result.inode);
        self.log.push(state, operation);
        Failpoint::ChangeQueued.pass();
        self.log.wake_if(state.reserve_numbers());
        if let Some(context) = context {
            context.keep(slot);
        }
        answered(result, node)
    }

    /// Makes a commit part of one of the same file that was answered and is not sent: to the master, the two are one.
    fn merge_commit(
        &self,
        state: &mut State,
        commit: &CommitContent,
        predicted: &Prediction,
        made_ns: i64,
    ) -> Option<MutationResult> {
        let session = state.delegations.session();
        let [attr] = predicted.result.attributes[..] else { return None };
        let (result, is_news) = state.merge(commit.inode, |operation| {
            let Some(Change::Commit(waiting)) = &operation.mutation.change else { return None };
            let (known, number) = (operation.answered.as_mut()?, operation.number?);
            let version = known.result.attributes.first()?.version;
            if version + 1 != attr.version {
                return None;
            }
            let change = Some(Change::Commit(predict::merged(waiting, commit)?));
            let mutation = Mutation { change, made_ns, ..operation.mutation.clone() };
            if !operation.slot.as_ref()?.write(session, Some(number), &mutation) {
                return None;
            }
            let attributes = vec![Attr { version, ..attr }];
            let result = MutationResult { attributes, ..predicted.result.clone() };
            known.result = result.clone();
            known.is_overwrite &= predicted.is_overwrite;
            operation.mutation = mutation;
            Some(result)
        })?;
        self.log.wake_if(is_news);
        Some(result)
    }

    /// Whether anything is held: nothing while the lease does not live.
    pub(super) fn holds_any(&self, state: &State) -> bool {
        let held = &state.delegations;
        !held.is_empty() && self.names.caching && self.lease.is_live() && held.session() == self.lease.session()
    }

    fn predict(&self, state: &mut State, change: &Change, owner: (u32, u32), now_ns: i64) -> Option<Prediction> {
        match change {
            Change::Create(create) => self.predict_create(state, create, owner, now_ns),
            Change::Remove(remove) => self.predict_remove(state, remove, now_ns),
            Change::Rename(rename) => self.predict_rename(state, rename, now_ns),
            Change::SetAttr(set) => {
                let node = self.delegated_inode(state, set.inode)?;
                let attr = predict::set(&node.attr(), set, now_ns)?;
                Some(Prediction::new(change.clone(), node.inode, vec![attr], &[node.parent]))
            }
            Change::Commit(commit) => {
                let node = self.delegated_inode(state, commit.inode)?;
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
        if create.naming() != Naming::Named || is_directory && !state.delegations.has_room() {
            return None;
        }
        let directory = self.delegated_directory(state, create.parent)?;
        if !self.is_free(create.parent, &create.name) {
            return None;
        }
        let above = directory.attr();
        let made = predict::created(create, owner, &above, now_ns)?;
        // Last of all: a number is used once.
        let inode = state.delegations.number_for(create.kind(), directory.mount.as_ref()?.id())?;
        let made = Attr { inode, ..made };
        let create = CreateInode { inode, delegate: is_directory, ..create.clone() };
        let parent = after(&above, |attr| directory_changed(attr, i32::from(is_directory), now_ns));
        let mut prediction = Prediction::new(Change::Create(create), inode, vec![made, parent], &[directory.parent]);
        prediction.result.delegated = is_directory;
        Some(prediction)
    }

    fn predict_remove(&self, state: &State, remove: &RemoveName, now_ns: i64) -> Option<Prediction> {
        let directory = self.delegated_directory(state, remove.parent)?;
        let target = self.at_name(state, remove.parent, &remove.name)?;
        if target.is_directory() != remove.directory {
            return None;
        }
        if remove.directory {
            let is_empty = self.names.directories.get(target.inode).is_some_and(|directory| directory.is_known_empty());
            if !is_empty || !state.delegations.holds(target.inode) {
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
        let from = self.delegated_directory(state, rename.parent)?;
        let to = self.delegated_directory(state, rename.new_parent)?;
        let mount_of = |directory: &Node| directory.mount.as_ref().map(|mount| mount.id());
        if mount_of(&from) != mount_of(&to) {
            return None;
        }
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
    fn delegated_directory(&self, state: &State, inode: u64) -> Option<Arc<Node>> {
        let is_held = state.delegations.holds(inode) && state.affected.is_certain(&[inode]);
        self.names.complete_node(inode).filter(|node| is_held && node.is_directory() && !node.is_removed())
    }

    /// An inode in a delegated directory, or a delegated directory, whose attributes are certain.
    fn delegated_inode(&self, state: &State, inode: u64) -> Option<Arc<Node>> {
        let node = self.names.complete_node(inode)?;
        let is_held = match node.is_directory() {
            true => state.delegations.holds(inode),
            false => state.delegations.holds(node.parent) && node.nlink == 1,
        };
        (is_held && !node.is_removed() && state.affected.is_certain(&[inode, node.parent])).then_some(node)
    }

    /// What a name of a delegated directory leads to, if it has no other name.
    fn at_name(&self, state: &State, directory: u64, name: &[u8]) -> Option<Arc<Node>> {
        let Some(Found::Node(node)) = self.names.cache.lookup(directory, name) else { return None };
        let is_plain = !node.lacks_attributes() && (node.is_directory() || node.nlink == 1);
        (is_plain && state.affected.is_certain(&[node.inode])).then_some(node)
    }

    /// Whether a name is known to lead nowhere, and can be one, of the root of a mount too.
    fn is_free(&self, directory: u64, name: &[u8]) -> bool {
        check_name(name).is_ok() && !is_reserved(name) && self.names.is_without(directory, name)
    }
}
