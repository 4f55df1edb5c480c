//! `cv refresh`.

use cavern_conf::counted;
use cavern_net::master::Stubs;
use cavern_proto::master::{RefreshFate, RefreshItem, RefreshProgress, RefreshRequest};
use clap::Args;
use serde::Serialize;

use super::connect::ResultArgs;
use crate::console;
use crate::error::CliError;

#[derive(Args)]
#[command(after_help = "Examples:
  cv refresh /train                     a directory and all below it
  cv refresh /train/part-1 --shallow    one directory alone
  cv refresh /work --dry-run            what others changed in the bucket

In fs-mode the namespace is the truth: what was changed there and is not in the bucket yet stays as it is, and is \
reported as a conflict where others have changed the object as well.

Returns when every client of the cluster has taken in what changed: \
from then on no open sees an old version.")]
pub struct RefreshArgs {
    /// Namespace path.
    #[arg(value_name = "PATH")]
    path: String,
    /// This directory only, not those below it.
    #[arg(long)]
    shallow: bool,
    /// In fs-mode: change nothing, and name what would be.
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    result: ResultArgs,
}

#[derive(Serialize)]
struct Refreshed {
    directories: u64,
    entries: u64,
    added: u64,
    changed: u64,
    removed: u64,
    hidden: u64,
    conflicts: u64,
    pending: u64,
    names: Vec<Name>,
}

/// A conflict, or what a dry run would change.
#[derive(Serialize)]
struct Name {
    fate: &'static str,
    path: String,
}

impl Name {
    fn of(item: RefreshItem) -> Self {
        let fate = match item.fate() {
            RefreshFate::Added => "added",
            RefreshFate::Changed => "changed",
            RefreshFate::Removed => "removed",
            RefreshFate::Conflict => "conflict",
            RefreshFate::Pending => "pending",
            RefreshFate::Nothing => "unchanged",
        };
        Self { fate, path: item.path }
    }
}

impl RefreshArgs {
    pub async fn run(self) -> Result<(), CliError> {
        let request = RefreshRequest { path: self.path.clone(), recursive: !self.shallow, dry_run: self.dry_run };
        // Begun again, it says what was left to do.
        let refresh = async |mut master: Stubs| {
            let mut progress = master.namespace.refresh(request.clone()).await?.into_inner();
            let (mut last, mut names) = (RefreshProgress::default(), Vec::new());
            while let Some(mut message) = progress.message().await? {
                names.extend(std::mem::take(&mut message.items).into_iter().map(Name::of));
                last = message;
            }
            Ok((last, names))
        };
        let (last, names) = self.result.cluster.masters().await?.ask(refresh).await?;
        if !last.done {
            return Err(CliError::Failed(format!("the master gave up refreshing {}: see its log", self.path)));
        }
        let RefreshProgress { directories, entries, added, changed, removed, hidden, conflicts, pending, .. } = last;
        let view = Refreshed { directories, entries, added, changed, removed, hidden, conflicts, pending, names };
        self.result.show(&view, |view| self.print(view))
    }

    fn print(&self, view: &Refreshed) -> Result<(), CliError> {
        let Refreshed { directories, entries, added, changed, removed, hidden, conflicts, pending, names } = view;
        for Name { fate, path } in names {
            console::line(format_args!("{fate:8}  {path}"))?;
        }
        let some = |count: &u64, what: &str| if *count == 0 { String::new() } else { format!(", {count} {what}") };
        console::line(format_args!(
            "{}: {}, {}: {}{added} added, {changed} changed, {removed} removed{}{}{}",
            self.path,
            counted(*directories, "directory"),
            counted(*entries, "entry"),
            if self.dry_run { "would be " } else { "" },
            some(hidden, if *hidden == 1 { "key hidden" } else { "keys hidden" }),
            some(conflicts, "in conflict"),
            some(pending, "left until the bucket has followed")
        ))
    }
}
