//! `cv why`: reads the beginning of a file as a client does that knows nothing of it yet, and says where its blocks
//! are, what each step waited for, and what can be done about it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use cavern_client::{Client, Node, Stage, Stages};
use cavern_net::Route;
use cavern_proto::CHUNK_BYTES;
use cavern_proto::master::{Worker, WorkerState};
use clap::Args;
use serde::Serialize;
use tokio::time::Instant;

use super::connect::ResultArgs;
use super::fs::blocks::{Block, Layout};
use super::fs::{check_kind, with_client};
use super::host_path::in_namespace;
use crate::console;
use crate::error::CliError;

/// What is read.
const READ_BYTES: u64 = 1 << 20;

#[derive(Args)]
pub struct WhyArgs {
    /// A file in a mount, or an absolute path in the namespace.
    path: String,
    #[command(flatten)]
    result: ResultArgs,
}

/// One step of the read. Times are in milliseconds.
#[derive(Serialize)]
struct Step {
    step: &'static str,
    ms: f64,
    /// What it waited for, by the names of the stages.
    #[serde(flatten)]
    waited: BTreeMap<&'static str, f64>,
}

/// What was found.
#[derive(Default, Serialize)]
struct Found {
    path: String,
    /// `cache-mode` or `fs-mode`.
    mode: &'static str,
    /// Of the object; empty in fs-mode.
    key: String,
    etag: String,
    size: u64,
    blocks: usize,
    /// As they were before the read.
    workers: Vec<WorkerView>,
    /// Bytes that workers have fetched for the read.
    filled_bytes: u64,
    sources: Sources,
    steps: Vec<Step>,
    /// What can be done, in one line.
    advice: String,
}

/// Where the bytes came from.
#[derive(Default, Serialize)]
struct Sources {
    descriptor_bytes: u64,
    network_bytes: u64,
    bucket_bytes: u64,
}

/// One worker and what it has of a file.
#[derive(Serialize)]
struct WorkerView {
    worker: u64,
    data: String,
    /// `local`: it hands out descriptors. `remote`: it sends bytes.
    route: &'static str,
    /// Readers ask it first for the first block.
    first: bool,
    blocks: usize,
    chunks: u32,
    chunks_present: u32,
    /// Why it said nothing, if it did not.
    error: Option<String>,
}

/// What each live worker has, and workers that should have something. One that does not answer is shown with the
/// reason.
async fn survey(client: &Client, layout: &Layout) -> Vec<WorkerView> {
    let mut views = Vec::new();
    for worker in client.workers().workers() {
        let blocks = layout.at(worker.id);
        let is_live = worker.state() == WorkerState::Live;
        if !blocks.is_empty() && (is_live || blocks.iter().any(|block| block.holders.is_some())) {
            views.push(ask(client, layout, worker, &blocks, is_live).await);
        }
    }
    views.sort_by_key(|view| (!view.first, view.worker));
    views
}

async fn ask(client: &Client, layout: &Layout, worker: &Worker, blocks: &[&Block], is_live: bool) -> WorkerView {
    let route = match client.pool().route(worker.id).await {
        Ok(Route::Local) => "local",
        Ok(Route::Remote) | Err(_) => "remote",
    };
    let (found, error) = match Block::query(client, worker.id, if is_live { blocks } else { &[] }).await {
        Ok(found) => (found, (!is_live).then(|| "not live: see `cv node list`".to_owned())),
        Err(error) => (Vec::new(), Some(error.to_string())),
    };
    let known = || blocks.iter().zip(&found).filter(|(_, cached)| cached.is_known);
    WorkerView {
        worker: worker.id,
        data: worker.data_address.clone(),
        route,
        first: layout.blocks.first().is_some_and(|block| block.index == 0 && block.first == Some(worker.id)),
        blocks: known().filter(|(_, cached)| cached.chunks > 0).count(),
        chunks: blocks.iter().map(|block| block.chunks()).sum(),
        chunks_present: known().map(|(_, cached)| cached.chunks).sum(),
        error,
    }
}

impl WorkerView {
    /// In a table; `blocks` are those of the file.
    fn row(&self, blocks: usize) -> [String; 6] {
        [
            format!("{}{}", self.worker, if self.first { "*" } else { "" }),
            self.data.clone(),
            self.route.to_owned(),
            format!("{}/{blocks}", self.blocks),
            format!("{}/{}", self.chunks_present, self.chunks),
            self.error.clone().unwrap_or_else(|| if self.first { "asked first".to_owned() } else { String::new() }),
        ]
    }
}

/// In milliseconds, to the microsecond.
fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

