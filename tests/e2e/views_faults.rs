//! Views while processes die, and objects and their store go: the right bytes, or `EIO` and a line that names the
//! object. Never zeros, never bytes of another file or version.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use cavern_tests::{COUNTED, Options, eventually, number};
use cavern_ufs::UfsError;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{Rng as _, RngCore as _, SeedableRng as _};
use rustix::fs::{Advice, fadvise};
use serde_json::json;

use crate::bucket::Bucket;
use crate::client_restart::replace_by_death;
use crate::views::{KernelView, WithViews, read_anew};

const PATIENCE: Duration = Duration::from_secs(60);
/// A read is not to wait long for what is away.
const CONF: &str = "[client]\nread_timeout = \"3s\"\nworker_timeout = \"1s\"\n";
const READERS: usize = 8;

type Tree = BTreeMap<String, Bytes>;

/// A view `v` of objects, shown by `cv fuse` and, where that can be, by the kernel.
struct Frozen {
    // Before the cluster: it is unmounted while that is there.
    kernel: Option<KernelView>,
    cluster: WithViews,
    tree: Tree,
}

impl Frozen {
    fn up(options: Options, objects: usize, bytes: usize, keeps_versions: bool) -> Self {
        let cluster = WithViews::up(options);
        cluster.s3.create_bucket("bucket");
        if keeps_versions {
            cluster.s3.keep_versions("bucket");
        }
        let tree = cluster.seed("bucket", "", objects, bytes);
        cluster.mount_indexed("s3://bucket");
        cluster.create("/data", "v");
        let kernel = KernelView::mount(&cluster, "v");
        Self { kernel, cluster, tree }
    }

    /// The directories that show it.
    fn tops(&self) -> Vec<PathBuf> {
        [Some(self.cluster.shown("v")), self.kernel.as_ref().map(|kernel| kernel.0.clone())]
            .into_iter()
            .flatten()
            .collect()
    }

    /// Reads all of it everywhere; the keys of what cannot be read.
    #[track_caller]
    fn read_all(&self) -> Vec<String> {
        let mut failed = Vec::new();
        for top in self.tops() {
            for (key, expected) in &self.tree {
                match checked(&top.join(key), expected) {
                    Ok(()) => {}
                    Err(Wrong::Failed(libc::EIO)) => failed.push(key.clone()),
                    Err(wrong) => panic!("{key} in {}: {wrong:?}", top.display()),
                }
            }
        }
        failed.sort();
        failed.dedup();
        failed
    }

    /// The client names what it could not read.
    #[track_caller]
    fn assert_named(&self, keys: &[String]) {
        let log = self.cluster.log_of_fuse();
        let named = |key: &String| log.lines().any(|line| line.contains("view v") && line.contains(key.as_str()));
        // A flood of lines is cut; what began it is there.
        assert!(keys.iter().any(named), "none of {keys:?} is named in {log}");
    }
}

/// Twenty within a minute are too many for a supervisor.
const DEATHS_APART: Duration = Duration::from_secs(4);

#[derive(Debug)]
enum Wrong {
    Failed(i32),
    /// Bytes came, which are not the file's.
    Bytes,
}

fn checked(path: &Path, expected: &[u8]) -> Result<(), Wrong> {
    match read_anew(path) {
        Ok(read) if read == expected => Ok(()),
        Ok(_) => Err(Wrong::Bytes),
        Err(error) => Err(Wrong::Failed(error.raw_os_error().unwrap_or(0))),
    }
}

/// What became of reads of parts of random files.
#[derive(Default)]
struct Counted {
    right: AtomicU64,
    failed: AtomicU64,
    is_over: AtomicBool,
}

