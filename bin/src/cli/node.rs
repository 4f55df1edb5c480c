//! `cv node`: the workers of a cluster, and how one leaves it.

use std::time::Duration;

use cavern_net::MasterChannel;
use cavern_net::master::Stubs;
use cavern_proto::master::{
    DrainWorkerRequest, ListWorkersRequest, RemoveWorkerRequest, UnavailableFiles, Worker, WorkerBlocks,
    WorkerBlocksRequest,
};
use clap::{Args, Subcommand};
use serde::Serialize;
use tokio::time::Instant;

use super::connect::{ClusterArgs, ResultArgs, new_request_id};
use super::report::{WorkerView, print_workers};
use crate::console::{self, Progress};
use crate::error::CliError;

/// How often a worker that is watched is looked at, and how often a line reports it where no bar is drawn.
const POLL_PERIOD: Duration = Duration::from_millis(500);
const LINE_PERIOD: Duration = Duration::from_secs(5);

#[derive(Subcommand)]
pub enum NodeCommand {
    /// List the workers, those that are lost included.
    #[command(after_help = "Examples:
  cv node list --json")]
    List(ResultArgs),
    /// Empty a worker: it is given no new blocks, and what it has of fs-mode mounts moves to other workers.
    #[command(after_help = "Examples:
  cv node drain 3 --watch
  cv node drain node7:7710 --undo

The worker goes on serving meanwhile, and stays so over restarts until --undo or `cv node remove`. What it caches of \
buckets stays behind: it is read from the bucket again, by other workers.")]
    Drain(DrainArgs),
    /// Take a worker that is empty or lost out of the cluster for good.
    #[command(after_help = "Examples:
  cv node drain 3 --watch && cv node remove 3

Refused while something is at this worker alone and in no bucket. The worker itself is notified when it asks next, and \
ends; it is refused from then on. Its directories stay as they are: with empty ones the host can join again, as a new \
worker.")]
    Remove(RemoveArgs),
}

#[derive(Args)]
pub struct DrainArgs {
    /// Number, data address, or host of the worker, as `cv node list` has them.
    #[arg(value_name = "WORKER")]
    worker: String,
    /// The worker takes blocks again.
    #[arg(long, conflicts_with = "watch")]
    undo: bool,
    /// Show what is left until the worker is empty.
    #[arg(long)]
    watch: bool,
    /// The result as JSON; with --watch, line by line.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

#[derive(Args)]
pub struct RemoveArgs {
    /// Number, data address, or host of the worker, as `cv node list` has them.
    #[arg(value_name = "WORKER")]
    worker: String,
    /// Remove it even if files are lost with it; says which.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    result: ResultArgs,
}

#[derive(Serialize)]
struct BlocksView {
    worker: u64,
    draining: bool,
    /// Blocks of files of fs-mode mounts that it has.
    blocks: u64,
    /// Why they do not move, if they do not.
    #[serde(skip_serializing_if = "String::is_empty")]
    stuck: String,
}

#[derive(Serialize)]
struct RemovedView {
    worker: u64,
    removed: bool,
    #[serde(skip_serializing_if = "String::is_empty")]
    reason: String,
    /// What is, or was, at this worker alone, and in no bucket.
    files: u64,
    blocks: u64,
    /// The first of these files.
    paths: Vec<String>,
}

impl NodeCommand {
    pub async fn run(self) -> Result<(), CliError> {
        match self {
            Self::List(args) => {
                let masters = args.cluster.masters().await?;
                let views: Vec<_> = workers(&masters).await?.iter().map(WorkerView::new).collect();
                args.show(&views, |views| print_workers(views))
            }
            Self::Drain(args) => args.run().await,
            Self::Remove(args) => args.run().await,
        }
    }
}

impl DrainArgs {
    async fn run(self) -> Result<(), CliError> {
        let masters = self.cluster.masters().await?;
        let worker_id = find(&workers(&masters).await?, &self.worker)?;
        let request = DrainWorkerRequest { worker_id, undo: self.undo };
        let blocks = masters.ask_unary(async |mut master: Stubs| master.cluster.drain_worker(request).await).await?;
        let mut view = BlocksView::new(worker_id, blocks);
        let mut progress = Progress::new_unless(self.json || !self.watch)?;
        let whole = view.blocks;
        while self.watch && view.draining && view.blocks > 0 {
            let part = (whole.saturating_sub(view.blocks), whole);
            progress.show_or_say(Some(part), view.left(), LINE_PERIOD, || view.say(self.json))?;
            let asked = Instant::now();
            let request = WorkerBlocksRequest { worker_id };
            let blocks =
                masters.ask_unary(async |mut master: Stubs| master.cluster.get_worker_blocks(request).await).await?;
            view = BlocksView::new(worker_id, blocks);
            // Counting many blocks takes the master a while.
            tokio::time::sleep(POLL_PERIOD.max(asked.elapsed() * 5)).await;
        }
        drop(progress);
        if self.json && !self.watch { console::json(&view) } else { view.say(self.json) }
    }
}

impl BlocksView {
    fn new(worker: u64, blocks: WorkerBlocks) -> Self {
        let WorkerBlocks { blocks, draining, stuck } = blocks;
        Self { worker, draining, blocks, stuck }
    }

