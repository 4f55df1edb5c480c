//! A client for one command, and walks through the namespace with it.

use std::sync::Arc;

use cavern_client::{Client, ClientError, NoSink, Node};
use cavern_proto::COMMAND_CLIENT;
use cavern_proto::master::Kind;

use crate::cli::connect::ClusterArgs;
use crate::error::CliError;

/// Entries asked for at a time.
const PAGE: usize = 1000;

/// The one place where an error of the client becomes an exit code.
impl From<ClientError> for CliError {
    fn from(error: ClientError) -> Self {
        match &error {
            ClientError::NotFound(_) | ClientError::Stale(_) => Self::NotFound(error.to_string()),
            ClientError::Net(error) => error.clone().into(),
            _ => Self::Failed(error.to_string()),
        }
    }
}

/// Runs `work` with a client of the cluster, and lets the client's tasks end afterwards whatever came out.
pub async fn with_client<T>(
    cluster: &ClusterArgs,
    work: impl AsyncFnOnce(&Client) -> Result<T, CliError>,
) -> Result<T, CliError> {
    let client = Client::connect(&cluster.config()?, COMMAND_CLIENT, Arc::new(NoSink)).await?;
    let result = work(&client).await;
    client.shutdown().await;
    result
}

/// Does something with every path, one after the other.
pub async fn each_path(
    cluster: &ClusterArgs,
    paths: &[String],
    mut work: impl AsyncFnMut(&Client, &str) -> Result<(), CliError>,
) -> Result<(), CliError> {
    with_client(cluster, async |client| {
        for path in paths {
            work(client, path).await?;
        }
        Ok(())
    })
    .await
}

/// Calls `visit` with every directory and file from `root` down, each with its path relative to `root` (empty for the
/// root itself), a directory before what it holds.
pub async fn walk(
    client: &Client,
    root: Arc<Node>,
    mut visit: impl AsyncFnMut(&str, &Arc<Node>) -> Result<(), CliError>,
) -> Result<(), CliError> {
    let mut pending = vec![(String::new(), root)];
    while let Some((path, node)) = pending.pop() {
        visit(&path, &node).await?;
        if node.kind != Kind::Directory {
            continue;
        }
        let mut after = Vec::new();
        loop {
            let page = client.metadata().read_dir(node.inode, &after, PAGE).await?;
            for child in &page.entries {
                let name = String::from_utf8_lossy(&child.name);
                let path = if path.is_empty() { name.into_owned() } else { format!("{path}/{name}") };
                if child.kind == Kind::Directory {
                    pending.push((path, child.clone()));
                } else {
                    visit(&path, child).await?;
                }
            }
            match page.entries.last() {
                Some(last) if !page.end => after = last.name.to_vec(),
                _ => break,
            }
        }
    }
    Ok(())
}
