//! Back-off: how long whoever failed waits before the next attempt.
//!
//! A pause doubles with every failure in a row, up to the longest. Where many processes may fail at the same moment,
//! chance takes a part of it away, so that they do not come back in step. The profiles below are all that there are
//! but for those of the configuration (`ufs.retry_backoff`, `client.worker_backoff`), and of a leader's tasks, whose
//! first pause is their pace (`master/work/src/background.rs`).

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::host;

/// A call or a command that no master answered: short at first, since another one leads within a second or two.
pub const MASTER: Profile = Profile::new(millis(20), millis(500), Jitter::Quarter);
/// The stream of events of a client, which is its lease.
pub const EVENT_STREAM: Profile = Profile::new(millis(50), millis(1000), Jitter::Quarter);
/// The stream of changes of a client: programs wait for it, and it is opened only while the session lives.
pub const CHANGE_STREAM: Profile = Profile::steady(millis(20), Jitter::None);
/// A worker that no master has answered: the next one that leads has to hear of it soon.
pub const HEARTBEAT: Profile = Profile::steady(millis(500), Jitter::Quarter);
/// A block of an fs-mode file: a worker that failed is left alone for longer, and others of the block may answer.
pub const BLOCK: Profile = Profile::steady(millis(50), Jitter::Quarter);
/// A block whose worker has no space: something has to be evicted first, or persisted.
pub const SPACE: Profile = Profile::steady(millis(200), Jitter::Quarter);
/// A file that was written and cannot be committed.
pub const COMMIT: Profile = Profile::steady(millis(500), Jitter::Quarter);
/// A read whose bucket cannot be reached. One that gets through wakes the others of its mount.
pub const BUCKET_READ: Profile = Profile::new(millis(100), millis(1000), Jitter::Quarter);
/// Credentials that cannot be fetched while requests wait for them. When they end is random, so pauses are not.
pub const CREDENTIALS: Profile = Profile::new(millis(250), millis(5_000), Jitter::None);
/// Credentials that cannot be fetched while the former ones are good.
pub const CREDENTIALS_EARLY: Profile = Profile::new(millis(250), millis(30_000), Jitter::None);
/// The process that replays a journal.
pub const REPLAY: Profile = Profile::new(millis(200), millis(5_000), Jitter::Quarter);
/// A worker of this host that keeps a journal: mostly there is none yet.
pub const JOURNAL_HANDOVER: Profile = Profile::new(millis(200), millis(5_000), Jitter::Quarter);
/// The process that serves a mount: its requests wait for the next one.
pub const DAEMON: Profile = Profile::new(millis(10), millis(1000), Jitter::None);
/// A process of `cv local`.
pub const LOCAL_PROCESS: Profile = Profile::new(millis(250), millis(30_000), Jitter::None);
/// The index of a mount whose bucket fails. This and those down to [`LOAD`] are the work of the master that leads.
pub const INDEX: Profile = Profile::new(millis(500), millis(30_000), Jitter::None);
/// A file or a key that the bucket has not got as it should.
pub const PERSIST: Profile = Profile::new(millis(500), millis(30_000), Jitter::None);
/// A whole bucket that fails: one request at a time asks whether it is back.
pub const PERSIST_BUCKET: Profile = Profile::new(millis(200), millis(5_000), Jitter::None);
/// A file or a key that failed because its bucket did, twice as long: another asks next, lest one that is itself to
/// blame keeps all others waiting.
pub const PERSIST_BLAMELESS: Profile = Profile::new(millis(400), millis(10_000), Jitter::None);
/// A block that no other worker could be given.
pub const REPLICA: Profile = Profile::new(millis(1_000), millis(60_000), Jitter::None);
/// Blocks that a worker could not load.
pub const LOAD: Profile = Profile::new(millis(500), millis(2_000), Jitter::None);
/// A listener that could not accept, mostly since there are no descriptors left.
pub const ACCEPT: Profile = Profile::steady(millis(100), Jitter::None);

