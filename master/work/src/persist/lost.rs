//! Files that cannot be written to the bucket, because their workers have lost blocks of them.
//!
//! A block is lost when each of its workers is live, with all of its disks, and says that it does not have it: a host
//! that loses its power loses what it had not synced. As long as one of them is away, it may still have the block, and
//! the file waits for it (see `crate::repair::unavailable`).
//!
//! Which files have lost blocks is known to the leader that has tried to write them, and to nobody else: the next one
//! finds it out with its own attempts. They are tried again like everything else, until somebody gives them up.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use cavern_proto::data::BlockRef;
use cavern_proto::master::{Extent, LostAction, ResolveLostReply, UnavailableFile};
use cavern_proto::record::DropLost;
use cavern_state::AT_ONCE;
use cavern_state::outcome::LostDrop;
use tokio::time::Instant;

use super::intents::PersistOutcome;
use super::plan::Work;
use super::retry_tracker::{FailureKind, Item, Priority, WorkPermit};
use super::scope::{Scope, ScopeFilter};
use super::{PAUSES, Persistence};
use crate::error::WorkError;
use crate::repair;

/// Blocks that a worker is asked about at a time.
const ASKED: usize = 1000;
/// How long an attempt that is under way is waited for, and a bucket that does not answer.
const TURN_TIMEOUT: Duration = Duration::from_secs(30);

/// A file that has lost blocks.
#[derive(Clone, Copy, Debug)]
struct LostFile {
    inode: u64,
    mount_id: u32,
}

/// What workers say of the blocks of a file, by their indexes.
#[derive(Default)]
struct Answers {
    /// At one of them at least.
    found: HashSet<u32>,
    /// One of them does not answer.
    unknown: HashSet<u32>,
}

impl Persistence {
    /// A worker has not found a block of a file that is to be written.
    pub(super) async fn recognize_lost(&self, work: &Work, missing: &str) -> Result<PersistOutcome, WorkError> {
        let lost = self.lost_blocks(work.inode, work.mount_id).await?;
        if lost.is_empty() {
            return Ok(PersistOutcome::Failed(FailureKind::Item, missing.to_owned()));
        }
        let workers: HashSet<u64> = lost.iter().flat_map(|extent| extent.workers.iter().copied()).collect();
        let mut workers: Vec<String> = workers.into_iter().map(|worker| worker.to_string()).collect();
        workers.sort();
        let error = format!(
            "{} blocks of inode {} are lost: none of their workers ({}) has them; `cv persist drop` gives them up",
            lost.len(),
            work.inode,
            workers.join(", ")
        );
        if !self.retries.is_lost(work.inode, work.change) {
            tracing::error!(mount = work.mount_id, "{error}");
        }
        Ok(PersistOutcome::Failed(FailureKind::Lost { change: work.change }, error))
    }

    /// The blocks of a file that all of their workers have lost. A worker that is away, lacks a disk or does not answer
    /// may have what it is to have.
    async fn lost_blocks(&self, inode: u64, mount_id: u32) -> Result<Vec<Extent>, WorkError> {
        let (mut extents, block_size) = self.extents_of(inode, mount_id).await?;
        let placement = self.writer.placement()?;
        let reported = self.writer.reported()?;
        let ails = |worker: u64| {
            let disks = reported.iter().filter(|known| known.id == worker).flat_map(|known| &known.disks);
            disks.into_iter().any(|disk| !disk.healthy)
        };
        let is_whole: HashMap<u64, bool> = extents
            .iter()
            .flat_map(|extent| extent.workers.iter().copied())
            .map(|worker| (worker, placement.is_live(worker) && !ails(worker)))
            .collect();
        extents.retain(|extent| extent.joining == 0 && extent.workers.iter().all(|worker| is_whole[worker]));
        let answers = self.ask_for_blocks(inode, mount_id, block_size, &extents).await;
        extents.retain(|extent| !answers.found.contains(&extent.index) && !answers.unknown.contains(&extent.index));
        Ok(extents)
    }

    /// Whether each block of a file is at one of its workers, by that worker's own word.
    pub(super) async fn has_all_blocks(&self, inode: u64, mount_id: u32) -> Result<bool, WorkError> {
        let (extents, block_size) = self.extents_of(inode, mount_id).await?;
        let answers = self.ask_for_blocks(inode, mount_id, block_size, &extents).await;
        Ok(extents.iter().all(|extent| answers.found.contains(&extent.index)))
    }

    /// The blocks of a file, and how large those of its mount are.
    async fn extents_of(&self, inode: u64, mount_id: u32) -> Result<(Vec<Extent>, u64), WorkError> {
        let read = self.lookups.reader.read(move |tables| {
            let block_size = tables.mount(mount_id)?.map_or(0, |mount| mount.block_size);
            Ok((tables.extents(inode, 0)?, block_size))
        });
        read.await
    }

    async fn ask_for_blocks(&self, inode: u64, mount_id: u32, block_size: u64, extents: &[Extent]) -> Answers {
        let mut asked: BTreeMap<u64, Vec<&Extent>> = BTreeMap::new();
        for extent in extents {
            extent.workers.iter().for_each(|worker| asked.entry(*worker).or_default().push(extent));
        }
        let mut answers = Answers::default();
        for (worker, extents) in asked {
            for extents in extents.chunks(ASKED) {
                let name = |extent: &&Extent| {
                    let Extent { generation, index, .. } = **extent;
                    BlockRef::of_inode(&self.cluster_id, inode, generation, index, block_size, mount_id)
                };
                match self.writer.has(worker, extents.iter().map(name).collect()).await {
                    Ok(has) => {
                        let found = extents.iter().zip(has).filter(|(_, has)| *has);
                        answers.found.extend(found.map(|(extent, _)| extent.index));
                    }
                    Err(_) => answers.unknown.extend(extents.iter().map(|extent| extent.index)),
                }
            }
        }
        answers
    }

