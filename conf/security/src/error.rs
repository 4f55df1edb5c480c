use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Why there is no secure connection to be had, or no certificate. Each text names the file and the next step.
#[derive(Debug, Error)]
pub enum SecurityError {
    #[error("cannot read {} ({source}): name a readable file with security.{key}", path.display())]
    Unreadable { key: &'static str, path: PathBuf, source: io::Error },
    #[error("cannot write {} ({source})", path.display())]
    Unwritable { path: PathBuf, source: io::Error },
    #[error("{} is there already, and nothing was changed: remove it, or choose another directory", .0.display())]
    Exists(PathBuf),
    #[error("{} (security.{key}): {reason}", path.display())]
    Unusable { key: &'static str, path: PathBuf, reason: String },
    #[error("{} can be read by everybody on this host: `chmod 600` it", .0.display())]
    OpenKey(PathBuf),
    #[error("\"{text}\" names no process of a cluster ({reason}): write it as cavern://CLUSTER/ROLE/NAME")]
    Identity { text: String, reason: &'static str },
    #[error("cannot read {} ({source}): it is part of an authority, which `cv cert init` makes", path.display())]
    NoAuthority { path: PathBuf, source: io::Error },
    #[error(
        "the authority in {} is that of the cluster \"{own}\", but cluster.name is \"{named}\": name the \
         configuration of the right cluster with --conf",
        directory.display()
    )]
    OtherCluster { directory: PathBuf, own: String, named: String },
    #[error(
        "the certificate would outlive the authority {}, which holds for {days} days yet: ask for no more, or make \
         another authority with `cv cert init`",
        authority.display()
    )]
    Outlives { authority: PathBuf, days: u64 },
    #[error("{}: {reason}", path.display())]
    Unrevoked { path: PathBuf, reason: String },
    #[error("{setting}: cannot use {} as a key: {reason}", path.display())]
    KeyEncryption { setting: &'static str, path: PathBuf, reason: String },
    #[error("the certificate cannot be made: {0}")]
    Making(String),
}

impl SecurityError {
    pub(crate) fn unusable(key: &'static str, path: &Path, reason: impl ToString) -> Self {
        Self::Unusable { key, path: path.to_owned(), reason: reason.to_string() }
    }
}
