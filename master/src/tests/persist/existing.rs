//! Prefixes that have objects when they are mounted: what is done to a namespace that does not know them all yet has
//! the results that it would have if it did, and nothing comes back.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use cavern_proto::master::mutation::Change;
use cavern_proto::master::{
    CommitContent, CreateInode, Extent, Kind, MutationResult, RemoveName, RenameMode, RenameName,
};
use cavern_proto::record::command::Command;
use cavern_proto::record::{AdoptListing, ListedEntry};
use cavern_work::namespace::Lookups;
use rustix::io::Errno;

use super::super::harness::number_from_environment;
use super::bench::{BLOCK, Fixture};
use super::fake::{body, written};
use crate::tests::harness::{PATIENCE, eventually, name};

/// What is under a path: the words of a file, or a directory.
pub(super) type Model = BTreeMap<String, Option<Vec<String>>>;

/// The same throws for the same seed.
pub(super) struct Dice(pub(super) u64);

impl Dice {
    pub(super) fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 33) as usize % bound
    }

    pub(super) fn flip(&mut self) -> bool {
        self.below(2) == 0
    }

    pub(super) fn pick<'a, T>(&mut self, from: &'a [T]) -> Option<&'a T> {
        if from.is_empty() { None } else { Some(&from[self.below(from.len())]) }
    }
}

pub(super) fn content(word: &str) -> Bytes {
    body(&[], &[word.to_owned()])
}

impl Fixture {
    pub(super) fn lookups(&self) -> &Lookups {
        &self.master().services().lookups
    }

    pub(super) fn start_index(&self) {
        let services = self.master().services();
        for mount in services.mounts.table().unwrap().1 {
            services.lookups.listings.start_existing(services.mounts.get(mount.id).unwrap());
        }
    }

    pub(super) async fn indexed(&self) {
        eventually(|| async {
            let read = self.lookups().reader.read(|tables| Ok(tables.index(1)?)).await.unwrap();
            read.is_some_and(|index| index.finished_ns != 0)
        })
        .await;
    }

    /// Makes a change as a client does: what must be listed is listed first.
    async fn insist(&mut self, change: Change) -> MutationResult {
        loop {
            let result = self.try_change(change.clone()).await;
            if result.unlisted == 0 {
                return result;
            }
            assert_eq!(result.errno, Errno::AGAIN.raw_os_error());
            while !self.lookups().make_listed(result.unlisted, result.unlisted_below).await.unwrap().done {}
        }
    }

    /// The inode under a path below the mount.
    pub(super) async fn find(&self, path: &str) -> Option<u64> {
        match self.lookups().resolve(&format!("/m/{path}")).await {
            Ok(entry) => Some(entry.attr.unwrap().inode),
            Err(error) => {
                assert!(error.is_not_found(), "{path}: {error}");
                None
            }
        }
    }

