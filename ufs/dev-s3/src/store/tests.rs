//! The store against a naive model, and against what a killed process leaves behind.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::Bound;
use std::path::Path;

use proptest::prelude::*;

use super::key_space::KeySpace;
use super::object::{Index, Key};
use super::record::ObjectRecord;
use super::*;

fn bucket_with<'k>(root: &Path, keys: impl IntoIterator<Item = &'k str>) -> (Store, Arc<Bucket>) {
    let store = Store::open(root).unwrap();
    store.create_bucket("bucket").unwrap();
    for key in keys {
        store.put("bucket", key, key.as_bytes()).unwrap();
    }
    let bucket = store.bucket("bucket").unwrap();
    (store, bucket)
}

/// What `key` holds, read through the store.
fn content(bucket: &Bucket, key: &str) -> Vec<u8> {
    let (object, content) = bucket.open(key).unwrap();
    content.read(0..object.size).unwrap().to_vec()
}

fn files_below(dir: &Path) -> usize {
    let entries = fs::read_dir(dir).unwrap().map(Result::unwrap);
    entries.map(|entry| if entry.path().is_dir() { files_below(&entry.path()) } else { 1 }).sum()
}

/// All names, by the definition: keys without the delimiter after the prefix, and the common prefixes of the others.
fn names_of(keys: &[String], prefix: &str, delimiter: &str) -> Vec<(String, bool)> {
    let mut names = BTreeMap::new();
    for key in keys {
        let Some(rest) = key.strip_prefix(prefix) else { continue };
        let at = if delimiter.is_empty() { None } else { rest.find(delimiter) };
        match at {
            Some(at) => names.insert(format!("{prefix}{}", &rest[..at + delimiter.len()]), true),
            None => names.insert(key.clone(), false),
        };
    }
    names.into_iter().collect()
}

fn object_of(key: &str) -> Arc<Object> {
    let record = ObjectRecord { key: key.to_owned(), size: key.len() as u64, ..ObjectRecord::default() };
    Arc::new(Object::from_record(record, 1).1)
}

fn deletion_of(key: &str) -> Arc<Object> {
    let record = ObjectRecord { key: key.to_owned(), deleted: true, ..ObjectRecord::default() };
    Arc::new(Object::from_record(record, 1).1)
}

fn any_key() -> impl Strategy<Value = String> {
    // A small alphabet with the delimiter, its neighbours in byte order, and letters of several bytes.
    prop::string::string_regex("[ab/.0é\u{10ffff}]{1,6}").unwrap()
}

/// All names that the pages from `query` on hold, and whether each is a common prefix.
fn names_on_pages(index: &Index, space: Option<&KeySpace>, query: ListQuery<'_>) -> Vec<(String, bool)> {
    let (mut found, mut next) = (Vec::new(), Some(query.after.to_owned()));
    while let Some(after) = next {
        let page = list::page(index, space, &ListQuery { after: &after, ..query });
        let names = page.objects.len() + page.prefixes.len();
        assert!(names <= query.limit && (page.next.is_none() || names == query.limit));
        let mut names: Vec<_> = page.prefixes.iter().map(|prefix| (prefix.clone(), true)).collect();
        for (key, object) in &page.objects {
            match index.get(key.as_bytes()) {
                Some(_) => assert_eq!(object.size as usize, key.len()),
                None => assert_eq!(Some(&**object), space.unwrap().object(key).as_ref()),
            }
            names.push((key.clone(), false));
        }
        names.sort();
        assert_eq!(page.next.as_ref(), names.last().map(|(name, _)| name).filter(|_| page.next.is_some()));
        found.extend(names);
        next = page.next;
    }
    found
}

