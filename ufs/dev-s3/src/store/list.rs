//! Listing: pages of keys and common prefixes, in the order of their bytes.
//!
//! The list is that of all *names*, a name being a key or, where a delimiter follows the prefix, the common prefix that
//! stands for all keys that begin with it. A page holds the first names after a marker. The marker is a name, too, and
//! a marker inside a common prefix comes after that prefix. A common prefix costs one search however many keys it
//! stands for: the next one begins at the smallest string that is greater than all of them.

use std::ops::Bound;
use std::sync::Arc;

use super::bucket::{Bucket, Index, Object, first_from};

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
    /// Index entries that were looked at.
    pub visited: usize,
}

impl Bucket {
    /// One page of a listing.
    pub fn list(&self, query: &ListQuery<'_>) -> ListPage {
        page(&self.contents.read().index, query)
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
pub(super) fn page(index: &Index, query: &ListQuery<'_>) -> ListPage {
    let mut page = ListPage::default();
    if query.limit == 0 {
        return page;
    }
    let mut last = String::new();
    let mut from = start(query);
    'seek: loop {
        for (key, object) in first_from(index, from.as_ref().map(Vec::as_slice)) {
            let key = key.as_str();
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
                page.objects.push((key.to_owned(), Arc::clone(object)));
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
