//! Copying from one file to another, or to elsewhere in the same, without the bytes leaving this process.
//!
//! Piece by piece: what is read is written before the next is read, so that a copy of any length takes the memory of
//! one piece. Holes of the source become holes, or zeros where something is in their place.

use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::file::FsFile;
use super::read::Seek;
use super::write::{FILE_BYTES_MAX, too_large};
use crate::error::ClientError;

/// Bytes of one piece: as many as the kernel reads and writes at a time.
const PIECE_BYTES: u64 = 1 << 20;
/// A copy that takes longer is answered with what it has done, and goes on with the next request: the kernel lets
/// nobody else write to the file meanwhile.
const LONGEST: Duration = Duration::from_secs(1);

impl FsFile {
    /// Copies up to `length` bytes of `source`, from `from` on, to `to` in this file, and says how many: 0 at the end
    /// of the source; fewer when it is short, when `stop` comes, when a second is over, or when something fails after a
    /// part. The ranges must not overlap where both are of one file.
    pub async fn copy_from(
        &self,
        source: &Self,
        from: u64,
        to: u64,
        length: u64,
        stop: &CancellationToken,
    ) -> Result<u64, ClientError> {
        let began = Instant::now();
        let length = length.min(source.size().await?.saturating_sub(from));
        if length == 0 {
            return Ok(0);
        }
        let length = length.min(FILE_BYTES_MAX.saturating_sub(to));
        if length == 0 {
            return Err(too_large());
        }
        let mut done = 0;
        while done < length && !(done > 0 && (stop.is_cancelled() || began.elapsed() >= LONGEST)) {
            match self.copy_piece(source, from + done, to + done, length - done).await {
                // Somebody has cut the source.
                Ok(0) => break,
                Ok(copied) => done += copied,
                Err(error) if done > 0 => {
                    tracing::debug!(inode = self.inode, done, "a copy ends early: {error}");
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    /// Copies what comes first: a hole, or a piece of data.
    async fn copy_piece(&self, source: &Self, from: u64, to: u64, length: u64) -> Result<u64, ClientError> {
        let hole = source.hole_at(from, length).await?;
        if hole > 0 {
            self.write_hole(to..to + hole).await?;
            return Ok(hole);
        }
        let length = source.data_at(from, length.min(PIECE_BYTES)).await?;
        let bytes = source.read(from, length as usize).await?;
        let copied = bytes.len() as u64;
        if copied > 0 {
            self.write(to, bytes).await?;
        }
        Ok(copied)
    }

    /// How many of `length` bytes within the file, from `at` on, are a hole.
    async fn hole_at(&self, at: u64, length: u64) -> Result<u64, ClientError> {
        let size = self.size().await?;
        let data = self.seek(at, Seek::Data).await?.unwrap_or(size.max(at));
        Ok((data - at).min(length))
    }

    /// How many of `length` bytes within the file, from `at` on, where data begins, come before the next hole.
    async fn data_at(&self, at: u64, length: u64) -> Result<u64, ClientError> {
        let hole = self.seek(at, Seek::Hole).await?.filter(|hole| *hole > at);
        Ok(hole.map_or(length, |hole| (hole - at).min(length)))
    }
}
