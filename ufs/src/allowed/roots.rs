//! The directories in which those of `file://` mounts must lie.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use cavern_conf::schema;

use crate::error::UfsError;

/// The directories in which those of mounts must lie.
#[derive(Clone, Debug)]
pub(crate) struct FileRoots(Arc<[PathBuf]>);

impl FileRoots {
    pub(crate) fn new(conf: &schema::Ufs) -> Self {
        Self(conf.file_roots.as_slice().into())
    }

    /// Whether every path is in one of them.
    pub(crate) fn have_all(&self) -> bool {
        self.0.iter().any(|root| root == Path::new("/"))
    }

    /// Whether a path without symbolic links is in one of them. Blocks on the disk where a root has links.
    pub(crate) fn have(&self, real: &Path) -> bool {
        // A path that is real begins with the name of a root only if that is real as well.
        self.0.iter().any(|root| real.starts_with(root))
            || self.0.iter().any(|root| root.canonicalize().is_ok_and(|root| real.starts_with(root)))
    }

    /// What is said of a mount's directory that is in none of them.
    pub(crate) fn refusal(&self, directory: &Path) -> UfsError {
        let roots: Vec<_> = self.0.iter().map(|root| root.display().to_string()).collect();
        let reason = match roots.is_empty() {
            true => "no directory may be mounted here".to_owned(),
            false => format!("it is not in {}", roots.join(" or ")),
        };
        UfsError::NotAllowed {
            what: format!("file://{}", directory.display()),
            reason: format!("{reason} (ufs.file_roots)"),
            remedy: "if it is meant, add a directory that it lies in to ufs.file_roots in the configuration of all \
                     masters, workers and clients, and start them again"
                .to_owned(),
        }
    }
}
