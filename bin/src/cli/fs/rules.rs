//! `cv fs quota` and `cv fs ttl`: what directories of fs-mode mounts may have of their own. Both are set, shown, taken
//! away and listed in the same way.

use std::str::FromStr;
use std::time::Duration;

use cavern_client::Client;
use cavern_conf::{ByteSize, Interval};
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{Quota, Quotas, SetQuota, SetTtl, Ttl, TtlAction};
use clap::{Args, Subcommand, ValueEnum};
use serde_json::{Value, json};

use super::change::{in_fs_mode, make};
use super::walk::PathArgs;
use crate::cli::connect::{ResultArgs, word};
use crate::console::{self, or_dash};
use crate::error::CliError;

/// How often it is looked whether everything has been counted.
const COUNT_POLL: Duration = Duration::from_millis(100);

#[derive(Subcommand)]
pub enum RuleCommand<R: Rule> {
    /// Give a directory a rule of its own.
    Set {
        /// Absolute path of a directory in an fs-mode mount.
        path: String,
        #[command(flatten)]
        rule: R,
    },
    /// Show the rules that hold for a directory or a file: its own, and those of the directories above it.
    Get(PathArgs),
    /// Take the rule of a directory away.
    Clear(PathArgs),
    /// Show all rules.
    List,
}

/// What a directory may have of its own, as the command line has it.
pub trait Rule: Args {
    /// A rule as the masters have it.
    type Found;

    /// What one is called, and, in refusals, several.
    const NAME: &'static str;
    const WHAT: &'static str;
    /// Said of a path for which none holds, and where there is none at all.
    const NONE_HOLDS: &'static str;
    const NONE: &'static str;

    /// The rules that hold in a directory, the nearest first; of inode 0, all there are.
    async fn find(client: &Client, directory: u64) -> Result<Vec<Self::Found>, CliError>;
    /// The directory that has it.
    fn inode(found: &Self::Found) -> u64;
    fn view(found: &Self::Found) -> Value;
    fn print(found: &[Self::Found], none: &str) -> Result<(), CliError>;

    fn change(&self, inode: u64) -> Change;
    /// Takes the rule of a directory away.
    fn cleared(inode: u64) -> Change;
    /// Waits until the rule that was set for a directory is in force.
    async fn settle(_client: &Client, _inode: u64) -> Result<(), CliError> {
        Ok(())
    }
}

impl<R: Rule> RuleCommand<R> {
    pub async fn run(&self, client: &Client, result: &ResultArgs) -> Result<(), CliError> {
        let (directory, none) = match self {
            Self::Set { path, rule } => {
                let inode = in_fs_mode(client, path, R::WHAT).await?.inode;
                make(client, path, rule.change(inode)).await?;
                return R::settle(client, inode).await;
            }
            Self::Clear(PathArgs { path }) => {
                let inode = in_fs_mode(client, path, R::WHAT).await?.inode;
                if !R::find(client, inode).await?.iter().any(|found| R::inode(found) == inode) {
                    return Err(CliError::NotFound(format!("{path} has no {} of its own", R::NAME)));
                }
                return make(client, path, R::cleared(inode)).await.map(drop);
            }
            Self::Get(PathArgs { path }) => {
                let node = in_fs_mode(client, path, R::WHAT).await?;
                (if node.is_directory() { node.inode } else { node.parent }, format!("{}{path}", R::NONE_HOLDS))
            }
            Self::List => (0, R::NONE.to_owned()),
        };
        let found = R::find(client, directory).await?;
        result.show(&found.iter().map(R::view).collect::<Vec<_>>(), || R::print(&found, &none))
    }
}

#[derive(Args)]
pub struct QuotaArgs {
    /// Bytes of all files, such as 500GiB; none for no bound.
    #[arg(long, value_name = "SIZE", required_unless_present = "inodes", value_parser = no_or::<ByteSize>)]
    bytes: Option<Bound<ByteSize>>,
    /// Files, directories and links; none for no bound.
    #[arg(long, value_name = "COUNT", value_parser = no_or::<u64>)]
    inodes: Option<Bound<u64>>,
}

/// A number, or none.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Bound<T>(Option<T>);

fn no_or<T: FromStr<Err: ToString> + Default + PartialEq>(text: &str) -> Result<Bound<T>, String> {
    if text == "none" {
        return Ok(Bound(None));
    }
    let bound = text.parse().map_err(|error: T::Err| error.to_string())?;
    if bound == T::default() {
        return Err("nothing at all would have room: say none for no bound".to_owned());
    }
    Ok(Bound(Some(bound)))
}

/// What is bounded; 0 is no bound.
fn bound(max: u64) -> Option<u64> {
    (max > 0).then_some(max)
}

impl Rule for QuotaArgs {
    type Found = Quota;

    const NAME: &'static str = "quota";
    const WHAT: &'static str = "quotas";
    const NONE_HOLDS: &'static str = "no quota holds for ";
    const NONE: &'static str = "no directory has a quota";

