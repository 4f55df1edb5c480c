//! What clients see on the wire: an S3 client (opendal) for the usual paths, and bytes over TCP under presigned URLs
//! where the exact answer counts.

// Helpers count as tests here: they stop where they cannot go on.
#![allow(clippy::unwrap_used)]

use std::net::SocketAddr;
use std::sync::Once;
use std::time::{Duration, Instant};

use cavern_dev_s3::{DevS3, DevS3Config, FaultKind, FaultRule, Kind, Running};
use opendal::{ErrorKind, Operator, services};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const PATIENCE: Duration = Duration::from_secs(20);

struct Fixture {
    root: tempfile::TempDir,
    s3: Running,
}

impl Fixture {
    async fn start() -> Self {
        static PROVIDER: Once = Once::new();
        PROVIDER.call_once(|| rustls::crypto::ring::default_provider().install_default().unwrap());
        let root = tempfile::tempdir().unwrap();
        let mut config = DevS3Config::new(root.path().join("root"));
        config.request_log = Some(root.path().join("log"));
        config.admin_listen = Some("127.0.0.1:0".to_owned());
        let s3 = DevS3::start(config).await.unwrap();
        s3.store().create_bucket("bucket").unwrap();
        Self { root, s3 }
    }

    fn client(&self) -> Operator {
        self.client_with("cavern", "cavern-secret", "bucket")
    }

    fn client_with(&self, access_key: &str, secret_key: &str, bucket: &str) -> Operator {
        opendal_http_transport_reqwest::install_default();
        let s3 = services::S3::default()
            .endpoint(&self.s3.endpoint())
            .region("us-east-1")
            .bucket(bucket)
            .access_key_id(access_key)
            .secret_access_key(secret_key)
            .disable_config_load()
            .disable_ec2_metadata();
        Operator::new(s3).unwrap()
    }

