//! `cv report`: what the cluster is doing.

mod certificates;
mod tasks;

use cavern_conf::counted;
use cavern_net::MasterChannel;
use cavern_net::master::Stubs;
use cavern_proto::master::{
    ClusterStatus, ListUnavailableRequest, LostPast, StatusRequest, UnavailableFiles, Worker, WorkerState, WorkerTable,
};
use cavern_security::{Role, Transport};
use clap::Args;
use serde::Serialize;

use certificates::CertificateView;
use tasks::TaskView;

use super::connect::ResultArgs;
use super::job::JobView;
use super::mount::{self, MountView};
use crate::console;
use crate::error::CliError;
use crate::group::{Dial, GroupView, Survey};

#[derive(Args)]
#[command(after_help = "Examples:
  cv report
  cv report --json | jq .cache.hit_ratio
  cv report --json | jq '.certificates[] | select(.ends_soon)'
  cv report --tasks

Hits are counted by the workers since they started, over what they were asked for. Programs receive more than that: \
what a client has in buffers, reads through a descriptor that it has of a block, or has its kernel read or keep in its \
pages, it asks no worker for. `cavern_client_` in the metrics of a client counts all but what its kernel does alone.")]
pub struct ReportArgs {
    /// Only what the master that leads does in the background, with errors.
    #[arg(long)]
    tasks: bool,
    #[command(flatten)]
    result: ResultArgs,
}

#[derive(Serialize)]
struct Report {
    cluster_id: String,
    version: String,
    leader: u64,
    applied_index: u64,
    /// Where there are several masters.
    #[serde(skip_serializing_if = "Option::is_none")]
    group: Option<GroupView>,
    inodes: u64,
    sessions: u64,
    cache: Cache,
    workers: Vec<WorkerView>,
    mounts: Vec<MountView>,
    jobs: Vec<JobView>,
    unavailable: Unavailable,
    lost: Lost,
    lost_pasts: Vec<LostPastView>,
    /// Where connections are secured.
    #[serde(skip_serializing_if = "Option::is_none")]
    certificates: Option<Vec<CertificateView>>,
}

/// Files of fs-mode mounts with content that is at lost workers only, and in no bucket.
#[derive(Serialize)]
struct Unavailable {
    files: u64,
    blocks: u64,
    /// The first of them.
    paths: Vec<String>,
}

/// Who says to have been told of later entries of the log than the masters have.
#[derive(Serialize)]
struct LostPastView {
    who: String,
    told: u64,
    had: u64,
    kept_blocks: u64,
    kept_bytes: u64,
}

/// Files of fs-mode mounts that have lost blocks: their workers are live and do not have them, and no bucket does.
#[derive(Serialize)]
struct Lost {
    files: u64,
    /// The first of them.
    paths: Vec<String>,
}

/// Unavailable files that are named.
const UNAVAILABLE_SHOWN: u32 = 20;

/// Sums over the live workers, since each of them started.
#[derive(Default, Serialize)]
struct Cache {
    capacity_bytes: u64,
    used_bytes: u64,
    blocks: u64,
    hits: u64,
    misses: u64,
    hit_bytes: u64,
    miss_bytes: u64,
    /// Bytes served from the cache by bytes that workers were asked for; absent before the first read.
    hit_ratio: Option<f64>,
    ufs_bytes: u64,
    ufs_requests: u64,
    evicted_blocks: u64,
    corrupt_chunks: u64,
}

#[derive(Serialize)]
pub struct WorkerView {
    id: u64,
    state: &'static str,
    /// It is being emptied.
    draining: bool,
    host: String,
    data: String,
    http: String,
    socket: String,
    version: String,
    capacity_bytes: u64,
    used_bytes: u64,
    blocks: u64,
    last_heartbeat_age_ms: i64,
    hit_bytes: u64,
    miss_bytes: u64,
    disks: Vec<DiskView>,
}

#[derive(Serialize)]
struct DiskView {
    path: String,
    tier: String,
    capacity_bytes: u64,
    used_bytes: u64,
    healthy: bool,
    error: String,
}

