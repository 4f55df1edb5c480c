//! `cv bench`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cavern_conf::{ByteSize, counted, host, process};
use clap::{Args, Subcommand};
use serde::Serialize;
use serde_json::Value;

use crate::bench::{
    CachePolicy, Files, Heading, Ingest, Length, List, Match, Meta, RandomReads, ReadStreams, Report, Sides, Stop,
    Tree, Workload, WriteStreams, check_picture, run_rounds, write_picture,
};
use crate::console::{self, Progress};
use crate::error::{CliError, Context as _};
use crate::runtime::block_on;

const ROUNDS: std::ops::RangeInclusive<i64> = 1..=1000;
const THREADS: std::ops::RangeInclusive<i64> = 1..=1024;
/// Files of one round.
const COUNT: std::ops::RangeInclusive<i64> = 1..=1_000_000;
/// Files that are written have their content in memory, once for each writer.
const LARGEST_INGESTED: u64 = 1 << 30;
const LARGEST_BLOCK: u64 = 64 << 20;

#[derive(Subcommand)]
pub enum BenchCommand {
    /// Read every file below a directory, in a shuffled order.
    #[command(after_help = "Examples:
  cv bench files /mnt/cv/train --baseline /data/train
  cv bench files /mnt/cv/train --baseline /data/empty --copy --cache drop

A file is opened, read to its end and closed. Each round has an order of its own, which is the same for both sides.")]
    Files(FilesArgs),
    /// Read large files from their beginning to their end, in pieces of 1 MiB; or write some.
    #[command(after_help = "Examples:
  cv bench stream /mnt/cv/checkpoints --streams 4
  cv bench stream /mnt/cv/work --write --size 2GiB --baseline /data/work

What is written is synced at its end, and removed.")]
    Stream(StreamArgs),
    /// Read small blocks anywhere in the largest file below a directory.
    #[command(after_help = "Examples:
  cv bench random /mnt/cv/train --threads 16 --baseline /data/train
  cv bench random /mnt/cv/train --block 256KiB --seconds 10")]
    Random(RandomArgs),
    /// Create, stat, open, rename and unlink files in a new directory.
    #[command(after_help = "Examples:
  cv bench meta /mnt/cv/work --baseline /data/work --threads 16 --count 10000

The directory is made in PATH, and removed.")]
    Meta(MetaArgs),
    /// List a tree: its names, then its names and attributes.
    #[command(after_help = "Examples:
  cv bench list /mnt/cv/train --baseline /data/train

The second phase is a stat of each entry after the names of the same directory, as in ls -lR. Before the first \
round all was listed once.")]
    List(ListArgs),
    /// Write many files into a new directory.
    #[command(after_help = "Examples:
  cv bench ingest /mnt/cv/work --count 10000 --size 50KB --threads 16
  cv bench ingest /mnt/cv/work --baseline /data/work --fsync

The directory is made in PATH, and removed.")]
    Ingest(IngestArgs),
}

/// Options of all workloads.
#[derive(Args, Serialize)]
pub struct CommonArgs {
    /// The directory to measure: of a mount, or any other.
    #[arg(value_name = "PATH")]
    #[serde(skip)]
    path: PathBuf,
    /// Measure this directory in turn with the other, and print the ratio.
    #[arg(long, value_name = "DIR")]
    #[serde(skip)]
    baseline: Option<PathBuf>,
    /// Rounds for each directory.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(ROUNDS))]
    rounds: u32,
    /// Of orders, offsets and contents.
    #[arg(long, value_name = "N", default_value_t = 42)]
    seed: u64,
    /// The result as JSON, with every round.
    #[arg(long)]
    #[serde(skip)]
    json: bool,
    /// Draw the result into this new file.
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    svg: Option<PathBuf>,
}

/// Options of what reads the content of files.
#[derive(Args, Serialize)]
pub struct ReadArgs {
    #[command(flatten)]
    #[serde(flatten)]
    common: CommonArgs,
    /// Copy the files to the baseline first, if that is empty. They stay there.
    #[arg(long, requires = "baseline")]
    copy: bool,
    /// What happens to the kernel's pages of the files that are read, before each round and on both sides alike.
    #[arg(long, value_enum, default_value_t = CachePolicy::Keep)]
    cache: CachePolicy,
}

