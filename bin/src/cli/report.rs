//! `cv report`: what the cluster is doing.

pub mod certificates;

use cavern_conf::counted;
use cavern_net::MasterChannel;
use cavern_net::master::Stubs;
use cavern_proto::master::{
    ClusterStatus, DiskReport, ListUnavailableRequest, Rollback, StatusRequest, TaskStatus, UnavailableFile,
    UnavailableFiles, Worker, WorkerCounters, WorkerState,
};
use cavern_security::{Role, Transport};
use clap::Args;
use serde_json::{Value, json};

use self::certificates::CertificateView;
use super::connect::{ResultArgs, rpc, word};
use super::job::JobView;
use super::mount::{self, MountView};
use crate::console::{self, or_dash};
use crate::error::CliError;
use crate::group::{Dial, GroupView, Survey};

/// Unavailable files that are named.
const UNAVAILABLE_SHOWN: u32 = 20;

#[derive(Args)]
pub struct ReportArgs {
    /// Only what the master that leads does in the background, with errors.
    #[arg(long)]
    tasks: bool,
    #[command(flatten)]
    result: ResultArgs,
}

/// What masters and workers say.
struct Report {
    status: ClusterStatus,
    workers: Vec<Worker>,
    mounts: Vec<MountView>,
    jobs: Vec<JobView>,
    /// Files of fs-mode mounts with content that is at lost workers only, and in no bucket; and those that have lost
    /// blocks: their workers are live and do not have them, and no bucket does.
    unavailable: UnavailableFiles,
    /// Where there are several masters.
    group: Option<GroupView>,
    /// Where connections are secured.
    certificates: Option<Vec<CertificateView>>,
}

impl ReportArgs {
    pub async fn run(self) -> Result<(), CliError> {
        let config = self.result.cluster.config()?;
        let masters = MasterChannel::connect(&config).await?;
        if self.tasks {
            let tasks = masters.ask_unary(rpc!(cluster.status(StatusRequest::default()))).await?.tasks;
            return self.result.show(&tasks.iter().map(task_view).collect::<Vec<_>>(), || {
                let heading = ["TASK", "STATE", "RUNS", "LAST RUN", "ERRORS", "LAST ERROR"];
                console::table(heading, tasks.iter().map(task_row))
            });
        }
        let request = ListUnavailableRequest { limit: UNAVAILABLE_SHOWN, ..ListUnavailableRequest::default() };
        let ask = async |mut master: Stubs| {
            let status = master.cluster.status(StatusRequest::default()).await?.into_inner();
            Ok((status, master.cluster.list_unavailable(request).await?.into_inner()))
        };
        let (mut status, unavailable) = masters.ask(ask).await?;
        let workers = status.workers.take().unwrap_or_default().workers;
        let dial = Dial::of(&config)?;
        let group = Survey::take(&config.cluster.masters, &dial).await.view();
        let mut certificates = None;
        if let Transport::Tls(tls) = &dial.transport {
            let masters = group.masters.iter().map(|master| (Role::Master, master.address.clone()));
            let live = workers.iter().filter(|worker| worker.state() == WorkerState::Live);
            let processes = masters.chain(live.map(|worker| (Role::Worker, worker.data_address.clone()))).collect();
            certificates = Some(certificates::survey(tls, processes, dial.wait).await);
        }
        let report = Report {
            mounts: MountView::all(&status.mounts.take().unwrap_or_default()),
            jobs: std::mem::take(&mut status.jobs).into_iter().map(JobView::from).collect(),
            status,
            workers,
            unavailable,
            group: (group.masters.len() > 1).then_some(group),
            certificates,
        };
        self.result.show(&report.view(), || report.print())
    }
}

impl Report {
    fn view(&self) -> Value {
        let Self { status, unavailable, .. } = self;
        // Who says to have been told of later entries of the log than the masters have.
        let rollback = |past: &Rollback| console::fields! { past; who, told, had, kept_blocks, kept_bytes; };
        console::fields! { status;
            cluster_id, version, leader, applied_index, inodes, sessions;
            "group": self.group,
            "cache": cache(&self.workers),
            "workers": self.workers.iter().map(worker_view).collect::<Vec<_>>(),
            "mounts": self.mounts,
            "jobs": self.jobs,
            "unavailable": {
                "files": unavailable.files,
                "blocks": unavailable.blocks,
                "paths": paths(&unavailable.listed),
            },
            "lost": {"files": unavailable.lost_files, "paths": paths(&unavailable.lost)},
            "rollbacks": status.rollbacks.iter().map(rollback).collect::<Vec<_>>(),
            "certificates": self.certificates,
        }
    }

