//! One data directory: its lock, its identity, its health, and where the file of a block is.
//!
//! ```text
//!   lock                    held (flock) by the worker that works here
//!   worker.json             format, worker uuid and id, cluster id, number of starts
//!   key                     where blocks are encrypted: see `sealing`
//!   index/                  RocksDB: block id → record
//!   blocks/xx/CONTENT.BLOCK.INCARNATION    one plain file per cached block
//!   data/xx/CONTENT.BLOCK.INCARNATION.MOUNT    one plain file per block of an fs-mode file
//! ```

use std::collections::HashSet;
use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use cavern_conf::{DirSpec, Tier, host};
use cavern_proto::{BlockId, ContentId};
use parking_lot::Mutex;
use rustix::fs::{FlockOperation, IFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use tracing::debug;

use super::files::replace_file;
use super::index::Index;
use super::sealing::Cipher;
use crate::error::WorkerError;

/// Version of the layout above,
const FORMAT: u32 = 1;
/// and of the same with blocks that are encrypted.
const FORMAT_ENCRYPTED: u32 = 2;
/// Incarnations are `starts` in the high bits, a counter in these low ones.
pub(super) const INCARNATION_BITS: u32 = 40;
/// Starts of a worker that its incarnations have room for.
const STARTS_MAX: u64 = (1 << (u64::BITS - INCARNATION_BITS)) - 1;
/// A directory is given up after this many I/O errors in a row.
const MAX_ERRORS: u32 = 5;

/// What `worker.json` holds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Identity {
    pub format: u32,
    /// 128 random bits in hexadecimal, the same in all directories of a worker.
    pub uuid: String,
    /// Empty until the master has sent it.
    pub cluster_id: String,
    /// 0 until the master has sent it.
    #[serde(default)]
    pub worker_id: u64,
    /// Counted up at every start, so that no two starts hand out the same incarnation.
    pub starts: u64,
    /// All directories that the worker had at its last start. Earlier versions name none.
    #[serde(default)]
    pub directories: Vec<PathBuf>,
}

impl Identity {
    /// Whether the blocks of its directories are encrypted.
    pub(super) fn is_encrypted(&self) -> bool {
        self.format == FORMAT_ENCRYPTED
    }

    pub(super) fn set_encrypted(&mut self, is_encrypted: bool) {
        self.format = if is_encrypted { FORMAT_ENCRYPTED } else { FORMAT };
    }

    pub(super) fn fresh() -> Self {
        Self { format: FORMAT, uuid: host::unique_name(), ..Self::default() }
    }

    /// That of a directory; `None` when it has none yet.
    pub(super) fn read(directory: &Path) -> Result<Option<Self>, WorkerError> {
        let path = directory.join("worker.json");
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            // What is no directory is refused by `ensure_dir`, which names the setting.
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Ok(None);
            }
            Err(error) => return Err(WorkerError::directory("read", &path)(error)),
        };
        let damaged = |reason: String| WorkerError::DirectoryIdentity { path: path.clone(), reason };
        // The format is looked at first: a later one may have changed everything else.
        let value: serde_json::Value = serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
        let format = value.get("format").and_then(serde_json::Value::as_u64).unwrap_or(0);
        let found = u32::try_from(format).unwrap_or(u32::MAX);
        if ![FORMAT, FORMAT_ENCRYPTED].contains(&found) {
            return Err(WorkerError::DirectoryFormat { path: directory.to_owned(), found, known: FORMAT_ENCRYPTED });
        }
        let identity: Self = serde_json::from_value(value).map_err(|error| damaged(error.to_string()))?;
        match identity.uuid_bytes() {
            None => Err(damaged("uuid is not 32 hexadecimal digits".to_owned())),
            Some(_) if identity.starts >= STARTS_MAX => Err(damaged("no worker has been started so often".to_owned())),
            Some(_) => Ok(Some(identity)),
        }
    }

    /// Replaces `worker.json` in one step, synced.
    pub(super) fn write(&self, directory: &Path) -> Result<(), WorkerError> {
        let name = "worker.json";
        let written = serde_json::to_vec_pretty(self).map_err(io::Error::from);
        let written = written.and_then(|text| replace_file(directory, name, &text));
        written.map_err(WorkerError::directory("write", &directory.join(name)))
    }

    /// The uuid as 16 bytes.
    pub(super) fn uuid_bytes(&self) -> Option<[u8; 16]> {
        let well_formed = self.uuid.len() == 32 && self.uuid.bytes().all(|digit| digit.is_ascii_hexdigit());
        u128::from_str_radix(&self.uuid, 16).ok().filter(|_| well_formed).map(u128::to_be_bytes)
    }
}

