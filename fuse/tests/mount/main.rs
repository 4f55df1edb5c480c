//! The whole mount, from `run` to unmounted: a real kernel mount, a master in memory, a directory as the bucket, no
//! worker.

// Helpers of tests report by panicking, where the test sees it.
#![allow(clippy::unwrap_used)]

mod master;
mod played;
mod stuck;

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use cavern_conf::schema::Choice;
use cavern_conf::{Config, Interval};
use cavern_fuse::FuseError;
use cavern_proto::master::watch_event::Event;
use master::Master;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

const DEADLINE: Duration = Duration::from_secs(20);

struct Mounted {
    directory: tempfile::TempDir,
    master: Master,
    stop: CancellationToken,
    stop_master: CancellationToken,
    running: Option<JoinHandle<Result<(), FuseError>>>,
    runtime: Runtime,
}

impl Mounted {
    /// A mount of a bucket with these objects, each with its key as its content. `change` sees the configuration.
    fn new(keys: &[&str], change: impl FnOnce(&mut Config)) -> Self {
        Self::start(keys, false, change)
    }

    /// The same, of a bucket that can be written to.
    fn writable(keys: &[&str], change: impl FnOnce(&mut Config)) -> Self {
        Self::start(keys, true, change)
    }

    fn start(keys: &[&str], is_writable: bool, change: impl FnOnce(&mut Config)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        for key in keys {
            put(directory.path(), key, key.as_bytes());
        }
        fs::create_dir_all(directory.path().join("bucket")).unwrap();
        let (stop, stop_master) = (CancellationToken::new(), CancellationToken::new());
        let bucket = directory.path().join("bucket");
        let (master, address) = runtime.block_on(Master::start(&bucket, is_writable, stop_master.clone()));
        let mut config = Config::default();
        config.cluster.masters = vec![address.to_string()];
        config.ufs.file_roots = vec!["/".into()];
        config.fuse.mount_point = directory.path().join("mnt");
        config.fuse.http_listen = "127.0.0.1:0".to_owned();
        config.client.metadata_timeout = Interval::millis(2000);
        config.client.change_timeout = Interval::millis(2000);
        config.client.staging_directory = directory.path().join("staging");
        change(&mut config);
        let running = runtime.spawn(cavern_fuse::run(config, stop.clone()));
        let mut mounted = Self { directory, master, stop, stop_master, running: Some(running), runtime };
        mounted.wait_until_mounted();
        mounted
    }

