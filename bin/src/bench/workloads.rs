//! What is measured: one function for each workload, which does one round of it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::IntoRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rand::seq::SliceRandom as _;
use rand::{Rng as _, RngCore as _};
use rustix::io::retry_on_intr;
use tokio::time::Instant;

use super::measure::{self, Operation, Phase, Tally, Unit};
use super::rounds::{Stop, Turn};
use super::scratch::Scratch;
use super::tree::Tree;
use crate::error::CliError;

/// Bytes that are read or written at a time.
const PIECE_BYTES: usize = 1 << 20;

const FILES: &[Unit] = &[Unit::Operations("files/s"), Unit::MibPerSecond];
const ENTRIES: &[Unit] = &[Unit::Operations("entries/s")];

static READ_FILE: Operation = Operation { name: "read", timed: "file", units: FILES };
static WRITE_FILE: Operation = Operation { name: "write", timed: "file", units: FILES };
static READ_PIECE: Operation = Operation { name: "read", timed: "read of 1 MiB", units: &[Unit::GibPerSecond] };
static READ_BLOCK: Operation =
    Operation { name: "read", timed: "read", units: &[Unit::Operations("reads/s"), Unit::MibPerSecond] };
static READDIR: Operation = Operation { name: "readdir", timed: "directory", units: ENTRIES };
static READDIR_STAT: Operation = Operation { name: "readdir+stat", timed: "directory with stats", units: ENTRIES };

const fn of_names(name: &'static str) -> Operation {
    Operation { name, timed: name, units: &[Unit::Operations("operations/s")] }
}

static CREATE: Operation = of_names("create");
static STAT: Operation = of_names("stat");
static OPEN: Operation = of_names("open");
static RENAME: Operation = of_names("rename");
static UNLINK: Operation = of_names("unlink");

/// `cv bench files`: every file of a tree is read once, in an order of the round, as a training job reads its images.
pub fn files(turn: &Turn<'_>, tree: &Tree, threads: usize) -> Result<Vec<Phase>, CliError> {
    let mut files: Vec<_> = tree.files.iter().map(|(path, bytes)| (turn.directory.join(path), *bytes)).collect();
    files.shuffle(&mut turn.random(0));
    let read = measure::run(&READ_FILE, threads, |worker, tally| {
        let mut buffer = vec![0; PIECE_BYTES];
        for (path, bytes) in files.iter().skip(worker).step_by(threads) {
            if turn.stop.is_asked() {
                return;
            }
            tally.time(|| read_whole(path, *bytes, &mut buffer));
        }
    })?;
    Ok(vec![read])
}

/// Opens a file, reads it to its end and closes it; it must have as many bytes as it was listed with.
fn read_whole(path: &Path, listed: u64, buffer: &mut [u8]) -> Result<u64, String> {
    let said = |error: io::Error| format!("cannot read {}: {error}", path.display());
    let file = File::open(path).map_err(said)?;
    let mut bytes = 0;
    loop {
        match read_once(&file, buffer).map_err(said)? {
            0 => break,
            count => bytes += count as u64,
        }
    }
    close(file).map_err(said)?;
    if bytes == listed {
        return Ok(bytes);
    }
    Err(format!("{} has {bytes} bytes, and was listed with {listed}: does somebody write to it?", path.display()))
}

fn read_once(file: &File, buffer: &mut [u8]) -> io::Result<usize> {
    Ok(retry_on_intr(|| rustix::io::read(file, &mut *buffer))?)
}

/// `cv bench stream`: each file of a tree from its beginning to its end, by a thread of its own.
pub fn stream(turn: &Turn<'_>, tree: &Tree) -> Result<Vec<Phase>, CliError> {
    let files: Vec<(PathBuf, u64)> =
        tree.files.iter().map(|(path, bytes)| (turn.directory.join(path), *bytes)).collect();
    let read = measure::run(&READ_PIECE, files.len(), |worker, tally| {
        let (path, bytes) = &files[worker];
        if let Err(text) = read_through(path, *bytes, tally, turn.stop) {
            tally.failures.add(text);
        }
    })?;
    Ok(vec![read])
}

