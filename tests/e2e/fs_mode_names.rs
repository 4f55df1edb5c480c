//! Names and inodes of fs-mode mounts: as on a local file system, seen by every mount, and neither lost nor made twice
//! when the master is killed.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cavern_tests::{Cluster, Options, eventually};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustix::fs::{AtFlags, CWD, FallocateFlags, FileType, Mode, RenameFlags, Timespec, Timestamps, XattrFlags};
use rustix::io::Errno;

/// For an invalidation to reach another mount.
const PATIENCE: Duration = Duration::from_secs(10);

fn mounted(options: Options) -> Cluster {
    let cluster = Cluster::up(options);
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &[]);
    cluster
}

#[track_caller]
fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> Errno {
    Errno::from_io_error(&result.unwrap_err()).unwrap()
}

// ------------------------------------------------------------------------------- against a local directory

/// What one operation answered: 0 or an errno, and what else it returned.
type Answer = (i32, String);

fn answer<T: std::fmt::Debug>(result: rustix::io::Result<T>) -> Answer {
    match result {
        Ok(value) => (0, format!("{value:?}")),
        Err(errno) => (errno.raw_os_error(), String::new()),
    }
}

/// One operation on names below a directory.
#[derive(Clone, Debug)]
enum Step {
    Mkdir(PathBuf, u32),
    Mknod(PathBuf, u32, bool),
    Symlink(PathBuf),
    Link(PathBuf, PathBuf),
    Unlink(PathBuf),
    Rmdir(PathBuf),
    Rename(PathBuf, PathBuf, u8),
    Chmod(PathBuf, u32),
    Chown(PathBuf, u32, u32),
    Utimes(PathBuf, i64, i64),
    SetXattr(PathBuf, u8, u8),
    GetXattr(PathBuf, u8),
    RemoveXattr(PathBuf, u8),
    Readlink(PathBuf),
    Read(PathBuf),
    /// Bytes at an offset.
    Write(PathBuf, u64, u8),
    Truncate(PathBuf, u64),
    List(PathBuf),
}

impl Step {
    fn random(random: &mut StdRng) -> Self {
        // Few names, so that most operations meet something.
        let path = |random: &mut StdRng| -> PathBuf {
            (0..random.random_range(1..=3)).map(|_| ["a", "b", "c", "d"][random.random_range(0..4)]).collect()
        };
        let at = path(random);
        let mode = random.random_range(0..0o1000) | 0o700;
        match random.random_range(0..28) {
            0..=4 => Self::Mkdir(at, mode),
            5 | 6 => Self::Mknod(at, mode, random.random()),
            7 => Self::Symlink(at),
            8 | 9 => Self::Link(at, path(random)),
            10 | 11 => Self::Unlink(at),
            12 => Self::Rmdir(at),
            13..=16 => Self::Rename(at, path(random), random.random_range(0..3)),
            17 => Self::Chmod(at, random.random_range(0..0o10000)),
            18 => Self::Chown(at, random.random_range(0..3), random.random_range(0..3)),
            19 => Self::Utimes(at, random.random_range(-1000..1_000_000), random.random_range(0..1_000_000_000)),
            20 => Self::SetXattr(at, random.random_range(0..3), random.random_range(0..3)),
            21 => match random.random() {
                true => Self::GetXattr(at, random.random_range(0..3)),
                false => Self::RemoveXattr(at, random.random_range(0..3)),
            },
            22 => match random.random() {
                true => Self::Readlink(at),
                false => Self::Read(at),
            },
            23 | 24 => Self::Write(at, random.random_range(0..5000), random.random()),
            25 => Self::Truncate(at, random.random_range(0..6000)),
            26 => Self::Read(at),
            _ => Self::List(at),
        }
    }

