//! Directories delegated to this session: nobody else is answered what is in there, or changes it, before the session
//! has let go. So what is changed there is answered before the master has it.
//!
//! A directory that is made here is held from its first moment on, and one that was there before from when the master
//! says so ([`Wishes`]). It is let go of when somebody else wants to look into it, or after a while without changes:
//! behind all that was answered there.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::Range;

use cavern_proto::master::mutation::Change;
use cavern_proto::master::{CreateInode, Kind, MutationResult, Naming, ReturnDelegations};
use tokio::time::Instant;

use super::known_locks::KnownLocks;
use super::operation::Operation;
use super::wishes::Wishes;

/// Directories held at most; the master has room for some more.
const DELEGATIONS_MAX: usize = 50_000;
/// Numbers for inodes that are asked for at once. When half of them are used up, the next ones are. The master takes
/// those of the last four times: enough for any that waits to be offered to a file.
pub(super) const NUMBERS: u32 = 16_384;

/// The delegations of this session.
#[derive(Debug, Default)]
pub(in crate::metadata) struct Delegations {
    session: u64,
    /// When something was changed there last.
    directories: HashMap<u64, Instant>,
    /// Those of them that were there before: others may have locked what is in there.
    existing: HashSet<u64>,
    wishes: Wishes,
    /// Asked for by operations in the log,
    asked: HashSet<u64>,
    /// or delegated, and held when this event has been taken in: until then, not all is known that others have changed
    /// there before.
    arriving: HashMap<u64, u64>,
    /// Recalled before the answer that says that they are held.
    recalled: HashSet<u64>,
    /// Operations in the log that let go of all: what was asked for before them is not held, though the answer says so.
    returning: u32,
    numbers: ReservedInodes,
    /// Numbers that files of a mount are to have before others.
    of_files: HashMap<u32, VecDeque<u64>>,
    /// Locks of what is in the directories.
    pub locks: KnownLocks,
}

/// Numbers for inodes that are made here.
#[derive(Debug, Default)]
struct ReservedInodes {
    left: Range<u64>,
    next: Range<u64>,
    are_asked_for: bool,
}

impl ReservedInodes {
    fn take(&mut self) -> Option<u64> {
        if self.left.is_empty() {
            self.left = std::mem::take(&mut self.next);
        }
        self.left.next()
    }

    fn are_short(&self) -> bool {
        !self.are_asked_for && self.next.is_empty() && self.left.end - self.left.start < u64::from(NUMBERS / 2)
    }
}

impl Delegations {
    pub fn session(&self) -> u64 {
        self.session
    }

    pub fn is_empty(&self) -> bool {
        self.directories.is_empty()
    }

    pub fn holds(&self, directory: u64) -> bool {
        self.directories.contains_key(&directory)
    }

    /// Whether a directory that is held was there before.
    pub fn is_existing(&self, directory: u64) -> bool {
        self.existing.contains(&directory)
    }

    /// The master has made a change in a directory; whether that is to be asked for. What is delegated twice could be
    /// returned between the two answers.
    pub fn wants(&mut self, directory: u64) -> bool {
        let is_coming = self.asked.contains(&directory) || self.arriving.contains_key(&directory);
        !self.holds(directory) && !is_coming && self.has_room() && self.wishes.changed(directory)
    }

    /// A directory that was asked for is delegated to the session, which holds it when it has taken in an event.
    pub fn arrives(&mut self, directory: u64, event_seq: u64, session: u64) {
        self.follow(session);
        if !self.recalled.remove(&directory) && self.returning == 0 {
            self.arriving.insert(directory, event_seq);
        }
    }

    /// Every event up to `seq` has been taken in; gives the directories that are held by that.
    pub fn caught_up(&mut self, seq: u64) -> Vec<u64> {
        let arrived: Vec<u64> = self.arriving.extract_if(|_, until| *until <= seq).map(|(inode, _)| inode).collect();
        arrived.into_iter().filter(|directory| self.begin_existing(*directory, self.session)).collect()
    }

