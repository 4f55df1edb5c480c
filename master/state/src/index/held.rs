//! Directories that sessions hold: what such a session changes in one it has answered before the master has the change.
//! Everybody else waits until it has let go.
//!
//! A session comes to hold a directory when it makes it, and in no other way; so nobody can have seen anything of what
//! is in there. It ends with the session, when the session lets go, and with the directory.

use std::collections::BTreeMap;

use crate::change::{HeldChange, HeldDirectory};
use crate::error::Result;
use crate::schema;
use crate::transaction::Transaction;

/// Directories of one session. More that are made in directories which it holds, and that it has answered for, are held
/// nevertheless.
pub const HELD_MAX: u64 = 100_000;

/// A session holds a directory that has just been made.
pub fn hold(tx: &mut Transaction<'_>, held: HeldDirectory) -> Result {
    let HeldDirectory { mount_id, directory, session } = held;
    let count = tx.before().held_count(session)? + 1;
    tx.put(schema::HeldDirectories, (mount_id, directory), &session);
    tx.put(schema::SessionDirectories, (session, directory), &mount_id);
    tx.put(schema::HeldCounts, session, &count);
    tx.counters.held += 1;
    tx.changes.held.push(HeldChange::Held(held));
    Ok(())
}

/// Nobody holds these any more. Once in a transaction for the directories of a session.
pub fn let_go(tx: &mut Transaction<'_>, directories: &[HeldDirectory]) -> Result {
    let mut of_session = BTreeMap::<u64, u64>::new();
    for held in directories {
        let HeldDirectory { mount_id, directory, session } = *held;
        tx.delete(schema::HeldDirectories, (mount_id, directory));
        tx.delete(schema::SessionDirectories, (session, directory));
        tx.changes.held.push(HeldChange::LetGo(*held));
        *of_session.entry(session).or_default() += 1;
    }
    for (session, gone) in of_session {
        match tx.before().held_count(session)?.saturating_sub(gone) {
            0 => tx.delete(schema::HeldCounts, session),
            left => tx.put(schema::HeldCounts, session, &left),
        }
    }
    tx.counters.held = tx.counters.held.saturating_sub(directories.len() as u64);
    Ok(())
}

/// A directory goes, and whoever holds it has nothing to hold any more.
pub fn forget(tx: &mut Transaction<'_>, mount_id: u32, directory: u64) -> Result {
    if tx.counters.held == 0 {
        return Ok(());
    }
    match tx.before().holder(mount_id, directory)? {
        Some(session) => let_go(tx, &[HeldDirectory { mount_id, directory, session }]),
        None => Ok(()),
    }
}

/// Lets go of what a session holds, of so many directories at most; of how many there were.
pub fn release_some(tx: &mut Transaction<'_>, session: u64, limit: usize) -> Result<usize> {
    // What has just been deleted costs a look as much as what is there.
    if tx.counters.held == 0 || tx.before().held_count(session)? == 0 {
        return Ok(0);
    }
    let held = tx.before().directories_of(session, limit)?;
    let_go(tx, &held)?;
    Ok(held.len())
}
