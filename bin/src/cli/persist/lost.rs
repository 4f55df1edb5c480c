//! `cv persist retry` and `cv persist drop`: files that have lost blocks.

use cavern_conf::counted;
use cavern_net::master::Stubs;
use cavern_proto::master::{LostAction, ResolveLostReply, ResolveLostRequest};
use clap::Args;
use serde::Serialize;

use crate::cli::connect::ClusterArgs;
use crate::console;
use crate::error::CliError;

#[derive(Args)]
pub struct LostArgs {
    /// File or directory of the namespace.
    #[arg(value_name = "PATH")]
    path: String,
    /// The result as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
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

impl ResolvedView {
    async fn of(path: String, action: LostAction, cluster: &ClusterArgs) -> Result<Self, CliError> {
        let request = ResolveLostRequest { path: path.clone(), action: action.into() };
        let ask = async |mut master: Stubs| master.cluster.resolve_lost(request.clone()).await;
        let reply = cluster.masters().await?.ask(ask).await?.into_inner();
        let ResolveLostReply { files, still_lost, reverted, zeroed, blocks, last_error } = reply;
        Ok(Self { path, files, still_lost, reverted, zeroed, blocks, last_error })
    }
}

impl LostArgs {
    pub async fn retry(self) -> Result<(), CliError> {
        let view = ResolvedView::of(self.path, LostAction::Retry, &self.cluster).await?;
        if self.json {
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
        if self.json {
            return Ok(());
        }
        let error = match view.last_error.is_empty() {
            true => String::new(),
            false => format!("; the last error: {}", view.last_error),
        };
        console::line(format_args!("{}: {} tried once more{error}", view.path, counted(view.files, "file")))
    }

    pub async fn give_up(self) -> Result<(), CliError> {
        let view = ResolvedView::of(self.path, LostAction::Drop, &self.cluster).await?;
        if self.json {
            return console::json(&view);
        }
        console::line(format_args!(
            "{}: {} given up; {} went back to the version of the bucket, in {} they are zeros",
            view.path,
            counted(view.blocks, "lost block"),
            counted(view.reverted, "file"),
            counted(view.zeroed, "file")
        ))
    }
}
