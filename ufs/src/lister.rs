//! Listings, page by page, always in the order of keys.
//!
//! Who applies a listing takes a name that is absent between two neighbours for one that is gone. S3 promises the order
//! of keys, but directory buckets, Storj and others list in none. So every page is looked at: its entries must be in
//! order, and follow those of the page before. From the first that does not, the listing is collected to its end,
//! sorted, and then handed out; from its beginning where the store says that it has no order. Where pages were handed
//! out before, it begins anew, and says so ([`ListPage::restarts`]).
//!
//! What is collected takes memory, and has a limit for that reason. A listing in order has that of who lists
//! ([`Lister::at_most`]): a store may answer for ever.
//!
//! The objects of views, which lie beside all names of a mount, are in no listing of it.

use cavern_proto::reserved::VIEW;

use crate::error::{Operation, Request, UfsError};
use crate::object::{ListMode, ListPage, ObjectMeta};
use crate::store::{ListRequest, PAGE_KEYS};
use crate::ufs::Ufs;

/// Some stores send empty pages while they look for the next key; none needs this many.
const EMPTY_PAGES_MAX: u32 = 10_000;
/// Of a listing that is in no order so much is collected.
const COLLECTED_BYTES: usize = 64 << 20;

/// A listing in progress. A clone goes on from where it was cloned.
#[derive(Clone, Debug)]
pub struct Lister {
    ufs: Ufs,
    prefix: String,
    mode: ListMode,
    position: Position,
    order: Order,
    /// Empty pages in a row.
    empty_pages: u32,
    collected_max: usize,
    /// Entries so far, and how many there may be, with what to do about more.
    entries: u64,
    most: Option<(u64, &'static str)>,
}

#[derive(Clone, Debug)]
enum Position {
    Start,
    After(String),
    End,
}

#[derive(Clone, Debug)]
enum Order {
    /// Pages are handed out as they come; up to this key or prefix they were.
    AsListed(String),
    Collecting(Collected),
    Sorted(Collected),
    TooMuch(UfsError),
}

impl Lister {
    pub(crate) fn new(ufs: Ufs, prefix: &str, mode: ListMode) -> Self {
        let position = Position::Start;
        let order = match ufs.capabilities().ordered_listings {
            true => Order::AsListed(String::new()),
            false => Order::Collecting(Collected::default()),
        };
        let collected_max = COLLECTED_BYTES;
        let (prefix, entries, most) = (prefix.to_owned(), 0, None);
        Self { ufs, prefix, mode, position, order, empty_pages: 0, collected_max, entries, most }
    }

    /// This listing with so many entries at most, where a page counts as one that has none. `remedy` says what to do
    /// about more.
    pub fn at_most(self, entries: u64, remedy: &'static str) -> Self {
        Self { most: Some((entries, remedy)), ..self }
    }

    /// The next page, up to 1,000 objects and prefixes; `None` after the last. A page can be empty, as all are of what
    /// is being collected. After an error, or when a call was given up, the same page can be asked for again.
    ///
    /// # Errors
    /// [`UfsError::Oversized`] for a listing that is in no order and too long to be sorted here, or has more entries
    /// than it may have.
    pub async fn next_page(&mut self) -> Result<Option<ListPage>, UfsError> {
        match &mut self.order {
            Order::Sorted(collected) => return Ok((!collected.is_empty()).then(|| collected.take_page())),
            Order::TooMuch(error) => return Err(error.clone()),
            Order::AsListed(_) | Order::Collecting(_) => {}
        }
        let token = match &self.position {
            Position::Start => None,
            Position::After(token) => Some(token.as_str()),
            Position::End => return Ok(None),
        };
        let request = ListRequest { prefix: &self.prefix, mode: self.mode, start_after: None, token, limit: PAGE_KEYS };
        let answer = self.ufs.requests().list(request).await?;
        let is_same = answer.next.is_some() && answer.next.as_deref() == token;
        let is_empty = answer.page.objects.is_empty() && answer.page.prefixes.is_empty() && answer.page.hidden == 0;
        self.empty_pages = if is_empty { self.empty_pages + 1 } else { 0 };
        if is_same || self.empty_pages > EMPTY_PAGES_MAX {
            let reason = "the listing goes on for ever, but gets no further".to_owned();
            return Err(UfsError::Malformed { request: self.request(), reason });
        }
        self.entries += (answer.page.objects.len() + answer.page.prefixes.len()).max(1) as u64 + answer.page.hidden;
        if let Some((most, remedy)) = self.most.filter(|(most, _)| self.entries > *most) {
            let reason = format!("the store lists more than {most} entries there");
            let error = UfsError::Oversized { request: self.request(), reason, remedy };
            self.order = Order::TooMuch(error.clone());
            return Err(error);
        }
        self.position = answer.next.map_or(Position::End, Position::After);
        let mut page = answer.page;
        hide_views(&mut page, self.ufs.prefix());
        self.in_order(page).map(Some)
    }