fn read_through(path: &Path, listed: u64, tally: &mut Tally, stop: &Stop) -> Result<(), String> {
    let said = |error: io::Error| format!("cannot read {}: {error}", path.display());
    let mut buffer = vec![0; PIECE_BYTES];
    let file = File::open(path).map_err(said)?;
    let mut bytes = 0;
    // What has no more bytes is no read: the end is found by the size.
    while bytes < listed && !stop.is_asked() {
        let before = tally.bytes;
        let is_read = tally.time(|| match read_once(&file, &mut buffer) {
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

/// When a round of random reads ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Length {
    Time(Duration),
    /// Reads of all threads together.
    Reads(u64),
}

/// `cv bench random`: blocks anywhere in one file, by threads with a descriptor each.
pub fn random(
    turn: &Turn<'_>,
    (path, file_bytes): (&Path, u64),
    block_bytes: usize,
    threads: usize,
    length: Length,
) -> Result<Vec<Phase>, CliError> {
    let path = turn.directory.join(path);
    let said = |error: io::Error| format!("cannot read {}: {error}", path.display());
    let blocks = file_bytes / block_bytes as u64;
    let read = measure::run(&READ_BLOCK, threads, |worker, tally| {
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) => return tally.failures.add(said(error)),
        };
        let mut random = turn.random(worker);
        let mut buffer = vec![0; block_bytes];
        let started = Instant::now();
        for done in 0.. {
            let is_done = match length {
                Length::Time(time) => started.elapsed() >= time,
                Length::Reads(reads) => done >= share(reads, threads, worker),
            };
            if is_done || turn.stop.is_asked() {
                return;
            }
            let offset = random.random_range(0..blocks) * block_bytes as u64;
            let is_read = tally.time(|| match file.read_at(&mut buffer, offset) {
                Ok(count) if count == block_bytes => Ok(count as u64),
                Ok(count) => Err(format!("{} has {count} of {block_bytes} bytes at {offset}", path.display())),
                Err(error) => Err(said(error)),
            });
            if !is_read {
                return;
            }
        }
    })?;
    Ok(vec![read])
}

/// What a worker has to do of a whole.
fn share(whole: u64, workers: usize, worker: usize) -> u64 {
    whole / workers as u64 + u64::from((worker as u64) < whole % workers as u64)
}

/// `cv bench meta`: names come, are looked at, opened and renamed, and go.
pub fn meta(turn: &Turn<'_>, count: usize, threads: usize) -> Result<Vec<Phase>, CliError> {
    Scratch::with(turn.directory, threads, |scratch| {
        // Each file by its name, and by that which it gets.
        let names = scratch.files(count, 'a').into_iter().zip(scratch.files(count, 'b'));
        let files: Vec<Vec<(PathBuf, PathBuf)>> =
            names.map(|(before, after)| before.into_iter().zip(after).collect()).collect();
        let step = |operation: &'static Operation, act: fn(&Path, &Path) -> io::Result<()>| {
            turn.stop.check()?;
            measure::run(operation, threads, |worker, tally| {
                for (before, after) in &files[worker] {
                    if turn.stop.is_asked() {
                        return;
                    }
                    let said = |error| format!("cannot {} {}: {error}", operation.name, before.display());
                    tally.time(|| act(before, after).map(|()| 0).map_err(said));
                }
            })
        };
        let stat = |file: &Path, _: &Path| match fs::symlink_metadata(file)?.is_file() {
            true => Ok(()),
            false => Err(io::Error::other("it is no file")),
        };
        Ok(vec![
            step(&CREATE, |file, _| close(OpenOptions::new().write(true).create_new(true).open(file)?))?,
            step(&STAT, stat)?,
            step(&OPEN, |file, _| close(File::open(file)?))?,
            step(&RENAME, |file, renamed| fs::rename(file, renamed))?,
            step(&UNLINK, |_, renamed| fs::remove_file(renamed))?,
        ])
    })
}

/// `cv bench list`: a tree is listed as `ls -R` and then as `ls -lR` do it, by one thread.
pub fn list(turn: &Turn<'_>) -> Result<Vec<Phase>, CliError> {
    let phase = |operation, with_stat| measure::run(operation, 1, |_, tally| list_tree(turn, with_stat, tally));
    let names = phase(&READDIR, false)?;
    let mut attributes = phase(&READDIR_STAT, true)?;
    let (found, before) = (attributes.tally.operations, names.tally.operations);
    if found != before && !turn.stop.is_asked() {
        attributes.tally.failures.add(format!(
            "{} has {found} entries, and had {before} a moment before: does somebody write to it?",
            turn.directory.display()
        ));
    }
    Ok(vec![names, attributes])
}

fn list_tree(turn: &Turn<'_>, with_stat: bool, tally: &mut Tally) {
    let mut ahead = vec![turn.directory.to_owned()];
    while let Some(folder) = ahead.pop() {
        if turn.stop.is_asked() {
            return;
        }
        let started = Instant::now();
        match list_folder(&folder, with_stat, &mut ahead) {
            Ok(entries) => {
                tally.latency.record(started.elapsed());
                tally.operations += entries;
            }
            Err(error) => tally.failures.add(format!("cannot list {}: {error}", folder.display())),
        }
    }
}

/// Counts the entries of a directory, and notes those that are directories.
fn list_folder(folder: &Path, with_stat: bool, ahead: &mut Vec<PathBuf>) -> io::Result<u64> {
    let mut entries = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let is_folder = if with_stat { entry.metadata()?.is_dir() } else { entry.file_type()?.is_dir() };
        if is_folder {
            ahead.push(entry.path());
        }
        entries += 1;
    }
    Ok(entries)
}

