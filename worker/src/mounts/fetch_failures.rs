//! Mounts that this worker cannot fetch from, which clients pass by without a word: the log tells when that begins and
//! when it is over, and each heartbeat which mounts they are.
//!
//! An object may fail where others do not: one that is archived, or that a policy hides. So a success of another object
//! ends a failure only when nothing has failed for [`QUIET`], and each mount has one warning in [`WARN_PAUSE`] at most.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cavern_proto::master::FetchFailure;
use parking_lot::Mutex;
use tokio::time::Instant;
use tracing::{info, warn};

/// Without a failure for so long, a mount is well as soon as something has been fetched.
const QUIET: Duration = Duration::from_secs(60);
/// Between two warnings of one mount.
const WARN_PAUSE: Duration = Duration::from_secs(60);
/// Mounts that a heartbeat names at most.
const REPORTED_MAX: usize = 32;
/// Characters of a message that are kept.
const MESSAGE_CHARS: usize = 1000;

#[derive(Debug, Default)]
pub struct FetchFailures {
    /// By mount.
    failing: Mutex<HashMap<u32, Failing>>,
    /// Whether any mount is failing: spares successes the lock.
    any: AtomicBool,
}

#[derive(Debug)]
struct Failing {
    /// Of the mount, in the namespace.
    path: String,
    /// The object that failed last, and why.
    key: String,
    message: String,
    began: Instant,
    failed_at: Instant,
    is_over: bool,
    /// The warning of this failure, or of one before.
    warned_at: Option<Instant>,
    is_told: bool,
}

impl FetchFailures {
    /// Says whether the log was told.
    pub fn failed(&self, mount_id: u32, path: &str, key: &str, error: &str) -> bool {
        let now = Instant::now();
        let message: String = error.chars().filter(|c| !c.is_control()).take(MESSAGE_CHARS).collect();
        let mut failing = self.failing.lock();
        let known = failing.remove(&mount_id);
        let warned_at = known.as_ref().and_then(|known| known.warned_at);
        let (began, was_told) =
            known.filter(|known| !known.is_over).map_or((None, false), |known| (Some(known.began), known.is_told));
        let tell = began.is_none() && warned_at.is_none_or(|warned| warned + WARN_PAUSE <= now);
        let told = tell.then(|| message.clone());
        let entry = Failing {
            path: path.to_owned(),
            key: key.to_owned(),
            message,
            began: began.unwrap_or(now),
            failed_at: now,
            is_over: false,
            warned_at: if tell { Some(now) } else { warned_at },
            is_told: tell || was_told,
        };
        failing.insert(mount_id, entry);
        self.any.store(true, Ordering::Release);
        drop(failing);
        if let Some(message) = told {
            warn!(mount = path, "cannot fetch from the bucket, and clients read past this worker: {message}");
        }
        tell
    }

    /// Says whether the log was told.
    pub fn succeeded(&self, mount_id: u32, key: &str) -> bool {
        if !self.any.load(Ordering::Acquire) {
            return false;
        }
        let mut failing = self.failing.lock();
        let Some(entry) = failing.get_mut(&mount_id).filter(|entry| !entry.is_over) else { return false };
        if entry.key != key && entry.failed_at.elapsed() < QUIET {
            return false;
        }
        entry.is_over = true;
        let told = std::mem::take(&mut entry.is_told).then(|| (entry.path.clone(), entry.began.elapsed()));
        self.any.store(failing.values().any(|entry| !entry.is_over), Ordering::Release);
        drop(failing);
        let Some((path, failed_for)) = told else { return false };
        let failed_for_ms = failed_for.as_millis() as u64;
        info!(mount = path, failed_for_ms, "fetches from the bucket succeed again");
        true
    }

    /// Forgets mounts that are gone.
    pub fn retain(&self, is_mounted: impl Fn(u32) -> bool) {
        let mut failing = self.failing.lock();
        failing.retain(|mount_id, _| is_mounted(*mount_id));
        self.any.store(failing.values().any(|entry| !entry.is_over), Ordering::Release);
    }

    /// For the master.
    pub fn report(&self) -> Vec<FetchFailure> {
        if !self.any.load(Ordering::Acquire) {
            return Vec::new();
        }
        let failing = self.failing.lock();
        let entries = failing.iter().filter(|(_, entry)| !entry.is_over).take(REPORTED_MAX);
        let entry = |(mount_id, entry): (&u32, &Failing)| FetchFailure {
            worker_id: 0,
            mount_id: *mount_id,
            message: entry.message.clone(),
            age_ms: entry.failed_at.elapsed().as_millis() as u64,
        };
        entries.map(entry).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_failure_is_told_once_and_ends_with_the_object_that_failed_or_after_a_while() {
        let failures = FetchFailures::default();
        assert!(!failures.succeeded(1, "k"));
        assert!(failures.failed(1, "/m", "k", "first"));
        assert!(!failures.failed(1, "/m", "l", "second\n\u{1b}[31m"), "told already");
        let report = failures.report();
        assert_eq!((report.len(), report[0].mount_id, report[0].message.as_str()), (1, 1, "second[31m"));
        assert!(!failures.succeeded(1, "k"), "another object has failed since");
        assert!(failures.succeeded(1, "l"));
        assert!(failures.report().is_empty());

        // A failure soon after shows in the report, not in the log; one of another mount does.
        assert!(!failures.failed(1, "/m", "k", "third"));
        assert!(failures.failed(2, "/n", "k", "other"));
        assert_eq!(failures.report().len(), 2);
        tokio::time::advance(QUIET).await;
        assert!(!failures.succeeded(1, "x"), "its beginning was not told");
        assert!(failures.failed(1, "/m", "k", "fourth"), "a while later");
        failures.retain(|mount_id| mount_id == 1);
        assert_eq!(failures.report()[0].message, "fourth");
        tokio::time::advance(QUIET).await;
        assert!(failures.succeeded(1, "x"));
        assert!(failures.report().is_empty());
    }
}
