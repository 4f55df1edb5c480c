//! Which cluster a command speaks to, the way there, questions about something that takes long, and how results are
//! shown.

use std::cell::Cell;
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use cavern_conf::{Config, Effective, SettingSource, check_master, host};
use cavern_net::MasterChannel;
use cavern_net::master::Stubs;
use clap::{Args, Subcommand};
use serde::Serialize;
use tokio::time::Instant;
use tonic::{Response, Status};

use crate::console;
use crate::error::CliError;
use crate::local::{self, Cluster};

#[derive(Args)]
pub struct ClusterArgs {
    /// Configuration file of the cluster.
    #[arg(long, global = true, value_name = "FILE")]
    conf: Option<PathBuf>,
    /// Address of a master's gRPC port.
    #[arg(long, global = true, value_name = "HOST:PORT", conflicts_with = "local", value_parser = master_address)]
    master: Option<String>,
    /// Directory of a cluster that `cv local up` has started.
    #[arg(long, global = true, visible_alias = "dir", value_name = "DIR", conflicts_with = "conf")]
    local: Option<PathBuf>,
}

/// What most commands take beside what they are about: how the result is shown, and of which cluster it is.
#[derive(Args)]
pub struct ResultArgs {
    /// The result as JSON; an object a line where it comes piece by piece.
    #[arg(long, global = true)]
    pub json: bool,
    #[command(flatten)]
    pub cluster: ClusterArgs,
}

/// Commands of one kind, and what all of them take.
#[derive(Args)]
pub struct Family<C: Subcommand> {
    #[command(flatten)]
    pub result: ResultArgs,
    #[command(subcommand)]
    pub command: C,
}

impl ResultArgs {
    /// Writes a result as JSON, or as `print` has it for people.
    pub fn show(&self, result: &impl Serialize, print: impl FnOnce() -> Result<(), CliError>) -> Result<(), CliError> {
        if self.json { console::json(result) } else { print() }
    }
}

pub fn master_address(text: &str) -> Result<String, String> {
    check_master(text).map(|()| text.to_owned())
}

impl ClusterArgs {
    /// The cluster of a configuration file, or of a directory of `cv local`.
    pub fn of(conf: Option<PathBuf>, local: Option<PathBuf>) -> Self {
        Self { conf, master: None, local }
    }

    /// The configuration of the cluster that is meant: `--local`, `--conf`, the usual places, and last the local
    /// cluster of this user if none of those says anything; `--master` goes before all for the masters' addresses.
    pub fn config(&self) -> Result<Config, CliError> {
        Ok(self.effective()?.config)
    }

    /// [`Self::config`], with where its values come from.
    pub fn effective(&self) -> Result<Effective, CliError> {
        let local = self.local.as_deref().map(Cluster::load).transpose()?;
        let path = match (&local, &self.conf) {
            (Some(cluster), _) => Some(cluster.conf_path()),
            (None, Some(path)) => Some(path.clone()),
            (None, None) => self.default_local(),
        };
        let mut effective = Effective::load(path.as_deref())?;
        let masters = &mut effective.config.cluster.masters;
        // What is said on the command line goes before what the environment says.
        if let Some(cluster) = local {
            *masters = cluster.masters.into_iter().map(|master| master.grpc).collect();
        }
        if let Some(master) = &self.master {
            *masters = vec![master.clone()];
        }
        Ok(effective)
    }

    /// Whether something says where the cluster is: a file, the environment, or the command line.
    pub fn is_named(&self, effective: &Effective) -> bool {
        self.master.is_some()
            || effective.file.is_some()
            || effective.origin("cluster.masters") != SettingSource::Default
    }

    /// The local cluster that is meant, if it is one.
    pub fn local_cluster(&self) -> Result<Option<Cluster>, CliError> {
        match (&self.local, &self.conf) {
            (Some(directory), _) => Cluster::load(directory).map(Some),
            (None, None) if self.default_local().is_some() => Cluster::find(&local::default_directory()),
            (None, _) => Ok(None),
        }
    }

    fn default_local(&self) -> Option<PathBuf> {
        let is_configured = self.master.is_some()
            || ["CV_CONF", "CV_CLUSTER__MASTERS"].iter().any(|name| std::env::var_os(name).is_some())
            || std::path::Path::new("/etc/cavern/cluster.toml").exists();
        let conf = local::default_directory().join("cluster.toml");
        (!is_configured && conf.exists()).then_some(conf)
    }

