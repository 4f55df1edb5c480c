//! The file system with a master in memory, and a kernel that the test plays itself: what a real one sends only in a
//! race.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cavern_client::{Client, Identity};
use cavern_conf::{Config, Interval};
use cavern_fuse::filesystem::Namespace;
use cavern_fuse::invalidation::{Inodes, Invalidations, NotifierThread};
use cavern_fuse::kernel::abi::{self, AttrOut, EntryOut, FileLock, InHeader, LkIn, OpenOut, OutHeader, opcode};
use cavern_fuse::kernel::{Connection, Session, SessionOptions};
use cavern_fuse::root::Root;
use cavern_proto::master::LockType::{Exclusive, Unlocked};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use zerocopy::{FromBytes, IntoBytes};

use crate::master::Master;
use crate::stuck::stick;
use crate::{DEADLINE, put};

struct Kernel {
    directory: tempfile::TempDir,
    socket: OwnedFd,
    /// What it is notified of, apart from the answers.
    notifications: OwnedFd,
    invalidations: Arc<Invalidations>,
    notifier: Option<NotifierThread>,
    master: Master,
    stop_master: CancellationToken,
    client: Arc<Client>,
    session: Option<Session>,
    runtime: Runtime,
}

impl Kernel {
    /// Of a mount of a bucket that can be written to, with this object.
    fn new(key: &str) -> Self {
        Self::start(key, |_| {})
    }

    fn start(key: &str, change: impl FnOnce(&Master)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        put(directory.path(), key, key.as_bytes());
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let (bucket, stop_master) = (directory.path().join("bucket"), CancellationToken::new());
        let (master, address) = runtime.block_on(Master::start(&bucket, true, stop_master.clone()));
        change(&master);
        let mut config = Config::default();
        config.client.metadata_timeout = Interval::millis(3000);
        config.client.change_timeout = Interval::millis(3000);
        config.cluster.masters = vec![address.to_string()];
        config.ufs.file_roots = vec!["/".into()];
        config.client.staging_directory = PathBuf::from(directory.path());
        let invalidations = Invalidations::new();
        let identity = Identity { name: "played".to_owned(), place: String::new() };
        let client = runtime.block_on(Client::connect(&config, identity, Arc::clone(&invalidations) as _)).unwrap();
        let root = Arc::new(Root::new("/data", runtime.block_on(client.metadata().resolve("/data")).unwrap().inode));
        let shared = Arc::clone(&invalidations);
        let namespace = Arc::new(Namespace::new(client.clone(), Arc::clone(&root), shared, &config.fuse, None));

        let pair = || socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let ((socket, device), (notifications, notified)) = (pair(), pair());
        set_socket_timeout(&socket, Timeout::Recv, Some(DEADLINE)).unwrap();
        let options = SessionOptions {
            threads: 1,
            max_background: 16,
            max_readahead: 0,
            async_dio: true,
            locks: true,
            posix_acl: false,
            passthrough: false,
        };
        let (session, notifier) = (None, None);
        #[rustfmt::skip]
        let mut kernel = Self {
            directory, socket, notifications, invalidations, notifier, master, stop_master, client, session, runtime,
        };
        let init = abi::InitIn { major: 7, minor: 31, max_readahead: 0, flags: 0 };
        kernel.send(opcode::INIT, 0, 1, init.as_bytes());
        let handle = kernel.runtime.handle().clone();
        kernel.session = Some(Session::start(device, &options, namespace, handle).unwrap());
        assert_eq!(kernel.answer().0, 0);
        let agreement = kernel.session.as_ref().unwrap().connection.agreement();
        let notifier = Connection::new(vec![notified], agreement).unwrap().notifier();
        let inodes = Inodes { open: Box::new(Vec::new), forgotten: Box::new(|_| {}) };
        kernel.notifier = Some(kernel.invalidations.attach(notifier, root, inodes).unwrap());
        kernel
    }

    fn send(&self, number: u32, node: u64, thread: u32, body: &[u8]) {
        let len = (size_of::<InHeader>() + body.len()) as u32;
        let head = InHeader { len, opcode: number, unique: 2, node, pid: thread, ..InHeader::default() };
        send(&self.socket, &[head.as_bytes(), body].concat(), SendFlags::empty()).unwrap();
    }

    /// The errno of an answer, and the answer.
    fn answer(&self) -> (i32, Vec<u8>) {
        let mut buffer = vec![0; 4096];
        let (length, _) = recv(&self.socket, &mut buffer[..], RecvFlags::empty()).unwrap();
        let (head, body) = OutHeader::read_from_prefix(&buffer[..length]).unwrap();
        (-head.error, body.to_vec())
    }

    fn ask<T: FromBytes>(&self, number: u32, node: u64, thread: u32, body: &[u8]) -> Result<T, i32> {
        self.send(number, node, thread, body);
        match self.answer() {
            (0, body) => Ok(T::read_from_prefix(&body).unwrap().0),
            (errno, _) => Err(errno),
        }
    }

