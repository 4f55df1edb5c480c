//! Snapshots: RocksDB checkpoints in `data_dir/snapshots`, one directory each, with the metadata beside it as JSON.
//!
//! A snapshot counts once its metadata file is there; that file is written last and renamed into place, and older
//! snapshots are deleted after it. A directory without metadata is what a crash left, and is deleted; but for the one
//! in which a snapshot of another master is [`incoming`], which goes on where it was.
//!
//! Snapshots are named by their position in the log. Of one position there is one: its files never change, so what is
//! [`outgoing`] holds them open, and need not care that a newer snapshot has taken the place of theirs.

mod incoming;
mod outgoing;

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cavern_conf::Failpoint;
use cavern_state::current::{link_files, remove_dir};
use cavern_state::{CurrentDatabase, Database};
use openraft::RaftSnapshotBuilder;
use parking_lot::Mutex;

use super::position::read_position;
use super::types::{Checkpoint, LogId, Meta, Snapshot, Types, from_json};
use crate::blocking::blocking;
use crate::error::{ConsensusError, Result};

pub use incoming::Incoming;
pub use outgoing::Outgoing;

/// Directory of what comes from another master.
const INCOMING: &str = "incoming";
/// Directories of snapshots that are not complete yet: one made here, and one of another master.
const NEW: &str = "new";
const ADOPTED: &str = "adopted";

/// The snapshots of one node.
#[derive(Clone, Debug)]
pub struct Snapshots {
    directory: PathBuf,
    /// Held while one becomes the current one: what is made here and what comes from another master may meet.
    committing: Arc<Mutex<()>>,
}

impl Snapshots {
    /// Opens the directory and removes what a crash may have left in it.
    pub fn open(directory: PathBuf) -> Result<Self> {
        fs::create_dir_all(&directory).map_err(ConsensusError::io(&directory))?;
        let snapshots = Self { directory, committing: Arc::default() };
        let current = snapshots.current()?;
        let current = current.as_ref().map(|(meta, _)| name(meta)).unwrap_or_default();
        snapshots.remove_all_but(&[INCOMING, &current])?;
        Ok(snapshots)
    }

    /// The newest complete snapshot.
    pub fn current(&self) -> Result<Option<(Meta, Checkpoint)>> {
        let mut newest: Option<Meta> = None;
        for path in read_dir(&self.directory)? {
            if path.extension().is_some_and(|extension| extension == "json") {
                let bytes = fs::read(&path).map_err(ConsensusError::io(&path))?;
                let meta: Meta = from_json(&bytes, &format!("the snapshot description {}", path.display()))?;
                let is_newer = newest.as_ref().is_none_or(|newest| newest.last_log_id < meta.last_log_id);
                if is_newer && self.directory.join(name(&meta)).is_dir() {
                    newest = Some(meta);
                }
            }
        }
        Ok(newest.map(|meta| {
            let directory = self.directory.join(name(&meta));
            (meta, Checkpoint { directory })
        }))
    }

    /// Makes a snapshot of `database` and the current one.
    pub fn build(&self, database: &Database) -> Result<(Meta, Checkpoint)> {
        let temporary = self.directory.join(NEW);
        remove_dir(&temporary)?;
        database.checkpoint(&temporary)?;
        // The log is of no use to another master, and may be larger than the state.
        Database::strip_checkpoint(&temporary)?;
        // The position is read from the checkpoint itself: the database has moved on.
        let (last_log_id, last_membership) = read_position(&Database::open_for_inspection(&temporary)?)?;
        Failpoint::SnapshotBuilt.pass();
        let meta = Meta { last_log_id, last_membership };
        let made = self.commit(meta, &temporary)?;
        Failpoint::SnapshotMade.pass();
        Ok(made)
    }

    /// Where the files of a snapshot that comes from another master are collected.
    pub fn incoming(&self) -> PathBuf {
        self.directory.join(INCOMING)
    }

    /// What came from another master is taken in, or of no use.
    pub fn forget_incoming(&self) -> Result {
        Ok(remove_dir(&self.incoming())?)
    }

