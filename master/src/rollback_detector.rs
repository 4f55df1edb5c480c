//! Who has been told of later entries of the log than it has: workers and clients outlive the masters, and tell when
//! these were restored from a copy. What they say is told as theirs, and stops nothing.

use std::collections::BTreeMap;

use cavern_proto::master::{HeartbeatRequest, HistoryPosition, Rollback};
use cavern_proto::record::Counters;
use cavern_security::Identity;
use cavern_state::transaction::Changes;
use parking_lot::Mutex;

/// Of so many clients it is known who they are. What they say leaves no worker out.
const CLIENTS_MAX: usize = 1000;

/// Those who have said so in this term.
#[derive(Default)]
pub struct RollbackDetector(Mutex<Known>);

#[derive(Default)]
struct Known {
    /// By their ids: no more than have registered.
    workers: BTreeMap<u64, Rollback>,
    /// By their certificates, where connections are secured: each says it once, whatever it calls itself.
    clients: BTreeMap<String, Rollback>,
}

impl RollbackDetector {
    /// What a worker says in a heartbeat, to a master that has this state, and has applied so much. Says whether the
    /// master lacks what the worker was told.
    pub fn heard_worker(&self, request: &HeartbeatRequest, counters: &Counters, applied: u64) -> bool {
        let HeartbeatRequest { worker_id, data_address, known, kept_blocks, kept_bytes, .. } = request;
        let told = known.unwrap_or_default();
        let had = last_of(&told, counters, applied);
        let workers = &mut self.0.lock().workers;
        if told.applied_index <= had {
            workers.remove(worker_id);
            return false;
        }
        let who = format!("worker {worker_id} at {data_address}");
        let (kept_blocks, kept_bytes) = (*kept_blocks, *kept_bytes);
        let past = Rollback { who, told: told.applied_index, had, kept_blocks, kept_bytes };
        if !workers.contains_key(worker_id) {
            log(&past);
        }
        workers.insert(*worker_id, past);
        true
    }

    /// What a client says of the last event that it has taken in; `owner` where connections are secured.
    pub fn heard_client(&self, (client, owner): (&str, Option<&Identity>), applied_seq: u64, applied: u64) {
        let told = Changes::index_of(applied_seq);
        if told <= applied {
            return;
        }
        let shown = || client.chars().take(128).flat_map(char::escape_debug).collect();
        let name: String = owner.map_or_else(shown, ToString::to_string);
        let past = Rollback { who: format!("client {name}"), told, had: applied, ..Rollback::default() };
        let clients = &mut self.0.lock().clients;
        if clients.is_empty() {
            log(&past);
        }
        if clients.len() < CLIENTS_MAX || clients.contains_key(&name) {
            clients.insert(name, past);
        }
    }

    /// Workers first.
    pub fn all(&self) -> Vec<Rollback> {
        let known = self.0.lock();
        known.workers.values().chain(known.clients.values()).cloned().collect()
    }
}

fn log(past: &Rollback) {
    tracing::error!(
        "{} says that it was told of entry {} of the log, of which this master has entries up to {} from that time: \
         if that is so, the masters were restored from an older copy, and what was changed after it is lost. Workers \
         that say so keep blocks that no file has until they are started again: `cv report` tells how many, and \
         docs/hosts.md what to do",
        past.who,
        past.told,
        past.had
    );
}

/// The last entry that this master has of the history that somebody was told of: of earlier ones it has none that are
/// later than the beginning of its own.
fn last_of(told: &HistoryPosition, counters: &Counters, applied: u64) -> u64 {
    if told.history == counters.history { applied } else { counters.history_after }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_was_told_of_entries_that_are_not_there_is_named_until_he_says_otherwise() {
        let rollbacks = RollbackDetector::default();
        let counters = Counters { history: 5, history_after: 100, ..Counters::default() };
        let heard = |history, applied_index| {
            let known = Some(HistoryPosition { history, applied_index });
            let request = HeartbeatRequest { worker_id: 3, known, kept_blocks: 2, ..HeartbeatRequest::default() };
            rollbacks.heard_worker(&request, &counters, 120)
        };
        for (history, index) in [(5, 120), (5, 0), (0, 0), (4, 100), (0, 100)] {
            assert!(!heard(history, index), "{history} {index}");
        }
        assert_eq!(rollbacks.all(), []);
        for (history, index, had) in [(5, 121, 120), (4, 101, 100), (0, 101, 100), (4, 119, 100)] {
            assert!(heard(history, index), "{history} {index}");
            let [past] = &rollbacks.all()[..] else { panic!("one worker") };
            assert_eq!((past.told, past.had, past.kept_blocks), (index, had, 2));
        }
        assert!(!heard(5, 120));
        assert_eq!(rollbacks.all(), []);
        rollbacks.heard_client(("host:/mnt", None), Changes::position(120, 9), 120);
        assert_eq!(rollbacks.all(), []);
        rollbacks.heard_client(("host:/mnt\u{1b}", None), Changes::position(121, 0), 120);
        assert_eq!(rollbacks.all()[0].who, "client host:/mnt\\u{1b}");
    }

    #[test]
    fn clients_say_it_once_for_each_certificate_and_leave_no_worker_out() {
        let (rollbacks, counters) = (RollbackDetector::default(), Counters { history: 5, ..Counters::default() });
        let liar = Identity::new("c", cavern_security::Role::Client, "liar").unwrap();
        for number in 0..CLIENTS_MAX + 100 {
            rollbacks.heard_client((format!("ghost-{number}").as_str(), Some(&liar)), u64::MAX, 9);
        }
        let whos = || rollbacks.all().into_iter().map(|past| past.who).collect::<Vec<_>>();
        assert_eq!(whos(), ["client cavern://c/client/liar"]);
        for number in 0..CLIENTS_MAX + 100 {
            rollbacks.heard_client((format!("ghost-{number}").as_str(), None), u64::MAX, 9);
        }
        assert_eq!(whos().len(), CLIENTS_MAX);
        let known = Some(HistoryPosition { history: 5, applied_index: 10 });
        // One worker, whatever it says where it is.
        for data_address in ["w:1", "w:2"] {
            let request = HeartbeatRequest {
                worker_id: 3,
                data_address: data_address.into(),
                known,
                ..HeartbeatRequest::default()
            };
            assert!(rollbacks.heard_worker(&request, &counters, 9));
        }
        assert_eq!(whos()[0], "worker 3 at w:2");
        assert_eq!(whos().len(), CLIENTS_MAX + 1);
    }
}
