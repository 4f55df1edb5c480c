//! `cv fs rm` and `cv fs mv`.

use std::sync::Arc;

use cavern_client::{Client, Node};
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{RemoveName, RenameMode, RenameName};
use clap::Args;
use serde::Serialize;

use super::change::{Changes, NameInDirectory, make};
use super::list::join;
use super::walk::{each_path, with_client};
use crate::cli::connect::{ClusterArgs, ResultArgs};
use crate::error::CliError;

/// Entries listed at a time.
const PAGE: usize = 1000;

#[derive(Args)]
pub struct RmArgs {
    /// Absolute paths in a mount that can be written to.
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<String>,
    /// Directories with all that is in them.
    #[arg(short = 'r', short_alias = 'R', long)]
    recursive: bool,
    /// Without an error for what is not there.
    #[arg(short = 'f', long)]
    force: bool,
    #[command(flatten)]
    result: ResultArgs,
}

#[derive(Args)]
pub struct MvArgs {
    /// Absolute paths, and last the new one: a new name, or a directory to move into.
    #[arg(value_name = "PATH", required = true, num_args = 2..)]
    paths: Vec<String>,
    /// Replace nothing: what is there already is an error.
    #[arg(short = 'n', long, conflicts_with = "exchange")]
    no_clobber: bool,
    /// Exchange two names in one step.
    #[arg(long)]
    exchange: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

#[derive(Serialize)]
struct Removed {
    /// Names: files, directories, links.
    removed: u64,
}

impl RmArgs {
    pub async fn run(self) -> Result<(), CliError> {
        let mut removed = 0;
        each_path(&self.result.cluster, &self.paths, async |client, path| {
            removed += self.remove(client, path).await?;
            Ok(())
        })
        .await?;
        self.result.show(&Removed { removed }, |_| Ok(()))
    }

    async fn remove(&self, client: &Client, path: &str) -> Result<u64, CliError> {
        let found = async {
            let place = NameInDirectory::find(client, path).await?;
            let node = place.existing(client).await?;
            Ok((place, node))
        };
        let (place, node) = match found.await {
            Err(CliError::NotFound(_)) if self.force => return Ok(0),
            found => found?,
        };
        if node.is_directory() && !self.recursive {
            return Err(CliError::Failed(format!(
                "{} is a directory: use -r to remove it and all below it",
                place.path
            )));
        }
        let below = if node.is_directory() { empty(client, &place.path, &node).await? } else { 0 };
        make(client, &place.path, name_gone(&place.directory, &node)).await?;
        Ok(below + 1)
    }
}

fn name_gone(directory: &Node, node: &Node) -> Change {
    Change::Remove(RemoveName { parent: directory.inode, name: node.name_bytes(), directory: node.is_directory() })
}

/// Removes all that is below a directory, what lies deepest first; how many names that were.
async fn empty(client: &Client, path: &str, directory: &Arc<Node>) -> Result<u64, CliError> {
    let mut removed = 0;
    // A directory is seen twice: when its files are removed, and when nothing below it is left.
    let mut pending: Vec<(String, Arc<Node>, Option<Arc<Node>>)> = vec![(path.to_owned(), directory.clone(), None)];
    while let Some((path, node, above)) = pending.pop() {
        if let Some(above) = above {
            make(client, &path, name_gone(&above, &node)).await?;
            removed += 1;
            continue;
        }
        let (mut changes, mut after) = (Changes::new(client), Vec::new());
        loop {
            let page = client.metadata().read_dir(node.inode, &after, PAGE).await?;
            for child in &page.entries {
                let path = join(&path, &child.name);
                if child.is_directory() {
                    pending.push((path.clone(), child.clone(), Some(node.clone())));
                    pending.push((path, child.clone(), None));
                } else {
                    changes.begin(path, name_gone(&node, child)).await?;
                }
            }
            changes.finish().await?;
            match page.entries.last() {
                Some(last) if !page.end => after = last.name.to_vec(),
                _ => break,
            }
        }
        removed += changes.count;
    }
    Ok(removed)
}

impl MvArgs {
    pub async fn run(self) -> Result<(), CliError> {
        let (target, sources) =
            self.paths.split_last().ok_or_else(|| CliError::Usage("say what to move".to_owned()))?;
        if self.exchange && sources.len() != 1 {
            return Err(CliError::Usage("two names are exchanged, neither more nor fewer".to_owned()));
        }
        with_client(&self.cluster, async |client| {
            if sources.len() > 1 && !client.metadata().resolve(target).await?.is_directory() {
                return Err(CliError::Usage(format!("{target} is no directory: several files cannot become one")));
            }
            for source in sources {
                self.rename(client, source, target).await?;
            }
            Ok(())
        })
        .await
    }

    async fn rename(&self, client: &Client, source: &str, target: &str) -> Result<(), CliError> {
        let from = NameInDirectory::find(client, source).await?;
        let to = match self.exchange {
            true => NameInDirectory::find(client, target).await?,
            false => NameInDirectory::target(client, target, Some(&from.name)).await?,
        };
        let mode = match (self.no_clobber, self.exchange) {
            (true, _) => RenameMode::NoReplace,
            (_, true) => RenameMode::Exchange,
            _ => RenameMode::Replace,
        };
        let rename = RenameName {
            parent: from.directory.inode,
            name: from.name,
            new_parent: to.directory.inode,
            new_name: to.name,
            mode: mode.into(),
        };
        make(client, &format!("{} → {}", from.path, to.path), Change::Rename(rename)).await.map(drop)
    }
}
