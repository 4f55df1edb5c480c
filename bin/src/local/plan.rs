//! What a cluster is to consist of: that of the record with what `cv local up` was asked for on top, or a new one.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::{Path, PathBuf};

use cavern_conf::{Config, host};
use cavern_net::journals;
use clap::Args;
use rand::Rng;

use super::child::ChildName;
use super::files::make_directory;
use super::mounted::is_mounted;
use super::record::{Cluster, DirArgs, Fuse, Master, Restart, S3, Worker, WorkerDir};
use crate::error::{CliError, Context as _};

/// Longest path of a Unix socket that the kernel takes, with its final zero byte.
const SOCKET_PATH_MAX: usize = 108;

/// Below the range that the kernel gives to outgoing connections (32,768 and up on Linux): a child that was stopped
/// finds its port still free when it starts again.
const PORTS: std::ops::Range<u16> = 12_000..32_000;
const ATTEMPTS: usize = 1000;

/// What `cv local up` is asked for.
#[derive(Args)]
pub struct UpOptions {
    #[command(flatten)]
    pub place: DirArgs,
    /// Where the namespace is mounted [default: D/mnt]; several times for several FUSE clients.
    #[arg(long, value_name = "M")]
    pub mount_point: Vec<PathBuf>,
    /// How many masters: 1, 3 or 5 [default: as many as there were, or 1].
    #[arg(long, value_name = "N", value_parser = number_of_masters)]
    pub masters: Option<usize>,
    /// How many workers [default: as many as there were, or 1].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub workers: Option<u16>,
    /// Configuration file for all processes; addresses and directories in it are replaced. Later starts use it as
    /// well, unless they name another, or CV_CONF does.
    #[arg(long, value_name = "F")]
    pub conf: Option<PathBuf>,
    /// Mutual TLS between all processes of a new cluster, with an authority and certificates of its own in
    /// D/certificates. A cluster stays as it was made.
    #[arg(long)]
    pub secure: bool,
    /// The object store shows its statistics, and takes faults, at a port of its own, for whoever has the token that
    /// `status --json` names the file of. Later starts have it as well.
    #[arg(long)]
    pub s3_admin: bool,
    /// What becomes of a child that ends though nobody has stopped it [default: as it was, or on-failure].
    #[arg(long, value_name = "WHEN", value_enum)]
    pub restart: Option<Restart>,
    /// Seconds that each child has to become ready; a master that gets on, with what others send it, has longer.
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub timeout: u64,
}

fn number_of_masters(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number @ (1 | 3 | 5)) => Ok(number),
        Ok(2 | 4) => Err("an even number survives no more failures than one less: 1, 3 or 5".to_owned()),
        _ => Err("there are 1, 3 or 5".to_owned()),
    }
}

/// The recorded cluster with what was asked for on top, or a new one. `given` is the file of `--conf`, if there is one,
/// and `config` what it says with the environment.
pub fn plan(
    directory: &Path,
    options: &UpOptions,
    (given, config): (Option<PathBuf>, &Config),
    ports: &mut FreePorts,
) -> Result<Cluster, CliError> {
    let mut cluster = known_or_new(directory, options, ports)?;
    let masters = number_of(&cluster, "masters", cluster.masters.len(), options.masters)?;
    let workers = number_of(&cluster, "workers", cluster.workers.len(), options.workers.map(usize::from))?;
    // The first masters begin the cluster together.
    let joins = !cluster.masters.is_empty();
    for number in cluster.masters.len()..masters {
        let data_dir = directory.join(format!("master{number}"));
        cluster.masters.push(Master { grpc: ports.address()?, http: ports.address()?, data_dir, joins });
    }
    if given.is_some() {
        cluster.given_conf = given;
        for (number, worker) in cluster.workers.iter_mut().enumerate() {
            let mut dirs = worker_dirs(directory, number, config);
            // What is in others of the worker stays its own.
            dirs.extend(worker.dirs.iter().skip(dirs.len()).cloned());
            worker.dirs = dirs;
        }
    }
    for number in cluster.workers.len()..workers {
        cluster.workers.push(Worker {
            data: ports.address()?,
            http: ports.address()?,
            socket: socket_path(directory, number)?,
            dirs: worker_dirs(directory, number, config),
        });
    }
    cluster.restart = options.restart.unwrap_or(cluster.restart);
    let is_first = options.mount_point.is_empty() && cluster.fuse.is_empty();
    for mount_point in options.mount_point.iter().cloned().chain(is_first.then(|| directory.join("mnt"))) {
        let (mount_point, is_new) = existing_mount_point(&mount_point)?;
        if is_new {
            cluster.made.push(mount_point.clone());
        }
        if cluster.fuse.iter().all(|fuse| fuse.mount_point != mount_point) {
            cluster.fuse.push(Fuse { http: ports.address()?, mount_point });
        }
    }
    Ok(cluster)
}

