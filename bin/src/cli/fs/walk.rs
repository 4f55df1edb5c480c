//! What the verbs of `cv fs` have in common: paths, and a walk.

use std::sync::Arc;

use cavern_client::{Client, ClientError, Node};
use cavern_conf::counted;
use cavern_proto::master::Kind;
use clap::Args;
use serde_json::json;

use crate::cli::connect::ResultArgs;
use crate::console;
use crate::error::CliError;

/// Entries asked for at a time.
const PAGE: usize = 1000;

#[derive(Args)]
pub struct PathArgs {
    /// Absolute path in the namespace.
    pub path: String,
}

#[derive(Args)]
pub struct PathsArgs {
    /// Absolute paths in the namespace.
    #[arg(value_name = "PATH", required = true)]
    pub paths: Vec<String>,
}

/// What a walk has come to.
pub struct Found<'a> {
    /// Below the root of the walk: empty for the root itself.
    pub below: &'a str,
    /// The directory that it was found in; 0 of the root.
    pub parent: u64,
    pub node: &'a Arc<Node>,
}

/// Calls `visit` with every directory and file from `root` down, a directory before what it holds. One that is removed
/// meanwhile holds nothing more.
pub async fn walk(
    client: &Client,
    root: Arc<Node>,
    mut visit: impl AsyncFnMut(Found<'_>) -> Result<(), CliError>,
) -> Result<(), CliError> {
    let mut pending = vec![(String::new(), 0, root)];
    while let Some((path, parent, node)) = pending.pop() {
        visit(Found { below: &path, parent, node: &node }).await?;
        if node.kind != Kind::Directory {
            continue;
        }
        let mut after = Vec::new();
        loop {
            let page = match client.metadata().read_dir(node.inode, &after, PAGE).await {
                Err(ClientError::NotFound(_) | ClientError::Stale(_)) => break,
                page => page?,
            };
            for child in &page.entries {
                let name = String::from_utf8_lossy(&child.name);
                let below = if path.is_empty() { name.into_owned() } else { format!("{path}/{name}") };
                if child.kind == Kind::Directory {
                    pending.push((below, node.inode, child.clone()));
                } else {
                    visit(Found { below: &below, parent: node.inode, node: child }).await?;
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

/// The path of a child, `name` as readable as it can be.
pub fn join(directory: &str, name: &[u8]) -> String {
    format!("{}/{}", directory.trim_end_matches('/'), String::from_utf8_lossy(name))
}

/// The path of what is below another, by its path relative to that: empty for that itself.
pub fn path_below(top: &str, below: &str) -> String {
    match (top.trim_end_matches('/'), below) {
        ("", "") => "/".to_owned(),
        (top, "") => top.to_owned(),
        (top, below) => format!("{top}/{below}"),
    }
}

/// What was copied, one way or the other.
#[derive(Default)]
pub struct Copied {
    pub files: u64,
    pub bytes: u64,
}

impl Copied {
    pub fn show(&self, result: &ResultArgs) -> Result<(), CliError> {
        let Self { files, bytes } = *self;
        result.show(&json!({"files": files, "bytes": bytes}), || {
            console::line(format_args!("{}, {}", counted(files, "file"), console::size(bytes)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_put_together() {
        assert_eq!(join("/", b"a"), "/a");
        assert_eq!(join("/a/b", b"c"), "/a/b/c");
        let below = [("/", ""), ("/", "a"), ("/a/", ""), ("/a", "b/c")].map(|(top, below)| path_below(top, below));
        assert_eq!(below, ["/", "/a", "/a", "/a/b/c"]);
    }
}
