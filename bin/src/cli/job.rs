//! `cv export` and `cv job`: long work of the masters, which goes on without the command that began it.

use cavern_conf::{counted, host, process};
use cavern_net::MasterChannel;
use cavern_net::master::Stubs;
use cavern_proto::master::{GetJobRequest, Job, JobKind, JobState, ListJobsRequest, SubmitExportRequest};
use clap::{Args, Subcommand};
use serde::{Serialize, Serializer};
use tokio_util::sync::CancellationToken;
use tonic::{Response, Status};

use super::connect::{ANSWER_TIMEOUT, LINE_PERIOD, POLL_PERIOD, Poller, ResultArgs, new_request_id, rpc, word};
use crate::console::{self, Progress};
use crate::error::CliError;

/// A rate of a shorter time is none to estimate the rest from.
pub const RATE_SECONDS: f64 = 1.0;

#[derive(Args)]
pub struct ExportArgs {
    /// File or directory of the namespace.
    path: String,
    /// Show progress until the job ends.
    #[arg(long)]
    watch: bool,
    #[command(flatten)]
    result: ResultArgs,
}

#[derive(Subcommand)]
pub enum JobCommand {
    /// List the jobs that run, and the last hundred that have ended.
    List,
    /// Show a job.
    Status(JobArgs),
    /// Show the progress of a job until it has ended.
    Wait(JobArgs),
    /// Stop a job.
    Cancel(JobArgs),
    /// Begin a job anew that failed or was cancelled.
    Retry {
        #[command(flatten)]
        job: JobArgs,
        /// Show progress until the job ends.
        #[arg(long)]
        watch: bool,
    },
}

#[derive(Args)]
pub struct JobArgs {
    /// Number of the job.
    id: u64,
}

impl ExportArgs {
    pub async fn run(self) -> Result<(), CliError> {
        let Self { path, watch, result } = self;
        let request = SubmitExportRequest { path, request_id: new_request_id() };
        begin(&result, watch, rpc!(cluster.submit_export(request))).await
    }
}

impl JobCommand {
    pub async fn run(self, result: &ResultArgs) -> Result<(), CliError> {
        match self {
            Self::List => {
                let jobs = result.cluster.call(rpc!(cluster.list_jobs(ListJobsRequest {}))).await?.jobs;
                let jobs: Vec<_> = jobs.into_iter().map(JobView::from).collect();
                result.show(&jobs, || JobView::print_table(&jobs))
            }
            Self::Status(JobArgs { id }) => {
                let job = get(&result.cluster.masters().await?, id).await?;
                result.show(&job, || console::line(job.line()))?;
                job.outcome()
            }
            Self::Wait(JobArgs { id }) => {
                let stop = process::shutdown_on_signals();
                let masters = result.cluster.masters().await?;
                let job = get(&masters, id).await?;
                watch(masters, job, false, result.json, stop).await
            }
            Self::Cancel(JobArgs { id }) => {
                let job = cancel(&result.cluster.masters().await?, id).await?;
                result.show(&job, || console::line(job.line()))
            }
            Self::Retry { job: JobArgs { id }, watch } => {
                let request = GetJobRequest { id, request_id: new_request_id() };
                begin(result, watch, rpc!(cluster.retry_job(request))).await
            }
        }
    }
}

/// A job as it stands.
async fn get(masters: &MasterChannel, id: u64) -> Result<JobView, CliError> {
    Ok(masters.ask_unary(rpc!(cluster.get_job(GetJobRequest { id, ..GetJobRequest::default() }))).await?.into())
}

async fn cancel(masters: &MasterChannel, id: u64) -> Result<JobView, CliError> {
    Ok(masters.ask_unary(rpc!(cluster.cancel_job(GetJobRequest { id, ..GetJobRequest::default() }))).await?.into())
}

/// Begins a job, once, and follows it if that is wanted.
pub async fn begin(
    result: &ResultArgs,
    is_watched: bool,
    submit: impl AsyncFnMut(Stubs) -> Result<Response<Job>, Status>,
) -> Result<(), CliError> {
    // From before there is a job: an interrupt that comes early is not lost.
    let stop = is_watched.then(process::shutdown_on_signals);
    let masters = result.cluster.masters().await?;
    let job = JobView::from(masters.ask_unary(submit).await?);
    match stop {
        Some(stop) => watch(masters, job, true, result.json, stop).await,
        None => result.show(&job, || console::line(job.line())),
    }
}