/// Refuses a directory that is empty, and was one of the worker as others of its directories know: its disk may not be
/// mounted, and the one below would be filled. What is in memory is lost with every start of the host.
pub(super) fn check_kept(directories: &[DirSpec]) -> Result<(), WorkerError> {
    let mut known = HashSet::new();
    let mut empty = Vec::new();
    for spec in directories {
        match Identity::read(&spec.path)? {
            Some(identity) => known.extend(identity.directories),
            // Somebody may have deleted the identity alone.
            None if spec.tier != Tier::Mem && !spec.path.join("blocks").exists() => empty.push(&spec.path),
            None => {}
        }
    }
    match empty.into_iter().find(|path| known.contains(*path) && path.exists()) {
        Some(path) => Err(WorkerError::DirectoryEmptied(path.clone())),
        None => Ok(()),
    }
}

/// Takes the lock of a directory, for as long as the file is kept.
pub(super) fn lock(directory: &Path) -> Result<File, WorkerError> {
    let path = directory.join("lock");
    let file = host::lock_file(&path).map_err(WorkerError::directory("lock", &path))?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(Errno::WOULDBLOCK) => Err(WorkerError::DirectoryInUse(directory.to_owned())),
        Err(error) => Err(WorkerError::directory("lock", &path)(error.into())),
    }
}

/// When the capacity of a directory was changed.
#[derive(Debug, Default)]
pub(super) struct CapacityAdjustment {
    pub lowered: Option<Instant>,
    /// When a write found no space although the file system showed some.
    pub disbelieved: Option<Instant>,
}

/// A data directory in use. It is healthy until several operations on its disk have failed in a row; what was given up
/// stays so until the next start.
#[derive(Debug)]
pub(super) struct Directory {
    pub spec: DirSpec,
    /// What was configured, or reckoned at start. The capacity in force may be less.
    pub capacity_bytes: u64,
    /// Taken before the lock of the table's residents.
    pub fitted: Mutex<CapacityAdjustment>,
    pub index: Index,
    /// Where its blocks are encrypted.
    pub cipher: Option<Arc<Cipher>>,
    pub health: DiskHealth,
    /// Held as long as it is used.
    pub _lock: File,
}

/// How the disk of a directory fares.
#[derive(Debug, Default)]
pub(super) struct DiskHealth {
    is_given_up: AtomicBool,
    errors_in_a_row: AtomicU32,
    last_error: Mutex<String>,
}

impl DiskHealth {
    pub(super) fn last_error(&self) -> String {
        self.last_error.lock().clone()
    }

    /// An operation on the disk has succeeded.
    pub(super) fn succeeded(&self) {
        if self.errors_in_a_row.load(Ordering::Relaxed) != 0 {
            self.errors_in_a_row.store(0, Ordering::Relaxed);
        }
    }

    /// The disk failed; says whether the directory has just been given up because of it.
    pub(super) fn failed(&self, error: &dyn std::fmt::Display) -> bool {
        *self.last_error.lock() = error.to_string();
        let errors = self.errors_in_a_row.fetch_add(1, Ordering::Relaxed) + 1;
        errors >= MAX_ERRORS && !self.is_given_up.swap(true, Ordering::Relaxed)
    }
}

impl Directory {
    pub(super) fn is_healthy(&self) -> bool {
        !self.health.is_given_up.load(Ordering::Relaxed)
    }
}

/// What the name of a data block's file says, which is all there is to say of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct DataName {
    pub id: BlockId,
    pub incarnation: u64,
    pub mount_id: u32,
    /// Bytes of the block, at least one. Its file may be shorter.
    pub length: u32,
}

/// Where the file of a block is below a data directory.
pub(super) fn block_path(directory: &Path, id: &BlockId, incarnation: u64) -> PathBuf {
    directory.join(format!("blocks/{:02x}/{}.{}.{incarnation}", id.content.as_bytes()[0], id.content, id.index))
}

