//! Changes of strict mounts that are answered only when nobody has anything cached any more that they made untrue.

use std::collections::{HashMap, VecDeque};

use tokio::sync::oneshot;

/// The changes that somebody has yet to let go of something for, by the number of their last event.
#[derive(Debug, Default)]
pub(super) struct PendingInvalidations {
    changes: HashMap<u64, Pending>,
    /// Of each session, in order: the number of the event after which it has let go, and the change.
    sessions: HashMap<u64, VecDeque<(u64, u64)>>,
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
        match waiting.back_mut() {
            // It was concerned by an earlier part of the same change.
            Some((last, of)) if *of == change => *last = event,
            _ => {
                waiting.push_back((event, change));
                self.changes.entry(change).or_default().sessions += 1;
            }
        }
    }

    /// A session keeps nothing that the events up to this one made untrue.
    pub(super) fn acknowledge(&mut self, session: u64, upto: u64) {
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
}
