//! What the masters ask of the state beyond single records: pages, counts and lists for those who work on it, and
//! whether somebody may do something. No command reads any of it.

mod access;

use std::collections::{BTreeSet, HashMap};

use cavern_proto::master::{CheckOpenRefsReply, CheckOpenRefsRequest, Extent, Quota, Quotas, Ttl, Ttls};
use cavern_proto::record::{
    DeletionRecord, GarbageRecord, IndexRange, IntentRecord, QuotaRecord, Stray, TtlRecord, UsageRecord,
};
use cavern_security::Identity;

pub use access::{blocking_lock, clean_object, has_content, may_access, may_have_layout};

use crate::error::Result;
use crate::index::usage;
use crate::schema::{self, FileBlock};
use crate::tables::Tables;

/// For each inode without a name that is asked for, so many are looked at: most may be held.
const UNREFERENCED_PART: usize = 10;

/// An inode that has lost its last name, with its mount.
pub type Unreferenced = (u64, u32);

/// A deletion, and which key it is for.
#[derive(Clone, Debug, PartialEq)]
pub struct PendingDeletion {
    pub mount_id: u32,
    pub key: String,
    pub record: DeletionRecord,
}

/// What a worker may have of a block that it is no part of any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StrayReplica {
    pub worker: u64,
    pub stray: Stray,
    pub mount_id: u32,
}

