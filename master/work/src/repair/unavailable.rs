//! Files of which nobody who is there has everything, while their bucket lacks it.
//!
//! They are found by the index of the replicas of the workers that are away, so that it costs nothing while all are
//! there.

use std::collections::BTreeSet;
use std::time::Duration;

use cavern_proto::master::{Extent, UnavailableFiles};
use cavern_state::{FileBlock, Tables, has_content};

use super::availability::AvailabilityMap;
use super::{PAGE, Repair, describe};
use crate::background::Next;
use crate::error::WorkError;

/// Between two counts.
pub(super) const PAUSE: Duration = Duration::from_secs(2);

impl Repair {
    /// Brings the gauges up to date.
    pub(super) async fn count_unavailable(&self) -> Result<Next, WorkError> {
        let found = self.unavailable(0).await?;
        let shown = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        let before = self.metrics.unavailable_files.set(shown(found.files));
        self.metrics.unavailable_blocks.set(shown(found.blocks));
        if found.files > 0 && before == 0 {
            let (files, blocks) = (found.files, found.blocks);
            tracing::error!(
                files,
                blocks,
                "content that is in no bucket is at lost workers only: start them again; `cv report` lists the files"
            );
        } else if found.files == 0 && before > 0 {
            tracing::info!("all content is available again");
        }
        Ok(Next::Rest)
    }

    /// How many files there are, and up to `limit` of them.
    pub async fn unavailable(&self, limit: usize) -> Result<UnavailableFiles, WorkError> {
        let availability = self.availability()?;
        let workers = self.reader.read(|tables| Ok(tables.workers_with_replicas()?)).await?;
        let away: Vec<u64> = workers.into_iter().filter(|worker| !availability.is_there(*worker)).collect();
        let mut found = UnavailableFiles::default();
        let mut files: BTreeSet<u64> = BTreeSet::new();
        for worker in away {
            let mut after = None;
            loop {
                let availability = availability.clone();
                let page = self.reader.read(move |tables| {
                    let page = tables.replicas_at(worker, after, PAGE)?;
                    let last = page.last().copied();
                    let lost = page.into_iter().filter_map(|at| is_lost(tables, &availability, worker, at).transpose());
                    Ok((last, lost.collect::<Result<Vec<FileBlock>, WorkError>>()?))
                });
                let (last, lost) = page.await?;
                found.blocks += lost.len() as u64;
                files.extend(lost.into_iter().map(|(inode, _)| inode));
                let Some(last) = last else { break };
                after = Some(last);
            }
        }
        found.files = files.len() as u64;
        for inode in files.into_iter().take(limit) {
            let file = self.reader.read(move |tables| describe(tables, inode)).await?;
            found.listed.extend(file);
        }
        Ok(found)
    }

    /// Whether a block of a file is at workers only that are away, whatever its bucket has.
    pub async fn has_unreachable_blocks(&self, inode: u64) -> Result<bool, WorkError> {
        let availability = self.availability()?;
        let read = self.reader.read(move |tables| {
            let is_away = |extent: &Extent| !extent.workers.iter().any(|worker| availability.is_there(*worker));
            Ok(tables.extents(inode, 0)?.iter().any(is_away))
        });
        read.await
    }

    /// Which blocks of a file are at workers only that are away, and what its bucket has is something else.
    pub async fn unavailable_blocks(&self, inode: u64) -> Result<Vec<Extent>, WorkError> {
        let availability = self.availability()?;
        let read = self.reader.read(move |tables| {
            if is_in_bucket(tables, inode)? {
                return Ok(Vec::new());
            }
            let mut extents = tables.extents(inode, 0)?;
            extents.retain(|extent| !extent.workers.iter().any(|worker| availability.is_there(*worker)));
            Ok(extents)
        });
        read.await
    }
}

/// The block, if none of its workers is there and its bucket lacks it. One of several workers answers for it: the
/// first.
fn is_lost(
    tables: Tables<'_>,
    availability: &AvailabilityMap,
    worker: u64,
    (inode, index): FileBlock,
) -> Result<Option<FileBlock>, WorkError> {
    let Some(extent) = tables.extent(inode, index)? else { return Ok(None) };
    let is_there = extent.workers.iter().any(|worker| availability.is_there(*worker));
    if is_there || extent.workers.first() != Some(&worker) || is_in_bucket(tables, inode)? {
        return Ok(None);
    }
    Ok(Some((inode, index)))
}

/// Whether an object holds the content of a file as it is.
pub(super) fn is_in_bucket(tables: Tables<'_>, inode: u64) -> Result<bool, WorkError> {
    let Some(record) = tables.inode(inode)? else { return Ok(true) };
    Ok(has_content(tables, inode, &record)?)
}
