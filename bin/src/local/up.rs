//! Starting: the whole cluster, or one child of it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cavern_conf::schema::{self, Security};
use cavern_conf::{Config, Effective, Interval};
use cavern_net::MasterChannel;
use cavern_net::master::Stubs;
use cavern_proto::master::{ListWorkersRequest, WorkerState};
use tokio::time::Instant;

use super::certificates;
use super::child::{ChildName, Role};
use super::down::stop_all;
use super::files::{self, MADE_FIRST, lock, make_directory, private_folder, refuse_foreign};
use super::masters::add_to_group;
use super::plan::{FreePorts, UpOptions, check_length, plan};
use super::record::Cluster;
use super::start::{Starting, ensure};
use crate::console;
use crate::error::{CliError, Context as _};
use crate::runtime::block_on;

const POLL: Duration = Duration::from_millis(5);
/// A master that the others do not take in does not become ready, and why they do not is told first.
const TOLD_LATER: Duration = Duration::from_secs(2);

/// Starts whatever is not running of the cluster in `directory`, making it first if it is new. Returns when every child
/// is ready, the workers are known to the master and the mounts can be used. After a failure everything is stopped
/// again that did not run before.
///
/// # Errors
/// `Usage`, before anything is written, for a directory that holds something, but no cluster, or has too long a path.
pub fn up(options: &UpOptions) -> Result<Cluster, CliError> {
    let directory = options.place.path();
    let known = Cluster::find(&directory)?;
    let (given, mut effective) = load_conf(options, known.as_ref())?;
    if known.is_none() {
        check_length(&directory, options.workers)?;
    }
    let name = directory.display();
    let is_new = make_directory(&directory)?;
    let directory = directory.canonicalize().context(format_args!("cannot use the directory {name}"))?;
    if Cluster::find(&directory)?.is_none() {
        refuse_foreign(&directory, &MADE_FIRST, "no cluster of `cv local`", "--dir")?;
    }
    let _lock = lock(&directory)?;
    let mut ports = FreePorts::default();
    let mut cluster = plan(&directory, options, (given, &effective.config), &mut ports)?;
    effective.share_memory(cluster.children().len())?;
    let config = effective.config;
    if is_new {
        cluster.made.push(directory.clone());
    }
    cluster.store()?;
    // The mount point may be in it, so the directory itself is for everyone, and what the processes keep is not.
    for folder in ["run", "log", "s3"] {
        private_folder(&directory.join(folder))?;
    }
    if cluster.secure {
        certificates::ensure(&cluster, &config.cluster.name)?;
    }
    let former = cluster.conf().ok();
    let config = write_conf(&cluster, config)?;
    let is_running = |name: &ChildName| cluster.is_running(*name).unwrap_or(false);
    let (running, begun): (Vec<ChildName>, Vec<ChildName>) = cluster.children().into_iter().partition(is_running);
    if former.is_some_and(|former| is_other(former, &config)) {
        remark_unchanged(&running);
    }
    let started = block_on(start_all(&cluster, Duration::from_secs(options.timeout)));
    if started.is_err() {
        // The cause of the failure is what the person needs; what goes wrong while tidying is not.
        let _ = stop_all(&cluster, &begun, Duration::from_secs(5));
    }
    started.map(|()| cluster)
}

/// What the file of `--conf` says with the environment, and that file: the one of this start, or of the last one that
/// named any, unless the environment names one now.
fn load_conf(options: &UpOptions, known: Option<&Cluster>) -> Result<(Option<PathBuf>, Effective), CliError> {
    let given = options.conf.as_ref().map(std::path::absolute).transpose().context("cannot use the file of --conf")?;
    let is_named = given.is_some() || std::env::var_os("CV_CONF").is_some();
    let former = known.and_then(|cluster| cluster.given_conf.clone()).filter(|_| !is_named);
    let Some(path) = former else {
        let effective = Effective::load(given.as_deref())?;
        return Ok((given, effective));
    };
    let effective = Effective::load(Some(&path)).map_err(|error| {
        let path = path.display();
        CliError::Usage(format!("{error}\nThis cluster was started with --conf {path}: name another with --conf"))
    })?;
    console::remark(format_args!("with --conf {}, as before", path.display()));
    Ok((Some(path), effective))
}

/// Whether a configuration says something else than the one before, other than of masters that come or go. What is no
/// setting follows the host.
fn is_other(former: Config, config: &Config) -> bool {
    let cluster = schema::Cluster { masters: config.cluster.masters.clone(), ..former.cluster };
    Config { cluster, budgets: config.budgets.clone(), ..former } != *config
}

/// What runs has read the configuration as it was.
fn remark_unchanged(running: &[ChildName]) {
    let names: Vec<String> = running.iter().filter(|name| name.role != Role::S3).map(ToString::to_string).collect();
    if !names.is_empty() {
        console::remark(format_args!(
            "the configuration is another one than before, with which {} go on: stop and start them, or all with \
             `cv local down` and `cv local up`",
            names.join(", ")
        ));
    }
}

/// Starts one child that is not running, on the addresses it had, and waits until it is ready; a master that needs
/// others for that is left waiting.
pub fn start(cluster: &Cluster, name: ChildName, patience: Duration) -> Result<(), CliError> {
    let _lock = lock(&cluster.directory)?;
    let Some(starting) = ensure(cluster, name)? else { return Ok(()) };
    if let Some(cause) = block_on(starting.wait(patience, true))? {
        console::remark(format_args!("{name} runs, but is not ready: {cause}"));
    }
    Ok(())
}

