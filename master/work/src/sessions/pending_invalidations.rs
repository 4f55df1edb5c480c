//! Changes of strict mounts that are answered only when nobody has anything cached any more that they made untrue.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

/// The changes that somebody has yet to let go of something for, by the number of their last event.
#[derive(Debug, Default)]
pub(super) struct PendingInvalidations {
    changes: HashMap<u64, Pending>,
    /// Of each session, in order: the number of the event after which it has let go, and the change.
    sessions: HashMap<u64, VecDeque<(u64, u64)>>,
    /// Sessions whose clients are told to forget everything. Before they have let go of that, they may have anything
    /// cached that a change makes untrue.
    resets: HashMap<u64, PendingReset>,
}

/// By which event, and when that was sent: what comes before it extends the client's lease to one from then at most.
#[derive(Debug)]
struct PendingReset {
    event: u64,
    sent_at: Option<Instant>,
}

#[derive(Debug, Default)]
struct Pending {
    sessions: usize,
    askers: Vec<oneshot::Sender<()>>,
}

impl PendingInvalidations {
    /// A change concerns a session, whose last event of it has this number.
    pub(super) fn add(&mut self, change: u64, session: u64, event: u64) {
        let waiting = self.sessions.entry(session).or_default();
        let event = waiting.back().map_or(event, |(last, _)| event.max(*last));
        match waiting.back_mut() {
            // It was concerned by an earlier part of the same change.
            Some((last, of)) if *of == change => *last = event,
            _ => {
                waiting.push_back((event, change));
                self.changes.entry(change).or_default().sessions += 1;
            }
        }
    }

    /// The client of a session is told to forget everything, by this event.
    pub(super) fn reset(&mut self, session: u64, event: u64) {
        self.resets.insert(session, PendingReset { event, sent_at: None });
    }

    /// A session is sent all that waits for it.
    pub(super) fn sent(&mut self, session: u64) {
        if let Some(reset) = self.resets.get_mut(&session) {
            reset.sent_at.get_or_insert_with(Instant::now);
        }
    }

    /// The sessions that have yet to let go of everything, and the event after which they have. Whoever was sent that a
    /// lease ago believes nothing of before, and has a kernel that is stuck.
    pub(super) fn resets(&self, lease: Duration) -> impl Iterator<Item = (u64, u64)> {
        let counts = move |reset: &PendingReset| reset.sent_at.is_none_or(|at| at.elapsed() < lease);
        self.resets.iter().filter(move |(_, reset)| counts(reset)).map(|(session, reset)| (*session, reset.event))
    }

    /// A session keeps nothing that the events up to this one made untrue.
    pub(super) fn acknowledge(&mut self, session: u64, upto: u64) {
        if self.resets.get(&session).is_some_and(|reset| reset.event <= upto) {
            self.resets.remove(&session);
        }
        let Some(waiting) = self.sessions.get_mut(&session) else { return };
        while let Some((_, change)) = waiting.pop_front_if(|(event, _)| *event <= upto) {
            Self::settle(&mut self.changes, change);
        }
        if waiting.is_empty() {
            self.sessions.remove(&session);
        }
    }

    /// A session is over, and its client believes nothing that it has.
    pub(super) fn gone(&mut self, session: u64) {
        self.acknowledge(session, u64::MAX);
    }

    /// Is sent to when everybody has let go of what a change made untrue; `None` if that is so already.
    pub(super) fn ask(&mut self, change: u64) -> Option<oneshot::Receiver<()>> {
        let pending = self.changes.get_mut(&change)?;
        let (asker, answer) = oneshot::channel();
        pending.askers.push(asker);
        Some(answer)
    }

    /// The changes that are waited for, in their order.
    pub(super) fn pending(&self) -> Vec<u64> {
        let mut pending: Vec<u64> = self.changes.keys().copied().collect();
        pending.sort_unstable();
        pending
    }

    /// Askers that wait.
    #[cfg(test)]
    pub(super) fn asked(&self) -> usize {
        self.changes.values().map(|pending| pending.askers.len()).sum()
    }

    fn settle(changes: &mut HashMap<u64, Pending>, change: u64) {
        let Some(pending) = changes.get_mut(&change) else { return };
        pending.sessions -= 1;
        if pending.sessions == 0
            && let Some(pending) = changes.remove(&change)
        {
            // One who no longer waits need not be answered.
            for asker in pending.askers {
                let _gone = asker.send(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(5);

    fn resets(pending: &PendingInvalidations) -> Vec<(u64, u64)> {
        pending.resets(LEASE).collect()
    }

    #[test]
    fn a_change_is_answered_when_all_have_let_go() {
        let mut pending = PendingInvalidations::default();
        assert!(pending.ask(5).is_none());
        pending.add(5, 1, 4);
        pending.add(5, 1, 5);
        pending.add(5, 2, 5);
        pending.add(9, 2, 9);
        let mut asked = [pending.ask(5).unwrap(), pending.ask(9).unwrap()];
        pending.acknowledge(1, 4);
        pending.acknowledge(2, 8);
        assert!(asked[0].try_recv().is_err(), "of its last event 1 has yet to let go");
        pending.acknowledge(1, 5);
        assert!(asked[0].try_recv().is_ok() && asked[1].try_recv().is_err());
        pending.gone(2);
        assert!(asked[1].try_recv().is_ok());
        assert!(pending.changes.is_empty() && pending.sessions.is_empty());
    }

    #[test]
    fn who_is_to_forget_everything_may_know_anything_until_it_has() {
        let mut pending = PendingInvalidations::default();
        pending.reset(1, 5);
        pending.reset(1, 7);
        pending.acknowledge(1, 6);
        assert_eq!(resets(&pending), [(1, 7)]);
        // One that concerns it by itself, and another one because of that.
        pending.add(9, 1, 9);
        pending.add(9, 1, 7);
        pending.add(12, 1, 7);
        pending.acknowledge(1, 7);
        assert_eq!((resets(&pending), pending.pending()), (vec![], vec![9, 12]), "it lets go of all in order");
        pending.acknowledge(1, 9);
        assert!(pending.pending().is_empty());
        pending.reset(2, 20);
        pending.gone(2);
        assert!(resets(&pending).is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn who_was_sent_a_lease_ago_that_it_is_to_forget_everything_is_stuck() {
        let mut pending = PendingInvalidations::default();
        pending.reset(1, 5);
        tokio::time::advance(LEASE).await;
        assert_eq!(resets(&pending), [(1, 5)], "it was not sent that");
        pending.sent(1);
        pending.sent(2);
        tokio::time::advance(LEASE / 2).await;
        pending.sent(1);
        assert_eq!(resets(&pending), [(1, 5)]);
        pending.add(9, 1, 5);
        tokio::time::advance(LEASE / 2).await;
        assert_eq!((resets(&pending), pending.pending()), (vec![], vec![9]), "changes of before wait for it");
        pending.reset(1, 10);
        assert_eq!(resets(&pending), [(1, 10)], "it is told once more");
    }
}
