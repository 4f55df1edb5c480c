//! Files beside one that is opened for the first time. Whoever reads the files of a directory, in whatever order, asks
//! the master where the bytes of many are when it wants one, and the worker of this host for their descriptors: most
//! are known when they are opened. Those that come next in the order of names are asked for, as many as
//! `prefetch_windows` says.

use std::collections::HashMap;
use std::sync::Arc;

use cavern_net::Route;
use cavern_proto::BlockId;
use cavern_proto::data::{BlockRef, open_request};
use cavern_proto::master;

use super::block::block_name;
use super::file::FsFile;
use super::layout::Layout;
use super::layout_cache::{CachedLayout, ChangeCount, LocalBlock};
use super::open_file_table::Shared;
use super::prefetch_window::PrefetchWindow;
use crate::error::ClientError;
use crate::metadata::InvalidationMark;
use crate::mounts::MountView;
use crate::read::fetch::check_status;

/// What is being asked for beside a file.
pub(super) struct Prefetch {
    pub inodes: Vec<u64>,
    window: Arc<PrefetchWindow>,
    mark: InvalidationMark,
    moment: ChangeCount,
}

impl FsFile {
    /// What is to be asked for beside this file, which is wanted for the first time.
    pub(super) fn plan_prefetch(&self) -> Option<Prefetch> {
        let shared = &self.shared;
        let moment = shared.layout_cache.moment();
        let mut window = None;
        let found = shared
            .metadata
            .files_after(self.inode, |directory| window.insert(shared.prefetch_windows.of(directory)).wanted())?;
        let mut inodes = found.inodes;
        let open = shared.open.lock();
        inodes.retain(|inode| !open.contains_key(inode) && !shared.layout_cache.knows(*inode));
        drop(open);
        Some(Prefetch { inodes, window: window?, mark: found.mark, moment }).filter(|found| !found.inodes.is_empty())
    }

    /// The master has answered: the rest is done by nobody who waits for it.
    pub(super) fn finish_prefetch(&self, prefetch: Prefetch, layouts: Vec<master::Layout>) {
        if layouts.is_empty() {
            return;
        }
        let (shared, mount) = (self.shared.clone(), self.mount.clone());
        self.shared.runtime.spawn(async move { shared.cache_prefetched(prefetch, layouts, &mount).await });
    }
}

impl Shared {
    async fn cache_prefetched(&self, prefetch: Prefetch, layouts: Vec<master::Layout>, mount: &Arc<MountView>) {
        let Prefetch { inodes, window, mark, moment } = prefetch;
        let known = |layout: master::Layout| {
            let (attr, ends_marked) = (layout.attr?, layout.ends_marked);
            let is_wanted = layout.block_size == mount.block_size() && inodes.contains(&attr.inode);
            let layout = Layout::new(&attr, layout.extents, layout.origin).known().filter(|_| is_wanted)?;
            let (blocks, ahead) = (self.layout_cache.no_blocks(), Some(window.clone()));
            Some((attr.inode, CachedLayout { layout, ends_marked, blocks, ahead }))
        };
        let mut found: HashMap<u64, CachedLayout> = layouts.into_iter().filter_map(known).collect();
        self.open_ahead(mount, &mut found).await;
        // From here on nobody opens or closes any.
        let open = self.open.lock();
        let has_changed = self.metadata.has_changed_since(mark);
        found.retain(|inode, _| !open.contains_key(inode) && !has_changed(*inode));
        self.layout_cache.add(moment, found);
    }

    /// Opens the blocks of those that have one alone, and have it on this host. What cannot be had is asked for when it
    /// is needed.
    async fn open_ahead(&self, mount: &MountView, found: &mut HashMap<u64, CachedLayout>) {
        let mut at_workers: HashMap<u64, Vec<(u64, BlockRef)>> = HashMap::new();
        for (inode, file) in &*found {
            let Some((index, generation, workers)) = file.layout.only_block() else { continue };
            let local = workers.iter().find(|worker| self.pool.known_route(**worker) == Route::Local);
            let Some(local) = local else { continue };
            let name = block_name(&self.pool, mount, (*inode, generation, index));
            at_workers.entry(*local).or_default().push((*inode, name));
        }
        for (worker, blocks) in at_workers {
            if let Err(error) = self.open_at(worker, blocks, found).await {
                tracing::debug!(worker, "blocks are opened when they are needed: {error}");
            }
        }
    }

    async fn open_at(
        &self,
        worker: u64,
        blocks: Vec<(u64, BlockRef)>,
        found: &mut HashMap<u64, CachedLayout>,
    ) -> Result<(), ClientError> {
        let item = |(_, name): &(u64, BlockRef)| open_request::Item { block: Some(name.clone()), want: Vec::new() };
        let items = blocks.iter().map(item).collect();
        let (reply, files) = self.pool.open(worker, items, self.worker_timeout()).await?;
        let mut files = files.into_iter();
        for ((inode, name), item) in blocks.into_iter().zip(reply.items) {
            if let Err(error) = check_status(worker, item.status(), &item.message) {
                tracing::debug!(inode, "a block is not opened ahead: {error}");
                continue;
            }
            let (Some(file), Some(block)) = (files.next(), BlockId::of(&name)) else { break };
            if let Some(known) = found.get_mut(&inode) {
                let incarnation = item.incarnation;
                known.blocks.push(LocalBlock { block, worker, incarnation, file: Some(file) });
            }
        }
        Ok(())
    }
}
