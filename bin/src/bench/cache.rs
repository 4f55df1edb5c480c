//! What the kernel may still have of the files when a round begins.

use std::fs::File;
use std::path::Path;

use clap::ValueEnum;
use rustix::fs::{Advice, fadvise};
use serde::Serialize;

use super::tree::Tree;
use crate::error::{CliError, Context as _};

/// The same for the target and the baseline.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CachePolicy {
    /// Whatever the kernel has of the files stays.
    Keep,
    /// The kernel's pages of each file that is read are dropped before each round. On a mount these are the pages of
    /// the mount, not those of what is behind it, as a worker's block files.
    Drop,
}

impl CachePolicy {
    /// Makes the files of a tree ready for a round. A file that is not there any more is left to the round to miss.
    ///
    /// # Errors
    /// When the kernel refuses the advice.
    pub fn prepare(self, directory: &Path, tree: &Tree) -> Result<(), CliError> {
        if self == Self::Keep {
            return Ok(());
        }
        for path in tree.files.keys() {
            let path = directory.join(path);
            let Ok(file) = File::open(&path) else { continue };
            fadvise(&file, 0, None, Advice::DontNeed)
                .context(format_args!("cannot drop the pages of {}", path.display()))?;
        }
        Ok(())
    }
}
