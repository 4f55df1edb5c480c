//! The kernel layer against the real kernel: mounts of a small file system in memory. Needs `/dev/fuse` and root.

// Helpers of tests report by panicking, where the test sees it.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use cavern_fuse::kernel::abi::{AttrOut, EntryOut, ROOT_NODE, StatfsOut, fopen};
use cavern_fuse::kernel::directory::{Added, DirectoryEntry};
use cavern_fuse::kernel::{
    Backing, DirectoryPage, Filesystem, Mount, MountError, MountOptions, Notifier, Operation, READ_MAX, Reply, Session,
    SessionOptions,
};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::mount::UnmountFlags;
use tokio::runtime::Runtime;

const DEADLINE: Duration = Duration::from_secs(30);
const BIG_DIRECTORY: u64 = 2;
const FIRST_FILE: u64 = 1000;
/// Opening it waits for ever.
const STUCK: u64 = 3;
/// Reading it waits for ever.
const STALLED: u64 = 4;

/// The kernel reads it by itself.
const BACKED: u64 = 5;

/// Names in the root, which may change; a directory of many names; a file whose open never returns.
struct Memory {
    names: Mutex<BTreeMap<Vec<u8>, u64>>,
    big: u64,
    size: u64,
    opens: AtomicU64,
    waiting: Arc<AtomicUsize>,
    /// What is behind `BACKED`, and its registrations.
    backing: Option<fs::File>,
    registered: Mutex<Vec<Backing>>,
}

impl Memory {
    fn new(big: u64, size: u64) -> Arc<Self> {
        let names =
            [("big", BIG_DIRECTORY), ("stuck", STUCK), ("stalled", STALLED), ("backed", BACKED), ("file", FIRST_FILE)];
        Arc::new(Self {
            names: Mutex::new(names.into_iter().map(|(name, node)| (name.into(), node)).collect()),
            big,
            size,
            opens: AtomicU64::new(0),
            waiting: Arc::default(),
            backing: None,
            registered: Mutex::default(),
        })
    }

    fn mode(node: u64) -> u32 {
        if matches!(node, ROOT_NODE | BIG_DIRECTORY) { libc::S_IFDIR | 0o755 } else { libc::S_IFREG | 0o644 }
    }

    fn entry(&self, node: u64) -> EntryOut {
        EntryOut {
            nodeid: node,
            entry_valid: 3600,
            attr_valid: 3600,
            attr: self.attr(node).attr,
            ..EntryOut::default()
        }
    }

    fn attr(&self, node: u64) -> AttrOut {
        let mut attr = AttrOut { attr_valid: 3600, ..AttrOut::default() };
        attr.attr.ino = node;
        attr.attr.mode = Self::mode(node);
        attr.attr.nlink = 1;
        attr.attr.size = self.size;
        attr.attr.blksize = 4096;
        attr
    }

    fn wait_for_ever(&self, reply: Reply) {
        let waiting = Waiting::new(&self.waiting);
        reply.defer(|reply| async move {
            let _waiting = waiting;
            std::future::pending::<()>().await;
            reply.done();
        });
    }

    /// Byte `offset` of a file.
    fn byte(node: u64, offset: u64) -> u8 {
        (node.wrapping_mul(31) ^ offset ^ (offset >> 8) ^ (offset >> 16)) as u8
    }

    fn directory(&self, node: u64) -> Vec<(Vec<u8>, u64)> {
        match node {
            BIG_DIRECTORY => {
                (0..self.big).map(|number| (format!("file-{number:06}").into_bytes(), FIRST_FILE + number)).collect()
            }
            _ => self.names.lock().iter().map(|(name, node)| (name.clone(), *node)).collect(),
        }
    }
}

/// Counts a task that waits, also when it is dropped.
struct Waiting(Arc<AtomicUsize>);

