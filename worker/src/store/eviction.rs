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
//! Where the share of a mount is limited (`shares`), it is a share of the capacity and of both watermarks: what a mount
//! has beyond it goes first, from its own blocks alone and in the same manner, with window and main of its own. What is
//! above the share of the high watermark goes in the background, on a thread that may wait for the disk. A fill evicts
//! blocks of its mount only for what would exceed the share of the capacity.

use cavern_proto::BlockId;

use super::frequency::FrequencySketch;
use super::shares::{MountLists, Shares};
use super::slab::{Entry, Links, List, NIL, Relist, Segment, Slab, Standing, hash_of};
use super::units::UNIT_BYTES;

/// Blocks used this recently are spared while there is another way.
const RECENT_SECONDS: u32 = 2;
/// A newcomer must have been used this many times more than what it displaces, and once more.
const HYSTERESIS: u8 = 2;
/// Held blocks that are passed over at the cold end of a list before the search is given up.
const MAX_PASSED_OVER: usize = 256;
/// The window has at least this many units (4 MiB), unless that is more than 2 % of the directory.
const MIN_WINDOW_UNITS: u64 = (4 << 20) / UNIT_BYTES as u64;

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

/// The lists of a scope, and how much they are to have.
struct Lists {
    window: List,
    main: List,
    window_target: u64,
    main_limit: u64,
}

/// Counters of what admission decided.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(super) struct AdmissionCounters {
    /// Newcomers that were evicted because what they would have displaced is used as often.
    pub rejected: u64,
}

/// The room of one directory, in units of 4 KiB.
#[derive(Debug)]
pub(super) struct Space {
    capacity: u64,
    high: u64,
    low: u64,
    window_target: u64,
    window: List,
    main: List,
    /// Blocks of fs-mode files. They take room like all others, and are no part of any contest.
    data: List,
    blocks: u64,
}

impl Space {
    /// `high` and `low` are fractions of the capacity with 0 < low ≤ high ≤ 1.
    pub(super) fn new(capacity_bytes: u64, high: f64, low: f64) -> Self {
        let capacity = capacity_bytes / u64::from(UNIT_BYTES);
        let share = |fraction: f64| (capacity as f64 * fraction) as u64;
        Self {
            capacity,
            high: share(high),
            low: share(low),
            window_target: share(0.01).max(MIN_WINDOW_UNITS.min(share(0.02))),
            window: List::EMPTY,
            main: List::EMPTY,
            data: List::EMPTY,
            blocks: 0,
        }
    }

    pub(super) fn used(&self) -> u64 {
        self.window.units + self.main.units + self.data.units
    }

    /// Units that no eviction can free.
    pub(super) fn data(&self) -> u64 {
        self.data.units
    }

    pub(super) fn capacity(&self) -> u64 {
        self.capacity
    }

    pub(super) fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Units below the high watermark that are free.
    pub(super) fn free(&self) -> u64 {
        self.high.saturating_sub(self.used())
    }

    fn main_limit(&self) -> u64 {
        self.low.saturating_sub(self.window_target).saturating_sub(self.data.units)
    }

    fn list(&mut self, segment: Option<Segment>) -> &mut List {
        match segment {
            Some(Segment::Window) => &mut self.window,
            Some(Segment::Main) => &mut self.main,
            None => &mut self.data,
        }
    }
}

/// All blocks of a worker, what they take of each directory, and the order in which cached ones would go.
#[derive(Debug)]
pub(super) struct Cache {
    pub slab: Slab,
    pub spaces: Vec<Space>,
    pub tally: AdmissionCounters,
    sketch: FrequencySketch,
    /// `None` where mounts may take all there is.
    shares: Option<Shares>,
}

impl Cache {
    /// `shares` is what the cached blocks of a mount may take of each directory.
    pub(super) fn new(spaces: Vec<Space>, shares: Option<Shares>) -> Self {
        let expected = spaces.iter().map(|space| space.capacity).sum::<u64>() / UNITS_PER_BLOCK;
        let sketch = FrequencySketch::new(usize::try_from(expected).unwrap_or(usize::MAX));
        Self { slab: Slab::default(), spaces, tally: AdmissionCounters::default(), sketch, shares }
    }

