//! The event loops against a kernel that this test plays itself, over a socket pair: what a real kernel never sends,
//! or sends only in a race.

// Helpers of tests report by panicking, where the test sees it.
#![allow(clippy::unwrap_used)]

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cavern_fuse::kernel::abi::{self, InHeader, OutHeader, opcode};
use cavern_fuse::kernel::in_flight::PATIENCE;
use cavern_fuse::kernel::{Filesystem, Operation, Reply, Session, SessionOptions};
use proptest::prelude::*;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};
use tokio::runtime::Runtime;
use zerocopy::{FromBytes, IntoBytes};

/// GETATTR waits for ever, SETLKW for a signal, UNLINK and READLINK for the name `go` to be looked up, OPEN is dropped,
/// STATFS panics, LISTXATTR has four bytes, everything else succeeds.
#[derive(Default)]
struct Stub {
    forgotten: AtomicU64,
    go: Arc<tokio::sync::Notify>,
}

impl Filesystem for Stub {
    fn dispatch(&self, _node: u64, operation: Operation<'_>, reply: Reply, _payload: &mut [u8]) {
        match operation {
            Operation::Getattr => reply.defer(|reply| async move {
                std::future::pending::<()>().await;
                reply.done();
            }),
            Operation::Unlink { .. } => {
                let go = Arc::clone(&self.go);
                reply.run_uninterruptible(|reply| async move {
                    go.notified().await;
                    reply.done();
                });
            }
            Operation::Readlink => {
                let go = Arc::clone(&self.go);
                reply.defer(|reply| async move {
                    go.notified().await;
                    reply.done();
                });
            }
            Operation::Setlk { .. } => reply.run_until_interrupted(|reply, interrupted| async move {
                interrupted.cancelled().await;
                reply.error(libc::EDEADLK);
            }),
            Operation::Lookup { name: b"go" } => {
                self.go.notify_one();
                reply.done();
            }
            Operation::Open { .. } => drop(reply),
            Operation::Statfs => panic!("a defect"),
            Operation::Listxattr { size } => reply.xattr(b"blue", size),
            _ => reply.done(),
        }
    }

    fn forget(&self, _node: u64, nlookup: u64) {
        self.forgotten.fetch_add(nlookup, Ordering::Relaxed);
    }
}

struct Kernel {
    socket: OwnedFd,
    session: Option<Session>,
    stub: Arc<Stub>,
    runtime: Runtime,
}

impl Kernel {
    fn new() -> Self {
        let (socket, device) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let (stub, options) = (
            Arc::new(Stub::default()),
            SessionOptions {
                threads: 1,
                max_background: 16,
                max_readahead: 1 << 20,
                async_dio: true,
                locks: true,
                posix_acl: false,
                passthrough: false,
            },
        );
        rustix::net::sockopt::set_socket_timeout(
            &socket,
            rustix::net::sockopt::Timeout::Recv,
            Some(Duration::from_secs(10)),
        )
        .unwrap();
        let mut kernel = Self { socket, session: None, stub: Arc::clone(&stub), runtime };
        let init = abi::InitIn { major: 7, minor: 45, max_readahead: 4096, flags: u32::MAX };
        let body = [init.as_bytes(), abi::InitInExtension::default().as_bytes()].concat();
        kernel.request(opcode::INIT, 1, &body);
        let handle = kernel.runtime.handle().clone();
        kernel.session = Some(Session::start(device, &options, stub, handle).unwrap());
        let (head, body) = kernel.answer();
        assert_eq!((head.unique, head.error), (1, 0));
        let (answer, _) = abi::InitOut::read_from_prefix(&body).unwrap();
        assert_eq!((answer.major, answer.minor, answer.max_pages), (7, abi::MINOR, 256));
        assert_eq!(u64::from(answer.flags) & abi::init::BIG_WRITES, abi::init::BIG_WRITES);
        kernel
    }

    fn request(&self, number: u32, unique: u64, body: &[u8]) {
        let len = (size_of::<InHeader>() + body.len()) as u32;
        let head = InHeader { len, opcode: number, unique, node: 1, ..InHeader::default() };
        self.raw(&[head.as_bytes(), body].concat());
    }

    fn raw(&self, bytes: &[u8]) {
        send(&self.socket, bytes, SendFlags::empty()).unwrap();
    }

    fn answer(&self) -> (OutHeader, Vec<u8>) {
        let mut buffer = vec![0; 4096];
        let (length, _) = recv(&self.socket, &mut buffer[..], RecvFlags::empty()).unwrap();
        let (head, body) = OutHeader::read_from_prefix(&buffer[..length]).unwrap();
        assert_eq!(head.len as usize, length);
        (head, body.to_vec())
    }

