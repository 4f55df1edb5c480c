//! Names by the cookies that readers of a directory were given with them.
//!
//! READDIR names a place by a cookie. Kernel and programs go on there whenever they like, through any descriptor, and
//! whatever was made or removed meanwhile; the namespace, however, is read on after a name. So each name gets a number
//! when it is first given, in the order of the listing, and keeps it for as long as the kernel may come back with it:
//! while the directory is open, and then until the memory for it is needed. The handles of a directory share them.
//!
//! A cookie that is not known any more is taken for what the first reader of a directory that has not changed got: the
//! number of entries before. That is one of a process before this one, but for the last answer of each handle, or one
//! of a directory so large that older names had to be dropped.

use std::collections::hash_map::RandomState;
use std::collections::{BTreeMap, HashMap};
use std::hash::BuildHasher as _;
use std::sync::Arc;

use hashbrown::HashTable;
use parking_lot::Mutex;

/// The cookie behind `.` and `..`: the listing follows.
pub const BEGINNING: u64 = 2;
/// Cookies of a directory that a process before this one opened have the number of the process above so many bits.
const EPOCH_BITS: u32 = 32;
/// Names of one directory that are kept, in bytes. Half of them are dropped beyond.
const NAMES_BYTES_MAX: usize = 16 << 20;
/// Of the names that are dropped every so manieth stays, and so many at most.
const LANDMARK_EVERY: usize = 1024;
const LANDMARKS_MAX: usize = 16_384;
/// Memory for names of directories that nobody has open.
const CLOSED_BYTES_MAX: usize = 32 << 20;
/// What a name takes beside its bytes, and a directory beside its names.
const NAME_BYTES: usize = 12;
const DIRECTORY_BYTES: usize = 512;

/// The names of one directory.
#[derive(Debug)]
pub struct DirectoryCookies {
    /// Cookie of the first name.
    first: u64,
    bytes: Vec<u8>,
    /// Where each name ends.
    ends: Vec<u32>,
    /// Places in `ends`, by name.
    by_name: HashTable<u32>,
    hasher: RandomState,
    /// Names by cookie: those that a process before this one gave last, and some of those that were dropped.
    landmarks: BTreeMap<u64, Box<[u8]>>,
}

/// A place in a listing.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Empty for the beginning.
    pub after: Vec<u8>,
    /// Entries behind it that are passed over.
    pub skip: u64,
}

impl DirectoryCookies {
    pub fn new(epoch: u64) -> Self {
        Self {
            first: (epoch << EPOCH_BITS) + BEGINNING + 1,
            bytes: Vec::new(),
            ends: Vec::new(),
            by_name: HashTable::new(),
            hasher: RandomState::new(),
            landmarks: BTreeMap::new(),
        }
    }

    /// The cookie of a name that is given.
    pub fn cookie(&mut self, name: &[u8]) -> u64 {
        let hash = self.hasher.hash_one(name);
        let known = self.by_name.find(hash, |place| name_at(&self.bytes, &self.ends, *place as usize) == name);
        if let Some(place) = known {
            return self.first + u64::from(*place);
        }
        if self.bytes.len() + name.len() > NAMES_BYTES_MAX {
            self.drop_older();
        }
        // NAMES_BYTES_MAX bounds both.
        let place = self.ends.len() as u32;
        self.bytes.extend_from_slice(name);
        self.ends.push(self.bytes.len() as u32);
        self.enter(hash, place);
        self.first + u64::from(place)
    }

    /// A process before this one has given a name with this cookie.
    pub fn given_before(&mut self, cookie: u64, name: &[u8]) {
        self.landmarks.insert(cookie, name.into());
    }

    /// The name that a cookie was given with.
    pub fn name(&self, cookie: u64) -> Option<&[u8]> {
        match cookie.checked_sub(self.first) {
            Some(place) if place < self.ends.len() as u64 => Some(name_at(&self.bytes, &self.ends, place as usize)),
            _ => self.landmarks.get(&cookie).map(|name| &**name),
        }
    }

