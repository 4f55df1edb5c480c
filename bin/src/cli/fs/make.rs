//! `cv fs touch`, `cv fs mkdir` and `cv fs ln`: new names.

use std::sync::Arc;

use bytes::Bytes;
use cavern_client::{Client, ClientError, Node};
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{CreateInode, Kind, LinkInode, Time};
use clap::Args;

use super::change::{NameInDirectory, changeable, made, make, own_umask, set};
use super::mode::ModeChange;
use super::walk::{each_path, with_client};
use crate::cli::connect::ClusterArgs;
use crate::error::CliError;

#[derive(Args)]
pub struct TouchArgs {
    /// Absolute paths in a mount that can be written to.
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<String>,
    /// Make no files.
    #[arg(short = 'c', long)]
    no_create: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

#[derive(Args)]
pub struct MkdirArgs {
    /// Absolute paths in a mount that can be written to.
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<String>,
    /// With the directories above, and without an error for what is there.
    #[arg(short = 'p', long)]
    parents: bool,
    /// Permissions of the directory, octal or symbolic [default: 0777 without the umask].
    #[arg(short = 'm', long, value_name = "MODE")]
    mode: Option<ModeChange>,
    #[command(flatten)]
    cluster: ClusterArgs,
}

#[derive(Args)]
pub struct LnArgs {
    /// What the link leads to: a path of the same mount; with -s any text.
    #[arg(value_name = "TARGET")]
    target: String,
    /// Absolute path of the link; in a directory that is there it gets the target's name.
    #[arg(value_name = "LINK")]
    link: String,
    /// A symbolic link.
    #[arg(short = 's', long)]
    symbolic: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

impl TouchArgs {
    pub async fn run(self) -> Result<(), CliError> {
        each_path(&self.cluster, &self.paths, async |client, path| self.touch(client, path).await).await
    }

    async fn touch(&self, client: &Client, path: &str) -> Result<(), CliError> {
        let node = match changeable(client, path).await {
            Err(CliError::NotFound(_)) => {
                let place = NameInDirectory::find(client, path).await?;
                if !self.no_create {
                    create(client, &place, Kind::File, 0o666, own_umask()).await?;
                }
                return Ok(());
            }
            node => node?,
        };
        let now = Some(Time { now: true, ns: 0 });
        let set = cavern_proto::master::SetAttr { atime: now, mtime: now, ..set(node.inode) };
        make(client, path, Change::SetAttr(set)).await.map(drop)
    }
}

impl MkdirArgs {
    pub async fn run(self) -> Result<(), CliError> {
        each_path(&self.cluster, &self.paths, async |client, path| self.mkdir(client, path).await).await
    }

    async fn mkdir(&self, client: &Client, path: &str) -> Result<(), CliError> {
        // Permissions that are given are meant as they are.
        let (mode, umask) = match &self.mode {
            Some(mode) => (mode.apply(0o777, Kind::Directory, own_umask()), 0),
            None => (0o777, own_umask()),
        };
        if !self.parents {
            let place = NameInDirectory::find(client, path).await?;
            return create(client, &place, Kind::Directory, mode, umask).await.map(drop);
        }
        let path = path.trim_end_matches('/');
        // As `mkdir -p`: whoever may not write to what it makes could not go on below it.
        let above = own_umask() & !0o300;
        let ends = path.match_indices('/').map(|(at, _)| at).filter(|at| *at > 0).chain([path.len()]);
        for end in ends {
            let part = &path[..end];
            match client.metadata().resolve(part).await {
                Ok(node) if node.is_directory() => {}
                Ok(_) => return Err(CliError::Failed(format!("{part} is there, and is no directory"))),
                Err(ClientError::NotFound(_)) => {
                    let place = NameInDirectory::find(client, part).await?;
                    let (mode, umask) = if end == path.len() { (mode, umask) } else { (0o777, above) };
                    create(client, &place, Kind::Directory, mode, umask).await?;
                }
                Err(error) => return Err(error.into()),
            }
        }
        // Where all of it was there already, it must be what could have been made.
        changeable(client, path).await.map(drop)
    }
}

impl LnArgs {
    pub async fn run(self) -> Result<(), CliError> {
        with_client(&self.cluster, async |client| {
            let target = self.target.trim_end_matches('/');
            let name = target.rsplit('/').next().unwrap_or(target).as_bytes();
            let place = NameInDirectory::find(client, &self.link).await?.into_directory(client, name).await?;
            let change = if self.symbolic {
                let target = Bytes::copy_from_slice(self.target.as_bytes());
                symlink(&place, target)
            } else {
                let inode = changeable(client, &self.target).await?.inode;
                Change::Link(LinkInode { inode, parent: place.directory.inode, name: place.name.clone() })
            };
            make(client, &place.path, change).await.map(drop)
        })
        .await
    }
}

/// A symbolic link, which is to be made.
pub fn symlink(place: &NameInDirectory, target: Bytes) -> Change {
    let (parent, name, kind) = (place.directory.inode, place.name.clone(), Kind::Symlink.into());
    Change::Create(CreateInode { parent, name, kind, target, ..CreateInode::default() })
}

/// Makes an inode of this kind, with these permissions, within what the umask or the directory's default list leaves of
/// them.
async fn create(
    client: &Client,
    place: &NameInDirectory,
    kind: Kind,
    mode: u32,
    umask: u32,
) -> Result<Arc<Node>, CliError> {
    let (parent, name) = (place.directory.inode, place.name.clone());
    let create = CreateInode { parent, name, kind: kind.into(), mode, umask, ..CreateInode::default() };
    let changed = make(client, &place.path, Change::Create(create)).await?;
    made(&changed, &place.directory)
}

/// The directory of this name, made if it is not there.
pub async fn ensure_directory(client: &Client, place: &NameInDirectory) -> Result<Arc<Node>, CliError> {
    match place.node(client).await? {
        Some(node) if node.is_directory() => Ok(node),
        Some(_) => Err(CliError::Failed(format!("{} is there, and is no directory", place.path))),
        None => create(client, place, Kind::Directory, 0o777, own_umask()).await,
    }
}
