//! Which block goes when a directory is full: W-TinyLFU (Einziger, Friedman, Manes 2017) with hysteresis.
//!
//! ```text
//!   0                                            low      high      capacity
//!   |── main ─────────────────────────────|window|─ slack ─|─ reserve ─|
//! ```
//!
//! Training reads a data set again and again in a new random order. Under LRU such a scan leaves nothing useful as soon
//! as the data set exceeds the cache: each newcomer pushes out what is needed next. Here newcomers wait in a small
//! *window*; what falls out of it enters *main* only if it was used more often than the blocks that it would push out,
//! by more than [`HYSTERESIS`] uses. That margin matters: in the midst of an epoch the newcomer has just been read and
//! the victim has not yet, so their counts differ by one although they are equally useful, and by two when the counters
//! were halved in between and one of the two was odd. Swapping them would be a loss each time.
//!
//! Eviction starts when a directory is filled above its high watermark and goes on to the low one, leaving alone what
//! was used in the last [`RECENT_SECONDS`] or is held by a request, so that a stream does not evict its own blocks. The
//! reserve above the high watermark is what such blocks may use; when that is exhausted too, recent blocks go as well
//! (those that a stream is still filling after all others), held ones never. What a directory accounts for never
//! exceeds its capacity: room is made before bytes are written.
//!
//! Where the share of a mount is limited (`space`), it is a share of the capacity and of both watermarks: what a mount
//! has beyond it goes first, from its own blocks alone and in the same manner, with window and main of its own. What is
//! above the share of the high watermark goes in the background, on a thread that may wait for the disk. A fill evicts
//! blocks of its mount only for what would exceed the share of the capacity.

use cavern_proto::BlockId;

use super::frequency::FrequencySketch;
use super::slab::{Entry, EvictionState, List, ListUpdate, NIL, Segment, Slab, hash_of};
use super::space::{Shares, Space, SpaceLimits, UNIT_BYTES};

/// Blocks used this recently are spared while there is another way.
const RECENT_SECONDS: u32 = 2;
/// A newcomer must have been used this many times more than what it displaces, and once more.
const HYSTERESIS: u8 = 2;
/// Held blocks that are passed over at the cold end of a list before the search is given up.
const MAX_PASSED_OVER: usize = 256;
/// The frequency sketch is laid out for blocks of 32 KiB at first, and grows with the number of blocks.
const UNITS_PER_BLOCK: u64 = 8;

/// There is no room: what could go is held by requests, or the wish exceeds the capacity.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Full;

/// Which blocks an eviction leaves alone, beside those that a request holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Protect {
    /// Those used a moment ago.
    Recent,
    /// Those used a moment ago and not complete yet: somebody streams them.
    Growing,
    /// None.
    InUseOnly,
}

/// Who goes next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Next {
    /// A newcomer that must contend with main.
    Candidate(u32),
    /// One that goes without a contest.
    Victim(u32),
}

/// Whose blocks an eviction is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Scope {
    Directory,
    /// Of one mount in the directory.
    Mount(u32),
}

/// What has become of blocks since somebody looked.
#[derive(Debug, Default)]
pub(super) struct EvictionCounts {
    /// Cached blocks that have left the table. Their index entries and files are still there.
    pub gone: Vec<Entry>,
    /// How many of them were evicted.
    pub evicted: u64,
    /// Newcomers that were evicted because what they would have displaced is used as often.
    pub rejected: u64,
}

/// All blocks of a worker, what they take of each directory, and the order in which cached ones would go.
#[derive(Debug)]
pub(super) struct Cache {
    pub slab: Slab,
    pub spaces: Vec<Space>,
    pub departures: EvictionCounts,
    /// Seconds of the worker's clock.
    pub now: u32,
    sketch: FrequencySketch,
    /// `None` where mounts may take all there is.
    shares: Option<Shares>,
}

impl Cache {
    /// `shares` is what the cached blocks of a mount may take of each directory.
    pub(super) fn new(spaces: Vec<Space>, shares: Option<Shares>) -> Self {
        let expected = spaces.iter().map(|space| space.limits.capacity).sum::<u64>() / UNITS_PER_BLOCK;
        let sketch = FrequencySketch::new(usize::try_from(expected).unwrap_or(usize::MAX));
        Self { slab: Slab::default(), spaces, departures: EvictionCounts::default(), now: 0, sketch, shares }
    }