    /// Where a reader with this cookie goes on.
    pub fn place(&self, cookie: u64) -> Place {
        if let Some(name) = self.name(cookie) {
            return Place { after: name.to_vec(), skip: 0 };
        }
        let before = self.landmarks.range(..cookie).next_back();
        match before.filter(|(known, _)| **known >> EPOCH_BITS == cookie >> EPOCH_BITS) {
            Some((known, name)) => Place { after: name.to_vec(), skip: cookie - known },
            None => {
                let entries = cookie & ((1 << EPOCH_BITS) - 1);
                Place { after: Vec::new(), skip: entries.saturating_sub(BEGINNING) }
            }
        }
    }

    fn enter(&mut self, hash: u64, place: u32) {
        let Self { bytes, ends, by_name, hasher, .. } = self;
        by_name.insert_unique(hash, place, |place| hasher.hash_one(name_at(bytes, ends, *place as usize)));
    }

    fn drop_older(&mut self) {
        let dropped = self.ends.len().div_ceil(2);
        for place in (0..dropped).step_by(LANDMARK_EVERY) {
            self.landmarks.insert(self.first + place as u64, name_at(&self.bytes, &self.ends, place).into());
        }
        while self.landmarks.len() > LANDMARKS_MAX {
            self.landmarks.pop_first();
        }
        let cut = self.ends[dropped - 1];
        self.bytes.drain(..cut as usize);
        self.ends.drain(..dropped);
        self.ends.iter_mut().for_each(|end| *end -= cut);
        self.first += dropped as u64;
        self.by_name.clear();
        for place in 0..self.ends.len() {
            self.enter(self.hasher.hash_one(name_at(&self.bytes, &self.ends, place)), place as u32);
        }
    }

    fn is_empty(&self) -> bool {
        self.ends.is_empty() && self.landmarks.is_empty()
    }

    /// Memory that it takes, roughly.
    fn memory_bytes(&self) -> usize {
        let landmarks: usize = self.landmarks.values().map(|name| name.len() + 4 * NAME_BYTES).sum();
        DIRECTORY_BYTES + self.bytes.len() + self.ends.len() * NAME_BYTES + landmarks
    }
}

fn name_at<'a>(bytes: &'a [u8], ends: &[u32], place: usize) -> &'a [u8] {
    let begin = place.checked_sub(1).map_or(0, |before| ends[before]);
    &bytes[begin as usize..ends[place] as usize]
}

/// The names of all directories whose cookies may come back.
#[derive(Debug, Default)]
pub struct CookieTable {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    directories: HashMap<u64, Directory>,
    /// Those that nobody has open, in the order in which they were closed, and the memory of all of them.
    closed: BTreeMap<u64, u64>,
    closed_bytes: usize,
    closes: u64,
}

#[derive(Debug)]
struct Directory {
    names: Arc<Mutex<DirectoryCookies>>,
    handles: usize,
    /// Its key in `closed`, and its memory.
    closed: Option<(u64, usize)>,
}

impl CookieTable {
    /// A handle of a directory is opened, or inherited from the process before the one of this epoch.
    pub fn opened(&self, inode: u64, epoch: u64) -> Arc<Mutex<DirectoryCookies>> {
        let mut state = self.state.lock();
        let State { directories, closed, closed_bytes, .. } = &mut *state;
        let directory = directories.entry(inode).or_insert_with(|| {
            let names = Arc::new(Mutex::new(DirectoryCookies::new(epoch)));
            Directory { names, handles: 0, closed: None }
        });
        directory.handles += 1;
        if let Some((key, bytes)) = directory.closed.take() {
            closed.remove(&key);
            *closed_bytes -= bytes;
        }
        Arc::clone(&directory.names)
    }

