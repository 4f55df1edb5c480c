//! A connection to the kernel: the handshake, and the event loops that read requests until the file system is
//! unmounted. Each loop has a descriptor of its own and a buffer for payloads, so that what is cached is answered
//! without touching another thread.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::JoinHandle;

use rustix::io::Errno;
use tokio::runtime::Handle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, warn};
use zerocopy::IntoBytes;

use super::abi::{self, InitOut, init};
use super::channel::{Backing, Channel};
use super::in_flight::{InFlight, RequestInfo};
use super::notify::Notifier;
use super::reply::Reply;
use super::request::{Malformed, Operation, Request};
use super::request_stats::RequestKind;

/// Bytes of a page; the unit of `max_pages`.
const PAGE: usize = 4096;
/// Pages of the largest read: 1 MiB, the default of `fs.fuse.max_pages_limit`.
const READ_PAGES: u16 = 256;
/// The largest READ that the kernel sends.
pub const READ_MAX: usize = READ_PAGES as usize * PAGE;
/// The largest WRITE that the kernel sends.
const WRITE_MAX: usize = READ_MAX;
/// Descriptors of a connection at most: what keeps the mount takes no more.
const CHANNELS_MAX: usize = 240;
/// Room for one request: the longest is a WRITE. BATCH_FORGET fills whatever room there is.
const REQUEST_BYTES: usize = WRITE_MAX + PAGE;

/// What serves the requests.
pub trait Filesystem: Send + Sync + 'static {
    /// Answers one request, at once or by [`Reply::defer`]. Called on an event loop: it must not block. `payload` is
    /// the loop's own page-aligned buffer of [`READ_MAX`] bytes, with arbitrary content.
    fn dispatch(&self, node: u64, operation: Operation<'_>, reply: Reply, payload: &mut [u8]);

    /// The kernel gives up `nlookup` references to an inode.
    fn forget(&self, node: u64, nlookup: u64) {
        let _ = (node, nlookup);
    }
}

/// What is asked of the kernel.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    /// Event loops.
    pub threads: usize,
    /// Read-ahead and other background requests in flight.
    pub max_background: u16,
    /// Bytes of kernel read-ahead. The kernel grants its bdi's present value at most; see `mount::set_read_ahead`.
    pub max_readahead: u32,
    /// Reads of `libaio` and the like with `O_DIRECT` do not wait for each other. A plain `read` with `O_DIRECT` of a
    /// file that was not opened with `FOPEN_DIRECT_IO` is then not interrupted by any signal.
    pub async_dio: bool,
    /// The kernel asks for access lists and heeds them: a request for each inode that somebody uses who does not own
    /// it. Whoever creates an inode applies the umask.
    pub posix_acl: bool,
    /// Locks of files are asked of us; otherwise the kernel keeps them among the processes of this host.
    pub locks: bool,
    /// Files may be opened with a backing file, where the kernel can (Linux 6.9 and later, CAP_SYS_ADMIN).
    pub passthrough: bool,
}

/// What kernel and file system agreed on.
#[derive(Clone, Copy, Debug)]
pub struct Agreement {
    pub minor: u32,
    pub flags: u64,
}

impl Agreement {
    /// Whether files may be opened with a backing file.
    pub fn has_passthrough(&self) -> bool {
        self.flags & init::PASSTHROUGH != 0
    }

    /// Whether what a process that died had read is sent once more when that is asked for (Linux 6.9 and later).
    pub fn has_resend(&self) -> bool {
        self.flags & init::HAS_RESEND != 0
    }
}

/// Why a session could not begin.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    #[error("the kernel's first message could not be read or answered: {0}")]
    Handshake(#[source] Errno),
    #[error(
        "the kernel speaks version {major}.{minor} of the FUSE protocol, and 7.{} or later is needed: Linux 5.4",
        abi::MINOR_OLDEST
    )]
    Version { major: u32, minor: u32 },
    #[error("the kernel's first message makes no sense")]
    Garbled,
    #[error("an event loop's thread could not be started: {0}")]
    Thread(#[source] io::Error),
}

/// A running session. Dropping it does not end it: unmount, then [`Session::join`].
#[derive(Debug)]
pub struct Session {
    pub connection: Connection,
    pub in_flight: Arc<InFlight>,
    /// Cancelled when the first event loop has found the connection gone.
    pub ended: CancellationToken,
    loops: Vec<JoinHandle<()>>,
}

/// A connection that has been greeted by a process before this one.
#[derive(Debug)]
pub struct Connection {
    channels: Vec<Arc<Channel>>,
    agreement: Agreement,
}

impl Connection {
    /// Of all descriptors that belong to it: what was read from one of them is answered on that one only, or sent
    /// again.
    pub fn new(devices: Vec<OwnedFd>, agreement: Agreement) -> Result<Self, SessionError> {
        let channels: Vec<_> = devices.into_iter().map(|device| Arc::new(Channel::new(device))).collect();
        if channels.is_empty() { Err(SessionError::Garbled) } else { Ok(Self { channels, agreement }) }
    }

