//! `cv persist`: how far the buckets of fs-mode mounts are behind.

use std::time::Duration;

use cavern_conf::{Interval, counted};
use cavern_net::master::Stubs;
use cavern_proto::master::{LostAction, PersistStatus, PersistStatusRequest, ResolveLostReply, ResolveLostRequest};
use clap::{Args, Subcommand};
use serde_json::Value;
use tokio::time::Instant;

use super::connect::{ANSWER_TIMEOUT, LINE_PERIOD, POLL_PERIOD, Poller, ResultArgs};
use crate::console::{self, Progress};
use crate::error::CliError;

/// How long a master may take for the first answer, before which clients are waited for: for some of their leases.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(120);

#[derive(Subcommand)]
pub enum PersistCommand {
    /// Show what the buckets lack.
    Status {
        /// File or directory of the namespace.
        #[arg(default_value = "/")]
        path: String,
    },
    /// Wait until the buckets have what is in the namespace now.
    Wait(WaitArgs),
    /// Try files that have lost blocks once more.
    Retry(PathArgs),
    /// Give up lost blocks: files go back to what the bucket has, or get zeros.
    Drop(PathArgs),
}

#[derive(Args)]
pub struct WaitArgs {
    /// File or directory of the namespace.
    path: String,
    /// Longest wait, as 30s or 5m.
    #[arg(long, value_name = "DURATION")]
    timeout: Option<Interval>,
}

#[derive(Args)]
pub struct PathArgs {
    /// File or directory of the namespace.
    path: String,
}

impl PersistCommand {
    pub async fn run(self, result: &ResultArgs) -> Result<(), CliError> {
        match self {
            Self::Status { path } => {
                let request = PersistStatusRequest { path: path.clone(), ..PersistStatusRequest::default() };
                let ask = async |mut master: Stubs| master.cluster.get_persist_status(request.clone()).await;
                let backlog = Backlog { path, status: result.cluster.call(ask).await? };
                result.show(&backlog.view(), || console::line(backlog.line()))
            }
            Self::Wait(args) => args.run(result).await,
            Self::Retry(args) => resolve_lost(args.path, LostAction::Retry, result).await,
            Self::Drop(args) => resolve_lost(args.path, LostAction::Drop, result).await,
        }
    }
}

/// How far the bucket is behind a file, or behind a directory and all below it.
pub fn status_view(status: &PersistStatus) -> Value {
    // Of the files, those that have lost blocks, with the paths of the first of them, and those that were written to
    // during their last upload.
    console::fields! { status;
        files, bytes, deletions, files_per_second, bytes_per_second, last_error, lost_files, changing_files;
        "persisted": status.files + status.deletions == 0,
        // Age of the oldest change that it lacks.
        "oldest_seconds": status.oldest_age_ms as f64 / 1000.0,
        "lost": lost_paths(status),
    }
}

fn lost_paths(status: &PersistStatus) -> Vec<&str> {
    status.lost.iter().map(|file| file.path.as_str()).collect()
}

/// What the buckets lack below a path.
struct Backlog {
    path: String,
    status: PersistStatus,
}

impl Backlog {
    fn view(&self) -> Value {
        let mut view = status_view(&self.status);
        view["path"] = self.path.as_str().into();
        view
    }

    /// Files and objects that are to be dealt with.
    fn left(&self) -> u64 {
        self.status.files + self.status.deletions
    }

    fn say(&self, json: bool) -> Result<(), CliError> {
        console::say(json, &self.view(), || self.line())
    }

    fn line(&self) -> String {
        let Self { path, status } = self;
        if self.left() == 0 {
            return format!("{path}: the bucket has everything");
        }
        let error = console::prefixed("; the last error: ", &status.last_error);
        let some = |files: u64, what: &str| match files {
            0 => String::new(),
            files => format!("; {} {what}", counted(files, "file")),
        };
        let changing = some(status.changing_files, "written to during the last upload");
        let notes = changing + &some(status.lost_files, "with lost blocks");
        format!(
            "{path}: {} ({}) to write, {} to delete, the oldest change {:.0} s ago; {} files/s, {}/s{notes}{error}",
            counted(status.files, "file"),
            console::size(status.bytes),
            counted(status.deletions, "object"),
            status.oldest_age_ms as f64 / 1000.0,
            status.files_per_second,
            console::size(status.bytes_per_second)
        )
    }

