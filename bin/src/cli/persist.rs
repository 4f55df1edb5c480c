//! `cv persist`: how far the buckets of fs-mode mounts are behind.

mod lost;
mod wait;

use cavern_conf::{Interval, counted};
use cavern_net::master::Stubs;
use cavern_proto::master::{PersistStatus, PersistStatusRequest};
use clap::{Args, Subcommand};
use serde::Serialize;

use self::lost::LostArgs;
use self::wait::Wait;
use super::connect::{ClusterArgs, ResultArgs};
use super::follow::Follower;
use crate::console;
use crate::error::CliError;

#[derive(Subcommand)]
pub enum PersistCommand {
    /// Show what the buckets lack.
    Status(StatusArgs),
    /// Wait until the buckets have what is in the namespace now.
    Wait(WaitArgs),
    /// Try files that have lost blocks once more.
    #[command(after_help = "Examples:
  cv persist retry /work/run1/model   a file
  cv persist retry /work              all files below that have lost blocks

Tries at once to bring files to the bucket of which blocks are lost: all workers of these blocks are live, and none \
has them (`cv report` and `cv persist wait` list such files). Exit code 1 when blocks are still lost.")]
    Retry(LostArgs),
    /// Give up lost blocks: files go back to what the bucket has, or get zeros.
    #[command(after_help = "Examples:
  cv persist drop /work/run1/model   a file
  cv persist drop /work              all files below that have lost blocks

Gives up blocks that are lost: all workers of these blocks are live, and none has them (`cv report` and `cv persist \
wait` list such files). A file that the bucket has goes back, as a whole, to the version there. Of a file that the \
bucket never had, the lost blocks become zeros, and the rest stays. Other files are left alone; exit code 1 when there \
is nothing to give up.")]
    Drop(LostArgs),
}

impl PersistCommand {
    pub async fn run(self) -> Result<(), CliError> {
        match self {
            Self::Status(args) => args.run().await,
            Self::Wait(args) => args.run().await,
            Self::Retry(args) => args.retry().await,
            Self::Drop(args) => args.give_up().await,
        }
    }
}

#[derive(Args)]
#[command(after_help = "Examples:
  cv persist status              all fs-mode mounts
  cv persist status /work/run1   a directory and what lies below it, or a file
  cv persist status --json

Files, directories and links count as files; bytes are those of files whose content the bucket lacks.")]
pub struct StatusArgs {
    /// File or directory of the namespace.
    #[arg(value_name = "PATH", default_value = "/")]
    path: String,
    #[command(flatten)]
    result: ResultArgs,
}

#[derive(Args)]
#[command(after_help = "Examples:
  cv persist wait /work/run1                 until the bucket has it
  cv persist wait /work/run1 --timeout 5m    for five minutes at most

Waits for the changes that were made before it began, not for those that come meanwhile. What fails is tried again for \
ever, so without --timeout the wait for a bucket that is away has no end. Draws a bar on a terminal, prints lines \
elsewhere and one JSON object per line with --json. Exit code 1 when the time is over, and when all that is left are \
files that have lost blocks, which only `cv persist drop` or a removal ends.")]
pub struct WaitArgs {
    /// File or directory of the namespace.
    #[arg(value_name = "PATH")]
    path: String,
    /// Longest wait, as 30s or 5m.
    #[arg(long, value_name = "DURATION")]
    timeout: Option<Interval>,
    /// Progress as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// The backlog as it is shown.
#[derive(Debug, Serialize)]
struct BacklogView {
    path: String,
    files: u64,
    bytes: u64,
    deletions: u64,
    oldest_seconds: f64,
    files_per_second: u64,
    bytes_per_second: u64,
    last_error: String,
    /// Of `files`, those that have lost blocks, and the paths of the first of them.
    lost_files: u64,
    lost: Vec<String>,
}

impl BacklogView {
    fn new(path: &str, status: PersistStatus) -> Self {
        Self {
            path: path.to_owned(),
            files: status.files,
            bytes: status.bytes,
            deletions: status.deletions,
            oldest_seconds: status.oldest_age_ms as f64 / 1000.0,
            files_per_second: status.files_per_second,
            bytes_per_second: status.bytes_per_second,
            last_error: status.last_error,
            lost_files: status.lost_files,
            lost: status.lost.into_iter().map(|file| file.path).collect(),
        }
    }

    /// Files and objects that are to be dealt with.
    fn left(&self) -> u64 {
        self.files + self.deletions
    }

    fn say(&self, json: bool) -> Result<(), CliError> {
        console::say(json, self, || self.line())
    }

    fn line(&self) -> String {
        if self.left() == 0 {
            return format!("{}: the bucket has everything", self.path);
        }
        let error =
            if self.last_error.is_empty() { String::new() } else { format!("; the last error: {}", self.last_error) };
        let lost = match self.lost_files {
            0 => String::new(),
            files => format!("; {} with lost blocks", counted(files, "file")),
        };
        format!(
            "{}: {} ({}) to write, {} to delete, the oldest change {:.0} s ago; {} files/s, {}/s{lost}{error}",
            self.path,
            counted(self.files, "file"),
            console::size(self.bytes),
            counted(self.deletions, "object"),
            self.oldest_seconds,
            self.files_per_second,
            console::size(self.bytes_per_second)
        )
    }
}

impl StatusArgs {
    async fn run(self) -> Result<(), CliError> {
        let request = PersistStatusRequest { path: self.path.clone(), ..PersistStatusRequest::default() };
        let ask = async |mut master: Stubs| master.cluster.get_persist_status(request.clone()).await;
        let view = BacklogView::new(&self.path, self.result.cluster.call(ask).await?);
        self.result.show(&view, |view| console::line(view.line()))
    }
}

impl WaitArgs {
    async fn run(self) -> Result<(), CliError> {
        let follower = Follower { masters: self.cluster.masters().await?, what: "persistence" };
        Wait { follower, path: self.path, json: self.json }.run(self.timeout.map(Interval::get)).await
    }
}