    /// Has a descriptor for each event loop; true when there are more of them than before.
    pub fn widen(&mut self, threads: usize) -> bool {
        let before = self.channels.len();
        while self.channels.len() < threads.min(CHANNELS_MAX) {
            match self.channels[0].another() {
                Ok(another) => self.channels.push(another),
                Err(cause) => {
                    warn!(%cause, "event loops share their descriptors");
                    break;
                }
            }
        }
        self.channels.len() > before
    }

    /// All its descriptors.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.channels.iter().map(|channel| channel.descriptor())
    }

    pub fn agreement(&self) -> Agreement {
        self.agreement
    }

    /// For messages to the kernel that answer nothing.
    pub fn notifier(&self) -> Notifier {
        Notifier::new(Arc::clone(&self.channels[0]))
    }

    /// A file that the process before registered with the kernel.
    pub fn backing(&self, number: u32) -> Backing {
        Backing::registered(&self.channels[0], number)
    }
}

impl Session {
    /// Greets the kernel on the descriptor of a fresh mount and starts the event loops. Blocks for the handshake.
    pub fn start<F: Filesystem>(
        device: OwnedFd,
        options: &SessionOptions,
        filesystem: Arc<F>,
        runtime: Handle,
    ) -> Result<Self, SessionError> {
        let channel = Arc::new(Channel::new(device));
        let agreement = greet(&channel, options)?;
        debug!(minor = agreement.minor, flags = agreement.flags, "the kernel has been greeted");
        let mut connection = Connection { channels: vec![channel], agreement };
        connection.widen(options.threads);
        Self::go_on(connection, options, filesystem, runtime)
    }

    /// Starts the event loops of a connection that has been greeted, with the descriptors that it has.
    pub fn go_on<F: Filesystem>(
        connection: Connection,
        options: &SessionOptions,
        filesystem: Arc<F>,
        runtime: Handle,
    ) -> Result<Self, SessionError> {
        let (in_flight, ended) = (Arc::new(InFlight::new(runtime)), CancellationToken::new());
        let mut session = Self { connection, in_flight, ended, loops: Vec::new() };
        for number in 0..options.threads.max(1) {
            session.start_loop(number, &filesystem)?;
        }
        Ok(session)
    }

    fn start_loop<F: Filesystem>(&mut self, number: usize, filesystem: &Arc<F>) -> Result<(), SessionError> {
        let channels = &self.connection.channels;
        let event_loop = EventLoop {
            channel: Arc::clone(&channels[number % channels.len()]),
            in_flight: Arc::clone(&self.in_flight),
            filesystem: Arc::clone(filesystem),
            ended: self.ended.clone(),
        };
        let thread = std::thread::Builder::new()
            .name(format!("fuse-loop-{number}"))
            .spawn(move || event_loop.run())
            .map_err(SessionError::Thread)?;
        self.loops.push(thread);
        Ok(())
    }

    /// Waits for the event loops: they end when the file system has been unmounted.
    pub fn join(self) {
        for thread in self.loops {
            if thread.join().is_err() {
                error!("an event loop panicked");
            }
        }
    }
}

/// INIT: takes the kernel's offer and asks for what a file system of large files wants.
fn greet(channel: &Arc<Channel>, options: &SessionOptions) -> Result<Agreement, SessionError> {
    const WANTED: u64 = init::ASYNC_READ
        | init::EXPORT_SUPPORT
        | init::BIG_WRITES
        | init::DO_READDIRPLUS
        | init::PARALLEL_DIROPS
        | init::MAX_PAGES
        | init::CACHE_SYMLINKS
        | init::DIRECT_IO_ALLOW_MMAP
        | init::HANDLE_KILLPRIV_V2
        | init::SETXATTR_EXT
        | init::HAS_RESEND
        | init::INIT_EXT;

    let mut buffer = vec![0; REQUEST_BYTES];
    let length = loop {
        match channel.receive(&mut buffer) {
            Ok(length) => break length,
            Err(Errno::INTR | Errno::AGAIN | Errno::NOENT) => {}
            Err(cause) => return Err(SessionError::Handshake(cause)),
        }
    };
    let request = Request::decode(&buffer[..length]).map_err(|_| SessionError::Garbled)?;
    let Operation::Init { major, minor, max_readahead, flags } = request.operation else {
        return Err(SessionError::Garbled);
    };
    if major != abi::MAJOR || minor < abi::MINOR_OLDEST {
        let _ = channel.send(request.unique, -libc::EPROTO, &[], &[]);
        return Err(SessionError::Version { major, minor });
    }
    let mut wanted = WANTED;
    if options.passthrough {
        wanted |= init::PASSTHROUGH;
    }
    if options.posix_acl {
        wanted |= init::POSIX_ACL | init::DONT_MASK;
    }
    if options.locks {
        wanted |= init::POSIX_LOCKS | init::FLOCK_LOCKS;
    }
    if options.async_dio {
        wanted |= init::ASYNC_DIO;
    }
    let agreement = Agreement { minor: minor.min(abi::MINOR), flags: wanted & flags };
    let answer = InitOut {
        major: abi::MAJOR,
        minor: agreement.minor,
        max_readahead: max_readahead.max(options.max_readahead),
        flags: (agreement.flags & u64::from(u32::MAX)) as u32,
        max_background: options.max_background,
        // The kernel calls the device congested at three quarters of max_background by default too.
        congestion_threshold: options.max_background - options.max_background / 4,
        max_write: WRITE_MAX as u32,
        time_gran: 1,
        max_pages: READ_PAGES,
        flags2: (agreement.flags >> 32) as u32,
        // Backing files on plain file systems: this mount is one level above them.
        max_stack_depth: u32::from(agreement.has_passthrough()),
        ..InitOut::default()
    };
    channel.send(request.unique, 0, answer.as_bytes(), &[]).map_err(SessionError::Handshake)?;
    Ok(agreement)
}

