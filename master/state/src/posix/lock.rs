//! Locks of files: held by sessions, in the state, so that they outlive a master and end with their session.
//!
//! A request that must wait is refused with `EAGAIN` and recorded; when nothing stands in its way any more it is
//! granted, in the same change that removed the last obstacle, and its session is notified.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};

use cavern_proto::locks::{LAST_BYTE, LockOwner, conflicts, grant, owner, place};
use cavern_proto::master::{Kind, Lock, LockKind, LockType, SetLock};
use cavern_proto::record::{LockRecord, WaitingLock};
use rustix::io::Errno;

use super::context::{Checked, MutationContext, refuse};
use crate::change::Change;
use crate::error::Result;
use crate::schema;
use crate::tables::Tables;
use crate::transaction::Transaction;

/// Locks of one kind on one file, held or waited for: their record is written anew with each change.
const LOCKS_MAX: usize = 4096;
/// Locks and owners that a search for a deadlock looks at. What would take more is not followed to its end.
const SEARCHED_MAX: usize = 10_000;

/// The locks of one kind on one file, under way.
struct Locks {
    inode: u64,
    kind: LockKind,
    record: LockRecord,
    /// Sessions in the record as it was read, and whether they waited.
    sessions: BTreeMap<u64, bool>,
}

impl Locks {
    fn read(tables: Tables<'_>, inode: u64, kind: LockKind) -> Result<Self> {
        let record = tables.locks(inode, kind)?;
        let sessions = sessions(&record);
        Ok(Self { inode, kind, record, sessions })
    }

    /// Grants what can be granted, and has the sessions notified.
    fn grant(&mut self, tx: &mut Transaction<'_>) {
        for granted in grant(&mut self.record) {
            let session = granted.lock.unwrap_or_default().session;
            tx.notify(Change::LockGranted { session, waiter: granted.waiter });
        }
    }

    /// Grants what can be granted, and writes what there is then.
    fn settle(mut self, tx: &mut Transaction<'_>) {
        self.grant(tx);
        let key = (self.inode, self.kind);
        if self.record.held.is_empty() && self.record.waiting.is_empty() {
            tx.delete(schema::Locks, key);
        } else {
            tx.put(schema::Locks, key, &self.record);
        }
        let now = sessions(&self.record);
        for (session, waits) in &now {
            if self.sessions.get(session) != Some(waits) {
                tx.put(schema::SessionLocks, (*session, (self.kind, self.inode)), waits);
            }
        }
        for session in self.sessions.keys().filter(|session| !now.contains_key(session)) {
            tx.delete(schema::SessionLocks, (*session, (self.kind, self.inode)));
        }
    }
}

/// The sessions of a record, and whether they wait.
fn sessions(record: &LockRecord) -> BTreeMap<u64, bool> {
    let held = record.held.iter().map(|lock| (lock.session, false));
    let waiting = record.waiting.iter().map(|waiting| (waiting.lock.unwrap_or_default().session, true));
    // Who does both waits.
    held.chain(waiting).collect()
}

