//! An object is replaced in the bucket: what is read is one version, whole, and the new one is seen in time.
//!
//! Every 16 bytes of a content hold its version and their own offset, and the version decides the length, so that a mix
//! of two versions, a shift and a cut all show.
//!
//! `CAVERN_REPLACED_SECONDS` says for how long; `bin/test --long=busy` does it for a minute.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use cavern_tests::{COUNTED, Cluster, Options, eventually};
use rustix::io::Errno;

const CELL: usize = 16;
const TTL: Duration = Duration::from_secs(3);
/// What a busy machine may add to a promise of time.
const SLACK: Duration = Duration::from_millis(500);
const READERS: usize = 8;
const REPLACE_EVERY: Duration = Duration::from_millis(200);

fn length_of(version: u64, mean: usize) -> usize {
    // Whole cells and a rest, which differ from version to version.
    mean + (version % 7) as usize * 1003
}

fn content(version: u64, mean: usize) -> Vec<u8> {
    let length = length_of(version, mean);
    let mut bytes = Vec::with_capacity(length + CELL);
    while bytes.len() < length {
        let offset = bytes.len() as u64;
        bytes.extend_from_slice(&version.to_le_bytes());
        bytes.extend_from_slice(&offset.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// The version that the bytes are, wholly; panics when they are a mixture or a part.
#[track_caller]
fn version_of(bytes: &[u8], mean: usize) -> u64 {
    let version = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    if bytes == content(version, mean) {
        return version;
    }
    let cells = bytes.chunks_exact(CELL).enumerate();
    let wrong = cells.filter(|(index, cell)| {
        cell[..8] != version.to_le_bytes() || cell[8..] != ((index * CELL) as u64).to_le_bytes()
    });
    let wrong: Vec<usize> = wrong.map(|(index, _)| index * CELL).collect();
    panic!(
        "not one version: begins as {version}, {} bytes instead of {}, other bytes at {:?} ({} of {} cells)",
        bytes.len(),
        length_of(version, mean),
        wrong.first(),
        wrong.len(),
        bytes.len() / CELL
    );
}

/// An object that one thread replaces again and again.
struct Replaced {
    key: &'static str,
    mean: usize,
    /// Versions that the bucket has, or is about to have.
    begun: AtomicU64,
    /// When a version was no longer the newest: index is the version.
    superseded: Mutex<Vec<Instant>>,
}

/// What readers have seen.
#[derive(Default)]
struct Seen {
    reads: AtomicU64,
    stale: AtomicU64,
    /// Opens during which the object was, or may have been, replaced.
    overtaken: AtomicU64,
    /// Longest time after which a replaced version was still opened, in milliseconds.
    oldest_ms: AtomicU64,
}

/// Where a reader may meet ESTALE while an object is being replaced.
#[derive(Clone, Copy, PartialEq)]
enum Stale {
    Nowhere,
    FromRead,
    FromOpen,
}

impl Replaced {
    fn new(key: &'static str, mean: usize) -> Self {
        Self { key, mean, begun: AtomicU64::new(0), superseded: Mutex::default() }
    }

    fn put(&self, cluster: &Cluster, version: u64) {
        self.begun.fetch_add(1, SeqCst);
        cluster.s3.put("bucket", self.key, content(version, self.mean));
        self.superseded.lock().unwrap().push(Instant::now());
    }

    /// Versions that the bucket has.
    fn versions(&self) -> u64 {
        self.superseded.lock().unwrap().len() as u64
    }

    /// How long before `now` the version had been replaced.
    fn age(&self, version: u64, now: Instant) -> Duration {
        let replaced_by = version as usize + 1;
        let superseded = self.superseded.lock().unwrap();
        superseded.get(replaced_by).map_or(Duration::ZERO, |at| now.saturating_duration_since(*at))
    }

    /// Opens, reads, closes, until `stop`. The only error that a file may give is ESTALE, and only where it is allowed.
    fn read_until(&self, path: &Path, stale: Stale, stop: &AtomicBool) -> Seen {
        let seen = Seen::default();
        let mut newest = 0;
        while !stop.load(SeqCst) {
            let (began, before) = (Instant::now(), self.versions());
            let opened = File::open(path);
            seen.overtaken.fetch_add(u64::from(self.begun.load(SeqCst) > before), SeqCst);
            let file = match opened {
                Err(error) if stale == Stale::FromOpen && is_stale(&error) => {
                    seen.stale.fetch_add(1, SeqCst);
                    continue;
                }
                opened => opened.unwrap_or_else(|error| panic!("open {}: {error}", path.display())),
            };
            let bytes = match read_all(&file) {
                Err(error) if stale == Stale::FromRead && is_stale(&error) => {
                    seen.stale.fetch_add(1, SeqCst);
                    continue;
                }
                read => read.unwrap_or_else(|error| panic!("read {}: {error}", path.display())),
            };
            let version = version_of(&bytes, self.mean);
            assert!(version >= newest, "{}: version {version} after {newest}", path.display());
            newest = version;
            seen.reads.fetch_add(1, SeqCst);
            seen.oldest_ms.fetch_max(self.age(version, began).as_millis() as u64, SeqCst);
        }
        seen
    }
}

/// To the end of the file, in reads of 128 KiB, as a program would that does not trust sizes.
fn read_all(file: &File) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; 128 * 1024];
    let mut length = 0;
    loop {
        if bytes.len() - length < 128 * 1024 {
            bytes.resize(bytes.len() * 2, 0);
        }
        match file.read_at(&mut bytes[length..], length as u64)? {
            0 => break,
            read => length += read,
        }
    }
    bytes.truncate(length);
    Ok(bytes)
}

fn is_stale(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::STALE.raw_os_error())
}

