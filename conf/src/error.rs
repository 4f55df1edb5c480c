use std::fmt::{self, Display};
use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Where a value of the configuration came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SettingSource {
    /// Nobody set it.
    Default,
    /// Nobody set it, and it follows these limits of its process.
    Limits(String),
    /// A line of the file, counted from 1.
    File { path: PathBuf, line: usize },
    /// The environment variable of this name.
    Environment(String),
}

impl SettingSource {
    /// Whether somebody has set it.
    pub(crate) fn is_set(&self) -> bool {
        !matches!(self, Self::Default | Self::Limits(_))
    }
}

impl Display for SettingSource {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => out.write_str("default"),
            Self::Limits(limits) => write!(out, "auto, for {limits}"),
            Self::File { path, line } => write!(out, "{}:{line}", path.display()),
            Self::Environment(variable) => write!(out, "environment {variable}"),
        }
    }
}

/// One thing that is wrong with the configuration: where it stands, which key, and what would be right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    pub origin: SettingSource,
    /// `section.key`, or what was written in its place; empty where the file as a whole is meant.
    pub key: String,
    /// What is wrong, and what would be valid.
    pub message: String,
}

impl Display for Problem {
    /// `file:line: key: message`; without a place for a default, without a key for the file as a whole.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.origin {
            SettingSource::Default | SettingSource::Limits(_) => {}
            SettingSource::Environment(variable) => write!(out, "{variable}: ")?,
            file @ SettingSource::File { .. } => write!(out, "{file}: ")?,
        }
        if !self.key.is_empty() {
            write!(out, "{}: ", self.key)?;
        }
        out.write_str(&self.message)
    }
}

/// Why there is no configuration. The text is for the person who wrote it.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration file {} ({named_by}): {source}", path.display())]
    Unreadable { path: PathBuf, named_by: &'static str, source: io::Error },
    /// All that is wrong with what was read, one line each: what is misspelt in the order of the file, or else what
    /// cannot be, section by section; never empty.
    #[error("{}", lines(.0))]
    Rejected(Vec<Problem>),
}

impl ConfigError {
    /// The single problems; empty for a file that could not be read.
    pub fn problems(&self) -> &[Problem] {
        match self {
            Self::Unreadable { .. } => &[],
            Self::Rejected(problems) => problems,
        }
    }
}

fn lines(problems: &[Problem]) -> String {
    problems.iter().map(Problem::to_string).collect::<Vec<_>>().join("\n")
}
