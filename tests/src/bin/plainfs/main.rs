//! The baseline of the benchmarks: the least that a FUSE file system over a local directory can be, done properly. It
//! caches nothing of its own and knows no cluster; what our mount loses against it is what Cavern costs.

mod answer;
mod handles;
mod read_only;
mod replaced;
mod writable;

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::thread;

use clap::Parser;
use fuser::{BackgroundSession, Config, MountOption, Session, SessionACL};
use rustix::fs::Mode;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::signal::unix::{SignalKind, signal};

use read_only::{Opens, ReadOnly};
use replaced::{OldVersion, Replaced};
use writable::Writable;

#[derive(Parser)]
#[command(about = "Shows a directory through a minimal FUSE file system, until SIGINT or SIGTERM")]
struct Options {
    source: PathBuf,
    mount_point: PathBuf,
    /// May be written; otherwise it is read-only, and nothing in the source may change.
    #[arg(long)]
    writable: bool,
    /// Event loops, each with a descriptor of its own.
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Kernel read-ahead in KiB.
    #[arg(long, default_value_t = 1024)]
    readahead: u32,
    /// Drop a file's pages each time it is opened.
    #[arg(long)]
    drop_pages: bool,
    /// Have the kernel open files by itself: it sends no OPEN and no RELEASE.
    #[arg(long, conflicts_with_all = ["writable", "drop_pages"])]
    no_open: bool,
    /// Show the source's files with contents of their own, and replace those that standard input names, one a line.
    #[arg(long, value_enum, value_name = "OLD", requires = "no_open")]
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "gone")]
    replaced: Option<OldVersion>,
}

fn main() -> io::Result<()> {
    let options = Options::parse();
    let source = options.source.canonicalize()?;
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName("plainfs".to_owned()),
        MountOption::Subtype("plainfs".to_owned()),
        if options.writable { MountOption::RW } else { MountOption::RO },
        MountOption::DefaultPermissions,
    ];
    config.acl = SessionACL::All;
    config.n_threads = Some(options.threads);
    config.clone_fd = true;
    let session = begin(&options, source, &config)?;
    set_read_ahead(&options)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let (mut interrupted, mut terminated) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        tokio::select! { _ = interrupted.recv() => {} _ = terminated.recv() => {} }
        io::Result::Ok(())
    })?;
    session.umount_and_join()
}

fn begin(options: &Options, source: PathBuf, config: &Config) -> io::Result<BackgroundSession> {
    if options.writable {
        rustix::process::umask(Mode::empty());
        raise_descriptors()?;
        return Session::new(Writable::new(source, options.drop_pages)?, &options.mount_point, config)?.spawn();
    }
    if let Some(old) = options.replaced {
        let replaced = Replaced::new(&source, old)?;
        let session = Session::new(replaced.clone(), &options.mount_point, config)?.spawn()?;
        let notifier = session.notifier();
        // It ends with its input, or with the process.
        thread::Builder::new().name("replacements".to_owned()).spawn(move || replaced.follow(&notifier))?;
        return Ok(session);
    }
    let opens = match (options.no_open, options.drop_pages) {
        (true, _) => Opens::Never,
        (false, true) => Opens::DropPages,
        (false, false) => Opens::KeepPages,
    };
    Session::new(ReadOnly::new(source, opens)?, &options.mount_point, config)?.spawn()
}

/// The kernel grants 128 KiB by itself.
fn set_read_ahead(options: &Options) -> io::Result<()> {
    let device = options.mount_point.metadata()?.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    std::fs::write(format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb"), options.readahead.to_string())
}

/// As many descriptors as the host allows.
fn raise_descriptors() -> io::Result<()> {
    let limit = getrlimit(Resource::Nofile);
    Ok(setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })?)
}