impl Counted {
    /// Reads until it is over. Whatever comes is to be right.
    fn read(&self, tops: &[PathBuf], tree: &Tree, seed: u64, may_fail: bool) {
        let mut random = StdRng::seed_from_u64(seed);
        let files: Vec<_> = tree.iter().collect();
        while !self.is_over.load(Ordering::Acquire) {
            let ((key, content), top) = (files.choose(&mut random).unwrap(), tops.choose(&mut random).unwrap());
            let path = top.join(key);
            let offset = random.random_range(0..content.len());
            let mut read = vec![0; random.random_range(1..100_000)];
            let answer = File::open(&path).and_then(|file| {
                fadvise(&file, 0, None, Advice::DontNeed)?;
                file.read_at(&mut read, offset as u64)
            });
            match answer {
                Ok(length) => {
                    let expected = &content[offset..content.len().min(offset + length)];
                    assert!(length > 0 && read[..length] == *expected, "{length} bytes at {offset} of {key}");
                    self.right.fetch_add(1, Ordering::Relaxed);
                }
                Err(error) if may_fail && error.raw_os_error() == Some(libc::EIO) => {
                    self.failed.fetch_add(1, Ordering::Relaxed);
                }
                Err(error) => panic!("{}: {error}", path.display()),
            }
        }
    }

    fn await_more(&self, count: u64) {
        let before = self.right.load(Ordering::Relaxed);
        eventually("readers go on", PATIENCE, || (self.right.load(Ordering::Relaxed) >= before + count).then_some(()));
    }
}

/// Ends readers, whatever becomes of the test.
struct Over<'a>(&'a Counted);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::Release);
    }
}

/// Runs something beside readers; what they have counted.
fn beside_readers(frozen: &Frozen, may_fail: bool, work: impl FnOnce(&Counted)) -> Counted {
    let (counted, tops, tree) = (Counted::default(), frozen.tops(), &frozen.tree);
    thread::scope(|scope| {
        let over = Over(&counted);
        let readers: Vec<_> = (0..READERS)
            .map(|reader| {
                let (counted, tops) = (&counted, &tops);
                scope.spawn(move || counted.read(tops, tree, reader as u64, may_fail))
            })
            .collect();
        work(&counted);
        drop(over);
        readers.into_iter().for_each(|reader| reader.join().unwrap());
    });
    counted
}

#[test]
fn readers_of_a_view_notice_nothing_of_deaths_and_reloads_of_the_process_that_serves_them() {
    let options = Options { supervised: true, ..Options::default() };
    let frozen = Frozen::up(options, 200, 60_000, false);
    let mount_point = frozen.cluster.mount_point().to_str().unwrap();
    beside_readers(&frozen, false, |counted| {
        for _ in 0..3 {
            counted.await_more(50);
            replace_by_death(&frozen.cluster);
            counted.await_more(50);
            eventually("the mount is reloaded", PATIENCE, || {
                let reload = ["fuse", "reload", "--mount-point", mount_point];
                (frozen.cluster.try_cv(&reload).code == 0).then_some(())
            });
        }
        counted.await_more(50);
    });
    assert!(frozen.read_all().is_empty());
}

#[test]
fn a_worker_that_dies_costs_no_byte_of_a_view() {
    let frozen = Frozen::up(Options { workers: 2, conf: CONF.to_owned(), ..Options::default() }, 100, 60_000, false);
    beside_readers(&frozen, false, |counted| {
        for worker in ["worker0", "worker1"] {
            counted.await_more(50);
            frozen.cluster.kill(worker);
            counted.await_more(50);
            frozen.cluster.start(worker);
        }
        counted.await_more(50);
    });
    assert!(frozen.read_all().is_empty());
}

