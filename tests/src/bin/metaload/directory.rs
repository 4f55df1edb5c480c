//! The same operations as programs make them, in a directory of any file system.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use crate::rates::measure_threads;
use crate::{Failure, LISTED};

/// A program with a directory of its own.
struct Program {
    directory: PathBuf,
    files: usize,
    next: usize,
}

impl Program {
    fn begin(above: &Path, number: usize) -> io::Result<Self> {
        let directory = above.join(format!("c{number}-{}", std::process::id()));
        fs::create_dir(&directory)?;
        Ok(Self { directory, files: 0, next: 0 })
    }

    fn create(&mut self) -> io::Result<bool> {
        File::create_new(self.old_path(self.files))?;
        self.files += 1;
        Ok(true)
    }

    /// The next file, round and round.
    fn any(&mut self) -> PathBuf {
        self.next = (self.next + 1) % self.files.max(1);
        self.old_path(self.next)
    }

    /// The number of the next file, once.
    fn one(&mut self) -> Option<usize> {
        self.next += 1;
        (self.next <= self.files).then(|| self.next - 1)
    }

    fn old_path(&self, number: usize) -> PathBuf {
        self.directory.join(format!("f{number}"))
    }

    fn new_path(&self, number: usize) -> PathBuf {
        self.directory.join(format!("g{number}"))
    }
}

/// The rates of all operations, one kind after the other.
pub fn run(directory: &Path, tasks: usize, time: Duration) -> Result<Value, Failure> {
    let begin = (0..tasks).map(|number| Program::begin(directory, number));
    let mut programs = begin.collect::<io::Result<Vec<_>>>()?;
    let listed = directory.join(format!("listed-{}", std::process::id()));
    fs::create_dir(&listed)?;
    for number in 0..LISTED {
        File::create_new(listed.join(format!("f{number}")))?;
    }
    let restart = |programs: &mut Vec<Program>| programs.iter_mut().for_each(|program| program.next = 0);

    let create = measure_threads(&mut programs, time, Program::create)?;
    let stat = measure_threads(&mut programs, time, |program| fs::metadata(program.any()).map(|_| true))?;
    let open = measure_threads(&mut programs, time, |program| File::open(program.any()).map(|_| true))?;
    let readdir = measure_threads(&mut programs, time, |_| match fs::read_dir(&listed)?.count() {
        LISTED => Ok(true),
        entries => Err(io::Error::other(format!("{entries} of {LISTED} entries"))),
    })?;
    restart(&mut programs);
    let rename = measure_threads(&mut programs, time, |program| {
        let Some(number) = program.one() else { return Ok(false) };
        fs::rename(program.old_path(number), program.new_path(number)).map(|()| true)
    })?;
    // Those that were not renamed stay.
    for program in &mut programs {
        program.files = program.files.min(program.next);
    }
    restart(&mut programs);
    let unlink = measure_threads(&mut programs, time, |program| {
        let Some(number) = program.one() else { return Ok(false) };
        fs::remove_file(program.new_path(number)).map(|()| true)
    })?;
    Ok(json!({
        "create": create, "stat": stat, "open": open, "readdir of 1,000": readdir, "rename": rename, "unlink": unlink,
    }))
}
