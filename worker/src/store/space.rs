//! The room of a directory, what blocks take of it, and how much of it the cached blocks of one mount may take, where
//! that is limited.
//!
//! Blocks count in units of 4 KiB, which is what a file system allocates at least.
//!
//! Where shares are limited, each mount has room of its own in a directory, with lists of its blocks alone, in the
//! order of those of the directory. What a mount has beyond its share goes by these, by the same policy as in the
//! directory as a whole. Their links are in a table of their own, so that entries are no larger where nothing is
//! limited.

use std::fs::Metadata;
use std::ops::Range;
use std::os::unix::fs::MetadataExt as _;

use cavern_proto::chunk::chunk_range;
use hashbrown::HashMap;

use super::slab::{EvictionState, Links, List, NIL, Segment};

/// Bytes of one unit.
pub(super) const UNIT_BYTES: u32 = 4096;
/// Bytes of what `stat` counts as one block.
const STAT_BLOCK_BYTES: u64 = 512;
/// The window has at least this many units (4 MiB), unless that is more than 2 % of the directory.
const MIN_WINDOW_UNITS: u64 = (4 << 20) / UNIT_BYTES as u64;

/// Units of a byte range of a file.
pub(super) fn units_of(range: &Range<u32>) -> u32 {
    (range.end - range.start).div_ceil(UNIT_BYTES)
}

/// What a file takes of the disk, in units.
pub(super) fn units_on_disk(stat: &Metadata) -> u32 {
    u32::try_from((stat.blocks() * STAT_BLOCK_BYTES).div_ceil(u64::from(UNIT_BYTES))).unwrap_or(u32::MAX)
}

/// Units of chunks of a block of `length` bytes.
pub(super) fn units_of_chunks(chunks: impl IntoIterator<Item = u32>, length: u32) -> u32 {
    chunks.into_iter().map(|index| units_of(&chunk_range(index, length))).sum()
}

/// How much room there is, in units.
#[derive(Clone, Copy, Debug)]
pub(super) struct SpaceLimits {
    pub capacity: u64,
    /// The watermarks.
    pub high: u64,
    pub low: u64,
    pub window_target: u64,
}

impl SpaceLimits {
    /// `high` and `low` are fractions of the capacity with 0 < low ≤ high ≤ 1.
    pub(super) fn new(capacity_bytes: u64, high: f64, low: f64) -> Self {
        let capacity = capacity_bytes / u64::from(UNIT_BYTES);
        let share = |fraction: f64| (capacity as f64 * fraction) as u64;
        let window_target = share(0.01).max(MIN_WINDOW_UNITS.min(share(0.02)));
        Self { capacity, high: share(high), low: share(low), window_target }
    }

    /// So many percent of them, but no less than `least` units of room.
    fn share(self, percent: u64, least: u64) -> Self {
        let of = |units: u64| units.saturating_mul(percent) / 100;
        let [capacity, high, low] = [self.capacity, self.high, self.low].map(|units| of(units).max(least));
        Self { capacity, high, low, window_target: of(self.window_target) }
    }
}

/// The room of one directory, or of one mount in it, and the blocks that take it.
#[derive(Debug)]
pub(super) struct Space {
    pub limits: SpaceLimits,
    pub window: List,
    pub main: List,
    /// Blocks of fs-mode files. They take room like all others, and are no part of any contest.
    pub data: List,
    /// Of a directory.
    pub blocks: u64,
}

impl Space {
    /// Without room.
    pub(super) const NONE: Self = Self {
        limits: SpaceLimits { capacity: 0, high: 0, low: 0, window_target: 0 },
        window: List::EMPTY,
        main: List::EMPTY,
        data: List::EMPTY,
        blocks: 0,
    };

    /// Without blocks.
    pub(super) fn new(limits: SpaceLimits) -> Self {
        Self { limits, ..Self::NONE }
    }

    pub(super) fn used(&self) -> u64 {
        self.window.units + self.main.units + self.data.units
    }

    /// Units below the high watermark that are free.
    pub(super) fn free(&self) -> u64 {
        self.limits.high.saturating_sub(self.used())
    }

    pub(super) fn main_limit(&self) -> u64 {
        self.limits.low.saturating_sub(self.limits.window_target).saturating_sub(self.data.units)
    }

    pub(super) fn list(&mut self, segment: Option<Segment>) -> &mut List {
        match segment {
            Some(Segment::Window) => &mut self.window,
            Some(Segment::Main) => &mut self.main,
            None => &mut self.data,
        }
    }
}

/// The rooms of mounts.
#[derive(Debug)]
pub(super) struct Shares {
    /// From 1 to 99.
    percent: u64,
    /// Units that a mount may have in any case.
    least: u64,
    /// By slot.
    links: Vec<Links>,
    /// By directory and mount. Each use of a block looks here under the lock, hence the cheap hash.
    spaces: HashMap<(usize, u32), Space>,
}

impl Shares {
    /// `None` with 100 percent: nothing is limited. A mount may have `least_bytes`, whatever the percentage is: what is
    /// reserved at a time has to fit.
    pub(super) fn new(percent: u32, least_bytes: u64) -> Option<Self> {
        let (percent, least) = (u64::from(percent), least_bytes.div_ceil(u64::from(UNIT_BYTES)));
        (percent < 100).then(|| Self { percent, least, links: Vec::new(), spaces: HashMap::new() })
    }

    pub(super) fn space(&self, directory: usize, mount_id: u32) -> &Space {
        self.spaces.get(&(directory, mount_id)).unwrap_or(&Space::NONE)
    }

    /// The mounts that ever had a block in a directory.
    pub(super) fn mounts(&self, directory: usize) -> impl Iterator<Item = u32> {
        self.spaces.keys().filter(move |(of, _)| *of == directory).map(|(_, mount_id)| *mount_id)
    }

    /// The next entry of the same mount towards the head of its list.
    pub(super) fn newer(&self, slot: u32) -> u32 {
        self.links.get(slot as usize).map_or(NIL, |links| links.previous)
    }

    /// The list of its mount that an entry is in, or is to be in, and the links of all; `None` for data. `limits` are
    /// those of the directory.
    pub(super) fn list(
        &mut self,
        slot: u32,
        standing: EvictionState,
        limits: SpaceLimits,
    ) -> Option<(&mut List, &mut Vec<Links>)> {
        let EvictionState { directory, segment, mount_id, .. } = standing;
        segment?;
        let slots = slot as usize + 1;
        if self.links.len() < slots {
            self.links.resize(slots, Links::NONE);
        }
        let share = || Space::new(limits.share(self.percent, self.least));
        let space = self.spaces.entry((directory, mount_id)).or_insert_with(share);
        Some((space.list(segment), &mut self.links))
    }

    /// The directory has got these limits.
    pub(super) fn resize(&mut self, directory: usize, limits: SpaceLimits) {
        let share = limits.share(self.percent, self.least);
        self.spaces.iter_mut().filter(|((of, _), _)| *of == directory).for_each(|(_, space)| space.limits = share);
    }
}