/// Which part of a pause chance may take away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Jitter {
    None,
    Quarter,
    Half,
}

/// How the pauses between attempts grow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Profile {
    /// After the first failure.
    pub first: Duration,
    /// At most.
    pub longest: Duration,
    pub jitter: Jitter,
}

/// The failures in a row of one piece of work.
#[derive(Clone, Copy, Debug)]
pub struct Backoff {
    profile: Profile,
    failures: u32,
}

const fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

impl Profile {
    pub const fn new(first: Duration, longest: Duration, jitter: Jitter) -> Self {
        Self { first, longest, jitter }
    }

    /// Each pause is as long as the first.
    pub const fn steady(pause: Duration, jitter: Jitter) -> Self {
        Self::new(pause, pause, jitter)
    }

    /// No failure yet.
    pub const fn begin(self) -> Backoff {
        Backoff { profile: self, failures: 0 }
    }

    /// Longest pause after a failure that so many others came before.
    pub fn ceiling(&self, failures: u32) -> Duration {
        self.first.saturating_mul(1 << failures.min(31)).min(self.longest)
    }

    /// A pause after a failure that so many others came before.
    pub fn pause(&self, failures: u32) -> Duration {
        let ceiling = self.ceiling(failures);
        match self.jitter {
            Jitter::None => ceiling,
            Jitter::Quarter => ceiling.mul_f64(host::jitter(0.75..1.0)),
            Jitter::Half => ceiling.mul_f64(host::jitter(0.5..1.0)),
        }
    }
}

impl Backoff {
    /// The pause after another failure.
    pub fn next_pause(&mut self) -> Duration {
        let pause = self.profile.pause(self.failures);
        self.failures = self.failures.saturating_add(1);
        pause
    }

    /// The pause after another failure; `None` where it would not end before the deadline.
    pub fn next_pause_before(&mut self, deadline: Instant) -> Option<Duration> {
        let pause = self.next_pause();
        (Instant::now() + pause < deadline).then_some(pause)
    }

    /// Waits after another failure.
    pub async fn wait(&mut self) {
        sleep(self.next_pause()).await;
    }

    /// Waits after another failure; false, at once, where the pause would not end before the deadline.
    #[must_use]
    pub async fn wait_before(&mut self, deadline: Instant) -> bool {
        let Some(pause) = self.next_pause_before(deadline) else { return false };
        sleep(pause).await;
        true
    }

    /// An attempt went well: the next pause is the first again.
    pub fn reset(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_begin_anew_after_a_success() {
        let mut backoff = DAEMON.begin();
        let pauses: Vec<u128> = (0..9).map(|_| backoff.next_pause().as_millis()).collect();
        assert_eq!(pauses, [10, 20, 40, 80, 160, 320, 640, 1000, 1000]);
        backoff.reset();
        assert_eq!(backoff.next_pause(), DAEMON.first);
        assert_eq!(DAEMON.ceiling(u32::MAX), DAEMON.longest);
        assert_eq!(Profile::new(Duration::MAX, Duration::MAX, Jitter::None).ceiling(5), Duration::MAX);
    }

    #[test]
    fn chance_takes_a_part_of_a_pause_away_and_adds_none() {
        for (jitter, least) in [(Jitter::None, 500), (Jitter::Quarter, 375), (Jitter::Half, 250)] {
            let pauses: Vec<u128> =
                (0..1000).map(|_| Profile::steady(millis(500), jitter).pause(3).as_millis()).collect();
            assert!(pauses.iter().all(|pause| (least..=500).contains(pause)), "{jitter:?}");
            assert_eq!(pauses.iter().any(|pause| *pause != 500), jitter != Jitter::None, "{jitter:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_waits_for_a_deadline() {
        let (began, deadline) = (Instant::now(), Instant::now() + millis(75));
        let mut backoff = DAEMON.begin();
        while backoff.wait_before(deadline).await {}
        assert_eq!(began.elapsed(), millis(70));
        backoff.reset();
        backoff.wait().await;
        assert_eq!(began.elapsed(), millis(80));
    }
}
