//! The answer to one request, as a value: it can be given from any thread, once, and a request whose `Reply` is
//! dropped without an answer gets `EIO`, so that no caller of the mount waits for ever.

use std::future::Future;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use cavern_client::journal::Slot;
use cavern_client::{RequestContext, Stages};
use futures::FutureExt as _;
use futures::future::lazy;
use rustix::io::Errno;
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, warn};
use zerocopy::{Immutable, IntoBytes};

use super::abi::{self, AttrOut, EntryOut, OpenOut, StatfsOut, fopen};
use super::channel::Backing;
use super::in_flight::{Admission, InFlight, InterruptPolicy, RequestInfo, WAITING_MAX};
use super::request::{Caller, CopyCount};
use super::request_stats::{Path, RequestKind};
use crate::trace::{Target, Trace, Traced};

/// How one request will be answered.
#[derive(Debug)]
pub struct Reply {
    in_flight: Arc<InFlight>,
    asked: RequestInfo,
    path: Path,
    answered: bool,
    /// What was asked for in its name is kept until it is answered.
    context: Option<Arc<RequestContext>>,
    /// On the heap: few requests have it, and all are moved.
    traced: Option<Box<Traced>>,
    /// Of the journal, until it is answered. On the heap, too.
    noted: Option<Box<Slot>>,
}

/// What answers a request later.
pub trait AnswerTask: Future<Output = ()> + Send + 'static {}
impl<T: Future<Output = ()> + Send + 'static> AnswerTask for T {}

/// Where the task of a request begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Begins {
    /// On the thread of the caller.
    Here,
    Elsewhere,
}

/// Whether the kernel has an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Delivery {
    Taken,
    /// A signal or the end of the connection was faster.
    Refused,
}

impl Reply {
    pub(super) fn new(in_flight: &Arc<InFlight>, asked: RequestInfo) -> Self {
        let in_flight = Arc::clone(in_flight);
        Self { in_flight, asked, path: Path::Fast, answered: false, context: None, traced: None, noted: None }
    }

    /// Names the request, also when it is sent once more.
    pub fn unique(&self) -> u64 {
        self.asked.unique & !abi::UNIQUE_RESEND
    }

    pub fn caller(&self) -> Caller {
        self.asked.caller
    }

    /// Whether a process before this one may have done what is asked for.
    pub fn is_resent(&self) -> bool {
        self.asked.unique & abi::UNIQUE_RESEND != 0
    }

    /// Has the journal keep what it has of this request until that is answered, however that comes about.
    pub fn keeping(mut self, noted: Option<Slot>) -> Self {
        self.noted = noted.map(Box::new);
        self
    }

    /// Has the trace follow this request, which is about to wait.
    pub fn traced(mut self, trace: &Arc<Trace>, target: Target) -> Self {
        self.traced = Some(Box::new(trace.follow(self.asked.received, target)));
        self
    }

    /// Answers from a task of the runtime. The task is dropped when the asker is killed, when it has waited for
    /// [`PATIENCE`](super::in_flight::PATIENCE) since another signal, or when the connection shuts down; the request is
    /// answered then.
    pub fn defer<T: AnswerTask>(self, work: impl FnOnce(Self) -> T) {
        self.run(InterruptPolicy::End, Begins::Elsewhere, work);
    }

    /// As `defer`, for what is short up to where it first waits: that runs on the thread of the caller.
    pub fn begin<T: AnswerTask>(self, work: impl FnOnce(Self) -> T) {
        self.run(InterruptPolicy::End, Begins::Here, work);
    }

    /// As `defer`, for what must not be given up half-way: a signal does not end it, so `work` must have a deadline. Up
    /// to where it first waits it runs on the thread of the caller.
    pub fn run_uninterruptible<T: AnswerTask>(self, work: impl FnOnce(Self) -> T) {
        self.run(InterruptPolicy::Wait, Begins::Here, work);
    }

    /// As `run_uninterruptible`, for what may take for ever: a signal is passed on, after which `work` must come to its
    /// end soon.
    pub fn run_until_interrupted<T: AnswerTask>(self, work: impl FnOnce(Self, CancellationToken) -> T) {
        let interrupted = CancellationToken::new();
        let policy = InterruptPolicy::NotifyTask(interrupted.clone());
        self.run(policy, Begins::Here, |reply| work(reply, interrupted));
    }

