//! `cv local`: a whole cluster on this host.

use std::path::PathBuf;
use std::time::Duration;

use cavern_conf::counted;
use clap::{Args, Subcommand};
use tokio::time::Instant;

use crate::console;
use crate::error::CliError;
use crate::local::{self, ChildName, Cluster, DirArgs, UpOptions, seed};

/// How long a child has for what it has begun before it is killed.
const STOP_PATIENCE: Duration = Duration::from_secs(20);

#[derive(Subcommand)]
pub enum LocalCommand {
    /// Start a cluster: object store, masters, workers, FUSE client. Returns when the mount can be used.
    Up(UpArgs),
    /// Show the endpoints and which children run.
    Status(StatusArgs),
    /// Stop everything and unmount. What is stored stays for the next `up`.
    Down(DownArgs),
    /// Start a child that is not running, on the addresses it had; from now on it is started again when it ends by
    /// itself.
    Start(ChildArgs),
    /// Stop a child with SIGTERM; it stays so until `start` or `up`.
    Stop(ChildArgs),
    /// Kill a child with SIGKILL; it stays so until `start` or `up`.
    Kill(ChildArgs),
    /// Copy a directory of files into a bucket of the cluster's object store; the bucket is made if need be.
    Seed(SeedArgs),
    #[command(hide = true)]
    Supervise(SuperviseArgs),
}

#[derive(Args)]
pub struct UpArgs {
    #[command(flatten)]
    options: UpOptions,
    /// The result as JSON, as `status --json` has it.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub struct StatusArgs {
    #[command(flatten)]
    place: DirArgs,
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub struct DownArgs {
    #[command(flatten)]
    place: DirArgs,
    /// Remove everything the cluster has made as well. What else is in D stays, and is named.
    #[arg(long)]
    purge: bool,
}

#[derive(Args)]
pub struct ChildArgs {
    /// s3, master, worker or fuse, with its number from 0: worker1; without a number the first.
    #[arg(value_name = "ROLE[N]")]
    child: ChildName,
    #[command(flatten)]
    place: DirArgs,
}

#[derive(Args)]
pub struct SeedArgs {
    /// Directory to copy.
    #[arg(value_name = "DIR")]
    source: PathBuf,
    /// s3://BUCKET[/PREFIX]
    #[arg(value_name = "URI")]
    target: String,
    #[command(flatten)]
    place: DirArgs,
}

#[derive(Args)]
pub struct SuperviseArgs {
    child: ChildName,
    #[arg(long)]
    dir: PathBuf,
}

impl LocalCommand {
    pub fn run(self) -> Result<(), CliError> {
        match self {
            Self::Up(args) => args.run(),
            Self::Status(args) => {
                let cluster = args.place.cluster()?;
                let status = local::status(&cluster)?;
                if args.json { console::json(&status.view()) } else { status.print() }
            }
            Self::Down(args) => args.run(),
            Self::Start(args) => args.act("started", |cluster, name| local::start(cluster, name, STOP_PATIENCE)),
            Self::Stop(args) => args.act("stopped", |cluster, name| local::stop(cluster, name, STOP_PATIENCE)),
            Self::Kill(args) => args.act("killed", local::kill),
            Self::Seed(args) => {
                let copied = seed::seed(&args.place.cluster()?.s3, &args.source, &args.target)?;
                console::line(format_args!(
                    "{}, {} in {}",
                    counted(copied.objects, "object"),
                    console::size(copied.bytes),
                    args.target
                ))
            }
            Self::Supervise(args) => local::supervise(&args.dir, args.child),
        }
    }
}

impl UpArgs {
    fn run(self) -> Result<(), CliError> {
        let started = Instant::now();
        let cluster = local::up(&self.options)?;
        let status = local::status(&cluster)?;
        if self.json {
            return console::json(&status.view());
        }
        status.print()?;
        console::line(format_args!("up in {:.2} s", started.elapsed().as_secs_f64()))
    }
}

impl DownArgs {
    fn run(self) -> Result<(), CliError> {
        let directory = self.place.path();
        let Some(cluster) = Cluster::find(&directory)? else {
            return console::line(format_args!("no local cluster in {}: nothing to stop", directory.display()));
        };
        local::stop_all(&cluster, &cluster.children(), STOP_PATIENCE)?;
        if self.purge {
            let left = local::purge(&cluster, &directory)?;
            let name = directory.display();
            let what = if directory.exists() { "removed what it had made in" } else { "removed" };
            console::line(format_args!("stopped, and {what} {name}"))?;
            for path in left {
                console::line(format_args!("left {}: the cluster has not made it, or not all of it", path.display()))?;
            }
            return Ok(());
        }
        console::line(format_args!("stopped; `cv local up` continues with what {} holds", directory.display()))
    }
}

impl ChildArgs {
    fn act(self, done: &str, action: impl Fn(&Cluster, ChildName) -> Result<(), CliError>) -> Result<(), CliError> {
        let cluster = self.place.cluster()?;
        cluster.expect(self.child)?;
        action(&cluster, self.child)?;
        console::line(format_args!("{} {done}", self.child))
    }
}
