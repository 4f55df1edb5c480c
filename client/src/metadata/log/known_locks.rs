//! Locks of files that nobody but this session can have locked: as the master has them, or will have them when all that
//! was answered has reached it.
//!
//! That is so of what this session has made in a directory delegated to it, as long as it is in one. A file that was
//! moved from elsewhere, or has had a name elsewhere, may be locked by others: it has strayed, and stays so. What the
//! master is asked for is entered with its answer; until then nothing about that file is certain.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::Range;

use cavern_proto::locks::{LAST_BYTE, conflicts, overlap, place};
use cavern_proto::master::{Lock, LockKind, LockType, MutationResult, SetLock};
use rustix::io::Errno;

/// Locks of all files. Of a file that would have more, nothing is known any longer.
const LOCKS_MAX: usize = 65_536;
/// Locks of one kind on one file: the master takes more, for those who wait.
const OF_FILE_MAX: usize = 1024;
/// Ranges of numbers that are remembered, of 16,384 each at most.
const RANGES_MAX: usize = 1024;
/// Files that are remembered one by one.
const FILES_MAX: usize = 65_536;

/// An inode and a `LockKind`.
type LockedFile = (u64, i32);

/// Locks that only this session can have.
#[derive(Debug, Default)]
pub(in super::super) struct KnownLocks {
    /// Numbers of what is made here.
    numbers: VecDeque<Range<u64>>,
    /// Files that were made here and have their numbers from the master.
    made: HashSet<u64>,
    strays: HashSet<u64>,
    files: HashMap<LockedFile, FileLocks>,
    /// Locks of all files.
    count: usize,
}

#[derive(Debug, Default)]
struct FileLocks {
    /// Of session 0: all are of ours.
    held: Vec<Lock>,
    /// Owners that ask the master for something.
    asking: Vec<(u64, Asking)>,
    /// Nobody can say in which order the master has made what an owner has asked for.
    is_unclear: bool,
}

/// How the master is asked for a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Asking {
    Once,
    /// The answer may be an event, which is in no order with those to other changes.
    Waiting,
}

/// What will become of a request for a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum LockPrediction {
    /// All is as it is to be already.
    Nothing,
    /// A lock of another owner stands in the way.
    InTheWay,
    /// It is made; what an owner gains by it, if it is no unlock.
    Made(Option<LockUpgrade>),
}

/// What an owner has of the bytes of a lock that it gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum LockUpgrade {
    /// It had none of them before.
    All,
    /// It had some, and gives nothing of that up.
    More,
    /// It had some, and has less of that now.
    Other,
}

