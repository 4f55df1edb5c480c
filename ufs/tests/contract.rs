//! Every store keeps the same promises. Those of others are asked where they are installed (`bin/test --long=stores`).

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should stop there")]

mod support;

use bytes::Bytes;
use cavern_conf::schema;
use cavern_ufs::{ListMode, Metadata, ObjectMeta, Precondition, Ufs, UfsError, named};
use support::contract::{self, Abort};
use support::gcs::Gcs;
use support::outside::Outside;
use support::{Bucket, conf, keys, options};

/// Azurite's account, which everybody knows.
const ACCOUNT: &str = "devstoreaccount1";
const KEY: &str = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";

fn azurite(store: &Outside, key: &str) -> Ufs {
    let options = options(&[
        ("azblob.account", ACCOUNT),
        ("azblob.endpoint_url", &store.endpoint),
        ("azblob.credentials.key", key),
    ]);
    Ufs::open("azblob://data", &options, &conf()).unwrap()
}

#[tokio::test]
async fn a_bucket_in_memory_keeps_the_contract() {
    let ufs = Ufs::open("memory://contract", &options(&[]), &conf()).unwrap();
    contract::keeps(&ufs, Abort::TakesParts).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bucket_of_s3_keeps_the_contract() {
    let bucket = Bucket::start().await;
    contract::keeps(&bucket.ufs(), Abort::TakesParts).await;
    bucket.s3.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bucket_of_google_keeps_the_contract() {
    let store = Gcs::start().await;
    let ufs = store.ufs(&conf());
    contract::keeps(&ufs, Abort::TakesParts).await;
    assert_eq!(store.state.lock().tokens, 1, "one token for all");
    assert_eq!(ufs.store_id(), format!("gs+{}/data", store.url));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_token_that_google_refuses_is_told_with_who_gave_it() {
    let store = Gcs::start().await;
    let ufs = store.ufs(&conf());
    ufs.check().await.unwrap();
    // One that has just been fetched is not replaced: who asks is not let in.
    store.state.lock().are_tokens_refused = true;
    let refused = ufs.check().await.unwrap_err().to_string();
    assert!(refused.contains("401") && refused.contains("gs.credentials.key"), "{refused}");
    assert!(!refused.contains("token-1") && !refused.contains("PRIVATE"), "{refused}");
    assert_eq!(store.state.lock().tokens, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_to_google_ends_only_over_what_it_expects() {
    let store = Gcs::start().await;
    let ufs = store.ufs(&conf());
    let body = Bytes::from_static(b"body");
    let upload = ufs.begin_multipart("k", &named(Metadata::new())).await.unwrap();
    let part = upload.part(1, &body).await.unwrap();
    let foreign = ufs.put("k", &body, &Metadata::new(), Precondition::Nothing).await.unwrap();
    let late = upload.complete(std::slice::from_ref(&part), Precondition::Nothing).await;
    assert!(matches!(late, Err(UfsError::VersionChanged { .. })), "{late:?}");
    assert_eq!(ufs.head("k").await.unwrap().etag, foreign);
    // Asked for again, as after answers that were lost, it is the same.
    for _ in 0..2 {
        let made = upload.complete(std::slice::from_ref(&part), Precondition::Version(&foreign)).await.unwrap();
        assert_eq!(ufs.head("k").await.unwrap().etag, made);
    }
    // What is large is copied in several requests.
    let large = Bytes::from(vec![1; (1 << 20) + 1]);
    ufs.put("large", &large, &Metadata::new(), Precondition::Nothing).await.unwrap();
    let copied = ufs.copy(&ufs.head("large").await.unwrap(), "copy").await.unwrap();
    assert_eq!(ufs.get_bytes("copy", &copied, 0..large.len() as u64).await.unwrap(), large);
    // One that would be copied in parts elsewhere is so too; the store need not have so many bytes.
    let there = ufs.head("large").await.unwrap();
    store.state.lock().asked.clear();
    let whole = ufs.copy(&ObjectMeta { size: (256 << 20) + 5, ..there }, "whole").await.unwrap();
    assert_eq!(ufs.head("whole").await.unwrap().etag, whole);
    let asked = store.state.lock().asked.clone();
    assert!(asked.iter().any(|line| line.contains("rewriteTo") && line.contains("rewriteToken=more")), "{asked:?}");
    assert!(asked.iter().all(|line| !line.contains("upload")), "{asked:?}");
    for key in ["", ".", ".."] {
        let refused = ufs.delete(key, Precondition::Anything).await;
        assert!(matches!(refused, Err(UfsError::Rejected { .. })), "{key:?}: {refused:?}");
    }
}

#[tokio::test]
async fn an_endpoint_of_others_gets_nothing_that_a_process_finds() {
    let uris = ["gs://data", "azblob://data"];
    let given = [("gs.endpoint_url", "http://127.0.0.1:1"), ("azblob.endpoint_url", "http://127.0.0.1:1")];
    for (uri, endpoint) in uris.into_iter().zip(given) {
        let mut options = options(&[endpoint]);
        if uri.starts_with("azblob") {
            options.insert("azblob.account".to_owned(), ACCOUNT.to_owned());
        }
        let refused = Ufs::open(uri, &options, &conf()).unwrap_err();
        assert!(matches!(refused, UfsError::Invalid { .. }), "{refused}");
        assert!(
            refused.to_string().contains(endpoint.0) && refused.to_string().contains("goes nowhere else"),
            "{refused}"
        );
    }
}

#[tokio::test]
async fn the_credentials_of_an_instance_need_leave() {
    for (uri, own) in [
        ("gs://data", options(&[("gs.credentials.source", "instance")])),
        ("azblob://data", options(&[("azblob.account", ACCOUNT), ("azblob.credentials.source", "instance")])),
    ] {
        let refused = Ufs::open(uri, &own, &conf()).unwrap().check().await.unwrap_err();
        assert!(matches!(refused, UfsError::NotAllowed { .. }), "{refused}");
        let (scheme, _) = uri.split_once(':').unwrap();
        let message = refused.to_string();
        assert!(message.contains(&format!("{scheme}.credentials.source=instance")), "{message}");
        assert!(message.contains("ufs.instance_credentials = true"), "{message}");
    }
}

#[tokio::test]
async fn a_store_of_this_host_needs_leave() {
    for (uri, own) in [
        ("gs://data", options(&[("gs.endpoint_url", "http://127.0.0.1:1"), ("gs.anonymous", "true")])),
        (
            "azblob://data",
            options(&[
                ("azblob.account", ACCOUNT),
                ("azblob.endpoint_url", "http://127.0.0.1:1"),
                ("azblob.anonymous", "true"),
            ]),
        ),
    ] {
        let nowhere = schema::Ufs { endpoints: vec![], ..conf() };
        let refused = Ufs::open(uri, &own, &nowhere).unwrap().check().await.unwrap_err();
        assert!(matches!(refused, UfsError::NotAllowed { .. }), "{refused}");
        assert!(refused.to_string().contains("add \"127.0.0.1:1\" to ufs.endpoints"), "{refused}");
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Azurite: bin/test --long=stores"]
async fn a_container_of_azurite_keeps_the_contract() {
    let store = Outside::serve("azurite", "data");
    let ufs = azurite(&store, KEY);
    contract::keeps(&ufs, Abort::LeavesParts).await;
    for key in ["a/../b", "dot.", "a\\b", "bell\u{7}"] {
        let refused = ufs.put(key, &Bytes::new(), &Metadata::new(), Precondition::Nothing).await;
        assert!(matches!(refused, Err(UfsError::Rejected { .. })), "{key:?}: {refused:?}");
    }
    // The upload that ends first takes the blocks of others away.
    let body = Bytes::from_static(b"body");
    let [one, other] = [
        ufs.begin_multipart("two", &Metadata::new()).await.unwrap(),
        ufs.begin_multipart("two", &Metadata::new()).await.unwrap(),
    ];
    let parts = [one.part(1, &body).await.unwrap(), other.part(1, &body).await.unwrap()];
    one.complete(&parts[..1], Precondition::Nothing).await.unwrap();
    let gone = other.complete(&parts[1..], Precondition::Anything).await;
    assert!(matches!(gone, Err(UfsError::NotFound { .. })), "{gone:?}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Azurite: bin/test --long=stores"]
async fn what_azurite_refuses_is_told_with_what_to_check() {
    let store = Outside::serve("azurite", "data");
    let wrong = azurite(&store, "aHVzaA==").check().await.unwrap_err();
    assert!(matches!(wrong, UfsError::Denied { .. }), "{wrong}");
    assert!(
        wrong.to_string().contains("check azblob.credentials.key") && !wrong.to_string().contains("aHVz"),
        "{wrong}"
    );
    let options = options(&[
        ("azblob.account", ACCOUNT),
        ("azblob.endpoint_url", &store.endpoint),
        ("azblob.credentials.key", KEY),
    ]);
    let none = Ufs::open("azblob://none", &options, &conf()).unwrap().check().await.unwrap_err();
    assert!(matches!(none, UfsError::NoBucket { .. }) && none.to_string().contains("azblob.account"), "{none}");
}

/// It knows conditions of insertions only, and no uploads in parts.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs fake-gcs-server: bin/test --long=stores"]
async fn a_bucket_of_fake_gcs_server_is_read_and_written() {
    let store = Outside::serve("fake-gcs-server", "data");
    let options = options(&[("gs.endpoint_url", &store.endpoint), ("gs.anonymous", "true")]);
    let ufs = Ufs::open("gs://data", &options, &conf()).unwrap();
    ufs.check().await.unwrap();
    contract::nothing_there(&ufs).await;
    contract::reads(&ufs).await;
    let body = Bytes::from_static(b"body");
    let kept = contract::metadata(&[("mode", "33188")]);
    let made = ufs.put("d/x", &body, &kept, Precondition::Nothing).await.unwrap();
    let again = ufs.put("d/x", &body, &kept, Precondition::Nothing).await;
    assert!(matches!(again, Err(UfsError::VersionChanged { .. })), "{again:?}");
    let there = ufs.head("d/x").await.unwrap();
    assert_eq!((&there.etag, &there.metadata), (&made, &kept));
    let copied = ufs.copy(&there, "d/y z+%20\u{e9}").await.unwrap();
    assert_eq!(ufs.get_bytes("d/y z+%20\u{e9}", &copied, 0..4).await.unwrap(), body);
    assert_eq!(keys(&ufs, "d/", ListMode::Directory).await, ["d/x", "d/y z+%20\u{e9}"]);
    ufs.delete("d/x", Precondition::Anything).await.unwrap();
    assert_eq!(keys(&ufs, "", ListMode::Recursive).await, ["d/y z+%20\u{e9}"]);
}
