//! `cv load`: warming jobs.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use cavern_proto::master::{GetJobRequest, Job, JobState, ListJobsRequest, SubmitLoadRequest};
use clap::Args;
use indicatif::{HumanDuration, ProgressBar, ProgressStyle};
use serde::Serialize;

use super::connect::{ClusterArgs, Connection};
use crate::console;
use crate::error::{CliError, Context as _};

/// How often a watched job is asked for on a terminal, and elsewhere.
const BAR_PERIOD: Duration = Duration::from_millis(200);
const LINE_PERIOD: Duration = Duration::from_secs(2);

#[derive(Args)]
#[command(after_help = "Examples:
  cv load /train                 start warming; prints the job's number
  cv load /train --watch         and show its progress until it ends
  cv load --status 7             one job
  cv load --cancel 7
  cv load --list                 all jobs

--watch draws a bar on a terminal, prints lines elsewhere and one JSON object per line with --json. \
Interrupting it leaves the job running. Exit code 1 when a job has ended with errors.")]
pub struct LoadArgs {
    /// File or directory of the namespace.
    #[arg(value_name = "PATH", required_unless_present_any = ["status", "cancel", "list"])]
    path: Option<String>,
    /// Show progress until the job ends.
    #[arg(long)]
    watch: bool,
    /// Show a job.
    #[arg(long, value_name = "ID", conflicts_with_all = ["path", "cancel", "list"])]
    status: Option<u64>,
    /// Stop a job.
    #[arg(long, value_name = "ID", conflicts_with_all = ["path", "list", "watch"])]
    cancel: Option<u64>,
    /// Show all jobs.
    #[arg(long, conflicts_with_all = ["path", "watch"])]
    list: bool,
    /// Results as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// A job as it is shown.
#[derive(Debug, Serialize)]
pub struct JobView {
    pub id: u64,
    pub path: String,
    /// `running`, `done`, `cancelled` or `failed`.
    pub state: &'static str,
    pub files_total: u64,
    pub files_done: u64,
    pub bytes_total: u64,
    pub bytes_done: u64,
    pub bytes_fetched: u64,
    /// The totals are final.
    pub walked: bool,
    pub errors: u64,
    pub last_error: String,
    pub seconds: f64,
    pub bytes_per_second: f64,
    pub files_per_second: f64,
    /// Estimate of the rest; absent while the totals still grow.
    pub eta_seconds: Option<f64>,
}

impl From<Job> for JobView {
    fn from(job: Job) -> Self {
        let now_ns = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_nanos() as i64);
        let end_ns = if job.ended_ns > 0 { job.ended_ns } else { now_ns };
        let seconds = end_ns.saturating_sub(job.started_ns).max(0) as f64 / 1e9;
        let rate = |amount: u64| if seconds > 0.0 { amount as f64 / seconds } else { 0.0 };
        let bytes_per_second = rate(job.bytes_done);
        let left = job.bytes_total.saturating_sub(job.bytes_done) as f64;
        let running = job.state() == JobState::Running;
        Self {
            state: match job.state() {
                JobState::Running => "running",
                JobState::Done => "done",
                JobState::Cancelled => "cancelled",
                JobState::Failed => "failed",
                JobState::Unspecified => "unknown",
            },
            eta_seconds: (running && job.walked && bytes_per_second > 0.0).then(|| left / bytes_per_second),
            files_per_second: rate(job.files_done),
            bytes_per_second,
            seconds,
            id: job.id,
            path: job.path,
            files_total: job.files_total,
            files_done: job.files_done,
            bytes_total: job.bytes_total,
            bytes_done: job.bytes_done,
            bytes_fetched: job.bytes_fetched,
            walked: job.walked,
            errors: job.errors,
            last_error: job.last_error,
        }
    }
}

impl JobView {
    fn is_running(&self) -> bool {
        self.state == "running"
    }

