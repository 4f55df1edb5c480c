//! What a change of our own leaves in the caches.
//!
//! The master does not notify a session of its own changes, but for a last name that is lost. So the result must leave
//! nothing outdated behind: names lead where it says, the attributes of every inode that it touched are replaced, and
//! listings of the directories are dropped. An answer to a question that was in flight meanwhile is kept out by the
//! marks that are set here; and what another client has changed since the call was sent is forgotten, since nobody
//! knows which came first.

use std::sync::Arc;

use cavern_proto::master::mutation::Change;
use cavern_proto::master::{Attr, Entry, Kind, MutationResult, Naming, RenameMode};

use super::names::Names;
use super::node::Node;
use super::recent_invalidations::InvalidationMark;

/// A name, and the inode that it leads to now (0 for none).
struct DentryUpdate {
    parent: u64,
    name: bytes::Bytes,
    inode: u64,
}

impl Names {
    /// Takes a change that was made into the caches; gives the node of the result's inode. Inodes that have lost their
    /// last name by it go to `gone`: their contents are not known any more, which is for the caller to say.
    pub(super) fn apply_to_cache(
        &self,
        change: &Change,
        result: &MutationResult,
        mark: InvalidationMark,
        gone: &mut Vec<u64>,
    ) -> Option<Arc<Node>> {
        // Nothing has changed: an inode is held, or renamed to another name of its own.
        if result.attributes.is_empty() {
            return None;
        }
        let dentry_updates = dentry_updates(change, result);
        for place in &dentry_updates {
            self.recent.own_entry(place.parent, &place.name, place.inode);
            self.cache.forget_name(place.parent, &place.name);
            if let Some(directory) = self.directories.get(place.parent) {
                directory.own_change(&place.name, place.inode);
            }
        }
        let mut nodes = Vec::with_capacity(result.attributes.len());
        for attr in &result.attributes {
            self.recent.own_inode(attr.inode);
            // Its name may have been forgotten above; then it has another place now, or is gone.
            let known = self.cache.node(attr.inode);
            self.cache.forget_inode(attr.inode);
            if attr.nlink == 0 {
                self.directories.forget(attr.inode);
                gone.push(attr.inode);
                continue;
            }
            let place = dentry_updates.iter().find(|place| place.inode == attr.inode);
            nodes.extend(match (place, known) {
                (Some(place), _) => self.node_at(change, attr, place, mark),
                (None, Some(known)) => Some(Arc::new(known.with_attributes(attr))),
                (None, None) => None,
            });
        }
        if self.caching {
            self.keep(&nodes);
            let absent = dentry_updates.iter().filter(|place| place.inode == 0 && self.keeps_absences(place.parent));
            absent.for_each(|place| self.cache.insert_absent(place.parent, &place.name));
            // After they are in: what comes later than this look takes them out itself.
            let foreign = self.recent.foreign_since(mark);
            if !foreign.none() {
                let overtaken = nodes.iter().filter(|node| foreign.touch(node.parent, &node.name, node.inode));
                overtaken.for_each(|node| self.cache.forget_inode(node.inode));
                let overtaken =
                    dentry_updates.iter().filter(|place| foreign.touch(place.parent, &place.name, place.inode));
                for place in overtaken {
                    self.cache.forget_name(place.parent, &place.name);
                    // It may be there again.
                    if let Some(directory) = self.directories.get(place.parent) {
                        directory.foreign_change(&place.name, true);
                    }
                }
            }
        }
        nodes.into_iter().find(|node| node.inode == result.inode)
    }

    /// Of a change that was answered and is not made, nothing is known.
    pub(super) fn forget_change(&self, change: &Change, result: &MutationResult) {
        for place in dentry_updates(change, result) {
            self.forget_entry(place.parent, &place.name, place.inode);
        }
        result.attributes.iter().for_each(|attr| self.forget_inode(attr.inode));
    }

