//! The access lists of inodes, which are kept beside their other extended attributes.

use cavern_posix::acl::{ACCESS, Acl};
use cavern_proto::record::InodeRecord;

use super::MutationContext;
use crate::error::StateError;
use crate::records::{mode, xattr_key};
use crate::{Family, Tables};

impl MutationContext<'_, '_> {
    pub(super) fn put_acl(&mut self, inode: u64, name: &[u8], acl: &Acl) {
        self.transaction.put_bytes(Family::Xattr, &xattr_key(inode, name), &acl.encode());
    }

    /// Has the access list of an inode follow its new permissions.
    pub(super) fn chmod_acl(&mut self, inode: u64, record: &InodeRecord) -> Result<(), StateError> {
        if let Some(mut acl) = of(self.transaction.before(), (inode, record), ACCESS)? {
            acl.set_mode(mode(record));
            self.put_acl(inode, ACCESS, &acl);
        }
        Ok(())
    }
}

/// One list of an inode. What is kept there has been checked before.
pub(super) fn of(
    tables: Tables<'_>,
    (inode, record): (u64, &InodeRecord),
    name: &[u8],
) -> Result<Option<Acl>, StateError> {
    let value = if record.has_xattrs { tables.xattr(inode, name)? } else { None };
    let Some(value) = value else { return Ok(None) };
    let acl = Acl::decode(&value);
    acl.map(Some).ok_or_else(|| StateError::Corrupt(format!("an access list of inode {inode}")))
}
