//! What all commands have in common that change the namespace: only what is in a mount that can be written to is
//! changed, and a refusal names the path.
//!
//! Links are not followed. Nobody's permissions are looked at: whoever reaches the master may change everything, as
//! root may on a mount.

use std::sync::Arc;

use bytes::Bytes;
use cavern_client::{Changed, Client, ClientError, Node};
use cavern_proto::master::mutation::Change;
use futures::future::LocalBoxFuture;
use futures::stream::FuturesUnordered;
use futures::{FutureExt as _, StreamExt as _};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::process::{getegid, geteuid, umask};

use super::walk::join;
use crate::error::CliError;

/// Changes that are under way at a time: they share log entries at the master.
const AT_A_TIME: usize = 64;

/// User and group of whoever gives the command: what it makes belongs to them.
pub fn own_ids() -> (u32, u32) {
    (geteuid().as_raw(), getegid().as_raw())
}

/// The file mode creation mask of this process.
pub fn own_umask() -> u32 {
    // It can only be read by setting it.
    let mask = umask(Mode::from_raw_mode(0o077));
    umask(mask);
    mask.as_raw_mode()
}

/// A name in a directory that can be changed, whether it is there or not.
pub struct NameInDirectory {
    /// Absolute, without a '/' at its end.
    pub path: String,
    pub directory: Arc<Node>,
    pub name: Bytes,
}

impl NameInDirectory {
    /// # Errors
    /// The directory is not there, or cannot be changed.
    pub async fn find(client: &Client, path: &str) -> Result<Self, CliError> {
        let path = path.trim_end_matches('/');
        let Some((above, name)) = path.rsplit_once('/').filter(|(_, name)| !matches!(*name, "" | "." | "..")) else {
            return Err(CliError::Usage(format!(
                "\"{path}\" cannot be made or removed: give the absolute path of a name"
            )));
        };
        let above = if above.is_empty() { "/" } else { above };
        let directory = client.metadata().resolve(above).await?;
        if !directory.is_directory() {
            return Err(CliError::Failed(format!("{above} is not a directory: {path} cannot be in it")));
        }
        check(path, &directory)?;
        Ok(Self { path: path.to_owned(), directory, name: Bytes::copy_from_slice(name.as_bytes()) })
    }

    /// A name in a directory with this path.
    pub fn below(path: &str, directory: &Arc<Node>, name: &[u8]) -> Self {
        Self { path: join(path, name), directory: directory.clone(), name: Bytes::copy_from_slice(name) }
    }

    /// As `cp`, `mv` and `ln` have it: the place of `name` in the directory that is at a path, or else that path
    /// itself. The root of a mount is a directory to put something into, though its own name cannot be changed.
    pub async fn target(client: &Client, path: &str, name: Option<&[u8]>) -> Result<Self, CliError> {
        match client.metadata().resolve(path).await {
            Ok(directory) if directory.is_directory() && directory.can_be_changed() => {
                let name = name.ok_or_else(|| {
                    CliError::Usage(format!("{path} is a directory: say which name the file shall have in it"))
                })?;
                Ok(Self::below(path, &directory, name))
            }
            _ => Self::find(client, path).await,
        }
    }

    /// What has the name now.
    pub async fn node(&self, client: &Client) -> Result<Option<Arc<Node>>, CliError> {
        match client.metadata().lookup(self.directory.inode, &self.name).await {
            Ok(node) => Ok(Some(node)),
            Err(ClientError::NotFound(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

/// What is to be changed: it is there, and in a mount that can be written to.
pub async fn changeable(client: &Client, path: &str) -> Result<Arc<Node>, CliError> {
    let node = client.metadata().resolve(path).await?;
    check(path, &node)?;
    Ok(node)
}

/// The directory or file of an fs-mode mount that `path` leads to. `what` (quotas, say) exists in such mounts only.
pub async fn in_fs_mode(client: &Client, path: &str, what: &str) -> Result<Arc<Node>, CliError> {
    let node = client.metadata().resolve(path).await?;
    match &node.mount {
        Some(mount) if !node.is_fs_mode() => Err(CliError::Failed(format!(
            "{what} exist in fs-mode mounts only: {path} is in {}, which is mounted in cache-mode",
            mount.path()
        ))),
        None => Err(CliError::Failed(format!(
            "{what} exist in fs-mode mounts only: {path} is in no mount; `cv mount` lists the mounts"
        ))),
        Some(_) => Ok(node),
    }
}

/// Refuses what cannot be changed.
fn check(path: &str, node: &Node) -> Result<(), CliError> {
    match &node.mount {
        Some(_) if node.can_be_changed() => Ok(()),
        Some(mount) => Err(CliError::Failed(format!(
            "{path}: {0} is mounted in cache-mode to be read: mount it with `--access-mode read-write`, or change the \
             objects with a client of the bucket, and run `cv refresh {0}` then",
            mount.path()
        ))),
        None => Err(CliError::Failed(format!(
            "{path} is in no mount: only what is in a mount can be changed; `cv mount` lists the mounts"
        ))),
    }
}

/// Makes a change; a refusal names the path.
pub async fn make(client: &Client, path: &str, change: Change) -> Result<Changed, CliError> {
    let (uid, gid) = own_ids();
    client.change(change, uid, gid).await.map_err(|error| refused(path, error))
}

/// Why a change of what is at a path was not made.
pub fn refused(path: &str, error: ClientError) -> CliError {
    let gone = [Errno::NOENT, Errno::STALE].map(Errno::raw_os_error);
    match error {
        ClientError::Refused { errno, reason } if gone.contains(&errno) => {
            CliError::NotFound(format!("{path}: {reason}"))
        }
        ClientError::NotFound(_) | ClientError::Stale(_) => {
            CliError::NotFound(format!("{path}: no such file or directory"))
        }
        ClientError::Refused { reason, .. } => CliError::Failed(format!("{path}: {reason}")),
        ClientError::Unlisted { .. } => CliError::Unreachable(format!(
            "{path}: the bucket has names there that are not known yet: try again when it answers"
        )),
        other => other.into(),
    }
}

/// Changes that do not depend on each other.
pub struct Changes<'c> {
    client: &'c Client,
    running: FuturesUnordered<LocalBoxFuture<'c, Result<(), CliError>>>,
    /// What is not there any more is passed over.
    pub skips_missing: bool,
    made: u64,
}

impl<'c> Changes<'c> {
    pub fn new(client: &'c Client) -> Self {
        Self { client, running: FuturesUnordered::new(), skips_missing: false, made: 0 }
    }

    /// Begins a change, if there is one, when there is room for another.
    pub async fn begin(&mut self, path: String, change: impl Into<Option<Change>>) -> Result<(), CliError> {
        let Some(change) = change.into() else { return Ok(()) };
        if self.running.len() >= AT_A_TIME {
            self.one().await?;
        }
        let client = self.client;
        self.running.push(async move { make(client, &path, change).await.map(drop) }.boxed_local());
        Ok(())
    }

    /// Waits for all that were begun. How many have been made so far.
    pub async fn finish(&mut self) -> Result<u64, CliError> {
        while !self.running.is_empty() {
            self.one().await?;
        }
        Ok(self.made)
    }

    async fn one(&mut self) -> Result<(), CliError> {
        match self.running.next().await.transpose() {
            Err(CliError::NotFound(_)) if self.skips_missing => {}
            made => self.made += u64::from(made?.is_some()),
        }
        Ok(())
    }
}
