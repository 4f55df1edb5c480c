//! `cv local`: a whole cluster on this host.

use std::path::PathBuf;
use std::time::Duration;

use cavern_conf::counted;
use clap::{Args, Subcommand};
use tokio::time::Instant;

use crate::console::{self, or_dash};
use crate::error::CliError;
use crate::local::{self, ChildName, ChildStatus, Cluster, ClusterStatus, Restart, UpOptions, seed};

/// How long a child has for what it has begun before it is killed.
const STOP_PATIENCE: Duration = Duration::from_secs(20);

#[derive(Subcommand)]
pub enum LocalCommand {
    /// Start a cluster: object store, masters, workers, FUSE client. Returns when the mount can be used.
    #[command(after_help = "Examples:
  cv local up
  cv local up --dir /tmp/a --workers 3 --mount-point /mnt/a --conf my.toml
  cv local up --masters 3
  cv local up --secure

On a cluster that is up, starts whatever is not running and adds masters, workers and mount points; masters that are \
added are taken in by the others, which serve meanwhile. \
Addresses, directories and certificates are chosen by `cv local`; all else of --conf is honoured. \
A process that ends by itself is started again, after a pause that doubles up to 30 s; `cv local status` tells of it.")]
    Up(UpArgs),
    /// Show the endpoints and which children run.
    #[command(after_help = "Examples:
  cv local status
  cv local status --json | jq -r .s3.endpoint")]
    Status(StatusArgs),
    /// Stop everything and unmount. What is stored stays for the next `up`.
    Down(DownArgs),
    /// Start a child that is not running, on the addresses it had; from now on it is started again when it ends by
    /// itself.
    #[command(after_help = "Examples:
  cv local start worker1     the second worker
  cv local start fuse")]
    Start(ChildArgs),
    /// Stop a child with SIGTERM; it stays so until `start` or `up`.
    Stop(ChildArgs),
    /// Kill a child with SIGKILL; it stays so until `start` or `up`.
    Kill(ChildArgs),
    /// Copy a directory of files into a bucket of the cluster's object store; the bucket is made if need be.
    #[command(after_help = "Examples:
  cv gen-images /tmp/images --count 2000
  cv local seed /tmp/images s3://demo/images")]
    Seed(SeedArgs),
    #[command(hide = true)]
    Keep(KeepArgs),
}

#[derive(Args)]
pub struct DirArgs {
    /// Directory of the cluster [default: ~/.cavern/local].
    #[arg(long, visible_alias = "local", value_name = "D")]
    dir: Option<PathBuf>,
}

#[derive(Args)]
pub struct UpArgs {
    #[command(flatten)]
    place: DirArgs,
    /// Where the namespace is mounted [default: D/mnt]; several times for several FUSE clients.
    #[arg(long, value_name = "M")]
    mount_point: Vec<PathBuf>,
    /// How many masters: 1, 3 or 5 [default: as many as there were, or 1].
    #[arg(long, value_name = "N", value_parser = number_of_masters)]
    masters: Option<usize>,
    /// How many workers [default: as many as there were, or 1].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    workers: Option<u16>,
    /// Configuration file for all processes; addresses and directories in it are replaced. Later starts use it as
    /// well, unless they name another, or CV_CONF does.
    #[arg(long, value_name = "F")]
    conf: Option<PathBuf>,
    /// Mutual TLS between all processes of a new cluster, with an authority and certificates of its own in
    /// D/certificates. A cluster stays as it was made.
    #[arg(long)]
    secure: bool,
    /// The object store shows its statistics, and takes faults, at a port of its own, for whoever has the token that
    /// `status --json` names the file of. Later starts have it as well.
    #[arg(long)]
    s3_admin: bool,
    /// What becomes of a child that ends though nobody has stopped it [default: as it was, or on-failure].
    #[arg(long, value_name = "WHEN", value_enum)]
    restart: Option<Restart>,
    /// Seconds that each child has to become ready; a master that gets on, with what others send it, has longer.
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    timeout: u64,
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
pub struct KeepArgs {
    child: ChildName,
    #[arg(long)]
    dir: PathBuf,
}

fn number_of_masters(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number @ (1 | 3 | 5)) => Ok(number),
        Ok(2 | 4) => Err("an even number survives no more failures than one less: 1, 3 or 5".to_owned()),
        _ => Err("there are 1, 3 or 5".to_owned()),
    }
}

