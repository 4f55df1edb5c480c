//! `cv bench meta`: names come, are looked at, opened and renamed, and go.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use super::close::close;
use super::scratch::{Scratch, file_name};
use super::stop::Stop;
use super::tally::{Operation, Phase, Unit};
use super::workers;
use super::workload::Workload;
use crate::error::CliError;

const fn operation(name: &'static str) -> Operation {
    Operation { name, timed: name, units: &[Unit::Operations("operations/s")] }
}

static CREATE: Operation = operation("create");
static STAT: Operation = operation("stat");
static OPEN: Operation = operation("open");
static RENAME: Operation = operation("rename");
static UNLINK: Operation = operation("unlink");

pub struct Meta {
    pub count: usize,
    pub threads: usize,
}

/// A file by both of its names.
struct Names {
    before: PathBuf,
    after: PathBuf,
}

type Act = fn(&Names) -> io::Result<()>;

/// What is done to each file, in this order.
const STEPS: [(&Operation, Act); 5] =
    [(&CREATE, create), (&STAT, stat), (&OPEN, open), (&RENAME, rename), (&UNLINK, unlink)];

fn create(file: &Names) -> io::Result<()> {
    close(OpenOptions::new().write(true).create_new(true).open(&file.before)?)
}

fn stat(file: &Names) -> io::Result<()> {
    let is_file = fs::symlink_metadata(&file.before)?.is_file();
    if is_file { Ok(()) } else { Err(io::Error::other("it is no file")) }
}

fn open(file: &Names) -> io::Result<()> {
    close(File::open(&file.before)?)
}

fn rename(file: &Names) -> io::Result<()> {
    fs::rename(&file.before, &file.after)
}

fn unlink(file: &Names) -> io::Result<()> {
    fs::remove_file(&file.after)
}

impl Workload for Meta {
    fn round(&self, directory: &Path, _round: u32, stop: &Stop) -> Result<Vec<Phase>, CliError> {
        Scratch::with(directory, self.threads, |scratch| {
            let of_worker = |worker: usize| {
                let path = |number, is_renamed| scratch.folder(worker).join(file_name(number, is_renamed));
                let numbers = (worker..self.count).step_by(self.threads);
                numbers.map(|number| Names { before: path(number, false), after: path(number, true) }).collect()
            };
            let files: Vec<Vec<Names>> = (0..self.threads).map(of_worker).collect();
            let mut phases = vec![];
            for (operation, act) in STEPS {
                stop.check()?;
                phases.push(workers::run(operation, self.threads, |worker, tally| {
                    for file in &files[worker] {
                        if stop.is_asked() {
                            return;
                        }
                        let said = |error| format!("cannot {} {}: {error}", operation.name, file.before.display());
                        tally.time(|| act(file).map(|()| 0).map_err(said));
                    }
                })?);
            }
            Ok(phases)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_goes_through_every_step_and_none_is_left() {
        let directory = tempfile::tempdir().unwrap();
        let workload = Meta { count: 10, threads: 3 };
        let phases = workload.round(directory.path(), 0, &Stop::default()).unwrap();
        let done: Vec<_> = phases
            .iter()
            .map(|phase| (phase.operation.name, phase.tally.operations, phase.tally.failures.count))
            .collect();
        assert_eq!(done, ["create", "stat", "open", "rename", "unlink"].map(|name| (name, 10, 0)));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn an_interrupted_round_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let stop = Stop::default();
        stop.ask();
        assert!(Meta { count: 10, threads: 3 }.round(directory.path(), 0, &stop).is_err());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
