//! `cv mount` and `cv umount`.

mod clients;
mod credentials;
mod view;

use std::ops::RangeInclusive;

use cavern_conf::{ByteSize, Interval};
use cavern_proto::master::{
    AccessMode, AttributePolicy, ClientRules, Consistency, Existing, ListMountsRequest, Mount, MountRequest, Names,
    UnmountRequest, UpdateMountRequest, WriteType,
};
use cavern_proto::{REPLICAS_MAX, Scheme, s3_options};
use clap::{Args, Subcommand, ValueEnum};

use self::clients::ClientArgs;
pub(super) use self::credentials::CredentialArgs;
pub use self::view::{MountView, print};
use super::connect::{ClusterArgs, ResultArgs, new_request_id, rpc};
use super::index::{Shown, follow};
use crate::console;
use crate::error::CliError;

const REPLICAS: RangeInclusive<i64> = 1..=REPLICAS_MAX as i64;
pub(super) const METADATA_TTL: Interval = Interval::secs(60);
/// Variables in which a shell has credentials of S3.
const CREDENTIAL_VARIABLES: [&str; 3] = ["AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE"];

#[derive(Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct MountArgs {
    #[command(subcommand)]
    command: Option<MountCommand>,
    /// What to attach: s3://BUCKET[/PREFIX], gs://BUCKET[/PREFIX], azblob://CONTAINER[/PREFIX] or file:///DIRECTORY.
    #[arg(requires = "path")]
    uri: Option<String>,
    /// Where in the namespace: /train.
    path: Option<String>,
    /// Which side is the truth.
    #[arg(long, value_enum, requires = "uri")]
    write_type: Option<WriteTypeArg>,
    /// Whether clients change what is in it [default: read-only in cache-mode, read-write in fs-mode].
    #[arg(long, value_enum, requires = "uri")]
    access_mode: Option<AccessModeArg>,
    /// In cache-mode: what becomes of modes, owners and times that programs set [default: refuse].
    #[arg(long, value_enum, requires = "uri")]
    attributes: Option<AttributesArg>,
    #[command(flatten)]
    settings: SettingArgs,
    /// Workers that keep each block.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(REPLICAS))]
    replicas: u32,
    /// Size of the blocks that files are cut into: a multiple of 128KiB from 1MiB to 1GiB.
    #[arg(long, value_name = "SIZE", default_value = "64MiB")]
    block_size: ByteSize,
    /// In fs-mode: when a change of a name is answered.
    #[arg(long, value_enum, requires = "uri")]
    names: Option<NamesArg>,
    /// In fs-mode: take every object of the prefix for a plain file. Otherwise those that Cavern has written are given
    /// back what their metadata say they were (owners, permissions, times, links, attributes), at the price of a HEAD
    /// for each object.
    #[arg(long, requires = "uri")]
    no_recover: bool,
    /// In fs-mode: take the prefix from a cluster that is no more. One that lives stops writing to the bucket within a
    /// minute or two, and what it has not written by then is in its mount alone.
    #[arg(long, requires = "uri")]
    take_over: bool,
    /// Verify bucket and credentials, record nothing.
    #[arg(long, requires = "uri")]
    check: bool,
    /// Wait until the mount is indexed: until the namespace has every object of the prefix.
    #[arg(long, requires = "uri", conflicts_with = "check")]
    index: bool,
    #[command(flatten)]
    result: ResultArgs,
}

#[derive(Subcommand)]
enum MountCommand {
    /// Change options, credentials, freshness and clients of a mount that is in use.
    Update(UpdateArgs),
}

#[derive(Args)]
struct UpdateArgs {
    /// Namespace path of the mount.
    path: String,
    #[command(flatten)]
    settings: SettingArgs,
    /// The mount is there for all clients.
    #[arg(long, conflicts_with = "client")]
    all_clients: bool,
    #[command(flatten)]
    result: ResultArgs,
}