    fn run(&self, top: &Path) -> Answer {
        let at = |path: &Path| top.join(path);
        match self {
            Self::Mkdir(path, mode) => answer(rustix::fs::mkdirat(CWD, at(path), Mode::from_raw_mode(*mode))),
            Self::Mknod(path, mode, fifo) => {
                let kind = if *fifo { FileType::Fifo } else { FileType::RegularFile };
                answer(rustix::fs::mknodat(CWD, at(path), kind, Mode::from_raw_mode(*mode), 0))
            }
            Self::Symlink(path) => answer(rustix::fs::symlinkat("../somewhere", CWD, at(path))),
            Self::Link(from, to) => answer(rustix::fs::linkat(CWD, at(from), CWD, at(to), AtFlags::empty())),
            Self::Unlink(path) => answer(rustix::fs::unlinkat(CWD, at(path), AtFlags::empty())),
            Self::Rmdir(path) => answer(rustix::fs::unlinkat(CWD, at(path), AtFlags::REMOVEDIR)),
            Self::Rename(from, to, mode) => {
                let flags = [RenameFlags::empty(), RenameFlags::NOREPLACE, RenameFlags::EXCHANGE][usize::from(*mode)];
                answer(rustix::fs::renameat_with(CWD, at(from), CWD, at(to), flags))
            }
            Self::Chmod(path, mode) => {
                if at(path).is_symlink() {
                    return (0, String::new());
                }
                // What root needs to go on.
                answer(rustix::fs::chmodat(CWD, at(path), Mode::from_raw_mode(*mode | 0o700), AtFlags::empty()))
            }
            Self::Chown(path, uid, gid) => answer(rustix::fs::chownat(
                CWD,
                at(path),
                Some(rustix::fs::Uid::from_raw(*uid)),
                Some(rustix::fs::Gid::from_raw(*gid)),
                AtFlags::SYMLINK_NOFOLLOW,
            )),
            Self::Utimes(path, seconds, nanoseconds) => {
                let time = Timespec { tv_sec: *seconds, tv_nsec: *nanoseconds };
                let times = Timestamps { last_access: time, last_modification: time };
                let set = rustix::fs::utimensat(CWD, at(path), &times, AtFlags::SYMLINK_NOFOLLOW);
                answer(set.map(|()| {
                    let data = at(path).symlink_metadata().unwrap();
                    (data.mtime(), data.mtime_nsec(), data.atime(), data.atime_nsec())
                }))
            }
            Self::SetXattr(path, name, mode) => {
                let flags = [XattrFlags::empty(), XattrFlags::CREATE, XattrFlags::REPLACE][usize::from(*mode)];
                let value = vec![b'v'; usize::from(*name) * 100];
                answer(rustix::fs::lsetxattr(at(path), format!("user.{name}"), &value, flags))
            }
            Self::GetXattr(path, name) => {
                let mut value = [0u8; 150];
                answer(rustix::fs::lgetxattr(at(path), format!("user.{name}"), &mut value[..]))
            }
            Self::RemoveXattr(path, name) => answer(rustix::fs::lremovexattr(at(path), format!("user.{name}"))),
            Self::Readlink(path) => answer(rustix::fs::readlinkat(CWD, at(path), Vec::new())),
            Self::Read(path) | Self::Write(path, ..) | Self::Truncate(path, _)
                if !at(path).symlink_metadata().is_ok_and(|data| data.is_file()) =>
            {
                (0, String::new())
            }
            Self::Write(path, offset, byte) => answer(write_at(&at(path), *offset, &[*byte; 100])),
            Self::Truncate(path, length) => {
                let file = OpenOptions::new().write(true).open(at(path));
                answer(file.and_then(|file| file.set_len(*length)).map_err(|error| errno_of(&error)))
            }
            Self::Read(path) => answer(fs::read(at(path)).map_err(|error| Errno::from_io_error(&error).unwrap())),
            Self::List(path) => answer(names(&at(path)).map_err(|error| Errno::from_io_error(&error).unwrap())),
        }
    }
}

fn errno_of(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap()
}

/// Opens, writes and closes.
fn write_at(path: &Path, offset: u64, bytes: &[u8]) -> rustix::io::Result<()> {
    let file = OpenOptions::new().write(true).open(path).map_err(|error| errno_of(&error))?;
    file.write_all_at(bytes, offset).map_err(|error| errno_of(&error))
}

fn names(directory: &Path) -> io::Result<Vec<String>> {
    let entries = fs::read_dir(directory)?.map(|entry| Ok(entry?.file_name().into_string().unwrap()));
    let mut names = entries.collect::<io::Result<Vec<String>>>()?;
    names.sort();
    Ok(names)
}

