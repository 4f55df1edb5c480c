//! Contents of files of fs-mode mounts: as on a local file system, through every way to read and write, seen by every
//! mount, and kept when processes are killed.

use std::fs::{self, File, OpenOptions};
use std::hash::{DefaultHasher, Hasher as _};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use cavern_tests::{Cluster, Options, eventually};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::Errno;

/// For an invalidation to reach another mount.
const PATIENCE: Duration = Duration::from_secs(30);
const MIB: u64 = 1 << 20;

/// Blocks are small, so that few operations reach many.
fn mounted(options: Options) -> Cluster {
    let cluster = Cluster::up(options);
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &["--block-size", "1MiB"]);
    cluster
}

fn noise(random: &mut StdRng, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    random.fill(&mut bytes[..]);
    bytes
}

#[track_caller]
fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> Errno {
    Errno::from_io_error(&result.unwrap_err()).unwrap()
}

fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

// ------------------------------------------------------------------------------- against a local directory

/// What one operation answered: 0 or an errno, and what else it returned.
type Answer = (i32, String);

fn answer<T: std::fmt::Debug>(result: io::Result<T>) -> Answer {
    match result {
        Ok(value) => (0, format!("{value:?}")),
        Err(error) => (error.raw_os_error().unwrap(), String::new()),
    }
}

/// One operation on one of a few files, each with one of a few handles.
#[derive(Debug)]
enum Step {
    Open(usize, bool, bool, bool),
    Close(usize),
    Write(usize, u64, Vec<u8>),
    Append(usize, Vec<u8>),
    Read(usize, u64, usize),
    Truncate(usize, u64),
    TruncatePath(usize, u64),
    Allocate(usize, u64, u64, u8),
    Sync(usize),
    Mapped(usize, u64, Vec<u8>),
    Stat(usize),
    Unlink(usize),
    Rename(usize, usize),
}

const FILES: usize = 3;
const HANDLES: usize = 5;

impl Step {
    fn random(random: &mut StdRng) -> Self {
        // Block boundaries and page boundaries matter most.
        let offset = |random: &mut StdRng| match random.random_range(0..4) {
            0 => random.random_range(0..4) * MIB,
            1 => (random.random_range(1..4) * MIB).saturating_sub(random.random_range(0..10_000)),
            2 => random.random_range(0..50_000),
            _ => random.random_range(0..4 * MIB),
        };
        let length = |random: &mut StdRng| match random.random_range(0..5) {
            0 => random.random_range(0..10),
            1 => random.random_range(0..400_000),
            _ => random.random_range(0..20_000),
        };
        let (file, handle) = (random.random_range(0..FILES), random.random_range(0..HANDLES));
        match random.random_range(0..30) {
            0..=3 => Self::Open(handle, random.random(), random.random_range(0..8) == 0, random.random()),
            4 => Self::Close(handle),
            5..=11 => {
                let (at, length) = (offset(random), length(random));
                Self::Write(handle, at, noise(random, length))
            }
            12 | 13 => {
                let length = length(random);
                Self::Append(file, noise(random, length))
            }
            14..=18 => Self::Read(handle, offset(random), length(random)),
            19 | 20 => Self::Truncate(handle, offset(random)),
            21 => Self::TruncatePath(file, offset(random)),
            22 | 23 => Self::Allocate(handle, offset(random), length(random) as u64, random.random_range(0..5)),
            24 => Self::Sync(handle),
            25 => {
                let (at, length) = (offset(random), length(random));
                Self::Mapped(handle, at, noise(random, length))
            }
            26 => Self::Unlink(file),
            27 => Self::Rename(file, random.random_range(0..FILES)),
            _ => Self::Stat(file),
        }
    }

