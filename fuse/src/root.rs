//! The root of the mount: the kernel's inode 1 is whatever inode `fuse.path` leads to. Where the mount is shown by a
//! directory within it ([`StagedMount`](crate::kernel::StagedMount)), so is the inode of that.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use parking_lot::Mutex;

use crate::aliases::{Aliases, inode_of};
use crate::kernel::abi::ROOT_NODE;

/// The name of the directory that is shown in place of the root.
pub const INNER_NAME: &[u8] = b".root";
/// Its number. No inode has it.
const INNER_NODE: u64 = i64::MAX as u64;

/// Translates between the kernel's node ids and the namespace's inode ids.
#[derive(Debug)]
pub struct Root {
    path: String,
    inode: AtomicU64,
    /// By which the kernel knows it.
    kernel_node: AtomicU64,
    pub names: RootNames,
    /// Of the files of fs-mode mounts.
    aliases: Aliases,
}

impl Root {
    /// `path` of the namespace leads to `inode`.
    pub fn new(path: &str, inode: u64) -> Self {
        let (inode, kernel_node) = (AtomicU64::new(inode), AtomicU64::new(ROOT_NODE));
        let (names, aliases) = (RootNames::default(), Aliases::default());
        Self { path: path.to_owned(), inode, kernel_node, names, aliases }
    }

    /// The kernel shows [`INNER_NAME`] in its place, or is about to.
    pub fn move_inside(&self) {
        self.kernel_node.store(INNER_NODE, Relaxed);
    }

    /// It does not.
    pub fn stay_outside(&self) {
        self.kernel_node.store(ROOT_NODE, Relaxed);
    }

    pub fn is_inside(&self) -> bool {
        self.kernel_node() != ROOT_NODE
    }

    /// Whether a lookup is the one for what is shown in its place.
    pub fn is_inner(&self, kernel_parent: u64, name: &[u8]) -> bool {
        kernel_parent == ROOT_NODE && name == INNER_NAME && self.is_inside()
    }

    pub fn kernel_node(&self) -> u64 {
        self.kernel_node.load(Relaxed)
    }

    /// The number of an inode that programs see.
    pub fn shown_number(&self, inode: u64) -> u64 {
        if inode == self.inode.load(Relaxed) { ROOT_NODE } else { inode }
    }

    pub fn path(&self) -> &str {
        &self.path
    }

    pub fn is_root(&self, kernel_node: u64) -> bool {
        kernel_node == ROOT_NODE || kernel_node == INNER_NODE
    }

    pub fn to_namespace(&self, kernel_node: u64) -> u64 {
        if self.is_root(kernel_node) {
            return self.inode.load(Relaxed);
        }
        self.aliases.inherit(kernel_node);
        inode_of(kernel_node)
    }

    /// The node by which the kernel gets to know an inode.
    pub fn to_kernel(&self, inode: u64) -> u64 {
        if inode == self.inode.load(Relaxed) { self.kernel_node() } else { self.aliases.newest(inode) }
    }

    /// All nodes by which the kernel may know an inode.
    pub fn kernel_nodes_of(&self, inode: u64) -> impl Iterator<Item = u64> + use<> {
        let inode = if inode == self.inode.load(Relaxed) { self.kernel_node() } else { inode };
        self.aliases.nodes_of(inode)
    }

    pub fn aliases(&self) -> &Aliases {
        &self.aliases
    }

    /// Whether the kernel may keep a name in `parent` for long: it may, unless the name is in the root and there is no
    /// room to remember it.
    pub fn remembers(&self, parent: u64, name: &[u8]) -> bool {
        parent != self.inode.load(Relaxed) || self.names.remember(name)
    }

    /// The path leads elsewhere now: a mount was removed and made again.
    pub fn moved_to(&self, inode: u64) {
        self.inode.store(inode, Relaxed);
    }
}

/// Names remembered at most.
const NAMES_MAX: usize = 4096;

/// Names of the root that the kernel was given, for kernels that need an invalidation of each name they are to forget.
#[derive(Debug, Default)]
pub struct RootNames {
    needless: AtomicBool,
    names: Mutex<HashSet<Box<[u8]>>>,
}

impl RootNames {
    /// The kernel can forget every name at once.
    pub fn need_not_be_remembered(&self) {
        self.needless.store(true, Relaxed);
        self.names.lock().clear();
    }

    /// False when there is no room.
    fn remember(&self, name: &[u8]) -> bool {
        if self.needless.load(Relaxed) {
            return true;
        }
        let mut names = self.names.lock();
        if names.contains(name) {
            return true;
        }
        names.len() < NAMES_MAX && names.insert(name.into())
    }

    /// All of them; they are remembered no longer.
    pub fn take(&self) -> HashSet<Box<[u8]>> {
        std::mem::take(&mut self.names.lock())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_root_are_remembered_as_far_as_there_is_room() {
        let root = Root::new("/", 1);
        for number in 0..NAMES_MAX {
            assert!(root.remembers(1, number.to_string().as_bytes()));
        }
        assert!(root.remembers(1, b"0"));
        assert!(!root.remembers(1, b"one too many"));
        assert!(root.remembers(2, b"one too many"));
        assert_eq!(root.names.take().len(), NAMES_MAX);
        assert!(root.remembers(1, b"one too many"));
        root.names.need_not_be_remembered();
        assert!(root.names.take().is_empty());
        assert!((0..2 * NAMES_MAX).all(|number| root.remembers(1, number.to_string().as_bytes())));
    }

    #[test]
    fn only_the_root_is_translated() {
        let root = Root::new("/a", 77);
        assert_eq!((root.to_namespace(1), root.to_namespace(2)), (77, 2));
        assert_eq!((root.to_kernel(77), root.to_kernel(2)), (1, 2));
        root.moved_to(78);
        assert_eq!((root.to_namespace(1), root.to_kernel(77)), (78, 77));
    }

    #[test]
    fn a_root_that_is_shown_by_a_directory_within_it_goes_by_the_number_of_that() {
        let root = Root::new("/a", 77);
        assert!(!root.is_inner(1, INNER_NAME), "a name like any other");
        root.move_inside();
        assert!(root.is_inner(1, INNER_NAME) && !root.is_inner(77, INNER_NAME) && !root.is_inner(1, b"a"));
        let inner = root.to_kernel(77);
        assert!(inner != 1 && root.is_root(inner) && root.is_root(1) && !root.is_root(77));
        assert_eq!((root.to_namespace(inner), root.to_namespace(1), root.shown_number(77)), (77, 77, 1));
        root.stay_outside();
        assert_eq!(root.to_kernel(77), 1);
    }
}
