//! The operations. An inode number is the source's own, but for the root; a file's descriptor stays with the inode
//! until [`DESCRIPTORS_MAX`] younger ones have come.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags, KernelConfig,
    LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyOpen,
    Request,
};

/// Names and attributes are good for this long in the kernel.
const TIMEOUT: Duration = Duration::from_secs(3600);
/// Descriptors kept: as many as a Cavern client keeps with its default settings.
const DESCRIPTORS_MAX: usize = 16_384;
/// The largest read that the kernel sends.
const READ_MAX: usize = 1 << 20;

thread_local! {
    /// One buffer per event loop.
    static BUFFER: RefCell<Vec<u8>> = RefCell::new(vec![0; READ_MAX]);
}

type Listing = Vec<(OsString, Arc<Node>)>;

/// A directory of this host, read-only.
pub struct Plain {
    nodes: RwLock<HashMap<INodeNo, Arc<Node>>>,
    listings: RwLock<HashMap<FileHandle, Arc<Listing>>>,
    next_listing: AtomicU64,
    /// Nodes with a descriptor, the oldest first.
    opened: Mutex<VecDeque<Arc<Node>>>,
    drop_pages: bool,
}

struct Node {
    path: PathBuf,
    attr: FileAttr,
    file: RwLock<Option<Arc<File>>>,
}

impl Plain {
    /// Shows `source`; `drop_pages`: the kernel forgets a file's pages at each open.
    pub fn new(source: PathBuf, drop_pages: bool) -> io::Result<Self> {
        let mut attr = attributes(&source.metadata()?);
        attr.ino = INodeNo::ROOT;
        let root = Arc::new(Node { path: source, attr, file: RwLock::default() });
        Ok(Self {
            nodes: RwLock::new(HashMap::from([(INodeNo::ROOT, root)])),
            listings: RwLock::default(),
            next_listing: AtomicU64::new(1),
            opened: Mutex::default(),
            drop_pages,
        })
    }

    fn node(&self, ino: INodeNo) -> Result<Arc<Node>, Errno> {
        self.nodes.read().unwrap_or_else(PoisonError::into_inner).get(&ino).cloned().ok_or(Errno::ESTALE)
    }

    fn child(&self, parent: &Node, name: &OsStr) -> io::Result<Arc<Node>> {
        let path = parent.path.join(name);
        let attr = attributes(&path.symlink_metadata()?);
        let mut nodes = self.nodes.write().unwrap_or_else(PoisonError::into_inner);
        let node = nodes.entry(attr.ino).or_insert_with(|| Arc::new(Node { path, attr, file: RwLock::default() }));
        Ok(Arc::clone(node))
    }

    fn list(&self, directory: &Node) -> io::Result<Listing> {
        let mut entries = Vec::new();
        for entry in directory.path.read_dir()? {
            let name = entry?.file_name();
            let node = self.child(directory, &name)?;
            entries.push((name, node));
        }
        Ok(entries)
    }

    fn open_file(&self, node: &Arc<Node>) -> io::Result<Arc<File>> {
        if let Some(file) = &*node.file.read().unwrap_or_else(PoisonError::into_inner) {
            return Ok(Arc::clone(file));
        }
        let file = Arc::new(File::open(&node.path)?);
        *node.file.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&file));
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        opened.push_back(Arc::clone(node));
        if opened.len() > DESCRIPTORS_MAX
            && let Some(oldest) = opened.pop_front()
        {
            *oldest.file.write().unwrap_or_else(PoisonError::into_inner) = None;
        }
        Ok(file)
    }

    fn listing(&self, fh: FileHandle) -> Arc<Listing> {
        self.listings.read().unwrap_or_else(PoisonError::into_inner).get(&fh).cloned().unwrap_or_default()
    }
}

