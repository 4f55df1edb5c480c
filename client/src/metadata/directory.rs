//! What is known of directories: how old their listing is, and the listing itself as inodes in name order.
//!
//! A listing grows page by page as it is read, and is dropped as soon as any name of it changes. It holds inodes only
//! (eight bytes an entry): the nodes are in the cache, and a page whose nodes have been evicted is fetched again.
//! Of a directory that was read to its end, or made here, all names are known besides, and follow the changes of this
//! client and those that it is notified of: whoever fills a directory asks nobody whether the next name is free, and
//! two who fill one do not cost each other that knowledge.

use std::sync::Arc;
use std::time::Duration;

use cavern_proto::master::Consistency;
use parking_lot::Mutex;
use quick_cache::sync::Cache as BoundedMap;
use tokio::time::Instant;

use super::cache::Cache;
use super::listing_budget::ListingBudget;
use super::name_set::NameSet;
use super::node::Node;
use crate::mounts::MountView;

/// Entries asked for at once when a listing is recorded, so that a large directory takes few round trips.
pub(super) const LISTING_PAGE: usize = 4096;
/// Directories remembered at least.
const DIRECTORIES_MIN: usize = 1024;

/// Consecutive entries of a directory, in name order (bytes), without `.` and `..`.
#[derive(Clone, Debug)]
pub struct DirPage {
    pub entries: Vec<Arc<Node>>,
    /// The directory has no further entry. When false, `entries` is not empty: go on after its last name.
    pub end: bool,
}

/// All directories that are known, bounded.
#[derive(Debug)]
pub(super) struct Directories {
    known: BoundedMap<u64, Arc<Directory>>,
    budget: Arc<ListingBudget>,
}

#[derive(Debug)]
pub(super) struct Directory {
    inode: u64,
    pub mount: Option<Arc<MountView>>,
    /// Key prefix of what is in it.
    pub location: Arc<str>,
    state: Mutex<State>,
    budget: Arc<ListingBudget>,
}

#[derive(Debug, Default)]
struct State {
    listed_at: Option<Instant>,
    touched_at: Option<Instant>,
    /// Counts how often the listing was dropped.
    epoch: u64,
    inodes: Vec<u64>,
    last_name: Box<[u8]>,
    complete: bool,
    /// The names of the listing as far as it goes.
    listed: Option<NameSet>,
    /// All names that there are, listed or not.
    names: Option<NameSet>,
    /// It did not fit; not tried again before it changes.
    too_large: bool,
}

/// Ties an answer of the master to the listing that it continues.
#[derive(Clone, Copy, Debug)]
pub(super) struct ListingEpoch(u64);

impl Directories {
    /// `entries` bounds the entries of all recorded listings.
    pub(super) fn new(entries: usize) -> Self {
        let budget = ListingBudget::new(entries);
        Self { known: BoundedMap::new((entries / 4).max(DIRECTORIES_MIN)), budget: Arc::new(budget) }
    }

    pub(super) fn get(&self, inode: u64) -> Option<Arc<Directory>> {
        self.known.get(&inode)
    }

    /// The directory, made or replaced when its mount or location are not these.
    pub(super) fn ensure(&self, inode: u64, mount: Option<&Arc<MountView>>, location: &str) -> Arc<Directory> {
        let same = |known: &Directory| match (&known.mount, mount) {
            (None, None) => true,
            (Some(known_mount), Some(mount)) => Arc::ptr_eq(known_mount, mount) && *known.location == *location,
            _ => false,
        };
        if let Some(known) = self.known.get(&inode).filter(|known| same(known)) {
            return known;
        }
        let directory = Arc::new(Directory {
            inode,
            mount: mount.cloned(),
            location: location.into(),
            state: Mutex::default(),
            budget: self.budget.clone(),
        });
        self.known.insert(inode, directory.clone());
        directory
    }

    /// All that are known.
    pub(super) fn inodes(&self) -> impl Iterator<Item = u64> {
        self.known.iter().map(|(inode, _)| inode)
    }

    pub(super) fn forget(&self, inode: u64) {
        self.known.remove(&inode);
    }

    pub(super) fn clear(&self) {
        self.known.clear();
    }
}

impl Directory {
    pub(super) fn age(&self, now: Instant) -> Option<Duration> {
        self.state.lock().listed_at.map(|listed| now.saturating_duration_since(listed))
    }

    pub(super) fn ttl(&self) -> Option<Duration> {
        self.mount.as_ref().and_then(|mount| mount.metadata_ttl())
    }

    /// Whether a name that is not there may be said to be absent later without asking. Where every open asks the
    /// bucket, there is no open that could ask about it.
    pub(super) fn keeps_absences(&self) -> bool {
        self.mount.as_ref().is_none_or(|mount| mount.consistency() != Consistency::Always)
    }

