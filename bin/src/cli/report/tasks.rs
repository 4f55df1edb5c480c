//! `cv report --tasks`: what the master that leads does in the background, and how that fares.

use cavern_proto::master::{TaskState, TaskStatus};
use serde::Serialize;

use crate::console::{self, or_dash};
use crate::error::CliError;

/// A task as it is shown. Its runs are those since that master leads.
#[derive(Debug, Serialize)]
pub struct TaskView {
    name: String,
    /// `running`, `idle`, or `backing off` after a failure.
    state: &'static str,
    runs: u64,
    errors: u64,
    /// This and the next: `null` before the first run has ended.
    last_run_age_ms: Option<u64>,
    last_run_ms: Option<u64>,
    /// This and the next: `null` where no run has failed.
    last_error: Option<String>,
    last_error_age_ms: Option<u64>,
}

impl From<TaskStatus> for TaskView {
    fn from(status: TaskStatus) -> Self {
        let state = match status.state() {
            TaskState::Running => "running",
            TaskState::Idle => "idle",
            TaskState::BackingOff => "backing off",
            TaskState::Unspecified => "unknown",
        };
        let TaskStatus { name, runs, errors, last_run_age_ms, last_run_ms, last_error, last_error_age_ms, .. } = status;
        let (has_run, has_failed) = (runs > 0, !last_error.is_empty());
        Self {
            name,
            state,
            runs,
            errors,
            last_run_age_ms: has_run.then_some(last_run_age_ms),
            last_run_ms: has_run.then_some(last_run_ms),
            last_error: has_failed.then_some(last_error),
            last_error_age_ms: has_failed.then_some(last_error_age_ms),
        }
    }
}

impl TaskView {
    /// Errors have words of buckets and workers, and stay on the line.
    fn row(&self) -> [String; 6] {
        let ago = |age_ms: u64| format!("{:.1} s ago", age_ms as f64 / 1000.0);
        let last_run = self.last_run_age_ms.zip(self.last_run_ms);
        let last_run = or_dash(last_run.map(|(age_ms, took_ms)| format!("{}, in {took_ms} ms", ago(age_ms))));
        let last_error = self.last_error_age_ms.zip(self.last_error.as_deref());
        let last_error = or_dash(last_error.map(|(age, error)| format!("{}: {}", ago(age), console::escaped(error))));
        let (runs, errors) = (self.runs.to_string(), self.errors.to_string());
        [console::escaped(&self.name), self.state.to_owned(), runs, last_run, errors, last_error]
    }
}

pub fn print(tasks: &[TaskView]) -> Result<(), CliError> {
    console::table(["TASK", "STATE", "RUNS", "LAST RUN", "ERRORS", "LAST ERROR"], tasks.iter().map(TaskView::row))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_is_one_line_whatever_its_error_says() {
        let status = TaskStatus {
            name: "index /a\nb".into(),
            state: TaskState::BackingOff as i32,
            runs: 7,
            errors: 2,
            last_run_age_ms: 1500,
            last_run_ms: 20,
            last_error: "no\n\u{1b}[2J answer".into(),
            last_error_age_ms: 61_000,
        };
        let expected =
            [r"index /a\nb", "backing off", "7", "1.5 s ago, in 20 ms", "2", r"61.0 s ago: no\n\u{1b}[2J answer"];
        assert_eq!(TaskView::from(status).row(), expected);
        let new =
            TaskView::from(TaskStatus { name: "tick".into(), state: TaskState::Idle as i32, ..TaskStatus::default() });
        assert_eq!(new.row(), ["tick", "idle", "0", "–", "0", "–"]);
        assert_eq!((new.last_run_ms, new.last_error), (None, None));
    }
}
