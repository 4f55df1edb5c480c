//! What the host gives and nothing can repeat: the time of day, chance, and tasks that nobody counts. Other modules
//! take them from here (`clippy.toml` forbids the other ways), so that a simulation can own them.
//!
//! Durations are measured with [`tokio::time::Instant`], whose clock the runtime owns. What the master writes down has
//! a clock of its own, above this one.

use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rand::Rng;
use rand::distr::Alphanumeric;
use rustix::time::{ClockId, clock_gettime};
use tokio::task::JoinHandle;

/// Of the files of locks.
const LOCK_MODE: u32 = 0o600;

/// Nanoseconds since the Unix epoch, as the host's clock has it: it can be set, forwards and back.
pub fn wall_ns() -> i64 {
    #[expect(clippy::disallowed_methods, reason = "the one place")]
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

/// How long the host has been up, the time included in which it slept. Nobody can set it.
///
/// For what somebody else measures meanwhile, as a lease: the clock of [`tokio::time::Instant`] stands still in a
/// suspend.
pub fn uptime() -> Duration {
    let uptime = clock_gettime(ClockId::Boottime);
    let (seconds, nanoseconds) = (u64::try_from(uptime.tv_sec), u32::try_from(uptime.tv_nsec));
    Duration::new(seconds.unwrap_or_default(), nanoseconds.unwrap_or_default())
}

/// A source of numbers that nobody can foresee, of this thread.
pub fn random() -> impl Rng {
    #[expect(clippy::disallowed_methods, reason = "the one place")]
    rand::rng()
}

/// A factor for a pause, so that those who wait for the same do not all come back at once.
pub fn jitter(range: Range<f64>) -> f64 {
    random().random_range(range)
}

/// A name that nobody else has: 32 hexadecimal digits.
pub fn unique_name() -> String {
    format!("{:032x}", random().random::<u128>())
}

/// 128 bits that nobody else has.
pub fn random_id() -> [u8; 16] {
    random().random::<u128>().to_be_bytes()
}

/// So many letters and digits that nobody can foresee.
pub fn random_text(length: usize) -> String {
    random().sample_iter(Alphanumeric).take(length).map(char::from).collect()
}

/// The file of a lock (flock), made where it is missing: its owner's alone, since whoever can open it can take it.
///
/// # Errors
/// Those of open(2).
pub fn lock_file(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(LOCK_MODE).open(path)?;
    if file.metadata()?.permissions().mode() & 0o777 != LOCK_MODE {
        // One of before; who may write to it and does not own it cannot close it to others, and takes the lock as well.
        let _ = file.set_permissions(Permissions::from_mode(LOCK_MODE));
    }
    Ok(file)
}

/// Runs a task on the runtime. For those whose handle is waited for; any other belongs to a `TaskTracker`.
pub fn spawn<T: Send + 'static>(task: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    #[expect(clippy::disallowed_methods, reason = "the one place")]
    tokio::spawn(task)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_its_owners_alone_also_where_its_file_was_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let mode = || std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        lock_file(&path).unwrap();
        assert_eq!(mode(), 0o600);
        std::fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        lock_file(&path).unwrap();
        assert_eq!(mode(), 0o600);
        assert!(lock_file(&directory.path().join("absent/lock")).is_err());
    }

    #[test]
    fn names_are_unique_and_pauses_stay_within_their_range() {
        assert_ne!(unique_name(), unique_name());
        assert_eq!(unique_name().len(), 32);
        let text = random_text(40);
        assert!(text.len() == 40 && text != random_text(40) && text.chars().all(|c| c.is_ascii_alphanumeric()));
        assert!((0..1000).map(|_| jitter(0.75..1.25)).all(|factor| (0.75..1.25).contains(&factor)));
        assert!(wall_ns() > 1_700_000_000_000_000_000);
        let before = uptime();
        assert!(before > Duration::ZERO && uptime() >= before);
    }
}
