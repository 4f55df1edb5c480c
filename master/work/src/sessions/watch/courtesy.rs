//! Sessions whose lease is over and that are kept nevertheless: what their clients have answered in directories that
//! they hold is made when they are back, as long as nobody else has asked for what they hold.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use tokio::time::Instant;

/// How long a session is kept that nobody takes up: what it has open stays as long.
const KEPT: Duration = Duration::from_secs(600);

/// Sessions that are kept beyond their leases.
#[derive(Default)]
pub(super) struct CourtesySessions {
    /// When the lease of each was over.
    since: HashMap<u64, Instant>,
    /// Sessions without a stream that end with their lease, or have ended.
    ending: HashSet<u64>,
}

impl CourtesySessions {
    pub(super) fn add(&mut self, session: u64) {
        self.since.insert(session, Instant::now());
    }

    /// A session without a stream is not kept any longer than its lease.
    pub(super) fn end(&mut self, session: u64) {
        self.ending.insert(session);
    }

    /// A session has a stream again, or is no more.
    pub(super) fn forget(&mut self, session: u64) {
        self.since.remove(&session);
        self.ending.remove(&session);
    }

    pub(super) fn contains(&self, session: u64) -> bool {
        self.since.contains_key(&session)
    }

    /// Whether a session is kept that lapsed when it was added, or else at that moment.
    pub(super) fn is_courtesy(&self, session: u64, or_else: Instant) -> bool {
        let since = self.since.get(&session).unwrap_or(&or_else);
        !self.ending.contains(&session) && since.elapsed() < KEPT
    }

    /// Takes out those that are not kept any longer: who holds nothing is not.
    pub(super) fn take_over(&mut self, holds: impl Fn(u64) -> bool) -> Vec<u64> {
        let Self { since, ending } = self;
        let is_over = |session: &u64, since: &mut Instant| {
            ending.contains(session) || since.elapsed() >= KEPT || !holds(*session)
        };
        since.extract_if(is_over).map(|(session, _)| session).collect()
    }
}