    /// Whether the session may come to hold another one.
    pub fn has_room(&self) -> bool {
        self.directories.len() < DELEGATIONS_MAX
    }

    /// What belongs to another session is nobody's any more; with 0 the session holds nothing, nor ever will.
    pub fn follow(&mut self, session: u64) {
        if self.session != session {
            // What is in the log goes on.
            let asked = std::mem::take(&mut self.asked);
            *self = Self { session, returning: self.returning, asked, ..Self::default() };
        }
    }

    /// An operation has come into the log.
    pub(super) fn enter(&mut self, operation: &Operation) {
        self.returning += u32::from(operation.returns_all());
        self.asked.extend(operation.asked_directory());
    }

    /// An operation is at its end, whatever became of it.
    pub(super) fn leave(&mut self, operation: &Operation) {
        // The session knows of every directory that it made before whether it holds it.
        self.returning = self.returning.saturating_sub(u32::from(operation.returns_all()));
        if let Some(directory) = operation.asked_directory() {
            self.asked.remove(&directory);
        }
    }

    /// The master says that the session holds the delegation of a directory that it has made.
    fn begin(&mut self, directory: u64, session: u64) {
        self.follow(session);
        let is_returned = self.recalled.remove(&directory) || self.returning > 0;
        if !is_returned && self.has_room() {
            self.directories.insert(directory, Instant::now());
        }
    }

    /// The master says that the session holds a directory that was there before; whether it does.
    fn begin_existing(&mut self, directory: u64, session: u64) -> bool {
        self.begin(directory, session);
        let is_held = self.holds(directory);
        if is_held {
            self.existing.insert(directory);
            self.wishes.granted(directory);
        } else {
            self.wishes.refused(directory);
        }
        is_held
    }

    /// What of a change that is answered here concerns which directories are held.
    pub fn answered(&mut self, operation: &Operation, inode: u64) {
        let now = Instant::now();
        self.use_now(&operation.inodes);
        match &operation.mutation.change {
            Some(Change::Create(create)) if create.kind() == Kind::Directory => {
                self.directories.insert(inode, now);
            }
            Some(Change::Remove(remove)) if remove.directory => {
                self.directories.remove(&inode);
                self.existing.remove(&inode);
            }
            Some(Change::Rename(rename)) if self.is_existing(rename.parent) => self.locks.stray(inode),
            Some(Change::SetLock(set)) => self.locks.enter(set),
            _ => {}
        }
    }

    /// Those of the inodes that are delegated directories are in use.
    pub fn use_now(&mut self, inodes: &[u64]) {
        let now = Instant::now();
        for inode in inodes {
            if let Some(changed) = self.directories.get_mut(inode) {
                *changed = now;
            }
        }
    }

    /// The master has answered an operation.
    pub fn learn(&mut self, operation: &Operation, result: &MutationResult, session: u64) {
        let (Some(change), answered) = (&operation.mutation.change, operation.answered.is_some()) else { return };
        match change {
            Change::SetLock(set) if answered && result.errno != 0 => self.locks.stray(set.inode),
            _ if answered => {}
            // What a process before has made is let go of with all that it held.
            Change::Create(_) if result.delegated && !operation.is_inherited => self.begin(result.inode, session),
            Change::AcquireDelegation(asked) if result.delegated && !operation.is_inherited => {
                self.begin_existing(asked.inode, session);
            }
            Change::AcquireDelegation(asked) => self.wishes.refused(asked.inode),
            Change::Create(create) if result.errno == 0 && is_named_file(create) => {
                // A file was made by way of the master.
                let is_held = self.session == session && self.holds(create.parent);
                is_held.then(|| self.locks.made(result.inode));
            }
            Change::Rename(_) | Change::RenameWhiteout(_) | Change::Link(_) => {
                let moved = result.attributes.iter().filter(|attr| attr.kind() != Kind::Directory);
                moved.for_each(|attr| self.locks.stray(attr.inode));
            }
            Change::SetLock(set) => self.locks.enter_answer(set, result),
            Change::ReserveInodes(count) if result.errno == 0 => {
                self.follow(session);
                let end = result.inode + u64::from(*count);
                (self.numbers.next, self.numbers.are_asked_for) = (result.inode..end, false);
                self.locks.numbers(result.inode, *count);
            }
            Change::ReserveInodes(_) => self.numbers.are_asked_for = false,
            Change::ReturnDelegations(let_go) => {
                // What was asked for since may have been recalled since as well.
                for directory in let_go.directories.iter().filter(|directory| !self.asked.contains(directory)) {
                    self.recalled.remove(directory);
                }
            }
            _ => {}
        }
    }

