//! `cv why`: reads the beginning of a file as a client does that knows nothing of it yet, and says where its blocks
//! are, what each step waited for, and what can be done about it.

mod advice;
mod survey;

use std::time::Duration;

use cavern_client::{Client, Node, Stage, StageTimes, Stages};
use cavern_proto::CHUNK_BYTES;
use clap::Args;
use serde::Serialize;
use tokio::time::Instant;

use self::survey::{WorkerView, survey};
use super::connect::ResultArgs;
use super::fs::layout::Layout;
use super::fs::reader::check_kind;
use super::fs::walk::with_client;
use super::host_path::in_namespace;
use crate::console;
use crate::error::CliError;

/// What is read.
const READ_BYTES: u64 = 1 << 20;

#[derive(Args)]
#[command(after_help = "Examples:
  cv why /mnt/cavern/train/000001.jpg        a path of this host, in a mount
  cv why /train/000001.jpg                   the same file in the namespace
  cv why /train/000001.jpg --json | jq .steps

The first MiB of the file is read, as by a client that has nothing of it yet, and what is not cached is cached by \
that. What a worker fetches from the bucket counts as time of the worker: \"descriptor\" where it is on this host, \
\"network\" elsewhere. \"bucket\" is what was read past the workers.

What a mount itself waited for lately: cat MOUNT/.cv/trace")]
pub struct WhyArgs {
    /// A file in a mount, or an absolute path in the namespace.
    #[arg(value_name = "PATH")]
    path: String,
    #[command(flatten)]
    result: ResultArgs,
}

/// One step of the read.
#[derive(Debug, Serialize)]
struct Step {
    step: &'static str,
    #[serde(flatten)]
    time: StepTime,
}

/// Milliseconds.
#[derive(Debug, Serialize)]
struct StepTime {
    ms: f64,
    queue: f64,
    metadata: f64,
    descriptor: f64,
    disk: f64,
    network: f64,
    fetch: f64,
    bucket: f64,
}

/// Where the bytes came from.
#[derive(Debug, Default, Serialize)]
struct Sources {
    descriptor_bytes: u64,
    network_bytes: u64,
    bucket_bytes: u64,
}

/// What was found.
#[derive(Debug, Serialize)]
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
    advice: String,
}

impl StepTime {
    fn new(took: Duration, times: &StageTimes) -> Self {
        let ms = |time: Duration| (time.as_secs_f64() * 1e6).round() / 1e3;
        let of = |stage: Stage| ms(times[stage as usize]);
        Self {
            ms: ms(took),
            queue: of(Stage::Queue),
            metadata: of(Stage::Metadata),
            descriptor: of(Stage::Descriptor),
            disk: of(Stage::Disk),
            network: of(Stage::Network),
            fetch: of(Stage::Fetch),
            bucket: of(Stage::Bucket),
        }
    }

    /// What was waited for, and how long.
    fn parts(&self) -> String {
        let parts = [
            ("queue", self.queue),
            ("metadata", self.metadata),
            ("descriptor", self.descriptor),
            ("disk", self.disk),
            ("network", self.network),
            ("fetch", self.fetch),
            ("bucket", self.bucket),
        ];
        let parts: Vec<String> =
            parts.into_iter().filter(|(_, ms)| *ms > 0.0).map(|(name, ms)| format!("{name} {ms:.1} ms")).collect();
        parts.join(", ")
    }
}

