//! The log against a model of it, under random changes, readers, restarts, and a disk that takes its time.

use std::collections::BTreeMap;
use std::mem;
use std::path::Path;

use cavern_conf::process::Metrics;
use cavern_proto::master::Job;
use cavern_proto::record::command::Command as Kind;
use cavern_proto::record::{Command, CommandBatch};
use cavern_state::{Lock, Resources};
use openraft::EntryPayload;
use openraft::type_config::TypeConfigExt as _;
use proptest::prelude::*;

use super::*;
use crate::position::APPLIED_KEY;
use crate::types::{Batch, log_id};

const STEP: u64 = 1000;

#[derive(Clone, Debug)]
enum Step {
    /// So many entries of so many bytes, each in an append of its own or all in one.
    Append(u64, usize, bool),
    /// This share of the log, from its end or from its begin, in hundredths.
    Truncate(u64),
    Purge(u64),
    Vote(u64),
    /// From now on nothing reaches the disk; everything is readable nevertheless.
    Hold,
    Release,
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (1..20u64, 0..500usize, any::<bool>()).prop_map(|(count, len, apart)| Step::Append(count, len, apart)),
        1 => (0..60u64).prop_map(Step::Truncate),
        1 => (0..110u64).prop_map(Step::Purge),
        1 => (1..100u64).prop_map(Step::Vote),
        2 => Just(Step::Hold),
        2 => Just(Step::Release),
        1 => Just(Step::Restart),
    ]
}

fn entry(term: u64, index: u64, length: usize) -> Entry {
    let job = Job { path: "x".repeat(length), ..Job::default() };
    let commands = vec![Command { command: Some(Kind::PutJob(job)) }];
    let payload = EntryPayload::Normal(Batch(CommandBatch { commands, now_ns: i64::try_from(index).unwrap() }));
    Entry { log_id: log_id(term, 1, index), payload }
}

/// What of an entry is compared.
fn bytes(entry: &Entry) -> Vec<u8> {
    encode_entry(entry.clone()).unwrap().0
}

/// What the log is to be, and the log.
struct Tested {
    entries: BTreeMap<u64, Vec<u8>>,
    purged: Option<LogId>,
    next: u64,
    term: u64,
    vote: Option<Vote>,
    flushes: Vec<oneshot::Receiver<Result<(), io::Error>>>,
    store: LogStore,
    thread: JoinHandle<()>,
    metrics: Arc<Metrics>,
}

impl Tested {
    fn open(directory: &Path) -> Self {
        let database =
            CurrentDatabase::open(directory, Resources::of_cache(1 << 20), Lock::take(directory).unwrap()).unwrap();
        let metrics = Metrics::new("master");
        let (store, thread) = LogStore::start(Arc::new(database), STEP, ConsensusMetrics::register(&metrics)).unwrap();
        let (entries, flushes) = (BTreeMap::new(), Vec::new());
        Self { entries, purged: None, next: 0, term: 1, vote: None, flushes, store, thread, metrics }
    }

    async fn append(&mut self, entries: Vec<Entry>) {
        for entry in &entries {
            self.entries.insert(entry.log_id.index, bytes(entry));
            self.next = entry.log_id.index + 1;
        }
        let (flushed, flush) = Types::oneshot();
        self.flushes.push(flush);
        self.store.append(entries, IOFlushed::signal(flushed)).await.unwrap();
    }

    /// Everything is on disk.
    async fn settle(&mut self) {
        for flush in self.flushes.drain(..) {
            flush.await.unwrap().unwrap();
        }
        let first = self.entries.keys().next().copied().unwrap_or(self.next);
        let kept: Vec<_> = self.store.read_disk(0, u64::MAX, usize::MAX).unwrap().iter().map(bytes).collect();
        assert_eq!(kept, self.entries.range(first..).map(|(_, bytes)| bytes.clone()).collect::<Vec<_>>());
    }

