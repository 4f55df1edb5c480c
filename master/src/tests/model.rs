//! The namespace against a model: whatever keys a bucket has, in whatever order its pages come.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};

use cavern_proto::master::Mount;
use cavern_proto::record::command::Command as Kind;
use cavern_proto::record::{ApplyListing, AttachMount, Command, InitCluster, ListingGroup};
use cavern_state::{Database, Outcome, Tables, Transaction, apply};
use cavern_ufs::{ListPage, ObjectMeta, Windows, is_name};
use cavern_work::listing::diff;
use cavern_work::mounts::changes::DetachPolicy;
use proptest::prelude::*;
use proptest::test_runner::{Config as Cases, TestRunner};

use super::harness::{TestMaster, Tree, new_bucket};

/// A key's components as the model makes them, from a set that provokes every rule.
fn component() -> impl Strategy<Value = String> {
    let plain = prop::sample::select(vec!["a", "b", "a-", "a.b", "a b", "a0", "é", "%2F", "ab", "A"]);
    let odd = prop::sample::select(vec!["", ".", "..", "a\0b"]).prop_map(str::to_owned);
    let long = Just("x".repeat(256));
    prop_oneof![12 => plain.prop_map(str::to_owned), 2 => odd, 1 => long]
}

fn key() -> impl Strategy<Value = String> {
    let depth = prop::collection::vec(component(), 1..4);
    (depth, prop::bool::weighted(0.1)).prop_map(|(names, is_marker)| {
        let key = names.join("/");
        if is_marker { format!("{key}/") } else { key }
    })
}

pub fn keys() -> impl Strategy<Value = BTreeSet<String>> {
    let keys = prop::collection::btree_set(key(), 0..25);
    keys.prop_map(|keys| keys.into_iter().filter(|key| !key.is_empty()).collect())
}

/// What a file system must show for these keys.
pub fn model<'a>(keys: impl Iterator<Item = (&'a str, u64, &'a str)>) -> Tree {
    let mut tree = Tree::new();
    for (key, size, etag) in keys {
        let mut names: Vec<&str> = key.split('/').collect();
        let file = names.pop().unwrap_or_default();
        let mut path = String::new();
        let shown = names.iter().take_while(|name| is_name(name.as_bytes()));
        let mut depth = 0;
        for name in shown {
            if depth > 0 {
                path.push('/');
            }
            path.push_str(name);
            // Also over an object that sorts before it.
            tree.insert(path.clone(), None);
            depth += 1;
        }
        if depth == names.len() && is_name(file.as_bytes()) {
            let path = if depth == 0 { file.to_owned() } else { format!("{path}/{file}") };
            // A directory of that name wins.
            tree.entry(path).or_insert_with(|| Some((size, etag.to_owned())));
        }
    }
    tree
}

#[test]
fn the_namespace_equals_the_bucket_after_any_change() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let master = runtime.block_on(TestMaster::new());
    let mut runner = TestRunner::new(Cases { cases: 60, ..Cases::default() });
    let number = AtomicU64::new(0);
    let strategy = prop::collection::vec(keys(), 1..4);
    let result = runner.run(&strategy, |states| {
        let number = number.fetch_add(1, Ordering::Relaxed);
        runtime.block_on(check_states(&master, &states, number));
        Ok(())
    });
    runtime.block_on(master.stop());
    result.unwrap();
}

