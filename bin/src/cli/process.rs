//! `cv master`, `cv worker`, `cv fuse`, `cv dev-s3`: the processes of a cluster.

use std::ffi::OsString;
use std::fmt::Display;
use std::path::PathBuf;

use cavern_conf::{Config, Effective, Role, enable_failpoints, process};
use cavern_fuse::supervisor::{SupervisorExit, reload};
use clap::{Args, Subcommand};
use tokio_util::sync::CancellationToken;

use crate::console;
use crate::error::{CliError, Context as _};
use crate::runtime::block_on;

/// What waits on disks; the default of 512 would let a burst of slow reads grow memory without need.
const BLOCKING_THREADS: usize = 64;

#[derive(Args)]
pub struct ProcessArgs {
    /// Configuration file of the cluster.
    #[arg(long, value_name = "FILE")]
    conf: Option<PathBuf>,
}

impl ProcessArgs {
    pub fn master(self) -> Result<(), CliError> {
        self.run(some_threads(), Some(Role::Master), cavern_master::run)
    }

    pub fn worker(self) -> Result<(), CliError> {
        let replay = self.replay_arguments();
        let worker = |config, stop| cavern_worker::run_with_replays(config, replay, stop);
        self.run(all_threads(), Some(Role::Worker), worker)
    }

    /// Those of a process that finishes what a dead mount had begun. It has the configuration of the worker, which is
    /// that of the cluster.
    fn replay_arguments(&self) -> Vec<OsString> {
        let conf = self.conf.iter().flat_map(|conf| ["--conf".into(), conf.into()]);
        ["fuse", "--replay"].map(OsString::from).into_iter().chain(conf).collect()
    }

    /// Runs a process; one that others connect to is first asked whether they can.
    fn run<E: Display>(
        self,
        threads: usize,
        serves_as: Option<Role>,
        role: impl AsyncFnOnce(Config, CancellationToken) -> Result<(), E>,
    ) -> Result<(), CliError> {
        let config = self.begin(serves_as)?;
        serve(threads, async |stop| role(config, stop).await)
    }

    /// What every process begins with: the configuration, and a log.
    fn begin(&self, serves_as: Option<Role>) -> Result<Config, CliError> {
        process::create_privately();
        let effective = Effective::load(self.conf.as_deref())?;
        serves_as.map_or(Ok(()), |role| effective.check_reach(role))?;
        process::init_logging(&effective.config.log).map_err(|error| CliError::Usage(error.to_string()))?;
        if let Some(role) = serves_as {
            effective.warn_if_open(role);
        }
        Ok(effective.config)
    }
}

#[derive(Args)]
pub struct DevS3Args {
    /// Where objects are kept; created if it does not exist.
    #[arg(long, value_name = "DIR")]
    root: PathBuf,
    /// Address of the S3 port; port 0 takes a free one.
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:9000")]
    listen: String,
    /// Address of the port for statistics and injected faults, of the loopback interface; none without.
    #[arg(long, value_name = "HOST:PORT")]
    admin_listen: Option<String>,
    /// Access key that clients must sign with.
    #[arg(long, env = "CV_DEV_S3_ACCESS_KEY", hide_env_values = true, default_value = "cavern")]
    access_key: String,
    /// Secret key that clients must sign with.
    #[arg(long, env = "CV_DEV_S3_SECRET_KEY", hide_env_values = true)]
    #[arg(default_value = "cavern-secret", hide_default_value = true)]
    secret_key: String,
    /// Write one JSON line for each request to this file.
    #[arg(long, value_name = "FILE")]
    request_log: Option<PathBuf>,
}

impl DevS3Args {
    pub fn run(self) -> Result<(), CliError> {
        process::create_privately();
        let mut log = Config::default().log;
        // The protocol's library takes every refused request for an error of the server, a 404 included.
        log.level.push_str(",s3s=off");
        process::init_logging(&log).map_err(|error| CliError::Usage(error.to_string()))?;
        let config = cavern_dev_s3::DevS3Config {
            listen: self.listen,
            admin_listen: self.admin_listen,
            access_key: self.access_key,
            secret_key: self.secret_key,
            request_log: self.request_log,
            ..cavern_dev_s3::DevS3Config::new(self.root)
        };
        serve(all_threads(), |stop| cavern_dev_s3::run(config, stop))
    }
}

