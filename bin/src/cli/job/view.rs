//! A job as it is shown.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use cavern_proto::master::{Job, JobKind, JobState};
use indicatif::HumanDuration;
use serde::Serialize;

use crate::console;
use crate::error::CliError;

/// A job as it is shown.
#[derive(Debug, Serialize)]
pub struct JobView {
    pub id: u64,
    /// `load` or `export`.
    pub kind: &'static str,
    pub path: String,
    /// `running`, `done`, `cancelled` or `failed`.
    pub state: &'static str,
    pub files_total: u64,
    pub files_done: u64,
    pub bytes_total: u64,
    pub bytes_done: u64,
    /// Of loads.
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
    /// The job that this one tries again.
    pub retry_of: Option<u64>,
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
            kind: match job.kind() {
                JobKind::Export => "export",
                JobKind::Load | JobKind::Unspecified => "load",
            },
            retry_of: (job.retry_of != 0).then_some(job.retry_of),
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
    pub fn is_running(&self) -> bool {
        self.state == "running"
    }

    pub fn line(&self) -> String {
        let more = if self.walked { "" } else { "+" };
        let eta = self.eta_seconds.map_or_else(String::new, |eta| {
            format!(", {} left", HumanDuration(Duration::try_from_secs_f64(eta).unwrap_or(Duration::MAX)))
        });
        let errors = match (self.errors, self.last_error.as_str()) {
            (0, "") => String::new(),
            (0, last) => format!(", the last error: {last}"),
            (errors, "") => format!(", {errors} errors"),
            (errors, last) => format!(", {errors} errors, the last: {last}"),
        };
        let fetched = match self.kind {
            "load" => format!(" ({} fetched)", console::size(self.bytes_fetched)),
            _ => String::new(),
        };
        format!(
            "job {} {} {} {}: {}/{}{more} files, {} of {}{more}{fetched}, {:.0} files/s, {}/s{eta}{errors}",
            self.id,
            self.kind,
            self.path,
            self.state,
            self.files_done,
            self.files_total,
            console::size(self.bytes_done),
            console::size(self.bytes_total),
            self.files_per_second,
            console::size(self.bytes_per_second as u64)
        )
    }

    /// Shows it once.
    pub fn print(&self, json: bool) -> Result<(), CliError> {
        if json { console::json(self) } else { console::line(self.line()) }
    }

    /// The table of `cv job list` and `cv report`.
    pub fn print_table(jobs: &[Self]) -> Result<(), CliError> {
        let rows: Vec<_> = jobs
            .iter()
            .map(|job| {
                [
                    job.id.to_string(),
                    job.kind.to_owned(),
                    job.state.to_owned(),
                    job.path.clone(),
                    format!("{}/{}", job.files_done, job.files_total),
                    format!("{} of {}", console::size(job.bytes_done), console::size(job.bytes_total)),
                    job.errors.to_string(),
                    job.last_error.clone(),
                ]
            })
            .collect();
        console::table(["JOB", "KIND", "STATE", "PATH", "FILES", "BYTES", "ERRORS", "LAST ERROR"], &rows)
    }

    /// What the exit code tells.
    pub fn outcome(&self) -> Result<(), CliError> {
        match self.state {
            "failed" => Err(CliError::Failed(format!(
                "job {} ended with {} errors, the last: {}; `cv job retry {}` begins it anew",
                self.id, self.errors, self.last_error, self.id
            ))),
            "cancelled" => Err(CliError::Failed(format!(
                "job {} was cancelled: `cv job retry {}` begins it anew",
                self.id, self.id
            ))),
            _ => Ok(()),
        }
    }
}
