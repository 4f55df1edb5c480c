//! From a page of a flat listing to the difference in each directory that it has to do with.
//!
//! A page says all about the keys between two positions. Of a directory that is a [`Window`] of its names, as one page
//! of its own listing would be, so the same comparison finds what differs ([`diff`]). In a flat listing all that lies
//! below a directory comes in one piece: one frame for each directory of the current position is all that must be
//! remembered, with the objects whose place ([`place_cmp`]) the listing has not passed yet.
//!
//! **Edges.** Where a range begins or ends, other keys of a name may lie in the range beside it: `img` sorts before the
//! cut `img-5`, and what is below `img/` behind it. Such names are beginnings of the cut's components. Both ranges
//! leave them alone, but for directories that they see, and who has listed up to the cut has them checked one by one.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap, HashSet};

use bytes::Bytes;
use cavern_proto::master::Kind;
use cavern_proto::record::{InodeRecord, ListedEntry, ListingGroup};
use cavern_state::Tables;
use cavern_ufs::{Listed, ObjectMeta, Window, is_name, place_cmp};

use crate::error::WorkError;
use crate::listing::diff::{self, listed_entry};

/// Names from the mount's root down to a directory.
pub(super) type Path = Vec<Bytes>;

/// What one page says of one directory; while a range is read, one of the directories of its current position.
#[derive(Debug)]
pub(super) struct DirectoryWindow {
    /// Names down to it, and what its keys begin with; both empty for the root.
    pub path: Path,
    pub prefix: String,
    /// Begins where the page does. Its names are of this page, or objects of earlier ones whose place comes later.
    pub window: Window,
    /// Directories whose place was passed before, but that the page has keys of.
    pub passed: Vec<Bytes>,
    /// The page, or an earlier one, has keys in it.
    pub is_seen: bool,
    /// All of its keys are in this range, and were listed since it began.
    pub is_whole: bool,
    /// It began with this page.
    pub is_new: bool,
    /// Others list it: what pages say of it was not used.
    pub is_left_alone: bool,
    /// It has names that are to be taken away at the end.
    pub has_absent: bool,
    /// Since when it has had the names of all pages, on the master's clock; 0 before the first.
    pub since_ns: i64,
}

impl DirectoryWindow {
    fn new(path: Path, prefix: String, is_whole: bool) -> Self {
        Self {
            path,
            prefix,
            window: Window { after: Vec::new(), upto: None, names: BTreeMap::new(), marker: None },
            passed: Vec::new(),
            is_seen: false,
            is_whole,
            is_new: true,
            is_left_alone: false,
            has_absent: false,
            since_ns: 0,
        }
    }

    fn name(&self) -> &[u8] {
        self.path.last().map_or(&[][..], |name| &name[..])
    }

    /// Takes out what lies in it up to a key; `None` where that is nothing.
    fn window_upto(&mut self, key: &str) -> Option<Self> {
        let upto = key.strip_prefix(&self.prefix)?.as_bytes().to_vec();
        let mut names = std::mem::take(&mut self.window.names);
        self.window.names.extend(names.extract_if(.., |name, _| place_cmp(name, &upto) == Ordering::Greater));
        let passed = std::mem::take(&mut self.passed);
        if self.window.after == upto && names.is_empty() && passed.is_empty() {
            return None;
        }
        let window = Window { after: self.window.after.clone(), upto: Some(upto), names, marker: None };
        Some(Self { path: self.path.clone(), prefix: self.prefix.clone(), window, passed, ..*self })
    }

    /// Whether no other page has to do with the rest of the directory.
    pub(super) fn is_all(&self) -> bool {
        self.is_whole && self.window.upto.is_none()
    }
}

/// The directories that a range is in.
#[derive(Debug)]
pub(super) struct Frames {
    frames: Vec<DirectoryWindow>,
    /// Entries so far, and keys that cannot be names.
    pub entries: u64,
    pub hidden: u64,
}

