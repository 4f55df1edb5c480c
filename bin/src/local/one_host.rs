//! A bucket as a directory of one host: what `cv fuse s3://…` starts, and where that lives.
//!
//! ```text
//! cv fuse s3://…, which returns when the mount can be used, or is the backend (--foreground)
//!   └─ cv fuse --backend D           master and worker, in one process
//!        └─ cv fuse --beside D       supervises the mount
//!             └─ cv fuse --daemon    serves it
//!
//! D/host.json     addresses, mount point        D/certificates   who may speak to these processes
//! D/cluster.toml  the configuration of all      D/master         the namespace
//! D/lock          held by each process          D/worker         the blocks
//! D/cv.log        what they said                D/run            the sockets of the worker
//! D/ending        the mount is gone
//! ```
//!
//! Backend and supervisor start each other again: one of the two is the parent of the other, and sees its end. The
//! kernel's mount table says what the end of a supervisor means: where the mount is there still, dead, the supervisor
//! was killed, and another one mounts; otherwise somebody has unmounted, and all of it ends. A killed backend is a
//! master and a worker that are away for a moment.
//!
//! The lock is held alone by whoever prepares the mount, and then together by the command, the backend and the
//! supervisor: it is free when the last of them has ended, however that was. Who makes the mount again waits for that,
//! longer where `ending` says that a backend is at it, and is refused while the mount is served. The ports are of the
//! loopback interface, and those of the start before where they are free, so that the master knows its worker again at
//! once; whoever connects shows a certificate of the authority in D, which is its user's alone.

mod backend;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use cavern_conf::{ByteSize, Config, Effective, HostLimits, Role, host};
use cavern_fuse::kernel::mount::is_dead;
use cavern_proto::master::Mount;
use prost::Message as _;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use tokio::time::Instant;

use self::backend::PERSIST_PATIENCE;
pub use self::backend::{serve, supervise_backend};
use super::mounted::is_mounted;
use super::plan::{FreePorts, existing_mount_point, socket_path};
use super::record::{Cluster, Fuse, Master, Worker, WorkerDir};
use super::{certificates, files};
use crate::console;
use crate::error::{CliError, Context as _};

/// What differs from the defaults.
const SETTINGS: &str = include_str!("one_host/settings.toml");
/// What that has of sizes: with less memory than they are for, each process has an equal part of it instead.
const SIZES: [&str; 5] = [
    "CV_MASTER__METADATA_CACHE",
    "CV_WORKER__MEMORY_BUDGET",
    "CV_WORKER__INDEX_CACHE",
    "CV_CLIENT__MEMORY_BUDGET",
    "CV_CLIENT__METADATA_CACHE_ENTRIES",
];
const SIZED_FOR: u64 = 1536 << 20;
const CONF_HEAD: &str = "# Written by `cv fuse` at every start; changes made here are lost.\n\n";
const RECORD: &str = "host.json";
const LOCK: &str = "lock";
/// What a directory may hold before there is a record.
const MADE_FIRST: [&str; 2] = [LOCK, "host.tmp"];
const LOG: &str = "cv.log";
const ENDING: &str = "ending";
/// For the processes of a mount that has just been unmounted.
const LOCK_PATIENCE: Duration = Duration::from_secs(10);
/// And while they bring to the bucket what it lacks.
const ENDING_PATIENCE: Duration = LOCK_PATIENCE.saturating_add(PERSIST_PATIENCE);
/// Between two looks.
const POLL: Duration = Duration::from_millis(10);
/// From the start of the backend to a mount that can be used.
const READY_PATIENCE: Duration = Duration::from_secs(60);
/// Lines of the log that are shown where none of them says what went wrong.
const LOG_LINES: usize = 15;

/// Where the cache lives, and what it may take.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CacheDir {
    pub directory: PathBuf,
    pub size: ByteSize,
}

/// A mount of this host, whose directory nobody else takes meanwhile.
pub struct OneHost {
    cluster: Cluster,
    _lock: File,
    /// Of the process that prepares it; the others listen there.
    _ports: FreePorts,
}

