//! Where the time of a request goes: what its task has waited for, by stage.
//!
//! A task that is traced has [`Stages`]. What waits for something on its way calls [`Stage::begin`] first, and drops
//! what it gets when the wait is over. One moment counts for one stage, so that the parts never exceed the whole:
//! while several sources are asked at a time, as when a read is hedged, it counts for the farthest of them.
//!
//! What a worker has waited for the bucket, its answer says: so much of the wait for the worker was one for that
//! ([`Stages::fetched`]).
//!
//! Work that several wait for is done by one of them, or by read-ahead. Its stages count for each of the others as
//! well, as far as he has waited ([`Stages::join`]).

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::task::futures::TaskLocalFuture;
use tokio::time::Instant;

/// What is waited for; those that are farther away come later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Stage {
    /// This process: a thread for the task, or its turn to have memory.
    Queue,
    /// The master.
    Metadata,
    /// A worker of this host that hands out a descriptor.
    Descriptor,
    /// A disk of this host.
    Disk,
    /// A worker that sends bytes.
    Network,
    /// The bucket, asked by a worker for either of these.
    Fetch,
    /// The bucket, asked from here.
    Bucket,
}

impl Stage {
    /// All, in the order of their numbers.
    pub const ALL: [Self; 7] =
        [Self::Queue, Self::Metadata, Self::Descriptor, Self::Disk, Self::Network, Self::Fetch, Self::Bucket];

    pub fn name(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::Metadata => "metadata",
            Self::Descriptor => "descriptor",
            Self::Disk => "disk",
            Self::Network => "network",
            Self::Fetch => "fetch",
            Self::Bucket => "bucket",
        }
    }

    /// The task that runs waits for this from now on, until the answer is dropped.
    pub(crate) fn begin(self) -> Waiting {
        let stages = Stages::current();
        if let Some(stages) = &stages {
            stages.change(self, |active| *active += 1);
        }
        Waiting { stages, stage: self }
    }
}

/// How long each stage has taken, in the order of [`Stage::ALL`].
pub type StageTimes = [Duration; Stage::ALL.len()];

tokio::task_local! {
    static STAGES: Option<Arc<Stages>>;
}

/// What the task of one request has waited for.
#[derive(Debug)]
pub struct Stages(Mutex<State>);

#[derive(Debug)]
struct State {
    times: StageTimes,
    /// How many wait for each now.
    active: [u32; Stage::ALL.len()],
    /// Up to when `times` is right.
    counted: Instant,
}

/// A wait for one stage.
#[derive(Debug)]
#[must_use]
pub(crate) struct Waiting {
    stages: Option<Arc<Stages>>,
    stage: Stage,
}

/// A wait for what another task does.
#[derive(Debug)]
#[must_use]
pub(crate) struct Joined {
    own: Arc<Stages>,
    other: Arc<Stages>,
    before: StageTimes,
}

impl Stages {
    /// Of a task that runs.
    pub fn new() -> Arc<Self> {
        let state = State { times: StageTimes::default(), active: Default::default(), counted: Instant::now() };
        Arc::new(Self(Mutex::new(state)))
    }

    /// Of a task that is to run for what was asked at `since`: it is in the queue until [`Self::dequeued`].
    pub fn queued(since: Instant) -> Arc<Self> {
        let mut active = <[u32; Stage::ALL.len()]>::default();
        active[Stage::Queue as usize] = 1;
        Arc::new(Self(Mutex::new(State { times: StageTimes::default(), active, counted: since })))
    }

    /// The task runs.
    pub fn dequeued(&self) {
        self.change(Stage::Queue, |active| *active = active.saturating_sub(1));
    }

    /// What has been counted by now.
    pub fn times(&self) -> StageTimes {
        let mut state = self.0.lock();
        state.count(Instant::now());
        state.times
    }

    /// Runs a task that counts here, if anywhere.
    pub fn scope<F: Future>(this: Option<Arc<Self>>, task: F) -> TaskLocalFuture<Option<Arc<Self>>, F> {
        STAGES.scope(this, task)
    }

    /// Runs work that counts here, on a thread that may block.
    pub fn scope_blocking<T>(this: Option<Arc<Self>>, work: impl FnOnce() -> T) -> T {
        STAGES.sync_scope(this, work)
    }

    /// So much of what the task that runs has waited for a worker, that one has waited for the bucket.
    pub(crate) fn fetched(us: u32) {
        if let Some(stages) = Self::current().filter(|_| us > 0) {
            let mut state = stages.0.lock();
            state.count(Instant::now());
            let mut left = Duration::from_micros(us.into());
            // Whichever way it is to the worker: that is known after the first answer.
            for stage in [Stage::Descriptor, Stage::Network] {
                let moved = left.min(state.times[stage as usize]);
                state.times[stage as usize] -= moved;
                state.times[Stage::Fetch as usize] += moved;
                left -= moved;
            }
        }
    }

    /// Those of the task that runs.
    pub(crate) fn current() -> Option<Arc<Self>> {
        STAGES.try_with(Clone::clone).ok().flatten()
    }

    /// The task that runs waits for one that counts in `other`, until the answer is dropped.
    pub(crate) fn join(other: Option<Arc<Self>>) -> Option<Joined> {
        let (own, other) = (Self::current()?, other?);
        let before = other.times();
        (!Arc::ptr_eq(&own, &other)).then_some(Joined { own, other, before })
    }

