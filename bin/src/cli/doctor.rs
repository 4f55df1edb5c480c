//! `cv doctor`: what is wrong with this host, its configuration and its cluster, and what to do about it.
//!
//! Looking and judging are apart: each module below has what was seen as a plain value, and what that means as a
//! function of it, so that a test need not have the fault itself. Every look ends in time, whatever hangs.

mod buckets;
mod certificates;
mod clocks;
mod configuration;
mod disks;
mod finding;
mod host;
mod members;
mod memory;
mod ports;
mod process;

use std::collections::HashMap;
use std::time::Duration;

use cavern_conf::schema::{Client, Fuse};
use cavern_conf::{Effective, Role, counted};
use clap::Args;
use futures::FutureExt as _;
use futures::future::{LocalBoxFuture, join_all};
use serde_json::json;

use self::buckets::Access;
use self::disks::{Looked, Place};
use self::finding::{Check, Finding, Level};
use self::host::{Host, MountPoint};
use self::memory::Memory;
use self::ports::{Listener, Port};
use self::process::Process;
use super::connect::ResultArgs;
use super::mount::{CredentialArgs, key_value};
use crate::console;
use crate::error::CliError;

/// For each look at this host; and at what is beyond it, whose own deadlines are shorter as a rule.
const PATIENCE: Duration = Duration::from_secs(8);
const FAR_PATIENCE: Duration = Duration::from_secs(30);

#[derive(Args)]
pub struct DoctorArgs {
    /// What this host is to run: master, worker, fuse [default: worker and fuse, and master where cluster.masters names
    /// this host].
    #[arg(long, value_name = "ROLE", value_delimiter = ',', value_parser = process::parse)]
    role: Vec<Role>,
    /// Look at this host and its configuration: no other process is asked.
    #[arg(long)]
    offline: bool,
    /// Look at this bucket, s3://BUCKET[/PREFIX], and not at those that are mounted.
    #[arg(long, value_name = "URI", conflicts_with = "offline")]
    bucket: Option<String>,
    /// Option of that bucket, as `cv mount` has it; several times.
    #[arg(short = 'c', long = "option", value_name = "KEY=VALUE", value_parser = key_value, requires = "bucket")]
    options: Vec<(String, String)>,
    #[command(flatten)]
    credentials: CredentialArgs,
    /// Put a small object into each bucket that is written to, and delete it.
    #[arg(long, conflicts_with = "offline")]
    write: bool,
    #[command(flatten)]
    result: ResultArgs,
}

impl DoctorArgs {
    pub async fn run(self) -> Result<(), CliError> {
        let mut found = match self.result.cluster.effective() {
            Ok(effective) => self.look(effective).await?,
            Err(CliError::Usage(text)) => {
                let mut found = configuration::refused(&text);
                found.extend(aside("the kernel", || Host::look().judge(&Fuse::default(), &Client::default())).await);
                found
            }
            Err(error) => return Err(error),
        };
        // Processes of a host have much in common.
        let mut known = Vec::new();
        found.retain(|finding| {
            let is_new = !known.contains(finding);
            known.extend(is_new.then(|| finding.clone()));
            is_new
        });
        found.sort_by_key(|finding| (std::cmp::Reverse(finding.level), finding.check));
        self.report(&found)
    }

    async fn look(&self, effective: Effective) -> Result<Vec<Finding>, CliError> {
        let processes = match self.result.cluster.local_cluster()? {
            Some(cluster) => process::of_local(&cluster)?,
            None => {
                let (of, asked) = (effective.clone(), self.role.clone());
                let named = tokio::task::spawn_blocking(move || process::of_host(&of, &asked));
                match tokio::time::timeout(PATIENCE, named).await {
                    Ok(Ok(processes)) => processes,
                    // Names are not looked up in time: that is told of cluster.masters.
                    _ => process::of_host(&effective, &[Role::Worker, Role::Fuse]),
                }
            }
        };
        let options = self.bucket_options()?;
        let access = if self.write { Access::Write } else { Access::Read };
        let (config, asked) = (&effective.config, self.role.clone());
        let mut looks: Vec<LocalBoxFuture<'_, Vec<Finding>>> = vec![look_at_disks(&processes).boxed_local()];
        let (all, of) = (processes.clone(), effective.clone());
        looks.push(aside("the configuration", move || configuration::look(&of, &all)).boxed_local());
        let all = processes.clone();
        let memory = move || Memory::look().map(|memory| memory.judge(&all)).into_iter().collect();
        looks.push(aside("the memory", memory).boxed_local());
        let listeners: Vec<Listener> = processes.iter().flat_map(Listener::of).collect();
        let ports = move || listeners.iter().map(|one| Port::look(one.address()).judge(one)).collect();
        looks.push(aside("the ports", ports).boxed_local());
        for process in processes.iter().filter(|process| process.role == Role::Fuse) {
            let (fuse, client) = (process.config().fuse.clone(), process.config().client.clone());
            let path = fuse.mount_point.clone();
            looks.push(aside("the kernel", move || Host::look().judge(&fuse, &client)).boxed_local());
            let what = format!("the mount point {}", path.display());
            looks.push(aside(what, move || vec![MountPoint::look(&path).judge(&path)]).boxed_local());
        }
        let of = config.clone();
        looks.push(aside("the certificates", move || certificates::look(&of, &asked)).boxed_local());
        if !self.offline {
            looks.push(in_time("the members of the cluster", FAR_PATIENCE, members::look(config)).boxed_local());
            match &self.bucket {
                Some(uri) => {
                    let look = buckets::look(uri, &options, config, access);
                    looks.push(in_time("the bucket", FAR_PATIENCE, look).boxed_local());
                }
                None => {
                    let look = buckets::look_at_mounts(config, access);
                    looks.push(in_time("the buckets", FAR_PATIENCE, look).boxed_local());
                }
            }
        }
        Ok(join_all(looks).await.into_iter().flatten().collect())
    }

