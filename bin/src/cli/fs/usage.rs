//! `cv fs du`, `cv fs count` and `cv fs df`.

use cavern_conf::counted;
use cavern_net::MasterChannel;
use cavern_net::master::Stubs;
use cavern_proto::master::{
    DiskReport, Entry, Kind, ListWorkersRequest, ReadDirRequest, UsageProgress, UsageRequest, WorkerState,
};
use clap::Args;
use serde::Serialize;

use super::args::PathArgs;
use super::list::{join, resolve};
use crate::cli::connect::ResultArgs;
use crate::console;
use crate::error::CliError;

#[derive(Args)]
pub struct DuArgs {
    #[command(flatten)]
    place: PathArgs,
    /// Only the total.
    #[arg(short)]
    summary: bool,
}

#[derive(Serialize)]
struct UsageView {
    path: String,
    directories: u64,
    files: u64,
    bytes: u64,
}

#[derive(Serialize)]
struct DfView {
    worker: String,
    path: String,
    tier: String,
    capacity_bytes: u64,
    used_bytes: u64,
    free_bytes: u64,
}

/// What is below a path, the directory itself included.
async fn usage(masters: &MasterChannel, path: String) -> Result<UsageView, CliError> {
    let count = async |mut master: Stubs| {
        let mut progress = master.namespace.usage(UsageRequest { path: path.clone() }).await?.into_inner();
        let mut last = UsageProgress::default();
        while let Some(message) = progress.message().await? {
            last = message;
        }
        Ok(last)
    };
    let last = masters.ask(count).await?;
    if !last.done {
        return Err(CliError::Failed(format!("the master gave up counting {path}: see its log")));
    }
    Ok(UsageView { path, directories: last.directories, files: last.files, bytes: last.bytes })
}

impl DuArgs {
    pub async fn run(self) -> Result<(), CliError> {
        let masters = self.place.result.cluster.masters().await?;
        let path = self.place.path;
        let mut views = Vec::new();
        let root = resolve(&masters, &path).await?.attr.unwrap_or_default();
        if !self.summary && root.kind() == Kind::Directory {
            let request = ReadDirRequest { inode: root.inode, ..ReadDirRequest::default() };
            let list = async |mut master: Stubs| {
                let mut pages = master.namespace.read_dir(request.clone()).await?.into_inner();
                let mut entries = Vec::new();
                while let Some(page) = pages.message().await? {
                    let short = |entry: Entry| {
                        let is_text = std::str::from_utf8(&entry.name).is_ok();
                        (join(&path, &entry.name), is_text, entry.attr.unwrap_or_default())
                    };
                    entries.extend(page.entries.into_iter().map(short));
                }
                Ok(entries)
            };
            for (path, is_text, attr) in masters.ask(list).await? {
                if !is_text && attr.kind() == Kind::Directory {
                    // A path is text: what is below another one cannot be asked for by itself.
                    console::remark(format_args!(
                        "{}: its name is not UTF-8, so that it is counted in the total only",
                        console::escaped(&path)
                    ));
                    continue;
                }
                views.push(match attr.kind() {
                    Kind::Directory => usage(&masters, path).await?,
                    _ => UsageView { path, directories: 0, files: 1, bytes: attr.size },
                });
            }
        }
        views.push(usage(&masters, path).await?);
        self.place.result.show(&views, |views| {
            views.iter().try_for_each(|view| {
                console::line(format_args!("{:>12}  {}", console::size(view.bytes), console::name(&view.path)))
            })
        })
    }
}

/// `cv fs count`.
pub async fn count(args: PathArgs) -> Result<(), CliError> {
    let view = usage(&args.result.cluster.masters().await?, args.path).await?;
    args.result.show(&view, |UsageView { path, directories, files, bytes }| {
        let (directories, files) = (counted(*directories, "directory"), counted(*files, "file"));
        console::line(format_args!("{directories}, {files}, {} in {path}", counted(*bytes, "byte")))
    })
}

/// `cv fs df`.
pub async fn df(args: &ResultArgs) -> Result<(), CliError> {
    let list = async |mut master: Stubs| master.cluster.list_workers(ListWorkersRequest {}).await;
    let table = args.cluster.call(list).await?;
    let live = table.workers.iter().filter(|worker| worker.state() == WorkerState::Live);
    let disks = live.flat_map(|worker| worker.disks.iter().map(|disk| (worker.data_address.clone(), disk)));
    let view = |(worker, disk): (String, &DiskReport)| DfView {
        worker,
        path: disk.path.clone(),
        tier: disk.tier.clone(),
        capacity_bytes: disk.capacity_bytes,
        used_bytes: disk.used_bytes,
        free_bytes: disk.capacity_bytes.saturating_sub(disk.used_bytes),
    };
    let views: Vec<_> = disks.map(view).collect();
    args.show(&views, |views| {
        let sum = |of: fn(&DfView) -> u64| views.iter().map(of).sum::<u64>();
        let total = DfView {
            worker: "total".to_owned(),
            path: String::new(),
            tier: String::new(),
            capacity_bytes: sum(|view| view.capacity_bytes),
            used_bytes: sum(|view| view.used_bytes),
            free_bytes: sum(|view| view.free_bytes),
        };
        let row = |view: &DfView| {
            let [size, used, free] = [view.capacity_bytes, view.used_bytes, view.free_bytes].map(console::size);
            let share = console::share(view.used_bytes, view.capacity_bytes);
            [view.worker.clone(), size, used, free, share, view.tier.clone(), view.path.clone()]
        };
        let heading = ["WORKER", "SIZE", "USED", "FREE", "USE", "TIER", "DIRECTORY"];
        console::table(heading, views.iter().chain([&total]).map(row))
    })
}