    fn change(&self, stage: Stage, change: impl FnOnce(&mut u32)) {
        let mut state = self.0.lock();
        state.count(Instant::now());
        change(&mut state.active[stage as usize]);
    }
}

impl State {
    fn count(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(std::mem::replace(&mut self.counted, now));
        if let Some(stage) = self.stage() {
            self.times[stage as usize] += passed;
        }
    }

    /// Who waits for his turn has asked nobody yet.
    fn stage(&self) -> Option<Stage> {
        let is_active = |stage: &Stage| self.active[*stage as usize] > 0;
        Some(Stage::Queue).filter(is_active).or_else(|| Stage::ALL.into_iter().rev().find(is_active))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Some(stages) = &self.stages {
            stages.change(self.stage, |active| *active = active.saturating_sub(1));
        }
    }
}

impl Drop for Joined {
    fn drop(&mut self) {
        let after = self.other.times();
        let mut state = self.own.0.lock();
        let mut fetched_before = Duration::ZERO;
        for ((own, before), after) in state.times.iter_mut().zip(self.before).zip(after) {
            *own += after.saturating_sub(before);
            fetched_before += before.saturating_sub(after);
        }
        // What was a wait for the worker until its answer said more: that part was over when this one began.
        let fetch = &mut state.times[Stage::Fetch as usize];
        *fetch = fetch.saturating_sub(fetched_before);
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::sleep;

    use super::*;

    fn ms(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    fn time(stages: &Stages, stage: Stage) -> Duration {
        stages.times()[stage as usize]
    }

    #[test]
    fn every_stage_has_its_own_place() {
        for (place, stage) in Stage::ALL.into_iter().enumerate() {
            assert_eq!(stage as usize, place, "{}", stage.name());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_moment_counts_once_for_the_farthest_that_is_waited_for() {
        let stages = Stages::queued(Instant::now());
        sleep(ms(5)).await;
        stages.dequeued();
        let task = async {
            sleep(ms(100)).await;
            let worker = Stage::Network.begin();
            sleep(ms(20)).await;
            let bucket = Stage::Bucket.begin();
            sleep(ms(30)).await;
            drop(bucket);
            sleep(ms(1)).await;
            drop(worker);
            let _asked = Stage::Metadata.begin();
            let turn = Stage::Queue.begin();
            sleep(ms(2)).await;
            drop(turn);
            sleep(ms(7)).await;
        };
        Stages::scope(Some(Arc::clone(&stages)), task).await;
        sleep(ms(1000)).await;
        let expected = [(Stage::Queue, 7), (Stage::Metadata, 7), (Stage::Network, 21), (Stage::Bucket, 30)];
        for (stage, expected) in expected {
            assert_eq!(time(&stages, stage), ms(expected), "{}", stage.name());
        }
        assert_eq!(stages.times().iter().sum::<Duration>(), ms(65), "what is not waited for counts for nothing");
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_worker_has_fetched_is_told_apart_for_all_who_waited() {
        let (first, second) = (Stages::new(), Stages::new());
        let fetch = Stages::scope(Some(Arc::clone(&first)), async {
            let _worker = Stage::Network.begin();
            sleep(ms(50)).await;
            Stages::fetched(40_000);
        });
        let other = Some(Arc::clone(&first));
        let wait = Stages::scope(Some(Arc::clone(&second)), async {
            sleep(ms(20)).await;
            let joined = Stages::join(other);
            sleep(ms(40)).await;
            drop(joined);
        });
        tokio::join!(fetch, wait);
        assert_eq!((time(&first, Stage::Network), time(&first, Stage::Fetch)), (ms(10), ms(40)));
        assert_eq!((time(&second, Stage::Network), time(&second, Stage::Fetch)), (ms(0), ms(30)));
        // Never more than was waited for a worker, whatever it says.
        let task = async {
            let worker = Stage::Descriptor.begin();
            sleep(ms(5)).await;
            Stages::fetched(u32::MAX);
            drop(worker);
        };
        let third = Stages::new();
        Stages::scope(Some(Arc::clone(&third)), task).await;
        assert_eq!((time(&third, Stage::Descriptor), time(&third, Stage::Fetch)), (ms(0), ms(5)));
    }

    #[tokio::test(start_paused = true)]
    async fn who_joins_the_work_of_another_counts_what_he_waits_for_it() {
        let (first, second) = (Stages::new(), Stages::new());
        let fetch = Stages::scope(Some(Arc::clone(&first)), async {
            let _bucket = Stage::Bucket.begin();
            sleep(ms(50)).await;
        });
        let other = Some(Arc::clone(&first));
        let wait = Stages::scope(Some(Arc::clone(&second)), async {
            sleep(ms(20)).await;
            let joined = Stages::join(other);
            sleep(ms(25)).await;
            drop(joined);
            sleep(ms(100)).await;
        });
        tokio::join!(fetch, wait);
        assert_eq!(time(&first, Stage::Bucket), ms(50));
        assert_eq!(time(&second, Stage::Bucket), ms(25));
    }

    #[tokio::test]
    async fn what_nobody_traces_costs_nothing_and_counts_nowhere() {
        let _waiting = Stage::Disk.begin();
        assert!(Stages::current().is_none());
        assert!(Stages::join(Some(Stages::new())).is_none());
        let none = Stages::scope(None, async { Stages::current().is_none() && Stage::Disk.begin().stages.is_none() });
        assert!(none.await);
    }
}