    fn line(&self) -> String {
        let more = if self.walked { "" } else { "+" };
        let eta = self.eta_seconds.map_or_else(String::new, |eta| {
            format!(", {} left", HumanDuration(Duration::try_from_secs_f64(eta).unwrap_or(Duration::MAX)))
        });
        let errors = match (self.errors, self.last_error.as_str()) {
            (0, "") => String::new(),
            (errors, "") => format!(", {errors} errors"),
            (errors, last) => format!(", {errors} errors, the last: {last}"),
        };
        format!(
            "job {} {} {}: {}/{}{more} files, {} of {}{more} ({} fetched), {:.0} files/s, {}/s{eta}{errors}",
            self.id,
            self.path,
            self.state,
            self.files_done,
            self.files_total,
            console::size(self.bytes_done),
            console::size(self.bytes_total),
            console::size(self.bytes_fetched),
            self.files_per_second,
            console::size(self.bytes_per_second as u64)
        )
    }

    /// The table of `cv load --list` and `cv report`.
    pub fn print_table(jobs: &[Self]) -> Result<(), CliError> {
        let rows: Vec<_> = jobs
            .iter()
            .map(|job| {
                [
                    job.id.to_string(),
                    job.state.to_owned(),
                    job.path.clone(),
                    format!("{}/{}", job.files_done, job.files_total),
                    format!("{} of {}", console::size(job.bytes_done), console::size(job.bytes_total)),
                    job.errors.to_string(),
                    job.last_error.clone(),
                ]
            })
            .collect();
        console::table(["JOB", "STATE", "PATH", "FILES", "BYTES", "ERRORS", "LAST ERROR"], &rows)
    }

    /// What the exit code tells.
    fn outcome(&self) -> Result<(), CliError> {
        match self.state {
            "failed" => Err(CliError::Failed(format!(
                "job {} ended with {} errors, the last: {}",
                self.id, self.errors, self.last_error
            ))),
            "cancelled" => Err(CliError::Failed(format!("job {} was cancelled", self.id))),
            _ => Ok(()),
        }
    }
}

impl LoadArgs {
    pub async fn run(self) -> Result<(), CliError> {
        let mut connection = self.cluster.connect().await?;
        if self.list {
            let jobs = connection.cluster.list_jobs(ListJobsRequest {}).await?.into_inner().jobs;
            let jobs: Vec<_> = jobs.into_iter().map(JobView::from).collect();
            return if self.json { console::json(&jobs) } else { JobView::print_table(&jobs) };
        }
        let job = if let Some(id) = self.cancel {
            connection.cluster.cancel_job(GetJobRequest { id }).await?.into_inner()
        } else if let Some(id) = self.status {
            connection.cluster.get_job(GetJobRequest { id }).await?.into_inner()
        } else {
            let path = self.path.clone().unwrap_or_default();
            connection.cluster.submit_load(SubmitLoadRequest { path }).await?.into_inner()
        };
        let job = JobView::from(job);
        if self.watch {
            return self.watch(&mut connection, job).await;
        }
        if self.json {
            console::json(&job)?
        } else {
            console::line(job.line())?
        }
        if self.status.is_some() { job.outcome() } else { Ok(()) }
    }

    async fn watch(&self, connection: &mut Connection, mut job: JobView) -> Result<(), CliError> {
        let bar = if self.json { ProgressBar::hidden() } else { progress_bar()? };
        let mut said = Instant::now();
        while job.is_running() {
            bar.set_length(job.bytes_total);
            bar.set_position(job.bytes_done);
            bar.set_message(format!("{}/{} files, {} errors", job.files_done, job.files_total, job.errors));
            if bar.is_hidden() && said.elapsed() >= LINE_PERIOD {
                said = Instant::now();
                if self.json { console::json_line(&job)? } else { console::line(job.line())? }
            }
            tokio::time::sleep(BAR_PERIOD).await;
            job = connection.cluster.get_job(GetJobRequest { id: job.id }).await?.into_inner().into();
        }
        bar.finish_and_clear();
        if self.json {
            console::json_line(&job)?
        } else {
            console::line(job.line())?
        }
        job.outcome()
    }
}

fn progress_bar() -> Result<ProgressBar, CliError> {
    let template = "{bar:40} {percent}% {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta} {msg}";
    let style = ProgressStyle::with_template(template).context("the progress bar's template")?;
    Ok(ProgressBar::new(0).with_style(style))
}
