//! Views: what is recorded of them, and what of fs-mode mounts they freeze.
//!
//! A view of an fs-mode mount is made in steps. From its beginning on no block of the mount is freed, so what the
//! leader reads of the tables then is there for as long as the view is. After that the view is frozen: a generation
//! begins that is later than any so far, and the mount table says so; whoever goes by that table changes no block of an
//! earlier one. When all clients do, blocks of that generation may take the places of those.

use cavern_proto::master::{Extent, Mount, View, ViewState, WriteType};
use cavern_proto::record::{
    BeginView, FinishView, FreezeView, GarbageRecord, KeptRecord, ReleaseKept, RemoveView, Stray,
};

use super::mount;
use crate::error::Result;
use crate::index::extents;
use crate::index::views::{self, UNFROZEN};
use crate::outcome::Outcome;
use crate::records::GENERATIONS_MAX;
use crate::schema;
use crate::transaction::Transaction;

/// Views at a time. All of them are read whenever one comes or goes.
pub const VIEWS_MAX: usize = 1000;

fn unknown(id: u32) -> Result<Outcome> {
    Outcome::refused(format!("there is no view {id} any more: see `cv view list`"))
}

/// Notes that a view is about to be made. From now on all that it may come to have is kept.
pub fn begin(tx: &mut Transaction<'_>, begin: BeginView) -> Result<Outcome> {
    let wanted = begin.view.unwrap_or_default();
    let (tables, name) = (tx.before(), &wanted.name);
    let known = tables.views()?;
    if let Some(other) = known.iter().find(|view| view.name == *name) {
        return Outcome::refused(format!(
            "there is a view {name} of {} already: choose another name, or delete it with `cv view delete {name}`",
            other.path
        ));
    }
    if known.len() >= VIEWS_MAX {
        return Outcome::refused(format!(
            "there are {VIEWS_MAX} views, as many as there may be: delete some with `cv view delete`"
        ));
    }
    let Some(mount) = tables.mount(wanted.mount_id)? else {
        return Outcome::refused(format!("the mount of {} is gone: see `cv mount list`", wanted.path));
    };
    if tables.mount(wanted.store_mount_id)?.is_none() {
        return Outcome::refused(format!(
            "the mount in whose bucket the view {name} was to be is gone: name another one with --store"
        ));
    }
    let Some(id) = tx.counters.view.checked_add(1).filter(|id| *id <= views::ID_MAX) else {
        return Outcome::refused("there are no ids of views left");
    };
    let keeps_blocks = mount.write_type() == WriteType::FsMode && !wanted.imported;
    let (generation, last_inode) = if keeps_blocks { (UNFROZEN, u64::MAX) } else { (0, 0) };
    let view = View { id, state: ViewState::Creating as i32, generation, last_inode, ..wanted };
    tx.counters.view = id;
    tx.counters.frozen_views += u32::from(keeps_blocks);
    tx.counters.unfrozen_views += u32::from(keeps_blocks);
    Ok(put(tx, view))
}

/// Begins the generation of which no block is the view's. The tables have been read for it. Or clients go by that.
pub fn freeze(tx: &mut Transaction<'_>, freeze: &FreezeView) -> Result<Outcome> {
    let tables = tx.before();
    let Some(mut view) = tables.view(freeze.id)? else { return unknown(freeze.id) };
    let is_due = if freeze.settled { is_frozen(&view) } else { view.generation == UNFROZEN };
    if !is_due {
        let what = if freeze.settled { "that is frozen" } else { "that is to be frozen" };
        return Outcome::refused(format!("the view {} is none {what}", view.name));
    }
    let Some(mount) = tables.mount(view.mount_id)? else {
        return Outcome::refused(format!("the mount of {} is gone: see `cv mount list`", view.path));
    };
    if freeze.settled {
        let settled_below = mount.settled_below.max(view.generation);
        mount::put_frozen(tx, &Mount { settled_below, ..mount });
        return Ok(Outcome::View(Box::new(view)));
    }
    let counters = &mut tx.counters;
    let generation = counters.latest_generation.max(counters.next_generation).saturating_add(1);
    if generation > GENERATIONS_MAX {
        return Outcome::refused(
            "there are no generations of blocks left for another view: files have been cut, or views made, as often as \
             they can be",
        );
    }
    (counters.next_generation, counters.latest_generation) = (generation, generation);
    counters.old_inodes = counters.inode;
    counters.unfrozen_views = counters.unfrozen_views.saturating_sub(1);
    (view.generation, view.last_inode) = (generation, counters.inode);
    mount::put_frozen(tx, &Mount { frozen_below: generation, frozen_inodes: view.last_inode, ..mount });
    Ok(put(tx, view))
}