fn any_rule() -> impl Strategy<Value = KeySpaceRule> {
    let names = (prop::sample::select(vec!["", "img/", "a"]), prop::sample::select(vec![0usize, 13, 30]));
    let changes = (any::<u64>(), prop::sample::select(vec![0.0, 0.1, 0.25]));
    (1u64..60, 0u64..7, 1u32..4, names, changes).prop_map(
        |(keys, files_per_directory, depth, (prefix, name_bytes), (seed, share))| KeySpaceRule {
            keys,
            files_per_directory,
            depth,
            prefix: prefix.to_owned(),
            name_bytes,
            seed,
            changes: KeySpaceChanges { seed, modified: 0.1, deleted: share, added: 0.1 },
            ..KeySpaceRule::default()
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn a_key_space_is_listed_as_if_its_objects_were_stored(
        rule in any_rule(),
        // Of the keys, by position: puts where the flag is set, and deletions.
        over in prop::collection::vec((any::<prop::sample::Index>(), any::<bool>()), 0..6),
        others in prop::collection::btree_set("(img/)?[0-2/]{1,6}", 0..4),
        queries in prop::collection::vec((
            any::<prop::sample::Index>(),
            0usize..24,
            prop::sample::select(vec!["", "/", "0", "0/", ".", "-"]),
            any::<prop::sample::Index>(),
            0usize..48,
            1usize..8,
        ), 8),
    ) {
        let space = KeySpace::new(rule).unwrap();
        let generated: Vec<String> = space.keys_from(Bound::Unbounded).map(|found| found.key).collect();
        prop_assert!(generated.is_sorted_by(|one, next| one < next));
        let mut keys: BTreeSet<String> = generated.iter().cloned().collect();
        let mut index: Index = others.iter().map(|key| (Key::new(key), object_of(key))).collect();
        keys.extend(others);
        for (at, is_put) in over.iter().filter(|_| !generated.is_empty()) {
            let key = at.get(&generated);
            let object = if *is_put { object_of(key) } else { deletion_of(key) };
            index.insert(Key::new(key), object);
            if *is_put { keys.insert(key.clone()) } else { keys.remove(key) };
        }
        let keys: Vec<String> = keys.into_iter().collect();
        for (below, length, delimiter, after, reach, limit) in queries.iter().filter(|_| !keys.is_empty()) {
            // Prefixes and markers that end anywhere within a key, those within directories included.
            let (below, after) = (below.get(&keys), after.get(&keys));
            let (prefix, after) = (&below[..*length.min(&below.len())], &after[..*reach.min(&after.len())]);
            let mut expected = names_of(&keys, prefix, delimiter);
            expected.retain(|(name, _)| name.as_str() > after);
            let found = names_on_pages(&index, Some(&space), ListQuery { prefix, delimiter, after, limit: *limit });
            prop_assert_eq!(found, expected, "prefix {:?} delimiter {:?} after {:?}", prefix, delimiter, after);
        }
    }

    #[test]
    fn pages_are_those_of_the_model(
        keys in prop::collection::btree_set(any_key(), 0..40),
        queries in prop::collection::vec((
            "[ab/é]{0,2}",
            prop::sample::select(vec!["", "/", "a", "a/", "é"]),
            prop::option::of(any_key()),
            1usize..8,
        ), 8),
    ) {
        let index: Index = keys.iter().map(|key| (Key::new(key), object_of(key))).collect();
        let keys: Vec<String> = keys.into_iter().collect();
        for (prefix, delimiter, after, limit) in &queries {
            let first = after.clone().unwrap_or_default();
            let mut expected = names_of(&keys, prefix, delimiter);
            expected.retain(|(name, _)| *name > first);
            let query = ListQuery { prefix, delimiter, after: &first, limit: *limit };
            let found = names_on_pages(&index, None, query);
            prop_assert_eq!(found, expected, "prefix {:?} delimiter {:?}", prefix, delimiter);
        }
    }
}

#[test]
fn a_page_costs_what_it_holds() {
    let root = tempfile::tempdir().unwrap();
    let keys: Vec<String> = (0..20).flat_map(|dir| (0..100).map(move |file| format!("{dir:02}/{file:03}"))).collect();
    let (_store, bucket) = bucket_with(root.path(), keys.iter().map(String::as_str));
    let flat = bucket.list(&ListQuery { after: "10/050", limit: 10, ..ListQuery::default() });
    assert_eq!((flat.objects.len(), flat.visited, flat.next.as_deref()), (10, 11, Some("10/060")));
    let dirs = bucket.list(&ListQuery { delimiter: "/", after: "04/", limit: 10, ..ListQuery::default() });
    assert_eq!((dirs.prefixes.len(), dirs.visited, dirs.next.as_deref()), (10, 11, Some("14/")));
    let inside = bucket.list(&ListQuery { delimiter: "/", after: "04/050", limit: 1, ..ListQuery::default() });
    assert_eq!((inside.prefixes, inside.visited), (vec!["05/".to_owned()], 2));
    assert_eq!(bucket.list(&ListQuery { delimiter: "/", limit: 0, ..ListQuery::default() }), ListPage::default());
}

#[test]
fn a_page_of_a_hundred_million_keys_costs_what_it_holds() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path()).unwrap();
    let rule = KeySpaceRule { keys: KEYS_MAX, files_per_directory: 1000, depth: 2, ..KeySpaceRule::default() };
    store.set_key_space("bucket", Some(rule)).unwrap();
    let bucket = store.bucket("bucket").unwrap();
    let (prefix, after) = ("img/", "img/123/045/99");
    let flat = bucket.list(&ListQuery { prefix, after, limit: 1000, ..ListQuery::default() });
    assert_eq!((flat.objects.len(), flat.visited), (1000, 1001));
    assert!(flat.objects[0].0.starts_with("img/123/046/"), "{}", flat.objects[0].0);
    let directories = bucket.list(&ListQuery { prefix, delimiter: "/", after, limit: 1000 });
    assert_eq!((directories.prefixes.len(), directories.visited), (192, 192));
    assert_eq!((directories.prefixes[0].as_str(), directories.next), ("img/124/", None));
}

