//! Workers that leave: they are emptied while they are at work, and taken out of the table for good.
//!
//! *Draining* is a mark in the worker table. Placement gives such a worker nothing new, in either mode, and repair
//! copies what it has of fs-mode files to others, as it does for a lost worker, with the difference that the worker
//! itself is a source. What it caches of buckets stays behind. The mark outlives restarts, and can be taken away at any
//! time.
//!
//! *Removal* must lose nothing unless it is forced: the worker is given up first wherever another one has the block,
//! then the blocks of files that their bucket has are dropped, and the command that takes it out of the table refuses
//! if it has any block left then. Whatever was written meanwhile is seen by that. Blocks that only views have are not
//! copied: a worker that has any stays until these views go.

use std::collections::BTreeSet;

use cavern_proto::master::{RemoveWorkerReply, UnavailableFiles, Worker, WorkerBlocks, WorkerState, WriteType};
use cavern_proto::record::{BlockOf, DrainWorker, GiveUpReplicas, RemoveWorker, RequestRecord};
use cavern_state::outcome::Repeatable;
use cavern_state::{FileBlock, Tables};
use prost::Message as _;

use super::availability::AvailabilityMap;
use super::unavailable::is_in_bucket;
use super::{PAGE, Repair, describe};
use crate::error::WorkError;
use crate::request::Request;

/// Files that an answer names.
const LISTED: usize = 20;

/// What becomes of blocks of a worker without it.
#[derive(Default)]
struct RemovalImpact {
    /// Another worker that is there has them.
    elsewhere: Vec<FileBlock>,
    /// Their files are in the bucket.
    in_bucket: BTreeSet<u64>,
    lost: Vec<FileBlock>,
}

impl Repair {
    /// Marks a worker as to be emptied, or takes the mark away.
    ///
    /// # Errors
    /// [`WorkError::NotFound`] for a worker that is none, [`WorkError::Refused`] when nobody could take its blocks.
    pub async fn drain(&self, worker_id: u64, draining: bool) -> Result<WorkerBlocks, WorkError> {
        self.known(worker_id).await?;
        match self.propose(DrainWorker { worker_id, draining }).await {
            Ok(()) => self.blocks_of(worker_id).await,
            Err(WorkError::Consensus(error)) => Err(WorkError::unavailable(error.to_string())),
            Err(refused) => Err(refused),
        }
    }

    /// How many blocks of fs-mode files a worker has, and why they do not move if they should.
    ///
    /// # Errors
    /// [`WorkError::NotFound`] for a worker that is none.
    pub async fn blocks_of(&self, worker_id: u64) -> Result<WorkerBlocks, WorkError> {
        let draining = self.known(worker_id).await?;
        let read = self.reader.read(move |tables| {
            let mounts = tables.mounts()?.into_iter().filter(|mount| mount.write_type() == WriteType::FsMode);
            let most = mounts.map(|mount| mount.replicas).max();
            Ok((tables.count_replicas_at(worker_id)?, most.unwrap_or(1)))
        });
        let (blocks, most) = read.await?;
        let stuck = if draining && blocks > 0 { self.why_stuck(most)? } else { String::new() };
        Ok(WorkerBlocks { blocks, draining, stuck })
    }

    fn why_stuck(&self, most: u32) -> Result<String, WorkError> {
        let placement = self.writer.placement()?;
        let takes = |worker: &&Worker| worker.state() == WorkerState::Live && !worker.draining;
        let takers = placement.workers().iter().filter(takes).count();
        if takers < most.max(1) as usize {
            return Ok(format!(
                "files are to have up to {most} replicas, and {takers} live workers take blocks: start another one, or \
                 remove the worker with fewer replicas left"
            ));
        }
        let progress = self.progress.lock();
        let failed = progress.failures.values().next().map(|failure| failure.reason.clone());
        Ok(failed
            .map_or_else(String::new, |reason| format!("a block could not be copied: {reason}; it is tried again")))
    }

    /// Whether a worker of the table is being emptied.
    async fn known(&self, worker_id: u64) -> Result<bool, WorkError> {
        let record = self.reader.read(move |tables| Ok(tables.worker(worker_id)?)).await?;
        let worker = record.and_then(|record| record.worker);
        let worker =
            worker.ok_or_else(|| WorkError::NotFound(format!("there is no worker {worker_id}: see `cv node list`")))?;
        Ok(worker.draining)
    }

