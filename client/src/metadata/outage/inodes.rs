//! Inodes of what buckets told of in outages.
//!
//! Their numbers are beyond those of the master and below those of files that are being written here. A number is made
//! out of mount, key and version, so it is the same whenever, and by whichever client, that version is found without a
//! master, and pages that a kernel has kept under it are right. Two that would share one get two.

use std::sync::Arc;
use std::time::Duration;

use cavern_proto::ContentId;
use parking_lot::Mutex;
use quick_cache::sync::Cache as BoundedMap;
use tokio::time::Instant;

use super::super::node::Node;
use crate::mounts::MountView;

/// The namespace counts from 1, and files that are being written have numbers from `END` on.
const FIRST: u64 = 1 << 61;
const END: u64 = 1 << 62;
/// Remembered at least.
const KNOWN_MIN: usize = 1024;

/// Whether an inode is one that a bucket told of.
pub(super) fn is_of_outage(inode: u64) -> bool {
    (FIRST..END).contains(&inode)
}

/// All that are remembered. One that is not any more is looked up again by its name.
pub(super) struct OutageInodes {
    known: BoundedMap<u64, Known>,
    entering: Mutex<()>,
}

#[derive(Clone)]
struct Known {
    node: Arc<Node>,
    found: Instant,
}

impl OutageInodes {
    /// For a metadata cache of so many entries.
    pub(super) fn new(entries: usize) -> Self {
        Self { known: BoundedMap::new((entries / 4).max(KNOWN_MIN)), entering: Mutex::default() }
    }

    pub(super) fn get(&self, inode: u64) -> Option<Arc<Node>> {
        self.known.get(&inode).map(|known| known.node)
    }

    /// Since the bucket has told of it last.
    pub(super) fn age(&self, inode: u64) -> Option<Duration> {
        self.known.get(&inode).map(|known| known.found.elapsed())
    }

    /// Enters what a bucket has just told of: `make` gives the node with the number that it gets.
    pub(super) fn enter(&self, mount: &MountView, make: impl Fn(u64) -> Node) -> Arc<Node> {
        let blank = make(FIRST);
        let mut inode = number(mount, &blank);
        let _entering = self.entering.lock();
        loop {
            match self.known.get(&inode) {
                Some(known) if !is_same(&known.node, &blank) => {
                    inode = if inode + 1 == END { FIRST } else { inode + 1 };
                    continue;
                }
                // The time of a directory stays the one that was shown first.
                Some(known) if known.node.parent == blank.parent => {
                    let node = known.node;
                    self.known.insert(inode, Known { node: node.clone(), found: Instant::now() });
                    return node;
                }
                Some(_) | None => {}
            }
            let node = Arc::new(make(inode));
            self.known.insert(inode, Known { node: node.clone(), found: Instant::now() });
            return node;
        }
    }
}

fn number(mount: &MountView, node: &Node) -> u64 {
    let place = format!("outage {} {}", mount.id(), mount.root_inode());
    let id = ContentId::of_object(&place, &node.key(), &node.etag(), node.size, mount.block_size());
    let [a, b, c, d, e, f, g, h, ..] = *id.as_bytes();
    FIRST + u64::from_be_bytes([a, b, c, d, e, f, g, h]) % (END - FIRST)
}

/// Whether they are one version of one object, or one directory, of one mount.
fn is_same(one: &Node, other: &Node) -> bool {
    let mount = |node: &Node| node.mount.as_ref().map(|mount| (mount.id(), mount.root_inode()));
    one.kind == other.kind
        && one.size == other.size
        && one.etag() == other.etag()
        && one.key() == other.key()
        && mount(one) == mount(other)
}

#[cfg(test)]
mod tests {
    use cavern_conf::schema;
    use cavern_proto::master::{Attr, Entry, Kind, Mount};

    use super::*;

    fn mount(id: u32) -> Arc<MountView> {
        let mount = Mount { id, uri: "memory://outage-inodes".into(), root_inode: 7, ..Mount::default() };
        Arc::new(MountView::new(mount, &schema::Ufs::default(), None))
    }

    fn enter(inodes: &OutageInodes, mount: &Arc<MountView>, name: &str, etag: &str, parent: u64) -> u64 {
        let make = |inode| {
            let attr = Attr { inode, kind: Kind::File as i32, size: 5, ..Attr::default() };
            let entry = Entry { name: name.to_owned().into(), parent, etag: etag.into(), ..Entry::default() };
            Node::new(&entry, &attr, Some(mount.clone()), "d/".into())
        };
        let node = inodes.enter(mount, make);
        assert_eq!((&*node.name, node.parent), (name.as_bytes(), parent));
        assert_eq!(inodes.get(node.inode).unwrap().inode, node.inode);
        node.inode
    }

    #[test]
    fn a_number_stands_for_one_version_in_one_mount() {
        let (inodes, one, other) = (OutageInodes::new(0), mount(1), mount(2));
        let first = enter(&inodes, &one, "a", "e1", 3);
        assert!(is_of_outage(first) && !is_of_outage(3) && !is_of_outage(END));
        assert_eq!(enter(&inodes, &one, "a", "e1", 3), first);
        assert_eq!(enter(&inodes, &one, "a", "e1", 4), first, "the directory has become known under another number");
        assert_eq!(enter(&OutageInodes::new(0), &one, "a", "e1", 3), first, "by another process");
        assert_ne!(enter(&inodes, &one, "a", "e2", 3), first);
        assert_ne!(enter(&inodes, &one, "b", "e1", 3), first);
        assert_ne!(enter(&inodes, &other, "a", "e1", 3), first);
        assert!(inodes.age(first).unwrap() < Duration::from_secs(10) && inodes.age(5).is_none());
    }

    #[test]
    fn two_that_would_share_a_number_get_two() {
        let (inodes, mount) = (OutageInodes::new(0), mount(1));
        let first = enter(&inodes, &mount, "a", "e", 3);
        let stranger = OutageInodes::new(0);
        enter(&stranger, &mount, "b", "e", 3);
        let second = enter(&stranger, &mount, "b", "e", 3);
        inodes.known.insert(second, inodes.known.get(&first).unwrap());
        assert_ne!(enter(&inodes, &mount, "b", "e", 3), second);
    }
}