impl KnownLocks {
    pub(in super::super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// The session has numbers for inodes.
    pub(in super::super) fn numbers(&mut self, first: u64, count: u32) {
        let end = first.saturating_add(u64::from(count));
        match self.numbers.back_mut() {
            Some(last) if last.end == first => last.end = end,
            _ => self.numbers.push_back(first..end),
        }
        if self.numbers.len() > RANGES_MAX {
            self.numbers.pop_front();
        }
    }

    /// A file was made in a directory that is held, under a number that is the master's.
    pub(in super::super) fn made(&mut self, inode: u64) {
        if self.made.len() < FILES_MAX {
            self.made.insert(inode);
        }
    }

    /// A file has been moved or linked by way of the master: others may have come to know it, or know it already.
    pub(in super::super) fn stray(&mut self, inode: u64) {
        if !self.is_ours(inode) {
            return;
        }
        if self.strays.len() >= FILES_MAX {
            return self.clear();
        }
        self.strays.insert(inode);
        for kind in [LockKind::Posix, LockKind::Flock] {
            let gone = self.files.remove(&(inode, kind.into()));
            self.count -= gone.map_or(0, |file| file.held.len());
        }
    }

    /// Whether a file was made here and has not strayed.
    fn is_ours(&self, inode: u64) -> bool {
        let is_made = self.numbers.iter().any(|range| range.contains(&inode)) || self.made.contains(&inode);
        is_made && !self.strays.contains(&inode)
    }

    /// The master is about to be asked for something.
    pub(in super::super) fn begin_asking(&mut self, set: &SetLock, asking: Asking) {
        if !self.is_ours(set.inode) {
            return;
        }
        let (locks, owner) = (self.files.entry(of(set)).or_default(), owner_of(set));
        let meets =
            |known: &(u64, Asking)| known.0 == owner && (known.1 == Asking::Waiting || asking == Asking::Waiting);
        locks.is_unclear |= locks.asking.iter().any(meets);
        locks.asking.push((owner, asking));
    }

    /// That is answered, and entered; or it is not known what became of it.
    pub(in super::super) fn end_asking(&mut self, set: &SetLock, asking: Asking, is_clear: bool) {
        let (file, owner) = (of(set), owner_of(set));
        let Some(locks) = self.files.get_mut(&file) else { return };
        if let Some(at) = locks.asking.iter().position(|known| *known == (owner, asking)) {
            locks.asking.swap_remove(at);
        }
        locks.is_unclear |= !is_clear;
        match (locks.asking.is_empty(), locks.is_unclear, locks.held.is_empty()) {
            (true, true, _) => self.stray(file.0),
            (true, false, true) => drop(self.files.remove(&file)),
            _ => {}
        }
    }

    /// The locks of a file, if they are certain.
    fn certain(&self, file: LockedFile) -> Option<&[Lock]> {
        if !self.is_ours(file.0) {
            return None;
        }
        match self.files.get(&file) {
            None => Some(&[]),
            Some(locks) => locks.asking.is_empty().then_some(&locks.held),
        }
    }

    /// What becomes of a request that does not wait; `None` when it is not certain.
    pub(in super::super) fn predict(&self, set: &SetLock) -> Option<LockPrediction> {
        let (want, held) = (checked(set).filter(|_| !set.wait && set.waiter == 0)?, self.certain(of(set))?);
        let own = || held.iter().filter(|known| known.owner == want.owner && overlap(known, &want));
        let has_none = own().next().is_none();
        if want.r#type() == LockType::Unlocked {
            return Some(if has_none { LockPrediction::Nothing } else { LockPrediction::Made(None) });
        }
        if conflicts(held, &want).next().is_some() {
            // An flock that becomes one of the other kind is lost by that.
            let is_certain = set.kind() == LockKind::Posix || has_none;
            return is_certain.then_some(LockPrediction::InTheWay);
        }
        let covers = |known: &Lock| known.r#type == want.r#type && known.start <= want.start && want.end <= known.end;
        if own().any(covers) {
            return Some(LockPrediction::Nothing);
        }
        let is_stronger = |known: &Lock| known.r#type() == LockType::Exclusive && want.r#type() == LockType::Shared;
        let upgrade = match own().any(is_stronger) {
            true => LockUpgrade::Other,
            false if has_none => LockUpgrade::All,
            false => LockUpgrade::More,
        };
        let has_room = held.len() < OF_FILE_MAX && self.count < LOCKS_MAX;
        has_room.then_some(LockPrediction::Made(Some(upgrade)))
    }

    /// The first lock in the way of another; `None` when it is not certain whether there is one.
    pub(in super::super) fn in_the_way(&self, inode: u64, kind: LockKind, want: &Lock) -> Option<Option<Lock>> {
        let set = SetLock { inode, kind: kind.into(), lock: Some(*want), ..SetLock::default() };
        let want = checked(&set)?;
        Some(conflicts(self.certain(of(&set))?, &want).next().copied())
    }

    /// What an owner has locked of the bytes of an unlock.
    pub(in super::super) fn owned(&self, unlock: &SetLock) -> Vec<Lock> {
        let want = unlock.lock.unwrap_or_default();
        let held = self.files.get(&of(unlock)).map_or(&[][..], |file| &file.held);
        let own = held.iter().filter(|known| known.owner == want.owner && overlap(known, &want));
        own.map(|known| Lock { start: known.start.max(want.start), end: known.end.min(want.end), ..*known }).collect()
    }

    /// A lock is made, or an unlock.
    pub(in super::super) fn enter(&mut self, set: &SetLock) {
        let Some(lock) = checked(set).filter(|_| self.is_ours(set.inode)) else { return };
        let file = self.files.entry(of(set)).or_default();
        let before = file.held.len();
        place(&mut file.held, lock);
        let after = file.held.len();
        self.count = self.count + after - before;
        if after > 2 * OF_FILE_MAX || self.count > 2 * LOCKS_MAX {
            self.stray(set.inode);
        } else if after == 0 && file.asking.is_empty() {
            self.files.remove(&of(set));
        }
    }