impl Waiting {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(count))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Filesystem for Memory {
    fn dispatch(&self, node: u64, operation: Operation<'_>, reply: Reply, payload: &mut [u8]) {
        match operation {
            Operation::Lookup { name } if node == BIG_DIRECTORY => {
                let number: Option<u64> =
                    std::str::from_utf8(name).ok().and_then(|name| name.strip_prefix("file-")?.parse().ok());
                match number.filter(|number| *number < self.big) {
                    Some(number) => reply.entry(&self.entry(FIRST_FILE + number)),
                    None => reply.no_entry(Duration::ZERO),
                }
            }
            Operation::Lookup { name } => match self.names.lock().get(name) {
                Some(node) => reply.entry(&self.entry(*node)),
                None => reply.no_entry(Duration::from_secs(3600)),
            },
            Operation::Getattr => reply.attr(&self.attr(node)),
            Operation::Open { .. } if node == STUCK => self.wait_for_ever(reply),
            Operation::Read { .. } if node == STALLED => self.wait_for_ever(reply),
            Operation::Open { .. } if node == BACKED => {
                let backing = reply.register(self.backing.as_ref().unwrap().as_fd());
                match backing {
                    Ok(backing) => {
                        let _ = reply.opened_passthrough(node, fopen::NOFLUSH, &backing);
                        self.registered.lock().push(backing);
                    }
                    Err(cause) => reply.error(cause.raw_os_error()),
                }
            }
            Operation::Open { .. } => {
                self.opens.fetch_add(1, Ordering::Relaxed);
                let _ = reply.opened(node, fopen::KEEP_CACHE);
            }
            Operation::Opendir => {
                let _ = reply.opened(node, 0);
            }
            Operation::Read { offset, size, .. } => {
                let length = self.size.saturating_sub(offset).min(u64::from(size)) as usize;
                for (place, byte) in payload[..length].iter_mut().enumerate() {
                    *byte = Self::byte(node, offset + place as u64);
                }
                // Every other megabyte takes the long way.
                if offset >> 20 & 1 == 0 {
                    reply.bytes(&payload[..length]);
                } else {
                    let bytes = payload[..length].to_vec();
                    reply.defer(|reply| async move {
                        tokio::task::yield_now().await;
                        reply.bytes(&bytes);
                    });
                }
            }
            Operation::Readdir { offset, size, .. } => {
                let mut page = DirectoryPage::new(size as usize);
                let entries = self.directory(node);
                for (place, (name, node)) in entries.iter().enumerate().skip(offset as usize) {
                    let mode = Self::mode(*node);
                    let entry = DirectoryEntry { ino: *node, next_offset: place as u64 + 1, mode, name };
                    if page.add(entry) == Added::Full {
                        break;
                    }
                }
                reply.bytes(page.as_bytes());
            }
            Operation::Readdirplus { offset, size, .. } => {
                let mut page = DirectoryPage::new(size as usize);
                let entries = self.directory(node);
                for (place, (name, node)) in entries.iter().enumerate().skip(offset as usize) {
                    let mode = Self::mode(*node);
                    let entry = DirectoryEntry { ino: *node, next_offset: place as u64 + 1, mode, name };
                    if page.add_plus(&self.entry(*node), entry) == Added::Full {
                        break;
                    }
                }
                reply.bytes(page.as_bytes());
            }
            Operation::Release { .. } | Operation::Releasedir { .. } => reply.done(),
            Operation::Statfs => {
                reply.statfs(&StatfsOut { bsize: 4096, frsize: 4096, namelen: 255, ..StatfsOut::default() })
            }
            Operation::Getxattr { name: b"user.colour", size } => reply.xattr(b"blue", size),
            Operation::Getxattr { .. } => reply.error(libc::ENODATA),
            Operation::Listxattr { size } => reply.xattr(b"user.colour\0", size),
            _ => reply.error(libc::ENOSYS),
        }
    }
}

/// A mount that goes away with this value, whatever the test did.
struct Mounted {
    directory: tempfile::TempDir,
    mount: Option<Mount>,
    session: Option<Session>,
    runtime: Runtime,
}

