//! How many bytes the content of a file takes: those that its extents take, and where no extent is, those that its
//! origin has.
//!
//! A client that writes to a block reports with the commit how much it takes at a worker. The sum is kept in the
//! inode's record, so that no command has to go through all blocks of a file; each change of blocks is accounted for as
//! it is made. Of a file from which very many blocks were cut off at once there is no sum until nothing of it is left.

use cavern_posix::file_takes;
use cavern_proto::block_id::block_length;
use cavern_proto::record::{ExtentRecord, InodeRecord};

/// The unit in which file systems give room to files.
const PAGE_BYTES: u64 = 4096;

/// Bytes of the origin that lie in a block.
fn of_origin(record: &InodeRecord, block_size: u64, index: u32) -> u64 {
    record.origin.as_ref().map_or(0, |origin| block_length(origin.valid, block_size, index).into())
}

/// Accounts for a block that is committed.
pub fn committed(
    record: &mut InodeRecord,
    index: u32,
    known: Option<&ExtentRecord>,
    after: &ExtentRecord,
    block_size: u64,
) {
    let before = match known {
        Some(known) => known.allocated.unwrap_or_default(),
        None => of_origin(record, block_size, index),
    };
    record.allocated = file_takes(record.allocated, before, after.allocated);
}

/// Accounts for a cut to `length` bytes: the blocks that were dropped with what they took, and the one in which the
/// file ends now, if it has an extent; of a file that was emptied, the one that it keeps. What lies behind the end
/// there is of no content. The origin of the record is that of before.
pub fn cut(
    record: &mut InodeRecord,
    length: u64,
    block_size: u64,
    dropped: &[(u32, u64)],
    last: Option<&mut ExtentRecord>,
) {
    if length == 0 {
        record.allocated = Some(0);
        if let Some(last) = last {
            last.allocated = Some(0);
        }
        return;
    }
    let valid = record.origin.as_ref().map_or(0, |origin| origin.valid);
    let cut_off = |index: u32| {
        let start = u64::from(index) * block_size;
        valid.min(start + block_size).saturating_sub(length.max(start))
    };
    let ends_in = u32::try_from(length / block_size).unwrap_or(u32::MAX);
    let mut hidden: u64 = dropped.iter().map(|(index, _)| cut_off(*index)).sum();
    let mut less: u64 = dropped.iter().map(|(_, bytes)| *bytes).sum();
    if let Some(last) = last {
        hidden += cut_off(ends_in);
        let before = last.allocated.unwrap_or_default();
        let most = (length % block_size).next_multiple_of(PAGE_BYTES);
        last.allocated = last.allocated.map(|bytes| bytes.min(most));
        less += before - last.allocated.unwrap_or_default();
    }
    less += valid.saturating_sub(length).saturating_sub(hidden);
    record.allocated = record.allocated.map(|sum| sum.saturating_sub(less));
}

#[cfg(test)]
mod tests {
    use cavern_proto::master::Origin;

    use super::*;

    fn taking(bytes: u64) -> ExtentRecord {
        ExtentRecord { allocated: Some(bytes), ..ExtentRecord::default() }
    }

    fn file(allocated: u64, valid: u64) -> InodeRecord {
        let origin = Origin { valid, ..Origin::default() };
        InodeRecord { allocated: Some(allocated), origin: (valid > 0).then_some(origin), ..InodeRecord::default() }
    }

    #[test]
    fn blocks_take_the_place_of_the_origin() {
        let mut record = file(25, 25);
        committed(&mut record, 2, None, &taking(4), 10);
        assert_eq!(record.allocated, Some(24));
        committed(&mut record, 2, Some(&taking(4)), &taking(9), 10);
        committed(&mut record, 3, None, &taking(6), 10);
        assert_eq!(record.allocated, Some(35));
        record.allocated = None;
        committed(&mut record, 4, None, &taking(6), 10);
        assert_eq!(record.allocated, None, "nobody knows what the others take");
    }

    #[test]
    fn a_cut_takes_away_what_was_dropped_and_what_the_origin_had() {
        const BLOCK: u64 = 4 * PAGE_BYTES;
        let mut record = file(3 * BLOCK, 0);
        cut(&mut record, BLOCK, BLOCK, &[(1, BLOCK), (2, BLOCK)], None);
        assert_eq!(record.allocated, Some(BLOCK));
        let mut last = taking(BLOCK);
        cut(&mut record, 5, BLOCK, &[], Some(&mut last));
        assert_eq!((record.allocated, last.allocated), (Some(PAGE_BYTES), Some(PAGE_BYTES)));

        // Blocks 0 and 2 are the origin's, 1 and 3 are not.
        let mut record = file(2 * BLOCK + 100 + 200, 3 * BLOCK);
        let mut last = taking(100);
        cut(&mut record, BLOCK + 1, BLOCK, &[(3, 200)], Some(&mut last));
        assert_eq!((record.allocated, last.allocated), (Some(BLOCK + 100), Some(100)));
        let mut record = file(2 * BLOCK + 100, 2 * BLOCK + 7);
        cut(&mut record, 2 * BLOCK + 3, BLOCK, &[(3, 93)], None);
        assert_eq!(record.allocated, Some(2 * BLOCK + 100 - 93 - 4));
        cut(&mut record, 0, BLOCK, &[], None);
        assert_eq!(record.allocated, Some(0));
        let (mut record, mut kept) = (file(BLOCK, 0), taking(BLOCK));
        cut(&mut record, 0, BLOCK, &[], Some(&mut kept));
        assert_eq!((record.allocated, kept.allocated), (Some(0), Some(0)));
    }
}