fn attributes(metadata: &Metadata) -> FileAttr {
    let kind = if metadata.is_dir() {
        FileType::Directory
    } else if metadata.is_symlink() {
        FileType::Symlink
    } else {
        FileType::RegularFile
    };
    let mtime = metadata.modified().unwrap_or(UNIX_EPOCH);
    FileAttr {
        ino: INodeNo(metadata.ino()),
        size: metadata.len(),
        blocks: metadata.blocks(),
        atime: mtime,
        mtime,
        ctime: mtime,
        crtime: UNIX_EPOCH,
        kind,
        // The permission bits only.
        perm: (metadata.mode() & 0o7777) as u16,
        nlink: u32::try_from(metadata.nlink()).unwrap_or(u32::MAX),
        uid: metadata.uid(),
        gid: metadata.gid(),
        rdev: 0,
        blksize: 128 * 1024,
        flags: 0,
    }
}

impl Filesystem for Plain {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Kernels without one of these serve without it.
        for capability in
            [InitFlags::FUSE_PARALLEL_DIROPS, InitFlags::FUSE_DO_READDIRPLUS, InitFlags::FUSE_READDIRPLUS_AUTO]
        {
            let _ = config.add_capabilities(capability);
        }
        let _ = config.set_max_background(256);
        Ok(())
    }

    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.node(parent).and_then(|parent| Ok(self.child(&parent, name)?)) {
            Ok(node) => reply.entry(&TIMEOUT, &node.attr, Generation(0)),
            Err(error) => reply.error(error),
        }
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        match self.node(ino) {
            Ok(node) => reply.attr(&TIMEOUT, &node.attr),
            Err(error) => reply.error(error),
        }
    }

    fn open(&self, _req: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let flags = if self.drop_pages { FopenFlags::empty() } else { FopenFlags::FOPEN_KEEP_CACHE };
        match self.node(ino).and_then(|node| Ok(self.open_file(&node).map(|_| ())?)) {
            Ok(()) => reply.opened(FileHandle(0), flags),
            Err(error) => reply.error(error),
        }
    }

    fn read(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        BUFFER.with_borrow_mut(|buffer| {
            let length = buffer.len().min(size as usize);
            let read =
                self.node(ino).and_then(|node| Ok(self.open_file(&node)?.read_at(&mut buffer[..length], offset)?));
            match read {
                Ok(length) => reply.data(&buffer[..length]),
                Err(error) => reply.error(error),
            }
        });
    }

    fn opendir(&self, _req: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        match self.node(ino).and_then(|node| Ok(self.list(&node)?)) {
            Ok(entries) => {
                let fh = FileHandle(self.next_listing.fetch_add(1, Relaxed));
                self.listings.write().unwrap_or_else(PoisonError::into_inner).insert(fh, Arc::new(entries));
                reply.opened(fh, FopenFlags::FOPEN_CACHE_DIR | FopenFlags::FOPEN_KEEP_CACHE);
            }
            Err(error) => reply.error(error),
        }
    }

    fn readdir(&self, _req: &Request, _ino: INodeNo, fh: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let listing = self.listing(fh);
        for (place, (name, node)) in (1..).zip(listing.iter()).skip(usize::try_from(offset).unwrap_or(usize::MAX)) {
            if reply.add(node.attr.ino, place, node.attr.kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn readdirplus(&self, _req: &Request, _ino: INodeNo, fh: FileHandle, offset: u64, mut reply: ReplyDirectoryPlus) {
        let listing = self.listing(fh);
        for (place, (name, node)) in (1..).zip(listing.iter()).skip(usize::try_from(offset).unwrap_or(usize::MAX)) {
            if reply.add(node.attr.ino, place, name, &TIMEOUT, &node.attr, Generation(0)) {
                break;
            }
        }
        reply.ok();
    }

    fn releasedir(&self, _req: &Request, _ino: INodeNo, fh: FileHandle, _flags: OpenFlags, reply: ReplyEmpty) {
        self.listings.write().unwrap_or_else(PoisonError::into_inner).remove(&fh);
        reply.ok();
    }
}