    async fn change(&mut self, step: Step) {
        let (first, next) = (self.entries.keys().next().copied().unwrap_or(self.next), self.next);
        match step {
            Step::Append(count, length, apart) => {
                let entries: Vec<_> = (next..next + count).map(|index| entry(self.term, index, length)).collect();
                if apart {
                    for entry in entries {
                        self.append(vec![entry]).await;
                    }
                } else {
                    self.append(entries).await;
                }
            }
            Step::Truncate(share) => {
                let from = next - (next - first) * share / 100;
                self.entries.split_off(&from);
                self.next = from;
                self.term += 1;
                let last = from.checked_sub(1).map(|last| log_id(1, 1, last));
                self.store.truncate_after(last).await.unwrap();
            }
            Step::Purge(share) => {
                // Also of what is not there yet: a snapshot came from another master.
                let upto = first + (next - first + 5) * share / 100;
                self.entries = self.entries.split_off(&(upto + 1));
                self.next = next.max(upto + 1);
                self.purged = Some(log_id(1, 1, upto));
                self.store.purge(log_id(1, 1, upto)).await.unwrap();
            }
            Step::Vote(term) => {
                self.vote = Some(Vote::new(term, 3));
                self.store.save_vote(&Vote::new(term, 3)).await.unwrap();
                assert_eq!(self.store.read_vote().await.unwrap(), self.vote);
            }
            Step::Hold | Step::Release | Step::Restart => {}
        }
    }

    /// What other masters are sent, from each entry on.
    async fn assert_sendable(&mut self) {
        let first = self.entries.keys().next().copied().unwrap_or(self.next);
        for start in first..self.next {
            let sent = self.store.limited_get_log_entries(start, self.next).await.unwrap();
            let expected = self.entries.range(start..).map(|(_, bytes)| bytes);
            assert!(!sent.is_empty() && sent.iter().map(bytes).eq(expected.take(sent.len()).cloned()), "from {start}");
        }
    }

    /// What is applied; the second time from the disk.
    async fn assert_readable(&mut self) {
        for _ in 0..2 {
            let first = self.entries.keys().next().copied().unwrap_or(self.next);
            let read = self.store.try_get_log_entries(first..self.next).await.unwrap();
            assert!(read.iter().map(bytes).eq(self.entries.values().cloned()), "{first}..{}", self.next);
        }
        let state = self.store.get_log_state().await.unwrap();
        assert_eq!(state.last_purged_log_id, self.purged);
        let last = self.entries.keys().last().copied().or(self.purged.map(|id| id.index));
        assert_eq!(state.last_log_id.map(|id| id.index), last);
        let total: usize = self.entries.values().map(Vec::len).sum();
        // Where the log was cut between two marks, a part of a step is a guess.
        assert!(
            self.store.size().lock().bytes_after(None).abs_diff(total as u64) < 4 * STEP,
            "{total} bytes in the log"
        );
    }

    /// Closes the database: its directory can go.
    fn end(self) {
        drop(self.store);
        self.thread.join().unwrap();
    }

    /// Ends it, and begins again with what is on disk.
    async fn restart(mut self, directory: &Path) -> Self {
        let (entries, purged, next, term, vote) =
            (mem::take(&mut self.entries), self.purged, self.next, self.term, self.vote);
        self.end();
        let mut again = Self { entries, purged, next, term, vote, ..Self::open(directory) };
        assert_eq!(again.store.read_vote().await.unwrap(), again.vote);
        again
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn the_log_is_what_was_appended_and_not_taken_away(steps in prop::collection::vec(step(), 1..40)) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let directory = tempfile::tempdir().unwrap();
            let mut tested = Tested::open(directory.path());
            let mut disk = None;
            for step in steps {
                let waits = matches!(step, Step::Truncate(_) | Step::Purge(_) | Step::Vote(_));
                let is_full = tested.flushes.len() + 20 > QUEUE;
                if waits || is_full || matches!(step, Step::Release | Step::Restart) {
                    disk = None;
                }
                match step {
                    Step::Restart => {
                        tested.settle().await;
                        tested = tested.restart(directory.path()).await;
                    }
                    Step::Hold if disk.is_none() => disk = Some(tested.store.shared.disk.clone().lock_owned().await),
                    step => tested.change(step).await,
                }
                tested.assert_sendable().await;
                if disk.is_none() {
                    tested.assert_readable().await;
                    tested.settle().await;
                }
            }
            drop(disk);
            tested.end();
        });
    }
}

