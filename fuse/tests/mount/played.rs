//! The file system with a master in memory, and a kernel that the test plays itself: what a real one sends only in a
//! race.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cavern_client::{Client, Identity};
use cavern_conf::Config;
use cavern_fuse::filesystem::Namespace;
use cavern_fuse::invalidation::Invalidations;
use cavern_fuse::kernel::abi::{self, AttrOut, EntryOut, InHeader, OpenOut, OutHeader, opcode};
use cavern_fuse::kernel::{Session, SessionOptions};
use cavern_fuse::root::Root;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use zerocopy::{FromBytes, IntoBytes};

use crate::master::Master;
use crate::{DEADLINE, put};

struct Kernel {
    directory: tempfile::TempDir,
    socket: OwnedFd,
    master: Master,
    stop_master: CancellationToken,
    client: Arc<Client>,
    session: Option<Session>,
    runtime: Runtime,
}

impl Kernel {
    /// Of a mount of a bucket that can be written to, with this object.
    fn new(key: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        put(directory.path(), key, key.as_bytes());
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let (bucket, stop_master) = (directory.path().join("bucket"), CancellationToken::new());
        let (master, address) = runtime.block_on(Master::start(&bucket, true, stop_master.clone()));
        let mut config = Config::default();
        config.cluster.masters = vec![address.to_string()];
        config.ufs.file_roots = vec!["/".into()];
        config.client.staging_directory = PathBuf::from(directory.path());
        let invalidations = Invalidations::new();
        let identity = Identity { name: "played".to_owned(), place: String::new() };
        let client = runtime.block_on(Client::connect(&config, identity, Arc::clone(&invalidations) as _)).unwrap();
        let root = Arc::new(Root::new("/data", runtime.block_on(client.metadata().resolve("/data")).unwrap().inode));
        let namespace = Arc::new(Namespace::new(client.clone(), root, invalidations, &config.fuse));

        let (socket, device) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        set_socket_timeout(&socket, Timeout::Recv, Some(DEADLINE)).unwrap();
        let options = SessionOptions {
            threads: 1,
            max_background: 16,
            max_readahead: 0,
            async_dio: true,
            locks: false,
            posix_acl: false,
            passthrough: false,
        };
        let mut kernel = Self { directory, socket, master, stop_master, client, session: None, runtime };
        let init = abi::InitIn { major: 7, minor: 31, max_readahead: 0, flags: 0 };
        kernel.send(opcode::INIT, 0, 1, init.as_bytes());
        let handle = kernel.runtime.handle().clone();
        kernel.session = Some(Session::start(device, &options, namespace, handle).unwrap());
        assert_eq!(kernel.answer().0, 0);
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
        rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both).unwrap();
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
