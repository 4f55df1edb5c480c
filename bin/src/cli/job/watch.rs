//! Follows a job until it ends, also over the restart of a master.

use std::time::Duration;

use cavern_net::MasterChannel;
use cavern_net::master::Stubs;
use cavern_proto::master::{GetJobRequest, Job};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::Response;

use super::view::JobView;
use crate::cli::connect::ask_patiently;
use crate::console::{self, Progress};
use crate::error::CliError;

/// How often a watched job is asked for, and how often a line reports it where no bar is drawn.
const POLL_PERIOD: Duration = Duration::from_millis(200);
const LINE_PERIOD: Duration = Duration::from_secs(2);
/// How long a master may take to answer one question; one that is only slow is asked again.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// What an interrupt does beside ending the watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interrupt {
    CancelsJob,
    LeavesJob,
}

pub struct Watch {
    pub masters: MasterChannel,
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
        let mut progress = if self.json { Progress::hidden() } else { Progress::new()? };
        let stop = self.stop.clone();
        let mut said = Instant::now();
        while job.is_running() {
            progress.show(job.part(), job.progress())?;
            if progress.is_hidden() && said.elapsed() >= LINE_PERIOD {
                said = Instant::now();
                self.say(&job)?;
            }
            let next = async {
                tokio::time::sleep(POLL_PERIOD).await;
                self.ask(job.id).await
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
        self.say(&job)?;
        job.outcome()
    }

    fn say(&self, job: &JobView) -> Result<(), CliError> {
        if self.json { console::json_line(job) } else { console::line(job.line()) }
    }

    /// The job as it stands.
    async fn ask(&self, id: u64) -> Result<Job, CliError> {
        let request = GetJobRequest { id, ..GetJobRequest::default() };
        let ask = async |mut master: Stubs| master.cluster.get_job(request.clone()).await;
        let job = ask_patiently(&self.masters, ANSWER_TIMEOUT, "the job", ask).await;
        job.map(Response::into_inner).map_err(|error| match error {
            CliError::Unreachable(cause) => CliError::Unreachable(format!("{cause}: `cv job wait {id}`")),
            error => error,
        })
    }

    async fn interrupted(self, job: JobView) -> Result<(), CliError> {
        let id = job.id;
        if self.interrupt == Interrupt::LeavesJob {
            return Err(CliError::Failed(format!("interrupted; job {id} goes on: `cv job cancel {id}` would end it")));
        }
        let request = GetJobRequest { id, ..GetJobRequest::default() };
        let cancel = async |mut master: Stubs| master.cluster.cancel_job(request.clone()).await;
        let cause = match tokio::time::timeout(ANSWER_TIMEOUT, self.masters.ask(cancel)).await {
            Ok(Ok(job)) => {
                let job = JobView::from(job.into_inner());
                self.say(&job)?;
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
