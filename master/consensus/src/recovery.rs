//! Opening the data directory of a master without losing anything.
//!
//! RocksDB makes an empty database where it finds no `CURRENT`, stops where its manifest or its log was cut off, and
//! then deletes the files that what it has read does not name. A master started so would serve an empty or an older
//! namespace, and call it the truth. So the directory is looked at first, and nothing in it is changed before all of
//! this holds:
//!
//! - where a master has worked before (its key is there, a high-water mark, or a table file), there is a database;
//! - the database opens for reading: its table files are there and have the lengths that the manifest says. Its log
//!   ends at the first record that is not whole, which is what a crash leaves behind the last sync;
//! - its log has no hole at the begin: where nothing was purged, it begins with the first entry;
//! - it has every log entry up to the *high-water mark*, and a manifest no shorter than that says. The mark is a small
//!   file beside the database, written once a second and at the end, always after the entry is on disk. It is not
//!   synced: one that is lost or old only proves less.

use std::fs;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use cavern_state::{CurrentDatabase, Database, Family, Lock, Resources, current};
use rocksdb::IteratorMode;

use crate::error::{ConsensusError, Result};
use crate::log_store::{index_of, purged};
use crate::position::read_position;

const MARK: &str = "high-water";

/// Opens the database of a data directory, or makes it at the very first start.
///
/// # Errors
/// [`ConsensusError::DatabaseMissing`], [`ConsensusError::DatabaseCut`] and [`StateError::OpenDatabase`] for one that
/// is not whole; nothing has been changed then.
///
/// [`StateError::OpenDatabase`]: cavern_state::StateError::OpenDatabase
pub fn open(data_dir: &Path, resources: Resources) -> Result<(CurrentDatabase, HighWater)> {
    let lock = Lock::take(data_dir)?;
    let directory = current::directory(data_dir)?;
    let mark = HighWater::read(data_dir)?;
    if let Some(evidence) = evidence(data_dir, &directory)? {
        if !directory.join("CURRENT").exists() {
            return Err(ConsensusError::DatabaseMissing { path: directory, evidence, data_dir: data_dir.to_owned() });
        }
        if let Err(reason) = inspect(&directory, &mark)? {
            return Err(ConsensusError::DatabaseCut { path: directory, reason, mark: mark.path });
        }
    }
    Ok((CurrentDatabase::open(data_dir, resources, lock)?, mark))
}

/// What shows that a master has worked here.
fn evidence(data_dir: &Path, database: &Path) -> Result<Option<PathBuf>> {
    for name in ["secret.key", MARK, current::POINTER] {
        let path = data_dir.join(name);
        if path.exists() {
            return Ok(Some(path));
        }
    }
    let files = match fs::read_dir(database) {
        Ok(files) => files,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(ConsensusError::io(database)(error)),
    };
    // A first start that was cut short leaves a manifest or a log, but no table.
    let tables = files.flatten().map(|file| file.path());
    Ok(tables.into_iter().find(|path| path.extension().is_some_and(|extension| extension == "sst")))
}

/// Reads a database as it lies there; the inner error says what is missing.
fn inspect(directory: &Path, mark: &HighWater) -> Result<Result<(), String>> {
    if let Some(Manifest { name, bytes, database }) = &mark.manifest
        && directory.file_name().is_some_and(|own| *own == **database)
        && let Ok(found) = fs::metadata(directory.join(name))
        && found.len() < *bytes
    {
        return Ok(Err(format!("{name} has {} bytes and had {bytes}", found.len())));
    }
    let database = Database::open_for_inspection(directory)?;
    let (first, last) = (log_entry(&database, IteratorMode::Start)?, last_entry(&database)?);
    if last < mark.known {
        return Ok(Err(format!("it ends at log entry {last}, and {} was acknowledged", mark.known)));
    }
    let begin = purged(&database)?.map_or(0, |index| index.saturating_add(1));
    match first {
        Some(first) if first > begin => Ok(Err(format!("its log begins at entry {first}, not at {begin}"))),
        _ => Ok(Ok(())),
    }
}

/// Index of the last log entry that a database knows of, be it in the log or applied and purged.
fn last_entry(database: &Database) -> Result<u64> {
    let applied = read_position(database)?.0.map_or(0, |id| id.index);
    Ok(log_entry(database, IteratorMode::End)?.unwrap_or(0).max(applied))
}

/// Index of the first or last entry of the log.
fn log_entry(database: &Database, which: IteratorMode<'_>) -> Result<Option<u64>> {
    let entry = database.raw().iterator_cf(database.family(Family::RaftLog), which).next().transpose()?;
    entry.map(|(key, _)| index_of(&key)).transpose()
}