    fn wait_until_mounted(&mut self) {
        let started = Instant::now();
        let point = self.path("").display().to_string();
        while !fs::read_to_string("/proc/self/mounts").unwrap().contains(point.trim_end_matches('/')) {
            if self.running.as_ref().unwrap().is_finished() {
                panic!("not mounted: {:?}", self.runtime.block_on(self.running.take().unwrap()));
            }
            assert!(started.elapsed() < DEADLINE, "not mounted in time");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join("mnt").join(name)
    }

    fn put(&self, key: &str, bytes: &[u8]) {
        put(self.directory.path(), key, bytes);
    }

    /// Stops the mount and returns what `run` returned.
    fn end(&mut self) -> Result<(), FuseError> {
        self.stop.cancel();
        let running = self.running.take().unwrap();
        self.runtime.block_on(async { tokio::time::timeout(DEADLINE, running).await }).unwrap().unwrap()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.master.release();
        if self.running.is_some() {
            let ended = self.end();
            if !std::thread::panicking() {
                ended.unwrap();
            }
        }
        self.stop_master.cancel();
    }
}

fn put(directory: &Path, key: &str, bytes: &[u8]) {
    let path = directory.join("bucket").join(key);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    // Another inode, so that every version has another ETag.
    let fresh = path.with_extension("fresh");
    fs::write(&fresh, bytes).unwrap();
    fs::rename(&fresh, &path).unwrap();
}

fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn errno<T>(result: io::Result<T>) -> i32 {
    result.err().and_then(|cause| cause.raw_os_error()).unwrap_or(0)
}

fn xattr(path: &Path, name: &str) -> Result<String, rustix::io::Errno> {
    let mut value = [0; 200];
    let length = rustix::fs::getxattr(path, name, &mut value[..])?;
    Ok(String::from_utf8(value[..length].to_vec()).unwrap())
}

#[test]
fn a_bucket_looks_like_a_tree_of_files() {
    let mounted = Mounted::new(&["a", "d/b", "d/e/c c", "d/é", "empty"], |_| {});
    mounted.put("zero", b"");
    mounted.runtime.block_on(mounted.master.take_in("zero"));
    assert_eq!(names(&mounted.path("")), ["data"]);
    assert_eq!(names(&mounted.path("data")), ["a", "d", "empty", "zero"]);
    assert_eq!(names(&mounted.path("data/d")), ["b", "e", "é"]);
    for key in ["a", "d/b", "d/e/c c", "d/é"] {
        assert_eq!(fs::read(mounted.path("data").join(key)).unwrap(), key.as_bytes(), "{key}");
    }
    assert_eq!(fs::read(mounted.path("data/zero")).unwrap(), b"");
    assert_eq!(errno(fs::metadata(mounted.path("data/nothing"))), libc::ENOENT);
    assert_eq!(errno(fs::metadata(mounted.path("data/a/below"))), libc::ENOTDIR);
    assert_eq!(errno(fs::metadata(mounted.path(&format!("data/{}", "n".repeat(256))))), libc::ENAMETOOLONG);
    assert_eq!(errno(fs::read_link(mounted.path("data/a"))), libc::EINVAL);
    assert_eq!(errno(fs::read(mounted.path("data/d"))), libc::EISDIR);

    let directory = fs::metadata(mounted.path("data/d")).unwrap();
    assert!(directory.is_dir());
    assert_eq!((directory.nlink(), directory.permissions().mode() & 0o7777), (2, 0o755));
    let file = fs::metadata(mounted.path("data/d/b")).unwrap();
    let source = fs::metadata(mounted.directory.path().join("bucket/d/b")).unwrap();
    assert_eq!((file.len(), file.blocks(), file.nlink(), file.mode() & 0o7777), (3, 1, 1, 0o644));
    assert_eq!((file.mtime(), file.uid(), file.blksize()), (source.mtime(), source.uid(), 128 * 1024));

    for change in [
        errno(fs::write(mounted.path("data/a"), "x")),
        errno(fs::write(mounted.path("data/new"), "x")),
        errno(fs::remove_file(mounted.path("data/a"))),
        errno(fs::OpenOptions::new().read(true).write(true).open(mounted.path("data/a"))),
        errno(fs::create_dir(mounted.path("new"))),
        errno(fs::rename(mounted.path("data/a"), mounted.path("data/d/new"))),
    ] {
        assert_eq!(change, libc::EROFS);
    }
    assert!(rustix::fs::access(mounted.path("data/a"), rustix::fs::Access::READ_OK).is_ok());
    assert_eq!(rustix::fs::statvfs(mounted.path("")).unwrap().f_namemax, 255);
}

#[test]
fn dots_and_inode_numbers_agree_with_stat() {
    let mounted = Mounted::new(&["d/e/x"], |_| {});
    for (path, parent) in [("", ""), ("data", ""), ("data/d", "data"), ("data/d/e", "data/d")] {
        let listed = Command::new("ls").args(["-ai1"]).arg(mounted.path(path)).output().unwrap();
        let listed = String::from_utf8(listed.stdout).unwrap();
        let number = |name: &str| -> u64 {
            let line = listed.lines().find(|line| line.trim().split_once(' ').is_some_and(|(_, found)| found == name));
            line.unwrap_or_else(|| panic!("{name} not in {listed}")).trim().split_once(' ').unwrap().0.parse().unwrap()
        };
        assert_eq!(number("."), fs::metadata(mounted.path(path)).unwrap().ino(), "{path}");
        if !path.is_empty() {
            assert_eq!(number(".."), fs::metadata(mounted.path(parent)).unwrap().ino(), "{path}");
        }
    }
}

#[test]
fn extended_attributes_tell_where_a_file_comes_from() {
    let mounted = Mounted::new(&["d/b"], |_| {});
    let (file, directory) = (mounted.path("data/d/b"), mounted.path("data/d"));
    assert_eq!(xattr(&file, "user.cavern.key").unwrap(), "d/b");
    assert_eq!(xattr(&file, "user.cavern.mount").unwrap(), "/data");
    assert!(!xattr(&file, "user.cavern.etag").unwrap().is_empty());
    assert_eq!(xattr(&file, "user.cavern.content_id").unwrap().len(), 32);
    assert_eq!(xattr(&directory, "user.cavern.key").unwrap(), "d/");
    assert_eq!(xattr(&directory, "user.cavern.etag"), Err(rustix::io::Errno::NODATA));
    assert_eq!(xattr(&mounted.path(""), "user.cavern.key"), Err(rustix::io::Errno::NODATA));
    // No file here has one, as soon as the client has the mount table.
    let deadline = Instant::now() + Duration::from_secs(10);
    while xattr(&file, "security.selinux") != Err(rustix::io::Errno::OPNOTSUPP) {
        assert!(Instant::now() < deadline, "labels are asked for of each file");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(xattr(&file, "user.other"), Err(rustix::io::Errno::NODATA));
    let mut list = [0u8; 500];
    let length = rustix::fs::listxattr(&file, &mut list[..]).unwrap();
    let list = String::from_utf8(list[..length].to_vec()).unwrap();
    assert_eq!(list.split_terminator('\0').count(), 4);
}

#[test]
fn a_large_directory_is_listed_completely_and_then_from_memory() {
    let keys: Vec<String> = (0..5000).map(|number| format!("many/file-{number:05}")).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let mounted = Mounted::new(&keys, |_| {});
    let directory = mounted.path("data/many");
    assert_eq!(names(&directory).len(), 5000);
    let calls = mounted.master.calls();
    assert_eq!(names(&directory).len(), 5000);
    for number in (0..5000).step_by(100) {
        assert_eq!(fs::metadata(directory.join(format!("file-{number:05}"))).unwrap().len(), 15);
    }
    assert_eq!(mounted.master.calls(), calls, "the second listing and every stat come from memory");
    let counted = Command::new("find").arg(&directory).args(["-type", "f", "-size", "-2"]).output().unwrap();
    assert_eq!(String::from_utf8(counted.stdout).unwrap().lines().count(), 5000);
}

#[test]
fn a_replaced_object_is_seen_at_once_and_never_mixed() {
    let mounted = Mounted::new(&["a", "b"], |_| {});
    let path = mounted.path("data/a");
    assert_eq!(fs::read(&path).unwrap(), b"a");
    let inode = fs::metadata(&path).unwrap().ino();
    let mut held = fs::File::open(&path).unwrap();
    mounted.put("a", b"another version");
    mounted.runtime.block_on(mounted.master.take_in("a"));
    assert_eq!(fs::read(&path).unwrap(), b"another version");
    assert_ne!(fs::metadata(&path).unwrap().ino(), inode);
    // The old handle has the old bytes (from the kernel's pages) and the old attributes.
    let mut old = Vec::new();
    held.read_to_end(&mut old).unwrap();
    assert_eq!(old, b"a");
    assert_eq!((held.metadata().unwrap().len(), held.metadata().unwrap().ino()), (1, inode));

    fs::remove_file(mounted.directory.path().join("bucket/b")).unwrap();
    assert_eq!(names(&mounted.path("data")), ["a", "b"]);
    mounted.runtime.block_on(mounted.master.take_out("b"));
    assert_eq!(errno(fs::metadata(mounted.path("data/b"))), libc::ENOENT);
    assert_eq!(names(&mounted.path("data")), ["a"]);
    mounted.put("c", b"new");
    assert_eq!(errno(fs::metadata(mounted.path("data/c"))), libc::ENOENT);
    mounted.runtime.block_on(mounted.master.take_in("c"));
    assert_eq!(fs::read(mounted.path("data/c")).unwrap(), b"new");
    assert_eq!(names(&mounted.path("data")), ["a", "c"]);
}

#[test]
fn an_open_that_meets_a_new_version_opens_it_without_an_error() {
    let mounted = Mounted::new(&["a"], |_| {});
    let path = mounted.path("data/a");
    assert_eq!(fs::metadata(&path).unwrap().len(), 1);
    // No event says so: the open itself finds out, and the kernel asks again.
    mounted.put("a", b"another version");
    assert_eq!(fs::read(&path).unwrap(), b"another version");
    fs::remove_file(mounted.directory.path().join("bucket/a")).unwrap();
    mounted.put("gone", b"x");
    mounted.runtime.block_on(mounted.master.take_in("gone"));
    assert_eq!(fs::metadata(mounted.path("data/gone")).unwrap().len(), 1);
    fs::remove_file(mounted.directory.path().join("bucket/gone")).unwrap();
    assert_eq!(errno(fs::read(mounted.path("data/gone"))), libc::ENOENT);
}

#[test]
fn what_is_read_without_an_open_never_has_the_size_of_another_version() {
    let mounted = Mounted::writable(&["large"], |config| {
        config.fuse.no_open = Choice::On;
        config.fuse.client_metadata_cache = false;
        config.fuse.attr_timeout = Interval::millis(0);
    });
    let held = fs::File::open(mounted.path("data/large")).unwrap();
    assert_eq!(held.metadata().unwrap().len(), 5);
    mounted.put("large", b"");
    mounted.runtime.block_on(mounted.master.take_in_silently("large"));
    // Nobody knows here that it is open: its version is gone, or it is as it was.
    match held.metadata() {
        Ok(metadata) => assert_eq!(metadata.len(), 5),
        Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ESTALE)),
    }
}

