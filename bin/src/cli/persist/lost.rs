//! `cv persist retry` and `cv persist drop`: files that have lost blocks.

use cavern_conf::counted;
use cavern_net::master::Stubs;
use cavern_proto::master::{LostAction, ResolveLostReply, ResolveLostRequest};
use clap::Args;
use serde::Serialize;

use crate::cli::connect::ResultArgs;
use crate::console;
use crate::error::CliError;

#[derive(Args)]
pub struct LostArgs {
    /// File or directory of the namespace.
    #[arg(value_name = "PATH")]
    path: String,
    #[command(flatten)]
    result: ResultArgs,
}

#[derive(Debug, Serialize)]
struct ResolvedView {
    path: String,
    files: u64,
    still_lost: u64,
    reverted: u64,
    zeroed: u64,
    blocks: u64,
    last_error: String,
}

impl LostArgs {
    async fn resolve(&self, action: LostAction) -> Result<ResolvedView, CliError> {
        let path = self.path.clone();
        let request = ResolveLostRequest { path: path.clone(), action: action.into() };
        let ask = async |mut master: Stubs| master.cluster.resolve_lost(request.clone()).await;
        let reply = self.result.cluster.call(ask).await?;
        let ResolveLostReply { files, still_lost, reverted, zeroed, blocks, last_error } = reply;
        Ok(ResolvedView { path, files, still_lost, reverted, zeroed, blocks, last_error })
    }

    pub async fn retry(self) -> Result<(), CliError> {
        let view = self.resolve(LostAction::Retry).await?;
        if self.result.json {
            console::json(&view)?;
        }
        if view.still_lost > 0 {
            return Err(CliError::Failed(format!(
                "{}: {} still with lost blocks; {}",
                view.path,
                counted(view.still_lost, "file"),
                view.last_error
            )));
        }
        if self.result.json {
            return Ok(());
        }
        let error = match view.last_error.is_empty() {
            true => String::new(),
            false => format!("; the last error: {}", view.last_error),
        };
        console::line(format_args!("{}: {} tried once more{error}", view.path, counted(view.files, "file")))
    }

    pub async fn give_up(self) -> Result<(), CliError> {
        let view = self.resolve(LostAction::Drop).await?;
        self.result.show(&view, |view| {
            let blocks = counted(view.blocks, "lost block");
            let (reverted, zeroed) = (counted(view.reverted, "file"), counted(view.zeroed, "file"));
            console::line(format_args!(
                "{}: {blocks} given up; {reverted} went back to the version of the bucket, in {zeroed} they are zeros",
                view.path
            ))
        })
    }
}
