//! How far the buckets are behind.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use cavern_proto::master::{Kind, MountBacklog, PersistStatus};
use cavern_proto::record::InodeRecord;
use cavern_state::{PendingDeletion, Tables, has_content};

use super::backlog::{Backlog, ChangeRange};
use super::retry_tracker::Item;
use super::scope::{Scope, ScopeFilter};
use super::{PAGE, Persistence};
use crate::background::Next;
use crate::error::WorkError;
use crate::repair;

/// Files with lost blocks that are listed.
const LOST_LISTED: usize = 20;
/// How often the gauges are set, at most.
pub(super) const MEASURE: Duration = Duration::from_secs(5);

impl Persistence {
    /// What the buckets lack of a path and of what lies below it. With `up_to`, of changes up to that number only.
    ///
    /// # Errors
    /// [`WorkError::NotFound`] for a path that leads nowhere.
    pub async fn status(self: &Arc<Self>, path: &str, up_to: u64) -> Result<PersistStatus, WorkError> {
        self.status_of(self.scope(path).await?, up_to).await
    }

    pub(super) async fn status_of(self: &Arc<Self>, scope: Scope, up_to: u64) -> Result<PersistStatus, WorkError> {
        let (backlog, change) = self.measure(scope, ChangeRange { up_to, expedited_since: None }).await?;
        let (files_per_second, bytes_per_second) = self.throughput.rate();
        Ok(PersistStatus {
            files: backlog.files,
            bytes: backlog.bytes,
            deletions: backlog.deletions,
            oldest_age_ms: self.age_ns(&backlog) / 1_000_000,
            last_error: backlog.last_error().to_owned(),
            files_per_second,
            bytes_per_second,
            change,
            lost_files: backlog.lost_files,
            lost: backlog.lost,
            changing_files: backlog.changing_files,
        })
    }

    /// What the bucket of each mount lacked when that was measured last; none of those that lacked nothing.
    pub fn backlogs(&self) -> Vec<MountBacklog> {
        self.backlogs.lock().clone()
    }

    /// Brings the gauges and the backlogs of mounts up to date.
    pub(super) async fn show_backlog(self: &Arc<Self>) -> Result<Next, WorkError> {
        let scope = Scope { inode: cavern_proto::ROOT_INODE, mount_id: 0 };
        let (backlogs, _) = self.measure_mounts(scope, ChangeRange::ALL).await?;
        let told = backlogs.iter().map(|(mount_id, backlog)| MountBacklog {
            mount_id: *mount_id,
            files: backlog.files,
            bytes: backlog.bytes,
            deletions: backlog.deletions,
            oldest_age_ms: self.age_ns(backlog) / 1_000_000,
            lost_files: backlog.lost_files,
        });
        *self.backlogs.lock() = told.collect();
        let all = sum(backlogs);
        let oldest = Duration::from_nanos(u64::try_from(self.age_ns(&all)).unwrap_or(0));
        self.metrics.set_backlog(all.files, all.bytes, all.deletions, oldest);
        self.metrics.changing_files.set(i64::try_from(all.changing_files).unwrap_or(i64::MAX));
        self.forget_changing().await?;
        Ok(Next::Rest)
    }

    /// Forgets files whose uploads were in vain and that have no changes any more: they went, or their mounts did.
    async fn forget_changing(&self) -> Result<(), WorkError> {
        let changing = self.changing.inodes();
        let read = self.lookups.reader.read(move |tables| {
            let mut gone = Vec::new();
            for inode in changing {
                if tables.intent(inode)?.is_none() {
                    gone.push(inode);
                }
            }
            Ok(gone)
        });
        read.await?.into_iter().for_each(|inode| self.changing.forget(inode));
        Ok(())
    }

    /// Age of the oldest change; 0 without any.
    fn age_ns(&self, backlog: &Backlog) -> i64 {
        match backlog.oldest_ns {
            0 => 0,
            oldest => self.lookups.reader.clock().age_ns(oldest).max(0),
        }
    }

    pub(super) async fn measure(
        self: &Arc<Self>,
        scope: Scope,
        span: ChangeRange,
    ) -> Result<(Backlog, u64), WorkError> {
        let (backlogs, change) = self.measure_mounts(scope, span).await?;
        Ok((sum(backlogs), change))
    }

