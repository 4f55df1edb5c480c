//! Bringing a path up to date with its bucket because somebody asks for it.

use std::ops::ControlFlow;

use bytes::Bytes;
use cavern_proto::master::{Entry, Kind, RefreshProgress};
use cavern_state::namespace::ListingCounts;
use tokio::sync::mpsc;

use super::{Lookups, PROGRESS_INTERVAL};
use crate::error::WorkError;
use crate::listing::CheckReason;
use crate::listing::walk::{ListPolicy, Walk};

impl Lookups {
    /// Brings what is below a path of a cache-mode mount up to date with its bucket, and says now and then how far it
    /// has come. All clients know of it when this returns.
    pub async fn refresh(
        &self,
        path: &str,
        recursive: bool,
        answers: &mpsc::Sender<Result<RefreshProgress, WorkError>>,
    ) -> Result<RefreshProgress, WorkError> {
        let mut progress = RefreshProgress::default();
        let (directory, name) = self.refresh_target(path).await?;
        match name {
            Some(name) => {
                self.listings.refresh_name(directory, &name, CheckReason::Unknown).await?;
                progress.entries = 1;
            }
            None => {
                let mut walk = Walk::new(self.listings.clone(), directory, ListPolicy::Refreshed, recursive);
                let mut last_report = tokio::time::Instant::now();
                let mut failure = None;
                while let Some(visited) = walk.next().await {
                    match visited {
                        Ok((inode, counts)) => self.count_refreshed(inode, counts, &mut progress).await?,
                        Err((_, error)) => failure = failure.or(Some(error)),
                    }
                    if last_report.elapsed() >= PROGRESS_INTERVAL {
                        last_report = tokio::time::Instant::now();
                        let _ = answers.send(Ok(progress.clone())).await;
                    }
                }
                if let Some(error) = failure {
                    return Err(error);
                }
                if progress.directories == 0 {
                    return Err(WorkError::NotFound(format!("{path} is gone since its listing began")));
                }
            }
        }
        self.watch.wait_acknowledged(self.watch.seq()).await;
        Ok(progress)
    }

    /// The directory of an fs-mode mount that a path leads to, or the directory above it and the name in it.
    pub async fn fs_mode_target(&self, path: &str) -> Result<Option<(u64, Option<Bytes>)>, WorkError> {
        let (entry, name) = match self.resolve(path).await {
            Ok(entry) if entry.attr.unwrap_or_default().kind() == Kind::Directory => (entry, None),
            Ok(entry) => (self.get_inode(entry.parent).await?, Some(entry.name)),
            Err(error) if error.is_not_found() => {
                let (above, name) = self.resolve_above(path, error).await?;
                (above, Some(name))
            }
            Err(error) => return Err(error),
        };
        let is_fs_mode = entry.mount_id != 0 && self.mounts.get(entry.mount_id)?.is_fs_mode();
        Ok(is_fs_mode.then_some((entry.attr.unwrap_or_default().inode, name)))
    }

    /// The directory above a path that was not found, and the name in it.
    async fn resolve_above(&self, path: &str, error: WorkError) -> Result<(Entry, Bytes), WorkError> {
        let (above, name) = path.trim_end_matches('/').rsplit_once('/').ok_or(error)?;
        let above = self.resolve(if above.is_empty() { "/" } else { above }).await?;
        Ok((above, Bytes::copy_from_slice(name.as_bytes())))
    }

    /// The directory to refresh, or the directory and the one name in it.
    async fn refresh_target(&self, path: &str) -> Result<(u64, Option<Bytes>), WorkError> {
        let entry = match self.resolve(path).await {
            Ok(entry) => entry,
            Err(error) if error.is_not_found() => {
                // It may have appeared in the bucket since: the directory above knows, once it is asked.
                let (above, name) = self.resolve_above(path, error).await?;
                let parent = above.attr.unwrap_or_default().inode;
                let found = self.revalidate(parent, &name, CheckReason::Unknown).await;
                found.map_err(|error| match error.is_not_found() {
                    true => WorkError::NotFound(format!("{path} is not there, and its bucket does not have it")),
                    false => error,
                })?
            }
            Err(error) => return Err(error),
        };
        let attr = entry.attr.unwrap_or_default();
        Ok(match attr.kind() {
            Kind::Directory => (attr.inode, None),
            _ => (entry.parent, Some(entry.name)),
        })
    }

    async fn count_refreshed(
        &self,
        inode: u64,
        counts: ListingCounts,
        progress: &mut RefreshProgress,
    ) -> Result<(), WorkError> {
        progress.directories += 1;
        progress.added += counts.added;
        progress.changed += counts.changed;
        progress.removed += counts.removed;
        progress.hidden += counts.hidden;
        let read = self.reader.read(move |tables| {
            let mut entries = 0;
            tables.scan::<()>(inode, None, |_, _| {
                entries += 1;
                Ok(ControlFlow::Continue(()))
            })?;
            Ok(entries)
        });
        progress.entries += read.await?;
        Ok(())
    }
}