#[derive(Args, Serialize)]
pub struct FilesArgs {
    #[command(flatten)]
    #[serde(flatten)]
    read: ReadArgs,
    /// Readers at the same time.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(THREADS))]
    threads: u32,
}

#[derive(Args, Serialize)]
pub struct StreamArgs {
    #[command(flatten)]
    #[serde(flatten)]
    read: ReadArgs,
    /// Files at the same time, each with a thread of its own. Those that are read are the largest of the directory.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(THREADS))]
    streams: u32,
    /// Write new files instead.
    #[arg(long, conflicts_with_all = ["copy", "cache"])]
    write: bool,
    /// Of each file that is written.
    #[arg(long, value_name = "SIZE", default_value = "1GiB", requires = "write")]
    size: ByteSize,
}

#[derive(Args, Serialize)]
pub struct RandomArgs {
    #[command(flatten)]
    #[serde(flatten)]
    read: ReadArgs,
    /// Readers at the same time, each with a descriptor of its own.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(THREADS))]
    threads: u32,
    /// Of one read; offsets are multiples of it.
    #[arg(long, value_name = "SIZE", default_value = "4KiB")]
    block: ByteSize,
    /// How long a round takes.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    /// Reads of a round, instead of a time.
    #[arg(long, value_name = "N", conflicts_with = "seconds", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
}

#[derive(Args, Serialize)]
pub struct MetaArgs {
    #[command(flatten)]
    #[serde(flatten)]
    common: CommonArgs,
    /// Threads at the same time, each in a folder of its own.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(THREADS))]
    threads: u32,
    /// Files of a round.
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(COUNT))]
    count: u32,
}

#[derive(Args, Serialize)]
pub struct ListArgs {
    #[command(flatten)]
    #[serde(flatten)]
    common: CommonArgs,
    /// Copy the files to the baseline first, if that is empty. They stay there.
    #[arg(long, requires = "baseline")]
    copy: bool,
}

#[derive(Args, Serialize)]
pub struct IngestArgs {
    #[command(flatten)]
    #[serde(flatten)]
    common: CommonArgs,
    /// Writers at the same time, each in a folder of its own.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(THREADS))]
    threads: u32,
    /// Files of a round.
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(COUNT))]
    count: u32,
    /// Of each file.
    #[arg(long, value_name = "SIZE", default_value = "50KB")]
    size: ByteSize,
    /// Sync each file before it is closed.
    #[arg(long)]
    fsync: bool,
}

/// A workload with what there is to say of it.
struct Prepared {
    workload: Box<dyn Workload>,
    work: String,
    notes: Vec<String>,
}

impl BenchCommand {
    pub fn run(self) -> Result<(), CliError> {
        block_on(async {
            let interrupted = process::shutdown_on_signals();
            let stop = Arc::new(Stop::default());
            let watched = Arc::clone(&stop);
            let watcher = host::spawn(async move {
                interrupted.cancelled().await;
                watched.ask();
            });
            let measured = tokio::task::spawn_blocking(move || self.measure(&stop)).await;
            watcher.abort();
            measured.context("the benchmark panicked")?
        })
    }

    fn measure(self, stop: &Stop) -> Result<(), CliError> {
        let common = self.common();
        if let Some(svg) = &common.svg {
            check_picture(svg)?;
        }
        let sides = Sides::new(common.path.clone(), common.baseline.clone())?;
        let (rounds, json, svg) = (common.rounds, common.json, common.svg.clone());
        let prepared = self.prepare(&sides, stop)?;
        let mut progress = Progress::new()?;
        let each = if sides.baseline.is_some() { 2 } else { 1 };
        let (mut begun, whole) = (0, u64::from(rounds) * each);
        let done = run_rounds(prepared.workload.as_ref(), &sides, rounds, stop, |number, side| {
            progress.show(Some((begun, whole)), format!("round {} of {rounds}, {}", number + 1, side.name()))?;
            begun += 1;
            Ok(())
        });
        drop(progress);
        let (workload, parameters) = self.parameters()?;
        let heading = Heading { workload, parameters, work: prepared.work, notes: prepared.notes };
        let report = Report::new(heading, &sides, &done?);
        if json {
            console::json(&report)?
        } else {
            report.print()?
        }
        if let Some(svg) = svg {
            write_picture(&report, &svg)?;
        }
        report.check()
    }

