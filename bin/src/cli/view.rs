//! `cv view`: what is below a directory, frozen.

mod mount;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};

use cavern_conf::counted;
use cavern_net::master::Stubs;
use cavern_posix::mode::MODE_BITS;
use cavern_proto::master::{
    CreateViewRequest, DeleteViewRequest, GetViewRequest, ImportViewRequest, ListViewsRequest, View, ViewProgress,
    ViewStep,
};
use clap::{Args, Subcommand, ValueEnum};
use futures::{Stream, stream};
use rustix::process::{getegid, geteuid};
use serde_json::Value;
use tokio::fs::File;
use tokio::io::AsyncReadExt as _;

use super::cert::timestamp;
use super::connect::{LINE_PERIOD, ResultArgs, rpc};
use super::fs::target::Target;
use super::fs::with_client;
use crate::console::{self, Progress};
use crate::error::{CliError, Context as _};

/// Bytes of a message of an import.
const PART_BYTES: usize = 512 << 10;

#[derive(Subcommand)]
pub enum ViewCommand {
    /// Freeze what is below a directory, under a name.
    Create(FreezeArgs),
    /// List the views.
    List,
    /// Show what is known of a view.
    Describe(ViewName),
    /// Delete a view, and what only it has.
    Delete(ViewName),
    /// Copy a view to a file, which another cluster can import.
    Export(ExportViewArgs),
    /// Take in a view that was exported.
    Import(ImportViewArgs),
    /// Have the kernel mount a view on this host.
    Mount(mount::ViewMountArgs),
    /// Unmount a view that the kernel has mounted.
    Umount(mount::ViewUmountArgs),
}

#[derive(Args)]
pub struct FreezeArgs {
    /// Namespace path of a mount, or of a directory in one.
    path: String,
    /// 1 to 64 characters of A-Z, a-z, 0-9, ".", "_" and "-", the first no dot.
    name: String,
    /// What is frozen [default: what is in the namespace; of a directory that was never listed, what the bucket has].
    #[arg(long, value_enum)]
    at: Option<MomentArg>,
    /// Namespace path of another mount, in whose bucket the view is to be stored.
    #[arg(long, value_name = "PATH")]
    store: Option<String>,
}

#[derive(Clone, Copy, ValueEnum)]
enum MomentArg {
    /// In cache-mode mounts: what the bucket has now, which is compared first.
    Now,
}

#[derive(Args)]
pub struct ViewName {
    /// Name of the view.
    name: String,
}

#[derive(Args)]
pub struct ExportViewArgs {
    /// Name of the view.
    name: String,
    /// File of this host, which is made, or replaced.
    file: PathBuf,
}

#[derive(Args)]
pub struct ImportViewArgs {
    /// File that `cv view export` has made.
    file: PathBuf,
    /// What it is to be called here.
    name: String,
    /// Namespace path of the mount that has its objects [default: the one of the same bucket and prefix].
    #[arg(long, value_name = "MOUNT")]
    path: Option<String>,
    /// Namespace path of another mount, in whose bucket the view is to be stored.
    #[arg(long, value_name = "PATH")]
    store: Option<String>,
}

impl ViewCommand {
    pub async fn run(self, result: &ResultArgs) -> Result<(), CliError> {
        match self {
            Self::Create(args) => args.run(result).await,
            Self::List => list(result).await,
            Self::Describe(ViewName { name }) => describe(name, result).await,
            Self::Delete(ViewName { name }) => delete(name, result).await,
            Self::Export(args) => args.run(result).await,
            Self::Import(args) => args.run(result).await,
            Self::Mount(args) => args.run(result),
            Self::Umount(args) => args.run(result),
        }
    }
}

impl FreezeArgs {
    async fn run(self, result: &ResultArgs) -> Result<(), CliError> {
        let fuse = result.cluster.config()?.fuse;
        let request = CreateViewRequest {
            name: self.name,
            path: self.path,
            store: self.store.unwrap_or_default(),
            fresh: self.at.is_some(),
            uid: u32::try_from(fuse.uid).unwrap_or_else(|_| geteuid().as_raw()),
            gid: u32::try_from(fuse.gid).unwrap_or_else(|_| getegid().as_raw()),
            file_mode: fuse.file_mode & MODE_BITS,
            directory_mode: fuse.dir_mode & MODE_BITS,
        };
        let (masters, mut progress) = (result.cluster.masters().await?, Progress::new(result.json));
        // Asked again, a master says what was made already.
        let view = masters
            .ask(async |mut master: Stubs| {
                let mut messages = master.views.create_view(request.clone()).await?.into_inner();
                let mut view = None;
                while let Some(message) = messages.message().await? {
                    let text = step_line(&message);
                    // It says nothing that could fail.
                    let _said = progress.show_or_say(None, text.clone(), LINE_PERIOD, || {
                        console::remark(&text);
                        Ok(())
                    });
                    view = message.view;
                }
                Ok(view)
            })
            .await?;
        drop(progress);
        let view =
            view.ok_or_else(|| CliError::Failed("the master gave up making the view: see its log".to_owned()))?;
        say(&view, &format!("{} is frozen as {}", view.path, view.name), result)
    }
}

