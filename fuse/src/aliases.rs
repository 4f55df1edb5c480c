//! Inodes that the kernel knows under more than one node id.
//!
//! The kernel reads a node either by its own pages or from a file that was registered for it (passthrough), and while a
//! handle of the node is open it cannot change from one to the other. Where it must, the inode gets another node id,
//! its next *alias*: the open is answered with `ESTALE`, the kernel looks the path up once more, and finds that. What
//! is open stays at the node that it was opened at. Programs see the inode's own number all the time.
//!
//! The number of an alias is in the high bits of the node id, so that whatever the kernel asks of any of them leads to
//! the inode, whoever knows of them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use parking_lot::RwLock;
use tokio::time::Instant;

/// Inodes from here on have no aliases. Numbers are given one after the other, so a cluster never comes so far.
const INODES_END: u64 = 1 << SHIFT;
const SHIFT: u32 = 52;
/// The last alias of an inode.
const LAST: u64 = 255;
/// Node ids from here on are those of what is no file of the namespace.
const END: u64 = (LAST + 1) << SHIFT;
/// Inodes that have aliases, at most; then no other is read in such a way that it could need one.
const INODES_MAX: usize = 1 << 16;
/// For how long the kernel does not read a file by itself after it had to be given another node, at least: those who
/// made that necessary open it meanwhile, or never. Doubled with each alias.
const REST: Duration = Duration::from_secs(30);
const REST_MAX: Duration = Duration::from_secs(3600);

#[derive(Clone, Copy, Debug)]
struct Newest {
    /// Its number; 0 for the inode itself.
    number: u64,
    rests_until: Instant,
}

/// The node ids of inodes that the kernel knows under several.
#[derive(Debug, Default)]
pub struct Aliases {
    is_used: AtomicBool,
    newest: RwLock<HashMap<u64, Newest>>,
}

/// The inode of a node, and the number of the alias.
fn split(node: u64) -> (u64, u64) {
    if node < END { (node % INODES_END, node >> SHIFT) } else { (node, 0) }
}

/// The inode that a node is one of.
pub fn inode_of(node: u64) -> u64 {
    split(node).0
}

/// Which of the inode's aliases a node is; 0 for none.
pub fn number_of(node: u64) -> u32 {
    // It has eight bits.
    split(node).1 as u32
}

/// The node of an inode by the number of the alias.
pub fn node_of(inode: u64, number: u32) -> u64 {
    inode | u64::from(number) << SHIFT
}

impl Aliases {
    fn of(&self, inode: u64) -> Option<Newest> {
        if self.is_used.load(Relaxed) { self.newest.read().get(&inode).copied() } else { None }
    }

    /// The node by which the kernel gets to know an inode.
    pub fn newest(&self, inode: u64) -> u64 {
        inode | self.of(inode).map_or(0, |newest| newest.number << SHIFT)
    }

    /// Whether an inode has another node by now than this one.
    pub fn is_superseded(&self, node: u64) -> bool {
        let (inode, number) = split(node);
        self.of(inode).is_some_and(|newest| newest.number > number)
    }

    /// Whether the kernel may know an inode by several nodes.
    pub fn has_others(&self, inode: u64) -> bool {
        self.of(inode).is_some()
    }

    /// All nodes that an inode has had.
    pub fn nodes_of(&self, inode: u64) -> impl Iterator<Item = u64> + use<> {
        let newest = self.of(inode).map_or(0, |newest| newest.number);
        (0..=newest).map(move |number| inode | number << SHIFT)
    }

    /// Whether the kernel may begin to read an inode by itself: there is another node for it should it have to end
    /// that, and it has not been given one a moment ago.
    pub fn allows_passthrough(&self, inode: u64) -> bool {
        match self.of(inode) {
            Some(newest) => newest.number < LAST && newest.rests_until <= Instant::now(),
            None => inode < INODES_END && (!self.is_used.load(Relaxed) || self.newest.read().len() < INODES_MAX),
        }
    }

    /// Has an inode known by another node than this one from now on, unless it is already.
    pub fn supersede(&self, node: u64) {
        let (inode, number) = split(node);
        let next = number + 1;
        if inode < INODES_END && next <= LAST {
            self.advance_to(inode, next);
        }
    }

    /// The kernel has this node, which a process before this one may have given it.
    pub fn inherit(&self, node: u64) {
        let (inode, number) = split(node);
        self.advance_to(inode, number);
    }

    fn advance_to(&self, inode: u64, number: u64) {
        if number == 0 || self.of(inode).is_some_and(|known| known.number >= number) {
            return;
        }
        let rest = REST.saturating_mul(1 << (number - 1).min(16)).min(REST_MAX);
        let mut newest = self.newest.write();
        if newest.get(&inode).is_none_or(|known| known.number < number) {
            newest.insert(inode, Newest { number, rests_until: Instant::now() + rest });
        }
        self.is_used.store(true, Relaxed);
    }

    /// The kernel has forgotten all nodes of an inode.
    pub fn forget(&self, inode: u64) {
        if self.is_used.load(Relaxed) {
            self.newest.write().remove(&inode);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_inode_has_one_node_until_it_needs_another() {
        let aliases = Aliases::default();
        assert_eq!((aliases.newest(7), aliases.is_superseded(7), aliases.allows_passthrough(7)), (7, false, true));
        aliases.supersede(7);
        let second = aliases.newest(7);
        assert_eq!((inode_of(second), number_of(second), node_of(7, 1)), (7, 1, second));
        assert!(aliases.is_superseded(7) && !aliases.is_superseded(second) && !aliases.is_superseded(8));
        // Whoever is late finds that it has been done.
        aliases.supersede(7);
        assert_eq!(aliases.newest(7), second);
        assert_eq!(aliases.nodes_of(7).collect::<Vec<_>>(), [7, second]);
        assert_eq!(aliases.nodes_of(8).collect::<Vec<_>>(), [8]);
        assert!(!aliases.allows_passthrough(7) && aliases.allows_passthrough(8));
        tokio::time::advance(REST).await;
        assert!(aliases.allows_passthrough(7));
        aliases.supersede(second);
        tokio::time::advance(REST).await;
        assert!(!aliases.allows_passthrough(7), "it rests for longer each time");
        tokio::time::advance(REST).await;
        assert!(aliases.allows_passthrough(7));
        assert!(aliases.has_others(7) && !aliases.has_others(8));
        aliases.forget(7);
        assert_eq!((aliases.newest(7), aliases.has_others(7)), (7, false));
    }

    #[tokio::test(start_paused = true)]
    async fn nodes_that_are_no_files_of_the_namespace_stay_what_they_are() {
        let aliases = Aliases::default();
        for node in [1 << 61, 1 << 62, u64::MAX, i64::MAX as u64] {
            assert_eq!((inode_of(node), number_of(node)), (node, 0));
            aliases.supersede(node);
            assert!(!aliases.is_superseded(node) && !aliases.allows_passthrough(node));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_alias_of_an_inode_is_read_by_requests_for_good() {
        let aliases = Aliases::default();
        (0..LAST).for_each(|_| aliases.supersede(aliases.newest(7)));
        tokio::time::advance(REST_MAX).await;
        assert_eq!(u64::from(number_of(aliases.newest(7))), LAST);
        assert!(!aliases.allows_passthrough(7));
        let (next, node) = (Aliases::default(), node_of(9, 3));
        [node, node_of(9, 2), 9].into_iter().for_each(|node| next.inherit(node));
        assert_eq!(next.newest(9), node);
    }
}