fn is_frozen(view: &View) -> bool {
    views::keeps_blocks(view) && view.generation != UNFROZEN
}

/// The view is in its bucket, and is shown from now on.
pub fn finish(tx: &mut Transaction<'_>, finish: FinishView) -> Result<Outcome> {
    let made = finish.view.unwrap_or_default();
    let tables = tx.before();
    let Some(known) = tables.view(made.id)? else { return unknown(made.id) };
    let has_settled = match is_frozen(&known) {
        true => tables.mount(known.mount_id)?.is_some_and(|mount| mount.settled_below >= known.generation),
        false => !views::keeps_blocks(&known),
    };
    if known.state() != ViewState::Creating || !has_settled {
        return Outcome::refused(format!("the view {} is none that is being made, or is not frozen yet", known.name));
    }
    let View { name, mount_id, generation, last_inode, imported, .. } = known;
    let state = ViewState::Ready as i32;
    let upload = String::new();
    Ok(put(tx, View { name, mount_id, generation, last_inode, imported, state, upload, ..made }))
}

/// Forgets a view. What only it has is freed in steps ([`release`]), and what it has in its bucket is noted until that
/// is deleted.
pub fn remove(tx: &mut Transaction<'_>, remove: &RemoveView) -> Result<Outcome> {
    let (id, tables) = (remove.id, tx.before());
    if remove.deleted {
        let Some(gone) = tables.get(schema::GoneViews, id)? else { return unknown(id) };
        tx.delete(schema::GoneViews, id);
        return Ok(Outcome::View(Box::new(gone)));
    }
    let Some(view) = tables.view(id)? else { return unknown(id) };
    tx.delete(schema::Views, id);
    // Where a bucket answers no more there may be more and more of them.
    if tables.gone_views()?.len() < VIEWS_MAX {
        let View { name, store_mount_id, key, etag, upload, .. } = view.clone();
        tx.put(schema::GoneViews, id, &View { id, name, store_mount_id, key, etag, upload, ..View::default() });
    }
    if views::keeps_blocks(&view) {
        let counters = &mut tx.counters;
        counters.frozen_views = counters.frozen_views.saturating_sub(1);
        let was_unfrozen = u32::from(view.generation == UNFROZEN);
        counters.unfrozen_views = counters.unfrozen_views.saturating_sub(was_unfrozen);
        let others = tables.views()?.into_iter().filter(|other| other.id != id && other.mount_id == view.mount_id);
        let latest = others.filter(|other| other.generation != UNFROZEN).max_by_key(|other| other.generation);
        let (frozen_below, frozen_inodes) = latest.map_or((0, 0), |latest| (latest.generation, latest.last_inode));
        let mount = tables.mount(view.mount_id)?;
        if let Some(mount) = mount.filter(|mount| mount.frozen_below != frozen_below) {
            let settled_below = mount.settled_below.min(frozen_below);
            mount::put_frozen(tx, &Mount { frozen_below, frozen_inodes, settled_below, ..mount });
        }
    }
    Ok(Outcome::View(Box::new(view)))
}

/// Has those of these blocks freed that no view has any more.
pub fn release(tx: &mut Transaction<'_>, release: &ReleaseKept) -> Result<Outcome> {
    let known = tx.before().views()?;
    for block in &release.blocks {
        let Some(kept) = tx.now().get(schema::KeptBlocks, *block)? else { continue };
        if known.iter().any(|view| views::has(view, block, &kept)) {
            continue;
        }
        tx.delete(schema::KeptBlocks, *block);
        tx.counters.kept = tx.counters.kept.saturating_sub(1);
        let (Stray { inode, generation, index }, KeptRecord { mount_id, workers, .. }) = (*block, kept);
        let extents = vec![Extent { index, generation, workers, ..Extent::default() }];
        extents::put_garbage(tx, &GarbageRecord { inode, mount_id, extents, is_cut: false });
    }
    Ok(Outcome::Done)
}

fn put(tx: &mut Transaction<'_>, view: View) -> Outcome {
    tx.put(schema::Views, view.id, &view);
    Outcome::View(Box::new(view))
}

#[cfg(test)]
mod tests;
