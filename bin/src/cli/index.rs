//! `cv index`, and how far the index of a mount is.

use cavern_conf::{counted, process};
use cavern_net::MasterChannel;
use cavern_proto::master::{IndexMountRequest, ListMountsRequest, MountStatus, MountTable};
use clap::Args;
use serde_json::{Value, json};

use super::connect::{ANSWER_TIMEOUT, LINE_PERIOD, POLL_PERIOD, Poller, ResultArgs, rpc};
use crate::console::{self, Progress};
use crate::error::CliError;

#[derive(Args)]
pub struct IndexArgs {
    /// Namespace path of the mount.
    path: String,
    /// Show progress until the index is complete.
    #[arg(long)]
    watch: bool,
    #[command(flatten)]
    result: ResultArgs,
}

/// How progress is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shown {
    /// As a bar on a terminal, in lines elsewhere.
    Text,
    /// In lines of JSON.
    Json,
    Nothing,
}

impl IndexArgs {
    pub async fn run(self) -> Result<(), CliError> {
        let masters = self.result.cluster.masters().await?;
        let begun = masters.ask_unary(rpc!(cluster.index_mount(IndexMountRequest { path: self.path }))).await?;
        let path = begun.mount.unwrap_or_default().path;
        let shown = if self.result.json { Shown::Json } else { Shown::Text };
        if self.watch {
            return follow(masters, &path, shown).await;
        }
        self.result.show(&json!({"path": path, "indexing": true}), || {
            console::line(format_args!(
                "{path} is being indexed: `cv mount` and `cv index {path} --watch` show how far"
            ))
        })
    }
}

/// Shows the index of a mount until it is complete, also over the restart of a master.
///
/// # Errors
/// The mount is gone, the wait was interrupted, or no master answered for long.
pub async fn follow(masters: MasterChannel, path: &str, shown: Shown) -> Result<(), CliError> {
    let stop = process::shutdown_on_signals();
    let follower = Poller::new(masters, "the index");
    let mut progress = Progress::new(shown != Shown::Text);
    let goes_on = format!("goes on with one: `cv index {path} --watch`");
    loop {
        let table = follower.ask(ANSWER_TIMEOUT, &goes_on, rpc!(cluster.list_mounts(ListMountsRequest {}))).await?;
        // A master that has just begun to lead may not have looked at the mount yet.
        if let Some(index) = IndexView::of(&table, path)? {
            if !index.status.indexing {
                drop(progress);
                return index.say(shown);
            }
            progress.show_or_say(index.part(), index.line(), LINE_PERIOD, || index.say(shown))?;
        }
        tokio::select! {
            () = tokio::time::sleep(POLL_PERIOD) => {}
            () = stop.cancelled() => {
                drop(progress);
                return Err(CliError::Failed(format!("interrupted; the index goes on: `cv index {path} --watch`")));
            }
        }
    }
}

/// How far the index of a mount is.
struct IndexView<'a> {
    path: &'a str,
    status: &'a MountStatus,
}

impl<'a> IndexView<'a> {
    /// That of the mount at a path; `None` while its master does not know.
    fn of(table: &'a MountTable, path: &'a str) -> Result<Option<Self>, CliError> {
        let Some(mount) = table.mounts.iter().find(|mount| mount.path == path) else {
            return Err(CliError::Failed(format!("{path} was unmounted before it was indexed")));
        };
        let status = table.status.iter().find(|status| status.mount_id == mount.id);
        Ok(status.map(|status| Self { path, status }))
    }

    /// How much is done of how much there is likely to be.
    fn part(&self) -> Option<(u64, u64)> {
        let MountStatus { indexed_entries, expected_entries, .. } = self.status;
        (*expected_entries > 0).then_some((*indexed_entries, *expected_entries))
    }

    /// Estimate of the rest; absent where nothing tells how much it is, and before there is a rate.
    fn eta_seconds(&self) -> Option<u64> {
        let MountStatus { indexed_entries, expected_entries, index_rate, .. } = self.status;
        let left = expected_entries.saturating_sub(*indexed_entries);
        (self.status.indexing && left > 0 && *index_rate > 0).then(|| left.div_ceil(*index_rate))
    }

    fn view(&self) -> Value {
        let status = self.status;
        console::fields! { status;
            indexing, expected_entries, hidden_keys, unlisted_directories, last_error;
            "path": self.path,
            "entries": status.indexed_entries,
            "entries_per_second": status.index_rate,
            "eta_seconds": self.eta_seconds(),
            "streams": status.index_streams,
        }
    }

    fn line(&self) -> String {
        let status = self.status;
        let entries = counted(status.indexed_entries, "entry");
        let failing = console::prefixed(", failing: ", &console::escaped(&status.last_error));
        if !status.indexing {
            return format!("{} is indexed: {entries}{failing}", self.path);
        }
        let about = match status.expected_entries {
            0 => String::new(),
            expected => format!(" of about {expected}"),
        };
        let unlisted = match status.unlisted_directories {
            0 => String::new(),
            left => format!(", {} to be listed", counted(left, "directory")),
        };
        let streams = match status.index_streams {
            0 => String::new(),
            streams => format!(", {}/s, {streams} LISTs at a time", status.index_rate),
        };
        let left = console::left(self.eta_seconds().map(|seconds| seconds as f64));
        format!("{} is being indexed: {entries}{about}{unlisted}{streams}{left}{failing}", self.path)
    }

    fn say(&self, shown: Shown) -> Result<(), CliError> {
        match shown {
            Shown::Nothing => Ok(()),
            Shown::Text | Shown::Json => console::say(shown == Shown::Json, &self.view(), || self.line()),
        }
    }
}

#[cfg(test)]
mod tests {
    use cavern_proto::master::Mount;

    use super::*;

    #[test]
    fn an_index_says_how_far_it_is_and_how_long_it_takes_where_that_can_be_told() {
        let mount = Mount { id: 7, path: "/m".into(), ..Mount::default() };
        let status = MountStatus {
            mount_id: 7,
            indexing: true,
            indexed_entries: 500,
            index_streams: 4,
            ..MountStatus::default()
        };
        let mut table = MountTable { mounts: vec![mount], ..MountTable::default() };
        assert!(IndexView::of(&table, "/m").unwrap().is_none() && IndexView::of(&table, "/n").is_err());
        table.status = vec![MountStatus { index_rate: 100, ..status.clone() }];
        let early = IndexView::of(&table, "/m").unwrap().unwrap();
        assert_eq!((early.part(), early.eta_seconds()), (None, None));
        assert_eq!(early.line(), "/m is being indexed: 500 entries, 100/s, 4 LISTs at a time");
        table.status = vec![MountStatus { index_rate: 100, expected_entries: 1500, ..status.clone() }];
        let known = IndexView::of(&table, "/m").unwrap().unwrap();
        assert_eq!((known.part(), known.eta_seconds()), (Some((500, 1500)), Some(10)));
        assert!(known.line().ends_with("500 entries of about 1500, 100/s, 4 LISTs at a time, 10 seconds left"));
        table.status = vec![MountStatus { indexing: false, last_error: "away".into(), ..status }];
        let done = IndexView::of(&table, "/m").unwrap().unwrap();
        assert_eq!(done.line(), "/m is indexed: 500 entries, failing: away");
        assert_eq!(done.view()["eta_seconds"], Value::Null);
    }
}
