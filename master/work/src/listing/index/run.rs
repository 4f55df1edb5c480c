//! What all streams of a running index share with each other, and with checks of single names.
//!
//! An index must not undo what was asked later than its pages were. A check that is recorded while an index runs is
//! noted here with the time of its question: pages that were asked for before leave the name alone, and what an earlier
//! page has found absent is not taken away any more. A check whose question is older than the index is asked again. For
//! both to be true at each moment, no page is applied while a check is recorded ([`IndexRun::step`]).

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;

use crate::error::WorkError;

/// Names that may be checked while pages are on their way.
const CHECKS_MAX: usize = 65_536;
/// What the note of an absent name takes beside the name.
const ABSENT_BYTES: usize = 160;

/// A running index of one mount.
pub struct IndexRun {
    pub(super) began_ns: i64,
    /// Held for reading while a page is applied, for writing while a check is recorded.
    pub step: tokio::sync::RwLock<()>,
    seen: Mutex<Seen>,
    /// Directories that were left to others though they are in no range as a whole.
    left_alone: Mutex<HashSet<Vec<Bytes>>>,
    /// Keys behind cuts, of whoever has met them first.
    behind_cuts: Mutex<HashMap<String, (Side, Vec<String>)>>,
    /// Memory that absent names may take, and do.
    absent_max: usize,
    absent_bytes: AtomicUsize,
}

#[derive(Default)]
struct Seen {
    /// When pages were asked for that are not applied yet, each with a number of its own.
    pages: BTreeSet<(i64, u64)>,
    next_page: u64,
    /// Checked names, by directory, and when they were asked about.
    checks: HashMap<(u64, Bytes), i64>,
    /// Names that are to be taken away, unless they are checked before.
    absent: HashSet<(u64, Bytes)>,
}

/// Who has listed what lies behind a cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// The range that ends there, and has gone on to the end of a page.
    UpTo,
    /// The range that begins there.
    From,
}

/// A page on its way, from before its question to after it was applied.
pub(super) struct PageInFlight {
    run: Arc<IndexRun>,
    number: u64,
    pub asked_ns: i64,
}

impl IndexRun {
    /// One that began at this time; absent names may take so much memory.
    pub(super) fn new(began_ns: i64, absent_max: usize) -> Self {
        Self {
            began_ns,
            step: tokio::sync::RwLock::default(),
            seen: Mutex::default(),
            left_alone: Mutex::default(),
            behind_cuts: Mutex::default(),
            absent_max,
            absent_bytes: AtomicUsize::new(0),
        }
    }

    /// A page is about to be asked for.
    pub(super) fn begin_page(self: &Arc<Self>, now_ns: i64) -> PageInFlight {
        let mut seen = self.seen.lock();
        let number = seen.next_page;
        seen.next_page += 1;
        seen.pages.insert((now_ns, number));
        PageInFlight { run: self.clone(), number, asked_ns: now_ns }
    }

    /// Notes that a name was asked about at `asked_ns`; false when that is older than this index, whose word then
    /// counts. To be called with `step` held for writing.
    ///
    /// # Errors
    /// [`WorkError::Overloaded`] when too many names were checked while pages are on their way.
    pub fn record_check(&self, directory: u64, name: &Bytes, asked_ns: i64) -> Result<bool, WorkError> {
        if asked_ns < self.began_ns {
            return Ok(false);
        }
        let seen = &mut *self.seen.lock();
        let key = (directory, name.clone());
        seen.absent.remove(&key);
        if seen.checks.len() >= CHECKS_MAX {
            seen.forget_checks();
        }
        if seen.checks.len() >= CHECKS_MAX {
            return Err(WorkError::Overloaded(format!(
                "{CHECKS_MAX} names were checked while one page of the index was on its way: try again"
            )));
        }
        let latest = seen.checks.entry(key).or_default();
        *latest = asked_ns.max(*latest);
        Ok(true)
    }

    /// Names, by directory, that were asked about since this time.
    pub(super) fn checked_since(&self, asked_ns: i64) -> HashSet<(u64, Bytes)> {
        let seen = self.seen.lock();
        seen.checks.iter().filter(|(_, checked)| **checked >= asked_ns).map(|(name, _)| name.clone()).collect()
    }

    /// Notes a name that is to be taken away at the end of its range; false where there is no room for it.
    pub(super) fn note_absent(&self, directory: u64, name: &Bytes) -> bool {
        let bytes = ABSENT_BYTES + name.len();
        if self.absent_bytes.fetch_add(bytes, Ordering::AcqRel) + bytes > self.absent_max {
            self.absent_bytes.fetch_sub(bytes, Ordering::AcqRel);
            return false;
        }
        self.seen.lock().absent.insert((directory, name.clone()));
        true
    }

