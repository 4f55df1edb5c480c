//! Which cached blocks go in the background: those of directories above their high watermark, those of mounts above
//! their share of that, and those that their mount does not want any longer.

use super::CacheStore;
use crate::store::eviction::Cache;

/// Blocks evicted per round towards the low watermark, so that no round holds the lock for long.
const RELIEF_BATCH: usize = 64;

impl CacheStore {
    /// Whether some directory is filled above its high watermark, or by a mount above the share of that.
    pub fn needs_relief(&self) -> bool {
        let residents = self.table.lock();
        (0..self.table.directories.len()).any(|position| residents.cache.needs_relief(position))
    }

    /// Evicts from directories above the high watermark towards the low one, sparing blocks that were just used, and
    /// in the same way what mounts have above their shares of that. *Blocking*. Says whether anything went: if so,
    /// there may be more to do.
    pub fn relieve(&self) -> bool {
        let mut any = false;
        for position in 0..self.table.directories.len() {
            let mut residents = self.table.lock();
            residents.cache.relieve(position, RELIEF_BATCH);
            any |= !residents.cache.departures.gone.is_empty();
        }
        any
    }

    /// Marks blocks that were unused for longer than their mount's ttl, in seconds; those go first when room is needed.
    /// Takes the lock for a part of the blocks at a time.
    pub fn expire(&self, ttl_of: impl Fn(u32) -> Option<u32>) {
        let expire = |cache: &mut Cache, slot: u32| {
            let entry = cache.slab.at(slot).filter(|entry| entry.cached().is_some() && !entry.is_expired())?;
            let age = cache.now.saturating_sub(entry.last_used);
            if age > ttl_of(entry.mount_id)? && !entry.busy() {
                cache.expire(slot);
            }
            None::<()>
        };
        self.table.walk(expire, drop);
    }
}
