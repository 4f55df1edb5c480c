//! Files of cache-mode mounts that are being written.
//!
//! Objects cannot be changed in place, so what is written is staged on this host ([`StagedFile`], in `file`, `write`,
//! `read` and `disk`) and goes to the bucket as a whole object when the file is closed or synced (`upload`), large ones
//! in parts that are sent ahead while they are written (`parts`). The bucket is the truth: a change is acknowledged
//! when the bucket has it. Then the master is asked to look, and with that the name leads to the new version on every
//! client; the workers have got its bytes before (`cached`). `staging_budget` is about the room on the disk, `layout`
//! about where the bytes are, `writers` about whose close counts, `names` and `rename` about names that are made,
//! removed and moved, `attributes` about what the bucket keeps beside bytes.
//!
//! While a file is being written here it has an inode of its own, beyond those of the namespace, which its name leads
//! to on this client only.

mod attributes;
mod cached;
mod disk;
mod file;
mod layout;
mod names;
mod parts;
mod ranges;
mod read;
mod rename;
mod staging_budget;
mod upload;
mod write;
mod writers;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cavern_conf::schema;
use cavern_net::WorkerPool;
use cavern_ufs::Ufs;
use parking_lot::Mutex;
use rustix::io::Errno;
use tokio::runtime::Handle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use file::StagedFile;
pub use parts::OBJECT_BYTES_MAX;

use crate::error::ClientError;
use crate::journal::EPOCH_BITS;
use crate::memory::MemoryShare;
use crate::metadata::{Metadata, Node};
use crate::mounts::MountView;
use crate::read::Files;
use crate::stats::Stats;
use file::StagedLocation;
use layout::Base;
use names::refuse;
use parts::UPLOAD_BYTES;
use staging_budget::StagingBudget;

/// The namespace counts its inodes from 1.
const FIRST_INODE: u64 = 1 << 62;
/// For how long a file that nobody has open is kept for one who is about to open it.
const MOMENT: Duration = Duration::from_secs(5);
/// How often a name is looked up before it is taken: each time, somebody else has done something with it meanwhile.
const LOOKS_MAX: usize = 100;
/// Key of an object at most, in bytes: what S3 allows.
const KEY_BYTES_MAX: usize = 1024;

/// The files that are being written by this process. Cheap to clone.
#[derive(Clone)]
pub struct StagedFiles {
    shared: Arc<Shared>,
}

pub(super) struct Shared {
    metadata: Metadata,
    files: Files,
    pool: Arc<WorkerPool>,
    stats: Arc<Stats>,
    directory: PathBuf,
    room: StagingBudget,
    /// Parts on their way.
    memory: MemoryShare,
    next_inode: AtomicU64,
    registry: Mutex<Registry>,
    tasks: TaskTracker,
    /// Event loops write outside the runtime.
    runtime: Handle,
}

impl Shared {
    /// The bucket of a mount, for changes: one that cannot be reached is waited for.
    fn ufs(&self, mount: &MountView) -> Result<Ufs, ClientError> {
        Ok(mount.ufs()?.patient(self.timeout()))
    }

    /// One read or write, every attempt included.
    fn timeout(&self) -> Duration {
        self.files.limits().read
    }
}

#[derive(Default)]
struct Registry {
    files: HashMap<u64, RegisteredFile>,
    names: HashMap<(u64, Box<[u8]>), u64>,
}

struct RegisteredFile {
    file: Arc<StagedFile>,
    /// Threads that are about to open it, and since when.
    expected: Vec<(u32, Instant)>,
    /// When its name was last said to lead there: who looked may open it even when the name leads elsewhere by then.
    shown: Option<Instant>,
}

impl RegisteredFile {
    fn new(file: Arc<StagedFile>) -> Self {
        Self { file, expected: Vec::new(), shown: None }
    }

    fn expect(&mut self, thread: u32) {
        self.expected.retain(|(expected, since)| *expected != thread && since.elapsed() < MOMENT);
        self.expected.push((thread, Instant::now()));
    }