/// The manifest that a database uses now; it only grows.
#[derive(Clone, PartialEq, Eq)]
struct Manifest {
    name: String,
    bytes: u64,
    /// Name of the database's directory: another one has manifests of the same names.
    database: String,
}

impl Manifest {
    fn of(directory: &Path) -> Option<Self> {
        let name = fs::read_to_string(directory.join("CURRENT")).ok()?.trim().to_owned();
        let bytes = fs::metadata(directory.join(&name)).ok()?.len();
        Some(Self { name, bytes, database: directory.file_name()?.to_str()?.to_owned() })
    }
}

/// The highest log entry that is known to have been applied, and so to be on disk.
pub struct HighWater {
    path: PathBuf,
    known: u64,
    manifest: Option<Manifest>,
}

impl HighWater {
    fn read(data_dir: &Path) -> Result<Self> {
        let path = data_dir.join(MARK);
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::InvalidData) => String::new(),
            Err(error) => return Err(ConsensusError::io(&path)(error)),
        };
        let mut words = text.split_whitespace();
        // One that is no mark proves nothing, and is written anew.
        let known = words.next().and_then(|word| word.parse().ok()).unwrap_or(0);
        let manifest = words.next().zip(words.next().and_then(|word| word.parse().ok())).zip(words.next());
        let manifest = manifest.map(|((name, bytes), database)| Manifest {
            name: name.to_owned(),
            bytes,
            database: database.to_owned(),
        });
        Ok(Self { path, known, manifest })
    }

    /// Remembers that everything up to this entry is applied to the database in a directory. Blocking, for a moment.
    pub fn raise(&mut self, applied: u64, directory: &Path) {
        let manifest = Manifest::of(directory);
        if applied <= self.known && manifest == self.manifest && self.path.exists() {
            return;
        }
        let known = self.known.max(applied);
        let of_manifest =
            manifest.as_ref().map(|Manifest { name, bytes, database }| format!("{name} {bytes} {database}"));
        let of_manifest = of_manifest.unwrap_or_default();
        let fresh = self.path.with_extension("new");
        let replaced = fs::File::create(&fresh)
            .and_then(|mut file| writeln!(file, "{known} {of_manifest}"))
            .and_then(|()| fs::rename(&fresh, &self.path));
        match replaced {
            Ok(()) => (self.known, self.manifest) = (known, manifest),
            Err(error) => tracing::warn!(file = %self.path.display(), "cannot write the high-water mark: {error}"),
        }
    }
}

/// With little memory.
#[cfg(test)]
fn open_small(data_dir: &Path) -> Result<(CurrentDatabase, HighWater)> {
    open(data_dir, Resources::of_cache(1 << 20))
}

#[cfg(test)]
mod replaced;

#[cfg(test)]
mod tests {
    use cavern_state::StateError;
    use rocksdb::WriteBatch;

    use super::*;

