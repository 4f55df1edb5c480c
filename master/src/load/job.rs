//! The progress of one job.

use cavern_proto::master::{Job, JobState};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

/// A job that runs.
pub struct RunningJob {
    pub id: u64,
    pub cancel: CancellationToken,
    /// Cancelled when the job has ended and the log says so.
    pub recorded: CancellationToken,
    job: Mutex<Job>,
}

impl RunningJob {
    pub fn new(job: Job, cancel: CancellationToken) -> Self {
        Self { id: job.id, cancel, recorded: CancellationToken::new(), job: Mutex::new(job) }
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
