//! Where a directory handle is in its listing.
//!
//! The kernel names a place by the number of entries before it. It reads on where it was, mostly; it goes back by a few
//! entries when a caller's buffer was full before its own; it goes back far after seekdir(3). The namespace, however,
//! is read on by name, since only a name survives changes of the directory. So the cursor keeps the last two pages, in
//! which every place has its entry whatever happened meanwhile, and for what lies further back the name at every page's
//! beginning. A million entries cost two pages and a thousand names.

use std::collections::VecDeque;
use std::sync::Arc;

use cavern_client::Node;

/// What a cursor knows of an entry.
pub trait Named {
    fn name(&self) -> &[u8];
}

impl Named for Arc<Node> {
    fn name(&self) -> &[u8] {
        &self.name
    }
}

/// Reads one listing. `T` is the entry; places count from 0.
#[derive(Debug)]
pub struct Cursor<T = Arc<Node>> {
    window: VecDeque<T>,
    /// Place of the window's first entry.
    start: u64,
    /// Beginning of the newest page within the window, counted from its start: what is before it may be dropped.
    newest: usize,
    /// The listing ends where the window ends.
    ended: bool,
    /// Every page came in turn from the very beginning.
    unbroken: bool,
    /// Places where pages begin with the name before each, in order. The beginning itself is implied.
    pages: Vec<(u64, Box<[u8]>)>,
}

impl<T> Default for Cursor<T> {
    fn default() -> Self {
        Self { window: VecDeque::new(), start: 0, newest: 0, ended: false, unbroken: true, pages: Vec::new() }
    }
}

/// What is at a place.
#[derive(Debug, PartialEq, Eq)]
pub enum Position<'a, T = Arc<Node>> {
    Entry(&'a T),
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
    place: u64,
}

impl<T: Named> Cursor<T> {
    /// Where another cursor was that has given these names, the first of them at a place: it can be read on after each.
    pub fn after(first: u64, names: Vec<Vec<u8>>) -> Self {
        let pages = (first + 1..).zip(names.into_iter().map(Vec::into_boxed_slice)).collect();
        Self { unbroken: false, pages, ..Self::default() }
    }

    /// Forgets everything.
    pub fn rewind(&mut self) {
        *self = Self::default();
    }

    /// Whether the listing was read from its beginning to its end without a jump.
    pub fn read_through(&self) -> bool {
        self.ended && self.unbroken
    }

