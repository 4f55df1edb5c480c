//! What every store promises, whatever its kind: one suite for all of them.

use std::collections::BTreeSet;

use bytes::Bytes;
use cavern_ufs::{ListMode, Metadata, Precondition, Ufs, UfsError, WRITE_NAME};
use futures::{StreamExt, TryStreamExt, stream};

use super::{keys, pages};

/// What becomes of the parts of an upload that is given up.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Abort {
    TakesParts,
    /// The store takes them away by itself, later.
    LeavesParts,
}

/// Requests on their way at a time.
const AT_A_TIME: usize = 32;

/// Keys that name files, however odd.
const ODD: [&str; 14] = [
    " leading and trailing ",
    "%2F",
    "+",
    "..not-parent",
    "/leading-slash",
    "a//b",
    "dir/",
    "e\u{301} is not \u{e9}",
    "plus+percent%20%2F%",
    "question?hash#semi;colon:at@eq=comma,dollar$",
    "quote\"apostrophe'amp&lt<gt>",
    "dot.in.it",
    "|pipe^caret`tick~tilde{brace}[bracket]!*()",
    "\u{fc}n\u{ef}/\u{e7}\u{f8}d\u{e9}/\u{6587}\u{4ef6}.jpg",
];

pub fn metadata(pairs: &[(&str, &str)]) -> Metadata {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

/// All of it, on an empty store.
pub async fn keeps(ufs: &Ufs, abort: Abort) {
    ufs.check().await.unwrap();
    nothing_there(ufs).await;
    odd_keys(ufs).await;
    listings(ufs).await;
    reads(ufs).await;
    descriptions(ufs).await;
    writes(ufs, abort).await;
}

/// Order, pages, both modes, and that a listing tells what a HEAD does.
pub async fn listings(ufs: &Ufs) {
    let names = (0..1040).map(|n| if n % 10 == 0 { format!("l/d{n:04}/x") } else { format!("l/f{n:04}-") });
    let expected: BTreeSet<String> = names.chain(["l/f0001/y".to_owned(), "l/f0001-/z".to_owned()]).collect();
    let put = async |key: String| {
        let etag = ufs.put(&key, &Bytes::from_static(b"x"), &Metadata::new(), Precondition::Nothing).await?;
        Ok::<_, UfsError>((key, etag))
    };
    let puts: Vec<_> =
        stream::iter(expected.iter().cloned().map(put)).buffer_unordered(AT_A_TIME).try_collect().await.unwrap();
    assert_eq!(keys(ufs, "l/", ListMode::Recursive).await, expected.iter().cloned().collect::<Vec<_>>());
    let found = pages(ufs, "l/", ListMode::Directory).await;
    assert!(found.iter().all(|page| page.objects.len() + page.prefixes.len() <= 1000 && page.hidden == 0));
    let found: Vec<_> = found.into_iter().filter(|page| !page.restarts).collect();
    let prefixes: BTreeSet<String> = found.iter().flat_map(|page| page.prefixes.clone()).collect();
    assert_eq!(prefixes.len(), 106, "{:?}", prefixes.first());
    assert!(["l/d0000/", "l/f0001/", "l/f0001-/"].iter().all(|prefix| prefixes.contains(*prefix)));
    let objects: Vec<_> = found.into_iter().flat_map(|page| page.objects).collect();
    assert!(objects.is_sorted_by(|one, other| one.key < other.key) && objects.len() == 936, "{}", objects.len());
    for object in &objects {
        let (_, etag) = puts.iter().find(|(key, _)| *key == object.key).unwrap();
        assert_eq!((object.size, &object.etag), (1, etag), "{}", object.key);
    }
    let head = ufs.head(&objects[0].key).await.unwrap();
    assert_eq!(
        (&head.etag, head.size, head.mtime_ns / 1_000_000_000),
        (&objects[0].etag, 1, objects[0].mtime_ns / 1_000_000_000)
    );
    assert!(keys(ufs, "l/f0001/", ListMode::Directory).await == ["l/f0001/y"]);
    let deleted =
        stream::iter(&expected).map(|key| ufs.delete(key, Precondition::Anything)).buffer_unordered(AT_A_TIME);
    deleted.try_collect::<Vec<()>>().await.unwrap();
    assert!(keys(ufs, "l/", ListMode::Recursive).await.is_empty());
}

/// Ranges, and that a read is of the version that it names.
pub async fn reads(ufs: &Ufs) {
    let content: Bytes = (0..3_000_000_u32).map(|at| (at ^ (at >> 9)) as u8).collect();
    let put = async |body: &Bytes| ufs.put("r", body, &Metadata::new(), Precondition::Anything).await.unwrap();
    let first = put(&content).await;
    for range in [0..1, 0..3_000_000, 2_999_999..3_000_000, 7..1_500_000, 5..5] {
        let bytes = ufs.get_bytes("r", &first, range.clone()).await.unwrap();
        assert!(bytes == content[range.start as usize..range.end as usize], "{range:?}");
    }
    for range in [0..3_000_001, 2_999_999..3_000_001, 3_000_000..3_000_001] {
        let beyond = ufs.get_bytes("r", &first, range.clone()).await;
        assert!(matches!(beyond, Err(UfsError::VersionChanged { .. })), "{range:?}: {beyond:?}");
    }
    // Replaced by as many bytes.
    let second = put(&content.slice(..2_999_999).iter().copied().chain([7]).collect()).await;
    assert_ne!(first, second);
    let outdated = ufs.get_bytes("r", &first, 0..10).await;
    assert!(matches!(outdated, Err(UfsError::VersionChanged { .. })), "{outdated:?}");
    assert_eq!(ufs.get_bytes("r", &second, 2_999_999..3_000_000).await.unwrap(), &[7_u8][..]);
    assert_eq!(ufs.get_bytes("r", "", 0..10).await.unwrap(), &content[..10]);
    ufs.delete("r", Precondition::Version(&second)).await.unwrap();
    assert!(matches!(
        ufs.get_bytes("r", &second, 0..10).await,
        Err(UfsError::NotFound { .. } | UfsError::VersionChanged { .. })
    ));
    // Nothing at all is an object, too.
    let empty = put(&Bytes::new()).await;
    assert_eq!(ufs.head("r").await.unwrap().size, 0);
    ufs.delete("r", Precondition::Version(&empty)).await.unwrap();
}

/// What is asked for and is not there.
pub async fn nothing_there(ufs: &Ufs) {
    for key in ["none", "none/", "none/below"] {
        assert!(matches!(ufs.head(key).await, Err(UfsError::NotFound { .. })), "{key}");
        assert!(matches!(ufs.get_bytes(key, "", 0..1).await, Err(UfsError::NotFound { .. })), "{key}");
        ufs.delete(key, Precondition::Anything).await.unwrap();
    }
    assert!(keys(ufs, "none/", ListMode::Recursive).await.is_empty());
}

/// A key that was written is listed, read and described byte for byte.
pub async fn odd_keys(ufs: &Ufs) {
    for key in ODD {
        let body = Bytes::from(format!("content of {key:?}"));
        ufs.put(key, &body, &Metadata::new(), Precondition::Nothing).await.unwrap();
    }
    let expected: BTreeSet<String> = ODD.iter().map(|key| (*key).to_owned()).collect();
    assert_eq!(keys(ufs, "", ListMode::Recursive).await, expected.into_iter().collect::<Vec<_>>());
    for page in pages(ufs, "", ListMode::Recursive).await {
        assert_eq!(page.hidden, 0);
        for object in page.objects {
            let bytes = ufs.get_bytes(&object.key, &object.etag, 0..object.size).await.unwrap();
            assert_eq!(bytes, format!("content of {:?}", object.key));
            assert_eq!(ufs.head(&object.key).await.unwrap().etag, object.etag, "{:?}", object.key);
            ufs.delete(&object.key, Precondition::Version(&object.etag)).await.unwrap();
        }
    }
    assert!(keys(ufs, "", ListMode::Recursive).await.is_empty());
}

/// What is kept beside the bytes: written, copied, and changed.
pub async fn descriptions(ufs: &Ufs) {
    let kept =
        metadata(&[("mode", "33188"), ("mtime", "1.000000002"), (WRITE_NAME, "w"), ("xattr", "%7B%22a+b%22%7D")]);
    ufs.put("m", &Bytes::from_static(b"body"), &kept, Precondition::Nothing).await.unwrap();
    let there = ufs.head("m").await.unwrap();
    assert_eq!(there.metadata, kept);
    let copied = ufs.copy(&there, "copy of m").await.unwrap();
    let copy = ufs.head("copy of m").await.unwrap();
    assert_eq!((&copy.etag, &copy.metadata), (&copied, &kept));
    let described = ufs.describe(&there, &metadata(&[("mode", "33152")])).await.unwrap();
    let there_now = ufs.head("m").await.unwrap();
    assert_eq!((&there_now.etag, there_now.metadata["mode"].as_str()), (&described, "33152"));
    assert!(!there_now.metadata.contains_key("mtime"), "{:?}", there_now.metadata);
    assert_eq!(ufs.get_bytes("m", &described, 0..4).await.unwrap(), "body");
    // With other bytes: the version of some stores is named by these alone.
    let other = Bytes::from_static(b"other");
    ufs.put("m", &other, &Metadata::new(), Precondition::Version(&described)).await.unwrap();
    let outdated = ufs.describe(&there, &metadata(&[("mode", "33152")])).await;
    assert!(matches!(outdated, Err(UfsError::VersionChanged { .. } | UfsError::NotFound { .. })), "{outdated:?}");
    let left = ufs.head("m").await.unwrap();
    assert!(left.size == 5 && left.metadata.is_empty(), "{left:?}");
    for key in ["m", "copy of m"] {
        ufs.delete(key, Precondition::Anything).await.unwrap();
    }
}

/// Writes, their conditions, copies and uploads in parts. Leaves an object `k`.
pub async fn writes(ufs: &Ufs, abort: Abort) {
    let none = Metadata::new();
    let put =
        async |body: &'static str, replaces: Precondition<'_>| ufs.put("k", &Bytes::from(body), &none, replaces).await;
    assert!(matches!(
        put("x", Precondition::Version("123")).await,
        Err(UfsError::NotFound { .. } | UfsError::VersionChanged { .. })
    ));
    let one = put("one", Precondition::Nothing).await.unwrap();
    assert_eq!(ufs.head("k").await.unwrap().etag, one);
    assert!(matches!(put("two", Precondition::Nothing).await, Err(UfsError::VersionChanged { .. })));
    let two = put("two", Precondition::Version(&one)).await.unwrap();
    assert!(matches!(put("three", Precondition::Version(&one)).await, Err(UfsError::VersionChanged { .. })));
    assert_eq!(ufs.get_bytes("k", &two, 0..3).await.unwrap(), "two");
    put("four", Precondition::Anything).await.unwrap();

    let from = ufs.head("k").await.unwrap();
    let copy = ufs.copy(&from, "other/k +%20\u{e9}").await.unwrap();
    assert_eq!(ufs.get_bytes("other/k +%20\u{e9}", &copy, 0..4).await.unwrap(), "four");
    put("five", Precondition::Anything).await.unwrap();
    let gone = ufs.copy(&from, "never").await;
    assert!(matches!(gone, Err(UfsError::NotFound { .. } | UfsError::VersionChanged { .. })));
    assert!(matches!(ufs.head("never").await, Err(UfsError::NotFound { .. })));
    ufs.delete("other/k +%20\u{e9}", Precondition::Anything).await.unwrap();
    put("four", Precondition::Anything).await.unwrap();

    let upload = ufs.begin_multipart("large", &metadata(&[("mode", "33188")])).await.unwrap();
    let parts = [Bytes::from(vec![1; 5 << 20]), Bytes::from_static(b"end")];
    // Parts arrive in any order.
    let second = upload.part(2, &parts[1]).await.unwrap();
    let first = upload.part(1, &parts[0]).await.unwrap();
    assert!(matches!(ufs.head("large").await, Err(UfsError::NotFound { .. })));
    let etag = upload.complete(&[first, second], Precondition::Nothing).await.unwrap();
    let there = ufs.head("large").await.unwrap();
    assert_eq!((there.etag, there.size), (etag.clone(), (5 << 20) + 3));
    let late = ufs.begin_multipart("large", &none).await.unwrap();
    let part = late.part(1, &parts[1]).await.unwrap();
    assert!(matches!(late.complete(&[part], Precondition::Nothing).await, Err(UfsError::VersionChanged { .. })));
    late.abort().await.unwrap();
    late.abort().await.unwrap();
    assert_eq!(late.part(1, &parts[1]).await.is_err(), abort == Abort::TakesParts);
    assert_eq!(ufs.head("large").await.unwrap().etag, etag);

    assert!(matches!(ufs.delete("large", Precondition::Version(&two)).await, Err(UfsError::VersionChanged { .. })));
    ufs.delete("large", Precondition::Version(&etag)).await.unwrap();
    ufs.delete("large", Precondition::Anything).await.unwrap();
    ufs.delete("large", Precondition::Version(&etag)).await.unwrap();
    assert!(matches!(ufs.head("large").await, Err(UfsError::NotFound { .. })));
}
