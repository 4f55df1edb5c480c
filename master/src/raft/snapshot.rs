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
use openraft::RaftSnapshotBuilder;

use super::state_machine::read_position;
use super::types::{LogId, Meta, Snapshot, Types, from_json};
use crate::MasterError;
use crate::blocking::run_blocking;
use crate::state::Database;

pub use incoming::Incoming;
pub use outgoing::Outgoing;

/// Directory of what comes from another master.
const INCOMING: &str = "incoming";

/// A snapshot's content: the directory of a RocksDB checkpoint.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    pub directory: PathBuf,
}

/// The snapshots of one node.
#[derive(Clone, Debug)]
pub struct Snapshots {
    directory: PathBuf,
}

impl Snapshots {
    /// Opens the directory and removes what a crash may have left in it.
    pub fn open(directory: PathBuf) -> Result<Self, MasterError> {
        fs::create_dir_all(&directory).map_err(MasterError::io(&directory))?;
        let snapshots = Self { directory };
        let current = snapshots.current()?;
        snapshots.remove_all_but(current.as_ref().map(|(meta, _)| name(meta)).as_deref())?;
        Ok(snapshots)
    }

    /// The newest complete snapshot.
    pub fn current(&self) -> Result<Option<(Meta, Checkpoint)>, MasterError> {
        let mut newest: Option<Meta> = None;
        for path in self.entries()? {
            if path.extension().is_some_and(|extension| extension == "json") {
                let bytes = fs::read(&path).map_err(MasterError::io(&path))?;
                let meta: Meta = from_json(&bytes, &format!("the snapshot description {}", path.display()))?;
                let is_newer = newest.as_ref().is_none_or(|newest| newest.last_log_id < meta.last_log_id);
                if is_newer && self.data(&name(&meta)).is_dir() {
                    newest = Some(meta);
                }
            }
        }
        Ok(newest.map(|meta| {
            let directory = self.data(&name(&meta));
            (meta, Checkpoint { directory })
        }))
    }

    /// Makes a snapshot of `database` and the current one.
    pub fn build(&self, database: &Database) -> Result<(Meta, Checkpoint), MasterError> {
        let temporary = self.directory.join("new");
        remove_dir(&temporary)?;
        database.checkpoint(&temporary)?;
        // The position is read from the checkpoint itself: the database has moved on.
        let (last_log_id, last_membership) = read_position(&Database::open_checkpoint(&temporary)?)?;
        Failpoint::SnapshotBuilt.pass();
        let meta = Meta { last_log_id, last_membership };
        if let Some((current, checkpoint)) = self.current()?
            && current.last_log_id == meta.last_log_id
        {
            // Another master may have a part of it.
            remove_dir(&temporary)?;
            return Ok((current, checkpoint));
        }
        let made = self.commit(&meta, &temporary)?;
        Failpoint::SnapshotMade.pass();
        Ok(made)
    }

    /// Where the files of a snapshot that comes from another master are collected.
    pub fn incoming(&self) -> PathBuf {
        self.directory.join(INCOMING)
    }

    /// Keeps a copy (hard links) of a received checkpoint as the current snapshot.
    pub fn adopt(&self, meta: &Meta, checkpoint: &Checkpoint) -> Result<(), MasterError> {
        let temporary = self.directory.join("new");
        remove_dir(&temporary)?;
        fs::create_dir(&temporary).map_err(MasterError::io(&temporary))?;
        for path in read_dir(&checkpoint.directory)? {
            let target = temporary.join(path.file_name().unwrap_or_default());
            fs::hard_link(&path, &target)
                .or_else(|_| fs::copy(&path, &target).map(drop))
                .map_err(MasterError::io(&path))?;
        }
        self.commit(meta, &temporary).map(drop)
    }

    fn commit(&self, meta: &Meta, temporary: &Path) -> Result<(Meta, Checkpoint), MasterError> {
        let name = name(meta);
        let directory = self.data(&name);
        remove_dir(&directory)?;
        fs::rename(temporary, &directory).map_err(MasterError::io(&directory))?;
        let description = self.directory.join(format!("{name}.json"));
        let unfinished = self.directory.join("description");
        let write = || {
            let mut file = fs::File::create(&unfinished)?;
            file.write_all(&serde_json::to_vec(meta)?)?;
            file.sync_all()?;
            fs::rename(&unfinished, &description)?;
            fs::File::open(&self.directory)?.sync_all()
        };
        write().map_err(MasterError::io(&description))?;
        self.remove_all_but(Some(&name))?;
        Ok((meta.clone(), Checkpoint { directory }))
    }

    fn remove_all_but(&self, keep: Option<&str>) -> Result<(), MasterError> {
        for path in self.entries()? {
            let stem = path.file_stem().and_then(|stem| stem.to_str());
            if stem == Some(INCOMING) || (keep.is_some() && stem == keep) {
                continue;
            }
            if path.is_dir() {
                remove_dir(&path)?;
            } else {
                fs::remove_file(&path).map_err(MasterError::io(&path))?;
            }
        }
        Ok(())
    }

    fn entries(&self) -> Result<Vec<PathBuf>, MasterError> {
        read_dir(&self.directory)
    }

    fn data(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }
}

/// The name of a snapshot: its position in the log.
fn name(meta: &Meta) -> String {
    let position = |id: LogId| format!("{}-{}-{}", id.leader_id.term, id.leader_id.node_id, id.index);
    meta.last_log_id.map_or_else(|| "empty".to_owned(), position)
}

fn read_dir(directory: &Path) -> Result<Vec<PathBuf>, MasterError> {
    let read = || fs::read_dir(directory)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>, std::io::Error>>();
    read().map_err(MasterError::io(directory))
}

fn remove_dir(directory: &Path) -> Result<(), MasterError> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(MasterError::io(directory)(error)),
        _ => Ok(()),
    }
}

/// Makes snapshots in the background.
pub struct Builder {
    pub snapshots: Snapshots,
    pub database: Arc<Database>,
}

impl RaftSnapshotBuilder<Types> for Builder {
    type SnapshotData = Checkpoint;

    async fn build_snapshot(&mut self) -> io::Result<Snapshot> {
        let (snapshots, database) = (self.snapshots.clone(), self.database.clone());
        let built = run_blocking(move || snapshots.build(&database)).await;
        let (meta, snapshot) = built.map_err(io::Error::other)?.map_err(io::Error::other)?;
        tracing::info!(snapshot = name(&meta), "made a snapshot");
        Ok(Snapshot { meta, snapshot })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