/// What a name shows, but for what file systems are free to choose.
#[derive(Debug, PartialEq, Eq)]
struct Shown {
    kind: &'static str,
    mode: u32,
    owner: (u32, u32),
    links: u64,
    target: Option<PathBuf>,
    xattrs: BTreeMap<String, Vec<u8>>,
    /// The first path, in their order, of the same inode.
    first: PathBuf,
}

fn tree(top: &Path) -> BTreeMap<PathBuf, Shown> {
    let (mut paths, mut left) = (Vec::new(), vec![top.to_owned()]);
    while let Some(directory) = left.pop() {
        for name in names(&directory).unwrap() {
            let path = directory.join(name);
            if path.symlink_metadata().unwrap().is_dir() {
                left.push(path.clone());
            }
            paths.push(path);
        }
    }
    paths.sort();
    let mut first = HashMap::new();
    let shown = paths.into_iter().map(|path| {
        let below = path.strip_prefix(top).unwrap().to_owned();
        let data = path.symlink_metadata().unwrap();
        let kind = match data.file_type() {
            kind if kind.is_dir() => "directory",
            kind if kind.is_symlink() => "symlink",
            kind if kind.is_fifo() => "fifo",
            kind if kind.is_file() => "file",
            _ => "other",
        };
        let mut list = [0u8; 1024];
        let length = rustix::fs::llistxattr(&path, &mut list[..]).unwrap();
        let listed = list[..length].split(|byte| *byte == 0).filter(|name| name.starts_with(b"user."));
        let xattrs = listed.map(|name| {
            let (name, mut value) = (String::from_utf8(name.to_vec()).unwrap(), [0u8; 1024]);
            let length = rustix::fs::lgetxattr(&path, &name, &mut value[..]).unwrap();
            (name, value[..length].to_vec())
        });
        let shown = Shown {
            kind,
            mode: data.mode() & 0o7777,
            owner: (data.uid(), data.gid()),
            links: data.nlink(),
            target: fs::read_link(&path).ok(),
            xattrs: xattrs.collect(),
            first: first.entry(data.ino()).or_insert_with(|| below.clone()).clone(),
        };
        (below, shown)
    });
    shown.collect()
}

#[test]
fn random_changes_have_the_results_that_they_have_locally() {
    let cluster = mounted(Options { more_mounts: vec!["second"], ..Options::default() });
    // Not /tmp, which may lack extended attributes.
    let local = tempfile::tempdir_in("/var/tmp").unwrap();
    for seed in 0..4u64 {
        let mut random = StdRng::seed_from_u64(seed);
        let (ours, theirs) = (cluster.path(format!("fs/{seed}")), local.path().join(seed.to_string()));
        fs::create_dir(&ours).unwrap();
        fs::create_dir(&theirs).unwrap();
        for number in 0..700 {
            let step = Step::random(&mut random);
            assert_eq!(step.run(&ours), step.run(&theirs), "seed {seed}, step {number}: {step:?}");
        }
        assert_eq!(tree(&ours), tree(&theirs), "seed {seed}");
    }
    // The other mount, which has seen nothing of all this, and this one after its caches are gone.
    let second = &cluster.at_start.fuse[1].mount_point;
    assert_eq!(tree(&second.join("fs")), tree(local.path()));
    cluster.stop("fuse0");
    cluster.start("fuse0");
    assert_eq!(tree(&cluster.path("fs")), tree(local.path()));
}

// ------------------------------------------------------------------------------------------- two mounts

/// A number that the environment may give.
fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| text.parse().unwrap())
}