/// How far the making of a view is.
fn step_line(progress: &ViewProgress) -> String {
    let names = counted(progress.names, "name");
    match progress.step() {
        ViewStep::Unspecified | ViewStep::Reading => format!("{names} read"),
        ViewStep::Listing => format!("{names} listed"),
        ViewStep::Storing => format!("{names}, {} stored", console::size(progress.bytes)),
        ViewStep::Settling => format!("{names}: waiting for clients to write to nothing that is frozen"),
        ViewStep::Done => format!("{names}: done"),
    }
}

async fn list(result: &ResultArgs) -> Result<(), CliError> {
    let views = result.cluster.call(rpc!(views.list_views(ListViewsRequest {}))).await?.views;
    result.show(&views.iter().map(view_json).collect::<Vec<_>>(), || {
        let row = |view: &View| {
            [
                view.name.clone(),
                view.path.clone(),
                view.names.to_string(),
                console::size(view.bytes),
                console::or_dash(timestamp(view.created_ns / 1_000_000_000)),
            ]
        };
        let none = "there are no views: `cv view create /PATH NAME` makes one";
        console::table_or(none, ["NAME", "PATH", "NAMES", "SIZE", "MADE"], views.iter().map(row))
    })
}

async fn describe(name: String, result: &ResultArgs) -> Result<(), CliError> {
    let view = result.cluster.call(rpc!(views.get_view(GetViewRequest { name, id: 0 }))).await?;
    result.show(&view_json(&view), || description(&view).iter().try_for_each(console::line))
}

async fn delete(name: String, result: &ResultArgs) -> Result<(), CliError> {
    let view = result.cluster.call(rpc!(views.delete_view(DeleteViewRequest { name }))).await?;
    result.show(&view_json(&view), || console::line(format_args!("{} of {} is deleted", view.name, view.path)))
}

impl ExportViewArgs {
    async fn run(self, result: &ResultArgs) -> Result<(), CliError> {
        let (target, file_name) = Target::of_file(&self.file)?;
        let view = with_client(&result.cluster, async |client| {
            let view = client.views().named(&self.name).await?;
            let mut draft = target.draft(&file_name)?;
            let file = draft.file().try_clone().context(format_args!("cannot write {}", self.file.display()))?;
            let progress = Mutex::new(Progress::new(result.json));
            let exported = client.views().export(&view, file, |bytes| {
                if let Ok(mut progress) = progress.lock() {
                    let text = format!("{} of {}", console::size(bytes), console::size(view.object_bytes));
                    progress.show(Some((bytes, view.object_bytes)), text);
                }
            });
            exported.await?;
            draft.keep()?;
            Ok(view)
        });
        let view = view.await?;
        say(&view, &format!("{} is in {}", view.name, self.file.display()), result)
    }
}

impl ImportViewArgs {
    async fn run(self, result: &ResultArgs) -> Result<(), CliError> {
        let what = format!("cannot read {}", self.file.display());
        let first = ImportViewRequest {
            name: self.name,
            path: self.path.unwrap_or_default(),
            store: self.store.unwrap_or_default(),
            ..ImportViewRequest::default()
        };
        File::open(&self.file).await.context(&what)?;
        let failed = Arc::new(OnceLock::new());
        // Asked again, a master says what was taken in already.
        let import = async |mut master: Stubs| {
            let messages = messages(self.file.clone(), first.clone(), Arc::clone(&failed));
            master.views.import_view(messages).await
        };
        let imported = result.cluster.call(import).await;
        if let Some(cause) = failed.get() {
            return Err(CliError::Failed(format!("{what}: {cause}")));
        }
        let view = imported?;
        say(&view, &format!("{} is there as {}, of {}", self.file.display(), view.name, view.path), result)
    }
}

