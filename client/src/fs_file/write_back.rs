//! The way of written bytes to the disk, while more are coming: whoever syncs a long file at its end waits for the last
//! of it alone, and not for all. The only unsafe code of this crate.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use tokio::runtime::Handle;

/// Shorter writes are no stream: the next one may be to the same place.
const STREAMED_MIN: usize = 64 << 10;
/// The disk gets so much at a time.
const AT_ONCE: u64 = 8 << 20;

/// Bytes of a block that were streamed and are not on their way to the disk.
#[derive(Debug, Default)]
pub(super) struct Streamed(AtomicU64);

impl Streamed {
    /// So many more were written in one piece; says whether it is time to send them on their way.
    fn add(&self, bytes: usize) -> bool {
        if bytes < STREAMED_MIN {
            return false;
        }
        let streamed = self.0.fetch_add(bytes as u64, Relaxed) + bytes as u64;
        streamed >= AT_ONCE && self.0.compare_exchange(streamed, 0, Relaxed, Relaxed).is_ok()
    }

    /// So many bytes were written in one piece to the files that the block has on this host. Waits for nothing.
    pub(super) fn wrote<'a>(&self, bytes: usize, files: impl Iterator<Item = &'a Arc<File>>, runtime: &Handle) {
        if self.add(bytes) {
            let files: Vec<_> = files.cloned().collect();
            // The disk's queue may be full.
            drop(runtime.spawn_blocking(move || files.iter().for_each(begin_write_back)));
        }
    }
}

/// The kernel begins to write what is in its cache of the file. What cannot be written is told by the sync that needs
/// it.
fn begin_write_back(file: &Arc<File>) {
    // SAFETY: it takes numbers alone, and the descriptor is open for as long as `file` is.
    let _begun = unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE) };
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Seek as _, Write as _};

    use super::*;

    #[test]
    fn only_what_is_written_in_large_pieces_is_on_its_way_at_once() {
        let streamed = Streamed::default();
        assert!((0..100_000).all(|_| !streamed.add(4096)));
        assert!((0..7).all(|_| !streamed.add(1 << 20)));
        assert!(streamed.add(1 << 20) && !streamed.add(1 << 20), "and the next is counted from there on");
    }

    #[test]
    fn what_is_on_its_way_is_what_was_written() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 100_000]).unwrap();
        begin_write_back(&Arc::new(file.try_clone().unwrap()));
        file.rewind().unwrap();
        let mut read = Vec::new();
        file.read_to_end(&mut read).unwrap();
        assert!(read == [7; 100_000]);
    }
}