/// `CAVERN_STEPS` and `CAVERN_SEEDS` have it go on for longer.
#[test]
fn in_a_strict_mount_the_very_next_call_on_any_mount_sees_a_change() {
    let cluster = Cluster::up(Options { more_mounts: vec!["second"], ..Options::default() });
    cluster.s3.create_bucket("bucket");
    cluster.mount_fs_mode("s3://bucket/fs", "/fs", &["--consistency", "strict"]);
    let mounts = [cluster.path("fs"), cluster.at_start.fuse[1].mount_point.join("fs")];
    let local = tempfile::tempdir_in("/var/tmp").unwrap();
    let first = number("CAVERN_SEED", 100);
    for seed in first..first + number("CAVERN_SEEDS", 2) {
        let mut random = StdRng::seed_from_u64(seed);
        let ours = mounts.each_ref().map(|mount| mount.join(seed.to_string()));
        let theirs = local.path().join(seed.to_string());
        fs::create_dir(&ours[0]).unwrap();
        fs::create_dir(&theirs).unwrap();
        for number in 0..number("CAVERN_STEPS", 1000) {
            let step = Step::random(&mut random);
            let mount = random.random_range(0..2);
            assert_eq!(step.run(&ours[mount]), step.run(&theirs), "seed {seed}, step {number} at {mount}: {step:?}");
        }
        for ours in &ours {
            assert_eq!(tree(ours), tree(&theirs), "seed {seed}");
        }
    }
    // Two who change one directory at a time keep each other waiting for a moment, and not for a lease.
    let begun = Instant::now();
    thread::scope(|scope| {
        for (mount, number) in mounts.iter().zip(0..) {
            scope.spawn(move || {
                for file in 0..200 {
                    fs::write(mount.join(format!("{number}-{file}")), "x").unwrap();
                }
            });
        }
    });
    let took = begun.elapsed();
    eprintln!("400 files by two mounts in one directory: {took:?}");
    assert!(took < PATIENCE * 3, "{took:?}");
    assert!(mounts.iter().all(|mount| names(mount).unwrap().iter().filter(|name| name.contains('-')).count() == 400));
    let refused = cluster.try_cv(&["mount", "update", "/fs", "--consistency", "ttl"]);
    assert!(refused.code != 0 && refused.stderr.contains("fs-mode"), "{refused:?}");
}

#[test]
fn two_mounts_see_each_others_changes() {
    let cluster = mounted(Options { more_mounts: vec!["second"], ..Options::default() });
    let mounts = [cluster.path("fs"), cluster.at_start.fuse[1].mount_point.join("fs")];
    let mut slowest = Duration::ZERO;
    let mut seen = |what: &str, state: &dyn Fn() -> bool| {
        let began = Instant::now();
        eventually(what, PATIENCE, || state().then_some(()));
        slowest = slowest.max(began.elapsed());
    };
    for round in 0..40 {
        let (here, there) = (&mounts[round % 2], &mounts[1 - round % 2]);
        let [a, b] = [format!("a{round}"), format!("b{round}")];
        // Looked for in vain, and listed: kernel and client have cached that.
        assert!(!there.join(&a).exists());
        let before = names(there).unwrap();
        fs::create_dir(here.join(&a)).unwrap();
        seen("a new directory", &|| there.join(&a).is_dir());
        seen("a new name in a listing", &|| names(there).unwrap().len() == before.len() + 1);
        fs::set_permissions(here.join(&a), fs::Permissions::from_mode(0o711)).unwrap();
        seen("permissions", &|| fs::metadata(there.join(&a)).unwrap().mode() & 0o7777 == 0o711);
        fs::rename(here.join(&a), here.join(&b)).unwrap();
        seen("a rename", &|| !there.join(&a).exists() && there.join(&b).is_dir());
        symlink("x", there.join(&b).join("link")).unwrap();
        seen("a symlink", &|| fs::read_link(here.join(&b).join("link")).is_ok_and(|target| target == Path::new("x")));
        fs::hard_link(there.join(&b).join("link"), there.join(&a)).unwrap();
        seen("two links", &|| here.join(&a).symlink_metadata().is_ok_and(|data| data.nlink() == 2));
        fs::remove_file(here.join(&b).join("link")).unwrap();
        seen("one link", &|| there.join(&a).symlink_metadata().unwrap().nlink() == 1);
        fs::remove_dir(there.join(&b)).unwrap();
        fs::remove_file(here.join(&a)).unwrap();
        seen("nothing", &|| !here.join(&b).exists() && there.join(&a).symlink_metadata().is_err());
        seen("the old listing", &|| names(there).unwrap() == before && names(here).unwrap() == before);
    }
    eprintln!("a change was seen by the other mount within {slowest:?}");
}

