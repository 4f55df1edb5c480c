//! `cv mount` and `cv umount`.

mod clients;
mod credentials;
mod environment;
mod keys;
mod update;

use std::collections::{BTreeMap, HashMap};
use std::ops::RangeInclusive;

use cavern_conf::{ByteSize, Interval, counted};
use cavern_net::master::Stubs;
use cavern_proto::master::{
    AccessMode, AttributePolicy, Consistency, Existing, FetchFailure, ListMountsRequest, Mount, MountReply,
    MountRequest, MountStatus, MountTable, Names, UnmountRequest, WriteType,
};
use cavern_proto::{HIDDEN, REPLICAS_MAX, shown_option};
use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;

use self::clients::{ClientArgs, shown_rules};
use self::credentials::CredentialArgs;
use self::keys::KeysView;
use self::update::UpdateArgs;
use super::connect::{ClusterArgs, ResultArgs, new_request_id};
use crate::console;
use crate::error::CliError;

const REPLICAS: RangeInclusive<i64> = 1..=REPLICAS_MAX as i64;

#[derive(Args)]
#[command(args_conflicts_with_subcommands = true)]
#[command(after_help = "Options of a bucket (-c):
  s3.endpoint_url          http://host:port of an S3-compatible store
  s3.region_name           region that requests are signed for
  s3.credentials.access    access key
  s3.credentials.secret    secret key
  s3.credentials.session_token
                           token of a temporary pair of keys
  s3.credentials.profile   profile that each process of the cluster looks
                           up in its own ~/.aws/credentials
  s3.credentials.source    environment, instance, container, web_identity:
                           where each process of the cluster finds its own
  s3.credentials.role      ARN of a role that is assumed with these
                           credentials, and renewed
  s3.credentials.external_id
                           what the role's owner has agreed on
  s3.credentials.role_session
                           name of its sessions: cavern
  s3.credentials.vended_role
                           ARN of a role: workers and clients get keys of
                           it that end, for the prefix of the mount only,
                           and the credentials stay with the masters
  s3.credentials.vended_duration
                           how long such keys live, 15m to 12h: 1h
  s3.sts_endpoint_url      http://host:port of the STS that gives these out
  s3.anonymous             true: requests are not signed
  s3.force.path.style      true: http://host/BUCKET/KEY,
                           false: http://BUCKET.host/KEY

Masters, workers and clients open what their configuration lets them: directories of file:// must lie in one of \
ufs.file_roots, endpoints at loopback or link-local addresses must be in ufs.endpoints, and credentials of an \
instance or a container are used with ufs.instance_credentials only.

A secret on a command line is seen by every user of the host, and kept by the shell: give it with --credentials-file, \
--credentials-env or --credentials-profile. Without any credentials each process of the cluster looks in its own \
environment, which is not the one of this command.

Examples:
  cv mount s3://data/train /train --write-type cache-mode \\
      -c s3.endpoint_url=http://s3:9000 -c s3.region_name=us-east-1 \\
      --credentials-file ~/.cavern-keys
  pass show s3/train | cv mount s3://data/train /train \\
      --write-type cache-mode --credentials-file - -c …
  cv mount s3://data/train /train --write-type cache-mode \\
      --credentials-profile train
  cv mount s3://data/train /train --write-type cache-mode -c … --check
                                             verify only
  cv mount s3://data/work /work --write-type fs-mode -c …
                                             files are as Cavern left them there
  cv mount s3://data/work /work --write-type fs-mode -c … \\
      --take-over                            of a cluster that is no more
  cv mount s3://data/work /work --write-type fs-mode -c … \\
      --client 'train-*' --client eval-1=ro      there for these clients only
  cv mount s3://data/home /home --write-type fs-mode -c … \\
      --client 'train-*=rw,root_squash'          whose root is nobody there
  cv mount s3://data/train /train --write-type cache-mode -c … \\
      -c s3.credentials.vended_role=arn:aws:iam::123456789012:role/train
                                             no keys but such as end soon
  cv mount update /work --client '*=rw,operations=2000'
                                             each goes on no faster there
  cv mount update /train --credentials-file ~/.cavern-keys
                                             new credentials, while it is in use
  cv mount                                   list what is attached

