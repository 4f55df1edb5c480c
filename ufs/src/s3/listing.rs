//! LIST: the request's query and the document that answers it.
//!
//! Keys travel percent-encoded, since XML cannot carry all characters, and a key which cannot be decoded costs only
//! itself.

use std::borrow::Cow;

use http::HeaderMap;
use http::header::{AsHeaderName, CONTENT_LENGTH, ETAG, LAST_MODIFIED};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use quick_xml::events::{BytesRef, BytesStart, Event};
use quick_xml::reader::Reader;
use reqsign_core::time::Timestamp;
use serde_json::Value;

use crate::object::{ListMode, ObjectMeta};
use crate::store::{ListRequest, PAGE_KEYS, StorePage};

/// The text of a header; empty where there is none, or it is no text.
pub(crate) fn header_text(headers: &HeaderMap, name: impl AsHeaderName) -> &str {
    headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

/// The object that the head of an answer describes, with what it says of its version; `None` where it does not say how
/// long it is. `metadata_name` reads the names of headers with metadata.
pub(crate) fn described_by_head(
    key: &str,
    headers: &HeaderMap,
    metadata_name: impl Fn(&str) -> Option<String>,
) -> Option<ObjectMeta> {
    let metadata = headers
        .iter()
        .filter_map(|(name, value)| Some((metadata_name(name.as_str())?, value.to_str().ok()?.to_owned())));
    Some(ObjectMeta {
        key: key.to_owned(),
        size: header_text(headers, CONTENT_LENGTH).parse().ok()?,
        etag: unquoted(header_text(headers, ETAG)).to_owned(),
        mtime_ns: Timestamp::parse_rfc2822(header_text(headers, LAST_MODIFIED)).map_or(0, nanoseconds),
        metadata: metadata.collect(),
    })
}

/// Everything but RFC 3986's unreserved characters, as SigV4 canonicalizes a query.
pub(crate) const QUERY: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// The query of ListObjectsV2, names in order.
pub(crate) fn query(request: &ListRequest<'_>) -> String {
    let encode = |value: &str| utf8_percent_encode(value, QUERY).to_string();
    let mut query = String::new();
    if let Some(token) = request.token {
        query.push_str(&format!("continuation-token={}&", encode(token)));
    }
    if request.mode == ListMode::Directory {
        query.push_str("delimiter=%2F&");
    }
    query.push_str(&format!("encoding-type=url&list-type=2&max-keys={}", request.limit));
    if !request.prefix.is_empty() {
        query.push_str(&format!("&prefix={}", encode(request.prefix)));
    }
    // A token says where the next page begins.
    if let Some(after) = request.start_after.filter(|_| request.token.is_none()) {
        query.push_str(&format!("&start-after={}", encode(after)));
    }
    query
}

/// The query of ListObjectVersions whose answer begins with the versions of this key, names in order.
pub(crate) fn versions_query(key: &str) -> String {
    format!("encoding-type=url&max-keys={PAGE_KEYS}&prefix={}&versions=", utf8_percent_encode(key, QUERY))
}

/// What one element's text was, or that it held something that is no text.
pub(crate) type Text = Option<String>;

/// What an element says of an object.
#[derive(Default)]
struct Object {
    key: Text,
    size: Option<u64>,
    mtime_ns: i64,
    etag: String,
}

/// Reads the answer to [`query`]. The error says what is wrong with the document.
pub(crate) fn parse(document: &[u8]) -> Result<StorePage, String> {
    let mut objects = Vec::new();
    let mut prefixes = Vec::new();
    let mut is_encoded = Ok(false);
    let mut is_truncated = Ok(None);
    let mut next: Option<Text> = None;
    let mut object = Object::default();
    let mut has_root = false;
    walk(document, |path, text| match *path {
        ["ListBucketResult"] => has_root = true,
        ["ListBucketResult", "Contents"] => objects.push(std::mem::take(&mut object)),
        ["ListBucketResult", "Contents", "Key"] => object.key = text.map(str::to_owned),
        ["ListBucketResult", "Contents", "Size"] => object.size = text.and_then(length),
        ["ListBucketResult", "Contents", "LastModified"] => {
            object.mtime_ns = text.and_then(|text| text.trim().parse().ok()).map_or(0, nanoseconds);
        }
        ["ListBucketResult", "Contents", "ETag"] => object.etag = unquoted(text.unwrap_or_default()).to_owned(),
        ["ListBucketResult", "CommonPrefixes", "Prefix"] => prefixes.push(text.map(str::to_owned)),
        ["ListBucketResult", "EncodingType"] => is_encoded = encoding(text),
        ["ListBucketResult", "IsTruncated"] => is_truncated = truncation(text),
        ["ListBucketResult", "NextContinuationToken"] => next = Some(text.map(str::to_owned)),
        _ => {}
    })?;
    if !has_root {
        return Err("the answer to a LIST is no ListBucketResult".to_owned());
    }
    let is_encoded = is_encoded?;
    let mut answer = StorePage::default();
    answer.page.objects.reserve_exact(objects.len());
    for object in objects {
        answer.page.hidden += keep(&mut answer.page.objects, described(object, is_encoded));
    }
    for prefix in prefixes {
        answer.page.hidden += keep(&mut answer.page.prefixes, decoded(prefix, is_encoded));
    }
    let next = next.filter(|token| token.as_deref() != Some(""));
    answer.next = match (is_truncated?.unwrap_or(next.is_some()), next.flatten()) {
        (false, _) => None,
        (true, Some(token)) => Some(token),
        (true, None) => return Err("the listing goes on, but has no NextContinuationToken that can be read".to_owned()),
    };
    Ok(answer)
}

/// Puts an entry of a page to the others; one that could not be read is counted.
pub(crate) fn keep<T>(kept: &mut Vec<T>, entry: Option<T>) -> u64 {
    let hidden = u64::from(entry.is_none());
    kept.extend(entry);
    hidden
}

/// Whether the keys of a document are percent-encoded, as its `EncodingType` says.
fn encoding(text: Option<&str>) -> Result<bool, String> {
    match text.map(str::trim) {
        Some("url") => Ok(true),
        Some("") => Ok(false),
        _ => Err("its EncodingType is not url, which was asked for".to_owned()),
    }
}

/// Whether a listing goes on, as `IsTruncated` says; `None` where it says nothing. What cannot be read must not be
/// taken for the end: all that would follow is gone then.
fn truncation(text: Option<&str>) -> Result<Option<bool>, String> {
    match text.map(|text| text.trim().to_ascii_lowercase()).as_deref() {
        Some("true" | "1") => Ok(Some(true)),
        Some("false" | "0") => Ok(Some(false)),
        Some("") => Ok(None),
        _ => Err("its IsTruncated is neither true nor false".to_owned()),
    }
}

/// The id of the newest version of a key with this ETag, in the answer to [`versions_query`]. The error says what is
/// wrong with the document.
pub(crate) fn find_version(document: &[u8], key: &str, etag: &str) -> Result<Option<String>, String> {
    let (mut has_root, mut is_encoded) = (false, Ok(false));
    let (mut versions, mut version) = (Vec::new(), (None, None, None));
    walk(document, |path, text| match *path {
        ["ListVersionsResult"] => has_root = true,
        ["ListVersionsResult", "EncodingType"] => is_encoded = encoding(text),
        ["ListVersionsResult", "Version"] => versions.push(std::mem::take(&mut version)),
        ["ListVersionsResult", "Version", "Key"] => version.0 = text.map(str::to_owned),
        ["ListVersionsResult", "Version", "ETag"] => version.1 = text.map(str::to_owned),
        ["ListVersionsResult", "Version", "VersionId"] => version.2 = text.map(str::to_owned),
        _ => {}
    })?;
    if !has_root {
        return Err("the answer to a listing of versions is no ListVersionsResult".to_owned());
    }
    let is_encoded = is_encoded?;
    let id = versions.into_iter().find_map(|(of, tag, id)| {
        let is_it = unquoted(tag.as_deref()?) == etag && decoded(of, is_encoded)? == key;
        id.filter(|id| is_it && !id.is_empty())
    });
    Ok(id)
}

/// The key that a text of the document stands for. With `encoding-type=url` a space may come as `+` (AWS does so) and
/// `+` itself always comes as `%2B`.
fn decoded(text: Text, is_encoded: bool) -> Option<String> {
    let text = text?;
    if !is_encoded || !text.bytes().any(|byte| matches!(byte, b'%' | b'+')) {
        return Some(text);
    }
    let text = if text.contains('+') { Cow::Owned(text.replace('+', " ")) } else { Cow::Borrowed(text.as_str()) };
    percent_decode_str(&text).decode_utf8().ok().map(Cow::into_owned)
}

/// `None` where the size is none that a file can have: such an object hides only itself.
fn described(object: Object, is_encoded: bool) -> Option<ObjectMeta> {
    let Object { key, size, mtime_ns, etag } = object;
    let key = decoded(key, is_encoded)?;
    let Some(size) = size else {
        tracing::warn!("an object is not shown, since the store does not say how long it is: {key:?}");
        return None;
    };
    Some(ObjectMeta { key, size, etag, mtime_ns, metadata: Default::default() })
}

/// The length that a file can have.
pub(crate) fn length(text: &str) -> Option<u64> {
    text.trim().parse::<i64>().ok().and_then(|length| u64::try_from(length).ok())
}

/// Nanoseconds since the Unix epoch, clamped to what 64 bits hold (the years 1678 to 2262).
pub(crate) fn nanoseconds(time: Timestamp) -> i64 {
    time.as_second().saturating_mul(1_000_000_000).saturating_add(time.subsec_nanosecond().into())
}

/// An ETag without its quotes. A weak one (`W/"…"`) stays as it is.
pub(crate) fn unquoted(etag: &str) -> &str {
    etag.strip_prefix('"').and_then(|etag| etag.strip_suffix('"')).unwrap_or(etag)
}

/// Code and message of an error, as those of JSON interfaces have it: in an `error` of Google's interfaces, or beside
/// one as OAuth 2.0 has it.
fn json_error(document: &[u8]) -> Option<(String, String)> {
    let answer: Value = serde_json::from_slice(document).ok()?;
    let error = answer.get("error")?;
    let text = |value: Option<&Value>| value.and_then(Value::as_str).unwrap_or_default().to_owned();
    Some(match error.as_str() {
        Some(code) => (code.to_owned(), text(answer.get("error_description"))),
        None => (text(error.pointer("/errors/0/reason")), text(error.get("message"))),
    })
}

/// `Code` and `Message` of an error document; empty for what is none.
pub(crate) fn error_document(document: &[u8]) -> (String, String) {
    if document.starts_with(b"{") {
        return json_error(document).unwrap_or_default();
    }
    let (mut code, mut message) = (String::new(), String::new());
    // What was read before the document turned out to be broken still helps.
    let _ = walk(document, |path, text| match *path {
        // STS has an element around it.
        ["Error", "Code"] | ["ErrorResponse", "Error", "Code"] => code = text.unwrap_or_default().to_owned(),
        ["Error", "Message"] | ["ErrorResponse", "Error", "Message"] => message = text.unwrap_or_default().to_owned(),
        _ => {}
    });
    (code, message)
}

/// The text of the first element with this path.
pub(crate) fn element(document: &[u8], wanted: &[&str]) -> Option<String> {
    let mut found = None;
    walk(document, |path, text| {
        if path == wanted && found.is_none() {
            found = text.map(str::to_owned);
        }
    })
    .ok()?;
    found
}

/// Elements nested deeper than this are no answer of an S3 endpoint.
const DEPTH: usize = 16;

/// An element that has begun, and the text directly in it so far. The next one of its depth takes its place, and its
/// memory: a page has thousands of them.
#[derive(Default)]
struct Element {
    name: String,
    text: String,
    /// It has something that is no text, or attributes that cannot be read.
    is_broken: bool,
    /// Its text is percent-encoded.
    is_encoded: bool,
}

impl Element {
    fn begin(&mut self, start: &BytesStart<'_>) {
        let mark = start.try_get_attribute("Encoded");
        self.is_broken = mark.is_err();
        self.is_encoded = mark.ok().flatten().is_some_and(|mark| mark.value == "true");
        self.text.clear();
        self.name.clear();
        self.name.push_str(start.local_name().as_ref());
    }

    fn text(&self) -> Option<Cow<'_, str>> {
        if self.is_broken {
            return None;
        }
        if self.is_encoded {
            return percent_decode_str(&self.text).decode_utf8().ok();
        }
        Some(Cow::Borrowed(self.text.as_str()))
    }
}

