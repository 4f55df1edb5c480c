//! `cv conf`: what the configuration says.

use std::path::PathBuf;

use cavern_conf::{Effective, Role};
use cavern_security::check_files;
use clap::{Args, Subcommand};

use crate::console;
use crate::error::CliError;

#[derive(Subcommand)]
pub enum ConfCommand {
    /// Read the configuration as a process would, and say what is wrong with it.
    Check(ConfArgs),
    /// Print every key with its effective value and where that comes from, as a configuration file.
    Show(ShowArgs),
}

#[derive(Args)]
pub struct ConfArgs {
    /// Configuration file; else CV_CONF, else /etc/cavern/cluster.toml, else the defaults.
    #[arg(long, value_name = "FILE")]
    conf: Option<PathBuf>,
}

#[derive(Args)]
pub struct ShowArgs {
    #[command(flatten)]
    file: ConfArgs,
    /// The defaults, whatever a file or the environment says.
    #[arg(long, conflicts_with = "conf")]
    defaults: bool,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

impl ConfCommand {
    pub fn run(self) -> Result<(), CliError> {
        match self {
            Self::Check(file) => {
                let effective = Effective::load(file.conf.as_deref())?;
                // One file serves all hosts, so it is to be good for whatever may run there.
                let checked = Role::ALL.map(|role| effective.check_reach(role));
                let problems = checked.iter().filter_map(|checked| checked.as_ref().err()).map(ToString::to_string);
                // A process of this host would read them.
                let files = check_files(&effective.config);
                let problems: Vec<String> = problems.chain(files.iter().map(ToString::to_string)).collect();
                if !problems.is_empty() {
                    return Err(CliError::Usage(problems.join("\n")));
                }
                console::line(format_args!("{}: the configuration is good", source(&effective)))
            }
            Self::Show(args) => {
                let file = args.file.conf.as_deref();
                let effective = if args.defaults { Effective::defaults() } else { Effective::load(file)? };
                if args.json { console::json(&effective.config) } else { console::raw(effective.show().as_bytes()) }
            }
        }
    }
}

/// Where a configuration came from.
pub fn source(effective: &Effective) -> String {
    let file = match &effective.file {
        Some(path) => path.display().to_string(),
        None => "the defaults, since no file is named and there is no /etc/cavern/cluster.toml".to_owned(),
    };
    let variables: Vec<&str> = effective.variables().collect();
    if variables.is_empty() { file } else { format!("{file}, with {} of the environment", variables.join(", ")) }
}