    /// Keeps a copy (hard links) of a received checkpoint as the current snapshot.
    pub fn adopt(&self, meta: &Meta, checkpoint: &Checkpoint) -> Result {
        let temporary = self.directory.join(ADOPTED);
        remove_dir(&temporary)?;
        link_files(&checkpoint.directory, &temporary).map_err(ConsensusError::io(&temporary))?;
        self.commit(meta.clone(), &temporary).map(drop)
    }

    /// Makes a directory the current snapshot, unless there is one that is no older: another master may have a part of
    /// that. Returns the current one.
    fn commit(&self, meta: Meta, temporary: &Path) -> Result<(Meta, Checkpoint)> {
        let _only = self.committing.lock();
        if let Some((current, checkpoint)) = self.current()?
            && current.last_log_id >= meta.last_log_id
        {
            remove_dir(temporary)?;
            return Ok((current, checkpoint));
        }
        let name = name(&meta);
        let directory = self.directory.join(&name);
        remove_dir(&directory)?;
        fs::rename(temporary, &directory).map_err(ConsensusError::io(&directory))?;
        let description = self.directory.join(format!("{name}.json"));
        let unfinished = self.directory.join("description");
        let write = || {
            let mut file = fs::File::create(&unfinished)?;
            file.write_all(&serde_json::to_vec(&meta)?)?;
            file.sync_all()?;
            fs::rename(&unfinished, &description)?;
            fs::File::open(&self.directory)?.sync_all()
        };
        write().map_err(ConsensusError::io(&description))?;
        self.remove_all_but(&[INCOMING, NEW, ADOPTED, &name])?;
        Ok((meta, Checkpoint { directory }))
    }

    fn remove_all_but(&self, keep: &[&str]) -> Result {
        for path in read_dir(&self.directory)? {
            let stem = path.file_stem().and_then(|stem| stem.to_str());
            if stem.is_some_and(|stem| keep.contains(&stem)) {
                continue;
            }
            if path.is_dir() {
                remove_dir(&path)?;
            } else {
                fs::remove_file(&path).map_err(ConsensusError::io(&path))?;
            }
        }
        Ok(())
    }
}

/// The name of a snapshot: its position in the log.
fn name(meta: &Meta) -> String {
    let position = |id: LogId| format!("{}-{}-{}", id.leader_id.term, id.leader_id.node_id, id.index);
    meta.last_log_id.map_or_else(|| "empty".to_owned(), position)
}

fn read_dir(directory: &Path) -> Result<Vec<PathBuf>> {
    let read = || fs::read_dir(directory)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>, std::io::Error>>();
    read().map_err(ConsensusError::io(directory))
}

/// Makes snapshots in the background.
pub struct Builder {
    pub snapshots: Snapshots,
    pub database: Arc<CurrentDatabase>,
}

impl RaftSnapshotBuilder<Types> for Builder {
    type SnapshotData = Checkpoint;