    fn common(&self) -> &CommonArgs {
        match self {
            Self::Files(args) => &args.read.common,
            Self::Stream(args) => &args.read.common,
            Self::Random(args) => &args.read.common,
            Self::Meta(args) => &args.common,
            Self::List(args) => &args.common,
            Self::Ingest(args) => &args.common,
        }
    }

    /// The name of the workload, and the options as they hold.
    fn parameters(&self) -> Result<(&'static str, Value), CliError> {
        let (name, value) = match self {
            Self::Files(args) => ("files", serde_json::to_value(args)),
            Self::Stream(args) => ("stream", serde_json::to_value(args)),
            Self::Random(args) => ("random", serde_json::to_value(args)),
            Self::Meta(args) => ("meta", serde_json::to_value(args)),
            Self::List(args) => ("list", serde_json::to_value(args)),
            Self::Ingest(args) => ("ingest", serde_json::to_value(args)),
        };
        Ok((name, value.context("cannot write the options as JSON")?))
    }

    fn prepare(&self, sides: &Sides, stop: &Stop) -> Result<Prepared, CliError> {
        match self {
            Self::Files(args) => args.prepare(sides, stop),
            Self::Stream(args) => args.prepare(sides, stop),
            Self::Random(args) => args.prepare(sides, stop),
            Self::Meta(args) => Ok(args.prepare()),
            Self::List(args) => args.prepare(sides, stop),
            Self::Ingest(args) => args.prepare(),
        }
    }
}

impl CommonArgs {
    /// `, 5 rounds, seed 42`.
    fn ending(&self) -> String {
        let each = if self.baseline.is_some() { " in turn" } else { "" };
        format!("{}{each}, seed {}", counted(u64::from(self.rounds), "round"), self.seed)
    }
}

impl ReadArgs {
    fn notes(&self) -> Vec<String> {
        let text = match self.cache {
            CachePolicy::Keep => "--cache keep: what the kernel has of the files stays between rounds",
            CachePolicy::Drop => {
                "--cache drop: the kernel's pages of these files were dropped before each round; on a mount not the \
                 pages of what is behind it"
            }
        };
        vec![text.to_owned()]
    }
}

/// The files of the target; an error where there are none.
fn files_of(sides: &Sides, stop: &Stop) -> Result<Tree, CliError> {
    let tree = Tree::walk(&sides.target, stop)?;
    if tree.files.is_empty() {
        let text = format!("there is no file below {}: name a directory that has some", sides.target.display());
        return Err(CliError::Failed(text));
    }
    Ok(tree)
}

fn described(tree: &Tree) -> String {
    format!("{} with {}", counted(tree.files.len() as u64, "file"), console::size(tree.bytes()))
}

impl FilesArgs {
    fn prepare(&self, sides: &Sides, stop: &Stop) -> Result<Prepared, CliError> {
        let tree = files_of(sides, stop)?;
        sides.match_baseline(&tree, Match::Same, self.read.copy, stop)?;
        let threads = counted(u64::from(self.threads), "thread");
        let work = format!("{} by {threads}, {}", described(&tree), self.read.common.ending());
        let workload =
            Files { tree, threads: self.threads as usize, seed: self.read.common.seed, cache: self.read.cache };
        Ok(Prepared { workload: Box::new(workload), work, notes: self.read.notes() })
    }
}

