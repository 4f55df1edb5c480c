//! Which database a master works with. It is another one when a snapshot of another master has taken its place: that is
//! made ready beside it, in a directory of its own, and is then the current one for everybody at once.
//!
//! ```text
//! data_dir/db, db-1, db-2 …   databases: one is the current one, and there may be what a crash has left
//! data_dir/database           the name of the current one; without this file it is `db`
//! ```
//!
//! The file is written beside its place, synced, and renamed: a crash leaves the earlier name or the new one, and both
//! databases are whole then. Names are never used again while the file names a later one. What is not current is
//! removed by the next start, but only once that has found the current one whole.
//!
//! Who reads goes on with the database that it has; the last one to let go of it closes it, and removes its files.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cavern_conf::Failpoint;
use parking_lot::{Mutex, MutexGuard, RwLock};

use crate::data_dir::{FIRST, Free, Lock, number};
pub use crate::data_dir::{POINTER, directory};
use crate::database::{Database, Resources};
use crate::error::{Result, StateError};

/// The database that a master works with.
pub struct CurrentDatabase {
    data_dir: PathBuf,
    resources: Resources,
    lock: Arc<Lock>,
    current: RwLock<Arc<Database>>,
    /// Held while something is written to the log, and while another database takes the place of this one: what is in
    /// the log is in the next one, too. Only the thread of the log, and the one that takes a snapshot in, wait for it.
    /// True when it is not known any more which one is the current one on disk.
    writing: Mutex<bool>,
}

impl CurrentDatabase {
    /// Opens (or makes) the current database of a data directory without looking at it first; removes what is not
    /// current.
    pub fn open(data_dir: &Path, resources: Resources, lock: Arc<Lock>) -> Result<Self> {
        let directory = directory(data_dir)?;
        let database = Database::open_in(&directory, &resources, Some(lock.clone()))?;
        remove_others(data_dir, &directory)?;
        let current = RwLock::new(Arc::new(database));
        Ok(Self { data_dir: data_dir.to_owned(), resources, lock, current, writing: Mutex::default() })
    }

    /// The current database, to look at now and let go of.
    pub fn get(&self) -> Arc<Database> {
        self.current.read().clone()
    }

    /// Set when every database is closed and the lock is free.
    pub fn free(&self) -> Free {
        self.lock.free.0.clone()
    }

    /// For the one who writes the log; the database is the same for as long as this is held.
    ///
    /// # Errors
    /// When what is written might not be in the database that the next start opens.
    pub fn lock_writing(&self) -> Result<MutexGuard<'_, bool>> {
        let is_unknown = self.writing.lock();
        if *is_unknown {
            return Err(StateError::UnknownCurrent(self.data_dir.join(POINTER)));
        }
        Ok(is_unknown)
    }

    /// Makes the next database of the files of a checkpoint, which stay as they are; its log is empty. *Blocking*.
    pub fn prepare(&self, checkpoint: &Path) -> Result<Database> {
        let current = self.get();
        let name = current.directory().file_name().and_then(|name| name.to_str()).and_then(number).unwrap_or(0);
        let directory = self.data_dir.join(format!("{FIRST}-{}", name.saturating_add(1)));
        remove_dir(&directory)?;
        link_files(checkpoint, &directory).map_err(StateError::io(&directory))?;
        Database::open_without_log(&directory, &self.resources, Some(self.lock.clone()))
    }

    /// Has a prepared database take the place of the current one. `keep` gives it what it is to have of that, and has
    /// it on disk when it returns; nothing is written to the log meanwhile. *Blocking*.
    ///
    /// # Errors
    /// Those of `keep` and of the file system; the current database is the one that it was.
    pub fn replace<E: From<StateError>>(
        &self,
        next: Database,
        keep: impl FnOnce(&Database, &Database) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut is_unknown = self.lock_writing()?;
        let before = self.get();
        keep(&before, &next)?;
        File::open(next.directory()).and_then(|file| file.sync_all()).map_err(StateError::io(next.directory()))?;
        Failpoint::DatabasePrepared.pass();
        *is_unknown = true;
        self.point_to(next.directory())?;
        *is_unknown = false;
        Failpoint::DatabaseReplaced.pass();
        *self.current.write() = Arc::new(next);
        before.retire();
        Ok(())
    }

    /// Notes which one is current, on disk when this returns.
    fn point_to(&self, directory: &Path) -> Result {
        let pointer = self.data_dir.join(POINTER);
        let name = directory.file_name().unwrap_or_default().to_string_lossy();
        let write = || {
            let fresh = pointer.with_extension("new");
            let mut file = File::create(&fresh)?;
            writeln!(file, "{name}")?;
            file.sync_all()?;
            // The directories that may be named are there after a loss of power, too.
            File::open(&self.data_dir)?.sync_all()?;
            Failpoint::DatabaseNamed.pass();
            fs::rename(&fresh, &pointer)?;
            File::open(&self.data_dir)?.sync_all()
        };
        write().map_err(StateError::io(&pointer))
    }
}

/// Removes the databases of a data directory that are not current.
fn remove_others(data_dir: &Path, current: &Path) -> Result {
    let failed = StateError::io(data_dir);
    let entries = fs::read_dir(data_dir).and_then(Iterator::collect::<Result<Vec<_>, _>>).map_err(failed)?;
    for path in entries.into_iter().map(|entry| entry.path()) {
        let is_database = path.file_name().and_then(|name| name.to_str()).is_some_and(|name| number(name).is_some());
        if is_database && path != current {
            tracing::info!("removing {}, which is not the current database", path.display());
            remove_dir(&path)?;
        }
    }
    Ok(())
}

/// Removes a directory with all that is in it, if it is there.
pub fn remove_dir(directory: &Path) -> Result {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(StateError::io(directory)(error)),
        _ => Ok(()),
    }
}

/// The files of a database in another directory, which is new. Tables never change and are the same files; of the
/// others there are copies.
pub fn link_files(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir(to)?;
    for entry in fs::read_dir(from)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default();
        // What the library has said, and its lock.
        if name.as_encoded_bytes().starts_with(b"LO") {
            continue;
        }
        let target = to.join(name);
        if path.extension().is_none_or(|extension| extension != "sst") || fs::hard_link(&path, &target).is_err() {
            fs::copy(&path, &target)?;
            File::open(&target)?.sync_all()?;
        }
    }
    File::open(to)?.sync_all()
}
