//! What "on disk" takes: the bytes of a data block, and its name.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use cavern_conf::Failpoint;

use super::block::DataBlock;
use super::{DataStore, DataTarget};
use crate::store::error::StoreError;
use crate::store::table::Touch;

impl DataStore {
    /// Returns when everything written to these blocks is on disk, and their existence with it. *Blocking*.
    ///
    /// # Errors
    /// One of them is not here, or the disk failed.
    pub fn sync(&self, targets: &[DataTarget]) -> Result<(), StoreError> {
        let find = |target| self.find(target, Touch::None);
        let blocks: Vec<Arc<DataBlock>> = targets.iter().map(find).collect::<Result<_, _>>()?;
        self.sync_blocks(&blocks)
    }

    /// Syncs blocks at hand. *Blocking*.
    ///
    /// # Errors
    /// The disk failed.
    pub(crate) fn sync_blocks(&self, blocks: &[Arc<DataBlock>]) -> Result<(), StoreError> {
        let mut unnamed: Vec<&DataBlock> = Vec::new();
        for block in blocks {
            if block.state().syncs_fail() {
                let source = io::Error::other("an earlier sync of this block failed, and what was lost cannot be told");
                return Err(StoreError::Io { action: "syncing a data block", source });
            }
            if let Err(source) = rustix::fs::fdatasync(block.descriptor()) {
                return Err(self.note_failed_sync(block, source.into()));
            }
            Failpoint::BlockSynced.pass();
            if !block.state().name_synced.load(Ordering::Acquire) {
                unnamed.push(block);
            }
        }
        let folders: BTreeSet<&Path> = unnamed.iter().filter_map(|block| block.path().parent()).collect();
        for folder in folders {
            if let Err(source) = File::open(folder).and_then(|folder| folder.sync_all()) {
                tracing::error!(folder = %folder.display(), error = %source, "a folder of data blocks could not be \
                    synced");
                let action = "syncing a folder of data blocks";
                return Err(match unnamed.iter().find(|block| block.path().parent() == Some(folder)) {
                    Some(block) => self.table.disk_failed(block, action, source),
                    None => StoreError::Io { action, source },
                });
            }
        }
        Failpoint::FolderSynced.pass();
        self.table.metrics.syncs.inc_by(blocks.len() as u64);
        for block in unnamed {
            block.state().name_synced.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// A client could not sync a block through the descriptor that it has of it: from now on it cannot be synced. The
    /// word of a client is about this block. Whether its disk has failed is for this host's kernel to say: the block is
    /// given the first time, for [`Self::ask_disk_of`]. *Blocking*, unless it is open.
    ///
    /// # Errors
    /// It is not here.
    pub fn sync_failed_elsewhere(&self, target: &DataTarget) -> Result<Option<Arc<DataBlock>>, StoreError> {
        let block = self.find(target, Touch::None)?;
        if block.state().fail_syncs() {
            return Ok(None);
        }
        if let Some(suppressed) = self.unsynced.admit(()) {
            tracing::warn!(block = %block.id(), file = %block.path().display(), suppressed,
                "a client could not sync a block of an fs-mode file: what was written to it may be lost");
        }
        Ok(Some(block))
    }

    /// Looks whether the disk of a block has failed, as a client says. *Blocking*.
    pub fn ask_disk_of(&self, block: &DataBlock) {
        if let Err(source) = rustix::fs::fdatasync(block.descriptor()) {
            self.table.disk_failed(block, "syncing a data block", source.into());
        }
    }

    fn note_failed_sync(&self, block: &DataBlock, source: io::Error) -> StoreError {
        block.state().fail_syncs();
        tracing::error!(block = %block.id(), file = %block.path().display(), error = %source,
            "a block of an fs-mode file could not be synced: what was written to it may be lost on this disk");
        self.table.disk_failed(block, "syncing a data block", source)
    }
}
