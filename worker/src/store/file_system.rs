//! Keeping to what the file system really has.
//!
//! The capacity of a directory is configured, or reckoned once at start; but others may write to the same file system,
//! and a configured capacity may simply be wrong. So free space is looked at every second. When little is left the
//! capacity is lowered to what is used, plus what is free, less a *headroom* (which the index needs to go on writing);
//! when there is plenty again it is raised, up to what it was at the start. Eviction does the rest, as always.
//!
//! The capacity is lowered once in a while only: what was evicted while clients hold its descriptors gives its space
//! back when they have let go. A store that shrank at each failed write would be empty before it had gained a byte.

use std::time::Duration;

use tokio::time::Instant;
use tracing::{info, warn};

use super::directory;
use super::space::{SpaceLimits, UNIT_BYTES};
use super::table::BlockTable;

/// From one lowering of the capacity to the next.
const SETTLE: Duration = Duration::from_secs(5);
/// After a write found no space although the file system shows some (a quota, no inodes), it is not believed for this
/// long.
const DISBELIEF: Duration = Duration::from_secs(300);
/// Share of the file system that is left free, and its bounds.
const HEADROOM_SHARE: u64 = 50;
const HEADROOM_MIN_BYTES: u64 = 1 << 20;
const HEADROOM_MAX_BYTES: u64 = 1 << 30;

/// What shows that space is short.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Sign {
    /// Nothing but the file system's own numbers.
    Free,
    /// A write that found none.
    WriteFailed,
}

impl BlockTable {
    /// Fits the capacity of every directory to its file system. *Blocking*, for a moment.
    pub fn fit_to_file_systems(&self) {
        for position in 0..self.directories.len() {
            self.fit(position, Sign::Free);
        }
    }

    /// A write to a directory found no space.
    pub(super) fn out_of_space(&self, position: usize) {
        self.fit(position, Sign::WriteFailed);
    }

    fn fit(&self, position: usize, sign: Sign) {
        let directory = &self.directories[position];
        if !directory.is_healthy() {
            return;
        }
        let Ok((total, free)) = directory::file_system_bytes(&directory.spec.path) else { return };
        let headroom = (total / HEADROOM_SHARE).clamp(HEADROOM_MIN_BYTES, HEADROOM_MAX_BYTES);
        let now = Instant::now();
        let since = |moment: Option<Instant>| moment.map_or(Duration::MAX, |moment| now.duration_since(moment));
        let mut fitted = directory.fitted.lock();
        let failed = sign == Sign::WriteFailed;
        if failed && free > headroom {
            fitted.disbelieved = Some(now);
        }
        let free = if failed { 0 } else { free };

        let mut residents = self.lock();
        let cache = &mut residents.cache;
        let capacity = cache.spaces[position].limits.capacity * u64::from(UNIT_BYTES);
        let used = cache.spaces[position].used() * u64::from(UNIT_BYTES);
        let affordable = (used + free).saturating_sub(headroom);
        let lower = free < headroom / 2 && affordable < capacity && since(fitted.lowered) > SETTLE;
        // Capacities are whole units: what is in force never equals a configured one that is none.
        let configured = directory.capacity_bytes - directory.capacity_bytes % u64::from(UNIT_BYTES);
        let raised = affordable.min(configured);
        // Not for a few bytes: they come and go with the index.
        let raise = raised > capacity + headroom / 2 || raised == configured && raised > capacity;
        let raise = raise && free > 2 * headroom && since(fitted.disbelieved) > DISBELIEF;
        if !lower && !raise {
            return;
        }
        let target = if lower { affordable } else { raised };
        cache.resize(position, SpaceLimits::new(target, self.high_watermark, self.low_watermark));
        // What cannot go now, because it is held, goes as soon as it can: see `relieve`.
        let _ = cache.make_room(position, 0);
        let evicted = cache.departures.gone.len();
        if lower {
            fitted.lowered = Some(now);
        }
        drop(fitted);
        drop(residents);
        let path = directory.spec.path.display();
        if lower {
            warn!(directory = %path, free, capacity = target, evicted,
                "hardly any space left on the device: going on with less; free some, or set the directory's capacity \
                 in worker.dirs below what the file system has");
        } else {
            info!(directory = %path, free, capacity = target, "there is space on the device again");
        }
    }
}