/// The configuration that a mount of one host begins with: `settings` are `(variable, value)` as in an environment, and
/// go before that.
///
/// # Errors
/// A variable of the environment, or one of `settings`, that no configuration takes, or this host has no room for.
pub fn configuration(settings: Vec<(String, String)>) -> Result<Config, CliError> {
    configuration_on(HostLimits::here(), settings)
}

fn configuration_on(limits: HostLimits, settings: Vec<(String, String)>) -> Result<Config, CliError> {
    let shipped = (PathBuf::from("settings.toml"), SETTINGS.as_bytes().to_vec());
    let settings = settings.into_iter().map(|(name, value)| (OsString::from(name), OsString::from(value)));
    // The host may be one of a cluster, whose certificates are not for here.
    let is_other = |name: &OsString| name.as_bytes().starts_with(b"CV_SECURITY__");
    let sizes = SIZES.iter().filter(|_| limits.memory < SIZED_FOR);
    let mut variables: BTreeMap<OsString, OsString> =
        sizes.map(|name| (OsString::from(name), OsString::from("auto"))).collect();
    variables.extend(std::env::vars_os().filter(|(name, _)| !is_other(name)));
    variables.extend(settings);
    let mut effective = Effective::compose_on(limits, Some(shipped), variables)?;
    effective.share_memory(Role::ALL.len())?;
    Role::ALL.into_iter().try_for_each(|role| effective.check_limits(role))?;
    Ok(effective.config)
}

impl OneHost {
    /// Takes a directory for a mount: its lock, ports, certificates and configuration. `config` is [`configuration`],
    /// with the path of the mount in the namespace.
    ///
    /// # Errors
    /// `Usage` for a directory that has other files, has too long a path, or lies in the mount; `Failed` where a mount
    /// uses it, or its processes have not ended ten seconds after it, 70 where they bring to the bucket what it lacks.
    pub fn prepare(cache: &CacheDir, mount_point: &Path, mut config: Config) -> Result<Self, CliError> {
        let name = cache.directory.display();
        let (mount_point, _) = existing_mount_point(mount_point)?;
        files::make_directory(&cache.directory)?;
        let directory = cache.directory.canonicalize().context(format_args!("cannot use the directory {name}"))?;
        if directory.starts_with(&mount_point) || mount_point.starts_with(&directory) {
            let text = format!("{name} and the mount point {} lie in one another", mount_point.display());
            return Err(CliError::Usage(format!("{text}: name another directory with --cache")));
        }
        if !directory.join(RECORD).exists() {
            files::refuse_foreign(&directory, &MADE_FIRST, "no cache of `cv fuse`", "--cache")?;
        }
        let socket = socket_path(&directory, 0).map_err(|_| {
            let text = format!("the path of {name} is too long for the sockets in it");
            CliError::Usage(format!("{text}: name a shorter one with --cache"))
        })?;
        files::private_folder(&directory)?;
        let lock = lock(&directory, FlockOperation::NonBlockingLockExclusive)?;
        files::remove(&directory.join(ENDING))?;
        // One that cannot be read, after a loss of power, is written anew.
        let before = record(&directory).ok().flatten().unwrap_or_default();
        let (master, worker, fuse) = (before.masters.first(), before.workers.first(), before.fuse.first());
        let mut ports = FreePorts::default();
        let mut address = |before: Option<&String>| ports.address_again(before);
        let (data_dir, path) = (directory.join("master"), directory.join("worker"));
        let dirs = vec![WorkerDir { tier: format!("[SSD:{}]", cache.size), path }];
        let (grpc, http) = (address(master.map(|master| &master.grpc))?, address(master.map(|master| &master.http))?);
        let masters = vec![Master { grpc, http, data_dir, joins: false }];
        let (data, http) = (address(worker.map(|worker| &worker.data))?, address(worker.map(|worker| &worker.http))?);
        let workers = vec![Worker { data, http, socket, dirs }];
        let fuse = vec![Fuse { http: address(fuse.map(|fuse| &fuse.http))?, mount_point }];
        let cluster = Cluster { directory, masters, workers, fuse, secure: true, ..Cluster::default() };
        let record = serde_json::to_vec_pretty(&cluster).context("cannot write the record of the mount as JSON")?;
        files::write_whole(&cluster.directory.join(RECORD), &record)?;
        for folder in ["run", "master", "worker"] {
            files::private_folder(&cluster.directory.join(folder))?;
        }
        certificates::ensure(&cluster, &config.cluster.name)?;
        config.cluster.masters = cluster.masters.iter().map(|master| master.grpc.clone()).collect();
        config.fuse.mount_point = cluster.fuse[0].mount_point.clone();
        // Who starts the backend again has to be there.
        config.fuse.supervised = true;
        config.security = certificates::of_admin(&cluster);
        config.check()?;
        files::write_whole(&cluster.conf_path(), format!("{CONF_HEAD}{}", config.to_toml()).as_bytes())?;
        flock(&lock, FlockOperation::NonBlockingLockShared).map_err(|_| refused(&cluster.directory))?;
        Ok(Self { cluster, _lock: lock, _ports: ports })
    }