/// Where the file of a data block is below a data directory.
pub(super) fn data_path(directory: &Path, name: &DataName) -> PathBuf {
    let DataName { id, incarnation, mount_id, length } = name;
    let folder = id.content.as_bytes()[0];
    directory.join(format!("data/{folder:02x}/{}.{}.{incarnation}.{mount_id}.{length}", id.content, id.index))
}

/// What the name of a data block's file says; `None` for names that are not ours.
pub(super) fn parse_data_name(name: &str) -> Option<DataName> {
    let (name, length) = name.rsplit_once('.')?;
    let (block, mount_id) = name.rsplit_once('.')?;
    let (id, incarnation) = parse_block_name(block)?;
    let length = parse_number(length).filter(|length| *length > 0)?;
    Some(DataName { id, incarnation, mount_id: parse_number(mount_id)?, length })
}

/// A number as it is written in the name of a file. Spelled in another way it would be looked for elsewhere.
fn parse_number<T: FromStr + ToString>(text: &str) -> Option<T> {
    text.parse().ok().filter(|number: &T| number.to_string() == text)
}

/// The block and incarnation that a file's name says; `None` for names that are not ours.
pub(super) fn parse_block_name(name: &str) -> Option<(BlockId, u64)> {
    let mut parts = name.split('.');
    let (content, index, incarnation) = (parts.next()?, parts.next()?, parts.next()?);
    let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    if parts.next().is_some() || content.len() != 32 || !content.bytes().all(is_digit) {
        return None;
    }
    let content = ContentId::from_slice(&u128::from_str_radix(content, 16).ok()?.to_be_bytes())?;
    let incarnation = parse_number(incarnation).filter(|incarnation| incarnation >> INCARNATION_BITS < STARTS_MAX)?;
    Some((BlockId { content, index: parse_number(index)? }, incarnation))
}

/// The folders of `blocks` or `data`.
pub(super) fn folders(kind: &Path) -> impl Iterator<Item = PathBuf> {
    (0..=255u8).map(move |folder| kind.join(format!("{folder:02x}")))
}

/// Makes `blocks` and `data` with their 256 folders each. Those of `data` are on disk when this returns: what is in
/// them must be found after a power failure.
pub(super) fn make_folders(directory: &Path) -> Result<(), WorkerError> {
    let failed = |action, path: &Path| WorkerError::directory(action, path);
    for kind in ["blocks", "data"] {
        let kind = directory.join(kind);
        std::fs::create_dir_all(&kind).map_err(failed("create", &kind))?;
        // Also where the whole directory is shared with others.
        std::fs::set_permissions(&kind, Permissions::from_mode(0o700)).map_err(failed("close to others", &kind))?;
        spread_folders(&kind);
        for path in folders(&kind) {
            std::fs::create_dir_all(&path).map_err(failed("create", &path))?;
        }
    }
    [&directory.join("data"), directory].into_iter().try_for_each(|path| {
        let synced = File::open(path).and_then(|folder| folder.sync_all());
        synced.map_err(failed("sync", path))
    })
}

/// Asks for the folders that are made in `kind` to be put far from each other on the disk, which is where their files
/// are put as well. ext4 takes no inode again for minutes after its file is gone, and looks at each such one of the
/// same group of blocks before it finds another: next to each other, a tenth of a millisecond per block after many have
/// been dropped. File systems that know nothing of this refuse it, and do not need it.
fn spread_folders(kind: &Path) {
    let spread = || {
        let folder = File::open(kind)?;
        let flags = rustix::fs::ioctl_getflags(&folder)?;
        Ok::<_, io::Error>(rustix::fs::ioctl_setflags(&folder, flags | IFlags::TOPDIR)?)
    };
    if let Err(error) = spread() {
        debug!(folder = %kind.display(), %error, "the file system does not spread folders");
    }
}