impl Tables<'_> {
    /// Up to `limit` intents of inodes beyond this one.
    pub fn intents(&self, after: u64, limit: usize) -> Result<Vec<(u64, IntentRecord)>> {
        self.rows_after(schema::Intents, (), Some(after)).page(limit, |row| row.entry())
    }

    /// Up to `limit` garbage records beyond this number.
    pub fn garbage(&self, after: u64, limit: usize) -> Result<Vec<(u64, GarbageRecord)>> {
        self.rows_after(schema::Garbage, (), Some(after)).page(limit, |row| row.entry())
    }

    /// Up to `limit` deletions beyond this one (of all mounts, in the order of mounts and keys).
    pub fn deletions(&self, after: Option<(u32, &str)>, limit: usize) -> Result<Vec<PendingDeletion>> {
        self.rows_after(schema::Deletions, (), after).page(limit, |row| {
            let ((mount_id, key), record) = row.entry()?;
            Ok(PendingDeletion { mount_id, key: key.to_owned(), record })
        })
    }

    /// Up to `limit` keys that begin so and of whose objects an inode has a note, each with the inode.
    pub fn noted_below(&self, mount_id: u32, prefix: &str, limit: usize) -> Result<Vec<(String, u64)>> {
        self.rows(schema::Noted, (mount_id, prefix)).page(limit, |row| {
            let ((_, key), inode) = row.entry()?;
            Ok((key.to_owned(), inode))
        })
    }

    /// Keys and versions of up to `limit` objects that the bucket of a mount has of it.
    pub fn noted_objects(&self, mount_id: u32, limit: usize) -> Result<Vec<(String, String)>> {
        let mut objects = Vec::new();
        for row in self.rows(schema::Noted, mount_id) {
            if objects.len() == limit {
                break;
            }
            let row = row?;
            let ((_, key), inode) = row.entry()?;
            if let Some(object) = self.object(inode, key)?.filter(|object| !object.etag.is_empty()) {
                objects.push((key.to_owned(), object.etag));
            }
        }
        Ok(objects)
    }

    /// Up to `limit` of a mount's unlisted directories: paths below its root, and inodes, beginning after a path.
    pub fn unlisted(&self, mount_id: u32, after: Option<&[u8]>, limit: usize) -> Result<Vec<(Vec<u8>, u64)>> {
        let after = after.map(|path| (mount_id, path));
        self.rows_after(schema::Unlisted, mount_id, after).page(limit, |row| {
            let ((_, path), inode) = row.entry()?;
            Ok((path.to_vec(), inode))
        })
    }

    /// The parts of a mount's keys that an index which runs has noted, by number.
    pub fn index_ranges(&self, mount_id: u32) -> Result<Vec<IndexRange>> {
        self.rows(schema::IndexRanges, mount_id).page(usize::MAX, |row| row.value())
    }

    /// Bytes of the blocks of each of these mounts. Of one that is gone nothing says so, but workers know its blocks by
    /// name.
    pub fn block_sizes(&self, mounts: impl IntoIterator<Item = u32>) -> Result<HashMap<u32, u64>> {
        let size = |id: u32| Ok((id, self.mount(id)?.map_or(1, |mount| mount.block_size.max(1))));
        mounts.into_iter().map(size).collect()
    }

    /// Up to `limit` files that have blocks, beyond this one, and their blocks.
    pub fn files_with_blocks(&self, after: u64, limit: usize) -> Result<Vec<(u64, Vec<Extent>)>> {
        let (mut files, mut last) = (Vec::new(), after);
        while files.len() < limit {
            let next = self.rows_after(schema::Extents, (), Some((last, u32::MAX))).next();
            let Some(row) = next.transpose()? else { break };
            (last, _) = row.key()?;
            files.push((last, self.extents(last, 0)?));
        }
        Ok(files)
    }

    /// How many blocks have a replica at a worker.
    pub fn count_replicas_at(&self, worker: u64) -> Result<u64> {
        self.rows(schema::Replicas, worker).try_fold(0, |count, row| row.map(|_| count + 1))
    }

    /// How many blocks that views have, and files no more, are kept at a worker.
    pub fn count_kept_at(&self, worker: u64) -> Result<u64> {
        self.kept_after(None).try_fold(0, |count, row| Ok(count + u64::from(row?.1.workers.contains(&worker))))
    }

    /// The workers that have replicas, whether the table has them or not.
    pub fn workers_with_replicas(&self) -> Result<Vec<u64>> {
        let mut workers: Vec<u64> = Vec::new();
        loop {
            let after = workers.last().map(|worker| (*worker, (u64::MAX, u32::MAX)));
            let next = self.rows_after(schema::Replicas, (), after).next();
            let Some(row) = next.transpose()? else { return Ok(workers) };
            workers.push(row.key()?.0);
        }
    }

    /// Up to `limit` blocks that lack replicas or have a copy under way, beyond this one.
    pub fn repairs(&self, after: Option<FileBlock>, limit: usize) -> Result<Vec<FileBlock>> {
        self.rows_after(schema::Repairs, (), after).page(limit, |row| row.key())
    }

    /// Up to `limit` strays beyond this one, by worker.
    pub fn strays(&self, after: Option<&(u64, Stray)>, limit: usize) -> Result<Vec<StrayReplica>> {
        self.rows_after(schema::Strays, (), after.copied()).page(limit, |row| {
            let ((worker, stray), mount_id) = row.entry()?;
            Ok(StrayReplica { worker, stray, mount_id })
        })
    }

    /// Whether a worker may have something of a block that is none of its replicas.
    pub fn is_stray(&self, worker: u64, stray: &Stray) -> Result<bool> {
        self.has(schema::Strays, (worker, *stray))
    }

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
    pub fn check_open_refs(&self, asked: &CheckOpenRefsRequest) -> Result<CheckOpenRefsReply> {
        let CheckOpenRefsRequest { session, open, referenced: held } = asked;
        let mut reply = CheckOpenRefsReply::default();
        let asked = open.iter().map(|inode| (*inode, false)).chain(held.iter().map(|inode| (*inode, true)));
        let records = self.inodes(open.iter().chain(held).copied())?;
        for ((inode, in_any_case), record) in asked.zip(records) {
            match record {
                None => reply.gone.push(inode),
                Some(record) if record.unlinked || in_any_case => {
                    if !self.has(schema::OpenRefs, (inode, *session))? {
                        reply.missing.push(inode);
                    }
                }
                Some(_) => {}
            }
        }
        Ok(reply)
    }

    /// How many inodes of a mount that have a name sessions hold.
    pub fn count_refs(&self, mount_id: u32) -> Result<u64> {
        let (mut held, mut last) = (0, 0);
        for row in self.rows(schema::OpenRefs, ()) {
            let (inode, _) = row?.key()?;
            if inode != last && self.inode(inode)?.is_some_and(|record| record.mount_id == mount_id && !record.unlinked)
            {
                held += 1;
            }
            last = inode;
        }
        Ok(held)
    }

    /// Up to `limit` inodes beyond `after` that have lost their last name and that nobody holds, but for those of
    /// mounts that are left out; and the last that was looked at, if there are more.
    pub fn unreferenced(
        &self,
        after: u64,
        left_out: &BTreeSet<u32>,
        limit: usize,
    ) -> Result<(Vec<Unreferenced>, Option<u64>)> {
        let mut unreferenced = Vec::new();
        for (looked_at, row) in self.rows_after(schema::Unlinked, (), Some(after)).enumerate() {
            let inode = row?.key()?;
            let mount_id = self.inode(inode)?.map_or(0, |record| record.mount_id);
            // The objects of one with an intent are still to be given up.
            if !left_out.contains(&mount_id) && !self.is_open(inode)? && self.intent(inode)?.is_none() {
                unreferenced.push((inode, mount_id));
            }
            if unreferenced.len() == limit || looked_at == limit * UNREFERENCED_PART {
                return Ok((unreferenced, Some(inode)));
            }
        }
        Ok((unreferenced, None))
    }
}