    /// The one in a directory, for a process of it.
    ///
    /// # Errors
    /// There is none, or somebody else has taken the directory.
    pub fn load(directory: &Path) -> Result<Self, CliError> {
        let none = || CliError::NotFound(format!("{} holds no mount of `cv fuse`", directory.display()));
        let cluster = record(directory)?.ok_or_else(none)?;
        let lock = lock(directory, FlockOperation::NonBlockingLockShared)?;
        Ok(Self { cluster, _lock: lock, _ports: FreePorts::default() })
    }

    /// The configuration of its processes, and of commands.
    pub fn conf(&self) -> Result<Config, CliError> {
        self.cluster.conf()
    }

    /// Where it is mounted.
    pub fn mount_point(&self) -> &Path {
        self.cluster.fuse.first().map_or(Path::new("/"), |fuse| &fuse.mount_point)
    }

    /// Where all of it lives.
    pub fn directory(&self) -> &Path {
        &self.cluster.directory
    }

    /// Notes that the mount is gone, so that whoever makes it again waits for as long as its end may take.
    fn note_end(&self) {
        // Without the note he has less patience.
        let _ = fs::write(self.directory().join(ENDING), "");
    }

    /// Starts the backend, which attaches `mount`, and waits until the mount can be used.
    ///
    /// # Errors
    /// What the processes said before they ended, or that they are not ready after a minute.
    pub fn start(&self, mount: &Mount) -> Result<(), CliError> {
        let path = self.directory().join(LOG);
        // There is none at first; that of the start before is kept.
        let _ = fs::rename(&path, path.with_extension("log.1"));
        let log = OpenOptions::new().create(true).append(true).mode(0o600).open(&path);
        let log = log.context(format_args!("cannot write {}", path.display()))?;
        let program = std::env::current_exe().context("cannot find this executable")?;
        let mut command = backend::command(&program, self.directory());
        command.stdin(Stdio::piped()).stdout(log.try_clone().context("cannot share the log")?).stderr(log);
        let mut backend = command.spawn().context(format_args!("cannot run {}", program.display()))?;
        if let Some(mut input) = backend.stdin.take() {
            // It may have keys in it. A backend that has ended is seen to be so.
            let _ = input.write_all(&mount.encode_to_vec());
        }
        let said = || String::from_utf8_lossy(&fs::read(&path).unwrap_or_default()).into_owned();
        let is_ready = files::poll(READY_PATIENCE, POLL, || {
            if said().lines().any(|line| line.starts_with("cv fuse ready")) {
                return Ok(Some(true));
            }
            Ok(backend.try_wait().context("cannot ask for the backend")?.map(|_ended| false))
        })?;
        if is_ready == Some(true) {
            return Ok(());
        }
        if is_ready.is_none() {
            // It ends what it has started.
            let _ = kill_process(Pid::from_child(&backend), Signal::TERM);
        }
        let what = if is_ready.is_none() { "is not ready after a minute" } else { "could not be made" };
        let (mount_point, why) = (self.mount_point().display(), cause(&said()));
        Err(CliError::Failed(format!("the mount at {mount_point} {what}: {why}\n(the log is {})", path.display())))
    }
}

