//! A directory for what a workload writes: made by it, and gone with it.
//!
//! It is removed whole, with what others have put into it meanwhile. What was there before is not in it: one `mkdir`
//! makes it, under a name that nothing had.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::console;
use crate::error::{CliError, Context as _};

/// A directory that was not there before, with a folder for each worker.
pub struct Scratch {
    folders: Vec<PathBuf>,
}

impl Scratch {
    /// Where so many files are to be that the workers share, each in its folder. Their names begin with `letter`.
    pub fn files(&self, count: usize, letter: char) -> Vec<Vec<PathBuf>> {
        let of_worker = |(worker, folder): (usize, &PathBuf)| {
            let numbers = (worker..count).step_by(self.folders.len());
            numbers.map(|number| folder.join(format!("{letter}{number:08}"))).collect()
        };
        self.folders.iter().enumerate().map(of_worker).collect()
    }

    /// Measures in a new directory of `parent`, and removes it whatever comes of that.
    ///
    /// # Errors
    /// What the measurement says; else why something is left.
    pub fn with<T>(
        parent: &Path,
        folders: usize,
        measure: impl FnOnce(&Self) -> Result<T, CliError>,
    ) -> Result<T, CliError> {
        let made = tempfile::Builder::new().prefix("cv-bench-").tempdir_in(parent).map_err(|error| {
            let next = match error.kind() {
                io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
                    ": name a directory that you may write to; cache-mode mounts are read-only without \
                     --access-mode read-write"
                }
                _ => "",
            };
            CliError::Failed(format!("cannot make a directory in {}: {error}{next}", parent.display()))
        })?;
        let folder = |number| made.path().join(format!("w{number}"));
        let scratch = Self { folders: (0..folders).map(folder).collect() };
        for folder in &scratch.folders {
            fs::create_dir(folder).context(format_args!("cannot make {}", folder.display()))?;
        }
        let measured = measure(&scratch);
        let what = format!("cannot remove {}, which this command made", made.path().display());
        match (measured, made.close().context(what)) {
            (Ok(measured), removed) => removed.map(|()| measured),
            (Err(error), removed) => {
                removed.unwrap_or_else(|left| console::remark(format_args!("cv: {left}")));
                Err(error)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(directory: &Path) -> Vec<PathBuf> {
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect()
    }

    #[test]
    fn it_is_gone_after_success_and_failure() {
        let parent = tempfile::tempdir().unwrap();
        fs::write(parent.path().join("a00000001"), "theirs").unwrap();
        let fill = |scratch: &Scratch| {
            for worker in 0..2 {
                fs::write(&scratch.files(2, ['a', 'b'][worker])[worker][0], "x").unwrap();
            }
            assert_eq!(names(parent.path()).len(), 2);
        };
        let measured = Scratch::with(parent.path(), 2, |scratch| {
            fill(scratch);
            Ok(7)
        });
        assert_eq!((measured.unwrap(), names(parent.path()).len()), (7, 1));
        let failed = Scratch::with(parent.path(), 2, |scratch| {
            fill(scratch);
            Err::<(), _>(CliError::Failed("no".to_owned()))
        });
        assert_eq!(failed.unwrap_err().to_string(), "no");
        assert_eq!(names(parent.path()), [parent.path().join("a00000001")]);
    }

    #[test]
    fn what_was_there_before_stays() {
        let parent = tempfile::tempdir().unwrap();
        let theirs = parent.path().join("cv-bench-theirs");
        fs::create_dir(&theirs).unwrap();
        fs::write(theirs.join("a00000001"), "theirs").unwrap();
        let measured = Scratch::with(parent.path(), 1, |scratch| {
            let folder = &scratch.folders[0];
            assert_eq!(names(folder), Vec::<PathBuf>::new());
            fs::write(folder.join("put by another"), "x").unwrap();
            std::os::unix::fs::symlink(&theirs, folder.join("link")).unwrap();
            Ok(())
        });
        measured.unwrap();
        assert_eq!(names(parent.path()), [theirs.clone()]);
        assert_eq!(names(&theirs), [theirs.join("a00000001")]);
    }

    #[test]
    fn a_parent_that_is_not_there_is_named() {
        let refused = Scratch::with(Path::new("/proc/none"), 1, |_| Ok(())).unwrap_err().to_string();
        assert!(refused.contains("/proc/none"), "{refused}");
    }
}
