//! `cv fuse`: the keeper of a mount, its daemon, and `cv fuse reload`.

use std::path::PathBuf;

use cavern_conf::{Config, Role, process};
use cavern_fuse::keeper::{Kept, reload};
use clap::{Args, Subcommand};

use super::process::{ProcessArgs, some_threads};
use crate::console;
use crate::error::{CliError, Context as _};
use crate::runtime::block_on;

#[derive(Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "The file may also be named by CV_CONF; \
CV_SECTION__KEY in the environment overrides single keys.

Examples:
  cv fuse --conf /etc/cavern/cluster.toml
  cv fuse reload                   after an upgrade, while the mount is in use

Two processes serve a mount. One keeps it; the other does the work, and another one goes on where it was when it dies. \
Programs with open files wait for that moment and notice nothing else. SIGTERM and SIGINT unmount and end both with \
exit code 0."
)]
pub struct FuseArgs {
    #[command(flatten)]
    process: ProcessArgs,
    /// The process that does the work; only `cv fuse` starts it.
    #[arg(long, hide = true)]
    kept: bool,
    /// What a mount had answered whose processes are dead is made, and nothing mounted; only `cv worker` starts it.
    #[arg(long, hide = true, conflicts_with = "kept")]
    replay: bool,
    #[command(subcommand)]
    command: Option<FuseCommand>,
}

#[derive(Subcommand)]
enum FuseCommand {
    /// Have a mount served by the executable that is installed now.
    Reload(ReloadArgs),
}

#[derive(Args)]
#[command(after_help = "Examples:
  cv fuse reload
  cv fuse reload --mount-point /mnt/other

What was written is brought to the workers, and a process of the installed executable goes on with open files, locks \
and whatever is under way. If it cannot, the old executable goes on, and this command says so. Files of cache-mode \
mounts that are being written must be closed first. What decides how a mount is made (fuse.path, no_open, xattrs, \
posix_acl, direct) stays as it was; everything else is read from the configuration anew.")]
struct ReloadArgs {
    /// Configuration file of the cluster, which says where the mount point is.
    #[arg(long, value_name = "FILE")]
    conf: Option<PathBuf>,
    /// The mount point, if it is not that of the configuration.
    #[arg(long, value_name = "DIR")]
    mount_point: Option<PathBuf>,
}

impl FuseArgs {
    pub fn run(self) -> Result<(), CliError> {
        match self.command {
            Some(FuseCommand::Reload(args)) => block_on(args.run()),
            None if self.replay => self.process.run(some_threads(), None, cavern_fuse::replay),
            None if self.kept => self.process.run(some_threads(), None, cavern_fuse::run_kept),
            None => keep(self.process),
        }
    }
}

/// Keeps a mount, or serves it where that is to be.
fn keep(process_args: ProcessArgs) -> Result<(), CliError> {
    let config = process_args.begin(Some(Role::Fuse))?;
    if !config.fuse.keep_mount {
        return process_args.serve(config, some_threads(), cavern_fuse::run);
    }
    // On this thread alone: the kernel ends a daemon with the thread that started it.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the asynchronous runtime")?;
    let arguments = std::env::args_os().skip(1).collect();
    let kept = runtime.block_on(async {
        let stop = process::shutdown_on_signals();
        cavern_fuse::keep(arguments, stop).await.map_err(|error| CliError::Failed(error.to_string()))
    })?;
    match kept {
        Kept::Exit(0) => Ok(()),
        // It has said why.
        Kept::Exit(code) => std::process::exit(code),
        Kept::Signal(signal) => {
            Err(CliError::Failed(format!("the process that served the mount was ended by signal {signal}")))
        }
    }
}

impl ReloadArgs {
    async fn run(self) -> Result<(), CliError> {
        let mount_point = match self.mount_point {
            Some(mount_point) => mount_point,
            None => Config::load(self.conf.as_deref())?.fuse.mount_point,
        };
        // Not by way of the mount itself, which may not answer.
        let mount_point = std::path::absolute(&mount_point).context("cannot find the mount point")?;
        let process = reload(&mount_point).await.map_err(|error| CliError::Failed(error.to_string()))?;
        console::line(format_args!("{} is served by process {process} now", mount_point.display()))
    }
}