impl Mounted {
    fn new(filesystem: Arc<Memory>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let (mount, device) = Mount::make(&directory.path().join("mnt"), &options()).unwrap();
        let session_options = SessionOptions {
            threads: 2,
            max_background: 64,
            max_readahead: 1 << 20,
            async_dio: true,
            locks: false,
            posix_acl: false,
            passthrough: true,
        };
        let session = Session::start(device, &session_options, filesystem, runtime.handle().clone()).unwrap();
        mount.set_read_ahead(1 << 20);
        Self { directory, mount: Some(mount), session: Some(session), runtime }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("mnt")
    }

    fn notifier(&self) -> Notifier {
        self.session.as_ref().unwrap().connection.notifier()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.mount.take();
        if let Some(session) = self.session.take() {
            session.join();
        }
    }
}

fn options() -> MountOptions {
    MountOptions { source: "cavern".to_owned(), allow_other: true, exec: true, read_only: true }
}

fn errno<T>(result: io::Result<T>) -> i32 {
    result.err().and_then(|cause| cause.raw_os_error()).unwrap_or(0)
}

#[track_caller]
fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < DEADLINE, "{what} did not come about");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A process that signals end as they do by default, also where whoever runs the tests has them ignored.
fn cat(path: &Path) -> Command {
    let mut command = Command::new("env");
    command.args(["--default-signal", "cat"]).arg(path);
    command
}

fn wait_for_end(mut child: Child) -> (std::process::ExitStatus, Duration) {
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return (status, started.elapsed());
        }
        if started.elapsed() > DEADLINE {
            // Unmounting frees it; the test has failed all the same.
            panic!("process {} is still there", child.id());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn eight_readers_get_every_byte_through_two_loops() {
    const SIZE: u64 = 9 * 1024 * 1024 + 77;
    let mounted = Mounted::new(Memory::new(16, SIZE));
    let directory = mounted.path().join("big");
    std::thread::scope(|scope| {
        for number in 0..8u64 {
            let path = directory.join(format!("file-{number:06}"));
            scope.spawn(move || {
                let bytes = fs::read(path).unwrap();
                assert_eq!(bytes.len() as u64, SIZE);
                let node = FIRST_FILE + number;
                assert!(bytes.iter().enumerate().all(|(offset, byte)| *byte == Memory::byte(node, offset as u64)));
            });
        }
    });
    let seen = &mounted.session.as_ref().unwrap().in_flight.observation;
    assert!(seen.read_bytes.load(Ordering::Relaxed) >= 8 * SIZE);
    let file = fs::File::open(directory.join("file-000015")).unwrap();
    let mut bytes = [0; 100];
    assert_eq!(file.read_at(&mut bytes, SIZE - 50).unwrap(), 50);
    assert_eq!(file.read_at(&mut bytes, SIZE).unwrap(), 0);
}

#[test]
fn a_read_is_as_large_as_a_megabyte() {
    let memory = Memory::new(0, 64 * READ_MAX as u64);
    let mounted = Mounted::new(memory);
    fs::read(mounted.path().join("file")).unwrap();
    let seen = &mounted.session.as_ref().unwrap().in_flight.observation;
    let reads = seen.kind(cavern_fuse::kernel::request_stats::RequestKind::Read);
    let count = reads.fast.load(Ordering::Relaxed) + reads.deferred.load(Ordering::Relaxed);
    assert!(count <= 2 * 64, "{count} requests for 64 MiB");
}

#[test]
fn a_hundred_thousand_entries_are_listed_once_each() {
    let mounted = Mounted::new(Memory::new(100_000, 10));
    for _ in 0..2 {
        let mut names: Vec<_> =
            fs::read_dir(mounted.path().join("big")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names.len(), 100_000);
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 100_000);
        assert_eq!(names[99_999], "file-099999");
    }
    assert_eq!(fs::metadata(mounted.path().join("big/file-000007")).unwrap().ino(), FIRST_FILE + 7);
}

