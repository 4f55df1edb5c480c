//! Directories that this session holds: nobody else is answered what is in there, or changes it, before the session has
//! let go. So what is changed there is answered before the master has it.
//!
//! A directory that is made here is held from its first moment on. A change in it whose result is certain ([`predict`])
//! is entered in the journal and in the caches, and waits with others to be sent ([`answer`]); the order of changes is
//! what it always is, and the master makes the same of them. Whatever is not certain is asked for as elsewhere, behind
//! them. Questions about what such a change is about wait until it is made ([`settled`](HeldDirectories::settled)), and
//! fsync(2) until all of them are.
//!
//! A directory is let go of when somebody else wants to look into it, or after a while without changes: in the same
//! order. What the master does not make nevertheless, since the session ended meanwhile, is lost, and that is told by
//! the next fsync(2) or close(2) of whatever it was about.

mod answer;
mod answer_lock;
mod known_locks;
mod predict;

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use cavern_conf::Failpoint;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{Kind, LetGoDirectories};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::cache::Found;
use super::changes::Pending;
use super::{Inner, Metadata};
use crate::error::ClientError;
pub(super) use answer_lock::AskedLock;
use known_locks::KnownLocks;
pub(super) use known_locks::{Asking, Gain};

/// Directories held at most; the master has room for some more.
const HELD_MAX: usize = 50_000;
/// Numbers for inodes that are asked for at once. When half of them are used up, the next ones are. The master takes
/// those of the last four times: enough for any that waits to be offered to a file.
const NUMBERS: u32 = 16_384;
/// A directory in which nothing was changed for so long is let go of.
const IDLE: Duration = Duration::from_secs(60);
/// When one is recalled, so are those that have been idle for this long: whoever looks into one looks into others.
const RECENTLY: Duration = Duration::from_secs(1);
/// Directories of one message.
const LET_GO_MAX: usize = 10_000;
/// Losses that are remembered for whoever asks; of more only some are told.
const LOSSES_MAX: usize = 65_536;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct HeldDirectories {
    state: Mutex<State>,
    /// Whether any directory is held: mostly none, which is to cost nothing.
    any: AtomicBool,
    /// Changes that were answered and are not made.
    unmade: AtomicUsize,
    /// What is lost and nobody was told of.
    lost: AtomicUsize,
    /// One of them is made.
    made: Notify,
}

#[derive(Debug, Default)]
struct State {
    session: u64,
    /// When something was changed there last.
    directories: HashMap<u64, Instant>,
    /// Recalled before the answer that says that they are held.
    recalled: HashSet<u64>,
    /// How often all are being let go of: what was asked for before is not held, though the answer says so.
    letting_go: u32,
    numbers: Numbers,
    /// Numbers that files of a mount are to have before others.
    of_files: HashMap<u32, VecDeque<u64>>,
    /// What the changes are about that were answered and are not made, and how many there are of each.
    answered: HashMap<u64, u32>,
    /// The same of those that were asked for and have no answer.
    asked: HashMap<u64, u32>,
    /// Of these, those that take names from what is there, or give it others.
    moving: HashMap<u64, u32>,
    /// Locks of what is in the directories.
    locks: KnownLocks,
    /// Changes that were answered, ever, and those of them that are neither made nor lost nor undone.
    begun: u64,
    unmade: BTreeSet<u64>,
    /// How many had begun with the last of them that was about more than the bytes of a file that the session holds.
    named: u64,
    /// Why something that was answered is lost, by what it was about.
    losses: HashMap<u64, String>,
}

/// Numbers for inodes that are made here.
#[derive(Debug, Default)]
struct Numbers {
    left: Range<u64>,
    next: Range<u64>,
    are_asked_for: bool,
}

impl Numbers {
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

/// A change of what is being changed here, until it is made.
#[derive(Debug)]
pub(super) struct Subject {
    held: Arc<HeldDirectories>,
    inodes: Vec<u64>,
    /// Which of all that were answered; `None` for one that is asked for.
    number: Option<u64>,
    /// It takes names from what is there, or gives it others.
    is_moving: bool,
}

impl HeldDirectories {
    /// A change is about to be asked for: nothing that it is about is answered here before its answer.
    pub(super) fn ask(self: &Arc<Self>, inodes: Vec<u64>, is_moving: bool) -> Subject {
        if inodes.is_empty() {
            // Those who ask so may have locked what is closed with the state locked: see `open_inodes`.
            return Subject { held: self.clone(), inodes, number: None, is_moving };
        }
        let mut state = self.state.lock();
        inodes.iter().for_each(|inode| *state.asked.entry(*inode).or_default() += 1);
        if is_moving {
            inodes.iter().for_each(|inode| *state.moving.entry(*inode).or_default() += 1);
        }
        Subject { held: self.clone(), inodes, number: None, is_moving }
    }

