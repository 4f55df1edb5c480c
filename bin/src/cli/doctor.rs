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
mod look;
mod members;
mod memory;
mod place;
mod ports;
mod process;

use std::cmp::Reverse;
use std::collections::HashMap;
use std::time::Duration;

use cavern_conf::schema::{Client, Fuse};
use cavern_conf::{Config, Effective, Role, counted};
use cavern_proto::StoreUri;
use clap::Args;
use futures::FutureExt as _;
use futures::future::{LocalBoxFuture, join_all};
use serde_json::json;

use self::buckets::Access;
use self::disks::Looked;
use self::finding::{Finding, Level};
use self::host::{Host, MountPoint};
use self::look::{aside, in_time};
use self::place::Place;
use self::ports::Listener;
use self::process::Process;
use super::connect::ResultArgs;
use super::mount::{CredentialArgs, key_value};
use super::one_host::{allow, complete};
use crate::console;
use crate::error::CliError;
use crate::local::one_host;

/// For each look at what is beyond this host, whose own deadlines are shorter as a rule.
const FAR_PATIENCE: Duration = Duration::from_secs(30);

/// What a look has found, or that it has not come to its end.
type Findings = Result<Vec<Finding>, Finding>;

#[derive(Args)]
pub struct DoctorArgs {
    /// What this host is to run: master, worker, fuse [default: worker and fuse, and master where cluster.masters names
    /// this host].
    #[arg(long, value_name = "ROLE", value_delimiter = ',', value_parser = process::parse)]
    role: Vec<Role>,
    /// Look at this host and its configuration: no other process is asked.
    #[arg(long)]
    offline: bool,
    /// Look at this bucket, named as for `cv mount`, and not at those that are mounted.
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
        let options = self.bucket_options()?;
        let looked = match self.result.cluster.effective() {
            Ok(effective) if self.role.is_empty() && !self.result.cluster.is_named(&effective) => {
                Box::pin(self.look_without_cluster(options)).await
            }
            Ok(effective) => Box::pin(self.look(effective, &options)).await,
            Err(error) => Err(error),
        };
        let looks = match looked {
            Ok(looks) => looks,
            Err(CliError::Usage(text)) => {
                let kernel = aside("the kernel", || Host::look().judge(&Fuse::default(), &Client::default())).await;
                vec![Ok(configuration::refused(&text)), kernel]
            }
            Err(error) => return Err(error),
        };
        let found = looks.into_iter().flat_map(|look| look.unwrap_or_else(|unfinished| vec![unfinished]));
        let mut found: Vec<Finding> = found.collect();
        found.sort_by_cached_key(|finding| (Reverse(finding.level), finding.check, finding.what.clone()));
        // Processes of a host have much in common.
        found.dedup();
        self.report(&found)
    }

    fn bucket_options(&self) -> Result<HashMap<String, String>, CliError> {
        let credentials = self.credentials.options()?;
        if self.bucket.is_none() && !credentials.is_empty() {
            let text = "credentials are those of a bucket: name it with --bucket. Mounts have theirs at the masters";
            return Err(CliError::Usage(text.to_owned()));
        }
        Ok(self.options.iter().cloned().chain(credentials).collect())
    }

    /// What a bucket as a directory of this host needs; with `--bucket` also that bucket, as `cv fuse URI` finds it.
    async fn look_without_cluster(&self, mut options: HashMap<String, String>) -> Result<Vec<Findings>, CliError> {
        let mut config = one_host::configuration(Vec::new())?;
        let (fuse, client) = (config.fuse.clone(), config.client.clone());
        let mut looks = vec![
            aside("the kernel", move || Host::look().judge(&fuse, &client)).await,
            aside("the mounts", || configuration::without(&one_host::running())).await,
        ];
        if let Some(bucket) = &self.bucket {
            // One that cannot be read is told of where it is opened.
            if let Ok(uri) = StoreUri::parse(bucket) {
                complete(uri.scheme(), &mut options);
                allow(&mut config.ufs, &uri, &options);
            }
            let look = buckets::look(bucket, &options, &config, self.access()).boxed_local();
            looks.push(in_time("the bucket", FAR_PATIENCE, look).await);
        }
        Ok(looks)
    }

    fn access(&self) -> Access {
        if self.write { Access::Write } else { Access::Read }
    }

    async fn look(&self, effective: Effective, options: &HashMap<String, String>) -> Result<Vec<Findings>, CliError> {
        let local = self.result.cluster.local_cluster()?;
        let of_mount = effective.file.as_deref().map(one_host::of_conf).transpose()?.flatten();
        let processes = match local.as_ref().or(of_mount.as_ref()) {
            Some(cluster) => process::of_local(cluster, &self.role)?,
            None => {
                let (of, asked) = (effective.clone(), self.role.clone());
                let named = aside("the masters", move || process::of_host(&of, &asked)).await;
                // Names that are not looked up in time are told of with the configuration.
                named.unwrap_or_else(|_late| process::of_host(&effective, &[Role::Worker, Role::Fuse]))
            }
        };
        let config = &effective.config;
        let mut looks: Vec<LocalBoxFuture<'_, Findings>> = vec![look_at_disks(&processes).boxed_local()];
        let (of, all) = (effective.clone(), processes.clone());
        looks.push(aside("the configuration", move || configuration::look(&of, &all)).boxed_local());
        let all = processes.clone();
        looks.push(aside("the memory", move || memory::look(&all)).boxed_local());
        let listeners: Vec<Listener> = processes.iter().flat_map(Listener::of).collect();
        let ports = move || listeners.iter().map(Listener::look).collect::<Vec<_>>();
        looks.push(aside("the ports", ports).boxed_local());
        for process in processes.iter().filter(|process| process.role == Role::Fuse) {
            let Config { fuse, client, .. } = process.config().clone();
            let (path, what) = (fuse.mount_point.clone(), format!("the mount point {}", fuse.mount_point.display()));
            looks.push(aside("the kernel", move || Host::look().judge(&fuse, &client)).boxed_local());
            let mount_point = move || vec![MountPoint::look(&path).judge(&path)];
            looks.push(async move { aside(&what, mount_point).await }.boxed_local());
        }
        for path in host::mounted_views() {
            let what = format!("the view at {}", path.display());
            looks.push(async move { aside(&what, move || vec![host::look_at_view(&path)]).await }.boxed_local());
        }
        let (of, asked) = (config.clone(), self.role.clone());
        looks.push(aside("the certificates", move || certificates::look(&of, &asked)).boxed_local());
        if !self.offline {
            looks.push(in_time("the members of the cluster", FAR_PATIENCE, members::look(config)).boxed_local());
            // The master of a mount of one host gives the credentials to its client, whose files this user has.
            let client = processes.iter().find(|process| of_mount.is_some() && process.role == Role::Fuse);
            let buckets = match &self.bucket {
                Some(uri) => buckets::look(uri, options, config, self.access()).boxed_local(),
                None => {
                    let config = client.map_or(config, Process::config);
                    buckets::look_at_mounts(config, self.access()).boxed_local()
                }
            };
            looks.push(in_time("the buckets", FAR_PATIENCE, buckets).boxed_local());
        }
        Ok(join_all(looks).await)
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
    let head = format!("{:<8} {:<19} ", level.name(), check.name());
    let lines = [(head.as_str(), what), ("         why ", why), ("         do  ", todo)];
    // One line each, whatever others have written into a name or an error.
    let mut lines = lines.into_iter().filter(|(_, text)| !text.is_empty());
    lines.try_for_each(|(head, text)| console::line(format_args!("{head}{}", console::name(text))))
}

/// The directories of all processes, one after the other: what is measured is not to wait for another measurement.
async fn look_at_disks(processes: &[Process]) -> Findings {
    let mut places: Vec<Place> = processes.iter().flat_map(Place::of).collect();
    // Clients of a host stage in one directory.
    places.dedup();
    let (mut looked, mut found) = (Vec::new(), Vec::new());
    for place in places {
        let what = place.name();
        let look = move || disks::idle(&place).map_or_else(|| Ok(Looked::at(place)), Err);
        match aside(&what, look).await.flatten() {
            Ok(one) => looked.push(one),
            Err(why_not) => found.push(why_not),
        }
    }
    found.extend(looked.iter().flat_map(Looked::judge));
    found.extend(disks::judge_together(&looked));
    Ok(found)
}