impl Step {
    fn row(&self) -> [String; 3] {
        let waited = self.waited.iter().filter(|(_, ms)| **ms > 0.0);
        let waited: Vec<String> = waited.map(|(stage, ms)| format!("{stage} {ms:.1} ms")).collect();
        [self.step.to_owned(), format!("{:>10.1} ms", self.ms), waited.join(", ")]
    }
}

impl WhyArgs {
    pub async fn run(self) -> Result<(), CliError> {
        let cluster = &self.result.cluster;
        let path = in_namespace(&self.path, &cluster.config()?.fuse.path);
        let found = with_client(cluster, async |client| Box::pin(find(client, &path)).await).await?;
        self.result.show(&found, || found.print())
    }
}

async fn timed<T, E: Into<CliError>>(
    step: &'static str,
    path: &str,
    steps: &mut Vec<Step>,
    work: impl Future<Output = Result<T, E>>,
) -> Result<T, CliError> {
    let (stages, began) = (Stages::new(), Instant::now());
    let result = Stages::scope(Some(stages.clone()), work).await;
    let waited = Stage::ALL.iter().zip(stages.times()).map(|(stage, time)| (stage.name(), ms(time))).collect();
    steps.push(Step { step, ms: ms(began.elapsed()), waited });
    result.map_err(|error| error.into().of(path))
}

async fn find(client: &Client, path: &str) -> Result<Found, CliError> {
    let mut steps = Vec::new();
    let node = timed("metadata", path, &mut steps, Box::pin(client.metadata().resolve(path))).await?;
    check_kind(path, &node, &format!("name a file in it, which `cv fs ls {path}` lists"))?;
    timed("metadata, cached", path, &mut steps, Box::pin(client.node(node.inode))).await?;
    let layout = Layout::of(client, &node).await.map_err(|error| error.of(path))?;
    let mut found = Found {
        path: path.to_owned(),
        mode: if node.is_fs_mode() { "fs-mode" } else { "cache-mode" },
        key: if node.is_fs_mode() { String::new() } else { node.key() },
        etag: node.etag(),
        size: layout.size,
        blocks: layout.blocks.len(),
        steps,
        ..Found::default()
    };
    if found.size > 0 {
        let present =
            |workers: &[WorkerView]| workers.iter().map(|worker| u64::from(worker.chunks_present)).sum::<u64>();
        found.workers = survey(client, &layout).await;
        read(client, &node, &mut found).await?;
        let (before, after) = (present(&found.workers), present(&survey(client, &layout).await));
        found.filled_bytes = after.saturating_sub(before) * u64::from(CHUNK_BYTES);
    }
    found.advice = advice(&found);
    Ok(found)
}

/// Opens the file and reads its beginning.
async fn read(client: &Client, node: &Arc<Node>, found: &mut Found) -> Result<(), CliError> {
    let (path, steps) = (found.path.clone(), &mut found.steps);
    let stats = client.stats();
    let counted = || [stats.descriptor_bytes.get(), stats.remote_bytes.get(), stats.bucket_bytes.get()];
    let before = counted();
    let file = timed("open", &path, steps, Box::pin(client.open_to_read(node))).await?;
    timed("first byte", &path, steps, Box::pin(file.read(0, 1))).await?;
    let length = found.size.min(READ_BYTES) as usize;
    timed("first MiB", &path, steps, Box::pin(file.read(0, length))).await?;
    let after = counted();
    let [descriptor_bytes, network_bytes, bucket_bytes] = std::array::from_fn(|source| after[source] - before[source]);
    found.sources = Sources { descriptor_bytes, network_bytes, bucket_bytes };
    Ok(())
}

impl Found {
    fn print(&self) -> Result<(), CliError> {
        let version = match self.etag.as_str() {
            "" => String::new(),
            etag => format!(", object {} ({etag})", self.key),
        };
        console::line(format_args!("{}: {}, {}{version}", self.path, self.mode, console::size(self.size)))?;
        if !self.workers.is_empty() {
            let rows = self.workers.iter().map(|worker| worker.row(self.blocks));
            console::line("")?;
            console::table(["WORKER", "DATA", "ROUTE", "BLOCKS", "CHUNKS", "REMARK"], rows)?;
        }
        console::line("")?;
        console::table(["STEP", "      TIME", "WAITED FOR"], self.steps.iter().map(Step::row))?;
        console::line("")?;
        let Sources { descriptor_bytes, network_bytes, bucket_bytes } = self.sources;
        let sources = [
            (descriptor_bytes, "by descriptor"),
            (network_bytes, "over the network"),
            (bucket_bytes, "from the bucket"),
            (self.filled_bytes, "fetched by workers"),
        ];
        let sources = sources.iter().filter(|(bytes, _)| *bytes > 0);
        let sources: Vec<_> = sources.map(|(bytes, how)| format!("{} {how}", console::size(*bytes))).collect();
        if !sources.is_empty() {
            console::line(format_args!("read: {}", sources.join(", ")))?;
        }
        console::line(&self.advice)
    }
}

