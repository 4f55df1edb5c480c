//! The frame of the work that a leader does in the background.
//!
//! A [`BackgroundTask`] takes one step after the other until its [`TaskGroup`] is shut down. What a step comes to
//! ([`Next`]) decides when the next one begins: after a rest by the task's [`Pace`], at once, never, or, when it fails,
//! after a pause that grows with each failure in a row ([`Backoff`]). A step that is under way when the group is shut
//! down is dropped where it waits.
//!
//! All groups of a term have one [`TaskList`]. It notes how each task fares, writes failures to the log, at most one
//! line for a task in [`LOG_PERIOD`], and shows all that to `cv report --tasks`.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use cavern_conf::backoff::{Backoff, Jitter, Profile};
use cavern_proto::master::{TaskState, TaskStatus};
use futures::future::BoxFuture;
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::error::WorkError;

/// A task writes one line about its failures in so long.
const LOG_PERIOD: Duration = Duration::from_secs(60);
/// Longest pause after failures, unless a task says otherwise, or rests longer anyway.
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// How often it is said how far something is that somebody waits for.
const REPORT_INTERVAL: Duration = Duration::from_millis(200);
/// Characters of an error that are kept.
const ERROR_MAX: usize = 1000;

/// What a task does after a step that went well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// It rests as its pace says.
    Rest,
    /// It rests for so long.
    RestFor(Duration),
    /// It goes on at once: there is more to do.
    More,
    /// It has reached its end.
    End,
}

/// How long a task rests after a step.
#[derive(Debug)]
pub struct Pace {
    period: Duration,
    rhythm: Rhythm,
    wake: Option<watch::Receiver<()>>,
}

#[derive(Clone, Copy, Debug)]
enum Rhythm {
    /// From the beginning of a step to that of the next.
    Beginnings,
    /// From the end of a step on, and at least so many times as long as the step took.
    Rests(u32),
}

impl Pace {
    /// A step begins in each period; one that takes longer is followed by the next at once.
    pub fn every(period: Duration) -> Self {
        Self { period, rhythm: Rhythm::Beginnings, wake: None }
    }

    /// A rest of that length follows each step.
    pub fn after(period: Duration) -> Self {
        Self { period, rhythm: Rhythm::Rests(0), wake: None }
    }

    /// A rest of that length follows each step, or of so many times as long as the step took, if that is longer.
    pub fn after_at_least(period: Duration, times: u32) -> Self {
        Self { period, rhythm: Rhythm::Rests(times), wake: None }
    }

    /// Ends a rest, or a pause after failures, when the sender says so.
    pub fn woken_by(self, wake: watch::Receiver<()>) -> Self {
        Self { wake: Some(wake), ..self }
    }

    fn rest(&self, took: Duration) -> Duration {
        match self.rhythm {
            Rhythm::Beginnings => self.period.saturating_sub(took),
            Rhythm::Rests(times) => self.period.max(took.saturating_mul(times)),
        }
    }

    async fn wait(&mut self, rest: Duration) {
        tokio::select! {
            () = tokio::time::sleep(rest) => {}
            () = woken(self.wake.as_mut()) => {}
        }
    }
}

/// Returns when it is signalled; never where nobody can.
async fn woken(wake: Option<&mut watch::Receiver<()>>) {
    if let Some(wake) = wake
        && wake.changed().await.is_ok()
    {
        return;
    }
    std::future::pending::<()>().await;
}

/// What is done in the background, as the list names it, and how fast.
#[derive(Debug)]
pub struct BackgroundTask {
    name: Cow<'static, str>,
    pace: Pace,
    backoff: Backoff,
    rests_first: bool,
}

impl BackgroundTask {
    /// After a failure it waits for the period of its pace, and longer after each further one.
    pub fn new(name: impl Into<Cow<'static, str>>, pace: Pace) -> Self {
        let backoff = Profile::new(pace.period, pace.period.max(PAUSE_MAX), Jitter::None).begin();
        Self { name: name.into(), pace, backoff, rests_first: false }
    }

    /// Waits otherwise after failures.
    pub fn with_backoff(self, pauses: Profile) -> Self {
        Self { backoff: pauses.begin(), ..self }
    }

    /// It rests for the period of its pace before the first step.
    pub fn resting_first(self) -> Self {
        Self { rests_first: true, ..self }
    }

    /// Failures do not slow it down: others wait for it.
    pub fn steady(self) -> Self {
        let pauses = Profile::steady(self.pace.period, Jitter::None);
        self.with_backoff(pauses)
    }
}

/// Tasks that end together.
#[derive(Debug, Default)]
pub struct TaskGroup {
    pub tracker: TaskTracker,
    /// Cancelled when they are to end.
    pub stop: CancellationToken,
}

impl TaskGroup {
    /// Runs something once, which is dropped where it waits when the group is shut down.
    pub fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        let stop = self.stop.clone();
        self.tracker.spawn(async move {
            stop.run_until_cancelled(work).await;
        })
    }

    /// Does something to its end, or until the group is shut down, though whoever has asked for it may be gone.
    ///
    /// # Errors
    /// Those of the work, and [`WorkError::Consensus`] when the group is shut down before its end.
    pub async fn to_the_end<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, WorkError>> + Send + 'static,
    ) -> Result<T, WorkError> {
        let stop = self.stop.clone();
        let done = self.tracker.spawn(async move { stop.run_until_cancelled(work).await });
        match done.await {
            Ok(Some(result)) => result,
            _ => Err(WorkError::stopping()),
        }
    }

    /// Does something that is not given up half-way: a shutdown of the group waits for its end, which must come soon.
    pub async fn finish(&self, work: impl Future<Output = ()> + Send + 'static) {
        // One that panics has said so.
        let _panicked = self.tracker.spawn(work).await;
    }

    /// Ends all tasks. Nothing of them is under way when this returns.
    pub async fn shutdown(&self) {
        self.stop.cancel();
        self.tracker.close();
        self.tracker.wait().await;
    }
}

