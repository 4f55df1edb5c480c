//! `cv fs ttl`: how long files of a directory of an fs-mode mount live.

use cavern_conf::Interval;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{SetTtl, Ttl, TtlAction};
use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;

use super::change::{in_fs_mode, make};
use super::walk::with_client;
use super::{AllArgs, DirectoryArgs, PathArgs};
use crate::cli::connect::ClusterArgs;
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
    List(AllArgs),
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

#[derive(Clone, Copy, Debug, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
enum Action {
    None,
    Free,
    Delete,
}

impl From<Action> for TtlAction {
    fn from(action: Action) -> Self {
        match action {
            Action::None => Self::None,
            Action::Free => Self::Free,
            Action::Delete => Self::Delete,
        }
    }
}

impl From<TtlAction> for Action {
    fn from(action: TtlAction) -> Self {
        match action {
            TtlAction::None => Self::None,
            TtlAction::Free => Self::Free,
            TtlAction::Delete => Self::Delete,
        }
    }
}

#[derive(Serialize)]
struct TtlView {
    path: String,
    seconds: u64,
    action: Action,
}

impl From<Ttl> for TtlView {
    fn from(ttl: Ttl) -> Self {
        let action = ttl.action().into();
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
            let set = SetTtl { inode, seconds, action: TtlAction::from(self.action) as i32 };
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
    let ttls = with_client(&args.cluster, async |client| {
        let node = in_fs_mode(client, &args.path, WHAT).await?;
        let directory = if node.is_directory() { node.inode } else { node.parent };
        Ok(client.metadata().ttls(directory).await?.ttls)
    })
    .await?;
    show(ttls, args.json, &format!("files of {} live for ever", args.path))
}

async fn list(args: AllArgs) -> Result<(), CliError> {
    let ttls = with_client(&args.cluster, async |client| Ok(client.metadata().ttls(0).await?.ttls)).await?;
    show(ttls, args.json, "no directory has a rule: files live for ever")
}

fn show(ttls: Vec<Ttl>, json: bool, none: &str) -> Result<(), CliError> {
    let views: Vec<TtlView> = ttls.into_iter().map(TtlView::from).collect();
    if json {
        return console::json(&views);
    }
    if views.is_empty() {
        return console::line(none);
    }
    let row = |view: TtlView| {
        let action = match view.action {
            Action::None => "none",
            Action::Free => "free",
            Action::Delete => "delete",
        };
        [Interval::millis(view.seconds.saturating_mul(1000)).to_string(), action.to_owned(), view.path]
    };
    let rows: Vec<_> = views.into_iter().map(row).collect();
    console::table(["AFTER", "ACTION", "DIRECTORY"], &rows)
}
