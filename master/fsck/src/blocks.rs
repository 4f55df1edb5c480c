//! Blocks of files of fs-mode mounts: as they are recorded, in the lists by which workers keep and get them, and at
//! these workers.
//!
//! A worker has what the tables say before they say it, and until they say no more that it has it. So a block counts
//! only if its record is the same before and after its workers have been asked.

use std::collections::BTreeMap;

use cavern_proto::block_id::block_length;
use cavern_proto::data::{BlockRef, InspectRequest, Status, inspect_reply, inspect_request};
use cavern_proto::master::{Finding, FindingKind, Kind, Worker, WorkerState};
use cavern_proto::record::{ExtentRecord, KeptRecord, Stray};
use cavern_state::{FileBlock, Tables, clean_object, schema};
use cavern_work::WorkError;
use tokio::time::Instant;

use super::{Mounted, PAGE, Run, of_inode};

/// Blocks that a worker is asked about at a time, and those that it reads for one answer.
const ASKED: usize = 500;
const READ: usize = 4;

/// A block as it is recorded.
pub(super) struct Known {
    pub at: FileBlock,
    pub extent: ExtentRecord,
    /// How many there are to be; 0 where no file has it any more, and a view does.
    replicas: u32,
    /// The version of the file's content.
    version: u64,
    /// What it is called at workers, how much of it is the file's and is to be read, and which object has that.
    asked: inspect_request::Block,
}

/// What its workers say of it.
pub(super) type Said = BTreeMap<u64, inspect_reply::Block>;

impl Known {
    /// One that only views have; none of a mount that cannot be used.
    pub(super) fn kept((mounts, cluster_id): (&Mounted, &str), block: Stray, kept: KeptRecord) -> Option<Self> {
        let (Stray { inode, generation, index }, KeptRecord { mount_id, workers, .. }) = (block, kept);
        let block_size = mounts.get(&mount_id)?.mount.block_size;
        let block = Some(BlockRef::of_inode(cluster_id, inode, generation, index, block_size, mount_id));
        let asked = inspect_request::Block { block, ..inspect_request::Block::default() };
        let extent = ExtentRecord { generation, workers, ..ExtentRecord::default() };
        Some(Self { at: (inode, index), extent, replicas: 0, version: 0, asked })
    }

    fn finding(&self, tables: Tables<'_>, kind: FindingKind, detail: String) -> Result<Finding, WorkError> {
        Ok(Finding { index: self.at.1, ..of_inode(tables, kind, self.at.0, detail)? })
    }

    fn has_object(&self) -> bool {
        self.asked.read > 0 && !self.asked.key.is_empty()
    }

    /// The workers of which one says so.
    pub(super) fn those(&self, said: &Said, is: impl Fn(&Self, &inspect_reply::Block) -> bool) -> Vec<u64> {
        said.iter().filter(|(_, answer)| is(self, answer)).map(|(worker, _)| *worker).collect()
    }

    /// Whether a worker has it; with `deep`, what its file has.
    pub(super) fn is_there(&self, answer: &inspect_reply::Block) -> bool {
        answer.status() == Status::Ok
    }

    /// Whether what a worker has are the bytes of the object.
    pub(super) fn is_as_object(&self, answer: &inspect_reply::Block) -> bool {
        self.is_there(answer) && self.has_object() && answer.crc == answer.object_crc
    }

    /// Whether it is recorded as it was; one that was read has not been written to.
    fn is_unchanged(&self, tables: Tables<'_>) -> Result<bool, WorkError> {
        let (inode, index) = self.at;
        if self.replicas == 0 {
            let block = Stray { inode, generation: self.extent.generation, index };
            return Ok(tables.has(schema::KeptBlocks, block)?);
        }
        if tables.extent(inode, index)?.as_ref() != Some(&self.extent) {
            return Ok(false);
        }
        if self.asked.read == 0 {
            return Ok(true);
        }
        let is_same = tables.inode(inode)?.is_some_and(|record| record.version == self.version);
        Ok(is_same && !tables.is_written_by_others(inode, 0)?)
    }

