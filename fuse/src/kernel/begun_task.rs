//! A task that begins on the thread that read its request, and is spawned when it is woken.
//!
//! Most of what has to wait sends a request first, and then there is nothing to do until the answer is here. To spawn
//! the task at once would wake a thread of the runtime that finds just that, and on a host whose processors are busy
//! this costs as much as the request. So the task stays where it is. What wakes it spawns it, mostly on the thread that
//! has received the answer, which runs it next.

use std::future::Future;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// What wakes the task, and what gives it up. Its lock is held for a moment: no task runs or is dropped under it.
pub(super) struct BegunTask {
    state: Mutex<State>,
    runtime: Handle,
}

enum State {
    /// The thread that has begun it is still at it.
    Beginning {
        is_woken: bool,
    },
    /// Nobody has it; the tracker counts it.
    Waits(Task, TaskTrackerToken),
    /// It is the runtime's. `None` while it is handed over.
    Spawned(Option<AbortHandle>),
    GivenUp,
}

impl std::fmt::Debug for BegunTask {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("BegunTask").finish_non_exhaustive()
    }
}

impl BegunTask {
    /// Runs a task up to where it first has to wait. If it does, `waits` is told who can give it up, before anything
    /// wakes it.
    pub(super) fn begin(
        task: impl Future<Output = ()> + Send + 'static,
        tasks: &TaskTracker,
        runtime: &Handle,
        waits: impl FnOnce(Arc<Self>),
    ) {
        let mut task: Task = Box::pin(task);
        let begun =
            Arc::new(Self { state: Mutex::new(State::Beginning { is_woken: false }), runtime: runtime.clone() });
        let waker = Waker::from(begun.clone());
        let _runtime = runtime.enter();
        match catch_unwind(AssertUnwindSafe(|| task.as_mut().poll(&mut Context::from_waker(&waker)))) {
            Ok(Poll::Pending) => {
                waits(begun.clone());
                begun.leave(tasks.token(), task);
            }
            // A panic has been told, and the request answered, as its task was dropped.
            Ok(Poll::Ready(())) | Err(_) => {}
        }
    }

    /// The thread that has begun it goes on with something else. Arguments are dropped from the last to the first: a
    /// task that was given up is counted until it is gone.
    fn leave(&self, counted: TaskTrackerToken, task: Task) {
        let mut state = self.state.lock();
        let is_woken = match &*state {
            State::Beginning { is_woken } => Some(*is_woken),
            State::Waits(..) | State::Spawned(_) | State::GivenUp => None,
        };
        match is_woken {
            Some(false) => *state = State::Waits(task, counted),
            Some(true) => {
                *state = State::Spawned(None);
                drop(state);
                self.spawn(task, &counted);
            }
            // It was given up meanwhile.
            None => drop(state),
        }
    }

    fn spawn(&self, task: Task, counted: &TaskTrackerToken) {
        let spawned = counted.task_tracker().spawn_on(task, &self.runtime).abort_handle();
        let mut state = self.state.lock();
        match &mut *state {
            State::GivenUp => spawned.abort(),
            state => *state = State::Spawned(Some(spawned)),
        }
    }

    /// Drops the task, wherever it is.
    pub(super) fn give_up(&self) {
        let given_up = mem::replace(&mut *self.state.lock(), State::GivenUp);
        if let State::Spawned(Some(spawned)) = given_up {
            spawned.abort();
        }
    }
}

impl Wake for BegunTask {
    fn wake(self: Arc<Self>) {
        let waited = {
            let mut state = self.state.lock();
            if let State::Beginning { is_woken } = &mut *state {
                *is_woken = true;
            }
            // Who has an earlier waker comes too late: the runtime has its own.
            if !matches!(&*state, State::Waits(..)) {
                return;
            }
            mem::replace(&mut *state, State::Spawned(None))
        };
        if let State::Waits(task, counted) = waited {
            self.spawn(task, &counted);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, poll_fn};

    use tokio::sync::oneshot;

    use super::*;

    fn begin(tasks: &TaskTracker, task: impl Future<Output = ()> + Send + 'static) -> Option<Arc<BegunTask>> {
        let mut waits = None;
        BegunTask::begin(task, tasks, &Handle::current(), |begun| waits = Some(begun));
        waits
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn it_goes_on_when_it_is_woken_however_soon() {
        let tasks = TaskTracker::new();
        let (answer, answered) = oneshot::channel();
        let (done, is_done) = oneshot::channel();
        let waits = begin(&tasks, async move { done.send(answered.await.unwrap()).unwrap() });
        assert!(waits.is_some() && tasks.len() == 1);
        answer.send(7).unwrap();
        assert_eq!(is_done.await.unwrap(), 7);
        // While it is begun.
        let (done, is_done) = oneshot::channel();
        let mut polls = 0;
        let twice = poll_fn(move |context| {
            polls += 1;
            context.waker().wake_by_ref();
            if polls == 2 { Poll::Ready(()) } else { Poll::Pending }
        });
        begin(&tasks, async move {
            twice.await;
            done.send(()).unwrap();
        });
        is_done.await.unwrap();
        assert!(begin(&tasks, async {}).is_none());
        tasks.close();
        tasks.wait().await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn it_is_dropped_when_it_is_given_up_before_it_was_woken_and_later() {
        let tasks = TaskTracker::new();
        for is_woken in [false, true] {
            let (answer, answered) = oneshot::channel::<()>();
            let (goes_on, has_gone_on) = oneshot::channel();
            let held = Arc::new(());
            let kept = held.clone();
            let waits = begin(&tasks, async move {
                let _kept = kept;
                answered.await.unwrap();
                goes_on.send(()).unwrap();
                pending::<()>().await;
            });
            if is_woken {
                answer.send(()).unwrap();
                has_gone_on.await.unwrap();
            }
            waits.unwrap().give_up();
            while Arc::strong_count(&held) > 1 {
                tokio::task::yield_now().await;
            }
        }
        tasks.close();
        tasks.wait().await;
    }
}
