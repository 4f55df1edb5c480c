//! What workers have beside the blocks of files: those that no file has, and those of objects.

use cavern_proto::data::{CachePlace, InspectReply, InspectRequest, OrphanBlock};
use cavern_proto::master::{Finding, FindingKind, WorkerState};
use cavern_work::WorkError;
use tokio::time::Instant;

use super::{Run, SILENCES};

impl Run<'_> {
    /// Has a worker say `what`, unless it has not answered too often.
    pub(super) async fn inspect(&mut self, worker: u64, request: InspectRequest, what: &str) -> Option<InspectReply> {
        if self.silences.get(&worker).is_some_and(|silences| *silences >= SILENCES) {
            return None;
        }
        match self.fsck.writer.inspect(worker, request).await {
            Ok(reply) => Some(reply),
            Err(error) => {
                *self.silences.entry(worker).or_default() += 1;
                self.miss(format!("worker {worker} does not say {what}: {error}"));
                None
            }
        }
    }

    fn live_workers(&self) -> Result<Vec<u64>, WorkError> {
        let placement = self.fsck.writer.placement()?;
        let live = placement.workers().iter().filter(|worker| worker.state() == WorkerState::Live);
        Ok(live.map(|worker| worker.id).collect())
    }

    pub(super) async fn check_strays(&mut self) -> Result<(), WorkError> {
        self.step("blocks of no file");
        for worker in self.live_workers()? {
            let began = Instant::now();
            let found = self.orphans_at(worker).await;
            self.looked_at(1, found, began).await?;
        }
        Ok(())
    }

    /// Blocks that a worker keeps for longer than it lets those be that no file has.
    pub(super) async fn orphans_at(&mut self, worker: u64) -> Vec<Finding> {
        let rest_ms = self.request.orphan_grace_ms;
        let request = InspectRequest { orphans: true, rest_ms, ..InspectRequest::default() };
        let reply = self.inspect(worker, request, "which blocks no file has").await;
        let Some(reply) = reply else { return Vec::new() };
        let (listed, all) = (reply.orphans.len() as u64, reply.orphan_blocks);
        if all > listed {
            self.miss(format!("worker {worker} has {all} blocks that no file has, of which it names {listed}"));
        }
        let of_block = |block: OrphanBlock| Finding {
            kind: FindingKind::StrayBlock as i32,
            path: format!("worker {worker}"),
            worker,
            detail: format!(
                "block {}, incarnation {}, of {} bytes, is in no file, and is not freed",
                block.block, block.incarnation, block.bytes
            ),
            ..Finding::default()
        };
        reply.orphans.into_iter().map(of_block).collect()
    }

    /// Has workers compare their cached blocks with the checksums. What is damaged is dropped by that, which is told at
    /// once: the bucket has it.
    pub(super) async fn check_cached(&mut self) -> Result<(), WorkError> {
        self.step("cached blocks");
        for worker in self.live_workers()? {
            let mut place = Some(CachePlace::default());
            while let Some(verify) = place.take() {
                let began = Instant::now();
                let request = InspectRequest { verify: Some(verify), ..InspectRequest::default() };
                let reply = self.inspect(worker, request, "which cached blocks are damaged").await;
                let Some(reply) = reply else { break };
                let of_block = |block: String| Finding {
                    kind: FindingKind::DamagedBlock as i32,
                    path: format!("worker {worker}"),
                    worker,
                    detail: format!("cached block {block} does not match its checksums"),
                    repaired: "what was wrong is dropped, and fetched again when it is asked for".to_owned(),
                    ..Finding::default()
                };
                self.progress.findings.extend(reply.damaged.into_iter().map(of_block));
                self.looked_at(usize::try_from(reply.verified).unwrap_or(0), Vec::new(), began).await?;
                place = reply.next;
            }
        }
        Ok(())
    }
}
