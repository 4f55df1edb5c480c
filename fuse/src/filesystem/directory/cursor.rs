//! Where a directory handle is in its listing.
//!
//! The kernel names a place by the cookie of the entry before it ([`DirectoryCookies`]). It reads on where it was,
//! mostly; it goes back by a few entries when a caller's buffer was full before its own; it goes anywhere after
//! seekdir(3). So the cursor keeps the last two pages, which are read on without a question, and elsewhere begins after
//! the name that the cookie stands for. A million entries cost two pages.

use std::collections::VecDeque;
use std::sync::Arc;

use cavern_client::Node;
use parking_lot::Mutex;

use super::cookies::{BEGINNING, DirectoryCookies, Place};

/// What a cursor knows of an entry.
pub trait Named {
    fn name(&self) -> &[u8];
}

impl Named for Arc<Node> {
    fn name(&self) -> &[u8] {
        &self.name
    }
}

/// Reads one listing. `T` is the entry.
#[derive(Debug)]
pub struct Cursor<T = Arc<Node>> {
    names: Arc<Mutex<DirectoryCookies>>,
    /// Entries with their cookies.
    window: VecDeque<(u64, T)>,
    /// Cookie of what is before the window.
    start: u64,
    /// Beginning of the newest page within the window: what is before it may be dropped.
    newest: usize,
    /// Where in the window it was read last.
    last: usize,
    /// The listing ends where the window ends.
    ended: bool,
    /// Every page came in turn from the very beginning.
    unbroken: bool,
    /// How far entries have been counted towards a cookie that has no name.
    counted: Option<Fetch>,
}

/// What is behind a cookie.
#[derive(Debug, PartialEq, Eq)]
pub enum Position<'a, T = Arc<Node>> {
    /// An entry, and its own cookie.
    Entry(u64, &'a T),
    /// The listing is over.
    End,
    /// Not in the window: read this, then ask again.
    Fetch(Fetch),
}

/// A page to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetch {
    /// Entries after this name; empty for the beginning.
    pub after: Vec<u8>,
    /// Entries to pass over.
    skip: u64,
    cookie: u64,
}

impl<T: Named> Cursor<T> {
    pub fn new(names: Arc<Mutex<DirectoryCookies>>) -> Self {
        Self {
            names,
            window: VecDeque::new(),
            start: BEGINNING,
            newest: 0,
            last: 0,
            ended: false,
            unbroken: true,
            counted: None,
        }
    }

    /// Forgets what was read.
    pub fn rewind(&mut self) {
        *self = Self::new(Arc::clone(&self.names));
    }

    /// Whether the listing was read from its beginning to its end without a jump.
    pub fn read_through(&self) -> bool {
        self.ended && self.unbroken
    }

    pub fn names(&self) -> &Mutex<DirectoryCookies> {
        &self.names
    }

