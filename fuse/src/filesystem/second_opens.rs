//! Opens that the kernel tries a second time.
//!
//! An open that finds its version gone is answered with `ESTALE`. The kernel then looks the whole path up and opens what
//! it leads to, once and no third time: an object that is replaced again between these two would show its reader an error.
//! So for a moment after such an answer a lookup of that name opens the file itself, following replacements until one stays,
//! and the open that comes next gets the file that is open already.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use cavern_client::{Node, OpenFile};
use parking_lot::Mutex;

/// For how long after an `ESTALE` its second open is expected, and for how long an open file is kept for it.
const MOMENT: Duration = Duration::from_secs(2);
/// Names and files that are kept at a time; beyond that the oldest go.
const KEPT_MAX: usize = 64;

#[derive(Default)]
pub struct SecondOpens {
    /// Whether there is anything here: all but a few lookups and opens look no further.
    is_used: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    expected: Vec<(Instant, Expected)>,
    files: Vec<(Instant, Arc<OpenFile>)>,
}

#[derive(PartialEq, Eq)]
enum Expected {
    /// Below a directory, an inode of the namespace.
    Name(u64, Box<[u8]>),
    /// The name of what could not be opened was not known.
    Any,
}

impl SecondOpens {
    /// An open of `node` (`None` when it was not known any more) is about to be answered with `ESTALE`.
    pub fn expect(&self, node: Option<&Node>) {
        let expected = node.map_or(Expected::Any, |node| Expected::Name(node.parent, node.name.clone()));
        let mut state = self.state.lock();
        state.expected.retain(|(_, known)| *known != expected);
        if state.expected.len() == KEPT_MAX {
            state.expected.remove(0);
        }
        state.expected.push((Instant::now(), expected));
        self.is_used.store(true, Relaxed);
    }

    /// Whether a lookup of a name is to open what it finds.
    pub fn is_expected(&self, parent: u64, name: &[u8]) -> bool {
        let is_meant = |expected: &Expected| match expected {
            Expected::Name(known_parent, known) => *known_parent == parent && **known == *name,
            Expected::Any => true,
        };
        self.is_used.load(Relaxed)
            && self.state.lock().expected.iter().any(|(since, expected)| since.elapsed() < MOMENT && is_meant(expected))
    }

    /// Keeps a file for the open that comes next.
    pub fn keep(&self, file: Arc<OpenFile>) {
        let files = &mut self.state.lock().files;
        files.retain(|(_, kept)| kept.node().inode != file.node().inode);
        if files.len() == KEPT_MAX {
            files.remove(0);
        }
        files.push((Instant::now(), file));
    }

    /// The file that is kept for an inode of the namespace.
    pub fn file(&self, inode: u64) -> Option<Arc<OpenFile>> {
        if !self.is_used.load(Relaxed) {
            return None;
        }
        let state = self.state.lock();
        let kept = state.files.iter().find(|(since, file)| since.elapsed() < MOMENT && file.node().inode == inode);
        kept.map(|(_, file)| Arc::clone(file))
    }

    /// Closes what was kept and not asked for.
    pub fn sweep(&self) {
        let mut state = self.state.lock();
        state.expected.retain(|(since, _)| since.elapsed() < MOMENT);
        let dropped: Vec<_> = state.files.extract_if(.., |(since, _)| since.elapsed() >= MOMENT).collect();
        self.is_used.store(!state.expected.is_empty() || !state.files.is_empty(), Relaxed);
        drop(state);
        // Without the lock, since the last close may take a while.
        drop(dropped);
    }
}