#[test]
fn a_process_waiting_in_open_dies_of_any_signal_at_once() {
    let memory = Memory::new(0, 10);
    let mounted = Mounted::new(Arc::clone(&memory));
    for signal in [rustix::process::Signal::INT, rustix::process::Signal::TERM, rustix::process::Signal::KILL] {
        let child = cat(&mounted.path().join("stuck")).stderr(Stdio::null()).spawn().unwrap();
        eventually("the request", || memory.waiting.load(Ordering::SeqCst) == 1);
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, signal).unwrap();
        let (status, took) = wait_for_end(child);
        assert!(!status.success());
        assert!(took < Duration::from_secs(2), "{signal:?} took {took:?}");
        eventually("the end of its task", || memory.waiting.load(Ordering::SeqCst) == 0);
    }
}

#[test]
fn a_process_waiting_for_a_page_dies_of_a_fatal_signal_at_once() {
    let memory = Memory::new(0, 10_000_000);
    let mounted = Mounted::new(Arc::clone(&memory));
    for signal in [rustix::process::Signal::INT, rustix::process::Signal::KILL] {
        let child = cat(&mounted.path().join("stalled")).stdout(Stdio::null()).spawn().unwrap();
        eventually("the request", || memory.waiting.load(Ordering::SeqCst) > 0);
        rustix::process::kill_process(rustix::process::Pid::from_child(&child), signal).unwrap();
        let (status, took) = wait_for_end(child);
        assert!(!status.success());
        assert!(took < Duration::from_secs(2), "{signal:?} took {took:?}");
    }
    // What read-ahead asked for is nobody's any more, and is answered at the end.
    let in_flight = Arc::clone(&mounted.session.as_ref().unwrap().in_flight);
    mounted.runtime.block_on(in_flight.close(libc::EIO));
    assert_eq!(memory.waiting.load(Ordering::SeqCst), 0);
}

#[test]
fn names_stay_until_the_kernel_is_told() {
    let memory = Memory::new(0, 10);
    let mounted = Mounted::new(Arc::clone(&memory));
    let notifier = mounted.notifier();
    let path = mounted.path().join("file");
    let missing = mounted.path().join("later");
    let inode = |path: &Path| fs::metadata(path).map(|metadata| metadata.ino());
    assert_eq!(inode(&path).unwrap(), FIRST_FILE);
    assert_eq!(errno(inode(&missing)), libc::ENOENT);
    memory.names.lock().insert(b"file".to_vec(), FIRST_FILE + 1);
    memory.names.lock().insert(b"later".to_vec(), FIRST_FILE + 2);
    assert_eq!(inode(&path).unwrap(), FIRST_FILE);
    assert_eq!(errno(inode(&missing)), libc::ENOENT);

    assert_eq!(notifier.entry(ROOT_NODE, b"file"), Ok(true));
    assert_eq!(inode(&path).unwrap(), FIRST_FILE + 1);
    assert_eq!(notifier.entry(ROOT_NODE, b"later"), Ok(true));
    assert_eq!(inode(&missing).unwrap(), FIRST_FILE + 2);

    assert_eq!(notifier.entry(ROOT_NODE, b"never seen"), Ok(false));
    assert_eq!(notifier.entry(777, b"x"), Ok(false));
    assert_eq!(notifier.inode(777), Ok(false));
    assert_eq!(notifier.inode(FIRST_FILE + 1), Ok(true));

    memory.names.lock().insert(b"file".to_vec(), FIRST_FILE + 3);
    match notifier.every_entry() {
        Ok(()) => assert_eq!(inode(&path).unwrap(), FIRST_FILE + 3),
        Err(cause) => assert_eq!(cause, rustix::io::Errno::INVAL, "kernels before 6.16 do not know it"),
    }
}