    /// Runs what takes long before it first waits, until a signal interrupts it: all of it runs elsewhere.
    pub fn defer_until_interrupted<T: AnswerTask>(self, work: impl FnOnce(Self, CancellationToken) -> T) {
        let interrupted = CancellationToken::new();
        let policy = InterruptPolicy::NotifyTask(interrupted.clone());
        self.run(policy, Begins::Elsewhere, |reply| work(reply, interrupted));
    }

    fn run<T: AnswerTask>(self, signals: InterruptPolicy, begins: Begins, work: impl FnOnce(Self) -> T) {
        let (in_flight, unique) = (Arc::clone(&self.in_flight), self.asked.unique);
        if let Some(mut reply) = self.admitted(signals) {
            let context = RequestContext::new(reply.unique());
            reply.context = Some(Arc::clone(&context));
            let stages = reply.stages();
            let task = context.scope(Stages::scope(stages.clone(), work(reply)));
            let task = lazy(move |_| dequeued(stages.as_deref())).then(move |()| task);
            match begins {
                Begins::Here => in_flight.begin(unique, task),
                Begins::Elsewhere => in_flight.spawn(unique, task),
            }
        }
    }

    /// Answers from a thread that may block. A signal ends the wait as with `defer`, but `work` goes on to its end.
    pub fn defer_blocking(self, work: impl FnOnce(Self) + Send + 'static) {
        let (in_flight, unique) = (Arc::clone(&self.in_flight), self.asked.unique);
        if let Some(reply) = self.admitted(InterruptPolicy::End) {
            let stages = reply.stages();
            in_flight.spawn_blocking(unique, move || {
                dequeued(stages.as_deref());
                Stages::scope_blocking(stages, || work(reply));
            });
        }
    }

    fn stages(&self) -> Option<Arc<Stages>> {
        self.traced.as_ref().map(|traced| Arc::clone(&traced.stages))
    }

    /// The reply of a request that may wait; the others are answered.
    fn admitted(mut self, signals: InterruptPolicy) -> Option<Self> {
        match self.in_flight.register(&self.asked, signals) {
            Admission::Waiting => {
                self.path = Path::Deferred;
                return Some(self);
            }
            Admission::Full => {
                // Never in ordinary use, so each is worth a line.
                let operation = self.asked.kind.name();
                error!(operation, waiting = WAITING_MAX, "too many requests are waiting: answered EIO");
                self.error(libc::EIO);
            }
            Admission::Closed => self.error(libc::EIO),
        }
        None
    }

    /// Success without a body.
    pub fn done(self) {
        self.finish(0, &[]);
    }

    /// Failure; `errno` is positive.
    pub fn error(self, errno: i32) {
        self.finish(errno, &[]);
    }

    pub fn entry(self, entry: &EntryOut) {
        self.structure(entry);
    }

    /// There is no such name, and the kernel may remember that for `valid`. With 0 this is a plain `ENOENT`.
    pub fn no_entry(self, valid: Duration) {
        if valid.is_zero() {
            return self.error(libc::ENOENT);
        }
        self.structure(&EntryOut {
            entry_valid: valid.as_secs(),
            entry_valid_nsec: valid.subsec_nanos(),
            ..EntryOut::default()
        });
    }

    pub fn attr(self, attr: &AttrOut) {
        self.structure(attr);
    }

    /// Answers STATX; `born_ns` is the time of birth, in nanoseconds since the epoch, where that is known.
    pub fn statx(self, attr: &AttrOut, born_ns: Option<i64>) {
        self.structure(&abi::StatxOut::new(attr, born_ns));
    }

    /// Answers OPEN or OPENDIR with a handle and the flags of [`abi::fopen`]. A handle that the kernel did not take is
    /// never released by it.
    pub fn opened(mut self, fh: u64, open_flags: u32) -> Delivery {
        self.send(0, OpenOut { fh, open_flags, backing_id: 0 }.as_bytes())
    }

    /// Answers CREATE and TMPFILE: a new name, or none, and its file, which is open.
    pub fn created(mut self, entry: &EntryOut, fh: u64, open_flags: u32) -> Delivery {
        let opened = OpenOut { fh, open_flags, backing_id: 0 };
        self.send(0, &[entry.as_bytes(), opened.as_bytes()].concat())
    }

    /// Answers WRITE.
    pub fn written(self, size: u32) {
        self.in_flight.observation.written_bytes.fetch_add(u64::from(size), Relaxed);
        self.structure(&abi::WriteOut { size, padding: 0 });
    }

