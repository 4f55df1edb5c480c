//! How many bytes the content of a file takes (`st_blocks`): the sum of what its blocks take.

use cavern_proto::block_id::block_length;
use cavern_proto::master::Extent;
use cavern_proto::record::ExtentRecord;

/// What a block takes that somebody has written to; `size` is that of the file with it. Who does not say it leaves it
/// as it was, and a new block counts as full.
pub fn block_takes(known: Option<&ExtentRecord>, made: &Extent, block_size: u64, size: u64) -> Option<u64> {
    let reported = made.allocated.map(|bytes| bytes.min(block_size));
    match known {
        Some(known) => reported.or(known.allocated),
        None => reported.or_else(|| Some(block_length(size, block_size, made.index).into())),
    }
}

/// What a file takes when one of its blocks takes `after`, and what was in its place took `before`; `None` where nobody
/// knows what the others take.
pub fn file_takes(sum: Option<u64>, before: u64, after: Option<u64>) -> Option<u64> {
    sum.map(|sum| sum.saturating_sub(before) + after.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_does_not_say_what_a_block_takes_leaves_it_as_it_was() {
        let taking = |bytes| ExtentRecord { allocated: Some(bytes), ..ExtentRecord::default() };
        let reported = |allocated| Extent { index: 2, allocated, ..Extent::default() };
        assert_eq!(block_takes(None, &reported(Some(7)), 10, 25), Some(7));
        assert_eq!(
            block_takes(None, &reported(Some(70)), 10, 25),
            Some(10),
            "the file system's own needs are not the file's"
        );
        assert_eq!(block_takes(None, &reported(None), 10, 25), Some(5));
        assert_eq!(block_takes(Some(&taking(3)), &reported(None), 10, 25), Some(3));
        assert_eq!(block_takes(Some(&taking(3)), &reported(Some(1)), 10, 25), Some(1));
        assert_eq!(block_takes(Some(&ExtentRecord::default()), &reported(None), 10, 25), None);
    }
}
