//! `cv fs chmod` and `cv fs chown`.

use std::str::FromStr;

use cavern_client::Node;
use cavern_conf::accounts;
use cavern_posix::mode::without_privileges;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{Kind, SetAttr};
use clap::Args;

use super::change::{Changes, changeable, own_umask, set};
use super::list::path_below;
use super::mode::ModeChange;
use super::walk::{walk, with_client};
use crate::cli::connect::ClusterArgs;
use crate::error::CliError;

#[derive(Args)]
pub struct ChmodArgs {
    /// Octal (0644) or symbolic (u+x, go-w, a+rX).
    #[arg(value_name = "MODE", allow_hyphen_values = true)]
    mode: ModeChange,
    #[command(flatten)]
    files: FileArgs,
}

#[derive(Args)]
pub struct ChownArgs {
    /// USER, USER:GROUP or :GROUP: numbers, or names that /etc/passwd and /etc/group of this host have.
    #[arg(value_name = "OWNER")]
    owner: Owner,
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
    #[command(flatten)]
    cluster: ClusterArgs,
}

impl ChmodArgs {
    pub async fn run(self) -> Result<(), CliError> {
        let umask = own_umask();
        let attributes = |node: &Node| {
            let mode = || Some(self.mode.apply(node.mode, node.kind, umask));
            // A link has no permissions of its own.
            (node.kind != Kind::Symlink).then(|| SetAttr { mode: mode(), ..set(node.inode) })
        };
        self.files.set_all(attributes).await
    }
}

impl ChownArgs {
    pub async fn run(self) -> Result<(), CliError> {
        let Owner { uid, gid } = self.owner;
        let attributes = |node: &Node| {
            let mode = without_set_ids(node);
            Some(SetAttr { uid, gid, mode: (mode != node.mode).then_some(mode), ..set(node.inode) })
        };
        self.files.set_all(attributes).await
    }
}

/// As chown(2) has it: a program with a new owner does not run in that owner's name.
fn without_set_ids(node: &Node) -> u32 {
    if node.kind == Kind::File { without_privileges(node.mode) } else { node.mode }
}

impl FileArgs {
    /// Sets what `attributes` says of every file that is named, and of all below if that is asked for.
    async fn set_all(&self, attributes: impl Fn(&Node) -> Option<SetAttr>) -> Result<(), CliError> {
        with_client(&self.cluster, async |client| {
            let mut changes = Changes::new(client);
            for path in &self.paths {
                let root = changeable(client, path).await?;
                if !self.recursive {
                    changes.begin(path.clone(), attributes(&root).map(Change::SetAttr)).await?;
                    continue;
                }
                walk(client, root, async |below, node| {
                    changes.begin(path_below(path, below), attributes(node).map(Change::SetAttr)).await
                })
                .await?;
            }
            changes.finish().await
        })
        .await
    }
}

/// A new owner, a new group, or both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Owner {
    uid: Option<u32>,
    gid: Option<u32>,
}

impl FromStr for Owner {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (user, group) = text.split_once(':').map_or((text, None), |(user, group)| (user, Some(group)));
        let uid = if user.is_empty() { None } else { Some(accounts::user_id(user)?) };
        let gid = group.filter(|group| !group.is_empty()).map(accounts::group_id).transpose()?;
        if uid.is_none() && gid.is_none() {
            return Err(format!("\"{text}\" names nobody: say USER, USER:GROUP or :GROUP"));
        }
        Ok(Self { uid, gid })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_are_numbers_or_names() {
        assert_eq!("7".parse(), Ok(Owner { uid: Some(7), gid: None }));
        assert_eq!("7:8".parse(), Ok(Owner { uid: Some(7), gid: Some(8) }));
        assert_eq!(":8".parse(), Ok(Owner { uid: None, gid: Some(8) }));
        assert_eq!("7:".parse(), Ok(Owner { uid: Some(7), gid: None }));
        assert_eq!("root:root".parse(), Ok(Owner { uid: Some(0), gid: Some(0) }));
        for text in ["", ":", "4294967295", "nobody-has-this-name", "-1"] {
            assert!(text.parse::<Owner>().is_err(), "{text:?}");
        }
    }
}
