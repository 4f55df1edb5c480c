//! Writing to a file that is staged: at any place, cutting it, and what becomes of bytes that were sent ahead.

use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use bytes::Bytes;
use rustix::io::Errno;
use tokio::time::Instant;

use super::file::StagedFile;
use super::names::refuse;
use super::parts::OBJECT_BYTES_MAX;
use super::read::PIECE_BYTES;
use super::staging_budget::punch;
use crate::error::ClientError;

/// Staged ranges of one file at most, each some 50 bytes of memory; beyond that what lies between them is fetched.
const RANGES_MAX: usize = 16_384;

impl StagedFile {
    /// Writes without waiting, for event loops; `None`: use `write`.
    pub fn write_now(self: &Arc<Self>, offset: u64, bytes: &[u8], writer: Option<u64>) -> Option<()> {
        let _writing = self.gate.try_read().ok()?;
        let range = range_of(offset, bytes.len()).ok()?;
        let file = self.file.lock().clone()?;
        if self.check_write(&range).is_err() || self.state.lock().layout.staged.count() >= RANGES_MAX {
            return None;
        }
        let room = bytes.len() as u64;
        if !self.shared.room.try_take(room) {
            return None;
        }
        if file.write_all_at(bytes, offset).is_err() {
            self.shared.room.give(room);
            return None;
        }
        self.wrote(range, writer);
        self.send_ahead();
        Some(())
    }

    /// Writes all of `bytes` at `offset`. Bounded by `client.read_timeout`, but for an upload of the file that is under
    /// way. The writer is named as whoever flushes the file is.
    pub async fn write(self: &Arc<Self>, offset: u64, bytes: Bytes, writer: Option<u64>) -> Result<(), ClientError> {
        let range = range_of(offset, bytes.len())?;
        if range.is_empty() {
            return Ok(());
        }
        if self.state.lock().layout.staged.count() >= RANGES_MAX {
            self.join_ranges().await?;
        }
        let room = bytes.len() as u64;
        if !self.shared.room.take(room, Instant::now() + self.shared.timeout()).await {
            let reason = format!(
                "{}: what may be staged on this host (client.staging_size) is used up, and the bucket takes nothing \
                 off it",
                self.node()
            );
            return refuse(Errno::NOSPC, reason);
        }
        let _writing = self.gate.read().await;
        let written = match self.check_write(&range) {
            Ok(()) => self.with_file(move |file| file.write_all_at(&bytes, offset)).await,
            Err(error) => Err(error),
        };
        match written {
            Ok(()) => self.wrote(range, writer),
            Err(error) => {
                self.shared.room.give(room);
                return Err(error);
            }
        }
        self.send_ahead();
        Ok(())
    }

    /// Whether a range may be written to.
    fn check_write(&self, range: &Range<u64>) -> Result<(), ClientError> {
        if !self.state.lock().layout.sent_away.touches(range) {
            return Ok(());
        }
        let reason = format!(
            "{}: bytes {}..{} have been sent to the bucket, and can be changed when the file has been closed; a larger \
             client.staging_size keeps them here",
            self.node(),
            range.start,
            range.end
        );
        refuse(Errno::NOSPC, reason)
    }

    /// A range has been written; its room was taken for all of it.
    fn wrote(&self, range: Range<u64>, writer: Option<u64>) {
        let mut state = self.state.lock();
        state.writers.add(writer);
        let new = state.layout.wrote(range.clone());
        self.shared.room.give((range.end - range.start) - new);
        state.upload.parts.touch(range);
        state.changed();
    }

    /// Cuts the file, or lengthens it with zeros. The writer is named as for `write`.
    pub async fn set_size(&self, size: u64, writer: Option<u64>) -> Result<(), ClientError> {
        if size > OBJECT_BYTES_MAX {
            return Err(too_large());
        }
        let _alone = self.gate.write().await;
        let removed = {
            let mut state = self.state.lock();
            let old = state.layout.size;
            if size == old && size > 0 {
                return Ok(());
            }
            let removed = state.layout.cut(size);
            state.upload.parts.touch(old.min(size)..old.max(size));
            state.writers.add(writer);
            state.changed();
            removed
        };
        self.shared.room.give(removed);
        // What is not staged any more is read no more; its room on the disk is another matter.
        let file = self.file.lock().clone();
        match file {
            Some(file) => self.blocking(move || file.set_len(size)).await,
            None => Ok(()),
        }
    }

    /// The time of the last change becomes now: the object is written anew with the next flush.
    pub fn touch(&self) {
        let mut state = self.state.lock();
        state.writers.add(None);
        state.changed();
    }

    /// Fetches what lies between staged ranges, so that they become few.
    async fn join_ranges(&self) -> Result<(), ClientError> {
        let _alone = self.gate.write().await;
        let gaps: Vec<Range<u64>> = {
            let state = self.state.lock();
            let layout = &state.layout;
            let gaps = layout.staged.pieces(0..layout.size).into_iter().filter(|(_, is_staged)| !is_staged);
            gaps.map(|(gap, _)| gap).filter(|gap| !layout.sent_away.touches(gap)).collect()
        };
        for gap in gaps {
            let mut at = gap.start;
            while at < gap.end {
                let piece = at..gap.end.min(at + PIECE_BYTES);
                at = piece.end;
                let bytes = self.collect(piece.clone()).await?;
                if !self.shared.room.try_take(piece.end - piece.start) {
                    let reason = format!("{}: too many places of it were changed for client.staging_size", self.node());
                    return refuse(Errno::NOSPC, reason);
                }
                let (start, room) = (piece.start, piece.end - piece.start);
                let written = self.with_file(move |file| file.write_all_at(&bytes, start)).await;
                written.inspect_err(|_| self.shared.room.give(room))?;
                self.state.lock().layout.staged.insert(piece);
            }
        }
        Ok(())
    }

    /// Gives the staged bytes of a part that was sent back to the file system.
    pub(super) async fn send_away(&self, index: u64, range: Range<u64>) {
        let _alone = self.gate.write().await;
        {
            let mut state = self.state.lock();
            // It may have been written to, or the upload may be over.
            if state.upload.parts.etag(index, range.end - range.start).is_none()
                || !state.layout.staged.contains(&range)
            {
                return;
            }
            state.layout.staged.remove(range.clone());
            state.layout.sent_away.insert(range.clone());
        }
        let room = range.end - range.start;
        self.give_back(range, room).await;
    }

    /// Gives all staged bytes of a file that the bucket has back to the file system. The caller has the gate alone.
    pub(super) async fn drop_staged(&self, size: u64) {
        let room = {
            let mut state = self.state.lock();
            if state.layout.base.is_none() {
                return;
            }
            state.layout.staged.remove(0..u64::MAX)
        };
        if room > 0 {
            self.give_back(0..size, room).await;
        }
    }

    async fn give_back(&self, range: Range<u64>, room: u64) {
        let punched = self.with_file(move |file| punch(file, &range)).await;
        if let Err(error) = punched {
            tracing::debug!(file = %self.node(), "staged bytes stay on the disk: {error}");
        }
        self.shared.room.give(room);
    }
}

fn range_of(offset: u64, length: usize) -> Result<Range<u64>, ClientError> {
    match offset.checked_add(length as u64) {
        Some(end) if end <= OBJECT_BYTES_MAX => Ok(offset..end),
        _ => Err(too_large()),
    }
}

fn too_large() -> ClientError {
    let reason = "an object has at most 5 TiB".to_owned();
    ClientError::Refused { errno: Errno::FBIG.raw_os_error(), reason }
}
