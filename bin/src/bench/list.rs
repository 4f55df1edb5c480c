//! `cv bench list`: a tree is listed as `ls -R` and `ls -lR` do it, by one thread.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use tokio::time::Instant;

use super::stop::Stop;
use super::tally::{Operation, Phase, Tally, Unit};
use super::workers;
use super::workload::Workload;
use crate::error::CliError;

static READDIR: Operation = Operation { name: "readdir", timed: "directory", units: &[Unit::Operations("entries/s")] };
static STAT: Operation =
    Operation { name: "readdir+stat", timed: "directory with stats", units: &[Unit::Operations("entries/s")] };

/// Lists the directory with all that is below it.
pub struct List;

impl Workload for List {
    fn round(&self, directory: &Path, _round: u32, stop: &Stop) -> Result<Vec<Phase>, CliError> {
        let phase =
            |operation, looks: Looks| workers::run(operation, 1, |_, tally| list(directory, looks, tally, stop));
        let names = phase(&READDIR, Looks::AtNames)?;
        let mut attributes = phase(&STAT, Looks::AtAttributes)?;
        let (found, before) = (attributes.tally.operations, names.tally.operations);
        if found != before && !stop.is_asked() {
            let text = format!(
                "{} has {found} entries, and had {before} a moment before: does somebody write to it?",
                directory.display()
            );
            attributes.tally.failures.add(text);
        }
        Ok(vec![names, attributes])
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Looks {
    AtNames,
    AtAttributes,
}

fn list(directory: &Path, looks: Looks, tally: &mut Tally, stop: &Stop) {
    let mut ahead = vec![directory.to_owned()];
    while let Some(folder) = ahead.pop() {
        if stop.is_asked() {
            return;
        }
        let started = Instant::now();
        match list_folder(&folder, looks, &mut ahead) {
            Ok(entries) => {
                tally.latency.record(started.elapsed());
                tally.operations += entries;
            }
            Err(error) => tally.failures.add(format!("cannot list {}: {error}", folder.display())),
        }
    }
}

/// Counts the entries of a directory, and notes those that are directories.
fn list_folder(folder: &Path, looks: Looks, ahead: &mut Vec<PathBuf>) -> io::Result<u64> {
    let mut entries = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let is_folder = match looks {
            Looks::AtNames => entry.file_type()?.is_dir(),
            Looks::AtAttributes => entry.metadata()?.is_dir(),
        };
        if is_folder {
            ahead.push(entry.path());
        }
        entries += 1;
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_is_counted_once() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir_all(directory.path().join("a/b")).unwrap();
        for name in ["one", "a/two", "a/b/three"] {
            fs::write(directory.path().join(name), "").unwrap();
        }
        let phases = List.round(directory.path(), 0, &Stop::default()).unwrap();
        let counts: Vec<_> = phases.iter().map(|phase| (phase.tally.operations, phase.tally.latency.count())).collect();
        assert_eq!(counts, [(5, 3), (5, 3)]);
        assert!(phases.iter().all(|phase| phase.tally.failures.count == 0));
        let phases = List.round(&directory.path().join("none"), 0, &Stop::default()).unwrap();
        assert!(phases.iter().all(|phase| phase.tally.failures.count == 1 && phase.tally.operations == 0));
    }
}
