//! `cv load`: brings what only the bucket has into the workers' cache.

use bytes::Bytes;
use cavern_net::master::Stubs;
use cavern_proto::master::SubmitLoadRequest;
use clap::Args;

use super::job::BeginArgs;
use crate::error::CliError;

#[derive(Args)]
#[command(after_help = "Examples:
  cv load /train                 start warming; prints the job's number
  cv load /train --watch         and show its progress until it ends
  cv job wait 7                  follow it later; see also cv job --help

--watch draws a bar on a terminal, prints lines elsewhere and one JSON object per line with --json; while no master \
answers it waits. Interrupting it cancels the job. Exit code 1 when the job ended with errors or was cancelled.

In cache-mode, what the listings know is loaded: those older than the mount's --metadata-ttl are made anew first, and \
`cv refresh` makes them anew at any time. In fs-mode, what only the bucket has is loaded: files of an existing prefix, \
and those whose blocks were dropped (`cv fs free`); the rest is at workers, and counts as done.")]
pub struct LoadArgs {
    #[command(flatten)]
    job: BeginArgs,
}

impl LoadArgs {
    pub async fn run(self) -> Result<(), CliError> {
        let submit = async |mut master: Stubs, path: String, request_id: Bytes| {
            master.cluster.submit_load(SubmitLoadRequest { path, request_id }).await
        };
        self.job.run(submit).await
    }
}