    /// Takes out directories that are let go of.
    pub(super) fn take_out(&mut self, is_over: impl Fn(u64, Instant) -> bool) -> Vec<u64> {
        let over: Vec<u64> =
            self.directories.extract_if(|inode, changed| is_over(*inode, *changed)).map(|(inode, _)| inode).collect();
        for inode in &over {
            self.existing.remove(inode);
        }
        over
    }

    /// Somebody wants to know what is in a directory that is not held here: the answer that says that it is may be on
    /// its way.
    pub(super) fn recall_unknown(&mut self, directory: u64) -> Vec<u64> {
        self.arriving.remove(&directory);
        self.recalled.insert(directory);
        vec![directory]
    }

    /// Lets go of everything, whether it is known here or not: the process before may have held it, or the one that led
    /// before may have said so.
    pub(super) fn take_out_all(&mut self) -> ReturnDelegations {
        self.directories.clear();
        self.existing.clear();
        self.arriving.clear();
        ReturnDelegations { directories: Vec::new(), all: true }
    }

    /// Whether more numbers are to be asked for. Says so once.
    pub(super) fn wants_numbers(&mut self) -> bool {
        let are_short = self.numbers.are_short();
        self.numbers.are_asked_for |= are_short;
        are_short
    }

    /// The number of what is made next.
    pub fn number_for(&mut self, kind: Kind, mount: u32) -> Option<u64> {
        let of_file = match kind {
            Kind::File => self.of_files.get_mut(&mount).and_then(VecDeque::pop_front),
            _ => None,
        };
        of_file.or_else(|| self.numbers.take())
    }

    /// Numbers for files that are going to be made here; fewer where none are made.
    pub fn take_numbers(&mut self, count: u32) -> Vec<u64> {
        let count = if self.is_empty() { 0 } else { count };
        (0..count).map_while(|_| self.numbers.take()).collect()
    }

    /// The next file that is made in a mount is to have this number, or one that was offered before.
    pub fn offer_file_number(&mut self, session: u64, mount: u32, number: u64) {
        if self.session == session {
            self.of_files.entry(mount).or_default().push_back(number);
        }
    }

    /// Takes back the offer of these numbers; gives those that no file has, nor ever will have.
    pub fn withdraw_file_numbers(&mut self, numbers: &HashSet<u64>) -> HashSet<u64> {
        let mut withdrawn = HashSet::new();
        for offered in self.of_files.values_mut() {
            offered.retain(|number| !numbers.contains(number) || !withdrawn.insert(*number));
        }
        withdrawn
    }
}

fn is_named_file(create: &CreateInode) -> bool {
    create.kind() == Kind::File && create.naming() == Naming::Named
}

#[cfg(test)]
mod tests {
    use cavern_proto::master::{AcquireDelegation, Lock, LockKind, LockType, RenameName, SetLock};

    use super::*;

    fn gave_numbers(held: &mut Delegations, first: u64, session: u64) {
        let result = MutationResult { inode: first, ..MutationResult::default() };
        held.learn(&Operation::must_deliver(Change::ReserveInodes(NUMBERS)), &result, session);
    }

