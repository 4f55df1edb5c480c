//! Reads of how long files live in directories.

use cavern_proto::master::{Ttl, Ttls};
use cavern_proto::record::TtlRecord;

use super::Tables;
use crate::Family;
use crate::error::StateError;
use crate::records::{inode_key, leading_id};

impl Tables<'_> {
    pub fn ttl(&self, directory: u64) -> Result<Option<TtlRecord>, StateError> {
        self.record(Family::Ttl, &inode_key(directory))
    }

    /// The rules of a directory and of those above it, nearest first; for inode 0, all of them.
    pub fn ttls(&self, directory: u64) -> Result<Ttls, StateError> {
        let mut ttls = Vec::new();
        if directory == 0 {
            for key in self.keys(Family::Ttl) {
                ttls.extend(self.ttl_of(leading_id(&key?).unwrap_or_default())?);
            }
            return Ok(Ttls { ttls });
        }
        for at in self.above(directory)? {
            ttls.extend(self.ttl_of(at)?);
        }
        Ok(Ttls { ttls })
    }

    fn ttl_of(&self, inode: u64) -> Result<Option<Ttl>, StateError> {
        let Some(TtlRecord { seconds, action }) = self.ttl(inode)? else { return Ok(None) };
        Ok(Some(Ttl { inode, path: self.path(inode)?, seconds, action }))
    }
}
