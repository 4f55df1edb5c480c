//! Which cluster a command speaks to, and the way there.

use std::path::PathBuf;

use bytes::Bytes;
use cavern_conf::{Config, check_master, host};
use cavern_net::MasterChannel;
use cavern_net::master::Stubs;
use clap::Args;
use serde::Serialize;
use tonic::{Response, Status};

use crate::console;
use crate::error::CliError;
use crate::local::{self, Cluster};

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

/// What most commands take beside what they are about: how the result is shown, and of which cluster it is.
#[derive(Args)]
pub struct ResultArgs {
    /// The result as JSON.
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub cluster: ClusterArgs,
}

impl ResultArgs {
    /// Writes a result as JSON, or as `print` has it for people.
    pub fn show<T: Serialize>(
        &self,
        result: &T,
        print: impl FnOnce(&T) -> Result<(), CliError>,
    ) -> Result<(), CliError> {
        console::show(self.json, result, print)
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
        let local = match &self.local {
            Some(directory) => Some(Cluster::load(directory)?),
            None => None,
        };
        let path = match (&local, &self.conf) {
            (Some(cluster), _) => Some(cluster.conf_path()),
            (None, Some(path)) => Some(path.clone()),
            (None, None) => self.default_local(),
        };
        let mut config = Config::load(path.as_deref())?;
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

    /// Asks the master that leads for one answer.
    pub async fn call<T>(&self, request: impl AsyncFnMut(Stubs) -> Result<Response<T>, Status>) -> Result<T, CliError> {
        Ok(self.masters().await?.ask_unary(request).await?)
    }
}

/// The id of a request: whoever sends it again with the same id is told what the first one did.
pub fn new_request_id() -> Bytes {
    Bytes::copy_from_slice(&host::random_id())
}
