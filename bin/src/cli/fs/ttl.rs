//! `cv fs ttl`: how long files of a directory of an fs-mode mount live.

use cavern_conf::Interval;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{SetTtl, Ttl, TtlAction};
use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;

use super::args::{DirectoryArgs, PathArgs};
use super::change::{directory_in_fs_mode, in_fs_mode, make};
use super::walk::with_client;
use crate::cli::connect::{ClusterArgs, ResultArgs};
use crate::console;
use crate::error::CliError;

/// What these commands are about, as refusals name it.
const WHAT: &str = "times to live";

#[derive(Subcommand)]
pub enum TtlCommand {
    /// Say how long files in and below a directory live, and what becomes of them then.
    #[command(after_help = "Examples:
  cv fs ttl set /work/scratch 7d --action delete
  cv fs ttl set /work 30d --action free
  cv fs ttl set /work/models 1d --action none   what is above holds not here

The time counts from the last change of a file: of its content, its attributes or its name (ctime), whatever mtime a \
tool has given it; reading does not count. Of files that were in the bucket when it was mounted it counts from their \
change there. A directory goes by its own rule, or by that of the nearest directory above that has one. With free, \
blocks of files that the bucket has are dropped, as by cv fs free; with delete, the files are removed, in the bucket \
too. Directories stay, and so does what somebody is writing to. The rules are gone through when a tenth of the \
shortest time is over, but every ten minutes at least.")]
    Set(SetArgs),
    /// Show the rule that holds for a directory or a file, and those above it.
    Get(PathArgs),
    /// Take the rule of a directory away.
    Clear(DirectoryArgs),
    /// Show all rules.
    List(ResultArgs),
}

#[derive(Args)]
pub struct SetArgs {
    /// Absolute path of a directory in an fs-mode mount.
    #[arg(value_name = "PATH")]
    path: String,
    /// Such as 12h or 7d; seconds at least.
    #[arg(value_name = "TIME")]
    time: Interval,
    /// What becomes of files whose time is over.
    #[arg(long, value_enum)]
    action: Action,
    #[command(flatten)]
    cluster: ClusterArgs,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Action {
    None = TtlAction::None as isize,
    Free = TtlAction::Free as isize,
    Delete = TtlAction::Delete as isize,
}

#[derive(Serialize)]
struct TtlView {
    path: String,
    seconds: u64,
    action: &'static str,
}

impl From<Ttl> for TtlView {
    fn from(ttl: Ttl) -> Self {
        let action = match ttl.action() {
            TtlAction::None => "none",
            TtlAction::Free => "free",
            TtlAction::Delete => "delete",
        };
        Self { path: ttl.path, seconds: ttl.seconds, action }
    }
}

impl TtlCommand {
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
        let seconds = self.time.get().as_secs();
        if seconds == 0 {
            return Err(CliError::Usage(format!("{}: files live for a second at least", self.time)));
        }
        with_client(&self.cluster, async |client| {
            let inode = in_fs_mode(client, &self.path, WHAT).await?.inode;
            let set = SetTtl { inode, seconds, action: self.action as i32 };
            make(client, &self.path, Change::SetTtl(set)).await.map(drop)
        })
        .await
    }
}

async fn clear(args: DirectoryArgs) -> Result<(), CliError> {
    with_client(&args.cluster, async |client| {
        let inode = in_fs_mode(client, &args.path, WHAT).await?.inode;
        let own = client.metadata().ttls(inode).await?.ttls.into_iter().any(|ttl| ttl.inode == inode);
        if !own {
            return Err(CliError::NotFound(format!("{} has no rule of its own", args.path)));
        }
        let set = SetTtl { inode, ..SetTtl::default() };
        make(client, &args.path, Change::SetTtl(set)).await.map(drop)
    })
    .await
}

async fn get(args: PathArgs) -> Result<(), CliError> {
    let ttls = with_client(&args.result.cluster, async |client| {
        let directory = directory_in_fs_mode(client, &args.path, WHAT).await?;
        Ok(client.metadata().ttls(directory).await?.ttls)
    })
    .await?;
    show(ttls, &args.result, &format!("files of {} live for ever", args.path))
}

async fn list(args: ResultArgs) -> Result<(), CliError> {
    let ttls = with_client(&args.cluster, async |client| Ok(client.metadata().ttls(0).await?.ttls)).await?;
    show(ttls, &args, "no directory has a rule: files live for ever")
}

fn show(ttls: Vec<Ttl>, args: &ResultArgs, none: &str) -> Result<(), CliError> {
    let views: Vec<TtlView> = ttls.into_iter().map(TtlView::from).collect();
    let row = |view: &TtlView| {
        let after = Interval::millis(view.seconds.saturating_mul(1000)).to_string();
        [after, view.action.to_owned(), view.path.clone()]
    };
    args.show(&views, |views| console::table_or(none, ["AFTER", "ACTION", "DIRECTORY"], views.iter().map(row)))
}
