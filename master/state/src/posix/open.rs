//! Opening a file to be written, where users are limited.

use cavern_posix::mode::{READ, WRITE};
use cavern_proto::master::{Kind, OpenToWrite};
use rustix::io::Errno;

use super::{MutationContext, MutationError, refuse};

impl MutationContext<'_, '_> {
    /// The session holds the file, and what it commits to it takes no permission any more: as with an open file
    /// of a local file system, whose mode may change afterwards.
    pub(super) fn open_to_write(&mut self, open: OpenToWrite, session: u64) -> Result<u64, MutationError> {
        let record = self.inode(open.inode)?;
        match record.kind() {
            Kind::File => {}
            Kind::Directory => return refuse(Errno::ISDIR, "a directory is not opened to be written"),
            _ => return refuse(Errno::INVAL, "only a file is opened to be written"),
        }
        let wanted = if open.read { READ | WRITE } else { WRITE };
        self.check_open(open.inode, &record, wanted)?;
        self.put_hold_to_write(open.inode, session);
        Ok(open.inode)
    }
}