/// The processes of the mount whose configuration this is; `None` where it is that of something else.
///
/// # Errors
/// The record beside it cannot be read.
pub fn of_conf(conf: &Path) -> Result<Option<Cluster>, CliError> {
    let Ok(conf) = conf.canonicalize() else { return Ok(None) };
    let found = conf.parent().map(record).transpose()?.flatten();
    Ok(found.filter(|cluster| cluster.conf_path() == conf))
}

/// The directories of the mounts that are held now, as far as this user may look into them.
pub fn running() -> Vec<PathBuf> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let directory = |process: fs::DirEntry| {
        let line = fs::read(process.path().join("cmdline")).ok()?;
        let mut words = line.split(|byte| *byte == 0);
        words.find(|word| *word == b"--beside")?;
        let directory = PathBuf::from(OsStr::from_bytes(words.next()?));
        directory.join(RECORD).exists().then_some(directory)
    };
    // The supervisor's, and that of what serves it.
    let found: BTreeSet<PathBuf> = processes.filter_map(directory).collect();
    found.into_iter().collect()
}

/// The mount that a backend is to attach, from its standard input; none for one that is started again.
///
/// # Errors
/// It cannot be read.
pub fn handed_over() -> Result<Option<Mount>, CliError> {
    let mut bytes = Vec::new();
    std::io::stdin().lock().read_to_end(&mut bytes).context("cannot read the mount from standard input")?;
    let mount = (!bytes.is_empty()).then(|| Mount::decode(bytes.as_slice()));
    mount.transpose().context("standard input is no mount: only `cv fuse` starts a backend")
}

/// What processes said of their end, each once.
fn cause(said: &str) -> String {
    let mut causes: Vec<&str> = said.lines().filter_map(|line| line.strip_prefix("cv: ")).collect();
    causes.dedup();
    if causes.is_empty() {
        let lines: Vec<&str> = said.lines().collect();
        causes = lines[lines.len().saturating_sub(LOG_LINES)..].to_vec();
    }
    causes.join("\n  ")
}

fn record(directory: &Path) -> Result<Option<Cluster>, CliError> {
    let path = directory.join(RECORD);
    let record = files::read(&path)?.map(|bytes| serde_json::from_slice(&bytes)).transpose();
    record.context(format_args!("{} is not the record of a mount", path.display()))
}

/// Holds the directory as long as the file is open: alone, or with the other processes of its mount. Waits for the end
/// of those of a mount that is gone.
fn lock(directory: &Path, operation: FlockOperation) -> Result<File, CliError> {
    let path = directory.join(LOCK);
    let file = host::lock_file(&path).context(format_args!("cannot create {}", path.display()))?;
    let (began, mut has_said) = (Instant::now(), false);
    let locked = files::poll(ENDING_PATIENCE, POLL, || match flock(&file, operation) {
        Err(Errno::WOULDBLOCK) if !may_end(directory, began.elapsed()) => Err(refused(directory)),
        Err(Errno::WOULDBLOCK) => {
            if !std::mem::replace(&mut has_said, true) {
                console::remark(format_args!("{}: waiting for its end", in_use(directory)));
            }
            Ok(None)
        }
        locked => locked.map(Some).context(format_args!("cannot lock {}", path.display())),
    })?;
    locked.map(|()| file).ok_or_else(|| refused(directory))
}

/// Whether to wait on for those who hold the lock: they are ending, or may soon be and were not waited for long.
fn may_end(directory: &Path, waited: Duration) -> bool {
    let is_used = || mount_point_of(directory).is_some_and(|path| is_served(&path));
    directory.join(ENDING).exists() || (waited < LOCK_PATIENCE && !is_used())
}

