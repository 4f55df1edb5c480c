//! Files that a kernel reads by itself (passthrough): of one block, whose file on this host ends where they do.
//!
//! The kernel knows nothing of a file's length then: it reads the file of the block up to that one's end. So both ends
//! are compared when the file is opened: with a descriptor, or, where the kernel knows the block's file from an earlier
//! open, by the version that the file had then. What is written to a block in its place shows at once to whoever reads
//! so. It does not show when the file gets another block, since the kernel goes on with the one that it has. An open
//! gets another way to read then; of a handle that stays open, whoever must know asks
//! ([`reads_current`](FsFile::reads_current)).

use std::any::Any;
use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use cavern_net::Route;
use cavern_proto::BlockId;

use super::FsFile;
use super::block::OpenBlock;
use super::layout::Layout;
use super::read::id_of;
use crate::error::ClientError;
use crate::read::WholeFile;

/// The first block of a file, whose own file a kernel reads in place of that.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KernelBlock {
    /// Of the block.
    pub generation: u32,
    pub worker: u64,
    /// Of the block's file at the worker.
    pub incarnation: u64,
}

/// A kernel may read the file by itself as long as this is there: nothing that is written to it here waits for being
/// sent.
pub struct KernelReads {
    file: Arc<FsFile>,
}

impl Drop for KernelReads {
    fn drop(&mut self) {
        self.file.kernel_reads.fetch_sub(1, Ordering::AcqRel);
    }
}

/// What is known of the one block of a file.
struct OnlyBlock {
    id: BlockId,
    generation: u32,
    version: u64,
    size: u64,
    open: Option<Arc<OpenBlock>>,
}

impl FsFile {
    /// Whether a kernel reads it by itself.
    pub(super) fn is_read_by_kernel(&self) -> bool {
        self.kernel_reads.load(Ordering::Acquire) > 0
    }

    /// A kernel reads it by itself, as long as this is there.
    pub fn begin_kernel_reads(self: &Arc<Self>) -> KernelReads {
        self.kernel_reads.fetch_add(1, Ordering::AcqRel);
        KernelReads { file: Arc::clone(self) }
    }

    /// A kernel has pages of the file from times that nobody has followed: none of them are kept at the next open.
    pub fn forget_pages(&self) {
        self.shared.pages.forget(self.inode);
    }

    /// The file of its one block, if a kernel may read that by itself, and what is kept with it: see
    /// [`OpenFile::with_local_descriptor`](crate::read::OpenFile::with_local_descriptor). Without a question: see
    /// [`find_block`](Self::find_block).
    pub fn kernel_block<T: Any + Send + Sync>(
        self: &Arc<Self>,
        make: impl FnOnce(BorrowedFd<'_>) -> Option<T>,
    ) -> Option<(KernelBlock, Arc<T>, KernelReads)> {
        // Before the look: what is taken to be written behind from now on is written at once.
        let reads = self.begin_kernel_reads();
        let OnlyBlock { id, generation, version, size, open } = self.only_block()?;
        let local = open
            .as_ref()
            .and_then(|open| open.replicas.iter().find_map(|replica| Some((replica, replica.file.as_deref()?))));
        let local = local.map(|(replica, file)| (file, replica.worker, replica.incarnation));
        let (kept, worker, incarnation) =
            self.shared.closed.block_files().kept_of(&WholeFile { block: id, version, size, local }, make)?;
        Some((KernelBlock { generation, worker, incarnation }, kept, reads))
    }

    /// The one block of the file, as the master knows all of it and nobody has changed it since.
    fn only_block(&self) -> Option<OnlyBlock> {
        if self.mount.is_strict() || !self.kept.is_watched() || !self.behind.is_drained() {
            return None;
        }
        let look = |layout: &mut Layout, blocks: &mut HashMap<u32, Arc<OpenBlock>>| {
            let known = layout.block(0).filter(|known| known.is_committed && !known.is_urgent)?;
            if !layout.is_committed() || !(1..=self.block_size()).contains(&layout.size()) {
                return None;
            }
            let open = blocks.get(&0).filter(|open| known.is_at(open.generation, &open.replicas)).cloned();
            let (generation, version, size) = (known.generation, layout.version(), layout.size());
            Some(OnlyBlock { id: id_of(&self.name_of(0, generation)), generation, version, size, open })
        };
        self.with_layout(look).flatten()
    }

    /// Whether it takes a question to find the file of its one block, and there may be one on this host.
    pub fn awaits_block(&self) -> bool {
        if self.mount.is_strict() || !self.kept.is_watched() {
            return false;
        }
        if self.with_layout(|_, _| ()).is_none() {
            let pool = &self.shared.pool;
            return pool.placement().workers().iter().any(|worker| pool.known_route(worker.id) == Route::Local);
        }
        let Some(OnlyBlock { id, version, open: None, .. }) = self.only_block() else { return false };
        !self.shared.closed.block_files().has_kept(&id, version) && self.is_at_local_worker()
    }

    fn is_at_local_worker(&self) -> bool {
        let pool = &self.shared.pool;
        let is_local = |layout: &mut Layout, _: &mut _| {
            let workers = layout.block(0).map(|known| known.workers.as_slice()).unwrap_or_default();
            workers.iter().any(|worker| pool.known_route(*worker) == Route::Local)
        };
        self.with_layout(is_local).unwrap_or(false)
    }

    /// Asks where the bytes of the file are, and the worker of this host for its one block. What cannot be had is asked
    /// for again when the file is read.
    ///
    /// # Errors
    /// Those of a read.
    pub async fn find_block(&self) -> Result<(), ClientError> {
        self.use_layout(|_, _| ()).await?;
        if self.awaits_block() {
            self.open_to_read(0).await?;
        }
        Ok(())
    }

    /// Whether the file's bytes are in that block still, all of them, as far as others have told of what they changed.
    ///
    /// # Errors
    /// The master does not say.
    pub async fn reads_current(&self, read: &KernelBlock) -> Result<bool, ClientError> {
        let look = |layout: &mut Layout, _: &mut _| {
            let known = layout.block(0).filter(|known| known.generation == read.generation)?;
            Some(known.workers.contains(&read.worker) && layout.size() <= self.block_size())
        };
        Ok(self.use_layout(look).await?.unwrap_or(false))
    }
}
