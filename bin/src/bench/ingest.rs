//! `cv bench ingest`: many small files are written, as when a data set is unpacked.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use rand::rngs::StdRng;
use rand::{RngCore as _, SeedableRng as _};

use super::close::close;
use super::scratch::{Scratch, file_name};
use super::seed::derived_seed;
use super::stop::Stop;
use super::tally::{Operation, Phase, Unit};
use super::workers;
use super::workload::Workload;
use crate::error::CliError;

static WRITE: Operation =
    Operation { name: "write", timed: "file", units: &[Unit::Operations("files/s"), Unit::MibPerSecond] };

pub struct Ingest {
    pub count: usize,
    /// Of each file.
    pub bytes: usize,
    pub writers: usize,
    /// Each file is synced before it is closed.
    pub is_synced: bool,
    pub seed: u64,
}

impl Workload for Ingest {
    fn round(&self, directory: &Path, round: u32, stop: &Stop) -> Result<Vec<Phase>, CliError> {
        Scratch::with(directory, self.writers, |scratch| {
            let paths = |worker: usize| -> Vec<PathBuf> {
                let numbers = (worker..self.count).step_by(self.writers);
                numbers.map(|number| scratch.folder(worker).join(file_name(number, false))).collect()
            };
            let files: Vec<Vec<PathBuf>> = (0..self.writers).map(paths).collect();
            let mut phase = workers::run(&WRITE, self.writers, |worker, tally| {
                let mut content = vec![0; self.bytes];
                StdRng::seed_from_u64(derived_seed(self.seed, round, worker)).fill_bytes(&mut content);
                for (number, path) in (0u64..).zip(&files[worker]) {
                    if stop.is_asked() {
                        return;
                    }
                    // No two files are equal, as far as there are bytes for that.
                    content.iter_mut().zip(number.to_le_bytes()).for_each(|(byte, digit)| *byte = digit);
                    tally.time(|| {
                        let written = self.write(path, &content);
                        written.map_err(|error| format!("cannot write {}: {error}", path.display()))
                    });
                }
            })?;
            stop.check()?;
            if phase.tally.failures.count == 0 {
                let short = files.iter().flatten().filter_map(|path| self.shortcoming(path));
                for text in short {
                    phase.tally.operations -= 1;
                    phase.tally.failures.add(text);
                }
            }
            Ok(vec![phase])
        })
    }
}

impl Ingest {
    fn write(&self, path: &Path, content: &[u8]) -> io::Result<u64> {
        let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
        file.write_all(content)?;
        if self.is_synced {
            file.sync_all()?;
        }
        close(file)?;
        Ok(content.len() as u64)
    }

    /// What a file that was written is not as it should be.
    fn shortcoming(&self, path: &Path) -> Option<String> {
        match fs::metadata(path) {
            Ok(attributes) if attributes.len() == self.bytes as u64 => None,
            Ok(attributes) => Some(format!("{} has {} of {} bytes", path.display(), attributes.len(), self.bytes)),
            Err(error) => Some(format!("{} was written, and is not there: {error}", path.display())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_is_written_and_removed() {
        let directory = tempfile::tempdir().unwrap();
        for (is_synced, bytes) in [(false, 1000), (true, 3), (false, 0)] {
            let workload = Ingest { count: 11, bytes, writers: 4, is_synced, seed: 7 };
            let tally = workload.round(directory.path(), 0, &Stop::default()).unwrap().remove(0).tally;
            assert_eq!((tally.operations, tally.bytes), (11, 11 * bytes as u64));
            assert_eq!((tally.failures.count, tally.latency.count()), (0, 11));
            assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        }
    }

    #[test]
    fn a_file_that_is_not_whole_afterwards_is_seen() {
        let directory = tempfile::tempdir().unwrap();
        let workload = Ingest { count: 1, bytes: 5, writers: 1, is_synced: false, seed: 7 };
        let path = directory.path().join("file");
        assert!(workload.shortcoming(&path).unwrap().contains("is not there"));
        assert_eq!(workload.write(&path, b"12345").unwrap(), 5);
        assert_eq!(workload.shortcoming(&path), None);
        fs::write(&path, "123").unwrap();
        assert!(workload.shortcoming(&path).unwrap().ends_with("has 3 of 5 bytes"));
        assert_eq!(workload.write(&path, b"12345").unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    }
}
