//! Who has been told of later entries of the log than it has: workers and clients outlive the masters, and tell when
//! these were restored from a copy. What they say is told as theirs, and stops nothing.

use std::collections::BTreeMap;

use cavern_proto::master::{HeartbeatRequest, LogPast, LostPast};
use cavern_proto::record::Counters;
use parking_lot::Mutex;

use crate::state::transaction::Changes;

/// Of so many it is known who they are.
const KNOWN_MAX: usize = 1000;

/// Those who have said so in this term.
#[derive(Default)]
pub struct LostPasts {
    known: Mutex<BTreeMap<String, LostPast>>,
}

impl LostPasts {
    /// What a worker says in a heartbeat, to a master that has this state, and has applied so much. Says whether the
    /// master lacks what the worker was told.
    pub fn heard_worker(&self, request: &HeartbeatRequest, counters: &Counters, applied: u64) -> bool {
        let HeartbeatRequest { worker_id, data_address, known, kept_blocks, kept_bytes, .. } = request;
        let (who, told) = (format!("worker {worker_id} at {data_address}"), known.unwrap_or_default());
        let had = last_of(&told, counters, applied);
        if told.applied_index <= had {
            self.known.lock().remove(&who);
            return false;
        }
        let (kept_blocks, kept_bytes) = (*kept_blocks, *kept_bytes);
        self.note(LostPast { who, told: told.applied_index, had, kept_blocks, kept_bytes });
        true
    }

    /// What a client says of the last event that it has taken in.
    pub fn heard_client(&self, client: &str, applied_seq: u64, applied: u64) {
        let told = Changes::index_of(applied_seq);
        if told > applied {
            let who = format!("client {}", client.chars().take(128).collect::<String>());
            self.note(LostPast { who, told, had: applied, ..LostPast::default() });
        }
    }

    fn note(&self, past: LostPast) {
        let mut known = self.known.lock();
        if known.is_empty() {
            tracing::error!(
                "{} says that it was told of entry {} of the log, of which this master has entries up to {} from that \
                 time: if that is so, the masters were restored from an older copy, and what was changed after it is \
                 lost. Workers that say so keep blocks that no file has until they are started again: `cv report` \
                 tells how many, and docs/hosts.md what to do",
                past.who,
                past.told,
                past.had
            );
        }
        if known.len() < KNOWN_MAX || known.contains_key(&past.who) {
            known.insert(past.who.clone(), past);
        }
    }

    pub fn all(&self) -> Vec<LostPast> {
        self.known.lock().values().cloned().collect()
    }
}

/// The last entry that this master has of the history that somebody was told of: of earlier ones it has none that are
/// later than the beginning of its own.
fn last_of(told: &LogPast, counters: &Counters, applied: u64) -> u64 {
    if told.history == counters.history { applied } else { counters.history_after }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_was_told_of_entries_that_are_not_there_is_named_until_he_says_otherwise() {
        let pasts = LostPasts::default();
        let counters = Counters { history: 5, history_after: 100, ..Counters::default() };
        let heard = |history, applied_index| {
            let known = Some(LogPast { history, applied_index });
            let request = HeartbeatRequest { worker_id: 3, known, kept_blocks: 2, ..HeartbeatRequest::default() };
            pasts.heard_worker(&request, &counters, 120)
        };
        for (history, index) in [(5, 120), (5, 0), (0, 0), (4, 100), (0, 100)] {
            assert!(!heard(history, index), "{history} {index}");
        }
        assert_eq!(pasts.all(), []);
        for (history, index, had) in [(5, 121, 120), (4, 101, 100), (0, 101, 100), (4, 119, 100)] {
            assert!(heard(history, index), "{history} {index}");
            let [past] = &pasts.all()[..] else { panic!("one worker") };
            assert_eq!((past.told, past.had, past.kept_blocks), (index, had, 2));
        }
        assert!(!heard(5, 120));
        assert_eq!(pasts.all(), []);
        pasts.heard_client("host:/mnt", Changes::position(120, 9), 120);
        assert_eq!(pasts.all(), []);
        pasts.heard_client("host:/mnt", Changes::position(121, 0), 120);
        assert_eq!(pasts.all()[0].who, "client host:/mnt");
    }
}