/// `D/cluster.toml`: what the user's file and environment say, with this cluster's addresses and directories: of each
/// role those of the first process, the others have theirs in their environment. Returns that.
fn write_conf(cluster: &Cluster, mut config: Config) -> Result<Config, CliError> {
    config.cluster.masters = cluster.masters.iter().map(|master| master.grpc.clone()).collect();
    if let Some(master) = cluster.masters.first() {
        config.master.listen.clone_from(&master.grpc);
        config.master.advertise.clone_from(&master.grpc);
        config.master.http_listen.clone_from(&master.http);
        config.master.data_dir.clone_from(&master.data_dir);
    }
    if let Some(worker) = cluster.workers.first() {
        config.worker.dirs = worker.dirs.iter().map(|dir| format!("{}{}", dir.tier, dir.path.display())).collect();
    }
    if let Some(fuse) = cluster.fuse.first() {
        config.fuse.mount_point.clone_from(&fuse.mount_point);
    }
    // Mounts lead where whoever starts the cluster may go, with no more rights than that, and to its object store.
    if config.ufs.file_roots.is_empty() {
        config.ufs.file_roots.push(PathBuf::from("/"));
    }
    if !config.ufs.endpoints.contains(&cluster.s3.listen) {
        config.ufs.endpoints.push(cluster.s3.listen.clone());
    }
    // Other files would be those of other processes.
    config.security = if cluster.secure { certificates::of_admin(cluster) } else { Security::default() };
    let head = "# Written by `cv local up` at every start; changes made here are lost.\n\n";
    files::write_whole(&cluster.conf_path(), format!("{head}{}", config.to_toml()).as_bytes())?;
    Ok(config)
}

async fn start_all(cluster: &Cluster, patience: Duration) -> Result<(), CliError> {
    // Workers and clients need a master that answers; nobody needs the object store before the first `cv mount`.
    let mut starting = Vec::new();
    for name in cluster.children() {
        if name.role == Role::Worker && name.number == 0 {
            masters_ready(cluster, std::mem::take(&mut starting), patience).await?;
        }
        starting.extend(ensure(cluster, name)?);
    }
    for child in starting {
        child.wait(patience, false).await?;
    }
    workers_known(cluster, patience).await?;
    for fuse in &cluster.fuse {
        usable(&fuse.mount_point, patience).await?;
    }
    Ok(())
}

/// Waits for all that was started so far. None of several masters is ready before a majority of them is there, so that
/// all run by now; those that came later are taken in by the others, one after another.
async fn masters_ready(cluster: &Cluster, starting: Vec<Starting<'_>>, patience: Duration) -> Result<(), CliError> {
    let joins = |name: ChildName| name.role == Role::Master && cluster.masters[name.number].joins;
    let (mut later, first): (Vec<_>, Vec<_>) = starting.into_iter().partition(|child| joins(child.name));
    for child in first {
        child.wait(patience, false).await?;
    }
    for name in cluster.children().into_iter().filter(|name| joins(*name)) {
        let child = later.iter().position(|child| child.name == name).map(|place| later.remove(place));
        let ready = async {
            match child {
                Some(child) => child.wait(patience + TOLD_LATER, false).await.map(drop),
                None => Ok(()),
            }
        };
        tokio::try_join!(ready, add_to_group(cluster, name.number, patience))?;
    }
    Ok(())
}

/// Waits until the master that leads counts every worker as live.
pub async fn workers_known(cluster: &Cluster, patience: Duration) -> Result<(), CliError> {
    let (wanted, mut config, mut live) = (cluster.workers.len(), cluster.conf()?, 0);
    // Another one may begin to lead meanwhile.
    config.client.metadata_timeout = Interval::secs(patience.as_secs());
    let masters = MasterChannel::for_command(&config)?;
    let all_live = async {
        loop {
            let list = async |mut master: Stubs| master.cluster.list_workers(ListWorkersRequest {}).await;
            let workers = masters.ask_unary(list).await?.workers;
            live = workers.iter().filter(|worker| worker.state() == WorkerState::Live).count();
            if live >= wanted {
                return Ok::<(), CliError>(());
            }
            tokio::time::sleep(POLL).await;
        }
    };
    let answer = tokio::time::timeout_at(Instant::now() + patience, all_live).await;
    answer.unwrap_or_else(|_elapsed| {
        let text = format!("the master knows {live} of {wanted} workers after {} s", patience.as_secs());
        Err(CliError::Failed(text))
    })
}

/// Waits until the root of the mount can be read. A mount that does not answer holds the thread that looks for good.
async fn usable(mount_point: &Path, patience: Duration) -> Result<(), CliError> {
    let (name, path) = (mount_point.display(), mount_point.to_owned());
    let look = move || fs::read_dir(&path).and_then(|mut entries| entries.next().transpose()).map(drop);
    match tokio::time::timeout(patience, tokio::task::spawn_blocking(look)).await {
        Ok(Ok(look)) => look.context(format_args!("the mount at {name} cannot be read")),
        Ok(Err(error)) => Err(CliError::Failed(format!("the mount at {name} cannot be looked at: {error}"))),
        Err(_) => Err(CliError::Failed(format!("the mount at {name} does not answer within {} s", patience.as_secs()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_is_another_one_whatever_masters_there_are() {
        let (former, mut config) = (Config::default(), Config::default());
        config.cluster.masters.push("127.0.0.1:1".to_owned());
        assert!(!is_other(former.clone(), &config));
        config.fuse.threads += 1;
        assert!(is_other(former, &config));
    }
}
