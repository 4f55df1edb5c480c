//! What the buckets lack, summed up.

use cavern_proto::master::UnavailableFile;
use tokio::time::Instant;

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
    /// [`Ledger::is_given_up`](super::retry_tracker::Ledger::is_given_up).
    pub given_up: u64,
    /// Of the files, those that have lost blocks, and the first of them.
    pub lost_files: u64,
    pub lost: Vec<UnavailableFile>,
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