impl StreamArgs {
    fn prepare(&self, sides: &Sides, stop: &Stop) -> Result<Prepared, CliError> {
        let streams = self.streams as usize;
        let ending = self.read.common.ending();
        if self.write {
            let bytes = self.size.bytes();
            if bytes == 0 {
                return Err(CliError::Usage("--size 0 writes nothing: name a size, as 1GiB".to_owned()));
            }
            let each = counted(u64::from(self.streams), "file");
            let work = format!("{each} of {} written and synced, {ending}", console::size(bytes));
            let workload = WriteStreams { bytes, streams, seed: self.read.common.seed };
            return Ok(Prepared { workload: Box::new(workload), work, notes: vec![] });
        }
        let tree = files_of(sides, stop)?.largest(streams);
        if tree.files.len() < streams {
            let text = format!(
                "{} has only {} for {streams} streams",
                sides.target.display(),
                counted(tree.files.len() as u64, "file")
            );
            return Err(CliError::Failed(text));
        }
        if tree.files.values().any(|bytes| *bytes == 0) {
            let text = format!("{} has too few files that are not empty", sides.target.display());
            return Err(CliError::Failed(text));
        }
        sides.match_baseline(&tree, Match::AtLeast, self.read.copy, stop)?;
        let work = format!("{} in reads of 1 MiB, {ending}", described(&tree));
        let workload = ReadStreams { tree, cache: self.read.cache };
        Ok(Prepared { workload: Box::new(workload), work, notes: self.read.notes() })
    }
}

impl RandomArgs {
    fn prepare(&self, sides: &Sides, stop: &Stop) -> Result<Prepared, CliError> {
        let block_bytes = self.block.bytes();
        if !(1..=LARGEST_BLOCK).contains(&block_bytes) {
            return Err(CliError::Usage(format!("--block {} is not between 1B and 64MiB", self.block)));
        }
        let length = match self.count {
            Some(reads) => Length::Reads(reads),
            None => Length::Time(Duration::from_secs(self.seconds)),
        };
        let tree = files_of(sides, stop)?.largest(1);
        let found = described(&tree);
        let threads = self.threads as usize;
        let workload = RandomReads::new(
            tree.clone(),
            block_bytes as usize,
            threads,
            length,
            self.read.common.seed,
            self.read.cache,
        )?;
        sides.match_baseline(&tree, Match::AtLeast, self.read.copy, stop)?;
        let work = format!(
            "{found} in reads of {} by {}, {}",
            self.block,
            counted(u64::from(self.threads), "thread"),
            self.read.common.ending()
        );
        Ok(Prepared { workload: Box::new(workload), work, notes: self.read.notes() })
    }
}

impl MetaArgs {
    fn prepare(&self) -> Prepared {
        let (files, threads) = (counted(u64::from(self.count), "file"), counted(u64::from(self.threads), "thread"));
        let work = format!("{files} by {threads}, {}", self.common.ending());
        let workload = Meta { count: self.count as usize, threads: self.threads as usize };
        Prepared { workload: Box::new(workload), work, notes: vec![] }
    }
}

impl ListArgs {
    fn prepare(&self, sides: &Sides, stop: &Stop) -> Result<Prepared, CliError> {
        let tree = files_of(sides, stop)?;
        sides.match_baseline(&tree, Match::Same, self.copy, stop)?;
        let directories = counted(tree.directories.len() as u64 + 1, "directory");
        let files = counted(tree.files.len() as u64, "file");
        let work = format!("{files} in {directories} by 1 thread, {}", self.common.ending());
        Ok(Prepared { workload: Box::new(List), work, notes: vec![] })
    }
}

impl IngestArgs {
    fn prepare(&self) -> Result<Prepared, CliError> {
        let bytes = self.size.bytes();
        if bytes > LARGEST_INGESTED {
            let text = format!("--size {} is more than 1GiB: cv bench stream --write writes large files", self.size);
            return Err(CliError::Usage(text));
        }
        let (files, threads) = (counted(u64::from(self.count), "file"), counted(u64::from(self.threads), "thread"));
        let synced = if self.fsync { ", each synced" } else { "" };
        let work = format!("{files} of {} by {threads}{synced}, {}", self.size, self.common.ending());
        let workload = Ingest {
            count: self.count as usize,
            bytes: bytes as usize,
            writers: self.threads as usize,
            is_synced: self.fsync,
            seed: self.common.seed,
        };
        Ok(Prepared { workload: Box::new(workload), work, notes: vec![] })
    }
}