#[test]
fn pages_are_kept_from_open_to_open() {
    let memory = Memory::new(0, 100_000);
    let mounted = Mounted::new(Arc::clone(&memory));
    for _ in 0..3 {
        fs::read(mounted.path().join("file")).unwrap();
    }
    assert_eq!(memory.opens.load(Ordering::Relaxed), 3);
    let seen = &mounted.session.as_ref().unwrap().in_flight.observation;
    assert!(seen.read_bytes.load(Ordering::Relaxed) < 110_000);
}

#[test]
fn a_file_with_a_backing_file_is_read_by_the_kernel_itself() {
    let mut source = tempfile::tempfile().unwrap();
    let bytes: Vec<u8> = (0..3_000_000u32).map(|number| (number >> 3) as u8).collect();
    source.write_all(&bytes).unwrap();
    let mut memory = Memory::new(0, bytes.len() as u64);
    Arc::get_mut(&mut memory).unwrap().backing = Some(source);
    let mounted = Mounted::new(Arc::clone(&memory));
    let session = mounted.session.as_ref().unwrap();
    if !session.connection.agreement().has_passthrough() {
        // Linux before 6.9.
        return;
    }
    let path = mounted.path().join("backed");
    match fs::read(&path) {
        Ok(read) => assert!(read == bytes),
        // The temporary directory is on a stacked file system.
        Err(cause) if cause.raw_os_error() == Some(libc::ELOOP) => return,
        Err(cause) => panic!("{cause}"),
    }
    assert_eq!(session.in_flight.observation.read_bytes.load(Ordering::Relaxed), 0);
    // A number that was given back leaves open files readable.
    let file = fs::File::open(&path).unwrap();
    memory.registered.lock().clear();
    let mut part = [0; 100];
    file.read_exact_at(&mut part, 2_000_000).unwrap();
    assert_eq!(part, bytes[2_000_000..2_000_100]);
}

#[test]
fn extended_attributes_follow_the_rules_of_the_call() {
    let mounted = Mounted::new(Memory::new(0, 10));
    let file = mounted.path().join("file");
    let mut value = [0u8; 16];
    assert_eq!(rustix::fs::getxattr(&file, "user.colour", &mut value[..]).unwrap(), 4);
    assert_eq!(&value[..4], b"blue");
    assert_eq!(rustix::fs::getxattr(&file, "user.colour", &mut value[..3]), Err(rustix::io::Errno::RANGE));
    assert_eq!(rustix::fs::getxattr(&file, "user.other", &mut value[..]), Err(rustix::io::Errno::NODATA));
    assert_eq!(rustix::fs::listxattr(&file, &mut value[..]).unwrap(), 12);
}

#[test]
fn every_change_is_refused() {
    let mounted = Mounted::new(Memory::new(0, 10));
    let at = |name: &str| mounted.path().join(name);
    assert_eq!(errno(fs::write(at("file"), "x")), libc::EROFS);
    assert_eq!(errno(fs::write(at("new"), "x")), libc::EROFS);
    assert_eq!(errno(fs::create_dir(at("new"))), libc::EROFS);
    assert_eq!(errno(fs::remove_file(at("file"))), libc::EROFS);
    assert_eq!(errno(fs::remove_dir(at("big"))), libc::EROFS);
    assert_eq!(errno(fs::rename(at("file"), at("other"))), libc::EROFS);
    assert_eq!(errno(fs::hard_link(at("file"), at("other"))), libc::EROFS);
    assert_eq!(errno(std::os::unix::fs::symlink("x", at("other"))), libc::EROFS);
    assert_eq!(errno(fs::set_permissions(at("file"), fs::metadata(at("file")).unwrap().permissions())), libc::EROFS);
}

