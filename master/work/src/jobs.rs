//! Jobs: long work that is asked for by a command, reported while it goes on, and kept.
//!
//! - [`load`](self::load): what only the bucket has comes into the workers' cache, or into the namespace at least.
//! - [`export`](self::export): what the bucket of an fs-mode mount lacks gets there now.
//!
//! A job is in the log from its beginning to its end: it goes on after a restart. Its progress is kept in memory, and
//! put into the log every few seconds. An ended job stays as it ended, until a hundred later ones have ended; trying it
//! again makes a new one. What [`Jobs::load_files`] does ends with whoever watches it, and is not recorded.

mod export;
mod load;
mod running;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use cavern_consensus::Proposer;
use cavern_proto::master::{Job, JobKind, JobState};
use cavern_state::outcome::{PutJob, Repeatable};
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use self::load::Loader;
use self::running::RunningJob;
use crate::background::{TaskGroup, report};
use crate::error::WorkError;
use crate::metrics::JobMetrics;
use crate::namespace::Lookups;
use crate::persist::Persistence;
use crate::request::Request;
use crate::workers::calls::BlockFiller;

/// Jobs that run at a time.
const JOBS_MAX: usize = 16;
/// Lists that are loaded, or looked at, at a time.
const LISTS_MAX: usize = 64;
/// How often progress goes into the log.
const SAVE_INTERVAL: Duration = Duration::from_secs(5);

/// All jobs.
pub struct Jobs {
    lookups: Lookups,
    proposer: Proposer,
    loader: Loader,
    persistence: Arc<Persistence>,
    metrics: JobMetrics,
    running: Mutex<HashMap<u64, Arc<RunningJob>>>,
    /// One for each job, from before it is recorded.
    places: Arc<Semaphore>,
    lists: Semaphore,
    tasks: TaskGroup,
}

impl Jobs {
    /// `concurrency` is that of all loads together, in blocks.
    pub fn new(
        lookups: Lookups,
        proposer: Proposer,
        filler: Arc<dyn BlockFiller>,
        concurrency: usize,
        persistence: Arc<Persistence>,
        metrics: JobMetrics,
    ) -> Arc<Self> {
        Arc::new(Self {
            loader: Loader::new(lookups.clone(), filler, concurrency),
            lookups,
            proposer,
            persistence,
            metrics,
            running: Mutex::default(),
            places: Arc::new(Semaphore::new(JOBS_MAX)),
            lists: Semaphore::new(LISTS_MAX),
            tasks: TaskGroup::default(),
        })
    }

    /// Goes on with the jobs that the log says are running.
    pub async fn resume(self: &Arc<Self>) -> Result<(), WorkError> {
        for job in self.lookups.reader.read(|tables| Ok(tables.jobs()?)).await? {
            if job.state() == JobState::Running {
                tracing::info!(job = job.id, path = job.path, "a job goes on");
                let job = match job.kind() {
                    // What is left is measured, not counted.
                    JobKind::Export => job,
                    // The walk begins anew.
                    JobKind::Load | JobKind::LoadMetadata | JobKind::Check | JobKind::Unspecified => {
                        let Job { id, kind, path, state, started_ns, retry_of, .. } = job;
                        Job { id, kind, path, state, started_ns, retry_of, ..Job::default() }
                    }
                };
                self.spawn(job, self.places.clone().try_acquire_owned().ok());
            }
        }
        Ok(())
    }

    /// Begins a job of the kind and path of one that failed or was cancelled.
    pub async fn retry_once(self: &Arc<Self>, request: &Request, id: u64) -> Result<Job, WorkError> {
        let job = self.get(id).await?;
        match job.state() {
            JobState::Failed | JobState::Cancelled => self.submit_once(request, job.kind(), &job.path, id).await,
            JobState::Done => Err(WorkError::Refused(format!(
                "job {id} is done, there is nothing to be tried again: begin another for {}",
                job.path
            ))),
            JobState::Running | JobState::Unspecified => Err(WorkError::Refused(format!(
                "job {id} still runs: wait for its end (cv job wait {id}), or cancel it (cv job cancel {id})"
            ))),
        }
    }

    /// Records a job that warms or lists what is below a path, or brings it to the bucket, and starts it. `retry_of` is
    /// the number of the job that it tries again; 0 for none.
    pub async fn submit_once(
        self: &Arc<Self>,
        request: &Request,
        kind: JobKind,
        path: &str,
        retry_of: u64,
    ) -> Result<Job, WorkError> {
        if let Some(answer) = request.answer(&self.lookups.reader).await? {
            return self.get(answer.job).await;
        }
        let mut job = match kind {
            JobKind::Export => self.plan_export(path).await?,
            JobKind::Load | JobKind::LoadMetadata | JobKind::Unspecified => {
                self.loader.lookups.resolve(path).await?;
                let kind = if kind == JobKind::LoadMetadata { kind } else { JobKind::Load };
                Job { kind: kind as i32, ..Job::default() }
            }
            JobKind::Check => return Err(not_of_this_kind(kind)),
        };
        let too_many = |_| WorkError::Overloaded(format!("{JOBS_MAX} jobs run already: wait for one, or cancel one"));
        let place = self.places.clone().try_acquire_owned().map_err(too_many)?;
        job.started_ns = self.lookups.reader.clock().now_ns();
        (job.path, job.state, job.retry_of) = (path.to_owned(), JobState::Running as i32, retry_of);
        let (jobs, command) = (self.clone(), request.command(PutJob(job.clone())));
        let recorded = self.tasks.to_the_end(async move {
            match jobs.proposer.propose(command).await? {
                Repeatable::First(id) => job.id = id,
                // Whoever recorded it has it run.
                Repeatable::Repeated(answer) => return jobs.get(answer.job).await,
            }
            jobs.spawn(job.clone(), Some(place));
            Ok(job)
        });
        recorded.await
    }

