//! What a file that is being written reads as: the bytes that were staged; where none were, those of the object that it
//! was opened from; else zeros.

use std::ops::Range;
use std::os::unix::fs::FileExt;

use bytes::{Bytes, BytesMut};
use rustix::io::Errno;

use super::file::StagedFile;
use super::ranges::RangeSet;
use crate::error::ClientError;
use crate::stages::Stage;

/// What is read of the object that a file was opened from at a time.
pub(super) const BASE_PIECE: u64 = 4 << 20;

/// Where a piece of a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Staged,
    Base,
    Zeros,
}

impl StagedFile {
    /// Reads `length` bytes at `offset`, fewer only at the end of the file.
    pub async fn read(&self, offset: u64, length: usize) -> Result<Bytes, ClientError> {
        let size = self.state.lock().size;
        let end = offset.saturating_add(length as u64).min(size);
        if offset >= end {
            return Ok(Bytes::new());
        }
        self.collect(offset..end).await
    }

    /// The bytes of a range.
    pub(super) async fn collect(&self, range: Range<u64>) -> Result<Bytes, ClientError> {
        // At most a part, or what one request asks for.
        let mut bytes = BytesMut::with_capacity((range.end - range.start) as usize);
        while bytes.len() as u64 != range.end - range.start {
            let at = range.start + bytes.len() as u64;
            let (piece, source) = self.first_piece(at..range.end)?;
            match source {
                Source::Zeros => bytes.resize(bytes.len() + (piece.end - piece.start) as usize, 0),
                Source::Base => bytes.extend_from_slice(&self.read_base(piece).await?),
                Source::Staged => {
                    let read = self.read_staged(piece.clone()).await?;
                    // What was given back to the file system meanwhile read as zeros.
                    if self.state.lock().staged.contains(&piece) {
                        bytes.extend_from_slice(&read);
                    }
                }
            }
        }
        Ok(bytes.freeze())
    }

    /// The beginning of a range that lies in one place.
    fn first_piece(&self, range: Range<u64>) -> Result<(Range<u64>, Source), ClientError> {
        let state = self.state.lock();
        let first = |set: &RangeSet| set.pieces(range.clone()).into_iter().next().unwrap_or((range.clone(), false));
        let (piece, is_staged) = first(&state.staged);
        if is_staged {
            return Ok((piece, Source::Staged));
        }
        if state.sent_away.touches(&(piece.start..piece.start + 1)) {
            let reason =
                format!("bytes that are on their way to {} cannot be read before it is closed", state.place.key());
            return Err(ClientError::Refused { errno: Errno::IO.raw_os_error(), reason });
        }
        let valid = state.base.as_ref().map_or(0, |base| base.valid);
        if piece.start >= valid {
            return Ok((piece, Source::Zeros));
        }
        let end = piece.end.min(valid).min(piece.start + BASE_PIECE);
        Ok((piece.start..end, Source::Base))
    }

    async fn read_base(&self, range: Range<u64>) -> Result<Bytes, ClientError> {
        let base = self.state.lock().base.as_ref().map(|base| base.file.clone());
        let key = || self.state.lock().place.key();
        let file = base.ok_or_else(|| ClientError::Stale(key()))?;
        let length = (range.end - range.start) as usize;
        let bytes = match file.read_object(range.start, length).await {
            Ok(bytes) => bytes,
            // Whoever has it open cannot look it up again.
            Err(error) if error.is_version_gone() => {
                let reason = format!("{}: the object was replaced while it was being changed here: {error}", key());
                return Err(ClientError::Refused { errno: Errno::IO.raw_os_error(), reason });
            }
            Err(error) => return Err(error),
        };
        if bytes.len() == length {
            return Ok(bytes);
        }
        Err(ClientError::Invalid(format!("{}: {} bytes instead of {length} of the old content", key(), bytes.len())))
    }

    async fn read_staged(&self, range: Range<u64>) -> Result<Vec<u8>, ClientError> {
        let _disk = Stage::Disk.begin();
        self.with_file(move |file| {
            let mut bytes = vec![0; (range.end - range.start) as usize];
            file.read_exact_at(&mut bytes, range.start)?;
            Ok(bytes)
        })
        .await
    }
}
