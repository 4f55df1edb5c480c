//! Having sessions return delegations: whoever looks into a directory, or changes something in it, waits here until the
//! state says that it is delegated to nobody else. By then everything is in the state that the holder had answered for.
//!
//! The holder is sent an event, and once more each second, since its stream may have broken. One whose stream stays
//! broken is waited for until its session is over: the end of a session returns all. That of a client with a
//! certificate is ended as well when it takes in what it is sent and lets go of nothing: whoever makes a directory in
//! a shared one would keep all others from listing that.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use cavern_conf::Failpoint;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::delegations::DirectoryDelegations;
use super::watch::WatchHub;
use crate::error::WorkError;

/// Between two events to the same session about the same directory.
const AGAIN: Duration = Duration::from_secs(1);
/// How many leases a holder has: one in which it is cut off, and the end of its session.
const LEASES: u32 = 2;
/// For how many leases in all others ask a session to return a directory, where clients are not trusted: enough for
/// whatever has to be brought to the workers before.
const LEASES_OF_A_CLIENT: u32 = 6;
/// After so many recalls in a row either nothing is held, or a session is over by that.
pub(crate) const RECALLS: u32 = LEASES_OF_A_CLIENT / LEASES + 1;
/// So long a client comes to hold nothing after one of its sessions was ended for that.
const DISTRUST: Duration = Duration::from_secs(600);
/// So long after a whole mount was recalled no session comes to hold anything: whoever asked for that has its turn.
const PAUSE: Duration = Duration::from_secs(2);
/// All directories of a session, where one could be named.
const ALL: u64 = 0;
/// So long after a directory was recalled nobody comes to hold it again, and twice as long each time that it is
/// recalled soon after that,
const DAMPED: Duration = Duration::from_secs(1);
/// but not for longer than this.
const DAMPED_MAX: Duration = Duration::from_secs(64);
/// Directories for which that is remembered.
const DAMPED_DIRECTORIES: usize = 16_384;

/// The recalls of one term.
pub struct Recalls {
    pub(super) hub: Arc<WatchHub>,
    delegations: Arc<DirectoryDelegations>,
    asked: Mutex<Asked>,
}

#[derive(Default)]
struct Asked {
    /// When a session was sent an event about a directory, or about all.
    sent: HashMap<(u64, u64), Instant>,
    /// For how long a session was asked to return a directory that it still holds, and when last.
    waited: HashMap<(u64, u64), (Duration, Instant)>,
    /// Clients whose sessions were ended, and when.
    distrusted: HashMap<String, Instant>,
    /// Whole mounts that are being recalled, and when the last one was.
    mounts: usize,
    ended: Option<Instant>,
    /// Directories that were recalled lately.
    damped: HashMap<u64, Damping>,
}

/// For how long a directory stays with nobody.
#[derive(Clone, Copy)]
struct Damping {
    until: Instant,
    span: Duration,
}

impl Damping {
    /// Whether another recall comes soon after the last one.
    fn counts(&self, now: Instant) -> bool {
        now < self.until + self.span
    }
}

impl Asked {
    /// A directory is recalled.
    fn damp(&mut self, directory: u64, now: Instant) {
        if self.damped.len() >= DAMPED_DIRECTORIES {
            self.damped.retain(|_, damping| damping.counts(now));
        }
        let before = self.damped.get(&directory).copied().filter(|damping| damping.counts(now));
        if before.is_none() && self.damped.len() >= DAMPED_DIRECTORIES {
            return;
        }
        let span = before.map_or(DAMPED, |before| (before.span * 2).min(DAMPED_MAX));
        self.damped.insert(directory, Damping { until: now + span, span });
    }
}

/// A mount is being recalled as long as this is there.
struct MountRecall<'a> {
    recalls: &'a Recalls,
    /// Whoever asked for that needs a moment without delegations.
    has_turn: bool,
}

impl Drop for MountRecall<'_> {
    fn drop(&mut self) {
        let mut asked = self.recalls.asked.lock();
        asked.mounts -= 1;
        // Whoever comes to hold something from now on is asked anew.
        asked.sent.retain(|(_, directory), _| *directory != ALL);
        if self.has_turn {
            asked.ended = Some(Instant::now());
        }
    }
}

impl Recalls {
    pub fn new(hub: Arc<WatchHub>) -> Self {
        Self { delegations: hub.delegations(), hub, asked: Mutex::default() }
    }

    pub fn delegations(&self) -> &DirectoryDelegations {
        &self.delegations
    }

    /// Returns when no other session than the asker (0 for whoever has none) holds a directory.
    ///
    /// # Errors
    /// [`WorkError::Deadline`] when the holder does not return it.
    pub async fn recall(&self, directory: u64, asker: u64) -> Result<(), WorkError> {
        self.recall_all(&[directory], asker).await
    }

    /// Recalls several directories.
    pub async fn recall_all(&self, directories: &[u64], asker: u64) -> Result<(), WorkError> {
        if self.delegations.is_empty() {
            return Ok(());
        }
        let holders = || {
            let other = |directory: &u64| Some((self.delegations.other_holder(*directory, asker)?, *directory));
            directories.iter().filter_map(other).collect()
        };
        self.wait(holders, false).await
    }

