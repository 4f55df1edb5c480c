//! `cv export`: brings what the bucket of an fs-mode mount lacks to the bucket now.

use bytes::Bytes;
use cavern_net::master::Stubs;
use cavern_proto::master::SubmitExportRequest;
use clap::Args;

use super::job::BeginArgs;
use crate::error::CliError;

#[derive(Args)]
#[command(after_help = "Examples:
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
answers it waits. Interrupting it cancels the job. Exit code 1 when the job ended with errors or was cancelled.")]
pub struct ExportArgs {
    #[command(flatten)]
    job: BeginArgs,
}

impl ExportArgs {
    pub async fn run(self) -> Result<(), CliError> {
        let submit = async |mut master: Stubs, path: String, request_id: Bytes| {
            master.cluster.submit_export(SubmitExportRequest { path, request_id }).await
        };
        self.job.run(submit).await
    }
}
