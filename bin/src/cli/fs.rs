//! `cv fs`: the namespace and its files, without a mount.

mod blocks;
mod content;
mod list;
mod usage;
mod walk;

use clap::{Args, Subcommand};

use super::connect::ClusterArgs;
use crate::error::CliError;

#[derive(Subcommand)]
pub enum FsCommand {
    /// List a directory.
    #[command(after_help = "Examples:
  cv fs ls /train
  cv fs ls -l -R /train/part-1")]
    Ls(list::LsArgs),
    /// Show what is known of a file or directory: attributes, key, version.
    Stat(list::StatArgs),
    /// Write files to stdout.
    #[command(after_help = "Examples:
  cv fs cat /train/labels.csv | head")]
    Cat(content::CatArgs),
    /// Copy a file or a directory to this host.
    #[command(after_help = "Examples:
  cv fs get /train/labels.csv
  cv fs get /train /tmp/train")]
    Get(content::GetArgs),
    /// Bytes of each entry of a directory.
    Du(usage::DuArgs),
    /// Capacity and use of the cache.
    Df(usage::DfArgs),
    /// Directories, files and bytes below a path.
    Count(PathArgs),
    /// Where the blocks of a file are, and how much of each is cached.
    Blocks(PathArgs),
    /// Drop the cached blocks of a file, or of all files below a directory. The bucket is not touched.
    Free(PathArgs),
}

#[derive(Args)]
pub struct PathArgs {
    /// Absolute path in the namespace.
    #[arg(value_name = "PATH")]
    path: String,
    /// The result as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

impl FsCommand {
    pub async fn run(self) -> Result<(), CliError> {
        match self {
            Self::Ls(args) => args.run().await,
            Self::Stat(args) => args.run().await,
            Self::Cat(args) => args.run().await,
            Self::Get(args) => args.run().await,
            Self::Du(args) => args.run().await,
            Self::Df(args) => args.run().await,
            Self::Count(args) => usage::count(args).await,
            Self::Blocks(args) => blocks::blocks(args).await,
            Self::Free(args) => blocks::free(args).await,
        }
    }
}
