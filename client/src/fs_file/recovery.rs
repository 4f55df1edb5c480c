//! What was written to files, and is not committed: kept for the process that goes on when this one has died.
//!
//! A write is answered when its bytes are at the workers, and the master may not know of them yet. What it does not
//! know is in the journal before the answer; so are the bytes of what is written behind. The successor lays the record
//! of a file over what the master has, as any client does when its layout was overtaken by somebody else's change.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use cavern_proto::journal::{ContentRecord, WriteRecord};
use prost::Message;

use super::file::FsFile;
use super::journaled_content::JournaledContent;
use super::layout::Layout;
use super::open_file_table::OpenFileTable;
use super::state::Known;
use crate::error::ClientError;
use crate::journal::Slot;

/// What became of what the process before had written.
#[derive(Default)]
pub(crate) struct Recovered {
    /// The files of which there was something.
    pub files: Vec<Arc<FsFile>>,
    /// Why something of others was not taken up.
    pub errors: Vec<ClientError>,
}

impl FsFile {
    /// Brings the journal up to date. To be called whenever what is not committed, or not synced, has changed, and
    /// before that is answered for.
    pub(super) fn note(&self) {
        let Some(journal) = self.shared.metadata.journal() else { return };
        // Before the state: who is first here has the older record.
        let mut noted = self.noted.lock();
        let record = {
            let state = self.state.lock();
            let Some(layout) = state.layout().filter(|layout| layout.revision() != noted.revision) else { return };
            noted.revision = layout.revision();
            layout.record(self.inode)
        };
        noted.set(journal, record.map(|record| record.encode_to_vec()));
    }
}

impl OpenFileTable {
    /// Opens the files of which the process before had written something, and writes what it had behind. They are to
    /// stay until whoever had them open has them again; what nobody has open is committed.
    pub(crate) async fn recover(&self) -> Recovered {
        let mut recovered = Recovered::default();
        let Some(journal) = self.shared.metadata.journal().cloned() else { return recovered };
        for (slot, record) in journal.contents.take_all() {
            let Ok(record) = ContentRecord::decode(&record[..]) else { continue };
            match self.recover_content(&record, slot).await {
                Ok(content) => recovered.files.push(content),
                Err(error) => {
                    tracing::warn!(inode = record.inode, "what was written last is lost: {error}");
                    recovered.errors.push(error);
                }
            }
        }
        let mut pieces: Vec<_> = journal.pieces.take_all().into_iter().filter_map(decode_write).collect();
        pieces.sort_by_key(|(_, record)| record.order);
        self.shared.pieces.store(pieces.last().map_or(0, |(_, record)| record.order + 1), Relaxed);
        for (slot, record) in pieces {
            let written = async {
                let bytes = journal.read_logged(&slot, usize::try_from(record.length).unwrap_or_default())?;
                let node = self.shared.metadata.node(record.inode).await?;
                let content = self.open(&node).await?;
                if !bytes.is_empty() {
                    content.write(record.offset, bytes.into()).await?;
                }
                Ok::<_, ClientError>(content)
            };
            match written.await {
                Ok(content) => {
                    slot.forget();
                    recovered.files.push(content);
                }
                Err(error) => {
                    tracing::warn!(inode = record.inode, offset = record.offset, "written bytes are lost: {error}");
                    recovered.errors.push(error);
                }
            }
        }
        recovered
    }

    async fn recover_content(&self, record: &ContentRecord, slot: Slot) -> Result<Arc<FsFile>, ClientError> {
        let node = self.shared.metadata.node(record.inode).await?;
        let content = self.open(&node).await?;
        // The process before may have had the master hold it: that ends when it is closed here.
        drop(self.shared.metadata.keep_held(record.inode));
        if node.limits_users() {
            content.is_written_by(Some(&node.owner()));
        }
        let layout = Layout::of_record(record);
        {
            let mut noted = content.noted.lock();
            let mut state = content.state.lock();
            *noted = JournaledContent { slot: Some(slot), revision: layout.revision() };
            // The master is asked before the first look, and what it has is what this is laid over.
            (state.known, state.gaps) = (Some(Known { layout, ..Known::default() }), None);
            state.outdate();
        }
        // Kernels have pages of what they have read.
        content.page_cache_hint().set();
        Ok(content)
    }
}

fn decode_write((slot, record): (Slot, Vec<u8>)) -> Option<(Slot, WriteRecord)> {
    let record = WriteRecord::decode(&record[..]).ok()?;
    Some((slot, record))
}
