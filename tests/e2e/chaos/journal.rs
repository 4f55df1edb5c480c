//! Every call that a program makes on a mount: how long it took, and what came of it.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;

/// What a client that was cut off for longer than its deadlines may answer; the last one of what others replaced.
const CLEAN: [Errno; 5] = [Errno::IO, Errno::TIMEDOUT, Errno::AGAIN, Errno::HOSTUNREACH, Errno::STALE];

/// What a call takes only if something is wrong.
const SLOW: Duration = Duration::from_secs(3);

/// The calls of one round.
#[derive(Default)]
pub struct Journal(Mutex<Calls>);

#[derive(Default)]
struct Calls {
    next: u64,
    running: BTreeMap<u64, (usize, &'static str, PathBuf, Instant)>,
    ended: Vec<Call>,
    /// Clients of calls that failed, as they may.
    failed: Vec<usize>,
}

#[derive(Clone, Debug)]
pub struct Call {
    pub client: usize,
    pub what: &'static str,
    pub path: PathBuf,
    pub took: Duration,
    errno: Option<Errno>,
}

impl Journal {
    fn with<T>(&self, work: impl FnOnce(&mut Calls) -> T) -> T {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn timed<T>(
        &self,
        client: usize,
        what: &'static str,
        path: &Path,
        call: impl FnOnce() -> io::Result<T>,
    ) -> (io::Result<T>, Duration) {
        let begun = Instant::now();
        let number = self.with(|calls| {
            calls.next += 1;
            calls.running.insert(calls.next, (client, what, path.to_owned(), begun));
            calls.next
        });
        let result = call();
        let took = begun.elapsed();
        self.with(|calls| {
            calls.running.remove(&number);
            let errno = result.as_ref().err().and_then(Errno::from_io_error);
            calls.ended.push(Call { client, what, path: path.to_owned(), took, errno });
        });
        (result, took)
    }

    /// Calls that have ended.
    pub fn ended(&self) -> usize {
        self.with(|calls| calls.ended.len())
    }

    /// How many calls of a client have failed.
    pub fn failed(&self, client: usize) -> usize {
        self.with(|calls| calls.failed.iter().filter(|failed| **failed == client).count())
    }

    /// The call of a client that took longest.
    pub fn longest(&self, client: usize) -> Option<Call> {
        self.longest_of(|call| call.client == client)
    }

    /// The call of all that took longest among some.
    pub fn longest_of(&self, wanted: impl Fn(&Call) -> bool) -> Option<Call> {
        self.with(|calls| calls.ended.iter().filter(|call| wanted(call)).max_by_key(|call| call.took).cloned())
    }

    /// Calls that have not ended, and those that took long, for whoever waits for something in vain.
    pub fn slow(&self) -> String {
        let running = |(client, what, path, begun): &(usize, &str, PathBuf, Instant)| {
            format!("  {what} {} on client {client} has taken {:.1?}", path.display(), begun.elapsed())
        };
        let ended = |call: &Call| {
            let Call { client, what, path, took, errno } = call;
            format!("  {what} {} on client {client} took {took:.1?}: {errno:?}", path.display())
        };
        self.with(|calls| {
            let slow = calls.ended.iter().filter(|call| call.took > SLOW).map(ended);
            slow.chain(calls.running.values().map(running)).collect::<Vec<_>>().join("\n")
        })
    }
}

/// What makes the calls of one program.
#[derive(Clone)]
pub struct Caller {
    pub client: usize,
    pub journal: Arc<Journal>,
    /// The client is cut off for so long that its calls may fail.
    pub may_fail: Arc<AtomicBool>,
}

impl Caller {
    /// Whether the client is cut off, or was a moment ago.
    pub fn may_fail(&self) -> bool {
        self.may_fail.load(Ordering::SeqCst)
    }

    /// Makes a call that must succeed; `None` where it may fail, and did, in a clean way. Whether it has changed
    /// something is not known then.
    pub fn call<T>(&self, what: &'static str, path: &Path, call: impl FnOnce() -> io::Result<T>) -> Option<T> {
        self.call_or(what, path, &[], call)?.ok()
    }

    /// The same for a call that changes something. A client that is cut off for longer than its lease loses what it has
    /// answered itself and not sent, and tells a later sync: `None` where it may.
    pub fn change<T>(&self, what: &'static str, path: &Path, call: impl FnOnce() -> io::Result<T>) -> Option<T> {
        let may_fail = self.may_fail();
        let done = self.call(what, path, call)?;
        (!may_fail && !self.may_fail()).then_some(done)
    }

    /// The same for a call that may also answer some of these.
    pub fn call_or<T>(
        &self,
        what: &'static str,
        path: &Path,
        allowed: &[Errno],
        call: impl FnOnce() -> io::Result<T>,
    ) -> Option<Result<T, Errno>> {
        // A call that began while it might fail may end later.
        let may_fail = self.may_fail();
        let (result, took) = self.journal.timed(self.client, what, path, call);
        let error = match result {
            Ok(value) => return Some(Ok(value)),
            Err(error) => error,
        };
        let errno = Errno::from_io_error(&error);
        if let Some(errno) = errno.filter(|errno| allowed.contains(errno)) {
            return Some(Err(errno));
        }
        let may_fail = may_fail || self.may_fail();
        let is_clean = errno.is_some_and(|errno| CLEAN.contains(&errno));
        assert!(may_fail && is_clean, "{what} {} on client {} after {took:.1?}: {error}", path.display(), self.client);
        self.journal.with(|calls| calls.failed.push(self.client));
        None
    }
}