    /// How many files are known to have lost blocks, and up to `limit` of them.
    pub async fn lost(&self, limit: usize) -> Result<(u64, Vec<UnavailableFile>), WorkError> {
        let lost = self.lost_in(self.scope("/").await?).await?;
        let files = lost.len() as u64;
        let listed = self.lookups.reader.read(move |tables| {
            let described = lost.into_iter().take(limit).map(|file| repair::describe(tables, file.inode).transpose());
            described.flatten().collect()
        });
        Ok((files, listed.await?))
    }

    /// Deals with the files of a path, and below it, that have lost blocks.
    ///
    /// # Errors
    /// [`WorkError::Refused`] when no file there is known to have, or one of them cannot be dealt with now.
    pub async fn resolve_lost(self: &Arc<Self>, path: &str, action: LostAction) -> Result<ResolveLostReply, WorkError> {
        let scope = self.scope(path).await?;
        let lost = self.lost_in(scope.clone()).await?;
        if lost.is_empty() {
            return Err(WorkError::Refused(format!(
                "no file at {path} or below it is known to have lost blocks: `cv persist status {path}` tells what the \
                 bucket lacks, and `cv report` which workers are away"
            )));
        }
        let mut reply = ResolveLostReply { files: lost.len() as u64, ..ResolveLostReply::default() };
        for file in lost {
            match action {
                LostAction::Retry => self.retry(file).await?,
                LostAction::Drop => self.drop_lost(file, &mut reply).await?,
                LostAction::Unspecified => return Err(WorkError::Invalid("nothing is to be done".into())),
            }
            let error = self.retries.error(&Item::Inode(file.inode));
            reply.last_error = error.map_or(reply.last_error, |(_, error)| error);
        }
        reply.still_lost = self.lost_in(scope).await?.len() as u64;
        Ok(reply)
    }

    /// The files of a scope that are known to have lost blocks.
    async fn lost_in(&self, scope: Scope) -> Result<Vec<LostFile>, WorkError> {
        let known = self.retries.lost();
        let read = self.lookups.reader.read(move |tables| {
            let (mut within, mut lost) = (ScopeFilter::new(&scope), Vec::new());
            for (inode, change) in known {
                let Some(intent) = tables.intent(inode)?.filter(|intent| intent.change == change) else { continue };
                if within.has(tables, inode, &intent)? {
                    lost.push(LostFile { inode, mount_id: intent.mount_id });
                }
            }
            Ok(lost)
        });
        read.await
    }

    /// The sole right to work on a file, whatever has failed before.
    async fn turn(&self, LostFile { inode, mount_id }: LostFile) -> Result<WorkPermit, WorkError> {
        let since = Instant::now();
        while since.elapsed() < TURN_TIMEOUT {
            if let Some(turn) = self.retries.begin(&Item::Inode(inode), mount_id, Priority::Expedited(since)) {
                return Ok(turn);
            }
            tokio::time::sleep(PAUSES.0).await;
        }
        let error = self.retries.bucket_error(mount_id).map_or(String::new(), |(_, error)| format!(": {error}"));
        Err(WorkError::Refused(format!("inode {inode} is being worked on, or its bucket does not answer{error}")))
    }

    async fn retry(self: &Arc<Self>, file: LostFile) -> Result<(), WorkError> {
        let turn = self.turn(file).await?;
        let Ok(permit) = self.permits.clone().acquire_owned().await else { return Ok(()) };
        let (persistence, pace) = (self.clone(), Priority::Expedited(Instant::now()));
        // It goes on when nobody waits for it any more.
        let attempt = self.tasks.spawn(async move {
            persistence.process_intent(file.inode, file.mount_id, pace, &turn, None).await;
            drop(permit);
        });
        attempt.await.map_err(|_stopped| WorkError::Refused("the attempt was given up".into()))
    }

    /// Gives up what a file has lost, if it still has: nothing is under way for it meanwhile.
    async fn drop_lost(&self, file: LostFile, reply: &mut ResolveLostReply) -> Result<(), WorkError> {
        let LostFile { inode, mount_id } = file;
        let turn = self.turn(file).await?;
        let lost = self.lost_blocks(inode, mount_id).await?;
        let (mut reverted, mut blocks) = (false, 0);
        for portion in lost.chunks(AT_ONCE) {
            let now_ns = self.lookups.reader.clock().now_ns();
            let drop = DropLost { inode, blocks: portion.to_vec(), now_ns };
            match self.proposer.propose(drop).await? {
                LostDrop::Dropped { reverted: is_reverted } => reverted = is_reverted,
                LostDrop::Refused(reason) => return Err(WorkError::Refused(format!("inode {inode}: {reason}"))),
                LostDrop::Delegated(_) => {
                    let reason =
                        format!("a client has the delegation of the directory of inode {inode} again: try once more");
                    return Err(WorkError::Refused(reason));
                }
            }
            blocks += portion.len() as u64;
            if reverted {
                blocks = lost.len() as u64;
                break;
            }
        }
        if blocks > 0 {
            tracing::warn!(inode, mount = mount_id, blocks, reverted, "lost blocks of a file were given up");
            reply.blocks += blocks;
            *(if reverted { &mut reply.reverted } else { &mut reply.zeroed }) += 1;
        }
        turn.ended();
        Ok(())
    }
}
