//! Other attributes for a file whose content may have changed here: another length among them.

use std::ops::Range;

use bytes::Bytes;
use cavern_conf::Failpoint;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{SetAttr, User};
use rustix::io::Errno;
use tokio::time::Instant;

use super::file::FsFile;
use super::layout::{Layout, LocatedBlock};
use super::state::{Known, State};
use super::write::{BlockOp, FILE_BYTES_MAX, too_large};
use crate::error::ClientError;
use crate::metadata::Changed;
use crate::read::span::spans;

impl FsFile {
    /// Sets attributes after everything that was written before, so that a time that is set stays. No write of this
    /// client runs meanwhile.
    pub async fn set_attributes(
        &self,
        set: SetAttr,
        owner: (u32, u32),
        user: Option<&User>,
    ) -> Result<Changed, ClientError> {
        self.behind.drain().await;
        let _alone = self.gate.write().await;
        let deadline = Instant::now() + self.shared.timeout();
        match set.size {
            Some(size) if size > FILE_BYTES_MAX => return Err(too_large()),
            // Only a file that grows has something to be zeroed.
            Some(size) if size > 0 => {
                while let Err(error) = self.zero_behind_end(size, deadline).await {
                    self.fall_back_to_origin_exclusive(error, deadline).await?;
                }
            }
            _ => {}
        }
        let keeps_block = set.keeps_block && self.has_one_block_alone().await?;
        let set = SetAttr { keeps_block, ..set };
        let cut_off = self.cut_off_by(&set).await?;
        match (self.commit_exclusive().await, set.size) {
            // Only what stays must have room.
            (Err(error), Some(size)) if error.errno() == Errno::DQUOT.raw_os_error() => {
                if let Some(layout) = self.state.lock().layout_mut() {
                    layout.give_up_beyond(size, self.block_size());
                }
                self.note();
                self.commit_exclusive().await?;
            }
            (committed, _) => committed?,
        }
        Failpoint::CutBegun.pass();
        let ended = self.reader.invalidate_on_drop();
        // Before the question: what others change while it is answered may come behind it.
        let seen = self.kept.changes();
        let changed = self.shared.metadata.change_by(Change::SetAttr(set), owner, user.cloned()).await?;
        Failpoint::CutAnswered.pass();
        let block = cut_off.as_ref().map(|(index, _)| *index);
        let (ends_in, is_alone) = self.apply_length(&set, (&changed, seen), block);
        // What was read meanwhile is of the layout before.
        drop(ended);
        self.note();
        // Of what somebody else may have written meanwhile nothing is cut off.
        let Some(((index, bytes), generation)) = cut_off.zip(ends_in).filter(|_| is_alone || !set.keeps_block) else {
            return Ok(changed);
        };
        let how = if is_alone { BlockOp::Cut } else { BlockOp::Zero };
        if let Err(error) = self.clear_cut_off((index, generation), &bytes, &how).await {
            tracing::warn!(
                inode = self.inode,
                index,
                "what was cut off stays behind the end of the file: a loss of power may show it when the file has \
                 grown again: {error}"
            );
        }
        Ok(changed)
    }

    /// Takes in the length that was set, and how often others had changed the file by when that was asked for. Gives
    /// the generation of a block, if the file has it still, and whether nobody else has changed the file, or may write
    /// to it.
    fn apply_length(
        &self,
        set: &SetAttr,
        (changed, seen_before): (&Changed, u64),
        block: Option<u32>,
    ) -> (Option<u32>, bool) {
        let (Some(size), Some(attr)) = (set.size, changed.attr_of(self.inode)) else { return (None, false) };
        let mut state = self.state.lock();
        let State { known, seen, .. } = &mut *state;
        let Some(Known { layout, blocks, .. }) = known else {
            // Nothing of it is left.
            if size == 0 {
                *known = Some(Known { layout: Layout::without_blocks(attr), ..Known::default() });
                *seen = seen_before;
            }
            self.shared.pages.forget(self.inode);
            return (None, false);
        };
        let before = layout.version();
        let is_next = layout.cut(attr, self.block_size());
        if is_next {
            self.shared.pages.advance(self.inode, before, attr.version);
        } else {
            // Somebody else has changed it, too.
            *seen = u64::MAX;
            self.shared.pages.forget(self.inode);
        }
        blocks.retain(|index, _| layout.block(*index).is_some());
        let generation = block.and_then(|index| layout.block(index)).map(|block| block.generation);
        (generation, is_next && changed.result.is_alone)
    }

    /// Whether the file, which is not empty, has its first block and no other, which can be cut off where it is.
    async fn has_one_block_alone(&self) -> Result<bool, ClientError> {
        let placement = self.shared.pool.placement();
        let is_fit = |(index, known): (u32, &LocatedBlock)| {
            let is_own = !known.is_joined && !self.is_frozen(known.generation);
            index == 0 && is_own && known.workers.iter().all(|worker| placement.is_live(*worker))
        };
        let look = |Known { layout, .. }: &mut Known| {
            layout.size() > 0 && layout.block(0).is_some() && layout.blocks().all(is_fit)
        };
        self.use_known(look).await
    }

    /// What the last block that stays has behind the length that the file is about to get.
    async fn cut_off_by(&self, set: &SetAttr) -> Result<Option<(u32, Range<u32>)>, ClientError> {
        if set.keeps_block {
            return Ok(Some((0, 0..self.block_length())));
        }
        let block_size = self.block_size();
        let Some(length) = set.size.filter(|length| !length.is_multiple_of(block_size)) else { return Ok(None) };
        let size = self.written_size().await?;
        let last = spans(length..size.max(length), block_size, u64::MAX).next();
        Ok(last.map(|span| (span.index, span.bytes)))
    }

    /// Drops what was cut off a block of this generation, on the disks of its workers as well. Who lengthens the file
    /// makes it zeros, too, or writes over it; but the length may be on the master's disk before either is on a
    /// worker's. Waits for a worker no longer than a request to it may take.
    async fn clear_cut_off(
        &self,
        (index, generation): (u32, u32),
        bytes: &Range<u32>,
        how: &BlockOp,
    ) -> Result<(), ClientError> {
        let deadline = Instant::now() + self.shared.worker_timeout();
        loop {
            match self.try_to_clear((index, generation), bytes, how).await {
                Ok(true) => return self.sync_blocks(&[index], deadline).await,
                Ok(false) => return Ok(()),
                Err(failure) => self.wait_after(index, failure, deadline).await?,
            }
        }
    }

    /// False when the block is another by now, or a view has it: who lengthens the file makes another, and zeros there.
    async fn try_to_clear(
        &self,
        (index, generation): (u32, u32),
        bytes: &Range<u32>,
        how: &BlockOp,
    ) -> Result<bool, ClientError> {
        self.pin_blocks().await?;
        let is_it = |known: &mut Known| known.layout.block(index).is_some_and(|known| known.generation == generation);
        if !self.use_known(is_it).await? || self.is_frozen(generation) {
            return Ok(false);
        }
        let _ended = self.reader.invalidate_on_drop();
        // Nothing is written, but what is open to be written is.
        let open = self.block_to_write(index, &(bytes.start..bytes.start + 1), Some(&Bytes::new())).await?;
        if open.generation != generation {
            return Ok(false);
        }
        self.apply_in_place(index, &open, bytes, how).await?;
        Ok(true)
    }
}
