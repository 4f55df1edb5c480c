//! How long files live: rules of directories.

use cavern_proto::master::{Mount, SetTtl, TtlAction};
use cavern_proto::record::TtlRecord;
use rustix::io::Errno;

use super::context::{Attempt, MutationContext, refuse};
use crate::schema;

impl MutationContext<'_, '_> {
    /// Sets the rule of a directory, or ends it.
    pub fn set_ttl(&mut self, set: &SetTtl) -> Attempt<u64> {
        self.directory(set.inode)?;
        self.check_root("sets how long files live")?;
        self.check_setting(Mount::may_set_ttls, "set how long files live", "ttl")?;
        self.check_nothing_held()?;
        let Ok(action) = TtlAction::try_from(set.action) else {
            return refuse(Errno::INVAL, "an action that this master does not know");
        };
        if set.seconds == 0 {
            self.tx.delete(schema::Ttls, set.inode);
        } else {
            let rule = TtlRecord { seconds: set.seconds, action: action as i32 };
            self.tx.put(schema::Ttls, set.inode, &rule);
        }
        Ok(set.inode)
    }
}