/// The tasks that run, in the order in which they began. Cheap to clone.
#[derive(Clone, Default)]
pub struct TaskList(Arc<Mutex<Vec<Arc<ListedTask>>>>);

impl TaskList {
    /// Starts a task of a group. Its first step begins at once, unless it rests first; each is given the state.
    pub fn start<S: Send + 'static>(
        &self,
        group: &TaskGroup,
        task: BackgroundTask,
        state: S,
        step: impl for<'a> FnMut(&'a mut S) -> BoxFuture<'a, Result<Next, WorkError>> + Send + 'static,
    ) {
        let progress = TaskProgress { state: TaskState::Idle, ..TaskProgress::default() };
        let listed = Arc::new(ListedTask { name: task.name.clone(), progress: Mutex::new(progress) });
        self.0.lock().push(listed.clone());
        let (list, stop) = (self.clone(), group.stop.clone());
        group.tracker.spawn(async move {
            stop.run_until_cancelled(run(task, &listed, state, step)).await;
            list.0.lock().retain(|other| !Arc::ptr_eq(other, &listed));
        });
    }

    /// How they fare.
    pub fn statuses(&self) -> Vec<TaskStatus> {
        self.0.lock().iter().map(|listed| listed.status()).collect()
    }
}

/// Says every so often how far something is. Where nobody takes it any more the work is given up, too.
pub async fn report<T>(answers: &mpsc::Sender<Result<T, WorkError>>, shown: impl Fn() -> T) {
    loop {
        tokio::time::sleep(REPORT_INTERVAL).await;
        let _gone = answers.send(Ok(shown())).await;
    }
}

/// Takes the steps of a task until it has reached its end.
async fn run<S>(
    task: BackgroundTask,
    listed: &ListedTask,
    mut state: S,
    mut step: impl for<'a> FnMut(&'a mut S) -> BoxFuture<'a, Result<Next, WorkError>>,
) {
    let BackgroundTask { mut pace, mut backoff, rests_first, .. } = task;
    if rests_first {
        pace.wait(pace.period).await;
    }
    loop {
        listed.progress.lock().state = TaskState::Running;
        let began = Instant::now();
        let result = step(&mut state).await;
        let took = began.elapsed();
        if result.is_ok() {
            backoff.reset();
        }
        let rest = match &result {
            Ok(Next::Rest) => pace.rest(took),
            Ok(Next::RestFor(rest)) => *rest,
            Ok(Next::More) => Duration::ZERO,
            Ok(Next::End) => return,
            Err(_) => backoff.next_pause(),
        };
        listed.ended(took, rest, result.err().as_ref());
        if rest.is_zero() {
            tokio::task::yield_now().await;
        } else {
            pace.wait(rest).await;
        }
    }
}

/// A task, and how it fares.
struct ListedTask {
    name: Cow<'static, str>,
    progress: Mutex<TaskProgress>,
}

#[derive(Default)]
struct TaskProgress {
    state: TaskState,
    runs: u64,
    errors: u64,
    /// When the last step ended, and how long it took.
    last_run: Option<(Instant, Duration)>,
    last_error: Option<(Instant, String)>,
    /// When a failure was written to the log last, and how many were not since then.
    logged: Option<Instant>,
    left_out: u64,
}

impl TaskProgress {
    /// How many failures were left out of the log before the one that is to be written now; `None` when that is to be
    /// left out as well.
    fn admit_line(&mut self, now: Instant) -> Option<u64> {
        if self.logged.is_some_and(|logged| now.saturating_duration_since(logged) < LOG_PERIOD) {
            self.left_out += 1;
            return None;
        }
        self.logged = Some(now);
        Some(std::mem::take(&mut self.left_out))
    }
}

impl ListedTask {
    /// A step has ended, and the task rests before the next.
    fn ended(&self, took: Duration, rest: Duration, error: Option<&WorkError>) {
        let now = Instant::now();
        let mut progress = self.progress.lock();
        progress.runs += 1;
        progress.last_run = Some((now, took));
        let Some(error) = error else {
            progress.state = TaskState::Idle;
            return;
        };
        let text = error.to_string();
        progress.state = TaskState::BackingOff;
        progress.errors += 1;
        progress.last_error = Some((now, text.chars().take(ERROR_MAX).collect()));
        // What buckets say is told with their mounts, and what is gone is missed by nobody.
        let line = if error.is_of_bucket() || error.is_not_found() { None } else { progress.admit_line(now) };
        drop(progress);
        let task = self.name.as_ref();
        match line {
            Some(left_out) => {
                tracing::warn!(task, left_out, "a background task failed, and is tried again in {rest:?}: {text}");
            }
            None => tracing::debug!(task, "a background task failed, and is tried again in {rest:?}: {text}"),
        }
    }

    fn status(&self) -> TaskStatus {
        let progress = self.progress.lock();
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let (last_error_age_ms, last_error) =
            progress.last_error.as_ref().map_or((0, ""), |(at, error)| (millis(at.elapsed()), error.as_str()));
        let (last_run_age_ms, last_run_ms) =
            progress.last_run.map_or((0, 0), |(at, took)| (millis(at.elapsed()), millis(took)));
        TaskStatus {
            name: self.name.to_string(),
            state: progress.state as i32,
            runs: progress.runs,
            errors: progress.errors,
            last_run_age_ms,
            last_run_ms,
            last_error: last_error.to_owned(),
            last_error_age_ms,
        }
    }
}

#[cfg(test)]
mod tests;