fn duration() -> Duration {
    let seconds = std::env::var("CAVERN_REPLACED_SECONDS").map_or(18, |seconds| seconds.parse().unwrap());
    Duration::from_secs(seconds)
}

/// A cluster with two mounts of its namespace, in each of which /data is `bucket`.
fn two_mounts(options: &[&str], objects: &[&Replaced]) -> (Cluster, [PathBuf; 2]) {
    two_mounts_with("", options, objects)
}

fn two_mounts_with(conf: &str, options: &[&str], objects: &[&Replaced]) -> (Cluster, [PathBuf; 2]) {
    let cluster = Cluster::up(Options { conf: conf.to_owned(), more_mounts: vec!["second"], ..Options::default() });
    cluster.s3.create_bucket("bucket");
    objects.iter().for_each(|object| object.put(&cluster, 0));
    cluster.mount("s3://bucket", "/data", options);
    let shown = [0, 1].map(|index: usize| cluster.at_start.fuse[index].mount_point.join("data"));
    (cluster, shown)
}

/// Eight readers and one writer for a while; answers what the readers of each object saw.
fn read_while_replacing(
    cluster: &Cluster,
    shown: &[PathBuf; 2],
    objects: &[&Replaced],
    stale: impl Fn(&Replaced) -> Stale,
    duration: Duration,
) -> Vec<Seen> {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let stop = &stop;
        // However the writer or a reader ends, all end.
        let guard = StopAll(stop);
        let readers: Vec<_> = (0..READERS)
            .map(|number| {
                let object = objects[number % objects.len()];
                let path = shown[number / 2 % 2].join(object.key);
                let stale = stale(object);
                scope.spawn(move || {
                    let _stop = StopAll(stop);
                    object.read_until(&path, stale, stop)
                })
            })
            .collect();
        let end = Instant::now() + duration;
        let mut version = 0;
        while Instant::now() < end && !stop.load(SeqCst) {
            version += 1;
            objects.iter().for_each(|object| object.put(cluster, version));
            thread::sleep(REPLACE_EVERY);
        }
        drop(guard);
        let mut seen: Vec<Seen> = objects.iter().map(|_| Seen::default()).collect();
        for (number, reader) in readers.into_iter().enumerate() {
            let one = reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            let all = &mut seen[number % objects.len()];
            *all.reads.get_mut() += one.reads.into_inner();
            *all.stale.get_mut() += one.stale.into_inner();
            *all.overtaken.get_mut() += one.overtaken.into_inner();
            let oldest = all.oldest_ms.get_mut();
            *oldest = (*oldest).max(one.oldest_ms.into_inner());
        }
        for (object, seen) in objects.iter().zip(&seen) {
            eprintln!(
                "{}: {version} replacements, {} reads, {} stale of {} overtaken, oldest {} ms after its replacement",
                object.key,
                seen.reads.load(SeqCst),
                seen.stale.load(SeqCst),
                seen.overtaken.load(SeqCst),
                seen.oldest_ms.load(SeqCst)
            );
        }
        seen
    })
}

struct StopAll<'a>(&'a AtomicBool);

impl Drop for StopAll<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

fn newest(object: &Replaced) -> u64 {
    object.versions() - 1
}

