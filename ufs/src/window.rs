//! From a bucket's order to names: turns the pages of a directory's listing into windows of names, exactly and in
//! bounded memory.
//!
//! A bucket lists a directory in the order of keys, where the directory `a` appears as `a/`: after the object `a-b`,
//! since `-` sorts before `/`, although the name `a` sorts before the name `a-b`. And a bucket may have both an object
//! `a` and keys below `a/`; then the directory wins, but which it is shows only when the listing has passed `a/`.
//!
//! So every name is taken to stand at `name + "/"`: there, and not earlier, everything about it is known. A window
//! covers the names whose place lies in (`after`, `upto`]. An object is kept back until the listing has passed its
//! place; all that are kept back are prefixes of the current position, hence never more than 255.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use bytes::Bytes;

use crate::object::{ListPage, ObjectMeta};

/// What a bucket has under a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listed {
    Directory,
    File { size: u64, mtime_ns: i64, etag: String },
}

impl Listed {
    /// A file.
    pub fn of(object: &ObjectMeta) -> Self {
        Self::File { size: object.size, mtime_ns: object.mtime_ns, etag: object.etag.clone() }
    }
}

/// All the names whose place is in (`after`, `upto`].
#[derive(Debug)]
pub struct Window {
    /// Exclusive; empty for the beginning.
    pub after: Vec<u8>,
    /// Inclusive; `None` for the end of the directory.
    pub upto: Option<Vec<u8>>,
    pub names: BTreeMap<Bytes, Listed>,
    /// ETag of the object whose key is the directory's prefix itself, in the first window after it was listed.
    pub marker: Option<String>,
}

/// Cuts one directory's listing into windows.
#[derive(Clone, Debug)]
pub struct Windows {
    /// Key prefix of the directory.
    prefix: String,
    position: Vec<u8>,
    held_back: BTreeMap<Bytes, Listed>,
    /// Keys and prefixes that cannot be names.
    pub hidden: u64,
    /// Whether the bucket has anything here, if only a directory marker.
    pub exists: bool,
    marker: Option<String>,
}

impl Windows {
    /// Of the directory with this key prefix.
    pub fn new(prefix: String) -> Self {
        Self { prefix, position: Vec::new(), held_back: BTreeMap::new(), hidden: 0, exists: false, marker: None }
    }

    /// The window that the next page completes; the rest of the directory when that is the last, or when there is none.
    /// After one that [restarts](ListPage::restarts) the listing the windows begin anew.
    pub fn page(&mut self, page: Option<&ListPage>, is_last: bool) -> Window {
        let upto = match page {
            Some(page) => self.take_in(page),
            None => self.position.clone(),
        };
        self.cut((!is_last).then_some(upto))
    }

    /// Notes what a page has; returns how far it reaches.
    fn take_in(&mut self, page: &ListPage) -> Vec<u8> {
        if page.restarts {
            *self = Self::new(std::mem::take(&mut self.prefix));
        }
        let mut upto = self.position.clone();
        self.hidden += page.hidden;
        self.exists |= page.hidden > 0;
        for object in &page.objects {
            let Some(name) = object.key.strip_prefix(&self.prefix) else { continue };
            self.exists = true;
            if name.is_empty() {
                self.marker = Some(object.etag.clone());
                continue;
            }
            upto = upto.max(name.as_bytes().to_vec());
            self.hold_back(name, Listed::of(object));
        }
        for prefix in &page.prefixes {
            let Some(place) = prefix.strip_prefix(&self.prefix) else { continue };
            self.exists = true;
            upto = upto.max(place.as_bytes().to_vec());
            self.hold_back(place.strip_suffix('/').unwrap_or(place), Listed::Directory);
        }
        upto
    }

    fn hold_back(&mut self, name: &str, listed: Listed) {
        if is_name(name.as_bytes()) {
            self.held_back.insert(Bytes::copy_from_slice(name.as_bytes()), listed);
        } else {
            self.hidden += 1;
        }
    }

    fn cut(&mut self, upto: Option<Vec<u8>>) -> Window {
        let mut names = std::mem::take(&mut self.held_back);
        if let Some(upto) = &upto {
            self.held_back.extend(names.extract_if(.., |name, _| place_cmp(name, upto) == Ordering::Greater));
        }
        let after = match &upto {
            Some(upto) => std::mem::replace(&mut self.position, upto.clone()),
            None => std::mem::take(&mut self.position),
        };
        Window { after, upto, names, marker: self.marker.take() }
    }
}

/// Compares the place of a name (`name + "/"`) with a position.
pub fn place_cmp(name: &[u8], position: &[u8]) -> Ordering {
    name.iter().chain(b"/").cmp(position)
}

