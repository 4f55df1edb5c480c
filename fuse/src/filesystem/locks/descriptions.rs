//! What was locked through which open file description, so that a release ends what it must, and nothing else.
//!
//! The kernel names the owner of a lock of fcntl(2) with each request: a process, or the description itself
//! (`F_OFD_SETLK`). It does not say which of the two, and gives the number of a description that is gone to the next
//! one at once. A process loses its locks of a file by FLUSH, which names it. RELEASE names nobody, and may come long
//! after the close: what ends with it is what was locked through that description and by nobody's later request through
//! another. Of a process there is nothing of that kind left, since each of its closes was a FLUSH.
//!
//! What is found to end is handed on to be unlocked before anybody can ask for more: the next description, which has
//! the number of the one that is gone, would lose its lock to an unlock that comes after it.
//!
//! Locks of flock(2) belong to descriptions, which are known here by the numbers of their handles: those are never used
//! twice.
//!
//! The close of a descriptor may be the last of its description, whose RELEASE is then in flight: a request that finds
//! a file locked meanwhile must look again after that.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

/// A RELEASE follows its FLUSH within this time, or the description is open elsewhere.
const FOLLOWS: Duration = Duration::from_secs(1);

/// A description that is gone. No handle has this number.
const GONE: u64 = 0;

/// Bytes that are locked, by the last of them, through a handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    start: u64,
    end: u64,
    through: u64,
}

impl Range {
    fn meets(&self, other: &Self) -> bool {
        self.start <= other.end && other.start <= self.end
    }
}

/// What is to be unlocked of fcntl(2) locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unlock {
    pub owner: u64,
    /// The first byte and the last; `None` for whatever the owner has.
    pub bytes: Option<(u64, u64)>,
}

/// The locks of fcntl(2) that an owner has of an inode.
#[derive(Default)]
struct Owned {
    ranges: Vec<Range>,
    /// Asked for, and not answered yet.
    asked: Vec<Range>,
}

impl Owned {
    fn cut(&mut self, cut: &Range) {
        self.ranges = without(&self.ranges, cut);
    }

    fn is_empty(&self) -> bool {
        self.ranges.is_empty() && self.asked.is_empty()
    }

    /// Takes out what nobody has any more. What is being asked for anew is left until the answer.
    fn take_gone(&mut self, owner: u64) -> Vec<Unlock> {
        let mut gone: Vec<Range> = self.ranges.iter().copied().filter(|range| range.through == GONE).collect();
        for asked in &self.asked {
            gone = without(&gone, asked);
        }
        gone.iter().for_each(|range| self.cut(range));
        if !gone.is_empty() && self.is_empty() {
            return vec![Unlock { owner, bytes: None }];
        }
        gone.iter().map(|range| Unlock { owner, bytes: Some((range.start, range.end)) }).collect()
    }
}

fn without(ranges: &[Range], cut: &Range) -> Vec<Range> {
    let mut left = Vec::with_capacity(ranges.len() + 1);
    for range in ranges {
        if !range.meets(cut) {
            left.push(*range);
            continue;
        }
        if range.start < cut.start {
            left.push(Range { end: cut.start - 1, ..*range });
        }
        if range.end > cut.end {
            left.push(Range { start: cut.end + 1, ..*range });
        }
    }
    left
}

/// A handle through which something was locked.
#[derive(Default)]
struct Handle {
    inode: u64,
    /// By fcntl(2); some may have nothing any more.
    owners: Vec<u64>,
    has_flock: bool,
    /// When a descriptor of it was closed last.
    closed: Option<Instant>,
}

/// Bounded by the locks that are held, and by the threads that wait for some.
#[derive(Default)]
struct State {
    handles: HashMap<u64, Handle>,
    /// By inode and owner.
    owned: HashMap<(u64, u64), Owned>,
    /// Handles by inode.
    inodes: HashMap<u64, Vec<u64>>,
}

impl State {
    fn handle(&mut self, inode: u64, handle: u64) -> &mut Handle {
        self.handles.entry(handle).or_insert_with(|| {
            self.inodes.entry(inode).or_default().push(handle);
            Handle { inode, ..Handle::default() }
        })
    }

    fn drop_if_empty(&mut self, key: (u64, u64)) {
        if self.owned.get(&key).is_some_and(Owned::is_empty) {
            self.owned.remove(&key);
        }
    }

    /// Whether anything is locked through a handle.
    fn has_locks(&self, number: u64, handle: &Handle) -> bool {
        let has = |owner: &u64| {
            let owned = self.owned.get(&(handle.inode, *owner));
            owned.is_some_and(|owned| owned.ranges.iter().any(|range| range.through == number))
        };
        handle.has_flock || handle.owners.iter().any(has)
    }
}

pub struct Descriptions {
    state: Mutex<State>,
    /// How many with locks have been released.
    released: watch::Sender<u64>,
}

impl Default for Descriptions {
    fn default() -> Self {
        Self { state: Mutex::default(), released: watch::Sender::new(0) }
    }
}

/// A request for a lock of fcntl(2), until it is answered.
pub struct Asked {
    descriptions: Arc<Descriptions>,
    inode: u64,
    owner: u64,
    range: Range,
}