#[test]
fn what_is_put_over_a_key_space_and_deleted_survives_a_restart() {
    let root = tempfile::tempdir().unwrap();
    let rule = KeySpaceRule { keys: 4, size_min: 3_000_000, size_max: 3_000_000, ..KeySpaceRule::default() };
    let listed = |bucket: &Bucket| {
        let page = bucket.list(&ListQuery { limit: 10, ..ListQuery::default() });
        page.objects.into_iter().map(|(key, object)| (key, object.etag.clone())).collect::<Vec<_>>()
    };
    let keys: Vec<String> = (0..4).map(|number| format!("img/{number:08}.jpg")).collect();
    let (before, generated) = {
        let store = Store::open(root.path()).unwrap();
        store.set_key_space("bucket", Some(rule.clone())).unwrap();
        let bucket = store.bucket("bucket").unwrap();
        let generated = content(&bucket, &keys[3]);
        assert_eq!(generated.len(), 3_000_000);
        let (first, wrong) = (bucket.object(&keys[0]).unwrap(), Some("other"));
        assert!(matches!(bucket.delete(&keys[0], wrong), Err(DevS3Error::Precondition(_))));
        bucket.delete(&keys[0], Some(&first.etag)).unwrap();
        bucket.delete(&keys[0], None).unwrap();
        store.put("bucket", &keys[1], b"put").unwrap();
        store.put("bucket", &keys[2], b"put and deleted").unwrap();
        bucket.delete(&keys[2], None).unwrap();
        store.put("bucket", "other", b"put beside").unwrap();
        assert!(matches!(bucket.object(&keys[0]), Err(DevS3Error::NoSuchKey(_))));
        assert!(matches!(bucket.open(&keys[2]), Err(DevS3Error::NoSuchKey(_))));
        assert!(matches!(store.delete_bucket("bucket"), Err(DevS3Error::BucketNotEmpty(_))));
        assert_eq!(files_below(&bucket.dir.join("objects")), 4);
        (listed(&bucket), generated)
    };
    let names: Vec<_> = before.iter().map(|(key, _)| key.as_str()).collect();
    assert_eq!(names, [keys[1].as_str(), keys[3].as_str(), "other"]);

    let store = Store::open(root.path()).unwrap();
    let bucket = store.bucket("bucket").unwrap();
    assert_eq!((listed(&bucket), bucket.key_space()), (before, Some(rule.clone())));
    assert_eq!((content(&bucket, &keys[1]), content(&bucket, &keys[3])), (b"put".to_vec(), generated));
    store.put("bucket", &keys[0], b"again").unwrap();
    assert_eq!(content(&bucket, &keys[0]), b"again");
    let fewer = KeySpaceRule { keys: 0, ..rule };
    assert!(matches!(store.set_key_space("bucket", Some(fewer)), Err(DevS3Error::InvalidKeySpace(_))));
    store.set_key_space("bucket", None).unwrap();
    assert_eq!((bucket.key_space(), bucket.len()), (None, 3));
    assert!(matches!(store.set_key_space("none", None), Err(DevS3Error::NoSuchBucket(_))));
    for key in [keys[0].as_str(), keys[1].as_str(), "other"] {
        bucket.delete(key, None).unwrap();
    }
    store.delete_bucket("bucket").unwrap();
}