    /// Takes a worker out of the table for good. Unless it is `forced`, the answer says why not if that would lose
    /// anything.
    ///
    /// # Errors
    /// [`WorkError::NotFound`] for a worker that is none.
    pub async fn remove_once(
        &self,
        request: &Request,
        worker_id: u64,
        forced: bool,
    ) -> Result<RemoveWorkerReply, WorkError> {
        if let Some(answer) = request.answer(&self.reader).await? {
            return removed_before(&answer);
        }
        let draining = self.known(worker_id).await?;
        let availability = self.availability()?;
        let (mut only_here, mut files) = (UnavailableFiles::default(), BTreeSet::new());
        let mut after = None;
        while let Some((last, page)) = self.page_of(worker_id, after, &availability).await? {
            only_here.blocks += page.lost.len() as u64;
            files.extend(page.lost.into_iter().map(|(inode, _)| inode));
            after = Some(last);
        }
        only_here.files = files.len() as u64;
        for inode in files.into_iter().take(LISTED) {
            let file = self.reader.read(move |tables| describe(tables, inode)).await?;
            only_here.listed.extend(file);
        }
        let refused =
            |reason: String, only_here| Ok(RemoveWorkerReply { removed: false, reason, only_here: Some(only_here) });
        if !forced {
            if availability.is_there(worker_id) && !draining {
                let reason = format!(
                    "worker {worker_id} is at work: empty it first with `cv node drain {worker_id}`, or stop it and \
                     wait until it is lost"
                );
                return refused(reason, only_here);
            }
            if only_here.blocks > 0 {
                let reason = format!(
                    "{} blocks of {} files are at worker {worker_id} alone, and in no bucket: drain it, or `cv export` \
                     the files; with --force they are lost",
                    only_here.blocks, only_here.files
                );
                return refused(reason, only_here);
            }
            if let Err(reason) = self.empty(worker_id, &availability).await {
                return refused(format!("worker {worker_id} cannot be removed yet: {reason}"), only_here);
            }
            // Behind that: what a file loses there is kept before it is not the file's any more.
            let kept = self.reader.read(move |tables| Ok(tables.count_kept_at(worker_id)?)).await?;
            if kept > 0 {
                let reason = format!(
                    "{kept} blocks at worker {worker_id} are kept for views: delete these with `cv view delete`; with \
                     --force the views may lose them"
                );
                return refused(reason, only_here);
            }
        }
        let remove = RemoveWorker { worker_id, with_replicas: forced };
        let reply = RemoveWorkerReply { removed: true, reason: String::new(), only_here: Some(only_here) };
        match self.proposer.propose(request.command_with(remove, &reply)).await? {
            Repeatable::Repeated(answer) => removed_before(&answer),
            Repeatable::First(Err(reason)) => refused(reason, reply.only_here.unwrap_or_default()),
            Repeatable::First(Ok(())) => Ok(reply),
        }
    }

    /// Gives the worker up wherever it is not needed.
    async fn empty(&self, worker_id: u64, availability: &AvailabilityMap) -> Result<(), String> {
        let others = availability.placement.workers().iter().map(|worker| worker.id);
        let others: Vec<u64> = others.filter(|other| *other != worker_id && availability.is_there(*other)).collect();
        let mut after = None;
        while let Some((last, page)) =
            self.page_of(worker_id, after, availability).await.map_err(|error| error.to_string())?
        {
            let blocks = page.elsewhere.iter().map(|(inode, index)| BlockOf { inode: *inode, index: *index }).collect();
            let given_up = GiveUpReplicas { worker_id, blocks, others: others.clone() };
            self.propose(given_up).await.map_err(|error| error.to_string())?;
            for inode in page.in_bucket {
                self.drop_lost(inode).await?;
            }
            after = Some(last);
        }
        Ok(())
    }

    /// The next blocks of a worker, and the last of them; `None` beyond the last of all.
    async fn page_of(
        &self,
        worker: u64,
        after: Option<FileBlock>,
        availability: &AvailabilityMap,
    ) -> Result<Option<(FileBlock, RemovalImpact)>, WorkError> {
        let availability = availability.clone();
        let read = self.reader.read(move |tables| {
            let page = tables.replicas_at(worker, after, PAGE)?;
            let mut found = RemovalImpact::default();
            for at in &page {
                found.add(tables, &availability, worker, *at)?;
            }
            Ok(page.last().map(|last| (*last, found)))
        });
        read.await
    }
}

/// The answer to a request that has removed a worker.
fn removed_before(answer: &RequestRecord) -> Result<RemoveWorkerReply, WorkError> {
    let reply = RemoveWorkerReply::decode(answer.reply.as_ref());
    reply.map_err(|_| WorkError::Invalid("this request's id is that of another one".into()))
}

impl RemovalImpact {
    fn add(
        &mut self,
        tables: Tables<'_>,
        availability: &AvailabilityMap,
        worker: u64,
        (inode, index): FileBlock,
    ) -> Result<(), WorkError> {
        let Some(extent) = tables.extent(inode, index)? else { return Ok(()) };
        if extent.workers.iter().any(|other| *other != worker && availability.is_there(*other)) {
            self.elsewhere.push((inode, index));
        } else if is_in_bucket(tables, inode)? {
            self.in_bucket.insert(inode);
        } else {
            self.lost.push((inode, index));
        }
        Ok(())
    }
}
