//! What clients see on the wire: signed requests and the documents that answer them for the usual paths, and bytes over
//! TCP under presigned URLs where the exact answer counts. `tests/e2e/s3_clients.rs` has the clients of others.

// Helpers count as tests here: they stop where they cannot go on.
#![allow(clippy::unwrap_used)]

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use cavern_dev_s3::{DEFAULT_ACCESS_KEY, DEFAULT_SECRET_KEY, DevS3, DevS3Config, FaultKind, FaultRule, Kind, Running};
use cavern_plain_s3::{Answer, PlainS3, PlainS3Error};
use hyper::header::{HeaderName, HeaderValue};
use hyper::{HeaderMap, Method, StatusCode};
use md5::{Digest as _, Md5};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const PATIENCE: Duration = Duration::from_secs(20);

struct Fixture {
    root: tempfile::TempDir,
    s3: Running,
}

impl Fixture {
    async fn start() -> Self {
        let root = tempfile::tempdir().unwrap();
        let mut config = DevS3Config::new(root.path().join("root"));
        config.request_log = Some(root.path().join("log"));
        config.admin_listen = Some("127.0.0.1:0".to_owned());
        let s3 = DevS3::start(config).await.unwrap();
        s3.store().create_bucket("bucket").unwrap();
        Self { root, s3 }
    }

    fn client(&self) -> PlainS3 {
        PlainS3::new(&self.s3.endpoint(), DEFAULT_ACCESS_KEY, DEFAULT_SECRET_KEY).unwrap()
    }

    /// Sends a signed request that has neither headers nor a body.
    async fn ask(&self, method: Method, key: &str, query: &str) -> Result<Answer, PlainS3Error> {
        self.client().send(method, "bucket", key, query, HeaderMap::new(), Bytes::new()).await
    }

    /// The entries of all pages of a listing, as they are written: on each page first its prefixes, then its objects.
    async fn list(&self, prefix: &str, delimiter: &str) -> Result<Vec<String>, PlainS3Error> {
        let encode = |name: &str| utf8_percent_encode(name, NON_ALPHANUMERIC).to_string();
        let rest = format!("delimiter={}&list-type=2&prefix={}", encode(delimiter), encode(prefix));
        let (mut entries, mut query) = (Vec::new(), rest.clone());
        loop {
            let page = text(&self.ask(Method::GET, "", &query).await?);
            for kind in ["CommonPrefixes", "Contents"] {
                entries.extend(elements(&page, kind).into_iter().map(str::to_owned));
            }
            let next = elements(&page, "NextContinuationToken").pop();
            assert_eq!(elements(&page, "IsTruncated"), [if next.is_some() { "true" } else { "false" }]);
            let Some(next) = next else { return Ok(entries) };
            query = format!("continuation-token={next}&{rest}");
        }
    }

    /// Sends a presigned GET with more headers and returns the answer's head and body.
    async fn get(&self, key: &str, headers: &str) -> Result<(String, Vec<u8>), std::io::Error> {
        exchange(self.s3.addr(), "GET", &self.presigned(key).await, headers).await
    }

    async fn presigned(&self, key: &str) -> String {
        self.client().presigned("bucket", key, PATIENCE).await.unwrap()
    }

    /// The header with the token of the second port.
    fn authorization(&self) -> String {
        let token = std::fs::read_to_string(self.root.path().join("root/admin-token")).unwrap();
        format!("Authorization: Bearer {}\r\n", token.trim())
    }

    /// Asks the second port.
    async fn admin(&self, method: &str, path: &str, headers: &str) -> (String, Vec<u8>) {
        let headers = format!("{}{headers}", self.authorization());
        exchange(self.s3.admin_addr().unwrap(), method, path, &headers).await.unwrap()
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.root.path().join("log")).unwrap()
    }
}

/// One request on a connection of its own, read to its end.
async fn exchange(
    to: SocketAddr,
    method: &str,
    path: &str,
    headers: &str,
) -> Result<(String, Vec<u8>), std::io::Error> {
    let request = format!("{method} {path} HTTP/1.1\r\nHost: {to}\r\nConnection: close\r\n{headers}\r\n");
    let mut stream = TcpStream::connect(to).await?;
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer)).await??;
    let Some(end) = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n") else {
        return Ok((String::new(), answer));
    };
    let head = String::from_utf8(answer[..end].to_vec()).unwrap().to_ascii_lowercase();
    Ok((head, answer[end + 4..].to_vec()))
}

fn header(name: &'static str, value: &str) -> HeaderMap {
    HeaderMap::from_iter([(HeaderName::from_static(name), HeaderValue::from_str(value).unwrap())])
}