    /// Request and errno of two answers in the order of the requests: a task may answer before the loop or after it.
    fn two_answers(&self) -> [(u64, i32); 2] {
        let mut answers = [(); 2].map(|()| self.answer().0).map(|head| (head.unique, head.error));
        answers.sort_unstable();
        answers
    }

    fn expect(&self, unique: u64, error: i32) {
        let (head, _) = self.answer();
        assert_eq!((head.unique, head.error), (unique, -error));
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both).unwrap();
        if let Some(session) = self.session.take() {
            session.join();
        }
    }
}

fn interrupt(unique: u64) -> abi::InterruptIn {
    abi::InterruptIn { unique }
}

#[test]
fn a_signal_ends_a_request_that_waits_on() {
    let kernel = Kernel::new();
    let began = Instant::now();
    kernel.request(opcode::GETATTR, 10, abi::GetattrIn::default().as_bytes());
    kernel.request(opcode::INTERRUPT, 11, interrupt(10).as_bytes());
    kernel.expect(10, libc::EINTR);
    assert!(began.elapsed() >= PATIENCE, "after {:?}", began.elapsed());
    // Nothing more comes for 10: the next answer belongs to the next request.
    kernel.request(opcode::ACCESS, 12, abi::AccessIn::default().as_bytes());
    kernel.expect(12, 0);
}

#[test]
fn a_signal_does_not_end_a_request_that_is_answered_soon() {
    let kernel = Kernel::new();
    for (unique, interrupt_first) in [(40, false), (50, true)] {
        let interrupt = || kernel.request(opcode::INTERRUPT, unique + 1, interrupt(unique).as_bytes());
        if interrupt_first {
            interrupt();
        }
        kernel.request(opcode::READLINK, unique, &[]);
        if !interrupt_first {
            interrupt();
        }
        kernel.request(opcode::ACCESS, unique + 2, abi::AccessIn::default().as_bytes());
        kernel.expect(unique + 2, 0);
        kernel.request(opcode::LOOKUP, unique + 4, b"go\0");
        assert_eq!(kernel.two_answers(), [(unique, 0), (unique + 4, 0)]);
    }
}

#[test]
fn a_signal_does_not_end_what_is_being_carried_out() {
    let kernel = Kernel::new();
    kernel.request(opcode::UNLINK, 14, b"name\0");
    kernel.request(opcode::INTERRUPT, 15, interrupt(14).as_bytes());
    kernel.request(opcode::ACCESS, 16, abi::AccessIn::default().as_bytes());
    kernel.expect(16, 0);
    kernel.request(opcode::LOOKUP, 18, b"go\0");
    assert_eq!(kernel.two_answers(), [(14, 0), (18, 0)]);
    // Nor does one that comes first.
    kernel.request(opcode::INTERRUPT, 21, interrupt(20).as_bytes());
    kernel.request(opcode::UNLINK, 20, b"name\0");
    kernel.request(opcode::LOOKUP, 22, b"go\0");
    assert_eq!(kernel.two_answers(), [(20, 0), (22, 0)]);
}

#[test]
fn a_signal_is_told_to_what_answers_it_by_itself() {
    let kernel = Kernel::new();
    let ask = abi::LkIn::default();
    kernel.request(opcode::SETLKW, 30, ask.as_bytes());
    kernel.request(opcode::INTERRUPT, 31, interrupt(30).as_bytes());
    kernel.expect(30, libc::EDEADLK);
    kernel.request(opcode::INTERRUPT, 33, interrupt(32).as_bytes());
    kernel.request(opcode::SETLKW, 32, ask.as_bytes());
    kernel.expect(32, libc::EDEADLK);
}

#[test]
fn an_interrupt_that_overtakes_its_request_is_remembered() {
    let kernel = Kernel::new();
    kernel.request(opcode::INTERRUPT, 21, interrupt(20).as_bytes());
    kernel.request(opcode::GETATTR, 20, abi::GetattrIn::default().as_bytes());
    kernel.expect(20, libc::EINTR);
    // Only that one.
    kernel.request(opcode::GETATTR, 22, abi::GetattrIn::default().as_bytes());
    kernel.request(opcode::ACCESS, 24, abi::AccessIn::default().as_bytes());
    kernel.expect(24, 0);
}

