//! A part of a flat listing, from behind any key on: for whoever lists several parts of a prefix at a time.
//!
//! Each page is one request, sent once: whoever has many of them under way wants to know of the first that a busy store
//! refuses, and sends it again by itself. Nothing is sorted here. A store that begins elsewhere than it is told to, or
//! lists in no order, is told by its first page that shows it ([`RangePage::Unsuitable`]). The objects of views are
//! left out, as in every listing.

use crate::error::UfsError;
use crate::lister::hide_views;
use crate::object::{ListMode, ListPage};
use crate::store::{ListRequest, PAGE_KEYS};
use crate::ufs::Ufs;

/// A listing of what lies behind a key.
#[derive(Debug)]
pub struct RangeLister {
    ufs: Ufs,
    /// The last key that was handed out, or the one to begin behind.
    after: String,
    token: Option<String>,
}

/// What comes next in a [`RangeLister`].
#[derive(Debug)]
pub enum RangePage {
    /// Keys in order, all behind those before; perhaps none.
    Keys { page: ListPage, is_last: bool },
    /// The store cannot list so: its pages are in no order, or do not begin where they are to begin.
    Unsuitable,
}

impl Ufs {
    /// All keys under the prefix of the mount that come behind one, each page sent for once.
    pub fn list_behind(&self, after: &str) -> RangeLister {
        RangeLister { ufs: self.clone(), after: after.to_owned(), token: None }
    }
}

impl RangeLister {
    /// The next page of up to 1,000 keys. After an error, or when a call was given up, the same page can be asked for
    /// again.
    pub async fn next_page(&mut self) -> Result<RangePage, UfsError> {
        let request = ListRequest {
            prefix: self.ufs.prefix(),
            mode: ListMode::Recursive,
            start_after: (!self.after.is_empty()).then_some(self.after.as_str()),
            token: self.token.as_deref(),
            limit: PAGE_KEYS,
        };
        let answer = match self.ufs.requests().attempts.list(request).await {
            // That is how a store says that it does not know where to begin.
            Err(UfsError::Rejected { .. }) if self.token.is_none() && !self.after.is_empty() => {
                return Ok(RangePage::Unsuitable);
            }
            answer => answer?,
        };
        let mut page = answer.page;
        let stands_still = answer.next.is_some() && answer.next == self.token;
        // Some stores are asked for the keys from one on, not for those behind it.
        if page.objects.first().is_some_and(|first| first.key == self.after) {
            page.objects.remove(0);
        }
        let is_behind = page.objects.first().is_none_or(|first| first.key > self.after);
        if stands_still || !is_behind || !page.objects.is_sorted_by(|one, next| one.key < next.key) {
            return Ok(RangePage::Unsuitable);
        }
        if let Some(last) = page.objects.last() {
            self.after.clone_from(&last.key);
        }
        hide_views(&mut page, self.ufs.prefix());
        self.token = answer.next;
        let is_last = self.token.is_none();
        Ok(RangePage::Keys { page, is_last })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, HashMap};

    use cavern_conf::schema;
    use proptest::prelude::*;

    use super::*;
    use crate::memory::MemoryBucket;

    fn ufs(name: &str) -> Ufs {
        Ufs::open(&format!("memory://{name}"), &HashMap::new(), &schema::Ufs::default()).unwrap()
    }

    /// All keys behind one; `None` where the store cannot list so.
    async fn listed(ufs: &Ufs, after: &str) -> Option<Vec<String>> {
        let (mut lister, mut keys) = (ufs.list_behind(after), Vec::new());
        loop {
            match lister.next_page().await.unwrap() {
                RangePage::Unsuitable => return None,
                RangePage::Keys { page, is_last } => {
                    keys.extend(page.objects.into_iter().map(|object| object.key));
                    if is_last {
                        return Some(keys);
                    }
                }
            }
        }
    }

    proptest! {
        #[test]
        fn what_lies_behind_a_key_is_all_that_is_listed(
            keys in proptest::collection::btree_set("[ab/.-]{1,4}", 0..30),
            after in "[ab/.-]{0,4}",
            page in 1_usize..8,
        ) {
            let bucket = MemoryBucket::named("ranges-model");
            for key in bucket.keys() {
                bucket.delete(&key);
            }
            for key in &keys {
                bucket.put(key, "x");
            }
            bucket.list_in_pages_of(page);
            let expected: Vec<_> = keys.iter().filter(|key| **key > after).cloned().collect();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let listed = runtime.block_on(listed(&ufs("ranges-model"), &after));
            prop_assert_eq!(listed, Some(expected));
        }
    }

    #[tokio::test]
    async fn views_are_in_no_part_of_a_listing() {
        let bucket = MemoryBucket::named("ranges-views");
        for key in ["m/.a", "m/.cavern-view-0123456789abcdef0123456789abcdef", "m/.cavern-view-1", "m/b"] {
            bucket.put(key, "x");
        }
        bucket.list_in_pages_of(1);
        let ufs = ufs("ranges-views/m");
        assert_eq!(listed(&ufs, "").await.unwrap(), ["m/.a", "m/b"]);
        assert_eq!(listed(&ufs, "m/.cavern-view-1").await.unwrap(), ["m/b"]);
    }

    #[tokio::test]
    async fn a_store_that_cannot_list_so_is_told_by_what_it_lists() {
        let bucket = MemoryBucket::named("ranges-unsuitable");
        let keys: BTreeSet<_> = (0..50).map(|number| format!("k{number:02}")).collect();
        for key in &keys {
            bucket.put(key, "x");
        }
        let ufs = ufs("ranges-unsuitable");
        assert_eq!(listed(&ufs, "k47").await.unwrap(), ["k48", "k49"]);
        bucket.ignore_start_after();
        assert_eq!(listed(&ufs, "").await.unwrap().len(), 50);
        assert_eq!(listed(&ufs, "k47").await, None);
        bucket.list_in_shards(u64::MAX, 1000);
        assert_eq!(listed(&ufs, "").await, None);
    }
}