async fn check_states(master: &TestMaster, states: &[BTreeSet<String>], number: u64) {
    let (bucket, uri) = new_bucket();
    let path = format!("/case{}x{number}", states.len());
    let mut stored: BTreeMap<String, String> = BTreeMap::new();
    let mut mounted = None;
    for (round, keys) in states.iter().enumerate() {
        let gone: Vec<String> = stored.keys().filter(|key| !keys.contains(*key)).cloned().collect();
        for key in gone {
            bucket.delete(&key);
            stored.remove(&key);
        }
        for (at, key) in keys.iter().enumerate() {
            // Every third object that is there already is replaced.
            if !stored.contains_key(key) || at % 3 == 0 {
                stored.insert(key.clone(), bucket.put(key, vec![b'x'; at]));
            }
        }
        if round == 0 {
            let mount = master.mount(&path, &uri).await;
            // The index alone in every other case, listings alone in the rest.
            if number.is_multiple_of(2) {
                master.indexed(&mount).await;
            }
            mounted = Some(mount);
        } else {
            master.refresh(&path).await;
        }
        let tree = master.tree(&path).await;
        let expected = model(stored.iter().map(|(key, etag)| (key.as_str(), 0, etag.as_str())));
        let without_sizes = |tree: Tree| -> BTreeMap<String, Option<String>> {
            tree.into_iter().map(|(path, file)| (path, file.map(|(_, etag)| etag))).collect()
        };
        assert_eq!(without_sizes(tree), without_sizes(expected), "round {round} of {states:?}");
    }
    if let Some(mount) = mounted {
        master.services().unmount_bucket(&mount.path, DetachPolicy::Keep).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_name_vanishes_where_a_bucket_lists_in_no_order() {
    let master = TestMaster::new().await;
    // In no order at all, and in two halves of which each is in order over several pages.
    for (number, (shards, page)) in [(u64::MAX, 100), (2, 30)].into_iter().enumerate() {
        let (bucket, uri) = new_bucket();
        bucket.list_in_shards(shards, page);
        let mut stored = BTreeMap::new();
        for number in 0..200 {
            for key in [format!("f{number}"), format!("d/f{number}"), format!("d{number}/f")] {
                stored.insert(key.clone(), bucket.put(&key, "x"));
            }
        }
        let path = format!("/m{number}");
        let mount = master.mount(&path, &uri).await;
        let expected = |stored: &BTreeMap<String, String>| {
            model(stored.iter().map(|(key, etag)| (key.as_str(), 1, etag.as_str())))
        };
        master.indexed(&mount).await;
        assert_eq!(master.tree(&path).await, expected(&stored), "by the index, {shards} shards");
        // A listing that finds what is known takes nothing away and adds nothing, not even for a moment.
        let listings = &master.services().lookups.listings;
        let counts = listings.relist(mount.root_inode).await.unwrap();
        assert_eq!((counts.added, counts.changed, counts.removed), (0, 0, 0), "{shards} shards");
        for key in ["f7", "d/f8", "d9/f"] {
            bucket.delete(key);
            stored.remove(key);
        }
        master.refresh(&path).await;
        assert_eq!(master.tree(&path).await, expected(&stored), "by listings, {shards} shards");
    }
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_early_page_lacks_goes_at_the_end_of_the_listing() {
    let master = TestMaster::new().await;
    let (bucket, uri) = new_bucket();
    for number in 0..2500 {
        bucket.put(&format!("f{number:04}"), "x");
    }
    bucket.put("f0001-d/x", "x");
    let mount = master.mount("/m", &uri).await;
    master.indexed(&mount).await;
    let listings = &master.services().lookups.listings;
    listings.relist(mount.root_inode).await.unwrap();
    // A file of the first page goes, and a directory of it becomes a file.
    bucket.delete("f0000");
    bucket.delete("f0001-d/x");
    bucket.put("f0001-d", "x");
    let counts = listings.relist(mount.root_inode).await.unwrap();
    assert_eq!((counts.added, counts.changed, counts.removed), (0, 1, 1));
    let tree = master.tree("/m").await;
    assert!(!tree.contains_key("f0000") && tree["f0001-d"].is_some());
    master.stop().await;
}

/// A mount in a database without a log.
struct Fixture {
    _dir: tempfile::TempDir,
    database: Database,
    mount: Mount,
}

impl Fixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let database = Database::open(dir.path(), 1 << 20).unwrap();
        let init = Kind::Init(InitCluster { cluster_id: "c".into(), now_ns: 1, feature_version: 1 });
        run(&database, init);
        let request = Mount { path: "/m".into(), uri: "memory://m".into(), ..Mount::default() };
        let attach = AttachMount { mount: Some(request), mounts_epoch: 0 };
        let Outcome::Mount(mount) = run(&database, Kind::AttachMount(attach)) else { panic!("no mount") };
        Self { _dir: dir, database, mount: *mount }
    }

    /// Lists the root in pages of `size`, as the master does.
    fn list(&self, keys: &BTreeSet<String>, size: usize, version: u64) {
        let mut windows = Windows::new(String::new());
        let pages = pages(keys, size, version);
        // Sometimes the last page is known to be the last, sometimes it is found out.
        let is_last = |number: usize| version.is_multiple_of(2) && number + 1 == pages.len();
        let mut pending: Vec<_> =
            pages.iter().enumerate().map(|(number, page)| windows.page(Some(page), is_last(number))).collect();
        if !version.is_multiple_of(2) || pages.is_empty() {
            pending.push(windows.page(None, true));
        }
        let count = pending.len();
        for (number, mut window) in pending.into_iter().enumerate() {
            let mut cursor = None;
            loop {
                let tables = Tables::new(&self.database);
                let step =
                    diff::step(tables, self.mount.root_inode, &mut window, cursor, &|_| false, &diff::is_same_version)
                        .unwrap();
                cursor = step.next;
                let group = ListingGroup {
                    remove: step.remove,
                    upsert: [step.upsert, step.replace].concat(),
                    listed_ns: i64::from(cursor.is_none() && number + 1 == count),
                    expect_inode: self.mount.root_inode,
                    ..ListingGroup::default()
                };
                run(
                    &self.database,
                    Kind::Listing(ApplyListing {
                        mount_id: self.mount.id,
                        groups: vec![group],
                        now_ns: 1,
                        ..ApplyListing::default()
                    }),
                );
                if cursor.is_none() {
                    break;
                }
            }
        }
    }

    fn names(&self) -> BTreeMap<String, Option<(u64, String)>> {
        let (entries, _) = Tables::new(&self.database).page(self.mount.root_inode, None, usize::MAX).unwrap();
        let entry = |(name, _, record): (bytes::Bytes, u64, cavern_proto::record::InodeRecord)| {
            let is_file = record.kind() == cavern_proto::master::Kind::File;
            let name = String::from_utf8(name.to_vec()).unwrap();
            (name, is_file.then(|| (record.size, cavern_state::records::etag(&record))))
        };
        entries.into_iter().map(entry).collect()
    }
}

fn run(database: &Database, kind: Kind) -> Outcome {
    let mut transaction = Transaction::new(database).unwrap();
    let outcome = apply(&mut transaction, Command { command: Some(kind) }).unwrap();
    database.write(transaction.finish().unwrap().0.into_batch(database)).unwrap();
    outcome
}

/// The root's listing as S3 gives it.
fn pages(keys: &BTreeSet<String>, size: usize, version: u64) -> Vec<ListPage> {
    let mut places: BTreeSet<String> = BTreeSet::new();
    for key in keys {
        places.insert(key.split_once('/').map_or(key.clone(), |(name, _)| format!("{name}/")));
    }
    let places: Vec<String> = places.into_iter().collect();
    let page = |chunk: &[String]| {
        let (prefixes, objects): (Vec<_>, Vec<_>) = chunk.iter().cloned().partition(|place| place.ends_with('/'));
        let object = |key: String| ObjectMeta {
            key,
            size: version,
            etag: format!("v{version}"),
            mtime_ns: 1,
            metadata: Default::default(),
        };
        ListPage { objects: objects.into_iter().map(object).collect(), prefixes, ..ListPage::default() }
    };
    places.chunks(size).map(page).collect()
}

#[test]
fn pages_of_any_size_give_the_same_directory() {
    let bench = Fixture::new();
    let mut runner = TestRunner::new(Cases { cases: 400, ..Cases::default() });
    let result = runner.run(&(keys(), 1usize..6, 1u64..4), |(keys, size, version)| {
        bench.list(&keys, size, version);
        let etag = format!("v{version}");
        let expected = model(keys.iter().map(|key| (key.as_str(), version, etag.as_str())));
        let expected: Tree = expected.into_iter().filter(|(path, _)| !path.contains('/')).collect();
        prop_assert_eq!(bench.names(), expected);
        // Listing the same again finds no difference.
        let before = Tables::new(&bench.database).counters().unwrap().inode;
        bench.list(&keys, size, version);
        prop_assert_eq!(Tables::new(&bench.database).counters().unwrap().inode, before);
        Ok(())
    });
    result.unwrap();
}
