//! `cv bench stream`: large files from their beginning to their end, each by a thread of its own.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use rand::rngs::StdRng;
use rand::{RngCore as _, SeedableRng as _};

use super::cache::CachePolicy;
use super::close::close;
use super::scratch::{Scratch, file_name};
use super::seed::derived_seed;
use super::stop::Stop;
use super::tally::{Operation, Phase, Tally, Unit};
use super::tree::Tree;
use super::workers;
use super::workload::Workload;
use crate::error::CliError;

/// Bytes that are read or written at a time.
const PIECE_BYTES: usize = 1 << 20;

static READ: Operation = Operation { name: "read", timed: "read of 1 MiB", units: &[Unit::GibPerSecond] };
static WRITE: Operation = Operation { name: "write", timed: "write of 1 MiB", units: &[Unit::GibPerSecond] };

/// Reads each file of the tree.
pub struct ReadStreams {
    pub tree: Tree,
    pub cache: CachePolicy,
}

impl Workload for ReadStreams {
    fn before(&self, directory: &Path) -> Result<(), CliError> {
        self.cache.prepare(directory, &self.tree)
    }

    fn round(&self, directory: &Path, _round: u32, stop: &Stop) -> Result<Vec<Phase>, CliError> {
        let files: Vec<(PathBuf, u64)> =
            self.tree.files.iter().map(|(path, bytes)| (directory.join(path), *bytes)).collect();
        let phase = workers::run(&READ, files.len(), |worker, tally| {
            let (path, bytes) = &files[worker];
            if let Err(text) = read_through(path, *bytes, tally, stop) {
                tally.failures.add(text);
            }
        })?;
        Ok(vec![phase])
    }
}

fn read_through(path: &Path, listed: u64, tally: &mut Tally, stop: &Stop) -> Result<(), String> {
    let said = |error: io::Error| format!("cannot read {}: {error}", path.display());
    let mut buffer = vec![0; PIECE_BYTES];
    let mut file = File::open(path).map_err(said)?;
    let mut bytes = 0;
    // What has no more bytes is no read: the end is found by the size.
    while bytes < listed && !stop.is_asked() {
        let before = tally.bytes;
        let is_read = tally.time(|| match read_once(&mut file, &mut buffer) {
            Ok(0) => Err(format!("{} ends after {bytes} of {listed} bytes", path.display())),
            Ok(count) => Ok(count as u64),
            Err(error) => Err(said(error)),
        });
        if !is_read {
            return Ok(());
        }
        bytes += tally.bytes - before;
    }
    close(file).map_err(said)
}

fn read_once(file: &mut File, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match file.read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Writes new files, which are removed again.
pub struct WriteStreams {
    /// Of each file.
    pub bytes: u64,
    pub streams: usize,
    pub seed: u64,
}

impl Workload for WriteStreams {
    fn round(&self, directory: &Path, round: u32, stop: &Stop) -> Result<Vec<Phase>, CliError> {
        Scratch::with(directory, self.streams, |scratch| {
            let phase = workers::run(&WRITE, self.streams, |worker, tally| {
                let path = scratch.folder(worker).join(file_name(worker, false));
                let seed = derived_seed(self.seed, round, worker);
                if let Err(text) = self.write(&path, seed, tally, stop) {
                    tally.failures.add(text);
                }
            })?;
            Ok(vec![phase])
        })
    }
}

impl WriteStreams {
    fn write(&self, path: &Path, seed: u64, tally: &mut Tally, stop: &Stop) -> Result<(), String> {
        let said = |error: io::Error| format!("cannot write {}: {error}", path.display());
        let mut buffer = vec![0; PIECE_BYTES];
        StdRng::seed_from_u64(seed).fill_bytes(&mut buffer);
        let mut file = OpenOptions::new().write(true).create_new(true).open(path).map_err(said)?;
        let mut ahead = self.bytes;
        while ahead > 0 {
            let piece = &buffer[..ahead.min(PIECE_BYTES as u64) as usize];
            let write = || file.write_all(piece).map(|()| piece.len() as u64).map_err(said);
            if stop.is_asked() || !tally.time(write) {
                return Ok(());
            }
            ahead -= piece.len() as u64;
        }
        // Without a latency of its own; its time counts in the rate.
        file.sync_all().map_err(said)?;
        close(file).map_err(said)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn every_byte_is_read_and_a_file_that_became_shorter_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let (one, two) = (directory.path().join("one"), directory.path().join("two"));
        fs::write(&one, vec![1; PIECE_BYTES + 1]).unwrap();
        fs::write(&two, vec![1; 10]).unwrap();
        let stop = Stop::default();
        let workload = ReadStreams { tree: Tree::walk(directory.path(), &stop).unwrap(), cache: CachePolicy::Keep };
        let read = || workload.round(directory.path(), 0, &stop).unwrap().remove(0).tally;
        let tally = read();
        assert_eq!((tally.bytes, tally.operations, tally.failures.count), ((PIECE_BYTES + 11) as u64, 3, 0));
        fs::write(&one, "x").unwrap();
        fs::remove_file(&two).unwrap();
        let tally = read();
        assert_eq!((tally.bytes, tally.failures.count), (1, 2));
        let said = tally.failures.first.join("\n");
        assert!(said.contains("one ends after 1 of 1048577 bytes") && said.contains("two: No such file"), "{said}");
    }

    #[test]
    fn what_is_written_is_counted_and_removed() {
        let directory = tempfile::tempdir().unwrap();
        let workload = WriteStreams { bytes: (2 * PIECE_BYTES + 5) as u64, streams: 2, seed: 1 };
        let tally = workload.round(directory.path(), 0, &Stop::default()).unwrap().remove(0).tally;
        assert_eq!((tally.bytes, tally.operations, tally.failures.count), (2 * workload.bytes, 6, 0));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