    /// Does with these files, and what is below these directories, what a job of this kind does, or looks at them
    /// ([`JobKind::Check`]), and says now and then how far it is. Gives what has become of it.
    ///
    /// # Errors
    /// There is no such work, too much of it is under way, or this master stops or leads no more. What fails of a path
    /// is counted.
    pub async fn load_files(
        &self,
        kind: JobKind,
        paths: Vec<String>,
        answers: &mpsc::Sender<Result<Job, WorkError>>,
    ) -> Result<Job, WorkError> {
        if matches!(kind, JobKind::Export | JobKind::Unspecified) {
            return Err(not_of_this_kind(kind));
        }
        let too_many = |_| WorkError::Overloaded(format!("{LISTS_MAX} lists are loaded already: wait for one"));
        let _place = self.lists.try_acquire().map_err(too_many)?;
        let (clock, state) = (self.lookups.reader.clock(), JobState::Running as i32);
        let list = Job { kind: kind as i32, state, started_ns: clock.now_ns(), ..Job::default() };
        // Blocks that are under way when nobody watches any more are loaded nevertheless.
        let stop = &self.tasks.stop;
        let list = Arc::new(RunningJob::new(list, stop.child_token()));
        tokio::select! {
            biased;
            () = stop.cancelled() => Err(WorkError::stopping()),
            ended = self.loader.run_list(&list, paths) => ended.map(|()| list.end(clock.now_ns())),
            () = report(answers, || list.snapshot()) => Ok(list.snapshot()),
        }
    }

    pub async fn get(&self, id: u64) -> Result<Job, WorkError> {
        if let Some(running) = self.running.lock().get(&id) {
            return Ok(running.snapshot());
        }
        let job = self.lookups.reader.read(move |tables| Ok(tables.job(id)?)).await?;
        job.ok_or_else(|| WorkError::NotFound(format!("there is no job {id}: cv job list names the jobs")))
    }

    pub async fn list(&self) -> Result<Vec<Job>, WorkError> {
        let jobs = self.lookups.reader.read(|tables| Ok(tables.jobs()?)).await?;
        let running = self.running.lock();
        Ok(jobs.into_iter().map(|job| running.get(&job.id).map_or(job, |running| running.snapshot())).collect())
    }

    /// Cancels a job, and answers when the log says so; one that has ended stays as it is.
    pub async fn cancel(&self, id: u64) -> Result<Job, WorkError> {
        let running = self.running.lock().get(&id).cloned();
        if let Some(running) = running {
            running.cancel.cancel();
            running.recorded.cancelled().await;
        }
        self.get(id).await
    }

    /// Stops what runs and waits for it; the jobs go on after a restart.
    pub async fn shutdown(&self) {
        self.tasks.shutdown().await;
    }

    fn spawn(self: &Arc<Self>, job: Job, place: Option<OwnedSemaphorePermit>) {
        let kind = job.kind();
        let job = Arc::new(RunningJob::new(job, self.tasks.stop.child_token()));
        self.running.lock().insert(job.id, job.clone());
        self.metrics.began(kind);
        let jobs = self.clone();
        self.tasks.tracker.spawn(async move {
            tokio::select! {
                result = jobs.run(&job) => if let Err(error) = result {
                    job.failed(&error.to_string());
                },
                () = job.cancel.cancelled() => {}
            }
            let ended = (!jobs.tasks.stop.is_cancelled()).then(|| job.end(jobs.lookups.reader.clock().now_ns()));
            jobs.metrics.ended(kind, ended.as_ref().map(Job::state));
            if let Some(ended) = ended {
                tracing::info!(job = ended.id, path = ended.path, errors = ended.errors, "a job ended");
                if let Err(error) = jobs.proposer.propose(PutJob(ended)).await {
                    tracing::warn!(job = job.id, "the end of a job is not recorded: {error}");
                }
            }
            jobs.running.lock().remove(&job.id);
            drop(place);
            job.recorded.cancel();
        });
    }

    async fn run(&self, job: &Arc<RunningJob>) -> Result<(), WorkError> {
        let save = async {
            loop {
                tokio::time::sleep(SAVE_INTERVAL).await;
                // The next one, or the end, makes up for one that fails.
                let _ = self.proposer.propose(PutJob(job.snapshot())).await;
            }
        };
        let work = async {
            match job.kind {
                JobKind::Export => self.run_export(job).await,
                JobKind::Load | JobKind::LoadMetadata | JobKind::Check | JobKind::Unspecified => {
                    self.loader.run(job).await
                }
            }
        };
        tokio::select! {
            result = work => result,
            () = save => Ok(()),
        }
    }
}

fn not_of_this_kind(kind: JobKind) -> WorkError {
    WorkError::Invalid(format!("{} is none of the kinds of work that are begun in this way", kind.as_str_name()))
}
