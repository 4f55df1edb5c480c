//! What clients have asked for in each mount: how much of it was here, and how much had to be fetched first.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cavern_proto::master::MountHits;
use parking_lot::RwLock;

/// Mounts that are told apart. Whoever asks names the mount: there must not be any number of them.
const MOUNTS_MAX: usize = 1000;

/// Bytes of one mount since the process started.
#[derive(Debug, Default)]
struct Bytes {
    hit: AtomicU64,
    missed: AtomicU64,
}

/// By mount.
#[derive(Debug, Default)]
pub struct HitCounters(RwLock<HashMap<u32, Arc<Bytes>>>);

impl HitCounters {
    /// So many bytes were asked for that were here, and so many that were not.
    pub fn count(&self, mount_id: u32, hit_bytes: u64, missed_bytes: u64) {
        let known = self.0.read().get(&mount_id).cloned();
        if let Some(bytes) = known.or_else(|| self.begin(mount_id)) {
            bytes.hit.fetch_add(hit_bytes, Ordering::Relaxed);
            bytes.missed.fetch_add(missed_bytes, Ordering::Relaxed);
        }
    }

    /// `None` where there are too many.
    fn begin(&self, mount_id: u32) -> Option<Arc<Bytes>> {
        let mut mounts = self.0.write();
        let has_room = mounts.len() < MOUNTS_MAX || mounts.contains_key(&mount_id);
        has_room.then(|| mounts.entry(mount_id).or_default().clone())
    }

    /// Forgets mounts that are gone.
    pub fn retain(&self, is_mounted: impl Fn(u32) -> bool) {
        self.0.write().retain(|mount_id, _| is_mounted(*mount_id));
    }

    /// All of them, as a heartbeat has them.
    pub fn all(&self) -> Vec<MountHits> {
        let hits = |(mount_id, bytes): (&u32, &Arc<Bytes>)| MountHits {
            mount_id: *mount_id,
            hit_bytes: bytes.hit.load(Ordering::Relaxed),
            miss_bytes: bytes.missed.load(Ordering::Relaxed),
        };
        self.0.read().iter().map(hits).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_counted_apart_and_not_without_end() {
        let counters = HitCounters::default();
        counters.count(7, 10, 0);
        counters.count(7, 5, 3);
        (100..100 + MOUNTS_MAX as u32).for_each(|mount_id| counters.count(mount_id, 1, 0));
        counters.count(7, 1, 0);
        let all = counters.all();
        assert_eq!(all.len(), MOUNTS_MAX);
        assert!(all.contains(&MountHits { mount_id: 7, hit_bytes: 16, miss_bytes: 3 }), "{all:?}");
        let last = 100 + MOUNTS_MAX as u32 - 1;
        assert!(all.iter().all(|hits| hits.mount_id < last), "the last one is one too many");
        counters.retain(|mount_id| mount_id == 7);
        counters.count(last, 1, 2);
        let mut ids: Vec<u32> = counters.all().into_iter().map(|hits| hits.mount_id).collect();
        ids.sort_unstable();
        assert_eq!(ids, [7, last], "mounts that are gone leave their places");
    }
}
