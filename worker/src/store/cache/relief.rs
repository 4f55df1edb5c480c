//! Which cached blocks go in the background: those of directories above their high watermark, those of mounts above
//! their share of that, and those that their mount does not want any longer.

use super::CacheStore;
use crate::store::discard::WALK_BATCH;

/// Blocks evicted per round towards the low watermark, so that no round holds the lock for long.
const RELIEF_BATCH: usize = 64;

impl CacheStore {
    /// Whether some directory is filled above its high watermark, or by a mount above the share of that.
    pub fn needs_relief(&self) -> bool {
        let residents = self.table.residents.lock();
        (0..self.table.directories.len()).any(|position| residents.cache.needs_relief(position))
    }

    /// Evicts from directories above the high watermark towards the low one, sparing blocks that were just used, and
    /// in the same way what mounts have above their shares of that. *Blocking*. Says whether anything went: if so,
    /// there may be more to do.
    pub fn relieve(&self) -> bool {
        let now = self.table.now();
        let mut any = false;
        for position in 0..self.table.directories.len() {
            let mut evicted = Vec::new();
            {
                let mut residents = self.table.residents.lock();
                residents.cache.relieve(position, now, RELIEF_BATCH, &mut evicted);
                let rejected = std::mem::take(&mut residents.cache.tally).rejected;
                self.table.metrics.admissions_rejected.inc_by(rejected);
            }
            any |= !evicted.is_empty();
            self.table.discard_evicted(evicted);
        }
        any
    }

    /// Marks blocks that were unused for longer than their mount's ttl, in seconds; those go first when room is needed.
    /// Takes the lock for a part of the blocks at a time.
    pub fn expire(&self, ttl_of: impl Fn(u32) -> Option<u32>) {
        let now = self.table.now();
        let mut from = 0;
        loop {
            let mut residents = self.table.residents.lock();
            let cache = &mut residents.cache;
            let until = cache.slab.slot_count().min(from + WALK_BATCH);
            for slot in from..until {
                let Some(entry) = cache.slab.at(slot) else { continue };
                if entry.cached().is_none_or(|cached| cached.expired) {
                    continue;
                }
                let old = ttl_of(entry.mount_id).is_some_and(|ttl| now.saturating_sub(entry.last_used) > ttl);
                if old && !entry.busy() {
                    cache.expire(slot);
                }
            }
            from = until;
            if until == cache.slab.slot_count() {
                return;
            }
        }
    }
}