#[test]
fn readers_see_whole_versions_and_the_newest_within_the_ttl() {
    let small = Replaced::new("small", 50_000);
    let large = Replaced::new("large", 3_500_000);
    let (cluster, shown) = two_mounts(&["--metadata-ttl", "3s", "--block-size", "1MiB"], &[&small, &large]);
    let stale = |object: &Replaced| if object.key == "large" { Stale::FromRead } else { Stale::Nowhere };
    let seen = read_while_replacing(&cluster, &shown, &[&small, &large], stale, duration());
    for seen in &seen {
        assert!(seen.reads.load(SeqCst) > 0);
        let oldest = Duration::from_millis(seen.oldest_ms.load(SeqCst));
        assert!(oldest <= TTL + SLACK, "a version was opened {oldest:?} after it had been replaced");
    }

    // The promise is about this very time: whoever opens `metadata_ttl` after the replacement gets the new version.
    thread::sleep(TTL);
    for path in &shown {
        for object in [&small, &large] {
            let version = version_of(&fs::read(path.join(object.key)).unwrap(), object.mean);
            assert_eq!(version, newest(object), "{}", path.join(object.key).display());
        }
    }
}

#[test]
fn after_a_refresh_every_client_sees_the_new_version_at_once() {
    let small = Replaced::new("dir/small", 50_000);
    let large = Replaced::new("dir/large", 3_500_000);
    let (cluster, shown) = two_mounts(&["--metadata-ttl", "1h", "--block-size", "1MiB"], &[&small, &large]);
    let objects = [&small, &large];
    let read = |path: &Path, object: &Replaced| version_of(&fs::read(path.join(object.key)).unwrap(), object.mean);
    for version in 1..=12 {
        let before = shown
            .each_ref()
            .map(|path| objects.map(|object| (read(path, object), fs::metadata(path.join(object.key)).unwrap().ino())));
        let put_from = SystemTime::now();
        objects.iter().for_each(|object| object.put(&cluster, version));
        for path in &shown {
            for object in objects {
                assert_eq!(read(path, object), version - 1, "nobody has asked the bucket for a newer version");
            }
        }
        // A tree, a directory, a file: whatever is named.
        match version % 3 {
            0 => drop(cluster.cv(&["refresh", "/"])),
            1 => drop(cluster.cv(&["refresh", "/data/dir"])),
            _ => objects.iter().for_each(|object| drop(cluster.cv(&["refresh", &format!("/data/{}", object.key)]))),
        }
        for (path, before) in shown.iter().zip(before) {
            for (object, (old, old_inode)) in objects.iter().zip(before) {
                // In turns, what comes first: the kernel's attributes or its pages.
                let stat = || fs::metadata(path.join(object.key)).unwrap();
                let (found, seen) = match version % 2 {
                    0 => (stat(), read(path, object)),
                    _ => {
                        let seen = read(path, object);
                        (stat(), seen)
                    }
                };
                assert_eq!((old, seen), (version - 1, version), "{}", path.join(object.key).display());
                assert_eq!(found.len(), length_of(version, object.mean) as u64);
                // The store keeps milliseconds at least.
                assert!(found.modified().unwrap() + Duration::from_millis(1000) >= put_from);
                assert_ne!(found.ino(), old_inode, "another version is another inode");
            }
        }
    }
}

#[test]
fn the_same_bytes_again_are_the_same_version() {
    let small = Replaced::new("small", 50_000);
    let (cluster, shown) = two_mounts_with(COUNTED, &["--metadata-ttl", "1h"], &[&small]);
    let stat = || shown.each_ref().map(|path| fs::metadata(path.join("small")).unwrap());
    let before = stat();
    assert_eq!(version_of(&fs::read(shown[0].join("small")).unwrap(), small.mean), 0);
    let written_again = || cluster.s3.put("bucket", "small", content(0, small.mean));
    eventually("the store's clock has gone on", Duration::from_secs(10), || {
        written_again();
        cluster.cv(&["refresh", "/data"]);
        (stat()[0].modified().unwrap() > before[0].modified().unwrap()).then_some(())
    });
    let after = stat();
    assert_eq!(after.each_ref().map(|stat| stat.ino()), before.each_ref().map(|stat| stat.ino()));
    assert_eq!(after[0].modified().unwrap(), after[1].modified().unwrap());
    let gets = cluster.s3.requests("GET");
    assert_eq!(shown.each_ref().map(|path| version_of(&fs::read(path.join("small")).unwrap(), small.mean)), [0, 0]);
    assert_eq!(cluster.s3.requests("GET"), gets, "what is cached stays so");
}