    fn directories(held: &Delegations) -> Vec<u64> {
        held.directories.keys().copied().collect()
    }

    #[test]
    fn numbers_are_asked_for_before_they_are_used_up() {
        let mut held = Delegations::default();
        assert!(held.wants_numbers() && !held.wants_numbers() && held.numbers.take().is_none());
        gave_numbers(&mut held, 10, 1);
        held.numbers.take().unwrap();
        assert!(!held.numbers.are_asked_for && !held.wants_numbers());
        let taken: Vec<u64> = (0..NUMBERS / 2).map(|_| held.numbers.take().unwrap()).collect();
        assert_eq!(taken[0], 11);
        assert!(held.wants_numbers());
        gave_numbers(&mut held, 1_000_000, 1);
        let rest: Vec<u64> = std::iter::from_fn(|| held.numbers.take()).collect();
        assert_eq!(
            (rest.len(), *rest.last().unwrap()),
            (NUMBERS as usize / 2 - 1 + NUMBERS as usize, 1_000_000 + 16_383)
        );
        gave_numbers(&mut held, 1, 1);
        held.begin(5, 2);
        assert!(held.numbers.take().is_none(), "those of another session");
        let refused = MutationResult { errno: 22, ..MutationResult::default() };
        assert!(held.wants_numbers() && !held.wants_numbers());
        held.learn(&Operation::must_deliver(Change::ReserveInodes(NUMBERS)), &refused, 2);
        assert!(held.wants_numbers(), "they were not given");
    }

    #[test]
    fn what_was_asked_for_before_all_was_let_go_of_is_not_held() {
        let mut held = Delegations::default();
        let let_go = Operation::must_deliver(Change::ReturnDelegations(held.take_out_all()));
        held.enter(&let_go);
        held.begin(5, 1);
        assert!(held.is_empty(), "the first session goes on from a process before");
        held.learn(&let_go, &MutationResult::default(), 1);
        held.leave(&let_go);
        held.begin(6, 1);
        assert!(held.holds(6));
        held.take_out_all();
        held.enter(&let_go);
        held.begin(7, 2);
        assert!(held.is_empty(), "it is made in the next session, behind what was asked for before");
        held.leave(&let_go);
        held.begin(8, 2);
        assert_eq!(directories(&held), [8]);
    }

    #[test]
    fn what_a_process_before_has_made_is_not_held() {
        let mut held = Delegations::default();
        let all = held.take_out_all();
        let own = Operation::must_deliver(Change::ReturnDelegations(all.clone()));
        held.enter(&own);
        let inherited = Operation { is_inherited: true, ..Operation::must_deliver(Change::ReturnDelegations(all)) };
        let made = Operation::new(Change::Create(CreateInode::default()), (0, 0));
        let inherited_made =
            Operation { is_inherited: true, ..Operation::new(Change::Create(CreateInode::default()), (0, 0)) };
        let made_held = |inode| MutationResult { inode, delegated: true, ..MutationResult::default() };
        held.enter(&inherited);
        held.learn(&inherited, &MutationResult::default(), 1);
        held.leave(&inherited);
        held.learn(&inherited_made, &made_held(5), 1);
        held.learn(&made, &made_held(6), 1);
        assert!(held.is_empty(), "all are being let go of still");
        held.leave(&own);
        held.learn(&inherited_made, &made_held(5), 1);
        assert!(held.is_empty());
        held.learn(&made, &made_held(7), 1);
        assert!(held.holds(7));
    }