#[test]
fn what_is_open_keeps_its_attributes_when_it_is_removed_elsewhere() {
    let conf = "[master]\nsession_lease = \"1500ms\"\n".to_owned();
    let cluster = mounted(Options { more_mounts: vec!["second"], conf, ..Options::default() });
    let (here, there) = (cluster.path("fs"), cluster.at_start.fuse[1].mount_point.join("fs"));
    let mknod = |path: PathBuf| rustix::fs::mknodat(CWD, path, FileType::RegularFile, Mode::RUSR, 0).unwrap();
    mknod(here.join("file"));
    mknod(here.join("unopened"));
    fs::create_dir(here.join("directory")).unwrap();
    let (file, directory) = (File::open(here.join("file")).unwrap(), File::open(here.join("directory")).unwrap());
    let (of_file, of_directory) = (file.metadata().unwrap(), directory.metadata().unwrap());
    let inodes = || cluster.cv(&["report", "--json"]).json()["inodes"].as_u64().unwrap();
    let before = inodes();
    fs::remove_file(there.join("file")).unwrap();
    fs::remove_file(there.join("unopened")).unwrap();
    fs::remove_dir(there.join("directory")).unwrap();
    // What nobody has open is deleted, and with it anything that nobody holds.
    eventually("the unopened file is deleted", Duration::from_secs(30), || (inodes() == before - 1).then_some(()));
    eventually("the loss of the last name is seen", PATIENCE, || (file.metadata().unwrap().nlink() == 0).then_some(()));
    assert_eq!(directory.metadata().unwrap().ino(), of_directory.ino());
    // The inode is still there at the master.
    file.set_permissions(fs::Permissions::from_mode(0o640)).unwrap();
    let now = file.metadata().unwrap();
    assert_eq!((now.ino(), now.mode() & 0o7777, now.mtime()), (of_file.ino(), 0o640, of_file.mtime()));
    // The kernel is told of names by another thread than of inodes.
    eventually("the loss of the name is seen", PATIENCE, || {
        (fs::metadata(here.join("file")).err()?.kind() == io::ErrorKind::NotFound).then_some(())
    });
    drop((file, directory));
    eventually("what is closed is deleted", Duration::from_secs(30), || (inodes() == before - 3).then_some(()));
}

// --------------------------------------------------------------------------------------------- failures

#[test]
fn a_killed_master_delays_changes_and_none_is_lost_or_made_twice() {
    const THREADS: usize = 8;
    let conf = "[client]\nmetadata_timeout = \"30s\"\n".to_owned();
    let cluster = mounted(Options { conf, ..Options::default() });
    let (done, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let counts: Vec<usize> = thread::scope(|scope| {
        let writers: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (top, done, stop) = (cluster.path(format!("fs/{thread}")), &done, &stop);
                scope.spawn(move || {
                    fs::create_dir(&top).unwrap();
                    let mut count = 0;
                    while !stop.load(Ordering::Relaxed) {
                        // Made twice, each of these would fail: EEXIST, ENOENT, ENOENT.
                        let (old, new) = (top.join(format!("old{count}")), top.join(format!("new{count}")));
                        fs::create_dir(&old).unwrap_or_else(|error| panic!("{}: {error}", old.display()));
                        fs::rename(&old, &new).unwrap_or_else(|error| panic!("{}: {error}", new.display()));
                        if count % 3 == 0 {
                            fs::remove_dir(&new).unwrap_or_else(|error| panic!("{}: {error}", new.display()));
                        }
                        count += 1;
                        done.fetch_add(1, Ordering::Relaxed);
                    }
                    count
                })
            })
            .collect();
        for _ in 0..3 {
            let before = done.load(Ordering::Relaxed);
            eventually("changes go on", Duration::from_secs(60), || {
                (done.load(Ordering::Relaxed) > before + 50 || writers.iter().any(|writer| writer.is_finished()))
                    .then_some(())
            });
            cluster.kill("master");
            cluster.start("master");
        }
        let before = done.load(Ordering::Relaxed);
        eventually("changes go on", Duration::from_secs(60), || {
            (done.load(Ordering::Relaxed) > before + 50 || writers.iter().any(|writer| writer.is_finished()))
                .then_some(())
        });
        stop.store(true, Ordering::Relaxed);
        writers.into_iter().map(|writer| writer.join().unwrap()).collect()
    });
    for (thread, count) in counts.into_iter().enumerate() {
        let mut expected: Vec<String> =
            (0..count).filter(|number| number % 3 != 0).map(|number| format!("new{number}")).collect();
        expected.sort();
        assert_eq!(names(&cluster.path(format!("fs/{thread}"))).unwrap(), expected);
    }
}