    async fn build_snapshot(&mut self) -> io::Result<Snapshot> {
        let (snapshots, database) = (self.snapshots.clone(), self.database.clone());
        let (meta, snapshot) = blocking(move || snapshots.build(&database.get())).await?;
        tracing::info!(snapshot = name(&meta), "made a snapshot");
        Ok(Snapshot { meta, snapshot })
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use cavern_conf::process::Metrics;
    use cavern_proto::raft::SnapshotOffer;
    use cavern_state::feature_version::FEATURE_VERSION;
    use cavern_state::{Changes, Lock, Resources};
    use openraft::async_runtime::watch::WatchReceiver as _;
    use tokio::time::{sleep, timeout};

    use super::*;
    use crate::leadership::leadership_won;
    use crate::types::Batch;
    use crate::{
        ChangeListener, Consensus, ConsensusConfig, ConsensusMetrics, FIRST_NODE, Identity, LogLimits, PeerConnector,
        until,
    };

    /// For what takes a moment.
    const PATIENCE: Duration = Duration::from_secs(30);

    struct NullListener;

    impl ChangeListener for NullListener {
        fn changed(&self, _: Changes) -> u64 {
            0
        }
        fn replaced(&self) {}
    }

    /// The only master of a group, which leads, and makes no snapshot by itself.
    async fn only_master(root: &Path) -> Consensus {
        let database = CurrentDatabase::open(root, Resources::of_cache(1 << 20), Lock::take(root).unwrap()).unwrap();
        let address = "127.0.0.1:1".to_owned();
        let (founds, snapshots) = (Some(vec![address.clone()]), root.join("snapshots"));
        let config = ConsensusConfig {
            cluster_name: "c",
            identity: Identity { cluster_id: "c".into(), node_id: FIRST_NODE, founds },
            address,
            snapshots: &snapshots,
            log: LogLimits { snapshot_after: u64::MAX, keep: Duration::MAX, size_max: u64::MAX },
            connector: PeerConnector(cavern_security::Transport::Plain),
            known: FEATURE_VERSION,
        };
        let metrics = ConsensusMetrics::register(&Metrics::new("master"));
        let master = Consensus::start(Arc::new(database), config, Arc::new(NullListener), metrics).await.unwrap();
        leadership_won(&master).await;
        master
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn one_that_is_asked_for_while_another_is_made_has_what_that_one_lacks() {
        let root = tempfile::tempdir().unwrap();
        let master = only_master(root.path()).await;
        let write = async || master.raft.client_write(Batch::default()).await.unwrap().log_id;
        write().await;
        // The first has its place in the log, and is not done before `hold` is dropped.
        let (committing, (hold, held), (begun, has_begun)) =
            (master.snapshots.committing.clone(), mpsc::channel::<()>(), mpsc::channel());
        let holder = thread::spawn(move || {
            let _committing = committing.lock();
            begun.send(()).unwrap();
            let _dropped = held.recv();
        });
        has_begun.recv().unwrap();
        master.raft.trigger().snapshot().await.unwrap();
        let cut = async {
            // RocksDB gives it this name when it is whole.
            while !master.snapshots.directory.join(NEW).exists() {
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(PATIENCE, cut).await.expect("no snapshot is begun");
        let last = write().await;
        assert!(until(&mut master.observe(), |metrics| metrics.last_applied >= Some(last)).await);
        let mut making = pin!(master.make_snapshot());
        assert!(futures::poll!(making.as_mut()).is_pending());
        // The core is asked one thing after another: it has been asked for the second one by now.
        write().await;
        drop(hold);
        holder.join().unwrap();
        timeout(PATIENCE, making).await.expect("the second snapshot is not made").unwrap();
        assert!(master.observe().borrow_watched().snapshot >= Some(last));
        master.stop().await;
    }

    #[test]
    fn leftovers_are_removed_and_the_newest_complete_snapshot_stays() {
        let root = tempfile::tempdir().unwrap();
        let data = root.path().join("data");
        fs::create_dir(&data).unwrap();
        let database = Database::open(&data, 1 << 20).unwrap();
        let snapshots = Snapshots::open(root.path().join("snapshots")).unwrap();
        assert!(snapshots.current().unwrap().is_none());
        let (meta, checkpoint) = snapshots.build(&database).unwrap();
        assert!(checkpoint.directory.is_dir());
        fs::create_dir(root.path().join("snapshots/new")).unwrap();
        fs::write(root.path().join("snapshots/new/CURRENT"), b"half").unwrap();
        let reopened = Snapshots::open(root.path().join("snapshots")).unwrap();
        assert_eq!(reopened.current().unwrap().unwrap().0, meta);
        assert!(!root.path().join("snapshots/new").exists());
        fs::write(root.path().join("snapshots/9-9.json"), b"nonsense").unwrap();
        let error = reopened.current().unwrap_err().to_string();
        assert!(error.contains("9-9.json"), "{error}");
    }

    /// Some files have several pieces, and bytes that cannot be made fewer.
    fn large_snapshot(root: &Path) -> (Meta, Checkpoint) {
        use ring::rand::SecureRandom as _;
        let data = root.join("theirs");
        fs::create_dir(&data).unwrap();
        let database = Database::open(&data, 1 << 20).unwrap();
        let random = ring::rand::SystemRandom::new();
        let mut batch = rocksdb::WriteBatch::default();
        for number in 0..40_u64 {
            let mut value = vec![0; 100 << 10];
            random.fill(&mut value).unwrap();
            batch.put_cf(database.family(cavern_state::Family::Inode), number.to_be_bytes(), value);
        }
        database.write(batch).unwrap();
        let applied = serde_json::to_vec(&crate::types::log_id(1, 1, 7)).unwrap();
        let mut position = rocksdb::WriteBatch::default();
        position.put_cf(database.family(cavern_state::Family::Meta), b"applied", applied);
        database.write(position).unwrap();
        Snapshots::open(root.join("made")).unwrap().build(&database).unwrap()
    }

    #[test]
    fn a_transfer_that_breaks_goes_on_where_it_was() {
        let root = tempfile::tempdir().unwrap();
        let (meta, checkpoint) = large_snapshot(root.path());
        let outgoing = Outgoing::open(&checkpoint).unwrap();
        let offer = SnapshotOffer {
            meta: serde_json::to_vec(&meta).unwrap().into(),
            files: outgoing.files(),
            ..SnapshotOffer::default()
        };
        let whole: u64 = offer.files.iter().map(|file| file.bytes).sum();
        let snapshots = Snapshots::open(root.path().join("snapshots")).unwrap();
        let (mut rounds, mut sent) = (0, 0);
        loop {
            // As after a restart.
            let snapshots = Snapshots::open(root.path().join("snapshots")).unwrap();
            let mut incoming = Incoming::begin(&snapshots, offer.clone()).unwrap();
            assert_eq!(incoming.transfer().received, sent);
            assert_eq!(incoming.transfer().bytes, whole);
            let missing = outgoing.missing(&incoming.progress());
            if missing.is_empty() {
                break;
            }
            let pieces = missing.into_iter().take(2).map(|(file, offset)| outgoing.read(file, offset).unwrap());
            let pieces: Vec<_> = pieces.collect();
            for piece in &pieces {
                sent += piece.data.len() as u64;
                incoming.write(piece).unwrap();
            }
            // One that is not the next one is refused, and one that is cut off has come to a part of the file.
            assert!(matches!(incoming.write(&pieces[0]), Err(ConsensusError::Invalid(_))));
            rounds += 1;
        }
        assert!(rounds > 2 && sent == whole, "{sent} of {whole} bytes in {rounds} rounds");
        let (found, received) = Incoming::begin(&snapshots, offer.clone()).unwrap().finish().unwrap();
        assert_eq!(found, meta);
        for file in &offer.files {
            let [theirs, ours] = [&checkpoint, &received].map(|of| fs::read(of.directory.join(&file.name)).unwrap());
            assert!(theirs == ours, "{}", file.name);
        }
        // Another one begins anew, and is not taken for whole before it is.
        let other = SnapshotOffer { files: offer.files[1..].to_vec(), ..offer };
        let incoming = Incoming::begin(&snapshots, other).unwrap();
        assert_eq!(incoming.transfer().received, 0);
        assert!(matches!(incoming.finish(), Err(ConsensusError::Invalid(_))));
        snapshots.forget_incoming().unwrap();
        assert!(!snapshots.incoming().exists());
    }

    #[test]
    fn a_snapshot_has_no_log_and_does_not_take_the_place_of_a_later_one() {
        let root = tempfile::tempdir().unwrap();
        let (meta, checkpoint) = large_snapshot(root.path());
        let snapshots = Snapshots::open(root.path().join("snapshots")).unwrap();
        snapshots.adopt(&meta, &checkpoint).unwrap();
        let data = root.path().join("own");
        fs::create_dir(&data).unwrap();
        let own = Database::open(&data, 1 << 20).unwrap();
        let mut batch = rocksdb::WriteBatch::default();
        batch.put_cf(own.family(cavern_state::Family::RaftLog), [0; 8], [7; 100]);
        own.write(batch).unwrap();
        // What was begun before the other one came.
        let (current, _) = snapshots.build(&own).unwrap();
        assert_eq!(current, meta);
        assert_eq!(snapshots.current().unwrap().unwrap().0, meta);
        let alone = Snapshots::open(root.path().join("alone")).unwrap();
        let (_, built) = alone.build(&own).unwrap();
        let built = Database::open_for_inspection(&built.directory).unwrap();
        assert_eq!(built.get(cavern_state::Family::RaftLog, &[0; 8]).unwrap(), None);
    }
}
