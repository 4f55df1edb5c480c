//! Writing to a bucket: whole objects with their metadata, in the place of what is expected there.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should stop there")]

mod support;

use std::time::Duration;

use bytes::Bytes;
use cavern_conf::{Interval, schema};
use cavern_dev_s3::{FaultKind, FaultRule};
use cavern_proto::Capabilities;
use cavern_ufs::{MemoryBucket, Metadata, ObjectMeta, Precondition, Ufs, UfsError, WRITE_NAME, named};
use support::contract::{self, Abort};
use support::fake::Fake;
use support::{BUCKET, Bucket, conf, options};

fn metadata(pairs: &[(&str, &str)]) -> Metadata {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn s3_keeps_objects_metadata_and_conditions() {
    let bucket = Bucket::start().await;
    let ufs = bucket.ufs();
    contract::writes(&ufs, Abort::TakesParts).await;
    // Copied in parts.
    bucket.s3.store().put_sparse(BUCKET, "sparse", (256 << 20) + 5).unwrap();
    ufs.copy(&ufs.head("sparse").await.unwrap(), "copy").await.unwrap();
    assert_eq!(ufs.head("copy").await.unwrap().size, (256 << 20) + 5);
    for key in ["sparse", "copy"] {
        ufs.delete(key, Precondition::Anything).await.unwrap();
    }
    let kept = metadata(&[("mode", "33188"), ("mtime", "1.000000002"), ("xattr", "%7B%22a+b%22%7D")]);
    for key in ["plain", " odd +%20\u{e9}/\n?#&=;:@", "dir/", "a//b", "line\u{7}"] {
        ufs.put(key, &Bytes::from_static(b"body"), &kept, Precondition::Nothing).await.unwrap();
        let object = bucket.s3.store().bucket(BUCKET).unwrap().object(key).unwrap();
        let stored = object.attributes().unwrap().metadata.clone();
        assert_eq!(stored.into_iter().collect::<Metadata>(), kept, "{key:?}");
        ufs.delete(key, Precondition::Version(&object.etag)).await.unwrap();
    }
    bucket.s3.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_is_tried_again_when_the_store_is_busy() {
    let bucket = Bucket::start().await;
    let ufs = bucket.ufs();
    let rule = |kind: FaultKind| FaultRule { kind: Some(kind), count: Some(1), ..FaultRule::default() };
    bucket.s3.faults().add(rule(FaultKind::Unavailable)).unwrap();
    ufs.put("k", &Bytes::from_static(b"1"), &Metadata::new(), Precondition::Nothing).await.unwrap();
    bucket.s3.faults().add(rule(FaultKind::Reset)).unwrap();
    ufs.delete("k", Precondition::Anything).await.unwrap();
    assert_eq!(ufs.stats().retries, 2);
    assert_eq!((ufs.stats().puts, ufs.stats().deletes), (2, 2));
    bucket.s3.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_store_refuses_to_copy_is_read_and_written() {
    let bucket = Bucket::start().await;
    let ufs = bucket.ufs();
    let rule = FaultRule { kind: Some(FaultKind::Denied), operations: vec!["COPY".into()], ..FaultRule::default() };
    bucket.s3.faults().add(rule).unwrap();
    let large: Bytes = (0..(20 << 20) + 5).map(|at: u32| (at ^ (at >> 9)) as u8).collect();
    for (key, body) in [("marker/", Bytes::new()), ("small", Bytes::from_static(b"body")), ("large", large)] {
        ufs.put(key, &body, &named(metadata(&[("mode", "33188")])), Precondition::Nothing).await.unwrap();
        let from = ufs.head(key).await.unwrap();
        let to = format!("to/{key}");
        let etag = ufs.copy(&from, &to).await.unwrap();
        let there = ufs.head(&to).await.unwrap();
        assert_eq!((&there.etag, there.size, there.metadata["mode"].as_str()), (&etag, from.size, "33188"), "{key}");
        assert_eq!(ufs.get_bytes(&to, &etag, 0..from.size).await.unwrap(), body, "{key}");
        let described = ufs.describe(&there, &metadata(&[("mode", "33152")])).await.unwrap();
        let described_there = ufs.head(&to).await.unwrap();
        assert_eq!((&described_there.etag, &*described_there.metadata["mode"]), (&described, "33152"), "{key}");
        // Of another version nothing is copied.
        ufs.put(key, &Bytes::from_static(b"other"), &Metadata::new(), Precondition::Anything).await.unwrap();
        for error in [
            ufs.copy(&from, "never").await.unwrap_err(),
            ufs.describe(&from, &metadata(&[("mode", "33152")])).await.unwrap_err(),
        ] {
            assert!(matches!(error, UfsError::VersionChanged { .. }), "{key}: {error}");
        }
        assert!(matches!(ufs.head("never").await, Err(UfsError::NotFound { .. })), "{key}");
    }
    assert_eq!(bucket.uploads(), 0, "nothing is left of what was given up");
    // Who may not read it either gets to know that.
    let from = ufs.head("small").await.unwrap();
    let rule = FaultRule { kind: Some(FaultKind::Denied), operations: vec!["GET".into()], ..FaultRule::default() };
    bucket.s3.faults().add(rule).unwrap();
    let error = ufs.copy(&from, "never").await.unwrap_err();
    assert!(matches!(error, UfsError::Denied { .. }) && error.to_string().contains("GET"), "{error}");
    bucket.s3.stop().await;
}

#[tokio::test]
async fn memory_is_written_to_and_a_directory_tree_is_not() {
    contract::writes(&Ufs::open("memory://written", &options(&[]), &conf()).unwrap(), Abort::TakesParts).await;
    let bucket = MemoryBucket::named("written");
    assert_eq!((bucket.keys(), bucket.uploads()), (vec!["k".to_owned()], 0));
    assert_eq!(bucket.object("k").unwrap().0, "four");
    let tree = tempfile::tempdir().unwrap();
    let files = Ufs::open(&format!("file://{}", tree.path().display()), &options(&[]), &conf()).unwrap();
    let refused = files.put("k", &Bytes::new(), &Metadata::new(), Precondition::Anything).await;
    assert!(matches!(refused, Err(UfsError::Rejected { .. })), "{refused:?}");
}

#[tokio::test]
async fn a_store_that_knows_no_conditions_is_sent_none() {
    let bucket = MemoryBucket::named("no-conditions");
    let ufs = Ufs::open("memory://no-conditions", &options(&[]), &conf()).unwrap();
    let put =
        async |replaces: Precondition<'_>| ufs.put("k", &Bytes::from_static(b"x"), &Metadata::new(), replaces).await;
    put(Precondition::Nothing).await.unwrap();
    assert!(matches!(put(Precondition::Nothing).await, Err(UfsError::VersionChanged { .. })));
    let all = ufs.capabilities();
    bucket.claim_capabilities(Capabilities { conditional_writes: false, ..all });
    put(Precondition::Nothing).await.unwrap();
    put(Precondition::Version("another")).await.unwrap();
    ufs.delete("k", Precondition::Version("another")).await.unwrap();
    assert!(bucket.keys().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_whose_answer_was_lost_is_known_again() {
    let store = Fake::start().await;
    let ufs = store.ufs(&conf());
    let lose = |line: &'static str| store.state.lock().lost.push(line);
    let (body, none) = (Bytes::from_static(b"body"), Metadata::new());
    // A directory, and a file that is made.
    for key in ["dir/", "made"] {
        lose("PUT /data/");
        let etag = ufs.put(key, &body, &named(none.clone()), Precondition::Nothing).await.unwrap();
        assert_eq!(ufs.head(key).await.unwrap().etag, etag);
        lose("PUT /data/");
        let refused = ufs.put(key, &body, &named(none.clone()), Precondition::Nothing).await;
        assert!(matches!(refused, Err(UfsError::VersionChanged { .. })), "another's: {refused:?}");
        store.state.lock().lost.clear();
    }
    let made = ufs.head("made").await.unwrap();
    lose("PUT /data/made");
    let replaces = Precondition::Version(&made.etag);
    let replaced = ufs.put("made", &body, &named(none.clone()), replaces).await.unwrap();
    let there = ufs.head("made").await.unwrap();
    assert_eq!(there.etag, replaced);
    lose("PUT /data/made");
    let described = ufs.describe(&there, &metadata(&[("mode", "33188")])).await.unwrap();
    let there = ufs.head("made").await.unwrap();
    assert_eq!((&there.etag, there.metadata["mode"].as_str()), (&described, "33188"));

    // Copied in parts; the store need not have so many bytes.
    lose("POST /data/copy?uploadId");
    let large = ObjectMeta { size: (256 << 20) + 5, ..there };
    let copied = ufs.copy(&large, "copy").await.unwrap();
    let there = ufs.head("copy").await.unwrap();
    assert_eq!((&there.etag, there.metadata["mode"].as_str()), (&copied, "33188"));
    assert_ne!(there.metadata[WRITE_NAME], large.metadata[WRITE_NAME]);
    lose("POST /data/parts?uploadId");
    let upload = ufs.begin_multipart("parts", &named(none)).await.unwrap();
    let part = upload.part(1, &body).await.unwrap();
    let completed = upload.complete(&[part], Precondition::Nothing).await.unwrap();
    assert_eq!(ufs.head("parts").await.unwrap().etag, completed);
    assert!(store.state.lock().lost.is_empty(), "all answers were lost that were to be");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_may_take_its_time_to_put_parts_together() {
    let store = Fake::start().await;
    // A part may take one and a half second and the time of a request.
    let (request_timeout, io_timeout) = (Interval::millis(1000), Interval::millis(250));
    let ufs = store.ufs(&schema::Ufs { request_timeout, io_timeout, retries: 1, ..conf() });
    let body = Bytes::from_static(b"body");
    let complete = async |key: &str, metadata: Metadata| {
        let upload = ufs.begin_multipart(key, &metadata).await.unwrap();
        let part = upload.part(1, &body).await.unwrap();
        upload.complete(&[part], Precondition::Nothing).await
    };
    // With blanks before the answer, and longer than anything else may take.
    store.state.lock().completion = Duration::from_millis(1400);
    let etag = complete("slow", Metadata::new()).await.unwrap();
    assert_eq!(ufs.head("slow").await.unwrap().etag, etag);
    assert_eq!((store.count("POST /data/slow?uploadId"), ufs.stats().retries), (1, 0));
    // So long that nobody hears of it.
    store.state.lock().completion = Duration::from_millis(3500);
    let etag = complete("slower", named(Metadata::new())).await.unwrap();
    assert_eq!((ufs.head("slower").await.unwrap().etag, ufs.stats().retries), (etag, 1));

    // An error under the status of a success is one.
    store.state.lock().completion = Duration::ZERO;
    let refuse = |document: &'static str| store.state.lock().refusals.push(document);
    for lost in [" \n<?xml version=\"1.0\"?><Error><Code>InternalError</Code></Error>", "   ", "<Complete"] {
        refuse(lost);
        complete("tried-again", Metadata::new()).await.unwrap();
        ufs.delete("tried-again", Precondition::Anything).await.unwrap();
    }
    refuse("<Error><Code>AccessDenied</Code></Error>");
    let error = complete("denied", Metadata::new()).await.unwrap_err();
    assert!(matches!(error, UfsError::Denied { .. }), "{error}");
    refuse("<Error><Code>InvalidPart</Code></Error>");
    let error = complete("invalid", named(Metadata::new())).await.unwrap_err();
    assert!(matches!(error, UfsError::Rejected { .. }) && error.to_string().contains("InvalidPart"), "{error}");
    refuse("<Error><Code>NoSuchUpload</Code></Error>");
    let error = complete("gone", named(Metadata::new())).await.unwrap_err();
    assert!(matches!(error, UfsError::NotFound { .. }), "{error}");
}