    fn request(&self) -> Request {
        Request::new(Operation::List, &self.ufs.shared().label, &self.prefix)
    }

    /// What is handed out for a page of the store.
    fn in_order(&mut self, page: ListPage) -> Result<ListPage, UfsError> {
        if let Order::AsListed(last) = &mut self.order {
            if let Some(end) = end_if_ordered(&page, last) {
                *last = end;
                return Ok(page);
            }
            tracing::debug!(store = self.ufs.store_id(), prefix = self.prefix, "a listing in no order is sorted here");
            let is_handed_out = !last.is_empty();
            self.order = Order::Collecting(Collected::default());
            if is_handed_out {
                (self.position, self.empty_pages, self.entries) = (Position::Start, 0, 0);
                return Ok(ListPage { restarts: true, ..ListPage::default() });
            }
        }
        let Order::Collecting(collected) = &mut self.order else { return Ok(page) };
        collected.add(page);
        if collected.bytes > self.collected_max {
            let most = self.collected_max >> 20;
            let error = UfsError::Oversized {
                request: self.request(),
                reason: format!("the store lists in no order, and more than {most} MiB of that are not sorted here"),
                remedy: "split the directory, mount a part of it, or use a store that lists in the order of keys",
            };
            self.order = Order::TooMuch(error.clone());
            return Err(error);
        }
        if !matches!(self.position, Position::End) {
            return Ok(ListPage::default());
        }
        let mut sorted = std::mem::take(collected);
        sorted.sort();
        let page = sorted.take_page();
        self.order = Order::Sorted(sorted);
        Ok(page)
    }
}

/// Takes the objects of views out of a page of a mount with this prefix.
pub(crate) fn hide_views(page: &mut ListPage, prefix: &str) {
    let is_shown = |key: &str| !key.strip_prefix(prefix).is_some_and(|name| name.starts_with(VIEW));
    page.objects.retain(|object| is_shown(&object.key));
    page.prefixes.retain(|prefix| is_shown(prefix));
}

/// Where a page ends whose entries are in order and behind `after`.
fn end_if_ordered(page: &ListPage, after: &str) -> Option<String> {
    let keys = || page.objects.iter().map(|object| object.key.as_str());
    let prefixes = || page.prefixes.iter().map(String::as_str);
    // A store may have a prefix at the end of a page and at the beginning of the next.
    let is_behind = [keys().next(), prefixes().next()].into_iter().flatten().all(|first| first >= after);
    let is_ordered = is_behind && keys().is_sorted() && prefixes().is_sorted();
    is_ordered
        .then(|| [keys().next_back(), prefixes().next_back()].into_iter().flatten().fold(after, Ord::max).to_owned())
}

/// What a listing in no order has brought so far; sorted, what is still to be handed out, the last entries first.
#[derive(Clone, Debug, Default)]
struct Collected {
    objects: Vec<ObjectMeta>,
    prefixes: Vec<String>,
    hidden: u64,
    bytes: usize,
}

impl Collected {
    fn add(&mut self, page: ListPage) {
        let object_bytes = |object: &ObjectMeta| size_of::<ObjectMeta>() + object.key.len() + object.etag.len();
        self.bytes += page.objects.iter().map(object_bytes).sum::<usize>();
        self.bytes += page.prefixes.iter().map(|prefix| size_of::<String>() + prefix.len()).sum::<usize>();
        self.objects.extend(page.objects);
        self.prefixes.extend(page.prefixes);
        self.hidden += page.hidden;
    }

    /// What a store lists twice is there once.
    fn sort(&mut self) {
        self.objects.sort_by(|one, other| other.key.cmp(&one.key));
        self.objects.dedup_by(|one, other| one.key == other.key);
        self.prefixes.sort_by(|one, other| other.cmp(one));
        self.prefixes.dedup();
    }

    fn is_empty(&self) -> bool {
        self.objects.is_empty() && self.prefixes.is_empty()
    }

    fn take_page(&mut self) -> ListPage {
        let mut page = ListPage { hidden: std::mem::take(&mut self.hidden), ..ListPage::default() };
        for _ in 0..PAGE_KEYS {
            let is_object = match (self.objects.last(), self.prefixes.last()) {
                (Some(object), Some(prefix)) => object.key < *prefix,
                (object, _) => object.is_some(),
            };
            if is_object {
                page.objects.extend(self.objects.pop());
            } else {
                page.prefixes.extend(self.prefixes.pop());
            }
        }
        page
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, HashMap};