#[test]
fn an_open_file_keeps_its_version_or_says_stale() {
    let small = Replaced::new("small", 50_000);
    let (cluster, shown) = two_mounts(&["--metadata-ttl", "1h", "--block-size", "1MiB"], &[&small]);
    let mib = 1 << 20;
    cluster.s3.put("bucket", "large", vec![1; 64 * mib]);
    cluster.cv(&["refresh", "/data"]);
    let (small_file, large_file) =
        (File::open(shown[0].join("small")).unwrap(), File::open(shown[0].join("large")).unwrap());
    let mut first = vec![0; 4096];
    large_file.read_exact_at(&mut first, 0).unwrap();

    small.put(&cluster, 1);
    cluster.s3.put("bucket", "large", vec![2; 64 * mib]);
    cluster.cv(&["refresh", "/data"]);
    assert_eq!(version_of(&fs::read(shown[0].join("small")).unwrap(), small.mean), 1);
    // The small file was made present when it was opened.
    assert_eq!(version_of(&read_all(&small_file).unwrap(), small.mean), 0);
    assert_eq!(small_file.metadata().unwrap().len(), length_of(0, small.mean) as u64);
    // Of the large one, what had been read is still there; the rest never was, and its version is gone.
    large_file.read_exact_at(&mut first, 0).unwrap();
    assert!(first.iter().all(|byte| *byte == 1));
    let error = large_file.read_exact_at(&mut first, 60 << 20).unwrap_err();
    assert!(is_stale(&error), "{error}");
    let mut anew = [0];
    File::open(shown[0].join("large")).unwrap().read_exact_at(&mut anew, 60 << 20).unwrap();
    assert_eq!(anew, [2]);
}

#[test]
fn always_sees_a_replacement_with_the_next_open() {
    let small = Replaced::new("small", 50_000);
    let large = Replaced::new("large", 3_500_000);
    let (cluster, shown) =
        two_mounts(&["--consistency", "always", "--metadata-ttl", "1h", "--block-size", "1MiB"], &[&small, &large]);
    for version in 1..=30 {
        for object in [&small, &large] {
            object.put(&cluster, version);
            for path in &shown {
                let seen = version_of(&fs::read(path.join(object.key)).unwrap(), object.mean);
                assert_eq!(seen, version, "{}", path.join(object.key).display());
            }
        }
    }
    // Deleted and made anew: the same, however often its absence has been seen.
    for version in 31..=33 {
        cluster.s3.delete("bucket", "small");
        for path in [&shown[0], &shown[1], &shown[0], &shown[1]] {
            assert_eq!(File::open(path.join("small")).unwrap_err().kind(), io::ErrorKind::NotFound);
        }
        small.put(&cluster, version);
        for path in &shown {
            assert_eq!(version_of(&fs::read(path.join("small")).unwrap(), small.mean), version);
        }
    }
}

#[test]
fn always_opens_no_old_version_while_an_object_is_replaced() {
    let small = Replaced::new("small", 50_000);
    let (cluster, shown) = two_mounts(&["--consistency", "always"], &[&small]);
    // The kernel opens a path twice at most, and each of the two asks the bucket here: a reader whose object is
    // replaced between these questions too gets ESTALE.
    let duration = duration().min(Duration::from_secs(8));
    let seen = read_while_replacing(&cluster, &shown, &[&small], |_| Stale::FromOpen, duration);
    let [reads, stale, overtaken] =
        [&seen[0].reads, &seen[0].stale, &seen[0].overtaken].map(|count| count.load(SeqCst));
    // How often that is says how fast the machine is.
    assert!(stale <= overtaken && reads > stale, "{stale} of {overtaken} opens were stale, and {reads} were not");
    let oldest = Duration::from_millis(seen[0].oldest_ms.load(SeqCst));
    assert!(oldest.is_zero(), "a version was opened {oldest:?} after it had been replaced");
}

#[test]
fn never_asks_again_only_for_a_refresh() {
    let small = Replaced::new("small", 50_000);
    let ttl = Duration::from_secs(1);
    let (cluster, shown) = two_mounts(&["--consistency", "never", "--metadata-ttl", "1s"], &[&small]);
    let read = |path: &Path| version_of(&fs::read(path.join("small")).unwrap(), small.mean);
    assert_eq!(shown.each_ref().map(|path| read(path)), [0, 0]);
    small.put(&cluster, 1);
    // Past every time that another mount would care for.
    thread::sleep(2 * ttl);
    let lists = cluster.s3.requests("LIST");
    assert_eq!(shown.each_ref().map(|path| read(path)), [0, 0]);
    assert_eq!(cluster.s3.requests("LIST"), lists);
    cluster.cv(&["refresh", "/data"]);
    assert_eq!(shown.each_ref().map(|path| read(path)), [1, 1]);
}