    /// What is wrong at its workers.
    fn judge(&self, tables: Tables<'_>, said: &Said, found: &mut Vec<Finding>) -> Result<(), WorkError> {
        let (index, generation) = (self.at.1, self.extent.generation);
        let there = self.those(said, Self::is_there);
        let elsewhere = match &there[..] {
            [] => "no other worker has it".to_owned(),
            workers => format!("workers {workers:?} have it"),
        };
        for (worker, answer) in said {
            let (kind, detail) = match answer.status() {
                Status::NoSuchBlock => (FindingKind::MissingBlock, format!("does not have it; {elsewhere}")),
                Status::BadRequest => (FindingKind::WrongLength, answer.message.clone()),
                Status::IoError => (FindingKind::UnreadableBlock, format!("cannot read it; {elsewhere}")),
                Status::Ok if self.has_object() && !self.is_as_object(answer) => {
                    (FindingKind::DamagedBlock, format!("has other bytes than the object \"{}\"", self.asked.key))
                }
                _ => continue,
            };
            let whose = if self.replicas == 0 { ", kept for views" } else { "" };
            let detail = format!("worker {worker}, block {index} of generation {generation}{whose}: {detail}");
            let cause = if kind == FindingKind::UnreadableBlock { answer.message.clone() } else { String::new() };
            found.push(Finding { worker: *worker, cause, ..self.finding(tables, kind, detail)? });
        }
        let mut sums: Vec<u32> = there.iter().filter_map(|worker| said.get(worker)).map(|answer| answer.crc).collect();
        sums.sort_unstable();
        sums.dedup();
        if sums.len() > 1 && !self.has_object() {
            let detail = format!("workers {there:?} have different bytes of block {index}");
            found.push(self.finding(tables, FindingKind::DamagedBlock, detail)?);
        }
        Ok(())
    }
}

/// Blocks that are recorded, without those of mounts that go, and what is wrong with the records.
fn known(
    tables: Tables<'_>,
    (mounts, cluster_id): (&Mounted, &str),
    blocks: &[FileBlock],
    deep: bool,
) -> Result<(Vec<Known>, Vec<Finding>), WorkError> {
    let (mut all, mut found) = (Vec::new(), Vec::new());
    for at in blocks.iter().copied() {
        let (inode, index) = at;
        let Some(extent) = tables.extent(inode, index)? else { continue };
        let record = tables.inode(inode)?;
        let Some(record) = record.filter(|record| record.kind() == Kind::File) else {
            let detail = format!("block {index} is recorded at workers {:?}, and the file is gone", extent.workers);
            found.push(Finding { index, ..of_inode(tables, FindingKind::BlockWithoutFile, inode, detail)? });
            continue;
        };
        let Some(open) = mounts.get(&record.mount_id) else { continue };
        let (mount, generation) = (&open.mount, extent.generation);
        let length = block_length(record.size, mount.block_size.max(1), index);
        // Nobody writes to it, as far as the master knows.
        let is_read = deep && length > 0 && !tables.is_written_by_others(inode, 0)?;
        let whole = if is_read { clean_object(tables, inode)? } else { None };
        let (key, etag) = whole.unwrap_or_default();
        let name = BlockRef::of_inode(cluster_id, inode, generation, index, mount.block_size, mount.id);
        let read = if is_read { length } else { 0 };
        let asked = inspect_request::Block { block: Some(name), read, key, etag };
        let block = Known { at, replicas: mount.replicas.max(1), version: record.version, asked, extent };
        for worker in &block.extent.workers {
            if !tables.has(schema::Replicas, (*worker, at))? {
                let detail = format!("block {index} is not among those that worker {worker} is to keep");
                found.push(block.finding(tables, FindingKind::BlockIndex, detail)?);
            }
        }
        let lacks_replicas = block.extent.joining != 0 || (block.extent.workers.len() as u32) < block.replicas;
        if lacks_replicas && !tables.has(schema::Repairs, at)? {
            let detail = format!("block {index} lacks replicas, and is not among those that get some");
            found.push(block.finding(tables, FindingKind::BlockIndex, detail)?);
        }
        all.push(block);
    }
    Ok((all, found))
}