/// The part of the keys that a range has.
#[derive(Clone, Debug)]
pub(super) struct Bounds {
    /// Exclusive; empty for the first key.
    pub after: String,
    /// Inclusive.
    pub upto: Option<String>,
}

impl Frames {
    /// Those of a position, behind which the listing goes on.
    pub(super) fn at(position: &str, entries: u64, hidden: u64) -> Self {
        let root = DirectoryWindow::new(Vec::new(), String::new(), position.is_empty());
        let mut frames = Self { frames: vec![root], entries, hidden };
        for name in directories_of(position) {
            frames.enter(name, false);
        }
        frames
    }

    /// Whether objects wait for their place to be passed.
    pub(super) fn hold_back(&self) -> bool {
        self.frames.iter().any(|frame| !frame.window.names.is_empty())
    }

    /// What objects wait for it, by directory.
    pub(super) fn held_back(&self) -> Vec<(Path, Bytes)> {
        let names = |frame: &DirectoryWindow| -> Vec<_> {
            frame.window.names.keys().map(|name| (frame.path.clone(), name.clone())).collect()
        };
        self.frames.iter().flat_map(names).collect()
    }

    /// What became of the directories that are still open; `since` says since when one has the names of this page, 0
    /// where the page says nothing of it.
    pub(super) fn note(&mut self, left_alone: &HashSet<Path>, absent: &HashSet<Path>, since: impl Fn(&[Bytes]) -> i64) {
        for frame in &mut self.frames {
            frame.is_left_alone |= left_alone.contains(&frame.path);
            frame.has_absent |= absent.contains(&frame.path);
            if frame.since_ns == 0 {
                frame.since_ns = since(&frame.path);
            }
        }
    }

    /// Whether one of them was left to others.
    pub(super) fn are_left_alone(&self) -> bool {
        self.frames.iter().any(|frame| frame.is_left_alone)
    }

    /// Cuts what lies behind `position` and up to `upto` (`None` for the end of all keys) into what it says of each
    /// directory, those above first. The keys of the objects begin with the mount's prefix.
    pub(super) fn cut(
        &mut self,
        bounds: &Bounds,
        position: &str,
        (prefix, objects): (&str, Vec<ObjectMeta>),
        upto: Option<&str>,
    ) -> Vec<DirectoryWindow> {
        let ends_in = |prefix: &str| bounds.upto.as_deref().is_some_and(|end| end.starts_with(prefix));
        for frame in &mut self.frames {
            frame.window.after = position.strip_prefix(&frame.prefix).unwrap_or_default().as_bytes().to_vec();
            frame.is_whole &= !ends_in(&frame.prefix);
            frame.is_new = position.is_empty();
        }
        let mut windows = Vec::new();
        for ObjectMeta { key, size, mtime_ns, etag, .. } in objects {
            let Some(key) = key.strip_prefix(prefix).filter(|key| !key.is_empty()) else { continue };
            let (above, file) = key.rsplit_once('/').unwrap_or(("", key));
            let directory = &key[..key.len() - file.len()];
            // Most keys are in the directory of the one before.
            let is_there = self.frames.last().is_some_and(|frame| frame.is_seen && frame.prefix == directory);
            let is_shown = is_there || {
                let names: Vec<&str> = if directory.is_empty() { Vec::new() } else { above.split('/').collect() };
                // The directories above a component that cannot be shown are there all the same.
                let shown = names.iter().take_while(|name| is_name(name.as_bytes())).count();
                self.go_to(&names[..shown], bounds, Seen::Yes, &mut windows);
                shown == names.len()
            };
            if !is_shown || !file.is_empty() && !is_name(file.as_bytes()) {
                self.hidden += 1;
            } else if let Some(frame) = self.frames.last_mut().filter(|_| !file.is_empty()) {
                self.entries += 1;
                let listed = Listed::File { size, mtime_ns, etag };
                frame.window.names.insert(Bytes::copy_from_slice(file.as_bytes()), listed);
            }
        }
        match upto {
            None => self.leave(0, &mut windows),
            Some(upto) => {
                // What lies before it in directories that have no keys there is absent.
                self.go_to(&directories_of(upto), bounds, Seen::No, &mut windows);
                windows.extend(self.frames.iter_mut().filter_map(|frame| frame.window_upto(upto)));
            }
        }
        windows.sort_by(|one, other| one.path.cmp(&other.path));
        windows
    }

