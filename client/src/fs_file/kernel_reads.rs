//! Files that a kernel reads by itself (passthrough): of one block, whose file on this host ends where they do.
//!
//! The kernel knows nothing of a file's length then: it reads the file of the block up to that one's end. So both ends
//! are compared when the file is opened: with a descriptor, or, where the kernel knows the block's file from an earlier
//! open, by the version that the file had then. A file that only the bucket has is read from the cached block of its
//! object, by the rules for objects.
//!
//! What is written to a block in its place shows at once to whoever reads so. It does not show when the file gets
//! another block, since the kernel goes on with the one that it has. An open gets another way to read then; of a handle
//! that stays open, whoever must know asks ([`reads_current`](FsFile::reads_current)).

use std::any::Any;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use cavern_net::Route;
use cavern_proto::BlockId;
use cavern_proto::master::Origin;

use super::block::OpenBlock;
use super::file::FsFile;
use super::read::id_of;
use super::state::Known;
use crate::error::ClientError;
use crate::read::WholeFile;

/// What a kernel reads in place of a file: two that are equal have the same bytes, for as long as nobody writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KernelBlock {
    /// Of the file's first block, or of the file without blocks.
    pub generation: u32,
    /// That has the block; 0 for a block of the file's object in the bucket.
    pub worker: u64,
    /// Of the block's file at the worker; of an object, the version of the content that it has.
    pub incarnation: u64,
}

/// A kernel may read the file by itself as long as this is there: nothing that is written to it here waits for being
/// sent.
pub struct KernelReads {
    file: Arc<FsFile>,
}

impl Drop for KernelReads {
    fn drop(&mut self) {
        self.file.behind.kernel_reads_end();
    }
}

/// What has all bytes of a file, as the master knows all of it and nobody has changed it since.
enum Whole {
    Block {
        id: BlockId,
        generation: u32,
        version: u64,
        size: u64,
        open: Option<Arc<OpenBlock>>,
        /// One of its workers is on this host.
        is_here: bool,
    },
    /// The block of an object; with the generation of the file.
    Object(Origin, u32),
}

impl FsFile {
    /// A kernel reads it by itself, as long as this is there.
    pub fn begin_kernel_reads(self: &Arc<Self>) -> KernelReads {
        self.behind.kernel_reads_begin();
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
        match self.whole()? {
            Whole::Block { id, generation, version, size, open, .. } => {
                let mut replicas = open.iter().flat_map(|open| &open.replicas);
                let local =
                    replicas.find_map(|replica| Some((replica.file.as_deref()?, replica.worker, replica.incarnation)));
                let whole = WholeFile { block: id, version, size, local };
                let (kept, worker, incarnation) = self.shared.files.descriptors().registered_whole(&whole, make)?;
                Some((KernelBlock { generation, worker, incarnation }, kept, reads))
            }
            Whole::Object(origin, generation) => {
                let kept = self.origin_file(&origin).ok()?.with_local_descriptor(make)?;
                Some((KernelBlock { generation, worker: 0, incarnation: origin.version }, kept, reads))
            }
        }
    }

    fn whole(&self) -> Option<Whole> {
        if self.mount.is_strict() || !self.kept.is_watched() || !self.behind.is_drained() {
            return None;
        }
        let look = |Known { layout, blocks, .. }: &mut Known| {
            let (version, size) = (layout.version(), layout.size());
            if !layout.is_committed() || !(1..=self.block_size()).contains(&size) {
                return None;
            }
            let Some(known) = layout.block(0) else {
                let origin = layout.origin().filter(|origin| (origin.valid, origin.length) == (size, size))?;
                return Some(Whole::Object(origin.clone(), layout.generation()));
            };
            let is_local = |worker: &u64| self.shared.pool.known_route(*worker) == Route::Local;
            let generation = known.generation;
            (known.is_committed && !known.is_urgent).then(|| Whole::Block {
                id: id_of(&self.name_of(0, generation)),
                generation,
                version,
                size,
                open: blocks.get(&0).filter(|open| known.is_at(open.generation, &open.replicas)).cloned(),
                is_here: known.workers.iter().any(is_local),
            })
        };
        self.with_known(look).flatten()
    }

    /// Whether it takes a question to find the file of its one block, and there may be one on this host.
    pub fn awaits_block(&self) -> bool {
        if self.mount.is_strict() || !self.kept.is_watched() {
            return false;
        }
        if self.with_known(|_| ()).is_none() {
            let pool = &self.shared.pool;
            return pool.placement().workers().iter().any(|worker| pool.known_route(worker.id) == Route::Local);
        }
        match self.whole() {
            Some(Whole::Block { id, version, open: None, is_here: true, .. }) => {
                !self.shared.files.descriptors().has_whole(&id, version)
            }
            Some(Whole::Object(origin, _)) => self.origin_file(&origin).is_ok_and(|object| object.may_be_local()),
            _ => false,
        }
    }

    /// Asks where the bytes of the file are, and the worker of this host for its one block. What cannot be had is asked
    /// for again when the file is read.
    ///
    /// # Errors
    /// Those of a read.
    pub async fn find_block(&self) -> Result<(), ClientError> {
        self.use_known(|_| ()).await?;
        if self.awaits_block() {
            match self.whole() {
                Some(Whole::Block { .. }) => drop(self.open_to_read(0).await?),
                Some(Whole::Object(origin, _)) => self.origin_file(&origin)?.make_present().await?,
                None => {}
            }
        }
        Ok(())
    }

    /// Whether the file's bytes are in that block still, all of them, as far as others have told of what they changed.
    ///
    /// # Errors
    /// The master does not say.
    pub async fn reads_current(&self, read: &KernelBlock) -> Result<bool, ClientError> {
        let look = |Known { layout, .. }: &mut Known| match layout.block(0) {
            Some(known) => {
                let is_it = (known.generation, layout.size() <= self.block_size()) == (read.generation, true);
                is_it && known.workers.contains(&read.worker)
            }
            None => layout.origin().is_some_and(|origin| {
                (read.worker, read.incarnation, origin.valid) == (0, origin.version, layout.size())
            }),
        };
        self.use_known(look).await
    }
}
