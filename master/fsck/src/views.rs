//! Views: the object of each, and the blocks that only views have.

use cavern_proto::master::{Finding, FindingKind, View, ViewState};
use cavern_proto::record::{KeptRecord, Stray};
use cavern_work::WorkError;
use tokio::time::Instant;

use super::blocks::Known;
use super::bucket::ask;
use super::{PAGE, Run};

impl Run<'_> {
    pub(super) async fn check_views(&mut self) -> Result<(), WorkError> {
        self.step("views");
        let (began, (count, found)) = (Instant::now(), self.judge_views().await?);
        self.looked_at(count, found, began).await?;
        self.step("blocks of views");
        let mut after: Option<Stray> = None;
        loop {
            let (began, from) = (Instant::now(), after);
            let read =
                self.read(move |tables| Ok(tables.kept_after(from).take(PAGE).collect::<Result<Vec<_>, _>>()?));
            let page = read.await?;
            let Some((last, _)) = page.last() else { return Ok(()) };
            after = Some(*last);
            let (count, found) = (page.len(), self.judge_kept(page).await?);
            self.looked_at(count, found, began).await?;
        }
    }

    /// How many views there are, and what is wrong with their objects.
    pub(super) async fn judge_views(&mut self) -> Result<(usize, Vec<Finding>), WorkError> {
        let mut views = self.read(|tables| Ok(tables.views()?)).await?;
        views.retain(|view| view.state() == ViewState::Ready);
        let (count, mut found) = (views.len(), Vec::new());
        for View { name: path, key, etag, object_bytes, store_mount_id: mount_id, .. } in views {
            let there = async { ask(&*self.fsck.lookups.mounts.get(mount_id)?, &key).await };
            let now = match there.await {
                Ok(Some((now, bytes))) if now == etag && bytes == object_bytes => continue,
                Ok(Some((now, bytes))) => format!("is version {now} of {bytes} bytes in the bucket"),
                Ok(None) => "is not in the bucket".to_owned(),
                Err(error) => {
                    self.miss(format!("the object of the view {path} cannot be looked at: {error}"));
                    continue;
                }
            };
            let detail = format!("its object \"{key}\", version {etag} of {object_bytes} bytes, {now}");
            let kind = FindingKind::MissingView as i32;
            found.push(Finding { kind, path, mount_id, key, detail, ..Finding::default() });
        }
        Ok((count, found))
    }

    async fn judge_kept(&mut self, page: Vec<(Stray, KeptRecord)>) -> Result<Vec<Finding>, WorkError> {
        let with = (&*self.mounts, &*self.fsck.cluster_id);
        let known = page.into_iter().filter_map(|(block, kept)| Known::kept(with, block, kept)).collect();
        self.judge_known(known).await
    }

    /// What is wrong with blocks at these places of files that only views have.
    pub(super) async fn kept_again(&mut self, places: Vec<(u64, u32)>) -> Result<Vec<Finding>, WorkError> {
        let read = self.read(move |tables| {
            let mut kept = Vec::new();
            for (inode, index) in places {
                let is_there = |(block, _): &(Stray, KeptRecord)| block.index == index;
                let rows = tables.kept_blocks(inode).filter(|row| row.as_ref().map_or(true, is_there));
                kept.extend(rows.collect::<Result<Vec<_>, _>>()?);
            }
            Ok(kept)
        });
        let kept = read.await?;
        self.judge_kept(kept).await
    }
}
