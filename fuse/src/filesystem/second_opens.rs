//! Opens that the kernel tries a second time.
//!
//! An open that finds its version gone is answered with `ESTALE`. The kernel then looks the whole path up and opens what
//! it leads to, once and no third time: an object that is replaced again between these two would show its reader an error.
//! So for a moment after such an answer a lookup opens the file itself, following replacements until one stays, and the
//! open that comes next gets the file that is open already.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use cavern_client::OpenFile;
use parking_lot::Mutex;

/// For how long after an `ESTALE` its second open is expected, and for how long an open file is kept for it.
const MOMENT: Duration = Duration::from_secs(2);
/// Files that are kept at a time; beyond that the oldest go.
const FILES_MAX: usize = 64;

pub struct SecondOpens {
    epoch: Instant,
    /// Until when they are expected, in milliseconds since `epoch`.
    until: AtomicU64,
    files: Mutex<Vec<(Instant, Arc<OpenFile>)>>,
}

impl Default for SecondOpens {
    fn default() -> Self {
        Self { epoch: Instant::now(), until: AtomicU64::new(0), files: Mutex::default() }
    }
}

impl SecondOpens {
    /// An open is about to be answered with `ESTALE`.
    pub fn expect(&self) {
        self.until.fetch_max((self.epoch.elapsed() + MOMENT).as_millis() as u64, Relaxed);
    }

    pub fn are_expected(&self) -> bool {
        let until = self.until.load(Relaxed);
        until != 0 && (self.epoch.elapsed().as_millis() as u64) < until
    }

    /// Keeps a file for the open that comes next.
    pub fn keep(&self, file: Arc<OpenFile>) {
        let mut files = self.files.lock();
        files.retain(|(_, kept)| kept.node().inode != file.node().inode);
        if files.len() == FILES_MAX {
            files.remove(0);
        }
        files.push((Instant::now(), file));
    }

    /// The file that is kept for an inode of the namespace.
    pub fn file(&self, inode: u64) -> Option<Arc<OpenFile>> {
        if !self.are_expected() {
            return None;
        }
        let files = self.files.lock();
        files.iter().find(|(_, file)| file.node().inode == inode).map(|(_, file)| Arc::clone(file))
    }

    /// Closes what was kept and not asked for.
    pub fn sweep(&self) {
        let dropped: Vec<_> = self.files.lock().extract_if(.., |(since, _)| since.elapsed() > MOMENT).collect();
        drop(dropped);
    }
}