fn text(answer: &Answer) -> String {
    String::from_utf8(answer.body.to_vec()).unwrap()
}

/// What is within each element of this name, as it is written.
fn elements<'d>(document: &'d str, name: &str) -> Vec<&'d str> {
    let (begin, end) = (format!("<{name}>"), format!("</{name}>"));
    document.split(&begin).skip(1).map(|rest| rest.split_once(&end).unwrap().0).collect()
}

/// The key, or the prefix, of an entry of a listing.
fn name_of(entry: &str) -> &str {
    elements(entry, "Key").pop().unwrap_or_else(|| elements(entry, "Prefix")[0])
}

fn is_refusal(error: &PlainS3Error, wanted: StatusCode, code: &str) -> bool {
    matches!(error, PlainS3Error::Refused { status, body, .. } if *status == wanted && body.contains(code))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_writes_reads_lists_and_deletes() {
    let fixture = Fixture::start().await;
    let s3 = fixture.client();
    let big: Vec<u8> = (0..3_000_000u32).map(|n| n as u8 ^ (n >> 8) as u8).collect();
    for (key, data) in [("a b/ü%+.bin", big.as_slice()), ("a b/empty", b""), ("top", b"top")] {
        let typed = header("content-type", "text/x");
        s3.send(Method::PUT, "bucket", key, "", typed, Bytes::copy_from_slice(data)).await.unwrap();
        assert_eq!(s3.get("bucket", key).await.unwrap(), data, "{key}");
    }
    let part = s3.get_range("bucket", "a b/ü%+.bin", 1_000_000, 1_699_999).await.unwrap();
    assert_eq!(part, &big[1_000_000..1_700_000]);
    let head = fixture.ask(Method::HEAD, "top", "").await.unwrap().headers;
    assert_eq!(head["content-length"], "3");
    assert_eq!(head["content-type"], "text/x");
    assert_eq!(head["etag"], "\"b28354b543375bfa94dabaeda722927f\"");

    let entries = fixture.list("", "/").await.unwrap();
    assert_eq!(entries.iter().map(|entry| name_of(entry)).collect::<Vec<_>>(), ["a b/", "top"]);
    let created = text(&fixture.ask(Method::POST, "parts", "uploads=").await.unwrap());
    let id = elements(&created, "UploadId")[0];
    let content = big.repeat(4);
    let parts = content.chunks(5 << 20).zip(1..).map(|(part, number)| {
        let (s3, query) = (&s3, format!("partNumber={number}&uploadId={id}"));
        async move {
            let part = Bytes::copy_from_slice(part);
            let stored = s3.send(Method::PUT, "bucket", "parts", &query, HeaderMap::new(), part).await.unwrap();
            format!("<Part><PartNumber>{number}</PartNumber><ETag>\"{}\"</ETag></Part>", stored.etag())
        }
    });
    let parts = futures::future::join_all(parts).await.concat();
    let parts = format!("<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>");
    let query = format!("uploadId={id}");
    s3.send(Method::POST, "bucket", "parts", &query, HeaderMap::new(), parts.into()).await.unwrap();
    assert!(fixture.ask(Method::HEAD, "parts", "").await.unwrap().etag().ends_with("-3"));
    assert!(s3.get("bucket", "parts").await.unwrap() == content);
    let source = header("x-amz-copy-source", "/bucket/parts");
    s3.send(Method::PUT, "bucket", "a b/copy", "", source, Bytes::new()).await.unwrap();
    assert_eq!(s3.get("bucket", "a b/copy").await.unwrap().len(), 12_000_000);
    assert_eq!(fixture.s3.stats().operations["CopyObject"], 1);

    s3.delete("bucket", "top").await.unwrap();
    let gone = s3.get("bucket", "top").await.unwrap_err();
    assert!(is_refusal(&gone, StatusCode::NOT_FOUND, "NoSuchKey"), "{gone}");
    let entries = fixture.list("a b/", "").await.unwrap();
    let objects: String =
        entries.iter().map(|entry| format!("<Object><Key>{}</Key></Object>", name_of(entry))).collect();
    let batch = format!("<Delete>{objects}</Delete>");
    let digest = header("content-md5", &BASE64_STANDARD.encode(Md5::digest(&batch)));
    let deleted = s3.send(Method::POST, "bucket", "", "delete=", digest, batch.into()).await.unwrap();
    assert_eq!(elements(&text(&deleted), "Deleted").len(), 3);
    let left = fixture.list("", "").await.unwrap();
    assert_eq!(left.iter().map(|entry| name_of(entry)).collect::<Vec<_>>(), ["parts"]);
    fixture.s3.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_does_not_match_its_checksum_is_refused() {
    let fixture = Fixture::start().await;
    let s3 = fixture.client();
    let created = text(&fixture.ask(Method::POST, "key", "uploads=").await.unwrap());
    let part = format!("partNumber=1&uploadId={}", elements(&created, "UploadId")[0]);
    let (right, wrong) = ("123456789", "123456780");
    for (name, checksum) in [
        ("x-amz-checksum-crc32", "y/Q5Jg=="),
        ("x-amz-checksum-crc32c", "4waSgw=="),
        ("x-amz-checksum-crc64nvme", "rosUhgp5mIg="),
        ("x-amz-checksum-sha1", "98O8HYCOBHMq32eZZczDTKeuNEE="),
        ("x-amz-checksum-sha256", "FeKw08M4keuw8e9gnsQZQgwg4yDOlMZfvIwzEkSOsiU="),
    ] {
        let before = header(name, checksum);
        let mut after = header("x-amz-content-sha256", "STREAMING-UNSIGNED-PAYLOAD-TRAILER");
        after.extend(header("x-amz-decoded-content-length", "9"));
        after.extend(header("x-amz-trailer", name));
        let chunked = |content: &str, trailer: &str| format!("9\r\n{content}\r\n0\r\n{trailer}\r\n");
        let trailer = format!("{name}:{checksum}\r\n");
        for query in ["", part.as_str()] {
            for (headers, body, matches) in [
                (&before, right.to_owned(), true),
                (&before, wrong.to_owned(), false),
                (&after, chunked(right, &trailer), true),
                (&after, chunked(wrong, &trailer), false),
                (&after, chunked(right, ""), false),
            ] {
                let what = format!("{name} {query} {body:?}");
                let stored = s3.send(Method::PUT, "bucket", "key", query, headers.clone(), body.into()).await;
                let is_refused = |error| is_refusal(error, StatusCode::BAD_REQUEST, "BadDigest");
                let is_right = stored.as_ref().map_or_else(|error| !matches && is_refused(error), |_| matches);
                assert!(is_right, "{what}: {stored:?}");
            }
        }
    }
    assert_eq!(s3.get("bucket", "key").await.unwrap(), right);
    fixture.s3.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn listings_of_thousands_are_paged() {
    let fixture = Fixture::start().await;
    let mut expected = Vec::new();
    for n in 0..2500 {
        let key = format!("d{}/{n:05}", n % 7);
        let object = fixture.s3.store().put("bucket", &key, key.as_bytes()).unwrap();
        expected.push(format!("{key} \"{}\" 8", object.etag));
    }
    expected.sort();
    let found = fixture.list("", "").await.unwrap();
    let found = found.iter().map(|entry| {
        let (etag, size) = (elements(entry, "ETag")[0].replace("&quot;", "\""), elements(entry, "Size")[0]);
        format!("{} {etag} {size}", name_of(entry))
    });
    assert_eq!(found.collect::<Vec<_>>(), expected);
    assert_eq!(fixture.s3.stats().count(Kind::List), 3);
    fixture.s3.reset_stats();
    assert_eq!(fixture.list("", "/").await.unwrap().len(), 7);
    assert_eq!(fixture.s3.stats().count(Kind::List), 1);
    assert_eq!(fixture.s3.stats().count(Kind::Head), 0);
    fixture.s3.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_keys_are_refused() {
    let fixture = Fixture::start().await;
    fixture.s3.store().put("bucket", "key", b"data").unwrap();
    for (access_key, secret_key, code) in
        [("other", "cavern-secret", "InvalidAccessKeyId"), ("cavern", "wrong", "SignatureDoesNotMatch")]
    {
        let s3 = PlainS3::new(&fixture.s3.endpoint(), access_key, secret_key).unwrap();
        let error = s3.get("bucket", "key").await.unwrap_err();
        assert!(is_refusal(&error, StatusCode::FORBIDDEN, code), "{error}");
    }
    let (head, _) = exchange(fixture.s3.addr(), "GET", "/bucket/key", "").await.unwrap();
    assert!(head.starts_with("http/1.1 403"), "{head}");
    let error = fixture.client().get("nobody", "key").await.unwrap_err();
    assert!(is_refusal(&error, StatusCode::NOT_FOUND, "NoSuchBucket"), "{error}");
    let (head, _) = exchange(fixture.s3.addr(), "GET", "/%ff%00?list-type=%", "").await.unwrap();
    assert!(head.starts_with("http/1.1 4"), "{head}");
    fixture.s3.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ranges_and_conditions_are_answered_as_by_s3() {
    let fixture = Fixture::start().await;
    let object = fixture.s3.store().put("bucket", "key", b"0123456789").unwrap();
    fixture.s3.store().put("bucket", "empty", b"").unwrap();
    let etag = format!("\"{}\"", object.etag);
    for (range, part) in
        [("0-0", "0"), ("2-4", "234"), ("7-", "789"), ("-3", "789"), ("5-99", "56789"), ("-99", "0123456789")]
    {
        let (head, body) = fixture.get("key", &format!("Range: bytes={range}\r\n")).await.unwrap();
        assert!(head.starts_with("http/1.1 206"), "{range}: {head}");
        assert!(head.contains(&format!("content-length: {}\r\n", part.len())), "{range}: {head}");
        assert!(head.contains("content-range: bytes ") && head.contains("/10"), "{range}: {head}");
        assert_eq!(body, part.as_bytes(), "{range}");
    }
    for (key, range, size) in [("key", "10-", 10), ("key", "-0", 10), ("empty", "0-", 0), ("empty", "-1", 0)] {
        let (head, _) = fixture.get(key, &format!("Range: bytes={range}\r\n")).await.unwrap();
        assert!(head.starts_with("http/1.1 416"), "{key} {range}: {head}");
        assert!(head.contains(&format!("content-range: bytes */{size}")), "{key} {range}: {head}");
    }
    for (headers, status) in [
        (format!("If-Match: {etag}\r\n"), "200"),
        ("If-Match: *\r\n".to_owned(), "200"),
        ("If-Match: \"other\"\r\n".to_owned(), "412"),
        (format!("If-None-Match: {etag}\r\n"), "304"),
        ("If-None-Match: \"other\"\r\n".to_owned(), "200"),
        ("If-Modified-Since: Sat, 01 Jan 2000 00:00:00 GMT\r\n".to_owned(), "200"),
        ("If-Modified-Since: Fri, 01 Jan 2100 00:00:00 GMT\r\n".to_owned(), "304"),
        ("If-Unmodified-Since: Sat, 01 Jan 2000 00:00:00 GMT\r\n".to_owned(), "412"),
        // The ETag outweighs the time.
        (format!("If-Match: {etag}\r\nIf-Unmodified-Since: Sat, 01 Jan 2000 00:00:00 GMT\r\n"), "200"),
    ] {
        let (head, body) = fixture.get("key", &headers).await.unwrap();
        assert!(head.starts_with(&format!("http/1.1 {status}")), "{headers}: {head}");
        assert_eq!(body == b"0123456789", status == "200", "{headers}");
        assert!(status != "304" || (body.is_empty() && head.contains(&etag)), "{headers}: {head}");
    }
    fixture.s3.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_download_goes_on_with_its_version() {
    let fixture = Fixture::start().await;
    let (old, new) = (vec![1u8; 32 << 20], vec![2u8; 32 << 20]);
    fixture.s3.store().put("bucket", "key", &old).unwrap();
    let path = fixture.presigned("key").await;
    let mut stream = TcpStream::connect(fixture.s3.addr()).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", fixture.s3.addr());
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = vec![0; 1 << 20];
    stream.read_exact(&mut answer).await.unwrap();
    fixture.s3.store().put("bucket", "key", &new).unwrap();
    stream.read_to_end(&mut answer).await.unwrap();
    assert!(answer.ends_with(&old));
    assert_eq!(fixture.client().get("bucket", "key").await.unwrap(), new);
    fixture.s3.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_are_real_on_the_wire() {
    let fixture = Fixture::start().await;
    let data = vec![7u8; 1 << 20];
    fixture.s3.store().put("bucket", "big", &data).unwrap();
    let fault =
        |kind, latency_ms| FaultRule { kind, latency_ms, operations: vec!["GET".into()], ..FaultRule::default() };

    fixture.s3.faults().add(fault(Some(FaultKind::Unavailable), 0)).unwrap();
    let (head, body) = fixture.get("big", "").await.unwrap();
    assert!(head.starts_with("http/1.1 503") && String::from_utf8(body).unwrap().contains("SlowDown"), "{head}");
    fixture.s3.faults().clear();

    fixture.s3.faults().add(fault(Some(FaultKind::Denied), 0)).unwrap();
    let (head, body) = fixture.get("big", "").await.unwrap();
    assert!(head.starts_with("http/1.1 403") && String::from_utf8(body).unwrap().contains("AccessDenied"), "{head}");
    fixture.s3.faults().clear();

    fixture.s3.faults().add(fault(Some(FaultKind::Reset), 0)).unwrap();
    assert_eq!(fixture.get("big", "").await.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
    fixture.s3.faults().clear();

    fixture.s3.faults().add(fault(Some(FaultKind::ShortBody), 0)).unwrap();
    let (head, body) = fixture.get("big", "").await.unwrap();
    assert!(head.starts_with("http/1.1 200") && head.contains("content-length: 1048576"), "{head}");
    assert_eq!(body, &data[..data.len() / 2]);
    assert!(fixture.client().get("bucket", "big").await.is_err());
    fixture.s3.faults().clear();

    fixture.s3.faults().add(fault(None, 300)).unwrap();
    let start = Instant::now();
    assert!(fixture.get("big", "").await.unwrap().0.starts_with("http/1.1 200"));
    assert!(start.elapsed() >= Duration::from_millis(300));
    fixture.s3.faults().clear();

    fixture.s3.faults().add(fault(Some(FaultKind::Hang), 0)).unwrap();
    let mut hanging = Box::pin(fixture.get("big", ""));
    assert!(tokio::time::timeout(Duration::from_millis(200), &mut hanging).await.is_err());
    fixture.s3.faults().clear();
    assert_eq!(hanging.await.unwrap().1, data);

    // A store with a request that hangs stops all the same.
    fixture.s3.faults().add(fault(Some(FaultKind::Hang), 0)).unwrap();
    let (to, path, before) = (fixture.s3.addr(), fixture.presigned("big").await, fixture.s3.stats().faults);
    let request = tokio::spawn(async move { exchange(to, "GET", &path, "").await });
    let deadline = Instant::now() + PATIENCE;
    while fixture.s3.stats().faults == before {
        assert!(Instant::now() < deadline);
        tokio::task::yield_now().await;
    }
    tokio::time::timeout(PATIENCE, fixture.s3.stop()).await.unwrap();
    let _ = request.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_log_has_a_line_for_every_answer() {
    let fixture = Fixture::start().await;
    fixture.client().put("bucket", "k e y", vec![1u8; 300_000]).await.unwrap();
    fixture.get("k e y", "Range: bytes=0-9\r\n").await.unwrap();
    fixture.get("k e y", "").await.unwrap();
    fixture.ask(Method::HEAD, "k e y", "").await.unwrap();
    fixture.ask(Method::HEAD, "missing", "").await.unwrap_err();
    fixture.list("", "/").await.unwrap();
    let log = fixture.log();
    let lines: Vec<&str> = log.lines().collect();
    let expect = [
        r#""kind":"PUT","op":"PutObject","bucket":"bucket","key":"k e y","status":200,"bytes":0}"#,
        r#""kind":"GET","op":"GetObject","bucket":"bucket","key":"k e y","range":"bytes=0-9","status":206,"bytes":10}"#,
        r#""kind":"GET","op":"GetObject","bucket":"bucket","key":"k e y","status":200,"bytes":300000}"#,
        r#""kind":"HEAD","op":"HeadObject","bucket":"bucket","key":"k e y","status":200,"bytes":0}"#,
        r#""kind":"HEAD","op":"HeadObject","bucket":"bucket","key":"missing","status":404,"bytes":0}"#,
        r#""kind":"LIST","op":"ListObjectsV2","bucket":"bucket","key":"","status":200,"bytes":"#,
    ];
    assert_eq!(lines.len(), expect.len(), "{log}");
    for (line, expect) in lines.iter().zip(expect) {
        assert!(line.starts_with(r#"{"time_ms":"#) && line.contains(expect), "{line}\n{expect}");
    }
    assert_eq!((fixture.s3.stats().requests, fixture.s3.stats().errors), (6, 1));
    fixture.s3.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_second_port_is_for_who_has_its_token_and_is_no_page() {
    let fixture = Fixture::start().await;
    fixture.s3.store().put("bucket", "key", b"kept").unwrap();
    let admin = fixture.s3.admin_addr().unwrap();
    let authorization = fixture.authorization();
    let sparse = "/_dev/sparse?bucket=bucket&key=key&size=1000";
    for (headers, status) in [
        (String::new(), "401"),
        ("Authorization: Bearer 0123456789abcdef\r\n".to_owned(), "401"),
        // As a page sends it that a browser shows, and one whose name leads here.
        (format!("Origin: http://{admin}\r\n{authorization}"), "403"),
        (format!("Host: evil.example\r\n{authorization}"), "4"),
    ] {
        for (method, path) in [("POST", sparse), ("DELETE", "/_dev/faults"), ("GET", "/metrics"), ("GET", "/healthz")] {
            let (head, _) = exchange(admin, method, path, &headers).await.unwrap();
            assert!(head.starts_with(&format!("http/1.1 {status}")), "{method} {path} {headers}: {head}");
        }
    }
    let named = format!("POST {sparse} HTTP/1.1\r\nHost: evil.example:{}\r\n{authorization}\r\n", admin.port());
    let mut stream = TcpStream::connect(admin).await.unwrap();
    stream.write_all(named.as_bytes()).await.unwrap();
    let mut answer = [0; 12];
    tokio::time::timeout(PATIENCE, stream.read_exact(&mut answer)).await.unwrap().unwrap();
    assert_eq!(&answer, b"HTTP/1.1 403");
    assert_eq!(fixture.client().get("bucket", "key").await.unwrap(), "kept");
    assert!(fixture.admin("POST", sparse, "").await.0.starts_with("http/1.1 200"));

    let other = tempfile::tempdir().unwrap();
    let mut config = DevS3Config::new(other.path());
    assert_eq!(config.admin_listen, None, "it is off unless it is asked for");
    config.admin_listen = Some("0.0.0.0:0".to_owned());
    let refused = DevS3::start(config).await.err().unwrap();
    assert!(refused.to_string().contains("--admin-listen 0.0.0.0:0"), "{refused}");
    fixture.s3.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_second_port_takes_faults_and_shows_counters() {
    let fixture = Fixture::start().await;
    let post = async |path: &str, body: &str| {
        let headers = format!("Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        // The blank line ends the header; the helper's own one follows the body and is not read.
        fixture.admin("POST", path, &headers).await
    };
    assert!(
        post("/_dev/faults", r#"{"kind":"503","operations":["LIST"],"count":1}"#).await.0.starts_with("http/1.1 204")
    );
    for nonsense in [r#"{"kind":"504"}"#, r#"{"colour":1}"#, r#"{"error_rate":2}"#, "{", ""] {
        assert!(post("/_dev/faults", nonsense).await.0.starts_with("http/1.1 4"), "{nonsense}");
    }
    let (_, body) = fixture.admin("GET", "/_dev/faults", "").await;
    assert!(String::from_utf8(body).unwrap().contains(r#""kind":"503""#));
    fixture.list("", "/").await.unwrap_err();
    fixture.list("", "/").await.unwrap();
    assert!(fixture.admin("DELETE", "/_dev/faults", "").await.0.starts_with("http/1.1 204"));

    let (head, body) = fixture.admin("POST", "/_dev/sparse?bucket=bucket&key=big&size=5368709120", "").await;
    assert!(head.starts_with("http/1.1 200"), "{head}");
    assert!(String::from_utf8(body).unwrap().contains("-1\""));
    assert_eq!(fixture.ask(Method::HEAD, "big", "").await.unwrap().headers["content-length"], "5368709120");
    let tail = fixture.client().get_range("bucket", "big", (5 << 30) - 4, (5 << 30) - 1).await.unwrap();
    assert_eq!(tail, [0u8; 4].as_slice());
    assert!(fixture.admin("POST", "/_dev/sparse?bucket=none&key=k&size=1", "").await.0.starts_with("http/1.1 400"));

    let (_, stats) = fixture.admin("GET", "/_dev/stats", "").await;
    let stats = String::from_utf8(stats).unwrap();
    assert!(
        stats.contains(r#""LIST":2"#) && stats.contains(r#""HEAD":1"#) && stats.contains(r#""faults":1"#),
        "{stats}"
    );
    let (_, metrics) = fixture.admin("GET", "/metrics", "").await;
    let metrics = String::from_utf8(metrics).unwrap();
    assert!(metrics.contains(r#"cavern_dev_s3_requests_total{operation="ListObjectsV2"} 2"#), "{metrics}");
    assert!(fixture.admin("POST", "/_dev/stats/reset", "").await.0.starts_with("http/1.1 204"));
    assert_eq!(fixture.s3.stats().requests, 0);
    fixture.s3.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_space_by_rule_is_a_bucket_like_any() {
    let fixture = Fixture::start().await;
    let post = async |path: &str, body: &str| {
        let headers = format!("Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        fixture.admin("POST", path, &headers).await.0
    };
    let rule = r#"{"keys":2500,"files_per_directory":100,"size_min":400000,"size_max":800000}"#;
    assert!(post("/_dev/key-space?bucket=bucket", rule).await.starts_with("http/1.1 204"));
    assert!(post("/_dev/key-space?bucket=made-now", "{}").await.starts_with("http/1.1 204"));
    for nonsense in [r#"{"keys":0}"#, r#"{"colour":1}"#, r#"{"changes":{"deleted":0.9}}"#, "{"] {
        assert!(post("/_dev/key-space?bucket=bucket", nonsense).await.starts_with("http/1.1 4"), "{nonsense}");
    }
    let (_, shown) = fixture.admin("GET", "/_dev/key-space?bucket=bucket", "").await;
    assert!(String::from_utf8(shown).unwrap().contains(r#""keys":2500"#));

    let found = fixture.list("", "").await.unwrap();
    assert_eq!((found.len(), fixture.s3.stats().count(Kind::List)), (2500, 3));
    assert_eq!((fixture.list("img/", "/").await.unwrap().len(), name_of(&found[100])), (25, "img/01/00000100.jpg"));
    let (key, etag, size) = (name_of(&found[7]), elements(&found[7], "ETag")[0], elements(&found[7], "Size")[0]);
    let etag = etag.replace("&quot;", "\"");
    let head = fixture.ask(Method::HEAD, key, "").await.unwrap().headers;
    assert_eq!((head["etag"].to_str().unwrap(), head["content-length"].to_str().unwrap()), (etag.as_str(), size));
    let whole = fixture.client().get("bucket", key).await.unwrap();
    assert_eq!(whole.len().to_string(), size);
    // Small answers are made at once, and large ones piece by piece.
    for (first, last) in [(0, 0), (3, 9), (100_001, 300_000), (1, whole.len() - 1)] {
        let part = fixture.client().get_range("bucket", key, first as u64, last as u64).await.unwrap();
        assert!(part == whole[first..=last], "{first}-{last}");
    }
    for (headers, status) in [
        (format!("If-Match: {etag}\r\n"), "200"),
        ("If-Match: \"other\"\r\n".to_owned(), "412"),
        (format!("If-None-Match: {etag}\r\n"), "304"),
        (format!("Range: bytes={size}-\r\n"), "416"),
    ] {
        let (head, _) = fixture.get(key, &headers).await.unwrap();
        assert!(head.starts_with(&format!("http/1.1 {status}")), "{headers}: {head}");
    }
    let source = header("x-amz-copy-source", &format!("/bucket/{key}"));
    fixture.client().send(Method::PUT, "bucket", "copy", "", source, Bytes::new()).await.unwrap();
    assert_eq!(fixture.client().get("bucket", "copy").await.unwrap(), whole);
    fixture.client().put("bucket", key, "over it").await.unwrap();
    assert_eq!(fixture.client().get("bucket", key).await.unwrap(), "over it");
    fixture.client().delete("bucket", key).await.unwrap();
    let gone = fixture.client().get("bucket", key).await.unwrap_err();
    assert!(is_refusal(&gone, StatusCode::NOT_FOUND, "NoSuchKey"), "{gone}");
    assert_eq!(fixture.list("img/", "").await.unwrap().len(), 2499);
    assert!(fixture.admin("DELETE", "/_dev/key-space?bucket=bucket", "").await.0.starts_with("http/1.1 204"));
    assert_eq!(fixture.list("", "").await.unwrap().iter().map(|entry| name_of(entry)).collect::<Vec<_>>(), ["copy"]);
    fixture.s3.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn listings_are_as_late_and_as_rare_as_the_profile_of_their_bucket_says() {
    let fixture = Fixture::start().await;
    fixture.s3.store().create_bucket("other").unwrap();
    let post = async |body: &str| {
        let headers = format!("Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        fixture.admin("POST", "/_dev/list-profile?bucket=bucket", &headers).await.0
    };
    assert!(post(r#"{"latency_ms":150}"#).await.starts_with("http/1.1 204"));
    let start = Instant::now();
    fixture.list("", "").await.unwrap();
    assert!(start.elapsed() >= Duration::from_millis(150));
    // One page in a second for each prefix: the second of two fails, unless they are a second apart.
    assert!(post(r#"{"pages_per_second":1,"rate_of":"prefix"}"#).await.starts_with("http/1.1 204"));
    let start = Instant::now();
    fixture.list("a/", "").await.unwrap();
    fixture.list("b/", "").await.unwrap();
    match fixture.list("a/", "").await {
        Ok(_) => assert!(start.elapsed() >= Duration::from_secs(1)),
        Err(error) => assert!(is_refusal(&error, StatusCode::SERVICE_UNAVAILABLE, "SlowDown"), "{error}"),
    }
    for _ in 0..3 {
        fixture.client().send(Method::GET, "other", "", "list-type=2", HeaderMap::new(), Bytes::new()).await.unwrap();
    }
    for nonsense in [r#"{"pages_per_second":0}"#, r#"{"rate_of":"key"}"#, r#"{"latency_ms":-1}"#] {
        assert!(post(nonsense).await.starts_with("http/1.1 4"), "{nonsense}");
    }
    let (_, shown) = fixture.admin("GET", "/_dev/list-profile?bucket=bucket", "").await;
    let shown = String::from_utf8(shown).unwrap();
    assert_eq!(shown, r#"{"latency_ms":0,"pages_per_second":1,"rate_of":"prefix"}"#);
    fixture.s3.stop().await;
}

/// What a listing says of each of these rows: version id, and whether it is the latest.
fn version_rows<'d>(document: &'d str, kind: &str) -> Vec<(&'d str, &'d str)> {
    let rows = elements(document, kind).into_iter();
    rows.map(|row| (elements(row, "VersionId")[0], elements(row, "IsLatest")[0])).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn versions_are_kept_listed_and_read_where_they_are_switched_on() {
    let fixture = Fixture::start().await;
    let s3 = fixture.client();
    let switch =
        async |keep: &str| fixture.admin("POST", &format!("/_dev/versions?bucket=bucket&keep={keep}"), "").await;
    s3.put("bucket", "key", "before").await.unwrap();
    s3.put("bucket", "key", "first").await.unwrap();
    assert!(switch("true").await.0.starts_with("http/1.1 204"));
    assert!(switch("perhaps").await.0.starts_with("http/1.1 4"));
    let status = text(&fixture.ask(Method::GET, "", "versioning=").await.unwrap());
    assert_eq!(elements(&status, "Status"), ["Enabled"]);
    s3.put("bucket", "key", "second").await.unwrap();
    s3.put("bucket", "key-2", "of another key").await.unwrap();
    s3.delete("bucket", "key").await.unwrap();
    assert!(is_refusal(&s3.get("bucket", "key").await.unwrap_err(), StatusCode::NOT_FOUND, "NoSuchKey"));
    assert_eq!(fixture.list("", "").await.unwrap().len(), 1);

    let listed = text(&fixture.ask(Method::GET, "", "prefix=key&versions=").await.unwrap());
    let versions = version_rows(&listed, "Version");
    assert_eq!(versions.iter().map(|(_, latest)| *latest).collect::<Vec<_>>(), ["false", "false", "true"], "{listed}");
    assert_eq!(version_rows(&listed, "DeleteMarker").iter().map(|(_, latest)| *latest).collect::<Vec<_>>(), ["true"]);
    for ((id, _), bytes) in versions.iter().zip(["second", "first", "of another key"]) {
        let key = if bytes.starts_with("of") { "key-2" } else { "key" };
        let answer = fixture.ask(Method::GET, key, &format!("versionId={id}")).await.unwrap();
        assert_eq!((text(&answer).as_str(), answer.headers["x-amz-version-id"].to_str().unwrap()), (bytes, *id));
        let head = fixture.ask(Method::HEAD, key, &format!("versionId={id}")).await.unwrap();
        assert_eq!(head.headers["content-length"].to_str().unwrap(), bytes.len().to_string());
    }
    let marker = version_rows(&listed, "DeleteMarker")[0].0;
    for id in [marker, "none"] {
        let refused = fixture.ask(Method::GET, "key", &format!("versionId={id}")).await.unwrap_err();
        assert!(is_refusal(&refused, StatusCode::NOT_FOUND, "NoSuchVersion"), "{refused}");
    }
    let refused = fixture.ask(Method::DELETE, "key", &format!("versionId={}", versions[0].0)).await.unwrap_err();
    assert!(is_refusal(&refused, StatusCode::NOT_IMPLEMENTED, "NotImplemented"), "{refused}");

    assert!(switch("false").await.0.starts_with("http/1.1 204"));
    let refused = fixture.ask(Method::GET, "key", &format!("versionId={}", versions[0].0)).await.unwrap_err();
    assert!(is_refusal(&refused, StatusCode::NOT_FOUND, "NoSuchVersion"), "{refused}");
    fixture.s3.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_does_no_harm() {
    let fixture = Fixture::start().await;
    for garbage in [b"GARBAGE\r\n\r\n".as_slice(), b"\x16\x03\x01\x02\x00\x01", &[0xff; 100_000], b""] {
        for to in [fixture.s3.addr(), fixture.s3.admin_addr().unwrap()] {
            let mut stream = TcpStream::connect(to).await.unwrap();
            // The server may hang up in the middle of it.
            let _ = stream.write_all(garbage).await;
            let _ = stream.shutdown().await;
            let mut answer = Vec::new();
            let _ = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer)).await.unwrap();
            assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 400"));
        }
    }
    let path = "/bucket/key?X-Amz-Signature=zz&X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Date=1&X-Amz-Credential=%2F%2F";
    for (method, path) in
        [("GET", path), ("PUT", path), ("GET", "/bucket?list-type=2&continuation-token=zz"), ("BREW", "/")]
    {
        let (head, _) =
            exchange(fixture.s3.addr(), method, path, "Authorization: AWS4-HMAC-SHA256 x\r\n").await.unwrap();
        assert!(head.starts_with("http/1.1 4"), "{method} {path}: {head}");
    }
    fixture.client().put("bucket", "key", "still here").await.unwrap();
    fixture.s3.stop().await;
}
