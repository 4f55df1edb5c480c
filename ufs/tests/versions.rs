//! Reads of versions that a bucket keeps, against an S3 server.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should stop there")]

mod support;

use cavern_dev_s3::{FaultKind, FaultRule, Kind};
use cavern_ufs::{MemoryBucket, Ufs, UfsError};
use futures::StreamExt;
use support::{BUCKET, Bucket, conf, options};

fn fault(kind: FaultKind, operation: &str) -> FaultRule {
    FaultRule { kind: Some(kind), operations: vec![operation.to_owned()], ..FaultRule::default() }
}

/// A bucket that keeps versions.
async fn versioned() -> Bucket {
    let bucket = Bucket::start().await;
    bucket.s3.store().bucket(BUCKET).unwrap().keep_versions(true).unwrap();
    bucket
}

fn delete(bucket: &Bucket, key: &str) {
    bucket.s3.store().bucket(BUCKET).unwrap().delete(key, None).unwrap();
}

fn is_gone<T>(answer: &Result<T, UfsError>) -> bool {
    matches!(answer, Err(UfsError::VersionChanged { .. } | UfsError::NotFound { .. }))
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_replaced_or_deleted_is_read_by_its_etag() {
    let bucket = versioned().await;
    let ufs = bucket.ufs();
    // Keys that begin with one another, and one that is spelt in no simple way.
    let odd = "d/a b+%2F ü?versionId=1&x";
    let mut etags = Vec::new();
    for key in ["d/a", "d/ab", odd] {
        etags.push((key, bucket.put(key, format!("first of {key}").as_bytes())));
        bucket.put(key, format!("second of {key}").as_bytes());
    }
    bucket.put("d/a/b", b"first of d/a");
    delete(&bucket, "d/ab");
    for (key, etag) in &etags {
        let expected = format!("first of {key}");
        assert!(is_gone(&ufs.get_bytes(key, etag, 0..expected.len() as u64).await), "{key}");
        assert_eq!(ufs.get_bytes_pinned(key, etag, 0..expected.len() as u64).await.unwrap(), expected, "{key}");
        assert_eq!(ufs.get_bytes_pinned(key, etag, 3..8).await.unwrap(), expected.as_bytes()[3..8], "{key}");
    }
    let deleted = ufs.get_bytes_pinned("d/ab", &etags[0].1, 0..3).await;
    assert!(matches!(deleted, Err(UfsError::NotFound { .. })), "an ETag of another key: {deleted:?}");
    assert!(is_gone(&ufs.get_bytes_pinned("d/a", "", 0..500).await), "it names no version, and ends before");

    // What is there is read at once; what is known is not looked for again.
    let current = bucket.put("now", b"now");
    bucket.s3.reset_stats();
    assert_eq!(ufs.get_bytes_pinned("now", &current, 0..3).await.unwrap(), "now");
    assert_eq!((bucket.s3.stats().count(Kind::Get), bucket.s3.stats().count(Kind::List)), (1, 0));
    ufs.get_bytes_pinned("d/a", &etags[0].1, 0..3).await.unwrap();
    assert_eq!((bucket.s3.stats().count(Kind::Get), bucket.s3.stats().count(Kind::List)), (2, 0));
    bucket.s3.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_newest_of_equal_versions_is_read_and_what_is_gone_for_good_is_gone() {
    let bucket = versioned().await;
    let ufs = bucket.ufs();
    let etag = bucket.put("k", b"twice");
    bucket.put("k", b"between");
    assert_eq!(bucket.put("k", b"twice"), etag);
    bucket.put("k", b"at last");
    assert_eq!(ufs.get_bytes_pinned("k", &etag, 0..5).await.unwrap(), "twice");
    bucket.put("k", b"twice");
    assert_eq!(ufs.get_bytes_pinned("k", &etag, 0..5).await.unwrap(), "twice");
    bucket.s3.store().bucket(BUCKET).unwrap().keep_versions(false).unwrap();
    assert_eq!(ufs.get_bytes_pinned("k", &etag, 0..5).await.unwrap(), "twice", "it is the current one now");
    bucket.put("k", b"other");
    assert!(is_gone(&ufs.get_bytes_pinned("k", &etag, 0..5).await));
    bucket.s3.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_body_goes_on_with_the_version_that_was_replaced_meanwhile() {
    let bucket = versioned().await;
    let old: Vec<u8> = (0..4_000_000_u32).map(|n| (n % 253) as u8).collect();
    let etag = bucket.put("k", &old);
    let ufs = bucket.ufs();
    bucket.s3.faults().add(FaultRule { count: Some(1), ..fault(FaultKind::ShortBody, "GET") }).unwrap();
    let mut stream = ufs.get_pinned("k", &etag, 0..4_000_000).await.unwrap();
    let mut received = stream.next().await.unwrap().unwrap().to_vec();
    bucket.put("k", &vec![9; 4_000_000]);
    while let Some(piece) = stream.next().await {
        received.extend_from_slice(&piece.unwrap());
    }
    assert!(received == old);
    bucket.s3.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_may_not_look_for_versions_has_what_is_there() {
    let bucket = versioned().await;
    let etag = bucket.put("k", b"first");
    bucket.put("k", b"second");
    let ufs = bucket.ufs();
    // A store that does not answer is no store without versions.
    bucket.s3.faults().add(fault(FaultKind::Unavailable, "ListObjectVersions")).unwrap();
    let silent = ufs.get_bytes_pinned("k", &etag, 0..5).await;
    assert!(matches!(silent, Err(UfsError::Unavailable { .. })), "{silent:?}");
    bucket.s3.faults().clear();
    // Neither is one that has the version, and refuses to give it.
    let only_current = FaultRule { count: Some(1), ..fault(FaultKind::Denied, "GetObject") };
    assert_eq!(ufs.get_bytes_pinned("k", &etag, 0..5).await.unwrap(), "first");
    bucket.s3.faults().add(only_current).unwrap();
    let refused = ufs.get_bytes_pinned("k", &etag, 0..5).await;
    assert!(matches!(refused, Err(UfsError::Denied { .. })), "{refused:?}");
    bucket.s3.faults().clear();

    let other = bucket.put("other", b"first");
    bucket.put("other", b"second");
    bucket.s3.faults().add(fault(FaultKind::Denied, "ListObjectVersions")).unwrap();
    bucket.s3.reset_stats();
    for _ in 0..3 {
        assert!(is_gone(&ufs.get_bytes_pinned("other", &other, 0..5).await));
    }
    let stats = bucket.s3.stats();
    assert_eq!((stats.count(Kind::Get), stats.count(Kind::List)), (3, 1), "it is asked once");
    assert_eq!(ufs.get_bytes_pinned("k", &etag, 0..5).await.unwrap(), "first", "what is known stays known");
    bucket.s3.stop().await;
}

#[tokio::test]
async fn a_store_without_versions_has_what_is_there() {
    let bucket = MemoryBucket::named("no-versions");
    let ufs = Ufs::open("memory://no-versions", &options(&[]), &conf()).unwrap();
    let etag = bucket.put("k", "first");
    assert_eq!(ufs.get_bytes_pinned("k", &etag, 0..5).await.unwrap(), "first");
    bucket.put("k", "second");
    assert!(matches!(ufs.get_bytes_pinned("k", &etag, 0..5).await, Err(UfsError::VersionChanged { .. })));
    bucket.keep_versions();
    let kept = bucket.put("k", "third");
    bucket.delete("k");
    assert_eq!(ufs.get_bytes_pinned("k", &kept, 1..5).await.unwrap(), "hird");
    assert!(matches!(ufs.get_bytes_pinned("k", &etag, 0..5).await, Err(UfsError::NotFound { .. })));
    assert_eq!(ufs.get_bytes_pinned("k", &etag, 5..5).await.unwrap().len(), 0);
}