    /// Puts an entry into the lists of its segment, or takes it out of them.
    fn relist(&mut self, slot: u32, step: ListUpdate) {
        let Some(entry) = self.slab.at(slot) else { return };
        let standing @ EvictionState { directory, segment, units, .. } = entry.standing();
        let space = &mut self.spaces[directory];
        space.list(segment).relist(&mut self.slab, slot, units, step);
        if let Some((list, links)) = self.shares.as_mut().and_then(|shares| shares.list(slot, standing, space.limits)) {
            list.relist(links, slot, units, step);
        }
    }

    fn space(&self, directory: usize, scope: Scope) -> &Space {
        match (scope, &self.shares) {
            (Scope::Mount(mount_id), Some(shares)) => shares.space(directory, mount_id),
            _ => &self.spaces[directory],
        }
    }

    /// The next entry of a scope towards the head of its list.
    fn newer(&self, scope: Scope, slot: u32) -> u32 {
        match (scope, &self.shares) {
            (Scope::Mount(_), Some(shares)) => shares.newer(slot),
            _ => self.slab.newer(slot),
        }
    }

    /// Counts one use of a block, cached or not.
    pub(super) fn count_use(&mut self, id: &BlockId) {
        self.sketch.increment(hash_of(id));
    }

    /// Marks an entry as the most recently used of its list.
    pub(super) fn touch(&mut self, slot: u32) {
        let Some(entry) = self.slab.at_mut(slot) else { return };
        entry.last_used = self.now;
        if let Some(cached) = entry.cached_mut() {
            cached.expired = false;
        }
        self.relist(slot, ListUpdate::Out);
        self.relist(slot, ListUpdate::Head);
    }

    /// Marks an entry as unused beyond its time: it is the first to go when room is needed.
    pub(super) fn expire(&mut self, slot: u32) {
        let Some(cached) = self.slab.at_mut(slot).and_then(Entry::cached_mut) else { return };
        cached.expired = true;
        self.move_to_main(slot, ListUpdate::Tail);
    }

    /// Adds an entry as a newcomer (at start: straight to main while there is room), or as data. Its units count at
    /// once: make room before.
    pub(super) fn insert(&mut self, entry: Entry) -> u32 {
        let (directory, mount_id) = (usize::from(entry.directory), entry.mount_id);
        let slot = self.slab.insert(entry);
        self.relist(slot, ListUpdate::Head);
        self.spaces[directory].blocks += 1;
        self.sketch.grow_to(self.slab.len());
        self.settle(directory, mount_id);
        slot
    }

    /// Takes an entry out, wherever it is.
    pub(super) fn remove(&mut self, slot: u32) -> Option<Entry> {
        let directory = usize::from(self.slab.at(slot)?.directory);
        self.relist(slot, ListUpdate::Out);
        self.spaces[directory].blocks -= 1;
        self.slab.remove(slot)
    }

    /// Takes out the entry of a cached block, whose file is deleted when the lock is released; gives the units that it
    /// took.
    pub(super) fn discard(&mut self, slot: u32) -> Option<u32> {
        let entry = self.remove(slot)?;
        let units = entry.units;
        self.departures.gone.push(entry);
        Some(units)
    }

    fn evict(&mut self, slot: u32) {
        self.departures.evicted += u64::from(self.discard(slot).is_some());
    }

    /// Adds units to an entry, for bytes about to be written (make room before), or takes those away that were not
    /// written or were dropped.
    pub(super) fn charge(&mut self, slot: u32, units: i64) {
        let Some(entry) = self.slab.at_mut(slot) else { return };
        let after = (i64::from(entry.units) + units).clamp(0, i64::from(u32::MAX)) as u32;
        let standing @ EvictionState { directory, segment, mount_id, units: before } = entry.standing();
        entry.units = after;
        let space = &mut self.spaces[directory];
        space.list(segment).adjust(before, after);
        if let Some((list, _)) = self.shares.as_mut().and_then(|shares| shares.list(slot, standing, space.limits)) {
            list.adjust(before, after);
        }
        self.settle(directory, mount_id);
    }

    /// Moves newcomers to main while main has room for them without a contest; where the share of a mount is limited,
    /// those of this one.
    fn settle(&mut self, directory: usize, mount_id: u32) {
        let scope = if self.shares.is_some() { Scope::Mount(mount_id) } else { Scope::Directory };
        loop {
            let spaces = [self.space(directory, scope), self.space(directory, Scope::Directory)];
            let tail = spaces[0].window.tail();
            let Some(entry) = self.slab.at(tail) else { return };
            let units = u64::from(entry.units);
            let fits = spaces.iter().all(|space| space.main.units + units <= space.main_limit());
            let is_over = spaces.iter().any(|space| space.window.units > space.limits.window_target);
            if !is_over || !fits {
                return;
            }
            self.move_to_main(tail, ListUpdate::Head);
        }
    }