#[test]
fn objects_that_were_replaced_or_deleted_are_errors_that_name_them() {
    let frozen = Frozen::up(Options { conf: CONF.to_owned(), ..Options::default() }, 60, 60_000, false);
    let mut gone = Vec::new();
    for (index, (key, content)) in frozen.tree.iter().enumerate() {
        match index % 3 {
            0 => drop(frozen.cluster.s3.put("bucket", key, vec![7; content.len()])),
            1 => frozen.cluster.s3.delete("bucket", key),
            _ => continue,
        }
        gone.push(key.clone());
    }
    gone.sort();
    assert_eq!(frozen.read_all(), gone);
    frozen.assert_named(&gone);
    // The mount itself is of what the bucket has.
    frozen.cluster.cv(&["refresh", "/data"]);
    assert!(
        fs::read(frozen.cluster.path("data").join(frozen.tree.keys().next().unwrap())).unwrap().iter().all(|b| *b == 7)
    );
    assert_eq!(frozen.read_all(), gone);
}

#[test]
fn what_workers_have_of_a_view_is_read_whatever_becomes_of_the_bucket() {
    // What comes from the bucket itself, since a worker is slow, that worker need not have.
    let frozen = Frozen::up(Options { conf: COUNTED.to_owned(), ..Options::default() }, 60, 60_000, false);
    assert!(frozen.read_all().is_empty());
    for (key, content) in &frozen.tree {
        frozen.cluster.s3.put("bucket", key, vec![7; content.len()]);
    }
    assert!(frozen.read_all().is_empty());
    frozen.cluster.stop("s3");
    assert!(frozen.read_all().is_empty());
    frozen.cluster.start("s3");
}

#[test]
fn a_bucket_that_keeps_versions_has_all_of_a_view_for_good() {
    let frozen = Frozen::up(Options { conf: CONF.to_owned(), ..Options::default() }, 60, 60_000, true);
    // Two epochs, while the bucket is written over.
    for epoch in 0..2_u8 {
        for (index, (key, content)) in frozen.tree.iter().enumerate() {
            match index % 3 {
                0 => drop(frozen.cluster.s3.put("bucket", key, vec![epoch; content.len()])),
                1 => frozen.cluster.s3.delete("bucket", key),
                _ => {}
            }
        }
        assert!(frozen.read_all().is_empty(), "epoch {epoch}");
        frozen.cluster.cv(&["refresh", "/data"]);
    }
}

#[test]
fn two_epochs_while_the_bucket_is_written_over_are_the_same_bytes_or_the_same_errors() {
    for keeps_versions in [true, false] {
        // What one epoch has got, workers have for the other.
        let options = Options { conf: COUNTED.to_owned(), ..Options::default() };
        let frozen = Frozen::up(options, 60, 60_000, keeps_versions);
        let write_over = |key: &String| drop(frozen.cluster.s3.put("bucket", key, vec![7; frozen.tree[key].len()]));
        // From the end on, so that some are other objects before anybody has read them.
        let mut keys: Vec<&String> = frozen.tree.keys().collect();
        let before = keys.split_off(50);
        before.iter().for_each(|key| write_over(key));
        let [first, second] = thread::scope(|scope| {
            let writer = scope.spawn(|| keys.iter().rev().for_each(|key| write_over(key)));
            let epochs = [frozen.read_all(), frozen.read_all()];
            writer.join().unwrap();
            epochs
        });
        assert_eq!(first, second, "versions are kept: {keeps_versions}");
        let is_lost = |key: &&String| first.contains(key);
        let lost = before.iter().copied().filter(is_lost).count();
        assert_eq!(lost, if keeps_versions { 0 } else { before.len() }, "{first:?}");
        assert_eq!(first.is_empty(), keeps_versions, "{first:?}");
    }
}

#[test]
fn the_object_of_a_deleted_view_goes_when_its_bucket_deletes_again() {
    let cluster = WithViews::up(Options::default());
    cluster.s3.create_bucket("bucket");
    cluster.seed("bucket", "", 3, 1000);
    cluster.mount_indexed("s3://bucket");
    let view = cluster.create("/data", "v");
    let bucket = Bucket::of(&cluster, "bucket");
    // No listing shows it.
    let is_there = || match bucket.runtime.block_on(bucket.ufs.head(view["key"].as_str().unwrap())) {
        Ok(_) => true,
        Err(UfsError::NotFound { .. }) => false,
        Err(error) => panic!("{error}"),
    };
    assert!(is_there());
    cluster.s3.add_fault(&json!({"kind": "403", "operations": ["DeleteObject"]}));
    cluster.cv(&["view", "delete", "v"]);
    assert_eq!(cluster.cv(&["view", "list", "--json"]).json(), json!([]));
    assert!(is_there());
    cluster.s3.clear_faults();
    eventually("its object is deleted", PATIENCE, || (!is_there()).then_some(()));
}

