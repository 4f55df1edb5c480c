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
//!
//! No call on a local disk ends with `EINTR` for a signal that the program handles, and programs are written so. But
//! a program whose mount hangs must be able to leave. So a signal that kills the asker ends the wait at once, and
//! another one only what still waits [`PATIENCE`] later. What has been passed on goes on without an asker that is being
//! killed, when it has taken [`KILLED_PATIENCE`].

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::begun_task::BegunTask;
use super::channel::Channel;
use super::request::Caller;
use super::request_stats::{Observation, Path, RequestKind};

/// Requests waiting at most. The kernel's own bound is one request per blocked thread of the host plus
/// `max_background`; this one protects our memory from a host with very many threads.
pub const WAITING_MAX: usize = 16_384;

/// Interrupts remembered whose request has not been registered (yet). Between the kernel's hand-over of a request and
/// its registration lie microseconds, in which not even this many signals arrive.
const EARLY_MAX: usize = 256;

/// How long a request goes on after a signal that does not kill the asker: longer than any takes while all is well.
pub const PATIENCE: Duration = Duration::from_secs(1);

/// How long a killed asker of what has been passed on waits for what became of it: longer than another master needs to
/// lead.
pub const KILLED_PATIENCE: Duration = Duration::from_secs(5);

/// The kernel sends an INTERRUPT for the first signal only. How often it is looked whether another one kills the asker.
const DEATH_CHECK: Duration = Duration::from_millis(50);

/// The table, shared by the event loops and the tasks of one connection.
#[derive(Debug)]
pub struct InFlight {
    state: Mutex<State>,
    tasks: TaskTracker,
    runtime: Handle,
    pub observation: Observation,
}

#[derive(Debug, Default)]
struct State {
    waiting: HashMap<u64, Waiting>,
    early: VecDeque<u64>,
    closed: bool,
}

/// What a signal does to a request that waits.
#[derive(Debug)]
pub enum InterruptPolicy {
    /// It is answered with `EINTR` and its task dropped, when the asker is being killed or has waited long enough.
    End,
    /// Nothing: the request has been passed on, and only its answer says what became of it. An asker that is being
    /// killed does without that in the end, and the task goes on.
    Wait,
    /// Its task is notified, and answers.
    NotifyTask(CancellationToken),
}

/// What whoever answers a request must know of it.
#[derive(Clone, Debug)]
pub struct RequestInfo {
    pub channel: Arc<Channel>,
    pub unique: u64,
    pub kind: RequestKind,
    pub caller: Caller,
    pub received: Instant,
}

#[derive(Debug)]
struct Waiting {
    asked: RequestInfo,
    signals: InterruptPolicy,
    task: Option<WaitingTask>,
}

/// The task of a request.
#[derive(Debug)]
enum WaitingTask {
    Spawned(AbortHandle),
    Begun(Arc<BegunTask>),
}

impl WaitingTask {
    /// Not under the lock of the table: what is dropped here may answer.
    fn end(self) {
        match self {
            Self::Spawned(task) => task.abort(),
            Self::Begun(task) => task.give_up(),
        }
    }
}

/// Whether a request may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    Waiting,
    /// The table is full.
    Full,
    /// The connection is being shut down.
    Closed,
}

impl InFlight {
    pub fn new(runtime: Handle) -> Self {
        let (state, observation) = (Mutex::default(), Observation::default());
        Self { state, tasks: TaskTracker::new(), runtime, observation }
    }

    /// Requests that wait now.
    pub fn waiting(&self) -> usize {
        self.state.lock().waiting.len()
    }

    /// Enters a request; unless it is admitted, the caller answers it.
    pub fn register(self: &Arc<Self>, asked: &RequestInfo, signals: InterruptPolicy) -> Admission {
        let mut state = self.state.lock();
        if state.closed {
            return Admission::Closed;
        }
        if state.waiting.len() >= WAITING_MAX {
            return Admission::Full;
        }
        let waiting = Waiting { asked: asked.clone(), signals, task: None };
        if let Some(place) = state.early.iter().position(|early| *early == asked.unique) {
            state.early.remove(place);
            // Nobody waits for it yet.
            self.signalled(&waiting).inspect(CancellationToken::cancel);
        }
        state.waiting.insert(asked.unique, waiting);
        Admission::Waiting
    }

    /// Runs the task of a registered request.
    pub fn spawn(&self, unique: u64, task: impl Future<Output = ()> + Send + 'static) {
        let task = self.tasks.spawn_on(task, &self.runtime);
        self.own(unique, WaitingTask::Spawned(task.abort_handle()));
    }

    /// Runs the task of a registered request, up to where it first has to wait on this thread: mostly it has nothing to
    /// wait for, or nothing to do before somebody answers.
    pub fn begin(&self, unique: u64, task: impl Future<Output = ()> + Send + 'static) {
        BegunTask::begin(task, &self.tasks, &self.runtime, |begun| self.own(unique, WaitingTask::Begun(begun)));
    }

    /// Runs what blocks for a registered request. Once begun it cannot be ended early.
    pub fn spawn_blocking(&self, unique: u64, work: impl FnOnce() + Send + 'static) {
        let task = self.tasks.spawn_blocking_on(work, &self.runtime);
        self.own(unique, WaitingTask::Spawned(task.abort_handle()));
    }

    fn own(&self, unique: u64, task: WaitingTask) {
        let mut state = self.state.lock();
        match state.waiting.get_mut(&unique) {
            Some(waiting) => waiting.task = Some(task),
            // Interrupted, or done, between registration and now.
            None => {
                drop(state);
                task.end();
            }
        }
    }

