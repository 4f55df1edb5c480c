//! `cv bench random`: small reads anywhere in one large file.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::time::Instant;

use super::cache::CachePolicy;
use super::seed::derived_seed;
use super::stop::Stop;
use super::tally::{Operation, Phase, Unit};
use super::tree::Tree;
use super::workers;
use super::workload::Workload;
use crate::error::CliError;

static READ: Operation =
    Operation { name: "read", timed: "read", units: &[Unit::Operations("reads/s"), Unit::MibPerSecond] };

/// When a round ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Length {
    Time(Duration),
    /// Reads of all threads together.
    Reads(u64),
}

pub struct RandomReads {
    tree: Tree,
    path: PathBuf,
    file_bytes: u64,
    block_bytes: usize,
    threads: usize,
    length: Length,
    seed: u64,
    cache: CachePolicy,
}

impl RandomReads {
    /// Reads of the largest file of a tree, which is the only one that is looked at.
    ///
    /// # Errors
    /// When it has less than two blocks.
    pub fn new(
        tree: Tree,
        block_bytes: usize,
        threads: usize,
        length: Length,
        seed: u64,
        cache: CachePolicy,
    ) -> Result<Self, CliError> {
        let found = tree.files.iter().max_by_key(|(_, bytes)| **bytes).map(|(path, bytes)| (path.clone(), *bytes));
        let (path, file_bytes) = found.unwrap_or_default();
        if file_bytes < 2 * block_bytes as u64 {
            let text = format!(
                "the largest file, {}, has {file_bytes} bytes: random reads need one of two blocks of {block_bytes} \
                 bytes at least",
                path.display()
            );
            return Err(CliError::Failed(text));
        }
        Ok(Self { tree, path, file_bytes, block_bytes, threads, length, seed, cache })
    }
}

impl Workload for RandomReads {
    fn before(&self, directory: &Path) -> Result<(), CliError> {
        self.cache.prepare(directory, &self.tree)
    }

    fn round(&self, directory: &Path, round: u32, stop: &Stop) -> Result<Vec<Phase>, CliError> {
        let path = directory.join(&self.path);
        let said = |error: io::Error| format!("cannot read {}: {error}", path.display());
        let blocks = self.file_bytes / self.block_bytes as u64;
        let phase = workers::run(&READ, self.threads, |worker, tally| {
            let file = match File::open(&path) {
                Ok(file) => file,
                Err(error) => return tally.failures.add(said(error)),
            };
            let mut random = StdRng::seed_from_u64(derived_seed(self.seed, round, worker));
            let mut buffer = vec![0; self.block_bytes];
            let started = Instant::now();
            for done in 0.. {
                let is_done = match self.length {
                    Length::Time(time) => started.elapsed() >= time,
                    Length::Reads(reads) => done >= share(reads, self.threads, worker),
                };
                if is_done || stop.is_asked() {
                    return;
                }
                let offset = random.random_range(0..blocks) * self.block_bytes as u64;
                let is_read = tally.time(|| match file.read_at(&mut buffer, offset) {
                    Ok(count) if count == self.block_bytes => Ok(count as u64),
                    Ok(count) => {
                        Err(format!("{} has {count} of {} bytes at {offset}", path.display(), self.block_bytes))
                    }
                    Err(error) => Err(said(error)),
                });
                if !is_read {
                    return;
                }
            }
        })?;
        Ok(vec![phase])
    }
}

/// What a worker has to do of a whole.
fn share(whole: u64, workers: usize, worker: usize) -> u64 {
    whole / workers as u64 + u64::from((worker as u64) < whole % workers as u64)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn reads_are_counted_and_one_that_is_short_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("big"), vec![0; 40_000]).unwrap();
        fs::write(directory.path().join("small"), vec![0; 10]).unwrap();
        let stop = Stop::default();
        let workload = |length| {
            let tree = Tree::walk(directory.path(), &stop).unwrap().largest(1);
            RandomReads::new(tree, 4096, 3, length, 42, CachePolicy::Drop)
        };
        let counted = workload(Length::Reads(100)).unwrap();
        counted.before(directory.path()).unwrap();
        let tally = counted.round(directory.path(), 0, &stop).unwrap().remove(0).tally;
        assert_eq!((tally.operations, tally.bytes, tally.failures.count), (100, 409_600, 0));
        let timed = workload(Length::Time(Duration::from_millis(20))).unwrap();
        let phase = timed.round(directory.path(), 0, &stop).unwrap().remove(0);
        assert!(phase.tally.operations > 0 && phase.seconds >= 0.02, "{} s", phase.seconds);

        fs::write(directory.path().join("big"), "short").unwrap();
        let tally = counted.round(directory.path(), 0, &stop).unwrap().remove(0).tally;
        assert_eq!(tally.failures.count, 3, "each worker gives up: {:?}", tally.failures.first);
        let refused = workload(Length::Reads(1)).err().unwrap().to_string();
        assert!(refused.contains("small") && refused.contains("two blocks of 4096 bytes"), "{refused}");
    }

    #[test]
    fn shares_make_the_whole() {
        let shares: Vec<u64> = (0..3).map(|worker| share(11, 3, worker)).collect();
        assert_eq!(shares, [4, 4, 3]);
    }
}