    /// A data directory with `entries` log entries, closed.
    fn filled(entries: u64) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let (database, mut mark) = open_small(dir.path()).unwrap();
        fs::write(dir.path().join("secret.key"), [1; 32]).unwrap();
        let database = database.get();
        for index in 0..=entries {
            let mut batch = WriteBatch::default();
            batch.put_cf(database.family(Family::RaftLog), index.to_be_bytes(), [7; 100]);
            database.write_synced(batch).unwrap();
        }
        mark.raise(entries, database.directory());
        dir
    }

    fn refusal(dir: &Path) -> ConsensusError {
        let before = contents(dir);
        let error = open_small(dir).map(drop).unwrap_err();
        assert_eq!(contents(dir), before, "a refusal changes nothing: {error}");
        error
    }

    fn contents(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
        let mut all: Vec<_> = fs::read_dir(dir)
            .unwrap()
            .chain(fs::read_dir(dir.join("db")).into_iter().flatten())
            .map(|file| file.unwrap().path())
            .filter(|path| path.is_file())
            .map(|path| (path.clone(), fs::read(path).unwrap()))
            .collect();
        all.sort();
        all
    }

    fn file(dir: &Path, part: &str) -> PathBuf {
        let files = fs::read_dir(dir.join("db")).unwrap().map(|file| file.unwrap().path());
        files.filter(|path| path.to_str().unwrap().contains(part)).max().unwrap()
    }

    fn cut(path: &Path, by: u64) {
        let file = fs::File::options().write(true).open(path).unwrap();
        file.set_len(file.metadata().unwrap().len().saturating_sub(by)).unwrap();
    }

    #[test]
    fn a_database_that_is_gone_is_missed() {
        let dir = filled(3);
        fs::remove_file(dir.path().join("db/CURRENT")).unwrap();
        assert!(matches!(refusal(dir.path()), ConsensusError::DatabaseMissing { .. }));
        fs::remove_dir_all(dir.path().join("db")).unwrap();
        let error = refusal(dir.path());
        assert!(matches!(&error, ConsensusError::DatabaseMissing { .. }), "{error}");
        assert!(error.to_string().contains("secret.key"), "{error}");
    }

    #[test]
    fn a_first_start_that_was_cut_short_is_repeated() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("db")).unwrap();
        fs::write(dir.path().join("db/MANIFEST-000001"), b"half a").unwrap();
        open_small(dir.path()).map(drop).unwrap();
    }

    #[test]
    fn what_a_crash_tears_off_is_no_damage_but_acknowledged_entries_are_missed() {
        // The last entry was being written: it is not in the mark.
        let dir = filled(20);
        fs::write(dir.path().join(MARK), "19\n").unwrap();
        cut(&file(dir.path(), ".log"), 50);
        let (database, _) = open_small(dir.path()).unwrap();
        assert_eq!(last_entry(&database.get()).unwrap(), 19);

        let dir = filled(20);
        cut(&file(dir.path(), ".log"), 300);
        let error = refusal(dir.path());
        assert!(matches!(error, ConsensusError::DatabaseCut { .. }), "{error}");
        assert!(error.to_string().contains("and 20 was acknowledged"), "{error}");
        assert!(error.to_string().contains("high-water"), "{error}");
        // The loss can be accepted.
        fs::remove_file(dir.path().join(MARK)).unwrap();
        let (database, _) = open_small(dir.path()).unwrap();
        assert!((10..20).contains(&last_entry(&database.get()).unwrap()));
    }

    #[test]
    fn what_a_loss_of_power_leaves_behind_the_last_sync_is_no_damage() {
        let dir = filled(20);
        let log = file(dir.path(), ".log");
        {
            let database = open_small(dir.path()).unwrap().0.get();
            // Changes of the state are not synced, and a long one has several parts.
            for number in 0..3u64 {
                let mut batch = WriteBatch::default();
                batch.put_cf(database.family(Family::Meta), number.to_be_bytes(), [number as u8; 100_000]);
                database.write(batch).unwrap();
            }
        }
        let log = [file(dir.path(), ".log"), log].into_iter().max().unwrap();
        // The file had its length, and some pages of it were not there yet.
        let mut bytes = fs::read(&log).unwrap();
        assert!(bytes.len() > 250_000, "{}", bytes.len());
        let hole = bytes.len() - 150_000..bytes.len() - 80_000;
        bytes[hole].fill(0);
        fs::write(&log, bytes).unwrap();
        let (database, _) = open_small(dir.path()).unwrap();
        let database = database.get();
        assert_eq!(last_entry(&database).unwrap(), 20);
        let is_there = |number: u64| database.get(Family::Meta, &number.to_be_bytes()).unwrap().is_some();
        assert_eq!([0, 1, 2].map(is_there), [true, false, false], "in their order");
    }

    #[test]
    fn damage_before_the_end_of_the_log_is_refused() {
        let dir = filled(50);
        let log = file(dir.path(), ".log");
        let mut bytes = fs::read(&log).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle..middle + 20].fill(0x5a);
        fs::write(&log, bytes).unwrap();
        let error = refusal(dir.path());
        // Damage that looks like a torn end is detected by the mark.
        assert!(
            matches!(
                error,
                ConsensusError::State(StateError::OpenDatabase { .. }) | ConsensusError::DatabaseCut { .. }
            ),
            "{error}"
        );
    }

    #[test]
    fn a_manifest_that_was_cut_off_is_noticed_with_and_without_its_length() {
        let dir = filled(5);
        // Another start writes a table, and names it in the manifest.
        let (database, mut mark) = open_small(dir.path()).unwrap();
        mark.raise(6, database.get().directory());
        drop(database);
        let path = file(dir.path(), "MANIFEST");
        cut(&path, fs::metadata(&path).unwrap().len() / 2);
        let error = refusal(dir.path());
        assert!(error.to_string().contains("MANIFEST"), "{error}");

        let dir = filled(5);
        let database = open_small(dir.path()).unwrap().0.get();
        let mut batch = WriteBatch::default();
        batch.delete_cf(database.family(Family::RaftLog), 0u64.to_be_bytes());
        database.write_synced(batch).unwrap();
        drop(database);
        let error = refusal(dir.path());
        assert!(error.to_string().contains("begins at entry 1, not at 0"), "{error}");
    }

    #[test]
    fn a_mark_that_is_no_number_proves_nothing() {
        let dir = filled(3);
        fs::write(dir.path().join(MARK), [0xff, 0xfe]).unwrap();
        assert!(open_small(dir.path()).is_ok());
        fs::write(dir.path().join(MARK), "many").unwrap();
        assert!(open_small(dir.path()).is_ok());
    }
}
