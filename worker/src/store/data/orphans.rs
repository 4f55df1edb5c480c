//! Data blocks that no file has.

use std::path::Path;
use std::time::Duration;

use cavern_conf::host;
use cavern_proto::{BlockId, ChunkMap};

use super::DataStore;
use crate::store::directory::{DataName, data_path};
use crate::store::eviction::Cache;
use crate::store::slab::Entry;

impl DataStore {
    /// Some file has these blocks: they are noted by their slots, a bit each, since there may be millions. A slot that
    /// another block has by now keeps that one, until the next look.
    pub fn claim(&self, claims: &mut ChunkMap, blocks: impl Iterator<Item = BlockId>) {
        let residents = self.table.lock();
        claims.extend(blocks.filter_map(|id| residents.cache.slab.find(&id)));
    }

    /// Data blocks that nobody has claimed, nor written to for `rest`, with their incarnations, and the bytes that they
    /// take. *Blocking*.
    pub fn orphans(&self, claims: &ChunkMap, rest: Duration) -> Vec<((BlockId, u64), u64)> {
        let mut found = Vec::new();
        let orphans = |cache: &mut Cache, slot: u32| {
            let entry = cache.slab.at(slot).filter(|entry| entry.data().is_some() && !claims.contains(slot))?;
            let Entry { id, incarnation, length, mount_id, directory, .. } = *entry;
            Some((usize::from(directory), DataName { id, incarnation, mount_id, length }))
        };
        self.table.walk(orphans, |(position, name)| {
            let path = data_path(&self.table.directories[position].spec.path, &name);
            found.extend(bytes_at_rest(&path, rest).map(|bytes| ((name.id, name.incarnation), bytes)));
        });
        found
    }

    /// Frees such a block, if it is still the same and still rests; gives its bytes. *Blocking*.
    pub fn free_orphans(&self, (id, incarnation): (BlockId, u64), rest: Duration) -> Option<u64> {
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
