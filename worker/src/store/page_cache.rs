//! What the page cache has of a file. The only unsafe code of the stores.

#![allow(unsafe_code)]

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd as _;

/// `cachestat(2)`, since Linux 6.5. Younger than the numbers that are those of one architecture only.
const CACHESTAT: libc::c_long = 451;

/// Whether the page cache has all pages of these bytes; some may still be on their way from the disk. `false` also
/// where the kernel does not tell: it is older than Linux 6.5, or a filter of system calls is in between.
pub(super) fn has_pages(file: &File, bytes: &Range<u32>) -> bool {
    // SAFETY: it reads a number that never changes.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    let page = u64::try_from(page).unwrap_or(0).max(1);
    let (first, end) = (u64::from(bytes.start) / page, u64::from(bytes.end).div_ceil(page));
    // Offset and length, in bytes.
    let asked: [u64; 2] = [first * page, (end - first) * page];
    // Pages: cached, dirty, under write-back, evicted, recently evicted.
    let mut counts = [0u64; 5];
    // SAFETY: the kernel reads a `struct cachestat_range`, which is two numbers of 64 bits, and writes a
    // `struct cachestat`, which is five. The descriptor is open, and 0 is the only value for flags.
    let answer = unsafe { libc::syscall(CACHESTAT, file.as_raw_fd(), &raw const asked, &raw mut counts, 0_u32) };
    answer == 0 && counts[0] >= end - first
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn pages_are_counted_from_the_first_byte_to_the_last() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[1; 100_000]).unwrap();
        if !has_pages(&file, &(0..100_000)) {
            // A kernel that does not tell: nothing is sent so.
            assert!(!has_pages(&file, &(0..1)));
            return;
        }
        assert!(has_pages(&file, &(99_999..100_000)) && has_pages(&file, &(70_001..70_002)));
        assert!(!has_pages(&file, &(0..300_000)), "the file ends before");
        assert!(!has_pages(&file, &(200_000..300_000)));
    }
}
