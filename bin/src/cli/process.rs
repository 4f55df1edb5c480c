//! `cv master`, `cv worker`, `cv fuse`, `cv dev-s3`: the processes of a cluster.

use std::convert::Infallible;
use std::ffi::OsString;
use std::fmt::Display;
use std::path::{Path, PathBuf};

use cavern_conf::{Budget, Config, Effective, HostLimits, Limits, Role, enable_failpoints, process};
use cavern_fuse::kernel::mount::table::mounts_for_automounter;
use cavern_fuse::supervisor::{ReloadError, SupervisorExit, reload};
use cavern_proto::master::Mount;
use clap::{Args, Subcommand};
use tokio_util::sync::CancellationToken;

use super::one_host::OneHostArgs;
use crate::console;
use crate::error::{CliError, Context as _};
use crate::local::one_host::{self, OneHost};
use crate::runtime::block_on;

#[derive(Args)]
pub struct ProcessArgs {
    /// Configuration file of the cluster.
    #[arg(long, value_name = "FILE")]
    conf: Option<PathBuf>,
}

impl ProcessArgs {
    pub fn master(self) -> Result<(), CliError> {
        self.run(Some(Role::Master), cavern_master::run)
    }

    pub fn worker(self) -> Result<(), CliError> {
        let replay = self.replay_arguments();
        let worker = |config, stop| cavern_worker::run_with_replays(config, replay, stop);
        self.run(Some(Role::Worker), worker)
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
        serves_as: Option<Role>,
        role: impl AsyncFnOnce(Config, CancellationToken) -> Result<(), E>,
    ) -> Result<(), CliError> {
        let config = self.begin(serves_as)?;
        // Others are clients that nobody connects to.
        let budget = config.budgets.of(serves_as.unwrap_or(Role::Fuse)).clone();
        serve(&budget, async |stop| role(config, stop).await)
    }

    /// What every process begins with: the configuration, and a log.
    fn begin(&self, serves_as: Option<Role>) -> Result<Config, CliError> {
        process::create_privately();
        let effective = Effective::load(self.conf.as_deref())?;
        serves_as.map_or(Ok(()), |role| effective.check_reach(role).and_then(|()| effective.check_limits(role)))?;
        process::init_logging(&effective.config.log).map_err(|error| CliError::Usage(error.to_string()))?;
        if let Some(role) = serves_as {
            effective.warn_if_open(role);
            effective.log_limits(role);
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
        let HostLimits { cpus, .. } = HostLimits::here();
        let budget = Budget::of(Role::Worker, Limits { cpus, ..Limits::STANDARD });
        serve(&budget, |stop| cavern_dev_s3::run(config, stop))
    }
}

/// Runs a process with the threads of its budget until a signal stops it.
fn serve<E: Display>(
    budget: &Budget,
    role: impl AsyncFnOnce(CancellationToken) -> Result<(), E>,
) -> Result<(), CliError> {
    enable_failpoints().map_err(CliError::Usage)?;
    process::raise_descriptor_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .worker_threads(budget.threads)
        .max_blocking_threads(budget.blocking_threads)
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
    #[command(flatten)]
    one_host: OneHostArgs,
    /// Master and worker of the mount of one host that lives in this directory; only `cv fuse` starts them.
    #[arg(long, hide = true, value_name = "DIR")]
    backend: Option<PathBuf>,
    /// Keeps that mount, and starts its backend again; only the backend starts it.
    #[arg(long, hide = true, value_name = "DIR", requires = "parent")]
    beside: Option<PathBuf>,
    /// Of the two, the one that has started this one.
    #[arg(long, hide = true, value_name = "PID")]
    parent: Option<i32>,
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
        match (self.command, &self.backend) {
            (Some(FuseCommand::Reload(args)), _) => block_on(args.run()),
            (None, _) if self.replay => self.process.run(None, cavern_fuse::replay),
            (None, _) if self.daemon => self.process.run(None, cavern_fuse::run_supervised),
            (None, Some(directory)) => backend(directory, self.parent),
            (None, None) if self.one_host.is_given() => {
                self.one_host.run()?.map_or(Ok(()), |(host, mount)| serve_host(&host, None, Some(mount)))
            }
            (None, None) => keep(self.process, self.beside.zip(self.parent)),
        }
    }
}

/// Master and worker of the mount of one host, whose supervisor may have started them.
fn backend(directory: &Path, parent: Option<i32>) -> Result<(), CliError> {
    let host = OneHost::load(directory)?;
    if !mounts_for_automounter(host.mount_point()) {
        // Away from the terminal of whoever makes the mount, and from the signals of his process group.
        rustix::process::setsid().context("cannot begin a session")?;
    }
    let mount = if parent.is_some() { None } else { one_host::handed_over()? };
    serve_host(&host, parent, mount)
}

fn serve_host(host: &OneHost, parent: Option<i32>, mount: Option<Mount>) -> Result<(), CliError> {
    process::create_privately();
    let config = host.conf()?;
    process::init_logging(&config.log).map_err(|error| CliError::Usage(error.to_string()))?;
    // Of both the one that moves bytes.
    serve(&config.budgets.worker, async |stop| one_host::serve(host, parent, mount, stop).await)
}

/// Keeps a mount, or serves it where that is to be. On a host that it has to itself, beside a backend: that lives in a
/// directory, and has started this process.
fn keep(process_args: ProcessArgs, backend: Option<(PathBuf, i32)>) -> Result<(), CliError> {
    let config = process_args.begin(Some(Role::Fuse))?;
    let load = |(directory, parent): (PathBuf, i32)| Ok::<_, CliError>((OneHost::load(&directory)?, parent));
    let backend = backend.map(load).transpose()?;
    if !config.fuse.supervised {
        let budget = config.budgets.client.clone();
        return serve(&budget, async |stop| cavern_fuse::run(config, stop).await);
    }
    let arguments = std::env::args_os().skip(1).collect();
    // On this thread alone: the kernel ends a daemon with the thread that started it.
    let kept = block_on(async {
        let stop = process::shutdown_on_signals();
        let watched = async {
            match &backend {
                Some((host, parent)) => one_host::supervise_backend(host, *parent, &stop).await,
                None => std::future::pending::<Infallible>().await,
            }
        };
        tokio::select! {
            kept = Box::pin(cavern_fuse::supervise(&config.fuse.mount_point, arguments, stop.clone())) => {
                kept.map_err(|error| CliError::Failed(error.to_string()))
            }
            never = watched => match never {},
        }
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
        // As the mount table has it. Nothing is asked of the mount itself, which may not answer.
        let resolved = mount_point.canonicalize().or_else(|_not_there| std::path::absolute(&mount_point));
        let mount_point = resolved.context("cannot find the mount point")?;
        let process = reload(&mount_point).await.map_err(|error| match &error {
            ReloadError::NoMount(_) | ReloadError::NoSupervisor { .. } => CliError::NotFound(error.to_string()),
            ReloadError::AnotherUser { .. } | ReloadError::Refused { .. } => CliError::Failed(error.to_string()),
        })?;
        console::line(format_args!("{} is served by process {process} now", mount_point.display()))
    }
}
