//! What the commands that begin a job have in common.

use bytes::Bytes;
use cavern_conf::process;
use cavern_net::master::Stubs;
use cavern_proto::master::Job;
use clap::Args;
use tonic::{Response, Status};

use super::view::JobView;
use super::watch::{Interrupt, Watch};
use crate::cli::connect::ResultArgs;
use crate::cli::follow::Follower;
use crate::error::CliError;
use crate::group::new_request_id;

#[derive(Args)]
pub struct BeginArgs {
    /// File or directory of the namespace.
    #[arg(value_name = "PATH")]
    path: String,
    /// Show progress until the job ends.
    #[arg(long)]
    watch: bool,
    #[command(flatten)]
    result: ResultArgs,
}

impl BeginArgs {
    /// Begins the job that `submit` asks for, for the path.
    pub async fn run(
        self,
        submit: impl AsyncFn(Stubs, String, Bytes) -> Result<Response<Job>, Status>,
    ) -> Result<(), CliError> {
        let Self { path, watch, result } = self;
        let submit = async |master: Stubs, id: Bytes| submit(master, path.clone(), id).await;
        begin(result, watch, submit).await
    }
}

/// Begins a job, once, and follows it if that is wanted.
pub async fn begin(
    ResultArgs { json, cluster }: ResultArgs,
    watch: bool,
    submit: impl AsyncFn(Stubs, Bytes) -> Result<Response<Job>, Status>,
) -> Result<(), CliError> {
    // From before there is a job: an interrupt that comes early is not lost.
    let stop = watch.then(process::shutdown_on_signals);
    let (mut leader, id) = (cluster.leader().await?, new_request_id());
    let job = JobView::from(leader.call(async |master: Stubs| submit(master, id.clone()).await).await?);
    let follower = Follower { cluster, connection: leader.into_stubs(), what: "the job" };
    match stop {
        Some(stop) => Watch { follower, interrupt: Interrupt::CancelsJob, json, stop }.run(job).await,
        None => job.print(json),
    }
}