    pub(super) fn is_strict(&self) -> bool {
        self.mount.as_ref().is_some_and(|mount| mount.is_strict())
    }

    /// The master says how old the listing is. Answers may arrive out of order: the youngest counts.
    pub(super) fn set_age(&self, now: Instant, age: Duration) {
        let listed = now.checked_sub(age);
        let mut state = self.state.lock();
        state.listed_at = state.listed_at.max(listed);
    }

    /// True once per `pause`: for requests in the background.
    pub(super) fn may_refresh(&self, now: Instant, pause: Duration) -> bool {
        let mut state = self.state.lock();
        let may = state.touched_at.is_none_or(|touched| now.saturating_duration_since(touched) >= pause);
        if may {
            state.touched_at = Some(now);
        }
        may
    }

    /// Up to `limit` entries after `after` as far as the listing goes, and whether the directory ends there. `None`
    /// when the next entries are not known.
    pub(super) fn page(&self, cache: &Cache, after: &[u8], limit: usize) -> Option<(Vec<Arc<Node>>, bool)> {
        let state = self.state.lock();
        let (nodes, reached) = cache.page(self.inode, &state.inodes, after, limit)?;
        let end = reached && state.complete;
        (end || !nodes.is_empty()).then_some((nodes, end))
    }

    pub(super) fn listing_epoch(&self) -> ListingEpoch {
        ListingEpoch(self.state.lock().epoch)
    }

    /// Whether pages are worth recording.
    pub(super) fn records(&self) -> bool {
        !self.state.lock().too_large
    }

    /// Continues the listing with the entries after `after`, unless it changed since `epoch` or stops elsewhere.
    pub(super) fn record(&self, epoch: ListingEpoch, after: &[u8], nodes: &[Arc<Node>], complete: bool) {
        let mut state = self.state.lock();
        if state.epoch != epoch.0 || state.too_large {
            return;
        }
        // The cache knows an inode under one name: listings of names that share theirs are not kept.
        if nodes.iter().any(|node| node.nlink > 1 && !node.is_directory()) {
            return self.drop_listing(&mut state);
        }
        if after.is_empty() {
            self.drop_listing(&mut state);
        } else if *state.last_name != *after || state.complete {
            return;
        }
        let fits = self.budget.take(nodes.len());
        state.inodes.extend(nodes.iter().map(|node| node.inode));
        if !fits {
            self.drop_listing(&mut state);
            state.too_large = true;
            return;
        }
        state.last_name = nodes.last().map_or_else(Box::default, |node| node.name.clone());
        state.complete = complete;
        if after.is_empty() {
            state.listed = Some(NameSet::new(self.budget.clone()));
        }
        state.listed.take_if(|listed| !nodes.iter().all(|node| listed.add(&node.name, node.inode)));
        if complete {
            state.names = state.listed.take();
        }
    }

    /// All names that there are, of an answer that has the directory whole, though there were changes of our own since
    /// it was asked for; `own` says what these have had names lead to, unless there were others.
    pub(super) fn record_names(&self, nodes: &[Arc<Node>], own: impl FnOnce() -> Option<Vec<(Box<[u8]>, u64)>>) {
        let mut state = self.state.lock();
        if state.names.is_some() {
            return;
        }
        // Whoever changes something after this says so before, and enters it here afterwards.
        let Some(own) = own() else { return };
        let mut names = NameSet::new(self.budget.clone());
        let mut fits = nodes.iter().all(|node| names.add(&node.name, node.inode));
        for (name, inode) in &own {
            match inode {
                0 => names.remove(name),
                _ => fits = fits && names.add(name, *inode),
            }
        }
        state.names = fits.then_some(names);
    }

    /// Whether all names are known here.
    pub(super) fn has_all_names(&self) -> bool {
        self.state.lock().names.is_some()
    }

    /// Whether no entry has this name, as far as is known here.
    pub(super) fn is_without(&self, name: &[u8]) -> bool {
        self.keeps_absences() && self.state.lock().names.as_ref().is_some_and(|names| !names.may_have(name))
    }

    /// Whether nothing is in it, as far as is known here.
    pub(super) fn is_known_empty(&self) -> bool {
        self.state.lock().names.as_ref().is_some_and(NameSet::is_empty)
    }

    /// Somebody else has had a name lead somewhere, or nowhere. What is no longer there may come again by a change of
    /// our own that is older than the event: it stays among the names that there may be.
    pub(super) fn foreign_change(&self, name: &[u8], is_there: bool) {
        let mut state = self.state.lock();
        self.changed(&mut state);
        match &mut state.names {
            Some(names) if !is_there => names.doubt(name),
            names => drop(names.take_if(|names| !names.add(name, 0))),
        }
    }

    /// Its entries may look otherwise; which names there are is known as before.
    pub(super) fn drop_pages(&self) {
        self.changed(&mut self.state.lock());
    }

