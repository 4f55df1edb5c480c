//! `cv bench`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use cavern_conf::{ByteSize, counted, host, process};
use clap::{Args, Subcommand, ValueEnum};

use crate::bench::workloads::{self, Length};
use crate::bench::{
    Heading, Match, Phase, Report, Sides, Stop, Tree, Turn, Workload, check_picture, run_rounds, write_picture,
};
use crate::console::{self, Progress};
use crate::error::{CliError, Context as _};
use crate::runtime::block_on;

const ROUNDS: std::ops::RangeInclusive<i64> = 1..=1000;
const THREADS: std::ops::RangeInclusive<i64> = 1..=1024;
/// Files of one round.
const COUNT: std::ops::RangeInclusive<i64> = 1..=1_000_000;
const LARGEST_BLOCK: u64 = 64 << 20;

#[derive(Subcommand)]
pub enum BenchCommand {
    /// Read every file below a directory, in a shuffled order.
    Files(FilesArgs),
    /// Read large files from their beginning to their end, in pieces of 1 MiB.
    Stream(StreamArgs),
    /// Read small blocks anywhere in the largest file below a directory.
    Random(RandomArgs),
    /// Create, stat, open, rename and unlink files in a new directory.
    Meta(MadeArgs),
    /// List a tree: its names, then its names and attributes.
    List(CommonArgs),
    /// Write files into a new directory.
    Ingest(IngestArgs),
}

/// Options of all workloads.
#[derive(Args)]
pub struct CommonArgs {
    /// The directory to measure: of a mount, or any other.
    path: PathBuf,
    /// Measure this directory in turn with the other, and print the ratio.
    #[arg(long, value_name = "DIR")]
    baseline: Option<PathBuf>,
    /// Rounds for each directory.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(ROUNDS))]
    rounds: u32,
    /// Of orders, offsets and contents.
    #[arg(long, value_name = "N", default_value_t = 42)]
    seed: u64,
    /// The result as JSON, with every round.
    #[arg(long)]
    json: bool,
    /// Draw the result into this new file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// Options of what reads the content of files.
#[derive(Args)]
struct ReadArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// What happens to the kernel's pages of the files that are read, before each round and on both sides alike.
    #[arg(long, value_enum, default_value_t = CachePolicy::Keep)]
    cache: CachePolicy,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum CachePolicy {
    /// Whatever the kernel has of the files stays.
    Keep,
    /// The kernel's pages of each file that is read are dropped before each round. On a mount these are the pages of
    /// the mount, not those of what is behind it, as a worker's block files.
    Drop,
}

#[derive(Args)]
pub struct FilesArgs {
    #[command(flatten)]
    read: ReadArgs,
    /// Readers at the same time.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(THREADS))]
    threads: u32,
}

#[derive(Args)]
pub struct StreamArgs {
    #[command(flatten)]
    read: ReadArgs,
    /// Files at the same time, the largest of the directory, each with a thread of its own.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(THREADS))]
    streams: u32,
}

#[derive(Args)]
pub struct RandomArgs {
    #[command(flatten)]
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

/// Options of what makes files.
#[derive(Args)]
pub struct MadeArgs {
    #[command(flatten)]
    common: CommonArgs,
    /// Threads at the same time, each in a folder of its own.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(THREADS))]
    threads: u32,
    /// Files of a round.
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(COUNT))]
    count: u32,
}

