//! A directory for what a workload writes: made by it, and gone with it.
//!
//! Files in it have names of one form ([`file_name`]). Nothing else is removed: what somebody else has put there stays,
//! with the directories above it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use cavern_conf::host::unique_name;

use crate::console;
use crate::error::{CliError, Context as _};

/// The first letters of names: what a file is called, and what it is called after a rename.
const FIRST: [char; 2] = ['a', 'b'];
/// Hexadecimal digits of the directory's name.
const NAME_DIGITS: usize = 12;

/// Removed when it is dropped; [`Self::remove`] says what went wrong with that.
pub struct Scratch {
    directory: PathBuf,
    folders: Vec<PathBuf>,
    removed: bool,
}

/// The name of a file, and that which it gets by a rename.
pub fn file_name(number: usize, is_renamed: bool) -> String {
    format!("{}{number:08}", FIRST[usize::from(is_renamed)])
}

fn is_ours(name: &str) -> bool {
    let digits = name.strip_prefix(FIRST).unwrap_or_default();
    digits.len() >= 8 && digits.bytes().all(|byte| byte.is_ascii_digit())
}

impl Scratch {
    /// Makes a directory in `parent` that was not there, with a folder for each worker.
    ///
    /// # Errors
    /// When it cannot be made; then nothing is left.
    pub fn make(parent: &Path, folders: usize) -> Result<Self, CliError> {
        let name = format!("cv-bench-{}", &unique_name()[..NAME_DIGITS]);
        let directory = parent.join(name);
        fs::create_dir(&directory).map_err(|error| {
            let next = match error.kind() {
                io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
                    ": name a directory that you may write to; cache-mode mounts are read-only without \
                     --access-mode read-write"
                }
                _ => "",
            };
            CliError::Failed(format!("cannot make {}: {error}{next}", directory.display()))
        })?;
        let mut scratch = Self { directory, folders: vec![], removed: false };
        for number in 0..folders {
            let folder = scratch.directory.join(format!("w{number}"));
            fs::create_dir(&folder).context(format_args!("cannot make {}", folder.display()))?;
            scratch.folders.push(folder);
        }
        Ok(scratch)
    }

    /// The folder of a worker.
    pub fn folder(&self, worker: usize) -> &Path {
        &self.folders[worker]
    }

    /// Measures in it, and removes it whatever comes of that.
    ///
    /// # Errors
    /// What the measurement says; else why something is left.
    pub fn with<T>(
        parent: &Path,
        folders: usize,
        measure: impl FnOnce(&Self) -> Result<T, CliError>,
    ) -> Result<T, CliError> {
        let scratch = Self::make(parent, folders)?;
        // Where this fails, the scratch is dropped, and so removed.
        let measured = measure(&scratch)?;
        scratch.remove()?;
        Ok(measured)
    }

    fn remove(mut self) -> Result<(), CliError> {
        self.removed = true;
        self.try_remove()
    }

    fn try_remove(&self) -> Result<(), CliError> {
        for folder in &self.folders {
            empty(folder)
                .and_then(|()| fs::remove_dir(folder))
                .context(format_args!("cannot remove {}, which this command made", folder.display()))?;
        }
        fs::remove_dir(&self.directory)
            .context(format_args!("cannot remove {}, which this command made", self.directory.display()))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if self.removed {
            return;
        }
        if let Err(error) = self.try_remove() {
            console::remark(format_args!("cv: {error}"));
        }
    }
}

fn empty(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        if name.to_str().is_some_and(is_ours) {
            fs::remove_file(folder.join(name))?;
        }
    }
    Ok(())
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
                fs::write(scratch.folder(worker).join(file_name(worker, worker == 1)), "x").unwrap();
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
    fn what_is_not_ours_stays() {
        let parent = tempfile::tempdir().unwrap();
        let measured = Scratch::with(parent.path(), 1, |scratch| {
            fs::write(scratch.folder(0).join(file_name(3, false)), "ours").unwrap();
            fs::write(scratch.folder(0).join("a1"), "theirs").unwrap();
            Ok(())
        });
        let said = measured.unwrap_err().to_string();
        assert!(said.contains("which this command made") && said.contains("not empty"), "{said}");
        let folder = names(parent.path())[0].join("w0");
        assert_eq!(names(&folder), [folder.join("a1")]);
    }

    #[test]
    fn a_parent_that_is_not_there_is_named() {
        let refused = Scratch::make(Path::new("/proc/none"), 1).err().unwrap().to_string();
        assert!(refused.contains("/proc/none/cv-bench-"), "{refused}");
    }
}
