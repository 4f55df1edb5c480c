//! What the journal has of a file of which the master does not know all.

use crate::journal::{Journal, Slot};

/// The journal's record of one file's uncommitted content.
#[derive(Debug, Default)]
pub(super) struct JournaledContent {
    pub slot: Option<Slot>,
    /// Of the layout that it is of.
    pub revision: u64,
}

impl JournaledContent {
    /// Enters another record, or none.
    pub(super) fn set(&mut self, journal: &Journal, record: Option<Vec<u8>>) {
        let Some(record) = record else {
            if let Some(slot) = self.slot.take() {
                slot.forget();
            }
            return;
        };
        match &self.slot {
            Some(slot) => _ = slot.set(&record),
            None => self.slot = journal.contents.put(&record),
        }
    }
}
