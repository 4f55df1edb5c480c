//! Starting: the whole cluster, or one child of it.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use cavern_conf::schema::{self, Security};
use cavern_conf::{Config, Interval};
use cavern_net::MasterChannel;
use cavern_net::master::Stubs;
use cavern_proto::master::{ListWorkersRequest, WorkerState};
use tokio::time::Instant;

use super::advance::Advance;
use super::certificates;
use super::child::{ChildName, Role, State};
use super::down::{stop, stop_all};
use super::files::{self, make_directory, private_folder};
use super::lock::{MADE_FIRST, lock};
use super::masters::{TakingIn, waits_for};
use super::plan::{UpOptions, plan};
use super::ports::FreePorts;
use super::record::Cluster;
use super::start::{Ended, Look, Starting, ensure};
use crate::console;
use crate::error::{CliError, Context as _};
use crate::runtime::block_on;

const POLL: Duration = Duration::from_millis(5);
/// Between two looks whether a master is a member.
const MEMBER_POLL: Duration = Duration::from_millis(50);

/// The file of `--conf`.
struct GivenConf {
    /// Absolute.
    path: PathBuf,
    /// It was named by an earlier start.
    is_former: bool,
}

/// Starts whatever is not running of the cluster in `directory`, making it first if it is new. Returns when every child
/// is ready, the workers are known to the master and the mounts can be used. After a failure everything is stopped
/// again that did not run before.
///
/// # Errors
/// `Usage`, before anything is written, for a directory that holds something, but no cluster.
pub fn up(options: &UpOptions) -> Result<Cluster, CliError> {
    let given = given_conf(options, Cluster::find(&options.directory)?.as_ref())?;
    let config = load_conf(given.as_ref())?;
    let name = options.directory.display();
    let is_new = make_directory(&options.directory)?;
    let directory = options.directory.canonicalize().context(format_args!("cannot use the directory {name}"))?;
    if Cluster::find(&directory)?.is_none() {
        refuse_foreign(&directory)?;
    }
    let _lock = lock(&directory)?;
    let mut ports = FreePorts::default();
    let mut cluster = plan(&directory, options, (given.map(|given| given.path), &config), &mut ports)?;
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
    let is_running = |name: &ChildName| cluster.state(*name).is_ok_and(|state| matches!(state, State::Running(_)));
    let (running, begun): (Vec<ChildName>, Vec<ChildName>) = cluster.children().into_iter().partition(is_running);
    if former.is_some_and(|former| is_other(former, &config)) {
        remark_unchanged(&running);
    }
    let started = start_all(&cluster, options.patience);
    if started.is_err() {
        // The cause of the failure is what the person needs; what goes wrong while tidying is not.
        let _ = stop_all(&cluster, &begun, Duration::from_secs(5));
    }
    started.map(|()| cluster)
}

/// The file of `--conf`: of this start, or of the last one that named any, unless the environment names one now.
fn given_conf(options: &UpOptions, known: Option<&Cluster>) -> Result<Option<GivenConf>, CliError> {
    if let Some(path) = &options.conf {
        let path = std::path::absolute(path).context(format_args!("cannot use {}", path.display()))?;
        return Ok(Some(GivenConf { path, is_former: false }));
    }
    let former = known.and_then(|cluster| cluster.given_conf.clone()).filter(|_| std::env::var_os("CV_CONF").is_none());
    Ok(former.map(|path| GivenConf { path, is_former: true }))
}

fn load_conf(given: Option<&GivenConf>) -> Result<Config, CliError> {
    let loaded = Config::load(given.map(|given| given.path.as_path()));
    let Some(GivenConf { path, .. }) = given.filter(|given| given.is_former) else {
        return Ok(loaded?);
    };
    let path = path.display();
    let config = loaded.map_err(|error| {
        CliError::Usage(format!("{error}\nThis cluster was started with --conf {path}: name another with --conf"))
    })?;
    console::remark(format_args!("with --conf {path}, as before"));
    Ok(config)
}

/// Whether a configuration says something else than the one before, other than of masters that come or go.
fn is_other(former: Config, config: &Config) -> bool {
    let cluster = schema::Cluster { masters: config.cluster.masters.clone(), ..former.cluster };
    Config { cluster, ..former } != *config
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
    let mut waits = None;
    let mut advance = Advance::of(name);
    let look = || {
        if name.role != Role::Master {
            return Ok(Look::Waits);
        }
        waits = waits_for(cluster, name.number)?;
        if waits.is_some() { Ok(Look::Enough) } else { advance.look(cluster) }
    };
    let started = starting.wait_or(patience, look);
    if let (Ok(()), Some(cause)) = (&started, &waits) {
        console::remark(format_args!("{name} runs, but is not ready: {cause}"));
    }
    started.map_err(|failure| {
        if failure.ended == Ended::Yes {
            // The caller gets the error, and need not be surprised by the child later.
            let _ = stop(cluster, name, patience);
        }
        failure.into()
    })
}