    /// Sends a presigned GET with more headers and returns the answer's head and body.
    async fn get(&self, key: &str, headers: &str) -> Result<(String, Vec<u8>), std::io::Error> {
        let signed = self.client().presign_read(key, PATIENCE).await.unwrap();
        exchange(self.s3.addr(), "GET", &signed.uri().to_string(), headers).await
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
async fn exchange(to: SocketAddr, method: &str, uri: &str, headers: &str) -> Result<(String, Vec<u8>), std::io::Error> {
    let path = uri.split_once(&to.to_string()).map_or(uri, |(_, path)| path);
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

#[tokio::test(flavor = "multi_thread")]
async fn a_client_writes_reads_lists_and_deletes() {
    let fixture = Fixture::start().await;
    let op = fixture.client();
    let big: Vec<u8> = (0..3_000_000u32).map(|n| n as u8 ^ (n >> 8) as u8).collect();
    for (key, data) in [("a b/ü%+.bin", big.as_slice()), ("a b/empty", b""), ("top", b"top")] {
        op.write_with(key, data.to_vec()).content_type("text/x").await.unwrap();
        assert_eq!(op.read(key).await.unwrap().to_vec(), data, "{key}");
    }
    let part = op.read_with("a b/ü%+.bin").range(1_000_000..1_700_000).await.unwrap();
    assert_eq!(part.to_vec(), &big[1_000_000..1_700_000]);
    let stat = op.stat("top").await.unwrap();
    assert_eq!((stat.content_length(), stat.content_type()), (3, Some("text/x")));
    assert_eq!(stat.etag(), Some("\"b28354b543375bfa94dabaeda722927f\""));

    let mut names: Vec<_> = op.list("").await.unwrap().iter().map(|entry| entry.path().to_owned()).collect();
    names.sort();
    assert_eq!(names, ["a b/", "top"]);
    let mut writer = op.writer_with("parts").chunk(5 << 20).concurrent(3).await.unwrap();
    for _ in 0..4 {
        writer.write(big.clone()).await.unwrap();
    }
    writer.close().await.unwrap();
    assert!(op.stat("parts").await.unwrap().etag().unwrap().ends_with("-3\""));
    assert_eq!(op.read("parts").await.unwrap().to_vec(), big.repeat(4));
    op.copy("parts", "a b/copy").await.unwrap();
    assert_eq!(op.read("a b/copy").await.unwrap().len(), 12_000_000);
    assert_eq!(fixture.s3.stats().operations["CopyObject"], 1);

    op.delete("top").await.unwrap();
    assert_eq!(op.read("top").await.unwrap_err().kind(), ErrorKind::NotFound);
    op.delete_with("a b/").recursive(true).await.unwrap();
    let left: Vec<_> = op.list_with("").recursive(true).await.unwrap().iter().map(|e| e.path().to_owned()).collect();
    assert_eq!(left, ["parts"]);
    fixture.s3.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn listings_of_thousands_are_paged() {
    let fixture = Fixture::start().await;
    let keys: Vec<String> = (0..2500).map(|n| format!("d{}/{n:05}", n % 7)).collect();
    for key in &keys {
        fixture.s3.store().put("bucket", key, key.as_bytes()).unwrap();
    }
    let op = fixture.client();
    let found = op.list_with("").recursive(true).await.unwrap();
    let mut expected = keys.clone();
    expected.sort();
    assert_eq!(found.iter().map(|entry| entry.path()).collect::<Vec<_>>(), expected);
    assert!(found.iter().all(|entry| entry.metadata().etag().is_some() && entry.metadata().content_length() == 8));
    assert_eq!(fixture.s3.stats().count(Kind::List), 3);
    fixture.s3.reset_stats();
    assert_eq!(op.list("").await.unwrap().len(), 7);
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
        let error = fixture.client_with(access_key, secret_key, "bucket").read("key").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied);
        assert!(error.to_string().contains(code), "{error}");
    }
    let (head, _) = exchange(fixture.s3.addr(), "GET", "/bucket/key", "").await.unwrap();
    assert!(head.starts_with("http/1.1 403"), "{head}");
    let error = fixture.client_with("cavern", "cavern-secret", "nobody").read("key").await.unwrap_err();
    assert!(error.to_string().contains("NoSuchBucket"), "{error}");
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
    let signed = fixture.client().presign_read("key", PATIENCE).await.unwrap().uri().to_string();
    let path = signed.split_once(&fixture.s3.addr().to_string()).unwrap().1;
    let mut stream = TcpStream::connect(fixture.s3.addr()).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", fixture.s3.addr());
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = vec![0; 1 << 20];
    stream.read_exact(&mut answer).await.unwrap();
    fixture.s3.store().put("bucket", "key", &new).unwrap();
    stream.read_to_end(&mut answer).await.unwrap();
    assert!(answer.ends_with(&old));
    assert_eq!(fixture.client().read("key").await.unwrap().to_vec(), new);
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
    assert!(fixture.client().read("big").await.is_err());
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
    let signed = fixture.client().presign_read("big", PATIENCE).await.unwrap().uri().to_string();
    let request = tokio::spawn(async move {
        let to = signed.strip_prefix("http://").unwrap().split('/').next().unwrap().parse().unwrap();
        exchange(to, "GET", &signed, "").await
    });
    let deadline = Instant::now() + PATIENCE;
    while fixture.s3.stats().faults < 6 {
        assert!(Instant::now() < deadline);
        tokio::task::yield_now().await;
    }
    tokio::time::timeout(PATIENCE, fixture.s3.stop()).await.unwrap();
    let _ = request.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_log_has_a_line_for_every_answer() {
    let fixture = Fixture::start().await;
    let op = fixture.client();
    op.write("k e y", vec![1u8; 300_000]).await.unwrap();
    fixture.get("k e y", "Range: bytes=0-9\r\n").await.unwrap();
    fixture.get("k e y", "").await.unwrap();
    op.stat("k e y").await.unwrap();
    op.stat("missing").await.unwrap_err();
    op.list("").await.unwrap();
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
    assert_eq!(fixture.client().read("key").await.unwrap().to_vec(), b"kept");
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
    fixture.client().list("").await.unwrap_err();
    fixture.client().list("").await.unwrap();
    assert!(fixture.admin("DELETE", "/_dev/faults", "").await.0.starts_with("http/1.1 204"));

    let (head, body) = fixture.admin("POST", "/_dev/sparse?bucket=bucket&key=big&size=5368709120", "").await;
    assert!(head.starts_with("http/1.1 200"), "{head}");
    assert!(String::from_utf8(body).unwrap().contains("-1\""));
    assert_eq!(fixture.client().stat("big").await.unwrap().content_length(), 5 << 30);
    let tail = fixture.client().read_with("big").range((5 << 30) - 4..5 << 30).await.unwrap();
    assert_eq!(tail.to_vec(), [0; 4]);
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
    fixture.client().write("key", "still here").await.unwrap();
    fixture.s3.stop().await;
}
