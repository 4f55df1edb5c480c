//! What is open in a mount, but for the listings of directories: see [`FileTable`].

use std::sync::Arc;

use cavern_client::Node;
use cavern_conf::schema::{self, Choice};

use super::estale_retry::EstaleRetries;
use super::handles::{Handles, OpenInodes};
use super::lost_handles::LostHandles;
use super::no_open::NoOpenHandles;
use super::open_handle::OpenHandle;
use super::open_nodes::OpenNodes;
use super::passthrough::Passthrough;

/// The open files of a mount. A file is found by the number of its handle; or by its inode where the kernel opens files
/// by itself. Beside the handles is what must be the same for all handles of an inode, or of one of the kernel's nodes,
/// and what is open for a moment, until the kernel opens it.
///
/// It has no lock of its own: each part has one, and none is taken under another but as the part says.
pub struct FileTable {
    pub handles: Handles<OpenHandle>,
    /// Handles of a process before this one that could not be had again.
    pub lost: LostHandles,
    /// `fuse.no_open`: files are read by inode.
    pub unopened: Option<NoOpenHandles>,
    /// With directories of fs-mode mounts.
    pub inodes: OpenInodes,
    /// Files of fs-mode mounts.
    pub nodes: OpenNodes,
    pub retries: EstaleRetries,
    /// What the kernel reads by itself.
    pub passthrough: Passthrough,
}

impl FileTable {
    pub fn new(conf: &schema::Fuse) -> Self {
        Self {
            handles: Handles::default(),
            lost: LostHandles::default(),
            unopened: (conf.no_open == Choice::On).then(NoOpenHandles::default),
            inodes: OpenInodes::default(),
            nodes: OpenNodes::default(),
            retries: EstaleRetries::default(),
            passthrough: Passthrough::new(conf),
        }
    }

    /// Whether the kernel opens and closes files by itself.
    pub fn has_no_open(&self) -> bool {
        self.unopened.is_some()
    }

    /// Files that are open.
    pub fn len(&self) -> usize {
        self.handles.len() + self.unopened.as_ref().map_or(0, NoOpenHandles::len)
    }

    /// Enters a handle under a number of its own.
    pub fn insert(&self, number: u64, handle: OpenHandle) {
        self.handles.insert(number, Arc::new(handle));
    }

    /// The version of an object that is open here, or what is kept for one who is about to open it; by inode of the
    /// namespace.
    pub fn node(&self, inode: u64) -> Option<Arc<Node>> {
        self.inodes.get(inode).or_else(|| self.retries.file(inode).map(|(node, _)| node))
    }

    /// Takes a handle off the table; what is in it is closed when it is dropped.
    pub fn closed(&self, number: u64) -> Option<Arc<OpenHandle>> {
        let Some(handle) = self.handles.remove(number) else {
            self.lost.released(number).into_iter().for_each(|node| self.nodes.closed(node));
            return None;
        };
        if let Some(node) = handle.file.version_node() {
            self.inodes.closed(node.inode);
        }
        if let Some(node) = handle.how.node {
            self.nodes.closed(node);
        }
        Some(handle)
    }

    /// Closes what nobody reads any more.
    pub fn sweep(&self) {
        self.retries.sweep();
        if let Some(unopened) = &self.unopened {
            unopened.sweep();
        }
    }
}