    /// The master has answered a request.
    pub(in super::super) fn enter_answer(&mut self, set: &SetLock, result: &MutationResult) {
        const AGAIN: i32 = Errno::AGAIN.raw_os_error();
        const DEADLOCK: i32 = Errno::DEADLK.raw_os_error();
        let is_refused = result.delegated_elsewhere == 0 && result.unlisted == 0;
        match result.errno {
            0 => self.enter(set),
            AGAIN if is_refused && set.kind() == LockKind::Flock => {
                // One kind becomes the other by way of none.
                let lock = set.lock.unwrap_or_default();
                let is_other = |known: &Lock| known.owner == lock.owner && known.r#type != lock.r#type;
                if self.files.get(&of(set)).is_some_and(|file| file.held.iter().any(is_other)) {
                    let none = Lock { r#type: LockType::Unlocked.into(), ..lock };
                    self.enter(&SetLock { lock: Some(none), ..*set });
                }
            }
            AGAIN | DEADLOCK if is_refused => {}
            _ => self.stray(set.inode),
        }
    }
}

fn of(set: &SetLock) -> LockedFile {
    (set.inode, set.kind)
}

fn owner_of(set: &SetLock) -> u64 {
    set.lock.unwrap_or_default().owner
}

/// The lock of a request as it is entered; `None` for one without sense.
fn checked(set: &SetLock) -> Option<Lock> {
    let lock = Lock { session: 0, ..set.lock? };
    LockType::try_from(lock.r#type).ok()?;
    match set.kind() {
        LockKind::Flock => Some(Lock { start: 0, end: LAST_BYTE, ..lock }),
        LockKind::Posix => (lock.start <= lock.end && lock.end <= LAST_BYTE).then_some(lock),
        LockKind::Unspecified => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const OURS: u64 = 10;

    fn known() -> KnownLocks {
        let mut known = KnownLocks::default();
        known.numbers(OURS, 5);
        known
    }

    fn set(kind: LockKind, owner: u64, r#type: LockType, start: u64, end: u64) -> SetLock {
        let lock = Lock { session: 7, owner, pid: 1, r#type: r#type.into(), start, end };
        SetLock { inode: OURS, kind: kind.into(), lock: Some(lock), ..SetLock::default() }
    }

    fn posix(owner: u64, r#type: LockType, start: u64, end: u64) -> SetLock {
        set(LockKind::Posix, owner, r#type, start, end)
    }

    fn flock(owner: u64, r#type: LockType) -> SetLock {
        set(LockKind::Flock, owner, r#type, 0, 0)
    }

    const MADE: Option<LockPrediction> = Some(LockPrediction::Made(Some(LockUpgrade::All)));

    #[test]
    fn what_others_may_know_of_is_not_certain() {
        let mut known = known();
        let wanted = posix(1, LockType::Exclusive, 0, 9);
        assert_eq!(known.predict(&wanted), MADE);
        assert_eq!(known.predict(&SetLock { inode: 15, ..wanted }), None, "of another session");
        known.made(15);
        assert_eq!(known.predict(&SetLock { inode: 15, ..wanted }), MADE);
        assert_eq!(known.predict(&SetLock { wait: true, waiter: 1, ..wanted }), None);
        assert_eq!(known.predict(&posix(1, LockType::Exclusive, 9, 0)), None, "it has no sense");
        known.enter(&wanted);
        known.stray(OURS);
        assert_eq!((known.predict(&wanted), known.count), (None, 0));
        known.enter(&wanted);
        assert!(known.files.is_empty());
        known.clear();
        assert_eq!(known.predict(&SetLock { inode: 15, ..wanted }), None);
    }

    #[test]
    fn locks_stand_in_each_others_way_and_what_changes_nothing_is_nothing() {
        let mut known = known();
        known.enter(&posix(1, LockType::Shared, 0, 9));
        assert_eq!(known.predict(&posix(2, LockType::Exclusive, 9, 20)), Some(LockPrediction::InTheWay));
        assert_eq!(known.predict(&posix(2, LockType::Shared, 9, 20)), MADE);
        assert_eq!(known.predict(&posix(1, LockType::Shared, 3, 4)), Some(LockPrediction::Nothing));
        assert_eq!(known.predict(&posix(2, LockType::Unlocked, 0, 9)), Some(LockPrediction::Nothing));
        assert_eq!(known.predict(&posix(1, LockType::Unlocked, 9, 9)), Some(LockPrediction::Made(None)));
        let upgrade = |known: &KnownLocks, set: SetLock| match known.predict(&set) {
            Some(LockPrediction::Made(upgrade)) => upgrade,
            other => panic!("{other:?}"),
        };
        assert_eq!(upgrade(&known, posix(1, LockType::Exclusive, 5, 20)), Some(LockUpgrade::More));
        assert_eq!(upgrade(&known, posix(1, LockType::Shared, 5, 20)), Some(LockUpgrade::More));
        known.enter(&posix(1, LockType::Exclusive, 5, 20));
        assert_eq!(upgrade(&known, posix(1, LockType::Shared, 0, 6)), Some(LockUpgrade::Other));
        let owned: Vec<_> =
            known.owned(&posix(1, LockType::Unlocked, 4, 7)).iter().map(|one| (one.start, one.end)).collect();
        assert_eq!(owned, [(4, 4), (5, 7)]);
        let found = known.in_the_way(OURS, LockKind::Posix, &posix(2, LockType::Shared, 0, 30).lock.unwrap());
        assert_eq!(found.unwrap().map(|one| (one.start, one.end)), Some((5, 20)));
        assert_eq!(known.in_the_way(OURS, LockKind::Flock, &flock(2, LockType::Exclusive).lock.unwrap()), Some(None));
    }

    #[test]
    fn an_flock_that_would_be_lost_by_its_change_is_not_answered_here() {
        let mut known = known();
        known.enter(&flock(1, LockType::Shared));
        assert_eq!(known.predict(&flock(1, LockType::Exclusive)), Some(LockPrediction::Made(Some(LockUpgrade::More))));
        known.enter(&flock(2, LockType::Shared));
        assert_eq!(known.predict(&flock(1, LockType::Exclusive)), None);
        assert_eq!(known.predict(&flock(3, LockType::Exclusive)), Some(LockPrediction::InTheWay));
        // The master says so, and has dropped the one that there was.
        known.begin_asking(&flock(1, LockType::Exclusive), Asking::Once);
        let refused = MutationResult { errno: Errno::AGAIN.raw_os_error(), ..MutationResult::default() };
        known.enter_answer(&flock(1, LockType::Exclusive), &refused);
        known.end_asking(&flock(1, LockType::Exclusive), Asking::Once, true);
        assert_eq!(known.predict(&flock(1, LockType::Unlocked)), Some(LockPrediction::Nothing));
        assert_eq!(known.predict(&flock(2, LockType::Exclusive)), Some(LockPrediction::Made(Some(LockUpgrade::More))));
    }

    #[test]
    fn nothing_is_certain_while_the_master_is_asked_and_all_is_when_it_has_answered() {
        let (mut known, of_owner) = (known(), |owner| posix(owner, LockType::Exclusive, 0, 9));
        known.enter(&posix(1, LockType::Exclusive, 0, 9));
        known.begin_asking(&of_owner(2), Asking::Waiting);
        known.begin_asking(&of_owner(1), Asking::Once);
        assert_eq!(known.predict(&posix(3, LockType::Shared, 50, 60)), None);
        assert_eq!(known.predict(&flock(3, LockType::Shared)), MADE, "of another kind");
        known.enter_answer(&posix(1, LockType::Unlocked, 0, 9), &MutationResult::default());
        known.end_asking(&of_owner(1), Asking::Once, true);
        assert_eq!(known.predict(&posix(3, LockType::Shared, 50, 60)), None);
        known.enter(&posix(2, LockType::Exclusive, 0, 9));
        known.end_asking(&of_owner(2), Asking::Waiting, true);
        assert_eq!(known.predict(&posix(3, LockType::Shared, 5, 60)), Some(LockPrediction::InTheWay));
        known.enter(&posix(2, LockType::Unlocked, 0, 9));
        assert_eq!((known.predict(&posix(3, LockType::Shared, 5, 60)), known.files.len()), (MADE, 0));
    }

    #[test]
    fn what_an_owner_asks_for_in_no_order_makes_its_file_uncertain_for_ever() {
        let of_owner = |owner| posix(owner, LockType::Exclusive, 0, 9);
        for is_clear in [true, false] {
            let mut known = known();
            let other = of_owner(if is_clear { 2 } else { 3 });
            known.begin_asking(&of_owner(2), Asking::Waiting);
            known.begin_asking(&other, Asking::Once);
            known.end_asking(&other, Asking::Once, true);
            known.end_asking(&of_owner(2), Asking::Waiting, is_clear);
            assert_eq!(known.predict(&posix(3, LockType::Shared, 5, 60)), None, "{is_clear}");
        }
        let mut known = known();
        let stale = MutationResult { errno: Errno::STALE.raw_os_error(), ..MutationResult::default() };
        known.enter_answer(&posix(2, LockType::Exclusive, 0, 9), &stale);
        assert_eq!(known.predict(&posix(3, LockType::Shared, 5, 60)), None);
    }

    #[test]
    fn what_is_known_is_bounded() {
        let mut known = known();
        for start in 0..OF_FILE_MAX as u64 {
            let wanted = posix(1, LockType::Exclusive, start * 2, start * 2);
            assert_eq!(known.predict(&wanted), MADE);
            known.enter(&wanted);
        }
        assert_eq!(known.predict(&posix(1, LockType::Exclusive, 5000, 5000)), None);
        assert_eq!(known.count, OF_FILE_MAX);
        for start in OF_FILE_MAX as u64..=2 * OF_FILE_MAX as u64 {
            known.enter(&posix(1, LockType::Exclusive, start * 2, start * 2));
        }
        assert_eq!((known.count, known.is_ours(OURS)), (0, false));
        for range in 0..2 * RANGES_MAX as u64 {
            known.numbers(1000 + range * 10, 5);
        }
        assert_eq!(known.numbers.len(), RANGES_MAX);
        known.numbers(1000 + 2 * RANGES_MAX as u64 * 10 - 5, 5);
        assert!(known.numbers.len() == RANGES_MAX && known.is_ours(1000 + 2 * RANGES_MAX as u64 * 10 - 1));
        for inode in 0..FILES_MAX as u64 {
            known.made(1_000_000 + inode);
            known.stray(1_000_000 + inode);
        }
        known.stray(1000 + 2 * RANGES_MAX as u64 * 10 - 1);
        assert!(known.numbers.is_empty() && known.made.is_empty() && known.strays.is_empty());
    }

    fn any_set() -> impl Strategy<Value = SetLock> {
        let kind = prop_oneof![Just(LockType::Unlocked), Just(LockType::Shared), Just(LockType::Exclusive)];
        (1u64..4, kind, 0u64..12, 0u64..12)
            .prop_map(|(owner, kind, one, other)| posix(owner, kind, one.min(other), one.max(other)))
    }

    proptest! {
        #[test]
        fn what_is_answered_is_what_the_master_says(requests in prop::collection::vec(any_set(), 1..60)) {
            let (mut known, mut held) = (known(), Vec::new());
            for set in requests {
                let want = checked(&set).unwrap();
                let is_refused = want.r#type() != LockType::Unlocked && conflicts(&held, &want).next().is_some();
                let prediction = known.predict(&set).unwrap();
                prop_assert_eq!(is_refused, prediction == LockPrediction::InTheWay);
                if is_refused {
                    continue;
                }
                let before = held.clone();
                place(&mut held, want);
                prop_assert_eq!(prediction == LockPrediction::Nothing, before == held);
                if prediction != LockPrediction::Nothing {
                    known.enter(&set);
                }
                prop_assert_eq!(known.files.get(&of(&set)).map_or(&[][..], |file| &file.held), &held[..]);
                prop_assert_eq!(known.count, held.len());
            }
        }
    }
}
