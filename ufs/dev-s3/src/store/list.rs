//! Listing: pages of keys and common prefixes, in the order of their bytes.
//!
//! The list is that of all *names*, a name being a key or, where a delimiter follows the prefix, the common prefix that
//! stands for all keys that begin with it. A page holds the first names after a marker. The marker is a name, too, and
//! a marker inside a common prefix comes after that prefix. A common prefix costs one search however many keys it
//! stands for: the next one begins at the smallest string that is greater than all of them.

use std::cmp::Ordering;
use std::collections::btree_map;
use std::iter::{Flatten, Peekable};
use std::ops::Bound;
use std::option;
use std::sync::Arc;

use super::bucket::Bucket;
use super::key_space::{GeneratedKey, KeySpace, Keys};
use super::object::{Index, Key, Object};

/// What to list.
#[derive(Clone, Copy, Debug, Default)]
pub struct ListQuery<'a> {
    pub prefix: &'a str,
    /// Empty for none.
    pub delimiter: &'a str,
    /// Names up to and including this one are left out; empty for none.
    pub after: &'a str,
    /// Names on a page at most.
    pub limit: usize,
}

/// One page.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ListPage {
    pub objects: Vec<(String, Arc<Object>)>,
    pub prefixes: Vec<String>,
    /// Where more names follow: the last name of this page.
    pub next: Option<String>,
    /// Objects that were looked at.
    pub visited: usize,
}

impl Bucket {
    /// One page of a listing.
    pub fn list(&self, query: &ListQuery<'_>) -> ListPage {
        let contents = self.contents.read();
        page(&contents.index, contents.space.as_deref(), query)
    }
}

/// An object that was come across.
enum Entry<'c> {
    Stored(&'c str, &'c Arc<Object>),
    Generated(GeneratedKey<'c>),
}

impl Entry<'_> {
    fn key(&self) -> &str {
        match self {
            Self::Stored(key, _) => key,
            Self::Generated(found) => &found.key,
        }
    }

    fn into_object(self) -> (String, Arc<Object>) {
        match self {
            Self::Stored(key, object) => (key.to_owned(), Arc::clone(object)),
            Self::Generated(found) => {
                let object = Arc::new(found.object());
                (found.key, object)
            }
        }
    }
}

/// Objects of the index and, where it has none of the same key, those of the key space, in the order of their keys.
struct Entries<'c> {
    stored: Peekable<btree_map::Range<'c, Key, Arc<Object>>>,
    generated: Peekable<Flatten<option::IntoIter<Keys<'c>>>>,
}

impl<'c> Entries<'c> {
    fn starting_at(index: &'c Index, space: Option<&'c KeySpace>, from: Bound<&[u8]>) -> Self {
        let stored = index.range::<[u8], _>((from, Bound::Unbounded)).peekable();
        let generated = space.map(|space| space.keys_from(from)).into_iter().flatten().peekable();
        Self { stored, generated }
    }
}

impl<'c> Iterator for Entries<'c> {
    type Item = Entry<'c>;

    fn next(&mut self) -> Option<Entry<'c>> {
        loop {
            let order = match (self.stored.peek(), self.generated.peek()) {
                (Some((stored, _)), Some(generated)) => stored.as_str().cmp(&generated.key),
                (Some(_), None) => Ordering::Less,
                (None, _) => Ordering::Greater,
            };
            if order == Ordering::Greater {
                return self.generated.next().map(Entry::Generated);
            }
            if order == Ordering::Equal {
                self.generated.next();
            }
            let (key, object) = self.stored.next()?;
            if !object.is_deleted() {
                return Some(Entry::Stored(key.as_str(), object));
            }
        }
    }
}

/// The smallest bytes greater than every string that begins with `prefix`. UTF-8 has no byte 0xFF, so incrementing the
/// last byte is enough; `None` for the empty prefix, which nothing is greater than.
fn after_all_with(prefix: &str) -> Option<Vec<u8>> {
    let mut bytes = prefix.as_bytes().to_vec();
    *bytes.last_mut()? += 1;
    Some(bytes)
}

/// The common prefix that stands for `key`, if any.
fn common_prefix<'k>(key: &'k str, query: &ListQuery<'_>) -> Option<&'k str> {
    if query.delimiter.is_empty() {
        return None;
    }
    let rest = key.get(query.prefix.len()..)?;
    let at = rest.find(query.delimiter)?;
    Some(&key[..query.prefix.len() + at + query.delimiter.len()])
}

fn start(query: &ListQuery<'_>) -> Bound<Vec<u8>> {
    let (prefix, after) = (query.prefix, query.after);
    if after < prefix || after.is_empty() {
        return Bound::Included(prefix.as_bytes().to_vec());
    }
    let inside = after.starts_with(prefix).then(|| common_prefix(after, query)).flatten();
    match inside.and_then(after_all_with) {
        Some(bytes) => Bound::Included(bytes),
        None => Bound::Excluded(after.as_bytes().to_vec()),
    }
}

/// The page that `query` asks for.
pub(super) fn page(index: &Index, space: Option<&KeySpace>, query: &ListQuery<'_>) -> ListPage {
    let mut page = ListPage::default();
    if query.limit == 0 {
        return page;
    }
    let mut last = String::new();
    let mut from = start(query);
    'seek: loop {
        for entry in Entries::starting_at(index, space, from.as_ref().map(Vec::as_slice)) {
            let key = entry.key();
            page.visited += 1;
            if !key.starts_with(query.prefix) {
                break 'seek;
            }
            if page.objects.len() + page.prefixes.len() == query.limit {
                page.next = Some(last);
                break 'seek;
            }
            let Some(common) = common_prefix(key, query) else {
                key.clone_into(&mut last);
                page.objects.push(entry.into_object());
                continue;
            };
            common.clone_into(&mut last);
            page.prefixes.push(common.to_owned());
            // A common prefix ends in the delimiter, so it is not empty.
            let Some(next) = after_all_with(common) else { break 'seek };
            from = Bound::Included(next);
            continue 'seek;
        }
        break;
    }
    page
}
