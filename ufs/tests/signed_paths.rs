//! Stores that verify the signature over the path as it was sent, as most that are not AWS do.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should stop there")]

mod support;

use bytes::Bytes;
use cavern_ufs::{ListMode, Metadata, Precondition};
use support::conf;
use support::fake::Fake;

/// What `encodeURIComponent`, browsers and SigV4 spell differently, and all else that may be in a key.
const KEYS: [&str; 10] = [
    "!'()*/it's (1)!*.jpg",
    "a+b %20%2F%zz",
    " two  spaces ",
    "\u{e9}/\u{65e5}\u{672c}/\u{1f980}",
    "?#&=;:@$,/[]{}|\\^`\"<>~-._",
    "a//b/",
    "/a",
    "a/../b/./c",
    "line\n\u{7f}\u{1}\tend",
    "plain/key-1_2.~",
];

#[tokio::test(flavor = "multi_thread")]
async fn every_key_is_sent_as_it_is_signed() {
    let store = Fake::start().await;
    let ufs = store.ufs(&conf());
    let (none, body) = (Metadata::new(), Bytes::from_static(b"body"));
    for key in KEYS {
        let etag = ufs.put(key, &body, &none, Precondition::Nothing).await.unwrap();
        let there = ufs.head(key).await.unwrap();
        assert_eq!((there.size, &there.etag, there.mtime_ns), (4, &etag, 1_767_323_045_000_000_000), "{key:?}");
        assert_eq!(ufs.get_bytes(key, &etag, 1..3).await.unwrap(), "od", "{key:?}");
        ufs.list(key, ListMode::Directory).next_page().await.unwrap();
        let described = ufs.describe(&there, &[("mode".to_owned(), "33188".to_owned())].into()).await.unwrap();
        let copied = ufs.copy(&ufs.head(key).await.unwrap(), &format!("copy of {key}")).await.unwrap();
        assert_eq!(ufs.head(&format!("copy of {key}")).await.unwrap().etag, copied);
        let upload = ufs.begin_multipart(key, &none).await.unwrap();
        let parts =
            [upload.part(1, &body).await.unwrap(), upload.copy(&ufs.head(key).await.unwrap()).await.unwrap().remove(0)];
        let etag = upload.complete(&parts, Precondition::Version(&described)).await.unwrap();
        ufs.begin_multipart(key, &none).await.unwrap().abort().await.unwrap();
        assert_eq!(store.state.lock().objects[key].body, b"bodybody", "{key:?}");
        ufs.delete(key, Precondition::Version(&etag)).await.unwrap();
        assert!(!store.state.lock().objects.contains_key(key), "{key:?}");
    }
    assert_eq!(store.state.lock().mismatches, [""; 0]);
}