#[test]
fn a_mount_in_use_is_taken_away_and_its_loops_end() {
    let mut mounted = Mounted::new(Memory::new(0, 50_000_000));
    let file = fs::File::open(mounted.path().join("file")).unwrap();
    let mut mount = mounted.mount.take().unwrap();
    assert_eq!(mount.unmount(), cavern_fuse::kernel::mount::Unmounted::Busy);
    mount.detach();
    let session = mounted.session.take().unwrap();
    let ended = session.ended.clone();
    session.join();
    assert!(ended.is_cancelled());
    assert_ne!(errno(file.read_at(&mut [0; 10], 40_000_000)), 0);
    assert!(!mounted.path().join("file").exists());
}

#[test]
fn a_mount_without_users_is_unmounted() {
    let mut mounted = Mounted::new(Memory::new(0, 10));
    fs::read(mounted.path().join("file")).unwrap();
    let mut mount = mounted.mount.take().unwrap();
    // The kernel closes files behind the back of close(2): busy for a moment.
    eventually("the unmount", || mount_is_gone(&mut mount));
    mounted.session.take().unwrap().join();
    assert_eq!(fs::read_dir(mounted.path()).unwrap().count(), 0);
}

fn mount_is_gone(mount: &mut Mount) -> bool {
    mount.unmount() == cavern_fuse::kernel::mount::Unmounted::Yes
}

#[test]
fn a_dead_mount_is_replaced_and_a_live_one_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let point = directory.path().join("a/b c");
    // Left behind: the descriptor is closed, the mount is not.
    let (left, device) = Mount::make(&point, &options()).unwrap();
    std::mem::forget(left);
    drop(device);
    assert_eq!(errno(fs::metadata(&point)), libc::ENOTCONN);
    let (second, device) = Mount::make(&point, &options()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let session_options = SessionOptions {
        threads: 1,
        max_background: 16,
        max_readahead: 0,
        async_dio: true,
        locks: false,
        posix_acl: false,
        passthrough: false,
    };
    let session = Session::start(device, &session_options, Memory::new(0, 10), runtime.handle().clone()).unwrap();
    let third = Mount::make(&point, &options());
    assert!(matches!(&third, Err(MountError::Busy { .. })), "{third:?}");
    assert!(third.err().unwrap().to_string().contains("umount"));
    drop(second);
    session.join();
    assert_eq!(fs::read_dir(&point).unwrap().count(), 0);
}

#[test]
fn a_mount_that_was_taken_away_lazily_ends_alone() {
    let directory = tempfile::tempdir().unwrap();
    let point = directory.path().join("mnt");
    let (mut first, first_device) = Mount::make(&point, &options()).unwrap();
    // Nobody is asked for this.
    let open = rustix::fs::open(&point, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).unwrap();
    rustix::mount::unmount(&point, UnmountFlags::DETACH).unwrap();
    let (second, second_device) = Mount::make(&point, &options()).unwrap();
    assert_ne!(first.device(), second.device());
    let has_ended = |device: &OwnedFd| {
        let mut polled = [PollFd::new(device, PollFlags::IN)];
        poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap();
        polled[0].revents().contains(PollFlags::ERR)
    };
    assert!(!first.is_there() && mount_is_gone(&mut first));
    let control = first.control();
    drop(first);
    assert!(second.is_there() && !has_ended(&first_device) && !has_ended(&second_device));
    assert!(control.abort().unwrap());
    assert!(has_ended(&first_device) && !has_ended(&second_device));
    // The number of its device is free from now on, and this one may have it.
    drop(open);
    let (third, third_device) = Mount::make(&directory.path().join("third"), &options()).unwrap();
    assert!(!control.abort().unwrap());
    assert!(third.is_there() && second.is_there() && !has_ended(&third_device) && !has_ended(&second_device));
}

#[test]
fn a_mount_point_that_is_a_file_is_refused() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let refused = Mount::make(file.path(), &options()).err().unwrap();
    assert!(matches!(refused, MountError::NotADirectory { .. }), "{refused}");
    let below = Mount::make(&file.path().join("x"), &options()).err().unwrap();
    assert!(matches!(below, MountError::MountPoint { .. }), "{below}");
}
