//! Indexes against a bucket, key by key: whatever it has, however its pages are cut, and while others change it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use cavern_conf::{ByteSize, Config};
use cavern_proto::master::{Kind, Mount};
use cavern_ufs::MemoryBucket;
use cavern_work::listing::CheckReason;
use cavern_work::mounts::changes::DetachPolicy;
use proptest::prelude::*;
use proptest::test_runner::{Config as Cases, TestRunner};

use super::harness::{NoWorkers, TestMaster, Tree, eventually, metric, name, new_bucket};
use super::model::{keys, model};

/// All that the namespace has of a mount at one moment, and directories that are not marked as listed.
async fn tree_and_unlisted(master: &TestMaster, mount: &Mount) -> (Tree, Vec<String>) {
    let root = mount.root_inode;
    let read = master.services().lookups.reader.read(move |tables| {
        let (mut tree, mut unlisted, mut waiting) = (Tree::new(), Vec::new(), vec![(root, String::new())]);
        while let Some((directory, above)) = waiting.pop() {
            if tables.inode(directory)?.unwrap().listed_ns == 0 {
                unlisted.push(above.clone());
            }
            for (name, inode, record) in tables.page(directory, None, usize::MAX)?.0 {
                let path = format!("{above}{}", std::str::from_utf8(&name).unwrap());
                let is_directory = record.kind() == Kind::Directory;
                if is_directory {
                    waiting.push((inode, format!("{path}/")));
                }
                tree.insert(path, (!is_directory).then(|| (record.size, cavern_state::records::etag(&record))));
            }
        }
        Ok((tree, unlisted))
    });
    read.await.unwrap()
}

/// What an index has made of a mount: nothing is left to be asked.
async fn known(master: &TestMaster, mount: &Mount) -> Tree {
    let (tree, unlisted) = tree_and_unlisted(master, mount).await;
    assert!(unlisted.is_empty(), "{unlisted:?} are not complete");
    tree
}

fn expected(stored: &BTreeMap<String, String>) -> Tree {
    model(stored.iter().map(|(key, etag)| (key.as_str(), 1, etag.as_str())))
}

fn is_indexing(master: &TestMaster) -> bool {
    master.services().mounts.status().iter().any(|status| status.indexing)
}

/// Has the mount compared with its bucket once more.
async fn index_again(master: &TestMaster, mount: &Mount) {
    // While the last one runs nobody begins another.
    eventually(|| async { !is_indexing(master) }).await;
    master.services().mount_changes.index(&mount.path).await.unwrap();
    master.indexed(mount).await;
    eventually(|| async { !is_indexing(master) }).await;
}

#[test]
fn an_index_equals_its_bucket_however_it_is_cut() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let master = runtime.block_on(TestMaster::new());
    let mut runner = TestRunner::new(Cases { cases: 40, ..Cases::default() });
    let number = AtomicU64::new(0);
    let strategy = (prop::collection::vec(keys(), 1..4), 1_usize..6);
    let result = runner.run(&strategy, |(states, page)| {
        let number = number.fetch_add(1, Ordering::Relaxed);
        runtime.block_on(check_states(&master, &states, page, number));
        Ok(())
    });
    runtime.block_on(master.stop());
    result.unwrap();
}

async fn check_states(master: &TestMaster, states: &[BTreeSet<String>], page: usize, number: u64) {
    let (bucket, uri) = new_bucket();
    bucket.list_in_pages_of(page);
    let mut stored: BTreeMap<String, String> = BTreeMap::new();
    let mut mounted: Option<Mount> = None;
    for (round, keys) in states.iter().enumerate() {
        let gone: Vec<String> = stored.keys().filter(|key| !keys.contains(*key)).cloned().collect();
        for key in gone {
            bucket.delete(&key);
            stored.remove(&key);
        }
        for (at, key) in keys.iter().enumerate() {
            // Every third object that is there already is replaced.
            if !stored.contains_key(key) || at % 3 == 0 {
                stored.insert(key.clone(), bucket.put(key, "x"));
            }
        }
        let mount = match mounted.take() {
            None => {
                let mount = master.mount(&format!("/index{number}"), &uri).await;
                master.indexed(&mount).await;
                mount
            }
            Some(mount) => {
                index_again(master, &mount).await;
                mount
            }
        };
        assert_eq!(known(master, &mount).await, expected(&stored), "round {round} of {states:?} in pages of {page}");
        mounted = Some(mount);
    }
    if let Some(mount) = mounted {
        master.services().unmount_bucket(&mount.path, DetachPolicy::Keep).await.unwrap();
    }
}

