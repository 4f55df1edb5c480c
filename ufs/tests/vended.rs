//! Keys that are vended, against the embedded store and its STS.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop there")]

mod support;

use std::collections::HashMap;
use std::time::Duration;

use bytes::Bytes;
use cavern_ufs::{KeyError, KeyProvider, KeyRight, KeyVendor, ListMode, Precondition, Ufs, UfsError, vended_options};
use support::{Bucket, conf, keys};

const ROLE: &str = "arn:aws:iam::123456789012:role/any";

/// The options of a mount that vends keys, as masters have them.
fn vended(bucket: &Bucket) -> HashMap<String, String> {
    let mut options = bucket.options();
    options.insert("s3.credentials.vended_role".to_owned(), ROLE.to_owned());
    options.insert("s3.sts_endpoint_url".to_owned(), bucket.s3.endpoint());
    options
}

fn vendor(bucket: &Bucket, uri: &str) -> KeyVendor {
    KeyVendor::open(uri, &vended(bucket), &conf()).unwrap().unwrap()
}

/// A handle as a process without credentials has it.
fn lent(bucket: &Bucket, uri: &str, right: KeyRight) -> Ufs {
    let vendor = vendor(bucket, uri);
    let lender = KeyProvider::new("a master", move || {
        let vendor = vendor.clone();
        async move { vendor.keys(right).await }
    });
    Ufs::open_vended(uri, &vended_options(&vended(bucket)).unwrap(), &conf(), &lender).unwrap()
}

fn denied<T: std::fmt::Debug>(what: &str, answer: Result<T, UfsError>) {
    match answer {
        Err(UfsError::Denied { reason, .. }) => assert!(reason.contains("403"), "{what}: {reason}"),
        other => panic!("{what}: {other:?}"),
    }
}

