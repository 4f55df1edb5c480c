//! What the buckets lack, summed up, and how much is written to them.

use std::collections::VecDeque;
use std::time::Duration;

use cavern_proto::master::UnavailableFile;
use parking_lot::Mutex;
use tokio::time::Instant;

/// The rate is that of so many seconds.
const WINDOW: Duration = Duration::from_secs(10);

/// Which changes are looked at.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChangeRange {
    /// Number of the last of them.
    pub up_to: u64,
    /// Somebody has been waiting for them since then: failures before that do not count, nor do objects whose keys are
    /// to be written anew, which is a change of its own.
    pub expedited_since: Option<Instant>,
}

impl ChangeRange {
    pub(super) const ALL: Self = Self { up_to: u64::MAX, expedited_since: None };
}

/// Sums up what a bucket lacks.
#[derive(Debug, Default)]
pub struct Backlog {
    /// Files, directories and links.
    pub files: u64,
    /// Of files of which the bucket lacks the content.
    pub bytes: u64,
    /// Objects that are to be deleted.
    pub deletions: u64,
    /// Of all these, those that nobody should wait for any longer: see
    /// [`RetryTracker::is_given_up`](super::retry_tracker::RetryTracker::is_given_up).
    pub given_up: u64,
    /// Of the files, those that have lost blocks, and the first of them.
    pub lost_files: u64,
    pub lost: Vec<UnavailableFile>,
    /// Of the files, those whose last upload was in vain, since they were written to meanwhile.
    pub changing_files: u64,
    pub(super) oldest_ns: i64,
    error: Option<(Instant, String)>,
}

impl Backlog {
    /// Files and objects that are to be dealt with.
    pub fn items(&self) -> u64 {
        self.files + self.deletions
    }

    /// The last failure; empty without any.
    pub fn last_error(&self) -> &str {
        self.error.as_ref().map_or("", |(_, error)| error)
    }

    /// Together with that of another mount.
    pub(super) fn and(mut self, other: Self) -> Self {
        self.files += other.files;
        // Files may be as long as they like, and take nothing.
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.deletions += other.deletions;
        self.given_up += other.given_up;
        self.lost_files += other.lost_files;
        self.changing_files += other.changing_files;
        self.lost.extend(other.lost);
        if other.oldest_ns != 0 {
            self.older(other.oldest_ns);
        }
        self.failed(other.error, ChangeRange::ALL);
        self
    }

    pub(super) fn older(&mut self, ns: i64) {
        if self.oldest_ns == 0 || ns < self.oldest_ns {
            self.oldest_ns = ns;
        }
    }

    pub(super) fn failed(&mut self, error: Option<(Instant, String)>, span: ChangeRange) {
        if let Some((at, _)) = &error
            && span.expedited_since.is_none_or(|since| since <= *at)
            && self.error.as_ref().is_none_or(|(last, _)| last < at)
        {
            self.error = error;
        }
    }
}

/// What was written lately.
#[derive(Default)]
pub(super) struct Throughput(Mutex<VecDeque<(Instant, u64, u64)>>);

impl Throughput {
    pub(super) fn add(&self, bytes: u64) {
        let now = Instant::now();
        let mut recent = self.0.lock();
        match recent.back_mut() {
            Some((began, files, sum)) if began.elapsed() < Duration::from_millis(250) => {
                *files += 1;
                *sum += bytes;
            }
            _ => recent.push_back((now, 1, bytes)),
        }
        while recent.front().is_some_and(|(began, _, _)| began.elapsed() > WINDOW) {
            recent.pop_front();
        }
    }

    /// Files and bytes per second.
    pub(super) fn rate(&self) -> (u64, u64) {
        let recent = self.0.lock();
        let recent = recent.iter().filter(|(began, _, _)| began.elapsed() <= WINDOW);
        let (files, bytes) = recent.fold((0, 0), |(files, bytes), (_, more, sum)| (files + more, bytes + sum));
        (files / WINDOW.as_secs(), bytes / WINDOW.as_secs())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_with_sparse_files_of_any_length_are_summed_up() {
        let of = |bytes| Backlog { files: 2, bytes, ..Backlog::default() };
        let both = of(u64::MAX).and(of(1 << 44));
        assert_eq!((both.files, both.bytes), (4, u64::MAX));
    }
}