/// Shows a job until it has ended, also over the restart of a master. An interrupt ends the watch, and cancels the job
/// if it `is_own`.
///
/// # Errors
/// The job failed or was cancelled, the watch was interrupted (`stop`), or no master answered for long.
async fn watch(
    masters: MasterChannel,
    mut job: JobView,
    is_own: bool,
    json: bool,
    stop: CancellationToken,
) -> Result<(), CliError> {
    let follower = Poller::new(masters, "the job");
    let mut progress = Progress::new(json);
    let id = job.id();
    let goes_on = format!("goes on with one: `cv job wait {id}`");
    while job.is_running() {
        progress.show_or_say(job.part(), job.line(), LINE_PERIOD, || job.say(json))?;
        let next = async {
            tokio::time::sleep(POLL_PERIOD).await;
            let request = GetJobRequest { id, ..GetJobRequest::default() };
            follower.ask(ANSWER_TIMEOUT, &goes_on, rpc!(cluster.get_job(request))).await
        };
        job = tokio::select! {
            job = next => job?.into(),
            () = stop.cancelled() => {
                drop(progress);
                return interrupted(&follower.masters, id, is_own, json).await;
            }
        };
    }
    drop(progress);
    job.say(json)?;
    job.outcome()
}

async fn interrupted(masters: &MasterChannel, id: u64, is_own: bool, json: bool) -> Result<(), CliError> {
    if !is_own {
        return Err(CliError::Failed(format!("interrupted; job {id} goes on: `cv job cancel {id}` would end it")));
    }
    let cause = match tokio::time::timeout(ANSWER_TIMEOUT, cancel(masters, id)).await {
        Ok(Ok(job)) => {
            job.say(json)?;
            return job.outcome();
        }
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("no answer within {} s", ANSWER_TIMEOUT.as_secs()),
    };
    Err(CliError::Unreachable(format!(
        "interrupted, but job {id} is not cancelled ({cause}): run `cv job cancel {id}` when a master answers"
    )))
}

/// A job as it is shown.
pub struct JobView {
    job: Job,
    /// How long it has been running, or ran.
    seconds: f64,
}

impl From<Job> for JobView {
    fn from(job: Job) -> Self {
        let end_ns = if job.ended_ns > 0 { job.ended_ns } else { host::wall_ns() };
        let seconds = end_ns.saturating_sub(job.started_ns).max(0) as f64 / 1e9;
        Self { job, seconds }
    }
}

impl Serialize for JobView {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let job = &self.job;
        // When it was walked, the totals are final; of loads there are bytes that were fetched.
        let view = console::fields! { job;
            id, path, files_total, files_done, bytes_total, bytes_done, bytes_fetched, walked, errors, last_error;
            "kind": self.kind(),
            "state": self.state(),
            "seconds": self.seconds,
            "bytes_per_second": self.rate(job.bytes_done),
            "files_per_second": self.rate(job.files_done),
            "eta_seconds": self.eta_seconds(),
            // The job that this one tries again.
            "retry_of": (job.retry_of != 0).then_some(job.retry_of),
        };
        view.serialize(serializer)
    }
}

impl JobView {
    pub fn id(&self) -> u64 {
        self.job.id
    }

    /// `load`, `load_metadata` or `export`.
    fn kind(&self) -> String {
        word(self.job.kind().as_str_name(), "JOB_KIND_")
    }

    /// `running`, `done`, `cancelled` or `failed`.
    fn state(&self) -> String {
        word(self.job.state().as_str_name(), "JOB_STATE_")
    }

    pub fn is_running(&self) -> bool {
        self.job.state() == JobState::Running
    }

    fn rate(&self, amount: u64) -> f64 {
        if self.seconds > 0.0 { amount as f64 / self.seconds } else { 0.0 }
    }

    /// Estimate of the rest; absent while the totals still grow, and before there is a rate.
    fn eta_seconds(&self) -> Option<f64> {
        let (job, rate) = (&self.job, self.rate(self.job.bytes_done));
        let left = job.bytes_total.saturating_sub(job.bytes_done) as f64;
        let is_known = self.is_running() && job.walked && self.seconds >= RATE_SECONDS && rate > 0.0 && left > 0.0;
        is_known.then(|| left / rate)
    }

    /// How much is done of how much, once that is known: bytes, or files where nothing has any.
    pub fn part(&self) -> Option<(u64, u64)> {
        let job = &self.job;
        job.walked.then_some(match job.bytes_total {
            0 => (job.files_done, job.files_total),
            total => (job.bytes_done, total),
        })
    }