Bucket and credentials are verified before anything is recorded.")]
pub struct MountArgs {
    #[command(subcommand)]
    command: Option<MountCommand>,
    /// What to attach: s3://BUCKET[/PREFIX].
    #[arg(value_name = "URI", requires = "path")]
    uri: Option<String>,
    /// Where in the namespace: /train.
    #[arg(value_name = "PATH")]
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
    /// Option of the bucket; several times.
    #[arg(short = 'c', long = "option", value_name = "KEY=VALUE", value_parser = key_value, requires = "uri")]
    options: Vec<(String, String)>,
    #[command(flatten)]
    credentials: CredentialArgs,
    /// Cached blocks unused for so long may be dropped first; 0 for never.
    #[arg(long, value_name = "TIME", default_value = "0")]
    ttl: Interval,
    /// Workers that keep each block.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(REPLICAS))]
    replicas: u32,
    /// Size of the blocks that files are cut into: a multiple of 128KiB from 1MiB to 1GiB.
    #[arg(long, value_name = "SIZE", default_value = "64MiB")]
    block_size: ByteSize,
    /// How long a directory's listing is trusted.
    #[arg(long, value_name = "TIME", default_value = "60s")]
    metadata_ttl: Interval,
    /// When the bucket is asked again; in fs-mode, whether changes wait for other clients.
    #[arg(long, value_enum, default_value_t = ConsistencyArg::Ttl)]
    consistency: ConsistencyArg,
    /// In fs-mode: when a change of a name is answered.
    #[arg(long, value_enum, requires = "uri")]
    names: Option<NamesArg>,
    /// In fs-mode: give the objects of the prefix back what their metadata say they were, as Cavern has written them:
    /// owners, permissions, times, links, attributes. This is done anyway, at the price of a HEAD for each object.
    #[arg(long, requires = "uri", conflicts_with = "no_recover")]
    recover: bool,
    /// In fs-mode: take every object of the prefix for a plain file, whatever its metadata say.
    #[arg(long, requires = "uri")]
    no_recover: bool,
    /// In fs-mode: take the prefix from a cluster that is no more. One that lives stops writing to the bucket within a
    /// minute or two, and what it has not written by then is in its mount alone.
    #[arg(long, requires = "uri")]
    take_over: bool,
    #[command(flatten)]
    clients: ClientArgs,
    /// Verify bucket and credentials, record nothing.
    #[arg(long, requires = "uri")]
    check: bool,
    #[command(flatten)]
    result: ResultArgs,
}

#[derive(Subcommand)]
enum MountCommand {
    /// Change options, credentials and freshness of a mount that is in use.
    Update(UpdateArgs),
}

#[derive(Clone, Copy, ValueEnum)]
enum WriteTypeArg {
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
    Held = Names::Held as isize,
    /// When the masters have it on disk, everywhere.
    Synced = Names::Synced as isize,
}

/// Options that are given one by one, and those that credentials come to.
fn options(given: &[(String, String)], credentials: &CredentialArgs) -> Result<HashMap<String, String>, CliError> {
    let mut options = HashMap::new();
    for (key, value) in given.iter().cloned().chain(credentials.options()?) {
        if options.insert(key.clone(), value).is_some() {
            return Err(CliError::Usage(format!("{key} is given twice")));
        }
    }
    Ok(options)
}