/// `cv bench ingest`: files of so many bytes are written, as when a data set is unpacked; each is synced before it is
/// closed, if that is asked for.
pub fn ingest(
    turn: &Turn<'_>,
    count: usize,
    bytes: u64,
    threads: usize,
    is_synced: bool,
) -> Result<Vec<Phase>, CliError> {
    Scratch::with(turn.directory, threads, |scratch| {
        let files = scratch.files(count, 'a');
        let mut write = measure::run(&WRITE_FILE, threads, |worker, tally| {
            let mut piece = vec![0; usize::try_from(bytes).map_or(PIECE_BYTES, |bytes| bytes.min(PIECE_BYTES))];
            turn.random(worker).fill_bytes(&mut piece);
            for (number, path) in (0u64..).zip(&files[worker]) {
                if turn.stop.is_asked() {
                    return;
                }
                // No two files are equal, as far as there are bytes for that.
                piece.iter_mut().zip(number.to_le_bytes()).for_each(|(byte, digit)| *byte = digit);
                tally.time(|| {
                    let written = write_whole(path, &piece, bytes, is_synced, turn.stop);
                    written.map_err(|error| format!("cannot write {}: {error}", path.display()))
                });
            }
        })?;
        turn.stop.check()?;
        if write.tally.failures.count == 0 {
            for text in files.iter().flatten().filter_map(|path| shortcoming(path, bytes)) {
                write.tally.operations -= 1;
                write.tally.failures.add(text);
            }
        }
        Ok(vec![write])
    })
}

/// Writes a new file, in pieces of the same bytes.
fn write_whole(path: &Path, piece: &[u8], bytes: u64, is_synced: bool, stop: &Stop) -> io::Result<u64> {
    let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
    let mut ahead = bytes;
    while ahead > 0 && !stop.is_asked() {
        let length = usize::try_from(ahead).map_or(piece.len(), |ahead| ahead.min(piece.len()));
        file.write_all(&piece[..length])?;
        ahead -= length as u64;
    }
    if is_synced {
        file.sync_all()?;
    }
    close(file)?;
    Ok(bytes)
}

/// What a file that was written is not as it should be.
fn shortcoming(path: &Path, bytes: u64) -> Option<String> {
    match fs::metadata(path) {
        Ok(attributes) if attributes.len() == bytes => None,
        Ok(attributes) => Some(format!("{} has {} of {bytes} bytes", path.display(), attributes.len())),
        Err(error) => Some(format!("{} was written, and is not there: {error}", path.display())),
    }
}