    /// A thread is there. Those that cannot be distinguished (0) all have a moment.
    fn thread_arrived(&mut self, thread: u32) {
        self.expected.retain(|(expected, _)| *expected != thread || thread == 0);
    }

    fn is_expected(&self) -> bool {
        self.expected.iter().any(|(_, since)| since.elapsed() < MOMENT)
    }

    /// Whether nobody can come to open it any more.
    fn is_reclaimable(&self) -> bool {
        let was_shown = self.shown.is_some_and(|since| since.elapsed() < MOMENT);
        !self.file.is_open() && !self.is_expected() && (self.file.is_dirty() || !was_shown)
    }
}

/// Whether a new file may come to replace an object that another client makes meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Creation {
    Replacing,
    /// `O_EXCL`.
    Exclusive,
}

impl StagedFiles {
    /// Inside a tokio runtime, where uploads will run.
    pub(crate) fn new(
        metadata: Metadata,
        files: Files,
        pool: Arc<WorkerPool>,
        stats: Arc<Stats>,
        conf: &schema::Client,
    ) -> Self {
        let memory = files.memory().share(UPLOAD_BYTES);
        let room = StagingBudget::new(conf.staging_size.bytes(), stats.staged_bytes.clone());
        let shared = Shared {
            metadata,
            files,
            pool,
            stats,
            directory: conf.staging_directory.clone(),
            room,
            memory,
            next_inode: AtomicU64::new(FIRST_INODE),
            registry: Mutex::default(),
            tasks: TaskTracker::new(),
            runtime: Handle::current(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Whether an inode is that of a file that is (or was) being written here.
    pub fn is_staged(inode: u64) -> bool {
        inode >= FIRST_INODE
    }

    /// The file of an inode.
    pub fn get(&self, inode: u64) -> Option<Arc<StagedFile>> {
        self.shared.registry.lock().files.get(&inode).map(|known| known.file.clone())
    }

    /// What a name leads to on this client, if that is not what the namespace says: a file that the bucket does not
    /// have as it is, or one that somebody is about to open for writing.
    pub fn shown(&self, parent: u64, name: &[u8]) -> Option<Arc<StagedFile>> {
        let mut registry = self.shared.registry.lock();
        let known = registry.named(parent, name)?;
        // What the bucket did not take is given up with its last close.
        if !known.is_expected() && (!known.file.is_dirty() || known.file.has_failed()) {
            return None;
        }
        known.shown = Some(Instant::now());
        Some(known.file.clone())
    }

    /// Inodes are others than those of processes before, which the kernel may know.
    pub(crate) fn begin_epoch(&self, epoch: u64) {
        self.shared.next_inode.fetch_add(epoch << EPOCH_BITS, Ordering::Relaxed);
    }

    /// Files that are being written.
    pub(crate) fn written(&self) -> usize {
        self.shared.registry.lock().files.values().filter(|known| known.file.is_dirty()).count()
    }

    /// The file of a name, whatever the name leads to.
    fn of_name(&self, parent: u64, name: &[u8]) -> Option<Arc<StagedFile>> {
        self.shared.registry.lock().named(parent, name).map(|known| known.file.clone())
    }

    /// Whether a file in a directory is being written here.
    fn is_written_below(&self, directory: u64) -> bool {
        let registry = self.shared.registry.lock();
        registry.names.iter().any(|((parent, _), inode)| {
            *parent == directory && registry.files.get(inode).is_some_and(|known| known.file.is_dirty())
        })
    }

    /// Takes its name from a file: nothing of it reaches the bucket any more.
    fn detach_name(&self, file: &StagedFile) {
        file.remove();
        self.shared.registry.lock().forget_name(file);
    }

    /// Begins a new file where there is none, open once. `EEXIST` if there is one by now; unless the new one was to be
    /// exclusive, `thread` is then expected to open what is there for writing.
    pub async fn create(
        &self,
        directory: &Node,
        name: &[u8],
        creation: Creation,
        thread: u32,
    ) -> Result<Arc<StagedFile>, ClientError> {
        let metadata = &self.shared.metadata;
        let thread = (creation == Creation::Replacing).then_some(thread);
        let mut is_asked = creation == Creation::Replacing;
        for _round in 0..LOOKS_MAX {
            let before = metadata.mark();
            match metadata.lookup(directory.inode, name).await {
                Ok(node) => {
                    if thread.is_some() && node.object().is_ok() {
                        self.begin(&node, thread)?;
                    }
                    return refuse(Errno::EXIST, format!("{node} is there already"));
                }
                // The listing may be older than an object. A bucket that does not answer says so at the close.
                Err(ClientError::NotFound(_)) if !is_asked => {
                    is_asked = true;
                    match metadata.written(directory.inode, name).await {
                        Ok(Some(node)) => return refuse(Errno::EXIST, format!("{node} is there already")),
                        Ok(None) | Err(_) => continue,
                    }
                }
                Err(ClientError::NotFound(_)) => {}
                Err(error) => return Err(error),
            }
            let mut registry = self.shared.registry.lock();
            registry.refuse_written(directory, name, thread)?;
            // Another may have gone to the bucket since; from now on none can.
            if !metadata.has_changed(before, directory.inode, name) {
                return self.insert_new(&mut registry, directory, name, creation);
            }
        }
        refuse(Errno::BUSY, format!("{directory}: others make and remove this name all the time"))
    }

    /// Begins a new file to take the place of whatever is there, open once. `EEXIST` if one of this name is being
    /// written here.
    pub fn replace(&self, directory: &Node, name: &[u8]) -> Result<Arc<StagedFile>, ClientError> {
        let mut registry = self.shared.registry.lock();
        registry.refuse_written(directory, name, None)?;
        self.insert_new(&mut registry, directory, name, Creation::Replacing)
    }

    fn insert_new(
        &self,
        registry: &mut Registry,
        directory: &Node,
        name: &[u8],
        creation: Creation,
    ) -> Result<Arc<StagedFile>, ClientError> {
        let place = location_in(directory, name)?;
        let mount =
            directory.mount.clone().ok_or_else(|| ClientError::Invalid(format!("{directory} is in no mount")))?;
        let inode = self.shared.next_inode.fetch_add(1, Ordering::Relaxed);
        let file = Arc::new(StagedFile::new(self.shared.clone(), inode, mount, place.clone(), None));
        if creation == Creation::Exclusive {
            file.set_exclusive();
        }
        file.handles.fetch_add(1, Ordering::AcqRel);
        registry.names.insert((place.parent, place.name), inode);
        registry.files.insert(inode, RegisteredFile::new(file.clone()));
        Ok(file)
    }

    /// Makes an object one that can be written to. If a thread is expected to open it, its name leads there for a
    /// moment.
    pub fn begin(&self, node: &Arc<Node>, thread: Option<u32>) -> Result<Arc<StagedFile>, ClientError> {
        let mut registry = self.shared.registry.lock();
        let mut expected = Vec::new();
        if let Some(known) = registry.named(node.parent, &node.name) {
            if known.file.is_dirty() || !known.file.is_older_than(node) {
                thread.inspect(|thread| known.expect(*thread));
                return Ok(known.file.clone());
            }
            // Another client has written it since.
            expected = std::mem::take(&mut known.expected);
        }
        let (object, file) = (node.object()?, self.shared.files.handle(node)?);
        let base = Base { file, etag: object.etag.to_string(), valid: object.length };
        let location: Arc<str> =
            object.key.strip_suffix(&*String::from_utf8_lossy(&node.name)).unwrap_or_default().into();
        let place = StagedLocation { parent: node.parent, name: node.name.clone(), location };
        let inode = self.shared.next_inode.fetch_add(1, Ordering::Relaxed);
        let file = Arc::new(StagedFile::new(self.shared.clone(), inode, object.mount, place, Some(base)));
        registry.names.insert((node.parent, node.name.clone()), inode);
        let mut known = RegisteredFile { expected, ..RegisteredFile::new(file.clone()) };
        thread.inspect(|thread| known.expect(*thread));
        registry.files.insert(inode, known);
        Ok(file)
    }

    /// A thread has opened a handle of the file.
    pub fn opened(&self, file: &Arc<StagedFile>, thread: u32) {
        file.handles.fetch_add(1, Ordering::AcqRel);
        if let Some(known) = self.shared.registry.lock().files.get_mut(&file.inode()) {
            known.thread_arrived(thread);
        }
    }

    /// A handle was closed. With the last one what the bucket does not have is lost: commit first.
    pub fn closed(&self, file: &Arc<StagedFile>) {
        if file.handles.fetch_sub(1, Ordering::AcqRel) > 1 {
            return;
        }
        self.shared.registry.lock().forget_if_over(file.inode());
    }

    /// A thread that was expected to open the file has changed it without.
    pub fn thread_arrived(&self, file: &Arc<StagedFile>, thread: u32) {
        let mut registry = self.shared.registry.lock();
        if let Some(known) = registry.files.get_mut(&file.inode()) {
            known.thread_arrived(thread);
        }
        registry.forget_if_over(file.inode());
    }

    /// Drops what was expected to be opened, and was not, now and then, until `stop`.
    pub(crate) async fn sweep(&self, stop: CancellationToken) {
        while stop.run_until_cancelled(tokio::time::sleep(MOMENT)).await.is_some() {
            let mut registry = self.shared.registry.lock();
            let over = registry.files.iter().filter(|(_, known)| known.is_reclaimable());
            let over: Vec<u64> = over.map(|(inode, _)| *inode).collect();
            over.into_iter().for_each(|inode| registry.forget(inode));
        }
    }

    /// Ends what runs in the background.
    pub(crate) async fn shutdown(&self) {
        let files = std::mem::take(&mut *self.shared.registry.lock());
        drop(files);
        self.shared.tasks.close();
        self.shared.tasks.wait().await;
    }
}

impl Registry {
    fn named(&mut self, parent: u64, name: &[u8]) -> Option<&mut RegisteredFile> {
        let inode = self.names.get(&(parent, Box::from(name)))?;
        self.files.get_mut(inode)
    }

    /// `EEXIST` if a file of this name is being written, which `thread` is then expected to open.
    fn refuse_written(&mut self, directory: &Node, name: &[u8], thread: Option<u32>) -> Result<(), ClientError> {
        match self.named(directory.inode, name).filter(|known| known.is_expected() || known.file.is_dirty()) {
            Some(known) => {
                thread.inspect(|thread| known.expect(*thread));
                refuse(Errno::EXIST, format!("{}: it is being written already", known.file.node()))
            }
            None => Ok(()),
        }
    }

    fn forget_if_over(&mut self, inode: u64) {
        if self.files.get(&inode).is_some_and(RegisteredFile::is_reclaimable) {
            self.forget(inode);
        }
    }

    fn forget(&mut self, inode: u64) {
        if let Some(known) = self.files.remove(&inode) {
            self.forget_name(&known.file);
        }
    }

    fn forget_name(&mut self, file: &StagedFile) {
        let StagedLocation { parent, name, .. } = file.state.lock().place.clone();
        let name = (parent, name);
        if self.names.get(&name) == Some(&file.inode()) {
            self.names.remove(&name);
        }
    }
}

/// A name in a directory of a cache-mode mount, which must be one that keys can have.
fn location_in(directory: &Node, name: &[u8]) -> Result<StagedLocation, ClientError> {
    let location = directory.key();
    if std::str::from_utf8(name).is_err() {
        let name = String::from_utf8_lossy(name);
        return refuse(Errno::ILSEQ, format!("\"{name}\" is not UTF-8, as names of objects are"));
    }
    if location.len() + name.len() > KEY_BYTES_MAX {
        return refuse(Errno::NAMETOOLONG, format!("a key of more than {KEY_BYTES_MAX} bytes below {location}"));
    }
    Ok(StagedLocation { parent: directory.inode, name: name.into(), location: location.into() })
}