    fn run(&self, top: &Path, handles: &mut [Option<File>; HANDLES]) -> Answer {
        let path = |file: &usize| top.join(format!("file{}", file % FILES));
        let missing = (-1, String::new());
        macro_rules! open {
            ($handle:expr) => {
                match &handles[*$handle] {
                    Some(file) => file,
                    None => return missing,
                }
            };
        }
        match self {
            Self::Open(handle, write, truncate, create) => {
                let mut options = OpenOptions::new();
                options.read(true).write(*write || *create || *truncate).truncate(*truncate).create(*create);
                let opened = options.open(path(handle));
                let code = opened.as_ref().map(|_| ()).map_err(|error| error.raw_os_error().unwrap());
                handles[*handle] = opened.ok();
                (0, format!("{code:?}"))
            }
            Self::Close(handle) => {
                handles[*handle] = None;
                (0, String::new())
            }
            Self::Write(handle, at, bytes) => answer(open!(handle).write_all_at(bytes, *at)),
            Self::Append(file, bytes) => {
                answer(OpenOptions::new().append(true).open(path(file)).and_then(|mut file| {
                    file.write_all(bytes)?;
                    Ok(file.metadata()?.len())
                }))
            }
            Self::Read(handle, at, length) => {
                let mut bytes = vec![0; *length];
                answer(open!(handle).read_at(&mut bytes, *at).map(|read| hash(&bytes[..read])))
            }
            Self::Truncate(handle, length) => answer(open!(handle).set_len(*length)),
            Self::TruncatePath(file, length) => {
                answer(OpenOptions::new().write(true).open(path(file)).and_then(|file| file.set_len(*length)))
            }
            Self::Allocate(handle, at, length, mode) => {
                let mode = [
                    FallocateFlags::empty(),
                    FallocateFlags::KEEP_SIZE,
                    FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
                    FallocateFlags::ZERO_RANGE,
                    FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
                ][usize::from(*mode)];
                answer(rustix::fs::fallocate(open!(handle), mode, *at, *length).map_err(io::Error::from))
            }
            Self::Sync(handle) => answer(open!(handle).sync_all()),
            Self::Mapped(handle, at, bytes) => answer(write_mapped(open!(handle), *at, bytes)),
            Self::Stat(file) => answer(fs::metadata(path(file)).map(|data| (data.len(), data.nlink(), data.mode()))),
            Self::Unlink(file) => answer(fs::remove_file(path(file))),
            Self::Rename(from, to) => answer(fs::rename(path(from), path(to))),
        }
    }
}

/// Writes what lies within the file through a shared mapping.
fn write_mapped(file: &File, at: u64, bytes: &[u8]) -> io::Result<usize> {
    let length = (file.metadata()?.len().saturating_sub(at) as usize).min(bytes.len());
    if length == 0 {
        return Ok(0);
    }
    let start = at / 4096 * 4096;
    let skipped = (at - start) as usize;
    // SAFETY: the file is not cut while it is mapped, and nobody else looks at this memory.
    #[expect(unsafe_code, reason = "a mapping is what is tested")]
    unsafe {
        use rustix::mm::{MapFlags, MsyncFlags, ProtFlags};
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let size = skipped + length;
        let mapped = rustix::mm::mmap(std::ptr::null_mut(), size, protection, MapFlags::SHARED, file, start)?;
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), mapped.cast::<u8>().add(skipped), length);
        rustix::mm::msync(mapped, size, MsyncFlags::SYNC)?;
        rustix::mm::munmap(mapped, size)?;
    }
    Ok(length)
}

/// All files, whole.
fn contents(top: &Path) -> Vec<(PathBuf, u64, u64)> {
    let mut paths: Vec<PathBuf> = fs::read_dir(top).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let whole = |path: PathBuf| {
        let bytes = fs::read(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), bytes.len() as u64);
        (path.strip_prefix(top).unwrap().to_owned(), bytes.len() as u64, hash(&bytes))
    };
    paths.into_iter().map(whole).collect()
}

#[test]
fn random_operations_on_contents_have_the_results_that_they_have_locally() {
    let cluster = mounted(Options { more_mounts: vec!["second"], ..Options::default() });
    random_operations(&cluster, 0..6);
}

