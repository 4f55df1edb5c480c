//! Points between two steps at which a test lets a process die, as `kill -9` would have it.
//!
//! What is tested is what is shipped, so the points are in every build; one that is passed costs a relaxed load. They
//! do nothing unless the process was started with `CAVERN_FAILPOINTS` in its environment, which names a directory that
//! is there, belongs to the user of the process, and that nobody else may write to. No file of configuration and no
//! port can switch them on.
//!
//! A point is armed by a file of its name in that directory, at any time. The file says at which pass the process dies;
//! an empty one means the first. Then it is renamed to `NAME.hit`, by one process alone, and that one sends itself
//! SIGKILL. Who can do all this could send the signal as well: a failpoint gives nobody a power that he does not have.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rustix::process::{Signal, geteuid, getpid, kill_process};

/// The environment variable that names the directory.
pub const FAILPOINTS_VARIABLE: &str = "CAVERN_FAILPOINTS";

static ENABLED: AtomicBool = AtomicBool::new(false);
static ARMED: OnceLock<Armed> = OnceLock::new();

macro_rules! points {
    ($($role:literal: { $($(#[$doc:meta])* $variant:ident = $name:literal,)* })*) => {
        /// Where a process may be made to die.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum Failpoint {
            $($($(#[$doc])* $variant,)*)*
        }

        impl Failpoint {
            /// In the order of their declaration.
            pub const ALL: &[Self] = &[$($(Self::$variant,)*)*];

            /// The name of the file that arms it.
            pub fn name(self) -> &'static str {
                match self {
                    $($(Self::$variant => $name,)*)*
                }
            }

            /// The process that it is in: `fuse`, `worker`, `master`.
            pub fn role(self) -> &'static str {
                match self {
                    $($(Self::$variant => $role,)*)*
                }
            }
        }
    };
}

points! {
    "fuse": {
        /// A change of a delegated directory is in the journal, and neither answered nor in the queue.
        ChangeJournaled = "change-journaled",
        /// Such a change is in the queue, and the kernel does not know.
        ChangeQueued = "change-queued",
        /// A call with changes that had been answered is on its way, and the master has not answered it.
        WriteBackSent = "write-back-sent",
        /// The master has made them, and nothing here knows.
        WriteBackMade = "write-back-made",
        /// Somebody wants to look into a delegated directory, and that it is let go of is in the queue.
        ReturnQueued = "return-queued",
        /// What the process before had left is found, and nothing of it is sent.
        ReplayBegun = "replay-begun",
        /// A block is there for a file that is not made yet.
        BlockPreallocated = "block-preallocated",
        /// A block has room at its workers, and the layout does not know it yet.
        BlockReserved = "block-reserved",
        /// The bytes are at every worker, and the write is not answered.
        WritePlaced = "write-placed",
        /// A sync is asked for, and no worker knows.
        SyncBegun = "sync-begun",
        /// The bytes are on the workers' disks, and the master does not know the length.
        SyncedAtWorkers = "synced-at-workers",
        /// A commit is about to be sent.
        CommitBegun = "commit-begun",
        /// The master has answered a commit, whatever it said, and the layout here does not know it.
        CommitAnswered = "commit-answered",
        /// What lay behind the end is zeros, and the file has its old length.
        CutBegun = "cut-begun",
        /// The file has its new length, and the layout here does not know it.
        CutAnswered = "cut-answered",
        /// A file was created, and the kernel does not know.
        CreateAnswered = "create-answered",
        /// Names were changed, and the kernel does not know.
        RenameAnswered = "rename-answered",
        /// A name is gone, and the kernel does not know.
        RemoveAnswered = "remove-answered",
    }
    "worker": {
        /// The file of a new block is there, and the store does not know it.
        BlockMade = "block-made",
        /// Bytes or zeros were written by a request that is not answered.
        WriteStored = "write-stored",
        /// A block is on disk, its name perhaps not.
        BlockSynced = "block-synced",
        /// All of a sync is done, but for its answer.
        FolderSynced = "folder-synced",
        /// The file of a freed block is gone, and the store still has the block.
        BlockFreed = "block-freed",
        /// A small file was read, and is not sent.
        UploadRead = "upload-read",
        /// A small object is in the bucket, and the master has no answer.
        UploadPut = "upload-put",
        /// A multipart upload was begun.
        UploadBegun = "upload-begun",
        /// One part of an upload is at the store.
        UploadPartSent = "upload-part-sent",
        /// All parts are at the store, and are no object.
        UploadSent = "upload-sent",
        /// A large object is in the bucket, and the master has no answer.
        UploadCompleted = "upload-completed",
    }
    "master": {
        /// Entries are about to be written to the log.
        LogAppend = "log-append",
        /// Entries are on disk, and the consensus does not know.
        LogSynced = "log-synced",
        /// Commands of an entry are about to be written to the state.
        CommandApplying = "command-applying",
        /// Commands of an entry are in the state, and nobody has been notified.
        CommandApplied = "command-applied",
        /// All commands of an entry are in the state, and its position is not.
        EntryApplied = "entry-applied",
        /// An entry is applied, and its proposers have no answer.
        EntryAnswered = "entry-answered",
        /// The state was copied for a snapshot, which is not described yet.
        SnapshotBuilt = "snapshot-built",
        /// A snapshot is there, and what it stands for is still in the log.
        SnapshotMade = "snapshot-made",
        /// A snapshot of another master is here and kept, and nothing was done with it.
        SnapshotAdopted = "snapshot-adopted",
        /// A database was made of a snapshot, with this master's log, and nothing names it.
        DatabasePrepared = "database-prepared",
        /// Its name is in a file that is not in its place yet.
        DatabaseNamed = "database-named",
        /// It is the current one on disk, and the earlier one is in use.
        DatabaseReplaced = "database-replaced",
        /// A part of what lies below a renamed directory has its intents.
        RenamePropagated = "rename-propagated",
        /// That there may be an object is noted, and no worker was asked to write it.
        ObjectNoted = "object-noted",
        /// The objects of an inode are written, and this is not noted.
        ObjectWritten = "object-written",
        /// It is noted, and keys may have been given up.
        ObjectConfirmed = "object-confirmed",
        /// An object is about to be deleted.
        DeletionBegun = "deletion-begun",
        /// An object is gone, and is noted as still to be deleted.
        ObjectDeleted = "object-deleted",
        /// A session was asked to return a directory.
        RecallSent = "recall-sent",
        /// It has let go in the state, and nobody who waits for that knows.
        DelegationReturned = "delegation-returned",
        /// A part of what a session leaves behind is gone, and the rest is not.
        SessionEnding = "session-ending",
        /// A worker has freed blocks, and they are noted as still to be freed.
        GarbageFreed = "garbage-freed",
    }
}

impl Failpoint {
    /// Passes the point: nothing happens, unless it is armed.
    #[inline]
    pub fn pass(self) {
        if ENABLED.load(Ordering::Relaxed) {
            self.look();
        }
    }

    #[cold]
    fn look(self) {
        if ARMED.get().is_some_and(|armed| armed.is_due(self)) {
            die();
        }
    }
}

fn die() {
    let _sent = kill_process(getpid(), Signal::KILL);
    // The signal ends every thread before the call returns to one of them; should it not, nothing goes on from here.
    std::process::abort();
}

/// The directory of the files that arm points, and how often each was passed since its file appeared.
struct Armed {
    directory: PathBuf,
    passes: Mutex<Vec<u32>>,
}

impl Armed {
    fn new(directory: PathBuf) -> Self {
        Self { directory, passes: Mutex::new(vec![0; Failpoint::ALL.len()]) }
    }

    /// Counts a pass; says whether the process is to die now, and has taken the file away then.
    fn is_due(&self, point: Failpoint) -> bool {
        let file = self.directory.join(point.name());
        let Ok(text) = std::fs::read_to_string(&file) else { return false };
        let wanted = text.trim().parse().unwrap_or(1);
        let mut passes = self.passes.lock();
        let count = &mut passes[point as usize];
        *count += 1;
        *count >= wanted && std::fs::rename(&file, file.with_extension("hit")).is_ok()
    }
}

/// Switches the points on if the environment says so. Call it once, before the process serves.
///
/// # Errors
/// The directory is not there, or is somebody else's, or somebody else may write to it.
pub fn enable_failpoints() -> Result<(), String> {
    let Some(directory) = std::env::var_os(FAILPOINTS_VARIABLE) else { return Ok(()) };
    let directory = PathBuf::from(directory);
    check(&directory).map_err(|cause| {
        format!(
            "{FAILPOINTS_VARIABLE}={} ({cause}): it is for tests only, remove it from the environment",
            directory.display()
        )
    })?;
    tracing::warn!(directory = %directory.display(), "failpoints are enabled: this process dies where a test wants it \
        to");
    ARMED.get_or_init(|| Armed::new(directory));
    ENABLED.store(true, Ordering::Relaxed);
    Ok(())
}

fn check(directory: &Path) -> Result<(), String> {
    let metadata = std::fs::symlink_metadata(directory).map_err(|error| error.to_string())?;
    if !metadata.is_dir() {
        return Err("not a directory".to_owned());
    }
    if metadata.uid() != geteuid().as_raw() || metadata.mode() & 0o022 != 0 {
        return Err("not a directory that this user alone may write to".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn names_are_different_and_no_point_is_enabled_by_itself() {
        let names: BTreeSet<&str> = Failpoint::ALL.iter().map(|point| point.name()).collect();
        assert_eq!(names.len(), Failpoint::ALL.len());
        for (number, point) in Failpoint::ALL.iter().enumerate() {
            assert_eq!(*point as usize, number);
            // Being here afterwards is the assertion.
            point.pass();
        }
        assert!(!ENABLED.load(Ordering::Relaxed));
    }

    #[test]
    fn a_point_is_due_at_the_pass_that_its_file_names_and_once() {
        let directory = tempfile::tempdir().unwrap();
        let armed = Armed::new(directory.path().to_owned());
        let file = directory.path().join("log-append");
        assert!(!armed.is_due(Failpoint::LogAppend));
        fs::write(&file, "3").unwrap();
        assert!(!armed.is_due(Failpoint::LogSynced));
        let due: Vec<bool> = (0..5).map(|_| armed.is_due(Failpoint::LogAppend)).collect();
        assert_eq!(due, [false, false, true, false, false]);
        assert!(!file.exists() && directory.path().join("log-append.hit").exists());
        fs::write(directory.path().join("log-synced"), "").unwrap();
        assert!(armed.is_due(Failpoint::LogSynced));
    }

    #[test]
    fn a_directory_that_others_may_write_to_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        check(directory.path()).unwrap();
        fs::set_permissions(directory.path(), Permissions::from_mode(0o777)).unwrap();
        assert!(check(directory.path()).unwrap_err().contains("alone"));
        assert!(check(&directory.path().join("nowhere")).is_err());
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(check(&file).unwrap_err().contains("not a directory"));
    }
}