/// A buffer that begins at a page boundary, so that copies into and out of the kernel run at full speed.
struct PageAligned {
    bytes: Vec<u8>,
    start: usize,
}

impl PageAligned {
    fn new(length: usize) -> Self {
        // Not zeros, whose pages would be there when they are used first: the kernel ends a request with an error that
        // it cannot copy to a process which is being killed.
        let bytes = vec![1; length + PAGE];
        let start = bytes.as_ptr().align_offset(PAGE).min(PAGE);
        Self { bytes, start }
    }

    fn slice(&mut self, length: usize) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + length]
    }
}

struct EventLoop<F> {
    channel: Arc<Channel>,
    in_flight: Arc<InFlight>,
    filesystem: Arc<F>,
    ended: CancellationToken,
}

impl<F: Filesystem> EventLoop<F> {
    fn run(self) {
        // Whatever ends this loop, the others and the owner are notified.
        let _ended = self.ended.clone().drop_guard();
        let mut requests = PageAligned::new(REQUEST_BYTES);
        let mut payloads = PageAligned::new(READ_MAX);
        let payload = payloads.slice(READ_MAX);
        loop {
            match self.channel.receive(requests.slice(REQUEST_BYTES)) {
                // A device never says this; whatever does is no longer there.
                Ok(0) => break,
                Ok(length) => {
                    let message = &requests.slice(REQUEST_BYTES)[..length];
                    // A defect in one operation must not take the mount down: its request has been answered with EIO by
                    // the drop of its Reply, and the panic hook has reported where.
                    if catch_unwind(AssertUnwindSafe(|| self.serve(message, payload))).is_err() {
                        error!("a request ended in a panic: answered EIO");
                    }
                }
                // NOENT: the asker was killed while the kernel copied the request.
                Err(Errno::INTR | Errno::AGAIN | Errno::NOENT) => {}
                Err(Errno::NODEV | Errno::CONNABORTED) => break,
                Err(cause) => {
                    error!(%cause, "the FUSE device cannot be read");
                    break;
                }
            }
        }
    }

    fn serve(&self, message: &[u8], payload: &mut [u8]) {
        let request = match Request::decode(message) {
            Ok(request) => request,
            Err(malformed) => return self.refuse(malformed),
        };
        match request.operation {
            Operation::Interrupt { unique } => self.in_flight.interrupt(unique),
            Operation::Forget { nlookup } => self.filesystem.forget(request.node, nlookup),
            Operation::BatchForget(forgets) => {
                for (node, nlookup) in forgets.iter() {
                    self.filesystem.forget(node, nlookup);
                }
            }
            operation => {
                let asked = RequestInfo {
                    channel: Arc::clone(&self.channel),
                    unique: request.unique,
                    kind: RequestKind::of(&operation),
                    caller: request.caller,
                    received: Instant::now(),
                };
                let reply = Reply::new(&self.in_flight, asked);
                match operation {
                    // The connection ends with ENODEV, not with this message, which only some mounts send.
                    Operation::Destroy => reply.done(),
                    Operation::Init { .. } => reply.error(libc::EPROTO),
                    Operation::Unsupported { .. } => reply.error(libc::ENOSYS),
                    operation => self.filesystem.dispatch(request.node, operation, reply, payload),
                }
            }
        }
    }

    fn refuse(&self, malformed: Malformed) {
        self.in_flight.observation.malformed.fetch_add(1, Relaxed);
        warn!(opcode = malformed.opcode, "a malformed request of the kernel: answered EIO");
        if let Some(unique) = malformed.unique {
            // FORGET and INTERRUPT expect no answer; the kernel says ENOENT to one, which is of no consequence.
            let _ = self.channel.send(unique, -libc::EIO, &[], &[]);
        }
    }
}
