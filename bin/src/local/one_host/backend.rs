//! The processes of a mount of one host: the backend, which is master and worker, and the supervisor of the mount. Each
//! starts the other again.

use std::collections::HashMap;
use std::convert::Infallible;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use cavern_conf::Config;
use cavern_conf::backoff::{self, Backoff};
use cavern_fuse::kernel::mount::is_dead;
use cavern_net::MasterChannel;
use cavern_net::master::Stubs;
use cavern_proto::master::{
    ListMountsRequest, Mount, MountRequest, PersistStatusRequest, UnmountRequest, UpdateMountRequest, WriteType,
};
use rustix::process::{Pid, Signal, getppid, kill_process};
use tokio::net::UnixStream;
use tokio::process::Child;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::OneHost;
use crate::console;
use crate::error::{CliError, Context as _};
use crate::local::child::{ChildName, Role};
use crate::local::down::undo_mount;
use crate::local::mounted::is_mounted;
use crate::local::{start, up};

/// The executable of this process, also when its file has been replaced.
const OWN: &str = "/proc/self/exe";
/// Between two looks whether the parent is still there, and at the mount.
const POLL: Duration = Duration::from_millis(200);
/// For the worker to be known to the master.
const WORKER_PATIENCE: Duration = Duration::from_secs(20);
/// Between two looks whether it serves.
const START_POLL: Duration = Duration::from_millis(5);
/// For the process that served a mount to be gone after its supervisor: it has a few last words to say.
const LAST_WORDS: Duration = Duration::from_secs(5);
/// A process that has run for so long has not been started in vain.
const SETTLED: Duration = Duration::from_secs(60);
/// For the bucket to get what an fs-mode mount has, when the mount ends.
pub(super) const PERSIST_PATIENCE: Duration = Duration::from_secs(60);

/// Serves as master and worker, and has a supervisor hold the mount, until the mount is gone or `stop`. `parent` is the
/// supervisor that has started this backend, if one has; otherwise `mount` is attached, and a supervisor is started.
///
/// # Errors
/// Why master or worker could not serve, or the mount could not be made.
pub async fn serve(
    host: &OneHost,
    parent: Option<i32>,
    mount: Option<Mount>,
    stop: CancellationToken,
) -> Result<(), CliError> {
    let ending = CancellationToken::new();
    let config_of = |role| host.cluster.conf_of(ChildName { role, number: 0 }).map(|effective| effective.config);
    let (master, worker) = (config_of(Role::Master)?, config_of(Role::Worker)?);
    let replay = [OsString::from("fuse"), "--replay".into(), "--conf".into(), host.cluster.conf_path().into()];
    let master = async {
        let ended = Box::pin(cavern_master::run(master, ending.clone())).await;
        ending.cancel();
        ended.context("the master has ended")
    };
    let worker = async {
        let ended = Box::pin(cavern_worker::run_with_replays(worker, replay.to_vec(), ending.clone())).await;
        ending.cancel();
        ended.context("the worker has ended")
    };
    let mut processes = Box::pin(async {
        let (master, worker) = tokio::join!(master, worker);
        master.and(worker)
    });
    let mounted = Box::pin(supervise_mount(host, parent, mount, &stop));
    let outcome = tokio::select! {
        // The supervisor starts them again.
        ended = &mut processes => {
            return ended.and(Err(CliError::Failed("master and worker have ended by themselves".to_owned())));
        }
        outcome = mounted => outcome,
    };
    ending.cancel();
    outcome.and(processes.await)
}

/// The backend of a directory; its standard input is empty.
pub fn command(program: &Path, directory: &Path) -> Command {
    let mut command = start::command(program);
    command.args(["fuse", "--backend"]).arg(directory).current_dir("/").stdin(Stdio::null());
    command
}

/// As [`command`] and its like, with this process as the parent; by the executable of this process where that of
/// `program` cannot be run.
fn spawn(program: &Path, make: impl Fn(&Path) -> Command) -> Result<Child, CliError> {
    let spawn = |program: &Path| {
        let mut command = make(program);
        command.arg("--parent").arg(std::process::id().to_string());
        tokio::process::Command::from(command).spawn()
    };
    spawn(program).or_else(|_| spawn(Path::new(OWN))).context(format_args!("cannot run {}", program.display()))
}

fn program() -> PathBuf {
    std::env::current_exe().unwrap_or_else(|_| PathBuf::from(OWN))
}

/// Returns when the process that has started this one is gone.
async fn parent_ended(parent: i32) {
    while getppid().is_some_and(|now| now.as_raw_nonzero().get() == parent) {
        sleep(POLL).await;
    }
}

