//! Files that a kernel reads by itself (passthrough): of one block, whose file on this host ends where they do.
//!
//! The kernel knows nothing of a file's length then: it reads the file of the block up to that one's end. So both ends
//! are compared when the file is opened: with a descriptor, or, where the kernel knows the block's file from an earlier
//! open, by the version that the file had then.
//!
//! What is written to a block in its place shows at once to whoever reads so. It does not show when the file gets
//! another block, or a second one, since the kernel goes on with the one that it has. An open gets another way to read
//! then; of a handle that stays open, whoever must know asks ([`reads_current`](FsFile::reads_current)).

use std::any::Any;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use cavern_net::Route;
use cavern_proto::BlockId;
use cavern_proto::journal::KernelBlock;

use super::block::OpenBlock;
use super::file::FsFile;
use super::read::id_of;
use super::state::Known;
use crate::error::ClientError;
use crate::read::WholeFile;

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

/// The block that has all bytes of a file.
struct Whole {
    id: BlockId,
    generation: u32,
    /// Of the file, if the master knows all of it.
    version: Option<u64>,
    size: u64,
    replicas: Vec<(u64, u32)>,
    open: Option<Arc<OpenBlock>>,
}

impl FsFile {
    /// A kernel reads it by itself, as long as this is there.
    pub fn begin_kernel_reads(self: &Arc<Self>) -> KernelReads {
        self.behind.kernel_reads_begin();
        KernelReads { file: Arc::clone(self) }
    }

    /// The file of its one block, if a kernel may read that by itself, and what is kept with it: see
    /// [`OpenFile::with_local_descriptor`](crate::read::OpenFile::with_local_descriptor). Without a question: see
    /// [`find_block`](Self::find_block). What `others` read here, whoever opens it may read although it is being
    /// written to.
    pub fn kernel_block<T: Any + Send + Sync>(
        self: &Arc<Self>,
        others: Option<&KernelBlock>,
        make: impl FnOnce(BorrowedFd<'_>) -> Option<T>,
    ) -> Option<(KernelBlock, Arc<T>, KernelReads)> {
        // Before the look: what is taken to be written behind from now on is written at once.
        let reads = self.begin_kernel_reads();
        let whole = self.whole().filter(|whole| whole.version.is_some() || others.is_some())?;
        let Whole { id, generation, version, size, replicas, open } = &whole;
        let mut at_workers = open.iter().flat_map(|open| &open.replicas);
        let local = at_workers.find_map(|at| Some((at.file.as_deref()?, (at.worker, at.joined), at.incarnation)));
        let whole = WholeFile { block: *id, version: *version, size: *size, replicas, local };
        let kept = self.shared.files.descriptors().registered_whole(&whole, make)?;
        let (worker, joined) = kept.replica;
        let block = KernelBlock { generation: *generation, worker, joined, incarnation: kept.incarnation };
        Some((block, kept.what, reads))
    }

    fn whole(&self) -> Option<Whole> {
        if self.mount.is_strict() || !self.kept.is_watched() || !self.behind.is_drained() {
            return None;
        }
        let look = |Known { layout, blocks, .. }: &mut Known| {
            let size = layout.size();
            let known = layout.block(0).filter(|known| known.is_committed && !known.is_urgent)?;
            (1..=self.block_size()).contains(&size).then(|| Whole {
                id: id_of(&self.name_of(0, known.generation)),
                generation: known.generation,
                version: layout.is_committed().then(|| layout.version()),
                size,
                replicas: known.replicas().collect(),
                open: blocks.get(&0).filter(|open| known.is_at(open.generation, &open.replicas)).cloned(),
            })
        };
        self.with_known(look).flatten()
    }

    /// Whether it takes a question to find the file of its one block, and there may be one on this host.
    pub fn awaits_block(&self) -> bool {
        let pool = &self.shared.pool;
        let is_local = |worker: u64| pool.known_route(worker) == Route::Local;
        if self.mount.is_strict() || !self.kept.is_watched() {
            return false;
        }
        if self.with_known(|_| ()).is_none() {
            return pool.placement().workers().iter().any(|worker| is_local(worker.id));
        }
        self.whole().is_some_and(|Whole { id, version, replicas, open, .. }| {
            let is_kept = version.is_some_and(|version| self.shared.files.descriptors().has_whole(&id, version));
            open.is_none() && !is_kept && replicas.iter().any(|(worker, _)| is_local(*worker))
        })
    }

    /// Asks where the bytes of the file are, and the worker of this host for its one block. What cannot be had is asked
    /// for again when the file is read.
    ///
    /// # Errors
    /// Those of a read.
    pub async fn find_block(&self) -> Result<(), ClientError> {
        self.use_known(|_| ()).await?;
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
        let look = |Known { layout, .. }: &mut Known| {
            layout.size() <= self.block_size()
                && layout.block(0).is_some_and(|known| {
                    let mut replicas = known.replicas();
                    known.generation == read.generation && replicas.any(|at| at == (read.worker, read.joined))
                })
        };
        self.use_known(look).await
    }
}
