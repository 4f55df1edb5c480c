//! A directory for what a workload writes: made by it, and gone with it.
//!
//! What was there before is not in it: one `mkdir` makes it, under a name that nothing had. Its files have names of one
//! form ([`Scratch::files`]), and nothing else is removed: what others have put into it meanwhile stays, with the
//! folders above it, which are named.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::console;
use crate::error::{CliError, Context as _};

/// A directory that was not there before, with a folder for each worker.
pub struct Scratch {
    directory: PathBuf,
    folders: Vec<PathBuf>,
}

impl Scratch {
    /// Where so many files are to be that the workers share, each in its folder. Their names begin with `letter`: a or
    /// b.
    pub fn files(&self, count: usize, letter: char) -> Vec<Vec<PathBuf>> {
        let of_worker = |(worker, folder): (usize, &PathBuf)| {
            let numbers = (worker..count).step_by(self.folders.len());
            numbers.map(|number| folder.join(format!("{letter}{number:08}"))).collect()
        };
        self.folders.iter().enumerate().map(of_worker).collect()
    }

    /// Measures in a new directory of `parent`, and removes it whatever comes of that, but for a panic, which leaves it
    /// there.
    ///
    /// # Errors
    /// What the measurement says; else why something is left, and what.
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
        let mut scratch = Self { directory: made.keep(), folders: vec![] };
        let made: Result<(), CliError> = (0..folders).try_for_each(|number| {
            let folder = scratch.directory.join(format!("w{number}"));
            fs::create_dir(&folder).context(format_args!("cannot make {}", folder.display()))?;
            scratch.folders.push(folder);
            Ok(())
        });
        let measured = made.and_then(|()| measure(&scratch));
        match (measured, scratch.remove()) {
            (Ok(measured), removed) => removed.map(|()| measured),
            (Err(error), removed) => {
                removed.unwrap_or_else(|left| console::remark(format_args!("cv: {left}")));
                Err(error)
            }
        }
    }

    /// Removes all that was made, as far as nothing else is in it.
    fn remove(&self) -> Result<(), CliError> {
        let what = |path: &Path| format!("cannot remove {}, which this command made", path.display());
        let emptied = self.folders.iter().map(|folder| empty(folder).context(what(folder)));
        // All of them, also after one that is left.
        emptied.fold(Ok(()), Result::and)?;
        fs::remove_dir(&self.directory).context(what(&self.directory))
    }
}

/// Removes a folder with its files.
fn empty(folder: &Path) -> io::Result<()> {
    // What is removed while a directory is read may hide others from the reader.
    let entries = fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.file_name()));
    for name in entries.collect::<io::Result<Vec<_>>>()? {
        let digits = name.to_str().and_then(|name| name.strip_prefix(['a', 'b'])).unwrap_or_default();
        if digits.len() >= 8 && digits.bytes().all(|byte| byte.is_ascii_digit()) {
            fs::remove_file(folder.join(&name))?;
        }
    }
    fs::remove_dir(folder)
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
    fn what_others_have_put_there_stays_and_is_named() {
        let parent = tempfile::tempdir().unwrap();
        let theirs = parent.path().join("cv-bench-theirs");
        fs::create_dir(&theirs).unwrap();
        fs::write(theirs.join("a00000001"), "theirs").unwrap();
        let measured = Scratch::with(parent.path(), 2, |scratch| {
            let folder = &scratch.folders[0];
            assert_eq!(names(folder), Vec::<PathBuf>::new());
            for file in scratch.files(4, 'a').iter().chain(&scratch.files(2, 'b')).flatten() {
                fs::write(file, "ours").unwrap();
            }
            fs::write(folder.join("a1"), "theirs").unwrap();
            std::os::unix::fs::symlink(&theirs, folder.join("link")).unwrap();
            Ok(())
        });
        let said = measured.unwrap_err().to_string();
        assert!(said.contains("w0, which this command made") && said.contains("not empty"), "{said}");
        let made: Vec<_> = names(parent.path()).into_iter().filter(|name| *name != theirs).collect();
        let folder = made[0].join("w0");
        let mut left = names(&folder);
        left.sort();
        assert_eq!((made.len(), names(&made[0])), (1, vec![folder.clone()]));
        assert_eq!(left, [folder.join("a1"), folder.join("link")]);
        assert_eq!(names(&theirs), [theirs.join("a00000001")]);
    }

    #[test]
    fn a_parent_that_is_not_there_is_named() {
        let refused = Scratch::with(Path::new("/proc/none"), 1, |_| Ok(())).unwrap_err().to_string();
        assert!(refused.contains("/proc/none"), "{refused}");
    }
}