    /// Whether a noted name is still to be taken away, which it is not any more after this.
    pub(super) fn take_absent(&self, directory: u64, name: &Bytes) -> bool {
        self.absent_bytes.fetch_sub(ABSENT_BYTES + name.len(), Ordering::AcqRel);
        self.seen.lock().absent.remove(&(directory, name.clone()))
    }

    pub(super) fn leave_alone(&self, path: &[Bytes]) {
        self.left_alone.lock().insert(path.to_vec());
    }

    pub(super) fn is_left_alone(&self, path: &[Bytes]) -> bool {
        self.left_alone.lock().contains(path)
    }

    /// Whether keys behind a cut, as one side has listed them, are in part those that the other side has. Some may have
    /// come or gone meanwhile, but hardly all; in a store that lists in another order there is none in common.
    pub(super) fn meets(&self, cut: &str, side: Side, keys: Vec<String>) -> bool {
        if keys.is_empty() {
            return true;
        }
        let mut behind_cuts = self.behind_cuts.lock();
        match behind_cuts.get(cut) {
            Some((other, known)) if *other != side => {
                let is_met = keys.iter().any(|key| known.contains(key));
                behind_cuts.remove(cut);
                is_met
            }
            _ => {
                behind_cuts.insert(cut.to_owned(), (side, keys));
                true
            }
        }
    }
}

impl Seen {
    /// Forgets what was asked about before any page that is on its way.
    fn forget_checks(&mut self) {
        match self.pages.first() {
            None => self.checks.clear(),
            Some((oldest, _)) => {
                let oldest = *oldest;
                self.checks.retain(|_, asked_ns| *asked_ns >= oldest);
            }
        }
    }
}

impl Drop for PageInFlight {
    fn drop(&mut self) {
        let seen = &mut *self.run.seen.lock();
        seen.pages.remove(&(self.asked_ns, self.number));
        if seen.checks.len() > CHECKS_MAX / 8 || seen.pages.is_empty() {
            seen.forget_checks();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &'static str) -> Bytes {
        Bytes::from_static(text.as_bytes())
    }

    #[test]
    fn what_was_asked_about_after_a_page_is_known_until_that_is_applied() {
        let run = Arc::new(IndexRun::new(10, 1 << 20));
        assert!(!run.record_check(1, &name("older"), 9).unwrap());
        let first = run.begin_page(20);
        assert!(run.record_check(1, &name("a"), 15).unwrap() && run.record_check(1, &name("b"), 25).unwrap());
        let second = run.begin_page(30);
        assert_eq!(run.checked_since(20), [(1, name("b"))].into());
        assert_eq!(run.checked_since(30), HashSet::new());
        // An earlier question does not hide a later one.
        assert!(run.record_check(1, &name("b"), 12).unwrap());
        assert_eq!(run.checked_since(20).len(), 1);
        drop(first);
        drop(second);
        assert_eq!(run.checked_since(0), HashSet::new());
    }

    #[test]
    fn checks_that_no_page_needs_make_room_for_others() {
        let run = Arc::new(IndexRun::new(1, 1 << 20));
        let early = run.begin_page(5);
        let check = |number: usize, asked_ns| run.record_check(1, &Bytes::from(number.to_string()), asked_ns);
        for number in 0..CHECKS_MAX {
            assert!(check(number, 10).unwrap());
        }
        assert!(check(CHECKS_MAX, 10).is_err());
        let _late = run.begin_page(20);
        drop(early);
        assert!(check(CHECKS_MAX, 30).unwrap());
    }

    #[test]
    fn absent_names_take_no_more_memory_than_they_may_and_go_when_they_are_checked() {
        let run = Arc::new(IndexRun::new(1, 2 * ABSENT_BYTES + 2));
        assert!(run.note_absent(1, &name("a")) && run.note_absent(1, &name("b")));
        assert!(!run.note_absent(1, &name("c")));
        assert!(run.record_check(1, &name("a"), 5).unwrap());
        assert!(!run.take_absent(1, &name("a")) && run.take_absent(1, &name("b")));
        assert!(run.note_absent(1, &name("c")));
    }

    #[test]
    fn both_sides_of_a_cut_meet_the_same_keys_behind_it() {
        let run = IndexRun::new(1, 0);
        let keys = |numbers: std::ops::Range<u32>| numbers.map(|number| format!("k{number:03}")).collect::<Vec<_>>();
        for (one, other) in [(Side::UpTo, Side::From), (Side::From, Side::UpTo)] {
            assert!(run.meets("k", one, keys(0..64)) && run.meets("k", other, keys(60..80)));
            assert!(run.meets("k", one, keys(0..64)) && !run.meets("k", other, keys(64..80)));
            // Nothing can be said.
            assert!(run.meets("k", one, keys(0..64)) && run.meets("k", other, Vec::new()));
            assert!(run.meets("other", other, keys(64..80)) && run.meets("k", other, keys(3..4)));
            assert!(run.meets("other", one, keys(79..99)));
        }
    }
}
