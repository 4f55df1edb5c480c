//! What a disk does, tried with a file that is gone afterwards. It has a name meanwhile: of a file without one some
//! file systems sync nothing.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::Duration;

use cavern_conf::host;
use rand::RngCore as _;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use tokio::time::Instant;

const PIECE_BYTES: usize = 1 << 20;
const PIECES: u32 = 32;
const SYNCED_BYTES: usize = 4096;
const SYNCS: u64 = 32;
/// A slow disk is measured by less.
const LONGEST: Duration = Duration::from_millis(300);
/// What the file is called; one that is so old is of a command that was killed.
const NAME: &str = ".cavern-doctor-";
const LEFT_AFTER: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Measured {
    /// The middle one of some writes of 4 KiB, each with its sync.
    pub sync: Duration,
    /// Written and synced.
    pub bytes_per_second: u64,
    pub punches_holes: bool,
}

impl Measured {
    /// *Blocking*, for a second at most, or as long as the disk hangs.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn of(directory: &Path) -> io::Result<Self> {
        remove_left(directory);
        let mut named = tempfile::Builder::new().prefix(NAME).tempfile_in(directory)?;
        let mut piece = vec![0; PIECE_BYTES];
        host::random().fill_bytes(&mut piece);
        let bytes_per_second = speed(named.as_file_mut(), &piece)?;
        let sync = sync_time(named.as_file(), &piece[..SYNCED_BYTES])?;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let punches_holes = match fallocate(named.as_file(), flags, 0, SYNCED_BYTES as u64) {
            Ok(()) => true,
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => false,
            Err(cause) => return Err(cause.into()),
        };
        Ok(Self { sync, bytes_per_second, punches_holes })
    }
}

/// As far as this user may.
fn remove_left(directory: &Path) {
    let files = fs::read_dir(directory).into_iter().flatten().flatten();
    for file in files.filter(|file| file.file_name().as_bytes().starts_with(NAME.as_bytes())) {
        let age = file.metadata().and_then(|metadata| metadata.modified()).ok().and_then(|time| time.elapsed().ok());
        if age.is_some_and(|age| age > LEFT_AFTER) {
            let _ = fs::remove_file(file.path());
        }
    }
}

fn speed(file: &mut File, piece: &[u8]) -> io::Result<u64> {
    let begun = Instant::now();
    let mut written = 0_u64;
    for _ in 0..PIECES {
        file.write_all(piece)?;
        written += piece.len() as u64;
        if begun.elapsed() > LONGEST {
            break;
        }
    }
    file.sync_data()?;
    Ok((written as f64 / begun.elapsed().as_secs_f64().max(1e-6)) as u64)
}

/// Of writes to what the file has already, so that nothing else than the data has to be synced.
fn sync_time(file: &File, bytes: &[u8]) -> io::Result<Duration> {
    let (begun, mut times) = (Instant::now(), Vec::new());
    for number in 0..SYNCS {
        let one = Instant::now();
        file.write_all_at(bytes, number * bytes.len() as u64)?;
        file.sync_data()?;
        times.push(one.elapsed());
        if begun.elapsed() > LONGEST {
            break;
        }
    }
    times.sort_unstable();
    Ok(times.get(times.len() / 2).copied().unwrap_or_default())
}