    /// The way to the masters, which begins at the one that leads.
    pub async fn masters(&self) -> Result<MasterChannel, CliError> {
        Ok(MasterChannel::connect(&self.config()?).await?)
    }

    /// Asks the master that leads for one answer.
    pub async fn call<T>(&self, request: impl AsyncFnMut(Stubs) -> Result<Response<T>, Status>) -> Result<T, CliError> {
        Ok(self.masters().await?.ask_unary(request).await?)
    }
}

/// A call of one method of the master that leads, which is made again, with the same request, until it has an answer.
macro_rules! rpc {
    ($service:ident.$method:ident($request:expr)) => {{
        let request = $request;
        async move |mut master: ::cavern_net::master::Stubs| master.$service.$method(request.clone()).await
    }};
}
pub(crate) use rpc;

/// Between two questions, and how often a line reports the answer where no bar is drawn.
pub const POLL_PERIOD: Duration = Duration::from_millis(200);
pub const LINE_PERIOD: Duration = Duration::from_secs(2);
/// How long a master may take to answer one question; one that is only slow is asked again.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long no master may answer: a restart, or until somebody starts it again. Each attempt meanwhile looks for one as
/// long as any command does.
const MASTER_PATIENCE: Duration = Duration::from_secs(300);

/// Whoever asks, one thing or several at a time.
pub struct Poller {
    pub masters: MasterChannel,
    /// What goes on with the next master, as a sentence begins with it.
    what: &'static str,
    /// Since when no master answers.
    away: Cell<Option<Instant>>,
}

impl Poller {
    pub fn new(masters: MasterChannel, what: &'static str) -> Self {
        Self { masters, what, away: Cell::new(None) }
    }

    /// The answer of the first master that gives one: each attempt has `answer_timeout` for it, all together
    /// [`MASTER_PATIENCE`].
    ///
    /// # Errors
    /// What a master says, or that none has answered for so long; `goes_on` says what becomes of it then.
    pub async fn ask<T>(
        &self,
        answer_timeout: Duration,
        goes_on: &str,
        request: impl AsyncFn(Stubs) -> Result<Response<T>, Status>,
    ) -> Result<T, CliError> {
        loop {
            let asked = self.masters.ask_unary(async |master: Stubs| {
                let answer = request(master).await;
                // Said now: another master is looked for before the call fails.
                if let Err(status) = &answer
                    && let CliError::Unreachable(cause) = CliError::from(status.clone())
                {
                    self.away_since(&cause);
                }
                answer
            });
            let answer = tokio::time::timeout(answer_timeout, asked).await;
            let cause = match answer {
                Ok(Ok(answer)) => {
                    self.is_answered();
                    return Ok(answer);
                }
                Ok(Err(error)) => match CliError::from(error) {
                    CliError::Unreachable(cause) => cause,
                    error => return Err(error),
                },
                Err(_late) => format!("the master does not answer within {} s", answer_timeout.as_secs()),
            };
            if self.away_since(&cause).elapsed() >= MASTER_PATIENCE {
                return Err(CliError::Unreachable(format!(
                    "no master has answered for {} s ({cause}): {} {goes_on}",
                    MASTER_PATIENCE.as_secs(),
                    self.what
                )));
            }
            tokio::time::sleep(POLL_PERIOD).await;
        }
    }

    /// A master answers. To be called with each part of an answer that comes in parts.
    pub fn is_answered(&self) {
        if self.away.take().is_some() {
            console::remark("a master answers again");
        }
    }

    /// Since when no master answers, which is said at the first failure.
    fn away_since(&self, cause: &str) -> Instant {
        let since = self.away.get().unwrap_or_else(|| {
            console::remark(format_args!("{cause}; waiting for a master, {} goes on when there is one", self.what));
            Instant::now()
        });
        self.away.set(Some(since));
        since
    }
}

/// The id of a request: whoever sends it again with the same id is told what the first one did.
pub fn new_request_id() -> Bytes {
    Bytes::copy_from_slice(&host::random_id())
}

/// The word of an enumeration of the protocol: `running` of `JOB_STATE_RUNNING`, whose values begin with `JOB_STATE_`.
pub fn word(name: &str, beginning: &str) -> String {
    name.strip_prefix(beginning).unwrap_or(name).to_lowercase()
}
