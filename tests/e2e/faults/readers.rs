//! Readers that compare every byte of a tree, side by side, and say what went wrong.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use bytes::Bytes;
use cavern_tests::eventually;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

/// Content by path.
pub type Tree = BTreeMap<PathBuf, Bytes>;

/// Threads that each read a whole tree, in an order of their own.
pub struct Readers {
    progress: Arc<Progress>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Progress {
    done: AtomicUsize,
    seen: Mutex<HashSet<PathBuf>>,
    wrong: Mutex<Vec<String>>,
}

impl Readers {
    pub fn start(count: u64, tree: &Arc<Tree>) -> Self {
        let progress = Arc::new(Progress::default());
        let threads = (0..count).map(|seed| {
            let (progress, tree) = (Arc::clone(&progress), Arc::clone(tree));
            thread::spawn(move || {
                let mut order: Vec<_> = tree.iter().collect();
                order.shuffle(&mut StdRng::seed_from_u64(seed));
                for (path, content) in order {
                    match fs::read(path) {
                        Ok(read) if read == *content => drop(progress.seen.lock().unwrap().insert(path.clone())),
                        Ok(read) => progress.wrong(format!("{}: {} wrong bytes", path.display(), read.len())),
                        Err(error) => progress.wrong(format!("{}: {error}", path.display())),
                    }
                    progress.done.fetch_add(1, Ordering::Relaxed);
                }
            })
        });
        Self { threads: threads.collect(), progress }
    }

    /// Waits until `count` different files have been read.
    pub fn wait_for(&self, count: usize) {
        eventually(&format!("{count} files are read"), Duration::from_secs(60), || {
            (self.seen() >= count).then_some(())
        });
    }

    /// Different files that have been read so far.
    pub fn seen(&self) -> usize {
        self.progress.seen.lock().unwrap().len()
    }

    /// Waits for the ends of all; panics unless every read was right.
    #[track_caller]
    pub fn finish(self) {
        for thread in self.threads {
            thread.join().unwrap();
        }
        let wrong = self.progress.wrong.lock().unwrap();
        assert!(wrong.is_empty(), "{} reads went wrong: {:#?}", wrong.len(), &wrong[..wrong.len().min(10)]);
    }
}

impl Progress {
    fn wrong(&self, what: String) {
        self.wrong.lock().unwrap().push(what);
    }
}

/// The tree of `Cluster::seed` as it is seen below `root`.
pub fn shown_at(root: &Path, prefix: &str, seeded: &BTreeMap<String, Bytes>) -> Arc<Tree> {
    let shown = |key: &String| root.join(key.strip_prefix(prefix).expect("every key has the prefix"));
    Arc::new(seeded.iter().map(|(key, content)| (shown(key), content.clone())).collect())
}

/// Has the kernel forget clean pages and names, so that reads reach the FUSE client again. Takes root; for others the
/// test says a little less.
pub fn drop_caches() {
    let _ = fs::write("/proc/sys/vm/drop_caches", "3");
}
