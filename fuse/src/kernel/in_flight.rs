//! Requests that wait for something, and how a signal ends them.
//!
//! A request that an event loop answers at once is never registered here. One that must wait becomes a task and an
//! entry of this table, and whoever takes the entry out answers: the task when it is done, the interrupt of a signal,
//! the shutdown. So each request is answered exactly once.
//!
//! The kernel sends INTERRUPT through whichever descriptor is read next, but wants the answer on the descriptor that
//! the request came from; an entry therefore keeps its channel. An interrupt may also be read by one event loop
//! before another has registered the request: it is then remembered in a short list that registration looks into.
//! (Request ids are never used twice, so a remembered id that turns out to be answered already does no harm.)

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::error;

use super::channel::Channel;
use super::observation::{Kind, Observation, Path};

/// Requests waiting at most. The kernel's own bound is one request per blocked thread of the host plus
/// `max_background`; this one protects our memory from a host with very many threads.
pub const WAITING_MAX: usize = 16_384;

/// Interrupts remembered whose request has not been registered (yet). Between the kernel's hand-over of a request and
/// its registration lie microseconds, in which not even this many signals arrive.
const EARLY_MAX: usize = 256;

/// The table, shared by the event loops and the tasks of one connection.
#[derive(Debug)]
pub struct InFlight {
    state: Mutex<State>,
    tasks: TaskTracker,
    runtime: Handle,
    observation: Arc<Observation>,
}

#[derive(Debug, Default)]
struct State {
    waiting: HashMap<u64, Waiting>,
    early: VecDeque<u64>,
    closed: bool,
}

/// What a signal does to a request that waits.
#[derive(Debug)]
pub enum Signals {
    /// It is answered with `EINTR`, and its task dropped.
    End,
    /// Nothing: the request has been passed on, and only its answer tells what became of it.
    Wait,
    /// Its task is told, and answers.
    Tell(CancellationToken),
}

#[derive(Debug)]
struct Waiting {
    channel: Arc<Channel>,
    kind: Kind,
    signals: Signals,
    received: Instant,
    abort: Option<AbortHandle>,
}

/// Whether a request may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    Waiting,
    /// Its interrupt is here already.
    Interrupted,
    /// The table is full.
    Full,
    /// The connection is being shut down.
    Closed,
}

impl InFlight {
    pub fn new(runtime: Handle, observation: Arc<Observation>) -> Self {
        Self { state: Mutex::default(), tasks: TaskTracker::new(), runtime, observation }
    }

    /// Requests that wait now.
    pub fn waiting(&self) -> usize {
        self.state.lock().waiting.len()
    }

    pub fn observation(&self) -> &Observation {
        &self.observation
    }

    /// Enters a request; unless it is admitted, the caller answers it.
    pub fn register(
        &self,
        unique: u64,
        channel: &Arc<Channel>,
        kind: Kind,
        signals: Signals,
        received: Instant,
    ) -> Admission {
        let mut state = self.state.lock();
        if state.closed {
            return Admission::Closed;
        }
        if let Some(place) = state.early.iter().position(|early| *early == unique) {
            state.early.remove(place);
            // Nothing has been done yet. But no program expects a close or a change of names to be interrupted, nor is it asked
            // to do it once more.
            if !matches!(signals, Signals::Wait) {
                return Admission::Interrupted;
            }
        }
        if state.waiting.len() >= WAITING_MAX {
            return Admission::Full;
        }
        let waiting = Waiting { channel: Arc::clone(channel), kind, signals, received, abort: None };
        state.waiting.insert(unique, waiting);
        Admission::Waiting
    }

    /// Runs the task of a registered request.
    pub fn spawn(&self, unique: u64, task: impl Future<Output = ()> + Send + 'static) {
        self.own(unique, self.tasks.spawn_on(task, &self.runtime).abort_handle());
    }

    /// Runs what blocks for a registered request. Once begun it cannot be ended early.
    pub fn spawn_blocking(&self, unique: u64, work: impl FnOnce() + Send + 'static) {
        self.own(unique, self.tasks.spawn_blocking_on(work, &self.runtime).abort_handle());
    }

    fn own(&self, unique: u64, abort: AbortHandle) {
        match self.state.lock().waiting.get_mut(&unique) {
            Some(waiting) => waiting.abort = Some(abort),
            // Interrupted, or done, between registration and now.
            None => abort.abort(),
        }
    }

    /// Takes the entry out: true for exactly one caller, who then answers.
    pub fn claim(&self, unique: u64) -> bool {
        self.state.lock().waiting.remove(&unique).is_some()
    }

    /// A signal has reached the asker: answers `EINTR` and drops the task, unless the request is one that signals do not
    /// end, or not so.
    pub fn interrupt(&self, unique: u64) {
        let waiting = {
            let mut state = self.state.lock();
            if let Some(waiting) = state.waiting.get(&unique) {
                match &waiting.signals {
                    Signals::End => {}
                    Signals::Wait => return,
                    Signals::Tell(interrupted) => {
                        self.observation.kind(waiting.kind).interrupted.fetch_add(1, Relaxed);
                        return interrupted.cancel();
                    }
                }
            }
            let waiting = state.waiting.remove(&unique);
            if waiting.is_none() {
                if state.early.len() == EARLY_MAX {
                    state.early.pop_front();
                }
                state.early.push_back(unique);
            }
            waiting
        };
        if let Some(waiting) = waiting {
            self.observation.kind(waiting.kind).interrupted.fetch_add(1, Relaxed);
            self.give_up(unique, waiting, libc::EINTR);
        }
    }

    /// Answers whatever still waits with `errno`, admits nothing any more, and returns when every task has ended.
    pub async fn close(&self, errno: i32) {
        let waiting = {
            let mut state = self.state.lock();
            state.closed = true;
            std::mem::take(&mut state.waiting)
        };
        for (unique, waiting) in waiting {
            self.give_up(unique, waiting, errno);
        }
        self.tasks.close();
        self.tasks.wait().await;
    }

    fn give_up(&self, unique: u64, waiting: Waiting, errno: i32) {
        let took = waiting.received.elapsed();
        // The kernel may have given up on its own: nothing is lost then.
        let _ = waiting.channel.send(unique, -errno, &[], &[]);
        if let Some(abort) = waiting.abort {
            abort.abort();
        }
        self.observation.answered(waiting.kind, Path::Deferred, 0, took);
    }

    /// Says why a request was turned away; the table is never full in ordinary use, so each is worth a line.
    pub fn log_full(&self, kind: Kind) {
        error!(operation = kind.name(), waiting = WAITING_MAX, "too many requests are waiting: answered EIO");
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[tokio::test]
    async fn a_signal_that_overtakes_its_request_ends_only_what_signals_end() {
        let in_flight = InFlight::new(Handle::current(), Arc::default());
        let channel = Arc::new(Channel::new(File::open("/dev/null").unwrap().into()));
        for (unique, signals, admission) in [
            (1, Signals::End, Admission::Interrupted),
            (2, Signals::Tell(CancellationToken::new()), Admission::Interrupted),
            (3, Signals::Wait, Admission::Waiting),
        ] {
            in_flight.interrupt(unique);
            let admitted = in_flight.register(unique, &channel, Kind::Flush, signals, Instant::now());
            assert_eq!(admitted, admission, "request {unique}");
        }
        // It is remembered once.
        assert!(in_flight.claim(3));
        let again = in_flight.register(3, &channel, Kind::Flush, Signals::End, Instant::now());
        assert_eq!(again, Admission::Waiting);
    }
}
