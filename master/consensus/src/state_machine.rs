//! The state machine: applies committed entries one after the other, on the task that openraft keeps for it. An entry
//! takes less time than handing it to a thread and back would.
//!
//! The commands of an entry share one write batch, and each sees what those before it did ([`WriteBatchOverlay`]).
//! Where that becomes too much there are several. The last one carries the entry's position in the log, those before it
//! say how many of the entry's commands are done: replay after a crash begins exactly behind what was written. Outcomes
//! go back to the proposers, changes to the [`ChangeListener`] in applied order, both when they are written.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use cavern_conf::Failpoint;
use cavern_proto::record::{Command, CommandBatch};
use cavern_state::{
    Changes, CurrentDatabase, Database, Family, Outcome, StateError, Tables, Transaction, WriteBatchOverlay, apply,
    feature_version,
};
use futures::{Stream, StreamExt};
use openraft::storage::{EntryResponder, RaftStateMachine};
use openraft::{EntryPayload, OptionalSend};
use rocksdb::WriteBatch;
use tokio::task;
use tokio::time::Instant;

use super::log_store::carry_over;
use super::position::{APPLIED_KEY, MEMBERSHIP_KEY, Position, read_position};
use super::snapshot::{Builder, Snapshots};
use super::types::{Checkpoint, Entry, LogId, Meta, Outcomes, Snapshot, StoredMembership, Types, to_json};
use crate::blocking::blocking;
use crate::error::{ConsensusError, Result};
use crate::metrics::ConsensusMetrics;

/// Index of an entry that is partly applied ‖ number of its commands that are done (u64 each, big-endian).
const PROGRESS_KEY: &[u8] = b"progress";
/// Entries that are applied so soon after others were waiting for them.
const AT_ONCE: Duration = Duration::from_micros(100);

/// Notified of what each command changed, in applied order, by the applying task, before the proposer gets its outcome.
/// Must not block.
pub trait ChangeListener: Send + Sync + 'static {
    /// The state is this one: at the start, and when another has taken its place.
    ///
    /// # Errors
    /// Those of reading it.
    fn begin_with(&self, _state: Tables<'_>) -> Result<(), StateError> {
        Ok(())
    }
    /// What a command changes is about to be written: nobody has read it yet.
    fn will_delegate(&self, _changes: &Changes) {}
    /// Gives the number of the change that the answer must wait for, which is one of a strict mount that concerns
    /// somebody; else 0.
    fn changed(&self, changes: Changes) -> u64;
    /// The state was replaced as a whole.
    fn replaced(&self);
}

/// A master's part of the consensus, as the library has it.
pub type Raft = openraft::Raft<Types, StateMachine>;

/// What openraft holds.
pub struct StateMachine {
    database: Arc<CurrentDatabase>,
    snapshots: Snapshots,
    listener: Arc<dyn ChangeListener>,
    metrics: ConsensusMetrics,
    /// The feature version up to which this program knows commands.
    known: u32,
    /// Index of the entry that a crash left partly applied, and how many of its commands are done.
    progress: (u64, u64),
    /// When the last entries were applied.
    ended: Option<Instant>,
}

/// What commands of an entry have changed and the database does not have yet.
#[derive(Default)]
struct Gathered {
    writes: WriteBatchOverlay,
    /// Of each command, by the place of its outcome.
    changes: Vec<(usize, Changes)>,
}

/// Index of the entry that was applied in part, and how many of its commands were.
fn read_progress(database: &Database) -> Result<(u64, u64)> {
    let Some(bytes) = database.get(Family::Meta, PROGRESS_KEY)? else { return Ok((0, 0)) };
    let number =
        |range: std::ops::Range<usize>| -> Option<u64> { Some(u64::from_be_bytes(bytes.get(range)?.try_into().ok()?)) };
    let progress = number(0..8).zip(number(8..16));
    progress.ok_or_else(|| ConsensusError::corrupt("the progress inside a log entry".into()))
}

