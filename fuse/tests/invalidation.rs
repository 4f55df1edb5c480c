//! Invalidations from the client's sink to a kernel that this test plays itself.

// Helpers of tests report by panicking, where the test sees it.
#![allow(clippy::unwrap_used)]

#[path = "mount/stuck.rs"]
mod stuck;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cavern_client::InvalidationSink;
use cavern_fuse::invalidation::{Inodes, Invalidations, NotifierThread};
use cavern_fuse::kernel::abi::{self, InHeader, OutHeader, notify, opcode};
use cavern_fuse::kernel::{Filesystem, Operation, Reply, Session, SessionOptions};
use cavern_fuse::root::Root;
use futures::FutureExt;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};
use tokio::runtime::Runtime;
use zerocopy::{FromBytes, IntoBytes};

use stuck::stick;

/// Inode of the namespace that the mount shows as its root.
const ROOT: u64 = 500;
/// One that is open.
const OPEN: u64 = 600;

struct Nothing;

impl Filesystem for Nothing {
    fn dispatch(&self, _node: u64, _operation: Operation<'_>, reply: Reply, _payload: &mut [u8]) {
        reply.error(libc::ENOSYS);
    }
}

struct Kernel {
    socket: OwnedFd,
    sink: Arc<Invalidations>,
    notifier: Option<NotifierThread>,
    session: Option<Session>,
    runtime: Runtime,
}

impl Kernel {
    fn new() -> Self {
        let (socket, device) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        set_socket_timeout(&socket, Timeout::Recv, Some(Duration::from_secs(10))).unwrap();
        let init = abi::InitIn { major: 7, minor: 31, max_readahead: 0, flags: 0 };
        let len = (size_of::<InHeader>() + size_of::<abi::InitIn>()) as u32;
        let head = InHeader { len, opcode: opcode::INIT, unique: 2, ..InHeader::default() };
        send(&socket, &[head.as_bytes(), init.as_bytes()].concat(), SendFlags::empty()).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let options = SessionOptions {
            threads: 1,
            max_background: 16,
            max_readahead: 0,
            async_dio: true,
            locks: false,
            posix_acl: false,
            passthrough: false,
        };
        let session = Session::start(device, &options, Arc::new(Nothing), runtime.handle().clone()).unwrap();
        let sink = Invalidations::new();
        let mut kernel = Self { socket, sink, notifier: None, session: Some(session), runtime };
        assert_eq!(kernel.receive().0.unique, 2);
        let notifier = kernel.session.as_ref().unwrap().connection.notifier();
        let inodes = Inodes { open: Box::new(|| vec![OPEN]), forgotten: Box::new(|_| {}) };
        kernel.notifier = Some(kernel.sink.attach(notifier, Arc::new(Root::new("/a", ROOT)), inodes).unwrap());
        // The question whether epochs are known.
        assert_eq!(kernel.receive().0.error, notify::INC_EPOCH);
        kernel
    }

    fn receive(&self) -> (OutHeader, Vec<u8>) {
        let mut buffer = vec![0; 4096];
        let (length, _) = recv(&self.socket, &mut buffer[..], RecvFlags::empty()).unwrap();
        let (head, body) = OutHeader::read_from_prefix(&buffer[..length]).unwrap();
        (head, body.to_vec())
    }

    /// The next messages, apart by what they are about: each kind has a thread of its own.
    fn messages(&self, count: usize) -> (Vec<(u64, Vec<u8>)>, Vec<u64>) {
        let (mut entries, mut inodes) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let (head, body) = self.receive();
            assert_eq!(head.unique, 0);
            match head.error {
                notify::INVAL_ENTRY => {
                    let (entry, name) = abi::NotifyInvalEntryOut::read_from_prefix(&body).unwrap();
                    assert_eq!(name.len(), entry.namelen as usize + 1);
                    entries.push((entry.parent, name[..name.len() - 1].to_vec()));
                }
                notify::INVAL_INODE => inodes.push(abi::NotifyInvalInodeOut::read_from_prefix(&body).unwrap().0.node),
                other => panic!("unexpected message {other}"),
            }
        }
        (entries, inodes)
    }

    /// The next message, which must be about an inode.
    fn inode(&self) -> u64 {
        let (head, body) = self.receive();
        assert_eq!(head.error, notify::INVAL_INODE);
        abi::NotifyInvalInodeOut::read_from_prefix(&body).unwrap().0.node
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both).unwrap();
        self.notifier.take();
        if let Some(session) = self.session.take() {
            session.join();
        }
    }
}

