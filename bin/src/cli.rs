//! The command line: one file for each family of commands, and `cli/help.txt` with what their help ends with.

mod bench;
mod cert;
mod conf;
mod connect;
mod doctor;
mod fs;
mod fsck;
mod gen_images;
mod gen_pages;
mod host_path;
mod index;
mod job;
mod load;
mod local;
mod mount;
mod node;
mod one_host;
mod persist;
mod process;
mod raft;
mod refresh;
mod report;
mod top;
mod view;
mod why;

use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

use self::connect::{Family, ResultArgs};
use crate::console;
use crate::error::CliError;
use crate::runtime::block_on;

/// A section for each command, below `# ` and its words. Lines of a paragraph are one there: a terminal wraps it where
/// it ends. What is indented is laid out by hand.
const HELP: &str = include_str!("cli/help.txt");

/// Cavern: a distributed cache tier for training data.
///
/// One executable starts every process (master, worker, fuse), attaches buckets and shows what goes on.
#[derive(Parser)]
#[command(name = "cv", version, disable_help_subcommand = true)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a master: the namespace.
    Master(process::ProcessArgs),
    /// Run a worker: the block cache of a host.
    Worker(process::ProcessArgs),
    /// Run a FUSE client: the mount point of a host; or a bucket as a directory, without a cluster.
    Fuse(Box<process::FuseArgs>),
    /// Run the embedded object store: the S3 protocol over a directory.
    DevS3(process::DevS3Args),
    /// Check or show the configuration.
    #[command(subcommand)]
    Conf(conf::ConfCommand),
    /// Certificates for the processes of a cluster: make an authority, have it sign, look at what there is.
    #[command(subcommand)]
    Cert(cert::CertCommand),
    /// Attach a bucket to the namespace, or list what is attached.
    Mount(Box<mount::MountArgs>),
    /// Detach a bucket from the namespace. The bucket itself is not touched.
    Umount(mount::UmountArgs),
    /// Compare a whole mount with its bucket, and show how far that is.
    Index(index::IndexArgs),
    /// Freeze what is below a directory, and have the kernel show that: views.
    View(Family<view::ViewCommand>),
    /// Look at files and directories of the namespace, and change those of fs-mode mounts.
    Fs(Family<fs::FsCommand>),
    /// Warm files and directories into the workers; say how much of them is cached, or drop that.
    Load(load::LoadArgs),
    /// Bring what the bucket of an fs-mode mount lacks to the bucket now.
    Export(job::ExportArgs),
    /// Follow, cancel and retry what `cv load` and `cv export` began.
    Job(Family<job::JobCommand>),
    /// How far the buckets of fs-mode mounts are behind the namespace.
    Persist(Family<persist::PersistCommand>),
    /// List the bucket again and apply what has changed, at once and everywhere.
    Refresh(refresh::RefreshArgs),
    /// Show the cluster: workers, cache, mounts, jobs.
    Report(report::ReportArgs),
    /// Show live what mounts, clients and workers do.
    Top(top::TopArgs),
    /// Say what is wrong with this host, its configuration and its cluster, and what to do about it.
    Doctor(Box<doctor::DoctorArgs>),
    /// Compare what the masters record with itself, with the workers and with the buckets, and mend what is safe.
    Fsck(fsck::FsckArgs),
    /// List the workers of the cluster, empty one, and take one out.
    Node(Family<node::NodeCommand>),
    /// The group of masters: show it, add and remove masters, have another one lead.
    Raft(Family<raft::RaftCommand>),
    /// The key that the masters encrypt credentials of buckets with: change it.
    #[command(subcommand)]
    Secrets(SecretsCommand),
    /// Where the time of a read goes: read the beginning of a file, and say what that waited for.
    Why(why::WhyArgs),
    /// Measure what a directory gives to programs, beside a baseline.
    #[command(subcommand)]
    Bench(bench::BenchCommand),
    /// Write synthetic JPEG images for tests and demonstrations.
    GenImages(gen_images::GenImagesArgs),
    /// Write the completions and man pages that packages have.
    #[command(hide = true)]
    GenPages(gen_pages::GenPagesArgs),
    /// A whole cluster on this host.
    #[command(subcommand)]
    Local(local::LocalCommand),
    /// Print the version.
    Version,
}

#[derive(Subcommand)]
enum SecretsCommand {
    /// Change the key.
    Rotate(ResultArgs),
}

/// Does what the arguments of this process ask for; ends it where they make no sense, or ask for help. What goes wrong
/// is reported by the error alone.
pub fn run() -> Result<(), CliError> {
    let Some(arguments) = one_host::helper_arguments(std::env::args_os().collect())? else { return Ok(()) };
    let matches = command().get_matches_from(&arguments);
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    cli.run().map_err(|error| host_path::explained(error, arguments.into_iter(), &matches))
}

