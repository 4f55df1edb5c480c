//! What all streams of a running index share with each other, and with checks of single names.
//!
//! An index must not undo what was asked later than its pages were. A check that is recorded while an index runs is
//! noted here with the time of its question: pages that were asked for before leave the name alone, and what an earlier
//! page has found absent is not taken away any more. A check whose question is older than the index is asked again. For
//! both to be true at each moment, no page is applied while a check is recorded ([`IndexRun::step`]). The listing of a
//! directory that has failed on its way may have said more than pages from before: these leave the directory alone.
//!
//! What is absent may only go when all keys are known to have come in order. Each range is in order by itself; that of
//! all together follows where the ranges on both sides of each cut have listed the same behind it ([`Border`]): then
//! they are one listing from the first key to the last, whatever the order of the store.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;

use crate::error::WorkError;

/// Names that may be checked while pages are on their way.
const CHECKS_MAX: usize = 65_536;
/// What the note of an absent name takes beside the name.
const ABSENT_BYTES: usize = 160;

/// A running index of one mount.
#[derive(Default)]
pub struct IndexRun {
    pub(super) began_ns: i64,
    /// Held for reading while a page is applied, for writing while a check is recorded.
    pub step: tokio::sync::RwLock<()>,
    seen: Mutex<Seen>,
    /// Directories that were left to others, or that have names for which there was no room.
    left_alone: Mutex<HashSet<Vec<Bytes>>>,
    /// Directories that no range has as a whole, and since when each has had all names of its pages.
    parts: Mutex<HashMap<Vec<Bytes>, i64>>,
    /// What is known of each cut.
    borders: Mutex<BTreeMap<String, Border>>,
    /// Memory that absent names may take, and do; and whether that was too little.
    absent_max: usize,
    absent_bytes: AtomicUsize,
    lacks_room: AtomicBool,
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
    /// Directories whose listings have failed on their way, and when.
    failed: HashMap<u64, i64>,
}

/// A cut, as the ranges on its sides have listed it.
#[derive(Default)]
struct Border {
    /// What the range that ends there has listed last; empty for nothing.
    last: String,
    /// The first keys behind it, of whoever has met them first.
    keys: Option<(Side, Vec<String>)>,
    is_met: bool,
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
        Self { began_ns, absent_max, ..Self::default() }
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
    pub(super) fn checked_since(&self, asked_ns: i64) -> HashMap<u64, HashSet<Bytes>> {
        let mut names: HashMap<u64, HashSet<Bytes>> = HashMap::new();
        for ((directory, name), checked) in &self.seen.lock().checks {
            if *checked >= asked_ns {
                names.entry(*directory).or_default().insert(name.clone());
            }
        }
        names
    }

    /// Notes that the listing of a directory has failed, of which a part may be in the namespace. To be called before
    /// it is no more among those that run.
    pub fn listing_failed(&self, directory: u64, now_ns: i64) {
        self.seen.lock().failed.insert(directory, now_ns);
    }

    /// Directories whose listings have failed since this time.
    pub(super) fn failed_since(&self, asked_ns: i64) -> Vec<u64> {
        let seen = self.seen.lock();
        seen.failed.iter().filter(|(_, failed)| **failed >= asked_ns).map(|(directory, _)| *directory).collect()
    }

    /// Takes so much of the memory for absent names; false where there is no room.
    pub(super) fn reserve(&self, bytes: usize) -> bool {
        let has_room = self.absent_bytes.fetch_add(bytes, Ordering::AcqRel) + bytes <= self.absent_max;
        if !has_room {
            self.free(bytes);
            self.lacks_room.store(true, Ordering::Release);
        }
        has_room
    }

    pub(super) fn free(&self, bytes: usize) {
        self.absent_bytes.fetch_sub(bytes, Ordering::AcqRel);
    }

    /// Whether names stay for which there was no room: another index is to take them away.
    pub(super) fn lacks_room(&self) -> bool {
        self.lacks_room.load(Ordering::Acquire)
    }

    /// Notes a name that is to be taken away at the end; false where there is no room for it.
    pub(super) fn note_absent(&self, directory: u64, name: &Bytes) -> bool {
        let has_room = self.reserve(ABSENT_BYTES + name.len());
        if has_room {
            self.seen.lock().absent.insert((directory, name.clone()));
        }
        has_room
    }

    /// Whether a noted name is still to be taken away, which it is not any more after this.
    pub(super) fn take_absent(&self, directory: u64, name: &Bytes) -> bool {
        self.free(ABSENT_BYTES + name.len());
        self.seen.lock().absent.remove(&(directory, name.clone()))
    }

    pub(super) fn leave_alone(&self, path: &[Bytes]) {
        self.left_alone.lock().insert(path.to_vec());
    }

    pub(super) fn is_left_alone(&self, path: &[Bytes]) -> bool {
        self.left_alone.lock().contains(path)
    }

