//! `cv load`: warming jobs.

mod view;
mod watch;

use cavern_conf::process;
use cavern_proto::master::{GetJobRequest, ListJobsRequest, SubmitLoadRequest};
use clap::Args;

pub use self::view::JobView;
use self::watch::{Interrupt, Watch};
use super::connect::ClusterArgs;
use crate::console;
use crate::error::CliError;

#[derive(Args)]
#[command(after_help = "Examples:
  cv load /train                 start warming; prints the job's number
  cv load /train --watch         and show its progress until it ends
  cv load --status 7             one job
  cv load --cancel 7
  cv load --list                 all jobs

--watch draws a bar on a terminal, prints lines elsewhere and one JSON object per line with --json; while no master
answers it waits. Interrupting `cv load PATH --watch` cancels the job, interrupting `cv load --status ID --watch` does
not. Exit code 1 when a job has ended with errors or was cancelled.

What the listings know is loaded: those older than the mount's --metadata-ttl are made anew first, and `cv refresh`
makes them anew at any time.")]
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

impl LoadArgs {
    pub async fn run(self) -> Result<(), CliError> {
        // From before there is a job: an interrupt that comes early is not lost.
        let stop = self.watch.then(process::shutdown_on_signals);
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
        if let Some(stop) = stop {
            let interrupt = if self.status.is_some() { Interrupt::LeavesJob } else { Interrupt::CancelsJob };
            return Watch { cluster: self.cluster, connection, interrupt, json: self.json, stop }.run(job).await;
        }
        if self.json {
            console::json(&job)?
        } else {
            console::line(job.line())?
        }
        if self.status.is_some() { job.outcome() } else { Ok(()) }
    }
}