    /// Leaves directories that are not above the current key, and enters those that are.
    fn go_to(&mut self, names: &[&str], bounds: &Bounds, seen: Seen, windows: &mut Vec<DirectoryWindow>) {
        let open = self.frames.iter().skip(1);
        let inside = open.zip(names).take_while(|(frame, name)| frame.name() == name.as_bytes()).count();
        self.leave(inside + 1, windows);
        if seen == Seen::Yes {
            self.frames.iter_mut().for_each(|frame| frame.is_seen = true);
        }
        for name in &names[inside..] {
            let Some(parent) = self.frames.last_mut() else { return };
            if seen == Seen::Yes {
                let name = Bytes::copy_from_slice(name.as_bytes());
                if place_cmp(&name, &parent.window.after) == Ordering::Greater {
                    self.entries += 1;
                    parent.window.names.insert(name, Listed::Directory);
                } else {
                    parent.passed.push(name);
                }
            }
            self.enter(name, true);
            if let Some(frame) = self.frames.last_mut() {
                frame.is_seen = seen == Seen::Yes;
                let lies_in = |edge: &str| edge.starts_with(&frame.prefix);
                frame.is_whole = !lies_in(&bounds.after) && !bounds.upto.as_deref().is_some_and(lies_in);
            }
        }
    }

    /// Keeps `depth` frames; the listing has passed the others.
    fn leave(&mut self, depth: usize, windows: &mut Vec<DirectoryWindow>) {
        let passed = self.frames.drain(depth.min(self.frames.len())..);
        windows.extend(passed.rev());
    }

