//! How long files live: rules of directories, and the removal of a file whose time is over.

use cavern_proto::master::{Mount, RemoveName, SetTtl, TtlAction};
use cavern_proto::record::{Expire, InodeRecord, TtlRecord};
use rustix::io::Errno;

use super::{MutationContext, MutationError, Outcome, Refusal, refuse};
use crate::error::StateError;
use crate::records::{inode_key, is_directory};
use crate::{Family, Transaction};

impl MutationContext<'_, '_> {
    /// Sets the rule of a directory, or ends it.
    pub(super) fn set_ttl(&mut self, set: &SetTtl) -> Result<u64, MutationError> {
        self.directory(set.inode)?;
        self.check_root("sets how long files live")?;
        self.check_setting(Mount::may_set_ttls, "set how long files live", "ttl")?;
        self.check_nothing_held()?;
        let Ok(action) = TtlAction::try_from(set.action) else {
            return refuse(Errno::INVAL, "an action that this master does not know");
        };
        if set.seconds == 0 {
            self.transaction.delete(Family::Ttl, &inode_key(set.inode));
        } else {
            let rule = TtlRecord { seconds: set.seconds, action: action as i32 };
            self.transaction.put(Family::Ttl, &inode_key(set.inode), &rule);
        }
        Ok(set.inode)
    }
}

/// Ends the rule of a directory that goes.
pub(super) fn drop_ttl(transaction: &mut Transaction<'_>, inode: u64, record: &InodeRecord) {
    if is_directory(record) {
        transaction.delete(Family::Ttl, &inode_key(inode));
    }
}

/// Removes the first name of a file that nobody has changed since it was looked at, nor writes to.
pub fn expire(transaction: &mut Transaction<'_>, expire: &Expire) -> Result<Outcome, StateError> {
    let is_as_seen =
        |record: &InodeRecord| !record.unlinked && !is_directory(record) && record.ctime_ns == expire.ctime_ns;
    let Some(record) = transaction.inode(expire.inode)?.filter(is_as_seen) else {
        return Ok(Outcome::Refused("the file has changed".into()));
    };
    if transaction.before().is_written_by_others(expire.inode, 0)? {
        return Ok(Outcome::Refused("somebody writes to the file".into()));
    }
    let remove = RemoveName { parent: record.parent, name: record.name, directory: false };
    let mut mutating = MutationContext::new(transaction, expire.now_ns);
    match mutating.remove(&remove) {
        Ok(_) => {
            mutating.note_intents()?;
            Ok(Outcome::Done)
        }
        Err(MutationError::Refused(Refusal { reason, .. })) => Ok(Outcome::Refused(reason)),
        Err(MutationError::Unlisted { .. }) => {
            Ok(Outcome::Refused("not all names of its directory are known yet".into()))
        }
        Err(MutationError::Held { directory }) => Ok(Outcome::Held(directory)),
        Err(MutationError::Storage(error)) => Err(error),
    }
}
