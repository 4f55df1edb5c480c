//! `cv master`, `cv worker`, `cv fuse`, `cv dev-s3`: the processes of a cluster.

use std::ffi::OsString;
use std::fmt::Display;
use std::path::PathBuf;

use cavern_conf::{Config, Effective, Role, enable_failpoints, process};
use clap::Args;
use tokio_util::sync::CancellationToken;

use crate::error::{CliError, Context as _};

/// What waits on disks; the default of 512 would let a burst of slow reads grow memory without need.
const BLOCKING_THREADS: usize = 64;

#[derive(Args)]
#[command(after_help = "The file may also be named by CV_CONF; \
CV_SECTION__KEY in the environment overrides single keys.

Examples:
  cv master --conf /etc/cavern/cluster.toml
  CV_LOG__LEVEL=debug cv worker --conf /etc/cavern/cluster.toml

SIGTERM and SIGINT drain and end with exit code 0.")]
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
    pub(super) fn run<E: Display>(
        self,
        threads: usize,
        serves_as: Option<Role>,
        role: impl AsyncFnOnce(Config, CancellationToken) -> Result<(), E>,
    ) -> Result<(), CliError> {
        let config = self.begin(serves_as)?;
        self.serve(config, threads, role)
    }

    /// Runs a process that has begun.
    pub(super) fn serve<E: Display>(
        self,
        config: Config,
        threads: usize,
        role: impl AsyncFnOnce(Config, CancellationToken) -> Result<(), E>,
    ) -> Result<(), CliError> {
        enable_failpoints().map_err(CliError::Usage)?;
        serve(threads, async |stop| role(config, stop).await)
    }

    /// What every process begins with: the configuration, and a log.
    pub(super) fn begin(&self, serves_as: Option<Role>) -> Result<Config, CliError> {
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
#[command(after_help = "Examples:
  cv dev-s3 --root /tmp/objects --listen 127.0.0.1:9000
  cv dev-s3 --root /tmp/objects --request-log /tmp/requests.jsonl

For laptops and tests: one pair of keys, no TLS, nothing is synced to disk. Objects are files below --root whose names \
are numbers; keys and attributes stand at their ends. At the admin port, GET /_dev/stats counts requests by \
kind, POST /_dev/faults takes rules that delay or fail them, GET /metrics is for Prometheus. It is for this host, and \
takes the token in the file admin-token below --root, which is a new one after each start:
  TOKEN=$(cat /tmp/objects/admin-token)
  curl -H \"Authorization: Bearer $TOKEN\" http://127.0.0.1:9001/_dev/stats")]
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
    #[arg(
        long,
        env = "CV_DEV_S3_SECRET_KEY",
        hide_env_values = true,
        default_value = "cavern-secret",
        hide_default_value = true
    )]
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
pub(super) fn some_threads() -> usize {
    all_threads().div_ceil(2)
}

/// Runs a process with so many threads for its tasks until a signal stops it.
fn serve<E: Display>(
    threads: usize,
    role: impl AsyncFnOnce(CancellationToken) -> Result<(), E>,
) -> Result<(), CliError> {
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