#[test]
fn objects_survive_a_restart_whatever_their_key() {
    let root = tempfile::tempdir().unwrap();
    let long = "é/".repeat(341) + "x";
    assert_eq!(long.len(), 1024);
    let keys =
        ["a", "a/b", "a//b", "/", "//", "a/", "..", "../x", "./.", "ü ñ +%20%", "nul\0", "line\n", "\u{10ffff}", &long];
    {
        let (store, bucket) = bucket_with(root.path(), keys);
        store.put("bucket", "empty", b"").unwrap();
        store.put("bucket", "a", b"replaced").unwrap();
        bucket.delete("a/b", None).unwrap();
        bucket.delete("never there", None).unwrap();
        assert!(matches!(store.put("bucket", "", b""), Err(DevS3Error::InvalidKey)));
        assert!(matches!(store.put("bucket", &"k".repeat(1025), b""), Err(DevS3Error::InvalidKey)));
        assert!(matches!(Store::open(root.path()), Err(DevS3Error::RootInUse { .. })));
    }
    let store = Store::open(root.path()).unwrap();
    let bucket = store.bucket("bucket").unwrap();
    assert_eq!(bucket.len(), keys.len());
    for key in keys.into_iter().filter(|key| !["a", "a/b"].contains(key)) {
        assert_eq!(content(&bucket, key), key.as_bytes());
    }
    assert_eq!(content(&bucket, "a"), b"replaced");
    assert_eq!(content(&bucket, "empty"), b"");
    assert_eq!(bucket.object("empty").unwrap().etag, "d41d8cd98f00b204e9800998ecf8427e");
    assert!(matches!(bucket.object("a/b"), Err(DevS3Error::NoSuchKey(_))));
    assert_eq!(files_below(&bucket.dir.join("objects")), bucket.len());
}

#[test]
fn what_a_killed_process_leaves_is_cleaned_up() {
    let root = tempfile::tempdir().unwrap();
    let (store, bucket) = bucket_with(root.path(), ["key", "other"]);
    // Killed after the new version got its name, before the old one was removed.
    let old = bucket.path_of(1);
    assert_eq!(fs::read(&old).unwrap()[..3], *b"key");
    let saved = root.path().join("saved");
    fs::copy(&old, &saved).unwrap();
    store.put("bucket", "key", b"new").unwrap();
    fs::rename(&saved, &old).unwrap();
    // Killed in the middle of an upload.
    let mut draft = store.draft().unwrap();
    draft.write(b"half").unwrap();
    std::mem::forget(draft);
    // Not whole, which only a lost power supply can do.
    fs::create_dir_all(bucket.path_of(77).parent().unwrap()).unwrap();
    fs::create_dir_all(bucket.path_of(78).parent().unwrap()).unwrap();
    fs::write(bucket.path_of(77), b"torn").unwrap();
    fs::write(bucket.path_of(78), b"").unwrap();
    drop((store, bucket));

    let store = Store::open(root.path()).unwrap();
    let bucket = store.bucket("bucket").unwrap();
    assert_eq!((content(&bucket, "key"), content(&bucket, "other")), (b"new".to_vec(), b"other".to_vec()));
    assert_eq!((bucket.len(), old.exists()), (2, false));
    assert_eq!(files_below(&root.path().join("tmp")), 0);
    // Numbers are not used again.
    store.put("bucket", "next", b"n").unwrap();
    assert_eq!(content(&bucket, "next"), b"n");
    assert_eq!(bucket.len(), 3);
}

#[test]
fn a_reader_keeps_its_version() {
    let root = tempfile::tempdir().unwrap();
    let (store, bucket) = bucket_with(root.path(), ["key"]);
    let (object, content) = bucket.open("key").unwrap();
    store.put("bucket", "key", b"longer than before").unwrap();
    assert_eq!((object.size, content.read(0..3).unwrap().as_ref()), (3, b"key".as_slice()));
    bucket.delete("key", None).unwrap();
    assert_eq!(content.read(1..3).unwrap(), "ey");
}