/// What can be changed while a mount is in use.
#[derive(Args)]
struct SettingArgs {
    /// Option of the bucket; several times. An update has it in the place of the one of that name, and without a value
    /// takes that away.
    #[arg(short = 'c', long = "option", value_name = "KEY=VALUE", value_parser = key_value)]
    options: Vec<(String, String)>,
    #[command(flatten)]
    credentials: CredentialArgs,
    /// Cached blocks unused for so long may be dropped first; 0 for never [default: 0].
    #[arg(long, value_name = "TIME")]
    ttl: Option<Interval>,
    /// In cache-mode: how long a directory's listing is trusted [default: 60s].
    #[arg(long, value_name = "TIME")]
    metadata_ttl: Option<Interval>,
    /// When the bucket is asked again; in fs-mode, whether changes wait for other clients [default: ttl].
    #[arg(long, value_enum)]
    consistency: Option<ConsistencyArg>,
    #[command(flatten)]
    clients: ClientArgs,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum WriteTypeArg {
    /// The bucket is the truth; Cavern caches it.
    #[value(name = "cache-mode", alias = "cache_mode")]
    CacheMode = WriteType::CacheMode as isize,
    /// The namespace is the truth, and can be written; the bucket follows it. Objects that are there
    /// already are indexed in the background.
    #[value(name = "fs-mode", alias = "fs_mode")]
    FsMode = WriteType::FsMode as isize,
}

#[derive(Clone, Copy, ValueEnum)]
enum AccessModeArg {
    /// Whatever would change something is refused.
    #[value(name = "read-only", alias = "read_only")]
    ReadOnly = AccessMode::ReadOnly as isize,
    /// Files can be written, made and removed; with cache-mode the bucket has a file when its close returns.
    #[value(name = "read-write", alias = "read_write")]
    ReadWrite = AccessMode::ReadWrite as isize,
}

#[derive(Clone, Copy, ValueEnum)]
enum AttributesArg {
    /// They are EOPNOTSUPP, and everything looks as the client's configuration says.
    Refuse = AttributePolicy::Refuse as isize,
    /// The bucket keeps them as metadata of the objects. The first look at a file costs a HEAD.
    Keep = AttributePolicy::Keep as isize,
}

#[derive(Clone, Copy, ValueEnum)]
enum ConsistencyArg {
    /// When a listing is older than the metadata TTL.
    Ttl = Consistency::Ttl as isize,
    /// At every open of a file.
    Always = Consistency::Always as isize,
    /// At `cv refresh` only.
    Never = Consistency::Never as isize,
    /// In fs-mode: no change returns before all clients have let go of what it made untrue.
    Strict = Consistency::Strict as isize,
}

#[derive(Clone, Copy, ValueEnum)]
enum NamesArg {
    /// In directories that the client has made, and nobody else looks into, at once; elsewhere, when the masters have
    /// it on disk.
    Delegated = Names::Delegated as isize,
    /// When the masters have it on disk, everywhere.
    Synced = Names::Synced as isize,
}

impl SettingArgs {
    /// The change of what is given; of no client where none is named.
    fn update(&self, path: String) -> Result<UpdateMountRequest, CliError> {
        let options = self.credentials.options_with(&self.options)?;
        let rules = self.clients.client.clone();
        Ok(UpdateMountRequest {
            path,
            options,
            metadata_ttl_ms: self.metadata_ttl.map(Interval::as_millis),
            consistency: self.consistency.map(|consistency| consistency as i32),
            ttl_ms: self.ttl.map(Interval::as_millis),
            clients: (!rules.is_empty()).then_some(ClientRules { rules }),
        })
    }
}

/// Whether nothing is to be changed.
fn is_nothing(update: &UpdateMountRequest) -> bool {
    *update == UpdateMountRequest { path: update.path.clone(), ..UpdateMountRequest::default() }
}

pub(super) fn key_value(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("write it as key=value, for example s3.endpoint_url=http://127.0.0.1:9000".to_owned()),
    }
}

impl MountArgs {
    pub async fn run(mut self) -> Result<(), CliError> {
        if let Some(MountCommand::Update(update)) = self.command.take() {
            return update.run().await;
        }
        let settings = self.settings.update(self.path.take().unwrap_or_default())?;
        let Some(uri) = self.uri.take() else {
            return self.list(&settings).await;
        };
        let Some(write_type) = self.write_type else {
            let text = "say which side is the truth: --write-type cache-mode (the bucket; Cavern caches it) or \
                        --write-type fs-mode (the namespace, which can be written; the bucket follows it)";
            return Err(CliError::Usage(text.to_owned()));
        };
        let (check_only, take_over, is_awaited) = (self.check, self.take_over, self.index);
        let mount = self.mount(uri, write_type, settings);
        warn_if_unused(&mount);
        let request = MountRequest { mount: Some(mount), check_only, request_id: new_request_id(), take_over };
        let reply = self.result.cluster.call(rpc!(cluster.mount(request))).await?;
        let is_empty = reply.is_empty;
        let view = MountView::answered(reply);
        if is_empty {
            console::remark(format_args!(
                "nothing is there yet under {}: see that it is spelled right if there should be objects",
                view.mount.uri
            ));
        }
        if view.mount.is_written() {
            for limit in view.mount.capabilities().limits() {
                console::remark(format_args!("{}: {limit}", view.mount.uri));
            }
        }
        let done = if check_only { "can be mounted at" } else { "is mounted at" };
        if is_awaited && self.result.json {
            follow(self.result.cluster.masters().await?, &view.mount.path, Shown::Nothing).await?;
        }
        self.result.show(&view, || view.say(&format!("{} {done} {}", view.mount.uri, view.mount.path)))?;
        if is_awaited && !self.result.json {
            follow(self.result.cluster.masters().await?, &view.mount.path, Shown::Text).await?;
        }
        Ok(())
    }

