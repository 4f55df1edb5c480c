//! Quotas and times to live, as people see them.

use cavern_proto::master::{Quota, Quotas, Ttl, Ttls};
use cavern_proto::record::{QuotaRecord, TtlRecord, UsageRecord};

use crate::error::Result;
use crate::index::usage;
use crate::schema;
use crate::tables::Tables;

impl Tables<'_> {
    /// The quotas that bound what is in a directory, nearest first; for inode 0, all of them.
    pub fn quotas(&self, directory: u64) -> Result<Quotas> {
        let counters = self.counters()?;
        let (counted, mut quotas) = (counters.counted == usage::ALL, Vec::new());
        let directories = match directory {
            _ if counters.quotas == 0 => Vec::new(),
            0 => self.rows(schema::Quotas, ()).page(usize::MAX, |row| row.key())?,
            directory => self.above(directory)?,
        };
        for inode in directories {
            if let Some(QuotaRecord { max_bytes, max_inodes }) = self.get(schema::Quotas, inode)? {
                let UsageRecord { bytes, inodes } = self.get(schema::Usage, inode)?.unwrap_or_default();
                quotas.push(Quota { inode, path: self.shown(inode)?, max_bytes, max_inodes, bytes, inodes });
            }
        }
        Ok(Quotas { quotas, counted })
    }

    /// The rules of a directory and of those above it, nearest first; for inode 0, all of them.
    pub fn ttls(&self, directory: u64) -> Result<Ttls> {
        let directories = match directory {
            0 => self.rows(schema::Ttls, ()).page(usize::MAX, |row| row.key())?,
            directory => self.above(directory)?,
        };
        let mut ttls = Vec::new();
        for inode in directories {
            if let Some(TtlRecord { seconds, action }) = self.get(schema::Ttls, inode)? {
                ttls.push(Ttl { inode, path: self.shown(inode)?, seconds, action });
            }
        }
        Ok(Ttls { ttls })
    }
}