/// What cannot be read of a view that is mounted anew.
fn again(frozen: &Frozen) -> Vec<String> {
    let place = &frozen.kernel.as_ref().unwrap().0;
    let mount_point = frozen.cluster.mount_point().to_str().unwrap();
    let directory = place.to_str().unwrap();
    frozen.cluster.cv(&["view", "umount", directory, "--mount-point", mount_point]);
    frozen.cluster.cv(&["view", "mount", "v", directory, "--mount-point", mount_point]);
    frozen.read_all()
}

#[test]
fn without_the_bucket_there_are_errors_that_name_objects_and_no_zeros() {
    // What is near files that are read one after the other would be fetched ahead.
    let conf = format!("{CONF}readahead_max = \"0B\"\nhedge_percent = 0\n");
    let frozen = Frozen::up(Options { conf, ..Options::default() }, 12, 60_000, false);
    let is_even = |key: &String| key.trim_end_matches(".bin").ends_with(['0', '2', '4', '6', '8']);
    let (warm, cold): (Vec<_>, Vec<_>) = frozen.tree.keys().cloned().partition(is_even);
    let read = |keys: &[String]| -> Vec<Result<(), Wrong>> {
        let tops = frozen.tops();
        let paths = keys.iter().flat_map(|key| tops.iter().map(move |top| (top.join(key), key)));
        paths.map(|(path, key)| checked(&path, &frozen.tree[key])).collect()
    };
    assert!(read(&warm).iter().all(Result::is_ok));
    frozen.cluster.stop("s3");
    assert!(read(&warm).iter().all(Result::is_ok));
    for answer in read(&cold) {
        assert!(matches!(answer, Err(Wrong::Failed(libc::EIO))), "{answer:?}");
    }
    frozen.assert_named(&cold);
    frozen.cluster.start("s3");
    eventually("the bucket answers again", PATIENCE, || read(&cold).iter().all(Result::is_ok).then_some(()));
}