#[test]
fn what_is_replaced_is_kept_until_the_store_stops() {
    let root = tempfile::tempdir().unwrap();
    let rule = KeySpaceRule { keys: 1, size_min: 100, size_max: 100, ..KeySpaceRule::default() };
    let (store, bucket) = bucket_with(root.path(), ["a", "b"]);
    store.set_key_space("bucket", Some(rule)).unwrap();
    let generated = bucket.list(&ListQuery { prefix: "img/", limit: 1, ..ListQuery::default() }).objects[0].0.clone();
    let made = content(&bucket, &generated);
    bucket.keep_versions(true).unwrap();
    for key in ["a", "b", generated.as_str()] {
        store.put("bucket", key, b"replaced").unwrap();
    }
    bucket.delete("b", None).unwrap();
    let rows = |prefix| -> Vec<(String, bool, bool)> {
        let (rows, has_more) = bucket.list_versions(prefix, 10);
        assert!(!has_more);
        rows.into_iter().map(|row| (row.key, row.version.is_deleted(), row.is_latest)).collect()
    };
    assert_eq!(rows("a"), [("a".to_owned(), false, true), ("a".to_owned(), false, false)]);
    let b = [(true, true), (false, false), (false, false)];
    assert_eq!(rows("b"), b.map(|(is_deleted, is_latest)| ("b".to_owned(), is_deleted, is_latest)));
    assert_eq!(bucket.list_versions("", 4).0.len(), 4);
    assert!(bucket.list_versions("", 4).1);
    let read = |key: &str, place: usize| {
        let id = bucket.list_versions(key, 10).0[place].version.version_id();
        let (object, content) = bucket.open_version(key, &id).unwrap();
        content.read(0..object.size).unwrap().to_vec()
    };
    assert_eq!((read("a", 1), read("b", 2), read(&generated, 1)), (b"a".to_vec(), b"b".to_vec(), made));
    drop((bucket, store));

    let store = Store::open(root.path()).unwrap();
    let bucket = store.bucket("bucket").unwrap();
    assert_eq!((content(&bucket, "a").as_slice(), bucket.object("b").is_err()), (b"replaced".as_slice(), true));
    assert_eq!(files_below(&root.path().join("buckets/bucket/objects")), 3, "the newest of each");
}

#[test]
fn readers_and_writers_at_once_see_whole_versions() {
    let root = tempfile::tempdir().unwrap();
    let (store, bucket) = bucket_with(root.path(), ["key"]);
    std::thread::scope(|scope| {
        for writer in 0..2u8 {
            let store = &store;
            scope.spawn(move || {
                for round in 0..100usize {
                    store.put("bucket", "key", &vec![writer; round + 1]).unwrap();
                }
            });
        }
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..300 {
                    let data = content(&bucket, "key");
                    assert!(data == b"key" || data.iter().all(|byte| *byte == data[0]));
                }
            });
        }
    });
    assert_eq!(content(&bucket, "key").len(), 100);
    assert_eq!(files_below(&bucket.dir.join("objects")), 1);
}

#[test]
fn conditions_of_a_write_hold() {
    let root = tempfile::tempdir().unwrap();
    let (store, bucket) = bucket_with(root.path(), ["key"]);
    let put = |key: &str, condition: PutCondition| {
        let version = Version { etag: "e".repeat(32), attributes: Attributes::default() };
        bucket.commit(store.draft().unwrap(), key, version, &condition).map(|_| ())
    };
    let absent = PutCondition { must_be_absent: true, must_have_etag: None };
    let etag = |etag: &str| PutCondition { must_be_absent: false, must_have_etag: Some(etag.to_owned()) };
    assert!(matches!(put("key", absent.clone()), Err(DevS3Error::Precondition(_))));
    assert!(matches!(put("key", etag("other")), Err(DevS3Error::Precondition(_))));
    assert!(matches!(put("none", etag("other")), Err(DevS3Error::NoSuchKey(_))));
    assert_eq!(content(&bucket, "key"), b"key");
    put("fresh", absent).unwrap();
    let current = bucket.object("key").unwrap().etag.clone();
    put("key", etag(&current)).unwrap();
    assert_eq!(content(&bucket, "key"), b"");
    assert_eq!(files_below(&bucket.dir.join("objects")), 2);
}

#[test]
fn sparse_objects_take_no_room() {
    let root = tempfile::tempdir().unwrap();
    let (store, bucket) = bucket_with(root.path(), []);
    let first = store.put_sparse("bucket", "big", 5 << 30).unwrap();
    let second = store.put_sparse("bucket", "big", 5 << 30).unwrap();
    assert!(first.etag.ends_with("-1") && first.etag != second.etag);
    drop((store, bucket));
    let bucket = Store::open(root.path()).unwrap().bucket("bucket").unwrap();
    let (object, content) = bucket.open("big").unwrap();
    let Content::File(file) = content else { panic!("it is no file") };
    assert_eq!(object.size, 5 << 30);
    assert!(std::os::unix::fs::MetadataExt::blocks(&file.metadata().unwrap()) < 64);
}

