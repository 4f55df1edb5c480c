//! Load for the metadata service of a master, by as many clients as one likes: the calls that a FUSE client makes,
//! without a kernel and without a cache, so that every operation costs the master what it costs.
//!
//! `echo` is the baseline: a gRPC service that does nothing, and the same number of clients that call it.
//!
//! `directory` makes the same operations as programs do, in a mount or in a directory of the local disk.

mod client;
mod directory;
mod echo;
mod rates;

use std::error::Error;
use std::path::PathBuf;
use std::time::Duration;

use cavern_conf::Config;
use cavern_security::Transport;
use clap::{Parser, Subcommand};

/// Files of the directory that is listed.
const LISTED: usize = 1000;

/// Errors of any kind end the program.
pub type Failure = Box<dyn Error + Send + Sync>;

#[derive(Parser)]
#[command(about = "Loads a master with metadata operations, and prints their rates and times as JSON")]
struct Options {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// A gRPC service that does nothing, until its standard input ends. Prints its address.
    Serve,
    /// Calls that service.
    Echo {
        address: String,
        #[command(flatten)]
        load: Load,
    },
    /// Makes files, looks at them, opens, lists, renames and removes them.
    Master {
        /// host:port of the master that leads.
        address: String,
        /// A directory of an fs-mode mount, in the namespace.
        directory: PathBuf,
        /// Clients besides that watch, and hear of nothing.
        #[arg(long, default_value_t = 0)]
        watchers: usize,
        /// The configuration of a cluster whose connections are secured.
        #[arg(long)]
        conf: Option<PathBuf>,
        #[command(flatten)]
        load: Load,
    },
    /// Does the same with system calls.
    Directory {
        path: PathBuf,
        #[command(flatten)]
        load: Load,
    },
}

#[derive(clap::Args, Clone, Copy)]
struct Load {
    /// Clients, each with one call under way.
    #[arg(long, default_value_t = 40)]
    tasks: usize,
    /// Of each kind of operation.
    #[arg(long, default_value_t = 4)]
    seconds: u64,
}

impl Load {
    fn time(self) -> Duration {
        Duration::from_secs(self.seconds)
    }
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    match Options::parse().what {
        What::Serve => echo::serve().await,
        What::Echo { address, load } => print(&echo::call(&address, load.tasks, load.time()).await?),
        What::Master { address, directory, watchers, conf, load } => {
            let directory = directory.to_str().ok_or("a path that is not UTF-8")?;
            let transport = match conf {
                Some(file) => Transport::of(&Config::load(Some(&file))?)?,
                None => Transport::Plain,
            };
            let _watching = client::watch(&address, &transport, directory, watchers).await?;
            print(&client::run(&address, &transport, directory, load.tasks, load.time()).await?)
        }
        What::Directory { path, load } => print(&directory::run(&path, load.tasks, load.time())?),
    }
}

fn print(report: &serde_json::Value) -> Result<(), Failure> {
    #[allow(clippy::print_stdout, reason = "the report is the program's purpose")]
    {
        println!("{}", serde_json::to_string(report)?);
    }
    Ok(())
}