/// Calls `leave` at the end of every element, with the local names from the root to it and the text directly in it.
/// Line ends and spaces are left as they are; a reference that stands for no character makes the text `None`, and
/// `Encoded="true"`, by which Azure marks a text that is percent-encoded, has it decoded.
pub(crate) fn walk(document: &[u8], mut leave: impl FnMut(&[&str], Option<&str>)) -> Result<(), String> {
    let mut reader = Reader::from_reader(document);
    reader.config_mut().expand_empty_elements = true;
    let broken = |error: &dyn std::fmt::Display| format!("its XML is broken: {error}");
    let mut elements: [Element; DEPTH] = Default::default();
    let mut depth = 0;
    loop {
        match reader.read_event().map_err(|error| broken(&error))? {
            Event::Start(start) => {
                let Some(element) = elements.get_mut(depth) else { return Err(broken(&"it is nested too deeply")) };
                element.begin(&start);
                depth += 1;
            }
            Event::End(_) => {
                let mut path = [""; DEPTH];
                path.iter_mut().zip(&elements[..depth]).for_each(|(name, element)| *name = element.name.as_str());
                let text = elements[..depth].last().and_then(Element::text);
                leave(&path[..depth], text.as_deref());
                depth = depth.saturating_sub(1);
            }
            Event::Text(text) => append(&mut elements[..depth], Some(&text)),
            Event::CData(text) => append(&mut elements[..depth], Some(&text)),
            Event::GeneralRef(reference) => append(&mut elements[..depth], resolve(&reference).as_deref()),
            Event::Eof if depth == 0 => return Ok(()),
            Event::Eof => return Err(broken(&"it ends too early")),
            _ => {}
        }
    }
}