    pub fn position(&mut self, place: u64) -> Position<'_, T> {
        let end = self.start + self.window.len() as u64;
        if place >= self.start && place < end {
            // Less than the window's length.
            return Position::Entry(&self.window[(place - self.start) as usize]);
        }
        if place >= end && self.ended {
            return Position::End;
        }
        if place == end
            && let Some(last) = self.window.back()
        {
            return Position::Fetch(Fetch { after: last.name().to_vec(), place });
        }
        let before = self.pages.partition_point(|(begin, _)| *begin <= place);
        Position::Fetch(match before.checked_sub(1).map(|index| &self.pages[index]) {
            // The window is further on than the last known page: no need to go back.
            Some((begin, _)) if place > end && *begin < end && !self.window.is_empty() => self.onward(end),
            None if place > end && !self.window.is_empty() => self.onward(end),
            Some((begin, name)) => Fetch { after: name.to_vec(), place: *begin },
            None => Fetch { after: Vec::new(), place: 0 },
        })
    }

    fn onward(&self, end: u64) -> Fetch {
        Fetch { after: self.window.back().map(|last| last.name().to_vec()).unwrap_or_default(), place: end }
    }

    /// Takes in what a fetch has read; `end`: nothing follows it.
    pub fn accept(&mut self, fetch: Fetch, entries: Vec<T>, end: bool) {
        let expected = self.start + self.window.len() as u64;
        // A page without entries that is not the last would be asked for again and again.
        let end = end || entries.is_empty();
        if fetch.place == expected && (fetch.place == 0 || !self.window.is_empty()) {
            self.start += self.newest as u64;
            self.window.drain(..self.newest);
            self.newest = self.window.len();
        } else {
            // Back to a page that was dropped, or two readers of one handle: begin there.
            self.window.clear();
            self.start = fetch.place;
            self.newest = 0;
            self.unbroken = false;
        }
        if fetch.place > 0 && self.pages.last().is_none_or(|(begin, _)| *begin < fetch.place) {
            self.pages.push((fetch.place, fetch.after.into_boxed_slice()));
        }
        self.window.extend(entries);
        self.ended = end;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    impl Named for Vec<u8> {
        fn name(&self) -> &[u8] {
            self
        }
    }

    fn name(number: usize) -> Vec<u8> {
        format!("{number:06}").into_bytes()
    }

    /// Reads the entry at a place of a sorted directory, in pages of `page`.
    fn read(cursor: &mut Cursor<Vec<u8>>, directory: &[Vec<u8>], page: usize, place: u64) -> Option<Vec<u8>> {
        for _ in 0..directory.len() + 3 {
            let fetch = match cursor.position(place) {
                Position::Entry(entry) => return Some(entry.clone()),
                Position::End => return None,
                Position::Fetch(fetch) => fetch,
            };
            let from = directory.partition_point(|entry| *entry <= fetch.after);
            let entries: Vec<_> = directory[from..].iter().take(page).cloned().collect();
            let end = from + entries.len() == directory.len();
            cursor.accept(fetch, entries, end);
        }
        panic!("the cursor runs in circles at {place}")
    }

    #[test]
    fn a_listing_is_read_in_bounded_memory() {
        let directory: Vec<_> = (0..100_000).map(name).collect();
        let mut cursor = Cursor::default();
        for (place, entry) in directory.iter().enumerate() {
            assert_eq!(read(&mut cursor, &directory, 1000, place as u64).as_ref(), Some(entry));
            assert!(cursor.window.len() <= 2000);
        }
        assert_eq!(read(&mut cursor, &directory, 1000, 100_000), None);
        assert!(cursor.read_through());
        assert_eq!(cursor.pages.len(), 99);
    }

    #[test]
    fn an_empty_directory_ends_at_once() {
        let mut cursor = Cursor::default();
        assert_eq!(read(&mut cursor, &[], 10, 0), None);
        assert!(cursor.read_through());
    }

    #[test]
    fn another_cursor_goes_on_after_any_name_that_was_given() {
        let mut directory: Vec<_> = (0..100).map(name).collect();
        let given = directory[19..40].to_vec();
        // What was read before is gone, as with `rm -r`.
        directory.drain(..35);
        let mut cursor = Cursor::after(19, given.clone());
        assert_eq!(read(&mut cursor, &directory, 10, 40), Some(name(40)));
        assert_eq!(read(&mut cursor, &directory, 10, 41), Some(name(41)));
        let mut cursor = Cursor::after(19, given);
        assert_eq!(read(&mut cursor, &directory, 10, 30), Some(name(35)), "after the thirtieth name");
        assert!(!cursor.read_through());
    }

    #[test]
    fn places_of_the_last_page_survive_changes() {
        let mut directory: Vec<_> = (0..100).map(name).collect();
        let mut cursor = Cursor::default();
        for place in 0..30 {
            read(&mut cursor, &directory, 20, place).unwrap();
        }
        // Removing what was read already must not make the reader skip what was not.
        directory.drain(..25);
        for place in 25..40 {
            assert_eq!(read(&mut cursor, &directory, 20, place), Some(name(place as usize)));
        }
        assert_eq!(read(&mut cursor, &directory, 20, 40), Some(name(40)));
    }

    proptest! {
        #[test]
        fn any_order_of_places_finds_the_right_entries(
            length in 0usize..200,
            page in 1usize..40,
            places in proptest::collection::vec(0u64..220, 1..60),
        ) {
            let directory: Vec<_> = (0..length).map(name).collect();
            let mut cursor = Cursor::default();
            for place in places {
                let found = read(&mut cursor, &directory, page, place);
                prop_assert_eq!(found, directory.get(place as usize).cloned());
                prop_assert!(cursor.window.len() <= 2 * page);
            }
        }

        #[test]
        fn a_forward_reader_sees_every_lasting_entry_once(
            page in 1usize..20,
            removals in proptest::collection::vec((0usize..60, 0usize..60), 0..20),
        ) {
            let mut directory: Vec<_> = (0..60).map(name).collect();
            let mut cursor = Cursor::default();
            let (mut seen, mut place) = (Vec::new(), 0);
            loop {
                for (when, which) in &removals {
                    if *when == place as usize {
                        directory.retain(|entry| *entry != name(*which));
                    }
                }
                match read(&mut cursor, &directory, page, place) {
                    Some(entry) => seen.push(entry),
                    None => break,
                }
                place += 1;
            }
            let mut once = seen.clone();
            once.dedup();
            prop_assert_eq!(&once, &seen);
            for entry in &directory {
                prop_assert!(seen.contains(entry));
            }
        }
    }
}
