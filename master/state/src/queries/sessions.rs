//! Sessions, and the inodes that they hold.

use cavern_proto::master::{CheckHoldsReply, CheckHoldsRequest};
use cavern_security::Identity;

use crate::error::Result;
use crate::schema;
use crate::tables::Tables;

impl Tables<'_> {
    /// The sessions that have changed something.
    pub fn session_ids(&self) -> Result<Vec<u64>> {
        self.rows(schema::Sessions, ()).page(usize::MAX, |row| row.key())
    }

    /// The sessions of which it is recorded whose they are.
    pub fn session_owners(&self) -> Result<Vec<(u64, Identity)>> {
        let mut owners = Vec::new();
        for row in self.rows(schema::Sessions, ()) {
            let (id, session) = row?.entry()?;
            owners.extend(session.owner.parse::<Identity>().ok().map(|owner| (id, owner)));
        }
        Ok(owners)
    }

    /// What a session must hold of the inodes that are open there and of those that it held, and which of them are
    /// gone.
    pub fn check_holds(&self, asked: &CheckHoldsRequest) -> Result<CheckHoldsReply> {
        let CheckHoldsRequest { session, open, held } = asked;
        let mut reply = CheckHoldsReply::default();
        let asked = open.iter().map(|inode| (*inode, false)).chain(held.iter().map(|inode| (*inode, true)));
        let records = self.inodes(open.iter().chain(held).copied())?;
        for ((inode, in_any_case), record) in asked.zip(records) {
            match record {
                None => reply.gone.push(inode),
                Some(record) if record.unlinked || in_any_case => {
                    if !self.has(schema::Holds, (inode, *session))? {
                        reply.hold.push(inode);
                    }
                }
                Some(_) => {}
            }
        }
        Ok(reply)
    }

    /// How many inodes of a mount that have a name sessions hold.
    pub fn held_of(&self, mount_id: u32) -> Result<u64> {
        let (mut held, mut last) = (0, 0);
        for row in self.rows(schema::Holds, ()) {
            let (inode, _) = row?.key()?;
            if inode != last && self.inode(inode)?.is_some_and(|record| record.mount_id == mount_id && !record.unlinked)
            {
                held += 1;
            }
            last = inode;
        }
        Ok(held)
    }

    /// Up to `limit` inodes that have lost their last name and that nobody holds.
    pub fn unheld(&self, limit: usize) -> Result<Vec<u64>> {
        let mut unheld = Vec::new();
        for row in self.rows(schema::Unlinked, ()) {
            let inode = row?.key()?;
            // The objects of one with an intent are still to be given up.
            if !self.is_held(inode)? && self.intent(inode)?.is_none() {
                unheld.push(inode);
                if unheld.len() == limit {
                    break;
                }
            }
        }
        Ok(unheld)
    }
}
