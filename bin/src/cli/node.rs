//! `cv node`: the workers of a cluster, and how one leaves it.

use std::time::Duration;

use cavern_conf::counted;
use cavern_net::MasterChannel;
use cavern_proto::master::{
    DrainWorkerRequest, ListWorkersRequest, RemoveWorkerRequest, Worker, WorkerBlocks, WorkerBlocksRequest,
};
use clap::{Args, Subcommand};
use serde_json::json;
use tokio::time::Instant;

use super::connect::{ResultArgs, new_request_id, rpc};
use super::report::{print_workers, worker_view};
use crate::console::{self, Progress};
use crate::error::CliError;

/// How often a worker that is watched is looked at, and how often a line reports it where no bar is drawn.
const POLL_PERIOD: Duration = Duration::from_millis(500);
const LINE_PERIOD: Duration = Duration::from_secs(5);

#[derive(Subcommand)]
pub enum NodeCommand {
    /// List the workers, those that are lost included.
    List,
    /// Empty a worker: it is given no new blocks, and what it has of fs-mode mounts moves to other workers.
    Drain(DrainArgs),
    /// Take a worker that is empty or lost out of the cluster for good.
    Remove(RemoveArgs),
}

#[derive(Args)]
pub struct DrainArgs {
    /// Number, data address, or host of the worker, as `cv node list` has them.
    worker: String,
    /// The worker takes blocks again.
    #[arg(long, conflicts_with = "watch")]
    undo: bool,
    /// Show what is left until the worker is empty.
    #[arg(long)]
    watch: bool,
}

#[derive(Args)]
pub struct RemoveArgs {
    /// Number, data address, or host of the worker, as `cv node list` has them.
    worker: String,
    /// Remove it even if files are lost with it; says which.
    #[arg(long)]
    force: bool,
}

impl NodeCommand {
    pub async fn run(self, result: &ResultArgs) -> Result<(), CliError> {
        let masters = result.cluster.masters().await?;
        let workers = masters.ask_unary(rpc!(cluster.list_workers(ListWorkersRequest {}))).await?.workers;
        match self {
            Self::List => {
                let views: Vec<_> = workers.iter().map(worker_view).collect();
                result.show(&views, || print_workers(&workers))
            }
            Self::Drain(args) => args.run(&masters, find(&workers, &args.worker)?, result.json).await,
            Self::Remove(args) => args.run(&masters, find(&workers, &args.worker)?, result).await,
        }
    }
}

impl DrainArgs {
    async fn run(&self, masters: &MasterChannel, worker_id: u64, json: bool) -> Result<(), CliError> {
        let drain = DrainWorkerRequest { worker_id, undo: self.undo };
        let blocks = masters.ask_unary(rpc!(cluster.drain_worker(drain))).await?;
        let mut drained = Drained { worker: worker_id, blocks };
        let mut progress = Progress::new(json || !self.watch);
        let whole = drained.blocks.blocks;
        while self.watch && drained.blocks.draining && drained.blocks.blocks > 0 {
            let part = (whole.saturating_sub(drained.blocks.blocks), whole);
            progress.show_or_say(Some(part), drained.left(), LINE_PERIOD, || drained.say(json))?;
            let asked = Instant::now();
            let look = WorkerBlocksRequest { worker_id };
            drained.blocks = masters.ask_unary(rpc!(cluster.get_worker_blocks(look))).await?;
            // Counting many blocks takes the master a while.
            tokio::time::sleep(POLL_PERIOD.max(asked.elapsed() * 5)).await;
        }
        drop(progress);
        drained.say(json)
    }
}

/// A worker, and the blocks of files of fs-mode mounts that it has.
struct Drained {
    worker: u64,
    blocks: WorkerBlocks,
}

impl Drained {
    fn say(&self, json: bool) -> Result<(), CliError> {
        let Self { worker, blocks: WorkerBlocks { blocks, draining, stuck } } = self;
        let view = json!({"worker": worker, "draining": draining, "blocks": blocks, "stuck": stuck});
        console::say(json, &view, || match (draining, blocks) {
            (false, _) => format!("worker {worker} takes blocks"),
            (true, 0) => format!("worker {worker} is empty: stop it, and take it out with `cv node remove {worker}`"),
            (true, _) => format!("worker {worker} is being emptied: {}", self.left()),
        })
    }

    fn left(&self) -> String {
        let stuck = console::prefixed("; ", &self.blocks.stuck);
        format!("{} blocks are left{stuck}", self.blocks.blocks)
    }
}

impl RemoveArgs {
    async fn run(&self, masters: &MasterChannel, worker_id: u64, result: &ResultArgs) -> Result<(), CliError> {
        let request = RemoveWorkerRequest { worker_id, force: self.force, request_id: new_request_id() };
        let reply = masters.ask_unary(rpc!(cluster.remove_worker(request))).await?;
        // What is, or was, at this worker alone, and in no bucket.
        let lost = reply.only_here.unwrap_or_default();
        let paths: Vec<&str> = lost.listed.iter().map(|file| file.path.as_str()).collect();
        let view = json!({
            "worker": worker_id,
            "removed": reply.removed,
            "reason": reply.reason,
            "files": lost.files,
            "blocks": lost.blocks,
            // The first of these files.
            "paths": paths,
        });
        let more = lost.files.saturating_sub(paths.len() as u64);
        let more = (more > 0).then(|| format!("\n  and {more} more"));
        let listed: String = paths.iter().map(|path| format!("\n  {path}")).chain(more).collect();
        result.show(&view, || match (reply.removed, lost.blocks) {
            (false, _) => Ok(()),
            (true, 0) => console::line(format_args!("worker {worker_id} is removed; nothing was at it alone")),
            (true, blocks) => console::line(format_args!(
                "worker {worker_id} is removed; {} of {} were at it alone and are lost:{listed}",
                counted(blocks, "block"),
                counted(lost.files, "file")
            )),
        })?;
        if reply.removed { Ok(()) } else { Err(CliError::Failed(format!("{}{listed}", reply.reason))) }
    }
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