    /// Notes since when a directory that no range has as a whole has had all names that pages have of it: one that was
    /// made anew later lacks some. 0 for a page that has none.
    pub(super) fn note_part(&self, path: &[Bytes], since_ns: i64) {
        if since_ns == 0 {
            return;
        }
        let mut parts = self.parts.lock();
        let known = parts.entry(path.to_vec()).or_insert(since_ns);
        *known = since_ns.min(*known);
    }

    /// Since when a directory has had all names that pages have of it; at any time where they have none.
    pub(super) fn part_since(&self, path: &[Bytes]) -> i64 {
        self.parts.lock().get(path).copied().unwrap_or(i64::MAX)
    }

    /// Notes what was listed last before a cut.
    pub(super) fn note_last(&self, cut: &str, last: &str) {
        last.clone_into(&mut self.borders.lock().entry(cut.to_owned()).or_default().last);
    }

    /// Notes the first keys behind a cut, as one side has listed them. False where the other side has others: some may
    /// have come or gone meanwhile, but hardly all; in a store that lists in another order there is none in common.
    pub(super) fn meets(&self, cut: &str, side: Side, keys: Vec<String>) -> bool {
        if keys.is_empty() {
            return true;
        }
        let mut borders = self.borders.lock();
        let border = borders.entry(cut.to_owned()).or_default();
        match border.keys.take() {
            _ if border.is_met => {}
            Some((other, known)) if other != side => {
                border.is_met = keys.iter().any(|key| known.contains(key));
                return border.is_met;
            }
            _ => border.keys = Some((side, keys)),
        }
        true
    }

    /// Both sides of a cut have listed the same behind it.
    pub(super) fn met(&self, cut: &str) {
        self.borders.lock().entry(cut.to_owned()).or_default().is_met = true;
    }

    /// What was listed last before a cut.
    pub(super) fn last_before(&self, cut: &str) -> String {
        self.borders.lock().get(cut).map(|border| border.last.clone()).unwrap_or_default()
    }

    /// Cuts of which it is not known that both sides have listed the same behind them.
    pub(super) fn unmet(&self) -> Vec<String> {
        let borders = self.borders.lock();
        borders.iter().filter(|(_, border)| !border.is_met).map(|(cut, _)| cut.clone()).collect()
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
        assert_eq!(run.checked_since(20), HashMap::from([(1, HashSet::from([name("b")]))]));
        assert_eq!(run.checked_since(30), HashMap::new());
        // An earlier question does not hide a later one.
        assert!(run.record_check(1, &name("b"), 12).unwrap());
        assert_eq!(run.checked_since(20).len(), 1);
        drop(first);
        drop(second);
        assert_eq!(run.checked_since(0), HashMap::new());
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
        assert!(run.note_absent(1, &name("a")) && run.note_absent(1, &name("b")) && !run.lacks_room());
        assert!(!run.note_absent(1, &name("c")) && run.lacks_room());
        assert!(run.record_check(1, &name("a"), 5).unwrap());
        assert!(!run.take_absent(1, &name("a")) && run.take_absent(1, &name("b")));
        assert!(run.note_absent(1, &name("c")));
    }

    #[test]
    fn both_sides_of_a_cut_meet_the_same_keys_behind_it() {
        let keys = |numbers: std::ops::Range<u32>| numbers.map(|number| format!("k{number:03}")).collect::<Vec<_>>();
        for (one, other) in [(Side::UpTo, Side::From), (Side::From, Side::UpTo)] {
            let run = IndexRun::new(1, 0);
            for cut in ["same", "others", "one", "asked"] {
                run.note_last(cut, "last");
                assert!(run.meets(cut, one, keys(0..64)));
            }
            assert!(run.meets("same", other, keys(60..80)) && !run.meets("others", other, keys(64..80)));
            // Nothing can be said.
            assert!(run.meets("one", other, Vec::new()) && run.meets("one", one, keys(3..4)));
            run.met("asked");
            assert!(run.meets("asked", other, keys(70..80)));
            assert_eq!(run.unmet(), ["one", "others"]);
            assert_eq!((run.last_before("one").as_str(), run.last_before("none").as_str()), ("last", ""));
        }
    }

    #[test]
    fn a_directory_that_pages_have_in_parts_has_all_of_them_since_the_first() {
        let run = IndexRun::new(5, 0);
        let path = [name("d")];
        for (since_ns, expected) in [(0, i64::MAX), (9, 9), (7, 7), (0, 7), (8, 7)] {
            run.note_part(&path, since_ns);
            assert_eq!(run.part_since(&path), expected);
        }
    }

    #[test]
    fn listings_that_fail_are_known_to_pages_from_before() {
        let run = IndexRun::new(1, 0);
        run.listing_failed(7, 20);
        assert_eq!((run.failed_since(20), run.failed_since(21)), (vec![7], vec![]));
    }
}
