//! What a process before this one has left of its handles in the journal.

use std::collections::HashMap;

use cavern_client::Journal;
use cavern_client::journal::Slot;
use cavern_proto::journal::{AppendRecord, HandleRecord, LockRecord, PositionRecord};
use prost::Message;

/// What the process before has left of its handles.
pub struct EarlierHandles {
    pub(super) handles: Vec<(Slot, HandleRecord)>,
    pub(super) positions: HashMap<u64, (Slot, PositionRecord)>,
    pub(super) locks: Vec<(Slot, LockRecord)>,
    pub(super) backings: Vec<(Slot, u32)>,
    pub(super) appends: Vec<(Slot, AppendRecord)>,
    /// Whose locks they are.
    pub(super) session: u64,
}

impl EarlierHandles {
    pub fn of(journal: &Journal) -> Self {
        let positions = records::<PositionRecord>(journal.positions.take_all());
        let backings = journal.backings.take_all().into_iter();
        let number = |record: Vec<u8>| Some(u32::from_le_bytes(record.try_into().ok()?));
        Self {
            handles: records(journal.handles.take_all()),
            positions: positions.into_iter().map(|(slot, record)| (record.number, (slot, record))).collect(),
            locks: records(journal.locks.take_all()),
            appends: records(journal.appends.take_all()),
            backings: backings.filter_map(|(slot, record)| Some((slot, number(record)?))).collect(),
            session: journal.session().0,
        }
    }

    /// Inodes of fs-mode mounts that are open.
    pub fn kept(&self) -> Vec<u64> {
        self.handles.iter().filter(|(_, record)| record.is_kept).map(|(_, record)| record.inode).collect()
    }
}

fn records<R: Message + Default>(found: Vec<(Slot, Vec<u8>)>) -> Vec<(Slot, R)> {
    found.into_iter().filter_map(|(slot, record)| Some((slot, R::decode(&record[..]).ok()?))).collect()
}