#[test]
fn ten_thousand_directories_are_made_by_sixteen_threads() {
    const THREADS: usize = 16;
    const EACH: usize = 625;
    let cluster = mounted(Options { more_mounts: vec!["second"], ..Options::default() });
    let top = cluster.path("fs");
    let began = Instant::now();
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let top = &top;
            scope.spawn(move || {
                for number in 0..EACH {
                    fs::create_dir(top.join(format!("{thread}-{number}"))).unwrap();
                }
            });
        }
    });
    eprintln!("{:.0} directories made per second", (THREADS * EACH) as f64 / began.elapsed().as_secs_f64());
    let mut expected: Vec<String> =
        (0..THREADS).flat_map(|thread| (0..EACH).map(move |number| format!("{thread}-{number}"))).collect();
    expected.sort();
    for mount in [&top, &cluster.at_start.fuse[1].mount_point.join("fs")] {
        assert_eq!(names(mount).unwrap(), expected);
        assert_eq!(fs::metadata(mount).unwrap().nlink() as usize, 2 + THREADS * EACH);
    }
}

// ------------------------------------------------------------------------------------------- the edges

/// Undone, whatever became of the test.
struct Overlay(PathBuf);

impl Drop for Overlay {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[track_caller]
fn assert_whiteout(path: &Path) {
    let left = path.symlink_metadata().unwrap();
    assert!(left.file_type().is_char_device() && left.rdev() == 0, "{left:?}");
    assert_eq!(left.permissions().mode() & 0o7777, 0);
}

#[test]
fn a_rename_may_leave_a_whiteout_and_the_upper_layer_of_an_overlay_may_be_here() {
    let cluster = mounted(Options { more_mounts: vec!["second"], ..Options::default() });
    let at = |path: &str| cluster.path("fs").join(path);
    let rename =
        |from: &str, to: &str, flags: RenameFlags| rustix::fs::renameat_with(CWD, at(from), CWD, at(to), flags);
    fs::create_dir(at("held")).unwrap();
    for directory in ["", "held/"] {
        let [a, b] = ["a", "b"].map(|name| format!("{directory}{name}"));
        fs::write(at(&a), "a").unwrap();
        fs::write(at(&b), "b").unwrap();
        assert_eq!(rename(&a, &b, RenameFlags::WHITEOUT | RenameFlags::NOREPLACE), Err(Errno::EXIST));
        assert_eq!(rename(&a, &b, RenameFlags::WHITEOUT | RenameFlags::EXCHANGE), Err(Errno::INVAL));
        rename(&a, &b, RenameFlags::WHITEOUT).unwrap();
        assert_whiteout(&at(&a));
        assert_eq!(fs::read(at(&b)).unwrap(), b"a");
        let second = cluster.directory().join("second/fs");
        assert_whiteout(&second.join(&a));
        assert_eq!(fs::read(second.join(&b)).unwrap(), b"a");
        // Over another whiteout.
        rename(&b, &a, RenameFlags::WHITEOUT).unwrap();
        assert_whiteout(&at(&b));
        assert_eq!(fs::read(at(&a)).unwrap(), b"a");
    }
    cluster.cv(&["persist", "wait", "/fs"]);
    let objects = ["fs/a", "fs/b"].map(|key| cluster.s3.get("bucket", key));
    assert_eq!(objects, ["a", ""]);

    let local = tempfile::tempdir().unwrap();
    let [lower, merged] = ["lower", "merged"].map(|name| local.path().join(name));
    for directory in [&lower, &lower.join("d"), &merged, &at("upper"), &at("work")] {
        fs::create_dir(directory).unwrap();
    }
    for name in ["gone", "moved", "changed", "kept"] {
        fs::write(lower.join(name), name).unwrap();
    }
    let [lower, upper, work] = [&lower, &at("upper"), &at("work")].map(|path| path.to_str().unwrap().to_owned());
    let options = format!("lowerdir={lower},upperdir={upper},workdir={work}");
    let mount = Command::new("mount").args(["-t", "overlay", "overlay", "-o", &options]).arg(&merged).output().unwrap();
    assert!(mount.status.success(), "{mount:?}");
    let overlay = Overlay(merged);
    let merged = |name: &str| overlay.0.join(name);
    fs::remove_file(merged("gone")).unwrap();
    fs::rename(merged("moved"), merged("d/moved")).unwrap();
    fs::write(merged("changed"), "anew").unwrap();
    assert_eq!(names(&overlay.0).unwrap(), ["changed", "d", "kept"]);
    assert_eq!(fs::read(merged("d/moved")).unwrap(), b"moved");
    assert_eq!(fs::read(merged("changed")).unwrap(), b"anew");
    assert_eq!(fs::read(merged("kept")).unwrap(), b"kept");
    drop(overlay);
    assert_whiteout(&at("upper/gone"));
    assert_whiteout(&at("upper/moved"));
    assert_eq!(fs::read(at("upper/changed")).unwrap(), b"anew");
}

#[test]
fn what_cannot_be_done_says_so() {
    let cluster = mounted(Options::default());
    cluster.s3.put("bucket", "objects/object", "object");
    cluster.mount("s3://bucket/objects", "/objects", &[]);
    cluster.mount_fs_mode("s3://bucket/other", "/other", &[]);
    let at = |path: &str| cluster.path(path);
    let mknod = |path: &str, kind| {
        let device = rustix::fs::makedev(7, 300);
        rustix::fs::mknodat(CWD, at(path), kind, Mode::from_raw_mode(0o644), device).unwrap();
    };
    mknod("fs/file", FileType::RegularFile);
    fs::create_dir(at("fs/directory")).unwrap();

    // Between mounts.
    assert_eq!(errno(fs::rename(at("fs/file"), at("other/file"))), Errno::XDEV);
    assert_eq!(errno(fs::rename(at("objects/object"), at("other/object"))), Errno::XDEV);
    assert_eq!(errno(fs::hard_link(at("fs/file"), at("other/file"))), Errno::XDEV);
    // The same mount again is nothing new.
    let options = cluster.bucket_options();
    let mount = |uri: &str, path: &str| {
        let mut arguments = vec!["mount", uri, path, "--write-type", "fs_mode"];
        arguments.extend(options.iter().flat_map(|option| ["-c", option.as_str()]));
        cluster.try_cv(&arguments)
    };
    cluster.cv(&["persist", "wait", "/fs"]);
    assert_eq!(mount("s3://bucket/fs", "/fs").code, 0);
    // Neither objects nor what is above the mounts can be changed.
    assert_eq!(errno(fs::create_dir(at("objects/new"))), Errno::ROFS);
    assert_eq!(errno(fs::rename(at("objects/object"), at("objects/new"))), Errno::ROFS);
    assert_eq!(errno(fs::remove_dir(at("fs"))), Errno::ROFS);
    assert_eq!(errno(fs::create_dir(at("new"))), Errno::ROFS);
    assert_eq!(errno(OpenOptions::new().write(true).open(at("objects/object"))), Errno::ROFS);
    assert_eq!(errno(File::create(at("objects/new"))), Errno::ROFS);
    let append = OpenOptions::new().append(true).open(at("fs/file")).unwrap();
    assert_eq!(
        errno(rustix::fs::fallocate(&append, FallocateFlags::COLLAPSE_RANGE, 0, 4096).map_err(io::Error::from)),
        Errno::OPNOTSUPP
    );
    // Times of more nanoseconds than are kept. Nothing of the call is done.
    let set_times = |seconds: [i64; 2]| {
        let [last_access, last_modification] = seconds.map(|tv_sec| Timespec { tv_sec, tv_nsec: 0 });
        let times = Timestamps { last_access, last_modification };
        rustix::fs::utimensat(CWD, at("fs/file"), &times, AtFlags::empty())
    };
    let last = 9_223_372_036;
    set_times([-last, last]).unwrap();
    for beyond in [last + 1, 10_413_792_000, -last - 2, i64::MAX, i64::MIN] {
        assert_eq!(set_times([1, beyond]), Err(Errno::INVAL), "{beyond}");
        assert_eq!(set_times([beyond, 1]), Err(Errno::INVAL), "{beyond}");
    }
    let kept = fs::metadata(at("fs/file")).unwrap();
    assert_eq!((kept.atime(), kept.mtime()), (-last, last));
    // Names and targets.
    assert_eq!(errno(fs::create_dir(at(&format!("fs/{}", "n".repeat(256))))), Errno::NAMETOOLONG);
    fs::create_dir(at(&format!("fs/{}", "n".repeat(255)))).unwrap();
    assert_eq!(errno(fs::rename(at("fs/directory"), at("fs/directory/below"))), Errno::INVAL);
    let target = "t/".repeat(2000);
    symlink(&target, at("fs/link")).unwrap();
    assert_eq!(fs::read_link(at("fs/link")).unwrap(), Path::new(&target));
    assert_eq!(at("fs/link").symlink_metadata().unwrap().len(), 4000);
    // Devices and sockets.
    mknod("fs/device", FileType::CharacterDevice);
    mknod("fs/socket", FileType::Socket);
    let device = fs::metadata(at("fs/device")).unwrap();
    assert!(device.file_type().is_char_device() && fs::metadata(at("fs/socket")).unwrap().file_type().is_socket());
    assert_eq!((rustix::fs::major(device.rdev()), rustix::fs::minor(device.rdev())), (7, 300));
    // Extended attributes.
    let (file, none) = (at("fs/file"), XattrFlags::empty());
    rustix::fs::setxattr(&file, "user.a", &vec![1; 60_000], none).unwrap();
    rustix::fs::setxattr(&file, "trusted.b", b"", none).unwrap();
    let mut list = [0u8; 100];
    let length = rustix::fs::listxattr(&file, &mut list[..]).unwrap();
    assert_eq!(&list[..length], b"trusted.b\0user.a\0");
    assert_eq!(rustix::fs::getxattr(&file, "user.a", &mut list[..]), Err(Errno::RANGE));
    assert_eq!(rustix::fs::getxattr(&file, "user.cavern.key", &mut list[..]), Err(Errno::NODATA));
    rustix::fs::removexattr(&file, "user.a").unwrap();
    assert_eq!(rustix::fs::getxattr(&file, "user.a", &mut list[..]), Err(Errno::NODATA));
}

// ------------------------------------------------------------------------------- many names

/// Ends what runs beside a test, however that ends.
struct Ending<'a>(&'a AtomicBool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// `CAVERN_LINKS` says how many there are in each of four directories.
#[test]
fn ten_thousand_links_to_a_file_come_and_go_while_others_are_served() {
    const DIRECTORIES: usize = 4;
    let links = number("CAVERN_LINKS", 2500) as usize;
    let conf = "[master]\npersist_delay = \"100ms\"\n".to_owned();
    let cluster = mounted(Options { conf, ..Options::default() });
    let top = cluster.path("fs");
    fs::write(top.join("file"), "content").unwrap();
    let directories: Vec<PathBuf> = (0..DIRECTORIES).map(|number| top.join(format!("d{number}"))).collect();
    directories.iter().for_each(|directory| fs::create_dir(directory).unwrap());
    let in_each = |work: &(dyn Fn(&Path) -> io::Result<()> + Sync)| {
        thread::scope(|scope| {
            for directory in &directories {
                scope.spawn(move || {
                    (0..links).try_for_each(|number| work(&directory.join(number.to_string()))).unwrap()
                });
            }
        });
    };
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let others = scope.spawn(|| {
            let (other, mut served) = (top.join("other"), 0);
            while !is_over.load(Ordering::Acquire) {
                fs::write(&other, "1").unwrap();
                assert!(other.symlink_metadata().unwrap().is_file());
                fs::remove_file(&other).unwrap();
                assert!(other.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound));
                served += 1;
            }
            served
        });
        let ending = Ending(&is_over);
        in_each(&|path: &Path| fs::hard_link(top.join("file"), path));
        assert_eq!(fs::metadata(top.join("file")).unwrap().nlink(), (DIRECTORIES * links + 1) as u64);
        // The bucket is on its way to have them.
        eventually("some links are objects", PATIENCE * 6, || (cluster.s3.requests("PUT") > 1000).then_some(()));
        in_each(&|path: &Path| fs::remove_file(path));
        assert_eq!(fs::metadata(top.join("file")).unwrap().nlink(), 1);
        directories.iter().for_each(|directory| fs::remove_dir(directory).unwrap());
        cluster.cv(&["persist", "wait", "/fs/file", "--timeout", "10m"]);
        drop(ending);
        assert!(others.join().unwrap() > 0);
    });
    cluster.cv(&["persist", "wait", "/fs", "--timeout", "10m"]);
    let objects = crate::bucket::Bucket::of(&cluster, "bucket").objects();
    assert_eq!(objects, [("fs/file".to_owned(), "content".into())].into());
}
