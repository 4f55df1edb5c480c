//! How the kernel reads the files of fs-mode mounts that are open here.
//!
//! All handles of a kernel's node that are open at a time are read in the same way, which the first of them decides: by
//! requests, with pages, or from the file of the block by the kernel itself. Only a file that is opened to be read
//! begins so. Readers of the same block follow, and so does who only writes: by requests, past all pages. Whoever reads
//! and writes would be able to map that file, and to change it unseen. He is a *conflict*, as is a reader when the file
//! has another block by then: he opens the inode by another node ([`Aliases`]).

use std::collections::HashMap;
use std::sync::Arc;

use cavern_client::KernelReads;
use cavern_proto::journal::KernelBlock;
use parking_lot::Mutex;

use super::passthrough::BackingFile;
use crate::aliases::Aliases;
use crate::kernel::abi::fopen;

/// A handle cannot be read as the others of its node are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Conflict;

/// What a handle is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OpenIntent {
    Read,
    Write,
    /// Or anything but one of these.
    Both,
}

/// How the kernel reads what is being opened: by requests, unless it says otherwise.
#[derive(Default)]
pub struct IoMode {
    /// Its node, if it is a file of an fs-mode mount.
    pub node: Option<u64>,
    /// What it reads by itself, or reads so for others.
    pub backing: Option<Arc<BackingFile>>,
    /// The block that it reads so, of a file of an fs-mode mount.
    pub block: Option<(KernelBlock, KernelReads)>,
    /// [`DIRECT`], if it is read by requests all the same, past all pages.
    pub open_flags: u32,
}

const DIRECT: u32 = fopen::DIRECT_IO | fopen::PARALLEL_DIRECT_WRITES;

/// A node with open handles.
#[derive(Default)]
struct OpenNode {
    handles: u32,
    /// What the kernel reads by itself, and which block that is, if that is known.
    backing: Option<Arc<BackingFile>>,
    block: Option<KernelBlock>,
}

/// Nodes with open handles. Its lock is taken before that of the aliases, which are superseded under it alone. See the
/// module.
#[derive(Default)]
pub struct OpenNodes(Mutex<HashMap<u64, OpenNode>>);

impl OpenNodes {
    /// Enters a handle of a node. `find` finds what the kernel may read by itself, if there is that, beside the block
    /// that it reads so for other handles of the node.
    pub fn opened(
        &self,
        node: u64,
        intent: OpenIntent,
        aliases: &Aliases,
        find: impl FnOnce(Option<&KernelBlock>) -> Option<IoMode>,
    ) -> Result<IoMode, Conflict> {
        let others = {
            let mut nodes = self.0.lock();
            match decide(&mut nodes, node, intent, aliases, None) {
                Some(decided) => return decided,
                None => nodes.get(&node).and_then(|open| open.block),
            }
        };
        // Without the lock, since it may be system calls. Another handle may be faster: then that one has decided.
        let found = find(others.as_ref());
        decide(&mut self.0.lock(), node, intent, aliases, Some(found)).unwrap_or(Err(Conflict))
    }

    /// From now on an inode is known by another node than this one.
    pub fn supersede(&self, node: u64, aliases: &Aliases) {
        let _nobody_opens = self.0.lock();
        aliases.supersede(node);
    }

    /// Whether the kernel reads a node by itself now.
    pub fn is_read_by_kernel(&self, node: u64) -> bool {
        self.0.lock().get(&node).is_some_and(|open| open.backing.is_some())
    }

    /// A handle that a process before this one gave the kernel, with what it registered, and what that is of.
    pub fn inherited(&self, node: u64, backing: Option<Arc<BackingFile>>, block: Option<KernelBlock>) {
        let mut nodes = self.0.lock();
        let open = nodes.entry(node).or_default();
        open.handles += 1;
        open.block = open.block.or(block);
        open.backing = open.backing.take().or(backing);
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

/// Decides how a handle is read, and enters it; `None` where that takes to know what was `found`.
fn decide(
    nodes: &mut HashMap<u64, OpenNode>,
    node: u64,
    intent: OpenIntent,
    aliases: &Aliases,
    found: Option<Option<IoMode>>,
) -> Option<Result<IoMode, Conflict>> {
    let open = nodes.get(&node);
    let how = match (intent, open.and_then(|open| open.backing.clone())) {
        (OpenIntent::Both, Some(_)) => return Some(Err(Conflict)),
        // By a name that the kernel is about to forget, or by none; or beside what the kernel reads by itself.
        (_, backing) if aliases.is_superseded(node) || intent == OpenIntent::Write && backing.is_some() => {
            IoMode { backing, open_flags: DIRECT, ..IoMode::default() }
        }
        (OpenIntent::Read, backing) if backing.is_some() || open.is_none() => match (backing, found?) {
            (None, found) => found.unwrap_or_default(),
            (backing, Some(found)) if open.and_then(|open| open.block) == found.block.as_ref().map(|(of, _)| *of) => {
                IoMode { backing, ..found }
            }
            _ => return Some(Err(Conflict)),
        },
        _ => IoMode::default(),
    };
    let open = nodes.entry(node).or_default();
    open.handles += 1;
    if let Some((block, _)) = &how.block {
        (open.backing, open.block) = (how.backing.clone(), Some(*block));
    }
    Some(Ok(IoMode { node: Some(node), ..how }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nobody(_: Option<&KernelBlock>) -> Option<IoMode> {
        None
    }

    fn is_by_requests(read: Result<IoMode, Conflict>) -> bool {
        read.is_ok_and(|how| how.backing.is_none() && how.open_flags == 0)
    }

    fn is_direct(read: Result<IoMode, Conflict>) -> bool {
        read.is_ok_and(|how| how.backing.is_none() && how.open_flags == DIRECT)
    }

    #[test]
    fn the_first_handle_decides_how_a_node_is_read() {
        let (nodes, aliases) = (OpenNodes::default(), Aliases::default());
        assert!(is_by_requests(nodes.opened(7, OpenIntent::Read, &aliases, nobody)));
        // By requests, whoever comes.
        for intent in [OpenIntent::Both, OpenIntent::Write, OpenIntent::Read] {
            let read = nodes.opened(7, intent, &aliases, |_| unreachable!("it is decided"));
            assert!(is_by_requests(read), "{intent:?}");
        }
        (0..4).for_each(|_| nodes.closed(7));
        assert!(nodes.0.lock().is_empty());
        nodes.closed(7);
        assert!(is_by_requests(nodes.opened(7, OpenIntent::Both, &aliases, |_| unreachable!("a writer"))));
        assert!(!nodes.is_read_by_kernel(7));
    }

    #[test]
    fn who_comes_by_a_node_of_before_is_read_past_all_pages() {
        let (nodes, aliases) = (OpenNodes::default(), Aliases::default());
        assert!(is_by_requests(nodes.opened(7, OpenIntent::Read, &aliases, nobody)));
        nodes.supersede(7, &aliases);
        for intent in [OpenIntent::Both, OpenIntent::Write, OpenIntent::Read] {
            let read = nodes.opened(7, intent, &aliases, |_| unreachable!("it is not begun so"));
            assert!(is_direct(read), "{intent:?}");
        }
        // Somebody is faster than who looks for the file of the block.
        let read = nodes.opened(8, OpenIntent::Read, &aliases, |_| {
            nodes.supersede(8, &aliases);
            None
        });
        assert!(is_direct(read));
    }
}
