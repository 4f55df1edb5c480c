//! Reading a file that is being written, from wherever its bytes are.

use std::ops::Range;

use bytes::{Bytes, BytesMut};
use rustix::io::Errno;
use tokio::time::Instant;

use super::file::StagedFile;
use super::layout::Located;
use super::names::refuse;
use crate::error::ClientError;
use crate::read::{PartLocation, Payer};

/// What is read of one place at a time.
pub(super) const PIECE_BYTES: u64 = 4 << 20;

impl StagedFile {
    /// Reads `length` bytes at `offset`, fewer only at the end of the file.
    pub async fn read(&self, offset: u64, length: usize) -> Result<Bytes, ClientError> {
        let size = self.state.lock().layout.size;
        let end = offset.saturating_add(length as u64).min(size);
        if offset >= end {
            return Ok(Bytes::new());
        }
        self.collect(offset..end).await
    }

    /// The bytes of a range.
    pub(super) async fn collect(&self, range: Range<u64>) -> Result<Bytes, ClientError> {
        // At most a part, or what one request asks for.
        let whole = (range.end - range.start) as usize;
        let mut bytes = BytesMut::new();
        while bytes.len() != whole {
            let at = range.start + bytes.len() as u64;
            let Some(piece) = self.read_piece(at..range.end.min(at + PIECE_BYTES)).await? else { continue };
            if piece.len() == whole {
                return Ok(piece);
            }
            bytes.reserve(whole - bytes.len());
            bytes.extend_from_slice(&piece);
        }
        Ok(bytes.freeze())
    }

    /// The beginning of a range that lies in one place; `None`: it does so no more.
    async fn read_piece(&self, range: Range<u64>) -> Result<Option<Bytes>, ClientError> {
        let located = self.state.lock().layout.locate(range);
        let (piece, at, is_staged) = match located {
            Located::Staged(piece) => (piece.clone(), PartLocation::Staged(self.file()?, piece.start), true),
            Located::Elsewhere(piece, at) => (piece, at, false),
            Located::SentAway => {
                let key = self.key();
                let reason = format!("bytes that are on their way to {key} cannot be read before it is closed");
                return refuse(Errno::IO, reason);
            }
        };
        let (length, deadline) = ((piece.end - piece.start) as usize, Instant::now() + self.shared.timeout());
        match self.reader.read_part(at, length, Payer::Caller, deadline, || self.key()).await {
            // What was given back to the file system meanwhile reads as zeros.
            Ok(bytes) => Ok(Some(bytes).filter(|_| !is_staged || self.state.lock().layout.staged.contains(&piece))),
            // Whoever has it open cannot look it up again.
            Err(error) if error.is_version_gone() => {
                let key = self.key();
                let reason = format!("{key}: the object was replaced while it was being changed here: {error}");
                refuse(Errno::IO, reason)
            }
            Err(ClientError::Io(error)) if is_staged => Err(self.not_staged(&error)),
            Err(error) => Err(error),
        }
    }
}