/// A directory with files of somebody else is not filled with those of a cluster.
fn refuse_foreign(directory: &Path) -> Result<(), CliError> {
    let name = directory.display();
    let mut entries = fs::read_dir(directory).context(format_args!("cannot list {name}"))?;
    // What an `up` that was interrupted may have left.
    let is_own = |name: &OsStr| MADE_FIRST.iter().any(|own| name == *own);
    let foreign = entries.find(|entry| !entry.as_ref().is_ok_and(|entry| is_own(&entry.file_name())));
    let Some(entry) = foreign else { return Ok(()) };
    let entry = entry.context(format_args!("cannot list {name}"))?;
    Err(CliError::Usage(format!(
        "{name} is not empty (it holds {}) and no cluster of `cv local`: name a new or an empty directory with --dir",
        entry.file_name().display()
    )))
}

/// `D/cluster.toml`: what the user's file and environment say, with this cluster's addresses. Returns that.
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

fn start_all(cluster: &Cluster, patience: Duration) -> Result<(), CliError> {
    // Workers and clients need a master that answers; nobody needs the object store before the first `cv mount`.
    let mut starting = BTreeMap::new();
    for name in cluster.children() {
        if name.role == Role::Worker && name.number == 0 {
            masters_ready(cluster, std::mem::take(&mut starting), patience)?;
        }
        if let Some(child) = ensure(cluster, name)? {
            starting.insert((name.role, name.number), child);
        }
    }
    starting.into_values().try_for_each(|child| child.wait(patience))?;
    workers_known(cluster, patience)?;
    cluster.fuse.iter().try_for_each(|fuse| usable(&fuse.mount_point, patience))
}

/// Waits for all that was started so far. None of several masters is ready before a majority of them is there, so that
/// all run by now; those that came later are taken in by the others, one after another.
fn masters_ready(
    cluster: &Cluster,
    mut starting: BTreeMap<(Role, usize), Starting<'_>>,
    patience: Duration,
) -> Result<(), CliError> {
    let mut later = Vec::new();
    for (number, _) in cluster.masters.iter().enumerate().filter(|(_, master)| master.joins) {
        later.push((number, starting.remove(&(Role::Master, number))));
    }
    for ((role, number), child) in starting {
        let mut advance = Advance::of(ChildName { role, number });
        child.wait_or(patience, || if role == Role::Master { advance.look(cluster) } else { Ok(Look::Waits) })?;
    }
    for (number, child) in later {
        let (mut taking_in, mut is_member) = (TakingIn::of(number, patience), false);
        let mut advance = Advance::of(ChildName { role: Role::Master, number });
        if let Some(child) = child {
            let help = || {
                is_member = is_member || taking_in.look(cluster)?;
                advance.look(cluster)
            };
            child.wait_or(patience, help)?;
        }
        let mut deadline = Instant::now() + patience;
        while !is_member && !taking_in.look(cluster)? {
            if advance.look(cluster)? == Look::Moves {
                deadline = Instant::now() + patience;
            }
            if Instant::now() > deadline {
                let text = format!(
                    "master{number} is not taken in by the others, and has not got on for {} s{}",
                    patience.as_secs(),
                    advance.remark()
                );
                return Err(CliError::Failed(text));
            }
            thread::sleep(MEMBER_POLL);
        }
    }
    Ok(())
}

/// Waits until the master that leads counts every worker as live.
fn workers_known(cluster: &Cluster, patience: Duration) -> Result<(), CliError> {
    if cluster.masters.is_empty() {
        return Ok(());
    }
    let (wanted, mut config) = (cluster.workers.len(), cluster.conf()?);
    // Another one may begin to lead meanwhile.
    config.client.metadata_timeout = Interval::secs(patience.as_secs());
    let deadline = Instant::now() + patience;
    block_on(async {
        let (masters, mut live) = (MasterChannel::for_command(&config)?, 0);
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
        let answer = tokio::time::timeout_at(deadline, all_live).await;
        answer.unwrap_or_else(|_elapsed| {
            let text = format!("the master knows {live} of {wanted} workers after {} s", patience.as_secs());
            Err(CliError::Failed(text))
        })
    })
}

/// Waits until the root of the mount can be read. The look happens on a thread of its own, since a mount that does not
/// answer would hold it for good.
fn usable(mount_point: &Path, patience: Duration) -> Result<(), CliError> {
    let name = mount_point.display();
    let (sender, receiver) = std::sync::mpsc::sync_channel(1);
    let path = mount_point.to_owned();
    let look = move || {
        let look = fs::read_dir(&path).and_then(|mut entries| entries.next().transpose()).map(|_| ());
        // The receiver has gone when it took too long.
        let _ = sender.send(look);
    };
    let thread = thread::Builder::new().name("look".to_owned()).spawn(look);
    thread.context(format_args!("the mount at {name} cannot be looked at"))?;
    match receiver.recv_timeout(patience) {
        Ok(look) => look.context(format_args!("the mount at {name} cannot be read")),
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