impl StateMachine {
    /// Finds out where to go on. `known` is the feature version up to which this program knows commands. *Blocking*.
    ///
    /// # Errors
    /// [`StateError::NewerFeatureVersion`] for a state beyond that, [`StateError::FormerState`] for one without any.
    pub fn open(
        database: Arc<CurrentDatabase>,
        snapshots: Snapshots,
        listener: Arc<dyn ChangeListener>,
        metrics: ConsensusMetrics,
        known: u32,
    ) -> Result<Self> {
        let current = database.get();
        feature_version::check_state(&current, known)?;
        let progress = read_progress(&current)?;
        listener.begin_with(Tables::new(&current))?;
        Ok(Self { database, snapshots, listener, metrics, known, progress, ended: None })
    }

    fn apply_entry(&mut self, entry: Entry) -> Result<Outcomes> {
        let timer = Instant::now();
        let database = self.database.get();
        let position = to_json(&entry.log_id, "a log id")?;
        let mut outcomes = Vec::new();
        let CommandBatch { commands, now_ns } = match entry.payload {
            EntryPayload::Normal(batch) => batch.0,
            EntryPayload::Blank => CommandBatch::default(),
            EntryPayload::Membership(membership) => {
                let stored = StoredMembership::new(Some(entry.log_id), membership);
                let mut batch = WriteBatch::default();
                let stored = to_json(&stored, "a membership")?;
                batch.put_cf(database.family(Family::Meta), MEMBERSHIP_KEY, stored);
                database.write(batch)?;
                CommandBatch::default()
            }
        };
        let index = entry.log_id.index;
        let done = if self.progress.0 == index { self.progress.1 } else { 0 };
        let (last, mut is_noted) = (commands.len() as u64, false);
        let mut gathered = Gathered::default();
        for (command, number) in commands.into_iter().zip(1u64..) {
            if number <= done {
                // Applied before the crash; nobody waits for what it did.
                outcomes.push(Outcome::Done);
                continue;
            }
            let timer = Instant::now();
            let applied = self.apply_command(&database, &mut gathered.writes, command, now_ns);
            self.metrics.command_seconds.observe(timer.elapsed().as_secs_f64());
            match applied {
                Ok((outcome, changes)) => {
                    outcomes.push(outcome);
                    let position = Changes::position(index, number);
                    gathered.changes.push((outcomes.len() - 1, Changes { position, ..changes }));
                }
                // Those before it are done.
                Err(error) => {
                    self.write(&database, gathered, (index, number - 1), None, &mut outcomes)?;
                    return Err(error);
                }
            }
            if number == last || gathered.writes.is_due() {
                is_noted = number == last;
                let position = is_noted.then_some(position.as_slice());
                self.write(&database, std::mem::take(&mut gathered), (index, number), position, &mut outcomes)?;
            }
        }
        Failpoint::EntryApplied.pass();
        if !is_noted {
            let mut batch = WriteBatch::default();
            batch.put_cf(database.family(Family::Meta), APPLIED_KEY, position);
            database.write(batch)?;
        }
        self.metrics.apply_seconds.observe(timer.elapsed().as_secs_f64());
        Ok(Outcomes(outcomes))
    }

    /// One that fails leaves no trace.
    fn apply_command(
        &self,
        database: &Database,
        unwritten: &mut WriteBatchOverlay,
        command: Command,
        now_ns: i64,
    ) -> Result<(Outcome, Changes)> {
        let mut transaction = Transaction::on(Tables::with(database, unwritten))?;
        transaction.known = self.known;
        transaction.counters.now_ns = transaction.counters.now_ns.max(now_ns);
        let outcome = apply(&mut transaction, command)?;
        let (writes, changes) = transaction.finish()?;
        unwritten.add(writes);
        Ok((outcome, changes))
    }