fn refused(directory: &Path) -> CliError {
    let todo = "unmount that, wait until it has ended, or name another directory with --cache";
    CliError::Failed(format!("{}: {todo}", in_use(directory)))
}

/// By which mount, and which processes of it.
fn in_use(directory: &Path) -> String {
    let by = mount_point_of(directory).map(|path| format!(" by the mount at {}", path.display())).unwrap_or_default();
    let holders: Vec<String> = holders(&directory.join(LOCK)).iter().map(i32::to_string).collect();
    let whose = if holders.is_empty() { String::new() } else { format!(" (process {})", holders.join(", ")) };
    format!("the cache in {} is in use{by}{whose}", directory.display())
}

/// Where the mount of a directory is, or was.
fn mount_point_of(directory: &Path) -> Option<PathBuf> {
    record(directory).ok()??.fuse.into_iter().next().map(|fuse| fuse.mount_point)
}

fn is_served(mount_point: &Path) -> bool {
    is_mounted(mount_point).unwrap_or(false) && !is_dead(mount_point)
}

/// The processes that hold a lock, as far as this user may look into them.
fn holders(lock: &Path) -> BTreeSet<i32> {
    let has_open = |pid: &i32| {
        let mut open = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        open.any(|file| fs::read_link(file.path()).is_ok_and(|path| path == lock))
    };
    with_locks(&fs::read_to_string("/proc/locks").unwrap_or_default()).filter(has_open).collect()
}

