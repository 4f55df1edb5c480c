//! Follows a job until it ends, also over the restart of a master.

use cavern_net::master::Stubs;
use cavern_proto::master::GetJobRequest;
use tokio_util::sync::CancellationToken;

use super::view::JobView;
use crate::cli::follow::{ANSWER_TIMEOUT, Follower, LINE_PERIOD, POLL_PERIOD};
use crate::console::Progress;
use crate::error::CliError;

/// What an interrupt does beside ending the watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interrupt {
    CancelsJob,
    LeavesJob,
}

pub struct Watch {
    pub follower: Follower,
    pub interrupt: Interrupt,
    pub json: bool,
    /// Cancelled by the first interrupt.
    pub stop: CancellationToken,
}

impl Watch {
    /// Shows the job until it has ended.
    ///
    /// # Errors
    /// The job failed or was cancelled, the watch was interrupted, or no master answered for long.
    pub async fn run(self, mut job: JobView) -> Result<(), CliError> {
        let mut progress = Progress::new_unless(self.json)?;
        let stop = self.stop.clone();
        let request = GetJobRequest { id: job.id, ..GetJobRequest::default() };
        let goes_on = format!("goes on with one: `cv job wait {}`", job.id);
        while job.is_running() {
            progress.show_or_say(job.part(), job.progress(), LINE_PERIOD, || job.say(self.json))?;
            let next = async {
                tokio::time::sleep(POLL_PERIOD).await;
                let ask = async |mut master: Stubs| master.cluster.get_job(request.clone()).await;
                self.follower.ask(ANSWER_TIMEOUT, &goes_on, ask).await
            };
            job = tokio::select! {
                job = next => job?.into(),
                () = stop.cancelled() => {
                    drop(progress);
                    return self.interrupted(job).await;
                }
            };
        }
        drop(progress);
        job.say(self.json)?;
        job.outcome()
    }

    async fn interrupted(self, job: JobView) -> Result<(), CliError> {
        let id = job.id;
        if self.interrupt == Interrupt::LeavesJob {
            return Err(CliError::Failed(format!("interrupted; job {id} goes on: `cv job cancel {id}` would end it")));
        }
        let request = GetJobRequest { id, ..GetJobRequest::default() };
        let cancel = async |mut master: Stubs| master.cluster.cancel_job(request.clone()).await;
        let cause = match tokio::time::timeout(ANSWER_TIMEOUT, self.follower.masters.ask_unary(cancel)).await {
            Ok(Ok(job)) => {
                let job = JobView::from(job);
                job.say(self.json)?;
                return job.outcome();
            }
            Ok(Err(error)) => CliError::from(error).to_string(),
            Err(_) => format!("no answer within {} s", ANSWER_TIMEOUT.as_secs()),
        };
        Err(CliError::Unreachable(format!(
            "interrupted, but job {id} is not cancelled ({cause}): run `cv job cancel {id}` when a master answers"
        )))
    }
}
