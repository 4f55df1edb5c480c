//! The scrubber: reads every block once in a while, slowly, and drops chunks whose checksum is wrong before anybody
//! asks for them.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use cavern_proto::BlockId;
use tokio_util::sync::CancellationToken;

use super::CacheStore;
use crate::store::error::StoreError;
use crate::store::table::Touch;

/// Blocks looked up in the index at a time.
const BATCH: usize = 64;
/// Between two passes over all directories.
const PASS_PAUSE: Duration = Duration::from_secs(60);
/// Read at a time for whoever wants to know which blocks are damaged, beside the last block.
const VERIFIED_BYTES: u64 = 64 << 20;

/// Blocks that were compared with their checksums.
#[derive(Debug, Default)]
pub struct Verified {
    /// How many, and those of which chunks were dropped.
    pub blocks: u64,
    pub damaged: Vec<BlockId>,
    /// The position of a directory, and the key in its index from which on to go on; `None` at the end.
    pub next: Option<(usize, Vec<u8>)>,
}

/// Verifies all directories in turn, for ever, at `bytes_per_second`; returns when `stop` is cancelled. A rate of 0
/// switches it off.
pub(crate) async fn scrub(store: Arc<CacheStore>, bytes_per_second: u64, stop: CancellationToken) {
    if bytes_per_second == 0 {
        return;
    }
    while stop.run_until_cancelled(scrub_once(&store, bytes_per_second)).await.is_some() {
        if stop.run_until_cancelled(tokio::time::sleep(PASS_PAUSE)).await.is_none() {
            return;
        }
    }
}

/// One pass over all directories.
async fn scrub_once(store: &Arc<CacheStore>, bytes_per_second: u64) {
    for position in 0..store.table.directories.len() {
        let mut from = vec![0];
        loop {
            let (work, start) = (store.clone(), from.clone());
            let ids_from = move || work.table.directories[position].index.ids_from(&start, BATCH);
            let Ok(Ok(ids)) = tokio::task::spawn_blocking(ids_from).await else { break };
            let Some(last) = ids.last() else { break };
            // The first key after the last one.
            from = last.to_key().to_vec();
            from.push(0);
            for id in ids {
                let work = store.clone();
                let Ok((bytes, _)) = tokio::task::spawn_blocking(move || work.scrub_block(&id)).await else { return };
                tokio::time::sleep(Duration::from_secs_f64(bytes as f64 / bytes_per_second as f64)).await;
            }
        }
    }
}

impl CacheStore {
    /// Verifies all chunks of a block, whether believed or not, and drops the bad ones; gives the bytes that the
    /// disk was asked for, and whether any was bad. *Blocking*.
    pub(in crate::store) fn scrub_block(&self, id: &BlockId) -> (u64, bool) {
        let Some(block) = self.find(id, Touch::None) else { return (0, false) };
        let present: Vec<u32> = block.state().present.iter().collect();
        // What the disk has to say is in the log.
        let (bytes, _logged) = self.check(&block, present.clone());
        self.table.metrics.scrubbed_bytes.inc_by(bytes);
        let state = block.state();
        (bytes, present.iter().any(|index| !state.present.contains(*index)))
    }

    /// Verifies some blocks from a place on: the position of a directory, and a key of its index. Drops bad chunks.
    /// *Blocking*.
    ///
    /// # Errors
    /// The index cannot be read.
    pub fn verify_some(&self, position: usize, from: Vec<u8>) -> Result<Verified, StoreError> {
        let (mut done, mut bytes) = (Verified::default(), 0);
        let Some(directory) = self.table.directories.get(position) else { return Ok(done) };
        let unread = |error| StoreError::Io { action: "reading the block index", source: io::Error::other(error) };
        let ids = directory.index.ids_from(&from, BATCH).map_err(unread)?;
        done.next = Some((position + 1, vec![0]));
        for id in ids {
            let (read, is_damaged) = self.scrub_block(&id);
            done.blocks += 1;
            done.damaged.extend(is_damaged.then_some(id));
            bytes += read;
            // The first key after this one.
            done.next = Some((position, [&id.to_key()[..], &[0]].concat()));
            if bytes >= VERIFIED_BYTES {
                break;
            }
        }
        Ok(done)
    }
}
