//! What a handle promises, against an S3 server.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should stop there")]

mod support;

use std::time::{Duration, Instant};

use cavern_dev_s3::{FaultKind, FaultRule, Kind};
use cavern_ufs::{Contents, ListMode, Ufs, UfsError};
use futures::StreamExt;
use support::{BUCKET, Bucket, conf, hasty, keys, options, pages};
use tokio::net::TcpSocket;

fn fault(kind: FaultKind, operations: &[&str]) -> FaultRule {
    let operations = operations.iter().map(|name| (*name).to_owned()).collect();
    FaultRule { kind: Some(kind), operations, ..FaultRule::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listing_tells_everything_in_one_request_a_page_and_no_head() {
    let bucket = Bucket::start().await;
    for n in 0..2500 {
        bucket.put(&format!("d/{n:05}"), b"x");
    }
    let etag = bucket.put("d/zz", b"seven..");
    bucket.put("e/f/g", b"");
    let ufs = bucket.ufs();
    bucket.s3.reset_stats();

    let found = pages(&ufs, "d/", ListMode::Directory).await;
    assert_eq!(found.iter().map(|page| page.objects.len()).collect::<Vec<_>>(), [1000, 1000, 501]);
    let last = &found[2].objects[500];
    assert_eq!((last.key.as_str(), last.size, last.etag.as_str()), ("d/zz", 7, etag.as_str()));
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos();
    assert!((now as i64 - last.mtime_ns).abs() < 600_000_000_000, "{}", last.mtime_ns);
    assert_eq!(bucket.s3.stats().count(Kind::List), 3);

    let all = keys(&ufs, "", ListMode::Recursive).await;
    assert_eq!(all.len(), 2502);
    assert!(all.is_sorted());
    assert_eq!(bucket.s3.stats().count(Kind::List), 6);

    let top = pages(&ufs, "", ListMode::Directory).await;
    assert_eq!(top.len(), 1);
    assert_eq!(top[0].prefixes, ["d/", "e/"]);
    assert!(top[0].objects.is_empty());
    assert_eq!(bucket.s3.stats().requests, 7, "nothing but LISTs: {:?}", bucket.s3.stats());
    assert_eq!(ufs.stats().lists, 7);
    bucket.s3.stop().await;
}

/// Keys that name files, however odd, and keys that cannot.
const ODD: [&str; 22] = [
    " leading and trailing ",
    "a b/c d",
    "plus+percent%20%2F%",
    "ünï/çødé/文件.jpg",
    "e\u{301} is not \u{e9}",
    "quote\"apostrophe'amp&lt<gt>",
    "question?hash#semi;colon:at@eq=comma,dollar$",
    "back\\slash|pipe^caret`tick~tilde{brace}[bracket]!*()",
    "line\nfeed",
    "carriage\rreturn",
    "bell\u{7}",
    "tab\tinside",
    "+",
    "marker/",
    "dir/inside",
    "dir/",
    "double//slash",
    "/leading-slash",
    "leading-slash",
    "dot/./dot",
    "dotdot/../dotdot",
    "..",
];

#[tokio::test(flavor = "multi_thread")]
async fn every_key_that_is_listed_can_be_read() {
    let bucket = Bucket::start().await;
    for key in ODD {
        bucket.put(key, format!("content of {key:?}").as_bytes());
    }
    let ufs = bucket.ufs();
    let mut expected: Vec<String> = ODD.iter().map(|key| (*key).to_owned()).collect();
    expected.sort();
    assert_eq!(keys(&ufs, "", ListMode::Recursive).await, expected);

    for page in pages(&ufs, "", ListMode::Recursive).await {
        assert_eq!(page.hidden, 0);
        for object in page.objects {
            let content = format!("content of {:?}", object.key);
            let bytes = ufs.get_bytes(&object.key, &object.etag, 0..object.size).await.unwrap();
            assert_eq!(bytes, content.as_bytes(), "{:?}", object.key);
            let head = ufs.head(&object.key).await.unwrap();
            assert_eq!((head.size, &head.etag), (object.size, &object.etag), "{:?}", object.key);
        }
    }
    let dir = pages(&ufs, "dir/", ListMode::Directory).await;
    assert_eq!(dir[0].objects.iter().map(|object| object.key.as_str()).collect::<Vec<_>>(), ["dir/", "dir/inside"]);
    let top = &pages(&ufs, "", ListMode::Directory).await[0];
    assert!(top.prefixes.contains(&"/".to_owned()) && top.prefixes.contains(&"a b/".to_owned()), "{:?}", top.prefixes);
    bucket.s3.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_range_is_one_get_and_comes_uncopied_in_pieces() {
    let bucket = Bucket::start().await;
    let content: Vec<u8> = (0..5_000_000_u32).map(|n| (n % 251) as u8).collect();
    let etag = bucket.put("big", &content);
    let ufs = bucket.ufs();
    bucket.s3.reset_stats();
    assert_eq!(ufs.get_bytes("big", &etag, 100..3_000_000).await.unwrap(), &content[100..3_000_000]);
    assert_eq!(ufs.get_bytes("big", "", 4_999_999..5_000_000).await.unwrap(), &content[4_999_999..]);
    assert_eq!(ufs.get_bytes("big", &etag, 7..7).await.unwrap().len(), 0);
    let mut stream = ufs.get("big", &etag, 0..5_000_000).await.unwrap();
    let mut received = Vec::new();
    while let Some(piece) = stream.next().await {
        received.extend_from_slice(&piece.unwrap());
    }
    assert!(received == content);
    let stats = bucket.s3.stats();
    assert_eq!((stats.count(Kind::Get), stats.requests), (3, 3));
    assert_eq!(ufs.stats().read_bytes, 2_999_900 + 1 + 5_000_000);
    bucket.s3.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn versions_never_mix() {
    let bucket = Bucket::start().await;
    let old = bucket.put("k", &[1; 1000]);
    let ufs = bucket.ufs();
    assert_eq!(ufs.get_bytes("k", &old, 0..500).await.unwrap(), vec![1; 500]);
    let new = bucket.put("k", &[2; 400]);
    assert!(matches!(ufs.get_bytes("k", &old, 500..1000).await, Err(UfsError::VersionChanged { .. })));
    assert!(matches!(ufs.get_bytes("k", &new, 300..500).await, Err(UfsError::VersionChanged { .. })));
    assert!(matches!(ufs.get_bytes("k", &new, 400..500).await, Err(UfsError::VersionChanged { .. })));
    bucket.s3.store().bucket(BUCKET).unwrap().delete("k", None).unwrap();
    let gone = ufs.get_bytes("k", &new, 0..400).await.unwrap_err();
    assert!(matches!(gone, UfsError::NotFound { .. }), "{gone}");
    assert!(gone.to_string().contains("GET \"k\" in s3://data at http://127.0.0.1:"), "{gone}");
    assert!(matches!(ufs.head("k").await, Err(UfsError::NotFound { .. })));
    assert_eq!(ufs.stats().retries, 0, "refusals are final");
    bucket.s3.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_credentials_and_a_missing_bucket_are_told_apart() {
    let bucket = Bucket::start().await;
    bucket.put("k", b"x");
    bucket.ufs().check().await.unwrap();

    for (name, value) in [("s3.credentials.secret", "hush-hush"), ("s3.credentials.access", "nobody")] {
        let mut options = bucket.options();
        options.insert(name.to_owned(), value.to_owned());
        let ufs = Ufs::open("s3://data", &options, &conf()).unwrap();
        for error in [
            ufs.check().await.unwrap_err(),
            ufs.get_bytes("k", "", 0..1).await.unwrap_err(),
            ufs.head("k").await.unwrap_err(),
        ] {
            assert!(matches!(error, UfsError::Denied { .. }), "{error}");
            let everything = format!("{error} {error:?} {ufs:?}");
            assert!(!everything.contains("hush-hush"), "{everything}");
        }
        assert_eq!(ufs.stats().retries, 0);
    }
    let missing = Ufs::open("s3://no-such-bucket/p", &bucket.options(), &conf()).unwrap();
    for error in [missing.check().await.unwrap_err(), missing.get_bytes("k", "", 0..1).await.unwrap_err()] {
        assert!(matches!(error, UfsError::NoBucket { .. }), "{error}");
        assert!(error.to_string().contains("no-such-bucket"), "{error}");
    }
    bucket.s3.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endpoint_without_a_server_is_unavailable() {
    // Nobody else gets the port, and nobody listens there.
    let port = TcpSocket::new_v4().unwrap();
    port.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let free = port.local_addr().unwrap();
    for endpoint in [format!("http://{free}"), format!("https://{free}"), "http://cavern.invalid:9000".to_owned()] {
        let options = options(&[("s3.endpoint_url", &endpoint), ("s3.anonymous", "true")]);
        let ufs = Ufs::open("s3://data", &options, &hasty()).unwrap();
        let began = Instant::now();
        let error = ufs.check().await.unwrap_err();
        assert!(began.elapsed() < ufs.deadline(0) + Duration::from_secs(1));
        assert!(matches!(error, UfsError::Unavailable { .. } | UfsError::Deadline { .. }), "{error}");
        assert!(error.to_string().contains(&endpoint), "{error}");
        assert_eq!(ufs.stats().retries, 2);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_hangs_ends_in_a_deadline_and_heals() {
    let bucket = Bucket::start().await;
    let etag = bucket.put("k", &[7; 100]);
    let ufs = bucket.ufs_with(&hasty());
    bucket.s3.faults().add(fault(FaultKind::Hang, &[])).unwrap();
    let began = Instant::now();
    let error = ufs.get_bytes("k", &etag, 0..100).await.unwrap_err();
    assert!(matches!(error, UfsError::Deadline { .. }), "{error}");
    assert!(error.to_string().contains("ufs.request_timeout"), "{error}");
    assert!(began.elapsed() < ufs.deadline(100), "{:?}", began.elapsed());
    assert!(began.elapsed() > Duration::from_millis(1400), "three attempts of half a second");
    assert!(matches!(ufs.list("", ListMode::Directory).next_page().await, Err(UfsError::Deadline { .. })));
    bucket.s3.faults().clear();
    assert_eq!(ufs.get_bytes("k", &etag, 0..100).await.unwrap(), vec![7; 100]);
    bucket.s3.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_list_tells_what_is_there_and_what_time_it_is() {
    let bucket = Bucket::start().await;
    let ufs = bucket.ufs();
    let probe = ufs.check().await.unwrap();
    assert_eq!((probe.contents, probe.first), (Contents::Nothing, None));
    bucket.put("b", &[7; 10]);
    bucket.put("c", &[7; 20]);
    let probe = ufs.check().await.unwrap();
    assert_eq!(probe.contents, Contents::Objects);
    assert_eq!(probe.first.map(|object| (object.key, object.size)), Some(("b".to_owned(), 10)));
    // Both have the clock of this host; the store tells whole seconds.
    assert!(probe.behind_s.is_some_and(|behind| (-60..=1).contains(&behind)), "{:?}", probe.behind_s);
    bucket.s3.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn storms_are_weathered_within_the_retries() {
    let bucket = Bucket::start().await;
    let etag = bucket.put("k", &[7; 100_000]);
    let ufs = bucket.ufs();
    for (kind, operations) in [
        (FaultKind::Unavailable, &["GET", "LIST"][..]),
        (FaultKind::Reset, &["GET", "LIST"]),
        (FaultKind::ShortBody, &["GET", "LIST"]),
    ] {
        // Two in a row are survived by two retries.
        bucket.s3.faults().add(FaultRule { count: Some(2), ..fault(kind, operations) }).unwrap();
        assert_eq!(ufs.get_bytes("k", &etag, 0..100_000).await.unwrap(), vec![7; 100_000], "{kind:?}");
        bucket.s3.faults().clear();
        bucket.s3.faults().add(FaultRule { count: Some(2), ..fault(kind, operations) }).unwrap();
        assert_eq!(keys(&ufs, "", ListMode::Recursive).await, ["k"], "{kind:?}");
        bucket.s3.faults().clear();
        // Without an end they are not.
        bucket.s3.faults().add(fault(kind, operations)).unwrap();
        let error = ufs.get_bytes("k", &etag, 0..100_000).await.unwrap_err();
        assert!(error.is_temporary(), "{kind:?}: {error}");
        bucket.s3.faults().clear();
    }
    bucket.s3.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_body_goes_on_with_the_same_version_or_fails() {
    let bucket = Bucket::start().await;
    let old: Vec<u8> = (0..4_000_000_u32).map(|n| (n % 253) as u8).collect();
    let etag = bucket.put("k", &old);
    let ufs = bucket.ufs();
    bucket.s3.faults().add(FaultRule { count: Some(1), ..fault(FaultKind::ShortBody, &["GET"]) }).unwrap();
    bucket.s3.reset_stats();
    assert!(ufs.get_bytes("k", &etag, 0..4_000_000).await.unwrap() == old);
    let stats = bucket.s3.stats();
    assert_eq!(stats.count(Kind::Get), 2);
    assert!(stats.bytes_out < 4_400_000, "the second request asks for the rest only: {}", stats.bytes_out);

    // The same, but another version has come by the time of the second request, and the reader named none.
    bucket.s3.faults().clear();
    bucket.s3.faults().add(FaultRule { count: Some(1), ..fault(FaultKind::ShortBody, &["GET"]) }).unwrap();
    let mut stream = ufs.get("k", "", 0..4_000_000).await.unwrap();
    let first = stream.next().await.unwrap().unwrap();
    bucket.put("k", &vec![9; 4_000_000]);
    let mut received = first.to_vec();
    let error = loop {
        match stream.next().await.expect("an error comes before the end") {
            Ok(piece) => received.extend_from_slice(&piece),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, UfsError::VersionChanged { .. }), "{error}");
    assert!(received == old[..received.len()], "only bytes of the first version");
    assert!(stream.next().await.is_none());
    bucket.s3.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_limit_of_requests_in_flight_is_shared_by_all_handles() {
    let bucket = Bucket::start().await;
    let etag = bucket.put("k", &[1; 10]);
    let (mut patient, mut hasty) = (conf(), hasty());
    (patient.concurrency, hasty.concurrency) = (1, 1);
    let (one, two) = (bucket.ufs_with(&patient), bucket.ufs_with(&hasty));
    let held = one.get("k", &etag, 0..10).await.unwrap();
    let error = two.get_bytes("k", &etag, 0..10).await.unwrap_err();
    assert!(error.to_string().contains("ufs.concurrency"), "{error}");
    drop(held);
    assert_eq!(two.get_bytes("k", &etag, 0..10).await.unwrap().len(), 10);
    assert_eq!(one.stats(), two.stats());
    bucket.s3.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_small_gets_run_side_by_side() {
    let bucket = Bucket::start().await;
    let content = vec![5; 50_000];
    let objects: Vec<(String, String)> =
        (0..64).map(|n| format!("img/{n}.jpg")).map(|key| (key.clone(), bucket.put(&key, &content))).collect();
    let ufs = bucket.ufs();
    bucket.s3.reset_stats();
    let rounds = 4;
    let began = Instant::now();
    let reads = (0..rounds).flat_map(|_| objects.iter()).map(|(key, etag)| ufs.get_bytes(key, etag, 0..50_000));
    let done = futures::stream::iter(reads).buffer_unordered(32).map(|bytes| bytes.unwrap().len()).collect::<Vec<_>>();
    let done = done.await;
    println!("{} GETs of 50 KB in {:?}", done.len(), began.elapsed());
    assert!(done.iter().all(|length| *length == 50_000));
    let stats = bucket.s3.stats();
    assert_eq!((stats.count(Kind::Get), stats.requests), (64 * rounds, 64 * rounds));
    bucket.s3.stop().await;
}

#[test]
fn a_store_has_one_name() {
    let endpoint = |url: &str| {
        let options = options(&[("s3.endpoint_url", url), ("s3.anonymous", "true")]);
        Ufs::open("s3://data/a/b", &options, &conf()).unwrap()
    };
    assert_eq!(endpoint("http://Host:80/").store_id(), "http://host/data");
    assert_eq!(endpoint("http://host").store_id(), endpoint("HTTP://HOST:80").store_id());
    assert_eq!(endpoint("http://host:9000").store_id(), "http://host:9000/data");
    assert_eq!(endpoint("http://host").prefix(), "a/b/");
    let aws = |region: &str| {
        let options = options(&[("s3.region_name", region), ("s3.anonymous", "true")]);
        Ufs::open("s3://data", &options, &conf()).unwrap()
    };
    assert_eq!(aws("eu-west-1").store_id(), "https://s3.amazonaws.com/data");
    assert_eq!(aws("eu-west-1").store_id(), aws("us-east-2").store_id());
}
