//! Each state in which a crash may leave a data directory while another database takes the place of the current one:
//! the next start finds the earlier one or the new one, whole.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;

use cavern_state::StateError;
use cavern_state::current::POINTER;
use rocksdb::WriteBatch;
use tempfile::TempDir;

use super::*;
use crate::log_store::carry_over;
use crate::types::{LogId, log_id};

/// A row of the state, how this master voted, and the entries of the log.
type Found = (Vec<u8>, Vec<u8>, Vec<u64>);

/// The last entry that the snapshot covers.
fn covered() -> LogId {
    log_id(1, 1, 4)
}

fn old() -> Found {
    (b"own".to_vec(), b"voted".to_vec(), (0..=6).collect())
}

fn new() -> Found {
    (b"theirs".to_vec(), b"voted".to_vec(), vec![5, 6])
}

fn put(database: &Database, family: Family, key: &[u8], value: &[u8]) {
    let mut batch = WriteBatch::default();
    batch.put_cf(database.family(family), key, value);
    database.write_synced(batch).unwrap();
}

/// A data directory in which a master has worked, and the checkpoint of another master beside it.
fn filled() -> (TempDir, CurrentDatabase, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let data_dir = dir.path().join("master");
    fs::create_dir(&data_dir).unwrap();
    let (current, mut mark) = open_small(&data_dir).unwrap();
    fs::write(data_dir.join("secret.key"), [1; 32]).unwrap();
    let database = current.get();
    put(&database, Family::Job, b"row", b"own");
    put(&database, Family::RaftMeta, b"vote", b"voted");
    for index in 0..=6_u64 {
        put(&database, Family::RaftLog, &index.to_be_bytes(), b"entry");
    }
    mark.raise(4, database.directory());
    let theirs = dir.path().join("theirs");
    fs::create_dir(&theirs).unwrap();
    let theirs = Database::open(&theirs, 1 << 20).unwrap();
    put(&theirs, Family::Job, b"row", b"theirs");
    put(&theirs, Family::Meta, b"applied", &serde_json::to_vec(&covered()).unwrap());
    put(&theirs, Family::RaftMeta, b"vote", b"of another master");
    put(&theirs, Family::RaftLog, &9_u64.to_be_bytes(), b"of another master");
    let checkpoint = dir.path().join("checkpoint");
    theirs.checkpoint(&checkpoint).unwrap();
    (dir, current, checkpoint)
}

/// A directory as `kill -9` would leave it now.
fn copy(data_dir: &Path) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut left = vec![PathBuf::new()];
    while let Some(below) = left.pop() {
        for entry in fs::read_dir(data_dir.join(&below)).unwrap() {
            let name = below.join(entry.unwrap().file_name());
            if data_dir.join(&name).is_dir() {
                fs::create_dir(dir.path().join(&name)).unwrap();
                left.push(name);
            } else {
                fs::copy(data_dir.join(&name), dir.path().join(&name)).unwrap();
            }
        }
    }
    dir
}

fn databases(data_dir: &Path) -> Vec<String> {
    let names = fs::read_dir(data_dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name == "db" || name.starts_with("db-")).collect();
    names.sort();
    names
}

fn read(database: &Database) -> Found {
    let log = database.raw().iterator_cf(database.family(Family::RaftLog), IteratorMode::Start);
    let log = log.map(|entry| u64::from_be_bytes(entry.unwrap().0.as_ref().try_into().unwrap()));
    let row = |family, key| database.get(family, key).unwrap().unwrap();
    (row(Family::Job, b"row"), row(Family::RaftMeta, b"vote"), log.collect())
}

/// What a start finds, which leaves one database.
#[track_caller]
fn start(data_dir: &Path) -> Found {
    let (current, mut mark) = open_small(data_dir).unwrap();
    assert_eq!(databases(data_dir).len(), 1);
    let found = read(&current.get());
    mark.raise(6, current.get().directory());
    drop(current);
    // And the next one.
    let (current, _) = open_small(data_dir).unwrap();
    assert_eq!(read(&current.get()), found);
    found
}

#[test]
fn a_crash_leaves_the_earlier_database_or_the_new_one() {
    let (dir, current, checkpoint) = filled();
    let data_dir = dir.path().join("master");
    let mut crashes = vec![copy(&data_dir)];
    // A part of the files is there.
    fs::create_dir(data_dir.join("db-1")).unwrap();
    fs::write(data_dir.join("db-1/CURRENT"), b"MANIF").unwrap();
    crashes.push(copy(&data_dir));
    let next = current.prepare(&checkpoint).unwrap();
    crashes.push(copy(&data_dir));
    let before = current.get();
    let keep = |from: &Database, to: &Database| {
        crashes.push(copy(&data_dir));
        carry_over(from, to, Some(covered()))?;
        crashes.push(copy(&data_dir));
        Ok::<_, ConsensusError>(())
    };
    current.replace(next, keep).unwrap();
    for torn in ["", "db", "db-1\n"] {
        let crash = copy(crashes.last().unwrap().path());
        fs::write(crash.path().join("database.new"), torn).unwrap();
        crashes.push(crash);
    }
    for crash in crashes {
        assert_eq!(start(crash.path()), old());
        assert_eq!(databases(crash.path()), ["db"]);
    }
    // The new one is current, and the earlier one still there for who reads it.
    assert_eq!((read(&before), read(&current.get())), (old(), new()));
    assert_eq!(databases(&data_dir), ["db", "db-1"]);
    assert_eq!(start(copy(&data_dir).path()), new());
    let half_removed = copy(&data_dir);
    fs::remove_file(half_removed.path().join("db/CURRENT")).unwrap();
    assert_eq!(start(half_removed.path()), new());
    drop(before);
    assert_eq!(databases(&data_dir), ["db-1"]);
    assert_eq!(start(copy(&data_dir).path()), new());

    // And once more.
    put(&current.get(), Family::Job, b"row", b"own");
    let next = current.prepare(&checkpoint).unwrap();
    assert_eq!(start(copy(&data_dir).path()).0, b"own");
    current.replace(next, |from, to| carry_over(from, to, Some(covered()))).unwrap();
    assert_eq!(databases(&data_dir), ["db-2"]);
    let free = current.free();
    assert!(!free.is_set());
    drop(current);
    assert!(free.is_set());
    assert_eq!(start(&data_dir), new());
}