#[test]
fn what_the_barrier_promises_is_in_the_kernels_hands() {
    let kernel = Kernel::new();
    kernel.sink.entry(7, b"name", 8, 9, true);
    kernel.sink.entry(7, b"other", 9, 0, true);
    kernel.sink.inode(12);
    kernel.sink.inode(13);
    kernel.runtime.block_on(kernel.sink.barrier());
    // Nothing has to be waited for.
    assert_eq!(kernel.sink.queued(), 0);
    let (entries, inodes) = kernel.messages(4);
    assert_eq!(entries, [(7, b"name".to_vec()), (7, b"other".to_vec())]);
    assert_eq!(inodes, [12, 13]);
}

#[test]
fn the_root_has_the_kernels_number() {
    let kernel = Kernel::new();
    kernel.sink.entry(ROOT, b"x", 0, 9, true);
    kernel.sink.entry(3, b"a", ROOT, 9, true);
    let (entries, inodes) = kernel.messages(3);
    assert_eq!(entries, [(abi::ROOT_NODE, b"x".to_vec()), (3, b"a".to_vec())]);
    assert_eq!(inodes, [abi::ROOT_NODE]);
}

#[test]
fn a_reset_is_one_message_for_every_name() {
    let kernel = Kernel::new();
    let listings = kernel.sink.listings();
    let (begun, _) = listings.begin(7);
    listings.complete(7, begun);
    kernel.sink.reset();
    assert_eq!(listings.begin(7).1, cavern_fuse::invalidation::Listing::Unknown);
    assert_eq!(kernel.receive().0.error, notify::INC_EPOCH);
    // And one for each file that is open, whose pages no name says anything of.
    assert_eq!([kernel.inode(), kernel.inode()], [abi::ROOT_NODE, OPEN]);
}

#[test]
fn a_flood_becomes_a_reset_and_loses_no_barrier() {
    let kernel = Kernel::new();
    // Nobody reads: the socket's buffer fills, then the queue.
    let mut barrier = kernel.sink.barrier();
    for number in 0..200_000u64 {
        kernel.sink.entry(7, number.to_string().as_bytes(), 0, number, true);
    }
    let after = kernel.sink.barrier();
    assert!(kernel.sink.queued() <= 70_000);
    let mut resets = 0;
    let mut entries = 0;
    while resets == 0 {
        match kernel.receive().0.error {
            notify::INC_EPOCH => resets += 1,
            notify::INVAL_ENTRY => entries += 1,
            other => panic!("unexpected message {other}"),
        }
    }
    assert!(entries < 200_000);
    let passed = async { tokio::time::timeout(Duration::from_secs(10), &mut barrier).await };
    kernel.runtime.block_on(passed).unwrap();
    // Read on, so that the thread can reach the second barrier, of which no message tells.
    set_socket_timeout(&kernel.socket, Timeout::Recv, Some(Duration::from_millis(50))).unwrap();
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::Acquire) {
                let _none_for_now = recv(&kernel.socket, &mut [0; 4096][..], RecvFlags::empty());
            }
        });
        let passed = async { tokio::time::timeout(Duration::from_secs(10), after).await };
        let passed = kernel.runtime.block_on(passed);
        is_done.store(true, Ordering::Release);
        passed.unwrap();
    });
}

/// As when a page of a file is being read for long.
#[test]
fn whoever_locks_a_file_waits_for_what_it_is_about_and_for_nothing_else() {
    let kernel = Kernel::new();
    stick(&kernel.sink, 12);
    kernel.sink.inode(13);
    let _runtime = kernel.runtime.enter();
    assert!(kernel.sink.forgotten(14).now_or_never().is_some());
    let mut forgotten = [12, 13].map(|inode| Box::pin(kernel.sink.forgotten(inode)));
    std::thread::scope(|scope| {
        let mut wait = async |duration| {
            let [first, second] = &mut forgotten;
            let one = async { tokio::join!(first, second) };
            tokio::time::timeout(Duration::from_millis(duration), one).await
        };
        assert!(kernel.runtime.block_on(wait(200)).is_err());
        scope.spawn(|| {
            while kernel.sink.queued() > 0 {
                kernel.receive();
            }
            // What is forgotten out of turn.
            kernel.receive();
            kernel.receive();
        });
        kernel.runtime.block_on(wait(10_000)).unwrap();
    });
}

#[test]
fn without_a_kernel_nothing_waits() {
    let sink = Invalidations::new();
    sink.entry(1, b"x", 0, 2, true);
    sink.reset();
    assert_eq!(sink.queued(), 0);
    assert!(sink.barrier().now_or_never().is_some());
    let kernel = Kernel::new();
    let sink = Arc::clone(&kernel.sink);
    drop(kernel);
    sink.entry(1, b"x", 0, 2, true);
    assert!(sink.barrier().now_or_never().is_some());
}