/// Starts the backend of a mount again whenever it ends, as the supervisor of that. `parent` is the one that has
/// started this process.
pub async fn supervise_backend(host: &OneHost, parent: i32, stop: &CancellationToken) -> Infallible {
    let program = program();
    parent_ended(parent).await;
    let mut backoff = backoff::LOCAL_PROCESS.begin();
    while stop.run_until_cancelled(backoff.wait()).await.is_some() {
        console::remark("master and worker of this mount have ended, and are started again");
        let began = Instant::now();
        match spawn(&program, |program| command(program, host.directory())) {
            // How it has ended is in its own words.
            Ok(mut backend) => _ = backend.wait().await,
            Err(error) => console::remark(error),
        }
        if began.elapsed() >= SETTLED {
            backoff.reset();
        }
    }
    std::future::pending().await
}

/// Who holds the mount.
enum MountSupervisor {
    Child(Box<Child>),
    /// It has started this process.
    Parent(i32),
}

impl MountSupervisor {
    fn start(host: &OneHost, program: &Path) -> Result<Self, CliError> {
        let (arguments, environment) = host.cluster.launch(ChildName { role: Role::Fuse, number: 0 });
        let supervisor = spawn(program, |program| {
            let mut command = start::command(program);
            command.args(&arguments).arg("--beside").arg(host.directory()).envs(environment.iter().cloned());
            command.current_dir("/").stdin(Stdio::null());
            command
        });
        supervisor.map(|supervisor| Self::Child(Box::new(supervisor)))
    }

    /// Returns when it has ended; how, if that can be known.
    async fn ended(&mut self) -> Option<ExitStatus> {
        match self {
            Self::Child(child) => child.wait().await.ok(),
            Self::Parent(parent) => {
                parent_ended(*parent).await;
                None
            }
        }
    }

    /// Has it unmount and end.
    fn stop(&self) {
        let pid = match self {
            Self::Child(child) => child.id().map(u32::cast_signed),
            Self::Parent(parent) => Some(*parent),
        };
        for signal in [Signal::TERM, Signal::CONT] {
            // One that is gone has ended.
            let _ = pid.and_then(Pid::from_raw).map(|pid| kill_process(pid, signal));
        }
    }
}

/// Has the mount held until somebody unmounts it or `stop`. What the bucket of an fs-mode mount lacks then is brought
/// there, as far as that takes no longer than a minute.
async fn supervise_mount(
    host: &OneHost,
    parent: Option<i32>,
    mount: Option<Mount>,
    stop: &CancellationToken,
) -> Result<(), CliError> {
    let (config, program, mount_point) = (host.conf()?, program(), host.mount_point());
    let mut supervisor = match parent {
        Some(parent) => MountSupervisor::Parent(parent),
        None => {
            let begun = stop.run_until_cancelled(Box::pin(begin(host, &config, mount))).await;
            let Some(()) = begun.transpose()? else { return Ok(()) };
            MountSupervisor::start(host, &program)?
        }
    };
    let mut backoff = backoff::LOCAL_PROCESS.begin();
    loop {
        let began = Instant::now();
        let status = tokio::select! {
            status = supervisor.ended() => status,
            () = stop.cancelled() => {
                supervisor.stop();
                supervisor.ended().await
            }
        };
        let is_dead = match status.map(|status| status.code()) {
            Some(Some(0)) => false,
            Some(Some(_)) => is_left_dead(mount_point, Duration::ZERO).await,
            // It was killed, or nobody knows how it has ended.
            Some(None) | None => is_left_dead(mount_point, LAST_WORDS).await,
        };
        if is_dead && !stop.is_cancelled() {
            let name = mount_point.display();
            console::remark(format_args!("the process that held {name} was killed: it is mounted anew"));
            if began.elapsed() >= SETTLED {
                backoff.reset();
            }
            if let Some(another) = start_again(host, &program, &mut backoff, stop).await {
                supervisor = another;
                continue;
            }
        }
        if is_dead {
            undo_mount(mount_point)?;
        }
        host.note_end();
        return match status.filter(|status| !status.success() && !stop.is_cancelled()) {
            Some(status) => Err(CliError::Failed(format!("what held the mount has ended: {status}"))),
            None => bring_to_bucket(&config).await,
        };
    }
}

/// Waits until the worker serves, and has the namespace show `mount`.
async fn begin(host: &OneHost, config: &Config, mount: Option<Mount>) -> Result<(), CliError> {
    for worker in &host.cluster.workers {
        // The master may count that of the start before as live.
        while UnixStream::connect(&worker.socket).await.is_err() {
            sleep(START_POLL).await;
        }
    }
    up::workers_known(&host.cluster, WORKER_PATIENCE).await?;
    match mount {
        Some(mount) => attach(config, mount).await,
        None => Ok(()),
    }
}

