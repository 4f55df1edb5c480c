//! Whether bytes of a file are in the page cache. The only unsafe code of this crate.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The number of cachestat(2) on all architectures; since Linux 6.5.
const SYS_CACHESTAT: libc::c_long = 451;

/// The kernel's `struct cachestat_range`, in bytes.
#[repr(C)]
struct CachestatRange {
    offset: u64,
    length: u64,
}

/// The kernel's `struct cachestat`, in pages.
#[repr(C)]
#[derive(Default)]
struct Cachestat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Whether every page of these bytes is in the page cache; also `false` where the kernel does not tell. A page that is
/// just being read counts.
pub(super) fn is_cached(file: &File, offset: u64, length: u64) -> bool {
    static IS_MISSING: AtomicBool = AtomicBool::new(false);
    static PAGE_BYTES: LazyLock<u64> = LazyLock::new(|| {
        // SAFETY: takes and gives a number.
        let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        u64::try_from(bytes).ok().filter(|bytes| *bytes > 0).unwrap_or(4096)
    });
    if length == 0 || IS_MISSING.load(Relaxed) {
        return length == 0;
    }
    let (range, mut found) = (CachestatRange { offset, length }, Cachestat::default());
    // SAFETY: both point to structures of the layout that the kernel documents, which live beyond the call; it reads
    // the first one and writes the second one. The descriptor is open for as long as `file` is borrowed.
    let result = unsafe { libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut found, 0u32) };
    if result != 0 {
        IS_MISSING.store(std::io::Error::last_os_error().raw_os_error() == Some(libc::ENOSYS), Relaxed);
        return false;
    }
    let pages = (offset + length - 1) / *PAGE_BYTES - offset / *PAGE_BYTES + 1;
    found.cached >= pages
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use super::*;

    #[test]
    fn what_was_written_is_in_memory_and_what_is_beyond_the_end_is_not() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[7; 300_000], 0).unwrap();
        if !is_cached(&file, 0, 1) {
            return eprintln!("left out: the kernel has no cachestat(2)");
        }
        assert!(is_cached(&file, 0, 300_000) && is_cached(&file, 4095, 2) && is_cached(&file, 299_999, 1));
        assert!(!is_cached(&file, 299_999, 100_000) && !is_cached(&file, 1 << 30, 1));
        assert!(is_cached(&file, 1 << 30, 0));
    }
}