fn key_value(text: &str) -> Result<(String, String), String> {
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
        let (Some(uri), Some(path)) = (self.uri.take(), self.path.take()) else {
            return self.list().await;
        };
        let Some(write_type) = self.write_type else {
            let text = "say which side is the truth: --write-type cache-mode (the bucket; Cavern caches it) or \
                        --write-type fs-mode (the namespace, which can be written; the bucket follows it)";
            return Err(CliError::Usage(text.to_owned()));
        };
        let check_only = self.check;
        let mount = self.mount(uri, path, write_type)?;
        environment::warn_if_unused(&mount, |name| std::env::var_os(name).is_some());
        let take_over = self.take_over;
        let request = MountRequest { mount: Some(mount), check_only, request_id: new_request_id(), take_over };
        let mount = async |mut master: Stubs| master.cluster.mount(request.clone()).await;
        let reply = self.result.cluster.call(mount).await?;
        let view = MountView::answered(&reply);
        if reply.is_empty {
            console::remark(format_args!(
                "nothing is there yet under {}: see that it is spelled right if there should be objects",
                view.uri
            ));
        }
        let done = if check_only { "can be mounted at" } else { "is mounted at" };
        self.result.show(&view, |view| view.print(&format!("{} {done} {}", view.uri, view.path)))
    }

    fn mount(&self, uri: String, path: String, write_type: WriteTypeArg) -> Result<Mount, CliError> {
        Ok(Mount {
            path,
            uri,
            write_type: write_type as i32,
            options: options(&self.options, &self.credentials)?,
            block_size: self.block_size.bytes(),
            replicas: self.replicas,
            metadata_ttl_ms: self.metadata_ttl.as_millis(),
            consistency: self.consistency as i32,
            ttl_ms: self.ttl.as_millis(),
            access_mode: self.access_mode.map_or(AccessMode::Unspecified.into(), |mode| mode as i32),
            attributes: self.attributes.unwrap_or(AttributesArg::Refuse) as i32,
            existing: match (self.recover, self.no_recover) {
                (true, _) => Existing::Recovered.into(),
                (_, true) => Existing::Indexed.into(),
                _ => Existing::None.into(),
            },
            names: self.names.unwrap_or(NamesArg::Held) as i32,
            clients: self.clients.rules(),
            ..Mount::default()
        })
    }

    async fn list(self) -> Result<(), CliError> {
        let list = async |mut master: Stubs| master.cluster.list_mounts(ListMountsRequest {}).await;
        let table = self.result.cluster.call(list).await?;
        self.result.show(&MountView::all(&table), |views| print(views))
    }
}

#[derive(Args)]
#[command(after_help = "Examples:
  cv umount /train

What was written to an fs-mode mount is brought to its bucket first; the mount stays when that fails, or while files \
are being written.")]
pub struct UmountArgs {
    /// Namespace path of the mount.
    #[arg(value_name = "PATH")]
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
        let unmount = async |mut master: Stubs| master.cluster.unmount(request.clone()).await;
        let mount = self.cluster.call(unmount).await?.mount.unwrap_or_default();
        console::line(format_args!("{} is no longer mounted at {}", mount.uri, mount.path))
    }
}

/// A mount as it may be shown: without secrets.
#[derive(Debug, Serialize)]
pub struct MountView {
    pub id: u32,
    pub path: String,
    pub uri: String,
    pub write_type: &'static str,
    pub access_mode: &'static str,
    pub attributes: &'static str,
    pub consistency: &'static str,
    pub names: &'static str,
    pub metadata_ttl_ms: u64,
    pub ttl_ms: u64,
    pub block_size: u64,
    pub replicas: u32,
    /// Which clients it is there for, as `--client` has them; all of them where there are none.
    pub clients: Vec<String>,
    pub options: BTreeMap<String, String>,
    /// Where keys are vended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keys: Option<KeysView>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<StatusView>,
}

#[derive(Debug, Serialize)]
pub struct StatusView {
    pub indexing: bool,
    pub indexed_entries: u64,
    pub hidden_keys: u64,
    pub unlisted_directories: u64,
    pub incomplete_entries: u64,
    pub last_error: String,
    /// Live workers that cannot fetch from the bucket.
    pub failing_workers: u64,
    /// What the first of them say.
    pub fetch_failures: Vec<FetchFailureView>,
}

#[derive(Debug, Serialize)]
pub struct FetchFailureView {
    pub worker: u64,
    pub message: String,
    pub age_ms: u64,
}

