//! A job as it is shown.

use std::time::Duration;

use cavern_conf::{counted, host};
use cavern_proto::master::{Job, JobKind, JobState};
use indicatif::HumanDuration;
use serde::Serialize;

use crate::console;
use crate::error::CliError;

/// A rate of a shorter time is none to estimate the rest from.
const RATE_SECONDS: f64 = 1.0;

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
    /// Estimate of the rest; absent while the totals still grow, and before there is a rate.
    pub eta_seconds: Option<f64>,
    /// The job that this one tries again.
    pub retry_of: Option<u64>,
}

impl From<Job> for JobView {
    fn from(job: Job) -> Self {
        let now_ns = host::wall_ns();
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
            eta_seconds: (running && job.walked && seconds >= RATE_SECONDS && bytes_per_second > 0.0 && left > 0.0)
                .then(|| left / bytes_per_second),
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

    /// How much is done of how much, once that is known: bytes, or files where nothing has any.
    pub fn part(&self) -> Option<(u64, u64)> {
        self.walked.then_some(match self.bytes_total {
            0 => (self.files_done, self.files_total),
            total => (self.bytes_done, total),
        })
    }

    /// What stands beside the bar.
    pub fn progress(&self) -> String {
        let rate = if self.bytes_done > 0 && self.seconds >= RATE_SECONDS {
            format!(", {}/s", console::size(self.bytes_per_second as u64))
        } else {
            String::new()
        };
        let errors = if self.errors == 0 { String::new() } else { format!(", {}", counted(self.errors, "error")) };
        format!(
            "{} of {}, {}{rate}{}{errors}",
            console::size(self.bytes_done),
            self.at_least(console::size(self.bytes_total)),
            self.files(),
            self.eta()
        )
    }

    /// A total that may still grow.
    fn at_least(&self, total: String) -> String {
        if self.walked { total } else { format!("{total} so far") }
    }

    /// `3/10 files`.
    fn files(&self) -> String {
        self.at_least(format!("{}/{}", self.files_done, counted(self.files_total, "file")))
    }

    fn eta(&self) -> String {
        self.eta_seconds.map_or_else(String::new, |eta| {
            format!(", {} left", HumanDuration(Duration::try_from_secs_f64(eta).unwrap_or(Duration::MAX)))
        })
    }

    pub fn line(&self) -> String {
        let eta = self.eta();
        let errors = match (self.errors, self.last_error.as_str()) {
            (0, "") => String::new(),
            (0, last) => format!(", the last error: {last}"),
            (errors, "") => format!(", {}", counted(errors, "error")),
            (errors, last) => format!(", {}, the last: {last}", counted(errors, "error")),
        };
        let fetched = match self.kind {
            "load" => format!(" ({} fetched)", console::size(self.bytes_fetched)),
            _ => String::new(),
        };
        format!(
            "job {} {} {} {}: {}, {} of {}{fetched}, {:.0} files/s, {}/s{eta}{errors}",
            self.id,
            self.kind,
            self.path,
            self.state,
            self.files(),
            console::size(self.bytes_done),
            self.at_least(console::size(self.bytes_total)),
            self.files_per_second,
            console::size(self.bytes_per_second as u64)
        )
    }

    /// Shows it once.
    pub fn print(&self, json: bool) -> Result<(), CliError> {
        if json { console::json(self) } else { console::line(self.line()) }
    }

    /// Shows it in one line.
    pub fn say(&self, json: bool) -> Result<(), CliError> {
        console::say(json, self, || self.line())
    }

    /// The table of `cv job list` and `cv report`; errors, which may be long, come below it.
    pub fn print_table(jobs: &[Self]) -> Result<(), CliError> {
        let row = |job: &Self| {
            let (kind, state, path) = (job.kind.to_owned(), job.state.to_owned(), job.path.clone());
            let files = format!("{}/{}", job.files_done, job.files_total);
            let bytes = format!("{} of {}", console::size(job.bytes_done), console::size(job.bytes_total));
            [job.id.to_string(), kind, state, path, files, bytes, job.errors.to_string()]
        };
        let heading = ["JOB", "KIND", "STATE", "PATH", "FILES", "BYTES", "ERRORS"];
        console::table(heading, jobs.iter().map(row))?;
        let failed = jobs.iter().filter(|job| !job.last_error.is_empty());
        failed.map(|job| format!("job {}: {}", job.id, job.last_error)).try_for_each(console::line)
    }

    /// What the exit code reports.
    pub fn outcome(&self) -> Result<(), CliError> {
        match self.state {
            "failed" => Err(CliError::Failed(format!(
                "job {} ended with {}, the last: {}; `cv job retry {}` begins it anew",
                self.id,
                counted(self.errors, "error"),
                self.last_error,
                self.id
            ))),
            "cancelled" => Err(CliError::Failed(format!(
                "job {} was cancelled: `cv job retry {}` begins it anew",
                self.id, self.id
            ))),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
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
        assert_eq!((growing.part(), growing.eta_seconds), (None, None));
        assert!(growing.line().contains("0/1 file so far, 50.00 MiB of 100.00 MiB so far"), "{}", growing.line());
        for early in [job(true, 0.0, 50 << 20), job(true, 10.0, 0), job(true, 10.0, 100 << 20)] {
            assert_eq!(early.eta_seconds, None);
            assert!(!early.progress().contains("left"), "{}", early.progress());
        }
        let known = job(true, 10.0, 50 << 20);
        assert_eq!(known.part(), Some((50 << 20, 100 << 20)));
        assert!(known.eta_seconds.is_some_and(|eta| eta > 0.0) && known.progress().ends_with("seconds left"));
        assert!(known.line().contains(": 0/1 file, "), "{}", known.line());
    }

    #[test]
    fn files_are_the_measure_of_what_has_no_bytes() {
        let empty = JobView { bytes_total: 0, files_done: 1, files_total: 4, ..job(true, 0.0, 0) };
        assert_eq!(empty.part(), Some((1, 4)));
    }
}
