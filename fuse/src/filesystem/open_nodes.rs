//! How the kernel reads the files of fs-mode mounts that are open here.
//!
//! All handles of a kernel's node that are open at a time are read in the same way, which the first of them decides:
//! by requests, with pages, or from the file of the block by the kernel itself. Only a file that is opened to be read
//! begins so, and only readers of the same block may follow: a writer would be able to map that file, and to change it
//! unseen. Anybody else is a *conflict*. He opens the inode by another node ([`Aliases`](crate::aliases)).

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use cavern_client::{Access, KernelBlock};
use parking_lot::Mutex;

use super::passthrough::{KeptBacking, KernelFile};

/// A handle cannot be read as the others of its node are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Conflict;

struct OpenNode {
    handles: u32,
    backing: Option<(KernelBlock, Arc<KeptBacking>)>,
}

/// Nodes with open handles. See the module.
#[derive(Default)]
pub struct OpenNodes(Mutex<HashMap<u64, OpenNode>>);

impl OpenNodes {
    /// Enters a handle of a node. `find` finds the file that the kernel may read by itself, if there is one.
    pub fn opened(
        &self,
        node: u64,
        access: Access,
        find: impl FnOnce() -> Option<KernelFile>,
    ) -> Result<Option<KernelFile>, Conflict> {
        {
            let mut nodes = self.0.lock();
            match (nodes.get_mut(&node), access) {
                (Some(OpenNode { handles, backing: None }), _) => {
                    *handles += 1;
                    return Ok(None);
                }
                (Some(_), Access::Write) => return Err(Conflict),
                (None, Access::Write) => {
                    nodes.insert(node, OpenNode { handles: 1, backing: None });
                    return Ok(None);
                }
                (_, Access::Read) => {}
            }
        }
        // Without the lock, since it may be system calls. Another handle may be faster: then that one has decided.
        let found = find();
        match self.0.lock().entry(node) {
            Entry::Vacant(free) => {
                let backing = found.as_ref().map(|file| (file.block, Arc::clone(&file.backing)));
                free.insert(OpenNode { handles: 1, backing });
                Ok(found)
            }
            Entry::Occupied(mut open) => {
                let OpenNode { handles, backing } = open.get_mut();
                let found = match (backing, found) {
                    (None, _) => None,
                    (Some((block, backing)), Some(file)) if *block == file.block => {
                        Some(KernelFile { backing: Arc::clone(backing), ..file })
                    }
                    (Some(_), _) => return Err(Conflict),
                };
                *handles += 1;
                Ok(found)
            }
        }
    }

    /// Enters a handle of a node that has been superseded, which is read by requests: the file that the kernel reads by
    /// itself for others.
    pub fn opened_superseded(&self, node: u64) -> Option<Arc<KeptBacking>> {
        let mut nodes = self.0.lock();
        let open = nodes.entry(node).or_insert(OpenNode { handles: 0, backing: None });
        open.handles += 1;
        open.backing.as_ref().map(|(_, backing)| Arc::clone(backing))
    }

    /// Whether the kernel reads a node by itself now.
    pub fn is_read_by_kernel(&self, node: u64) -> bool {
        self.0.lock().get(&node).is_some_and(|open| open.backing.is_some())
    }

    /// A handle that a process before this one gave the kernel, with what it registered.
    pub fn inherited(&self, node: u64, backing: Option<(KernelBlock, Arc<KeptBacking>)>) {
        self.0.lock().entry(node).or_insert(OpenNode { handles: 0, backing }).handles += 1;
    }

    /// A handle is closed (or was never taken by the kernel).
    pub fn closed(&self, node: u64) {
        let last = {
            let mut nodes = self.0.lock();
            let Some(open) = nodes.get_mut(&node) else { return };
            open.handles -= 1;
            if open.handles == 0 { nodes.remove(&node) } else { None }
        };
        // Gives the backing file back, without the lock.
        drop(last);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nobody() -> Option<KernelFile> {
        None
    }

    #[test]
    fn the_first_handle_decides_how_a_node_is_read() {
        let nodes = OpenNodes::default();
        assert!(matches!(nodes.opened(7, Access::Read, nobody), Ok(None)));
        // By requests, whoever comes.
        assert!(matches!(nodes.opened(7, Access::Write, nobody), Ok(None)));
        assert!(matches!(nodes.opened(7, Access::Read, || unreachable!("it is decided")), Ok(None)));
        (0..3).for_each(|_| nodes.closed(7));
        assert!(nodes.0.lock().is_empty());
        nodes.closed(7);
        assert!(matches!(nodes.opened(7, Access::Write, || unreachable!("a writer")), Ok(None)));
        assert!(!nodes.is_read_by_kernel(7));
    }
}