    /// Nobody knows what is in it.
    pub(super) fn forget_listing(&self) {
        let mut state = self.state.lock();
        self.changed(&mut state);
        state.names = None;
    }

    /// A change of our own: the name leads to this inode now, or nowhere (0).
    pub(super) fn own_change(&self, name: &[u8], inode: u64) {
        let mut state = self.state.lock();
        self.changed(&mut state);
        match &mut state.names {
            Some(names) if inode == 0 => names.remove(name),
            names => drop(names.take_if(|names| !names.add(name, inode))),
        }
    }

    /// Makes the listing out of the names that are known, if these are all and what they lead to is cached: nobody need
    /// be asked for what was made here.
    pub(super) fn list_known(&self, cache: &Cache) {
        let (epoch, nodes) = {
            let state = self.state.lock();
            let Some(names) = state.names.as_ref().filter(|_| !state.complete && !state.too_large) else { return };
            let node = |inode| {
                let node = cache.node(inode).filter(|node| node.parent == self.inode && !node.lacks_attributes())?;
                names.has(&node.name, inode).then_some(node)
            };
            let Some(nodes) = names.all().and_then(|inodes| inodes.map(node).collect::<Option<Vec<_>>>()) else {
                return;
            };
            (ListingEpoch(state.epoch), nodes)
        };
        let mut nodes = nodes;
        nodes.sort_unstable_by(|one, other| one.name.cmp(&other.name));
        self.record(epoch, b"", &nodes, true);
    }

    fn changed(&self, state: &mut State) {
        self.drop_listing(state);
        state.epoch += 1;
        state.too_large = false;
    }

    fn drop_listing(&self, state: &mut State) {
        self.budget.give_back(state.inodes.len());
        state.listed = None;
        state.inodes = Vec::new();
        state.last_name = Box::default();
        state.complete = false;
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        self.budget.give_back(self.state.get_mut().inodes.len());
    }
}

/// Key prefix of a mount's root.
pub(super) fn root_location(mount: &MountView) -> Arc<str> {
    mount.ufs().map_or_else(|_| "".into(), |ufs| ufs.prefix().into())
}

#[cfg(test)]
mod tests {
    use super::super::cache::tests::node;
    use super::*;

    fn page(directory: &Directory, cache: &Cache, after: &str, limit: usize) -> Option<(usize, bool)> {
        directory.page(cache, after.as_bytes(), limit).map(|(nodes, end)| (nodes.len(), end))
    }

    #[test]
    fn listings_grow_in_order_and_end_when_a_name_changes() {
        let (directories, cache) = (Directories::new(100), Cache::new(100));
        let directory = directories.ensure(1, None, "");
        let nodes = [node(10, 1, "a"), node(11, 1, "b"), node(12, 1, "c")];
        cache.insert(&nodes);
        assert_eq!(page(&directory, &cache, "", 9), None);
        let epoch = directory.listing_epoch();
        directory.record(epoch, b"", &nodes[..2], false);
        directory.record(epoch, b"a", &nodes[2..], true);
        assert_eq!(page(&directory, &cache, "", 9), Some((2, false)), "a page that does not continue is ignored");
        assert_eq!(page(&directory, &cache, "b", 9), None);
        directory.record(epoch, b"b", &nodes[2..], true);
        assert_eq!(page(&directory, &cache, "a", 9), Some((2, true)));
        assert_eq!(page(&directory, &cache, "c", 9), Some((0, true)));
        directory.forget_listing();
        directory.record(epoch, b"", &nodes, true);
        assert_eq!(page(&directory, &cache, "", 9), None, "an answer from before the change is not recorded");
    }

    #[test]
    fn listings_stay_within_their_budget() {
        let (directories, cache) = (Directories::new(8), Cache::new(100));
        let nodes: Vec<_> = (10..13).map(|inode| node(inode, 1, &inode.to_string())).collect();
        cache.insert(&nodes);
        let (first, second) = (directories.ensure(1, None, ""), directories.ensure(2, None, ""));
        first.record(first.listing_epoch(), b"", &nodes, true);
        second.record(second.listing_epoch(), b"", &nodes, true);
        assert!(!second.records() && first.records());
        assert_eq!(directories.budget.used(), 6, "entries, and names");
        directories.clear();
        drop((first, second));
        assert_eq!(directories.budget.used(), 0);
    }

