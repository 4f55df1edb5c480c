//! Views: the object of each, and the blocks that only views have.

use cavern_proto::master::{Finding, FindingKind, View, ViewState};
use cavern_proto::record::{KeptRecord, Stray};
use cavern_work::WorkError;
use tokio::time::Instant;

use super::blocks::Known;
use super::bucket::ask;
use super::{PAGE, Run};

/// Blocks that were kept when they were looked up.
type KeptBlocks = Vec<(Stray, KeptRecord)>;

impl Run<'_> {
    pub(super) async fn check_views(&mut self) -> Result<(), WorkError> {
        self.step("views");
        for view in self.ready_views().await? {
            let began = Instant::now();
            let found = self.judge_view(&view).await?;
            self.looked_at(1, found.into_iter().collect(), began).await?;
        }
        self.step("blocks of views");
        let mut after: Option<Stray> = None;
        loop {
            let (began, from) = (Instant::now(), after);
            let page =
                self.read(move |tables| Ok(tables.kept_after(from).take(PAGE).collect::<Result<KeptBlocks, _>>()?));
            let page = page.await?;
            let Some((last, _)) = page.last() else { return Ok(()) };
            after = Some(*last);
            let (count, found) = (page.len(), self.judge_kept(page).await?);
            self.looked_at(count, found, began).await?;
        }
    }

    async fn ready_views(&self) -> Result<Vec<View>, WorkError> {
        let mut views = self.read(|tables| Ok(tables.views()?)).await?;
        views.retain(|view| view.state() == ViewState::Ready);
        Ok(views)
    }

    async fn judge_view(&mut self, view: &View) -> Result<Option<Finding>, WorkError> {
        let there = match self.fsck.lookups.mounts.get(view.store_mount_id) {
            Ok(open) => ask(&open, &view.key).await,
            Err(error) => Err(error),
        };
        let detail = match there {
            Err(error) => {
                self.miss(format!("the object of the view {} cannot be looked at: {error}", view.name));
                return Ok(None);
            }
            Ok(None) => "is not in the bucket".to_owned(),
            Ok(Some((etag, bytes))) if etag != view.etag || bytes != view.object_bytes => {
                format!("is version {etag} of {bytes} bytes in the bucket")
            }
            Ok(Some(_)) => return Ok(None),
        };
        let View { name: path, key, etag, object_bytes, store_mount_id: mount_id, .. } = view.clone();
        let detail = format!("its object \"{key}\", version {etag} of {object_bytes} bytes, {detail}");
        Ok(Some(Finding { kind: FindingKind::MissingView as i32, path, mount_id, key, detail, ..Finding::default() }))
    }

    pub(super) async fn views_again(&mut self, before: &[Finding]) -> Result<Vec<Finding>, WorkError> {
        let mut found = Vec::new();
        for view in self.ready_views().await? {
            if before.iter().any(|finding| finding.path == view.name) {
                found.extend(self.judge_view(&view).await?);
            }
        }
        Ok(found)
    }

    /// What is wrong with blocks at their workers that only views have.
    async fn judge_kept(&mut self, page: KeptBlocks) -> Result<Vec<Finding>, WorkError> {
        let (mounts, cluster_id) = (self.mounts.clone(), self.fsck.cluster_id.clone());
        let known = page.into_iter().filter_map(|(block, kept)| Known::kept((&mounts, &cluster_id), block, kept));
        let known: Vec<Known> = known.collect();
        let said = self.ask(&known).await?;
        let read = self.read(move |tables| {
            let mut found = Vec::new();
            for (block, said) in known.iter().zip(&said) {
                if block.is_unchanged(tables)? {
                    block.judge(tables, said, &mut found)?;
                }
            }
            Ok(found)
        });
        read.await
    }

    /// Those of the blocks at these places of files.
    pub(super) async fn kept_again(&mut self, places: Vec<(u64, u32)>) -> Result<Vec<Finding>, WorkError> {
        let read = self.read(move |tables| {
            let mut kept = KeptBlocks::new();
            for (inode, index) in places {
                kept.extend(tables.kept_blocks(inode)?.into_iter().filter(|(block, _)| block.index == index));
            }
            Ok(kept)
        });
        let kept = read.await?;
        self.judge_kept(kept).await
    }
}
