//! The files of a directory: whether another directory has the same, and what the kernel has of them.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use cavern_conf::counted;
use rustix::fs::{Advice, fadvise, syncfs};

use super::rounds::Stop;
use crate::error::{CliError, Context as _};

/// Names of a kind of difference that an error gives.
const NAMED: usize = 3;

/// What must be alike in two directories.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Match {
    /// They have the same files, and no others.
    Same,
    /// The other one has these files; it may have more.
    AtLeast,
}

/// The regular files below a directory, by their paths in it; symbolic links are not followed.
#[derive(Clone, Default, Debug)]
pub struct Tree {
    /// Sizes in bytes.
    pub files: BTreeMap<PathBuf, u64>,
    /// Directories below, each after the one that it is in.
    pub directories: Vec<PathBuf>,
}

impl Tree {
    /// # Errors
    /// When a directory cannot be listed, or the listing is interrupted.
    pub fn walk(directory: &Path, stop: &Stop) -> Result<Self, CliError> {
        let mut tree = Self::default();
        let mut ahead = vec![PathBuf::new()];
        while let Some(folder) = ahead.pop() {
            stop.check()?;
            let place = directory.join(&folder);
            let listed = fs::read_dir(&place).context(format_args!("cannot list {}", place.display()))?;
            for entry in listed {
                let entry = entry.context(format_args!("cannot list {}", place.display()))?;
                let path = folder.join(entry.file_name());
                let attributes =
                    entry.metadata().context(format_args!("cannot look at {}", directory.join(&path).display()))?;
                if attributes.is_dir() {
                    tree.directories.push(path.clone());
                    ahead.push(path);
                } else if attributes.is_file() {
                    tree.files.insert(path, attributes.len());
                }
            }
        }
        Ok(tree)
    }

    pub fn bytes(&self) -> u64 {
        self.files.values().sum()
    }

    /// Only the largest files, those of the same size by their names; directories that none of them is in are gone.
    pub fn largest(self, count: usize) -> Self {
        let mut files: Vec<(PathBuf, u64)> = self.files.into_iter().collect();
        files.sort_by(|(path, bytes), (other_path, other_bytes)| {
            other_bytes.cmp(bytes).then_with(|| path.cmp(other_path))
        });
        files.truncate(count);
        let is_needed = |folder: &PathBuf| files.iter().any(|(path, _)| path.starts_with(folder));
        let directories = self.directories.into_iter().filter(is_needed).collect();
        Self { files: files.into_iter().collect(), directories }
    }

    /// What another directory has not as this one has it, as a clause; `None` where they match.
    pub fn difference(&self, other: &Self, how: Match) -> Option<String> {
        let named = |files: Vec<&PathBuf>, what: &str| {
            let more = if files.len() > NAMED { ", …" } else { "" };
            let first: Vec<String> = files.iter().take(NAMED).map(|path| path.display().to_string()).collect();
            let count = counted(files.len() as u64, "file");
            (!files.is_empty()).then(|| format!("{count} {what} ({}{more})", first.join(", ")))
        };
        let absent = self.files.iter().filter(|(path, bytes)| other.files.get(*path) != Some(*bytes));
        let foreign = other.files.keys().filter(|path| how == Match::Same && !self.files.contains_key(*path));
        named(absent.map(|(path, _)| path).collect(), "missing, or of another size")
            .or_else(|| named(foreign.collect(), "that should not be there"))
    }

    /// Drops the kernel's pages of its files in a directory. One that is not there any more is left to others to miss.
    ///
    /// # Errors
    /// When the disk cannot be synced, without which pages stay that were written, or the kernel refuses the advice.
    pub fn drop_pages(&self, directory: &Path) -> Result<(), CliError> {
        let disk = File::open(directory).context(format_args!("cannot open {}", directory.display()))?;
        syncfs(&disk).context(format_args!("cannot sync the disk of {}", directory.display()))?;
        for path in self.files.keys() {
            let path = directory.join(path);
            let Ok(file) = File::open(&path) else { continue };
            fadvise(&file, 0, None, Advice::DontNeed)
                .context(format_args!("cannot drop the pages of {}", path.display()))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, u64)]) -> Tree {
        Tree { files: files.iter().map(|(path, bytes)| (path.into(), *bytes)).collect(), directories: vec![] }
    }

    #[test]
    fn a_directory_is_listed_with_what_is_below() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir_all(directory.path().join("a/b")).unwrap();
        fs::create_dir(directory.path().join("empty")).unwrap();
        fs::write(directory.path().join("a/b/two"), "22").unwrap();
        fs::write(directory.path().join("none"), "").unwrap();
        std::os::unix::fs::symlink("none", directory.path().join("link")).unwrap();
        let mut found = Tree::walk(directory.path(), &Stop::default()).unwrap();
        assert_eq!(found.files, tree(&[("a/b/two", 2), ("none", 0)]).files);
        let place = |path: &str| found.directories.iter().position(|folder| folder == Path::new(path)).unwrap();
        assert!(place("a") < place("a/b"));
        found.directories.sort_unstable();
        assert_eq!((found.directories.len(), found.bytes()), (3, 2));
        let largest = found.largest(1);
        assert_eq!(largest.files, tree(&[("a/b/two", 2)]).files);
        assert_eq!(largest.directories, [PathBuf::from("a"), PathBuf::from("a/b")]);
        let stop = Stop::default();
        stop.ask();
        assert!(Tree::walk(directory.path(), &stop).is_err());
    }

    #[test]
    fn the_largest_files_are_chosen_by_size_and_then_by_name() {
        let chosen = tree(&[("c", 5), ("a", 5), ("b", 5), ("d", 9), ("e", 1)]).largest(3);
        assert_eq!(chosen.files, tree(&[("a", 5), ("b", 5), ("d", 9)]).files);
    }

    #[test]
    fn differences_are_named() {
        let here = tree(&[("a", 1), ("b", 2), ("c", 3)]);
        assert_eq!(here.difference(&here.clone(), Match::Same), None);
        let there = tree(&[("a", 1), ("c", 4), ("x", 1)]);
        let said = here.difference(&there, Match::Same).unwrap();
        assert_eq!(said, "2 files missing, or of another size (b, c)");
        let said = tree(&[("a", 1), ("c", 4)]).difference(&there, Match::Same).unwrap();
        assert_eq!(said, "1 file that should not be there (x)");
        assert_eq!(tree(&[("a", 1)]).difference(&there, Match::AtLeast), None);
        let many: Vec<(String, u64)> = (0..9).map(|number| (number.to_string(), 1)).collect();
        let many: Vec<(&str, u64)> = many.iter().map(|(path, bytes)| (path.as_str(), *bytes)).collect();
        let said = tree(&many).difference(&tree(&[]), Match::Same).unwrap();
        assert_eq!(said, "9 files missing, or of another size (0, 1, 2, …)");
    }
}