#[derive(Args)]
pub struct IngestArgs {
    #[command(flatten)]
    made: MadeArgs,
    /// Of each file.
    #[arg(long, value_name = "SIZE", default_value = "50KB")]
    size: ByteSize,
    /// Sync each file before it is closed.
    #[arg(long)]
    fsync: bool,
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
        let (name, common) = self.common();
        let CommonArgs { rounds, seed, json, svg, .. } = common;
        if let Some(svg) = svg {
            check_picture(svg)?;
        }
        let sides = Sides::new(common.path.clone(), common.baseline.clone())?;
        let Prepared { workload, work, notes } = self.prepare(&sides, stop)?;
        let mut progress = Progress::new(false);
        let (each, in_turn) = if sides.baseline.is_some() { (2, " in turn") } else { (1, "") };
        let (mut begun, whole) = (0, u64::from(*rounds) * each);
        let done = run_rounds(&workload, &sides, (*rounds, *seed), stop, |number, side| {
            progress.show(Some((begun, whole)), format!("round {} of {rounds}, {}", number + 1, side.name()));
            begun += 1;
        });
        drop(progress);
        let work = format!("{work}, {}{in_turn}, seed {seed}", counted(u64::from(*rounds), "round"));
        let heading = Heading { workload: name, work, notes };
        let report = Report::new(heading, &sides, &done?);
        if *json {
            console::json(&report)?;
        } else {
            report.print()?;
        }
        if let Some(svg) = svg {
            write_picture(&report, svg)?;
        }
        report.check()
    }

    /// What the workload is called, and the options that all have.
    fn common(&self) -> (&'static str, &CommonArgs) {
        match self {
            Self::Files(args) => ("files", &args.read.common),
            Self::Stream(args) => ("stream", &args.read.common),
            Self::Random(args) => ("random", &args.read.common),
            Self::Meta(args) => ("meta", &args.common),
            Self::List(common) => ("list", common),
            Self::Ingest(args) => ("ingest", &args.made.common),
        }
    }

    fn prepare(&self, sides: &Sides, stop: &Stop) -> Result<Prepared, CliError> {
        Ok(match self {
            Self::Files(FilesArgs { read, threads }) => {
                let tree = files_of(sides, Match::Same, usize::MAX, stop)?;
                let work = format!("{} by {}", described(&tree), counted(u64::from(*threads), "thread"));
                let threads = *threads as usize;
                read.prepared(tree, work, move |turn, tree| workloads::files(turn, tree, threads))
            }
            Self::Stream(StreamArgs { read, streams }) => {
                let streams = *streams as usize;
                let tree = files_of(sides, Match::AtLeast, streams, stop)?;
                let files = tree.files.values().filter(|bytes| **bytes > 0).count();
                if files < streams {
                    let (target, files) = (sides.target.display(), counted(files as u64, "file"));
                    let text = format!("{target} has only {files} with any bytes, for {streams} streams");
                    return Err(CliError::Failed(text));
                }
                let work = format!("{} in reads of 1 MiB", described(&tree));
                read.prepared(tree, work, workloads::stream)
            }
            Self::Random(args) => args.prepare(sides, stop)?,
            Self::Meta(made) => {
                let (work, threads, count) = (made.work(""), made.threads as usize, made.count as usize);
                let workload: Workload = Box::new(move |turn| workloads::meta(turn, count, threads));
                Prepared { workload, work, notes: vec![] }
            }
            Self::List(_) => {
                let tree = files_of(sides, Match::Same, usize::MAX, stop)?;
                let directories = counted(tree.directories.len() as u64 + 1, "directory");
                let work = format!("{} in {directories} by 1 thread", counted(tree.files.len() as u64, "file"));
                Prepared { workload: Box::new(workloads::list), work, notes: vec![] }
            }
            Self::Ingest(IngestArgs { made, size, fsync }) => {
                let (threads, count, bytes, fsync) = (made.threads as usize, made.count as usize, size.bytes(), *fsync);
                let synced = if fsync { ", each synced" } else { "" };
                let work = format!("{}{synced}", made.work(&format!(" of {size}")));
                let workload: Workload = Box::new(move |turn| workloads::ingest(turn, count, bytes, threads, fsync));
                Prepared { workload, work, notes: vec![] }
            }
        })
    }
}

/// A workload with what there is to say of it.
struct Prepared {
    workload: Workload,
    /// What there is to read or to write.
    work: String,
    notes: Vec<String>,
}

/// The files of the target, no more of them than the largest `count`; the baseline has them, too.
fn files_of(sides: &Sides, how: Match, count: usize, stop: &Stop) -> Result<Tree, CliError> {
    let tree = Tree::walk(&sides.target, stop)?;
    if tree.files.is_empty() {
        let text = format!("there is no file below {}: name a directory that has some", sides.target.display());
        return Err(CliError::Failed(text));
    }
    let tree = if count < tree.files.len() { tree.largest(count) } else { tree };
    sides.match_baseline(&tree, how, stop)?;
    Ok(tree)
}

impl ReadArgs {
    /// A workload that reads files of a tree.
    fn prepared(
        &self,
        tree: Tree,
        work: String,
        round: impl Fn(&Turn<'_>, &Tree) -> Result<Vec<Phase>, CliError> + 'static,
    ) -> Prepared {
        let (drops, note) = match self.cache {
            CachePolicy::Keep => (false, "--cache keep: what the kernel has of the files stays between rounds"),
            CachePolicy::Drop => (
                true,
                "--cache drop: the kernel's pages of these files were dropped before each round; on a mount not the \
                 pages of what is behind it",
            ),
        };
        let workload: Workload = Box::new(move |turn| {
            if drops {
                tree.drop_pages(turn.directory)?;
            }
            round(turn, &tree)
        });
        Prepared { workload, work, notes: vec![note.to_owned()] }
    }
}

impl RandomArgs {
    fn prepare(&self, sides: &Sides, stop: &Stop) -> Result<Prepared, CliError> {
        let block_bytes = self.block.bytes();
        if !(1..=LARGEST_BLOCK).contains(&block_bytes) {
            return Err(CliError::Usage(format!("--block {} is not between 1B and 64MiB", self.block)));
        }
        let tree = files_of(sides, Match::AtLeast, 1, stop)?;
        let largest = tree.files.first_key_value().map(|(path, bytes)| (path.clone(), *bytes));
        let (path, bytes) = largest.unwrap_or_default();
        if bytes < 2 * block_bytes {
            return Err(CliError::Failed(format!(
                "the largest file, {}, has {bytes} bytes: random reads need one of two blocks of {block_bytes} bytes \
                 at least",
                path.display()
            )));
        }
        let length = match self.count {
            Some(reads) => Length::Reads(reads),
            None => Length::Time(Duration::from_secs(self.seconds)),
        };
        let threads = counted(u64::from(self.threads), "thread");
        let work = format!("{} in reads of {} by {threads}", described(&tree), self.block);
        let (block_bytes, threads) = (block_bytes as usize, self.threads as usize);
        let round = move |turn: &Turn<'_>, _: &Tree| {
            workloads::random(turn, (path.as_path(), bytes), block_bytes, threads, length)
        };
        Ok(self.read.prepared(tree, work, round))
    }
}

impl MadeArgs {
    fn work(&self, of: &str) -> String {
        format!("{}{of} by {}", counted(u64::from(self.count), "file"), counted(u64::from(self.threads), "thread"))
    }
}

fn described(tree: &Tree) -> String {
    format!("{} with {}", counted(tree.files.len() as u64, "file"), console::size(tree.bytes()))
}
