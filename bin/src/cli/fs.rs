//! `cv fs`: the namespace and its files, without a mount.

pub(super) mod blocks;
mod change;
mod content;
mod find;
mod list;
mod mode;
mod names;
mod put;
mod rules;
pub(super) mod target;
mod walk;
mod xattr;

use std::sync::Arc;

use cavern_client::{Client, NoSink};
use cavern_proto::COMMAND_CLIENT;
use clap::Subcommand;

pub(super) use self::content::check_kind;
use self::rules::{QuotaArgs, RuleCommand, TtlArgs};
use self::walk::{PathArgs, PathsArgs};
use super::connect::{ClusterArgs, ResultArgs};
use crate::error::CliError;

#[derive(Subcommand)]
pub enum FsCommand {
    /// List a directory.
    Ls(list::LsArgs),
    /// Show what is known of a file or directory: attributes, key, version.
    Stat(PathsArgs),
    /// Write files to stdout.
    Cat(PathsArgs),
    /// Copy a file or a directory to this host.
    Get(content::GetArgs),
    /// Write the beginning of files to stdout.
    Head(content::EndArgs),
    /// Write the end of files to stdout.
    Tail(content::EndArgs),
    /// List what is below a path and is as is asked for.
    Find(find::FindArgs),
    /// Copy a file or a directory of this host, or stdin, into a mount that can be written to.
    Put(put::PutArgs),
    /// Make files in a mount that can be written to, or set the times of those that are there to now.
    Touch(names::TouchArgs),
    /// Make directories in a mount that can be written to.
    Mkdir(names::MkdirArgs),
    /// Make a hard or a symbolic link in an fs-mode mount.
    Ln(names::LnArgs),
    /// Remove files and directories of a mount that can be written to.
    Rm(names::RmArgs),
    /// Rename or move within a mount that can be written to.
    Mv(names::MvArgs),
    /// Change permissions in an fs-mode mount.
    Chmod(names::ChmodArgs),
    /// Change owner and group in an fs-mode mount.
    Chown(names::ChownArgs),
    /// Set or remove an extended attribute in an fs-mode mount.
    Setfattr(xattr::SetfattrArgs),
    /// Show extended attributes in an fs-mode mount.
    Getfattr(xattr::GetfattrArgs),
    /// Bound what may be below directories of fs-mode mounts.
    #[command(subcommand)]
    Quota(RuleCommand<QuotaArgs>),
    /// How long files of directories of fs-mode mounts live.
    #[command(subcommand)]
    Ttl(RuleCommand<TtlArgs>),
    /// Directories, files and bytes of each entry of a directory.
    Du(list::DuArgs),
    /// Where the blocks of a file are, and how much of each is cached.
    Blocks(PathArgs),
    /// Drop the cached blocks of a file, or of all files below a directory. The bucket is not touched. Files of fs-mode
    /// mounts are read from the bucket then; what the bucket lacks of them is kept.
    Free(PathArgs),
}

impl FsCommand {
    pub async fn run(self, result: &ResultArgs) -> Result<(), CliError> {
        let cluster = &result.cluster;
        match self {
            Self::Ls(args) => args.run(result).await,
            Self::Stat(args) => list::stat(&args.paths, result).await,
            Self::Cat(args) => with_client(cluster, async |client| content::cat(client, &args.paths).await).await,
            Self::Get(args) => with_client(cluster, async |client| args.run(client, result).await).await,
            Self::Head(args) => with_client(cluster, async |client| args.head(client).await).await,
            Self::Tail(args) => with_client(cluster, async |client| args.tail(client).await).await,
            Self::Find(args) => with_client(cluster, async |client| args.run(client, result.json).await).await,
            Self::Put(args) => with_client(cluster, async |client| args.run(client, result).await).await,
            Self::Touch(args) => with_client(cluster, async |client| args.run(client).await).await,
            Self::Mkdir(args) => with_client(cluster, async |client| args.run(client).await).await,
            Self::Ln(args) => with_client(cluster, async |client| args.run(client).await).await,
            Self::Rm(args) => with_client(cluster, async |client| args.run(client, result).await).await,
            Self::Mv(args) => with_client(cluster, async |client| args.run(client).await).await,
            Self::Chmod(args) => with_client(cluster, async |client| args.run(client).await).await,
            Self::Chown(args) => with_client(cluster, async |client| args.run(client).await).await,
            Self::Setfattr(args) => with_client(cluster, async |client| args.run(client).await).await,
            Self::Getfattr(args) => with_client(cluster, async |client| args.run(client, result.json).await).await,
            Self::Quota(rule) => with_client(cluster, async |client| rule.run(client, result).await).await,
            Self::Ttl(rule) => with_client(cluster, async |client| rule.run(client, result).await).await,
            Self::Du(args) => args.run(result).await,
            Self::Blocks(args) => with_client(cluster, async |client| blocks::show(client, &args, result).await).await,
            Self::Free(args) => {
                with_client(cluster, async |client| blocks::free(client, &[args.path], result).await).await
            }
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