    /// Writes what commands have changed, and notifies of it. `progress` is the index of their entry and the number of
    /// the last of them, `position` that of the entry if they end it.
    fn write(
        &self,
        database: &Database,
        gathered: Gathered,
        progress: (u64, u64),
        position: Option<&[u8]>,
        outcomes: &mut [Outcome],
    ) -> Result {
        if gathered.changes.is_empty() {
            return Ok(());
        }
        let Gathered { writes, changes } = gathered;
        let mut batch = writes.into_batch(database);
        let meta = database.family(Family::Meta);
        batch.put_cf(meta, PROGRESS_KEY, [progress.0.to_be_bytes(), progress.1.to_be_bytes()].concat());
        if let Some(position) = position {
            batch.put_cf(meta, APPLIED_KEY, position);
        }
        changes.iter().for_each(|(_, changes)| self.listener.will_delegate(changes));
        Failpoint::CommandApplying.pass();
        database.write(batch)?;
        Failpoint::CommandApplied.pass();
        for (number, changes) in changes {
            let change = self.listener.changed(changes);
            if change != 0
                && let Some(Outcome::Mutated(_, waits_for)) = outcomes.get_mut(number)
            {
                *waits_for = change;
            }
        }
        Ok(())
    }
}

/// Keeps a snapshot of another master, which is to take the place of the state here.
fn adopt(snapshots: &Snapshots, meta: &Meta, checkpoint: &Checkpoint, known: u32) -> Result {
    feature_version::check_state(&Database::open_for_inspection(&checkpoint.directory)?, known)?;
    snapshots.adopt(meta, checkpoint)?;
    Failpoint::SnapshotAdopted.pass();
    Ok(())
}

/// Takes a snapshot in that this master was about to take in when it ended. Before the log is opened. *Blocking*.
pub fn finish_installation(database: &CurrentDatabase, snapshots: &Snapshots) -> Result {
    let Some((meta, checkpoint)) = snapshots.current()? else { return Ok(()) };
    if read_position(&database.get())?.0 < meta.last_log_id {
        tracing::info!("taking in a snapshot that this master has kept, but has not come to use");
        let next = database.prepare(&checkpoint.directory)?;
        replace(database, next, meta.last_log_id)?;
    }
    Ok(())
}

/// Has a prepared database take the place of the current one, with what this master keeps of its log. *Blocking*.
fn replace(database: &CurrentDatabase, next: Database, covered: Option<LogId>) -> Result {
    database.replace(next, |from, to| carry_over(from, to, covered))?;
    // A simulated disk has all of it.
    #[cfg(test)]
    if let Some(host) = super::simulation::Host::current() {
        host.disk.lock().note_synced();
    }
    Ok(())
}

/// A simulation has processes die here.
async fn between_steps(_left: usize) {
    #[cfg(test)]
    if let Some(host) = super::simulation::Host::current() {
        host.between_steps(_left).await;
    }
}

impl RaftStateMachine<Types> for StateMachine {
    type SnapshotData = Checkpoint;
    type SnapshotBuilder = Builder;

    async fn applied_state(&mut self) -> io::Result<Position> {
        Ok(read_position(&self.database.get())?)
    }

    async fn apply<S>(&mut self, mut entries: S) -> io::Result<()>
    where
        S: Stream<Item = io::Result<EntryResponder<Types>>> + Unpin + OptionalSend,
    {
        if self.ended.is_some_and(|ended| ended.elapsed() < AT_ONCE) {
            // The core was told of the last entries, and would wait for these: it is to run on this thread.
            task::yield_now().await;
        }
        while let Some(next) = entries.next().await {
            let (entry, proposer) = next?;
            let outcomes = self.apply_entry(entry)?;
            if let Some(proposer) = proposer {
                proposer.send(outcomes);
            }
        }
        self.ended = Some(Instant::now());
        Ok(())
    }

    async fn get_snapshot_builder(&mut self) -> Builder {
        Builder { snapshots: self.snapshots.clone(), database: self.database.clone() }
    }

