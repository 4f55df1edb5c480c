//! How much of a directory the cached blocks of one mount may take, where that is limited.
//!
//! Each mount has lists of its own then, with its blocks alone, in the order of those of the directory. What a mount
//! has beyond its share goes by these, by the same policy as in the directory as a whole. Their links are in a table of
//! their own, so that entries are no larger where nothing is limited.

use hashbrown::HashMap;

use super::slab::{Links, List, NIL, Segment, Standing};
use super::units::UNIT_BYTES;

/// See the module.
#[derive(Debug)]
pub(super) struct Shares {
    /// From 1 to 99.
    percent: u64,
    /// Units that a mount may have in any case.
    least: u64,
    /// By slot.
    links: Vec<Links>,
    /// By directory and mount. Each use of a block looks here under the lock, hence the cheap hash.
    lists: HashMap<(usize, u32), MountLists>,
}

/// The cached blocks of a mount in one directory.
#[derive(Clone, Copy, Debug)]
pub(super) struct MountLists {
    pub window: List,
    pub main: List,
}

impl MountLists {
    const EMPTY: Self = Self { window: List::EMPTY, main: List::EMPTY };

    pub(super) fn units(&self) -> u64 {
        self.window.units + self.main.units
    }
}

impl Shares {
    /// `None` with 100 percent: nothing is limited. A mount may have `least_bytes`, whatever the percentage is: what is
    /// reserved at a time has to fit.
    pub(super) fn new(percent: u32, least_bytes: u64) -> Option<Self> {
        let (percent, least) = (u64::from(percent), least_bytes.div_ceil(u64::from(UNIT_BYTES)));
        (percent < 100).then(|| Self { percent, least, links: Vec::new(), lists: HashMap::new() })
    }

    /// The percentage of so many units.
    pub(super) fn of(&self, units: u64) -> u64 {
        units.saturating_mul(self.percent) / 100
    }

    /// What a mount may have of the capacity of a directory, or of a watermark of it.
    pub(super) fn limit(&self, units: u64) -> u64 {
        self.of(units).max(self.least)
    }

    pub(super) fn lists(&self, directory: usize, mount_id: u32) -> MountLists {
        self.lists.get(&(directory, mount_id)).copied().unwrap_or(MountLists::EMPTY)
    }

    /// The mounts that ever had a block in a directory.
    pub(super) fn mounts(&self, directory: usize) -> impl Iterator<Item = u32> {
        self.lists.keys().filter(move |(of, _)| *of == directory).map(|(_, mount_id)| *mount_id)
    }

    /// The next entry of the same mount towards the head of its list.
    pub(super) fn newer(&self, slot: u32) -> u32 {
        self.links.get(slot as usize).map_or(NIL, |links| links.previous)
    }

    /// The list of its mount that an entry is in, or is to be in, and the links of all; `None` for data.
    pub(super) fn list(&mut self, slot: u32, standing: Standing) -> Option<(&mut List, &mut Vec<Links>)> {
        let Standing { directory, segment, mount_id, .. } = standing;
        let segment = segment?;
        let slots = slot as usize + 1;
        if self.links.len() < slots {
            self.links.resize(slots, Links::NONE);
        }
        let lists = self.lists.entry((directory, mount_id)).or_insert(MountLists::EMPTY);
        let list = if segment == Segment::Main { &mut lists.main } else { &mut lists.window };
        Some((list, &mut self.links))
    }
}