    /// A handle of a directory is closed. `forget` is told of each directory whose cookies have no meaning any more.
    pub fn closed(&self, inode: u64, forget: impl Fn(u64)) {
        let mut state = self.state.lock();
        let State { directories, closed, closed_bytes, closes } = &mut *state;
        let Some(directory) = directories.get_mut(&inode) else { return };
        directory.handles -= 1;
        if directory.handles > 0 {
            return;
        }
        let bytes = {
            let names = directory.names.lock();
            if names.is_empty() { None } else { Some(names.memory_bytes()) }
        };
        let Some(bytes) = bytes else {
            directories.remove(&inode);
            return;
        };
        *closes += 1;
        directory.closed = Some((*closes, bytes));
        closed.insert(*closes, inode);
        *closed_bytes += bytes;
        while *closed_bytes > CLOSED_BYTES_MAX
            && let Some((_, oldest)) = closed.pop_first()
        {
            let dropped = directories.remove(&oldest).and_then(|directory| directory.closed);
            *closed_bytes -= dropped.map_or(0, |(_, bytes)| bytes);
            forget(oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    fn after(name: &str) -> Place {
        Place { after: name.into(), skip: 0 }
    }

    #[test]
    fn a_name_keeps_its_cookie_and_a_cookie_its_name() {
        let mut names = DirectoryCookies::new(0);
        let cookies: Vec<_> = ["a", "b", "c", "b", "d"].map(|name| names.cookie(name.as_bytes())).into();
        assert_eq!(cookies, [3, 4, 5, 4, 6]);
        assert_eq!([4, 6, 2].map(|cookie| names.place(cookie)), [after("b"), after("d"), Place::default()]);
        assert_eq!(names.place(9), Place { after: vec![], skip: 7 }, "nobody was given this");
    }

    #[test]
    fn another_process_knows_the_last_cookies_and_counts() {
        let mut names = DirectoryCookies::new(1);
        names.given_before(10, b"j");
        names.given_before(11, b"k");
        let mine = names.cookie(b"a");
        assert_eq!([mine, 10, 11].map(|cookie| names.place(cookie)), [after("a"), after("j"), after("k")]);
        assert_eq!(names.place(9), Place { after: vec![], skip: 7 });
        assert_eq!(names.place(14), Place { after: b"k".into(), skip: 3 });
        assert_eq!(names.place(mine + 1), Place { after: vec![], skip: 2 }, "another process's");
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut names = DirectoryCookies::new(0);
        let name = |number: u64| format!("{number:0250}").into_bytes();
        let all = 3 * NAMES_BYTES_MAX as u64 / 250;
        for number in 0..all {
            assert_eq!(names.cookie(&name(number)), 3 + number);
        }
        assert!(names.bytes.len() <= NAMES_BYTES_MAX && names.memory_bytes() < 2 * NAMES_BYTES_MAX);
        for number in (0..all).step_by(77) {
            let Place { after, skip } = names.place(3 + number);
            assert!(skip < LANDMARK_EVERY as u64 && after == name(number - skip), "{number}: {skip}");
        }
        assert_eq!(names.place(2 + all), Place { after: name(all - 1), skip: 0 });
        assert_eq!(names.cookie(&name(0)), 3 + all, "what was dropped is another name");
    }

    #[test]
    fn names_of_directories_that_are_closed_stay_while_there_is_room() {
        let (table, forgotten) = (CookieTable::default(), RefCell::new(Vec::new()));
        let close = |inode| table.closed(inode, |inode| forgotten.borrow_mut().push(inode));
        let name = vec![b'x'; CLOSED_BYTES_MAX / 8];
        let open = |inode: u64| table.opened(inode, 0).lock().cookie(&name);
        table.opened(1, 0);
        close(1);
        assert!(table.state.lock().directories.is_empty(), "no name was given");
        for inode in 1..8 {
            assert_eq!((open(inode), open(inode)), (3, 3));
            close(inode);
            close(inode);
        }
        open(1);
        table.opened(2, 0).lock().cookie(b"another");
        close(2);
        for inode in 8..11 {
            open(inode);
            close(inode);
        }
        assert_eq!(*forgotten.borrow(), [3, 4], "the first is open, and the second was closed later");
        assert_eq!(table.opened(2, 0).lock().cookie(b"another"), 4);
        (5..11).for_each(|inode| table.opened(inode, 0).lock().cookie(b"another").eq(&4).then_some(()).unwrap());
        assert_eq!(table.state.lock().closed_bytes, 0);
    }
}
