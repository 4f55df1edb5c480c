//! What of its log a master keeps when a snapshot takes the place of its state: how it voted, who it is, and the
//! entries behind the snapshot. Those that the snapshot covers are purged.

use cavern_state::{Database, Family};
use rocksdb::{Direction, IteratorMode, WriteBatch};

use super::{PURGED_KEY, purged};
use crate::error::Result;
use crate::types::{LogId, to_json};

/// Bytes of one batch.
const BATCH_BYTES: usize = 4 << 20;

/// Copies it into a database without a log, on disk when this returns. Nobody writes to the log meanwhile. *Blocking*.
pub fn carry_over(from: &Database, to: &Database, covered: Option<LogId>) -> Result {
    let begin = covered.map_or(0, |covered| covered.index.saturating_add(1));
    let mut batch = WriteBatch::default();
    for (family, start) in [(Family::RaftMeta, Vec::new()), (Family::RaftLog, begin.to_be_bytes().to_vec())] {
        let mode = IteratorMode::From(&start, Direction::Forward);
        for item in from.raw().iterator_cf(from.family(family), mode) {
            let (key, value) = item?;
            batch.put_cf(to.family(family), key, value);
            if batch.size_in_bytes() >= BATCH_BYTES {
                to.write(std::mem::take(&mut batch))?;
            }
        }
    }
    if let Some(covered) = covered
        && purged(from)?.is_none_or(|purged| purged < covered.index)
    {
        batch.put_cf(to.family(Family::RaftMeta), PURGED_KEY, to_json(&covered, "a log id")?);
    }
    Ok(to.write_synced(batch)?)
}