    fn say(&self, json: bool) -> Result<(), CliError> {
        let worker = self.worker;
        console::say(json, self, || match (self.draining, self.blocks) {
            (false, _) => format!("worker {worker} takes blocks"),
            (true, 0) => format!("worker {worker} is empty: stop it, and take it out with `cv node remove {worker}`"),
            (true, _) => format!("worker {worker} is being emptied: {}", self.left()),
        })
    }

    fn left(&self) -> String {
        let stuck = if self.stuck.is_empty() { String::new() } else { format!("; {}", self.stuck) };
        format!("{} blocks are left{stuck}", self.blocks)
    }
}

impl RemoveArgs {
    async fn run(self) -> Result<(), CliError> {
        let masters = self.result.cluster.masters().await?;
        let worker = find(&workers(&masters).await?, &self.worker)?;
        let request = RemoveWorkerRequest { worker_id: worker, force: self.force, request_id: new_request_id() };
        let remove = async |mut master: Stubs| master.cluster.remove_worker(request.clone()).await;
        let reply = masters.ask_unary(remove).await?;
        let UnavailableFiles { files, blocks, listed, .. } = reply.only_here.unwrap_or_default();
        let paths = listed.into_iter().map(|file| file.path).collect();
        let view = RemovedView { worker, removed: reply.removed, reason: reply.reason, files, blocks, paths };
        if self.result.json {
            console::json(&view)?;
        }
        if !view.removed {
            return Err(CliError::Failed(format!("{}{}", view.reason, view.listed())));
        }
        match (self.result.json, view.blocks) {
            (true, _) => Ok(()),
            (false, 0) => console::line(format_args!("worker {worker} is removed; nothing was at it alone")),
            (false, _) => console::line(format_args!(
                "worker {worker} is removed; {} blocks of {} files were at it alone and are lost:{}",
                view.blocks,
                view.files,
                view.listed()
            )),
        }
    }
}

impl RemovedView {
    fn listed(&self) -> String {
        let more = self.files.saturating_sub(self.paths.len() as u64);
        let mut lines: Vec<String> = self.paths.iter().map(|path| format!("\n  {path}")).collect();
        lines.extend((more > 0).then(|| format!("\n  and {more} more")));
        lines.concat()
    }
}

async fn workers(masters: &MasterChannel) -> Result<Vec<Worker>, CliError> {
    let list = async |mut master: Stubs| master.cluster.list_workers(ListWorkersRequest {}).await;
    Ok(masters.ask_unary(list).await?.workers)
}

/// The worker that is meant by a number, a data address, or the name of a host with one worker.
fn find(workers: &[Worker], named: &str) -> Result<u64, CliError> {
    let is_meant = |worker: &&Worker| worker.data_address == named || named.parse() == Ok(worker.id);
    if let Some(worker) = workers.iter().find(is_meant) {
        return Ok(worker.id);
    }
    let on_host: Vec<&Worker> = workers.iter().filter(|worker| worker.host == named).collect();
    match on_host[..] {
        [worker] => Ok(worker.id),
        [] => Err(CliError::NotFound(format!("there is no worker {named}: see `cv node list`"))),
        _ => Err(CliError::Usage(format!(
            "{named} has {} workers: name one by its number or its data address, see `cv node list`",
            on_host.len()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_found_by_number_address_and_host() {
        let worker = |id, address: &str, host: &str| Worker {
            id,
            data_address: address.into(),
            host: host.into(),
            ..Worker::default()
        };
        let workers = [worker(1, "a:1", "a"), worker(2, "b:1", "b"), worker(3, "b:2", "b")];
        for (named, id) in [("2", 2), ("b:2", 3), ("a", 1)] {
            assert_eq!(find(&workers, named).unwrap(), id);
        }
        assert!(matches!(find(&workers, "b"), Err(CliError::Usage(_))));
        assert!(matches!(find(&workers, "4"), Err(CliError::NotFound(_))));
    }
}
