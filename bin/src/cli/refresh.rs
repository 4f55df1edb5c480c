//! `cv refresh`.

use cavern_proto::master::{RefreshProgress, RefreshRequest};
use clap::Args;
use serde::Serialize;

use super::connect::ClusterArgs;
use crate::console;
use crate::error::CliError;

#[derive(Args)]
#[command(after_help = "Examples:
  cv refresh /train                     a directory and all below it
  cv refresh /train/part-1 --shallow    one directory alone

Returns when every client of the cluster has taken in what changed: \
from then on no open sees an old version.")]
pub struct RefreshArgs {
    /// Namespace path.
    #[arg(value_name = "PATH")]
    path: String,
    /// This directory only, not those below it.
    #[arg(long)]
    shallow: bool,
    /// The result as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

#[derive(Serialize)]
struct Refreshed {
    directories: u64,
    entries: u64,
    added: u64,
    changed: u64,
    removed: u64,
    hidden: u64,
}

impl RefreshArgs {
    pub async fn run(self) -> Result<(), CliError> {
        let mut connection = self.cluster.connect().await?;
        let request = RefreshRequest { path: self.path.clone(), recursive: !self.shallow };
        let mut progress = connection.namespace.refresh(request).await?.into_inner();
        let mut last = RefreshProgress::default();
        while let Some(message) = progress.message().await? {
            last = message;
        }
        if !last.done {
            return Err(CliError::Failed(format!("the master gave up refreshing {}: see its log", self.path)));
        }
        let RefreshProgress { directories, entries, added, changed, removed, hidden, .. } = last;
        if self.json {
            return console::json(&Refreshed { directories, entries, added, changed, removed, hidden });
        }
        let hidden = if hidden == 0 { String::new() } else { format!(", {hidden} keys hidden") };
        console::line(format_args!(
            "{}: {directories} directories, {entries} entries: {added} added, {changed} changed, {removed} removed{hidden}",
            self.path
        ))
    }
}
