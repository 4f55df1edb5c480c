//! `cv mount update`.

use cavern_conf::Interval;
use cavern_net::master::Stubs;
use cavern_proto::master::{ClientRules, UpdateMountRequest};
use clap::Args;

use super::clients::ClientArgs;
use super::credentials::CredentialArgs;
use super::{ConsistencyArg, MountView, key_value, options};
use crate::cli::connect::ResultArgs;
use crate::error::CliError;

#[derive(Args)]
#[command(after_help = "Examples:
  cv mount update /train --credentials-file ~/.cavern-keys
  cv mount update /train --metadata-ttl 5m
  cv mount update /train -c s3.region_name=  take an option away
  cv mount update /train -c s3.credentials.vended_role=arn:…
                                             no keys but such as end soon
  cv mount update /work --client 'train-*'   there for these clients, in the
                                             place of those of before

Bucket and credentials are verified before anything is changed. Clients and workers \
take the new ones on within seconds; files stay open.")]
pub struct UpdateArgs {
    /// Namespace path of the mount.
    #[arg(value_name = "PATH")]
    path: String,
    /// Option of the bucket, in the place of the one of that name; without a value it is taken away. Several times.
    #[arg(short = 'c', long = "option", value_name = "KEY=VALUE", value_parser = key_value)]
    options: Vec<(String, String)>,
    #[command(flatten)]
    credentials: CredentialArgs,
    /// Cached blocks unused for so long may be dropped first; 0 for never.
    #[arg(long, value_name = "TIME")]
    ttl: Option<Interval>,
    /// In cache-mode: how long a directory's listing is trusted.
    #[arg(long, value_name = "TIME")]
    metadata_ttl: Option<Interval>,
    /// In cache-mode: when the bucket is asked again.
    #[arg(long, value_enum)]
    consistency: Option<ConsistencyArg>,
    #[command(flatten)]
    clients: ClientArgs,
    /// The mount is there for all clients.
    #[arg(long, conflicts_with = "client")]
    all_clients: bool,
    #[command(flatten)]
    fixed: FixedArgs,
    #[command(flatten)]
    result: ResultArgs,
}

/// What stays as it is for as long as there is a mount; taken to say why.
#[derive(Args)]
struct FixedArgs {
    #[arg(long, hide = true)]
    uri: Option<String>,
    #[arg(long, hide = true)]
    write_type: Option<String>,
    #[arg(long, hide = true)]
    access_mode: Option<String>,
    #[arg(long, hide = true)]
    attributes: Option<String>,
    #[arg(long, hide = true)]
    block_size: Option<String>,
    #[arg(long, hide = true)]
    replicas: Option<String>,
    #[arg(long, hide = true)]
    recover: bool,
    #[arg(long, hide = true)]
    no_recover: bool,
}

impl FixedArgs {
    /// The first that is given, and why it cannot change.
    fn given(&self) -> Option<(&'static str, &'static str)> {
        let all = [
            (self.uri.is_some(), "--uri", "what is cached and what was written belong to its bucket"),
            (self.write_type.is_some(), "--write-type", "which side is the truth decides what everything in it is"),
            (self.access_mode.is_some(), "--access-mode", "clients have opened its files by it"),
            (self.attributes.is_some(), "--attributes", "clients have seen its files by it"),
            (self.block_size.is_some(), "--block-size", "its files are cut into blocks already"),
            (self.replicas.is_some(), "--replicas", "its blocks are at their workers already"),
            (self.recover || self.no_recover, "--recover", "its objects have come into the namespace already"),
        ];
        all.into_iter().find(|(is_given, ..)| *is_given).map(|(_, name, reason)| (name, reason))
    }
}

impl UpdateArgs {
    pub async fn run(self) -> Result<(), CliError> {
        let path = self.path;
        if let Some((name, reason)) = self.fixed.given() {
            return Err(CliError::Usage(format!(
                "{name} of a mount cannot change, since {reason}: `cv umount {path}`, and mount it anew"
            )));
        }
        let request = UpdateMountRequest {
            path,
            options: options(&self.options, &self.credentials)?,
            metadata_ttl_ms: self.metadata_ttl.map(Interval::as_millis),
            consistency: self.consistency.map(|consistency| consistency as i32),
            ttl_ms: self.ttl.map(Interval::as_millis),
            clients: match self.clients.rules() {
                rules if rules.is_empty() && !self.all_clients => None,
                rules => Some(ClientRules { rules }),
            },
        };
        if request == (UpdateMountRequest { path: request.path.clone(), ..UpdateMountRequest::default() }) {
            let text = "say what is to change: -c KEY=VALUE, --credentials-file and its like, --metadata-ttl, \
                --consistency, --ttl, --client or --all-clients";
            return Err(CliError::Usage(text.to_owned()));
        }
        let update = async |mut master: Stubs| master.cluster.update_mount(request.clone()).await;
        let view = MountView::answered(&self.result.cluster.call(update).await?);
        self.result.show(&view, |view| view.print(&format!("{} at {} has the new options", view.uri, view.path)))
    }
}
