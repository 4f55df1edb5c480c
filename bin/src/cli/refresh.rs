//! `cv refresh`.

use cavern_conf::counted;
use cavern_net::master::Stubs;
use cavern_proto::master::{RefreshItem, RefreshProgress, RefreshRequest};
use clap::Args;
use serde_json::{Value, json};

use super::connect::{ResultArgs, word};
use crate::console;
use crate::error::CliError;

#[derive(Args)]
pub struct RefreshArgs {
    /// Namespace path.
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

/// What has become, or would become, of a name.
fn fate(item: &RefreshItem) -> String {
    word(item.fate().as_str_name(), "REFRESH_FATE_")
}

impl RefreshArgs {
    pub async fn run(self) -> Result<(), CliError> {
        let request = RefreshRequest { path: self.path.clone(), recursive: !self.shallow, dry_run: self.dry_run };
        // Begun again, it says what was left to do.
        let refresh = async |mut master: Stubs| {
            let mut progress = master.namespace.refresh(request.clone()).await?.into_inner();
            let (mut last, mut items) = (RefreshProgress::default(), Vec::new());
            while let Some(mut message) = progress.message().await? {
                items.append(&mut message.items);
                last = message;
            }
            Ok((last, items))
        };
        let (last, items) = self.result.cluster.masters().await?.ask(refresh).await?;
        if !last.done {
            return Err(CliError::Failed(format!("the master gave up refreshing {}: see its log", self.path)));
        }
        let name = |item: &RefreshItem| json!({"fate": fate(item), "path": item.path});
        let view = console::fields! { last;
            directories, entries, added, changed, removed, hidden, conflicts, pending;
            // Conflicts, and what a dry run would change.
            "names": items.iter().map(name).collect::<Vec<Value>>(),
        };
        self.result.show(&view, || self.print(&last, &items))
    }

    fn print(&self, last: &RefreshProgress, items: &[RefreshItem]) -> Result<(), CliError> {
        for item in items {
            console::line(format_args!("{:8}  {}", fate(item), item.path))?;
        }
        let RefreshProgress { added, changed, removed, hidden, .. } = last;
        let some = |count: u64, what: &str| if count == 0 { String::new() } else { format!(", {count} {what}") };
        console::line(format_args!(
            "{}: {}, {}: {}{added} added, {changed} changed, {removed} removed{}{}{}",
            self.path,
            counted(last.directories, "directory"),
            counted(last.entries, "entry"),
            if self.dry_run { "would be " } else { "" },
            some(*hidden, if *hidden == 1 { "key hidden" } else { "keys hidden" }),
            some(last.conflicts, "in conflict"),
            some(last.pending, "left until the bucket has followed")
        ))
    }
}