/// Does the same at random, seed by seed, in the first mount of a cluster with two and in a directory of this host, and
/// holds the results and the contents of the files against each other.
pub fn random_operations(cluster: &Cluster, seeds: Range<u64>) {
    let second = cluster.at_start.fuse[1].mount_point.join("fs");
    let local = tempfile::tempdir_in("/var/tmp").unwrap();
    for seed in seeds.clone() {
        let mut random = StdRng::seed_from_u64(seed);
        let (ours, theirs) = (cluster.path(format!("fs/{seed}")), local.path().join(seed.to_string()));
        fs::create_dir(&ours).unwrap();
        fs::create_dir(&theirs).unwrap();
        let (mut our_handles, mut their_handles) = ([const { None }; HANDLES], [const { None }; HANDLES]);
        for number in 0..1000 {
            let step = Step::random(&mut random);
            let (our, their) = (step.run(&ours, &mut our_handles), step.run(&theirs, &mut their_handles));
            assert_eq!(our, their, "seed {seed}, step {number}: {step:?}");
            if number % 100 == 99 {
                assert_eq!(contents(&ours), contents(&theirs), "seed {seed}, after step {number}");
            }
        }
        drop((our_handles, their_handles));
        assert_eq!(contents(&ours), contents(&theirs), "seed {seed}");
        // Over the other mount, which has seen nothing of it.
        assert_eq!(contents(&second.join(seed.to_string())), contents(&theirs), "seed {seed}, the other mount");
    }
    // From the workers, when no client remembers anything.
    cluster.stop("fuse0");
    cluster.start("fuse0");
    for seed in seeds {
        let name = seed.to_string();
        assert_eq!(contents(&cluster.path("fs").join(&name)), contents(&local.path().join(&name)));
    }
}

// ------------------------------------------------------------------------------------------------ details

#[test]
fn bytes_behind_the_end_never_come_back() {
    let cluster = mounted(Options::default());
    let path = cluster.path("fs/file");
    for (cut, then) in [(10u64, 5000u64), (MIB + 10, MIB + 200_000), (0, 3 * MIB), (2 * MIB, 2 * MIB + 1)] {
        fs::write(&path, vec![7; 3 * MIB as usize]).unwrap();
        let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        file.set_len(cut).unwrap();
        // By a length, and by a write behind it.
        match cut % 20 {
            0 => file.set_len(then).unwrap(),
            _ => file.write_all_at(b"x", then - 1).unwrap(),
        }
        drop(file);
        let bytes = fs::read(&path).unwrap();
        assert_eq!(bytes.len() as u64, then);
        assert!(bytes[..cut as usize].iter().all(|byte| *byte == 7));
        assert!(bytes[cut as usize..then as usize - 1].iter().all(|byte| *byte == 0), "{cut} to {then}");
    }
}

#[test]
fn a_file_looks_never_shorter_than_it_is_while_it_is_made_known() {
    let cluster = mounted(Options::default());
    for is_removed in [false, true] {
        let path = cluster.path(format!("fs/{is_removed}"));
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
        let reader = File::open(&path).unwrap();
        if is_removed {
            fs::remove_file(&path).unwrap();
        }
        let write_and_read = || {
            for step in 1..2000 {
                file.write_all_at(b"end", step * 1000).unwrap();
                // The kernel asks how long the file is before it says that there is nothing more.
                let mut bytes = [0; 10];
                let read = reader.read_at(&mut bytes, step * 1000).unwrap();
                assert_eq!(&bytes[..read], b"end", "removed: {is_removed}, step {step}");
                assert_eq!(reader.metadata().unwrap().len(), step * 1000 + 3, "removed: {is_removed}");
            }
        };
        thread::scope(|scope| {
            let writing = scope.spawn(write_and_read);
            while !writing.is_finished() {
                file.sync_all().unwrap();
            }
        });
    }
}