    /// The entry behind a cookie, which is not that of a dot.
    pub fn after(&mut self, cookie: u64) -> Position<'_, T> {
        let Some(index) = self.index_after(cookie) else { return Position::Fetch(self.seek(cookie)) };
        self.last = index;
        match (self.window.get(index), self.window.back()) {
            (Some((cookie, entry)), _) => Position::Entry(*cookie, entry),
            (None, _) if self.ended => Position::End,
            (None, Some((_, last))) => Position::Fetch(Fetch { after: last.name().to_vec(), skip: 0, cookie }),
            (None, None) => Position::Fetch(self.seek(cookie)),
        }
    }

    /// Up to `count` entries behind a cookie, as far as they are in the window, with their cookies.
    pub fn window_after(&self, cookie: u64, count: usize) -> impl Iterator<Item = &(u64, T)> {
        let index = self.index_after(cookie).unwrap_or(self.window.len());
        self.window.range(index..).take(count)
    }

    fn index_after(&self, cookie: u64) -> Option<usize> {
        if cookie == self.start {
            return Some(0);
        }
        let is_it = |known: &(u64, T)| known.0 == cookie;
        let index = match self.window.get(self.last) {
            Some(known) if is_it(known) => self.last,
            _ => self.window.iter().position(is_it)?,
        };
        Some(index + 1)
    }

    fn seek(&self, cookie: u64) -> Fetch {
        if let Some(counted) = self.counted.as_ref().filter(|counted| counted.cookie == cookie) {
            return counted.clone();
        }
        let Place { after, skip } = self.names.lock().place(cookie);
        Fetch { after, skip, cookie }
    }

    /// Takes in what a fetch has read; `end`: nothing follows it.
    pub fn accept(&mut self, fetch: Fetch, entries: Vec<T>, end: bool) {
        // A page without entries that is not the last would be asked for again and again.
        let end = end || entries.is_empty();
        if let Some(last) = entries.last()
            && fetch.skip >= entries.len() as u64
            && !end
        {
            let (after, skip) = (last.name().to_vec(), fetch.skip - entries.len() as u64);
            self.counted = Some(Fetch { after, skip, cookie: fetch.cookie });
            return;
        }
        self.counted = None;
        if fetch.skip == 0 && fetch.cookie == self.window.back().map_or(self.start, |(last, _)| *last) {
            if let Some(before) = self.newest.checked_sub(1) {
                self.start = self.window[before].0;
                self.window.drain(..self.newest);
            }
            self.newest = self.window.len();
            self.last = self.newest.saturating_sub(1);
        } else {
            // Elsewhere, or two readers of one handle: begin there.
            self.window.clear();
            self.start = fetch.cookie;
            (self.newest, self.last) = (0, 0);
            self.unbroken = false;
        }
        let mut names = self.names.lock();
        let skip = fetch.skip.min(entries.len() as u64) as usize;
        self.window.extend(entries.into_iter().skip(skip).map(|entry| (names.cookie(entry.name()), entry)));
        self.ended = end;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    impl Named for Vec<u8> {
        fn name(&self) -> &[u8] {
            self
        }
    }

    type Names = BTreeSet<Vec<u8>>;

    fn name(number: usize) -> Vec<u8> {
        format!("{number:06}").into_bytes()
    }

    fn names(numbers: std::ops::Range<usize>) -> Names {
        numbers.map(name).collect()
    }

    fn given() -> Arc<Mutex<DirectoryCookies>> {
        Arc::new(Mutex::new(DirectoryCookies::new(0)))
    }

    /// Reads the entry behind a cookie, in pages of `page`.
    fn read(cursor: &mut Cursor<Vec<u8>>, directory: &Names, page: usize, cookie: u64) -> Option<(u64, Vec<u8>)> {
        for _ in 0..directory.len() + 3 {
            let fetch = match cursor.after(cookie) {
                Position::Entry(cookie, entry) => return Some((cookie, entry.clone())),
                Position::End => return None,
                Position::Fetch(fetch) => fetch,
            };
            let mut rest = directory.iter().filter(|name| **name > fetch.after);
            let entries: Vec<_> = rest.by_ref().take(page).cloned().collect();
            let end = rest.next().is_none();
            cursor.accept(fetch, entries, end);
        }
        panic!("the cursor runs in circles at {cookie}")
    }

    /// What follows a cookie, to the end.
    fn rest(cursor: &mut Cursor<Vec<u8>>, directory: &Names, page: usize, mut cookie: u64) -> Vec<Vec<u8>> {
        let mut seen = Vec::new();
        while let Some((next, entry)) = read(cursor, directory, page, cookie) {
            seen.push(entry);
            cookie = next;
        }
        seen
    }

    #[test]
    fn a_listing_is_read_in_bounded_memory() {
        let directory: Vec<_> = (0..100_000).map(name).collect();
        let mut cursor = Cursor::new(given());
        let (mut cookie, mut seen, mut pages) = (BEGINNING, 0, 0);
        loop {
            match cursor.after(cookie) {
                Position::Entry(next, entry) => {
                    assert_eq!((next, entry), (cookie + 1, &directory[seen]));
                    (cookie, seen) = (next, seen + 1);
                }
                Position::End => break,
                Position::Fetch(fetch) => {
                    let from = directory.partition_point(|name| *name <= fetch.after);
                    let to = directory.len().min(from + 1000);
                    cursor.accept(fetch, directory[from..to].to_vec(), to == directory.len());
                    pages += 1;
                }
            }
            assert!(cursor.window.len() <= 2000);
        }
        assert_eq!((seen, pages), (100_000, 100));
        assert!(cursor.read_through());
    }

    #[test]
    fn an_empty_directory_ends_at_once() {
        let mut cursor = Cursor::new(given());
        assert_eq!(read(&mut cursor, &Names::new(), 10, BEGINNING), None);
        assert!(cursor.read_through());
    }

    #[test]
    fn a_cookie_leads_after_its_name_whatever_was_removed_and_through_any_handle() {
        let mut directory = names(0..100);
        let (given, mut cookies) = (given(), vec![BEGINNING]);
        let mut first = Cursor::new(Arc::clone(&given));
        for _ in 0..60 {
            cookies.push(read(&mut first, &directory, 10, *cookies.last().unwrap()).unwrap().0);
        }
        // All but every third of what was read.
        directory.retain(|entry| *entry >= name(60) || (0..20).any(|third| *entry == name(3 * third)));
        let mut second = Cursor::new(given);
        for (count, cookie) in cookies.iter().enumerate().rev() {
            let expected: Vec<_> = directory.range(name(count)..).cloned().collect();
            assert_eq!(rest(&mut second, &directory, 10, *cookie), expected, "{count} read before, another handle");
            assert!(!second.read_through() || count == 0);
            second.rewind();
            // The window may have what is removed, but lacks nothing, and repeats nothing.
            let seen = rest(&mut first, &directory, 10, *cookie);
            assert!(seen.is_sorted_by(|one, next| one < next) && expected.iter().all(|entry| seen.contains(entry)));
        }
    }

    #[test]
    fn another_process_goes_on_after_any_name_that_was_given_last() {
        let mut directory = names(0..100);
        let mut earlier = Cursor::new(given());
        let mut cookie = BEGINNING;
        let mut last = DirectoryCookies::new(1);
        for number in 0..40 {
            cookie = read(&mut earlier, &directory, 10, cookie).unwrap().0;
            if number >= 19 {
                last.given_before(cookie, &name(number));
            }
        }
        // What was read before is gone, as with `rm -r`.
        directory.retain(|entry| *entry >= name(35));
        let last = Arc::new(Mutex::new(last));
        let mut cursor = Cursor::new(Arc::clone(&last));
        let (next, entry) = read(&mut cursor, &directory, 10, cookie).unwrap();
        assert_eq!(entry, name(40));
        assert_eq!(read(&mut cursor, &directory, 10, next).unwrap().1, name(41));
        let mut cursor = Cursor::new(last);
        assert_eq!(read(&mut cursor, &directory, 10, cookie - 10).unwrap().1, name(35), "after the thirtieth name");
        assert!(!cursor.read_through());
    }

    #[test]
    fn a_cookie_without_a_name_is_counted_to() {
        let directory = names(0..100);
        let mut cursor = Cursor::new(Arc::new(Mutex::new(DirectoryCookies::new(1))));
        for count in [0, 1, 9, 10, 11, 57, 99] {
            let expected: Vec<_> = directory.range(name(count)..).cloned().collect();
            assert_eq!(rest(&mut cursor, &directory, 10, BEGINNING + count as u64), expected);
        }
        assert_eq!(read(&mut cursor, &directory, 10, BEGINNING + 100), None);
        assert_eq!(read(&mut cursor, &directory, 10, BEGINNING + 1000), None);
    }

    /// What a program does with a directory that has two descriptors.
    #[derive(Clone, Debug)]
    enum Step {
        Read(usize),
        /// To the start of the listing, or behind the entry that was given so many before the last.
        Seek(usize, Option<usize>),
        Remove(usize),
        Make(usize),
    }

    const MOST: usize = 80;

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            8 => (0..2usize).prop_map(Step::Read),
            1 => (0..2usize, proptest::option::of(0..MOST)).prop_map(|(handle, back)| Step::Seek(handle, back)),
            2 => (0..MOST).prop_map(Step::Remove),
            2 => (0..MOST).prop_map(Step::Make),
        ]
    }

    proptest! {
        #[test]
        fn every_entry_that_lasts_is_seen_exactly_once(
            page in 1usize..20,
            steps in proptest::collection::vec(step(), 0..400),
        ) {
            let (given, mut directory) = (given(), names(0..MOST / 2));
            // For each descriptor: its cursor, its cookie, after which name that is, what was there all the while
            // since it was moved there, and what it has seen since.
            let handle = |directory: &Names| {
                (Cursor::new(Arc::clone(&given)), BEGINNING, Vec::new(), directory.clone(), Vec::new())
            };
            let mut handles = [handle(&directory), handle(&directory)];
            let mut told: Vec<(u64, Vec<u8>)> = Vec::new();
            let ends = (0..MOST + 1).flat_map(|_| [Step::Read(0), Step::Read(1)]);
            for step in steps.into_iter().chain(ends) {
                match step {
                    Step::Read(handle) => {
                        let (cursor, cookie, from, lasting, seen) = &mut handles[handle];
                        match read(cursor, &directory, page, *cookie) {
                            Some((next, entry)) => {
                                prop_assert!(seen.last().is_none_or(|last| *last < entry), "not twice");
                                prop_assert!(*from < entry);
                                told.push((next, entry.clone()));
                                seen.push(entry);
                                *cookie = next;
                            }
                            None => prop_assert!(lasting.iter().all(|entry| entry <= from || seen.contains(entry))),
                        }
                        prop_assert!(cursor.window.len() <= 2 * page);
                    }
                    Step::Seek(handle, back) => {
                        let place = back.and_then(|back| told.iter().rev().nth(back));
                        let (cursor, cookie, from, lasting, seen) = &mut handles[handle];
                        (*cookie, *from) = place.cloned().unwrap_or((BEGINNING, Vec::new()));
                        if *cookie == BEGINNING {
                            cursor.rewind();
                        }
                        (*lasting, *seen) = (directory.clone(), Vec::new());
                        // A window is older than the seek: what was made since may be missing there.
                        if cursor.index_after(*cookie).is_some()
                            && let Some((_, last)) = cursor.window.back()
                        {
                            let is_in = |entry: &Vec<u8>| cursor.window.iter().any(|(_, known)| known == entry);
                            lasting.retain(|entry| is_in(entry) || entry > last && !cursor.ended);
                        }
                    }
                    Step::Remove(number) => {
                        directory.remove(&name(number));
                        handles.iter_mut().for_each(|(_, _, _, lasting, _)| _ = lasting.remove(&name(number)));
                    }
                    Step::Make(number) => _ = directory.insert(name(number)),
                }
            }
        }
    }
}