    /// The same of one that is being answered; whether it is about bytes or locks alone.
    fn answer(self: &Arc<Self>, state: &mut State, inodes: Vec<u64>, is_overwrite: bool) -> Subject {
        inodes.iter().for_each(|inode| *state.answered.entry(*inode).or_default() += 1);
        let number = state.begun;
        state.begun += 1;
        state.unmade.insert(number);
        if !is_overwrite {
            state.named = state.begun;
        }
        self.unmade.fetch_add(1, Ordering::Release);
        Subject { held: self.clone(), inodes, number: Some(number), is_moving: false }
    }

    /// The master says that the session holds a directory that it has made.
    pub(super) fn begin(&self, directory: u64, session: u64) {
        let mut state = self.state.lock();
        state.follow(session);
        let is_let_go = state.recalled.remove(&directory) || state.letting_go > 0;
        if !is_let_go && state.directories.len() < HELD_MAX {
            state.directories.insert(directory, Instant::now());
            self.any.store(true, Ordering::Release);
        }
    }

    /// The master gives numbers for inodes.
    pub(super) fn numbers(&self, first: u64, count: u32, session: u64) {
        let mut state = self.state.lock();
        state.follow(session);
        let numbers = &mut state.numbers;
        (numbers.next, numbers.are_asked_for) = (first..first + u64::from(count), false);
        state.locks.numbers(first, count);
    }

    /// They were not given.
    pub(super) fn no_numbers(&self) {
        self.state.lock().numbers.are_asked_for = false;
    }

    /// The session holds nothing, nor ever will: it is over, or another one has begun.
    pub(super) fn end(&self) {
        self.state.lock().follow(0);
        self.any.store(false, Ordering::Release);
    }

    /// Whether something that was answered is not made yet.
    pub(super) fn has_unmade(&self) -> bool {
        self.unmade.load(Ordering::Acquire) > 0
    }

    /// Whether that is so of anything about this inode.
    pub(super) fn is_unsettled(&self, inode: u64) -> bool {
        self.has_unmade() && self.state.lock().answered.contains_key(&inode)
    }

    /// Why something is lost that was answered about this inode; said once.
    fn take_loss(&self, inode: u64) -> Option<String> {
        if self.lost.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut state = self.state.lock();
        let loss = state.losses.remove(&inode);
        self.lost.store(state.losses.len(), Ordering::Release);
        loss
    }

    /// Completes when everything that was answered by now is made, lost or undone. Not bounded: what was answered is
    /// sent until the session is over.
    async fn all_made(&self) {
        let begun = self.state.lock().begun;
        self.made_up_to(begun).await;
    }

    async fn made_up_to(&self, begun: u64) {
        loop {
            let made = self.made.notified();
            tokio::pin!(made);
            made.as_mut().enable();
            if !self.state.lock().has_unmade(begun) {
                return;
            }
            made.await;
        }
    }
}

impl State {
    /// What belongs to another session is nobody's any more.
    fn follow(&mut self, session: u64) {
        if self.session != session {
            if self.session != 0 {
                self.letting_go = 0;
            }
            self.session = session;
            self.directories.clear();
            self.recalled.clear();
            self.numbers = Numbers::default();
            self.of_files.clear();
            self.locks.clear();
        }
    }

    /// The number of what is made next.
    fn number_for(&mut self, kind: Kind, mount: u32) -> Option<u64> {
        let of_file = match kind {
            Kind::File => self.of_files.get_mut(&mount).and_then(VecDeque::pop_front),
            _ => None,
        };
        of_file.or_else(|| self.numbers.take())
    }

    /// Whether all that is known here of these is as it will be: nothing about them was asked for without an answer.
    fn is_certain(&self, inodes: &[u64]) -> bool {
        // 0: about anything.
        self.asked.is_empty()
            || !self.asked.contains_key(&0) && inodes.iter().all(|inode| !self.asked.contains_key(inode))
    }

    /// Whether any of so many that have begun is not made.
    fn has_unmade(&self, begun: u64) -> bool {
        self.unmade.first().is_some_and(|first| *first < begun)
    }

