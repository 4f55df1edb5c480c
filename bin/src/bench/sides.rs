//! The directories that are measured.

use std::fs;
use std::path::{Path, PathBuf};

use super::copy::copy;
use super::stop::Stop;
use super::tree::{Match, Tree};
use crate::console;
use crate::error::{CliError, Context as _};

/// The target and, if there is one, the baseline.
pub struct Sides {
    pub target: PathBuf,
    pub baseline: Option<PathBuf>,
}

impl Sides {
    /// # Errors
    /// When one of them is no directory, or they are not apart.
    pub fn new(target: PathBuf, baseline: Option<PathBuf>) -> Result<Self, CliError> {
        let place = existing(&target)?;
        if let Some(baseline) = &baseline {
            let other = existing(baseline)?;
            if place.starts_with(&other) || other.starts_with(&place) {
                let text = format!(
                    "{} and the baseline {} are not apart: name two directories of which none is in the other",
                    target.display(),
                    baseline.display()
                );
                return Err(CliError::Usage(text));
            }
        }
        Ok(Self { target, baseline })
    }

    /// Sees that the baseline has the files of a tree, which the target has; with `fill` they are copied into a
    /// baseline that is empty.
    ///
    /// # Errors
    /// When it has not, by the end.
    pub fn match_baseline(&self, tree: &Tree, how: Match, fill: bool, stop: &Stop) -> Result<(), CliError> {
        let Some(baseline) = &self.baseline else { return Ok(()) };
        let mut found = Tree::walk(baseline, stop)?;
        if fill && found.is_empty() {
            console::remark(format_args!("copying {} to {}", console::size(tree.bytes()), baseline.display()));
            copy(tree, &self.target, baseline, stop)?;
            found = Tree::walk(baseline, stop)?;
        }
        tree.difference(&found, how).map_or(Ok(()), |difference| {
            let next = match fill {
                true => "--copy fills an empty directory only: name one",
                false => "copy them, or name an empty directory and have --copy fill it",
            };
            let (baseline, target) = (baseline.display(), self.target.display());
            Err(CliError::Failed(format!("{baseline} has not the files of {target}: {difference}. Next: {next}")))
        })
    }
}

/// The path of a directory without symbolic links.
fn existing(path: &Path) -> Result<PathBuf, CliError> {
    let attributes = fs::metadata(path).map_err(|error| {
        let text = format!("cannot measure {}: {error}", path.display());
        if error.kind() == std::io::ErrorKind::NotFound { CliError::NotFound(text) } else { CliError::Failed(text) }
    })?;
    if !attributes.is_dir() {
        return Err(CliError::Usage(format!("{} is not a directory: name the one that it is in", path.display())));
    }
    path.canonicalize().context(format_args!("cannot find out what {} is", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_are_apart() {
        let top = tempfile::tempdir().unwrap();
        let place = |name: &str| top.path().join(name);
        fs::create_dir_all(place("a/in")).unwrap();
        fs::create_dir(place("b")).unwrap();
        std::os::unix::fs::symlink(place("a"), place("link")).unwrap();
        assert!(Sides::new(place("a"), Some(place("b"))).is_ok());
        for other in ["a", "a/in", "link", "b/../a/in"] {
            let refused = Sides::new(place("a"), Some(place(other))).err().unwrap().to_string();
            assert!(refused.contains("not apart"), "{other}: {refused}");
        }
        fs::write(place("file"), "").unwrap();
        let refused = |path: &str| Sides::new(place(path), None).err().unwrap();
        assert!(matches!(refused("none"), CliError::NotFound(text) if text.contains("/none")));
        assert!(matches!(refused("file"), CliError::Usage(text) if text.contains("is not a directory")));
    }
}