    #[test]
    fn what_was_there_before_is_held_when_the_master_says_so_and_its_locks_are_not_known() {
        let mut held = Delegations::default();
        gave_numbers(&mut held, 100, 1);
        let granted = MutationResult { delegated: true, ..MutationResult::default() };
        assert_eq!([(); 3].map(|()| held.wants(5)), [false, false, true]);
        held.learn(&asked(5), &MutationResult::default(), 1);
        assert!(!held.holds(5) && !held.wants(5));
        held.learn(&asked(5), &granted, 1);
        assert!(held.holds(5) && held.is_existing(5) && !held.wants(5));
        let inherited = Operation { is_inherited: true, ..asked(6) };
        held.learn(&inherited, &granted, 1);
        assert!(!held.holds(6), "what a process before has asked for is let go of");
        held.recall_unknown(7);
        held.learn(&asked(7), &granted, 1);
        assert!(!held.holds(7) && !held.is_existing(7), "it was recalled before");

        let lock = Lock { owner: 1, r#type: LockType::Exclusive.into(), end: 9, ..Lock::default() };
        let lock = SetLock { inode: 100, kind: LockKind::Posix.into(), lock: Some(lock), ..SetLock::default() };
        assert!(held.locks.predict(&lock).is_some());
        let rename = RenameName { parent: 5, new_parent: 8, ..RenameName::default() };
        held.answered(&Operation::new(Change::Rename(rename), (0, 0)), 100);
        assert_eq!(held.locks.predict(&lock), None, "others may have locked it before");
        assert_eq!(held.take_out(|inode, _| inode == 5), [5]);
        assert!(!held.is_existing(5));
    }

    /// The wish to hold a directory.
    fn asked(inode: u64) -> Operation {
        Operation::new(Change::AcquireDelegation(AcquireDelegation { inode, ..Default::default() }), (0, 0))
    }

    #[test]
    fn a_directory_is_asked_for_once_at_a_time_and_a_recall_is_of_what_was_asked_for_before_it() {
        let mut held = Delegations::default();
        gave_numbers(&mut held, 100, 1);
        let granted = MutationResult { delegated: true, ..MutationResult::default() };
        held.enter(&asked(5));
        assert!([(); 9].iter().all(|()| !held.wants(5)), "it is on its way");
        // One was returned before that, and this one is recalled before its answer.
        held.recall_unknown(5);
        let let_go = ReturnDelegations { directories: vec![5], all: false };
        let let_go = Operation::must_deliver(Change::ReturnDelegations(let_go));
        held.learn(&let_go, &MutationResult::default(), 1);
        held.follow(2);
        held.follow(1);
        assert!(!held.wants(5), "it is in the log in whatever session");
        held.recall_unknown(5);
        held.learn(&let_go, &MutationResult::default(), 1);
        held.learn(&asked(5), &granted, 1);
        held.leave(&asked(5));
        assert!(!held.holds(5));
        assert_eq!([(); 3].map(|()| held.wants(5)), [false, false, true]);
    }

    #[test]
    fn what_is_delegated_is_held_when_all_is_known_that_others_have_changed_there() {
        let mut held = Delegations::default();
        gave_numbers(&mut held, 100, 1);
        held.arrives(5, 40, 1);
        assert!(held.caught_up(39).is_empty() && !held.holds(5) && !held.wants(5));
        assert_eq!((held.caught_up(40), held.holds(5), held.is_existing(5)), (vec![5], true, true));
        held.arrives(6, 50, 1);
        assert_eq!(held.recall_unknown(6), [6], "it is returned though it is not held yet");
        held.arrives(7, 50, 1);
        held.take_out_all();
        held.recall_unknown(8);
        held.arrives(8, 50, 1);
        assert!(held.caught_up(60).is_empty() && held.is_empty());
    }

    #[test]
    fn what_was_recalled_before_it_was_known_to_be_held_is_not_held() {
        let mut held = Delegations::default();
        held.begin(5, 1);
        assert_eq!(held.recall_unknown(6), [6]);
        held.begin(6, 1);
        assert_eq!(directories(&held), [5]);
        held.begin(6, 1);
        assert!(held.holds(6), "it was let go of once");
        assert_eq!(held.take_out(|inode, _| inode == 6), [6]);
        held.follow(0);
        assert!(held.is_empty() && held.session() == 0);
    }
}
