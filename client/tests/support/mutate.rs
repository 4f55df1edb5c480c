//! Changes as the fake master makes them: names and permissions, as much as tests of the client need; and what it does
//! to those who ask.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use cavern_proto::master::mutation::Change;
use cavern_proto::master::*;

use super::master::State;

const ENOENT: i32 = 2;
const EAGAIN: i32 = 11;
const EEXIST: i32 = 17;
const ESTALE: i32 = 116;

/// What was asked, and what becomes of the next questions.
#[derive(Default)]
pub struct Mutations {
    /// Session, numbers and `answered` of every call that was not refused.
    pub calls: Vec<Call>,
    results: HashMap<(u64, u64), MutationResult>,
    /// How often a change was made: once for each number, or something is wrong.
    pub made: u64,
    pub held: BTreeSet<u64>,
    /// Inodes that have lost their last names without an event.
    pub nameless: BTreeSet<u64>,
    /// Calls whose changes are made, and whose answers get lost.
    pub lose: u32,
    /// Calls that are refused, because the session is said to be over.
    pub refuse: u32,
    /// How much later the next answer comes.
    pub late: Option<Duration>,
    /// With the next loss or refusal the session ends.
    pub end_session: bool,
    /// Sent to the client before the answer to the next call: another client has changed this inode.
    pub meanwhile: Option<u64>,
    /// The answer to the next call comes when the client has acknowledged all events before it.
    pub after_events: bool,
    /// Errnos with which the next commits are refused.
    pub commit_refusals: VecDeque<i32>,
    /// The blocks that commits have named.
    pub committed: Vec<Extent>,
    /// The one lock that there is, whatever file and bytes are asked for.
    pub lock: Option<Lock>,
    /// Requests about locks, in their order, and the numbers that wait.
    pub lock_requests: Vec<SetLock>,
    pub waiting: BTreeSet<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    pub session: u64,
    pub numbers: Vec<u64>,
    pub answered: u64,
}

impl State {
    pub fn mutate(&mut self, request: MutateRequest) -> Result<MutateReply, tonic::Status> {
        let session = request.session;
        if self.mutations.refuse > 0 || session != self.session {
            self.mutations.refuse = self.mutations.refuse.saturating_sub(1);
            self.maybe_end_session();
            return Err(tonic::Status::failed_precondition("the session has lapsed"));
        }
        let numbers = request.mutations.iter().map(|mutation| mutation.seq).collect();
        self.mutations.calls.push(Call { session, numbers, answered: request.answered });
        let results = request.mutations.into_iter().map(|mutation| self.mutate_once(session, mutation)).collect();
        if let Some(inode) = self.mutations.meanwhile.take() {
            if let Some(attr) = self.entries.get_mut(&inode).and_then(|entry| entry.attr.as_mut()) {
                attr.version += 1;
            }
            self.announce(watch_event::Event::InodeChanged(inode));
        }
        if self.mutations.lose > 0 {
            self.mutations.lose -= 1;
            self.maybe_end_session();
            return Err(tonic::Status::unavailable("the answer is lost"));
        }
        Ok(MutateReply { results, event_seq: self.seq })
    }

    fn maybe_end_session(&mut self) {
        if std::mem::take(&mut self.mutations.end_session) {
            self.session += 1;
            self.watchers.clear();
        }
    }

    fn mutate_once(&mut self, session: u64, mutation: Mutation) -> MutationResult {
        if let Some(known) = self.mutations.results.get(&(session, mutation.seq)) {
            return known.clone();
        }
        self.mutations.made += 1;
        let result = match mutation.change.unwrap() {
            Change::Create(create) => self.create(create, mutation.uid, mutation.gid),
            Change::Remove(remove) => self.remove_name(&remove),
            Change::Rename(rename) => self.rename(&rename),
            Change::SetAttr(set) => self.set_attr(&set),
            Change::SetOpenRefs(set) => {
                self.mutations.held.retain(|inode| !set.closed.contains(inode));
                self.mutations.held.extend(set.opened);
                MutationResult::default()
            }
            Change::SetLock(set) => self.set_lock(session, set),
            Change::Commit(commit) => self.commit(&commit),
            other => panic!("not in these tests: {other:?}"),
        };
        self.mutations.results.insert((session, mutation.seq), result.clone());
        result
    }

    pub fn check_open_refs(&self, request: &CheckOpenRefsRequest) -> CheckOpenRefsReply {
        let Mutations { held, nameless, .. } = &self.mutations;
        let open = request.open.iter().filter(|inode| nameless.contains(inode));
        let hold = open.chain(&request.referenced).filter(|inode| !held.contains(inode));
        CheckOpenRefsReply { missing: hold.copied().collect(), gone: Vec::new() }
    }

    fn set_lock(&mut self, session: u64, set: SetLock) -> MutationResult {
        let lock = Lock { session, ..set.lock.unwrap() };
        let mutations = &mut self.mutations;
        mutations.lock_requests.push(set);
        mutations.waiting.remove(&set.waiter);
        let is_own = mutations.lock.is_none_or(|held| (held.session, held.owner) == (session, lock.owner));
        match (lock.r#type(), is_own) {
            (LockType::Unlocked, true) => mutations.lock = None,
            (LockType::Unlocked, false) => {}
            (_, true) => mutations.lock = Some(lock),
            (_, false) => {
                if set.wait {
                    mutations.waiting.insert(set.waiter);
                }
                return refused(EAGAIN);
            }
        }
        MutationResult { inode: set.inode, ..MutationResult::default() }
    }