    pub fn line(&self) -> String {
        let job = &self.job;
        let errors = match (job.errors, job.last_error.as_str()) {
            (0, last) => console::prefixed(", the last error: ", last),
            (errors, last) => format!(", {}{}", counted(errors, "error"), console::prefixed(", the last: ", last)),
        };
        let fetched = match job.kind() {
            JobKind::Load => format!(" ({} fetched)", console::size(job.bytes_fetched)),
            _ => String::new(),
        };
        // Totals may still grow.
        let so_far = if job.walked { "" } else { " so far" };
        let files = format!("{}/{}{so_far}", job.files_done, counted(job.files_total, "file"));
        // A listing has no bytes.
        let bytes = match job.kind() {
            JobKind::LoadMetadata => String::new(),
            _ => format!(", {} of {}{so_far}", console::size(job.bytes_done), console::size(job.bytes_total)),
        };
        let rates = (self.rate(job.files_done), console::size(self.rate(job.bytes_done) as u64));
        let left = console::left(self.eta_seconds());
        let (id, kind, path, state) = (job.id, self.kind(), &job.path, self.state());
        format!(
            "job {id} {kind} {path} {state}: {files}{bytes}{fetched}, {:.0} files/s, {}/s{left}{errors}",
            rates.0, rates.1
        )
    }

    /// Shows it in one line.
    pub fn say(&self, json: bool) -> Result<(), CliError> {
        console::say(json, self, || self.line())
    }

    /// The table of `cv job list` and `cv report`; errors, which may be long, come below it.
    pub fn print_table(jobs: &[Self]) -> Result<(), CliError> {
        let row = |view: &Self| {
            let job = &view.job;
            let files = format!("{}/{}", job.files_done, job.files_total);
            let bytes = format!("{} of {}", console::size(job.bytes_done), console::size(job.bytes_total));
            let (id, errors) = (job.id.to_string(), job.errors.to_string());
            [id, view.kind(), view.state(), job.path.clone(), files, bytes, errors]
        };
        let heading = ["JOB", "KIND", "STATE", "PATH", "FILES", "BYTES", "ERRORS"];
        console::table_or("no job has been begun: see `cv load` and `cv export`", heading, jobs.iter().map(row))?;
        let failed = jobs.iter().map(|view| &view.job).filter(|job| !job.last_error.is_empty());
        failed.map(|job| format!("job {}: {}", job.id, job.last_error)).try_for_each(console::line)
    }

    /// What the exit code reports.
    pub fn outcome(&self) -> Result<(), CliError> {
        let Job { id, errors, last_error, .. } = &self.job;
        let what = match self.job.state() {
            JobState::Failed => format!("ended with {}, the last: {last_error}; ", counted(*errors, "error")),
            JobState::Cancelled => "was cancelled: ".to_owned(),
            JobState::Running | JobState::Done | JobState::Unspecified => return Ok(()),
        };
        Err(CliError::Failed(format!("job {id} {what}`cv job retry {id}` begins it anew")))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn job(walked: bool, seconds: f64, done: u64) -> JobView {
        let started_ns = host::wall_ns() - (seconds * 1e9) as i64;
        JobView::from(Job {
            id: 7,
            path: "/data".into(),
            state: JobState::Running.into(),
            kind: JobKind::Load.into(),
            walked,
            started_ns,
            files_total: 1,
            bytes_done: done,
            bytes_total: 100 << 20,
            ..Job::default()
        })
    }

    #[test]
    fn there_is_neither_a_share_of_an_unknown_total_nor_an_end_before_there_is_a_rate() {
        let growing = job(false, 10.0, 50 << 20);
        assert_eq!((growing.part(), growing.eta_seconds()), (None, None));
        assert!(growing.line().contains("0/1 file so far, 50.00 MiB of 100.00 MiB so far"), "{}", growing.line());
        for early in [job(true, 0.0, 50 << 20), job(true, 10.0, 0), job(true, 10.0, 100 << 20)] {
            assert_eq!(early.eta_seconds(), None);
            assert!(!early.line().contains("left"), "{}", early.line());
        }
        let known = job(true, 10.0, 50 << 20);
        assert_eq!(known.part(), Some((50 << 20, 100 << 20)));
        assert!(known.eta_seconds().is_some_and(|eta| eta > 0.0) && known.line().ends_with("seconds left"));
        assert!(known.line().contains(": 0/1 file, "), "{}", known.line());
        let shown = serde_json::to_value(&known).unwrap();
        assert_eq!(
            [&shown["kind"], &shown["state"], &shown["retry_of"]],
            [&json!("load"), &json!("running"), &json!(null)]
        );
    }

    #[test]
    fn files_are_the_measure_of_what_has_no_bytes() {
        let empty = job(true, 0.0, 0).job;
        let empty = JobView::from(Job { bytes_total: 0, files_done: 1, files_total: 4, ..empty });
        assert_eq!(empty.part(), Some((1, 4)));
    }
}
