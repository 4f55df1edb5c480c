//! What clients can have seen of the namespace: of changes that concern none of them they are not notified.
//!
//! Nobody has seen a directory that no client has asked about since the master started: sessions begin with a `Reset`.
//! And nobody has seen the absence of a name in a directory that was never listed whole, unless that absence was the
//! answer to a question.

use std::collections::HashSet;

/// Directories remembered one by one; beyond that all count as seen.
const DIRECTORIES_MAX: usize = 1 << 20;

/// What was answered to clients since the master started.
#[derive(Default)]
pub(super) struct SeenDirectories {
    entries: Directories,
    absences: Directories,
}

impl SeenDirectories {
    /// A client is about to be answered what is in a directory.
    pub(super) fn add_entries(&mut self, directory: u64) {
        self.entries.add(directory);
    }

    /// A client is about to be answered that a name is not in a directory.
    pub(super) fn add_absence(&mut self, directory: u64) {
        self.absences.add(directory);
    }

    /// Whether a change of a name in a directory may be one of something seen. With `first_fill` the directory was not
    /// listed whole before, so that only an absence can have been seen.
    pub(super) fn concerns(&self, directory: u64, first_fill: bool) -> bool {
        if first_fill { self.absences.has(directory) } else { self.entries.has(directory) }
    }
}

/// A set of directories that no longer distinguishes them when it grows too large.
#[derive(Default)]
struct Directories {
    known: HashSet<u64>,
    has_all: bool,
}

impl Directories {
    fn add(&mut self, directory: u64) {
        if !self.has_all {
            self.known.insert(directory);
            if self.known.len() > DIRECTORIES_MAX {
                *self = Self { known: HashSet::new(), has_all: true };
            }
        }
    }

    fn has(&self, directory: u64) -> bool {
        self.has_all || self.known.contains(&directory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_names_concern_those_who_missed_them_and_others_those_who_looked() {
        let mut seen = SeenDirectories::default();
        seen.add_entries(1);
        seen.add_absence(2);
        let concerned = |first_fill| [1, 2, 3].map(|directory| seen.concerns(directory, first_fill));
        assert_eq!((concerned(false), concerned(true)), ([true, false, false], [false, true, false]));
    }

    #[test]
    fn when_there_are_too_many_all_count_as_seen() {
        let mut seen = SeenDirectories::default();
        (0..=DIRECTORIES_MAX as u64).for_each(|directory| seen.add_entries(2 * directory));
        assert!(seen.concerns(1, false) && !seen.concerns(1, true));
    }
}
