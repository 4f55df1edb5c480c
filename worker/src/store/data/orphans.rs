//! Data blocks that no file has.

use std::path::Path;
use std::time::Duration;

use cavern_conf::host;
use cavern_proto::BlockId;

use super::DataStore;
use crate::store::eviction::Cache;

/// Blocks that are to be kept, by their slots: a bit each, since there may be millions. A slot that another block has
/// by now keeps that one, until the next look.
#[derive(Debug, Default)]
pub struct ReferencedBlocks(Vec<u64>);

impl ReferencedBlocks {
    fn add(&mut self, slot: u32) {
        let word = slot as usize / 64;
        if word >= self.0.len() {
            self.0.resize(word + 1, 0);
        }
        self.0[word] |= 1 << (slot % 64);
    }

    fn has(&self, slot: u32) -> bool {
        self.0.get(slot as usize / 64).is_some_and(|word| word & 1 << (slot % 64) != 0)
    }
}

impl DataStore {
    /// Some file has these blocks.
    pub fn claim(&self, claims: &mut ReferencedBlocks, blocks: impl Iterator<Item = BlockId>) {
        let residents = self.table.lock();
        for id in blocks {
            if let Some(slot) = residents.cache.slab.find(&id) {
                claims.add(slot);
            }
        }
    }

    /// Data blocks that nobody has claimed, nor written to for `rest`, with their incarnations, and the bytes that they
    /// take. *Blocking*.
    pub fn unclaimed(&self, claims: &ReferencedBlocks, rest: Duration) -> Vec<((BlockId, u64), u64)> {
        let mut found = Vec::new();
        let unclaimed = |cache: &mut Cache, slot: u32| {
            let entry = cache.slab.at(slot).filter(|entry| entry.data().is_some() && !claims.has(slot))?;
            Some(self.table.place(entry))
        };
        self.table.walk(unclaimed, |place| {
            found.extend(bytes_at_rest(&place.path, rest).map(|bytes| ((place.id, place.incarnation), bytes)));
        });
        found
    }

    /// Frees such a block, if it is still the same and still rests; gives its bytes. *Blocking*.
    pub fn free_unclaimed(&self, (id, incarnation): (BlockId, u64), rest: Duration) -> Option<u64> {
        self.free_if(&id, |place| place.incarnation == incarnation && bytes_at_rest(&place.path, rest).is_some())
    }
}

/// The bytes that a file takes which was neither written to nor put there for so long. What cannot be determined is
/// none.
fn bytes_at_rest(path: &Path, rest: Duration) -> Option<u64> {
    use std::os::unix::fs::MetadataExt as _;

    let stat = std::fs::symlink_metadata(path).ok()?;
    let since = u64::try_from(stat.mtime().max(stat.ctime())).unwrap_or(u64::MAX);
    // A change of this very second counts as one of its end.
    let now = u64::try_from(host::wall_ns() / 1_000_000_000).ok()?;
    (now.saturating_sub(since) > rest.as_secs()).then(|| stat.blocks() * 512)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_are_of_their_slots_alone() {
        let mut claims = ReferencedBlocks::default();
        for slot in [0, 63, 64, 1_000_000] {
            assert!(!claims.has(slot));
            claims.add(slot);
        }
        let claimed: Vec<u32> = (0..1_000_100).filter(|slot| claims.has(*slot)).collect();
        assert_eq!(claimed, [0, 63, 64, 1_000_000]);
    }
}