    fn print(&self) -> Result<(), CliError> {
        let (status, cache) = (&self.status, cache(&self.workers));
        let of = |name: &str| cache[name].as_u64().unwrap_or_default();
        let live = self.workers.iter().filter(|worker| worker.state() == WorkerState::Live).count() as u64;
        console::line(format_args!("cluster   {}, version {}", status.cluster_id, status.version))?;
        console::line(format_args!(
            "master    leader {}, log applied to {}, {}, {}",
            status.leader,
            status.applied_index,
            counted(status.inodes, "inode"),
            counted(status.sessions, "client")
        ))?;
        if let Some(group) = &self.group {
            console::line(format_args!("masters   {}", group.summary()))?;
        }
        console::line(format_args!(
            "cache     {} of {} used, {} on {}, {} evicted",
            console::size(of("used_bytes")),
            console::size(of("capacity_bytes")),
            counted(of("blocks"), "block"),
            counted(live, "worker"),
            of("evicted_blocks")
        ))?;
        console::line(format_args!(
            "hits      {} of bytes that workers were asked for ({} from the cache, {} fetched first), {} of requests",
            console::share(of("hit_bytes"), of("hit_bytes").saturating_add(of("miss_bytes"))),
            console::size(of("hit_bytes")),
            console::size(of("miss_bytes")),
            console::share(of("hits"), of("hits").saturating_add(of("misses")))
        ))?;
        console::line(format_args!(
            "buckets   {} read by workers in {}",
            console::size(of("ufs_bytes")),
            counted(of("ufs_requests"), "request")
        ))?;
        if of("corrupt_chunks") > 0 {
            console::line(format_args!(
                "damage    {} failed the checksum, read again",
                counted(of("corrupt_chunks"), "chunk")
            ))?;
        }
        self.print_lost()?;
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

    /// What only a person can bring back.
    fn print_lost(&self) -> Result<(), CliError> {
        let Self { status, unavailable, .. } = self;
        if unavailable.files > 0 {
            console::line(format_args!(
                "LOST      {} of {} at lost workers only, and in no bucket: start these workers again",
                counted(unavailable.blocks, "block"),
                counted(unavailable.files, "file")
            ))?;
            print_paths(unavailable.files, &unavailable.listed)?;
        }
        if unavailable.lost_files > 0 {
            console::line(format_args!(
                "LOST      blocks of {}, which no bucket has and none of their workers has any more: see `cv persist \
                 drop --help`",
                counted(unavailable.lost_files, "file")
            ))?;
            print_paths(unavailable.lost_files, &unavailable.lost)?;
        }
        for Rollback { who, told, had, kept_blocks, kept_bytes } in &status.rollbacks {
            console::line(format_args!(
                "RESTORED  {who} was told of entry {told} of the log, and the masters have up to {had} of that time: \
                 they are older, and lack what came after it; {}, {}, that no file has are kept there",
                counted(*kept_blocks, "block"),
                console::size(*kept_bytes)
            ))?;
        }
        Ok(())
    }
}

fn paths(files: &[UnavailableFile]) -> Vec<&str> {
    files.iter().map(|file| file.path.as_str()).collect()
}

/// The first of so many files.
fn print_paths(files: u64, named: &[UnavailableFile]) -> Result<(), CliError> {
    for path in paths(named) {
        console::line(format_args!("          {path}"))?;
    }
    let more = files.saturating_sub(named.len() as u64);
    if more > 0 { console::line(format_args!("          and {more} more")) } else { Ok(()) }
}

/// Sums over the live workers, since each of them started, as JSON has them.
fn cache(workers: &[Worker]) -> Value {
    let sum = |of: fn(&Worker, &WorkerCounters) -> u64| sum(workers, of);
    let (hit_bytes, miss_bytes) = (sum(|_, counters| counters.hit_bytes), sum(|_, counters| counters.miss_bytes));
    let served = hit_bytes.saturating_add(miss_bytes);
    json!({
        "capacity_bytes": sum(|worker, _| worker.capacity_bytes),
        "used_bytes": sum(|worker, _| worker.used_bytes),
        "blocks": sum(|worker, _| worker.blocks),
        "hits": sum(|_, counters| counters.hits),
        "misses": sum(|_, counters| counters.misses),
        "hit_bytes": hit_bytes,
        "miss_bytes": miss_bytes,
        // Bytes served from the cache by bytes that workers were asked for; absent before the first read.
        "hit_ratio": (served > 0).then(|| hit_bytes as f64 / served as f64),
        "ufs_bytes": sum(|_, counters| counters.ufs_bytes),
        "ufs_requests": sum(|_, counters| counters.ufs_requests),
        "evicted_blocks": sum(|_, counters| counters.evicted_blocks),
        "corrupt_chunks": sum(|_, counters| counters.corrupt_chunks),
    })
}

/// Of the live workers. One may say any numbers.
fn sum(workers: &[Worker], of: fn(&Worker, &WorkerCounters) -> u64) -> u64 {
    let live = workers.iter().filter(|worker| worker.state() == WorkerState::Live);
    live.fold(0, |sum, worker| sum.saturating_add(of(worker, &worker.counters.unwrap_or_default())))
}

/// `live` or `lost`.
fn state_of(worker: &Worker) -> String {
    word(worker.state().as_str_name(), "WORKER_STATE_")
}

/// A worker as it is shown.
pub fn worker_view(worker: &Worker) -> Value {
    let disk = |disk: &DiskReport| console::fields! { disk; path, tier, capacity_bytes, used_bytes, healthy, error; };
    let counters = worker.counters.unwrap_or_default();
    // One that is draining is being emptied.
    console::fields! { worker;
        id, draining, host, version, capacity_bytes, used_bytes, blocks, last_heartbeat_age_ms;
        "state": state_of(worker),
        "data": worker.data_address,
        "http": worker.http_address,
        "socket": worker.socket_path,
        "hit_bytes": counters.hit_bytes,
        "miss_bytes": counters.miss_bytes,
        "disks": worker.disks.iter().map(disk).collect::<Vec<_>>(),
    }
}

pub fn print_workers(workers: &[Worker]) -> Result<(), CliError> {
    let row = |worker: &Worker| {
        let state = format!("{}{}", state_of(worker), if worker.draining { ", draining" } else { "" });
        let used = format!("{} of {}", console::size(worker.used_bytes), console::size(worker.capacity_bytes));
        let WorkerCounters { hit_bytes, miss_bytes, .. } = worker.counters.unwrap_or_default();
        let hits = console::share(hit_bytes, hit_bytes.saturating_add(miss_bytes));
        let (all, failed) = (worker.disks.len(), worker.disks.iter().filter(|disk| !disk.healthy).count());
        let disks = if failed == 0 { all.to_string() } else { format!("{all} ({failed} failed)") };
        let (id, blocks) = (worker.id.to_string(), worker.blocks.to_string());
        [id, state, worker.host.clone(), worker.data_address.clone(), used, blocks, hits, disks]
    };
    let heading = ["WORKER", "STATE", "HOST", "DATA", "USED", "BLOCKS", "HITS", "DISKS"];
    let none = "no worker has registered: start one with `cv worker`";
    console::table_or(none, heading, workers.iter().map(row))
}

/// `running`, `idle`, or `backing off` after a failure.
fn task_state(task: &TaskStatus) -> String {
    word(task.state().as_str_name(), "TASK_STATE_").replace('_', " ")
}

/// When the last run ended and how long it took, if any has.
fn last_run(task: &TaskStatus) -> Option<(u64, u64)> {
    (task.runs > 0).then_some((task.last_run_age_ms, task.last_run_ms))
}

/// When and why the last run failed that did, if any has.
fn last_error(task: &TaskStatus) -> Option<(u64, &str)> {
    Some((task.last_error_age_ms, task.last_error.as_str())).filter(|(_, error)| !error.is_empty())
}

fn task_view(task: &TaskStatus) -> Value {
    let (run, error) = (last_run(task), last_error(task));
    // Since that master leads.
    console::fields! { task; name, runs, errors;
        "state": task_state(task),
        "last_run_age_ms": run.map(|(age_ms, _)| age_ms),
        "last_run_ms": run.map(|(_, took_ms)| took_ms),
        "last_error": error.map(|(_, error)| error),
        "last_error_age_ms": error.map(|(age_ms, _)| age_ms),
    }
}

/// Errors have words of buckets and workers, and stay on the line.
fn task_row(task: &TaskStatus) -> [String; 6] {
    let ago = |age_ms: u64| format!("{:.1} s ago", age_ms as f64 / 1000.0);
    let (run, error) = (last_run(task), last_error(task));
    let run = or_dash(run.map(|(age_ms, took_ms)| format!("{}, in {took_ms} ms", ago(age_ms))));
    let error = or_dash(error.map(|(age_ms, error)| format!("{}: {}", ago(age_ms), console::escaped(error))));
    let (runs, errors) = (task.runs.to_string(), task.errors.to_string());
    [console::escaped(&task.name), task_state(task), runs, run, errors, error]
}

#[cfg(test)]
mod tests {
    use cavern_proto::master::TaskState;

    use super::*;

    #[test]
    fn a_task_is_one_line_whatever_its_error_says() {
        let status = TaskStatus {
            name: "index /a\nb".into(),
            state: TaskState::BackingOff as i32,
            runs: 7,
            errors: 2,
            last_run_age_ms: 1500,
            last_run_ms: 20,
            last_error: "no\n\u{1b}[2J answer".into(),
            last_error_age_ms: 61_000,
        };
        let expected =
            [r"index /a\nb", "backing off", "7", "1.5 s ago, in 20 ms", "2", r"61.0 s ago: no\n\u{1b}[2J answer"];
        assert_eq!(task_row(&status), expected);
        let new = TaskStatus { name: "tick".into(), state: TaskState::Idle as i32, ..TaskStatus::default() };
        assert_eq!(task_row(&new), ["tick", "idle", "0", "–", "0", "–"]);
        let view = task_view(&new);
        assert_eq!((&view["last_run_ms"], &view["last_error"]), (&Value::Null, &Value::Null));
    }
}
