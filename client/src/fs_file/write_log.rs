//! Bytes that are written behind, in the journal until they are at the workers.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use cavern_proto::journal::WriteRecord;
use prost::Message as _;

use crate::journal::{Journal, Slot};

/// Where the pieces of one file are entered.
#[derive(Clone, Copy)]
pub(super) struct WriteLog<'a> {
    pub journal: &'a Journal,
    pub inode: u64,
    /// How many pieces there were, of all files.
    pub count: &'a AtomicU64,
}

/// A piece in the journal.
#[derive(Debug)]
pub(super) struct LoggedWrite {
    slot: Slot,
    record: WriteRecord,
}

/// The journal has no room: the bytes are to be written at once.
#[derive(Debug)]
pub(super) struct LogFull;

impl WriteLog<'_> {
    pub(super) fn begin(&self, offset: u64, bytes: &[u8]) -> Result<LoggedWrite, LogFull> {
        let order = self.count.fetch_add(1, Relaxed);
        // An empty piece first: its bytes count when they are there.
        let record = WriteRecord { inode: self.inode, offset, length: 0, order };
        let slot = self.journal.pieces.put(&record.encode_to_vec()).ok_or(LogFull)?;
        let mut piece = LoggedWrite { slot, record };
        self.extend(&mut piece, 0, bytes)?;
        Ok(piece)
    }

    /// Enters more bytes of a piece, at a place in it.
    pub(super) fn extend(&self, piece: &mut LoggedWrite, at: u64, bytes: &[u8]) -> Result<(), LogFull> {
        self.journal.log_write(&piece.slot, at, bytes).map_err(|_no_room| LogFull)?;
        let end = at + bytes.len() as u64;
        if end > piece.record.length {
            piece.record.length = end;
            if !piece.slot.set(&piece.record.encode_to_vec()) {
                return Err(LogFull);
            }
        }
        Ok(())
    }
}

impl LoggedWrite {
    /// Its bytes are at the workers.
    pub(super) fn forget(self) {
        self.slot.forget();
    }
}