async fn put(ufs: &Ufs, key: &str) -> Result<String, UfsError> {
    ufs.put(key, &Bytes::from_static(b"written"), &Default::default(), Precondition::Anything).await
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_are_good_for_their_prefix_and_for_what_they_are_to_do() {
    let bucket = Bucket::start().await;
    for key in ["data/key", "data2/key", "key"] {
        bucket.put(key, b"content");
    }
    let (read, write) =
        (lent(&bucket, "s3://data/data", KeyRight::Read), lent(&bucket, "s3://data/data", KeyRight::Write));
    for ufs in [&read, &write] {
        assert_eq!(ufs.get_bytes("data/key", "", 0..7).await.unwrap(), "content");
        assert_eq!(keys(ufs, "data/", ListMode::Recursive).await, ["data/key"]);
        for key in ["data2/key", "key"] {
            denied("GET", ufs.get_bytes(key, "", 0..7).await);
            denied("PUT", put(ufs, key).await);
            denied("DELETE", ufs.delete(key, Precondition::Anything).await);
        }
        for prefix in ["", "data2/"] {
            denied("LIST", ufs.list(prefix, ListMode::Recursive).next_page().await);
        }
    }
    denied("PUT", put(&read, "data/key").await);
    denied("DELETE", read.delete("data/key", Precondition::Anything).await);
    put(&write, "data/other").await.unwrap();
    write.delete("data/key", Precondition::Anything).await.unwrap();
    assert_eq!(keys(&read, "data/", ListMode::Recursive).await, ["data/other"]);
    // What is not there is told from what is refused.
    for ufs in [&read, &write] {
        assert!(matches!(ufs.head("data/key").await, Err(UfsError::NotFound { .. })));
        assert!(matches!(ufs.get_bytes("data/key", "", 0..7).await, Err(UfsError::NotFound { .. })));
    }
    // The store does not tell them apart by itself.
    let vendor = vendor(&bucket, "s3://data/data");
    let keys = vendor.keys(KeyRight::Read).await.unwrap();
    let mut options = bucket.options();
    for (name, value) in [("access", keys.access), ("secret", keys.secret), ("session_token", keys.session_token)] {
        options.insert(format!("s3.credentials.{name}"), value);
    }
    let plain = Ufs::open("s3://data/data", &options, &conf()).unwrap();
    denied("HEAD", plain.head("data/key").await);
    bucket.s3.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn versions_that_a_bucket_keeps_are_read_within_the_prefix() {
    let bucket = Bucket::start().await;
    bucket.s3.store().bucket("data").unwrap().keep_versions(true).unwrap();
    let mut etags = HashMap::new();
    for key in ["data/replaced", "data/deleted", "data2/key"] {
        etags.insert(key, bucket.put(key, b"content"));
        bucket.put(key, b"other");
    }
    bucket.s3.store().bucket("data").unwrap().delete("data/deleted", None).unwrap();
    for right in [KeyRight::Read, KeyRight::Write] {
        let ufs = lent(&bucket, "s3://data/data", right);
        for key in ["data/replaced", "data/deleted"] {
            assert_eq!(ufs.get_bytes_pinned(key, &etags[key], 0..7).await.unwrap(), "content", "{key}");
        }
        denied("GET", ufs.get_bytes_pinned("data2/key", &etags["data2/key"], 0..7).await);
    }
    bucket.s3.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefix_with_characters_of_patterns_stands_for_itself() {
    let bucket = Bucket::start().await;
    for key in ["a*?$\u{e9}/key", "abc$\u{e9}/key"] {
        bucket.put(key, b"content");
    }
    let ufs = lent(&bucket, "s3://data/a*?$\u{e9}", KeyRight::Read);
    assert_eq!(ufs.get_bytes("a*?$\u{e9}/key", "", 0..7).await.unwrap(), "content");
    assert_eq!(keys(&ufs, "a*?$\u{e9}/", ListMode::Recursive).await, ["a*?$\u{e9}/key"]);
    denied("GET", ufs.get_bytes("abc$\u{e9}/key", "", 0..7).await);
    denied("LIST", ufs.list("abc$\u{e9}/", ListMode::Recursive).next_page().await);
    bucket.s3.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_request_serves_all_who_ask_and_all_handles_of_a_mount() {
    let bucket = Bucket::start().await;
    let (one, other) = (vendor(&bucket, "s3://data/data"), vendor(&bucket, "s3://data/data"));
    let asked = [&one, &other].into_iter().cycle().take(32).map(|vendor| vendor.keys(KeyRight::Read));
    let given = futures::future::join_all(asked).await;
    let first = given[0].as_ref().unwrap();
    assert!(given.iter().all(|keys| keys.as_ref().unwrap() == first));
    assert_eq!(bucket.s3.stats().operations["AssumeRole"], 1);
    assert!(!format!("{first:?}").contains(&first.secret));
    // Those that write are others, and so are those of another mount.
    let writes = one.keys(KeyRight::Write).await.unwrap();
    let elsewhere = vendor(&bucket, "s3://data/other").keys(KeyRight::Read).await.unwrap();
    assert!(writes != *first && elsewhere != *first);
    assert_eq!(bucket.s3.stats().operations["AssumeRole"], 3);
    bucket.s3.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn when_nobody_lends_any_more_the_end_of_the_keys_is_the_end() {
    let bucket = Bucket::start().await;
    bucket.put("data/key", b"content");
    bucket.s3.set_session_life(6);
    let vendor = vendor(&bucket, "s3://data/data");
    let lender = KeyProvider::new("a master, asked for keys of /data,", {
        let asked = std::sync::atomic::AtomicBool::new(false);
        move || {
            let is_first = !asked.swap(true, std::sync::atomic::Ordering::SeqCst);
            let vendor = vendor.clone();
            async move {
                match is_first {
                    true => vendor.keys(KeyRight::Read).await,
                    false => Err(KeyError::Unavailable("no master answers".to_owned())),
                }
            }
        }
    });
    let options = vended_options(&vended(&bucket)).unwrap();
    let ufs = Ufs::open_vended("s3://data/data", &options, &conf(), &lender).unwrap();
    let mut served = 0;
    let error = loop {
        match ufs.head("data/key").await {
            Ok(_) => served += 1,
            Err(error) => break error,
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert!(served > 0, "{served}");
    let text = error.to_string();
    assert!(error.is_outage() && text.contains("have ended") && text.contains("no master answers"), "{text}");
    bucket.s3.stop().await;
}

#[test]
fn options_without_the_role_vend_nothing_and_wrong_ones_are_refused() {
    let given = |pairs: &[(&str, &str)]| support::options(pairs);
    let open = |uri: &str, options: &HashMap<String, String>| KeyVendor::open(uri, options, &conf());
    assert!(open("s3://data/data", &given(&[])).unwrap().is_none());
    assert!(open("memory://data/data", &given(&[("s3.credentials.vended_role", ROLE)])).unwrap().is_none());
    let elsewhere = given(&[("s3.credentials.vended_role", ROLE), ("s3.endpoint_url", "http://127.0.0.1:1")]);
    let error = open("s3://data/data", &elsewhere).unwrap_err().to_string();
    assert!(error.contains("s3.credentials.vended_role") && error.contains("s3.sts_endpoint_url"), "{error}");
}