    fn enter(&mut self, name: &str, is_whole: bool) {
        let Some(parent) = self.frames.last() else { return };
        let (mut path, prefix) = (parent.path.clone(), format!("{}{name}/", parent.prefix));
        path.push(Bytes::copy_from_slice(name.as_bytes()));
        self.frames.push(DirectoryWindow::new(path, prefix, is_whole));
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Seen {
    Yes,
    No,
}

/// The names of the directories that a key is in, as far as they can be shown.
fn directories_of(key: &str) -> Vec<&str> {
    let Some((above, _)) = key.rsplit_once('/') else { return Vec::new() };
    above.split('/').take_while(|name| is_name(name.as_bytes())).collect()
}

/// Directories above a key, the root first: their paths.
pub(super) fn paths_above(key: &str) -> impl Iterator<Item = Path> {
    let names: Path = directories_of(key).into_iter().map(|name| Bytes::copy_from_slice(name.as_bytes())).collect();
    (0..=names.len()).map(move |depth| names[..depth].to_vec())
}

/// The directory that a path leads to.
pub(super) fn directory_at(tables: Tables<'_>, root: u64, path: &[Bytes]) -> Result<Option<u64>, WorkError> {
    Ok(match find(tables, root, path)? {
        Found::Directory(inode, _) => Some(inode),
        Found::Missing(..) | Found::Nothing => None,
    })
}

/// Whether keys of a name may lie on both sides of a cut that has `rest` in its directory.
pub(super) fn is_at_edge(rest: &str, name: &[u8]) -> bool {
    !name.is_empty()
        && rest.as_bytes().starts_with(name)
        && rest.as_bytes().get(name.len()).is_none_or(|next| *next <= b'/')
}

/// The names of a directory of which keys may lie on both sides of a cut that has `rest` in it.
pub(super) fn names_at_edge(rest: &str) -> impl Iterator<Item = Bytes> {
    let component = rest.split('/').next().unwrap_or_default().len();
    let names = (1..=component).filter(move |length| is_at_edge(rest, &rest.as_bytes()[..*length]));
    names.map(move |length| Bytes::copy_from_slice(&rest.as_bytes()[..length]))
}

/// What is known beside a page.
pub(super) struct Known {
    pub root: u64,
    /// When the page was asked for, and the index began.
    pub asked_ns: i64,
    pub began_ns: i64,
    pub bounds: Bounds,
    /// Directories that are being listed, or whose listings have failed since the page was asked for.
    pub listing: HashSet<u64>,
    /// Names, by directory, that were asked about since the page was.
    pub newer: HashMap<u64, HashSet<Bytes>>,
}

impl Known {
    fn is_newer(&self, directory: u64, name: &[u8]) -> bool {
        self.newer.get(&directory).is_some_and(|names| names.contains(name))
    }
}

/// What a page has found absent in a directory.
#[derive(Debug)]
pub(super) struct Absent {
    pub path: Path,
    pub inode: u64,
    pub observed_ns: i64,
    pub remove: Vec<Bytes>,
    /// Files in the places of directories.
    pub replace: Vec<ListedEntry>,
    /// With this it is listed completely, as of this time; 0 where it is not.
    pub listed_ns: i64,
}

/// What a page comes to.
#[derive(Debug, Default)]
pub(super) struct PageChanges {
    pub groups: Vec<ListingGroup>,
    pub absent: Vec<Absent>,
    /// Directories that were left to others.
    pub left_alone: HashSet<Path>,
    /// Directories of which there may be more in other pages: those that the namespace has, and gets with this.
    pub found: HashSet<Path>,
    pub added: HashSet<Path>,
    /// Objects whose names are at an edge of the range: to be checked.
    pub at_edge: Vec<(Path, Bytes)>,
}

/// Where a path leads to.
enum Found {
    Directory(u64, InodeRecord),
    /// There is no directory of this name, the first of the path that is missing, in this one.
    Missing(u64, InodeRecord, Bytes),
    /// Not even the mount's root.
    Nothing,
}

/// Compares windows with the namespace.
pub(super) fn changes(
    tables: Tables<'_>,
    known: &Known,
    windows: Vec<DirectoryWindow>,
) -> Result<PageChanges, WorkError> {
    let mut changes = PageChanges::default();
    for window in windows {
        let others_list =
            |inode: u64, record: &InodeRecord| known.listing.contains(&inode) || record.listed_ns > known.asked_ns;
        match find(tables, known.root, &window.path)? {
            Found::Directory(inode, record) if others_list(inode, &record) => {
                changes.left_alone.insert(window.path);
            }
            Found::Directory(inode, record) => changes.compare(tables, known, window, (inode, &record))?,
            Found::Missing(inode, record, name) if others_list(inode, &record) || known.is_newer(inode, &name) => {
                changes.left_alone.insert(window.path);
            }
            Found::Missing(..) if window.is_seen => changes.add(known, window),
            Found::Missing(..) | Found::Nothing => {}
        }
    }
    Ok(changes)
}

fn find(tables: Tables<'_>, root: u64, path: &[Bytes]) -> Result<Found, WorkError> {
    let mut inode = root;
    for name in path {
        inode = match tables.dentry(inode, name)? {
            Some(dentry) if dentry.kind() == Kind::Directory => dentry.inode,
            _ => {
                let record = tables.inode(inode)?;
                return Ok(record.map_or(Found::Nothing, |record| Found::Missing(inode, record, name.clone())));
            }
        };
    }
    Ok(tables.inode(inode)?.map_or(Found::Nothing, |record| Found::Directory(inode, record)))
}

impl PageChanges {
    /// Takes objects at an edge out of a window; with the rests of the cuts in the directory.
    fn without_edges<'k>(&mut self, known: &'k Known, window: &mut DirectoryWindow) -> Vec<&'k str> {
        let cuts = [Some(known.bounds.after.as_str()), known.bounds.upto.as_deref()];
        let rests: Vec<&str> =
            cuts.into_iter().flatten().filter_map(|cut| cut.strip_prefix(window.prefix.as_str())).collect();
        if rests.iter().all(|rest| rest.is_empty()) {
            return Vec::new();
        }
        let is_object = |name: &Bytes, listed: &mut Listed| {
            *listed != Listed::Directory && rests.iter().any(|rest| is_at_edge(rest, name))
        };
        let taken = window.window.names.extract_if(.., is_object);
        self.at_edge.extend(taken.map(|(name, _)| (window.path.clone(), name)));
        rests
    }