    /// How many are waited for until all are made that are about more than bytes; `None` when they are.
    fn named_unmade(&self) -> Option<u64> {
        self.has_unmade(self.named).then_some(self.named)
    }

    /// Whether these are where they are known to be, and will be.
    fn is_in_place(&self, inodes: &[u64]) -> bool {
        self.moving.is_empty()
            || !self.moving.contains_key(&0) && inodes.iter().all(|inode| !self.moving.contains_key(inode))
    }
}

impl Subject {
    /// Nothing of it came to be, though it was answered.
    pub(super) fn lose(&self, reason: &str) {
        let mut state = self.held.state.lock();
        for inode in &self.inodes {
            if state.losses.len() < LOSSES_MAX {
                state.losses.entry(*inode).or_insert_with(|| reason.to_owned());
            }
        }
        self.held.lost.store(state.losses.len(), Ordering::Release);
    }

    /// Whether this is the last one about an inode that was answered and is not made.
    pub(super) fn is_last_of(&self, inode: u64) -> bool {
        self.held.state.lock().answered.get(&inode).is_none_or(|count| *count <= 1)
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        if self.inodes.is_empty() && self.number.is_none() {
            return;
        }
        let mut state = self.held.state.lock();
        less(if self.number.is_some() { &mut state.answered } else { &mut state.asked }, &self.inodes);
        if self.is_moving {
            less(&mut state.moving, &self.inodes);
        }
        if let Some(number) = self.number {
            state.unmade.remove(&number);
            drop(state);
            self.held.unmade.fetch_sub(1, Ordering::Release);
            self.held.made.notify_waiters();
        }
    }
}

fn less(counts: &mut HashMap<u64, u32>, inodes: &[u64]) {
    for inode in inodes {
        if let Some(count) = counts.get_mut(inode) {
            *count -= 1;
            if *count == 0 {
                counts.remove(inode);
            }
        }
    }
}

impl Metadata {
    /// Returns when everything that was answered here is made by the master, and in its log; bounded by
    /// `client.change_timeout`.
    ///
    /// # Errors
    /// `OutcomeUnknown` when the master is not there, or when something about this inode is lost: that is said once.
    pub async fn settle(&self, inode: u64) -> Result<(), ClientError> {
        self.inner.made_within(self.inner.change_timeout).await?;
        self.take_loss(inode)
    }

    /// The same, but for the bytes of files of which the session's end says that they may have changed.
    ///
    /// # Errors
    /// Those of [`Self::settle`].
    pub(crate) async fn settle_names(&self, inode: u64) -> Result<(), ClientError> {
        let (inner, held) = (&self.inner, &self.inner.held);
        let named = held.state.lock().named_unmade();
        if let Some(named) = named {
            inner.changes.hurry();
            let made = tokio::time::timeout(inner.change_timeout, held.made_up_to(named));
            made.await.map_err(|_elapsed| inner.late(inner.change_timeout))?;
        }
        self.take_loss(inode)
    }

    /// Whether what is committed of a file is answered here, as far as can be said.
    pub(crate) fn holds_place_of(&self, inode: u64) -> bool {
        let inner = &self.inner;
        inner.held.any.load(Ordering::Acquire)
            && inner
                .cache
                .node(inode)
                .is_some_and(|node| inner.held.state.lock().directories.contains_key(&node.parent))
    }

    /// From now on changes are answered when the master has made them.
    pub(crate) fn answer_no_more(&self) {
        self.inner.let_go_of_all();
    }

    /// Has the master make what was answered here by now. Bounded by `client.metadata_timeout`.
    pub(crate) async fn make_answered(&self) -> Result<(), ClientError> {
        self.inner.all_settled().await
    }

    /// Whether [`Self::settle`] would wait, or has something to say.
    pub fn is_unsettled(&self, inode: u64) -> bool {
        self.inner.held.has_unmade() || self.has_loss(inode)
    }

    /// Whether something that was answered about this inode is lost, and nobody was told.
    pub fn has_loss(&self, inode: u64) -> bool {
        self.inner.held.lost.load(Ordering::Acquire) > 0 && self.inner.held.state.lock().losses.contains_key(&inode)
    }

    /// Tells that, once.
    ///
    /// # Errors
    /// `OutcomeUnknown` with what happened.
    pub fn take_loss(&self, inode: u64) -> Result<(), ClientError> {
        match self.inner.held.take_loss(inode) {
            Some(cause) => Err(ClientError::OutcomeUnknown { cause }),
            None => Ok(()),
        }
    }