/// Another supervisor after a pause; `None` where `stop` comes before that.
async fn start_again(
    host: &OneHost,
    program: &Path,
    backoff: &mut Backoff,
    stop: &CancellationToken,
) -> Option<MountSupervisor> {
    loop {
        stop.run_until_cancelled(backoff.wait()).await?;
        match MountSupervisor::start(host, program) {
            Ok(supervisor) => return Some(supervisor),
            Err(error) => console::remark(error),
        }
    }
}

/// Whether a mount is there that nobody serves. One that is served for so long is that of somebody else.
async fn is_left_dead(mount_point: &Path, patience: Duration) -> bool {
    let deadline = Instant::now() + patience;
    loop {
        let path = mount_point.to_owned();
        let look = move || is_mounted(&path).unwrap_or(false).then(|| is_dead(&path));
        match tokio::task::spawn_blocking(look).await.unwrap_or_default() {
            Some(false) if Instant::now() < deadline => sleep(POLL).await,
            found => return found.unwrap_or(false),
        }
    }
}

/// Has the namespace show `mount` and nothing else: what was mounted before in another way is unmounted, and with it
/// brought to its bucket. Blocks that are cached stay, since their names are those of the content.
async fn attach(config: &Config, mount: Mount) -> Result<(), CliError> {
    let masters = MasterChannel::for_command(config)?;
    let list = async |mut master: Stubs| master.cluster.list_mounts(ListMountsRequest {}).await;
    let is_same = |there: &Mount| {
        (&there.path, &there.uri, there.write_type(), there.is_written())
            == (&mount.path, &mount.uri, mount.write_type(), mount.is_written())
    };
    let (same, others): (Vec<Mount>, Vec<Mount>) = masters.ask_unary(list).await?.mounts.into_iter().partition(is_same);
    for Mount { path, uri, .. } in others {
        let request = UnmountRequest { path, ..UnmountRequest::default() };
        let unmount = async |mut master: Stubs| master.cluster.unmount(request.clone()).await;
        masters.ask_unary(unmount).await.map_err(|error| {
            let text = format!("the cache has {uri}, which cannot be unmounted: {error}");
            CliError::Failed(format!("{text}. Mount that again, or name another directory with --cache"))
        })?;
    }
    let Some(there) = same.into_iter().next() else {
        let request = MountRequest { mount: Some(mount), ..MountRequest::default() };
        masters.ask_unary(async |mut master: Stubs| master.cluster.mount(request.clone()).await).await?;
        return Ok(());
    };
    // Values may be hidden, so that nobody knows whether they are the same. Those that are not given any more go.
    let mut options: HashMap<String, String> = there.options.into_keys().map(|name| (name, String::new())).collect();
    options.extend(mount.options);
    let metadata_ttl_ms = (mount.write_type != WriteType::FsMode as i32).then_some(mount.metadata_ttl_ms);
    let request = UpdateMountRequest { path: mount.path, options, metadata_ttl_ms, ..UpdateMountRequest::default() };
    masters.ask_unary(async |mut master: Stubs| master.cluster.update_mount(request.clone()).await).await?;
    Ok(())
}

/// Waits until the bucket of an fs-mode mount has everything.
///
/// # Errors
/// It lacks something after a minute: the directory has that.
async fn bring_to_bucket(config: &Config) -> Result<(), CliError> {
    let masters = MasterChannel::for_command(config)?;
    let list = async |mut master: Stubs| master.cluster.list_mounts(ListMountsRequest {}).await;
    if !masters.ask_unary(list).await?.mounts.iter().any(|mount| mount.write_type() == WriteType::FsMode) {
        return Ok(());
    }
    // Of all changes, and at once.
    let (path, up_to_change) = (config.fuse.path.clone(), u64::MAX);
    let request = PersistStatusRequest { path, up_to_change, ..PersistStatusRequest::default() };
    let deadline = Instant::now() + PERSIST_PATIENCE;
    loop {
        let ask = async |mut master: Stubs| master.cluster.get_persist_status(request.clone()).await;
        let status = masters.ask_unary(ask).await?;
        let left = status.files + status.deletions;
        if left == 0 {
            return Ok(());
        }
        if Instant::now() >= deadline || status.lost_files == left {
            let last = console::prefixed("; the last error: ", &status.last_error);
            return Err(CliError::Failed(format!(
                "the bucket lacks {left} changes, which are kept here until the same mount is made again{last}"
            )));
        }
        sleep(POLL).await;
    }
}