    async fn measure_mounts(
        self: &Arc<Self>,
        scope: Scope,
        span: ChangeRange,
    ) -> Result<(BTreeMap<u32, Backlog>, u64), WorkError> {
        let persistence = self.clone();
        self.lookups.reader.read(move |tables| persistence.sum_up(tables, &scope, span)).await
    }

    /// Reads all of the backlog, and sums it up by mount. *Blocking*.
    fn sum_up(
        &self,
        tables: Tables<'_>,
        scope: &Scope,
        span: ChangeRange,
    ) -> Result<(BTreeMap<u32, Backlog>, u64), WorkError> {
        // Before the rest: what comes meanwhile has a higher number.
        let change = tables.counters()?.change;
        let mut backlogs = BTreeMap::<u32, Backlog>::new();
        let mut within = ScopeFilter::new(scope);
        let add = |backlog: &mut Backlog, item: &Item, mount_id: u32| {
            backlog.failed(self.retries.error(item), span);
            let is_given_up = |since| self.retries.is_given_up(item, mount_id, since);
            backlog.given_up += u64::from(span.expedited_since.is_some_and(is_given_up));
        };
        let mut after = 0;
        loop {
            let page = tables.intents(after, PAGE)?;
            let Some((last, _)) = page.last() else { break };
            after = *last;
            for (inode, intent) in page {
                if intent.first_change > span.up_to || !within.has(tables, inode, &intent)? {
                    continue;
                }
                let backlog = backlogs.entry(intent.mount_id).or_default();
                backlog.files += 1;
                backlog.bytes = backlog.bytes.saturating_add(unwritten_bytes(tables, inode)?);
                backlog.older(intent.first_ns);
                backlog.changing_files += u64::from(self.changing.contains(inode));
                if self.retries.is_lost(inode, intent.change) {
                    backlog.lost_files += 1;
                    if backlog.lost.len() < LOST_LISTED {
                        backlog.lost.extend(repair::describe(tables, inode)?);
                    }
                }
                add(backlog, &Item::Inode(inode), intent.mount_id);
            }
        }
        let mut after: Option<(u32, String)> = None;
        loop {
            let page = tables.deletions(after.as_ref().map(|(mount, key)| (*mount, key.as_str())), PAGE)?;
            let Some(last) = page.last() else { break };
            after = Some((last.mount_id, last.key.clone()));
            for deletion in page {
                if deletion.record.first_change > span.up_to || !self.counts(tables, &mut within, &deletion, span)? {
                    continue;
                }
                let mount_id = deletion.mount_id;
                let backlog = backlogs.entry(mount_id).or_default();
                backlog.deletions += 1;
                backlog.older(deletion.record.since_ns);
                add(backlog, &Item::Key(mount_id, deletion.key), mount_id);
            }
        }
        for (mount_id, backlog) in &mut backlogs {
            backlog.failed(self.retries.bucket_error(*mount_id), span);
        }
        Ok((backlogs, change))
    }

    /// Whether an object that is to be deleted counts as something that the bucket lacks.
    fn counts(
        &self,
        tables: Tables<'_>,
        within: &mut ScopeFilter<'_>,
        deletion: &PendingDeletion,
        span: ChangeRange,
    ) -> Result<bool, WorkError> {
        let prefix = || self.lookups.mounts.prefix(deletion.mount_id);
        if !within.has_key(tables, deletion, prefix)? {
            return Ok(false);
        }
        if span.expedited_since.is_some() && self.waits_for_owner(tables, deletion)? {
            return Ok(false);
        }
        // What is kept for those who have a nameless file open goes when they close it.
        let Some(inode) = tables.origin_of(deletion.mount_id, &deletion.key)? else { return Ok(true) };
        let is_kept = tables.is_open(inode)? && tables.inode(inode)?.is_some_and(|record| record.unlinked);
        Ok(!is_kept)
    }
}

fn sum(backlogs: BTreeMap<u32, Backlog>) -> Backlog {
    let mut all = backlogs.into_values().fold(Backlog::default(), Backlog::and);
    all.lost.truncate(LOST_LISTED);
    all
}

/// Bytes of a file that its objects do not have.
fn unwritten_bytes(tables: Tables<'_>, inode: u64) -> Result<u64, WorkError> {
    let is_file = |record: &InodeRecord| record.kind() == Kind::File && !record.unlinked;
    let Some(record) = tables.inode(inode)?.filter(is_file) else { return Ok(0) };
    Ok(if has_content(tables, inode, &record)? { 0 } else { record.size })
}
