//! Directories delegated to sessions: what such a session changes in one it has answered before the master has the
//! change. Everybody else waits until it has returned the delegation.
//!
//! A session gets the delegation of a directory when it makes it, or when it asks for one that nobody else knows
//! anything of: so nobody has what is in there in a cache. It ends with the session, when the session lets go, and with
//! the directory.

use std::collections::BTreeMap;

use crate::change::{DelegationChange, DirectoryDelegation};
use crate::error::Result;
use crate::schema;
use crate::transaction::Transaction;

/// Directories of one session. More that are made in directories which it holds, and that it has answered for, are held
/// nevertheless.
pub const DELEGATIONS_MAX: u64 = 100_000;

/// A session holds the delegation of a directory that nobody holds.
pub fn grant(tx: &mut Transaction<'_>, held: DirectoryDelegation) -> Result {
    let DirectoryDelegation { mount_id, directory, session } = held;
    let count = tx.before().delegation_count(session)? + 1;
    tx.put(schema::DirectoryDelegations, (mount_id, directory), &session);
    tx.put(schema::SessionDelegations, (session, directory), &mount_id);
    tx.put(schema::DelegationCounts, session, &count);
    tx.counters.delegations += 1;
    tx.changes.delegations.push(DelegationChange::Granted(held));
    Ok(())
}

/// Nobody holds these any more. Once in a transaction for the directories of a session.
pub fn give_back(tx: &mut Transaction<'_>, directories: &[DirectoryDelegation]) -> Result {
    let mut of_session = BTreeMap::<u64, u64>::new();
    for held in directories {
        let DirectoryDelegation { mount_id, directory, session } = *held;
        tx.delete(schema::DirectoryDelegations, (mount_id, directory));
        tx.delete(schema::SessionDelegations, (session, directory));
        tx.changes.delegations.push(DelegationChange::Returned(*held));
        *of_session.entry(session).or_default() += 1;
    }
    for (session, gone) in of_session {
        match tx.before().delegation_count(session)?.saturating_sub(gone) {
            0 => tx.delete(schema::DelegationCounts, session),
            left => tx.put(schema::DelegationCounts, session, &left),
        }
    }
    tx.counters.delegations = tx.counters.delegations.saturating_sub(directories.len() as u64);
    Ok(())
}

/// A directory goes, and whoever holds it has nothing to hold any more.
pub fn forget(tx: &mut Transaction<'_>, mount_id: u32, directory: u64) -> Result {
    if tx.counters.delegations == 0 {
        return Ok(());
    }
    match tx.before().holder(mount_id, directory)? {
        Some(session) => give_back(tx, &[DirectoryDelegation { mount_id, directory, session }]),
        None => Ok(()),
    }
}

/// Lets go of what a session holds, of so many directories at most; of how many there were.
pub fn release_some(tx: &mut Transaction<'_>, session: u64, limit: usize) -> Result<usize> {
    // What has just been deleted costs a look as much as what is there.
    if tx.counters.delegations == 0 || tx.before().delegation_count(session)? == 0 {
        return Ok(0);
    }
    let held = tx.before().directories_of(session, limit)?;
    give_back(tx, &held)?;
    Ok(held.len())
}