    /// Returns when nobody holds the delegation of any directory of a mount. New ones may be held right after that.
    ///
    /// # Errors
    /// As [`Self::recall`].
    pub async fn recall_mount(&self, mount_id: u32) -> Result<(), WorkError> {
        self.return_mount(mount_id, true).await
    }

    /// Returns when everything is made in a mount that sessions had answered by now; they may go on.
    ///
    /// # Errors
    /// As [`Self::recall`].
    pub async fn settle_mount(&self, mount_id: u32) -> Result<(), WorkError> {
        self.return_mount(mount_id, false).await
    }

    async fn return_mount(&self, mount_id: u32, has_turn: bool) -> Result<(), WorkError> {
        self.asked.lock().mounts += 1;
        let _whole = MountRecall { recalls: self, has_turn };
        self.wait(|| self.delegations.delegations_in(mount_id), true).await
    }

    /// Has a directory recalled, without waiting for that.
    pub fn ask(&self, directory: u64) {
        if let Some(holder) = self.delegations.holder(directory) {
            self.send(&[(holder, directory)]);
        }
    }

    /// Whether sessions of a client may come to hold what they make: not while somebody needs a whole mount, and not
    /// soon after one had to be ended.
    pub fn allow_delegations(&self, client: Option<&str>) -> bool {
        let asked = self.asked.lock();
        let is_trusted =
            client.and_then(|client| asked.distrusted.get(client)).is_none_or(|ended| ended.elapsed() >= DISTRUST);
        is_trusted && asked.mounts == 0 && asked.ended.is_none_or(|ended| ended.elapsed() >= PAUSE)
    }

    /// Whether a directory was recalled so lately that nobody is to hold it yet.
    pub(super) fn is_damped(&self, directory: u64) -> bool {
        self.asked.lock().damped.get(&directory).is_some_and(|damping| Instant::now() < damping.until)
    }

    /// Waits until there are no holders of directories; of a whole mount each is asked for all that it holds.
    async fn wait(&self, holders: impl Fn() -> Vec<(u64, u64)>, of_all: bool) -> Result<(), WorkError> {
        let deadline = Instant::now() + self.hub.lease() * LEASES;
        loop {
            let returned = self.delegations.next_return();
            tokio::pin!(returned);
            // Registered before looking, so that none is missed.
            returned.as_mut().enable();
            let holders = holders();
            let Some((session, _)) = holders.first() else { return Ok(()) };
            let now = Instant::now();
            if now >= deadline {
                return Err(WorkError::Deadline(format!(
                    "{} has a delegation here and does not return it: try again, or end it",
                    self.hub.describe(*session)
                )));
            }
            self.end_stubborn(&holders);
            match of_all {
                true => {
                    let sessions: HashSet<_> = holders.iter().map(|(session, _)| (*session, ALL)).collect();
                    self.send(&Vec::from_iter(sessions));
                }
                false => self.send(&holders),
            }
            let _again = tokio::time::timeout_at(deadline.min(now + AGAIN), returned).await;
        }
    }

    /// Ends the sessions of clients with certificates that were asked for long, and let go of nothing.
    fn end_stubborn(&self, holders: &[(u64, u64)]) {
        let now = Instant::now();
        let mut late = HashSet::new();
        {
            let mut asked = self.asked.lock();
            asked.waited.retain(|(session, directory), _| self.delegations.holder(*directory) == Some(*session));
            for holder in holders {
                let (waited, last) = asked.waited.entry(*holder).or_insert((Duration::ZERO, now));
                *waited += now.duration_since(*last).min(2 * AGAIN);
                *last = now;
                if *waited >= self.hub.lease() * LEASES_OF_A_CLIENT {
                    late.insert(holder.0);
                }
            }
        }
        for session in late {
            let Some(owner) = self.hub.owner_of(session) else { continue };
            let Some(client) = owner.client_name() else { continue };
            tracing::warn!(client, session, "a session is ended that does not let go of directories others ask for");
            let mut asked = self.asked.lock();
            asked.distrusted.retain(|_, ended| now.duration_since(*ended) < DISTRUST);
            asked.distrusted.insert(client.to_owned(), now);
            drop(asked);
            self.hub.end(session);
        }
    }

    /// Sends each holder its event, unless it was sent it a moment ago.
    fn send(&self, holders: &[(u64, u64)]) {
        let now = Instant::now();
        let mut due = HashSet::new();
        let mut asked = self.asked.lock();
        asked.sent.retain(|_, sent| now.duration_since(*sent) < AGAIN);
        for holder in holders {
            if !asked.sent.contains_key(holder) && self.hub.send_recall(holder.0, holder.1) {
                due.insert(*holder);
                Failpoint::RecallSent.pass();
            }
        }
        due.iter().filter(|(_, directory)| *directory != ALL).for_each(|(_, directory)| asked.damp(*directory, now));
        asked.sent.extend(due.into_iter().map(|holder| (holder, now)));
    }
}