    /// Why waiting any longer makes no sense.
    fn lost_only(&self) -> String {
        let lost = lost_paths(&self.status);
        let files = match self.status.lost_files {
            1 => "1 file has".to_owned(),
            files => format!("{files} files have"),
        };
        let more = match self.status.lost_files.saturating_sub(lost.len() as u64) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        format!(
            "{files} lost blocks before the bucket had them, and nothing else is left to be written: {}{more}. The \
             workers of these blocks are there and have not got them. `cv persist retry PATH` tries once more; \
             `cv persist drop PATH` takes the file back to the version that the bucket has, or fills the lost blocks \
             with zeros",
            lost.join(", ")
        )
    }
}

impl WaitArgs {
    /// Waits until the bucket has what was in the namespace when the wait began, also over the restart of a master.
    ///
    /// # Errors
    /// The time is over, nothing is left but files that have lost blocks, there is no such path, or no master answered
    /// for long.
    async fn run(self, result: &ResultArgs) -> Result<(), CliError> {
        let Self { path, timeout } = self;
        let (timeout, began) = (timeout.map(Interval::get), Instant::now());
        let follower = Poller::new(result.cluster.masters().await?, "persistence");
        // The backlog of changes up to a number, or of those that there are now: before that, clients bring what they
        // have answered, and one that is cut off is waited for.
        let ask = async |up_to_change: u64, patience: Duration| {
            let request = PersistStatusRequest { path: path.clone(), up_to_change, settle: up_to_change == 0 };
            let ask = async |mut master: Stubs| master.cluster.get_persist_status(request.clone()).await;
            let status = follower.ask(patience, "goes on when one is started", ask).await?;
            Ok::<_, CliError>(Backlog { path: path.clone(), status })
        };
        let mut progress = Progress::new(result.json);
        let settling = timeout.map_or(SETTLE_TIMEOUT, |timeout| timeout.min(SETTLE_TIMEOUT));
        let mut backlog = ask(0, settling).await?;
        // What is changed from here on is not waited for.
        let up_to = backlog.status.change;
        let mut most = 0;
        while backlog.left() > 0 {
            let left = backlog.left();
            most = most.max(left);
            progress
                .show_or_say(Some((most - left, most)), backlog.line(), LINE_PERIOD, || backlog.say(result.json))?;
            if backlog.status.lost_files == left {
                return Err(CliError::Failed(backlog.lost_only()));
            }
            if timeout.is_some_and(|timeout| began.elapsed() >= timeout) {
                return Err(CliError::Failed(format!(
                    "the time is over; {}; `cv persist status {path}` tells how it goes on",
                    backlog.line()
                )));
            }
            tokio::time::sleep(POLL_PERIOD).await;
            backlog = ask(up_to, ANSWER_TIMEOUT).await?;
        }
        drop(progress);
        backlog.say(result.json)
    }
}

/// Has something done about lost blocks.
async fn resolve_lost(path: String, action: LostAction, result: &ResultArgs) -> Result<(), CliError> {
    let request = ResolveLostRequest { path: path.clone(), action: action.into() };
    let ask = async |mut master: Stubs| master.cluster.resolve_lost(request.clone()).await;
    let reply = result.cluster.call(ask).await?;
    let view = console::fields! { reply; files, still_lost, reverted, zeroed, blocks, last_error; "path": path };
    let ResolveLostReply { files, still_lost, reverted, zeroed, blocks, last_error } = reply;
    let is_failure = action == LostAction::Retry && still_lost > 0;
    result.show(&view, || match action {
        _ if is_failure => Ok(()),
        LostAction::Drop => {
            let blocks = counted(blocks, "lost block");
            let (reverted, zeroed) = (counted(reverted, "file"), counted(zeroed, "file"));
            console::line(format_args!(
                "{path}: {blocks} given up; {reverted} went back to the version of the bucket, in {zeroed} they are \
                 zeros"
            ))
        }
        LostAction::Retry | LostAction::Unspecified => {
            let error = console::prefixed("; the last error: ", &last_error);
            console::line(format_args!("{path}: {} tried once more{error}", counted(files, "file")))
        }
    })?;
    if !is_failure {
        return Ok(());
    }
    Err(CliError::Failed(format!("{path}: {} still with lost blocks; {last_error}", counted(still_lost, "file"))))
}