impl Sources {
    fn of(client: &Client) -> Self {
        let stats = client.stats();
        Self {
            descriptor_bytes: stats.descriptor_bytes.get(),
            network_bytes: stats.remote_bytes.get(),
            bucket_bytes: stats.bucket_bytes.get(),
        }
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
    steps.push(Step { step, time: StepTime::new(began.elapsed(), &stages.times()) });
    result.map_err(|error| error.into().of(path))
}

impl WhyArgs {
    pub async fn run(self) -> Result<(), CliError> {
        let cluster = &self.result.cluster;
        let path = in_namespace(&self.path, &cluster.config()?.fuse.path);
        let found = with_client(cluster, async |client| Box::pin(find(client, &path)).await).await?;
        self.result.show(&found, Found::print)
    }
}

async fn find(client: &Client, path: &str) -> Result<Found, CliError> {
    let mut steps = Vec::new();
    let node = timed("metadata", path, &mut steps, client.metadata().resolve(path)).await?;
    check_kind(path, &node, &format!("name a file in it, which `cv fs ls {path}` lists"))?;
    timed("metadata, cached", path, &mut steps, client.node(node.inode)).await?;
    let mut found = Found {
        path: path.to_owned(),
        mode: if node.is_fs_mode() { "fs-mode" } else { "cache-mode" },
        key: if node.is_fs_mode() { String::new() } else { node.key() },
        etag: node.etag(),
        size: node.size,
        blocks: 0,
        workers: Vec::new(),
        filled_bytes: 0,
        sources: Sources::default(),
        steps,
        advice: String::new(),
    };
    let layout = Layout::of(client, &node).await.map_err(|error| error.of(path))?;
    (found.size, found.blocks) = (layout.size, layout.blocks.len());
    if found.size > 0 {
        found.workers = survey(client, &layout).await;
        read(client, &node, &mut found).await?;
        let before: u64 = found.workers.iter().map(|worker| u64::from(worker.chunks_present)).sum();
        let after: u64 = survey(client, &layout).await.iter().map(|worker| u64::from(worker.chunks_present)).sum();
        found.filled_bytes = after.saturating_sub(before) * u64::from(CHUNK_BYTES);
    }
    found.advice = advice::of(&found);
    Ok(found)
}

/// Opens the file and reads its beginning.
async fn read(client: &Client, node: &std::sync::Arc<Node>, found: &mut Found) -> Result<(), CliError> {
    let (path, steps) = (found.path.clone(), &mut found.steps);
    let before = Sources::of(client);
    let file = timed("open", &path, steps, Box::pin(client.open_to_read(node))).await?;
    timed("first byte", &path, steps, Box::pin(file.read(0, 1))).await?;
    let length = found.size.min(READ_BYTES) as usize;
    timed("first MiB", &path, steps, Box::pin(file.read(0, length))).await?;
    let after = Sources::of(client);
    found.sources = Sources {
        descriptor_bytes: after.descriptor_bytes - before.descriptor_bytes,
        network_bytes: after.network_bytes - before.network_bytes,
        bucket_bytes: after.bucket_bytes - before.bucket_bytes,
    };
    Ok(())
}

impl Found {
    fn print(&self) -> Result<(), CliError> {
        let version =
            if self.etag.is_empty() { String::new() } else { format!(", object {} ({})", self.key, self.etag) };
        console::line(format_args!("{}: {}, {}{version}", self.path, self.mode, console::size(self.size)))?;
        if !self.workers.is_empty() {
            let rows = self.workers.iter().map(|worker| worker.row(self.blocks));
            console::line("")?;
            console::table(["WORKER", "DATA", "ROUTE", "BLOCKS", "CHUNKS", "OF BLOCK 0", "REMARK"], rows)?;
        }
        let row = |step: &Step| [step.step.to_owned(), format!("{:>10.1} ms", step.time.ms), step.time.parts()];
        console::line("")?;
        console::table(["STEP", "      TIME", "WAITED FOR"], self.steps.iter().map(row))?;
        console::line("")?;
        let Sources { descriptor_bytes, network_bytes, bucket_bytes } = &self.sources;
        let sources = [
            (*descriptor_bytes, "by descriptor"),
            (*network_bytes, "over the network"),
            (*bucket_bytes, "from the bucket"),
            (self.filled_bytes, "fetched by workers"),
        ];
        let sources: Vec<String> = sources
            .into_iter()
            .filter(|(bytes, _)| *bytes > 0)
            .map(|(bytes, how)| format!("{} {how}", console::size(bytes)))
            .collect();
        if !sources.is_empty() {
            console::line(format_args!("read: {}", sources.join(", ")))?;
        }
        console::line(&self.advice)
    }
}
