//! A snapshot on its way to another master: its files, open, so that they outlive the directory.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use bytes::Bytes;
use cavern_proto::raft::{SnapshotFile, SnapshotPiece, SnapshotProgress};

use super::read_dir;
use crate::error::{ConsensusError, Result};
use crate::types::Checkpoint;

/// Bytes of one piece.
const PIECE_BYTES: u64 = 1 << 20;

/// The open files of a snapshot that is being sent. Cheap to clone.
#[derive(Clone)]
pub struct Outgoing {
    files: Arc<[(SnapshotFile, File)]>,
}

impl Outgoing {
    /// Opens every file of a checkpoint. *Blocking*.
    pub fn open(checkpoint: &Checkpoint) -> Result<Self> {
        let mut files = Vec::new();
        for path in read_dir(&checkpoint.directory)? {
            let file = File::open(&path).map_err(ConsensusError::io(&path))?;
            let bytes = file.metadata().map_err(ConsensusError::io(&path))?.len();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            // What the library says while it looks at a checkpoint is no part of it.
            if name.starts_with("LOG") {
                continue;
            }
            files.push((SnapshotFile { name, bytes }, file));
        }
        Ok(Self { files: files.into() })
    }

    /// What there is to send.
    pub fn files(&self) -> Vec<SnapshotFile> {
        self.files.iter().map(|(file, _)| file.clone()).collect()
    }

    /// Where the pieces begin that the other one does not have: file and offset.
    pub fn missing(&self, progress: &SnapshotProgress) -> Vec<(u32, u64)> {
        let had = progress.bytes.iter().copied().chain(std::iter::repeat(0));
        let numbered = (0u32..).zip(self.files.iter()).zip(had);
        let mut missing = Vec::new();
        for ((file, (SnapshotFile { bytes, .. }, _)), had) in numbered {
            let mut offset = had.min(*bytes);
            while offset < *bytes {
                missing.push((file, offset));
                offset += PIECE_BYTES;
            }
        }
        missing
    }

    /// One piece. *Blocking*.
    pub fn read(&self, file: u32, offset: u64) -> Result<SnapshotPiece> {
        let corrupt = || ConsensusError::corrupt(format!("file {file} of a snapshot"));
        let (SnapshotFile { name, bytes }, open) = self.files.get(file as usize).ok_or_else(corrupt)?;
        let length = bytes.saturating_sub(offset).min(PIECE_BYTES);
        let mut data = vec![0; usize::try_from(length).map_err(|_| corrupt())?];
        open.read_exact_at(&mut data, offset).map_err(ConsensusError::io(name))?;
        Ok(SnapshotPiece { offer: None, file, offset, data: Bytes::from(data) })
    }
}
