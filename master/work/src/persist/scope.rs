//! A part of the namespace, and what of the backlog belongs to it.

use std::collections::HashMap;

use cavern_proto::master::Kind;
use cavern_proto::record::IntentRecord;
use cavern_state::{PendingDeletion, Tables};

use crate::error::WorkError;

/// An inode and what lies below it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Scope {
    pub inode: u64,
    /// 0 above all mounts.
    pub mount_id: u32,
}

/// Says what lies in a scope.
pub(super) struct ScopeFilter<'s> {
    scope: &'s Scope,
    /// Directories that were asked about before.
    known: HashMap<u64, bool>,
    /// The key of a file, or what the keys below a directory begin with; not known yet, or no such thing.
    keys: Option<Option<Keys>>,
}

enum Keys {
    One(String),
    Below(String),
}

impl<'s> ScopeFilter<'s> {
    pub(super) fn new(scope: &'s Scope) -> Self {
        Self { scope, known: HashMap::new(), keys: None }
    }

    /// Whether an inode with changes that the bucket lacks has a name there.
    pub(super) fn has(&mut self, tables: Tables<'_>, inode: u64, intent: &IntentRecord) -> Result<bool, WorkError> {
        let top = self.scope.inode;
        // What is to be handed on to a directory concerns all that lies in it.
        if inode == top || (intent.propagates && tables.is_below(top, inode)?) {
            return Ok(true);
        }
        let Some(record) = tables.inode(inode)? else { return Ok(false) };
        if record.unlinked {
            // Its objects are to be given up. They were where its last name was, and that directory may have gone as
            // well.
            return Ok(self.has_mount(tables, intent.mount_id)? || tables.is_below(record.parent, top)?);
        }
        for name in tables.names(inode, &record) {
            let (parent, _) = name?;
            let is_below = match self.known.get(&parent) {
                Some(known) => *known,
                None => tables.is_below(parent, top)?,
            };
            self.known.insert(parent, is_below);
            if is_below {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether an object that is to be deleted has its key there; `prefix` is that of its mount.
    pub(super) fn has_key(
        &mut self,
        tables: Tables<'_>,
        deletion: &PendingDeletion,
        prefix: impl FnOnce() -> String,
    ) -> Result<bool, WorkError> {
        if self.scope.mount_id == 0 {
            return self.has_mount(tables, deletion.mount_id);
        }
        if self.scope.mount_id != deletion.mount_id {
            return Ok(false);
        }
        if self.keys.is_none() {
            self.keys = Some(keys(tables, self.scope.inode, &prefix())?);
        }
        Ok(match self.keys.as_ref().and_then(Option::as_ref) {
            Some(Keys::One(key)) => deletion.key == *key,
            Some(Keys::Below(prefix)) => deletion.key.starts_with(prefix),
            None => false,
        })
    }

    /// Whether a whole mount lies in the scope.
    fn has_mount(&self, tables: Tables<'_>, mount_id: u32) -> Result<bool, WorkError> {
        let Some(mount) = tables.mount(mount_id)? else { return Ok(false) };
        Ok(tables.is_below(mount.root_inode, self.scope.inode)?)
    }
}

/// The keys of an inode, by the first of its names, and of what lies below.
fn keys(tables: Tables<'_>, inode: u64, prefix: &str) -> Result<Option<Keys>, WorkError> {
    let Some(record) = tables.inode(inode)? else { return Ok(None) };
    if record.kind() == Kind::Directory {
        let directory = tables.directory(inode)?;
        return Ok(directory.and_then(|directory| directory.key_prefix(prefix)).map(Keys::Below));
    }
    let Some((parent, name)) = tables.names(inode, &record).next().transpose()? else { return Ok(None) };
    let above = tables.directory(parent)?.and_then(|directory| directory.key_prefix(prefix));
    Ok(above.map(|above| Keys::One(format!("{above}{}", String::from_utf8_lossy(&name)))))
}