#[test]
fn names_outlive_the_process_that_serves_a_view_and_contents_are_errors() {
    let options = Options { supervised: false, conf: CONF.to_owned(), ..Options::default() };
    let mut frozen = Frozen::up(options, 20, 60_000, false);
    let Some(kernel) = &frozen.kernel else { return };
    let (place, warm) = (kernel.0.clone(), frozen.tree.first_key_value().unwrap());
    assert_eq!(fs::read(place.join(warm.0)).unwrap(), *warm.1);
    let names = |place: &Path| -> Vec<_> {
        let entries = fs::read_dir(place.join("0000")).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    let before = names(&place);
    frozen.cluster.kill("fuse");
    eventually("the devices are dead", PATIENCE, || checked(&place.join(warm.0), warm.1).is_err().then_some(()));
    assert_eq!(names(&place), before);
    for (key, expected) in &frozen.tree {
        assert_eq!(fs::metadata(place.join(key)).unwrap().len(), expected.len() as u64);
        let answer = checked(&place.join(key), expected);
        assert!(matches!(answer, Err(Wrong::Failed(libc::EIO))), "{key}: {answer:?}");
    }
    frozen.cluster.start("fuse");
    let looked = frozen.cluster.try_cv(&["doctor", "--offline", "--role", "fuse", "--json"]).json();
    let shown = place.to_str().unwrap();
    let is_it = |finding: &serde_json::Value| finding["what"].as_str().is_some_and(|what| what.contains(shown));
    let finding = looked["findings"].as_array().unwrap().iter().find(|finding| is_it(finding)).unwrap();
    assert_eq!((&finding["check"], &finding["level"]), (&json!("view-mount"), &json!("error")), "{finding}");
    assert!(again(&frozen).is_empty());
    frozen.kernel = None;
}

#[test]
fn no_fault_gives_a_reader_bytes_of_something_else() {
    let seconds = number("CAVERN_VIEW_SECONDS", 12);
    let options = Options { workers: 2, supervised: true, conf: CONF.to_owned(), ..Options::default() };
    let frozen = Frozen::up(options, 300, 60_000, false);
    let cluster = &frozen.cluster;
    let (mut random, end) = (StdRng::seed_from_u64(seconds), Instant::now() + Duration::from_secs(seconds));
    let (mut rounds, mut replaced) = ([0; 6], Tree::new());
    let mut last_death = None::<Instant>;
    let counted = beside_readers(&frozen, true, |counted| {
        while Instant::now() < end {
            counted.await_more(20);
            let round = random.random_range(0..rounds.len());
            // A mount whose process dies all the time is given up.
            if round == 1 && last_death.is_some_and(|last| last.elapsed() < DEATHS_APART) {
                continue;
            }
            rounds[round] += 1;
            match round {
                0 => {
                    let worker = ["worker0", "worker1"][random.random_range(0..2)];
                    cluster.kill(worker);
                    cluster.start(worker);
                }
                1 => {
                    replace_by_death(cluster);
                    last_death = Some(Instant::now());
                }
                2 => {
                    for kind in ["503", "reset", "short_body"] {
                        cluster.s3.add_fault(&json!({"kind": kind, "operations": ["GET"], "count": 20}));
                    }
                }
                3 => {
                    // Of the same length, of others, and gone.
                    let (key, content) = frozen.tree.iter().nth(random.random_range(0..100)).unwrap();
                    let mut other = vec![0; content.len() + random.random_range(0..2)];
                    random.fill_bytes(&mut other);
                    cluster.s3.put("bucket", key, other);
                    if random.random_bool(0.3) {
                        cluster.s3.delete("bucket", key);
                    }
                    replaced.insert(key.clone(), content.clone());
                }
                4 => {
                    cluster.stop("s3");
                    cluster.start("s3");
                }
                _ => drop(cluster.try_cv(&["fs", "free", "/data"])),
            }
        }
        cluster.s3.clear_faults();
    });
    let (right, failed) = (counted.right.into_inner(), counted.failed.into_inner());
    eprintln!("{right} reads were right and {failed} failed while {rounds:?} faults came");
    assert!(right > 0);
    let whole = eventually("everything is there again", PATIENCE, || {
        let failed = frozen.read_all();
        failed.iter().all(|key| replaced.contains_key(key)).then_some(failed)
    });
    eprintln!("{} of {} objects that were replaced or deleted are nowhere any more", whole.len(), replaced.len());
}

#[test]
fn an_image_that_is_damaged_on_this_host_is_fetched_anew() {
    let frozen = Frozen::up(Options::default(), 20, 20_000, false);
    let image = fs::read_link(frozen.cluster.shown("v@image")).unwrap();
    let Frozen { kernel, cluster, tree } = frozen;
    drop(kernel);
    cluster.stop("fuse");
    let length = fs::metadata(&image).unwrap().len();
    let cut: [fn(&Path, u64) -> io::Result<()>; 2] =
        [|path, length| File::options().write(true).open(path)?.set_len(length / 2), |path, _| fs::remove_file(path)];
    for damage in cut {
        damage(&image, length).unwrap();
        cluster.start("fuse");
        for (key, content) in &tree {
            assert_eq!(fs::read(cluster.shown("v").join(key)).unwrap(), *content, "{key}");
        }
        assert_eq!(fs::metadata(&image).unwrap().len(), length);
        cluster.stop("fuse");
    }
    cluster.start("fuse");
}