    fn move_to_main(&mut self, slot: u32, place: ListUpdate) {
        self.relist(slot, ListUpdate::Out);
        if let Some(cached) = self.slab.at_mut(slot).and_then(Entry::cached_mut) {
            cached.segment = Segment::Main;
        }
        self.relist(slot, place);
    }

    /// Evicts blocks of a mount until `units` more of it are within its share of the directory, none that a request
    /// holds. What it has beyond its share already stays for [`Self::relieve`]: no more goes than comes.
    pub(super) fn keep_share(&mut self, directory: usize, mount_id: u32, units: u64) {
        if self.shares.is_some() {
            let scope = Scope::Mount(mount_id);
            let space = self.space(directory, scope);
            let target = space.limits.capacity.max(space.used()).saturating_sub(units);
            self.evict_to(directory, scope, target, Protect::InUseOnly, usize::MAX);
        }
    }

    /// Evicts until `units` more fit in the directory.
    ///
    /// # Errors
    /// [`Full`] when that is impossible; what was evicted in the attempt is gone all the same.
    pub(super) fn make_room(&mut self, directory: usize, units: u64) -> Result<(), Full> {
        let target = self.spaces[directory].limits.capacity.checked_sub(units).ok_or(Full)?;
        self.evict_to(directory, Scope::Directory, target, Protect::InUseOnly, usize::MAX);
        if self.spaces[directory].used() > target { Err(Full) } else { Ok(()) }
    }

    /// Whether the directory is above its high watermark, or what a mount has is above the share of that.
    pub(super) fn needs_relief(&self, directory: usize) -> bool {
        self.scopes(directory).iter().any(|scope| self.is_above_high(directory, *scope))
    }

    /// Evicts what is above the high watermark, or the share of a mount in that, towards the low one: some `limit`
    /// blocks.
    pub(super) fn relieve(&mut self, directory: usize, limit: usize) {
        let stop_at = self.departures.gone.len().saturating_add(limit);
        for scope in self.scopes(directory) {
            if !self.is_above_high(directory, scope) {
                continue;
            }
            let SpaceLimits { high, low, .. } = self.space(directory, scope).limits;
            self.evict_to(directory, scope, low, Protect::Recent, stop_at);
            if scope != Scope::Directory {
                // A mount that reads fast has nothing but recent blocks in its window. They go here, not in its fills.
                self.evict_to(directory, scope, high, Protect::InUseOnly, stop_at);
            }
        }
    }

    /// The mounts whose share of a directory is limited, and after them the directory.
    fn scopes(&self, directory: usize) -> Vec<Scope> {
        let mounts = self.shares.iter().flat_map(|shares| shares.mounts(directory));
        mounts.map(Scope::Mount).chain([Scope::Directory]).collect()
    }

    fn is_above_high(&self, directory: usize, scope: Scope) -> bool {
        let space = self.space(directory, scope);
        space.used() > space.limits.high
    }

    /// Evicts until no more than `target` units are taken, or so many entries have gone in all.
    fn evict_to(&mut self, directory: usize, scope: Scope, target: u64, spare: Protect, stop_at: usize) {
        while self.space(directory, scope).used() > target && self.departures.gone.len() < stop_at {
            match self.next_to_go(directory, scope, spare) {
                Some(Next::Candidate(slot)) => self.contest(directory, scope, slot),
                Some(Next::Victim(slot)) => self.evict(slot),
                None => return,
            }
        }
    }

    /// Who is next: newcomers beyond the window's share first, then the coldest of main.
    fn next_to_go(&self, directory: usize, scope: Scope, spare: Protect) -> Option<Next> {
        let Space { limits, window, main, .. } = self.space(directory, scope);
        let over = window.units > limits.window_target || main.units == 0;
        let coldest = |list: &List, spare| Some(self.coldest(list, scope, spare)).filter(|slot| *slot != NIL);
        let candidate = |spare| if over { coldest(window, spare).map(Next::Candidate) } else { None };
        let victim = |list, spare| coldest(list, spare).map(Next::Victim);
        match spare {
            // While the window exceeds its share because of recent blocks, main pays nothing for it.
            Protect::Recent if over => candidate(spare).or_else(|| {
                let tail = main.tail();
                self.slab.at(tail).is_some_and(Entry::is_expired).then_some(Next::Victim(tail))
            }),
            Protect::Recent => victim(main, spare).or_else(|| victim(window, spare)),
            Protect::Growing | Protect::InUseOnly => candidate(Protect::Recent)
                .or_else(|| candidate(Protect::Growing))
                .or_else(|| victim(main, Protect::Growing))
                .or_else(|| victim(window, Protect::Growing))
                .or_else(|| victim(window, Protect::InUseOnly))
                .or_else(|| victim(main, Protect::InUseOnly)),
        }
    }

