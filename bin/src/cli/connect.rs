//! Which cluster a command speaks to, and the way there.

use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use cavern_conf::{Config, check_master, host};
use cavern_net::MasterChannel;
use cavern_net::master::Stubs;
use cavern_proto::master::{ListWorkersRequest, WorkerState};
use clap::Args;
use tokio::time::Instant;
use tonic::Status;

use crate::console;
use crate::error::CliError;
use crate::local::{self, Cluster};
use crate::runtime::block_on;

/// How long no master may answer whoever follows something: a restart, or until somebody starts it again.
const MASTER_PATIENCE: Duration = Duration::from_secs(300);
/// Between two attempts meanwhile, each of which has looked for a master for as long as a call may take.
const AWAY_PAUSE: Duration = Duration::from_millis(200);

#[derive(Args)]
pub struct ClusterArgs {
    /// Configuration file of the cluster.
    #[arg(long, value_name = "FILE")]
    conf: Option<PathBuf>,
    /// Address of a master's gRPC port.
    #[arg(long, value_name = "HOST:PORT", conflicts_with = "local", value_parser = master_address)]
    master: Option<String>,
    /// Directory of a cluster that `cv local up` has started.
    #[arg(long, visible_alias = "dir", value_name = "DIR", conflicts_with = "conf")]
    local: Option<PathBuf>,
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
        let local = match &self.local {
            Some(directory) => Some(Cluster::load(directory)?),
            None => None,
        };
        let path = match (&local, &self.conf) {
            (Some(cluster), _) => Some(cluster.conf_path()),
            (None, Some(path)) => Some(path.clone()),
            (None, None) => self.default_local(),
        };
        let mut config = Config::load(path.as_deref()).map_err(|error| CliError::Usage(error.to_string()))?;
        // What is said on the command line goes before what the environment says.
        if let Some(cluster) = local {
            config.cluster.masters = cluster.masters.into_iter().map(|master| master.grpc).collect();
        }
        if let Some(master) = &self.master {
            config.cluster.masters = vec![master.clone()];
        }
        Ok(config)
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
}

/// Asks until a master has answered, and goes on for [`MASTER_PATIENCE`] while none does. `what` goes on with the next
/// one; a person is told so.
pub async fn ask_patiently<T>(
    masters: &MasterChannel,
    answer_timeout: Duration,
    what: &str,
    request: impl AsyncFn(Stubs) -> Result<T, Status>,
) -> Result<T, CliError> {
    let mut away: Option<Instant> = None;
    loop {
        let asked = masters.ask(async |master: Stubs| request(master).await);
        let cause = match tokio::time::timeout(answer_timeout, asked).await {
            Ok(Ok(answer)) => {
                if away.is_some() {
                    console::remark("a master answers again");
                }
                return Ok(answer);
            }
            Ok(Err(error)) => match CliError::from(error) {
                CliError::Unreachable(cause) => cause,
                error => return Err(error),
            },
            Err(_late) => format!("the master does not answer within {} s", answer_timeout.as_secs()),
        };
        let since = *away.get_or_insert_with(|| {
            console::remark(format_args!("{cause}; waiting for a master, {what} goes on when there is one"));
            Instant::now()
        });
        if since.elapsed() >= MASTER_PATIENCE {
            let waited = MASTER_PATIENCE.as_secs();
            let text = format!("no master has answered for {waited} s ({cause}): {what} goes on with one");
            return Err(CliError::Unreachable(text));
        }
        tokio::time::sleep(AWAY_PAUSE).await;
    }
}

/// The id of a request: whoever sends it again with the same id is told what the first one did.
pub fn new_request_id() -> Bytes {
    Bytes::copy_from_slice(&host::random_id())
}

/// How many workers of this cluster the masters at these addresses count as live.
pub fn live_workers(config: &Config, masters: Vec<String>) -> Result<usize, CliError> {
    let mut asked = Config { security: config.security.clone(), ..Config::default() };
    asked.cluster.name.clone_from(&config.cluster.name);
    asked.cluster.masters = masters;
    block_on(async {
        let masters = MasterChannel::connect(&asked).await?;
        let list = async |mut master: Stubs| master.cluster.list_workers(ListWorkersRequest {}).await;
        let table = masters.ask(list).await?.into_inner();
        Ok(table.workers.iter().filter(|worker| worker.state() == WorkerState::Live).count())
    })
}