    /// Takes the entry out: true for exactly one caller, who then answers.
    pub fn claim(&self, unique: u64) -> bool {
        // What is dropped with the entry is not dropped under the lock.
        let taken = self.state.lock().waiting.remove(&unique);
        taken.is_some()
    }

    /// A signal has reached the asker.
    pub fn interrupt(self: &Arc<Self>, unique: u64) {
        let mut state = self.state.lock();
        if let Some(waiting) = state.waiting.get(&unique) {
            let notified = self.signalled(waiting);
            // Who waits for it is spawned, and what cannot be spawned any more is dropped, and may answer.
            drop(state);
            notified.inspect(CancellationToken::cancel);
            return;
        }
        if state.early.len() == EARLY_MAX {
            state.early.pop_front();
        }
        state.early.push_back(unique);
    }

    /// Gives what the caller is to cancel.
    fn signalled(self: &Arc<Self>, waiting: &Waiting) -> Option<CancellationToken> {
        match &waiting.signals {
            InterruptPolicy::End => {
                let (this, unique, thread) = (Arc::clone(self), waiting.asked.unique, waiting.asked.caller.thread);
                self.tasks.spawn_on(async move { this.end_in_time(unique, thread).await }, &self.runtime);
            }
            InterruptPolicy::Wait => {
                let (this, RequestInfo { unique, caller, received, .. }) = (Arc::clone(self), waiting.asked.clone());
                self.tasks
                    .spawn_on(async move { this.leave_killed(unique, caller.thread, received).await }, &self.runtime);
            }
            InterruptPolicy::NotifyTask(interrupted) => {
                self.observation.kind(waiting.asked.kind).interrupted.fetch_add(1, Relaxed);
                return Some(interrupted.clone());
            }
        }
        None
    }

    async fn end_in_time(&self, unique: u64, thread: u32) {
        let patience = Instant::now() + PATIENCE;
        while Instant::now() < patience && !is_being_killed(thread) {
            tokio::time::sleep(DEATH_CHECK).await;
            if !self.state.lock().waiting.contains_key(&unique) {
                return;
            }
        }
        let waiting = self.state.lock().waiting.remove(&unique);
        if let Some(waiting) = waiting {
            self.observation.kind(waiting.asked.kind).interrupted.fetch_add(1, Relaxed);
            self.give_up(waiting, libc::EINTR);
        }
    }

    async fn leave_killed(&self, unique: u64, thread: u32, received: Instant) {
        while received.elapsed() < KILLED_PATIENCE || !is_being_killed(thread) {
            tokio::time::sleep(DEATH_CHECK).await;
            let state = self.state.lock();
            if state.closed || !state.waiting.contains_key(&unique) {
                return;
            }
        }
        let waiting = self.state.lock().waiting.remove(&unique);
        if let Some(waiting) = waiting {
            self.observation.kind(waiting.asked.kind).interrupted.fetch_add(1, Relaxed);
            self.give_up(Waiting { task: None, ..waiting }, libc::EINTR);
        }
    }

    /// Answers whatever still waits with `errno`, admits nothing any more, and returns when every task has ended.
    pub async fn close(&self, errno: i32) {
        let waiting = {
            let mut state = self.state.lock();
            state.closed = true;
            std::mem::take(&mut state.waiting)
        };
        for waiting in waiting.into_values() {
            self.give_up(waiting, errno);
        }
        self.tasks.close();
        self.tasks.wait().await;
    }

    fn give_up(&self, Waiting { asked, task, .. }: Waiting, errno: i32) {
        let took = asked.received.elapsed();
        // The kernel may have given up on its own: nothing is lost then.
        let _ = asked.channel.send(asked.unique, -errno, &[], &[]);
        if let Some(task) = task {
            task.end();
        }
        self.observation.answered(asked.kind, Path::Deferred, 0, took);
    }
}

/// Whether a thread has a fatal signal pending, whichever it is. False for one that is not in this process namespace.
fn is_being_killed(thread: u32) -> bool {
    // A signal that ends a process reaches each of its threads as SIGKILL.
    const SIGKILL: u64 = 1 << (libc::SIGKILL - 1);
    let status = std::fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
    let pending = status.lines().find_map(|line| line.strip_prefix("SigPnd:"));
    pending.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).is_some_and(|set| set & SIGKILL != 0)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[tokio::test]
    async fn a_signal_that_overtakes_its_request_ends_only_what_signals_end() {
        let began = Instant::now();
        let in_flight = Arc::new(InFlight::new(Handle::current()));
        let channel = Arc::new(Channel::new(File::open("/dev/null").unwrap().into()));
        let asked = |unique| RequestInfo {
            channel: Arc::clone(&channel),
            unique,
            kind: RequestKind::Flush,
            caller: Caller::default(),
            received: Instant::now(),
        };
        let notified = CancellationToken::new();
        for (unique, signals) in
            [(1, InterruptPolicy::End), (2, InterruptPolicy::NotifyTask(notified.clone())), (3, InterruptPolicy::Wait)]
        {
            in_flight.interrupt(unique);
            assert_eq!(in_flight.register(&asked(unique), signals), Admission::Waiting, "request {unique}");
        }
        assert!(notified.is_cancelled());
        // Each is remembered once.
        assert!(in_flight.state.lock().early.is_empty());
        while in_flight.waiting() == 3 {
            tokio::time::sleep(DEATH_CHECK).await;
        }
        assert!(began.elapsed() >= PATIENCE);
        assert_eq!([1, 2, 3].map(|unique| in_flight.claim(unique)), [false, true, true]);
    }
}