    /// What a file has, also while it is on its way to the bucket.
    async fn words(&self, path: &str) -> Vec<String> {
        let inode = self.find(path).await.unwrap();
        let read = async {
            loop {
                if let Some(words) = self.read(inode).await {
                    return words;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(PATIENCE, read).await.unwrap_or_else(|_| panic!("{path} ({inode}) is not to be read"))
    }

    /// The whole namespace below the mount, listing what was not listed.
    pub(super) async fn whole(&self) -> Model {
        let mut model = Model::new();
        for (path, file) in self.master().tree("/m").await {
            let words = match file {
                None => None,
                Some(_) => Some(self.words(&path).await),
            };
            model.insert(path, words);
        }
        model
    }
}

fn parts(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or(("", path))
}

fn has_entries(model: &Model, path: &str) -> bool {
    model.keys().any(|key| key.strip_prefix(path).is_some_and(|rest| rest.starts_with('/')))
}

/// What rename(2) makes of the model.
fn rename(model: &mut Model, from: &str, to: &str) -> Option<Errno> {
    let Some(moved) = model.get(from).cloned() else { return Some(Errno::NOENT) };
    if to.strip_prefix(from).is_some_and(|rest| rest.starts_with('/')) && moved.is_none() {
        return Some(Errno::INVAL);
    }
    if from.strip_prefix(to).is_some_and(|rest| rest.starts_with('/')) {
        return Some(Errno::NOTEMPTY);
    }
    if from == to {
        return None;
    }
    match (moved.is_none(), model.get(to)) {
        (_, None) | (false, Some(Some(_))) => {}
        (true, Some(Some(_))) => return Some(Errno::NOTDIR),
        (false, Some(None)) => return Some(Errno::ISDIR),
        (true, Some(None)) if has_entries(model, to) => return Some(Errno::NOTEMPTY),
        (true, Some(None)) => {}
    }
    let is_moved = |key: &String| key == from || key.strip_prefix(from).is_some_and(|rest| rest.starts_with('/'));
    let keys: Vec<String> = model.keys().filter(|key| is_moved(key)).cloned().collect();
    let taken: Vec<_> = keys.into_iter().map(|key| (key.clone(), model.remove(&key).unwrap())).collect();
    model.extend(taken.into_iter().map(|(key, words)| (format!("{to}{}", &key[from.len()..]), words)));
    None
}

/// Some objects, what shows of them, and those that nothing shows.
pub(super) fn some_objects(dice: &mut Dice) -> (Vec<(String, Bytes)>, Model, BTreeMap<String, Bytes>) {
    let mut objects = BTreeMap::new();
    for number in 0..1 + dice.below(39) {
        let depth = 1 + dice.below(4);
        let path: Vec<&str> = (0..depth).map(|_| *dice.pick(&["a", "a-b", "b", "c", "d.e"]).unwrap()).collect();
        let key = match dice.below(12) {
            0 => format!("{}/", path.join("/")),
            1 => format!("{}//x", path.join("/")),
            2 => format!("{}/./x", path.join("/")),
            _ => path.join("/"),
        };
        let bytes = if key.ends_with('/') { Bytes::new() } else { content(&format!("o{number}")) };
        objects.insert(key, bytes);
    }
    let (model, hidden) = shown(&objects);
    let objects = objects.into_iter().map(|(key, bytes)| (format!("top/{key}"), bytes)).collect();
    (objects, model, hidden)
}

/// What a namespace shows of objects whose keys are below its prefix, and what it does not.
pub(super) fn shown(objects: &BTreeMap<String, Bytes>) -> (Model, BTreeMap<String, Bytes>) {
    let (mut model, mut hidden) = (Model::new(), BTreeMap::new());
    for (key, bytes) in objects {
        let shown = key.split('/').take_while(|part| !part.is_empty() && *part != ".").count();
        let is_whole = shown == key.trim_end_matches('/').split('/').count();
        let parts: Vec<&str> = key.split('/').collect();
        let directories = if is_whole && !key.ends_with('/') { shown - 1 } else { shown };
        for depth in 1..=directories {
            model.insert(parts[..depth].join("/"), None);
        }
        if !is_whole || objects.keys().any(|other| other.starts_with(&format!("{key}/"))) {
            hidden.insert(format!("top/{key}"), bytes.clone());
        } else if !key.ends_with('/') {
            let words = bytes.chunks(BLOCK as usize).map(|block| String::from_utf8_lossy(block).trim().to_owned());
            model.insert(key.clone(), Some(words.collect()));
        }
    }
    (model, hidden)
}

/// Pages that say again what the bucket had in a directory at first.
async fn say_again(bench: &Fixture, at_first: &Model, path: &str, inode: u64) {
    let entry = |(key, words): (&String, &Option<Vec<String>>)| ListedEntry {
        name: name(parts(key).1),
        kind: if words.is_some() { Kind::File } else { Kind::Directory } as i32,
        size: if words.is_some() { BLOCK } else { 0 },
        mtime_ns: 1,
        etag: "old".to_owned(),
        restored: None,
    };
    let key_prefix = if path.is_empty() { "top/".to_owned() } else { format!("top/{path}/") };
    let listing = AdoptListing {
        mount_id: 1,
        directory: inode,
        key_prefix,
        entries: at_first.iter().filter(|(key, _)| parts(key).0 == path).map(entry).collect(),
        marker: "old".to_owned(),
        complete: true,
        ..AdoptListing::default()
    };
    bench.master().services().proposer.propose(Command::AdoptListing(listing)).await.unwrap();
}

/// One random thing.
pub(super) async fn step(bench: &mut Fixture, model: &mut Model, dice: &mut Dice) {
    let mut places: Vec<String> =
        model.iter().filter(|(_, file)| file.is_none()).map(|(path, _)| path.clone()).collect();
    places.push(String::new());
    let mut paths: Vec<String> = model.keys().cloned().collect();
    paths.push("none".to_owned());
    let place = dice.pick(&places).unwrap().clone();
    let path = dice.pick(&paths).unwrap().clone();
    let new = *dice.pick(&["a", "b", "n1", "n2"]).unwrap();
    let new_path = if place.is_empty() { new.to_owned() } else { format!("{place}/{new}") };
    let directory = bench.find(&place).await.unwrap_or_else(|| panic!("{place} is gone"));
    let (above, last) = parts(&path);
    let errno = |expected: Option<Errno>| expected.map_or(0, Errno::raw_os_error);
    match dice.below(7) {
        0 => {
            let kind = if dice.flip() { Kind::File } else { Kind::Directory };
            let create = CreateInode { parent: directory, name: name(new), kind: kind as i32, ..Default::default() };
            let expected = model.contains_key(&new_path).then_some(Errno::EXIST);
            let result = bench.insist(Change::Create(create)).await;
            assert_eq!(result.errno, errno(expected), "create {new_path}: {}", result.reason);
            if expected.is_none() {
                model.insert(new_path, (kind == Kind::File).then(Vec::new));
            }
        }
        1 => {
            let parent = bench.find(above).await.unwrap();
            let is_directory = dice.flip();
            let expected = match model.get(&path) {
                None => Some(Errno::NOENT),
                Some(Some(_)) if is_directory => Some(Errno::NOTDIR),
                Some(None) if !is_directory => Some(Errno::ISDIR),
                Some(None) if has_entries(model, &path) => Some(Errno::NOTEMPTY),
                _ => None,
            };
            let remove = RemoveName { parent, name: name(last), directory: is_directory };
            let result = bench.insist(Change::Remove(remove)).await;
            assert_eq!(result.errno, errno(expected), "remove {path}: {}", result.reason);
            if expected.is_none() {
                model.remove(&path);
            }
        }
        2 | 3 => {
            let parent = bench.find(above).await.unwrap();
            let expected = rename(model, &path, &new_path);
            let rename = RenameName {
                parent,
                name: name(last),
                new_parent: directory,
                new_name: name(new),
                mode: RenameMode::Replace as i32,
            };
            let result = bench.insist(Change::Rename(rename)).await;
            assert_eq!(result.errno, errno(expected), "rename {path} to {new_path}: {}", result.reason);
        }
        4 => {
            let found = bench.find(&path).await;
            assert_eq!(found.is_some(), model.contains_key(&path), "{path}");
            let (Some(inode), Some(Some(words))) = (found, model.get_mut(&path)) else { return };
            let record = bench.lookups().reader.read(move |tables| Ok(tables.inode(inode)?)).await.unwrap().unwrap();
            let index = dice.below(2) as u32;
            let known = bench.lookups().reader.read(move |tables| Ok(tables.extent(inode, index)?)).await.unwrap();
            let generation = known.map_or(record.generation, |known| known.generation);
            let commit = CommitContent {
                inode,
                grow_to: u64::from(index + 1) * BLOCK,
                made: vec![Extent { index, generation, workers: vec![1], ..Extent::default() }],
                changed: true,
            };
            assert_eq!(bench.try_change(Change::Commit(commit)).await.errno, 0);
            words.resize(words.len().max(index as usize + 1), super::fake::HOLE.to_owned());
            words[index as usize] = written(inode, generation);
        }
        5 => {
            // What readdir does.
            while !bench.lookups().make_listed(directory, false).await.unwrap().done {}
            let read = bench.lookups().reader.read(move |tables| Ok(tables.page(directory, None, usize::MAX)?));
            let names = read.await.unwrap().0.into_iter().map(|(name, _, _)| String::from_utf8(name.to_vec()).unwrap());
            let expected = model.keys().filter(|key| parts(key).0 == place).map(|key| parts(key).1.to_owned());
            assert_eq!(names.collect::<BTreeSet<_>>(), expected.collect(), "{place}");
        }
        _ => {
            let found = bench.find(&new_path).await;
            assert_eq!(found.is_some(), model.contains_key(&new_path), "{new_path}");
        }
    }
}

async fn run(seed: u64) {
    let mut dice = Dice(seed);
    let (objects, mut model, hidden) = some_objects(&mut dice);
    let objects: Vec<(&str, Bytes)> = objects.iter().map(|(key, bytes)| (key.as_str(), bytes.clone())).collect();
    let mut bench = Fixture::with(&objects).await;
    let at_first = model.clone();
    // Directories by what their path was at first: what is said of them later is of no use when they have been listed.
    let mut listed_directories = Vec::new();
    let mut is_running = false;
    for _ in 0..40 {
        match dice.below(20) {
            0 if !is_running => {
                bench.start_index();
                is_running = true;
            }
            1 => {
                bench.fake.is_away.fetch_xor(1, Ordering::AcqRel);
            }
            2 => {
                bench.restart().await;
                is_running = true;
            }
            3 => {
                let places: Vec<&String> =
                    at_first.iter().filter(|(_, file)| file.is_none()).map(|(path, _)| path).collect();
                if let Some(path) = dice.pick(&places)
                    && model.get(*path) == Some(&None)
                    && let Some(inode) = bench.find(path).await
                {
                    while !bench.lookups().make_listed(inode, false).await.unwrap().done {}
                    listed_directories.push(((*path).clone(), inode));
                }
            }
            4 => {
                if let Some((path, inode)) = dice.pick(&listed_directories) {
                    say_again(&bench, &at_first, path, *inode).await;
                }
            }
            _ => step(&mut bench, &mut model, &mut dice).await,
        }
    }
    let names = bench.master().tree("/m").await.into_keys();
    assert_eq!(names.collect::<Vec<_>>(), model.keys().cloned().collect::<Vec<_>>(), "seed {seed}");
    // An upload whose confirmation was lost is known again by the next one: until then its file is not to be read.
    bench.fake.is_away.store(0, Ordering::Release);
    assert_eq!(bench.whole().await, model, "seed {seed}");
    if !is_running {
        bench.start_index();
    }
    bench.indexed().await;
    assert_eq!(bench.whole().await, model, "seed {seed}");
    bench.settled().await;
    let objects: BTreeMap<String, Bytes> = bench
        .bucket
        .keys()
        .into_iter()
        .filter(|key| !key.ends_with('/'))
        .map(|key| (key.clone(), bench.bucket.object(&key).unwrap().0))
        .collect();
    let files = model.iter().filter_map(|(path, words)| Some((format!("top/{path}"), body(&[], words.as_ref()?))));
    let mut expected: BTreeMap<String, Bytes> = hidden.into_iter().filter(|(key, _)| !key.ends_with('/')).collect();
    expected.extend(files);
    assert_eq!(objects, expected, "seed {seed}");
    // A marker of a directory is one of the namespace.
    for key in bench.bucket.keys().iter().filter(|key| key.ends_with('/')) {
        let path = key.trim_start_matches("top/").trim_end_matches('/');
        assert_eq!(model.get(path), Some(&None), "seed {seed}: {key}");
    }
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_done_while_names_are_unknown_is_right_and_nothing_comes_back() {
    let mut runs = tokio::task::JoinSet::new();
    let first = number_from_environment("CAVERN_SEED").unwrap_or(1);
    (first..first + 5).for_each(|seed| drop(runs.spawn(run(seed))));
    runs.join_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_index_goes_on_after_a_restart_and_counts_everything_once() {
    let objects: Vec<(String, Bytes)> = (0..3000)
        .map(|number: u32| (format!("top/d{}/e{}/f{number}", number % 7, number % 70), content("x")))
        .chain([("top/a//b".to_owned(), Bytes::new()), ("top/a/".to_owned(), Bytes::new())])
        .collect();
    let objects: Vec<(&str, Bytes)> = objects.iter().map(|(key, bytes)| (key.as_str(), bytes.clone())).collect();
    let mut bench = Fixture::with(&objects).await;
    bench.start_index();
    eventually(|| async {
        let index = bench.lookups().reader.read(|tables| Ok(tables.index(1)?)).await.unwrap().unwrap();
        index.entries > 100
    })
    .await;
    bench.restart().await;
    bench.indexed().await;
    let index = bench.lookups().reader.read(|tables| Ok(tables.index(1)?)).await.unwrap().unwrap();
    assert_eq!((index.entries, index.hidden_keys, index.unlisted), (3000 + 7 + 70 + 1, 1, 0));
    eventually(|| async { !bench.master().services().mounts.status()[0].indexing }).await;
    let top = bench.lookups().resolve("/m").await.unwrap().attr.unwrap();
    assert_eq!(top.nlink, 2 + 8);
    assert_eq!(bench.status("/m").await.files, 0, "the bucket lacks nothing of it");
    let writes = bench.fake.written.lock().len();
    assert_eq!(writes, 0);
    bench.end().await;
}
