//! Starting: the whole cluster, or one child of it.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use cavern_conf::schema::{self, Security};
use cavern_conf::{Config, host};
use cavern_net::journals;
use tokio::time::Instant;

use super::advance::Advance;
use super::certificates;
use super::child::State;
use super::child::{ChildName, Role, write_whole};
use super::down::{stop, stop_all};
use super::lock::{MADE_FIRST, lock};
use super::masters::{TakingIn, leader, live_workers, waits_for};
use super::mounted::is_mounted;
use super::ports::FreePorts;
use super::record::{Cluster, Fuse, Master, Restart, S3, Worker, WorkerDir};
use super::start::{Ended, Look, Starting, ensure};
use crate::console;
use crate::error::{CliError, Context as _};

const POLL: Duration = Duration::from_millis(5);
/// Between two looks whether a master is a member.
const MEMBER_POLL: Duration = Duration::from_millis(50);
/// Longest path of a Unix socket that the kernel takes, with its final zero byte.
const SOCKET_PATH_MAX: usize = 108;

/// What `cv local up` was asked for.
pub struct UpOptions {
    pub directory: PathBuf,
    /// Empty for `D/mnt`; one FUSE client for each.
    pub mount_points: Vec<PathBuf>,
    /// `None` for as many as there were, or one.
    pub masters: Option<usize>,
    /// `None` for as many as there were, or one.
    pub workers: Option<usize>,
    pub conf: Option<PathBuf>,
    /// `None` for as it was, or on failure.
    pub restart: Option<Restart>,
    /// A new cluster has certificates. One that is there stays as it was made.
    pub secure: bool,
    /// The object store has its second port. One that is there and has none must not run.
    pub s3_admin: bool,
    /// For each child to become ready.
    pub patience: Duration,
}

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
    let mut cluster = plan(&directory, options, (given, &config), &mut ports)?;
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
        return loaded.map_err(|error| CliError::Usage(error.to_string()));
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

/// Creates a folder that only its user may look into, and closes one of an earlier version.
fn private_folder(path: &Path) -> Result<(), CliError> {
    fs::create_dir_all(path)
        .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(0o700)))
        .context(format_args!("cannot create {}", path.display()))
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

