//! `cv bench files`: every file of a directory is read once, as a training job reads its images.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use rand::SeedableRng as _;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;

use super::cache::CachePolicy;
use super::close::close;
use super::seed::derived_seed;
use super::stop::Stop;
use super::tally::{Operation, Phase, Unit};
use super::tree::Tree;
use super::workers;
use super::workload::Workload;
use crate::error::CliError;

/// Bytes that are asked for at a time.
const READ_BYTES: usize = 1 << 20;

static READ: Operation =
    Operation { name: "read", timed: "file", units: &[Unit::Operations("files/s"), Unit::MibPerSecond] };

pub struct Files {
    pub tree: Tree,
    pub threads: usize,
    pub seed: u64,
    pub cache: CachePolicy,
}

impl Files {
    /// The order of a round, the same in every directory.
    fn order(&self, round: u32) -> Vec<(&PathBuf, u64)> {
        let mut files: Vec<_> = self.tree.files.iter().map(|(path, bytes)| (path, *bytes)).collect();
        files.shuffle(&mut StdRng::seed_from_u64(derived_seed(self.seed, round, 0)));
        files
    }
}

impl Workload for Files {
    fn before(&self, directory: &Path) -> Result<(), CliError> {
        self.cache.prepare(directory, &self.tree)
    }

    fn round(&self, directory: &Path, round: u32, stop: &Stop) -> Result<Vec<Phase>, CliError> {
        let files: Vec<(PathBuf, u64)> =
            self.order(round).into_iter().map(|(path, bytes)| (directory.join(path), bytes)).collect();
        let phase = workers::run(&READ, self.threads, |worker, tally| {
            let mut buffer = vec![0; READ_BYTES];
            for (path, bytes) in files.iter().skip(worker).step_by(self.threads) {
                if stop.is_asked() {
                    return;
                }
                tally.time(|| read_whole(path, *bytes, &mut buffer));
            }
        })?;
        Ok(vec![phase])
    }
}

/// Opens a file, reads it to its end and closes it; it must have as many bytes as it was listed with.
fn read_whole(path: &Path, listed: u64, buffer: &mut [u8]) -> Result<u64, String> {
    let said = |error: io::Error| format!("cannot read {}: {error}", path.display());
    let mut file = File::open(path).map_err(said)?;
    let mut bytes = 0;
    loop {
        match file.read(buffer) {
            Ok(0) => break,
            Ok(count) => bytes += count as u64,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(said(error)),
        }
    }
    close(file).map_err(said)?;
    if bytes == listed {
        return Ok(bytes);
    }
    Err(format!("{} has {bytes} bytes, and was listed with {listed}: does somebody write to it?", path.display()))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn files(count: usize, threads: usize) -> (tempfile::TempDir, Files) {
        let directory = tempfile::tempdir().unwrap();
        for number in 0..count {
            fs::write(directory.path().join(format!("{number:03}")), vec![0; number]).unwrap();
        }
        let tree = Tree::walk(directory.path(), &Stop::default()).unwrap();
        (directory, Files { tree, threads, seed: 42, cache: CachePolicy::Drop })
    }

    #[test]
    fn a_round_has_an_order_of_its_own_with_every_file_once() {
        let (_directory, mut workload) = files(100, 3);
        let first: Vec<PathBuf> = workload.order(0).into_iter().map(|(path, _)| path.clone()).collect();
        let again: Vec<PathBuf> = workload.order(0).into_iter().map(|(path, _)| path.clone()).collect();
        let second: Vec<PathBuf> = workload.order(1).into_iter().map(|(path, _)| path.clone()).collect();
        assert!(first == again && first != second);
        workload.seed = 43;
        assert!(workload.order(0).iter().map(|(path, _)| *path).ne(&first));
        let mut sorted = first.clone();
        sorted.sort();
        assert!(sorted != first && sorted.iter().eq(workload.tree.files.keys()));
    }

    #[test]
    fn what_is_missing_or_of_another_size_is_no_success() {
        let (directory, workload) = files(100, 3);
        workload.before(directory.path()).unwrap();
        let stop = Stop::default();
        let read = || workload.round(directory.path(), 0, &stop).unwrap().remove(0).tally;
        let tally = read();
        assert_eq!((tally.operations, tally.bytes, tally.failures.count), (100, 99 * 100 / 2, 0));
        fs::remove_file(directory.path().join("007")).unwrap();
        fs::write(directory.path().join("008"), "short").unwrap();
        fs::write(directory.path().join("009"), "much longer than it was").unwrap();
        workload.before(directory.path()).unwrap();
        let tally = read();
        assert_eq!((tally.operations, tally.failures.count), (97, 3));
        let said = tally.failures.first.join("\n");
        assert!(said.contains("007: No such file") && said.contains("008 has 5 bytes"), "{said}");
        assert!(said.contains("009 has 23 bytes, and was listed with 9"), "{said}");
    }
}