/// Size of the file system of a directory, and what this user may still write there, in bytes.
pub(super) fn file_system_bytes(directory: &Path) -> Result<(u64, u64), WorkerError> {
    let failed = WorkerError::directory("ask for the free space of", directory);
    let stat = rustix::fs::statvfs(directory).map_err(|error| failed(error.into()))?;
    Ok((stat.f_blocks.saturating_mul(stat.f_frsize), stat.f_bavail.saturating_mul(stat.f_frsize)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn block_names_survive_the_round_trip() {
        let id = BlockId { content: ContentId::of_object("s", "k", "e", 1, 1), index: 17 };
        let path = block_path(Path::new("/d"), &id, 99);
        let name = path.file_name().unwrap().to_str().unwrap();
        assert_eq!(parse_block_name(name), Some((id, 99)));
        assert!(path.starts_with(format!("/d/blocks/{:02x}", id.content.as_bytes()[0])));
        let said = DataName { id, incarnation: 99, mount_id: 7, length: 1 << 20 };
        let path = data_path(Path::new("/d"), &said);
        let data_name = path.file_name().unwrap().to_str().unwrap();
        assert_eq!(parse_data_name(data_name), Some(said));
        assert_eq!(parse_data_name(&format!("{name}.7.0")), None, "a block has bytes");
        assert_eq!((parse_data_name(name), parse_block_name(data_name)), (None, None), "the kinds are told apart");
        assert!(path.starts_with(format!("/d/data/{:02x}", id.content.as_bytes()[0])));
        for wrong in ["", "x", "a.b.c", &format!("{name}.1"), &name[1..], "+f000000000000000000000000000000.1.1"] {
            assert_eq!(parse_block_name(wrong), None, "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn a_name_is_that_of_one_block_or_of_none(
            name in prop_oneof![".{0,60}", "[0-9a-fA-F]{32}(\\.[+0]?[0-9]{1,20}){2,4}(\\.draft)?"],
        ) {
            let directory = Path::new("/d");
            let is_named = |path: PathBuf| path.file_name().unwrap().to_str().unwrap() == name;
            if let Some((id, incarnation)) = parse_block_name(&name) {
                prop_assert!(is_named(block_path(directory, &id, incarnation)));
            }
            if let Some(said) = parse_data_name(&name) {
                prop_assert!(is_named(data_path(directory, &said)));
            }
        }

        #[test]
        fn every_block_has_a_name_that_says_it(
            content: [u8; 16],
            index: u32,
            incarnation in 0..STARTS_MAX << INCARNATION_BITS,
            mount_id: u32,
            length in 1..=u32::MAX,
        ) {
            let id = BlockId { content: ContentId::from_slice(&content).unwrap(), index };
            let said = DataName { id, incarnation, mount_id, length };
            let path = data_path(Path::new("/d"), &said);
            let name = path.file_name().unwrap().to_str().unwrap();
            prop_assert_eq!(parse_data_name(name), Some(said));
        }
    }

    #[test]
    fn identities_are_kept_and_wrong_ones_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Identity::read(dir.path()).unwrap(), None);
        let identity = Identity { cluster_id: "c".into(), worker_id: 5, starts: 3, ..Identity::fresh() };
        identity.write(dir.path()).unwrap();
        assert_eq!(Identity::read(dir.path()).unwrap(), Some(identity));
        let with = |text: &str| {
            std::fs::write(dir.path().join("worker.json"), text).unwrap();
            Identity::read(dir.path()).unwrap_err()
        };
        assert!(matches!(with("{"), WorkerError::DirectoryIdentity { .. }));
        assert!(matches!(with(r#"{"format": 9}"#), WorkerError::DirectoryFormat { found: 9, .. }));
        assert!(matches!(with(r#"{"format": 1}"#), WorkerError::DirectoryIdentity { .. }));
        let endless =
            r#"{"format":1,"uuid":"00000000000000000000000000000001","cluster_id":"","starts":18446744073709551615}"#;
        assert!(with(endless).to_string().contains("started so often"));
        let short = r#"{"format":1,"uuid":"12","cluster_id":"","starts":1}"#;
        assert!(matches!(with(short), WorkerError::DirectoryIdentity { .. }));
    }

    #[test]
    fn a_directory_has_one_worker() {
        let dir = tempfile::tempdir().unwrap();
        let first = lock(dir.path()).unwrap();
        assert!(matches!(lock(dir.path()), Err(WorkerError::DirectoryInUse(_))));
        drop(first);
        assert!(lock(dir.path()).is_ok());
    }
}
