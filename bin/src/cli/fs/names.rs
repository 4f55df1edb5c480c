//! Names and attributes: `cv fs touch`, `mkdir`, `ln`, `rm`, `mv`, `chmod` and `chown`.

use std::sync::Arc;

use bytes::Bytes;
use cavern_client::{Client, ClientError, Node};
use cavern_conf::accounts;
use cavern_posix::mode::without_privileges;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{CreateInode, Kind, LinkInode, RemoveName, RenameMode, RenameName, SetAttr, Time};
use clap::Args;
use serde_json::json;

use super::change::{Changes, NameInDirectory, changeable, make, own_umask};
use super::mode::ModeChange;
use super::walk::{path_below, walk};
use crate::cli::connect::ResultArgs;
use crate::error::CliError;

#[derive(Args)]
pub struct TouchArgs {
    /// Absolute paths in a mount that can be written to.
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<String>,
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
}

#[derive(Args)]
pub struct LnArgs {
    /// What the link leads to: a path of the same mount; with -s any text.
    target: String,
    /// Absolute path of the link; in a directory that is there it gets the target's name.
    link: String,
    /// A symbolic link.
    #[arg(short = 's', long)]
    symbolic: bool,
}

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
}

#[derive(Args)]
pub struct MvArgs {
    /// Absolute paths, and last the new one: a new name, or a directory to move into.
    #[arg(value_name = "PATH", required = true, num_args = 2..)]
    paths: Vec<String>,
    /// Exchange two names in one step.
    #[arg(long)]
    exchange: bool,
}

#[derive(Args)]
pub struct ChmodArgs {
    /// Octal (0644) or symbolic (u+x, go-w, a+rX).
    #[arg(allow_hyphen_values = true)]
    mode: ModeChange,
    #[command(flatten)]
    files: FileArgs,
}

#[derive(Args)]
pub struct ChownArgs {
    /// USER, USER:GROUP or :GROUP: numbers, or names that /etc/passwd and /etc/group of this host have.
    #[arg(value_parser = owner)]
    owner: (Option<u32>, Option<u32>),
    #[command(flatten)]
    files: FileArgs,
}

#[derive(Args)]
struct FileArgs {
    /// Absolute paths in an fs-mode mount.
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<String>,
    /// With everything below.
    #[arg(short = 'R', long)]
    recursive: bool,
}