/// Closes a file: a FUSE file system reports there what went wrong with bytes that were written before, and dropping a
/// file does not say it.
///
/// # Errors
/// What `close` says. The descriptor is gone then as well.
#[expect(unsafe_code, reason = "the standard library has no close that answers")]
fn close(file: File) -> io::Result<()> {
    let descriptor = file.into_raw_fd();
    // SAFETY: the file owned the descriptor and has given it up, so nobody else uses or closes it.
    let result = unsafe { libc::close(descriptor) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn<'a>(directory: &'a Path, stop: &'a Stop) -> Turn<'a> {
        Turn { directory, round: 0, seed: 42, stop }
    }

    #[test]
    fn a_round_has_an_order_of_its_own_that_the_seed_decides() {
        let stop = Stop::default();
        let order = |seed, round| {
            let mut numbers: Vec<u32> = (0..100).collect();
            numbers.shuffle(&mut Turn { directory: Path::new("/"), round, seed, stop: &stop }.random(0));
            numbers
        };
        assert!(order(42, 0) == order(42, 0) && order(42, 0) != order(42, 1) && order(42, 0) != order(43, 0));
    }

    #[test]
    fn what_is_missing_or_of_another_size_is_no_success() {
        let directory = tempfile::tempdir().unwrap();
        for number in 0..100 {
            fs::write(directory.path().join(format!("{number:03}")), vec![0; number]).unwrap();
        }
        let stop = Stop::default();
        let tree = Tree::walk(directory.path(), &stop).unwrap();
        tree.drop_pages(directory.path()).unwrap();
        let read = || files(&turn(directory.path(), &stop), &tree, 3).unwrap().remove(0).tally;
        let tally = read();
        assert_eq!((tally.operations, tally.bytes, tally.failures.count), (100, 99 * 100 / 2, 0));
        fs::remove_file(directory.path().join("007")).unwrap();
        fs::write(directory.path().join("008"), "short").unwrap();
        fs::write(directory.path().join("009"), "much longer than it was").unwrap();
        tree.drop_pages(directory.path()).unwrap();
        let tally = read();
        assert_eq!((tally.operations, tally.failures.count), (97, 3));
        let said = tally.failures.first.join("\n");
        assert!(said.contains("007: No such file") && said.contains("008 has 5 bytes"), "{said}");
        assert!(said.contains("009 has 23 bytes, and was listed with 9"), "{said}");
    }

    #[test]
    fn every_byte_is_read_and_a_file_that_became_shorter_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let (one, two) = (directory.path().join("one"), directory.path().join("two"));
        fs::write(&one, vec![1; PIECE_BYTES + 1]).unwrap();
        fs::write(&two, vec![1; 10]).unwrap();
        let stop = Stop::default();
        let tree = Tree::walk(directory.path(), &stop).unwrap();
        let read = || stream(&turn(directory.path(), &stop), &tree).unwrap().remove(0).tally;
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
    fn random_reads_are_counted_and_one_that_is_short_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("big"), vec![0; 40_000]).unwrap();
        let stop = Stop::default();
        let read = |length| {
            let found = (Path::new("big"), 40_000);
            random(&turn(directory.path(), &stop), found, 4096, 3, length).unwrap().remove(0)
        };
        let tally = read(Length::Reads(100)).tally;
        assert_eq!((tally.operations, tally.bytes, tally.failures.count), (100, 409_600, 0));
        let phase = read(Length::Time(Duration::from_millis(20)));
        assert!(phase.tally.operations > 0 && phase.seconds >= 0.02, "{} s", phase.seconds);
        fs::write(directory.path().join("big"), "short").unwrap();
        let tally = read(Length::Reads(100)).tally;
        assert_eq!(tally.failures.count, 3, "each worker gives up: {:?}", tally.failures.first);
        let shares: Vec<u64> = (0..3).map(|worker| share(11, 3, worker)).collect();
        assert_eq!(shares, [4, 4, 3]);
    }

    #[test]
    fn every_name_goes_through_every_step_and_none_is_left() {
        let directory = tempfile::tempdir().unwrap();
        let stop = Stop::default();
        let phases = meta(&turn(directory.path(), &stop), 10, 3).unwrap();
        let done: Vec<_> = phases
            .iter()
            .map(|phase| (phase.operation.name, phase.tally.operations, phase.tally.failures.count))
            .collect();
        assert_eq!(done, ["create", "stat", "open", "rename", "unlink"].map(|name| (name, 10, 0)));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        // An interrupted round leaves nothing, too.
        stop.ask();
        assert!(meta(&turn(directory.path(), &stop), 10, 3).is_err());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn every_entry_is_counted_once() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir_all(directory.path().join("a/b")).unwrap();
        for name in ["one", "a/two", "a/b/three"] {
            fs::write(directory.path().join(name), "").unwrap();
        }
        let stop = Stop::default();
        let phases = list(&turn(directory.path(), &stop)).unwrap();
        let counts: Vec<_> = phases.iter().map(|phase| (phase.tally.operations, phase.tally.latency.count())).collect();
        assert_eq!(counts, [(5, 3), (5, 3)]);
        assert!(phases.iter().all(|phase| phase.tally.failures.count == 0));
        let phases = list(&turn(&directory.path().join("none"), &stop)).unwrap();
        assert!(phases.iter().all(|phase| phase.tally.failures.count == 1 && phase.tally.operations == 0));
    }

    #[test]
    fn every_file_is_written_and_removed() {
        let directory = tempfile::tempdir().unwrap();
        let stop = Stop::default();
        for (is_synced, bytes) in [(false, 1000), (true, 3), (false, 0), (true, (2 * PIECE_BYTES + 5) as u64)] {
            let tally = ingest(&turn(directory.path(), &stop), 11, bytes, 4, is_synced).unwrap().remove(0).tally;
            assert_eq!((tally.operations, tally.bytes), (11, 11 * bytes));
            assert_eq!((tally.failures.count, tally.latency.count()), (0, 11));
            assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        }
    }

    #[test]
    fn a_file_that_is_not_whole_afterwards_is_seen() {
        let directory = tempfile::tempdir().unwrap();
        let (path, stop) = (directory.path().join("file"), Stop::default());
        assert!(shortcoming(&path, 5).unwrap().contains("is not there"));
        let write = || write_whole(&path, b"123", 5, false, &stop);
        assert_eq!(write().unwrap(), 5);
        assert_eq!((shortcoming(&path, 5), fs::read(&path).unwrap()), (None, b"12312".to_vec()));
        fs::write(&path, "123").unwrap();
        assert!(shortcoming(&path, 5).unwrap().ends_with("has 3 of 5 bytes"));
        assert_eq!(write().unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    }

    #[test]
    fn a_closed_file_is_whole() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"content").unwrap();
        close(file.reopen().unwrap()).unwrap();
        assert_eq!(fs::read(file.path()).unwrap(), b"content");
    }
}