/// Makes a directory with its parents; says whether it was not there.
fn make_directory(path: &Path) -> Result<bool, CliError> {
    let made = match (fs::create_dir(path), path.parent()) {
        (Err(error), Some(parent)) if error.kind() == io::ErrorKind::NotFound => {
            fs::create_dir_all(parent).and_then(|()| fs::create_dir(path))
        }
        (made, _) => made,
    };
    match made {
        Ok(()) => Ok(true),
        // A symbolic link to one will do, too.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(false),
        Err(error) => Err(CliError::Failed(format!("cannot create {}: {error}", path.display()))),
    }
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

/// The recorded cluster with what was asked for on top, or a new one.
fn plan(
    directory: &Path,
    options: &UpOptions,
    (given, config): (Option<GivenConf>, &Config),
    ports: &mut FreePorts,
) -> Result<Cluster, CliError> {
    let mut address = || ports.address().context("cannot find a port for a child");
    let mut cluster = match Cluster::find(directory)? {
        Some(cluster) if options.secure && !cluster.secure => {
            return Err(CliError::Usage(format!(
                "the cluster in {} was made without --secure, and stays so: leave --secure away, or make another \
                 cluster with --dir",
                directory.display()
            )));
        }
        Some(cluster) => cluster,
        None => {
            let s3 = S3 {
                listen: address()?,
                admin: None,
                access_key: format!("cavern{}", host::random_text(14)),
                secret_key: host::random_text(40),
                root: directory.join("s3"),
            };
            Cluster { secure: options.secure, ..Cluster::new(directory.to_owned(), s3) }
        }
    };
    if options.s3_admin && cluster.s3.admin.is_none() {
        if matches!(cluster.state(ChildName { role: Role::S3, number: 0 })?, State::Running(_)) {
            return Err(CliError::Usage(format!(
                "the object store of the cluster in {} runs without --s3-admin: `cv local stop s3` first",
                directory.display()
            )));
        }
        cluster.s3.admin = Some(address()?);
    }
    let number_of = |role: &str, there: usize, wanted: Option<usize>| {
        let wanted = wanted.unwrap_or(there.max(1));
        let directory = directory.display();
        if wanted >= there {
            return Ok(wanted);
        }
        Err(CliError::Usage(format!(
            "the cluster in {directory} has {there} {role}, more than {wanted}: leave --{role} away, or remove the \
             directory"
        )))
    };
    let masters = number_of("masters", cluster.masters.len(), options.masters)?;
    let workers = number_of("workers", cluster.workers.len(), options.workers)?;
    // The first masters begin the cluster together.
    let joins = !cluster.masters.is_empty();
    for number in cluster.masters.len()..masters {
        let data_dir = directory.join(format!("master{number}"));
        cluster.masters.push(Master { grpc: address()?, http: address()?, data_dir, joins });
    }
    if let Some(GivenConf { path, .. }) = given {
        cluster.given_conf = Some(path);
        for (number, worker) in cluster.workers.iter_mut().enumerate() {
            let mut dirs = worker_dirs(directory, number, config);
            // What is in others of the worker stays its own.
            dirs.extend(worker.dirs.iter().skip(dirs.len()).cloned());
            worker.dirs = dirs;
        }
    }
    for number in cluster.workers.len()..workers {
        cluster.workers.push(Worker {
            data: address()?,
            http: address()?,
            socket: socket_path(directory, number)?,
            dirs: worker_dirs(directory, number, config),
        });
    }
    let mut mount_points = options.mount_points.clone();
    if mount_points.is_empty() && cluster.fuse.is_empty() {
        mount_points.push(directory.join("mnt"));
    }
    cluster.restart = options.restart.unwrap_or(cluster.restart);
    for mount_point in mount_points {
        let (mount_point, is_new) = existing_mount_point(&mount_point)?;
        if is_new {
            cluster.made.push(mount_point.clone());
        }
        if cluster.fuse.iter().all(|fuse| fuse.mount_point != mount_point) {
            cluster.fuse.push(Fuse { http: address()?, mount_point });
        }
    }
    Ok(cluster)
}

/// Creates the mount point if need be, and names it without symlinks, as the kernel's mount table will; says whether it
/// is new. One on which a dead client has left its mount cannot be resolved, so only its parent is.
fn existing_mount_point(path: &Path) -> Result<(PathBuf, bool), CliError> {
    let absolute = std::path::absolute(path).context(format_args!("cannot use the mount point {}", path.display()))?;
    let resolved = match (absolute.parent(), absolute.file_name()) {
        (Some(parent), Some(name)) => fs::create_dir_all(parent)
            .and_then(|()| parent.canonicalize())
            .context(format_args!("cannot create {}", parent.display()))?
            .join(name),
        _ => absolute,
    };
    if is_mounted(&resolved).context("cannot read the mount table")? {
        return Ok((resolved, false));
    }
    let is_new = make_directory(&resolved)?;
    let name = resolved.display();
    Ok((resolved.canonicalize().context(format_args!("cannot use the mount point {name}"))?, is_new))
}

/// In the cluster's directory; below `/tmp` where that path is too long for a socket.
fn socket_path(directory: &Path, number: usize) -> Result<PathBuf, CliError> {
    let name = format!("worker{number}.sock");
    let near = directory.join("run").join(&name);
    // There is another one beside it.
    if journals::socket_path(&near).as_os_str().len() < SOCKET_PATH_MAX {
        return Ok(near);
    }
    let hash =
        directory.as_os_str().as_bytes().iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
    let far = std::env::temp_dir().join(format!("cavern-{hash:016x}"));
    private_folder(&far)?;
    Ok(far.join(name))
}

/// The tiers and capacities of the configuration, in directories of this cluster.
fn worker_dirs(directory: &Path, number: usize, config: &Config) -> Vec<WorkerDir> {
    let base = directory.join(format!("worker{number}"));
    let tiers = config.worker.dirs.iter().map(|spec| spec.find(']').map_or("", |end| &spec[..=end]).to_owned());
    tiers.enumerate().map(|(disk, tier)| WorkerDir { tier, path: base.join(format!("disk{disk}")) }).collect()
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
    let path = cluster.conf_path();
    write_whole(&path, format!("{head}{}", config.to_toml()).as_bytes())
        .context(format_args!("cannot write {}", path.display()))?;
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
        let (mut taking_in, mut is_member) = (TakingIn::of(number), false);
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

/// Waits until the master counts every worker as live.
fn workers_known(cluster: &Cluster, patience: Duration) -> Result<(), CliError> {
    if cluster.masters.is_empty() {
        return Ok(());
    }
    let (wanted, config) = (cluster.workers.len(), cluster.conf()?);
    let deadline = Instant::now() + patience;
    loop {
        let live = match leader(cluster, patience).and_then(|leader| live_workers(&config, leader)) {
            // Another one may have begun to lead in between.
            Err(_) if cluster.masters.len() > 1 && Instant::now() <= deadline => 0,
            live => live?,
        };
        if live >= wanted {
            return Ok(());
        }
        if Instant::now() > deadline {
            let text = format!("the master knows {live} of {wanted} workers after {} s", patience.as_secs());
            return Err(CliError::Failed(text));
        }
        thread::sleep(POLL);
    }
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

    fn options(directory: &Path, workers: Option<usize>, mount_points: &[PathBuf]) -> UpOptions {
        UpOptions {
            directory: directory.to_owned(),
            mount_points: mount_points.to_vec(),
            masters: None,
            workers,
            conf: None,
            restart: None,
            secure: false,
            s3_admin: false,
            patience: Duration::from_secs(1),
        }
    }

    #[test]
    fn a_plan_keeps_what_there_is_and_adds_what_is_asked_for() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path().canonicalize().unwrap();
        let mut config = Config::default();
        config.worker.dirs = vec!["[MEM:1GiB]/dev/shm/x".into(), "[SSD]/nvme".into()];
        let mut ports = FreePorts::default();
        let first = plan(&directory, &options(&directory, None, &[]), (None, &config), &mut ports).unwrap();
        assert_eq!((first.masters.len(), first.workers.len(), first.fuse.len()), (1, 1, 1));
        assert_eq!(first.fuse[0].mount_point, directory.join("mnt"));
        assert_eq!(first.workers[0].dirs[0].tier, "[MEM:1GiB]");
        assert_eq!(first.workers[0].dirs[1].path, directory.join("worker0/disk1"));
        first.store().unwrap();
        let more =
            plan(&directory, &options(&directory, Some(3), &[directory.join("other")]), (None, &config), &mut ports)
                .unwrap();
        assert_eq!((more.workers.len(), more.fuse.len()), (3, 2));
        assert_eq!((&more.workers[0], &more.s3), (&first.workers[0], &first.s3));
        more.store().unwrap();
        let fewer = plan(&directory, &options(&directory, Some(2), &[]), (None, &config), &mut ports).unwrap_err();
        assert!(matches!(&fewer, CliError::Usage(text) if text.contains("has 3 workers")), "{fewer}");
        let again = plan(&directory, &options(&directory, None, &[]), (None, &config), &mut ports).unwrap();
        assert_eq!(again, more);
    }

    #[test]
    fn a_file_that_is_named_holds_for_the_workers_that_are_there_and_is_remembered() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path().canonicalize().unwrap();
        let (mut config, mut ports) = (Config::default(), FreePorts::default());
        let mut planned = |config: &Config, named: Option<&str>| {
            let given = named.map(|path| GivenConf { path: PathBuf::from(path), is_former: false });
            let planned = plan(&directory, &options(&directory, Some(2), &[]), (given, config), &mut ports).unwrap();
            planned.store().unwrap();
            planned
        };
        let tiers = |cluster: &Cluster| -> Vec<Vec<String>> {
            let of = |worker: &Worker| worker.dirs.iter().map(|dir| dir.tier.clone()).collect();
            cluster.workers.iter().map(of).collect()
        };
        config.worker.dirs = vec!["[SSD:1GiB]/a".into(), "[HDD:1GiB]/b".into()];
        let first = planned(&config, Some("/first.toml"));
        assert_eq!(first.given_conf, Some(PathBuf::from("/first.toml")));
        config.worker.dirs = vec!["[SSD:2GiB]/a".into()];
        let none = planned(&config, None);
        assert_eq!(none, first, "nobody has named it");
        let second = planned(&config, Some("/second.toml"));
        assert_eq!(tiers(&second), [["[SSD:2GiB]", "[HDD:1GiB]"]; 2]);
        assert_eq!(second.given_conf, Some(PathBuf::from("/second.toml")));
        assert_eq!(second.workers[1].dirs[0].path, first.workers[1].dirs[0].path);
    }

    #[test]
    fn a_configuration_is_another_one_whatever_masters_there_are() {
        let (former, mut config) = (Config::default(), Config::default());
        config.cluster.masters.push("127.0.0.1:1".to_owned());
        assert!(!is_other(former.clone(), &config));
        config.fuse.threads += 1;
        assert!(is_other(former, &config));
    }

    #[test]
    fn masters_that_come_later_are_taken_in_by_the_first() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path().canonicalize().unwrap();
        let (config, mut ports) = (Config::default(), FreePorts::default());
        let mut planned = |masters| {
            let options = UpOptions { masters, ..options(&directory, None, &[]) };
            let planned = plan(&directory, &options, (None, &config), &mut ports);
            planned.inspect(|cluster| cluster.store().unwrap())
        };
        let joins = |cluster: &Cluster| cluster.masters.iter().map(|master| master.joins).collect::<Vec<_>>();
        let three = planned(Some(3)).unwrap();
        assert_eq!(joins(&three), [false; 3]);
        assert_eq!(three.masters[2].data_dir, directory.join("master2"));
        let five = planned(Some(5)).unwrap();
        assert_eq!((joins(&five), &five.masters[..3]), (vec![false, false, false, true, true], &three.masters[..]));
        assert_eq!(planned(None).unwrap(), five);
        let fewer = planned(Some(3)).unwrap_err();
        assert!(matches!(&fewer, CliError::Usage(text) if text.contains("has 5 masters")), "{fewer}");
    }

    #[test]
    fn a_cluster_stays_with_or_without_certificates() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path().canonicalize().unwrap();
        let (config, mut ports) = (Config::default(), FreePorts::default());
        let mut planned = |name: &str, secure| {
            let directory = directory.join(name);
            fs::create_dir_all(&directory).unwrap();
            let planned =
                plan(&directory, &UpOptions { secure, ..options(&directory, None, &[]) }, (None, &config), &mut ports);
            planned.inspect(|cluster| cluster.store().unwrap())
        };
        assert!(planned("secure", true).unwrap().secure);
        assert!(planned("secure", false).unwrap().secure);
        assert!(!planned("plain", false).unwrap().secure);
        let changed = planned("plain", true).unwrap_err();
        assert!(matches!(&changed, CliError::Usage(text) if text.contains("made without --secure")), "{changed}");
    }

    #[test]
    fn the_object_store_has_its_second_port_once_it_was_asked_for() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path().canonicalize().unwrap();
        let (config, mut ports) = (Config::default(), FreePorts::default());
        let mut planned = |s3_admin| {
            let options = UpOptions { s3_admin, ..options(&directory, None, &[]) };
            let planned = plan(&directory, &options, (None, &config), &mut ports).unwrap();
            planned.store().unwrap();
            let arguments = planned.launch(ChildName { role: Role::S3, number: 0 }).arguments;
            (planned.s3.admin, arguments.iter().any(|argument| argument == "--admin-listen"))
        };
        assert_eq!(planned(false), (None, false));
        let (admin, is_asked_for) = planned(true);
        assert!(admin.is_some() && is_asked_for);
        assert_eq!(planned(false), (admin, true));
    }

    #[test]
    fn a_socket_of_a_deep_directory_lies_elsewhere() {
        let near = socket_path(Path::new("/tmp/d"), 1).unwrap();
        assert_eq!(near, Path::new("/tmp/d/run/worker1.sock"));
        let deep = PathBuf::from(format!("/tmp/{}", "x".repeat(200)));
        let far = socket_path(&deep, 0).unwrap();
        assert!(far.as_os_str().len() < SOCKET_PATH_MAX);
        assert_eq!(far, socket_path(&deep, 0).unwrap());
        fs::remove_dir(far.parent().unwrap()).unwrap();
    }
}
