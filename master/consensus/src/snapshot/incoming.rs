//! A snapshot on its way from another master. Its files are collected in one directory; `offer` beside them says of
//! what, so that a transfer that breaks goes on where it was, and one of another snapshot begins anew.
//!
//! What is here is not trusted before it is whole: the files have the lengths that were offered, and the checkpoint
//! opens at the position that was.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use cavern_proto::raft::{SnapshotOffer, SnapshotPiece, SnapshotProgress, SnapshotTransfer};
use cavern_state::Database;
use cavern_state::current::remove_dir;
use prost::Message;

use super::Snapshots;
use crate::error::{ConsensusError, Result};
use crate::position::read_position;
use crate::types::{Checkpoint, Meta, from_json};

/// Bytes after which a file goes to the disk. A sync of something else on the same disk may have to wait for what lies
/// in memory of this one.
const SYNC_BYTES: u64 = 8 << 20;
/// Files of a snapshot, at most.
const FILES_MAX: usize = 100_000;

/// A snapshot that is being received.
pub struct Incoming {
    meta: Meta,
    offer: SnapshotOffer,
    /// Directory of the files.
    files: PathBuf,
    /// The one that was written to last.
    open: Option<(u32, File)>,
}

impl Incoming {
    /// Takes an offer up, with what is here of it already. *Blocking*.
    ///
    /// # Errors
    /// [`ConsensusError::Invalid`] for an offer that makes no sense: nothing was changed then.
    pub fn begin(snapshots: &Snapshots, offer: SnapshotOffer) -> Result<Self> {
        let meta: Meta = from_json(&offer.meta, "the description of a snapshot of another master")?;
        if offer.files.len() > FILES_MAX {
            return Err(ConsensusError::Invalid(format!("a snapshot of {} files", offer.files.len())));
        }
        let is_plain = |name: &str| !name.is_empty() && !name.contains(['/', '\0']) && name != "." && name != "..";
        if let Some(file) = offer.files.iter().find(|file| !is_plain(&file.name)) {
            return Err(ConsensusError::Invalid(format!("a snapshot with a file \"{}\"", file.name.escape_debug())));
        }
        let lengths = offer.files.iter().map(|file| file.bytes);
        if lengths.reduce(u64::saturating_add) == Some(u64::MAX) {
            return Err(ConsensusError::Invalid("a snapshot of more bytes than there can be".to_owned()));
        }
        let directory = snapshots.incoming();
        let files = directory.join("files");
        // Whose it is, and what: those of another master are other files, though of the same names.
        let named = SnapshotOffer { target: None, ..offer.clone() }.encode_to_vec();
        let note = directory.join("offer");
        if fs::read(&note).ok().as_deref() != Some(named.as_slice()) {
            remove_dir(&directory)?;
            fs::create_dir_all(&files).map_err(ConsensusError::io(&files))?;
            fs::write(&note, &named).map_err(ConsensusError::io(&note))?;
        }
        Ok(Self { meta, offer, files, open: None })
    }

    /// What is here of each file.
    pub fn progress(&self) -> SnapshotProgress {
        let length = |name: &str| fs::metadata(self.files.join(name)).map_or(0, |file| file.len());
        SnapshotProgress { bytes: self.offer.files.iter().map(|file| length(&file.name).min(file.bytes)).collect() }
    }

    /// How much of it is here, and how much it is.
    pub fn transfer(&self) -> SnapshotTransfer {
        let received = self.progress().bytes.into_iter().sum();
        SnapshotTransfer { received, bytes: self.offer.files.iter().map(|file| file.bytes).sum() }
    }

    /// Takes a piece in. They come in order, file by file. *Blocking*.
    pub fn write(&mut self, piece: &SnapshotPiece) -> Result {
        let Some(file) = self.offer.files.get(piece.file as usize) else {
            return Err(ConsensusError::Invalid(format!("a piece of file {} of a snapshot", piece.file)));
        };
        let path = self.files.join(&file.name);
        let open = match &mut self.open {
            Some((number, open)) if *number == piece.file => open,
            open => {
                if let Some((_, done)) = open.take() {
                    done.sync_data().map_err(ConsensusError::io(&self.files))?;
                }
                let made = OpenOptions::new().create(true).write(true).truncate(false).open(&path);
                &mut open.insert((piece.file, made.map_err(ConsensusError::io(&path))?)).1
            }
        };
        let is_next = open.metadata().is_ok_and(|found| found.len() == piece.offset);
        if !is_next || piece.offset.saturating_add(piece.data.len() as u64) > file.bytes {
            return Err(ConsensusError::Invalid(format!("a piece of {} that is out of order", file.name)));
        }
        open.write_all_at(&piece.data, piece.offset).map_err(ConsensusError::io(&path))?;
        let end = piece.offset + piece.data.len() as u64;
        if end / SYNC_BYTES > piece.offset / SYNC_BYTES {
            open.sync_data().map_err(ConsensusError::io(&path))?;
        }
        Ok(())
    }

