//! The operations of a directory that is only read. An inode number is the source's own, but for the root; a file's
//! descriptor stays with the inode until [`DESCRIPTORS_MAX`] younger ones have come. So a tree may have more files than
//! a process may have descriptors.

use std::collections::{HashMap, VecDeque};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use fuser::{
    Errno, FileAttr, FileHandle, Filesystem, FopenFlags, Generation, INodeNo, KernelConfig, LockOwner, OpenFlags,
    ReplyAttr, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyOpen, Request,
};

use crate::answer::{TIMEOUT, answer_read, attributes, greet};
use crate::handles::Handles;

/// Descriptors kept: as many as a Cavern client keeps with its default settings.
const DESCRIPTORS_MAX: usize = 16_384;

type Listing = Vec<(OsString, Arc<Node>)>;

/// What an OPEN does.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Opens {
    KeepPages,
    /// The kernel forgets a file's pages.
    DropPages,
    /// There is none: the first one is answered so that the kernel sends no other.
    Never,
}

/// A directory of this host.
pub struct ReadOnly {
    nodes: RwLock<HashMap<INodeNo, Arc<Node>>>,
    listings: Handles<Listing>,
    /// Nodes with a descriptor, the oldest first.
    opened: Mutex<VecDeque<Arc<Node>>>,
    opens: Opens,
}

struct Node {
    path: PathBuf,
    attr: FileAttr,
    file: RwLock<Option<Arc<File>>>,
}

impl ReadOnly {
    /// Shows `source`.
    pub fn new(source: PathBuf, opens: Opens) -> io::Result<Self> {
        let mut attr = attributes(&source.metadata()?);
        attr.ino = INodeNo::ROOT;
        let root = Arc::new(Node { path: source, attr, file: RwLock::default() });
        Ok(Self {
            nodes: RwLock::new(HashMap::from([(INodeNo::ROOT, root)])),
            listings: Handles::default(),
            opened: Mutex::default(),
            opens,
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
}

impl Filesystem for ReadOnly {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        greet(config);
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
        let flags = match self.opens {
            Opens::KeepPages => FopenFlags::FOPEN_KEEP_CACHE,
            Opens::DropPages => FopenFlags::empty(),
            Opens::Never => return reply.error(Errno::ENOSYS),
        };
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
        answer_read(reply, size, |buffer| {
            self.node(ino).and_then(|node| Ok(self.open_file(&node)?.read_at(buffer, offset)?))
        });
    }

    fn opendir(&self, _req: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        match self.node(ino).and_then(|node| Ok(self.list(&node)?)) {
            Ok(entries) => {
                reply.opened(self.listings.add(entries), FopenFlags::FOPEN_CACHE_DIR | FopenFlags::FOPEN_KEEP_CACHE);
            }
            Err(error) => reply.error(error),
        }
    }

    fn readdir(&self, _req: &Request, _ino: INodeNo, fh: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let listing = self.listings.get(fh).unwrap_or_default();
        for (place, (name, node)) in (1..).zip(listing.iter()).skip(usize::try_from(offset).unwrap_or(usize::MAX)) {
            if reply.add(node.attr.ino, place, node.attr.kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn readdirplus(&self, _req: &Request, _ino: INodeNo, fh: FileHandle, offset: u64, mut reply: ReplyDirectoryPlus) {
        let listing = self.listings.get(fh).unwrap_or_default();
        for (place, (name, node)) in (1..).zip(listing.iter()).skip(usize::try_from(offset).unwrap_or(usize::MAX)) {
            if reply.add(node.attr.ino, place, name, &TIMEOUT, &node.attr, Generation(0)) {
                break;
            }
        }
        reply.ok();
    }

    fn releasedir(&self, _req: &Request, _ino: INodeNo, fh: FileHandle, _flags: OpenFlags, reply: ReplyEmpty) {
        self.listings.remove(fh);
        reply.ok();
    }
}
