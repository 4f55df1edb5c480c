//! Blocks that files have lost and views have: what no view has any more is freed.
//!
//! Views go one at a time, and may have kept very many blocks: so these are looked at page by page, and a crash leaves
//! the rest to the next leader. No view that begins meanwhile comes to have any of them.

use std::time::Duration;

use cavern_proto::record::{KeptRecord, ReleaseKept, Stray};
use cavern_state::{AT_ONCE, Tables, view_has};

use super::Repair;
use crate::background::Next;
use crate::error::WorkError;

/// Between two looks, unless a view goes.
pub(super) const PAUSE: Duration = Duration::from_secs(600);

impl Repair {
    /// Views are fewer: what only they had is to be freed.
    pub fn views_removed(&self) {
        self.views_removed.send_replace(());
    }

    pub(super) async fn release_kept(&self) -> Result<Next, WorkError> {
        let mut after: Option<Stray> = None;
        loop {
            let from = after;
            let page = self.reader.read(move |tables| needless(tables, from)).await?;
            let Some((last, blocks)) = page else { return Ok(Next::Rest) };
            after = Some(last);
            if !blocks.is_empty() {
                self.proposer.propose(ReleaseKept { blocks }).await?;
            }
        }
    }
}

/// The last of a page of kept blocks, and those of them that no view has; `None` behind the last of all.
fn needless(tables: Tables<'_>, after: Option<Stray>) -> Result<Option<(Stray, Vec<Stray>)>, WorkError> {
    if tables.counters()?.kept == 0 {
        return Ok(None);
    }
    let page = tables.kept_after(after).take(AT_ONCE).collect::<Result<Vec<(Stray, KeptRecord)>, _>>()?;
    let Some((last, _)) = page.last() else { return Ok(None) };
    let (last, views) = (*last, tables.views()?);
    let is_needless = |(block, kept): &(Stray, KeptRecord)| !views.iter().any(|view| view_has(view, block, kept));
    Ok(Some((last, page.into_iter().filter(is_needless).map(|(block, _)| block).collect())))
}
