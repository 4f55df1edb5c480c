//! Directories that sessions hold: what such a session changes in one it has answered before the master has the change.
//! Everybody else waits until it has let go.
//!
//! A session comes to hold a directory when it makes it, and in no other way; so nobody can have seen anything of what
//! is in there. It ends with the session, when the session lets go, and with the directory.

use std::collections::BTreeMap;

use super::Family;
use super::records::{held_by_key, held_count_key, held_key};
use super::transaction::Transaction;
use crate::error::StateError;

/// Directories of one session. More that are made in directories which it holds, and that it has answered for, are held
/// nevertheless.
pub const HELD_MAX: u64 = 100_000;

/// A directory that a session holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldDirectory {
    pub mount_id: u32,
    pub directory: u64,
    pub session: u64,
}

/// What became of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeldChange {
    Held(HeldDirectory),
    LetGo(HeldDirectory),
}

/// A session holds a directory that has just been made.
pub fn hold(transaction: &mut Transaction<'_>, held: HeldDirectory) -> Result<(), StateError> {
    let HeldDirectory { mount_id, directory, session } = held;
    let count = transaction.before().held_count(session)? + 1;
    transaction.put_bytes(Family::Meta, &held_key(mount_id, directory), &session.to_be_bytes());
    transaction.put_bytes(Family::Meta, &held_by_key(session, directory), &mount_id.to_be_bytes());
    transaction.put_bytes(Family::Meta, &held_count_key(session), &count.to_be_bytes());
    transaction.counters.held += 1;
    transaction.held.push(HeldChange::Held(held));
    Ok(())
}

/// Nobody holds these any more. Once in a transaction for the directories of a session.
pub fn let_go(transaction: &mut Transaction<'_>, directories: &[HeldDirectory]) -> Result<(), StateError> {
    let mut of_session = BTreeMap::<u64, u64>::new();
    for held in directories {
        let HeldDirectory { mount_id, directory, session } = *held;
        transaction.delete(Family::Meta, &held_key(mount_id, directory));
        transaction.delete(Family::Meta, &held_by_key(session, directory));
        transaction.held.push(HeldChange::LetGo(*held));
        *of_session.entry(session).or_default() += 1;
    }
    for (session, gone) in of_session {
        let key = held_count_key(session);
        match transaction.before().held_count(session)?.saturating_sub(gone) {
            0 => transaction.delete(Family::Meta, &key),
            left => transaction.put_bytes(Family::Meta, &key, &left.to_be_bytes()),
        }
    }
    let counters = &mut transaction.counters;
    counters.held = counters.held.saturating_sub(directories.len() as u64);
    Ok(())
}

/// A directory goes, and whoever holds it has nothing to hold any more.
pub fn forget(transaction: &mut Transaction<'_>, mount_id: u32, directory: u64) -> Result<(), StateError> {
    if transaction.counters.held == 0 {
        return Ok(());
    }
    match transaction.before().holder(mount_id, directory)? {
        Some(session) => let_go(transaction, &[HeldDirectory { mount_id, directory, session }]),
        None => Ok(()),
    }
}

/// Lets go of what a session holds, of so many directories at most; of how many there were.
pub fn release_some(transaction: &mut Transaction<'_>, session: u64, limit: usize) -> Result<usize, StateError> {
    // What has just been deleted costs a look as much as what is there.
    if transaction.counters.held == 0 || transaction.before().held_count(session)? == 0 {
        return Ok(0);
    }
    let held = transaction.before().directories_of(session, limit)?;
    let_go(transaction, &held)?;
    Ok(held.len())
}