#[test]
fn a_master_that_hangs_holds_nobody_longer_than_its_deadline() {
    let mounted = Mounted::new(&["a", "d/b", "e/c"], |_| {});
    assert_eq!(fs::read(mounted.path("data/a")).unwrap(), b"a");
    mounted.master.hang();
    // Interrupted at once.
    let child = Command::new("ls").arg(mounted.path("data/d")).stderr(Stdio::null()).spawn().unwrap();
    let calls = mounted.master.calls();
    let started = Instant::now();
    while mounted.master.calls() == calls && started.elapsed() < Duration::from_millis(500) {
        std::thread::sleep(Duration::from_millis(5));
    }
    let started = Instant::now();
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), rustix::process::Signal::TERM).unwrap();
    assert!(!child.wait_with_output().unwrap().status.success());
    assert!(started.elapsed() < Duration::from_millis(1500), "took {:?}", started.elapsed());
    // Not known: an error, in time. Known: served.
    let started = Instant::now();
    assert_eq!(errno(fs::metadata(mounted.path("data/e/c"))), libc::EIO);
    assert!(started.elapsed() < Duration::from_secs(6), "took {:?}", started.elapsed());
    assert_eq!(fs::metadata(mounted.path("data/a")).unwrap().len(), 1);
    mounted.master.release();
    let started = Instant::now();
    while fs::read(mounted.path("data/e/c")).ok().as_deref() != Some(b"e/c") {
        assert!(started.elapsed() < DEADLINE, "nothing heals");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Whoever looks a name up has the directory locked, until the master has answered.
#[test]
fn a_client_lets_go_though_a_directory_is_locked() {
    let mounted = Mounted::new(&["a"], |config| {
        config.client.metadata_timeout = Interval::millis(30_000);
        config.client.change_timeout = Interval::millis(30_000);
    });
    assert_eq!(fs::read(mounted.path("data/a")).unwrap(), b"a");
    let calls = mounted.master.calls();
    mounted.master.hang();
    let missing = mounted.path("data/missing");
    let asked = std::thread::spawn(move || errno(fs::metadata(missing)));
    let started = Instant::now();
    while mounted.master.calls() == calls {
        assert!(started.elapsed() < DEADLINE, "the master is not asked");
        std::thread::sleep(Duration::from_millis(5));
    }
    mounted.put("a", b"another version");
    let started = Instant::now();
    mounted.runtime.block_on(async {
        let changed = mounted.master.take_in_silently("a").await;
        let seq = mounted.master.announce(Event::Entry(changed));
        mounted.master.invalidated(seq).await;
        assert!(started.elapsed() < Duration::from_secs(5), "took {:?}", started.elapsed());
        // By and by every name is looked up anew, where the kernel can do that.
        mounted.master.acknowledged(seq).await;
    });
    assert!(!asked.is_finished(), "the directory is still locked");
    mounted.master.release();
    assert_eq!(asked.join().unwrap(), libc::ENOENT);
    assert_eq!(fs::read(mounted.path("data/a")).unwrap(), b"another version");
}

#[test]
fn a_part_of_the_namespace_can_be_shown() {
    let mounted = Mounted::new(&["d/b"], |config| {
        config.fuse.path = "/data/d".to_owned();
        // A data set alone has none otherwise.
        config.fuse.xattrs = Choice::On;
    });
    assert_eq!(names(&mounted.path("")), ["b"]);
    assert_eq!(fs::read(mounted.path("b")).unwrap(), b"d/b");
    assert_eq!(fs::metadata(mounted.path("")).unwrap().ino(), 1);
    assert_eq!(xattr(&mounted.path(""), "user.cavern.key").unwrap(), "d/");
}

#[test]
fn the_switches_of_the_caches_work() {
    let mounted = Mounted::new(&["a", "d/b"], |config| {
        config.fuse.kernel_metadata_cache = false;
        config.fuse.client_metadata_cache = false;
        config.fuse.direct = true;
    });
    assert_eq!(names(&mounted.path("data")), ["a", "d"]);
    let calls = mounted.master.calls();
    assert_eq!(fs::metadata(mounted.path("data/a")).unwrap().len(), 1);
    assert_eq!(fs::metadata(mounted.path("data/a")).unwrap().len(), 1);
    assert!(mounted.master.calls() >= calls + 2, "every stat asks the master");
    assert_eq!(fs::read(mounted.path("data/d/b")).unwrap(), b"d/b");
    let file = fs::File::open(mounted.path("data/d/b")).unwrap();
    let mut bytes = [0; 8];
    assert_eq!(file.read_at(&mut bytes, 2).unwrap(), 1);
}

#[test]
fn a_stop_unmounts_even_under_open_files() {
    let mut mounted = Mounted::new(&["a"], |_| {});
    let file = fs::File::open(mounted.path("data/a")).unwrap();
    let point = mounted.path("");
    mounted.end().unwrap();
    assert_eq!(fs::read_dir(&point).unwrap().count(), 0);
    assert_ne!(errno(file.read_at(&mut [0; 1], 0)), 0);
}

#[test]
fn a_path_that_leads_nowhere_is_refused_in_one_sentence() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    fs::create_dir_all(directory.path().join("bucket")).unwrap();
    let stop = CancellationToken::new();
    let (_master, address) = runtime.block_on(Master::start(&directory.path().join("bucket"), false, stop.clone()));
    let mut config = Config::default();
    config.cluster.masters = vec![address.to_string()];
    config.fuse.mount_point = directory.path().join("mnt");
    config.fuse.http_listen = "127.0.0.1:0".to_owned();
    config.fuse.path = "/nowhere".to_owned();
    let refused = runtime.block_on(cavern_fuse::run(config, CancellationToken::new())).unwrap_err();
    assert!(refused.to_string().contains("/nowhere") && refused.to_string().contains("fuse.path"), "{refused}");
    assert!(!directory.path().join("mnt").exists());
    stop.cancel();
}