/// The cluster without what may be added to it, and with the second port of its object store if that is asked for.
fn known_or_new(directory: &Path, options: &UpOptions, ports: &mut FreePorts) -> Result<Cluster, CliError> {
    let known = Cluster::find(directory)?;
    let name = directory.display();
    if options.secure && known.as_ref().is_some_and(|known| !known.secure) {
        return Err(CliError::Usage(format!(
            "the cluster in {name} was made without --secure, and stays so: leave --secure away, or make another \
             cluster with --dir"
        )));
    }
    let mut cluster = match known {
        Some(known) => known,
        None => Cluster {
            directory: directory.to_owned(),
            s3: S3 {
                listen: ports.address()?,
                admin: None,
                access_key: format!("cavern{}", host::random_text(14)),
                secret_key: host::random_text(40),
                root: directory.join("s3"),
            },
            secure: options.secure,
            ..Cluster::default()
        },
    };
    if options.s3_admin && cluster.s3.admin.is_none() {
        if cluster.is_running(ChildName::S3)? {
            return Err(CliError::Usage(format!(
                "the object store of the cluster in {name} runs without --s3-admin: `cv local stop s3` first"
            )));
        }
        cluster.s3.admin = Some(ports.address()?);
    }
    Ok(cluster)
}

/// How many children of a role there are to be: as many as are wanted, and no fewer than there are.
fn number_of(cluster: &Cluster, role: &str, there: usize, wanted: Option<usize>) -> Result<usize, CliError> {
    let wanted = wanted.unwrap_or(there.max(1));
    if wanted >= there {
        return Ok(wanted);
    }
    let directory = cluster.directory.display();
    Err(CliError::Usage(format!(
        "the cluster in {directory} has {there} {role}, more than {wanted}: leave --{role} away, or remove the \
         directory"
    )))
}