impl ReportArgs {
    pub async fn run(self) -> Result<(), CliError> {
        if self.tasks {
            let ask = async |mut master: Stubs| Ok(master.cluster.status(StatusRequest {}).await?.into_inner().tasks);
            let tasks = self.result.cluster.masters().await?.ask(ask).await?;
            let tasks: Vec<_> = tasks.into_iter().map(TaskView::from).collect();
            return self.result.show(&tasks, |tasks| tasks::print(tasks));
        }
        let request = ListUnavailableRequest { limit: UNAVAILABLE_SHOWN, ..ListUnavailableRequest::default() };
        let ask = async |mut master: Stubs| {
            let status = master.cluster.status(StatusRequest {}).await?.into_inner();
            let unavailable = master.cluster.list_unavailable(request).await?.into_inner();
            Ok(Report::new(status, unavailable))
        };
        let config = self.result.cluster.config()?;
        let mut report = MasterChannel::connect(&config).await?.ask(ask).await?;
        let dial = Dial::of(&config)?;
        let group = Survey::take(&config.cluster.masters, &dial).await.view();
        if let Transport::Tls(tls) = dial.transport() {
            let masters = group.masters.iter().map(|master| (Role::Master, master.address.clone()));
            let live = report.workers.iter().filter(|worker| worker.state == "live");
            let processes = masters.chain(live.map(|worker| (Role::Worker, worker.data.clone()))).collect();
            report.certificates = Some(certificates::survey(tls, processes, dial.wait).await);
        }
        report.group = (group.masters.len() > 1).then_some(group);
        self.result.show(&report, Report::print)
    }
}

impl Report {
    fn new(status: ClusterStatus, unavailable: UnavailableFiles) -> Self {
        let workers = status.workers.unwrap_or_default();
        Self {
            cluster_id: status.cluster_id,
            version: status.version,
            leader: status.leader,
            applied_index: status.applied_index,
            group: None,
            inodes: status.inodes,
            sessions: status.sessions,
            cache: Cache::of(&workers),
            workers: workers.workers.iter().map(WorkerView::new).collect(),
            mounts: MountView::all(&status.mounts.unwrap_or_default()),
            jobs: status.jobs.into_iter().map(JobView::from).collect(),
            unavailable: Unavailable {
                files: unavailable.files,
                blocks: unavailable.blocks,
                paths: unavailable.listed.into_iter().map(|file| file.path).collect(),
            },
            lost: Lost {
                files: unavailable.lost_files,
                paths: unavailable.lost.into_iter().map(|file| file.path).collect(),
            },
            lost_pasts: status.lost_pasts.into_iter().map(LostPastView::from).collect(),
            certificates: None,
        }
    }

    fn print(&self) -> Result<(), CliError> {
        let live = self.workers.iter().filter(|worker| worker.state == "live").count() as u64;
        let cache = &self.cache;
        console::line(format_args!("cluster   {}, version {}", self.cluster_id, self.version))?;
        console::line(format_args!(
            "master    leader {}, log applied to {}, {}, {}",
            self.leader,
            self.applied_index,
            counted(self.inodes, "inode"),
            counted(self.sessions, "client")
        ))?;
        if let Some(group) = &self.group {
            console::line(format_args!("masters   {}", group.summary()))?;
        }
        console::line(format_args!(
            "cache     {} of {} used, {} on {}, {} evicted",
            console::size(cache.used_bytes),
            console::size(cache.capacity_bytes),
            counted(cache.blocks, "block"),
            counted(live, "worker"),
            cache.evicted_blocks
        ))?;
        console::line(format_args!(
            "hits      {} of bytes that workers were asked for ({} from the cache, {} fetched first), {} of requests",
            console::share(cache.hit_bytes, cache.hit_bytes.saturating_add(cache.miss_bytes)),
            console::size(cache.hit_bytes),
            console::size(cache.miss_bytes),
            console::share(cache.hits, cache.hits.saturating_add(cache.misses))
        ))?;
        console::line(format_args!(
            "buckets   {} read by workers in {}",
            console::size(cache.ufs_bytes),
            counted(cache.ufs_requests, "request")
        ))?;
        if cache.corrupt_chunks > 0 {
            console::line(format_args!(
                "damage    {} failed the checksum, read again",
                counted(cache.corrupt_chunks, "chunk")
            ))?;
        }
        self.unavailable.print()?;
        self.lost.print()?;
        self.lost_pasts.iter().try_for_each(LostPastView::print)?;
        let certificates = self.certificates.as_deref().unwrap_or_default();
        certificates::print_warning(certificates)?;
        console::line("")?;
        print_workers(&self.workers)?;
        console::line("")?;
        mount::print(&self.mounts)?;
        if !self.jobs.is_empty() {
            console::line("")?;
            JobView::print_table(&self.jobs)?;
        }
        if !certificates.is_empty() {
            console::line("")?;
            certificates::print(certificates)?;
        }
        Ok(())
    }
}

impl Unavailable {
    fn print(&self) -> Result<(), CliError> {
        if self.files == 0 {
            return Ok(());
        }
        console::line(format_args!(
            "LOST      {} of {} at lost workers only, and in no bucket: start these workers again",
            counted(self.blocks, "block"),
            counted(self.files, "file")
        ))?;
        print_paths(self.files, &self.paths)
    }
}