impl Run<'_> {
    pub(super) async fn check_blocks(&mut self) -> Result<(), WorkError> {
        self.step("blocks");
        let mut after: Option<FileBlock> = None;
        loop {
            let (began, from) = (Instant::now(), after);
            let read = self
                .read(move |tables| Ok(tables.rows_after(schema::Extents, (), from).page(PAGE, |row| row.key())?));
            let page = read.await?;
            let Some(last) = page.last() else { break };
            after = Some(*last);
            let (count, found) = (page.len(), self.judge_blocks(page).await?);
            self.looked_at(count, found, began).await?;
        }
        self.step("lists of blocks");
        self.look_at_pages(|tables, after: Option<(u64, FileBlock)>| {
            let page = tables.rows_after(schema::Replicas, (), after).page(PAGE, |row| row.key())?;
            Ok((page.last().copied(), page.len(), judge_replicas(tables, &page)?))
        })
        .await
    }

    /// What is wrong with blocks, in the tables and at their workers.
    pub(super) async fn judge_blocks(&mut self, blocks: Vec<FileBlock>) -> Result<Vec<Finding>, WorkError> {
        let (known, mut found) = self.recorded(blocks).await?;
        found.extend(self.judge_known(known).await?);
        Ok(found)
    }

    /// What is wrong with blocks at their workers.
    pub(super) async fn judge_known(&mut self, known: Vec<Known>) -> Result<Vec<Finding>, WorkError> {
        let said = self.ask(&known).await?;
        let (repair, placement) = (self.fsck.repair.clone(), self.fsck.writer.placement()?);
        let read = self.read(move |tables| {
            let mut found = Vec::new();
            for (block, said) in known.iter().zip(&said) {
                if !block.is_unchanged(tables)? {
                    continue;
                }
                block.judge(tables, said, &mut found)?;
                let has = &block.extent.workers;
                let there = has.iter().filter(|worker| placement.is_live(**worker)).count();
                if block.extent.joining != 0 || there >= block.replicas as usize {
                    continue;
                }
                let takes = |worker: &Worker| worker.state() == WorkerState::Live && !worker.draining;
                let mut others = placement.workers().iter().filter(|worker| !has.contains(&worker.id));
                let failure = repair.failure(block.at);
                // Otherwise it is about to get one.
                if failure.is_some() || !others.any(takes) {
                    let why = if failure.is_some() { "copies fail" } else { "there is no worker that takes another" };
                    let detail = format!("block {} has {there} of {} replicas: {why}", block.at.1, block.replicas);
                    let finding = block.finding(tables, FindingKind::TooFewReplicas, detail)?;
                    found.push(Finding { cause: failure.unwrap_or_default(), ..finding });
                }
            }
            Ok(found)
        });
        read.await
    }

    /// Blocks as they are recorded, and what is wrong with that.
    pub(super) async fn recorded(&self, blocks: Vec<FileBlock>) -> Result<(Vec<Known>, Vec<Finding>), WorkError> {
        let (mounts, cluster_id, deep) = (self.mounts.clone(), self.fsck.cluster_id.clone(), self.request.deep);
        self.read(move |tables| known(tables, (&mounts, &cluster_id), &blocks, deep)).await
    }

    /// What the workers of blocks say of them, one by one; nothing of those that are not there, or do not answer.
    pub(super) async fn ask(&mut self, blocks: &[Known]) -> Result<Vec<Said>, WorkError> {
        let mut said: Vec<Said> = blocks.iter().map(|_| Said::new()).collect();
        let placement = self.fsck.writer.placement()?;
        let mut asked: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        for (position, block) in blocks.iter().enumerate() {
            block.extent.workers.iter().for_each(|worker| asked.entry(*worker).or_default().push(position));
        }
        for (worker, positions) in asked {
            if !placement.is_live(worker) {
                self.miss(format!("worker {worker} is not there: what it has is not looked at"));
                continue;
            }
            let at_a_time = if self.request.deep { READ } else { ASKED };
            for positions in positions.chunks(at_a_time) {
                let blocks = positions.iter().map(|position| blocks[*position].asked.clone()).collect();
                let request = InspectRequest { blocks, ..InspectRequest::default() };
                let Some(reply) = self.inspect(worker, request, "what it has").await else { break };
                for (position, answer) in positions.iter().zip(reply.blocks) {
                    match answer.status() {
                        Status::Ok | Status::NoSuchBlock | Status::BadRequest | Status::IoError => {
                            said[*position].insert(worker, answer);
                        }
                        // The object is another one by now.
                        Status::NotFound | Status::VersionChanged => {}
                        _ => self.miss(format!("worker {worker} cannot look at a block: {}", answer.message)),
                    }
                }
            }
        }
        Ok(said)
    }

    pub(super) async fn replicas_again(&self, before: &[Finding]) -> Result<Vec<Finding>, WorkError> {
        let rows: Vec<_> = before.iter().map(|it| (it.worker, (it.inode, it.index))).collect();
        self.read(move |tables| judge_replicas(tables, &rows)).await
    }
}

/// What workers are to keep is what the blocks say that they have.
fn judge_replicas(tables: Tables<'_>, rows: &[(u64, FileBlock)]) -> Result<Vec<Finding>, WorkError> {
    let mut found = Vec::new();
    for (worker, (inode, index)) in rows.iter().copied() {
        let extent = tables.recorded_extent(inode, index)?;
        if extent.is_none_or(|extent| !extent.workers.contains(&worker)) {
            let detail = format!("worker {worker} is to keep block {index}, which is not recorded to be there");
            let finding = of_inode(tables, FindingKind::BlockIndex, inode, detail)?;
            found.push(Finding { worker, index, ..finding });
        }
    }
    Ok(found)
}