    pub fn get_lock(&self, request: &GetLockRequest) -> GetLockReply {
        let want = request.lock.unwrap();
        let held = self.mutations.lock;
        GetLockReply { lock: held.filter(|held| (held.session, held.owner) != (want.session, want.owner)) }
    }

    fn create(&mut self, create: CreateInode, uid: u32, gid: u32) -> MutationResult {
        let key = (create.parent, create.name.to_vec());
        if self.names.contains_key(&key) {
            return refused(EEXIST);
        }
        let inode = self.next_inode;
        self.next_inode += 1;
        let (kind, mode) = (create.kind, create.mode);
        let attr = Attr { inode, kind, mode, uid, gid, nlink: 1, mtime_ns: 5, ..Attr::default() };
        let (name, target) = (create.name, create.target);
        let entry = Entry { name, attr: Some(attr), parent: create.parent, mount_id: 1, target, ..Entry::default() };
        self.entries.insert(inode, entry);
        self.names.insert(key, inode);
        MutationResult { inode, attributes: vec![attr, self.touched(create.parent)], ..MutationResult::default() }
    }

    fn remove_name(&mut self, remove: &RemoveName) -> MutationResult {
        let Some(inode) = self.names.remove(&(remove.parent, remove.name.to_vec())) else { return refused(ENOENT) };
        let attr = Attr { nlink: 0, ..self.entries.remove(&inode).unwrap().attr.unwrap() };
        MutationResult { inode, attributes: vec![attr, self.touched(remove.parent)], ..MutationResult::default() }
    }

    fn rename(&mut self, rename: &RenameName) -> MutationResult {
        let Some(inode) = self.names.remove(&(rename.parent, rename.name.to_vec())) else { return refused(ENOENT) };
        let mut attributes = Vec::new();
        let to = (rename.new_parent, rename.new_name.to_vec());
        if let Some(replaced) = self.names.insert(to, inode) {
            let attr = self.entries.remove(&replaced).unwrap().attr.unwrap();
            attributes.push(Attr { nlink: 0, ..attr });
        }
        let entry = self.entries.get_mut(&inode).unwrap();
        (entry.parent, entry.name) = (rename.new_parent, rename.new_name.clone());
        attributes.push(entry.attr.unwrap());
        attributes.push(self.touched(rename.parent));
        MutationResult { inode, attributes, ..MutationResult::default() }
    }

    fn set_attr(&mut self, set: &SetAttr) -> MutationResult {
        let Some(entry) = self.entries.get_mut(&set.inode) else { return refused(ESTALE) };
        let attr = entry.attr.as_mut().unwrap();
        attr.mode = set.mode.unwrap_or(attr.mode);
        if let (Some(size), Some(extents)) = (set.size, self.extents.get_mut(&set.inode)) {
            let below = self.mount.frozen_below;
            let is_own = |extent: &Extent| extent.index == 0 && extent.generation >= below;
            let keeps = size == 0 && set.keeps_block && extents.len() == 1 && extents.values().all(is_own);
            if size < attr.size && !keeps {
                attr.generation = attr.generation.max(self.next_generation) + 1;
                extents.retain(|index, _| u64::from(*index) * self.mount.block_size < size);
            }
            attr.next_generation = attr.generation.max(self.next_generation);
            (attr.size, attr.version) = (size, attr.version + 1);
        }
        MutationResult { inode: set.inode, attributes: vec![*attr], is_alone: true, ..MutationResult::default() }
    }

    fn commit(&mut self, commit: &CommitContent) -> MutationResult {
        if let Some(errno) = self.mutations.commit_refusals.pop_front() {
            return refused(errno);
        }
        self.mutations.committed.extend(commit.made.iter().cloned());
        if let Some(extents) = self.extents.get_mut(&commit.inode) {
            let first = self.entries[&commit.inode].attr.unwrap().generation;
            let takes = first..=first.max(self.next_generation);
            let Mount { frozen_below, settled_below, .. } = self.mount;
            let is_replaceable = |generation: u32| settled_below >= frozen_below && generation < frozen_below;
            for made in &commit.made {
                let is_fit = match extents.get(&made.index) {
                    Some(known) if known.generation == made.generation => true,
                    Some(known) => {
                        let is_it = made.replaces == Some(known.generation) && is_replaceable(known.generation);
                        is_it && made.generation >= frozen_below && takes.contains(&made.generation)
                    }
                    None => made.replaces.is_none() && takes.contains(&made.generation),
                };
                if !is_fit {
                    return refused(ESTALE);
                }
            }
            extents.extend(commit.made.iter().map(|made| (made.index, Extent { replaces: None, ..made.clone() })));
        }
        let attr = self.entries.get_mut(&commit.inode).unwrap().attr.as_mut().unwrap();
        (attr.size, attr.version) = (attr.size.max(commit.grow_to), attr.version + 1);
        MutationResult { inode: commit.inode, attributes: vec![*attr], ..MutationResult::default() }
    }

    /// A directory whose entries have changed.
    fn touched(&mut self, directory: u64) -> Attr {
        let attr = self.entries.get_mut(&directory).unwrap().attr.as_mut().unwrap();
        attr.mtime_ns += 1;
        *attr
    }
}

fn refused(errno: i32) -> MutationResult {
    MutationResult { errno, reason: format!("errno {errno}"), ..MutationResult::default() }
}