    /// Numbers for files that are going to be made here, and the session whose they are; fewer where none are made.
    pub(crate) fn take_numbers(&self, count: u32) -> (u64, Vec<u64>) {
        let inner = &self.inner;
        let mut state = inner.held.state.lock();
        if !inner.held.any.load(Ordering::Acquire) {
            return (state.session, Vec::new());
        }
        let numbers = (0..count).map_while(|_| state.numbers.take()).collect();
        inner.reserve_more(&mut state);
        (state.session, numbers)
    }

    /// The next file that is made in a mount is to have this number, or one that was offered before.
    pub(crate) fn offer_file_number(&self, session: u64, mount: u32, number: u64) {
        let mut state = self.inner.held.state.lock();
        if state.session == session {
            state.of_files.entry(mount).or_default().push_back(number);
        }
    }

    /// Takes back the offer of these numbers; gives those that no file has, nor ever will have.
    pub(crate) fn withdraw_file_numbers(&self, numbers: &HashSet<u64>) -> HashSet<u64> {
        let mut state = self.inner.held.state.lock();
        let mut withdrawn = HashSet::new();
        for offered in state.of_files.values_mut() {
            offered.retain(|number| !numbers.contains(number) || !withdrawn.insert(*number));
        }
        withdrawn
    }

    /// Lets go of directories in which nothing is changed any more, until `stop`.
    pub(crate) async fn let_go_of_idle(&self, stop: CancellationToken) {
        let work = async {
            loop {
                tokio::time::sleep(IDLE / 4).await;
                let now = Instant::now();
                self.inner.let_go_of(|_, changed| now.saturating_duration_since(changed) >= IDLE);
            }
        };
        let _stopped = stop.run_until_cancelled(work).await;
    }
}

impl Inner {
    /// Waits until what was answered about an inode is made, so that the master's answer is not older than that.
    /// Bounded by `client.metadata_timeout`.
    pub(super) async fn settled(&self, inode: u64) -> Result<(), ClientError> {
        if self.held.is_unsettled(inode) { self.all_settled().await } else { Ok(()) }
    }

    /// The same of everything.
    pub(super) async fn all_settled(&self) -> Result<(), ClientError> {
        self.made_within(self.master.timeout()).await
    }

    async fn made_within(&self, patience: Duration) -> Result<(), ClientError> {
        if !self.held.has_unmade() {
            return Ok(());
        }
        self.changes.hurry();
        tokio::time::timeout(patience, self.held.all_made()).await.map_err(|_elapsed| self.late(patience))
    }

    /// Somebody else wants to know what is in a directory (0: in any): it is let go of, after all that was answered
    /// there.
    pub(super) fn recalled(&self, directory: u64) {
        self.end_stays();
        if directory == 0 {
            return self.let_go_of_all();
        }
        let now = Instant::now();
        let is_held = self.held.state.lock().directories.contains_key(&directory);
        if is_held {
            return self
                .let_go_of(|inode, changed| inode == directory || now.saturating_duration_since(changed) >= RECENTLY);
        }
        // The answer that says that it is held may be on its way: it comes before that to this.
        let mut state = self.held.state.lock();
        state.recalled.insert(directory);
        self.push_let_go(LetGoDirectories { directories: vec![directory], all: false });
    }

    /// Sees to it that there are numbers for what is made here.
    pub(super) fn reserve_inodes(&self) {
        self.reserve_more(&mut self.held.state.lock());
    }

    fn reserve_more(&self, state: &mut State) {
        if state.numbers.are_short() {
            state.numbers.are_asked_for = true;
            self.changes.push(Pending::owed(Change::ReserveInodes(NUMBERS)));
        }
    }

    /// Lets go of everything, whether it is known here or not: the process before may have held it, or the one that led
    /// before may have said so.
    pub(super) fn let_go_of_all(&self) {
        let mut state = self.held.state.lock();
        state.directories.clear();
        self.held.any.store(false, Ordering::Release);
        state.letting_go += 1;
        self.push_let_go(LetGoDirectories { directories: Vec::new(), all: true });
    }

