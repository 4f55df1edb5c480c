//! What the store says: JSON of objects and listings.

use std::collections::BTreeMap;

use reqsign_core::time::Timestamp;
use serde::Deserialize;
use serde_json::Value;

use crate::object::ObjectMeta;
use crate::s3::listing::{keep, nanoseconds};
use crate::store::StorePage;

/// The header of an answer that names the version.
pub(super) const GENERATION: &str = "x-goog-generation";

/// An object, by the fields that are asked for. Its name must be there: else a page of `{}` would take forty times the
/// memory that it has bytes.
#[derive(Deserialize)]
struct Object {
    name: String,
    #[serde(default)]
    size: String,
    #[serde(default)]
    generation: String,
    #[serde(default)]
    updated: String,
    #[serde(default)]
    metadata: BTreeMap<String, String>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Page {
    next_page_token: String,
    prefixes: Vec<String>,
    items: Vec<Object>,
}

/// The object that a document describes.
pub(super) fn object(document: &[u8]) -> Option<ObjectMeta> {
    described(serde_json::from_slice(document).ok()?)
}

/// The generation of the object that a document describes; `of` leads to it.
pub(super) fn generation(document: &[u8], of: &str) -> Option<String> {
    let answer: Value = serde_json::from_slice(document).ok()?;
    Some(answer.pointer(of)?.get("generation")?.as_str()?.to_owned())
}

/// A page of a listing. The error says what is wrong with the document.
pub(super) fn page(document: &[u8]) -> Result<StorePage, String> {
    // An array would be taken for the fields in their order.
    if !document.trim_ascii_start().starts_with(b"{") {
        return Err("the answer to a listing is no JSON object".to_owned());
    }
    let listed: Page = serde_json::from_slice(document).map_err(|error| {
        format!("the answer to a listing is broken at line {}, column {}", error.line(), error.column())
    })?;
    let mut page = StorePage::default();
    for item in listed.items {
        page.page.hidden += keep(&mut page.page.objects, described(item));
    }
    page.page.prefixes = listed.prefixes;
    page.next = Some(listed.next_page_token).filter(|token| !token.is_empty());
    Ok(page)
}

/// `None` where there is no length that a file can have, or no version.
fn described(object: Object) -> Option<ObjectMeta> {
    let size = object.size.parse::<i64>().ok().and_then(|size| u64::try_from(size).ok())?;
    let time = object.updated.parse::<Timestamp>();
    let metadata = object.metadata.into_iter().map(|(name, value)| (name.to_ascii_lowercase(), value));
    Some(ObjectMeta {
        key: object.name,
        size,
        etag: Some(object.generation).filter(|generation| !generation.is_empty())?,
        mtime_ns: time.map_or(0, nanoseconds),
        metadata: metadata.collect(),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_page_is_read() {
        let document = br#"{"kind":"storage#objects","nextPageToken":"tok","prefixes":["d/","e/"],"items":[
            {"name":"a \u0007/b","size":"7","generation":"1700000000000001","updated":"2026-01-02T03:04:05.678Z",
             "metadata":{"Mode":"33188"}},
            {"name":"b","size":"-1","generation":"1"}, {"name":"c","size":"1"}]}"#;
        let StorePage { page, next, .. } = page(document).unwrap();
        assert_eq!(next.as_deref(), Some("tok"));
        assert_eq!((page.prefixes, page.hidden), (vec!["d/".to_owned(), "e/".to_owned()], 2));
        let expected = ObjectMeta {
            key: "a \u{7}/b".to_owned(),
            size: 7,
            etag: "1700000000000001".to_owned(),
            mtime_ns: 1_767_323_045_678_000_000,
            metadata: [("mode".to_owned(), "33188".to_owned())].into(),
        };
        assert_eq!(page.objects, [expected]);
    }

    #[test]
    fn an_empty_bucket_is_no_error_and_what_is_no_listing_is_one() {
        let empty = page(b"{\"kind\":\"storage#objects\"}").unwrap();
        assert!(empty.page.objects.is_empty() && empty.next.is_none());
        for document in ["", "<html>", "[]", "7", "{", "{\"items\":[7]}", "{\"items\":[{}]}"] {
            assert!(page(document.as_bytes()).is_err(), "{document:?}");
        }
        assert_eq!(generation(b"{\"resource\":{\"generation\":\"5\"}}", "/resource").as_deref(), Some("5"));
        assert_eq!(generation(b"{\"generation\":\"6\"}", "").as_deref(), Some("6"));
        assert_eq!(generation(b"{\"generation\":6}", ""), None);
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = page(&bytes);
            let _ = object(&bytes);
        }
    }
}