#[test]
fn interrupts_of_answered_requests_pile_up_to_no_harm() {
    let kernel = Kernel::new();
    for unique in (100..2100).step_by(2) {
        kernel.request(opcode::INTERRUPT, unique + 1, interrupt(unique).as_bytes());
    }
    kernel.request(opcode::ACCESS, 5000, abi::AccessIn::default().as_bytes());
    kernel.expect(5000, 0);
}

#[test]
fn a_request_that_nobody_answers_gets_eio() {
    let kernel = Kernel::new();
    kernel.request(opcode::OPEN, 30, abi::OpenIn::default().as_bytes());
    kernel.expect(30, libc::EIO);
}

#[test]
fn a_panic_costs_one_request() {
    let kernel = Kernel::new();
    kernel.request(opcode::STATFS, 40, &[]);
    kernel.expect(40, libc::EIO);
    kernel.request(opcode::ACCESS, 42, abi::AccessIn::default().as_bytes());
    kernel.expect(42, 0);
}

#[test]
fn what_is_not_served_is_refused_by_name() {
    let kernel = Kernel::new();
    for (number, error) in [
        (opcode::FLUSH, libc::EIO),
        (opcode::FSYNC, libc::EIO),
        (opcode::COPY_FILE_RANGE, libc::EIO),
        (opcode::COPY_FILE_RANGE_64, libc::EIO),
        (opcode::TMPFILE, libc::EIO),
        (9999, libc::ENOSYS),
        (opcode::INIT, libc::EIO),
        (opcode::FALLOCATE, libc::EIO),
        (opcode::WRITE, libc::EIO),
        (opcode::READ, libc::EIO),
        (opcode::MKDIR, libc::EIO),
        (opcode::DESTROY, 0),
    ] {
        kernel.request(number, 50, &[]);
        kernel.expect(50, error);
    }
}

#[test]
fn an_attribute_is_measured_refused_or_given() {
    let kernel = Kernel::new();
    for (size, error, body) in [
        (0, 0, abi::GetxattrOut { size: 4, padding: 0 }.as_bytes().to_vec()),
        (3, libc::ERANGE, Vec::new()),
        (4, 0, b"blue".to_vec()),
        (9, 0, b"blue".to_vec()),
    ] {
        kernel.request(opcode::LISTXATTR, 80, abi::GetxattrIn { size, padding: 0 }.as_bytes());
        let (head, found) = kernel.answer();
        assert_eq!((head.error, found), (-error, body), "{size}");
    }
}

#[test]
fn whatever_waits_is_answered_at_the_end() {
    let kernel = Kernel::new();
    kernel.request(opcode::GETATTR, 60, abi::GetattrIn::default().as_bytes());
    // The loop serves in order: once this is answered, 60 is registered.
    kernel.request(opcode::ACCESS, 62, abi::AccessIn::default().as_bytes());
    kernel.expect(62, 0);
    let in_flight = Arc::clone(&kernel.session.as_ref().unwrap().in_flight);
    assert_eq!(in_flight.waiting(), 1);
    kernel.runtime.block_on(in_flight.close(libc::EIO));
    kernel.expect(60, libc::EIO);
    assert_eq!(in_flight.waiting(), 0);
    kernel.request(opcode::GETATTR, 64, abi::GetattrIn::default().as_bytes());
    kernel.expect(64, libc::EIO);
}

#[test]
fn forgets_are_counted_and_not_answered() {
    let kernel = Kernel::new();
    kernel.request(opcode::FORGET, 70, abi::ForgetIn { nlookup: 3 }.as_bytes());
    let mut batch = abi::BatchForgetIn { count: 2, dummy: 0 }.as_bytes().to_vec();
    for nlookup in [4, 5] {
        batch.extend_from_slice(abi::ForgetOne { node: 9, nlookup }.as_bytes());
    }
    kernel.request(opcode::BATCH_FORGET, 72, &batch);
    kernel.request(opcode::ACCESS, 74, abi::AccessIn::default().as_bytes());
    kernel.expect(74, 0);
    assert_eq!(kernel.stub.forgotten.load(Ordering::Relaxed), 12);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn garbage_leaves_the_loop_alive(
        messages in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..200), 1..20),
    ) {
        let kernel = Kernel::new();
        for message in &messages {
            kernel.raw(message);
        }
        kernel.request(opcode::ACCESS, 4242, abi::AccessIn::default().as_bytes());
        // Garbage that is long enough for a header is answered, in order; ours comes last.
        let mut answers = 0;
        while kernel.answer().0.unique != 4242 {
            answers += 1;
            prop_assert!(answers <= messages.len());
        }
    }
}