/// A bucket of some thousand objects: in one directory, in many, and in deep ones.
fn fill(bucket: &MemoryBucket, objects: usize) -> BTreeMap<String, String> {
    let forms = |number: usize| {
        [
            format!("flat/img-{number:06}.jpg"),
            format!("d{:03}/f{number:06}", number % 97),
            format!("deep/{}/{}/{number}", number % 5, number % 3),
        ]
    };
    let keys = (0..objects / 3).flat_map(forms).chain(["flat/img".to_owned(), "flat/img/below".to_owned()]);
    keys.map(|key| (key.clone(), bucket.put(&key, "x"))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_index_applies_the_difference_deletions_included() {
    let master = TestMaster::new().await;
    let (bucket, uri) = new_bucket();
    bucket.list_in_pages_of(100);
    let mut stored = fill(&bucket, 3000);
    let mount = master.mount("/m", &uri).await;
    master.indexed(&mount).await;
    assert_eq!(known(&master, &mount).await, expected(&stored));
    let inodes =
        || async { master.services().lookups.reader.read(|tables| Ok(tables.counters()?.inode)).await.unwrap() };
    let before = inodes().await;
    index_again(&master, &mount).await;
    assert_eq!(inodes().await, before, "an index that finds no difference makes nothing");
    let names: Vec<String> = stored.keys().cloned().collect();
    for (number, key) in names.into_iter().enumerate() {
        match number % 7 {
            0 => {
                bucket.delete(&key);
                stored.remove(&key);
            }
            1 => {
                stored.insert(key.clone(), bucket.put(&key, "y"));
            }
            2 => {
                let new = format!("{key}-new");
                stored.insert(new.clone(), bucket.put(&new, "z"));
            }
            _ => {}
        }
    }
    // A directory goes as a whole, and one becomes an object.
    stored.retain(|key, _| {
        let is_kept = !key.starts_with("deep/1/") && !key.starts_with("d005/");
        if !is_kept {
            bucket.delete(key);
        }
        is_kept
    });
    stored.insert("d005".to_owned(), bucket.put("d005", "x"));
    index_again(&master, &mount).await;
    assert_eq!(known(&master, &mount).await, expected(&stored));
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_others_change_meanwhile_takes_nothing_away_that_stays() {
    let master = TestMaster::new().await;
    let (bucket, uri) = new_bucket();
    bucket.list_in_pages_of(20);
    let stored = fill(&bucket, 2400);
    let mount = master.mount("/m", &uri).await;
    master.indexed(&mount).await;
    let is_over = Arc::new(AtomicBool::new(false));
    let changes = {
        let (bucket, is_over) = (bucket.clone(), is_over.clone());
        let keys: Vec<String> = stored.keys().filter(|key| key.contains('7')).cloned().collect();
        tokio::spawn(async move {
            let mut rounds = 0_usize;
            while !is_over.load(Ordering::Acquire) {
                let (now, before) = (rounds % 4, (rounds + 3) % 4);
                for key in keys.iter().skip(rounds % 5).step_by(5) {
                    bucket.delete(key);
                    bucket.delete(&format!("{key}+{before}"));
                    bucket.put(&format!("{key}+{now}"), "x");
                    bucket.put(&format!("{key}/{now}"), "x");
                    tokio::task::yield_now().await;
                }
                for key in keys.iter().skip(rounds % 3).step_by(3) {
                    bucket.delete(&format!("{key}/{before}"));
                    bucket.put(key, "x");
                }
                rounds += 1;
            }
        })
    };
    let staying: Tree = expected(&stored).into_iter().filter(|(path, _)| !path.contains('7')).collect();
    for _ in 0..3 {
        master.services().mount_changes.index(&mount.path).await.unwrap();
        let mut looks = 0;
        while looks == 0 || is_indexing(&master) {
            let (tree, _) = tree_and_unlisted(&master, &mount).await;
            for (path, file) in &staying {
                assert_eq!(tree.get(path), Some(file), "{path}");
            }
            looks += 1;
        }
    }
    is_over.store(true, Ordering::Release);
    changes.await.unwrap();
    index_again(&master, &mount).await;
    let now: BTreeMap<String, String> =
        bucket.keys().into_iter().map(|key| (key.clone(), bucket.etag(&key).unwrap())).collect();
    let sizes = |tree: Tree| -> BTreeMap<String, Option<String>> {
        tree.into_iter().map(|(path, file)| (path, file.map(|(_, etag)| etag))).collect()
    };
    assert_eq!(sizes(known(&master, &mount).await), sizes(expected(&now)));
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_master_goes_on_where_each_range_was() {
    let mut master = TestMaster::new().await;
    let (bucket, uri) = new_bucket();
    bucket.list_in_pages_of(5);
    let stored = fill(&bucket, 3000);
    // Half of its pages, and then one at a time: it is not over before a master ends.
    let turns = bucket.list_by_turns("");
    turns.add_permits(stored.len() / 10);
    let mount = master.mount("/m", &uri).await;
    let id = mount.id;
    let mut restarts = 0;
    for least in [2, 6, 12] {
        let ranges = || async {
            let read = master.services().lookups.reader.read(move |tables| {
                Ok((tables.index(id)?.is_some_and(|index| index.began_ns == 0), tables.index_ranges(id)?))
            });
            read.await.unwrap()
        };
        eventually(|| async {
            turns.add_permits(1);
            let (is_over, ranges) = ranges().await;
            is_over || ranges.len() >= least && ranges.iter().any(|range| range.entries > 0)
        })
        .await;
        if ranges().await.0 {
            break;
        }
        master = master.restart().await;
        restarts += 1;
    }
    assert!(restarts > 0, "the index was over before a master could end");
    turns.add_permits(stored.len());
    master.indexed(&mount).await;
    // Directories in which a range was when its master ended may be left to be listed.
    assert_eq!(master.tree("/m").await, expected(&stored));
    assert!(
        master.services().lookups.reader.read(move |tables| Ok(tables.index_ranges(id)?)).await.unwrap().is_empty()
    );
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_master_lists_only_what_was_not_noted() {
    const PAGE: usize = 5;
    let master = TestMaster::new().await;
    let (bucket, uri) = new_bucket();
    bucket.list_in_pages_of(PAGE);
    let keys = (0..6000).map(|number| format!("d{:02}/f{number:06}", number % 20));
    let stored: BTreeMap<String, String> = keys.map(|key| (key.clone(), bucket.put(&key, "x"))).collect();
    let pages = stored.len() / PAGE;
    // The first master gets no further than this, but for pages that cuts have cost.
    let turns = bucket.list_by_turns("");
    turns.add_permits(pages / 4 * 3);
    let mount = master.mount("/m", &uri).await;
    let id = mount.id;
    eventually(|| async {
        let read = master.services().lookups.reader.read(move |tables| Ok(tables.index_ranges(id)?));
        let noted: u64 = read.await.unwrap().iter().map(|range| range.entries).sum();
        turns.add_permits(1);
        noted >= stored.len() as u64 / 2
    })
    .await;
    let master = master.restart().await;
    turns.add_permits(10 * pages);
    master.indexed(&mount).await;
    // With what cuts cost.
    let listed = metric(&master.metrics, "list_pages_total");
    assert!(listed < pages as u64, "{listed} pages were listed, and {pages} have all keys");
    assert_eq!(master.tree("/m").await, expected(&stored));
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_begins_where_it_likes_is_listed_in_one_stream() {
    let master = TestMaster::new().await;
    for (number, shards) in [None, Some(2), Some(u64::MAX)].into_iter().enumerate() {
        let (bucket, uri) = new_bucket();
        bucket.list_in_pages_of(30);
        match shards {
            None => bucket.ignore_start_after(),
            Some(shards) => bucket.list_in_shards(shards, 30),
        }
        let mut stored = fill(&bucket, 900);
        let mount = master.mount(&format!("/m{number}"), &uri).await;
        master.indexed(&mount).await;
        assert_eq!(known(&master, &mount).await, expected(&stored), "{shards:?}");
        let gone: Vec<String> = stored.keys().step_by(11).cloned().collect();
        for key in gone {
            bucket.delete(&key);
            stored.remove(&key);
        }
        index_again(&master, &mount).await;
        assert_eq!(known(&master, &mount).await, expected(&stored), "{shards:?}");
    }
    master.stop().await;
}

/// Shards follow each other, each in order over many pages: a range whose end lies in the first of them ends in order
/// long before another shows that there is more before its end.
#[tokio::test(flavor = "multi_thread")]
async fn disorder_that_shows_late_takes_no_name_away() {
    let master = TestMaster::new().await;
    for shards in 2..6 {
        let (bucket, uri) = new_bucket();
        bucket.list_in_pages_of(20);
        let mut stored = fill(&bucket, 1500);
        let mount = master.mount(&format!("/m{shards}"), &uri).await;
        master.indexed(&mount).await;
        eventually(|| async { !is_indexing(&master) }).await;
        bucket.list_in_shards(shards, 20);
        // Nothing becomes something else.
        let numbered = stored.keys().filter(|key| key.contains(|c: char| c.is_ascii_digit()));
        let gone: Vec<String> = numbered.step_by(13).cloned().collect();
        for key in gone {
            bucket.delete(&key);
            stored.remove(&key);
        }
        let staying = expected(&stored);
        master.services().mount_changes.index(&mount.path).await.unwrap();
        let mut looks = 0;
        while looks == 0 || is_indexing(&master) {
            let (tree, _) = tree_and_unlisted(&master, &mount).await;
            let missing: Vec<_> = staying.iter().filter(|(path, file)| tree.get(*path) != Some(*file)).collect();
            assert!(missing.is_empty(), "{shards} shards: {missing:?}");
            looks += 1;
        }
        assert_eq!(known(&master, &mount).await, staying, "{shards} shards");
    }
    master.stop().await;
}

/// A client that has written below a directory has it made anew, and never listed: what the index has put into the one
/// before is not in it.
#[tokio::test(flavor = "multi_thread")]
async fn a_directory_that_is_made_anew_meanwhile_is_not_taken_for_complete() {
    let master = TestMaster::new().await;
    let (bucket, uri) = new_bucket();
    bucket.list_in_pages_of(20);
    let stored = fill(&bucket, 2400);
    let mount = master.mount("/m", &uri).await;
    let lookups = &master.services().lookups;
    for round in 0..3 {
        let mut replaced = 0;
        while replaced == 0 || is_indexing(&master) {
            for directory in ["flat", "deep", "d050"] {
                match lookups.revalidate(mount.root_inode, &name(directory), CheckReason::WrittenBelow).await {
                    Ok(_) => replaced += 1,
                    Err(error) => assert!(error.is_not_found(), "{error}"),
                }
            }
        }
        // What is not complete is listed by whoever looks into it.
        assert_eq!(master.tree("/m").await, expected(&stored), "round {round}");
        master.services().mount_changes.index(&mount.path).await.unwrap();
    }
    eventually(|| async { !is_indexing(&master) }).await;
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn more_names_than_there_is_room_for_go_one_index_after_the_other() {
    let mut config = Config::default();
    // A quarter of it, for some fifty names.
    config.master.index_memory = ByteSize::kib(64);
    let directory = Arc::new(tempfile::tempdir().unwrap());
    let master = TestMaster::with(config, directory, Arc::new(NoWorkers)).await.unwrap();
    let (bucket, uri) = new_bucket();
    bucket.list_in_pages_of(100);
    let mut stored = fill(&bucket, 900);
    let mount = master.mount("/m", &uri).await;
    master.indexed(&mount).await;
    eventually(|| async { !is_indexing(&master) }).await;
    let gone: Vec<String> = stored.keys().filter(|key| !key.ends_with('7')).cloned().collect();
    for key in gone {
        bucket.delete(&key);
        stored.remove(&key);
    }
    index_again(&master, &mount).await;
    assert_eq!(known(&master, &mount).await, expected(&stored));
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_gives_up_asking_for_an_index_keeps_nobody_from_it() {
    let master = TestMaster::new().await;
    let (bucket, uri) = new_bucket();
    bucket.put("a", "1");
    let mount = master.mount("/m", &uri).await;
    master.indexed(&mount).await;
    eventually(|| async { !is_indexing(&master) }).await;
    for _ in 0..20 {
        let asked = master.services().mount_changes.index(&mount.path);
        if tokio::time::timeout(Duration::ZERO, asked).await.is_ok() {
            // It has begun, and ends by itself.
            break;
        }
        assert!(!is_indexing(&master));
    }
    eventually(|| async { !is_indexing(&master) }).await;
    bucket.put("b", "2");
    index_again(&master, &mount).await;
    assert!(known(&master, &mount).await.contains_key("b"));
    master.stop().await;
}