    /// The node of an inode at a name that it has got.
    fn node_at(&self, change: &Change, attr: &Attr, place: &DentryUpdate, mark: InvalidationMark) -> Option<Arc<Node>> {
        let mount = self.directories.get(place.parent)?.mount.clone()?;
        let target = match change {
            Change::Create(create) => create.target.clone(),
            // Where an old symlink leads is asked again.
            _ if attr.kind() == Kind::Symlink => return None,
            _ => bytes::Bytes::new(),
        };
        if attr.kind() == Kind::Directory {
            let directory = self.directories.ensure(attr.inode, Some(&mount), "");
            let epoch = directory.listing_epoch();
            // Somebody else may have made the first file in it already; or a program here, that has listed it before.
            let is_new = || !self.recent.foreign_since(mark).touch(attr.inode, b"", attr.inode);
            let is_empty = || !directory.has_all_names() && is_new();
            if matches!(change, Change::Create(_)) && is_empty() {
                directory.record(epoch, b"", &[], true);
            }
        }
        let entry = Entry { name: place.name.clone(), parent: place.parent, target, ..Entry::default() };
        Some(Arc::new(Node::new(&entry, attr, Some(mount), "".into())))
    }
}

/// The names that a change is about, as they are after it.
fn dentry_updates(change: &Change, result: &MutationResult) -> Vec<DentryUpdate> {
    let place = |parent: u64, name: &bytes::Bytes, inode: u64| DentryUpdate { parent, name: name.clone(), inode };
    match change {
        Change::Create(create) if create.naming() != Naming::Named => Vec::new(),
        Change::Create(create) => vec![place(create.parent, &create.name, result.inode)],
        Change::Link(link) => vec![place(link.parent, &link.name, result.inode)],
        Change::Remove(remove) => vec![place(remove.parent, &remove.name, 0)],
        Change::Rename(rename) | Change::RenameWhiteout(rename) => {
            let touched = || result.attributes.iter().filter(|attr| attr.inode != result.inode);
            let left = match change {
                // The newest of all inodes.
                Change::RenameWhiteout(_) => {
                    touched().filter(|attr| attr.kind() == Kind::CharacterDevice).map(|attr| attr.inode).max()
                }
                _ if rename.mode() == RenameMode::Exchange => {
                    let directories = [rename.parent, rename.new_parent];
                    touched().map(|attr| attr.inode).find(|inode| !directories.contains(inode))
                }
                _ => None,
            };
            vec![
                place(rename.parent, &rename.name, left.unwrap_or(0)),
                place(rename.new_parent, &rename.new_name, result.inode),
            ]
        }
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use cavern_conf::schema;
    use cavern_proto::master::{CreateInode, Mount};
    use prometheus_client::metrics::gauge::Gauge;

    use super::*;
    use crate::mounts::MountView;

    #[test]
    fn what_was_made_in_a_new_directory_before_its_answer_is_taken_in_stays_known() {
        let names = Names::new(100, true, &Gauge::default());
        let mount = Mount { id: 1, uri: "memory://new-directory".into(), root_inode: 2, ..Mount::default() };
        let mount = Arc::new(MountView::new(mount, &schema::Ufs::default(), None));
        let attr = |inode: u64| Attr { inode, kind: Kind::Directory.into(), nlink: 2, ..Attr::default() };
        let made = |inode: u64| {
            let create = CreateInode { parent: 2, name: inode.to_string().into(), ..CreateInode::default() };
            let result = MutationResult { inode, attributes: vec![attr(inode)], ..MutationResult::default() };
            let mark = names.recent.mark();
            names.apply_to_cache(&Change::Create(create), &result, mark, &mut Vec::new());
            names.directories.get(inode).unwrap()
        };
        names.directories.ensure(2, Some(&mount), "");
        assert!(made(3).is_known_empty());
        // Others on this host have found it, listed it, and made a file.
        let listed = names.directories.ensure(4, Some(&mount), "");
        listed.record(listed.listing_epoch(), b"", &[], true);
        listed.own_change(b"f", 5);
        assert!(!made(4).is_known_empty() && !names.is_without(4, b"f"));
    }
}