#[test]
fn times_that_are_set_before_the_close_stay() {
    let cluster = mounted(Options::default());
    let path = cluster.path("fs/file");
    let mut file = File::create(&path).unwrap();
    file.write_all(b"content").unwrap();
    let time = std::time::SystemTime::UNIX_EPOCH + Duration::new(1_000_000, 5);
    file.set_modified(time).unwrap();
    drop(file);
    assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), time);
    // A later write counts again.
    OpenOptions::new().append(true).open(&path).unwrap().write_all(b"more").unwrap();
    assert!(fs::metadata(&path).unwrap().modified().unwrap() > time);
}

#[test]
fn sparse_files_stay_sparse_and_may_be_huge() {
    let cluster = mounted(Options::default());
    let path = cluster.path("fs/sparse");
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
    file.write_all_at(b"end", (1 << 40) - 3).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 1 << 40);
    let mut bytes = [1; 3];
    file.read_exact_at(&mut bytes, 1 << 39).unwrap();
    assert_eq!(bytes, [0; 3]);
    file.read_exact_at(&mut bytes, (1 << 40) - 3).unwrap();
    assert_eq!(&bytes, b"end");
    assert_eq!(errno(file.set_len((1 << 44) + 1)), Errno::FBIG);
    assert_eq!(errno(file.write_at(b"x", 1 << 44)), Errno::FBIG);
    let seek = |from| rustix::fs::seek(&file, from).unwrap();
    let data = seek(rustix::fs::SeekFrom::Data(0));
    assert!((1 << 40) - 3 - data < MIB, "data begins at {data}");
    assert_eq!(seek(rustix::fs::SeekFrom::Hole(0)), 0);
    assert_eq!(seek(rustix::fs::SeekFrom::Hole((1 << 40) - 1)), 1 << 40);
}

#[test]
fn allocated_room_is_set_aside_on_the_disks_of_the_workers() {
    let cluster = mounted(Options::default());
    let file = File::create(cluster.path("fs/allocated")).unwrap();
    let data = cluster.at_start.workers[0].dirs[0].join("data");
    let taken = || -> u64 {
        let folders = fs::read_dir(&data).unwrap().map(|folder| folder.unwrap().path());
        let files = folders.flat_map(|folder| fs::read_dir(folder).unwrap());
        files.map(|file| file.unwrap().metadata().unwrap().blocks() * 512).sum()
    };
    assert_eq!(taken(), 0);
    rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, MIB / 2, 3 * MIB).unwrap();
    assert!((3 * MIB..4 * MIB).contains(&taken()), "{} bytes", taken());
    assert_eq!(file.metadata().unwrap().len(), 0);
    file.write_all_at(b"written", MIB).unwrap();
    assert!(taken() < 4 * MIB, "what is written goes there");
    assert_eq!(file.metadata().unwrap().len(), MIB + 7);
}

#[test]
fn what_is_removed_while_it_is_open_can_be_written_and_read() {
    let cluster = mounted(Options::default());
    let path = cluster.path("fs/file");
    let mut file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
    file.write_all(b"before").unwrap();
    fs::remove_file(&path).unwrap();
    fs::write(&path, b"another").unwrap();
    file.write_all(&[1; 100_000]).unwrap();
    file.sync_all().unwrap();
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(0)).unwrap();
    file.read_to_end(&mut bytes).unwrap();
    assert_eq!((bytes.len(), &bytes[..6]), (100_006, &b"before"[..]));
    assert_eq!(file.metadata().unwrap().nlink(), 0);
    assert_eq!(fs::read(&path).unwrap(), b"another");
}

