//! What the commands that begin a job have in common.

use cavern_conf::process;
use cavern_net::master::Stubs;
use cavern_proto::master::Job;
use clap::Args;
use tonic::{Response, Status};

use super::view::JobView;
use super::watch::{Interrupt, Watch};
use crate::cli::connect::ClusterArgs;
use crate::error::CliError;

#[derive(Args)]
pub struct BeginArgs {
    /// File or directory of the namespace.
    #[arg(value_name = "PATH")]
    path: String,
    /// Show progress until the job ends.
    #[arg(long)]
    watch: bool,
    /// The result as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

impl BeginArgs {
    /// Begins the job that `submit` asks for, for the path.
    pub async fn run(
        self,
        submit: impl AsyncFnOnce(&mut Stubs, String) -> Result<Response<Job>, Status>,
    ) -> Result<(), CliError> {
        let Self { path, watch, json, cluster } = self;
        begin(cluster, watch, json, async |connection: &mut Stubs| submit(connection, path).await).await
    }
}

/// Begins a job, and follows it if that is wanted.
pub async fn begin(
    cluster: ClusterArgs,
    watch: bool,
    json: bool,
    submit: impl AsyncFnOnce(&mut Stubs) -> Result<Response<Job>, Status>,
) -> Result<(), CliError> {
    // From before there is a job: an interrupt that comes early is not lost.
    let stop = watch.then(process::shutdown_on_signals);
    let mut connection = cluster.connect().await?;
    let job = JobView::from(submit(&mut connection).await?.into_inner());
    match stop {
        Some(stop) => Watch { cluster, connection, interrupt: Interrupt::CancelsJob, json, stop }.run(job).await,
        None => job.print(json),
    }
}
