//! What is done about a finding: nothing by which bytes could go that are nowhere else. What is nowhere else, or may be
//! what somebody else wants, is left to a person; `docs/operations.md` says of each kind what he can do.

use cavern_proto::data::{Status, inspect_reply};
use cavern_proto::master::{Finding, FindingKind, FreeFate};
use cavern_proto::record::mend::Fault;
use cavern_proto::record::{BlockOf, FreeContent, GiveUpReplicas, Mend, MendDirectory, MendName, MendObject};
use cavern_state::clean_object;
use cavern_state::records::{is_directory, links};
use cavern_work::WorkError;
use cavern_work::persist::plan;

use super::Run;
use super::blocks::Known;
use super::bucket::ask;
use super::namespace::count;

impl Run<'_> {
    /// Says what has been done; nothing where nothing is, or it is not so any more.
    pub(super) async fn mend(&mut self, finding: &Finding) -> Result<String, WorkError> {
        let (inode, index, kind) = (finding.inode, finding.index, finding.kind());
        let (fault, done) = match kind {
            FindingKind::LinkCount | FindingKind::EntryCount => {
                (self.miscounted(inode).await?.map(Fault::Directory), "it counts what it has")
            }
            FindingKind::Usage => (Some(Fault::Usage(true)), "all that quotas go by is counted anew"),
            FindingKind::DanglingName => {
                let name = MendName { parent: inode, name: finding.name.clone() };
                (Some(Fault::Name(name)), "the name, which led to nothing, is removed")
            }
            FindingKind::BlockIndex if finding.worker == 0 => {
                (Some(Fault::Block(BlockOf { inode, index })), "it is in the lists that it has to be in")
            }
            FindingKind::MissingObject | FindingKind::LostIntent => {
                (self.unwritten(finding).await?.map(Fault::Object), "it is written to the bucket")
            }
            FindingKind::MissingBlock | FindingKind::DamagedBlock => return self.mend_block(finding).await,
            _ => (None, ""),
        };
        let Some(fault) = fault else { return Ok(String::new()) };
        // What is counted anew is so for all directories.
        let is_usage = kind == FindingKind::Usage;
        if is_usage && self.counts_anew {
            return Ok(done.to_owned());
        }
        let now_ns = self.fsck.lookups.reader.clock().now_ns();
        let is_mended = self.fsck.proposer.propose(Mend { now_ns, fault: Some(fault) }).await?;
        self.counts_anew |= is_usage;
        Ok(if is_mended || is_usage { done.to_owned() } else { String::new() })
    }

    /// What a directory counts, and has.
    async fn miscounted(&self, inode: u64) -> Result<Option<MendDirectory>, WorkError> {
        self.read(move |tables| {
            let Some(record) = tables.inode(inode)?.filter(is_directory) else { return Ok(None) };
            let counts = count(tables, inode, false)?;
            let (was_links, was_entries) = (links(&record), record.entries);
            let (links, entries) = (counts.links(), counts.entries);
            Ok(Some(MendDirectory { inode, was_links, links, was_entries, entries }))
        })
        .await
    }

    /// An inode whose object is gone, or was never there; of a file, if it has its content elsewhere.
    async fn unwritten(&self, finding: &Finding) -> Result<Option<MendObject>, WorkError> {
        let (inode, key) = (finding.inode, finding.key.clone());
        if key.is_empty() {
            let is_free = self.has_nothing_else(finding).await?;
            return Ok(is_free.then(|| MendObject { inode, ..MendObject::default() }));
        }
        self.read(move |tables| {
            let record = tables.inode(inode)?.filter(|it| it.origin.as_ref().is_none_or(|origin| origin.key != key));
            let object = if record.is_some() { tables.object(inode, &key)? } else { None };
            Ok(object.map(|object| MendObject { inode, key, etag: object.etag }))
        })
        .await
    }

    /// Whether the bucket has nothing under the keys of an inode but what is noted of it: that is written over.
    async fn has_nothing_else(&self, finding: &Finding) -> Result<bool, WorkError> {
        let Some(open) = self.mounts.get(&finding.mount_id).cloned() else { return Ok(false) };
        let (inode, seen) = (finding.inode, open.clone());
        let read = self.read(move |tables| {
            let mut noted = Vec::new();
            let Some(record) = tables.inode(inode)? else { return Ok(noted) };
            for key in plan::keys(tables, inode, &record, seen.ufs.prefix())?.unwrap_or_default() {
                noted.push((tables.object(inode, &key)?.unwrap_or_default().etag, key));
            }
            Ok(noted)
        });
        for (etag, key) in read.await? {
            if ask(&open, &key).await?.is_some_and(|(now, _)| now != etag) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// A worker that lacks a block, or has damaged it, is given up if another one has the block as it is: it gets a
    /// copy of that. Where all workers lack it, the file is read from its object, if that is there.
    async fn mend_block(&mut self, finding: &Finding) -> Result<String, WorkError> {
        let (inode, index, worker_id) = (finding.inode, finding.index, finding.worker);
        let (known, _) = self.recorded(vec![(inode, index)]).await?;
        let said = self.ask(&known).await?;
        let (Some(block), Some(said)) = (known.first(), said.first()) else { return Ok(String::new()) };
        let reported = self.fsck.writer.reported()?;
        let ailing = reported.iter().filter(|worker| worker.disks.iter().any(|disk| !disk.healthy));
        let ailing: Vec<u64> = ailing.map(|worker| worker.id).collect();
        let is_missing = finding.kind() == FindingKind::MissingBlock;
        // What a worker does not find while a disk fails is on that, perhaps; one that is away says nothing.
        let is_at_fault = |worker: &u64| {
            said.get(worker).is_some_and(|answer| match is_missing {
                true => answer.status() == Status::NoSuchBlock && !ailing.contains(worker),
                false => block.is_there(answer) && !block.is_as_object(answer),
            })
        };
        // It is the block that was asked about still.
        let now = self.read(move |tables| Ok(tables.extent(inode, index)?)).await?;
        if !is_at_fault(&worker_id) || now.as_ref() != Some(&block.extent) {
            return Ok(String::new());
        }
        let is_whole: fn(&Known, &inspect_reply::Block) -> bool =
            if is_missing { Known::is_there } else { Known::is_as_object };
        let others = block.those(said, is_whole);
        if !others.is_empty() {
            let blocks = vec![BlockOf { inode, index }];
            let done = format!("worker {worker_id} is given up for it; others have it, and one gets a copy");
            let given_up = self.fsck.proposer.propose(GiveUpReplicas { worker_id, blocks, others }).await?;
            return Ok(given_up.map_or_else(|_| String::new(), |()| done));
        }
        let extent = &block.extent;
        let is_lost = is_missing && extent.joining == 0 && extent.workers.iter().all(is_at_fault);
        if !is_lost || !self.is_in_bucket(inode).await? {
            return Ok(String::new());
        }
        let freed = self.fsck.proposer.propose(FreeContent { inode, session: 0 }).await?;
        let is_freed = freed.fate() == FreeFate::Freed;
        Ok(if is_freed { "it is read from the bucket, which has all of it".to_owned() } else { String::new() })
    }

    /// Whether the bucket has a file as it is: an object that is recorded so, and is there.
    async fn is_in_bucket(&self, inode: u64) -> Result<bool, WorkError> {
        let read = self.read(move |tables| {
            let mount_id = tables.inode(inode)?.map_or(0, |record| record.mount_id);
            Ok((mount_id, clean_object(tables, inode)?))
        });
        let (mount_id, Some((key, etag))) = read.await? else { return Ok(false) };
        let Some(open) = self.mounts.get(&mount_id) else { return Ok(false) };
        Ok(ask(open, &key).await?.is_some_and(|(now, _)| now == etag))
    }
}