    async fn install_snapshot(&mut self, meta: &Meta, snapshot: Checkpoint) -> io::Result<()> {
        let (snapshots, own, known) = (self.snapshots.clone(), meta.clone(), self.known);
        let snapshot = blocking(move || {
            adopt(&snapshots, &own, &snapshot, known)?;
            Ok(snapshot)
        })
        .await?;
        between_steps(2).await;
        let database = self.database.clone();
        let next = blocking(move || Ok(database.prepare(&snapshot.directory)?)).await?;
        between_steps(1).await;
        let (database, snapshots, covered) = (self.database.clone(), self.snapshots.clone(), meta.last_log_id);
        self.progress = blocking(move || {
            // A checkpoint may have been made in the middle of an entry.
            let progress = read_progress(&next)?;
            replace(&database, next, covered)?;
            // It has its own names for the files.
            snapshots.forget_incoming()?;
            Ok(progress)
        })
        .await?;
        self.metrics.snapshots_installed.inc();
        self.listener.begin_with(Tables::new(&self.database.get())).map_err(io::Error::other)?;
        self.listener.replaced();
        Ok(())
    }

    async fn get_current_snapshot(&mut self) -> io::Result<Option<Snapshot>> {
        let current = self.snapshots.current()?;
        Ok(current.map(|(meta, snapshot)| Snapshot { meta, snapshot }))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;

    use cavern_conf::process::Metrics;
    use cavern_proto::ROOT_INODE;
    use cavern_proto::master::mutation::Change;
    use cavern_proto::master::{CreateInode, Job, Kind as EntryKind, Mount, Mutation, WriteType};
    use cavern_proto::record::command::Command as Kind;
    use cavern_proto::record::{
        ApplyListing, AttachMount, Command, Counters, InitCluster, ListedEntry, ListingGroup, Mutate,
    };
    use cavern_state::feature_version::{FEATURE_VERSION, FIRST};
    use cavern_state::tables::COUNTERS_KEY;
    use cavern_state::{DelegationChange, Lock};
    use prost::Message as _;

    use super::*;
    use crate::types::{Batch, log_id};

    struct NullListener;

    impl ChangeListener for NullListener {
        fn changed(&self, _: Changes) -> u64 {
            0
        }
        fn replaced(&self) {}
    }

    fn metrics() -> ConsensusMetrics {
        ConsensusMetrics::register(&Metrics::new("master"))
    }

    fn open(database: &Arc<CurrentDatabase>, snapshots: &Snapshots) -> StateMachine {
        let (database, snapshots, listener) = (database.clone(), snapshots.clone(), Arc::new(NullListener));
        StateMachine::open(database, snapshots, listener, metrics(), FEATURE_VERSION).unwrap()
    }

    fn entry(index: u64, jobs: usize) -> Entry {
        let command = Command { command: Some(Kind::PutJob(Job::default())) };
        let batch = Batch(CommandBatch { commands: vec![command; jobs], now_ns: 0 });
        Entry { log_id: log_id(1, 1, index), payload: EntryPayload::Normal(batch) }
    }

    fn write(database: &CurrentDatabase, family: Family, key: &[u8], value: &[u8]) {
        let (database, mut batch) = (database.get(), WriteBatch::default());
        batch.put_cf(database.family(family), key, value);
        database.write(batch).unwrap();
    }

    fn open_database(data_dir: &Path) -> Arc<CurrentDatabase> {
        Arc::new(
            CurrentDatabase::open(data_dir, cavern_state::Resources::of_cache(1 << 20), Lock::take(data_dir).unwrap())
                .unwrap(),
        )
    }

    fn empty() -> (tempfile::TempDir, Arc<CurrentDatabase>, Snapshots) {
        let dir = tempfile::tempdir().unwrap();
        let database = open_database(dir.path());
        let snapshots = Snapshots::open(dir.path().join("snapshots")).unwrap();
        (dir, database, snapshots)
    }

    #[tokio::test]
    async fn replay_skips_the_commands_that_were_applied_before_the_crash() {
        let (_dir, database, snapshots) = empty();
        write(&database, Family::Meta, PROGRESS_KEY, &[7u64.to_be_bytes(), 2u64.to_be_bytes()].concat());
        let mut machine = open(&database, &snapshots);
        let outcomes = machine.apply_entry(entry(7, 3)).unwrap();
        assert_eq!(outcomes.0, [Outcome::Done, Outcome::Done, Outcome::Job(1)]);
        assert_eq!(machine.apply_entry(entry(8, 1)).unwrap().0, [Outcome::Job(2)]);
        assert_eq!(machine.applied_state().await.unwrap().0, Some(log_id(1, 1, 8)));
    }

    #[tokio::test]
    async fn a_command_of_a_newer_version_stops_the_replica_where_it_is() {
        let (_dir, database, snapshots) = empty();
        let mut machine = open(&database, &snapshots);
        machine.apply_entry(entry(1, 1)).unwrap();
        let unknown = Batch(CommandBatch { commands: vec![Command { command: None }], now_ns: 0 });
        let newer = Entry { log_id: log_id(1, 1, 2), payload: EntryPayload::Normal(unknown) };
        assert!(matches!(machine.apply_entry(newer), Err(ConsensusError::State(StateError::UnknownCommand))));
        assert_eq!(machine.applied_state().await.unwrap().0, Some(log_id(1, 1, 1)));

        // In the middle of an entry: what comes before it is done, once.
        let mut mixed = entry(2, 3);
        if let EntryPayload::Normal(batch) = &mut mixed.payload {
            batch.0.commands[2].command = None;
        }
        assert!(matches!(machine.apply_entry(mixed), Err(ConsensusError::State(StateError::UnknownCommand))));
        assert_eq!(Tables::new(&database.get()).jobs().unwrap().len(), 3);
        assert_eq!(read_progress(&database.get()).unwrap(), (2, 2));
        let mut newer = open(&database, &snapshots);
        assert_eq!(newer.apply_entry(entry(2, 3)).unwrap().0, [Outcome::Done, Outcome::Done, Outcome::Job(4)]);
    }

    /// Notes how many jobs there are at each change, and has every second one waited for.
    struct Witness {
        database: Arc<CurrentDatabase>,
        seen: parking_lot::Mutex<Vec<(u64, usize)>>,
    }

    impl ChangeListener for Witness {
        fn changed(&self, changes: Changes) -> u64 {
            let mut seen = self.seen.lock();
            seen.push((changes.position, Tables::new(&self.database.get()).jobs().unwrap().len()));
            if seen.len().is_multiple_of(2) { changes.position } else { 0 }
        }
        fn replaced(&self) {}
    }

    #[tokio::test]
    async fn who_is_notified_of_a_command_finds_it_and_each_answer_waits_for_its_own_change() {
        let (_dir, database, snapshots) = empty();
        let witness = Arc::new(Witness { database: database.clone(), seen: parking_lot::Mutex::default() });
        let mut machine =
            StateMachine::open(database.clone(), snapshots, witness.clone(), metrics(), FEATURE_VERSION).unwrap();
        let mut mixed = entry(1, 4);
        if let EntryPayload::Normal(batch) = &mut mixed.payload {
            let mutation = Some(Mutation { seq: 1, ..Mutation::default() });
            for command in &mut batch.0.commands[2..] {
                command.command =
                    Some(Kind::Mutate(Mutate { session: 7, mutation: mutation.clone(), ..Mutate::default() }));
            }
        }
        let outcomes = machine.apply_entry(mixed).unwrap().0;
        let position = |number| Changes::position(1, number);
        assert_eq!(*witness.seen.lock(), [1, 2, 3, 4].map(|number| (position(number), 2)));
        assert_eq!(outcomes[..2], [Outcome::Job(1), Outcome::Job(2)]);
        let waits_for = |outcome: &Outcome| match outcome {
            Outcome::Mutated(_, change) => *change,
            other => panic!("{other:?}"),
        };
        assert_eq!((waits_for(&outcomes[2]), waits_for(&outcomes[3])), (0, position(4)));
    }

    #[tokio::test]
    async fn an_entry_of_very_many_records_is_several_batches() {
        const NAMES: usize = 500;
        let (_dir, database, snapshots) = empty();
        let mut machine = open(&database, &snapshots);
        let mount = Mount { path: "/m".into(), uri: "memory://m".into(), ..Mount::default() };
        let init = InitCluster { cluster_id: "c".into(), now_ns: 1, feature_version: 1 };
        let attach = AttachMount { mount: Some(mount), mounts_epoch: 0 };
        let mut kinds = vec![Kind::Init(init), Kind::AttachMount(attach)];
        for part in 0..10 {
            let listed = |number| ListedEntry {
                name: format!("{part}-{number}").into(),
                kind: cavern_proto::master::Kind::File as i32,
                ..ListedEntry::default()
            };
            let group = ListingGroup { upsert: (0..NAMES).map(listed).collect(), ..ListingGroup::default() };
            kinds.push(Kind::Listing(ApplyListing {
                mount_id: 1,
                groups: vec![group],
                now_ns: 2,
                ..ApplyListing::default()
            }));
        }
        let commands = kinds.into_iter().map(|kind| Command { command: Some(kind) }).collect();
        let before = database.get().raw().latest_sequence_number();
        let payload = EntryPayload::Normal(Batch(CommandBatch { commands, now_ns: 0 }));
        let outcomes = machine.apply_entry(Entry { log_id: log_id(1, 1, 1), payload }).unwrap().0;
        assert_eq!(outcomes.len(), 12);
        assert_eq!(Tables::new(&database.get()).counters().unwrap().inodes as usize, 2 + 10 * NAMES);
        assert_eq!(read_progress(&database.get()).unwrap(), (1, 12));
        // Each of the batches has the counters and the progress.
        let records = database.get().raw().latest_sequence_number() - before;
        assert!((20 * NAMES as u64 + 10..20 * NAMES as u64 + 60).contains(&records), "{records} records");
    }

    #[tokio::test]
    async fn a_replica_stops_where_the_others_agree_on_what_it_does_not_know() {
        let (_dir, database, snapshots) = empty();
        let mut machine = open(&database, &snapshots);
        let raise = |index, version| {
            let command = Command { command: Some(Kind::RaiseFeatureVersion(version)) };
            let batch = Batch(CommandBatch { commands: vec![command], now_ns: 0 });
            Entry { log_id: log_id(1, 1, index), payload: EntryPayload::Normal(batch) }
        };
        let version = || Tables::new(&database.get()).counters().unwrap().feature_version;
        machine.apply_entry(raise(1, FEATURE_VERSION)).unwrap();
        machine.apply_entry(raise(2, 0)).unwrap();
        assert_eq!(version(), FEATURE_VERSION, "it never falls");
        let newer = machine.apply_entry(raise(3, FEATURE_VERSION + 1));
        assert!(matches!(newer, Err(ConsensusError::State(StateError::NewerFeatureVersion { .. }))), "{newer:?}");
        assert_eq!((version(), machine.applied_state().await.unwrap().0), (FEATURE_VERSION, Some(log_id(1, 1, 2))));

        // Nor does it start with a state of theirs, or take one in.
        let counters = Counters { feature_version: FEATURE_VERSION + 1, ..Counters::default() };
        write(&database, Family::Meta, COUNTERS_KEY, &counters.encode_to_vec());
        let (meta, theirs) = snapshots.build(&database.get()).unwrap();
        let (_other, other, own) = empty();
        let mut machine = open(&other, &own);
        machine.apply_entry(raise(1, FEATURE_VERSION)).unwrap();
        let refused = machine.install_snapshot(&meta, theirs).await.unwrap_err().to_string();
        assert!(refused.contains("upgrade this master"), "{refused}");
        assert_eq!(machine.applied_state().await.unwrap().0, Some(log_id(1, 1, 1)), "nothing was changed");
        let refused = StateMachine::open(database, snapshots, Arc::new(NullListener), metrics(), FEATURE_VERSION).err();
        assert!(matches!(refused, Some(ConsensusError::State(StateError::NewerFeatureVersion { .. }))), "{refused:?}");
    }

    #[tokio::test]
    async fn what_an_earlier_commit_has_written_is_refused_and_stays_as_it_is() {
        let (_dir, database, snapshots) = empty();
        let mut machine = open(&database, &snapshots);
        let init = |feature_version| {
            let init = InitCluster { cluster_id: "c".into(), now_ns: 1, feature_version };
            let commands = vec![Command { command: Some(Kind::Init(init)) }];
            let payload = EntryPayload::Normal(Batch(CommandBatch { commands, now_ns: 0 }));
            Entry { log_id: log_id(1, 1, 1), payload }
        };
        let is_former = |error: Option<&ConsensusError>| {
            let says = |error: &ConsensusError| error.to_string().contains("go back to that commit");
            matches!(error, Some(ConsensusError::State(StateError::FormerState))) && error.is_some_and(says)
        };
        let counters = || Tables::new(&database.get()).counters().unwrap();
        // Its log.
        assert!(is_former(machine.apply_entry(init(0)).err().as_ref()));
        assert_eq!((machine.applied_state().await.unwrap().0, counters()), (None, Counters::default()));
        machine.apply_entry(init(FIRST)).unwrap();
        assert_eq!(counters().feature_version, FIRST);

        // Its state, whichever level its masters had agreed on, and a snapshot of that.
        let former = |former_feature_version| Counters { former_feature_version, feature_version: 0, ..counters() };
        let both = Counters { former_feature_version: 13, ..counters() };
        for written in [former(0), former(1), former(13), both] {
            write(&database, Family::Meta, COUNTERS_KEY, &written.encode_to_vec());
            let listener = Arc::new(NullListener);
            let opened =
                StateMachine::open(database.clone(), snapshots.clone(), listener, metrics(), FEATURE_VERSION).err();
            assert!(is_former(opened.as_ref()), "{written:?}: {opened:?}");
            assert_eq!(counters(), written);
        }
        let (meta, theirs) = snapshots.build(&database.get()).unwrap();
        let (_other, other, own) = empty();
        let mut machine = open(&other, &own);
        let refused = machine.install_snapshot(&meta, theirs).await.unwrap_err().to_string();
        assert!(refused.contains("go back to that commit"), "{refused}");
        assert_eq!(machine.applied_state().await.unwrap().0, None);
    }

    /// Which session holds the delegation of a directory.
    #[derive(Default)]
    struct Holders(parking_lot::Mutex<BTreeMap<u64, u64>>);

    impl ChangeListener for Holders {
        fn begin_with(&self, state: Tables<'_>) -> Result<(), StateError> {
            *self.0.lock() = state.all_delegations()?.into_iter().map(|held| (held.directory, held.session)).collect();
            Ok(())
        }
        fn will_delegate(&self, changes: &Changes) {
            for change in &changes.delegations {
                if let DelegationChange::Granted(held) = change {
                    self.0.lock().insert(held.directory, held.session);
                }
            }
        }
        fn changed(&self, _: Changes) -> u64 {
            0
        }
        fn replaced(&self) {}
    }

    impl Holders {
        fn holder(&self, directory: u64) -> Option<u64> {
            self.0.lock().get(&directory).copied()
        }
    }

    #[tokio::test]
    async fn what_sessions_hold_is_known_after_a_start_and_with_a_snapshot() {
        let open = |database: &Arc<CurrentDatabase>, snapshots: &Snapshots| {
            let holders = Arc::new(Holders::default());
            let (database, snapshots, listener) = (database.clone(), snapshots.clone(), holders.clone());
            let machine = StateMachine::open(database, snapshots, listener, metrics(), FEATURE_VERSION);
            (machine.unwrap(), holders)
        };
        let (_dir, database, snapshots) = empty();
        let (mut machine, held) = open(&database, &snapshots);
        let kind = EntryKind::Directory as i32;
        let create =
            CreateInode { parent: ROOT_INODE + 1, name: "d".into(), kind, delegate: true, ..CreateInode::default() };
        let mutation = Some(Mutation { seq: 1, change: Some(Change::Create(create)), ..Mutation::default() });
        let (path, uri, write_type) = ("/m".to_owned(), "memory://m".to_owned(), WriteType::FsMode as i32);
        let mount = Some(Mount { path, uri, write_type, ..Mount::default() });
        let kinds = [
            Kind::Init(InitCluster { cluster_id: "c".into(), now_ns: 1, feature_version: 1 }),
            Kind::AttachMount(AttachMount { mount, mounts_epoch: 0 }),
            Kind::Mutate(Mutate { session: 7, mutation, ..Mutate::default() }),
        ];
        let commands = kinds.into_iter().map(|kind| Command { command: Some(kind) }).collect();
        let payload = EntryPayload::Normal(Batch(CommandBatch { commands, now_ns: 0 }));
        let outcomes = machine.apply_entry(Entry { log_id: log_id(1, 1, 1), payload }).unwrap().0;
        let Some(Outcome::Mutated(made, _)) = outcomes.last() else { panic!("{outcomes:?}") };
        assert!(made.delegated, "{made:?}");
        assert_eq!(held.holder(made.inode), Some(7));
        assert_eq!(open(&database, &snapshots).1.holder(made.inode), Some(7), "after a start");

        let (meta, theirs) = snapshots.build(&database.get()).unwrap();
        let (_other, other, own) = empty();
        let (mut machine, held) = open(&other, &own);
        assert!(held.0.lock().is_empty());
        machine.install_snapshot(&meta, theirs).await.unwrap();
        assert_eq!(held.holder(made.inode), Some(7), "with a snapshot");
    }

    #[tokio::test]
    async fn a_snapshot_that_was_kept_and_not_used_is_taken_in_at_the_next_start() {
        let (_theirs, database, snapshots) = empty();
        open(&database, &snapshots).apply_entry(entry(1, 3)).unwrap();
        let expected = Tables::new(&database.get()).jobs().unwrap();
        let (meta, checkpoint) = snapshots.build(&database.get()).unwrap();
        let (_own, database, snapshots) = empty();
        // As a crash in the middle of an installation leaves it.
        adopt(&snapshots, &meta, &checkpoint, FEATURE_VERSION).unwrap();
        finish_installation(&database, &snapshots).unwrap();
        let mut machine = open(&database, &snapshots);
        assert_eq!(Tables::new(&database.get()).jobs().unwrap(), expected);
        assert_eq!(machine.applied_state().await.unwrap().0, Some(log_id(1, 1, 1)));
    }

    /// A checkpoint is made beside the loop that applies: it may fall between two commands of an entry.
    #[tokio::test]
    async fn a_snapshot_from_the_middle_of_an_entry_goes_on_in_the_middle_of_it() {
        let dir = tempfile::tempdir().unwrap();
        let place = |name: &str| {
            let place = dir.path().join(name);
            std::fs::create_dir(&place).unwrap();
            let database = open_database(&place);
            (database, Snapshots::open(place.join("snapshots")).unwrap())
        };
        let (database, snapshots) = place("leader");
        let mut leader = open(&database, &snapshots);
        leader.apply_entry(entry(1, 1)).unwrap();
        write(&database, Family::Meta, PROGRESS_KEY, &[2u64.to_be_bytes(), 2u64.to_be_bytes()].concat());
        let (meta, checkpoint) = snapshots.build(&database.get()).unwrap();
        let (database, snapshots) = place("follower");
        let mut follower = open(&database, &snapshots);
        follower.install_snapshot(&meta, checkpoint).await.unwrap();
        assert_eq!(follower.apply_entry(entry(2, 3)).unwrap().0, [Outcome::Done, Outcome::Done, Outcome::Job(2)]);
    }
}