    /// The coldest entry of a list that may go, or `NIL`.
    fn coldest(&self, list: &List, scope: Scope, spare: Protect) -> u32 {
        let mut slot = list.tail();
        for _ in 0..MAX_PASSED_OVER {
            let Some(entry) = self.slab.at(slot) else { return NIL };
            let recent = !entry.is_expired() && self.now < entry.last_used.saturating_add(RECENT_SECONDS);
            let spared = match spare {
                // Lists are roughly ordered by use: what is further up is hardly colder.
                Protect::Recent if recent => return NIL,
                Protect::Recent | Protect::InUseOnly => false,
                Protect::Growing => recent && entry.units < entry.length / UNIT_BYTES,
            };
            if !spared && !entry.busy() {
                return slot;
            }
            slot = self.newer(scope, slot);
        }
        NIL
    }

    /// A newcomer against the coldest blocks of main that it would displace: the one or the others go.
    fn contest(&mut self, directory: usize, scope: Scope, candidate: u32) {
        let space = self.space(directory, scope);
        let Some(entry) = self.slab.at(candidate) else { return };
        let frequency = self.sketch.estimate(hash_of(&entry.id));
        let mut needed = (space.main.units + u64::from(entry.units)).saturating_sub(space.main_limit());
        let (mut victims, mut defender) = (Vec::new(), NIL);
        let (mut slot, mut passed_over) = (space.main.tail(), 0);
        while needed > 0 {
            let Some(victim) = self.slab.at(slot) else { break };
            if victim.busy() {
                passed_over += 1;
                if passed_over > MAX_PASSED_OVER {
                    break;
                }
            } else if victim.is_expired()
                || frequency > self.sketch.estimate(hash_of(&victim.id)).saturating_add(HYSTERESIS)
            {
                needed = needed.saturating_sub(u64::from(victim.units));
                victims.push(slot);
            } else {
                defender = slot;
                break;
            }
            slot = self.newer(scope, slot);
        }
        if needed > 0 {
            self.departures.rejected += 1;
            // Another one defends main next time, without being called used: one cold block whose counters collide with
            // those of hot ones would keep all newcomers out for ever.
            self.relist(defender, ListUpdate::Out);
            self.relist(defender, ListUpdate::Head);
            self.evict(candidate);
            return;
        }
        victims.into_iter().for_each(|victim| self.evict(victim));
        self.move_to_main(candidate, ListUpdate::Head);
    }

    /// Gives the directory other limits. What exceeds them is still there: make room after.
    pub(super) fn resize(&mut self, directory: usize, limits: SpaceLimits) {
        self.spaces[directory].limits = limits;
        if let Some(shares) = &mut self.shares {
            shares.resize(directory, limits);
        }
    }

    /// Adds up all entries anew and compares with the running sums.
    #[cfg(test)]
    pub(super) fn check_sums(&self) {
        for (directory, space) in self.spaces.iter().enumerate() {
            let entries = (0..self.slab.slot_count()).filter_map(|slot| self.slab.at(slot));
            let own: Vec<&Entry> = entries.filter(|entry| usize::from(entry.directory) == directory).collect();
            assert_eq!(own.iter().map(|entry| u64::from(entry.units)).sum::<u64>(), space.used());
            assert_eq!(own.len() as u64, space.blocks);
            let Some(shares) = &self.shares else { continue };
            for mount_id in shares.mounts(directory) {
                let cached = own.iter().filter(|entry| entry.mount_id == mount_id && entry.cached().is_some());
                let units = cached.map(|entry| u64::from(entry.units)).sum::<u64>();
                assert_eq!(units, shares.space(directory, mount_id).used(), "mount {mount_id}");
            }
        }
    }
}

#[cfg(test)]
#[path = "eviction_simulation.rs"]
mod simulation;
