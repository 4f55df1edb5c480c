//! Opens that the kernel tries a second time.
//!
//! An open that finds its version gone is answered with `ESTALE`. The kernel then looks the whole path up and opens
//! what it leads to, once and no third time: an object that is replaced again between these two would show its reader
//! an error. So for a moment after such an answer a lookup of that name opens the file itself, following replacements
//! until one stays, and the open that comes next gets the file that is open already. A file of an fs-mode mount that
//! is open stays what it is, so nobody can remove it between the two. A thread that opens for writing
//! gets a name that leads to the file that is written, since its next open of an inode that is only read would be
//! answered with `ESTALE` again. The kernel may let the lookup of another thread answer for it, so where the name is
//! still known, it is made to lead there for all.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use cavern_client::{File, Node};
use parking_lot::Mutex;
use quick_cache::sync::Cache;
use tokio::time::Instant;

/// For how long after an `ESTALE` its second open is expected, and for how long an open file is kept for it.
const MOMENT: Duration = Duration::from_secs(2);
/// Names and files that are kept at a time; beyond that the oldest go.
const KEPT_MAX: usize = 64;
/// Names that are remembered at a time.
const NAMES_MAX: usize = 1024;

#[derive(Default)]
pub struct EstaleRetries {
    /// Whether there is anything here: all but a few lookups and opens look no further.
    is_used: AtomicBool,
    state: Mutex<State>,
    names: RecentNames,
}

/// Directory and name of files that a lookup has answered lately, by inode: of those only whose inode goes when they
/// are written to.
struct RecentNames(Cache<u64, (u64, Box<[u8]>)>);

impl Default for RecentNames {
    fn default() -> Self {
        Self(Cache::new(NAMES_MAX))
    }
}

#[derive(Default)]
struct State {
    expected: Vec<(Instant, ExpectedOpen)>,
    files: Vec<(Instant, Arc<Node>, File)>,
}

#[derive(PartialEq, Eq)]
enum ExpectedOpen {
    /// Below a directory, an inode of the namespace.
    Name(u64, Box<[u8]>),
    /// The name of what could not be opened was not known.
    Any,
    /// By this thread, for writing, and its name was not known either.
    Writer(u32),
}

/// What a lookup is to do besides.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum LookupHint {
    Nothing,
    /// Open what it finds.
    Reader,
    /// Have what it finds written to.
    Writer,
}

impl EstaleRetries {
    /// A lookup is about to be answered with a node.
    pub fn note_name(&self, node: &Node) {
        if node.moves_when_written() {
            self.names.0.insert(node.inode, (node.parent, node.name.clone()));
        }
    }

    /// Something that had a name has another one.
    pub fn forget_name(&self, parent: u64, name: &[u8]) {
        self.names.0.retain(|_, (known_parent, known)| *known_parent != parent || **known != *name);
    }

    /// The directory and the name that led to an inode, if that was lately.
    pub fn name_of(&self, inode: u64) -> Option<(u64, Box<[u8]>)> {
        self.names.0.get(&inode)
    }

    /// An open of `node` (`None` when it was not known any more) is about to be answered with `ESTALE`.
    pub fn expect(&self, node: Option<&Node>) {
        self.add(node.map_or(ExpectedOpen::Any, |node| ExpectedOpen::Name(node.parent, node.name.clone())));
    }

    /// An open for writing of what was not known any more is about to be answered with `ESTALE`.
    pub fn expect_writer(&self, thread: u32) {
        self.add(ExpectedOpen::Writer(thread));
    }

    fn add(&self, expected: ExpectedOpen) {
        let mut state = self.state.lock();
        state.expected.retain(|(_, known)| *known != expected);
        if state.expected.len() == KEPT_MAX {
            state.expected.remove(0);
        }
        state.expected.push((Instant::now(), expected));
        self.is_used.store(true, Relaxed);
    }

    /// What a lookup of a name by a thread is to do.
    pub fn expecting(&self, parent: u64, name: &[u8], thread: u32) -> LookupHint {
        let meaning = |expected: &ExpectedOpen| match expected {
            ExpectedOpen::Name(known_parent, known) if *known_parent == parent && **known == *name => {
                LookupHint::Reader
            }
            ExpectedOpen::Any => LookupHint::Reader,
            ExpectedOpen::Writer(known) if *known == thread => LookupHint::Writer,
            ExpectedOpen::Name(..) | ExpectedOpen::Writer(_) => LookupHint::Nothing,
        };
        if !self.is_used.load(Relaxed) {
            return LookupHint::Nothing;
        }
        let state = self.state.lock();
        let recent = state.expected.iter().filter(|(since, _)| since.elapsed() < MOMENT);
        recent.map(|(_, expected)| meaning(expected)).max().unwrap_or(LookupHint::Nothing)
    }

    /// A thread has been given what it is to write to.
    pub fn writer_arrived(&self, thread: u32) {
        if !self.is_used.load(Relaxed) {
            return;
        }
        self.state.lock().expected.retain(|(_, known)| *known != ExpectedOpen::Writer(thread));
    }

    /// Keeps a file for the open that comes next, if it is one version of an object, or of an fs-mode mount: what is
    /// being written here stays by itself.
    pub fn keep(&self, node: &Arc<Node>, file: File) {
        if file.version_node().is_none() && !node.is_fs_mode() {
            return;
        }
        let files = &mut self.state.lock().files;
        files.retain(|(_, _, kept)| kept.inode() != file.inode());
        if files.len() == KEPT_MAX {
            files.remove(0);
        }
        files.push((Instant::now(), Arc::clone(node), file));
    }

    /// The file that is kept for an inode of the namespace.
    pub fn file(&self, inode: u64) -> Option<(Arc<Node>, File)> {
        if !self.is_used.load(Relaxed) {
            return None;
        }
        let state = self.state.lock();
        let kept = state.files.iter().find(|(since, _, file)| since.elapsed() < MOMENT && file.inode() == inode);
        kept.map(|(_, node, file)| (Arc::clone(node), file.clone()))
    }

    /// Closes what was kept and not asked for.
    pub fn sweep(&self) {
        let mut state = self.state.lock();
        state.expected.retain(|(since, _)| since.elapsed() < MOMENT);
        let dropped: Vec<_> = state.files.extract_if(.., |(since, _, _)| since.elapsed() >= MOMENT).collect();
        self.is_used.store(!state.expected.is_empty() || !state.files.is_empty(), Relaxed);
        drop(state);
        // Without the lock, since the last close may take a while.
        drop(dropped);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lookup_is_for_whom_it_was_expected_of() {
        let second = EstaleRetries::default();
        assert_eq!(second.expecting(1, b"a", 7), LookupHint::Nothing);
        second.expect_writer(7);
        assert_eq!(second.expecting(1, b"a", 7), LookupHint::Writer);
        assert_eq!(second.expecting(1, b"a", 8), LookupHint::Nothing);
        second.expect(None);
        assert_eq!(second.expecting(1, b"a", 8), LookupHint::Reader);
        assert_eq!(second.expecting(1, b"a", 7), LookupHint::Writer, "an open for reading alone would be in vain");
        second.writer_arrived(7);
        assert_eq!(second.expecting(1, b"a", 7), LookupHint::Reader);
    }
}
