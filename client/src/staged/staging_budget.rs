//! Where staged bytes lie: nameless files of `client.staging_directory`, which end with the process however it ends,
//! and the room that they may take together.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use prometheus_client::metrics::gauge::Gauge;
use rustix::fs::{FallocateFlags, Mode, OFlags, fallocate, open};
use rustix::io::Errno;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Names of files that get one for a moment.
static NUMBER: AtomicU64 = AtomicU64::new(0);

/// A file without a name.
pub(super) fn nameless_file(directory: &Path) -> io::Result<File> {
    let mode = Mode::RUSR | Mode::WUSR;
    match open(directory, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, mode) {
        Ok(file) => Ok(File::from(file)),
        // Not every file system can do it at once.
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {
            let path = named(directory);
            let file: OwnedFd = open(&path, OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC, mode)?;
            std::fs::remove_file(&path)?;
            Ok(File::from(file))
        }
        Err(cause) => Err(cause.into()),
    }
}

fn named(directory: &Path) -> PathBuf {
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    directory.join(format!(".cavern-staged-{}-{number}", std::process::id()))
}

/// Gives the room of a range back to the file system, where that can be done.
pub(super) fn punch(file: &File, range: &Range<u64>) -> io::Result<()> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(fallocate(file, flags, range.start, range.end - range.start)?)
}

/// The bytes that may be staged, of all files together.
#[derive(Debug)]
pub(super) struct StagingBudget {
    limit: u64,
    used: Mutex<u64>,
    /// Shows `used`.
    shown: Gauge,
    given: Notify,
}

impl StagingBudget {
    pub fn new(limit: u64, shown: Gauge) -> Self {
        Self { limit, used: Mutex::new(0), shown, given: Notify::new() }
    }

    /// Takes room, if there is so much.
    pub fn try_take(&self, bytes: u64) -> bool {
        let mut used = self.used.lock();
        let fits = used.saturating_add(bytes) <= self.limit;
        if fits {
            *used += bytes;
            self.shown.set(used.cast_signed());
        }
        fits
    }

    /// Takes room as soon as there is so much; false when there was not until the deadline.
    pub async fn take(&self, bytes: u64, deadline: Instant) -> bool {
        loop {
            let given = self.given.notified();
            if self.try_take(bytes) {
                return true;
            }
            if tokio::time::timeout_at(deadline, given).await.is_err() {
                return self.try_take(bytes);
            }
        }
    }

    pub fn give(&self, bytes: u64) {
        if bytes > 0 {
            let mut used = self.used.lock();
            *used = used.saturating_sub(bytes);
            self.shown.set(used.cast_signed());
            drop(used);
            self.given.notify_waiters();
        }
    }

    /// Whether what can be done without should go.
    pub fn is_scarce(&self) -> bool {
        *self.used.lock() > self.limit / 2
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::time::Duration;

    use super::*;

    #[test]
    fn staged_files_have_no_name() {
        let directory = tempfile::tempdir().unwrap();
        let file = nameless_file(directory.path()).unwrap();
        file.write_all_at(b"staged", 4096).unwrap();
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
        punch(&file, &(4096..8192)).unwrap();
        let mut bytes = [1; 6];
        file.read_exact_at(&mut bytes, 4096).unwrap();
        assert_eq!(bytes, [0; 6]);
        assert!(nameless_file(&directory.path().join("none")).is_err());
    }

    #[tokio::test]
    async fn who_waits_for_room_gets_it_or_hears_that_there_is_none() {
        let room = std::sync::Arc::new(StagingBudget::new(100, Gauge::default()));
        assert!(room.try_take(60) && !room.try_take(41) && room.is_scarce());
        let soon = || Instant::now() + Duration::from_millis(5);
        assert!(!room.take(50, soon()).await);
        let waiting = tokio::spawn({
            let room = room.clone();
            async move { room.take(50, Instant::now() + Duration::from_secs(60)).await }
        });
        tokio::task::yield_now().await;
        room.give(20);
        assert!(waiting.await.unwrap());
        room.give(90);
        assert!(!room.is_scarce());
    }
}