/// The command line with all of its help.
fn command() -> clap::Command {
    let sections = HELP.strip_prefix("# ").unwrap_or(HELP).split("\n# ");
    sections.filter_map(|section| section.split_once('\n')).fold(Cli::command(), |cli, (name, text)| {
        let path: Vec<&str> = name.split(' ').skip(1).collect();
        with_help(cli, &path, unwrapped(text))
    })
}

/// A command with the help of what is at a path below it.
fn with_help(command: clap::Command, path: &[&str], text: String) -> clap::Command {
    match path {
        [] => command.after_help(text),
        [name, below @ ..] => command.mut_subcommand(name, |command| with_help(command, below, text)),
    }
}

/// Text whose paragraphs are a line each.
fn unwrapped(text: &str) -> String {
    let mut joined = String::new();
    let mut is_prose = false;
    for line in text.trim().lines() {
        let was_prose = std::mem::replace(&mut is_prose, !line.is_empty() && !line.starts_with(' '));
        if !joined.is_empty() {
            joined.push(if was_prose && is_prose { ' ' } else { '\n' });
        }
        joined.push_str(line);
    }
    joined
}

impl Cli {
    fn run(self) -> Result<(), CliError> {
        match self.command {
            Command::Master(args) => args.master(),
            Command::Worker(args) => args.worker(),
            Command::Fuse(args) => args.run(),
            Command::DevS3(args) => args.run(),
            Command::Conf(command) => command.run(),
            Command::Cert(command) => command.run(),
            Command::Mount(args) => block_on(args.run()),
            Command::Umount(args) => block_on(args.run()),
            Command::Index(args) => block_on(args.run()),
            Command::View(Family { result, command }) => block_on(command.run(&result)),
            Command::Fs(Family { result, command }) => block_on(command.run(&result)),
            Command::Load(args) => block_on(args.run()),
            Command::Export(args) => block_on(args.run()),
            Command::Job(Family { result, command }) => block_on(command.run(&result)),
            Command::Persist(Family { result, command }) => block_on(command.run(&result)),
            Command::Refresh(args) => block_on(args.run()),
            Command::Report(args) => block_on(args.run()),
            Command::Top(args) => block_on(args.run()),
            Command::Doctor(args) => block_on(args.run()),
            Command::Fsck(args) => block_on(args.run()),
            Command::Node(Family { result, command }) => block_on(command.run(&result)),
            Command::Raft(Family { result, command }) => block_on(command.run(&result)),
            Command::Secrets(SecretsCommand::Rotate(result)) => block_on(raft::rotate(&result)),
            Command::Why(args) => block_on(args.run()),
            Command::Bench(command) => command.run(),
            Command::GenImages(args) => args.run(),
            Command::GenPages(args) => args.run(command()),
            Command::Local(command) => command.run(),
            Command::Version => console::line(format_args!("cv {}", env!("CARGO_PKG_VERSION"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Command;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
    }

    #[test]
    fn help_shows_no_secret_key() {
        let mut command = command();
        let help = command.find_subcommand_mut("dev-s3").unwrap().render_long_help().to_string();
        assert!(help.contains("--secret-key") && !help.contains("cavern-secret"), "{help}");
    }

    fn every_command(command: &Command, visit: &mut impl FnMut(&Command)) {
        visit(command);
        command.get_subcommands().for_each(|below| every_command(below, visit));
    }

    /// A terminal wraps prose where it ends, once: a paragraph is one line, and what is laid out by hand fits into 80
    /// columns.
    #[test]
    fn help_is_wrapped_once() {
        let mut commands = 0;
        every_command(&command(), &mut |command| {
            commands += 1;
            let name = command.get_name();
            let text = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let is_prose = |line: &str| !line.is_empty() && !line.starts_with(' ');
            let lines: Vec<&str> = text.lines().collect();
            for pair in lines.windows(2) {
                let wrapped = is_prose(pair[0]) && is_prose(pair[1]);
                assert!(!wrapped, "the help of {name} is wrapped by hand after {:?}", pair[0]);
            }
            for line in lines.iter().filter(|line| !is_prose(line)) {
                assert!(line.chars().count() <= 80, "the help of {name} has a line that is too long: {line}");
            }
            for columns in [80, 120] {
                let help = command.clone().term_width(columns).render_long_help().to_string();
                let wide = help.lines().find(|line| line.chars().count() > columns);
                assert_eq!(wide, None, "the help of {name} at {columns} columns");
            }
        });
        assert!(commands > 50, "{commands}");
    }
}