impl MutationContext<'_, '_> {
    pub fn set_lock(&mut self, set: SetLock) -> Checked<u64> {
        let (inode, kind) = (set.inode, set.kind());
        let lock = check(set.lock, kind, self.caller.session)?;
        if lock.r#type() != LockType::Unlocked && self.lockable_inode(inode)?.kind() != Kind::File {
            return refuse(Errno::INVAL, format!("{} is not a file", self.shown(inode)?));
        }
        let mut locks = Locks::read(self.tx.before(), inode, kind)?;
        let decision = self.decide(&mut locks, lock, &set);
        locks.settle(self.tx);
        decision.map(|()| inode)
    }

    fn decide(&mut self, locks: &mut Locks, lock: Lock, set: &SetLock) -> Checked {
        let is_it = |waiting: &WaitingLock| {
            set.waiter != 0
                && waiting.waiter == set.waiter
                && waiting.lock.is_some_and(|waiting| waiting.session == lock.session)
        };
        let waits = locks.record.waiting.iter().any(is_it);
        if waits && set.wait {
            return refuse(Errno::AGAIN, "the lock is still waited for");
        }
        locks.record.waiting.retain(|waiting| !is_it(waiting));
        // As on a local file system, one kind of flock becomes the other by way of none.
        let held = &mut locks.record.held;
        let has_other = |known: &Lock| owner(known) == owner(&lock) && known.r#type != lock.r#type;
        if locks.kind == LockKind::Flock && held.iter().any(has_other) {
            place(held, Lock { r#type: LockType::Unlocked.into(), ..lock });
            locks.grant(self.tx);
        }
        let (mut held, waiting) = (locks.record.held.clone(), locks.record.waiting.len());
        let is_unlock = lock.r#type() == LockType::Unlocked;
        if is_unlock {
            place(&mut held, lock);
            // A hole in a lock makes two of it.
            if held.len() <= locks.record.held.len() || held.len() + waiting <= LOCKS_MAX {
                locks.record.held = held;
                return Ok(());
            }
        }
        if is_unlock || held.len() + waiting >= LOCKS_MAX {
            return refuse(Errno::NOLCK, format!("{} has {LOCKS_MAX} locks already", self.shown(locks.inode)?));
        }
        let Some(obstacle) = conflicts(&locks.record.held, &lock).next() else {
            place(&mut locks.record.held, lock);
            return Ok(());
        };
        // Who knows the number of a session knows more than he needs to.
        let reason = match obstacle.session != lock.session {
            true => "a lock of another session stands in the way".to_owned(),
            false => format!("a lock of session {} stands in the way", obstacle.session),
        };
        if set.wait && set.waiter != 0 {
            if locks.kind == LockKind::Posix && waits_for_itself(self.tx.before(), locks, &lock)? {
                return refuse(Errno::DEADLK, "the owner of the lock waits for whoever asks");
            }
            locks.record.waiting.push(WaitingLock { waiter: set.waiter, lock: Some(lock) });
        }
        refuse(Errno::AGAIN, reason)
    }
}

/// A lock that makes sense.
fn check(lock: Option<Lock>, kind: LockKind, session: u64) -> Checked<Lock> {
    let lock = Lock { session, ..lock.unwrap_or_default() };
    if LockType::try_from(lock.r#type).is_err() {
        return refuse(Errno::INVAL, "a lock of a type that this master does not know");
    }
    match kind {
        LockKind::Unspecified => refuse(Errno::INVAL, "a lock of a kind that this master does not know"),
        LockKind::Flock => Ok(Lock { start: 0, end: LAST_BYTE, ..lock }),
        LockKind::Posix if lock.start > lock.end || lock.end > LAST_BYTE => {
            refuse(Errno::INVAL, format!("bytes {} to {} cannot be locked", lock.start, lock.end))
        }
        LockKind::Posix => Ok(lock),
    }
}

/// Who waits for whom, as far as it has been looked at: a session may have very many locks, and many owners of them.
struct WaitSearch<'a> {
    tables: Tables<'a>,
    /// By file.
    records: HashMap<u64, LockRecord>,
    /// By session and owner: files, and what is waited for there.
    waiting: HashMap<u64, HashMap<u64, Vec<(u64, Lock)>>>,
    /// Locks that may still be looked at.
    left: usize,
}

impl WaitSearch<'_> {
    /// Reads where a session waits.
    fn read(&mut self, session: u64) -> Result {
        let places = self.tables.locks_of(session, self.left)?;
        self.left -= places.len();
        let mut by_owner: HashMap<u64, Vec<(u64, Lock)>> = HashMap::new();
        for (_, inode, _) in places.into_iter().filter(|(kind, _, waits)| *kind == LockKind::Posix && *waits) {
            let record = match self.records.entry(inode) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(_) if self.left == 0 => break,
                Entry::Vacant(unknown) => {
                    let record = self.tables.locks(inode, LockKind::Posix)?;
                    self.left = self.left.saturating_sub(record.held.len() + record.waiting.len());
                    unknown.insert(record)
                }
            };
            for lock in record.waiting.iter().filter_map(|waiting| waiting.lock).filter(|lock| lock.session == session)
            {
                by_owner.entry(lock.owner).or_default().push((inode, lock));
            }
        }
        self.waiting.insert(session, by_owner);
        Ok(())
    }
}

/// Whether whoever holds what stands in the way of `want` waits for its owner, by way of others perhaps.
fn waits_for_itself(tables: Tables<'_>, here: &Locks, want: &Lock) -> Result<bool> {
    let records = HashMap::from([(here.inode, here.record.clone())]);
    let mut search = WaitSearch { tables, records, waiting: HashMap::new(), left: SEARCHED_MAX };
    let mut to_visit: Vec<LockOwner> = conflicts(&here.record.held, want).map(owner).collect();
    let mut visited = HashSet::new();
    while let Some(next) = to_visit.pop() {
        if next == owner(want) {
            return Ok(true);
        }
        if visited.len() == SEARCHED_MAX || !visited.insert(next) {
            continue;
        }
        let (session, number) = next;
        if !search.waiting.contains_key(&session) {
            search.read(session)?;
        }
        let waiting = search.waiting.get(&session).and_then(|owners| owners.get(&number));
        for (inode, lock) in waiting.into_iter().flatten() {
            let held = search.records.get(inode).map_or(&[][..], |record| &record.held);
            to_visit.extend(conflicts(held, lock).map(owner).filter(|owner| !visited.contains(owner)));
        }
    }
    Ok(false)
}

/// Frees what a session has locked, and ends its waiting, at so many files at most; at how many that was.
pub fn release_some(tx: &mut Transaction<'_>, session: u64, limit: usize) -> Result<usize> {
    let tables = tx.before();
    let files = tables.locks_of(session, limit)?;
    for (kind, inode, _) in files.iter().copied() {
        let mut locks = Locks::read(tables, inode, kind)?;
        locks.record.held.retain(|lock| lock.session != session);
        locks.record.waiting.retain(|waiting| waiting.lock.is_some_and(|lock| lock.session != session));
        locks.settle(tx);
    }
    Ok(files.len())
}

#[cfg(test)]
mod tests;