    #[test]
    fn names_are_known_from_a_whole_listing_on_and_follow_our_own_changes() {
        let (directories, cache) = (Directories::new(100), Cache::new(100));
        let directory = directories.ensure(1, None, "");
        let nodes = [node(10, 1, "a"), node(11, 1, "b")];
        cache.insert(&nodes);
        let absent = |names: &str| names.bytes().map(|name| directory.is_without(&[name])).collect::<Vec<_>>();
        directory.record(directory.listing_epoch(), b"", &nodes[..1], false);
        assert_eq!(absent("bc"), [false, false], "nobody knows what comes after a");
        directory.record(directory.listing_epoch(), b"a", &nodes[1..], true);
        assert_eq!(absent("abc"), [false, false, true]);
        directory.own_change(b"c", 12);
        directory.own_change(b"a", 0);
        assert_eq!(absent("abcd"), [true, false, false, true]);
        assert_eq!(page(&directory, &cache, "", 9), None, "the listing is another one now");
        directory.foreign_change(b"f", true);
        directory.foreign_change(b"c", false);
        assert_eq!(absent("abcdf"), [true, false, false, true, false], "what others remove may come again");
        directory.drop_pages();
        assert!(directory.is_without(b"d"));
        directory.forget_listing();
        directory.own_change(b"e", 14);
        assert_eq!(absent("abcd"), [false; 4]);
    }

    #[test]
    fn names_are_known_from_an_answer_and_what_was_changed_here_since() {
        let directories = Directories::new(100);
        let directory = directories.ensure(1, None, "");
        let nodes = [node(10, 1, "a"), node(11, 1, "b")];
        directory.record_names(&nodes, || None);
        assert!(!directory.has_all_names(), "others have changed something");
        let own = || Some(vec![(Box::from(&b"c"[..]), 12), (Box::from(&b"a"[..]), 0)]);
        directory.record_names(&nodes, own);
        let absent = |names: &str| names.bytes().map(|name| directory.is_without(&[name])).collect::<Vec<_>>();
        assert_eq!((absent("abcd"), directory.has_all_names()), (vec![true, false, false, true], true));
        directory.record_names(&[], || Some(Vec::new()));
        assert_eq!(absent("ab"), [true, false], "what is known stays");
        let small = Directories::new(1);
        let directory = small.ensure(1, None, "");
        directory.record_names(&nodes, || Some(Vec::new()));
        assert_eq!((directory.has_all_names(), small.budget.used()), (false, 0));
    }

    #[test]
    fn a_directory_of_which_all_names_are_known_is_listed_without_a_question() {
        let (directories, cache) = (Directories::new(100), Cache::new(100));
        let directory = directories.ensure(1, None, "");
        let listed = |after: &str| {
            directory.list_known(&cache);
            page(&directory, &cache, after, 9)
        };
        assert_eq!(listed(""), None, "nobody knows what is in it");
        directory.record(directory.listing_epoch(), b"", &[], true);
        for (inode, name) in [(12, "c"), (10, "a"), (11, "b")] {
            cache.insert(&[node(inode, 1, name)]);
            directory.own_change(name.as_bytes(), inode);
        }
        assert_eq!((listed(""), listed("a")), (Some((3, true)), Some((2, true))));
        let nodes = directory.page(&cache, b"", 2).unwrap().0;
        assert_eq!(nodes.iter().map(|node| node.inode).collect::<Vec<_>>(), [10, 11], "in the order of names");
        directory.own_change(b"b", 0);
        assert_eq!(listed(""), Some((2, true)));
        cache.forget_inode(12);
        directory.drop_pages();
        assert_eq!(listed(""), None, "one is not cached");
        cache.insert(&[node(12, 1, "d")]);
        assert_eq!(listed(""), None, "it has another name");
        cache.insert(&[node(12, 1, "c")]);
        assert_eq!(listed(""), Some((2, true)));
        directory.foreign_change(b"x", true);
        assert_eq!(listed(""), None, "somebody else has made something");
        directory.own_change(b"x", 0);
        assert_eq!(listed(""), Some((2, true)));
        directory.foreign_change(b"a", false);
        assert_eq!(listed(""), None, "or has removed something");
    }

    #[test]
    fn names_stay_within_the_budget_of_listings() {
        let directories = Directories::new(4);
        let directory = directories.ensure(1, None, "");
        directory.record(directory.listing_epoch(), b"", &[], true);
        for name in [b"a", b"b", b"c", b"d", b"d"] {
            directory.own_change(name, 10);
        }
        assert!(directory.is_without(b"x"));
        directory.own_change(b"e", 14);
        assert!(!directory.is_without(b"x"), "one did not fit");
        assert_eq!(directory.budget.used(), 0);
    }

    #[test]
    fn the_youngest_age_counts() {
        let directory = Directories::new(4).ensure(1, None, "");
        let now = Instant::now();
        directory.set_age(now, Duration::from_secs(3));
        directory.set_age(now, Duration::from_secs(8));
        assert_eq!(directory.age(now), Some(Duration::from_secs(3)));
        assert!(directory.may_refresh(now, Duration::from_secs(1)));
        assert!(!directory.may_refresh(now, Duration::from_secs(1)));
    }
}