    fn bucket_options(&self) -> Result<HashMap<String, String>, CliError> {
        Ok(self.options.iter().cloned().chain(self.credentials.options()?).collect())
    }

    /// Shows what was found, the worst first. Whether something is wrong is the error.
    fn report(&self, found: &[Finding]) -> Result<(), CliError> {
        let of = |level| found.iter().filter(|finding| finding.level == level).count() as u64;
        let (errors, warnings) = (of(Level::Error), of(Level::Warning));
        let view = json!({
            "findings": found,
            "errors": errors,
            "warnings": warnings,
            "notes": of(Level::Note),
            "ok": of(Level::Ok),
        });
        self.result.show(&view, || found.iter().try_for_each(print))?;
        let code = match (errors, warnings) {
            (0, 0) => return Ok(()),
            (0, _) => 1,
            _ => 2,
        };
        let counts = format!("{} and {}", counted(errors, "error"), counted(warnings, "warning"));
        Err(CliError::Found { text: format!("{counts}: docs/doctor.md tells more of each"), code })
    }
}

fn print(finding: &Finding) -> Result<(), CliError> {
    let Finding { level, check, what, why, todo } = finding;
    console::line(format_args!("{:<8} {:<19} {what}", level.name(), check.name()))?;
    for (label, text) in [("why", why), ("do", todo)].into_iter().filter(|(_, text)| !text.is_empty()) {
        console::line(format_args!("         {label:<4}{text}"))?;
    }
    Ok(())
}

/// The directories of all processes, one after the other: what is measured is not to wait for another measurement.
async fn look_at_disks(processes: &[Process]) -> Vec<Finding> {
    let mut places: Vec<Place> = Vec::new();
    for place in processes.iter().flat_map(Place::of) {
        if !places.contains(&place) {
            places.push(place);
        }
    }
    let (mut looked, mut found) = (Vec::new(), Vec::new());
    for place in places {
        let what = place.name();
        let look = tokio::task::spawn_blocking(move || Looked::at(place));
        match tokio::time::timeout(PATIENCE, look).await {
            Ok(Ok(one)) => {
                found.extend(one.judge());
                looked.push(one);
            }
            Ok(Err(panicked)) => found.push(unfinished(&what, &panicked.to_string())),
            Err(_late) => found.push(late(&what, PATIENCE)),
        }
    }
    found.extend(disks::judge_together(&looked));
    found
}

/// What a look that blocks has found. One that hangs is left behind: this command ends without it.
async fn aside(what: impl Into<String>, look: impl FnOnce() -> Vec<Finding> + Send + 'static) -> Vec<Finding> {
    let what = what.into();
    let look = async {
        let looked = tokio::task::spawn_blocking(look).await;
        looked.unwrap_or_else(|panicked| vec![unfinished(&what, &panicked.to_string())])
    };
    in_time(&what, PATIENCE, look).await
}

/// What a look has found, or that it took too long.
async fn in_time(what: &str, patience: Duration, look: impl Future<Output = Vec<Finding>>) -> Vec<Finding> {
    // On the heap: some are long.
    tokio::time::timeout(patience, Box::pin(look)).await.unwrap_or_else(|_late| vec![late(what, patience)])
}

fn late(what: &str, patience: Duration) -> Finding {
    unfinished(what, &format!("no answer within {} s", patience.as_secs()))
}

fn unfinished(what: &str, cause: &str) -> Finding {
    Finding::error(
        Check::Unfinished,
        format!("{what} could not be looked at: {cause}"),
        "processes wait for it as this command did",
        "see whether a disk, a network file system or a mount hangs: `dmesg`, and `ps` for processes in state D",
    )
}

#[cfg(test)]
mod tests {
    use super::finding::wrong;
    use super::*;

    #[tokio::test]
    async fn a_look_that_hangs_or_breaks_is_a_finding() {
        let hung = in_time("the disk", Duration::from_millis(10), std::future::pending()).await;
        assert_eq!(wrong(&hung), [(Level::Error, Check::Unfinished)]);
        assert!(hung[0].what.contains("the disk"), "{hung:?}");
        let broken = aside("the disk", || panic!("it breaks")).await;
        assert_eq!(wrong(&broken), [(Level::Error, Check::Unfinished)]);
        assert!(aside("the disk", Vec::new).await.is_empty());
    }
}