/// What can be done about a read, in one line. The first that applies: what keeps bytes farthest away goes first.
fn advice(found: &Found) -> String {
    let path = &found.path;
    if found.size == 0 {
        return "the file is empty: nothing is read".to_owned();
    }
    if let Some(lost) = found.workers.iter().find(|worker| worker.first && worker.error.is_some()) {
        return format!(
            "worker {} should have the block, and does not answer: see `cv node list`, and its log",
            lost.worker
        );
    }
    if found.blocks > 0 && found.workers.is_empty() {
        return "no worker is live, so reads go to the bucket: see `cv node list`".to_owned();
    }
    if found.sources.bucket_bytes > 0 {
        return "the bucket was read past the workers, which did not give the bytes in time: see `cv node list`, their \
                logs, and how long the bucket takes (`cavern_ufs_` in the metrics of the workers)"
            .to_owned();
    }
    if found.filled_bytes > 0 {
        return format!(
            "the block was on no worker, or not all of it: this read went to the bucket, and what it read is cached \
             now; `cv load {path}` caches all of the file"
        );
    }
    if found.mode == "fs-mode" && found.blocks == 0 {
        return format!(
            "no worker has a block of the file: it is a hole, or only the bucket has it; `cv load {path}` fetches that"
        );
    }
    let total: f64 = found.steps.iter().map(|step| step.ms).sum();
    let metadata: f64 = found.steps.iter().filter_map(|step| step.waited.get(Stage::Metadata.name())).sum();
    let held = found.workers.iter().find(|worker| worker.chunks_present > 0);
    if found.sources.network_bytes > 0 {
        let worker = held.map_or_else(|| "the worker".to_owned(), |worker| format!("worker {}", worker.worker));
        return format!(
            "{worker} is on another host (or `client.local_descriptors` is off): bytes come over the network; with a \
             worker on this host that has the block they come by descriptor"
        );
    }
    if metadata * 2.0 > total {
        return "the bytes are on this host; most of the time went to the master, which a mount asks once for what it \
                then keeps: see `cv raft status`"
            .to_owned();
    }
    let (present, chunks) = held.map_or((0, 0), |worker| (worker.chunks_present, worker.chunks));
    if found.mode == "cache-mode" && present < chunks {
        return format!(
            "the beginning is on this host, and {present} of {chunks} chunks of the file; `cv load {path}` caches all"
        );
    }
    "the bytes are on this host: what a mount waited for nevertheless shows `cat MOUNT/.cv/trace`".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(present: u32) -> WorkerView {
        WorkerView {
            worker: 3,
            data: String::new(),
            route: "local",
            first: true,
            blocks: 1,
            chunks: 8,
            chunks_present: present,
            error: None,
        }
    }

    fn found(workers: Vec<WorkerView>) -> Found {
        let waited = BTreeMap::from([(Stage::Metadata.name(), 1.0), (Stage::Descriptor.name(), 5.0)]);
        Found {
            path: "/t/a".to_owned(),
            mode: "cache-mode",
            size: 1 << 20,
            blocks: 1,
            workers,
            sources: Sources { descriptor_bytes: 1 << 20, ..Sources::default() },
            steps: vec![Step { step: "open", ms: 10.0, waited }],
            ..Found::default()
        }
    }

    #[test]
    fn the_farthest_place_decides() {
        let said = |found: &Found, expected: &str| {
            let advice = advice(found);
            assert!(advice.contains(expected) && !advice.contains('\n'), "{advice}");
        };
        said(&found(vec![worker(8)]), "the bytes are on this host: ");
        said(&found(vec![worker(2)]), "2 of 8 chunks of the file; `cv load /t/a`");
        said(&found(vec![]), "no worker is live");
        said(&Found { size: 0, blocks: 0, ..found(vec![]) }, "the file is empty");
        let cold = Found { filled_bytes: 1, ..found(vec![worker(0)]) };
        said(&cold, "on no worker");
        let bucket = Sources { bucket_bytes: 5, ..Sources::default() };
        said(&Found { sources: bucket, ..cold }, "read past the workers");
        let network = Sources { network_bytes: 5, ..Sources::default() };
        said(&Found { sources: network, ..found(vec![worker(8)]) }, "worker 3 is on another host");
        said(&Found { mode: "fs-mode", blocks: 0, ..found(vec![]) }, "no worker has a block");
        let silent = WorkerView { error: Some("refused".to_owned()), ..worker(0) };
        said(&found(vec![silent]), "worker 3 should have the block");
        let mut asked = found(vec![worker(8)]);
        asked.steps[0].waited.insert(Stage::Metadata.name(), 9.0);
        said(&asked, "most of the time went to the master");
    }
}