    use cavern_conf::schema;
    use cavern_proto::Capabilities;

    use super::*;
    use crate::memory::MemoryBucket;
    use crate::store::model;
    use crate::window::{Windows, place_cmp};

    /// A bucket of 2,500 objects and 400 prefixes in `d/`, and their keys.
    fn bucket(name: &str) -> (MemoryBucket, Ufs, BTreeSet<String>) {
        let bucket = MemoryBucket::named(name);
        let objects = (0..2500).map(|number| format!("d/a-{number:04}"));
        let keys: BTreeSet<_> = objects.chain((0..400).map(|number| format!("d/a-{:04}/x", number * 7))).collect();
        for key in &keys {
            bucket.put(key, "x");
        }
        let ufs = Ufs::open(&format!("memory://{name}"), &HashMap::new(), &schema::Ufs::default()).unwrap();
        (bucket, ufs, keys)
    }

    /// All entries as they come after the last beginning, and how many beginnings there were.
    async fn listed(lister: &mut Lister) -> (Vec<String>, u32) {
        let (mut entries, mut restarts) = (Vec::new(), 0);
        while let Some(page) = lister.next_page().await.unwrap() {
            if page.restarts {
                (entries, restarts) = (Vec::new(), restarts + 1);
            }
            let mut of_page: Vec<_> = page.objects.into_iter().map(|object| object.key).chain(page.prefixes).collect();
            assert!(of_page.len() <= PAGE_KEYS);
            of_page.sort();
            entries.append(&mut of_page);
        }
        (entries, restarts)
    }

    #[tokio::test]
    async fn no_name_is_missing_from_a_listing_in_no_order() {
        let (bucket, ufs, _) = bucket("lister-no-order");
        for number in 0..400 {
            bucket.put(&format!("e/{number}"), "x");
        }
        // Each entry in a shard of its own; pages of all sizes.
        for page in [1000, 400, 399, 7, 1] {
            bucket.list_in_shards(u64::MAX, page);
            let mut lister = ufs.list("e/", ListMode::Directory);
            let mut windows = Windows::new("e/".to_owned());
            let mut names = BTreeSet::new();
            loop {
                let page = lister.next_page().await.unwrap();
                if page.as_ref().is_some_and(|page| page.restarts) {
                    names.clear();
                }
                let window = windows.page(page.as_ref(), page.is_none());
                for name in window.names.into_keys() {
                    let is_behind = place_cmp(&name, &window.after).is_gt();
                    assert!(is_behind, "{name:?} comes in a window after {:?}", window.after);
                    names.insert(String::from_utf8(name.to_vec()).unwrap());
                }
                if page.is_none() {
                    break;
                }
            }
            assert_eq!(names, (0..400).map(|number| number.to_string()).collect::<BTreeSet<_>>(), "pages of {page}");
        }
    }

    #[tokio::test]
    async fn disorder_that_shows_late_has_the_listing_begin_anew() {
        let (bucket, ufs, keys) = bucket("lister-shards");
        for mode in [ListMode::Directory, ListMode::Recursive] {
            let expected = model::entries(&keys, "d/", mode);
            // In order.
            bucket.list_in_shards(1, 1000);
            assert_eq!(listed(&mut ufs.list("d/", mode)).await, (expected.clone(), 0));
            // Each of two halves is in order, over several pages.
            bucket.list_in_shards(2, 100);
            assert_eq!(listed(&mut ufs.list("d/", mode)).await, (expected.clone(), 1));
            // The first page is in no order.
            bucket.list_in_shards(u64::MAX, 1000);
            assert_eq!(listed(&mut ufs.list("d/", mode)).await, (expected.clone(), 0));
        }
    }

    #[tokio::test]
    async fn a_store_that_promises_no_order_has_its_listings_sorted_from_their_beginning() {
        let (bucket, ufs, keys) = bucket("lister-promises");
        bucket.list_in_shards(2, 100);
        let promised = ufs.capabilities();
        bucket.claim_capabilities(Capabilities { ordered_listings: false, ..promised });
        let expected = model::entries(&keys, "d/", ListMode::Recursive);
        assert_eq!(listed(&mut ufs.list("d/", ListMode::Recursive)).await, (expected, 0));
    }

