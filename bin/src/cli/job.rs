//! `cv job`: long work that other commands began.

mod begin;
mod view;
mod watch;

use cavern_conf::process;
use cavern_net::MasterChannel;
use cavern_net::master::Stubs;
use cavern_proto::master::{GetJobRequest, ListJobsRequest};
use clap::{Args, Subcommand};

pub use self::begin::{BeginArgs, EXPORT_HELP, LOAD_HELP};
pub use self::view::JobView;
use self::watch::{Interrupt, Watch};
use super::connect::{ClusterArgs, ResultArgs};
use super::follow::Follower;
use crate::console;
use crate::error::CliError;

#[derive(Subcommand)]
pub enum JobCommand {
    /// List the jobs that run, and the last hundred that have ended.
    List(ListArgs),
    /// Show a job.
    #[command(after_help = "Examples:
  cv job status 7
  cv job status 7 --json

Exit code 1 when the job has ended with errors or was cancelled.")]
    Status(JobArgs),
    /// Show the progress of a job until it has ended.
    #[command(after_help = "Examples:
  cv job wait 7

Draws a bar on a terminal, prints lines elsewhere and one JSON object per line with --json; while no master answers it \
waits. Interrupting it leaves the job alone. Exit code 1 when the job ended with errors or was cancelled.")]
    Wait(JobArgs),
    /// Stop a job.
    #[command(after_help = "Examples:
  cv job cancel 7

What was done so far stays. A cancelled export gives up its hurry: the bucket follows at its usual pace. A job that \
has ended stays as it is.")]
    Cancel(JobArgs),
    /// Begin a job anew that failed or was cancelled.
    Retry(RetryArgs),
}

impl JobCommand {
    pub async fn run(self) -> Result<(), CliError> {
        match self {
            Self::List(args) => args.run().await,
            Self::Status(args) => args.status().await,
            Self::Wait(args) => args.wait().await,
            Self::Cancel(args) => args.cancel().await,
            Self::Retry(args) => args.run().await,
        }
    }
}

#[derive(Args)]
#[command(after_help = "Examples:
  cv job list
  cv job list --json | jq '.[] | select(.state == \"failed\")'")]
pub struct ListArgs {
    /// Results as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

#[derive(Args)]
#[command(after_help = "Examples:
  cv job retry 7
  cv job retry 7 --watch

Begins a new job of the same kind for the same path, and prints its number; the old one stays as it ended. What the \
old one did is not done again. Interrupting it with --watch cancels the new job.")]
pub struct RetryArgs {
    /// Show progress until the job ends.
    #[arg(long)]
    watch: bool,
    #[command(flatten)]
    job: JobArgs,
}

#[derive(Args)]
pub struct JobArgs {
    /// Number of the job.
    #[arg(value_name = "ID")]
    id: u64,
    #[command(flatten)]
    result: ResultArgs,
}

impl ListArgs {
    async fn run(self) -> Result<(), CliError> {
        let list = async |mut master: Stubs| master.cluster.list_jobs(ListJobsRequest {}).await;
        let jobs: Vec<_> = self.cluster.call(list).await?.jobs.into_iter().map(JobView::from).collect();
        match (self.json, jobs.is_empty()) {
            (true, _) => console::json(&jobs),
            (_, true) => console::line("no job has been begun: see `cv load` and `cv export`"),
            _ => JobView::print_table(&jobs),
        }
    }
}

impl JobArgs {
    async fn status(self) -> Result<(), CliError> {
        let (job, _) = self.get().await?;
        job.print(self.result.json)?;
        job.outcome()
    }

    async fn wait(self) -> Result<(), CliError> {
        let stop = process::shutdown_on_signals();
        let (job, masters) = self.get().await?;
        let follower = Follower { masters, what: "the job" };
        Watch { follower, interrupt: Interrupt::LeavesJob, json: self.result.json, stop }.run(job).await
    }

    async fn cancel(self) -> Result<(), CliError> {
        let request = GetJobRequest { id: self.id, ..GetJobRequest::default() };
        let cancel = async |mut master: Stubs| master.cluster.cancel_job(request.clone()).await;
        JobView::from(self.result.cluster.call(cancel).await?).print(self.result.json)
    }

    /// The job as it stands, and the way to the masters.
    async fn get(&self) -> Result<(JobView, MasterChannel), CliError> {
        let masters = self.result.cluster.masters().await?;
        let request = GetJobRequest { id: self.id, ..GetJobRequest::default() };
        let job = masters.ask_unary(async |mut master: Stubs| master.cluster.get_job(request.clone()).await).await?;
        Ok((job.into(), masters))
    }
}

impl RetryArgs {
    async fn run(self) -> Result<(), CliError> {
        let JobArgs { id, result } = self.job;
        let retry =
            async |mut master: Stubs, request_id| master.cluster.retry_job(GetJobRequest { id, request_id }).await;
        begin::begin(result, self.watch, retry).await
    }
}
