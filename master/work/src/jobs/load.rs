//! Loads: walk a subtree, name the blocks of every file, and have the workers that own them fill them; or say what they
//! have of them ([`JobKind::Check`]); or list what is there, and no more ([`JobKind::LoadMetadata`]).
//!
//! Of a file in a cache-mode mount the blocks are those of its object. Of one in an fs-mode mount they are those of its
//! origin that no block of the file has taken the place of: the rest is at workers already, or is a hole, and counts as
//! done. A walk has no cursor: after a restart it begins anew, where filling what is already filled costs a worker one
//! look into its index.

mod blocks;
mod fill;

use std::sync::Arc;

use bytes::Bytes;
use cavern_proto::master::{Entry, Job, JobKind, Kind};
use cavern_state::records::etag;
use futures::{StreamExt as _, stream};
use tokio::sync::Semaphore;

use self::blocks::File;
use self::fill::Batches;
use super::running::RunningJob;
use crate::error::WorkError;
use crate::listing::walk::{ListPolicy, Walk};
use crate::namespace::Lookups;
use crate::workers::calls::BlockFiller;

/// Entries of a directory read at a time.
const PAGE_ENTRIES: usize = 1000;
/// Paths of a list that are looked up at a time: a directory that was never listed is listed then.
const PATHS_AT_A_TIME: usize = 16;

/// Fills blocks for all loads. Cheap to clone.
#[derive(Clone)]
pub struct Loader {
    pub(super) lookups: Lookups,
    filler: Arc<dyn BlockFiller>,
    /// Blocks in flight, over all jobs.
    blocks: Arc<Semaphore>,
    concurrency: u32,
}

impl Loader {
    pub fn new(lookups: Lookups, filler: Arc<dyn BlockFiller>, concurrency: usize) -> Self {
        let concurrency = u32::try_from(concurrency.clamp(1, 1 << 16)).unwrap_or(1);
        let lookups = Lookups { listings_only: true, ..lookups };
        Self { lookups, filler, blocks: Arc::new(Semaphore::new(concurrency as usize)), concurrency }
    }

    /// Loads what is below the path of a job. What fails is counted; an error is about the path.
    pub async fn run(&self, job: &Arc<RunningJob>) -> Result<(), WorkError> {
        let Job { path, .. } = job.snapshot();
        let mut batches = Batches::new(self.clone(), job.clone());
        let entry = self.find(job.kind, &path).await?;
        self.load(&mut batches, &entry).await?;
        job.walked();
        batches.finish().await;
        Ok(())
    }

    /// Loads what is below many paths. What fails is counted; an error is about this master.
    pub async fn run_list(&self, job: &Arc<RunningJob>, paths: Vec<String>) -> Result<(), WorkError> {
        let mut batches = Batches::new(self.clone(), job.clone());
        let found = stream::iter(paths).map(|path| async move {
            let entry = self.find(job.kind, &path).await;
            (path, entry)
        });
        let mut found = found.buffered(PATHS_AT_A_TIME);
        while let Some((path, entry)) = found.next().await {
            let loaded = match entry {
                Ok(entry) => self.load(&mut batches, &entry).await,
                Err(error) => Err(error),
            };
            match loaded {
                Ok(()) => {}
                Err(error) if error.is_of_master() => return Err(error),
                Err(error) => {
                    let error = error.to_string();
                    job.failed(&if error.contains(&path) { error } else { format!("{path}: {error}") });
                }
            }
        }
        job.walked();
        batches.finish().await;
        Ok(())
    }

    /// What a path leads to. A file that is to be loaded is known from the listing of its directory, which is renewed
    /// like those of a walk.
    async fn find(&self, kind: JobKind, path: &str) -> Result<Entry, WorkError> {
        let entry = self.lookups.resolve(path).await?;
        if kind == JobKind::Check || entry.attr.unwrap_or_default().kind() == Kind::Directory {
            return Ok(entry);
        }
        self.lookups.refresh_listings(&[entry.parent], true).await?;
        self.lookups.resolve(path).await
    }

    /// Loads a file, or what is below a directory.
    async fn load(&self, batches: &mut Batches, entry: &Entry) -> Result<(), WorkError> {
        let attr = entry.attr.unwrap_or_default();
        if attr.kind() != Kind::Directory {
            return self.load_file(batches, entry).await;
        }
        let policy = if batches.job.kind == JobKind::Check { ListPolicy::Known } else { ListPolicy::Fresh };
        let mut walk = Walk::new(self.lookups.listings.clone(), attr.inode, policy, true);
        while let Some(visited) = walk.next().await {
            match visited {
                Ok((inode, _)) => self.load_directory(batches, inode).await?,
                Err((_, error)) if error.is_of_master() => return Err(error),
                Err((_, error)) => batches.job.failed(&error.to_string()),
            }
        }
        Ok(())
    }

    async fn load_directory(&self, batches: &mut Batches, inode: u64) -> Result<(), WorkError> {
        let reader = &self.lookups.reader;
        let Some(directory) = reader.read(move |tables| Ok(tables.directory(inode)?)).await? else { return Ok(()) };
        if directory.mount_id == 0 {
            return Ok(());
        }
        let mount = self.lookups.mounts.get(directory.mount_id)?;
        let prefix = directory.key_prefix(mount.ufs.prefix()).unwrap_or_default();
        let mut after: Option<Bytes> = None;
        loop {
            let (from, prefix, is_fs_mode) = (after.take(), prefix.clone(), mount.is_fs_mode());
            let read = reader.read(move |tables| {
                let (page, end) = tables.page(inode, from.as_deref(), PAGE_ENTRIES)?;
                let last = page.last().map(|(name, _, _)| name.clone());
                let files = page.into_iter().filter(|(_, _, record)| record.kind() == Kind::File);
                let files = files.map(|(name, inode, record)| match is_fs_mode {
                    true => File::of_content(tables, inode, record),
                    false => {
                        let key = format!("{prefix}{}", String::from_utf8_lossy(&name));
                        Ok(File::of_object(key, etag(&record), record.size))
                    }
                });
                Ok((files.collect::<Result<Vec<_>, _>>()?, last, end))
            });
            let (files, last, end) = read.await?;
            for file in files {
                batches.add(&mount, file).await?;
            }
            after = last;
            if end || after.is_none() {
                return Ok(());
            }
        }
    }

    async fn load_file(&self, batches: &mut Batches, entry: &Entry) -> Result<(), WorkError> {
        let mount = self.lookups.mounts.get(entry.mount_id)?;
        let attr = entry.attr.unwrap_or_default();
        if !mount.is_fs_mode() {
            return batches.add(&mount, File::of_object(entry.key.clone(), entry.etag.clone(), attr.size)).await;
        }
        let inode = attr.inode;
        let read = self.lookups.reader.read(move |tables| {
            let record = tables.inode(inode)?.filter(|record| record.kind() == Kind::File);
            record.map(|record| File::of_content(tables, inode, record)).transpose()
        });
        match read.await? {
            Some(file) => batches.add(&mount, file).await,
            None => Ok(()),
        }
    }
}
