//! What several of the commands take, and what they answer.

use cavern_conf::counted;
use clap::Args;
use serde::Serialize;

use crate::cli::connect::{ClusterArgs, ResultArgs};
use crate::console;
use crate::error::CliError;

#[derive(Args)]
pub struct PathArgs {
    /// Absolute path in the namespace.
    #[arg(value_name = "PATH")]
    pub path: String,
    #[command(flatten)]
    pub result: ResultArgs,
}

/// A directory that has, or is to have, something of its own.
#[derive(Args)]
pub struct DirectoryArgs {
    /// Absolute path of a directory in an fs-mode mount.
    #[arg(value_name = "PATH")]
    pub path: String,
    #[command(flatten)]
    pub cluster: ClusterArgs,
}

/// What was copied, one way or the other.
#[derive(Default, Serialize)]
pub struct Copied {
    pub files: u64,
    pub bytes: u64,
}

impl Copied {
    pub fn show(&self, args: &ResultArgs) -> Result<(), CliError> {
        args.show(self, |copied| {
            console::line(format_args!("{}, {}", counted(copied.files, "file"), console::size(copied.bytes)))
        })
    }
}