/// A file in parts. It ends where the file cannot be read, and `failed` says why.
fn messages(
    path: PathBuf,
    first: ImportViewRequest,
    failed: Arc<OnceLock<String>>,
) -> impl Stream<Item = ImportViewRequest> + Send + 'static {
    stream::unfold((None::<File>, Some(first)), move |(file, first)| {
        let (path, failed) = (path.clone(), Arc::clone(&failed));
        async move {
            let read = async {
                let mut file = match file {
                    Some(file) => file,
                    None => File::open(path).await?,
                };
                let mut data = Vec::with_capacity(PART_BYTES);
                (&mut file).take(PART_BYTES as u64).read_to_end(&mut data).await?;
                Ok::<_, std::io::Error>((file, data))
            };
            match read.await {
                Ok((_, data)) if data.is_empty() && first.is_none() => None,
                Ok((file, data)) => {
                    let message = ImportViewRequest { data: data.into(), ..first.unwrap_or_default() };
                    Some((message, (Some(file), None)))
                }
                Err(cause) => {
                    let _ = failed.set(cause.to_string());
                    None
                }
            }
        }
    })
}

/// Shows what has become of a view.
fn say(view: &View, done: &str, result: &ResultArgs) -> Result<(), CliError> {
    result.show(&view_json(view), || {
        let (names, bytes) = (counted(view.names, "name"), console::size(view.bytes));
        console::line(format_args!("{done}: {names}, {bytes}, hash {}", hex(&view.hash)))
    })
}

fn view_json(view: &View) -> Value {
    console::fields! { view;
        id, name, path, mount_id, store_mount_id, key, etag, image_bytes, pages_bytes, object_bytes, names, inodes,
        bytes, device_blocks, imported;
        "created": timestamp(view.created_ns / 1_000_000_000),
        "uuid": hex(&view.uuid),
        "hash": hex(&view.hash),
    }
}

fn description(view: &View) -> Vec<String> {
    let made = console::or_dash(timestamp(view.created_ns / 1_000_000_000));
    let whence = if view.imported { "imported" } else { "made" };
    let names = format!("{}, {}", counted(view.names, "name"), counted(view.inodes, "inode"));
    let devices = counted(view.device_blocks.len() as u64, "device");
    let lines = [
        ("name", view.name.clone()),
        ("path", view.path.clone()),
        (whence, made),
        ("has", format!("{names}, {} in {devices}", console::size(view.bytes))),
        ("hash", hex(&view.hash)),
        ("object", format!("{}, {}", view.key, console::size(view.object_bytes))),
        ("image", console::size(view.image_bytes)),
    ];
    lines.into_iter().map(|(what, text)| format!("{what:9} {}", console::name(&text))).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use futures::StreamExt as _;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_view_is_described_by_what_it_has() {
        let view = View {
            name: "v".into(),
            path: "/data".into(),
            created_ns: 1_700_000_000_000_000_000,
            names: 3,
            inodes: 1,
            bytes: 4096,
            hash: vec![0xab, 1].into(),
            device_blocks: vec![1],
            key: "p/.cavern-view-00".into(),
            ..View::default()
        };
        let lines = description(&view);
        assert_eq!(lines[2], "made      2023-11-14T22:13:20Z");
        assert!(lines[3].ends_with("3 names, 1 inode, 4.00 KiB in 1 device"), "{lines:?}");
        let shown = view_json(&view);
        assert_eq!(
            (&shown["hash"], &shown["device_blocks"], &shown["imported"]),
            (&json!("ab01"), &json!([1]), &json!(false))
        );
        let storing = ViewProgress { step: ViewStep::Storing.into(), names: 1, bytes: 1024, view: None };
        assert_eq!(step_line(&storing), "1 name, 1.00 KiB stored");
    }

    #[tokio::test]
    async fn a_file_is_imported_in_parts_of_which_the_first_says_as_what() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("view");
        let first = ImportViewRequest { name: "v".into(), ..ImportViewRequest::default() };
        for length in [0, 1, PART_BYTES, 2 * PART_BYTES + 7] {
            let content: Vec<u8> = (0..length).map(|at| at as u8).collect();
            std::fs::write(&path, &content).unwrap();
            let failed = Arc::default();
            let parts: Vec<_> = messages(path.clone(), first.clone(), Arc::clone(&failed)).collect().await;
            assert_eq!(parts.len(), length.div_ceil(PART_BYTES).max(1));
            assert!(parts[0].name == "v" && parts[1..].iter().all(|part| part.name.is_empty()));
            assert!(parts.iter().flat_map(|part| part.data.iter()).eq(&content) && failed.get().is_none());
        }
        let failed = Arc::default();
        let none: Vec<_> = messages(directory.path().join("none"), first, Arc::clone(&failed)).collect().await;
        assert!(none.is_empty() && failed.get().is_some());
    }
}