    async fn find(client: &Client, directory: u64) -> Result<Vec<Quota>, CliError> {
        let Quotas { quotas, counted } = client.metadata().quotas(directory).await?;
        if !counted && !quotas.is_empty() {
            console::remark("not everything has been counted yet: there is more than what is shown");
        }
        Ok(quotas)
    }

    fn inode(found: &Quota) -> u64 {
        found.inode
    }

    fn view(found: &Quota) -> Value {
        let (max_bytes, max_inodes) = (bound(found.max_bytes), bound(found.max_inodes));
        let Quota { path, bytes, inodes, .. } = found;
        json!({"path": path, "bytes": bytes, "max_bytes": max_bytes, "inodes": inodes, "max_inodes": max_inodes})
    }

    fn print(found: &[Quota], none: &str) -> Result<(), CliError> {
        let row = |quota: &Quota| {
            let (max_bytes, max_inodes) = (bound(quota.max_bytes), bound(quota.max_inodes));
            let share = |part, whole: Option<u64>| or_dash(whole.map(|whole| console::share(part, whole)));
            let (shares, inodes) = ([share(quota.bytes, max_bytes), share(quota.inodes, max_inodes)], quota.inodes);
            let [byte_share, inode_share] = shares;
            let (used, of) = (console::size(quota.bytes), or_dash(max_bytes.map(console::size)));
            [used, of, byte_share, inodes.to_string(), or_dash(max_inodes), inode_share, quota.path.clone()]
        };
        console::table_or(none, ["BYTES", "OF", "USE", "INODES", "OF", "USE", "DIRECTORY"], found.iter().map(row))
    }

    fn change(&self, inode: u64) -> Change {
        let max_bytes = self.bytes.map(|bound| bound.0.map_or(0, ByteSize::bytes));
        let max_inodes = self.inodes.map(|bound| bound.0.unwrap_or(0));
        Change::SetQuota(SetQuota { inode, max_bytes, max_inodes })
    }

    fn cleared(inode: u64) -> Change {
        Change::SetQuota(SetQuota { inode, max_bytes: Some(0), max_inodes: Some(0) })
    }

    async fn settle(client: &Client, inode: u64) -> Result<(), CliError> {
        let mut is_reported = false;
        loop {
            let Quotas { quotas, counted } = client.metadata().quotas(inode).await?;
            // Somebody may have taken the last one away meanwhile.
            if counted || quotas.is_empty() {
                return Ok(());
            }
            if !std::mem::replace(&mut is_reported, true) {
                console::remark("counting what is there: until that is done, the quota may be exceeded");
            }
            tokio::time::sleep(COUNT_POLL).await;
        }
    }
}

#[derive(Args)]
pub struct TtlArgs {
    /// Such as 12h or 7d; seconds at least.
    #[arg(value_parser = seconds)]
    time: u64,
    /// What becomes of files whose time is over.
    #[arg(long, value_enum)]
    action: Action,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Action {
    None = TtlAction::None as isize,
    Free = TtlAction::Free as isize,
    Delete = TtlAction::Delete as isize,
}

fn seconds(text: &str) -> Result<u64, String> {
    let time: Interval = text.parse()?;
    match time.get().as_secs() {
        0 => Err("files live for a second at least".to_owned()),
        seconds => Ok(seconds),
    }
}

fn action_of(ttl: &Ttl) -> String {
    word(ttl.action().as_str_name(), "TTL_ACTION_")
}

impl Rule for TtlArgs {
    type Found = Ttl;

    const NAME: &'static str = "rule";
    const WHAT: &'static str = "times to live";
    const NONE_HOLDS: &'static str = "files live for ever at ";
    const NONE: &'static str = "no directory has a rule: files live for ever";

    async fn find(client: &Client, directory: u64) -> Result<Vec<Ttl>, CliError> {
        Ok(client.metadata().ttls(directory).await?.ttls)
    }

    fn inode(found: &Ttl) -> u64 {
        found.inode
    }

    fn view(found: &Ttl) -> Value {
        json!({"path": found.path, "seconds": found.seconds, "action": action_of(found)})
    }

    fn print(found: &[Ttl], none: &str) -> Result<(), CliError> {
        let row = |ttl: &Ttl| {
            let after = Interval::millis(ttl.seconds.saturating_mul(1000)).to_string();
            [after, action_of(ttl), ttl.path.clone()]
        };
        console::table_or(none, ["AFTER", "ACTION", "DIRECTORY"], found.iter().map(row))
    }

    fn change(&self, inode: u64) -> Change {
        Change::SetTtl(SetTtl { inode, seconds: self.time, action: self.action as i32 })
    }

    fn cleared(inode: u64) -> Change {
        Change::SetTtl(SetTtl { inode, ..SetTtl::default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_numbers_or_none() {
        assert_eq!(no_or("none"), Ok(Bound::<u64>(None)));
        assert_eq!(no_or("7"), Ok(Bound(Some(7_u64))));
        assert_eq!(no_or("2GiB"), Ok(Bound(Some(ByteSize::gib(2)))));
        for wrong in ["0", "0B", "0GiB", "", "-1", "many", "None"] {
            assert!(no_or::<u64>(wrong).is_err() && no_or::<ByteSize>(wrong).is_err(), "{wrong:?}");
        }
    }
}
