//! `cv fs quota`: how many bytes and inodes there may be below a directory of an fs-mode mount.

use std::str::FromStr;
use std::time::Duration;

use cavern_client::Client;
use cavern_conf::ByteSize;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{Quota, Quotas, SetQuota};
use clap::{Args, Subcommand};
use serde::Serialize;

use super::args::{DirectoryArgs, PathArgs};
use super::change::{directory_in_fs_mode, in_fs_mode, make};
use super::walk::with_client;
use crate::cli::connect::{ClusterArgs, ResultArgs};
use crate::console::{self, or_dash};
use crate::error::CliError;

/// How often it is looked whether everything has been counted.
const COUNT_POLL: Duration = Duration::from_millis(100);

/// What these commands are about, as refusals name it.
const WHAT: &str = "quotas";

#[derive(Subcommand)]
pub enum QuotaCommand {
    /// Bound what may be below a directory.
    #[command(after_help = "Examples:
  cv fs quota set /work/alice --bytes 2TiB --inodes 10000000
  cv fs quota set /work/alice --inodes none      the bound of bytes stays

Bytes are those of the files as they are long, holes included; a file with several names counts once, at its first \
one. Directories, links and the like are inodes as files are; the directory itself is none of its own. What is there \
already stays, even if it is more. With the first quota of a cluster everything is counted once; the command waits for \
that.")]
    Set(SetArgs),
    /// Show the quotas that hold for a directory or a file: its own, and those of the directories above it.
    Get(PathArgs),
    /// Take the quota of a directory away.
    Clear(DirectoryArgs),
    /// Show all quotas.
    List(ResultArgs),
}

#[derive(Args)]
pub struct SetArgs {
    /// Absolute path of a directory in an fs-mode mount.
    #[arg(value_name = "PATH")]
    path: String,
    /// Bytes of all files, such as 500GiB; none for no bound.
    #[arg(long, value_name = "SIZE", required_unless_present = "inodes")]
    bytes: Option<Bound<ByteSize>>,
    /// Files, directories and links; none for no bound.
    #[arg(long, value_name = "COUNT")]
    inodes: Option<Bound<u64>>,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// A number, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Bound<T>(Option<T>);

impl<T: FromStr<Err: ToString>> FromStr for Bound<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self(None)),
            "0" => Err("nothing at all would have room: say none for no bound".to_owned()),
            _ => text.parse().map(|bound| Self(Some(bound))).map_err(|error: T::Err| error.to_string()),
        }
    }
}

/// A quota and its use; what is not bounded is left out.
#[derive(Serialize)]
struct QuotaView {
    path: String,
    bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_bytes: Option<u64>,
    inodes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_inodes: Option<u64>,
}

impl From<Quota> for QuotaView {
    fn from(quota: Quota) -> Self {
        let bound = |max: u64| (max > 0).then_some(max);
        Self {
            path: quota.path,
            bytes: quota.bytes,
            max_bytes: bound(quota.max_bytes),
            inodes: quota.inodes,
            max_inodes: bound(quota.max_inodes),
        }
    }
}

impl QuotaCommand {
    pub async fn run(self) -> Result<(), CliError> {
        match self {
            Self::Set(args) => args.run().await,
            Self::Get(args) => get(args).await,
            Self::Clear(args) => clear(args).await,
            Self::List(args) => list(args).await,
        }
    }
}

impl SetArgs {
    async fn run(self) -> Result<(), CliError> {
        let max_bytes = self.bytes.map(|bound| bound.0.map_or(0, ByteSize::bytes));
        let max_inodes = self.inodes.map(|bound| bound.0.unwrap_or(0));
        with_client(&self.cluster, async |client| {
            let inode = in_fs_mode(client, &self.path, WHAT).await?.inode;
            make(client, &self.path, Change::SetQuota(SetQuota { inode, max_bytes, max_inodes })).await?;
            let mut is_reported = false;
            while !counted(client, inode).await? {
                if !std::mem::replace(&mut is_reported, true) {
                    console::remark("counting what is there: until that is done, the quota may be exceeded");
                }
                tokio::time::sleep(COUNT_POLL).await;
            }
            Ok(())
        })
        .await
    }
}

async fn counted(client: &Client, inode: u64) -> Result<bool, CliError> {
    let Quotas { quotas, counted } = client.metadata().quotas(inode).await?;
    // Somebody may have taken the last one away meanwhile.
    Ok(counted || quotas.is_empty())
}

async fn clear(args: DirectoryArgs) -> Result<(), CliError> {
    with_client(&args.cluster, async |client| {
        let inode = in_fs_mode(client, &args.path, WHAT).await?.inode;
        let own = client.metadata().quotas(inode).await?.quotas.into_iter().any(|quota| quota.inode == inode);
        if !own {
            return Err(CliError::NotFound(format!("{} has no quota of its own", args.path)));
        }
        let set = SetQuota { inode, max_bytes: Some(0), max_inodes: Some(0) };
        make(client, &args.path, Change::SetQuota(set)).await.map(drop)
    })
    .await
}

async fn get(args: PathArgs) -> Result<(), CliError> {
    let quotas = with_client(&args.result.cluster, async |client| {
        let directory = directory_in_fs_mode(client, &args.path, WHAT).await?;
        Ok(client.metadata().quotas(directory).await?)
    })
    .await?;
    show(quotas, &args.result, &format!("no quota holds for {}", args.path))
}

async fn list(args: ResultArgs) -> Result<(), CliError> {
    let quotas = with_client(&args.cluster, async |client| Ok(client.metadata().quotas(0).await?)).await?;
    show(quotas, &args, "no directory has a quota")
}

fn show(Quotas { quotas, counted }: Quotas, args: &ResultArgs, none: &str) -> Result<(), CliError> {
    let views: Vec<QuotaView> = quotas.into_iter().map(QuotaView::from).collect();
    args.show(&views, |views| {
        if !counted && !views.is_empty() {
            console::remark("not everything has been counted yet: there is more than what is shown");
        }
        let row = |view: &QuotaView| {
            let QuotaView { path, bytes, max_bytes, inodes, max_inodes } = view;
            let (bound, share) = (max_bytes.map(console::size), max_bytes.map(|max| console::share(*bytes, max)));
            let inode_share = or_dash(max_inodes.map(|max| console::share(*inodes, max)));
            let (used, inodes) = (console::size(*bytes), inodes.to_string());
            [used, or_dash(bound), or_dash(share), inodes, or_dash(*max_inodes), inode_share, path.clone()]
        };
        console::table_or(none, ["BYTES", "OF", "USE", "INODES", "OF", "USE", "DIRECTORY"], views.iter().map(row))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_numbers_or_none() {
        assert_eq!("none".parse::<Bound<u64>>(), Ok(Bound(None)));
        assert_eq!("7".parse::<Bound<u64>>(), Ok(Bound(Some(7))));
        assert_eq!("2GiB".parse::<Bound<ByteSize>>(), Ok(Bound(Some(ByteSize::gib(2)))));
        for wrong in ["0", "", "-1", "many"] {
            assert!(wrong.parse::<Bound<u64>>().is_err() && wrong.parse::<Bound<ByteSize>>().is_err(), "{wrong:?}");
        }
    }
}
