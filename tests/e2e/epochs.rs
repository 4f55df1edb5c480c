//! Training reads a data set again and again in a new random order. A cache of half of it must go on serving nearly
//! half.
//!
//! Hits are counted where they cannot be faked: a hit is a file for which the bucket got no GET. Neither the kernel's
//! page cache nor descriptors that the client still holds may add to them, so the tests let go of both.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use cavern_tests::{COUNTED, Cluster, Options, Process, eventually};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

const FILES: usize = 4000;
const MEAN_BYTES: usize = 50_000;
const CAPACITY: u64 = 100_000_000;
const READERS: usize = 4;
const EPOCHS: u64 = 3;
const HIT_RATIO: f64 = 0.45;

#[test]
fn a_cache_of_half_the_data_hits_45_percent_from_the_second_epoch_on() {
    // What a training job is: one process that goes on reading, with a client that goes on holding what it may.
    let ratios = epochs(|_| {});
    assert!(ratios[1..].iter().all(|ratio| *ratio >= HIT_RATIO), "{ratios:?}");
}

#[test]
fn the_hits_are_those_of_the_worker_not_of_the_client() {
    let ratios = epochs(|cluster| {
        cluster.stop("fuse");
        cluster.start("fuse");
    });
    assert!(ratios[1..].iter().all(|ratio| *ratio >= HIT_RATIO), "{ratios:?}");
}

/// The hit ratio of each epoch; `between` runs before each.
fn epochs(between: impl Fn(&Cluster)) -> Vec<f64> {
    // Hits are what the bucket was not asked for: a hedged read would count as a miss though the worker has the block.
    let conf = format!("[worker]\ndirs = [\"[SSD:{CAPACITY}B]/cache\"]\n{COUNTED}");
    let cluster = Cluster::up(Options { conf, ..Options::default() });
    let tree = cluster.seed("bucket", "", FILES, MEAN_BYTES);
    let total: u64 = tree.values().map(|content| content.len() as u64).sum();
    assert!(total.abs_diff(2 * CAPACITY) < CAPACITY / 50, "the cache holds half of {total} bytes");
    cluster.mount("s3://bucket", "/data", &[]);
    let files: Vec<(PathBuf, u64)> =
        (tree.iter()).map(|(key, content)| (cluster.path("data").join(key), content.len() as u64)).collect();

    let (stop, most_used) = (AtomicBool::new(false), AtomicU64::new(0));
    let blocks: Vec<PathBuf> = cluster.at_start.workers[0].dirs.iter().map(|dir| dir.join("blocks")).collect();
    let mut ratios = Vec::new();
    thread::scope(|scope| {
        // Ends with the scope even when an epoch panics.
        let _stops = Stops(&stop);
        scope.spawn(|| {
            let mut before = files_below(&blocks);
            while !stop.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(50));
                let now = files_below(&blocks);
                // However long a look takes, and whatever comes and goes meanwhile: what two of them have found was
                // there between them, all at once.
                let stayed = now.iter().filter(|(place, _)| before.contains_key(*place));
                most_used.fetch_max(stayed.map(|(_, bytes)| bytes).sum(), Ordering::Relaxed);
                before = now;
            }
        });
        for epoch in 0..EPOCHS {
            between(&cluster);
            let before = cluster.s3.requests("GET");
            read_all(&files, epoch);
            let misses = cluster.s3.requests("GET") - before;
            ratios.push(1.0 - misses as f64 / FILES as f64);
            let used: u64 = files_below(&blocks).values().sum();
            assert!(used <= CAPACITY, "{used} bytes of {CAPACITY} are used");
            most_used.fetch_max(used, Ordering::Relaxed);
        }
    });
    let most_used = most_used.into_inner();
    eprintln!("hit ratios {ratios:?}, at most {most_used} of {CAPACITY} bytes used");
    // A file is gone a moment after others have its room.
    assert!(
        (CAPACITY * 9 / 10..=CAPACITY * 101 / 100).contains(&most_used),
        "{most_used} bytes of {CAPACITY} were used"
    );
    eventually("no process holds evicted files", Duration::from_secs(20), || {
        let status = &cluster.at_start;
        let now = cluster.status();
        let held = Process::of(&now.fuse[0]).deleted_files() + Process::of(&status.workers[0]).deleted_files();
        (held == 0).then_some(())
    });
    ratios
}

/// Reads every file once, in an order that the epoch decides, and leaves none of their pages with the kernel.
fn read_all(files: &[(PathBuf, u64)], epoch: u64) {
    let mut order: Vec<&(PathBuf, u64)> = files.iter().collect();
    order.shuffle(&mut StdRng::seed_from_u64(epoch));
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..READERS {
            scope.spawn(|| {
                while let Some((path, length)) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let mut file = File::open(path).unwrap();
                    let mut content = Vec::new();
                    std::io::Read::read_to_end(&mut file, &mut content).unwrap();
                    assert_eq!(content.len() as u64, *length, "{}", path.display());
                    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
                }
            });
        }
    });
}

/// The files below directories, by path and inode, and the room that each takes on the disk.
fn files_below(directories: &[PathBuf]) -> BTreeMap<(PathBuf, u64), u64> {
    let (mut files, mut waiting) = (BTreeMap::new(), directories.to_vec());
    while let Some(directory) = waiting.pop() {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            match entry.metadata() {
                Ok(metadata) if metadata.is_dir() => waiting.push(entry.path()),
                Ok(metadata) => drop(files.insert((entry.path(), metadata.ino()), metadata.blocks() * 512)),
                // Evicted meanwhile.
                Err(_) => {}
            }
        }
    }
    files
}

struct Stops<'a>(&'a AtomicBool);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
