//! `cv fs`: the namespace and its files, without a mount.

mod args;
mod attributes;
mod blocks;
mod change;
mod content;
mod ends;
mod find;
mod glob;
pub(super) mod layout;
mod list;
mod make;
mod mode;
mod put;
mod quota;
pub(super) mod reader;
mod remove;
mod target;
mod ttl;
mod usage;
pub(super) mod walk;
mod xattr;

use clap::Subcommand;

pub use find::with_two_dashes;

use self::args::PathArgs;
use super::connect::ResultArgs;
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
    /// Write the beginning of files to stdout.
    #[command(after_help = "Examples:
  cv fs head /train/labels.csv
  cv fs head -c 512 /train/part-1/000001.jpg | file -")]
    Head(ends::EndArgs),
    /// Write the end of files to stdout.
    #[command(after_help = "Examples:
  cv fs tail /work/run1/train.log
  cv fs tail -n 100 /work/run1/train.log /work/run2/train.log")]
    Tail(ends::EndArgs),
    /// List what is below a path and is as is asked for.
    #[command(after_help = "Examples:
  cv fs find /train --name '*.jpg' --size +1M
  cv fs find /work --type d --json
  cv fs find /work/run1 --newer /work/run1/checkpoint.pt

What is asked for holds together: a file must be as every option says. The options may have one dash, as those of \
find(1).")]
    Find(find::FindArgs),
    /// Copy a file or a directory of this host, or stdin, into a mount that can be written to.
    #[command(after_help = "Examples:
  cv fs put model.pt /work/run1/model.pt
  cv fs put ./data /work
  tar cf - src | cv fs put - /work/src.tar

What is there already is replaced, a file in one step: a reader has the old one or the new one, whole. When the \
command is done, the bytes are on the disks of the workers.")]
    Put(put::PutArgs),
    /// Make files in a mount that can be written to, or set the times of those that are there to now.
    #[command(after_help = "Examples:
  cv fs touch /work/run1/DONE")]
    Touch(make::TouchArgs),
    /// Make directories in a mount that can be written to.
    #[command(after_help = "Examples:
  cv fs mkdir /work/run1
  cv fs mkdir -p -m 2775 /work/shared/results/today")]
    Mkdir(make::MkdirArgs),
    /// Make a hard or a symbolic link in an fs-mode mount.
    #[command(after_help = "Examples:
  cv fs ln /work/run1/model.pt /work/best.pt
  cv fs ln -s run1/model.pt /work/latest.pt")]
    Ln(make::LnArgs),
    /// Remove files and directories of a mount that can be written to.
    #[command(after_help = "Examples:
  cv fs rm /work/run1/tmp.bin
  cv fs rm -r /work/run1")]
    Rm(remove::RmArgs),
    /// Rename or move within a mount that can be written to.
    #[command(after_help = "Examples:
  cv fs mv /work/run1 /work/run1-old
  cv fs mv /work/a.pt /work/b.pt /work/models
  cv fs mv --exchange /work/current /work/next")]
    Mv(remove::MvArgs),
    /// Change permissions in an fs-mode mount.
    #[command(after_help = "Examples:
  cv fs chmod 0644 /work/run1/model.pt
  cv fs chmod -R u=rwX,go=rX /work/run1")]
    Chmod(attributes::ChmodArgs),
    /// Change owner and group in an fs-mode mount.
    #[command(after_help = "Examples:
  cv fs chown 1000:1000 /work/run1
  cv fs chown -R :research /work/shared")]
    Chown(attributes::ChownArgs),
    /// Set or remove an extended attribute in an fs-mode mount.
    #[command(after_help = "Examples:
  cv fs setfattr -n user.step -v 12000 /work/run1/model.pt
  cv fs setfattr -x user.step /work/run1/model.pt")]
    Setfattr(xattr::SetfattrArgs),
    /// Show extended attributes in an fs-mode mount.
    #[command(after_help = "Examples:
  cv fs getfattr -d /work/run1/model.pt
  cv fs getfattr -n user.step --only-values /work/run1/model.pt")]
    Getfattr(xattr::GetfattrArgs),
    /// Bound what may be below directories of fs-mode mounts.
    #[command(subcommand)]
    Quota(quota::QuotaCommand),
    /// How long files of directories of fs-mode mounts live.
    #[command(subcommand)]
    Ttl(ttl::TtlCommand),
    /// Bytes of each entry of a directory.
    Du(usage::DuArgs),
    /// Capacity and use of the cache.
    Df(ResultArgs),
    /// Directories, files and bytes below a path.
    Count(PathArgs),
    /// Where the blocks of a file are, and how much of each is cached.
    Blocks(PathArgs),
    /// Drop the cached blocks of a file, or of all files below a directory. The bucket is not touched. Files of fs-mode
    /// mounts are read from the bucket then; what the bucket lacks of them is kept.
    Free(PathArgs),
}

impl FsCommand {
    pub async fn run(self) -> Result<(), CliError> {
        match self {
            Self::Ls(args) => args.run().await,
            Self::Stat(args) => args.run().await,
            Self::Cat(args) => args.run().await,
            Self::Get(args) => args.run().await,
            Self::Head(args) => ends::head(args).await,
            Self::Tail(args) => ends::tail(args).await,
            Self::Find(args) => args.run().await,
            Self::Put(args) => args.run().await,
            Self::Touch(args) => args.run().await,
            Self::Mkdir(args) => args.run().await,
            Self::Ln(args) => args.run().await,
            Self::Rm(args) => args.run().await,
            Self::Mv(args) => args.run().await,
            Self::Chmod(args) => args.run().await,
            Self::Chown(args) => args.run().await,
            Self::Setfattr(args) => args.run().await,
            Self::Getfattr(args) => args.run().await,
            Self::Quota(command) => command.run().await,
            Self::Ttl(command) => command.run().await,
            Self::Du(args) => args.run().await,
            Self::Df(args) => usage::df(&args).await,
            Self::Count(args) => usage::count(args).await,
            Self::Blocks(args) => blocks::blocks(args).await,
            Self::Free(args) => blocks::free(args).await,
        }
    }
}
