//! The rules of locks, of one kind on one file: what conflicts, how ranges are split and joined, and who is next.
//!
//! A request is held against the locks that are held, not against those who wait: so whoever waits does so for a lock
//! that somebody has, and a circle of those is a deadlock. Among those who wait the order of arrival decides.

use cavern_proto::master::{Lock, LockType};
use cavern_proto::record::{LockRecord, WaitingLock};

/// The last byte that can be locked.
pub const LAST_BYTE: u64 = i64::MAX as u64;

/// Who has a lock: a session, and an owner in it.
pub type LockOwner = (u64, u64);

pub fn owner(lock: &Lock) -> LockOwner {
    (lock.session, lock.owner)
}

/// The locks that stand in the way of another.
pub fn conflicts<'l>(held: &'l [Lock], want: &'l Lock) -> impl Iterator<Item = &'l Lock> {
    held.iter().filter(move |known| {
        let one_is_exclusive = known.r#type() == LockType::Exclusive || want.r#type() == LockType::Exclusive;
        owner(known) != owner(want) && one_is_exclusive && overlap(known, want)
    })
}

fn overlap(one: &Lock, other: &Lock) -> bool {
    one.start <= other.end && other.start <= one.end
}

/// Gives an owner a lock, or takes away what it has in that range.
pub fn place(held: &mut Vec<Lock>, lock: Lock) {
    let mut lock = lock;
    let mut after = Vec::with_capacity(held.len() + 2);
    for known in held.drain(..) {
        if owner(&known) != owner(&lock) || !overlap(&known, &lock) {
            after.push(known);
            continue;
        }
        if known.start < lock.start {
            after.push(Lock { end: lock.start - 1, ..known });
        }
        if known.end > lock.end {
            after.push(Lock { start: lock.end + 1, ..known });
        }
    }
    if lock.r#type() != LockType::Unlocked {
        after.retain(|known| {
            let touches = known.start <= lock.end + 1 && lock.start <= known.end + 1;
            let joins = owner(known) == owner(&lock) && known.r#type == lock.r#type && touches;
            if joins {
                (lock.start, lock.end) = (lock.start.min(known.start), lock.end.max(known.end));
            }
            !joins
        });
        after.push(lock);
    }
    after.sort_by_key(|lock| (lock.start, owner(lock)));
    *held = after;
}

/// Gives the locks that nothing stands in the way of any more to those who wait for them.
pub fn grant(record: &mut LockRecord) -> Vec<WaitingLock> {
    let mut granted = Vec::new();
    // A lock that is granted may replace a stronger one of its owner: then there is more to be granted.
    loop {
        let LockRecord { held, waiting } = record;
        let next = waiting.iter().position(|waiting| {
            let wanted = waiting.lock.unwrap_or_default();
            conflicts(held, &wanted).next().is_none()
        });
        let Some(next) = next else { return granted };
        let waiting = waiting.remove(next);
        place(held, waiting.lock.unwrap_or_default());
        granted.push(waiting);
    }
}