impl TouchArgs {
    pub async fn run(&self, client: &Client) -> Result<(), CliError> {
        let now = Some(Time { now: true, ns: 0 });
        for path in &self.paths {
            match changeable(client, path).await {
                Ok(node) => {
                    let set = SetAttr { inode: node.inode, atime: now, mtime: now, ..SetAttr::default() };
                    make(client, path, Change::SetAttr(set)).await?;
                }
                Err(CliError::NotFound(_)) => {
                    let place = NameInDirectory::find(client, path).await?;
                    create(client, &place, Kind::File, 0o666, own_umask()).await?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl MkdirArgs {
    pub async fn run(&self, client: &Client) -> Result<(), CliError> {
        // Permissions that are given are meant as they are.
        let (mode, umask) = match &self.mode {
            Some(mode) => (mode.apply(0o777, Kind::Directory, own_umask()), 0),
            None => (0o777, own_umask()),
        };
        for path in self.paths.iter().map(|path| path.trim_end_matches('/')) {
            if self.parents {
                make_parents(client, path).await?;
            }
            match client.metadata().resolve(path).await {
                // It must be what could have been made.
                Ok(node) if self.parents && node.is_directory() => {
                    changeable(client, path).await?;
                }
                _ => {
                    let place = NameInDirectory::find(client, path).await?;
                    create(client, &place, Kind::Directory, mode, umask).await?;
                }
            }
        }
        Ok(())
    }
}

/// Makes the directories above a path that are not there.
async fn make_parents(client: &Client, path: &str) -> Result<(), CliError> {
    // As `mkdir -p`: whoever may not write to what it makes could not go on below it.
    let umask = own_umask() & !0o300;
    for (end, _) in path.match_indices('/').filter(|(end, _)| *end > 0) {
        let above = &path[..end];
        match client.metadata().resolve(above).await {
            Ok(node) if node.is_directory() => {}
            Ok(_) => return Err(CliError::Failed(format!("{above} is there, and is no directory"))),
            Err(ClientError::NotFound(_)) => {
                let place = NameInDirectory::find(client, above).await?;
                create(client, &place, Kind::Directory, 0o777, umask).await?;
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

impl LnArgs {
    pub async fn run(&self, client: &Client) -> Result<(), CliError> {
        let target = self.target.trim_end_matches('/');
        let name = target.rsplit('/').next().unwrap_or(target).as_bytes();
        let place = NameInDirectory::target(client, &self.link, Some(name)).await?;
        let change = if self.symbolic {
            symlink(&place, Bytes::copy_from_slice(self.target.as_bytes()))
        } else {
            let inode = changeable(client, &self.target).await?.inode;
            Change::Link(LinkInode { inode, parent: place.directory.inode, name: place.name.clone() })
        };
        make(client, &place.path, change).await.map(drop)
    }
}

/// A symbolic link, which is to be made.
pub fn symlink(place: &NameInDirectory, target: Bytes) -> Change {
    let (parent, name, kind) = (place.directory.inode, place.name.clone(), Kind::Symlink.into());
    Change::Create(CreateInode { parent, name, kind, target, ..CreateInode::default() })
}

/// Makes an inode of this kind, with these permissions, within what the umask or the directory's default list leaves of
/// them.
async fn create(client: &Client, place: &NameInDirectory, kind: Kind, mode: u32, umask: u32) -> Result<(), CliError> {
    let (parent, name) = (place.directory.inode, place.name.clone());
    let create = CreateInode { parent, name, kind: kind.into(), mode, umask, ..CreateInode::default() };
    make(client, &place.path, Change::Create(create)).await.map(drop)
}

/// The directory of this name, made if it is not there.
pub async fn ensure_directory(client: &Client, place: &NameInDirectory) -> Result<Arc<Node>, CliError> {
    if place.node(client).await?.is_none() {
        create(client, place, Kind::Directory, 0o777, own_umask()).await?;
    }
    let is_other = || CliError::Failed(format!("{} is there, and is no directory", place.path));
    place.node(client).await?.filter(|node| node.is_directory()).ok_or_else(is_other)
}

impl RmArgs {
    pub async fn run(&self, client: &Client, result: &ResultArgs) -> Result<(), CliError> {
        let mut removed = 0;
        for path in &self.paths {
            removed += self.remove(client, path).await?;
        }
        result.show(&json!({"removed": removed}), || Ok(()))
    }

    /// Removes what has a path; how many names that were. Others may remove something of it at the same time.
    async fn remove(&self, client: &Client, path: &str) -> Result<u64, CliError> {
        let found = async {
            let place = NameInDirectory::find(client, path).await?;
            let none = || CliError::NotFound(format!("{}: no such file or directory", place.path));
            let root = place.node(client).await?.ok_or_else(none)?;
            Ok((place, root))
        };
        let (place, root) = match found.await {
            Err(CliError::NotFound(_)) if self.force => return Ok(0),
            found => found?,
        };
        if root.is_directory() && !self.recursive {
            return Err(CliError::Failed(format!(
                "{} is a directory: use -r to remove it and all below it",
                place.path
            )));
        }
        let (mut changes, mut directories) = (Changes::new(client), Vec::new());
        changes.skips_missing = self.force;
        walk(client, root, async |found| {
            let (path, directory) = (path_below(&place.path, found.below), found.node.is_directory());
            let (parent, name) = match found.below {
                "" => (place.directory.inode, place.name.clone()),
                _ => (found.parent, found.node.name_bytes()),
            };
            let gone = Change::Remove(RemoveName { parent, name, directory });
            if directory {
                directories.push((path, gone));
                return Ok(());
            }
            changes.begin(path, gone).await
        })
        .await?;
        changes.finish().await?;
        // What lies deepest comes last, and goes before what holds it.
        for (path, gone) in directories.into_iter().rev() {
            changes.begin(path, gone).await?;
            changes.finish().await?;
        }
        changes.finish().await
    }
}

impl MvArgs {
    pub async fn run(&self, client: &Client) -> Result<(), CliError> {
        let (target, sources) =
            self.paths.split_last().ok_or_else(|| CliError::Usage("say what to move".to_owned()))?;
        if self.exchange && sources.len() != 1 {
            return Err(CliError::Usage("two names are exchanged, neither more nor fewer".to_owned()));
        }
        if sources.len() > 1 && !client.metadata().resolve(target).await?.is_directory() {
            return Err(CliError::Usage(format!("{target} is no directory: several files cannot become one")));
        }
        let mode = if self.exchange { RenameMode::Exchange } else { RenameMode::Replace };
        for source in sources {
            let from = NameInDirectory::find(client, source).await?;
            let to = match self.exchange {
                true => NameInDirectory::find(client, target).await?,
                false => NameInDirectory::target(client, target, Some(&from.name)).await?,
            };
            let rename = RenameName {
                parent: from.directory.inode,
                name: from.name,
                new_parent: to.directory.inode,
                new_name: to.name,
                mode: mode.into(),
            };
            make(client, &format!("{} → {}", from.path, to.path), Change::Rename(rename)).await?;
        }
        Ok(())
    }
}

impl ChmodArgs {
    pub async fn run(&self, client: &Client) -> Result<(), CliError> {
        let umask = own_umask();
        let set =
            |node: &Node| SetAttr { mode: Some(self.mode.apply(node.mode, node.kind, umask)), ..SetAttr::default() };
        // A link has no permissions of its own.
        self.files.set_all(client, |node| (node.kind != Kind::Symlink).then(|| set(node))).await
    }
}

impl ChownArgs {
    pub async fn run(&self, client: &Client) -> Result<(), CliError> {
        let (uid, gid) = self.owner;
        let set = |node: &Node| {
            // As chown(2) has it: a program with a new owner does not run in that owner's name.
            let mode = Some(without_privileges(node.mode)).filter(|mode| node.kind == Kind::File && *mode != node.mode);
            Some(SetAttr { uid, gid, mode, ..SetAttr::default() })
        };
        self.files.set_all(client, set).await
    }
}

impl FileArgs {
    /// Sets what `attributes` says of every file that is named, and of all below if that is asked for.
    async fn set_all(&self, client: &Client, attributes: impl Fn(&Node) -> Option<SetAttr>) -> Result<(), CliError> {
        let mut changes = Changes::new(client);
        let change = |node: &Node| attributes(node).map(|set| Change::SetAttr(SetAttr { inode: node.inode, ..set }));
        for path in &self.paths {
            let root = changeable(client, path).await?;
            if !self.recursive {
                changes.begin(path.clone(), change(&root)).await?;
                continue;
            }
            walk(client, root, async |found| changes.begin(path_below(path, found.below), change(found.node)).await)
                .await?;
        }
        changes.finish().await.map(|_made| ())
    }
}

/// A new owner, a new group, or both.
fn owner(text: &str) -> Result<(Option<u32>, Option<u32>), String> {
    let (user, group) = text.split_once(':').unwrap_or((text, ""));
    let uid = Some(user).filter(|user| !user.is_empty()).map(accounts::user_id).transpose()?;
    let gid = Some(group).filter(|group| !group.is_empty()).map(accounts::group_id).transpose()?;
    match (uid, gid) {
        (None, None) => Err(format!("\"{text}\" names nobody: say USER, USER:GROUP or :GROUP")),
        owner => Ok(owner),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_are_numbers_or_names() {
        assert_eq!(owner("7"), Ok((Some(7), None)));
        assert_eq!(owner("7:8"), Ok((Some(7), Some(8))));
        assert_eq!(owner(":8"), Ok((None, Some(8))));
        assert_eq!(owner("7:"), Ok((Some(7), None)));
        assert_eq!(owner("root:root"), Ok((Some(0), Some(0))));
        for text in ["", ":", "4294967295", "nobody-has-this-name", "-1"] {
            assert!(owner(text).is_err(), "{text:?}");
        }
    }
}