#[test]
fn buckets_come_and_go() {
    let root = tempfile::tempdir().unwrap();
    let (store, bucket) = bucket_with(root.path(), ["key"]);
    assert!(matches!(store.create_bucket("bucket"), Err(DevS3Error::BucketExists(_))));
    for name in ["", "ab", "Upper", "a/b", "..", "192.168.0.1"] {
        assert!(matches!(store.create_bucket(name), Err(DevS3Error::InvalidBucketName(_))), "{name}");
    }
    assert!(matches!(store.delete_bucket("bucket"), Err(DevS3Error::BucketNotEmpty(_))));
    bucket.delete("key", None).unwrap();
    let draft = store.draft().unwrap();
    store.delete_bucket("bucket").unwrap();
    let version = Version { etag: String::new(), attributes: Attributes::default() };
    let late = bucket.commit(draft, "late", version, &PutCondition::default());
    assert!(matches!(late, Err(DevS3Error::NoSuchBucket(_))));
    assert!(matches!(store.put("bucket", "key", b""), Err(DevS3Error::NoSuchBucket(_))));
    drop(store);
    assert!(Store::open(root.path()).unwrap().buckets().is_empty());
}

#[test]
fn uploads_survive_a_restart_and_join_in_order() {
    let root = tempfile::tempdir().unwrap();
    let big = vec![7; 5 << 20];
    let part = |store: &Store, id: &str, number: u32, data: &[u8]| {
        use md5::Digest;
        let mut draft = store.draft().unwrap();
        draft.write(data).unwrap();
        let bucket = store.bucket("bucket").unwrap();
        bucket.put_part("key", id, number, draft, md5::Md5::digest(data).into())
    };
    let (store, bucket) = bucket_with(root.path(), []);
    let attributes = Attributes { content_type: Some("text/x".into()), ..Attributes::default() };
    let id = bucket.create_upload("key", attributes).unwrap();
    part(&store, &id, 3, b"replaced").unwrap();
    let last = part(&store, &id, 3, b"end").unwrap();
    part(&store, &id, 2, b"small").unwrap();
    drop((store, bucket));

    let store = Store::open(root.path()).unwrap();
    let bucket = store.bucket("bucket").unwrap();
    let first = part(&store, &id, 1, &big).unwrap();
    let uploads = bucket.list_uploads("k", ("", ""), 10);
    assert_eq!((uploads.uploads.len(), uploads.uploads[0].id.as_str(), uploads.truncated), (1, id.as_str(), false));
    assert!(bucket.list_uploads("", ("key", &id), 10).uploads.is_empty());
    assert!(bucket.list_uploads("", ("key", ""), 10).uploads.is_empty());
    let (parts, more) = bucket.list_parts("key", &id, 1, 1).unwrap();
    assert_eq!((parts[0].number, parts[0].size, more), (2, 5, true));

    let complete = |listed: &[(u32, &str)]| {
        let listed: Vec<_> = listed.iter().map(|(number, etag)| (*number, (*etag).to_owned())).collect();
        bucket.complete_upload("key", &id, &listed, &PutCondition::default())
    };
    let small = parts[0].etag.clone();
    assert!(matches!(complete(&[(1, &first), (3, &first)]), Err(DevS3Error::InvalidPart(3))));
    assert!(matches!(complete(&[(3, &last), (1, &first)]), Err(DevS3Error::InvalidPartOrder)));
    assert!(matches!(complete(&[(2, &small), (3, &last)]), Err(DevS3Error::PartTooSmall { number: 2, size: 5 })));
    let object = complete(&[(1, &first), (3, &last)]).unwrap();
    assert_eq!(object.attributes().unwrap().content_type.as_deref(), Some("text/x"));
    assert!(object.etag.ends_with("-2"));
    assert_eq!(content(&bucket, "key"), [big.as_slice(), b"end"].concat());
    assert!(matches!(complete(&[(1, &first)]), Err(DevS3Error::NoSuchUpload(_))));
    assert_eq!(files_below(&bucket.dir.join("uploads")), 0);

    let id = bucket.create_upload("key", Attributes::default()).unwrap();
    assert!(matches!(bucket.abort_upload("other", &id), Err(DevS3Error::NoSuchUpload(_))));
    bucket.abort_upload("key", &id).unwrap();
    assert!(matches!(part(&store, &id, 1, b""), Err(DevS3Error::NoSuchUpload(_))));
}
