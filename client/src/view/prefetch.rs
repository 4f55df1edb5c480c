//! Bringing the runs that are about to be read: small ones alone, since a large file has read-ahead of its own.

use std::sync::Arc;

use cavern_net::master::RetryPolicy;
use cavern_proto::view_file::{BLOCK_BYTES, blocks_of};
use tokio::time::Instant;

use super::ahead::{BATCH_RUNS, RUN_BYTES, RunBatch};
use super::devices::Devices;
use super::table::{TablePage, TableRun};
use crate::error::ClientError;

impl Devices {
    /// A run is read.
    pub(super) fn note(self: &Arc<Self>, device: u32, run: &TableRun<'_>) {
        let files = &self.parts.files;
        if files.limits().readahead_max > 0
            && let Some(batch) = self.ahead.on_run(device, run.blocks())
        {
            let this = self.clone();
            files.in_background(async move { this.bring(batch).await });
        }
    }

    async fn bring(&self, batch: RunBatch) -> Result<(), ClientError> {
        let found = self.next_runs(&batch).await?;
        let runs: Vec<TableRun<'_>> = found.iter().filter_map(|(page, number)| page.runs().nth(*number)).collect();
        let Some(last) = runs.last() else { return Ok(()) };
        self.ahead.begun(&batch, last.blocks().end, runs[runs.len() / 2].first);
        self.locate_all(&runs).await?;
        let made: Vec<_> = runs.iter().map(|run| self.make_ready(*run)).collect();
        for made in futures::future::join_all(made).await {
            if let Err(error) = made {
                tracing::debug!(view = self.view.name, "a file is not read ahead: {error}");
            }
        }
        Ok(())
    }

    /// The next runs, each by its page and its number there.
    async fn next_runs(&self, batch: &RunBatch) -> Result<Vec<(Arc<TablePage>, usize)>, ClientError> {
        let mut found = Vec::new();
        let at = u64::from(batch.from) * BLOCK_BYTES;
        let mut next = self.table.find(batch.device, at).unwrap_or(0);
        while let Some(page) = self.load_page(next).await?
            && page.device() <= batch.device
        {
            if page.device() == batch.device {
                let runs = page.runs().enumerate().filter(|(_, run)| run.first >= batch.from);
                let left = BATCH_RUNS - found.len();
                let numbers: Vec<_> = runs.map(|(number, _)| number).take(left).collect();
                found.extend(numbers.into_iter().map(|number| (page.clone(), number)));
            }
            if found.len() == BATCH_RUNS {
                break;
            }
            next += 1;
        }
        Ok(found)
    }

    /// Has it known where the blocks of all of these are, with one question.
    async fn locate_all(&self, runs: &[TableRun<'_>]) -> Result<(), ClientError> {
        let mut inodes = Vec::new();
        if self.view.imported {
            return Ok(());
        }
        for run in runs.iter().filter(|run| run.is_up_to(RUN_BYTES) && !self.is_of_object(run)) {
            if self.parts.located.peek(&(self.view.id, run.file.inode)).is_none() {
                inodes.push(run.file.inode);
            }
        }
        if let Some(first) = inodes.pop() {
            let deadline = Instant::now() + self.parts.files.limits().read;
            self.locate(first, inodes, RetryPolicy::OneAttempt, deadline).await?;
        }
        Ok(())
    }

    /// Whether no block of this cluster has anything of it.
    fn is_of_object(&self, run: &TableRun<'_>) -> bool {
        run.has_object() && (run.file.generations.is_empty() || self.view.imported)
    }

    async fn make_ready(&self, run: TableRun<'_>) -> Result<(), ClientError> {
        if !run.is_up_to(RUN_BYTES) {
            return Ok(());
        }
        let blocks = blocks_of(run.file.size);
        let Ok(_under_way) = self.parts.ahead.clone().try_acquire_many_owned(blocks) else { return Ok(()) };
        let files = &self.parts.files;
        if self.is_of_object(&run) {
            return files.make_object_ready(&self.object(&run)?).await;
        }
        let Some(located) = self.parts.located.get(&(self.view.id, run.file.inode)) else { return Ok(()) };
        for extent in located.iter().filter(|extent| self.generation(&run, extent.index) == Some(extent.generation)) {
            let block = self.replicated(&run, extent.generation, extent.index, extent.workers.clone());
            if self.opened(&block.id).is_none() && self.open_here(&block).await.is_none() {
                files.make_block_ready(Arc::new(block)).await?;
            }
        }
        Ok(())
    }
}