    fn lock(&self, number: u32, node: u64, owner: u64) {
        let lock = FileLock { start: 0, end: i64::MAX as u64, kind: libc::F_WRLCK.cast_unsigned(), pid: 1 };
        self.send(number, node, 1, LkIn { fh: 1, owner, lock, lk_flags: 0, padding: 0 }.as_bytes());
    }

    fn lookup(&self, thread: u32, name: &str) -> Result<EntryOut, i32> {
        self.ask(opcode::LOOKUP, abi::ROOT_NODE, thread, format!("{name}\0").as_bytes())
    }

    fn stat(&self, node: u64) -> Result<AttrOut, i32> {
        self.ask(opcode::GETATTR, node, 1, abi::GetattrIn { getattr_flags: 0, dummy: 0, fh: 0 }.as_bytes())
    }

    fn open(&self, node: u64, thread: u32, flags: i32) -> Result<OpenOut, i32> {
        let flags = flags.cast_unsigned();
        self.ask(opcode::OPEN, node, thread, abi::OpenIn { flags, open_flags: 0 }.as_bytes())
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        for socket in [&self.socket, &self.notifications] {
            rustix::net::shutdown(socket, rustix::net::Shutdown::Both).unwrap();
        }
        self.notifier.take();
        if let Some(session) = self.session.take() {
            session.join();
        }
        let ended = async { tokio::time::timeout(Duration::from_secs(10), self.client.shutdown()).await };
        let ended = self.runtime.block_on(ended);
        self.stop_master.cancel();
        assert!(ended.is_ok() || std::thread::panicking(), "the client does not end");
    }
}

#[test]
fn an_object_that_is_replaced_before_it_is_opened_for_writing_costs_one_retry_and_no_more() {
    let kernel = Kernel::new("a");
    let old = kernel.lookup(1, "a").unwrap();
    put(kernel.directory.path(), "a", b"another version");
    // The kernel has not taken the invalidation in yet: it goes by what it has looked up.
    kernel.runtime.block_on(kernel.master.take_in("a"));
    let attributes = kernel.stat(old.nodeid).unwrap();
    assert_eq!((attributes.attr.size, attributes.attr_valid, attributes.attr_valid_nsec), (15, 0, 0));
    // Now it looks the name up again, once; another thread may do so for it.
    assert_eq!(kernel.open(old.nodeid, 1, libc::O_WRONLY | libc::O_APPEND).unwrap_err(), libc::ESTALE);
    let written = kernel.lookup(2, "a").unwrap();
    assert_eq!((written.attr.size, written.entry_valid, written.entry_valid_nsec), (15, 0, 0));
    assert_eq!(kernel.lookup(1, "a").unwrap().nodeid, written.nodeid);
    assert_eq!(kernel.stat(written.nodeid).unwrap().attr.size, 15);
    kernel.open(written.nodeid, 1, libc::O_WRONLY | libc::O_APPEND).unwrap();
}

/// As when a page of the file is being read for long.
#[test]
fn nobody_has_a_file_locked_before_the_kernel_has_forgotten_what_others_changed() {
    let kernel = Kernel::start("a", Master::fs_mode);
    let file = kernel.lookup(1, "a").unwrap().nodeid;
    stick(&kernel.invalidations, file);
    let begun = Instant::now();
    kernel.lock(opcode::SETLK, file, 1);
    assert_eq!(kernel.answer().0, libc::EAGAIN, "after {:?}", begun.elapsed());
    kernel.lock(opcode::SETLKW, file, 2);
    set_socket_timeout(&kernel.socket, Timeout::Recv, Some(Duration::from_secs(4))).unwrap();
    let answer = recv(&kernel.socket, &mut [0; 4096][..], RecvFlags::empty());
    assert_eq!(answer.err(), Some(rustix::io::Errno::AGAIN), "it waits for longer than for a master");
    set_socket_timeout(&kernel.socket, Timeout::Recv, Some(DEADLINE)).unwrap();
    kernel.send(opcode::INTERRUPT, 0, 1, abi::InterruptIn { unique: 2 }.as_bytes());
    assert_eq!(kernel.answer().0, libc::EINTR);
    kernel.lock(opcode::SETLKW, file, 3);
    let taken = std::thread::scope(|scope| {
        scope.spawn(|| {
            while recv(&kernel.notifications, &mut [0; 4096][..], RecvFlags::empty()).is_ok_and(|(n, _)| n > 0) {}
        });
        let answer = kernel.answer().0;
        rustix::net::shutdown(&kernel.notifications, rustix::net::Shutdown::Both).unwrap();
        answer
    });
    assert_eq!(taken, 0);
    assert_eq!(kernel.master.locks(), [Exclusive, Unlocked, Exclusive, Unlocked, Exclusive]);
}
