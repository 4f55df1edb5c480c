//! Reading a file that is being written, from wherever its bytes are.

use std::ops::Range;
use std::os::unix::fs::FileExt;

use bytes::{Bytes, BytesMut};
use rustix::io::Errno;
use tokio::time::Instant;

use super::file::StagedFile;
use super::layout::Located;
use super::names::refuse;
use crate::error::ClientError;
use crate::read::{Owner, PartLocation};
use crate::stages::Stage;

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
        self.collect_before(offset..end, Some(Instant::now() + self.shared.timeout())).await
    }

    /// The bytes of a range, for a change of the file or an upload. They wait for the disk as long as it takes.
    pub(super) async fn collect(&self, range: Range<u64>) -> Result<Bytes, ClientError> {
        self.collect_before(range, None).await
    }

    /// The deadline is for a disk of this host: objects have their own.
    async fn collect_before(&self, range: Range<u64>, deadline: Option<Instant>) -> Result<Bytes, ClientError> {
        // At most a part, or what one request asks for.
        let whole = (range.end - range.start) as usize;
        let mut bytes = BytesMut::new();
        while bytes.len() != whole {
            let at = range.start + bytes.len() as u64;
            let piece = at..range.end.min(at + PIECE_BYTES);
            let Some(piece) = self.read_piece(piece, deadline).await? else { continue };
            if piece.len() == whole {
                return Ok(piece);
            }
            bytes.reserve(whole - bytes.len());
            bytes.extend_from_slice(&piece);
            // A piece may be there without a wait, and a part has many.
            tokio::task::yield_now().await;
        }
        Ok(bytes.freeze())
    }

    /// The beginning of a range that lies in one place; `None`: it does so no more.
    async fn read_piece(&self, range: Range<u64>, deadline: Option<Instant>) -> Result<Option<Bytes>, ClientError> {
        let located = self.state.lock().layout.locate(range);
        let (piece, at) = match located {
            Located::Staged(piece) => return self.read_staged(piece, deadline).await,
            Located::Elsewhere(piece, at) => (piece, at),
            Located::SentAway => {
                let key = self.key();
                let reason = format!("bytes that are on their way to {key} cannot be read before it is closed");
                return refuse(Errno::IO, reason);
            }
        };
        let (length, deadline) = ((piece.end - piece.start) as usize, Instant::now() + self.shared.timeout());
        match self.reader.read_part(at, length, Owner::Caller, deadline, || self.key()).await {
            // Whoever has it open cannot look it up again.
            Err(error) if error.is_version_gone() => {
                let key = self.key();
                let reason = format!("{key}: the object was replaced while it was being changed here: {error}");
                refuse(Errno::IO, reason)
            }
            read => read.map(Some),
        }
    }

    /// A piece from the disk of this host; `None`: it is there no more.
    async fn read_staged(&self, piece: Range<u64>, deadline: Option<Instant>) -> Result<Option<Bytes>, ClientError> {
        let (start, length) = (piece.start, (piece.end - piece.start) as usize);
        let read = match deadline {
            Some(deadline) => {
                let at = PartLocation::Staged(self.file()?, start);
                self.reader.read_part(at, length, Owner::Caller, deadline, || self.key()).await
            }
            None => {
                let _disk = Stage::Disk.begin();
                let read = self.with_file(move |file| {
                    let mut bytes = vec![0; length];
                    file.read_exact_at(&mut bytes, start)?;
                    Ok(bytes)
                });
                read.await.map(Bytes::from)
            }
        };
        match read {
            // What was given back to the file system meanwhile reads as zeros.
            Ok(bytes) => Ok(Some(bytes).filter(|_| self.state.lock().layout.staged.contains(&piece))),
            Err(ClientError::Io(error)) => Err(self.not_staged(&error)),
            Err(error) => Err(error),
        }
    }
}