    #[tokio::test]
    async fn a_listing_that_is_too_long_to_be_sorted_is_an_error_that_says_so() {
        let (bucket, ufs, keys) = bucket("lister-budget");
        let mut lister = Lister { collected_max: 1 << 10, ..ufs.list("d/", ListMode::Recursive) };
        assert_eq!(listed(&mut lister).await.0, model::entries(&keys, "d/", ListMode::Recursive), "in order");
        bucket.list_in_shards(u64::MAX, 100);
        let mut lister = Lister { collected_max: 1 << 10, ..ufs.list("d/", ListMode::Recursive) };
        let error = lister.next_page().await.unwrap_err();
        assert!(matches!(error, UfsError::Oversized { .. }) && !error.is_temporary(), "{error:?}");
        for part in ["LIST \"d/\" in memory://lister-budget", "lists in no order", "split the directory"] {
            assert!(error.to_string().contains(part), "{error}");
        }
        let lists = ufs.stats().lists;
        assert!(lister.next_page().await.is_err());
        assert_eq!(ufs.stats().lists, lists, "the store is not asked in vain");
    }

    #[tokio::test]
    async fn a_listing_ends_where_it_may_have_no_more_entries() {
        let (bucket, ufs, keys) = bucket("lister-most");
        for (mode, there) in [(ListMode::Recursive, 2900), (ListMode::Directory, 2900)] {
            assert_eq!(model::entries(&keys, "d/", mode).len(), there);
            let mut whole = ufs.list("d/", mode).at_most(there as u64, "raise it");
            assert_eq!(listed(&mut whole).await.0.len(), there);
            let mut cut = ufs.list("d/", mode).at_most(there as u64 - 1, "raise it");
            let mut pages = 0;
            let error = loop {
                match cut.next_page().await {
                    Ok(page) => pages += u64::from(page.is_some()),
                    Err(error) => break error,
                }
            };
            assert_eq!(pages, 2);
            assert!(matches!(error, UfsError::Oversized { .. }) && !error.is_temporary(), "{error:?}");
            for part in ["LIST \"d/\" in memory://lister-most", "more than 2899 entries", "raise it"] {
                assert!(error.to_string().contains(part), "{error}");
            }
            let lists = ufs.stats().lists;
            assert!(cut.next_page().await.is_err());
            assert_eq!(ufs.stats().lists, lists, "the store is not asked in vain");
        }
        // One that begins anew counts anew.
        bucket.list_in_shards(2, 100);
        assert_eq!(listed(&mut ufs.list("d/", ListMode::Recursive).at_most(2900, "")).await.1, 1);
    }

    #[tokio::test]
    async fn views_are_in_no_listing() {
        let bucket = MemoryBucket::named("lister-views");
        let view = format!("{VIEW}0123456789abcdef0123456789abcdef");
        let keys = [".cavern-view", ".cavern-vieww", "a", "d/a", "m/a", "m/z"].map(str::to_owned);
        // Those of mounts above and beside are objects as any other.
        let others = [view.clone(), format!("m/d/{view}"), format!("n/{view}")];
        for key in keys.iter().chain(&others).chain(&[format!("m/{view}"), format!("m/{view}x/y")]) {
            bucket.put(key, "x");
        }
        let ufs = Ufs::open("memory://lister-views/m", &HashMap::new(), &schema::Ufs::default()).unwrap();
        for shards in [1, u64::MAX] {
            bucket.list_in_shards(shards, 3);
            let entries = listed(&mut ufs.list("m/", ListMode::Directory)).await.0;
            assert_eq!(entries, ["m/a", "m/d/", "m/z"]);
            let all = listed(&mut ufs.list("m/", ListMode::Recursive)).await.0;
            assert_eq!(all, ["m/a".to_owned(), format!("m/d/{view}"), "m/z".to_owned()]);
        }
        let whole = Ufs::open("memory://lister-views", &HashMap::new(), &schema::Ufs::default()).unwrap();
        let entries = listed(&mut whole.list("", ListMode::Directory)).await.0;
        assert_eq!(entries, [".cavern-view", ".cavern-vieww", "a", "d/", "m/", "n/"]);
    }

    #[tokio::test]
    async fn a_clone_goes_on_from_where_it_was_cloned() {
        let (bucket, ufs, keys) = bucket("lister-clones");
        bucket.list_in_shards(u64::MAX, 1000);
        let mut lister = ufs.list("d/", ListMode::Recursive);
        lister.next_page().await.unwrap();
        let mut clone = lister.clone();
        let expected = model::entries(&keys, "d/", ListMode::Recursive);
        assert_eq!(listed(&mut lister).await.0, expected);
        assert_eq!(listed(&mut clone).await.0, expected);
    }
}
