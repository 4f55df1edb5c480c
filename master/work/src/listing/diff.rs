//! The difference between a window of a listing and the namespace.
//!
//! Runs outside the apply loop, in steps that each end after a bounded number of differences, so that a directory of a
//! million entries that vanished costs a thousand small proposals and no memory.

use std::cmp::Ordering;
use std::ops::ControlFlow;

use bytes::Bytes;
use cavern_proto::NAME_MAX;
use cavern_proto::master::Kind;
use cavern_proto::record::{DentryRecord, InodeVersion, ListedEntry};
use cavern_state::Tables;
use cavern_state::records::is_listed;
use cavern_ufs::{Listed, Window, place_cmp};

use crate::error::WorkError;

/// Removals of one step at most.
const STEP_REMOVALS: usize = 1000;

/// Part of a difference.
#[derive(Debug, Default)]
pub struct Step {
    pub remove: Vec<Bytes>,
    pub upsert: Vec<ListedEntry>,
    /// Files in the places of directories, which go with all that they have.
    pub replace: Vec<ListedEntry>,
    /// Go on after this name; `None` when the window is done.
    pub next: Option<Vec<u8>>,
}

impl Step {
    pub fn is_empty(&self) -> bool {
        self.remove.is_empty() && self.upsert.is_empty() && self.replace.is_empty()
    }
}

/// A name that both sides have.
pub struct MatchedName {
    pub name: Bytes,
    pub dentry: DentryRecord,
    pub version: Option<InodeVersion>,
}

/// Whether an object is the one that an inode of cache-mode stands for.
pub fn is_same_version(compared: &MatchedName, listed: &Listed) -> Result<bool, WorkError> {
    Ok(match (listed, &compared.version) {
        (Listed::File { size, mtime_ns, etag }, Some(version)) if compared.dentry.kind() == Kind::File => {
            is_listed(version, etag, *size, *mtime_ns)
        }
        _ => false,
    })
}

/// The next step for `window`, whose names shrink by those that were compared. `cursor` is what the step before gave.
/// Names for which `is_newer` says so were asked about since the listing began, and are left alone; `is_same` compares
/// what both sides have.
pub fn step(
    tables: Tables<'_>,
    directory: u64,
    window: &mut Window,
    cursor: Option<Vec<u8>>,
    is_newer: &dyn Fn(&[u8]) -> bool,
    is_same: &dyn Fn(&MatchedName, &Listed) -> Result<bool, WorkError>,
) -> Result<Step, WorkError> {
    let mut step = Step::default();
    let mut compare: Vec<(Bytes, DentryRecord, Listed)> = Vec::with_capacity(window.names.len());
    let (after, upto) = (window.after.clone(), window.upto.clone());
    let mut visit = |name: &[u8], dentry: DentryRecord, step: &mut Step| {
        // Both come in the same order.
        let is_first = window.names.first_key_value().is_some_and(|(first, _)| first[..] == *name);
        let listed = if is_first { window.names.pop_first() } else { window.names.remove_entry(name) };
        if is_newer(name) {
            return;
        }
        match listed {
            None => step.remove.push(Bytes::copy_from_slice(name)),
            Some((_, Listed::Directory)) if dentry.kind() == Kind::Directory => {}
            Some((name, listed)) => compare.push((name, dentry, listed)),
        }
    };
    if cursor.is_none() {
        for name in names_before_the_scan(&after, upto.as_deref()) {
            if let Some(dentry) = tables.dentry(directory, name)? {
                visit(name, dentry, &mut step);
            }
        }
    }
    let after = cursor.unwrap_or(after);
    step.next = tables
        .scan(directory, (!after.is_empty()).then_some(after.as_slice()), |name, dentry| {
            if let Some(upto) = &upto {
                if name > upto.as_slice() {
                    return Ok(ControlFlow::Break(None));
                }
                if place_cmp(name, upto) == Ordering::Greater {
                    return Ok(ControlFlow::Continue(()));
                }
            }
            visit(name, dentry, &mut step);
            let is_full = step.remove.len() >= STEP_REMOVALS;
            Ok(if is_full { ControlFlow::Break(Some(name.to_vec())) } else { ControlFlow::Continue(()) })
        })?
        .flatten();
    let inodes: Vec<u64> = compare.iter().map(|(_, dentry, _)| dentry.inode).collect();
    for ((name, dentry, listed), version) in compare.into_iter().zip(tables.versions(&inodes)?) {
        let compared = MatchedName { name, dentry, version };
        if !is_same(&compared, &listed)? {
            let is_directory = compared.dentry.kind() == Kind::Directory;
            let differing = if is_directory { &mut step.replace } else { &mut step.upsert };
            differing.push(listed_entry(compared.name, listed));
        }
    }
    if step.next.is_none() {
        let new = std::mem::take(&mut window.names).into_iter().filter(|(name, _)| !is_newer(name));
        step.upsert.extend(new.map(|(name, listed)| listed_entry(name, listed)));
    }
    Ok(step)
}

/// Names whose place is in the window although they themselves sort before it: prefixes of where it begins.
fn names_before_the_scan<'a>(position: &'a [u8], upto: Option<&'a [u8]>) -> impl Iterator<Item = &'a [u8]> {
    let longest = position.len().min(NAME_MAX);
    let prefixes = (1..=longest).map(move |length| &position[..length]);
    let is_inside = move |name: &&[u8]| {
        place_cmp(name, position) == Ordering::Greater
            && upto.is_none_or(|upto| place_cmp(name, upto) != Ordering::Greater)
    };
    prefixes.take_while(|name| !name.contains(&b'/')).filter(is_inside)
}

/// An entry of a listing as a command carries it.
pub fn listed_entry(name: Bytes, listed: Listed) -> ListedEntry {
    match listed {
        Listed::Directory => ListedEntry { name, kind: Kind::Directory as i32, ..ListedEntry::default() },
        Listed::File { size, mtime_ns, etag } => {
            ListedEntry { name, kind: Kind::File as i32, size, mtime_ns, etag, restored: None }
        }
    }
}