#[test]
fn another_mount_sees_what_was_closed_and_then_what_was_synced() {
    let cluster = mounted(Options { more_mounts: vec!["second"], ..Options::default() });
    let mounts = [cluster.path("fs"), cluster.at_start.fuse[1].mount_point.join("fs")];
    let mut random = StdRng::seed_from_u64(1);
    for round in 0..20usize {
        let (here, there) = (mounts[round % 2].join("file"), mounts[1 - round % 2].join("file"));
        let bytes = noise(&mut random, 1000 + round * 150_000);
        // A reader that has it open, with the pages of the round before.
        let open = File::open(&there).ok();
        fs::write(&here, &bytes).unwrap();
        // At first the other mount knows that there is no such file.
        eventually("the new content", PATIENCE, || fs::read(&there).is_ok_and(|read| read == bytes).then_some(()));
        if let Some(open) = open {
            let mut seen = vec![0; bytes.len()];
            eventually("the new content of an open file", PATIENCE, || {
                (open.read_at(&mut seen, 0).unwrap() > 0 && open.metadata().unwrap().len() == bytes.len() as u64)
                    .then_some(())
            });
            open.read_exact_at(&mut seen, 0).unwrap();
            assert!(seen == bytes);
        }
    }
    // Synced, not closed.
    let file = OpenOptions::new().append(true).open(mounts[0].join("file")).unwrap();
    let before = file.metadata().unwrap().len();
    (&file).write_all(b"line\n").unwrap();
    file.sync_data().unwrap();
    let there = mounts[1].join("file");
    eventually("the line", PATIENCE, || (fs::metadata(&there).unwrap().len() == before + 5).then_some(()));
    assert!(fs::read(&there).unwrap().ends_with(b"line\n"));
}

#[test]
fn lines_of_a_log_that_stays_open_are_seen_by_others_and_outlive_their_client() {
    let conf = "[master]\npersist_delay = \"100ms\"\n".to_owned();
    let cluster = mounted(Options { more_mounts: vec!["second"], conf, ..Options::default() });
    let there = cluster.at_start.fuse[1].mount_point.join("fs/log");
    let mut log = OpenOptions::new().append(true).create(true).open(cluster.path("fs/log")).unwrap();
    log.write_all(b"a line\n").unwrap();
    eventually("the line", PATIENCE, || (fs::read(&there).ok()? == b"a line\n").then_some(()));
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    assert_eq!(cluster.s3.get("bucket", "fs/log"), "a line\n");
    cluster.kill("fuse0");
    assert_eq!(fs::read(&there).unwrap(), b"a line\n");
}

#[test]
fn synced_writes_are_there_after_all_processes_were_killed() {
    let cluster = mounted(Options { ..Options::default() });
    let mut random = StdRng::seed_from_u64(2);
    let mut kept = Vec::new();
    for number in 0..20usize {
        let bytes = noise(&mut random, 10 + number * 131_000);
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .custom_flags(if number % 2 == 0 { OFlags::SYNC.bits() as i32 } else { 0 })
            .open(cluster.path(format!("fs/{number}")))
            .unwrap();
        file.write_all(&bytes).unwrap();
        if number % 2 == 1 {
            file.sync_all().unwrap();
        }
        // It is never closed before the end.
        kept.push((number, bytes, file));
    }
    for process in ["fuse0", "worker0", "master0"] {
        cluster.kill(process);
    }
    let kept: Vec<_> = kept.into_iter().map(|(number, bytes, _file)| (number, bytes)).collect();
    for process in ["master0", "worker0", "fuse0"] {
        cluster.start(process);
    }
    for (number, bytes) in kept {
        let path = cluster.path(format!("fs/{number}"));
        let read = eventually("the file can be read", PATIENCE, || fs::read(&path).ok());
        assert!(read == bytes, "file {number}");
    }
}

#[test]
fn writers_go_on_while_their_worker_restarts() {
    let conf = "[master]\nworker_timeout = \"60s\"\n".to_owned();
    let cluster = mounted(Options { conf, ..Options::default() });
    let path = cluster.path("fs/file");
    let done = Arc::new(AtomicUsize::new(0));
    let writer = thread::spawn({
        let (path, done) = (path.clone(), Arc::clone(&done));
        move || {
            let mut random = StdRng::seed_from_u64(3);
            let mut file = File::create(path).unwrap();
            let mut all = Vec::new();
            for number in 1..=60 {
                let bytes = noise(&mut random, 300_000);
                file.write_all(&bytes).unwrap();
                file.sync_data().unwrap();
                all.extend_from_slice(&bytes);
                done.store(number, Ordering::Relaxed);
            }
            all
        }
    });
    while !writer.is_finished() {
        let before = done.load(Ordering::Relaxed);
        cluster.kill("worker0");
        cluster.start("worker0");
        let goes_on = || writer.is_finished() || done.load(Ordering::Relaxed) > before + 9;
        eventually("the writer goes on", PATIENCE, || goes_on().then_some(()));
    }
    assert!(fs::read(&path).unwrap() == writer.join().unwrap());
}