    fn mount(&self, uri: String, write_type: WriteTypeArg, settings: UpdateMountRequest) -> Mount {
        let existing = if self.no_recover { Existing::Indexed } else { Existing::None };
        Mount {
            path: settings.path,
            uri,
            write_type: write_type as i32,
            options: settings.options,
            block_size: self.block_size.bytes(),
            replicas: self.replicas,
            metadata_ttl_ms: settings.metadata_ttl_ms.unwrap_or(METADATA_TTL.as_millis()),
            consistency: settings.consistency.unwrap_or(Consistency::Ttl.into()),
            ttl_ms: settings.ttl_ms.unwrap_or(0),
            access_mode: self.access_mode.map_or(AccessMode::Unspecified.into(), |mode| mode as i32),
            attributes: self.attributes.unwrap_or(AttributesArg::Refuse) as i32,
            existing: existing.into(),
            names: self.names.unwrap_or(NamesArg::Delegated) as i32,
            clients: settings.clients.unwrap_or_default().rules,
            ..Mount::default()
        }
    }

    async fn list(self, settings: &UpdateMountRequest) -> Result<(), CliError> {
        if !is_nothing(settings) {
            return Err(CliError::Usage("say what to attach, and where: cv mount s3://BUCKET/PREFIX /PATH".to_owned()));
        }
        let views = MountView::all(&self.result.cluster.call(rpc!(cluster.list_mounts(ListMountsRequest {}))).await?);
        self.result.show(&views, || print(&views))
    }
}

impl UpdateArgs {
    async fn run(self) -> Result<(), CliError> {
        let mut request = self.settings.update(self.path)?;
        if self.all_clients {
            request.clients = Some(ClientRules::default());
        }
        if is_nothing(&request) {
            let text = "say what is to change: -c KEY=VALUE, --credentials-file and its like, --metadata-ttl, \
                --consistency, --ttl, --client or --all-clients";
            return Err(CliError::Usage(text.to_owned()));
        }
        let view = MountView::answered(self.result.cluster.call(rpc!(cluster.update_mount(request))).await?);
        self.result.show(&view, || view.say(&format!("{} at {} has the new options", view.mount.uri, view.mount.path)))
    }
}

/// Says so where this command's environment has credentials, and the mount has none of its own: it is the masters and
/// the workers that read the bucket, with the credentials that *they* find.
fn warn_if_unused(mount: &Mount) {
    if let Some(variable) = unused_variable(mount, |name| std::env::var_os(name).is_some()) {
        console::remark(format_args!(
            "{variable} of this command's environment is not used: it is the master and the workers that read the \
             bucket, and without -c s3.credentials.… each of them takes what its own environment has; \
             --credentials-env and --credentials-profile give them yours"
        ));
    }
}

fn unused_variable(mount: &Mount, is_set: impl Fn(&str) -> bool) -> Option<&'static str> {
    if mount.scheme() != Some(Scheme::S3) || mount.options.keys().any(|name| s3_options::names_credentials(name)) {
        return None;
    }
    CREDENTIAL_VARIABLES.into_iter().find(|name| is_set(name))
}

#[derive(Args)]
pub struct UmountArgs {
    /// Namespace path of the mount.
    path: String,
    /// Detach an fs-mode mount although its bucket lacks changes: they are lost.
    #[arg(long)]
    discard: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

impl UmountArgs {
    pub async fn run(self) -> Result<(), CliError> {
        let request = UnmountRequest { path: self.path, discard: self.discard, request_id: new_request_id() };
        let mount = self.cluster.call(rpc!(cluster.unmount(request))).await?.mount.unwrap_or_default();
        console::line(format_args!("{} is no longer mounted at {}", mount.uri, mount.path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_need_a_key_and_keep_equal_signs_of_the_value() {
        assert_eq!(key_value("a=b=c"), Ok(("a".into(), "b=c".into())));
        assert_eq!(key_value("a="), Ok(("a".into(), String::new())));
        assert!(key_value("=b").is_err());
        assert!(key_value("ab").is_err());
    }

    #[test]
    fn only_credentials_that_nobody_will_use_are_spoken_of() {
        let mount = |uri: &str, option: &str| Mount {
            uri: uri.into(),
            options: [(option.to_owned(), "x".to_owned())].into(),
            ..Mount::default()
        };
        let profile = |name: &str| name == "AWS_PROFILE";
        assert_eq!(unused_variable(&mount("s3://b", "s3.region_name"), profile), Some("AWS_PROFILE"));
        assert_eq!(unused_variable(&mount("s3://b", "s3.region_name"), |_| false), None);
        assert_eq!(unused_variable(&mount("s3://b", "s3.credentials.access"), profile), None);
        assert_eq!(unused_variable(&mount("s3://b", "s3.anonymous"), profile), None);
        assert_eq!(unused_variable(&mount("file:///b", "s3.region_name"), profile), None);
    }
}
