//! Extended attributes.

use cavern_proto::master::{RemoveXattr, SetXattr, XattrMode};
use rustix::io::Errno;

use super::{Mutating, Stop, refuse};
use crate::state::Family;
use crate::state::records::xattr_key;

/// As the kernel has them: bytes of a name, of a value, and of all names of an inode with their NULs.
const NAME_BYTES_MAX: usize = 255;
const VALUE_BYTES_MAX: usize = 65_536;
const NAMES_BYTES_MAX: usize = 65_536;
/// Bytes of all names and values of an inode: they are one scan.
const TOTAL_BYTES_MAX: usize = 1 << 20;

impl Mutating<'_, '_> {
    pub(super) fn set_xattr(&mut self, set: &SetXattr) -> Result<u64, Stop> {
        if set.name.is_empty() || set.name.len() > NAME_BYTES_MAX || set.name.contains(&0) {
            return refuse(Errno::RANGE, format!("an attribute's name of {} bytes", set.name.len()));
        }
        if set.value.len() > VALUE_BYTES_MAX {
            return refuse(Errno::TOOBIG, format!("an attribute of {} bytes", set.value.len()));
        }
        let mut record = self.inode(set.inode)?;
        let known = self.transaction.before().xattr(set.inode, &set.name)?;
        match (set.mode(), known.is_some()) {
            (XattrMode::Create, true) => return refuse(Errno::EXIST, "the attribute is there"),
            (XattrMode::Replace, false) => return refuse(Errno::NODATA, "the attribute is not there"),
            _ => {}
        }
        if record.has_xattrs {
            let (mut names, mut total) = (set.name.len() + 1, set.name.len() + set.value.len());
            for (name, value) in self.transaction.before().xattrs(set.inode)? {
                if name != set.name {
                    names += name.len() + 1;
                    total += name.len() + value.len();
                }
            }
            if names > NAMES_BYTES_MAX || total > TOTAL_BYTES_MAX {
                return refuse(Errno::NOSPC, format!("the attributes of inode {} take too much room", set.inode));
            }
        }
        self.transaction.put_bytes(Family::Xattr, &xattr_key(set.inode, &set.name), &set.value);
        record.has_xattrs = true;
        record.ctime_ns = self.now_ns;
        self.put(set.inode, record);
        Ok(set.inode)
    }

    pub(super) fn remove_xattr(&mut self, remove: &RemoveXattr) -> Result<u64, Stop> {
        let mut record = self.inode(remove.inode)?;
        let names = if record.has_xattrs { self.transaction.before().xattrs(remove.inode)? } else { Vec::new() };
        if !names.iter().any(|(name, _)| *name == remove.name) {
            return refuse(Errno::NODATA, "the attribute is not there");
        }
        self.transaction.delete(Family::Xattr, &xattr_key(remove.inode, &remove.name));
        record.has_xattrs = names.len() > 1;
        record.ctime_ns = self.now_ns;
        self.put(remove.inode, record);
        Ok(remove.inode)
    }
}