#[tokio::test]
async fn appends_share_a_sync_and_nobody_waits_for_it() {
    let directory = tempfile::tempdir().unwrap();
    let mut tested = Tested::open(directory.path());
    let disk = tested.store.shared.disk.clone().lock_owned().await;
    for index in 0..100 {
        tested.append(vec![entry(1, index, 100)]).await;
    }
    tested.assert_sendable().await;
    assert!(tested.flushes.iter_mut().all(|flush| flush.try_recv().is_err()), "nothing is on disk");
    // Nor is anything applied before it is.
    let mut reader = tested.store.clone();
    let applied = tokio::time::timeout(std::time::Duration::from_millis(20), reader.try_get_log_entries(0..1)).await;
    assert!(applied.is_err(), "{applied:?}");
    drop(disk);
    tested.settle().await;
    assert_eq!(reader.try_get_log_entries(0..100).await.unwrap().len(), 100);
    let text = tested.metrics.encode().unwrap();
    let syncs = text.lines().find_map(|line| line.strip_prefix("cavern_master_log_sync_seconds_count "));
    let syncs: u64 = syncs.unwrap().parse().unwrap();
    assert!(syncs <= 2, "{syncs} syncs");
    drop(reader);
    tested.end();
}

#[tokio::test]
async fn an_entry_that_does_not_follow_the_last_one_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let mut tested = Tested::open(directory.path());
    let disk = tested.store.shared.disk.clone().lock_owned().await;
    tested.append(vec![entry(1, 0, 1)]).await;
    let refused = tested.store.append(vec![entry(1, 2, 1)], IOFlushed::noop()).await.unwrap_err();
    assert!(refused.to_string().contains("ends with entry 0, and is given entry 2"), "{refused}");
    drop(disk);
    tested.settle().await;
    tested.end();
}

#[tokio::test]
async fn after_a_write_that_failed_nothing_is_written() {
    let directory = tempfile::tempdir().unwrap();
    let mut tested = Tested::open(directory.path());
    tested.append(vec![entry(1, 0, 1)]).await;
    tested.settle().await;
    *tested.store.shared.disk.lock().await = Some("no space");
    let (flushed, flush) = Types::oneshot();
    tested.store.append(vec![entry(1, 1, 1)], IOFlushed::signal(flushed)).await.unwrap();
    let failed = flush.await.unwrap().unwrap_err().to_string();
    assert!(failed.contains("no space"), "{failed}");
    *tested.store.shared.disk.lock().await = None;
    let (flushed, flush) = Types::oneshot();
    tested.store.append(vec![entry(1, 2, 1)], IOFlushed::signal(flushed)).await.unwrap();
    assert!(flush.await.unwrap().is_err(), "it would be in the log without the one before it");
    assert!(tested.store.save_vote(&Vote::new(9, 3)).await.is_err());
    assert!(tested.store.try_get_log_entries(0..3).await.is_err());
    let tested = tested.restart(directory.path()).await;
    assert_eq!(tested.store.read_disk(0, u64::MAX, usize::MAX).unwrap().len(), 1);
    tested.end();
}

/// Of a master that was removed and comes back, or of a copy of its directory.
#[tokio::test]
async fn what_was_applied_is_not_taken_out_of_the_log() {
    let directory = tempfile::tempdir().unwrap();
    let mut tested = Tested::open(directory.path());
    for index in 0..5 {
        tested.append(vec![entry(1, index, 100)]).await;
    }
    tested.settle().await;
    let database = tested.store.shared.database.get();
    let mut batch = rocksdb::WriteBatch::default();
    batch.put_cf(database.family(Family::Meta), APPLIED_KEY, to_json(&log_id(1, 1, 2), "a log id").unwrap());
    database.write(batch).unwrap();
    drop(database);
    let refused = tested.store.truncate_after(Some(log_id(1, 1, 1))).await.unwrap_err().to_string();
    assert!(refused.contains("up to entry 2") && refused.contains("cv raft add"), "{refused}");
    tested.settle().await;
    // What was not is anybody's.
    tested.store.truncate_after(Some(log_id(1, 1, 2))).await.unwrap();
    assert_eq!(tested.store.read_disk(0, u64::MAX, usize::MAX).unwrap().len(), 3);
    tested.end();
}