    fn let_go_of(&self, is_over: impl Fn(u64, Instant) -> bool) {
        // Locked until the message has its place: what is answered later is asked for.
        let mut state = self.held.state.lock();
        let over = state.directories.extract_if(|inode, changed| is_over(*inode, *changed));
        let over: Vec<u64> = over.map(|(inode, _)| inode).collect();
        if state.directories.is_empty() {
            self.held.any.store(false, Ordering::Release);
        }
        for directories in over.chunks(LET_GO_MAX) {
            self.push_let_go(LetGoDirectories { directories: directories.to_vec(), all: false });
        }
    }

    fn push_let_go(&self, let_go: LetGoDirectories) {
        self.changes.push(Pending::owed(Change::LetGoDirectories(let_go)));
        Failpoint::LetGoQueued.pass();
    }

    /// The session has let go of them, and knows of every directory that it made before whether it holds it.
    pub(super) fn has_let_go(&self, let_go: &LetGoDirectories) {
        let mut state = self.held.state.lock();
        if let_go.all {
            state.letting_go = state.letting_go.saturating_sub(1);
        }
        for directory in &let_go.directories {
            state.recalled.remove(directory);
        }
    }

    /// What a change that is asked for is about: directories whose names it changes, and inodes with the directory that
    /// each is in. 0 for what is not known.
    fn subject_of(&self, change: &Change) -> Vec<u64> {
        let with_place = |inode: u64| {
            let parent = self.cache.node(inode).map_or(0, |node| node.parent);
            [inode, parent]
        };
        // Of what leads nowhere, the directory is enough.
        let at = |directory: u64, name: &[u8]| match self.cache.lookup(directory, name) {
            Some(Found::Node(node)) => node.inode,
            Some(Found::Absent(_)) => directory,
            None if self.directories.get(directory).is_some_and(|known| known.is_without(name)) => directory,
            None => 0,
        };
        match change {
            Change::Create(create) => vec![create.parent, create.inode.max(create.parent)],
            Change::Link(link) => [vec![link.parent], with_place(link.inode).to_vec()].concat(),
            Change::Remove(remove) => vec![remove.parent, at(remove.parent, &remove.name)],
            Change::Rename(rename) | Change::RenameWhiteout(rename) => vec![
                rename.parent,
                rename.new_parent,
                at(rename.parent, &rename.name),
                at(rename.new_parent, &rename.new_name),
            ],
            Change::SetAttr(set) => with_place(set.inode).to_vec(),
            Change::SetXattr(set) => with_place(set.inode).to_vec(),
            Change::RemoveXattr(remove) => with_place(remove.inode).to_vec(),
            Change::Commit(commit) => with_place(commit.inode).to_vec(),
            Change::SetQuota(_) | Change::SetTtl(_) => vec![0],
            Change::Hold(_)
            | Change::LetGo(_)
            | Change::SetHolds(_)
            | Change::SetLock(_)
            | Change::ReserveInodes(_)
            | Change::LetGoDirectories(_)
            | Change::OpenToWrite(_) => Vec::new(),
        }
    }

    /// A change is asked for: what it is about.
    pub(super) fn ask(&self, change: &Change) -> Subject {
        let is_moving =
            matches!(change, Change::Link(_) | Change::Remove(_) | Change::Rename(_) | Change::RenameWhiteout(_));
        self.held.ask(self.subject_of(change), is_moving)
    }