/// Threads for tasks that move bytes: one per core.
fn all_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Threads for tasks that do little before they hand on to a disk, a socket or a thread of their own: one for two
/// cores. With more of them each change of the namespace wakes some that then find nothing to do; on two cores a new
/// file costs the master and the client thirteen changes of threads each with two threads, and eight with one.
fn some_threads() -> usize {
    all_threads().div_ceil(2)
}

/// Runs a process with so many threads for its tasks until a signal stops it.
fn serve<E: Display>(
    threads: usize,
    role: impl AsyncFnOnce(CancellationToken) -> Result<(), E>,
) -> Result<(), CliError> {
    enable_failpoints().map_err(CliError::Usage)?;
    process::raise_descriptor_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .worker_threads(threads)
        .max_blocking_threads(BLOCKING_THREADS)
        .build()
        .context("cannot start the asynchronous runtime")?;
    runtime.block_on(async {
        let stop = process::shutdown_on_signals();
        role(stop).await.map_err(|error| CliError::Failed(error.to_string()))
    })
}

#[derive(Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct FuseArgs {
    #[command(flatten)]
    process: ProcessArgs,
    /// The process that does the work; only `cv fuse` starts it.
    #[arg(long, hide = true)]
    daemon: bool,
    /// What a mount had answered whose processes are dead is made, and nothing mounted; only `cv worker` starts it.
    #[arg(long, hide = true, conflicts_with = "daemon")]
    replay: bool,
    #[command(subcommand)]
    command: Option<FuseCommand>,
}

#[derive(Subcommand)]
enum FuseCommand {
    /// Have a mount served by the executable that is installed now.
    Reload(ReloadArgs),
}

#[derive(Args)]
struct ReloadArgs {
    /// Configuration file of the cluster, which says where the mount point is.
    #[arg(long, value_name = "FILE")]
    conf: Option<PathBuf>,
    /// The mount point, if it is not that of the configuration.
    #[arg(long, value_name = "DIR")]
    mount_point: Option<PathBuf>,
}

impl FuseArgs {
    pub fn run(self) -> Result<(), CliError> {
        match self.command {
            Some(FuseCommand::Reload(args)) => block_on(args.run()),
            None if self.replay => self.process.run(some_threads(), None, cavern_fuse::replay),
            None if self.daemon => self.process.run(some_threads(), None, cavern_fuse::run_supervised),
            None => keep(self.process),
        }
    }
}

/// Keeps a mount, or serves it where that is to be.
fn keep(process_args: ProcessArgs) -> Result<(), CliError> {
    let config = process_args.begin(Some(Role::Fuse))?;
    if !config.fuse.supervised {
        return serve(some_threads(), async |stop| cavern_fuse::run(config, stop).await);
    }
    let arguments = std::env::args_os().skip(1).collect();
    // On this thread alone: the kernel ends a daemon with the thread that started it.
    let kept = block_on(async {
        let stop = process::shutdown_on_signals();
        cavern_fuse::supervise(arguments, stop).await.map_err(|error| CliError::Failed(error.to_string()))
    })?;
    match kept {
        SupervisorExit::Exit(0) => Ok(()),
        // It has said why.
        SupervisorExit::Exit(code) => std::process::exit(code),
        SupervisorExit::Signal(signal) => {
            Err(CliError::Failed(format!("the process that served the mount was ended by signal {signal}")))
        }
    }
}

impl ReloadArgs {
    async fn run(self) -> Result<(), CliError> {
        let mount_point = match self.mount_point {
            Some(mount_point) => mount_point,
            None => Config::load(self.conf.as_deref())?.fuse.mount_point,
        };
        // Not by way of the mount itself, which may not answer.
        let mount_point = std::path::absolute(&mount_point).context("cannot find the mount point")?;
        let process = reload(&mount_point).await.map_err(|error| CliError::Failed(error.to_string()))?;
        console::line(format_args!("{} is served by process {process} now", mount_point.display()))
    }
}