    /// A directory that the namespace does not have.
    fn add(&mut self, known: &Known, mut window: DirectoryWindow) {
        self.without_edges(known, &mut window);
        // Taken away since pages before, it is made anew without what these have.
        if window.since_ns != 0 {
            window.is_left_alone = true;
            self.left_alone.insert(window.path.clone());
        }
        let is_all = window.is_all();
        let passed = window.passed.into_iter().map(|name| (name, Listed::Directory));
        let upsert = passed.chain(window.window.names).map(|(name, listed)| listed_entry(name, listed)).collect();
        let is_complete = is_all && !window.is_left_alone;
        let listed_ns = match (is_complete, window.is_new) {
            (false, _) => 0,
            (true, true) => known.asked_ns,
            (true, false) => known.began_ns,
        };
        if !is_all {
            self.added.insert(window.path.clone());
        }
        let (directory, observed_ns) = (window.path, known.asked_ns);
        self.groups.push(ListingGroup { directory, upsert, listed_ns, observed_ns, ..ListingGroup::default() });
    }

    /// A directory that it has.
    fn compare(
        &mut self,
        tables: Tables<'_>,
        known: &Known,
        mut window: DirectoryWindow,
        (inode, record): (u64, &InodeRecord),
    ) -> Result<(), WorkError> {
        if !window.is_all() {
            self.found.insert(window.path.clone());
        }
        // Made anew since pages before, it lacks what these have.
        if window.since_ns != 0 && record.mtime_ns > window.since_ns {
            window.is_left_alone = true;
            self.left_alone.insert(window.path.clone());
        }
        let rests = self.without_edges(known, &mut window);
        let directories: HashSet<Bytes> = match rests.is_empty() {
            true => HashSet::new(),
            // What is left at an edge are directories.
            false => {
                let names = window.window.names.keys();
                names.filter(|name| rests.iter().any(|rest| is_at_edge(rest, name))).cloned().collect()
            }
        };
        let is_newer = |name: &[u8]| {
            known.is_newer(inode, name)
                || rests.iter().any(|rest| is_at_edge(rest, name)) && !directories.contains(name)
        };
        let mut upsert = Vec::new();
        for name in std::mem::take(&mut window.passed) {
            let dentry = tables.dentry(inode, &name)?;
            if dentry.is_none_or(|dentry| dentry.kind() != Kind::Directory) && !known.is_newer(inode, &name) {
                upsert.push(listed_entry(name, Listed::Directory));
            }
        }
        let (mut remove, mut replace, mut cursor) = (Vec::new(), Vec::new(), None);
        let is_end = window.window.upto.is_none();
        loop {
            let mut step =
                diff::step(tables, inode, &mut window.window, cursor.take(), &is_newer, &diff::is_same_version)?;
            upsert.append(&mut step.upsert);
            remove.append(&mut step.remove);
            replace.append(&mut step.replace);
            cursor = step.next;
            if cursor.is_none() {
                break;
            }
        }
        let has_absent = window.has_absent || !remove.is_empty() || !replace.is_empty();
        let is_complete = is_end && window.is_whole && !window.is_left_alone;
        let (path, observed_ns) = (window.path, known.asked_ns);
        let mut listed_ns = match (is_complete, window.is_new && !has_absent) {
            (false, _) => 0,
            (true, true) => known.asked_ns,
            (true, false) => known.began_ns,
        };
        if has_absent && (listed_ns != 0 || !remove.is_empty() || !replace.is_empty()) {
            let path = path.clone();
            self.absent.push(Absent { path, inode, observed_ns, remove, replace, listed_ns });
            listed_ns = 0;
        }
        if !upsert.is_empty() || listed_ns > record.listed_ns {
            let group = ListingGroup {
                directory: path,
                upsert,
                listed_ns,
                expect_inode: inode,
                observed_ns,
                remove: Vec::new(),
            };
            self.groups.push(group);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn object(key: &str) -> ObjectMeta {
        ObjectMeta { key: key.to_owned(), size: 1, etag: "e".to_owned(), mtime_ns: 1, ..ObjectMeta::default() }
    }

    fn key() -> impl Strategy<Value = String> {
        let component = prop::sample::select(vec!["a", "b", "a-", "a.b", "ab", "a0", "", "."]);
        prop::collection::vec(component, 1..4).prop_map(|names| names.join("/"))
    }

    /// All that windows of a range say, by directory.
    fn listed(
        frames: &mut Frames,
        bounds: &Bounds,
        keys: &[String],
        page: usize,
    ) -> (BTreeMap<Path, BTreeMap<Bytes, bool>>, Vec<DirectoryWindow>) {
        let (mut names, mut all) = (BTreeMap::<Path, BTreeMap<Bytes, bool>>::new(), Vec::new());
        let (mut position, mut rest) = (bounds.after.clone(), keys);
        loop {
            let (now, later) = rest.split_at(page.min(rest.len()));
            let upto = if later.is_empty() { bounds.upto.clone() } else { now.last().cloned() };
            let objects = now.iter().map(|key| object(key)).collect();
            for window in frames.cut(bounds, &position, ("", objects), upto.as_deref()) {
                let directory = names.entry(window.path.clone()).or_default();
                for (name, listed) in &window.window.names {
                    assert!(place_cmp(name, &window.window.after).is_gt(), "{window:?}");
                    assert!(directory.insert(name.clone(), *listed == Listed::Directory).is_none(), "{window:?}");
                }
                all.push(window);
            }
            match upto {
                Some(upto) if !later.is_empty() => (position, rest) = (upto, later),
                _ => return (names, all),
            }
        }
    }

    /// What keys say of each directory, looked at one by one, and how many cannot be shown.
    fn model(keys: &[String]) -> (BTreeMap<Path, BTreeMap<Bytes, bool>>, u64) {
        let (mut names, mut hidden) = (BTreeMap::<Path, BTreeMap<Bytes, bool>>::new(), 0);
        for key in keys {
            let (mut path, mut components) = (Path::new(), key.split('/').peekable());
            while let Some(name) = components.next() {
                let is_directory = components.peek().is_some();
                if !is_directory && name.is_empty() {
                    break;
                }
                if !is_name(name.as_bytes()) {
                    hidden += 1;
                    break;
                }
                let name = Bytes::copy_from_slice(name.as_bytes());
                *names.entry(path.clone()).or_default().entry(name.clone()).or_default() |= is_directory;
                path.push(name);
            }
        }
        (names, hidden)
    }

    proptest! {
        /// Cut into ranges and pages in whatever way, each name that is at no edge is said once, and as in one listing.
        #[test]
        fn ranges_say_together_what_one_listing_says(
            keys in prop::collection::btree_set(key(), 0..30),
            cuts in prop::collection::btree_set(key().prop_filter("no cut", |key| !key.is_empty()), 0..4),
            page in 1_usize..5,
        ) {
            let keys: Vec<_> = keys.into_iter().filter(|key| !key.is_empty()).collect();
            let whole = Bounds { after: String::new(), upto: None };
            let mut all = Frames::at("", 0, 0);
            let (expected, windows) = listed(&mut all, &whole, &keys, usize::MAX);
            let named = expected.iter().filter(|(_, names)| !names.is_empty());
            let named: BTreeMap<_, _> = named.map(|(path, names)| (path.clone(), names.clone())).collect();
            prop_assert_eq!((named, all.hidden), model(&keys));
            prop_assert!(windows.iter().all(|window| window.is_whole && window.window.upto.is_none()));
            let mut said = BTreeMap::<Path, BTreeMap<Bytes, bool>>::new();
            let mut held = BTreeMap::<Path, Vec<Bytes>>::new();
            let edges: Vec<_> = cuts.iter().cloned().map(Some).chain([None]).collect();
            let (mut after, mut hidden) = (String::new(), 0);
            for upto in edges {
                let lies_in = |key: &&String| **key > after && upto.as_ref().is_none_or(|upto| *key <= upto);
                let of_range: Vec<_> = keys.iter().filter(lies_in).cloned().collect();
                let bounds = Bounds { after: after.clone(), upto: upto.clone() };
                let mut frames = Frames::at(&after, 0, 0);
                let (names, windows) = listed(&mut frames, &bounds, &of_range, page);
                hidden += frames.hidden;
                for (path, name) in frames.held_back() {
                    held.entry(path).or_default().push(name);
                }
                for (path, names) in names {
                    for (name, is_directory) in names {
                        said.entry(path.clone()).or_default().entry(name)
                            .and_modify(|known| *known |= is_directory).or_insert(is_directory);
                    }
                }
                // A directory that is complete has all of its keys here.
                for window in windows.iter().filter(|window| window.is_whole && window.window.upto.is_none()) {
                    let all = keys.iter().filter(|key| key.starts_with(&window.prefix)).count();
                    let here = of_range.iter().filter(|key| key.starts_with(&window.prefix)).count();
                    prop_assert_eq!(all, here, "{:?}", window);
                }
                after = upto.unwrap_or_default();
            }
            prop_assert_eq!(hidden, all.hidden);
            let prefix = |path: &Path| -> String {
                path.iter().map(|name| format!("{}/", std::str::from_utf8(name).unwrap())).collect()
            };
            let is_edge = |path: &Path, name: &Bytes| {
                cuts.iter().filter_map(|cut| cut.strip_prefix(&prefix(path))).any(|rest| is_at_edge(rest, name))
            };
            for (path, names) in &expected {
                for (name, is_directory) in names {
                    let known = said.get(path).and_then(|names| names.get(name));
                    let is_checked = is_edge(path, name);
                    prop_assert!(known == Some(is_directory) || is_checked, "{path:?} {name:?}: {known:?}");
                }
            }
            for (path, names) in &said {
                let expected = expected.get(path);
                let unknown = names.keys().find(|name| expected.is_none_or(|names| !names.contains_key(*name)));
                prop_assert!(unknown.is_none(), "{path:?} {unknown:?}");
            }
            // What is held back at the end of a range is at its edge.
            for (path, names) in &held {
                prop_assert!(names.iter().all(|name| is_edge(path, name)), "{path:?} {names:?}");
            }
        }

        #[test]
        fn names_at_an_edge_are_those_that_have_keys_on_both_sides(rest in key(), name in "[ab.0-]{1,3}") {
            let named: Vec<_> = names_at_edge(&rest).collect();
            prop_assert!(named.iter().all(|name| is_at_edge(&rest, name)));
            if is_at_edge(&rest, name.as_bytes()) && !name.contains('/') {
                prop_assert!(named.contains(&Bytes::from(name.clone())), "{rest} {name}");
            }
            // A key of an object, or of a directory, on one side, and one of the other kind on the other.
            let (object, below) = (name.clone(), format!("{name}/\u{10ffff}"));
            if object <= rest && below > rest {
                prop_assert!(is_at_edge(&rest, name.as_bytes()), "{rest} {name}");
            }
        }
    }
}