    /// The whole checkpoint, on disk. *Blocking*.
    ///
    /// # Errors
    /// [`ConsensusError::Invalid`] where something is missing, or is not what was offered.
    pub fn finish(mut self) -> Result<(Meta, Checkpoint)> {
        if let Some((_, last)) = self.open.take() {
            last.sync_data().map_err(ConsensusError::io(&self.files))?;
        }
        for file in &self.offer.files {
            let path = self.files.join(&file.name);
            // Files without a byte come in no piece.
            let found = OpenOptions::new().create(true).append(true).open(&path).and_then(|file| file.metadata());
            if found.map_err(ConsensusError::io(&path))?.len() != file.bytes {
                return Err(ConsensusError::Invalid(format!("{} of a snapshot is not whole", file.name)));
            }
        }
        File::open(&self.files).and_then(|files| files.sync_all()).map_err(ConsensusError::io(&self.files))?;
        let (last, _) = read_position(&Database::open_for_inspection(&self.files)?)?;
        if last != self.meta.last_log_id {
            let (found, offered) = (last.map(|id| id.index), self.meta.last_log_id.map(|id| id.index));
            return Err(ConsensusError::Invalid(format!("a snapshot at entry {found:?}, offered as of {offered:?}")));
        }
        Ok((self.meta, Checkpoint { directory: self.files }))
    }
}

#[cfg(test)]
mod tests {
    use cavern_proto::raft::SnapshotFile;
    use proptest::prelude::*;

    use super::*;
    use crate::types::to_json;

    fn offer() -> impl Strategy<Value = SnapshotOffer> {
        let meta = prop_oneof![
            4 => Just(to_json(&Meta::default(), "a description").unwrap()),
            1 => prop::collection::vec(any::<u8>(), 0..40),
        ];
        let name = prop_oneof![4 => "[0-9]{1,2}\\.sst", 1 => ".{0,10}", 1 => Just("../out".to_owned())];
        let bytes = prop_oneof![4 => 0u64..50, 1 => any::<u64>()];
        let file = (name, bytes).prop_map(|(name, bytes)| SnapshotFile { name, bytes });
        (meta, prop::collection::vec(file, 0..4)).prop_map(|(meta, files)| SnapshotOffer {
            meta: meta.into(),
            files,
            ..SnapshotOffer::default()
        })
    }

    fn piece() -> impl Strategy<Value = SnapshotPiece> {
        let offset = prop_oneof![4 => 0u64..50, 1 => any::<u64>()];
        let data = prop::collection::vec(any::<u8>(), 0..50);
        (0u32..5, offset, data).prop_map(|(file, offset, data)| SnapshotPiece {
            offer: None,
            file,
            offset,
            data: data.into(),
        })
    }

    proptest! {
        #[test]
        fn whatever_another_master_sends_stays_within_what_it_has_offered(
            offers in prop::collection::vec((offer(), prop::collection::vec(piece(), 0..12)), 1..3),
        ) {
            let home = tempfile::tempdir().unwrap();
            let directory = home.path().join("snapshots");
            let snapshots = Snapshots::open(directory.clone()).unwrap();
            for (offer, pieces) in offers {
                let offered: u64 = offer.files.iter().map(|file| file.bytes).fold(0, u64::saturating_add);
                let Ok(mut incoming) = Incoming::begin(&snapshots, offer) else { continue };
                for piece in pieces {
                    let _out_of_order = incoming.write(&piece);
                    prop_assert!(incoming.transfer().received <= offered);
                }
                prop_assert!(incoming.finish().is_err(), "none of this is a checkpoint");
            }
            let beside: Vec<_> = fs::read_dir(home.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
            prop_assert_eq!(beside, [directory]);
        }
    }
}