impl Asked {
    /// Has unlocked what descriptions that were released meanwhile have left.
    pub fn answered(self, is_granted: bool, unlock: impl FnMut(Unlock)) {
        let mut state = self.descriptions.state.lock();
        let key = (self.inode, self.owner);
        let Some(owned) = state.owned.get_mut(&key) else { return };
        if let Some(place) = owned.asked.iter().position(|asked| *asked == self.range) {
            owned.asked.swap_remove(place);
        }
        if is_granted {
            owned.cut(&self.range);
            owned.ranges.push(self.range);
        }
        owned.take_gone(self.owner).into_iter().for_each(unlock);
        state.drop_if_empty(key);
    }
}

impl Descriptions {
    /// An owner asks for a lock of fcntl(2) through a handle.
    pub fn ask(self: &Arc<Self>, inode: u64, handle: u64, owner: u64, (start, end): (u64, u64)) -> Asked {
        let range = Range { start, end, through: handle };
        let mut state = self.state.lock();
        let owners = &mut state.handle(inode, handle).owners;
        if !owners.contains(&owner) {
            owners.push(owner);
        }
        state.owned.entry((inode, owner)).or_default().asked.push(range);
        drop(state);
        Asked { descriptions: Arc::clone(self), inode, owner, range }
    }

    /// A lock of flock(2) is asked for through a handle.
    pub fn ask_flock(&self, inode: u64, handle: u64) {
        self.state.lock().handle(inode, handle).has_flock = true;
    }

    /// An owner has unlocked bytes.
    pub fn unlocked(&self, inode: u64, owner: u64, (start, end): (u64, u64)) {
        let mut state = self.state.lock();
        if let Some(owned) = state.owned.get_mut(&(inode, owner)) {
            owned.cut(&Range { start, end, through: GONE });
            state.drop_if_empty((inode, owner));
        }
    }

    /// FLUSH: a process has closed a descriptor, and has no locks of the file any more.
    pub fn flushed(&self, inode: u64, handle: u64, process: u64) {
        let mut state = self.state.lock();
        if let Some(owned) = state.owned.get_mut(&(inode, process)) {
            owned.ranges.clear();
            state.drop_if_empty((inode, process));
        }
        if let Some(closed) = state.handles.get_mut(&handle) {
            closed.closed = Some(Instant::now());
        }
    }

    /// RELEASE has been read: whoever meets with the locks of this description waits for them to go. Whether it may
    /// have one of flock(2). To be followed by `released`.
    pub fn closing(&self, number: u64) -> bool {
        let mut state = self.state.lock();
        let Some(handle) = state.handles.get_mut(&number) else { return false };
        handle.closed = Some(Instant::now());
        handle.has_flock
    }

    /// A description is gone: has unlocked what ends with it. Its lock of flock(2) is unlocked already.
    pub fn released(&self, number: u64, mut unlock: impl FnMut(Unlock)) {
        let mut state = self.state.lock();
        let Some(handle) = state.handles.remove(&number) else { return };
        for owner in handle.owners {
            let Some(owned) = state.owned.get_mut(&(handle.inode, owner)) else { continue };
            owned.ranges.iter_mut().filter(|range| range.through == number).for_each(|range| range.through = GONE);
            owned.take_gone(owner).into_iter().for_each(&mut unlock);
            state.drop_if_empty((handle.inode, owner));
        }
        if let Some(handles) = state.inodes.get_mut(&handle.inode) {
            handles.retain(|other| *other != number);
            if handles.is_empty() {
                state.inodes.remove(&handle.inode);
            }
        }
        // Before anybody finds it gone: whoever has met with its locks asks again for one reason or the other.
        self.released.send_modify(|released| *released += 1);
        drop(state);
    }

    /// To be taken before one asks for a lock.
    pub fn look(&self) -> ReleaseWatch<'_> {
        ReleaseWatch { descriptions: self, released: self.released.subscribe() }
    }

    /// Whether a description that has locks of the inode, other than this one, may have been closed a moment ago.
    fn has_closing(&self, inode: u64, except: u64) -> bool {
        let state = self.state.lock();
        let handles = state.inodes.get(&inode).into_iter().flatten().filter(|number| **number != except);
        let mut known = handles.filter_map(|number| Some((*number, state.handles.get(number)?)));
        known.any(|(number, handle)| {
            handle.closed.is_some_and(|closed| closed.elapsed() < FOLLOWS) && state.has_locks(number, handle)
        })
    }
}

/// What has happened since somebody began to ask for a lock.
pub struct ReleaseWatch<'d> {
    descriptions: &'d Descriptions,
    released: watch::Receiver<u64>,
}

impl ReleaseWatch<'_> {
    /// Somebody is in the way: whether it is worth to ask again, since a description has been released. Waits for one
    /// that may be about to be, until `deadline`.
    pub async fn is_outdated(&mut self, inode: u64, asking: u64, deadline: tokio::time::Instant) -> bool {
        if tokio::time::Instant::now() >= deadline {
            return false;
        }
        // In this order: what is not closing any more has been released.
        let is_closing = self.descriptions.has_closing(inode, asking);
        if self.released.has_changed().unwrap_or(false) {
            self.released.mark_unchanged();
            return true;
        }
        is_closing && matches!(tokio::time::timeout_at(deadline, self.released.changed()).await, Ok(Ok(())))
    }
}

#[cfg(test)]
mod tests;