/// The processes that have a lock of flock(2) on whatever file, by `/proc/locks`:
/// `1: FLOCK  ADVISORY  WRITE 4711 08:01:131073 0 EOF`.
fn with_locks(table: &str) -> impl Iterator<Item = i32> {
    table.lines().filter_map(|line| {
        let mut fields = line.split_whitespace().skip(1);
        let is_flock = fields.next()? == "FLOCK";
        fields.nth(2).filter(|_| is_flock)?.parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn cache(directory: PathBuf) -> CacheDir {
        CacheDir { directory, size: ByteSize::gib(1) }
    }

    fn refusal(cache: &CacheDir, mount_point: &Path) -> String {
        let prepared = OneHost::prepare(cache, mount_point, Config::default());
        prepared.err().map(|error| error.to_string()).unwrap_or_default()
    }

    #[test]
    fn the_settings_are_those_of_a_small_host_and_can_be_overridden() {
        let config = configuration(vec![("CV_FUSE__UID".into(), "7".into())]).unwrap();
        assert_eq!((config.fuse.uid, config.fuse.allow_other), (7, false));
        assert!(config.worker.memory_budget < Config::default().worker.memory_budget);
        let wrong = configuration(vec![("CV_FUSE__UID".into(), "me".into())]).unwrap_err();
        assert!(matches!(&wrong, CliError::Usage(text) if text.contains("fuse.uid")), "{wrong}");
    }

    #[test]
    fn processes_share_the_memory_of_a_small_group_and_take_no_more_of_a_large_one() {
        let within = |mib: u64| {
            let memory_by = Some("/sys/fs/cgroup/memory.max".into());
            configuration_on(HostLimits { memory: mib << 20, memory_by, ..HostLimits::default() }, Vec::new()).unwrap()
        };
        let (small, just, large) = (within(512), within(SIZED_FOR >> 20), within(64 << 10));
        let limits = [small.master.resource_limit, small.worker.resource_limit, small.client.resource_limit];
        assert_eq!(limits.map(|limit| limit.to_string()), ["170m"; 3]);
        assert_eq!((small.worker.memory_budget, small.client.memory_budget), (ByteSize::mib(32), ByteSize::mib(21)));
        for config in [just, large] {
            assert_eq!(config.worker.memory_budget, ByteSize::mib(128));
            assert_eq!(config.client.metadata_cache_entries, 200_000);
        }
    }

    #[test]
    fn a_directory_is_taken_once_with_files_that_nobody_else_reads() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().canonicalize().unwrap();
        let (cache, mount_point) = (cache(directory.join("cache")), directory.join("mnt"));
        let prepared = OneHost::prepare(&cache, &mount_point, Config::default()).unwrap();
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&cache.directory), 0o700);
        let conf = prepared.conf().unwrap();
        assert!(conf.security.is_on() && conf.cluster.masters[0].starts_with("127.0.0.1:"), "{conf:?}");
        // A process of it has it, too, and is the last one to go.
        let loaded = OneHost::load(&cache.directory).unwrap();
        assert_eq!(loaded.mount_point(), mount_point);
        let own = cache.directory.join("cluster.toml");
        assert_eq!(of_conf(&own).unwrap().unwrap().directory, cache.directory);
        let other = cache.directory.join("other.toml");
        fs::copy(&own, &other).unwrap();
        assert!([&other, &directory.join("none.toml")].iter().all(|conf| of_conf(conf).unwrap().is_none()));
        drop(prepared);
        let file = host::lock_file(&cache.directory.join(LOCK)).unwrap();
        assert_eq!(flock(&file, FlockOperation::NonBlockingLockExclusive), Err(Errno::WOULDBLOCK));
        let text = refused(&cache.directory).to_string();
        let by = format!("in use by the mount at {} (process {}): ", mount_point.display(), std::process::id());
        assert!(text.contains(&by) && text.contains("--cache"), "{text}");
        // Whose end has begun is waited for longer.
        let waits = |seconds| may_end(&cache.directory, Duration::from_secs(seconds));
        assert!(waits(9) && !waits(10));
        loaded.note_end();
        assert!(waits(60));
        drop(loaded);
        // At the addresses of before, with whatever an interrupted start has left.
        fs::remove_file(cache.directory.join("cluster.toml")).unwrap();
        let again = OneHost::prepare(&cache, &mount_point, Config::default()).unwrap();
        assert_eq!(again.conf().unwrap().cluster, conf.cluster);
        assert!(!waits(60), "its end is another one");
    }

    #[test]
    fn directories_of_others_are_left_alone() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().canonicalize().unwrap();
        let (theirs, long) = (directory.join("theirs"), "x".repeat(120));
        fs::create_dir(&theirs).unwrap();
        fs::set_permissions(&theirs, fs::Permissions::from_mode(0o755)).unwrap();
        fs::write(theirs.join("thesis"), "mine").unwrap();
        for (below, mount_point, part) in [
            ("theirs", "mnt", "not empty (it holds thesis)"),
            ("mnt/cache", "mnt", "lie in one another"),
            ("cache", "cache/mnt", "lie in one another"),
            (long.as_str(), "mnt", "too long"),
        ] {
            let text = refusal(&cache(directory.join(below)), &directory.join(mount_point));
            assert!(text.contains(part) && text.contains("--cache"), "{text}");
        }
        assert_eq!(theirs.metadata().unwrap().permissions().mode() & 0o777, 0o755);
        // What a start has left that was interrupted is nobody else's.
        let begun = directory.join("begun");
        fs::create_dir(&begun).unwrap();
        MADE_FIRST.iter().for_each(|name| fs::write(begun.join(name), "").unwrap());
        assert_eq!(refusal(&cache(begun), &directory.join("mnt")), "");
    }

    #[test]
    fn who_has_a_lock_is_told_from_who_waits_and_from_other_locks() {
        let table = "1: POSIX  ADVISORY  WRITE 11 08:01:4 0 EOF\n2: FLOCK  ADVISORY  READ 12 00:2d:131073 0 EOF\n\
                     2: -> FLOCK  ADVISORY  WRITE 13 00:2d:131073 0 EOF\n3: FLOCK  ADVISORY  WRITE 0 08:01:7 0 EOF\n\n";
        assert_eq!(with_locks(table).collect::<Vec<_>>(), [12, 0]);
    }

    #[test]
    fn what_processes_said_last_is_the_cause() {
        assert_eq!(cause("INFO x\ncv: no device\ncv: no device\ncv: it ended\n"), "no device\n  it ended");
        assert_eq!(cause("one\ntwo"), "one\n  two");
    }
}
