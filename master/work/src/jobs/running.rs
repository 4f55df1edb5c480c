//! The progress of one job.

use cavern_proto::master::{Job, JobKind, JobState};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::persist::Backlog;

/// A job that runs.
pub struct RunningJob {
    pub id: u64,
    pub kind: JobKind,
    pub cancel: CancellationToken,
    /// Cancelled when the job has ended and the log says so.
    pub recorded: CancellationToken,
    job: Mutex<Job>,
}

impl RunningJob {
    pub fn new(job: Job, cancel: CancellationToken) -> Self {
        Self { id: job.id, kind: job.kind(), cancel, recorded: CancellationToken::new(), job: Mutex::new(job) }
    }

    /// As it stands now.
    pub fn snapshot(&self) -> Job {
        self.job.lock().clone()
    }

    pub fn add_file(&self, bytes: u64) {
        let mut job = self.job.lock();
        job.files_total += 1;
        job.bytes_total += bytes;
    }

    pub fn file_done(&self) {
        self.job.lock().files_done += 1;
    }

    pub fn bytes_done(&self, bytes: u64, fetched: u64) {
        let mut job = self.job.lock();
        job.bytes_done += bytes;
        job.bytes_fetched += fetched;
    }

    pub fn failed(&self, error: &str) {
        let mut job = self.job.lock();
        job.errors += 1;
        error.clone_into(&mut job.last_error);
    }

    pub fn walked(&self) {
        self.job.lock().walked = true;
    }

    /// So much is left of what the job began with.
    pub fn left(&self, left: &Backlog) {
        let mut job = self.job.lock();
        (job.files_total, job.files_done) = advanced(job.files_total, job.files_done, left.items());
        (job.bytes_total, job.bytes_done) = advanced(job.bytes_total, job.bytes_done, left.bytes);
        job.errors = left.given_up;
        left.last_error().clone_into(&mut job.last_error);
    }

    /// Ends the job: cancelled, failed if anything failed, or done.
    pub fn end(&self, now_ns: i64) -> Job {
        let mut job = self.job.lock();
        let state = match (self.cancel.is_cancelled(), job.errors) {
            (true, _) => JobState::Cancelled,
            (false, 0) => JobState::Done,
            (false, _) => JobState::Failed,
        };
        job.state = state as i32;
        job.ended_ns = now_ns;
        job.clone()
    }
}

/// Total and done, by what is left. What is left no more is done; what has come on top was not known before: a
/// directory that was renamed becomes all that is in it.
fn advanced(total: u64, done: u64, left: u64) -> (u64, u64) {
    let before = total.saturating_sub(done);
    if left <= before { (total, total - left) } else { (done + left, done) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_no_more_is_done_and_what_comes_on_top_makes_the_total_grow() {
        let mut progress = (10, 0);
        let expected = [(10, (10, 0)), (7, (10, 3)), (7, (10, 3)), (9, (12, 3)), (0, (12, 12)), (1, (13, 12))];
        for (left, wanted) in expected {
            progress = advanced(progress.0, progress.1, left);
            assert_eq!(progress, wanted, "{left} left");
        }
    }
}
