//! The baseline gets what the target has.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use super::close::close;
use super::stop::Stop;
use super::tree::Tree;
use crate::console;
use crate::error::{CliError, Context as _};

/// What has been made so far, in that order: it goes again when the copy does not become whole.
#[derive(Default)]
struct Made {
    files: Vec<PathBuf>,
    directories: Vec<PathBuf>,
}

/// Copies the files of a tree from one directory into another, which is empty, and has them on its disk, so that their
/// pages can be dropped.
///
/// # Errors
/// When something cannot be copied whole, or the copy is interrupted: then nothing of it is left.
pub fn copy(tree: &Tree, from: &Path, to: &Path, stop: &Stop) -> Result<(), CliError> {
    let mut made = Made::default();
    let copied = made.copy(tree, from, to, stop);
    if copied.is_err() {
        made.remove();
    }
    copied
}

impl Made {
    fn copy(&mut self, tree: &Tree, from: &Path, to: &Path, stop: &Stop) -> Result<(), CliError> {
        for folder in &tree.directories {
            let folder = to.join(folder);
            fs::create_dir(&folder).context(format_args!("cannot make the directory {}", folder.display()))?;
            self.directories.push(folder);
        }
        for (path, bytes) in &tree.files {
            stop.check()?;
            let (source, target) = (from.join(path), to.join(path));
            let mut input = File::open(&source).context(format_args!("cannot read {}", source.display()))?;
            let mut output = OpenOptions::new()
                .write(true)
                .create_new(true)
                .open(&target)
                .context(format_args!("cannot make {}", target.display()))?;
            self.files.push(target.clone());
            let copied = io::copy(&mut input, &mut output)
                .and_then(|copied| close(output).map(|()| copied))
                .context(format_args!("cannot copy {} to {}", source.display(), target.display()))?;
            if copied != *bytes {
                let text = format!(
                    "{} has {copied} bytes now instead of {bytes}: does somebody write to it?",
                    source.display()
                );
                return Err(CliError::Failed(text));
            }
        }
        let directory = File::open(to).context(format_args!("cannot open {}", to.display()))?;
        rustix::fs::syncfs(&directory).context(format_args!("cannot sync the disk of {}", to.display()))
    }

    fn remove(self) {
        let files = self.files.iter().rev().map(|path| (path, fs::remove_file(path)));
        let left: Vec<_> = files.filter(|(_, removed)| removed.is_err()).map(|(path, _)| path).collect();
        // A directory with something that is not of here stays.
        self.directories.iter().rev().for_each(|path| drop(fs::remove_dir(path)));
        if let Some(first) = left.first() {
            console::remark(format_args!("cv: files of the copy could not be removed: {} …", first.display()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_whole_or_nothing() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::create_dir_all(from.path().join("a/b")).unwrap();
        fs::write(from.path().join("a/b/file"), "content").unwrap();
        fs::write(from.path().join("z"), "").unwrap();
        let stop = Stop::default();
        let mut tree = Tree::walk(from.path(), &stop).unwrap();
        copy(&tree, from.path(), to.path(), &stop).unwrap();
        assert_eq!(Tree::walk(to.path(), &stop).unwrap().files, tree.files);
        assert_eq!(fs::read_to_string(to.path().join("a/b/file")).unwrap(), "content");

        // What is there is not written over.
        let refused = copy(&tree, from.path(), to.path(), &stop).unwrap_err().to_string();
        assert!(refused.contains("cannot make the directory"), "{refused}");
        assert_eq!(fs::read_to_string(to.path().join("a/b/file")).unwrap(), "content");

        let other = tempfile::tempdir().unwrap();
        tree.files.insert("z".into(), 5);
        let refused = copy(&tree, from.path(), other.path(), &stop).unwrap_err().to_string();
        assert!(refused.contains("has 0 bytes now instead of 5"), "{refused}");
        assert_eq!(fs::read_dir(other.path()).unwrap().count(), 0);
    }
}