/// The first name that may still come after all that stands up to a position: no name before it does. Of those that are
/// known otherwise `is_known` says so. Empty at the beginning of a listing.
pub fn first_open_name(position: &[u8], is_known: impl Fn(&[u8]) -> bool) -> &[u8] {
    // Its place is behind the position: it is the whole of that, or goes on there with what sorts before the `/`.
    let is_open = |name: &&[u8]| match position.get(name.len()) {
        None => true,
        Some(next) => *next < b'/' && is_name(name) && !is_known(name),
    };
    (1..=position.len()).map(move |length| &position[..length]).find(is_open).unwrap_or_default()
}

/// Whether a key's component can be shown as a name.
pub fn is_name(name: &[u8]) -> bool {
    cavern_posix::check_name(name).is_ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn object(key: &str) -> ObjectMeta {
        ObjectMeta { key: key.into(), size: 1, etag: "e".into(), mtime_ns: 1, metadata: Default::default() }
    }

    fn page(objects: &[&str], prefixes: &[&str]) -> ListPage {
        ListPage {
            objects: objects.iter().map(|key| object(key)).collect(),
            prefixes: prefixes.iter().map(ToString::to_string).collect(),
            ..ListPage::default()
        }
    }

    fn names(window: &Window) -> Vec<(&str, bool)> {
        window
            .names
            .iter()
            .map(|(name, listed)| (std::str::from_utf8(name).unwrap(), *listed == Listed::Directory))
            .collect()
    }

    #[test]
    fn an_object_waits_until_its_directory_would_have_shown() {
        let mut windows = Windows::new("d/".into());
        let first = windows.page(Some(&page(&["d/a", "d/a-1"], &[])), false);
        assert_eq!(names(&first), []);
        let second = windows.page(Some(&page(&["d/a-2"], &["d/a/"])), false);
        // `a-2` is followed by `a/`, which lies behind its own place.
        assert_eq!(names(&second), [("a", true), ("a-1", false), ("a-2", false)]);
        assert_eq!(names(&windows.page(None, true)), []);
        assert!(windows.exists);
    }

    #[test]
    fn what_cannot_be_a_name_is_counted() {
        let long = format!("d/{}", "x".repeat(256));
        let mut windows = Windows::new("d/".into());
        let window =
            windows.page(Some(&page(&["d/", "d/.", "d/..", "d/n\0l", &long], &["d//", "d/./", "d/ok/"])), false);
        assert_eq!(windows.hidden, 6);
        let rest = windows.page(None, true);
        let all: Vec<_> = names(&window).into_iter().chain(names(&rest)).collect();
        assert_eq!(all, [("ok", true)]);
    }

    #[test]
    fn windows_begin_anew_with_their_listing() {
        let mut windows = Windows::new("d/".into());
        windows.page(Some(&page(&["d/", "d/n\0l", "d/x"], &["d/m/"])), false);
        let restart = windows.page(Some(&ListPage { restarts: true, ..ListPage::default() }), false);
        assert_eq!((names(&restart), windows.hidden, windows.exists), (vec![], 0, false));
        let first = windows.page(Some(&page(&["d/a", "d/b"], &[])), true);
        assert_eq!((first.after.as_slice(), names(&first)), (&b""[..], vec![("a", false), ("b", false)]));
    }

    #[test]
    fn names_before_the_first_open_one_come_no_more() {
        let open = |position: &str| {
            let name = first_open_name(position.as_bytes(), |name| name == b"known");
            String::from_utf8(name.to_vec()).unwrap()
        };
        for (position, name) in [
            ("", ""),
            ("0123", "0123"),
            ("0123.jpg", "0123"),
            ("img-1-2.jpg", "img"),
            ("known-1-2.jpg", "known-1"),
            // The directory itself has been listed.
            ("img/", "img/"),
            ("..x", "..x"),
            ("\u{e9}-1", "\u{e9}"),
        ] {
            assert_eq!(open(position), name, "{position}");
        }
    }

    proptest! {
        #[test]
        fn no_name_comes_before_the_first_open_one(position in "[a.0/-]{1,5}", name in "[a.0-]{1,5}") {
            let open = first_open_name(position.as_bytes(), |_| false);
            let is_before = name.as_bytes() < open && is_name(name.as_bytes());
            prop_assert!(!is_before || place_cmp(name.as_bytes(), position.as_bytes()) != Ordering::Greater);
        }
    }

    #[test]
    fn nothing_at_all_is_told_from_a_marker() {
        let mut windows = Windows::new("d/".into());
        windows.page(Some(&page(&[], &[])), false);
        assert!(!windows.exists);
        windows.page(Some(&page(&["d/"], &[])), true);
        assert!(windows.exists);
    }
}