#[test]
fn readers_go_on_while_their_worker_restarts() {
    const FILES: usize = 4_000;
    let conf = "[master]\nworker_timeout = \"60s\"\n".to_owned();
    let cluster = mounted(Options { conf, ..Options::default() });
    let path = cluster.path("fs/many");
    fs::create_dir(&path).unwrap();
    (0..FILES).for_each(|number| fs::write(path.join(number.to_string()), number.to_string()).unwrap());
    // One that has no block open.
    cluster.stop("fuse");
    cluster.start("fuse");
    let done = Arc::new(AtomicUsize::new(0));
    let reader = thread::spawn({
        let done = Arc::clone(&done);
        move || {
            for number in 0..FILES {
                let read = fs::read(path.join(number.to_string())).unwrap_or_else(|error| panic!("{number}: {error}"));
                assert!(read == number.to_string().into_bytes(), "{number}");
                done.store(number, Ordering::Relaxed);
            }
        }
    });
    while !reader.is_finished() {
        let before = done.load(Ordering::Relaxed);
        cluster.kill("worker0");
        cluster.start("worker0");
        let goes_on = || reader.is_finished() || done.load(Ordering::Relaxed) > before + 500;
        eventually("the reader goes on", PATIENCE, || goes_on().then_some(()));
    }
    reader.join().unwrap();
}

#[test]
fn what_is_written_reaches_the_bucket_as_it_is() {
    let cluster = mounted(Options::default());
    let mut random = StdRng::seed_from_u64(4);
    fs::create_dir(cluster.path("fs/checkpoints")).unwrap();
    let mut expected = Vec::new();
    for number in 0..10usize {
        let bytes = noise(&mut random, number * 700_001);
        // As programs write checkpoints.
        let temporary = cluster.path(format!("fs/checkpoints/.{number}.tmp"));
        let mut file = File::create(&temporary).unwrap();
        file.write_all(&bytes).unwrap();
        file.sync_all().unwrap();
        fs::rename(&temporary, cluster.path(format!("fs/checkpoints/{number}"))).unwrap();
        expected.push(bytes);
    }
    let log = cluster.path("fs/log");
    for line in 0..50 {
        let mut log = OpenOptions::new().append(true).create(true).open(&log).unwrap();
        writeln!(log, "line {line}").unwrap();
    }
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "60s"]);
    for (number, bytes) in expected.iter().enumerate() {
        assert!(cluster.s3.get("bucket", &format!("fs/checkpoints/{number}")) == *bytes, "checkpoint {number}");
    }
    assert_eq!(cluster.s3.get("bucket", "fs/log"), fs::read(&log).unwrap());
}

#[test]
fn programs_find_a_file_system() {
    let cluster = mounted(Options::default());
    let top = cluster.path("fs");
    let run = |script: &str| {
        let done = Command::new("bash").args(["-euc", script]).current_dir(&top).output().unwrap();
        assert!(done.status.success(), "{script}\n{}", String::from_utf8_lossy(&done.stderr));
    };
    run("mkdir source && cd source && git init -q . && for n in $(seq 300); do echo $n > f$n; done \
         && git add . && git -c user.name=n -c user.email=e commit -qm all");
    run("git clone -q --no-hardlinks source clone && git -C clone fsck --strict && diff -r -x .git source clone");
    run("tar cf source.tar source && mkdir there && tar xf source.tar -C there && diff -r source there/source");
}