impl MountView {
    pub fn new(mount: &Mount, status: Option<&MountStatus>) -> Self {
        Self {
            id: mount.id,
            path: mount.path.clone(),
            uri: mount.uri.clone(),
            write_type: match mount.write_type() {
                WriteType::CacheMode => "cache_mode",
                WriteType::FsMode => "fs_mode",
                WriteType::Unspecified => "unknown",
            },
            access_mode: match (mount.access_mode(), mount.write_type()) {
                (AccessMode::ReadWrite, _) | (AccessMode::Unspecified, WriteType::FsMode) => "read_write",
                _ => "read_only",
            },
            attributes: match (mount.attributes(), mount.write_type()) {
                (AttributePolicy::Refuse, WriteType::CacheMode) => "refuse",
                _ => "keep",
            },
            consistency: match mount.consistency() {
                Consistency::Always => "always",
                Consistency::Never => "never",
                Consistency::Strict => "strict",
                Consistency::Ttl | Consistency::Unspecified => "ttl",
            },
            names: match (mount.names(), mount.write_type()) {
                (Names::Held, WriteType::FsMode) => "held",
                _ => "synced",
            },
            metadata_ttl_ms: mount.metadata_ttl_ms,
            ttl_ms: mount.ttl_ms,
            block_size: mount.block_size,
            replicas: mount.replicas,
            clients: shown_rules(&mount.clients),
            options: mount.options.iter().map(|(key, value)| (key.clone(), shown_option(key, value))).collect(),
            keys: KeysView::of(mount, status.and_then(|status| status.keys.as_ref())),
            status: status.map(|status| StatusView {
                indexing: status.indexing,
                indexed_entries: status.indexed_entries,
                hidden_keys: status.hidden_keys,
                unlisted_directories: status.unlisted_directories,
                incomplete_entries: status.incomplete_entries,
                last_error: status.last_error.clone(),
                failing_workers: status.failing_workers,
                fetch_failures: status.fetch_failures.iter().map(FetchFailureView::new).collect(),
            }),
        }
    }

    /// The mount that an answer is about.
    fn answered(reply: &MountReply) -> Self {
        let mount = reply.mount.clone().unwrap_or_default();
        Self { keys: KeysView::of(&mount, reply.keys.as_ref()), ..Self::new(&mount, None) }
    }

    /// Says what has become of it, and of keys that are vended.
    fn print(&self, done: &str) -> Result<(), CliError> {
        console::line(done)?;
        self.keys.iter().flat_map(KeysView::remarks).try_for_each(console::line)
    }

    /// All mounts, by path.
    pub fn all(table: &MountTable) -> Vec<Self> {
        let mut views: Vec<_> = table
            .mounts
            .iter()
            .map(|mount| Self::new(mount, table.status.iter().find(|status| status.mount_id == mount.id)))
            .collect();
        views.sort_by(|one, other| one.path.cmp(&other.path));
        views
    }

    /// In a word or two, for a table.
    fn state(&self) -> String {
        let Some(status) = &self.status else { return String::new() };
        let state = match (status.last_error.is_empty(), status.indexing) {
            (false, _) => "failing",
            (true, true) => "indexing",
            (true, false) => "ok",
        };
        let hidden = match status.hidden_keys {
            0 => String::new(),
            keys => format!(", {} hidden", counted(keys, "key")),
        };
        let failing = match status.failing_workers {
            0 => String::new(),
            workers => format!(", {} failing", counted(workers, "worker")),
        };
        let keys = if self.keys.as_ref().is_some_and(KeysView::is_failing) { ", keys failing" } else { "" };
        format!("{state}{hidden}{failing}{keys}")
    }