impl Lost {
    fn print(&self) -> Result<(), CliError> {
        if self.files == 0 {
            return Ok(());
        }
        console::line(format_args!(
            "LOST      blocks of {}, which no bucket has and none of their workers has any more: see `cv persist drop \
             --help`",
            counted(self.files, "file")
        ))?;
        print_paths(self.files, &self.paths)
    }
}

impl From<LostPast> for LostPastView {
    fn from(past: LostPast) -> Self {
        let LostPast { who, told, had, kept_blocks, kept_bytes } = past;
        Self { who, told, had, kept_blocks, kept_bytes }
    }
}

impl LostPastView {
    fn print(&self) -> Result<(), CliError> {
        let Self { who, told, had, .. } = self;
        console::line(format_args!(
            "RESTORED  {who} was told of entry {told} of the log, and the masters have up to {had} of that time: they \
             are older, and lack what came after it; {}, {}, that no file has are kept there",
            counted(self.kept_blocks, "block"),
            console::size(self.kept_bytes)
        ))
    }
}

/// The first of so many files.
fn print_paths(files: u64, paths: &[String]) -> Result<(), CliError> {
    for path in paths {
        console::line(format_args!("          {path}"))?;
    }
    let more = files.saturating_sub(paths.len() as u64);
    if more > 0 { console::line(format_args!("          and {more} more")) } else { Ok(()) }
}

impl Cache {
    fn of(table: &WorkerTable) -> Self {
        let mut cache = Self::default();
        for worker in table.workers.iter().filter(|worker| worker.state() == WorkerState::Live) {
            let counters = worker.counters.unwrap_or_default();
            // A worker may say any numbers.
            let add = |sum: &mut u64, part: u64| *sum = sum.saturating_add(part);
            add(&mut cache.capacity_bytes, worker.capacity_bytes);
            add(&mut cache.used_bytes, worker.used_bytes);
            add(&mut cache.blocks, worker.blocks);
            add(&mut cache.hits, counters.hits);
            add(&mut cache.misses, counters.misses);
            add(&mut cache.hit_bytes, counters.hit_bytes);
            add(&mut cache.miss_bytes, counters.miss_bytes);
            add(&mut cache.ufs_bytes, counters.ufs_bytes);
            add(&mut cache.ufs_requests, counters.ufs_requests);
            add(&mut cache.evicted_blocks, counters.evicted_blocks);
            add(&mut cache.corrupt_chunks, counters.corrupt_chunks);
        }
        let served = cache.hit_bytes.saturating_add(cache.miss_bytes);
        cache.hit_ratio = (served > 0).then(|| cache.hit_bytes as f64 / served as f64);
        cache
    }
}

impl WorkerView {
    pub fn new(worker: &Worker) -> Self {
        let counters = worker.counters.unwrap_or_default();
        Self {
            id: worker.id,
            state: match worker.state() {
                WorkerState::Live => "live",
                WorkerState::Lost => "lost",
                WorkerState::Unspecified => "unknown",
            },
            draining: worker.draining,
            host: worker.host.clone(),
            data: worker.data_address.clone(),
            http: worker.http_address.clone(),
            socket: worker.socket_path.clone(),
            version: worker.version.clone(),
            capacity_bytes: worker.capacity_bytes,
            used_bytes: worker.used_bytes,
            blocks: worker.blocks,
            last_heartbeat_age_ms: worker.last_heartbeat_age_ms,
            hit_bytes: counters.hit_bytes,
            miss_bytes: counters.miss_bytes,
            disks: worker
                .disks
                .iter()
                .map(|disk| DiskView {
                    path: disk.path.clone(),
                    tier: disk.tier.clone(),
                    capacity_bytes: disk.capacity_bytes,
                    used_bytes: disk.used_bytes,
                    healthy: disk.healthy,
                    error: disk.error.clone(),
                })
                .collect(),
        }
    }
}

pub fn print_workers(workers: &[WorkerView]) -> Result<(), CliError> {
    let row = |worker: &WorkerView| {
        let state = format!("{}{}", worker.state, if worker.draining { ", draining" } else { "" });
        let used = format!("{} of {}", console::size(worker.used_bytes), console::size(worker.capacity_bytes));
        let hits = console::share(worker.hit_bytes, worker.hit_bytes.saturating_add(worker.miss_bytes));
        let (all, failed) = (worker.disks.len(), worker.disks.iter().filter(|disk| !disk.healthy).count());
        let disks = if failed == 0 { all.to_string() } else { format!("{all} ({failed} failed)") };
        let (id, blocks) = (worker.id.to_string(), worker.blocks.to_string());
        [id, state, worker.host.clone(), worker.data.clone(), used, blocks, hits, disks]
    };
    let heading = ["WORKER", "STATE", "HOST", "DATA", "USED", "BLOCKS", "HITS", "DISKS"];
    let none = "no worker has registered: start one with `cv worker`";
    console::table_or(none, heading, workers.iter().map(row))
}