/// Creates the mount point if need be, and names it without symlinks, as the kernel's mount table will; says whether it
/// is new. One on which a dead client has left its mount cannot be resolved, so only its parent is.
pub fn existing_mount_point(path: &Path) -> Result<(PathBuf, bool), CliError> {
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

/// Refuses the directory of a new cluster with so many workers where [`plan`] would, before it is made.
///
/// # Errors
/// `Usage`: its path is too long.
pub fn check_length(directory: &Path, workers: Option<u16>) -> Result<(), CliError> {
    let absolute = std::path::absolute(directory).context(format_args!("cannot use {}", directory.display()))?;
    // What is there of it is named without symbolic links, as the whole of it will be.
    let there = absolute.ancestors().find_map(|above| Some((above.canonicalize().ok()?, above)));
    let named = there.and_then(|(named, above)| Some(named.join(absolute.strip_prefix(above).ok()?)));
    let last = workers.map_or(0, |workers| usize::from(workers).saturating_sub(1));
    socket_path(named.as_deref().unwrap_or(&absolute), last).map(drop)
}

/// In the cluster's directory.
pub fn socket_path(directory: &Path, number: usize) -> Result<PathBuf, CliError> {
    let path = directory.join(format!("run/worker{number}.sock"));
    // There is another one beside it.
    if journals::socket_path(&path).as_os_str().len() < SOCKET_PATH_MAX {
        return Ok(path);
    }
    Err(CliError::Usage(format!(
        "the path of {} is too long for the sockets in it: name a shorter one with --dir",
        directory.display()
    )))
}

/// The tiers and capacities of the configuration, in directories of this cluster.
fn worker_dirs(directory: &Path, number: usize, config: &Config) -> Vec<WorkerDir> {
    let base = directory.join(format!("worker{number}"));
    let tiers = config.worker.dirs.iter().map(|spec| spec.find(']').map_or("", |end| &spec[..=end]).to_owned());
    tiers.enumerate().map(|(disk, tier)| WorkerDir { tier, path: base.join(format!("disk{disk}")) }).collect()
}

/// Hands out each free port once, as long as it lives: a socket without a file is named after it, so that another
/// `cv local up` does not choose it before the child listens there.
#[derive(Default)]
pub struct FreePorts {
    set_aside: Vec<UnixListener>,
}

impl FreePorts {
    /// `127.0.0.1:PORT` that nobody listens on at this moment.
    pub fn address(&mut self) -> Result<String, CliError> {
        self.find().context("cannot find a port for a child")
    }

    /// An address that was given before, or another where that is taken now.
    pub fn address_again(&mut self, before: Option<&String>) -> Result<String, CliError> {
        let port = before.and_then(|address| address.rsplit_once(':')?.1.parse().ok());
        match port.and_then(|port| self.set_aside(port).ok().flatten()) {
            Some(address) => Ok(address),
            None => self.address(),
        }
    }

    fn find(&mut self) -> io::Result<String> {
        for _ in 0..ATTEMPTS {
            if let Some(address) = self.set_aside(host::random().random_range(PORTS))? {
                return Ok(address);
            }
        }
        Err(io::Error::other(format!("no free port between {} and {}", PORTS.start, PORTS.end)))
    }

    fn set_aside(&mut self, port: u16) -> io::Result<Option<String>> {
        let name = SocketAddr::from_abstract_name(format!("cavern-port-{port}"))?;
        let Ok(set_aside) = UnixListener::bind_addr(&name) else { return Ok(None) };
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_err() {
            return Ok(None);
        }
        self.set_aside.push(set_aside);
        Ok(Some(format!("127.0.0.1:{port}")))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn options(directory: &Path, workers: Option<u16>, mount_points: &[PathBuf]) -> UpOptions {
        UpOptions {
            place: DirArgs { dir: Some(directory.to_owned()) },
            mount_point: mount_points.to_vec(),
            masters: None,
            workers,
            conf: None,
            restart: None,
            secure: false,
            s3_admin: false,
            timeout: 1,
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
            let given = (named.map(PathBuf::from), config);
            let planned = plan(&directory, &options(&directory, Some(2), &[]), given, &mut ports).unwrap();
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
            let (arguments, _) = planned.launch(ChildName::S3);
            (planned.s3.admin, arguments.iter().any(|argument| argument == "--admin-listen"))
        };
        assert_eq!(planned(false), (None, false));
        let (admin, is_asked_for) = planned(true);
        assert!(admin.is_some() && is_asked_for);
        assert_eq!(planned(false), (admin, true));
    }

    #[test]
    fn a_directory_that_is_too_deep_for_a_socket_is_refused() {
        assert_eq!(socket_path(Path::new("/tmp/d"), 1).unwrap(), Path::new("/tmp/d/run/worker1.sock"));
        let deep = PathBuf::from(format!("/tmp/{}", "x".repeat(200)));
        let refused = socket_path(&deep, 0).unwrap_err();
        assert!(matches!(&refused, CliError::Usage(text) if text.contains("too long")), "{refused}");
    }

    #[test]
    fn a_directory_that_is_too_deep_is_refused_before_it_is_made() {
        let place = tempfile::tempdir().unwrap();
        let deep = place.path().join("x".repeat(200));
        let refused = crate::local::up(&options(&deep, None, &[])).unwrap_err();
        assert!(matches!(&refused, CliError::Usage(text) if text.contains("too long")), "{refused}");
        assert!(!deep.exists());
        // Behind a symbolic link it is as long, and a link with a long name leads to a short one.
        fs::create_dir(&deep).unwrap();
        let [short, long] = ["d".to_owned(), "l".repeat(200)].map(|name| place.path().join(name));
        std::os::unix::fs::symlink(&deep, &short).unwrap();
        std::os::unix::fs::symlink(place.path(), &long).unwrap();
        assert!(check_length(&short.join("new"), None).is_err());
        check_length(&long.join("new/er"), Some(64)).unwrap();
    }

    #[test]
    fn what_is_set_aside_is_given_to_nobody_else() {
        let mut ports = FreePorts::default();
        let name = |address: &str| {
            let port = address.rsplit(':').next().unwrap();
            SocketAddr::from_abstract_name(format!("cavern-port-{port}")).unwrap()
        };
        let address = ports.address().unwrap();
        assert!(UnixListener::bind_addr(&name(&address)).is_err());
        drop(ports);
        assert!(UnixListener::bind_addr(&name(&address)).is_ok());
    }

    #[test]
    fn no_port_is_given_twice_nor_while_taken() {
        let mut ports = FreePorts::default();
        let addresses: HashSet<String> = (0..100).map(|_| ports.address().unwrap()).collect();
        assert_eq!(addresses.len(), 100);
        let held: Vec<_> = addresses.iter().map(|address| TcpListener::bind(address).unwrap()).collect();
        let other = FreePorts::default().address().unwrap();
        assert!(!addresses.contains(&other));
        // One of before is given again, unless it is taken.
        let again = |before: &String| FreePorts::default().address_again(Some(before)).unwrap();
        assert_eq!(again(&other), other);
        assert!(addresses.iter().all(|taken| !addresses.contains(&again(taken))));
        drop(held);
    }
}