/// Adds to the innermost element.
fn append(elements: &mut [Element], part: Option<&str>) {
    let Some(element) = elements.last_mut() else { return };
    match part {
        Some(part) => element.text.push_str(part),
        None => element.is_broken = true,
    }
}

fn resolve(reference: &BytesRef<'_>) -> Option<Cow<'static, str>> {
    match reference.resolve_char_ref() {
        Ok(Some(c)) => Some(Cow::Owned(c.to_string())),
        Ok(None) => match &**reference {
            "amp" => Some(Cow::Borrowed("&")),
            "lt" => Some(Cow::Borrowed("<")),
            "gt" => Some(Cow::Borrowed(">")),
            "quot" => Some(Cow::Borrowed("\"")),
            "apos" => Some(Cow::Borrowed("'")),
            _ => None,
        },
        Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn document(encoding: &str, contents: &str) -> String {
        format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<ListBucketResult \
             xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Name>b</Name><Prefix></Prefix>\
             <IsTruncated>false</IsTruncated>{contents}{encoding}</ListBucketResult>"
        )
    }

    fn object(key: &str) -> String {
        format!(
            "<Contents><Key>{key}</Key><LastModified>2026-01-02T03:04:05.678Z</LastModified>\
             <ETag>&quot;e1&quot;</ETag><Size>7</Size><StorageClass>STANDARD</StorageClass></Contents>"
        )
    }

    const URL: &str = "<EncodingType>url</EncodingType>";

    #[test]
    fn an_object_is_described_without_a_head() {
        let page = parse(document(URL, &object("a%2Fb")).as_bytes()).unwrap().page;
        let mtime_ns = 1_767_323_045_678_000_000;
        let expected = ObjectMeta {
            key: "a/b".to_owned(),
            size: 7,
            etag: "e1".to_owned(),
            mtime_ns,
            metadata: Default::default(),
        };
        assert_eq!(page.objects, [expected]);
        assert_eq!(page.hidden, 0);
    }

    #[test]
    fn keys_come_out_byte_for_byte() {
        for (encoding, encoded, key) in [
            (URL, "+a+", " a "),
            (URL, "a%20b", "a b"),
            (URL, "a%2Bb", "a+b"),
            (URL, "%252F", "%2F"),
            (URL, "%0D%0A%01", "\r\n\u{1}"),
            (URL, "%C3%BC", "ü"),
            (URL, "%2Fa", "/a"),
            ("", " a ", " a "),
            ("", "a+b%20", "a+b%20"),
            ("", "a&#13;&#10;b", "a\r\nb"),
            ("", "&lt;&amp;&gt;&quot;&apos;", "<&>\"'"),
            ("", "<![CDATA[<x>]]>", "<x>"),
            ("", " ", " "),
        ] {
            let page = parse(document(encoding, &object(encoded)).as_bytes()).unwrap().page;
            assert_eq!(page.objects[0].key, key, "{encoded}");
        }
    }

    #[test]
    fn the_newest_version_of_a_key_is_found_by_its_etag() {
        assert_eq!(versions_query("a b/+"), "encoding-type=url&max-keys=1000&prefix=a%20b%2F%2B&versions=");
        let row = |key: &str, etag: &str, id: &str| {
            format!("<Version><Key>{key}</Key><VersionId>{id}</VersionId><ETag>&quot;{etag}&quot;</ETag></Version>")
        };
        let marker = "<DeleteMarker><Key>a%20b</Key><VersionId>m</VersionId><ETag>&quot;e2&quot;</ETag></DeleteMarker>";
        let rows = [
            marker.to_owned(),
            row("a%20b", "e3", "4"),
            row("a%20b", "e2", "3"),
            row("a%20b", "e1", "2"),
            row("a%20b", "e1", "null"),
            row("a%20b%20c", "e5", "5"),
        ];
        let document = |rows: &str| format!("<ListVersionsResult>{rows}{URL}</ListVersionsResult>");
        let find = |etag| find_version(document(&rows.concat()).as_bytes(), "a b", etag).unwrap();
        assert_eq!((find("e1").as_deref(), find("e2").as_deref()), (Some("2"), Some("3")));
        assert_eq!((find("e5"), find("")), (None, None), "that of another key");
        assert_eq!(
            find_version(document(&row("k", "e", "null")).as_bytes(), "k", "e").unwrap().as_deref(),
            Some("null")
        );
        assert!(find_version(b"<ListBucketResult></ListBucketResult>", "k", "e").is_err());
    }

    #[test]
    fn a_key_that_cannot_be_told_hides_only_itself() {
        let contents = [object("a"), object("&#0;"), object("%FF"), object("b")].concat();
        let page = parse(document(URL, &contents).as_bytes()).unwrap().page;
        assert_eq!(page.objects.iter().map(|object| object.key.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(page.hidden, 2);
    }

    #[test]
    fn an_object_of_an_impossible_size_hides_only_itself() {
        let sizes = ["-1", "x", "", "9223372036854775808", "18446744073709551616"];
        let odd = sizes.map(|size| format!("<Contents><Key>odd</Key><Size>{size}</Size></Contents>")).concat();
        let contents = [object("a"), odd, "<Contents><Key>none</Key></Contents>".to_owned(), object("b")].concat();
        let page = parse(document("", &contents).as_bytes()).unwrap().page;
        assert_eq!(page.objects.iter().map(|object| object.key.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(page.hidden, sizes.len() as u64 + 1);
    }

    #[test]
    fn a_listing_that_goes_on_needs_its_token() {
        let more = "<ListBucketResult><IsTruncated>true</IsTruncated>{}</ListBucketResult>";
        let token = "<NextContinuationToken>a+/=</NextContinuationToken>";
        assert_eq!(parse(more.replace("{}", token).as_bytes()).unwrap().next.as_deref(), Some("a+/="));
        assert!(parse(more.replace("{}", "").as_bytes()).unwrap_err().contains("NextContinuationToken"));
        // A token on the last page means nothing.
        let last = document("", token);
        assert_eq!(parse(last.as_bytes()).unwrap().next, None);
    }

    #[test]
    fn what_cannot_be_read_is_not_taken_for_the_end() {
        let answer = |said: &str| {
            let token = "<NextContinuationToken>t</NextContinuationToken>";
            let page = parse(format!("<ListBucketResult>{said}{token}</ListBucketResult>").as_bytes());
            page.map(|page| page.next.is_some())
        };
        for goes_on in ["true", " true\n", "True", "1"] {
            assert_eq!(answer(&format!("<IsTruncated>{goes_on}</IsTruncated>")), Ok(true), "{goes_on}");
        }
        for end in ["false", "FALSE", "0"] {
            assert_eq!(answer(&format!("<IsTruncated>{end}</IsTruncated>")), Ok(false), "{end}");
        }
        // The token says so.
        assert_eq!((answer(""), answer("<IsTruncated/>")), (Ok(true), Ok(true)));
        assert_eq!(parse(b"<ListBucketResult/>").unwrap().next, None);
        let unread = b"<ListBucketResult><NextContinuationToken>t&x;</NextContinuationToken></ListBucketResult>";
        assert!(parse(unread).unwrap_err().contains("NextContinuationToken"));
        for neither in ["yes", "true&x;", "true<x/>false"] {
            let error = answer(&format!("<IsTruncated>{neither}</IsTruncated>")).unwrap_err();
            assert!(error.contains("IsTruncated"), "{neither}: {error}");
        }
    }

    #[test]
    fn keys_in_an_unknown_encoding_are_no_keys() {
        for (encoding, key) in [("url", "a/b"), (" url ", "a/b"), ("", "a%2Fb")] {
            let encoding = format!("<EncodingType>{encoding}</EncodingType>");
            let page = parse(document(&encoding, &object("a%2Fb")).as_bytes()).unwrap().page;
            assert_eq!(page.objects[0].key, key, "{encoding}");
        }
        for encoding in ["base64", "u&x;rl"] {
            let encoding = format!("<EncodingType>{encoding}</EncodingType>");
            let error = parse(document(&encoding, &object("a%2Fb")).as_bytes()).unwrap_err();
            assert!(error.contains("EncodingType"), "{error}");
            let versions = format!("<ListVersionsResult>{encoding}</ListVersionsResult>");
            assert_eq!(find_version(versions.as_bytes(), "k", "e"), Err(error));
        }
    }

    #[test]
    fn an_element_has_its_own_text_and_nothing_of_those_before_it() {
        let document = "<!DOCTYPE a [<!ENTITY x \"y\">]><a>1<b Encoded=\"true\">%41&x;</b>2<b>%42</b><b/>\
             <n:b>&lt;<d><![CDATA[<&]]></d><!-- no --><?no?>&#62;</n:b><b Encoded=\"true\">%43</b><b Encoded=x>4</b>\
             <b Encoded=\"true\">%FF</b><b>5</b>3</a>";
        let mut said = Vec::new();
        walk(document.as_bytes(), |path, text| said.push((path.join("/"), text.map(str::to_owned)))).unwrap();
        let expected = [
            ("a/b", None),
            ("a/b", Some("%42")),
            ("a/b", Some("")),
            ("a/b/d", Some("<&")),
            ("a/b", Some("<>")),
            ("a/b", Some("C")),
            ("a/b", None),
            ("a/b", None),
            ("a/b", Some("5")),
            ("a", Some("123")),
        ];
        assert_eq!(said, expected.map(|(path, text)| (path.to_owned(), text.map(str::to_owned))));
    }

    #[test]
    fn elements_that_nobody_knows_hide_nothing_beside_them() {
        let nested = |depth: usize| format!("{}x{}", "<Key>".repeat(depth), "</Key>".repeat(depth));
        let listing = |depth: usize| {
            let contents = object("a").replace("<Size>", &format!("<Other>{}</Other><Size>", nested(depth)));
            parse(document("", &[contents, object("b")].concat()).as_bytes())
        };
        let page = listing(DEPTH - 3).unwrap().page;
        assert_eq!(page.objects.iter().map(|object| object.key.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert!(listing(DEPTH - 2).unwrap_err().contains("deeply"));
    }

    #[test]
    fn what_is_no_listing_is_refused() {
        for text in
            ["", "hello", "<html></html>", "<ListBucketResult>", "<ListBucketResult><Contents></ListBucketResult>"]
        {
            assert!(parse(text.as_bytes()).is_err(), "{text:?}");
        }
        assert!(parse("<a>".repeat(1000).as_bytes()).unwrap_err().contains("deeply"));
    }

    #[test]
    fn an_error_document_gives_its_code() {
        let document =
            b"<?xml version=\"1.0\"?><Error><Code>NoSuchKey</Code><Message>a &amp; b</Message><Key>k</Key></Error>";
        assert_eq!(error_document(document), ("NoSuchKey".to_owned(), "a & b".to_owned()));
        assert_eq!(error_document(b"<html>502"), (String::new(), String::new()));
        let google = br#"{"error":{"code":412,"message":"it differs","errors":[{"reason":"conditionNotMet"}]}}"#;
        assert_eq!(error_document(google), ("conditionNotMet".to_owned(), "it differs".to_owned()));
        let oauth = br#"{"error":"invalid_grant","error_description":"it has ended"}"#;
        assert_eq!(error_document(oauth), ("invalid_grant".to_owned(), "it has ended".to_owned()));
        for broken in ["{", "{}", "{\"error\":7}"] {
            assert_eq!(error_document(broken.as_bytes()), (String::new(), String::new()), "{broken}");
        }
    }

    #[test]
    fn a_query_is_encoded_once_and_ordered() {
        let request = ListRequest {
            prefix: "a b/+ü/",
            mode: ListMode::Directory,
            start_after: None,
            token: Some("x=/+"),
            limit: 10,
        };
        assert_eq!(
            query(&request),
            "continuation-token=x%3D%2F%2B&delimiter=%2F&encoding-type=url&list-type=2&max-keys=10\
             &prefix=a%20b%2F%2B%C3%BC%2F"
        );
        let request =
            ListRequest { prefix: "", mode: ListMode::Recursive, start_after: None, token: None, limit: 1000 };
        assert_eq!(query(&request), "encoding-type=url&list-type=2&max-keys=1000");
        let behind = ListRequest { prefix: "p/", start_after: Some("p/a b"), ..request };
        assert_eq!(query(&behind), "encoding-type=url&list-type=2&max-keys=1000&prefix=p%2F&start-after=p%2Fa%20b");
        assert!(!query(&ListRequest { token: Some("t"), ..behind }).contains("start-after"));
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = parse(&bytes);
            let _ = find_version(&bytes, "k", "e");
            let _ = error_document(&bytes);
        }

        #[test]
        fn every_key_survives(key in "\\PC*|[\\x01-\\x7f]{0,20}") {
            let encoded = utf8_percent_encode(&key, QUERY).to_string();
            let page = parse(document(URL, &object(&encoded)).as_bytes()).unwrap().page;
            prop_assert_eq!(&page.objects[0].key, &key);
        }
    }
}
