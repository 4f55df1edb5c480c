//! A data directory: its lock, and which database in it is the current one.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use cavern_conf::host;
use parking_lot::{Condvar, Mutex};
use rustix::fs::{FlockOperation, flock};

use crate::error::{Result, StateError};

/// The file that names the directory of the current database.
pub const POINTER: &str = "database";
/// The name of the first one; those of the others go on with a number.
pub(crate) const FIRST: &str = "db";

/// The lock of a data directory, which keeps a second process out.
pub struct Lock {
    _file: File,
    /// The last field, and so the last to be dropped.
    pub(crate) free: SetAtEnd,
}

impl Lock {
    /// Takes it, for as long as it is kept.
    ///
    /// # Errors
    /// [`StateError::DataDirInUse`] while another process has it.
    pub fn take(data_dir: &Path) -> Result<Arc<Self>> {
        let path = data_dir.join("lock");
        let file = host::lock_file(&path).map_err(StateError::io(&path))?;
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Err(StateError::DataDirInUse(data_dir.to_owned()));
        }
        Ok(Arc::new(Self { _file: file, free: SetAtEnd(Free::default()) }))
    }
}

/// Whether every database of a data directory is closed and its lock is free. Cheap to clone.
#[derive(Clone, Default)]
pub struct Free(Arc<(Mutex<bool>, Condvar)>);

impl Free {
    pub fn is_set(&self) -> bool {
        *self.0.0.lock()
    }

    /// Returns when it is so, or after this time; whether it is. *Blocking*.
    pub fn wait(&self, within: Duration) -> bool {
        let (is_free, changed) = &*self.0;
        let mut is_free = is_free.lock();
        changed.wait_while_for(&mut is_free, |is_free| !*is_free, within);
        *is_free
    }
}

/// Set when this is dropped.
pub(crate) struct SetAtEnd(pub(crate) Free);

impl Drop for SetAtEnd {
    fn drop(&mut self) {
        let (is_free, changed) = &*self.0.0;
        *is_free.lock() = true;
        changed.notify_all();
    }
}

/// The directory of the current database.
///
/// # Errors
/// [`StateError::Corrupt`] where the name of it is none: which one it is cannot be guessed.
pub fn directory(data_dir: &Path) -> Result<PathBuf> {
    let path = data_dir.join(POINTER);
    let name = match fs::read_to_string(&path) {
        Ok(text) => text.trim().to_owned(),
        Err(error) if error.kind() == ErrorKind::NotFound => FIRST.to_owned(),
        Err(error) if error.kind() == ErrorKind::InvalidData => String::new(),
        Err(error) => return Err(StateError::io(&path)(error)),
    };
    match number(&name) {
        Some(_) => Ok(data_dir.join(name)),
        None => Err(StateError::Corrupt(format!("the name of the database in {}", path.display()))),
    }
}

/// 0 for `db`, 1 for `db-1`; none for what is no database.
pub(crate) fn number(name: &str) -> Option<u64> {
    let rest = name.strip_prefix(FIRST)?;
    match rest.strip_prefix('-') {
        None => rest.is_empty().then_some(0),
        Some(digits) => digits.parse().ok().filter(|number: &u64| *number > 0 && number.to_string() == digits),
    }
}