#[test]
fn what_does_not_name_a_database_is_refused_and_nothing_is_removed() {
    let (dir, current, checkpoint) = filled();
    let data_dir = dir.path().join("master");
    let before = current.get();
    let next = current.prepare(&checkpoint).unwrap();
    current.replace(next, |from, to| carry_over(from, to, Some(covered()))).unwrap();
    for garbled in [b"".as_slice(), b"db-", b"db-01", b"../master", b"\xff\xfe", b"db-1\ndb-2"] {
        let crash = copy(&data_dir);
        fs::write(crash.path().join(POINTER), garbled).unwrap();
        let error = open_small(crash.path()).map(drop).unwrap_err();
        assert!(error.to_string().contains(POINTER), "{error}");
        assert_eq!(databases(crash.path()), ["db", "db-1"]);
    }
    let crash = copy(&data_dir);
    fs::write(crash.path().join(POINTER), "db-7\n").unwrap();
    let error = open_small(crash.path()).map(drop).unwrap_err();
    assert!(matches!(&error, ConsensusError::DatabaseMissing { path, .. } if path.ends_with("db-7")), "{error}");
    assert_eq!(databases(crash.path()), ["db", "db-1"]);
    // A file of the new one is gone: the earlier one is no way back, its votes may be old.
    let crash = copy(&data_dir);
    let tables = fs::read_dir(crash.path().join("db-1")).unwrap().map(|file| file.unwrap().path());
    fs::remove_file(tables.filter(|path| path.extension().is_some_and(|it| it == "sst")).max().unwrap()).unwrap();
    open_small(crash.path()).map(drop).unwrap_err();
    assert_eq!(databases(crash.path()), ["db", "db-1"]);
    drop(before);
}

/// As that of a later version has it, at a feature version that both know.
#[test]
fn what_a_checkpoint_has_more_is_left_out() {
    let (dir, current, checkpoint) = filled();
    let mut db = {
        let mut options = rocksdb::Options::default();
        options.set_track_and_verify_wals_in_manifest(true);
        let names = rocksdb::DB::list_cf(&options, &checkpoint).unwrap();
        rocksdb::DB::open_cf(&options, &checkpoint, names).unwrap()
    };
    db.create_cf("of_a_later_version", &rocksdb::Options::default()).unwrap();
    drop(db);
    let next = current.prepare(&checkpoint).unwrap();
    current.replace(next, |from, to| carry_over(from, to, Some(covered()))).unwrap();
    drop(current);
    assert_eq!(start(&dir.path().join("master")), new());
}

#[test]
fn one_that_cannot_take_the_place_changes_nothing() {
    let (dir, current, checkpoint) = filled();
    let data_dir = dir.path().join("master");
    let next = current.prepare(&checkpoint).unwrap();
    let failed = current.replace(next, |_, _| Err(StateError::UnknownCommand));
    assert!(matches!(failed, Err(StateError::UnknownCommand)), "{failed:?}");
    assert_eq!(read(&current.get()), old());
    drop(current.lock_writing().unwrap());
    assert_eq!(start(copy(&data_dir).path()), old());

    // It is not known what the disk has: nothing is acknowledged any more.
    let next = current.prepare(&checkpoint).unwrap();
    fs::create_dir(data_dir.join("database.new")).unwrap();
    let failed = current.replace(next, |from, to| carry_over(from, to, Some(covered()))).unwrap_err();
    assert!(failed.to_string().contains("database"), "{failed}");
    let refused = current.lock_writing().map(drop).unwrap_err();
    assert!(refused.to_string().contains("restart this master"), "{refused}");
    fs::remove_dir(data_dir.join("database.new")).unwrap();
    drop(current);
    assert_eq!(start(&data_dir), old());
}

#[test]
fn entries_that_are_written_meanwhile_are_in_the_next_database() {
    let (_dir, current, checkpoint) = filled();
    let (stop, (told, puts)) = (AtomicBool::new(false), mpsc::channel());
    let written = thread::scope(|scope| {
        let (current, stop) = (&current, &stop);
        let writer = scope.spawn(move || {
            let mut index = 6_u64;
            while !stop.load(Ordering::Relaxed) {
                index += 1;
                let _same = current.lock_writing().unwrap();
                put(&current.get(), Family::RaftLog, &index.to_be_bytes(), b"entry");
                told.send(()).unwrap();
            }
            index
        });
        for _ in 0..5 {
            let next = current.prepare(&checkpoint).unwrap();
            // At least one is written between the two.
            puts.try_iter().for_each(drop);
            puts.recv().unwrap();
            current.replace(next, |from, to| carry_over(from, to, Some(covered()))).unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        writer.join().unwrap()
    });
    assert!(written > 10, "{written}");
    assert_eq!(read(&current.get()).2, (5..=written).collect::<Vec<_>>());
}
