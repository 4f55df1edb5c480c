//! The rules of locks, of one kind on one file: what conflicts, how ranges are split and joined, and who is next. The
//! master has all locks by them, and a client those that only it can have.
//!
//! A request is held against the locks that are held, not against those who wait: so whoever waits does so for a lock
//! that somebody has, and a circle of those is a deadlock. Among those who wait the order of arrival decides.

use crate::master::{Lock, LockType};
use crate::record::{LockRecord, WaitingLock};

/// The last byte that can be locked.
pub const LAST_BYTE: u64 = i64::MAX as u64;

/// Who has a lock: a session, and an owner in it.
pub type LockOwner = (u64, u64);

/// That of a lock.
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

/// Whether they have a byte in common.
pub fn overlap(one: &Lock, other: &Lock) -> bool {
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const BYTES: u64 = 12;

    fn lock(owner: u64, r#type: LockType, start: u64, end: u64) -> Lock {
        Lock { session: 7, owner, pid: 1, r#type: r#type.into(), start, end }
    }

    fn lock_type() -> impl Strategy<Value = LockType> {
        prop_oneof![Just(LockType::Unlocked), Just(LockType::Shared), Just(LockType::Exclusive)]
    }

    fn request() -> impl Strategy<Value = Lock> {
        (1u64..4, lock_type(), 0..BYTES, 0..BYTES).prop_map(|(owner, kind, one, other)| {
            let (start, end) = (one.min(other), one.max(other));
            lock(owner, kind, start, end)
        })
    }

    /// By byte and owner: the type of the lock.
    type Model = BTreeMap<(u64, u64), LockType>;

    fn model_conflicts(model: &Model, want: &Lock) -> bool {
        model.iter().any(|((byte, owner), held)| {
            (want.start..=want.end).contains(byte)
                && *owner != want.owner
                && (*held == LockType::Exclusive || want.r#type() == LockType::Exclusive)
        })
    }

    fn model_place(model: &mut Model, lock: &Lock) {
        for byte in lock.start..=lock.end {
            match lock.r#type() {
                LockType::Unlocked => model.remove(&(byte, lock.owner)),
                held => model.insert((byte, lock.owner), held),
            };
        }
    }

    fn bytes(held: &[Lock]) -> Model {
        let mut model = Model::new();
        for lock in held {
            for byte in lock.start..=lock.end {
                assert_eq!(model.insert((byte, lock.owner), lock.r#type()), None, "two locks of one owner on one byte");
            }
        }
        model
    }

    proptest! {
        #[test]
        fn ranges_are_those_of_a_file_whose_bytes_are_locked_one_by_one(
            requests in prop::collection::vec(request(), 1..60),
        ) {
            let (mut held, mut model) = (Vec::new(), Model::new());
            for want in requests {
                let refused = want.r#type() != LockType::Unlocked && conflicts(&held, &want).next().is_some();
                prop_assert_eq!(refused, want.r#type() != LockType::Unlocked && model_conflicts(&model, &want));
                if refused {
                    continue;
                }
                place(&mut held, want);
                model_place(&mut model, &want);
                prop_assert_eq!(bytes(&held), model.clone());
                // Joined as far as can be, and in order.
                let touching = held.iter().any(|one| held.iter().any(|other| {
                    owner(one) == owner(other) && one.r#type == other.r#type && one.end + 1 == other.start
                }));
                prop_assert!(!touching && held.is_sorted_by_key(|lock| (lock.start, owner(lock))), "{held:?}");
            }
        }

        #[test]
        fn nobody_waits_for_nothing_and_the_first_to_come_is_the_first_to_go(
            requests in prop::collection::vec((request(), any::<bool>()), 1..60)
        ) {
            let (mut record, mut number) = (LockRecord::default(), 0);
            for (want, waits) in requests {
                if want.r#type() == LockType::Unlocked || conflicts(&record.held, &want).next().is_none() {
                    place(&mut record.held, want);
                } else if waits {
                    number += 1;
                    record.waiting.push(WaitingLock { waiter: number, lock: Some(want) });
                }
                let before = record.clone();
                let granted = grant(&mut record);
                prop_assert_eq!(granted.len() + record.waiting.len(), before.waiting.len());
                for waiting in &record.waiting {
                    let wanted = waiting.lock.unwrap();
                    prop_assert!(conflicts(&record.held, &wanted).next().is_some(), "{waiting:?}");
                    // Who came later has not overtaken somebody who could have had the lock.
                    let overtaken = conflicts(&before.held, &wanted).next().is_none()
                        && granted.iter().any(|granted| granted.waiter > waiting.waiter);
                    let other = granted.iter().any(|granted| {
                        let lock: Vec<_> = granted.lock.into_iter().collect();
                        granted.waiter < waiting.waiter && conflicts(&lock, &wanted).next().is_some()
                    });
                    prop_assert!(!overtaken || other, "{waiting:?} in {before:?}");
                }
                let model = bytes(&record.held);
                for ((byte, owner), held) in &model {
                    let alone = model.keys().filter(|(other, _)| other == byte).count() == 1;
                    prop_assert!(alone || *held == LockType::Shared, "byte {byte} of owner {owner} is locked twice");
                }
            }
        }
    }
}