    /// A change as it is asked for: whoever makes a directory wants to hold it, if there is a successor who could
    /// finish what is answered there.
    pub(super) fn asking_to_hold(&self, mut change: Change) -> Change {
        if let (Change::Create(create), true) = (&mut change, self.holds_directories) {
            let mount = self.directories.get(create.parent).and_then(|directory| directory.mount.clone());
            create.hold = create.kind() == Kind::Directory && mount.is_none_or(|mount| !mount.has_synced_names());
        }
        change
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_about_nothing_is_asked_for_while_the_state_is_locked() {
        let held = Arc::new(HeldDirectories::default());
        let locked = held.state.lock();
        // Whoever answers a removal closes the file, and whoever lets go of closed files asks for that: each of them
        // with something locked that the other one needs.
        let asked = held.ask(Vec::new(), false);
        drop(asked);
        assert!(locked.asked.is_empty());
    }

    #[test]
    fn numbers_are_asked_for_before_they_are_used_up() {
        let held = HeldDirectories::default();
        assert!(held.state.lock().numbers.are_short() && held.state.lock().numbers.take().is_none());
        held.numbers(10, NUMBERS, 1);
        held.state.lock().numbers.take().unwrap();
        assert!(!held.state.lock().numbers.are_asked_for);
        let mut state = held.state.lock();
        assert!(!state.numbers.are_short());
        let taken: Vec<u64> = (0..NUMBERS / 2).map(|_| state.numbers.take().unwrap()).collect();
        assert_eq!(taken[0], 11);
        assert!(state.numbers.are_short());
        drop(state);
        held.numbers(1_000_000, NUMBERS, 1);
        let mut state = held.state.lock();
        let rest: Vec<u64> = std::iter::from_fn(|| state.numbers.take()).collect();
        assert_eq!(
            (rest.len(), *rest.last().unwrap()),
            (NUMBERS as usize / 2 - 1 + NUMBERS as usize, 1_000_000 + 16_383)
        );
        drop(state);
        held.numbers(1, NUMBERS, 1);
        held.begin(5, 2);
        assert!(held.state.lock().numbers.take().is_none(), "those of another session");
    }

    #[test]
    fn what_was_asked_for_before_all_was_let_go_of_is_not_held() {
        let held = HeldDirectories::default();
        held.state.lock().letting_go = 1;
        held.begin(5, 1);
        assert!(held.state.lock().directories.is_empty(), "the first session goes on from a process before");
        held.state.lock().letting_go = 0;
        held.begin(6, 1);
        assert!(held.state.lock().directories.contains_key(&6));
        held.state.lock().letting_go = 1;
        held.begin(7, 2);
        assert_eq!(
            held.state.lock().directories.keys().collect::<Vec<_>>(),
            [&7],
            "another session lets go of nothing"
        );
    }

    #[test]
    fn what_was_recalled_before_it_was_known_to_be_held_is_not_held() {
        let held = HeldDirectories::default();
        held.begin(5, 1);
        held.state.lock().recalled.insert(6);
        held.begin(6, 1);
        assert_eq!(held.state.lock().directories.keys().collect::<Vec<_>>(), [&5]);
        held.end();
        assert!(held.state.lock().directories.is_empty() && !held.any.load(Ordering::Acquire));
    }

    #[tokio::test]
    async fn what_is_answered_is_waited_for_and_what_is_asked_for_makes_the_rest_uncertain() {
        let held = Arc::new(HeldDirectories::default());
        let asked = held.ask(vec![5, 6], false);
        assert!(held.state.lock().is_certain(&[7]) && !held.state.lock().is_certain(&[7, 6]));
        let anything = held.ask(vec![0], false);
        assert!(!held.state.lock().is_certain(&[7]) && held.state.lock().is_in_place(&[5, 7]));
        let moving = held.ask(vec![7], true);
        assert!(!held.state.lock().is_in_place(&[5, 7]) && held.state.lock().is_in_place(&[5]));
        drop((asked, anything, moving));
        assert!(held.state.lock().moving.is_empty());
        assert!(held.state.lock().is_certain(&[5]) && held.state.lock().asked.is_empty());
        held.all_made().await;
        let [first, second] = [vec![5], vec![5, 6]].map(|inodes| held.answer(&mut held.state.lock(), inodes, false));
        assert!(held.is_unsettled(5) && !held.is_unsettled(7) && !first.is_last_of(5) && second.is_last_of(6));
        let waiting = {
            let held = held.clone();
            tokio::spawn(async move { held.all_made().await })
        };
        first.lose("the session is over");
        drop(first);
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        // One that came later is over before: it was undone.
        let undone = held.answer(&mut held.state.lock(), Vec::new(), true);
        drop(undone);
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        drop(second);
        waiting.await.unwrap();
        assert!(!held.has_unmade());
        assert_eq!((held.take_loss(6), held.take_loss(5).as_deref()), (None, Some("the session is over")));
        assert_eq!(held.take_loss(5), None, "it is said once");
    }

    #[test]
    fn what_is_about_bytes_alone_need_not_be_waited_for() {
        let held = Arc::new(HeldDirectories::default());
        let answer = |is_overwrite| held.answer(&mut held.state.lock(), vec![5], is_overwrite);
        let [named, bytes] = [answer(false), answer(true)];
        let waited_for = || held.state.lock().named_unmade();
        assert_eq!(waited_for(), Some(1));
        drop(named);
        assert_eq!(waited_for(), None);
        drop(bytes);
        let later = [answer(true), answer(false)];
        assert_eq!(waited_for(), Some(4), "in the order of all");
        drop(later);
        assert_eq!(waited_for(), None);
    }
}