impl DirArgs {
    fn path(&self) -> PathBuf {
        self.dir.clone().unwrap_or_else(local::default_directory)
    }

    fn cluster(&self) -> Result<Cluster, CliError> {
        Cluster::load(&self.path())
    }
}

impl LocalCommand {
    pub fn run(self) -> Result<(), CliError> {
        match self {
            Self::Up(args) => args.run(),
            Self::Status(args) => {
                let status = local::status(&args.place.cluster()?)?;
                console::show(args.json, &status, print)
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
            Self::Keep(args) => local::keep(&args.dir, args.child),
        }
    }
}

impl UpArgs {
    fn run(self) -> Result<(), CliError> {
        let started = Instant::now();
        let cluster = local::up(&UpOptions {
            directory: self.place.path(),
            mount_points: self.mount_point,
            masters: self.masters,
            workers: self.workers.map(usize::from),
            conf: self.conf,
            restart: self.restart,
            secure: self.secure,
            s3_admin: self.s3_admin,
            patience: Duration::from_secs(self.timeout),
        })?;
        let status = local::status(&cluster)?;
        console::show(self.json, &status, |status| {
            print(status)?;
            console::line(format_args!("up in {:.2} s", started.elapsed().as_secs_f64()))
        })
    }
}

impl DownArgs {
    fn run(self) -> Result<(), CliError> {
        let directory = self.place.path();
        let Some(cluster) = Cluster::find(&directory)? else {
            return console::line(format_args!("no local cluster in {}: nothing to stop", directory.display()));
        };
        local::down(&cluster, STOP_PATIENCE)?;
        if self.purge {
            let purged = local::purge(&cluster, &directory)?;
            let name = directory.display();
            let what = if purged.is_whole { "removed" } else { "removed what it had made in" };
            console::line(format_args!("stopped, and {what} {name}"))?;
            for path in purged.left {
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

/// The endpoints and what the children do, for people.
fn print(status: &ClusterStatus) -> Result<(), CliError> {
    let admin = status.s3.admin.as_ref().map(|admin| format!(" admin={admin}")).unwrap_or_default();
    let mut rows = vec![row(&status.s3.child, format!("{}{admin}", status.s3.endpoint))];
    rows.extend(status.masters.iter().map(|master| {
        let [name, state, pid, endpoints] = row(&master.child, format!("grpc={} http={}", master.grpc, master.http));
        let role = master.role.map(|role| format!(", {}", role.as_str())).unwrap_or_default();
        [name, format!("{state}{role}"), pid, endpoints]
    }));
    let workers = status.workers.iter();
    rows.extend(workers.map(|worker| row(&worker.child, format!("data={} http={}", worker.data, worker.http))));
    rows.extend(status.fuse.iter().map(|fuse| {
        let mounted = if fuse.mounted { "" } else { " (not mounted)" };
        row(&fuse.child, format!("{}{mounted} http={}", fuse.mount_point.display(), fuse.http))
    }));
    console::table(["CHILD", "STATE", "PID", "ENDPOINTS"], rows)?;
    if status.restart == Restart::OnFailure && status.children().any(|child| child.pid.is_some() && !child.supervised) {
        console::line(
            "the keeper of a child is gone: `cv local up` gives it another, which starts the child again if it ends",
        )?;
    }
    console::line(format_args!("mount point    {}", status.mount_point.display()))?;
    console::line(format_args!("S3 access key  {}  secret key {}", status.s3.access_key, status.s3.secret_key))?;
    console::line(format_args!("configuration  {}", status.conf.display()))?;
    if status.secure {
        console::line("connections    mutual TLS: the configuration has the certificate of an admin")?;
    }
    Ok(())
}

fn row(child: &ChildStatus, endpoints: String) -> [String; 4] {
    let mut state = child.state.to_owned();
    if let Some(exit) = child.exit {
        state = format!("{state} ({exit})");
    }
    if let Some(next) = child.next_try_ms {
        state = format!("{state}, next try in {:.1} s", next as f64 / 1000.0);
    }
    if child.restarts > 0 {
        let last = child.last_exit.map(|exit| format!(", last: {exit}")).unwrap_or_default();
        state = format!("{state}, restarts: {}{last}", child.restarts);
    }
    [child.name.to_string(), state, or_dash(child.pid), endpoints]
}
