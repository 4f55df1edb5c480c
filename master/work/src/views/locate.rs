//! Where blocks are that views have of files of fs-mode mounts: those that the files have still, and those that are
//! kept for views.

use cavern_proto::master::{
    Extent, GetViewRequest, LocateBlocksReply, LocateBlocksRequest, LocatedFile, View, ViewState,
};
use cavern_proto::record::Stray;
use cavern_state::{Tables, view_has};

use super::{ViewMaker, unknown};
use crate::error::WorkError;

/// Blocks of a file that is asked about beside another.
const FEW_EXTENTS: usize = 64;

impl ViewMaker {
    /// The blocks of some files, as a view has them.
    ///
    /// # Errors
    /// [`WorkError::NotFound`] for a view that is not there.
    pub async fn locate(&self, request: LocateBlocksRequest) -> Result<LocateBlocksReply, WorkError> {
        let LocateBlocksRequest { view, inode, prefetch } = request;
        let read = self.lookups.reader.read(move |tables| {
            let found = tables.view(view)?.filter(|view| view.state() == ViewState::Ready);
            let wanted = GetViewRequest { id: view, ..GetViewRequest::default() };
            let view = found.ok_or_else(|| unknown(&wanted))?;
            let beside = prefetch.into_iter().map(|inode| (inode, FEW_EXTENTS));
            let mut files = Vec::new();
            for (inode, limit) in std::iter::once((inode, usize::MAX)).chain(beside) {
                let extents = located(tables, &view, inode, limit)?;
                if !extents.is_empty() {
                    files.push(LocatedFile { inode, extents });
                }
            }
            Ok(LocateBlocksReply { files })
        });
        read.await
    }
}

/// The blocks of a file that a view has; none of a file of which more than `limit` are known.
fn located(tables: Tables<'_>, view: &View, inode: u64, limit: usize) -> Result<Vec<Extent>, WorkError> {
    // Of what is not kept for the view it has nothing.
    if inode > view.last_inode {
        return Ok(Vec::new());
    }
    let mut extents = match tables.inode(inode)?.filter(|record| record.mount_id == view.mount_id) {
        Some(record) if limit < usize::MAX => match tables.few_extents(inode, &record, limit)? {
            Some(extents) => extents,
            None => return Ok(Vec::new()),
        },
        Some(_) => tables.extents(inode, 0)?,
        None => Vec::new(),
    };
    extents.retain(|extent| extent.generation < view.generation);
    for (looked_at, row) in tables.kept_blocks(inode).enumerate() {
        let (block, kept) = row?;
        if looked_at == limit {
            return Ok(Vec::new());
        }
        // They are in the order of generations.
        if block.generation >= view.generation {
            break;
        }
        if view_has(view, &block, &kept) {
            let Stray { index, generation, .. } = block;
            extents.push(Extent { index, generation, workers: kept.workers, ..Extent::default() });
        }
    }
    Ok(extents)
}
