//! How much is below a path, by reading all of it.

use bytes::Bytes;
use cavern_proto::master::{Kind, UsageProgress};
use tokio::sync::mpsc;

use super::{Lookups, PAGE_ENTRIES, PROGRESS_INTERVAL};
use crate::error::WorkError;
use crate::listing::walk::{ListPolicy, Walk};

impl Lookups {
    /// Counts, and says now and then how far it has come.
    pub async fn usage(
        &self,
        path: &str,
        answers: &mpsc::Sender<Result<UsageProgress, WorkError>>,
    ) -> Result<UsageProgress, WorkError> {
        let mount = self.check_path_access(path)?;
        let entry = self.resolve(path).await?;
        let attr = entry.attr.unwrap_or_default();
        if attr.kind() != Kind::Directory {
            return Ok(UsageProgress { files: 1, bytes: attr.size, ..UsageProgress::default() });
        }
        // Nobody lets go of anything for whoever may not change it.
        if self.check_refresh(mount.as_ref()).is_ok() {
            self.recall_mount_of(attr.inode).await?;
        }
        let mut progress = UsageProgress::default();
        let mut walk = Walk::new(self.listings.clone(), attr.inode, ListPolicy::Known, true);
        let mut last_report = tokio::time::Instant::now();
        while let Some(visited) = walk.next().await {
            let (inode, _) = visited.map_err(|(_, error)| error)?;
            progress.directories += 1;
            let mut after: Option<Bytes> = None;
            loop {
                let from = after.take();
                let (page, end) =
                    self.reader.read(move |tables| Ok(tables.page(inode, from.as_deref(), PAGE_ENTRIES)?)).await?;
                let files = page.iter().filter(|(_, _, record)| record.kind() == Kind::File);
                for (_, _, record) in files {
                    progress.files += 1;
                    progress.bytes = progress.bytes.saturating_add(record.size);
                }
                after = page.last().map(|(name, _, _)| name.clone());
                if end || after.is_none() {
                    break;
                }
            }
            if last_report.elapsed() >= PROGRESS_INTERVAL {
                last_report = tokio::time::Instant::now();
                let _ = answers.send(Ok(progress)).await;
            }
        }
        Ok(progress)
    }
}
