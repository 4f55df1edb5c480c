//! What each session can have seen of the namespace: of changes that do not concern it it is not notified.
//!
//! A session has seen the names that it asked about, whether they were there or not, directories that it listed, and
//! what it changed itself. Beside a name it knows the attributes of the inode that it leads to; when an inode goes
//! elsewhere, whoever knew it keeps an eye on the inode itself, which may be open. Nothing is taken back before the
//! session's stream begins anew, with an empty cache: a client does not report what it forgets.
//!
//! Few sessions know most places, and most changes concern nobody. So it is kept by place: a change costs a look or
//! two, however many sessions there are.

use std::collections::hash_map::Entry as Slot;
use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};

use cavern_state::InodeLocation;

/// Names of a directory that are remembered one by one for a session; whoever knows more of them counts as knowing all.
const NAMES_MAX: usize = 64;
/// Directories, names and inodes remembered for a session; whoever knows more is notified of everything.
pub(super) const PLACES_MAX: usize = 65_536;

/// Ids of sessions in order. Few in most places, and then without any allocation but one.
#[derive(Debug, Default)]
pub(super) struct SessionSet(Vec<u64>);

impl SessionSet {
    fn add(&mut self, session: u64) -> bool {
        self.0.binary_search(&session).map_err(|at| self.0.insert(at, session)).is_err()
    }

    fn remove(&mut self, session: u64) {
        if let Ok(at) = self.0.binary_search(&session) {
            self.0.remove(at);
        }
    }

