//! Programs that use the mounts all the time and take no error: some make files in an fs-mode mount, others read the
//! objects of a cache-mode mount.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use bytes::Bytes;
use cavern_tests::{Cluster, eventually};

const PATIENCE: Duration = Duration::from_secs(120);
const WRITERS: usize = 2;
/// Steps of each program after which it certainly has gone on.
const STEPS: usize = 20;
/// Files of each writer that are looked for in the bucket.
const LOOKED_AT: usize = 50;
/// Objects of the cache-mode mount.
const OBJECTS: usize = 60;

/// One program: it has done so many steps.
struct Program {
    steps: Arc<AtomicUsize>,
    thread: JoinHandle<()>,
}

/// All of them, until they are told to end.
pub struct Load {
    done: Arc<AtomicBool>,
    writers: Vec<(PathBuf, Program)>,
    reader: Program,
    seeded: BTreeMap<String, Bytes>,
}

impl Load {
    /// Mounts two buckets and begins; returns when everything is under way.
    #[track_caller]
    pub fn start(cluster: &Cluster) -> Self {
        let seeded = cluster.seed("images", "", OBJECTS, 20_000);
        // So short that readers ask the master all the time.
        cluster.mount("s3://images", "/images", &["--metadata-ttl", "1s"]);
        cluster.s3.create_bucket("files");
        cluster.mount_fs_mode("s3://files", "/files", &[]);
        let done = Arc::new(AtomicBool::new(false));
        let writers = (0..WRITERS).map(|number| {
            let directory = cluster.path(format!("files/{number}"));
            fs::create_dir(&directory).unwrap();
            let program = Program::start(&done, {
                let directory = directory.clone();
                move |step| make(&directory, step)
            });
            (directory, program)
        });
        let writers = writers.collect();
        let objects: Vec<_> =
            seeded.iter().map(|(key, content)| (cluster.path("images").join(key), content.clone())).collect();
        let reader = Program::start(&done, move |step| {
            let (path, content) = &objects[step % objects.len()];
            let read = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            assert!(read == *content, "{}: {} bytes, wrong content", path.display(), read.len());
        });
        let load = Self { done, writers, reader, seeded };
        load.go_on();
        load
    }

    fn programs(&self) -> impl Iterator<Item = &Program> {
        self.writers.iter().map(|(_, program)| program).chain([&self.reader])
    }

    /// Waits until each program has gone on; panics when one has ended, as it does by an error.
    #[track_caller]
    pub fn go_on(&self) {
        let steps = || self.programs().map(|program| program.steps.load(Ordering::Relaxed)).collect::<Vec<_>>();
        let before = steps();
        eventually("all programs go on", PATIENCE, || {
            assert!(!self.programs().any(|program| program.thread.is_finished()), "a program got an error");
            steps().iter().zip(&before).all(|(now, before)| *now > before + STEPS).then_some(())
        });
    }

    /// Ends all, and finds everything that was made: in this mount, in one that knows nothing, and in the bucket.
    #[track_caller]
    pub fn finish(self, cluster: &Cluster) {
        self.done.store(true, Ordering::Relaxed);
        let finish = |program: Program| {
            program.thread.join().unwrap();
            program.steps.load(Ordering::Relaxed)
        };
        finish(self.reader);
        let made: Vec<_> = self.writers.into_iter().map(|(directory, program)| (directory, finish(program))).collect();
        let check = || made.iter().for_each(|(directory, count)| assert_made(directory, *count));
        check();
        cluster.stop("fuse");
        cluster.start("fuse");
        check();
        cluster.assert_tree("images", "", &self.seeded);
        cluster.cv(&["persist", "wait", "/files", "--timeout", "120s"]);
        for (number, (_, count)) in made.iter().enumerate() {
            for file in (0..*count).step_by(count / LOOKED_AT + 1) {
                assert_eq!(cluster.s3.get("files", &format!("{number}/{file}")), content(file), "{number}/{file}");
            }
        }
    }
}

impl Program {
    fn start(done: &Arc<AtomicBool>, mut step: impl FnMut(usize) + Send + 'static) -> Self {
        let (done, steps) = (Arc::clone(done), Arc::new(AtomicUsize::new(0)));
        let thread = thread::spawn({
            let steps = Arc::clone(&steps);
            move || {
                while !done.load(Ordering::Relaxed) {
                    step(steps.load(Ordering::Relaxed));
                    steps.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        Self { steps, thread }
    }
}

fn content(number: usize) -> Vec<u8> {
    format!("{number} ").repeat(1 + number % 500).into_bytes()
}

/// A new file, as careful programs make it. Each step fails where a change is done twice, or not at all: names are new,
/// and those that are renamed and removed were made just before.
fn make(directory: &Path, number: usize) {
    let on = |what: &str, path: &Path, result: std::io::Result<()>| {
        result.unwrap_or_else(|error| panic!("{what} {}: {error}", path.display()));
    };
    let (new, path) = (directory.join(format!("{number}.new")), directory.join(number.to_string()));
    let write = || {
        let mut file = File::create_new(&new)?;
        file.write_all(&content(number))?;
        if number.is_multiple_of(10) { file.sync_all() } else { Ok(()) }
    };
    on("write", &new, write());
    on("rename", &new, fs::rename(&new, &path));
    if number.is_multiple_of(5) {
        let folder = directory.join("folder");
        on("mkdir", &folder, fs::create_dir(&folder));
        on("rmdir", &folder, fs::remove_dir(&folder));
    }
    // Of another step: most likely not in the kernel's pages of this call.
    let earlier = number / 2;
    let path = directory.join(earlier.to_string());
    let read = fs::read(&path).unwrap_or_else(|error| panic!("read {}: {error}", path.display()));
    assert!(read == content(earlier), "{}: {} bytes, wrong content", path.display(), read.len());
}

/// All files that were made are there, with their content, and nothing else.
#[track_caller]
fn assert_made(directory: &Path, count: usize) {
    let names = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut numbers: Vec<usize> = names.map(|name| name.parse().unwrap_or_else(|_| panic!("{name} is left"))).collect();
    numbers.sort_unstable();
    assert!(numbers.iter().copied().eq(0..count), "{} of {count} files in {}", numbers.len(), directory.display());
    for number in numbers {
        let path = directory.join(number.to_string());
        let read = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        assert!(read == content(number), "{}: {} bytes, wrong content", path.display(), read.len());
    }
}
