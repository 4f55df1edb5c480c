//! `cv load` brings what only the bucket has into the workers' cache. `cv export` brings what the bucket of an fs-mode
//! mount lacks to the bucket now.

use bytes::Bytes;
use cavern_conf::process;
use cavern_net::master::Stubs;
use cavern_proto::master::{Job, SubmitExportRequest, SubmitLoadRequest};
use clap::Args;
use tonic::{Response, Status};

use super::view::JobView;
use super::watch::{Interrupt, Watch};
use crate::cli::connect::{ResultArgs, new_request_id};
use crate::cli::follow::Follower;
use crate::error::CliError;

/// What the help of `cv load` ends with.
pub const LOAD_HELP: &str = "Examples:
  cv load /train                 start warming; prints the job's number
  cv load /train --watch         and show its progress until it ends
  cv job wait 7                  follow it later; see also cv job --help

--watch draws a bar on a terminal, prints lines elsewhere and one JSON object per line with --json; while no master \
answers it waits. Interrupting it cancels the job. Exit code 1 when the job ended with errors or was cancelled.

In cache-mode, what the listings know is loaded: those older than the mount's --metadata-ttl are made anew first, and \
`cv refresh` makes them anew at any time. In fs-mode, what only the bucket has is loaded: files of an existing prefix, \
and those whose blocks were dropped (`cv fs free`); the rest is at workers, and counts as done.";
/// What the help of `cv export` ends with.
pub const EXPORT_HELP: &str = "Examples:
  cv export /work/run1           start; prints the job's number
  cv export /work/run1 --watch   and show its progress until that is done
  cv job wait 7                  follow it later; see also cv job --help

The bucket follows an fs-mode mount by itself, when files have been at rest for master.persist_delay. An export does \
not wait for that, and tries again at once what has failed before. It is of the changes that were made before it \
began, not of those that come meanwhile. Files, directories, links and objects that are to be deleted count as files.

It fails when all that is left was refused five times (access denied, a name that cannot be a key), or has failed \
otherwise for a minute. The bucket follows nevertheless as soon as it can; `cv job retry` begins another export. \
Cancelling gives up the hurry, nothing else.

--watch draws a bar on a terminal, prints lines elsewhere and one JSON object per line with --json; while no master \
answers it waits. Interrupting it cancels the job. Exit code 1 when the job ended with errors or was cancelled.";

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
    pub async fn load(self) -> Result<(), CliError> {
        let Self { path, watch, result } = self;
        let load = async |mut master: Stubs, request_id| {
            master.cluster.submit_load(SubmitLoadRequest { path: path.clone(), request_id }).await
        };
        begin(result, watch, load).await
    }

    pub async fn export(self) -> Result<(), CliError> {
        let Self { path, watch, result } = self;
        let export = async |mut master: Stubs, request_id| {
            master.cluster.submit_export(SubmitExportRequest { path: path.clone(), request_id }).await
        };
        begin(result, watch, export).await
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
    let (masters, id) = (cluster.masters().await?, new_request_id());
    let job = JobView::from(masters.ask_unary(async |master: Stubs| submit(master, id.clone()).await).await?);
    let follower = Follower { masters, what: "the job" };
    match stop {
        Some(stop) => Watch { follower, interrupt: Interrupt::CancelsJob, json, stop }.run(job).await,
        None => job.print(json),
    }
}