    fn has(&self, session: u64) -> bool {
        self.0.binary_search(&session).is_ok()
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Names are told apart by their hashes: two of one hash cost a notification too many.
fn hash_of(name: &[u8]) -> u64 {
    BuildHasherDefault::<DefaultHasher>::default().hash_one(name)
}

/// Who knows what, of all sessions.
#[derive(Debug, Default)]
pub(super) struct WatchRegistry {
    directories: HashMap<u64, Directory>,
    inodes: HashMap<u64, SessionSet>,
    everything: SessionSet,
    /// Have come from elsewhere, and what they know is not known here yet: they count as knowing everything, too.
    unsettled: SessionSet,
    sessions: HashMap<u64, Known>,
}

/// Who knows what of a directory's names.
#[derive(Debug, Default)]
struct Directory {
    /// Have seen that whatever is not there is not.
    whole: SessionSet,
    /// Have asked about so many names that they are not told apart.
    many: SessionSet,
    names: HashMap<u64, SessionSet>,
    /// Have read, while it was listed for the first time, all names before this one. Each is in `whole` as well.
    begun: HashMap<u64, Box<[u8]>>,
    /// Nobody has read so any name from this one on: what a listing brings is behind it.
    begun_before: Box<[u8]>,
}

impl Directory {
    fn is_unknown(&self) -> bool {
        self.whole.is_empty() && self.many.is_empty() && self.names.is_empty() && self.begun.is_empty()
    }
}

/// The places where a session is entered.
#[derive(Debug, Default)]
struct Known {
    directories: HashMap<u64, Names>,
    inodes: HashSet<u64>,
    places: usize,
}

#[derive(Debug, Default)]
struct Names {
    whole: bool,
    many: bool,
    /// Hashes.
    few: Vec<u64>,
}

impl Known {
    fn names_of(&mut self, directory: u64) -> &mut Names {
        self.directories.entry(directory).or_insert_with(|| {
            self.places += 1;
            Names::default()
        })
    }
}

impl WatchRegistry {
    /// A session begins, and knows nothing yet.
    pub(super) fn begin(&mut self, session: u64) {
        self.end(session);
        self.sessions.insert(session, Known::default());
    }

    /// A session begins that knows things from elsewhere.
    pub(super) fn begin_unsettled(&mut self, session: u64) {
        self.begin(session);
        self.unsettled.add(session);
    }

    /// What a session knew before it came is entered here by now, or forgotten there.
    pub(super) fn settle(&mut self, session: u64) {
        self.unsettled.remove(session);
    }

    /// Whether a session is entered here.
    pub(super) fn has(&self, session: u64) -> bool {
        self.sessions.contains_key(&session)
    }

    /// Whether it is known here what a session knows.
    pub(super) fn is_settled(&self, session: u64) -> bool {
        self.has(session) && !self.unsettled.has(session)
    }

    pub(super) fn end(&mut self, session: u64) {
        self.everything.remove(session);
        self.unsettled.remove(session);
        if let Some(known) = self.sessions.remove(&session) {
            self.forget(session, known);
        }
    }

    /// A session is about to be answered what a name leads to, or that it leads nowhere.
    pub(super) fn watch_name(&mut self, session: u64, directory: u64, name: &[u8]) {
        self.watch(session, |watches, known| {
            let names = known.names_of(directory);
            let hash = hash_of(name);
            if names.many || names.few.contains(&hash) {
                return;
            }
            if names.few.len() == NAMES_MAX {
                return watches.enter_many(session, directory, known);
            }
            names.few.push(hash);
            watches.directories.entry(directory).or_default().names.entry(hash).or_default().add(session);
            known.places += 1;
        });
    }

    fn enter_many(&mut self, session: u64, directory: u64, known: &mut Known) {
        let names = known.names_of(directory);
        if !names.many {
            names.many = true;
            let few = std::mem::take(&mut names.few);
            known.places -= few.len();
            let watched = self.directories.entry(directory).or_default();
            watched.many.add(session);
            few.into_iter().for_each(|hash| watched.forget_name(session, hash));
        }
    }

    /// A session knows any number of names of a directory, and that any number are not there.
    pub(super) fn watch_many_names(&mut self, session: u64, directory: u64) {
        self.watch(session, |watches, known| watches.enter_many(session, directory, known));
    }

    /// A session is about to be answered what is in a directory.
    pub(super) fn watch_directory(&mut self, session: u64, directory: u64) {
        self.watch(session, |watches, known| {
            let names = known.names_of(directory);
            if !names.whole {
                names.whole = true;
                watches.directories.entry(directory).or_default().whole.add(session);
            }
        });
    }

    /// A session is about to be answered which names there are before this one, in a directory that is being listed for
    /// the first time.
    pub(super) fn watch_names_before(&mut self, session: u64, directory: u64, before: &[u8]) {
        self.watch_directory(session, directory);
        self.watch(session, |watches, known| {
            let Directory { begun, begun_before, .. } = watches.directories.entry(directory).or_default();
            let read = begun.entry(session).or_insert_with(|| {
                known.places += 1;
                Box::default()
            });
            if **read < *before {
                *read = before.into();
            }
            if **begun_before < *before {
                *begun_before = before.into();
            }
        });
    }

    /// A session knows an inode, whatever its name is or will be.
    pub(super) fn watch_inode(&mut self, session: u64, inode: u64) {
        self.watch(session, |watches, known| {
            if known.inodes.insert(inode) {
                watches.inodes.entry(inode).or_default().add(session);
                known.places += 1;
            }
        });
    }

    fn watch(&mut self, session: u64, enter: impl FnOnce(&mut Self, &mut Known)) {
        let Some(mut known) = self.sessions.remove(&session) else { return };
        if !self.everything.has(session) {
            enter(self, &mut known);
            if known.places > PLACES_MAX {
                self.forget(session, std::mem::take(&mut known));
                self.everything.add(session);
            }
        }
        self.sessions.insert(session, known);
    }

    fn forget(&mut self, session: u64, known: Known) {
        for (directory, names) in known.directories {
            let Slot::Occupied(mut slot) = self.directories.entry(directory) else { continue };
            let watched = slot.get_mut();
            watched.whole.remove(session);
            watched.many.remove(session);
            watched.begun.remove(&session);
            names.few.into_iter().for_each(|hash| watched.forget_name(session, hash));
            if watched.is_unknown() {
                slot.remove();
            }
        }
        for inode in known.inodes {
            let Slot::Occupied(mut slot) = self.inodes.entry(inode) else { continue };
            slot.get_mut().remove(session);
            if slot.get().is_empty() {
                slot.remove();
            }
        }
    }

    /// An inode is no longer there, and nothing will be changed about it.
    pub(super) fn inode_gone(&mut self, inode: u64) {
        for session in self.inodes.remove(&inode).unwrap_or_default().0 {
            if let Some(known) = self.sessions.get_mut(&session) {
                known.places -= usize::from(known.inodes.remove(&inode));
            }
        }
    }

    /// Whether any of some sessions can have seen anything that is in a directory, or that is not.
    pub(super) fn is_known_by(&self, directory: u64, is_of_them: impl Fn(u64) -> bool) -> bool {
        let has = |sessions: &SessionSet| sessions.0.iter().any(|session| is_of_them(*session));
        has(&self.everything)
            || has(&self.unsettled)
            || self
                .directories
                .get(&directory)
                .is_some_and(|watched| has(&watched.whole) || has(&watched.many) || watched.names.values().any(has))
    }

    /// The inodes that some sessions know whatever their names are; `None` for more than so many.
    pub(super) fn inodes_known_by(&self, is_of_them: impl Fn(u64) -> bool, limit: usize) -> Option<Vec<u64>> {
        let mut inodes = Vec::new();
        for (_, known) in self.sessions.iter().filter(|(id, _)| is_of_them(**id)) {
            inodes.extend(known.inodes.iter().take(limit + 1 - inodes.len()));
            if inodes.len() > limit {
                return None;
            }
        }
        Some(inodes)
    }

    /// Calls `found` for every session that can have seen what a name led to. With `first_fill` the directory was never
    /// listed whole: nobody has seen more of it than its beginning. A session may be found more than once.
    pub(super) fn of_name(&self, directory: u64, name: &[u8], first_fill: bool, mut found: impl FnMut(u64)) {
        self.of_anything(&mut found);
        let Some(watched) = self.directories.get(&directory) else { return };
        if first_fill && name < &*watched.begun_before {
            let has_read = watched.begun.iter().filter(|(_, before)| name < &***before);
            has_read.for_each(|(session, _)| found(*session));
        } else if !first_fill {
            watched.whole.0.iter().for_each(|session| found(*session));
        }
        watched.many.0.iter().for_each(|session| found(*session));
        if !watched.names.is_empty()
            && let Some(sessions) = watched.names.get(&hash_of(name))
        {
            sessions.0.iter().for_each(|session| found(*session));
        }
    }

    fn of_anything(&self, found: &mut impl FnMut(u64)) {
        self.everything.0.iter().chain(&self.unsettled.0).for_each(|session| found(*session));
    }

    /// Calls `found` for every session that can have seen an inode, which is there now; false when any session may know
    /// it.
    pub(super) fn of_inode(&self, inode: u64, location: &InodeLocation, mut found: impl FnMut(u64)) -> bool {
        match location {
            InodeLocation::Named { parent, name, .. } => self.of_name(*parent, name, false, &mut found),
            InodeLocation::Several => return false,
            InodeLocation::Nameless | InodeLocation::Gone => self.of_anything(&mut found),
        }
        if let Some(sessions) = self.inodes.get(&inode) {
            sessions.0.iter().for_each(|session| found(*session));
        }
        true
    }
}

impl Directory {
    fn forget_name(&mut self, session: u64, hash: u64) {
        if let Slot::Occupied(mut slot) = self.names.entry(hash) {
            slot.get_mut().remove(session);
            if slot.get().is_empty() {
                slot.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use bytes::Bytes;
    use proptest::prelude::*;

    use super::*;

    fn of_name(watches: &WatchRegistry, directory: u64, name: &str, first_fill: bool) -> Vec<u64> {
        let mut found = BTreeSet::new();
        watches.of_name(directory, name.as_bytes(), first_fill, |session| {
            found.insert(session);
        });
        found.into_iter().collect()
    }

    fn of_inode(watches: &WatchRegistry, inode: u64, location: &InodeLocation) -> Option<Vec<u64>> {
        let mut found = BTreeSet::new();
        let known = watches.of_inode(inode, location, |session| {
            found.insert(session);
        });
        known.then(|| found.into_iter().collect())
    }

    fn named(parent: u64, name: &'static str) -> InodeLocation {
        InodeLocation::Named { parent, name: Bytes::from_static(name.as_bytes()), is_directory: false }
    }

    fn with_sessions(sessions: &[u64]) -> WatchRegistry {
        let mut watches = WatchRegistry::default();
        sessions.iter().for_each(|session| watches.begin(*session));
        watches
    }

    #[test]
    fn who_asked_about_a_name_or_listed_its_directory_is_concerned() {
        let mut watches = with_sessions(&[1, 2, 3]);
        watches.watch_name(1, 10, b"a");
        watches.watch_directory(2, 10);
        watches.watch_name(9, 10, b"a");
        assert_eq!(of_name(&watches, 10, "a", false), [1, 2], "9 is no session");
        assert_eq!((of_name(&watches, 10, "b", false), of_name(&watches, 11, "a", false)), (vec![2], vec![]));
        assert_eq!(of_name(&watches, 10, "a", true), [1], "nobody has seen a directory that is being filled");
        watches.end(2);
        assert_eq!(of_name(&watches, 10, "a", false), [1]);
        watches.begin(1);
        assert_eq!(of_name(&watches, 10, "a", false), Vec::<u64>::new());
        assert!(watches.directories.is_empty());
    }

    #[test]
    fn who_has_read_a_part_of_what_is_being_filled_is_concerned_by_that_part() {
        let mut watches = with_sessions(&[1, 2]);
        watches.watch_names_before(1, 10, b"m");
        watches.watch_names_before(1, 10, b"f");
        watches.watch_names_before(2, 10, b"f");
        let filled = |name| of_name(&watches, 10, name, true);
        assert_eq!((filled("a"), filled("f"), filled("m")), (vec![1, 2], vec![1], vec![]));
        assert_eq!(of_name(&watches, 10, "x", false), [1, 2]);
        watches.end(1);
        assert_eq!(of_name(&watches, 10, "a", true), [2]);
        watches.end(2);
        assert!(watches.directories.is_empty());
    }

    #[test]
    fn what_others_know_of_a_directory_is_known_whatever_it_is() {
        let mut watches = with_sessions(&[1, 2]);
        watches.watch_name(1, 10, b"a");
        watches.watch_directory(1, 10);
        watches.watch_inode(1, 5);
        let is_known =
            |watches: &WatchRegistry, directory: u64, but: u64| watches.is_known_by(directory, |id| id != but);
        let inodes = |watches: &WatchRegistry, but: u64, limit: usize| watches.inodes_known_by(|id| id != but, limit);
        assert!(!is_known(&watches, 10, 1) && is_known(&watches, 10, 2));
        assert_eq!((inodes(&watches, 1, 9), inodes(&watches, 2, 9)), (Some(vec![]), Some(vec![5])));
        assert_eq!(inodes(&watches, 2, 0), None, "too many");
        watches.watch_name(2, 10, b"b");
        assert!(is_known(&watches, 10, 1) && !is_known(&watches, 11, 1));
        watches.end(2);
        assert!(!is_known(&watches, 10, 1));
        watches.begin_unsettled(3);
        assert!(is_known(&watches, 11, 1), "nobody knows what it knows");
    }

    #[test]
    fn who_comes_from_elsewhere_is_concerned_by_everything_until_it_is_known_what_it_knows() {
        let mut watches = WatchRegistry::default();
        watches.begin_unsettled(1);
        watches.watch_name(1, 10, b"a");
        assert_eq!(
            (of_name(&watches, 11, "x", true), of_inode(&watches, 5, &InodeLocation::Nameless)),
            (vec![1], Some(vec![1]))
        );
        watches.settle(1);
        assert_eq!((of_name(&watches, 11, "x", true), of_name(&watches, 10, "a", false)), (vec![], vec![1]));
    }

    #[test]
    fn inodes_are_known_by_their_name_or_themselves() {
        let mut watches = with_sessions(&[1, 2, 3]);
        watches.watch_name(1, 10, b"a");
        watches.watch_inode(2, 5);
        assert_eq!(of_inode(&watches, 5, &named(10, "a")), Some(vec![1, 2]));
        assert_eq!(of_inode(&watches, 5, &named(10, "b")), Some(vec![2]));
        assert_eq!(of_inode(&watches, 5, &InodeLocation::Nameless), Some(vec![2]));
        assert_eq!(of_inode(&watches, 5, &InodeLocation::Several), None);
        watches.inode_gone(5);
        assert_eq!(of_inode(&watches, 5, &InodeLocation::Gone), Some(vec![]));
        assert_eq!((watches.inodes.len(), watches.sessions[&2].places), (0, 0));
    }

    #[test]
    fn many_names_of_a_directory_count_as_all() {
        let mut watches = with_sessions(&[1]);
        let watch =
            |watches: &mut WatchRegistry, number: usize| watches.watch_name(1, 10, number.to_string().as_bytes());
        (0..NAMES_MAX).for_each(|number| watch(&mut watches, number));
        assert_eq!(of_name(&watches, 10, "x", false), Vec::<u64>::new());
        watch(&mut watches, NAMES_MAX);
        assert_eq!((of_name(&watches, 10, "x", false), of_name(&watches, 10, "x", true)), (vec![1], vec![1]));
        assert_eq!((watches.sessions[&1].places, watches.directories[&10].names.len()), (1, 0));
        watches.end(1);
        assert!(watches.directories.is_empty());
    }

    #[test]
    fn who_knows_too_much_is_concerned_by_everything_until_it_begins_anew() {
        let mut watches = with_sessions(&[1, 2]);
        (0..=PLACES_MAX as u64).for_each(|inode| watches.watch_inode(1, inode));
        assert_eq!(of_name(&watches, 77, "x", true), [1]);
        assert_eq!(of_inode(&watches, 1 << 40, &named(3, "y")), Some(vec![1]));
        assert!(watches.inodes.is_empty());
        watches.begin(1);
        assert_eq!(of_name(&watches, 77, "x", false), Vec::<u64>::new());
    }

    /// Names, directories and inodes.
    type Seen = (HashSet<(u64, u8)>, HashSet<u64>, HashSet<u64>);

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Begin(u64),
        End(u64),
        Name(u64, u64, u8),
        Directory(u64, u64),
        Inode(u64, u64),
        Gone(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        let session = || 0u64..4;
        prop_oneof![
            1 => session().prop_map(Step::Begin),
            1 => session().prop_map(Step::End),
            20 => (session(), 0u64..3, 0u8..120).prop_map(|(session, at, name)| Step::Name(session, at, name)),
            3 => (session(), 0u64..3).prop_map(|(session, directory)| Step::Directory(session, directory)),
            5 => (session(), 0u64..6).prop_map(|(session, inode)| Step::Inode(session, inode)),
            2 => (0u64..6).prop_map(Step::Gone),
        ]
    }

    proptest! {
        /// Nobody who has seen something is missed, and of the ended nothing stays.
        #[test]
        fn whoever_has_seen_something_is_found(steps in prop::collection::vec(step(), 0..600)) {
            let mut watches = WatchRegistry::default();
            let mut seen: HashMap<u64, Seen> = HashMap::new();
            for step in steps {
                match step {
                    Step::Begin(session) => {
                        watches.begin(session);
                        seen.insert(session, Default::default());
                    }
                    Step::End(session) => {
                        watches.end(session);
                        seen.remove(&session);
                    }
                    Step::Name(session, directory, name) => {
                        watches.watch_name(session, directory, &[name]);
                        seen.get_mut(&session).map(|(names, _, _)| names.insert((directory, name)));
                    }
                    Step::Directory(session, directory) => {
                        watches.watch_directory(session, directory);
                        seen.get_mut(&session).map(|(_, directories, _)| directories.insert(directory));
                    }
                    Step::Inode(session, inode) => {
                        watches.watch_inode(session, inode);
                        seen.get_mut(&session).map(|(_, _, inodes)| inodes.insert(inode));
                    }
                    Step::Gone(inode) => {
                        watches.inode_gone(inode);
                        for (_, _, inodes) in seen.values_mut() {
                            inodes.remove(&inode);
                        }
                    }
                }
            }
            for (session, (names, directories, inodes)) in &seen {
                for (directory, name) in names {
                    let mut found = false;
                    watches.of_name(*directory, &[*name], true, |other| found |= other == *session);
                    prop_assert!(found, "{session} knows {name} of {directory}");
                }
                for directory in directories {
                    let mut found = false;
                    watches.of_name(*directory, b"any", false, |other| found |= other == *session);
                    prop_assert!(found, "{session} knows all of {directory}");
                }
                for inode in inodes {
                    let known = of_inode(&watches, *inode, &InodeLocation::Nameless).unwrap();
                    prop_assert!(known.contains(session), "{session} knows inode {inode}");
                }
            }
            let sessions: Vec<u64> = seen.keys().copied().collect();
            sessions.into_iter().for_each(|session| watches.end(session));
            prop_assert!(watches.directories.is_empty() && watches.inodes.is_empty() && watches.sessions.is_empty());
        }
    }
}