    /// Answers COPY_FILE_RANGE. `bytes` are no more than were asked for.
    pub fn copied(self, bytes: u64, count: CopyCount) {
        self.in_flight.observation.copied_bytes.fetch_add(bytes, Relaxed);
        match count {
            CopyCount::Bits32 => {
                self.structure(&abi::WriteOut { size: u32::try_from(bytes).unwrap_or(u32::MAX), padding: 0 });
            }
            CopyCount::Bits64 => self.structure(&abi::CopyFileRangeOut { bytes_copied: bytes }),
        }
    }

    /// Answers LSEEK.
    pub fn at(self, offset: u64) {
        self.structure(&abi::LseekOut { offset });
    }

    /// Registers a file for [`Reply::opened_passthrough`].
    pub fn register(&self, file: BorrowedFd<'_>) -> Result<Backing, Errno> {
        Backing::register(&self.asked.channel, file)
    }

    /// Answers OPEN: the kernel reads `backing` by itself, and with `FOPEN_DIRECT_IO` maps it only. All handles of an
    /// inode that are open at a time must have the same backing file, or none.
    pub fn opened_passthrough(mut self, fh: u64, open_flags: u32, backing: &Backing) -> Delivery {
        // Numbers are small; the structure has it signed.
        let backing_id = backing.number().cast_signed();
        self.send(0, OpenOut { fh, open_flags: open_flags | fopen::PASSTHROUGH, backing_id }.as_bytes())
    }

    /// Answers GETLK.
    pub fn lock(self, lock: abi::FileLock) {
        self.structure(&abi::LkOut { lock });
    }

    pub fn statfs(self, totals: &StatfsOut) {
        self.structure(totals);
    }

    /// Bytes of a file, of a symlink's target or of a directory page.
    pub fn bytes(self, bytes: &[u8]) {
        if self.asked.kind == RequestKind::Read {
            self.in_flight.observation.read_bytes.fetch_add(bytes.len() as u64, Relaxed);
        }
        self.finish(0, bytes);
    }

    /// Answers GETXATTR or LISTXATTR by the rule of the system call: with `size` 0 the length is asked for, and a
    /// buffer that is too small gets `ERANGE`.
    pub fn xattr(self, value: &[u8], size: u32) {
        match u32::try_from(value.len()) {
            Ok(length) if size == 0 => self.structure(&abi::GetxattrOut { size: length, padding: 0 }),
            Ok(length) if length <= size => self.finish(0, value),
            _ => self.error(libc::ERANGE),
        }
    }

    fn structure<T: IntoBytes + Immutable>(self, structure: &T) {
        self.finish(0, structure.as_bytes());
    }

    fn finish(mut self, errno: i32, body: &[u8]) {
        let _ = self.send(errno, body);
    }

    fn send(&mut self, errno: i32, body: &[u8]) -> Delivery {
        self.answered = true;
        let is_taken = self.path == Path::Deferred && !self.in_flight.claim(self.asked.unique);
        if let Some(traced) = self.traced.take() {
            // A request that somebody has given up is of interest as well.
            let errno = if is_taken { libc::EINTR } else { errno };
            traced.ended(self.asked.kind, self.asked.received.elapsed(), errno);
        }
        if is_taken {
            return Delivery::Refused;
        }
        // Counted before it is sent, so that whoever has the answer finds it counted.
        self.in_flight.observation.answered(self.asked.kind, self.path, errno, self.asked.received.elapsed());
        match self.asked.channel.send(self.asked.unique, -errno, body, &[]) {
            Ok(()) => return Delivery::Taken,
            // The asker was killed, or the file system unmounted: nobody waits.
            Err(Errno::NOENT | Errno::NODEV) => {
                debug!(operation = self.asked.kind.name(), "the kernel no longer waits")
            }
            Err(cause) => {
                warn!(operation = self.asked.kind.name(), %cause, "the kernel refused an answer: answered EIO");
                let _ = self.asked.channel.send(self.asked.unique, -libc::EIO, &[], &[]);
            }
        }
        Delivery::Refused
    }
}

/// The task of a request runs.
fn dequeued(stages: Option<&Stages>) {
    if let Some(stages) = stages {
        stages.dequeued();
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if !self.answered {
            let _ = self.send(libc::EIO, &[]);
        }
    }
}
