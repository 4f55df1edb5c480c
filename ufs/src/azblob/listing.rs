//! Listings of a container: the query, and the document that answers it.

use percent_encoding::utf8_percent_encode;
use reqsign_core::time::Timestamp;

use crate::object::{ListMode, ObjectMeta};
use crate::s3::listing::{QUERY, Text, keep, length, nanoseconds, unquoted, walk};
use crate::store::{ListRequest, StorePage};

/// The query of List Blobs.
pub(super) fn query(request: &ListRequest<'_>) -> String {
    let mut query = format!("restype=container&comp=list&maxresults={}", request.limit);
    let delimiter = (request.mode == ListMode::Directory).then_some("/");
    let prefix = Some(request.prefix).filter(|prefix| !prefix.is_empty());
    for (name, value) in [("delimiter", delimiter), ("marker", request.token), ("prefix", prefix)] {
        if let Some(value) = value {
            query.push_str(&format!("&{name}={}", utf8_percent_encode(value, QUERY)));
        }
    }
    query
}

#[derive(Default)]
struct Blob {
    name: Text,
    size: Option<u64>,
    modified: Text,
    etag: Text,
    /// It is an entry of a hierarchical namespace, which has directories.
    is_directory: bool,
}

/// Reads the answer to [`query`]. The error says what is wrong with the document.
pub(super) fn parse(document: &[u8]) -> Result<StorePage, String> {
    let mut answer = StorePage::default();
    let page = &mut answer.page;
    let (mut has_root, mut next, mut blob, mut prefix) = (false, None, Blob::default(), None);
    walk(document, |path, text| {
        let ["EnumerationResults", path @ ..] = path else { return };
        let owned = || text.map(str::to_owned);
        match *path {
            [] => has_root = true,
            ["NextMarker"] => next = Some(owned()),
            ["Blobs", "Blob", "Name"] => blob.name = owned(),
            ["Blobs", "Blob", "Properties", "Content-Length"] => blob.size = text.and_then(length),
            ["Blobs", "Blob", "Properties", "Last-Modified"] => blob.modified = owned(),
            ["Blobs", "Blob", "Properties", "Etag"] => blob.etag = owned(),
            ["Blobs", "Blob", "Properties", "ResourceType"] => blob.is_directory = text == Some("directory"),
            ["Blobs", "Blob"] => match std::mem::take(&mut blob) {
                Blob { is_directory: true, .. } => {}
                file => page.hidden += keep(&mut page.objects, described(file)),
            },
            ["Blobs", "BlobPrefix", "Name"] => prefix = owned(),
            ["Blobs", "BlobPrefix"] => page.hidden += keep(&mut page.prefixes, prefix.take()),
            _ => {}
        }
    })?;
    if !has_root {
        return Err("the answer to a listing is no EnumerationResults".to_owned());
    }
    // What cannot be read must not be taken for the end.
    let next = next.map(|text| text.ok_or("the marker of the next page cannot be read")).transpose()?;
    answer.next = next.filter(|next| !next.is_empty());
    Ok(answer)
}

fn described(blob: Blob) -> Option<ObjectMeta> {
    let modified = blob.modified.and_then(|time| Timestamp::parse_rfc2822(time.trim()).ok());
    Some(ObjectMeta {
        key: blob.name?,
        size: blob.size?,
        etag: unquoted(blob.etag.as_deref().unwrap_or_default().trim()).to_owned(),
        mtime_ns: modified.map_or(0, nanoseconds),
        metadata: Default::default(),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_page_is_read() {
        let document = "<?xml version=\"1.0\" encoding=\"utf-8\"?><EnumerationResults ServiceEndpoint=\"http://h/\" \
             ContainerName=\"data\"><Prefix/><Blobs>\
             <Blob><Name> a&amp;&#xD;b </Name><Properties><Last-Modified>Fri, 02 Jan 2026 03:04:05 GMT</Last-Modified>\
             <Etag>0x8D1</Etag><Content-Length>7</Content-Length><Content-Type/></Properties></Blob>\
             <Blob><Name Encoded=\"true\">e%07%25</Name><Properties><Content-Length>0</Content-Length></Properties>\
             </Blob>\
             <Blob><Name>d</Name><Properties><ResourceType>directory</ResourceType><Content-Length>0</Content-Length>\
             </Properties></Blob>\
             <Blob><Name>odd</Name><Properties><Content-Length>-1</Content-Length></Properties></Blob>\
             <BlobPrefix><Name>d/</Name></BlobPrefix><BlobPrefix><Name Encoded=\"true\">%FF/</Name></BlobPrefix>\
             </Blobs><NextMarker>a+/=</NextMarker></EnumerationResults>";
        let StorePage { page, next, .. } = parse(document.as_bytes()).unwrap();
        assert_eq!(next.as_deref(), Some("a+/="));
        assert_eq!((page.prefixes, page.hidden), (vec!["d/".to_owned()], 2));
        let keys: Vec<&str> = page.objects.iter().map(|object| object.key.as_str()).collect();
        assert_eq!(keys, [" a&\rb ", "e\u{7}%"]);
        let first = &page.objects[0];
        assert_eq!((first.size, first.etag.as_str(), first.mtime_ns), (7, "0x8D1", 1_767_323_045_000_000_000));
    }

    #[test]
    fn the_end_has_no_marker_and_what_is_no_listing_is_an_error() {
        let last = b"<EnumerationResults><Blobs/><NextMarker/></EnumerationResults>";
        assert_eq!(parse(last).unwrap().next, None);
        let unread = "<EnumerationResults><NextMarker>a&x;</NextMarker></EnumerationResults>";
        for document in ["", "<html></html>", "<EnumerationResults>", "{}", unread] {
            assert!(parse(document.as_bytes()).is_err(), "{document:?}");
        }
    }

    #[test]
    fn a_query_is_encoded_once() {
        let request = ListRequest {
            prefix: "a b/+ü/",
            mode: ListMode::Directory,
            start_after: None,
            token: Some("x=/+"),
            limit: 10,
        };
        assert_eq!(
            query(&request),
            "restype=container&comp=list&maxresults=10&delimiter=%2F&marker=x%3D%2F%2B&prefix=a%20b%2F%2B%C3%BC%2F"
        );
        let request =
            ListRequest { prefix: "", mode: ListMode::Recursive, start_after: None, token: None, limit: 1000 };
        assert_eq!(query(&request), "restype=container&comp=list&maxresults=1000");
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = parse(&bytes);
        }
    }
}