    /// Puts an entry into the lists of its segment, as the most recently used one.
    fn push_head(&mut self, slot: u32) {
        self.relist(slot, Relist::Head);
    }

    /// Puts an entry into the lists of its segment, as the first to go.
    fn push_tail(&mut self, slot: u32) {
        self.relist(slot, Relist::Tail);
    }

    /// Takes an entry out of its lists.
    fn unlink(&mut self, slot: u32) {
        self.relist(slot, Relist::Out);
    }

    fn relist(&mut self, slot: u32, step: Relist) {
        let Some(entry) = self.slab.at(slot) else { return };
        let standing @ Standing { directory, segment, units, .. } = entry.standing();
        self.spaces[directory].list(segment).relist(&mut self.slab, slot, units, step);
        if let Some((list, links)) = self.list_of_mount(slot, standing) {
            list.relist(links, slot, units, step);
        }
    }

    /// The list of its mount that an entry is in, where shares are limited, and the links of that.
    fn list_of_mount(&mut self, slot: u32, standing: Standing) -> Option<(&mut List, &mut Vec<Links>)> {
        self.shares.as_mut()?.list(slot, standing)
    }

    fn lists(&self, directory: usize, scope: Scope) -> Lists {
        let space = &self.spaces[directory];
        match (scope, &self.shares) {
            (Scope::Mount(mount_id), Some(shares)) => {
                let MountLists { window, main } = shares.lists(directory, mount_id);
                let window_target = shares.of(space.window_target);
                let main_limit = shares.limit(space.low).saturating_sub(window_target);
                Lists { window, main, window_target, main_limit }
            }
            _ => {
                let Space { window, main, window_target, .. } = *space;
                Lists { window, main, window_target, main_limit: space.main_limit() }
            }
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
    pub(super) fn touch(&mut self, slot: u32, now: u32) {
        let Some(entry) = self.slab.at_mut(slot) else { return };
        entry.last_used = now;
        if let Some(cached) = entry.cached_mut() {
            cached.expired = false;
        }
        self.unlink(slot);
        self.push_head(slot);
    }

    /// Marks an entry as unused beyond its time: it is the first to go when room is needed.
    pub(super) fn expire(&mut self, slot: u32) {
        let Some(cached) = self.slab.at_mut(slot).and_then(Entry::cached_mut) else { return };
        cached.expired = true;
        self.unlink(slot);
        self.assign_to_main(slot);
        self.push_tail(slot);
    }

    /// Adds an entry as a newcomer (at start: straight to main while there is room), or as data. Its units count at
    /// once: make room before.
    pub(super) fn insert(&mut self, entry: Entry) -> u32 {
        let (directory, mount_id) = (usize::from(entry.directory), entry.mount_id);
        let slot = self.slab.insert(entry);
        self.push_head(slot);
        self.spaces[directory].blocks += 1;
        self.sketch.grow_to(self.slab.len());
        self.settle(directory, mount_id);
        slot
    }

    /// Takes an entry out, wherever it is.
    pub(super) fn remove(&mut self, slot: u32) -> Option<Entry> {
        let directory = usize::from(self.slab.at(slot)?.directory);
        self.unlink(slot);
        self.spaces[directory].blocks -= 1;
        self.slab.remove(slot)
    }

    /// Adds units to an entry, for bytes about to be written. Make room before.
    pub(super) fn charge(&mut self, slot: u32, units: u32) {
        self.adjust(slot, i64::from(units));
    }

    /// Takes units from an entry, for bytes that were not written or were dropped.
    pub(super) fn discharge(&mut self, slot: u32, units: u32) {
        self.adjust(slot, -i64::from(units));
    }

    fn adjust(&mut self, slot: u32, units: i64) {
        let Some(entry) = self.slab.at_mut(slot) else { return };
        let after = (i64::from(entry.units) + units).clamp(0, i64::from(u32::MAX)) as u32;
        let standing @ Standing { directory, segment, mount_id, units: before } = entry.standing();
        entry.units = after;
        self.spaces[directory].list(segment).adjust(before, after);
        if let Some((list, _)) = self.list_of_mount(slot, standing) {
            list.adjust(before, after);
        }
        self.settle(directory, mount_id);
    }

    /// Moves newcomers to main while main has room for them without a contest; where the share of a mount is limited,
    /// those of this one.
    fn settle(&mut self, directory: usize, mount_id: u32) {
        let scope = if self.shares.is_some() { Scope::Mount(mount_id) } else { Scope::Directory };
        loop {
            let Lists { window, main, window_target, main_limit } = self.lists(directory, scope);
            let tail = window.tail();
            let Some(entry) = self.slab.at(tail) else { return };
            let (space, units) = (&self.spaces[directory], u64::from(entry.units));
            let fits = main.units + units <= main_limit && space.main.units + units <= space.main_limit();
            let over = window.units > window_target || space.window.units > space.window_target;
            if !over || !fits {
                return;
            }
            self.promote(tail);
        }
    }

    fn promote(&mut self, slot: u32) {
        self.unlink(slot);
        self.assign_to_main(slot);
        self.push_head(slot);
    }

    /// Of an entry that is in no list now.
    fn assign_to_main(&mut self, slot: u32) {
        if let Some(cached) = self.slab.at_mut(slot).and_then(Entry::cached_mut) {
            cached.segment = Segment::Main;
        }
    }

    /// Evicts blocks of a mount until `units` more of it are within its share of the directory, none that a request
    /// holds. What it has beyond its share already stays for [`Self::relieve`]: no more goes than comes.
    pub(super) fn keep_share(
        &mut self,
        directory: usize,
        mount_id: u32,
        units: u64,
        now: u32,
        evicted: &mut Vec<Entry>,
    ) {
        if self.shares.is_none() {
            return;
        }
        let scope = Scope::Mount(mount_id);
        let share = self.limit(scope, self.spaces[directory].capacity);
        let target = share.max(self.used(directory, scope)).saturating_sub(units);
        self.evict_to((directory, scope), target, Protect::InUseOnly, now, usize::MAX, evicted);
    }

    /// Evicts until `units` more fit in the directory, and gives the entries that went.
    ///
    /// # Errors
    /// [`Full`] when that is impossible; what was evicted in the attempt is in `evicted` all the same.
    pub(super) fn make_room(
        &mut self,
        directory: usize,
        units: u64,
        now: u32,
        evicted: &mut Vec<Entry>,
    ) -> Result<(), Full> {
        let target = self.spaces[directory].capacity.checked_sub(units).ok_or(Full)?;
        let all = (directory, Scope::Directory);
        self.evict_to(all, target, Protect::InUseOnly, now, usize::MAX, evicted);
        if self.spaces[directory].used() > target { Err(Full) } else { Ok(()) }
    }

    /// Whether the directory is above its high watermark, or what a mount has is above the share of that.
    pub(super) fn needs_relief(&self, directory: usize) -> bool {
        self.scopes(directory).iter().any(|scope| self.above_high(directory, *scope))
    }

    /// Evicts what is above the high watermark, or the share of a mount in that, towards the low one: some `limit`
    /// blocks. Gives the entries that went.
    pub(super) fn relieve(&mut self, directory: usize, now: u32, limit: usize, evicted: &mut Vec<Entry>) {
        let stop_at = evicted.len().saturating_add(limit);
        for scope in self.scopes(directory) {
            if !self.above_high(directory, scope) {
                continue;
            }
            let Space { high, low, .. } = self.spaces[directory];
            let left = stop_at.saturating_sub(evicted.len());
            self.evict_to((directory, scope), self.limit(scope, low), Protect::Recent, now, left, evicted);
            if scope != Scope::Directory {
                // A mount that reads fast has nothing but recent blocks in its window. They go here, not in its fills.
                let left = stop_at.saturating_sub(evicted.len());
                self.evict_to((directory, scope), self.limit(scope, high), Protect::InUseOnly, now, left, evicted);
            }
        }
    }

    /// The mounts whose share of a directory is limited, and after them the directory.
    fn scopes(&self, directory: usize) -> Vec<Scope> {
        let mounts = self.shares.iter().flat_map(|shares| shares.mounts(directory));
        mounts.map(Scope::Mount).chain([Scope::Directory]).collect()
    }

    fn above_high(&self, directory: usize, scope: Scope) -> bool {
        self.used(directory, scope) > self.limit(scope, self.spaces[directory].high)
    }

    /// Units that a scope takes.
    fn used(&self, directory: usize, scope: Scope) -> u64 {
        match (scope, &self.shares) {
            (Scope::Mount(mount_id), Some(shares)) => shares.lists(directory, mount_id).units(),
            _ => self.spaces[directory].used(),
        }
    }

    /// What a scope may have of the capacity of a directory, or of a watermark of it, in units.
    fn limit(&self, scope: Scope, units: u64) -> u64 {
        match (scope, &self.shares) {
            (Scope::Mount(_), Some(shares)) => shares.limit(units),
            _ => units,
        }
    }

    fn evict_to(
        &mut self,
        (directory, scope): (usize, Scope),
        target: u64,
        spare: Protect,
        now: u32,
        limit: usize,
        evicted: &mut Vec<Entry>,
    ) {
        let stop_at = evicted.len().saturating_add(limit);
        while self.used(directory, scope) > target && evicted.len() < stop_at {
            match self.next_to_go(directory, scope, spare, now) {
                Some(Next::Candidate(slot)) => self.contest(directory, scope, slot, evicted),
                Some(Next::Victim(slot)) => evicted.extend(self.remove(slot)),
                None => return,
            }
        }
    }

    /// Who is next: newcomers beyond the window's share first, then the coldest of main.
    fn next_to_go(&self, directory: usize, scope: Scope, spare: Protect, now: u32) -> Option<Next> {
        let Lists { window, main, window_target, .. } = &self.lists(directory, scope);
        let over = window.units > *window_target || main.units == 0;
        let coldest = |list: &List, spare| Some(self.coldest(list, scope, spare, now)).filter(|slot| *slot != NIL);
        let candidate = |spare| if over { coldest(window, spare).map(Next::Candidate) } else { None };
        let victim = |list, spare| coldest(list, spare).map(Next::Victim);
        match spare {
            // While the window exceeds its share because of recent blocks, main pays nothing for it.
            Protect::Recent if over => candidate(spare).or_else(|| {
                let tail = main.tail();
                self.is_expired(tail).then_some(Next::Victim(tail))
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

    fn is_expired(&self, slot: u32) -> bool {
        self.slab.at(slot).is_some_and(Entry::is_expired)
    }

    /// The coldest entry of a list that may go, or `NIL`.
    fn coldest(&self, list: &List, scope: Scope, spare: Protect, now: u32) -> u32 {
        let mut slot = list.tail();
        for _ in 0..MAX_PASSED_OVER {
            let Some(entry) = self.slab.at(slot) else { return NIL };
            let recent = !entry.is_expired() && now < entry.last_used.saturating_add(RECENT_SECONDS);
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
    fn contest(&mut self, directory: usize, scope: Scope, candidate: u32, evicted: &mut Vec<Entry>) {
        let Lists { main, main_limit, .. } = self.lists(directory, scope);
        let Some(entry) = self.slab.at(candidate) else { return };
        let frequency = self.sketch.estimate(hash_of(&entry.id));
        let mut needed = (main.units + u64::from(entry.units)).saturating_sub(main_limit);
        let (mut victims, mut defender) = (Vec::new(), NIL);
        let (mut slot, mut passed_over) = (main.tail(), 0);
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
            self.tally.rejected += 1;
            // Another one defends main next time: one cold block whose counters collide with those of hot ones would
            // keep all newcomers out for ever.
            self.rotate(defender);
            evicted.extend(self.remove(candidate));
            return;
        }
        for victim in victims {
            evicted.extend(self.remove(victim));
        }
        self.promote(candidate);
    }

    /// Moves an entry of main from the cold end to the other, without calling it used.
    fn rotate(&mut self, slot: u32) {
        if slot != NIL {
            self.unlink(slot);
            self.push_head(slot);
        }
    }

    /// Gives the directory another capacity. What exceeds it is still there: make room after.
    pub(super) fn resize(&mut self, directory: usize, capacity_bytes: u64, high: f64, low: f64) {
        let space = &mut self.spaces[directory];
        let resized = Space::new(capacity_bytes, high, low);
        space.capacity = resized.capacity;
        space.high = resized.high;
        space.low = resized.low;
        space.window_target = resized.window_target;
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
                assert_eq!(units, shares.lists(directory, mount_id).units(), "mount {mount_id}");
            }
        }
    }
}

#[cfg(test)]
#[path = "eviction_simulation.rs"]
mod simulation;