    /// What there is to be said that a table has no room for.
    fn remarks(&self) -> Vec<String> {
        let mut remarks = Vec::new();
        if !self.clients.is_empty() {
            remarks.push(format!("there for {} only", self.clients.join(", ")));
        }
        remarks.extend(self.keys.iter().flat_map(KeysView::remarks));
        let Some(status) = &self.status else { return remarks };
        if status.indexing {
            let left = match status.unlisted_directories {
                0 => String::new(),
                left => format!(", {} to be listed", counted(left, "directory")),
            };
            remarks.push(format!("indexing, {} so far{left}", counted(status.indexed_entries, "entry")));
        }
        if status.incomplete_entries > 0 {
            let entries = counted(status.incomplete_entries, "entry");
            remarks.push(format!("{entries} recovered without all of their attributes"));
        }
        remarks.extend(Some(status.last_error.clone()).filter(|error| !error.is_empty()));
        remarks.extend(status.fetch_failures.iter().map(FetchFailureView::remark));
        let unnamed = status.failing_workers.saturating_sub(status.fetch_failures.len() as u64);
        if unnamed > 0 {
            remarks.push(format!("{} cannot fetch from the bucket", counted(unnamed, "other worker")));
        }
        remarks
    }
}

impl FetchFailureView {
    fn new(failure: &FetchFailure) -> Self {
        Self { worker: failure.worker_id, message: failure.message.clone(), age_ms: failure.age_ms }
    }

    fn remark(&self) -> String {
        let Self { worker, message, age_ms } = self;
        let age = Interval::secs(age_ms / 1000);
        format!("worker {worker} cannot fetch from the bucket ({age} ago): {}", console::escaped(message))
    }
}

/// The table of `cv mount` and `cv report`, and below it what has no room in it. Options that are hidden are left out.
pub fn print(views: &[MountView]) -> Result<(), CliError> {
    if views.is_empty() {
        return console::line("nothing is mounted: attach a bucket with `cv mount s3://BUCKET/PREFIX /PATH`");
    }
    let row = |view: &MountView| {
        let shown = view.options.iter().filter(|(_, value)| *value != HIDDEN);
        let options: Vec<_> = shown.map(|(key, value)| format!("{key}={value}")).collect();
        let (mode, consistency) = (
            view.write_type.replace('_', "-"),
            match view.consistency {
                "ttl" => format!("ttl {}", Interval::millis(view.metadata_ttl_ms)),
                other => other.to_owned(),
            },
        );
        [view.path.clone(), view.uri.clone(), mode, consistency, view.state(), options.join(" ")]
    };
    let heading = ["PATH", "URI", "MODE", "CONSISTENCY", "STATUS", "OPTIONS"];
    console::table_cut(heading, views.iter().map(row))?;
    let remarks = views.iter().flat_map(|view| view.remarks().into_iter().map(move |text| (&view.path, text)));
    remarks.map(|(path, text)| format!("{path}: {text}")).try_for_each(console::line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_and_unknown_options_are_not_shown() {
        let options = [
            ("s3.endpoint_url", "http://h"),
            ("s3.credentials.access", "AK"),
            ("s3.credentials.secret", "hush"),
            ("s3.credentials.session_token", "hush"),
            ("gcs.private_key", "hush"),
        ];
        let options = options.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let view = MountView::new(&Mount { options, ..Mount::default() }, None);
        let text = serde_json::to_string(&view).unwrap();
        assert!(!text.contains("hush") && text.contains("http://h") && !text.contains("AK"), "{text}");
    }

    #[test]
    fn workers_that_cannot_fetch_are_named_and_what_they_say_is_shown_as_text() {
        let failure =
            FetchFailure { worker_id: 7, mount_id: 1, message: "clocks\n\u{1b}[2J differ".to_owned(), age_ms: 61_500 };
        let status = MountStatus { failing_workers: 3, fetch_failures: vec![failure], ..MountStatus::default() };
        let view = MountView::new(&Mount::default(), Some(&status));
        assert_eq!(view.state(), "ok, 3 workers failing");
        let named = r"worker 7 cannot fetch from the bucket (61s ago): clocks\n\u{1b}[2J differ";
        assert_eq!(view.remarks(), [named, "2 other workers cannot fetch from the bucket"]);
    }

    #[test]
    fn options_need_a_key_and_keep_equal_signs_of_the_value() {
        assert_eq!(key_value("a=b=c"), Ok(("a".into(), "b=c".into())));
        assert_eq!(key_value("a="), Ok(("a".into(), String::new())));
        assert!(key_value("=b").is_err());
        assert!(key_value("ab").is_err());
    }
}
