//! Servers that speak HTTP and break the protocol above it, each in its own way.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on should stop there")]

mod support;

use std::time::{Duration, Instant};

use cavern_conf::schema;
use cavern_ufs::{Denial, ListMode, Ufs, UfsError};
use support::{conf, hasty, options};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::JoinHandle;

/// A server that gives the same answer to every request and closes; its task ends when it is dropped.
struct Server {
    url: String,
    task: JoinHandle<()>,
}

#[derive(Clone)]
struct Answer {
    /// Status line and headers.
    head: &'static str,
    body: Vec<u8>,
    /// Between any two bytes of the body.
    pause: Duration,
}

impl Server {
    async fn answering(head: &'static str, body: &[u8]) -> Self {
        Self::start(Answer { head, body: body.to_vec(), pause: Duration::ZERO }).await
    }

    async fn start(answer: Answer) -> Self {
        Self::at(TcpListener::bind("127.0.0.1:0").await.unwrap(), answer)
    }

    fn at(listener: TcpListener, answer: Answer) -> Self {
        let url = format!("http://{}", listener.local_addr().unwrap());
        let task = tokio::spawn(async move {
            let mut exchanges = tokio::task::JoinSet::new();
            while let Ok((socket, _)) = listener.accept().await {
                let answer = answer.clone();
                // A client that goes away is what half of these tests are about.
                exchanges.spawn(async move { exchange(socket, answer).await.ok() });
            }
        });
        Self { url, task }
    }

    fn ufs(&self) -> Ufs {
        self.ufs_with(&conf())
    }

    fn ufs_with(&self, conf: &schema::Ufs) -> Ufs {
        let options = options(&[("s3.endpoint_url", &self.url), ("s3.anonymous", "true")]);
        Ufs::open("s3://data", &options, conf).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn exchange(mut socket: TcpStream, answer: Answer) -> std::io::Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(socket.read_u8().await?);
    }
    socket.write_all(answer.head.replace('\n', "\r\n").as_bytes()).await?;
    socket.write_all(b"connection: close\r\n\r\n").await?;
    if answer.pause.is_zero() {
        return socket.write_all(&answer.body).await;
    }
    for byte in answer.body {
        socket.write_all(&[byte]).await?;
        tokio::time::sleep(answer.pause).await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_of_another_range_are_never_taken() {
    for head in [
        // The range ignored.
        "HTTP/1.1 200 OK\ncontent-length: 4\n",
        // Another range than was asked for.
        "HTTP/1.1 206 Partial Content\ncontent-length: 4\ncontent-range: bytes 0-3/100\n",
        "HTTP/1.1 206 Partial Content\ncontent-length: 4\n",
        "HTTP/1.1 204 No Content\n",
    ] {
        let server = Server::answering(head, b"abcd").await;
        let error = server.ufs().get_bytes("k", "e", 10..14).await.unwrap_err();
        assert!(matches!(error, UfsError::Malformed { .. }), "{head}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_of_another_length_is_an_error() {
    let right = "HTTP/1.1 206 Partial Content\ncontent-range: bytes 10-13/100\n";
    let server = Server::answering(right, b"abcd").await;
    assert_eq!(server.ufs().get_bytes("k", "e", 10..14).await.unwrap(), "abcd");
    for (body, is_short) in [(&b"abc"[..], true), (b"", true), (b"abcde", false)] {
        let server = Server::answering(right, body).await;
        let error = server.ufs().get_bytes("k", "e", 10..14).await.unwrap_err();
        match error {
            UfsError::ShortBody { expected: 4, .. } if is_short => {}
            UfsError::Malformed { .. } if !is_short => {}
            // After a piece of the body the retry asks for the rest, which this server does not answer.
            UfsError::Malformed { .. } if body == b"abc" => {}
            other => panic!("{body:?}: {other}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_version_behind_an_ignored_condition_is_noticed() {
    let head = "HTTP/1.1 206 Partial Content\ncontent-range: bytes 10-13/100\netag: \"new\"\n";
    let server = Server::answering(head, b"abcd").await;
    let error = server.ufs().get_bytes("k", "old", 10..14).await.unwrap_err();
    assert!(matches!(error, UfsError::VersionChanged { .. }), "{error}");
    assert_eq!(server.ufs().get_bytes("k", "new", 10..14).await.unwrap(), "abcd");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_head_counts_with_the_status_200_and_a_length_only() {
    let etag = "etag: \"e\"\n";
    for (status, length, is_good) in [
        ("200 OK", "content-length: 7\n", true),
        ("200 OK", "", false),
        ("206 Partial Content", "content-length: 7\n", false),
        ("204 No Content", "", false),
        ("202 Accepted", "content-length: 7\n", false),
    ] {
        let head = format!("HTTP/1.1 {status}\n{length}{etag}").leak();
        let answer = Server::answering(head, b"").await.ufs().head("k").await;
        match answer {
            Ok(object) => assert!(is_good && object.size == 7 && object.etag == "e", "{head}: {object:?}"),
            Err(error) => assert!(!is_good && matches!(error, UfsError::Malformed { .. }), "{head}: {error}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dripping_body_is_as_late_as_a_silent_one() {
    let head = "HTTP/1.1 206 Partial Content\ncontent-length: 100\ncontent-range: bytes 0-99/100\n";
    let drip = Answer { head, body: vec![1; 100], pause: Duration::from_millis(100) };
    let server = Server::start(drip).await;
    let ufs = server.ufs_with(&hasty());
    let began = Instant::now();
    let mut stream = ufs.get("k", "", 0..100).await.unwrap();
    let error = loop {
        match futures::StreamExt::next(&mut stream).await.expect("an error comes before the end") {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert!(matches!(error, UfsError::Deadline { .. }), "{error}");
    assert!(error.to_string().contains("ufs.io_timeout"), "{error}");
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_is_waited_for_by_who_is_patient_and_a_refusal_by_nobody() {
    // Nobody else gets the port, and nobody listens there yet.
    let port = TcpSocket::new_v4().unwrap();
    port.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let url = format!("http://{}", port.local_addr().unwrap());
    let options = options(&[("s3.endpoint_url", &url), ("s3.anonymous", "true")]);
    let ufs = Ufs::open("s3://data", &options, &conf()).unwrap();
    let patient = ufs.patient(Duration::from_secs(600));
    let error = ufs.head("k").await.unwrap_err();
    assert!(error.is_outage(), "{error}");
    let before = ufs.stats().retries;
    let reading = tokio::spawn(async move { patient.get_bytes("k", "e", 10..14).await });
    while ufs.stats().retries < before + 10 {
        assert!(!reading.is_finished(), "it has given up");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let head = "HTTP/1.1 206 Partial Content\ncontent-range: bytes 10-13/100\n";
    let server = Server::at(port.listen(16).unwrap(), Answer { head, body: b"abcd".to_vec(), pause: Duration::ZERO });
    assert_eq!(reading.await.unwrap().unwrap(), "abcd");
    drop(server);
    let server = Server::answering("HTTP/1.1 403 Forbidden\n", b"").await;
    let error = server.ufs().patient(Duration::from_secs(600)).get_bytes("k", "e", 10..14).await.unwrap_err();
    assert!(matches!(error, UfsError::Denied { .. }), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_s3_says_so() {
    for (head, body, part) in [
        ("HTTP/1.1 200 OK\n", "<html>hello</html>", "no ListBucketResult"),
        ("HTTP/1.1 200 OK\n", "", "no ListBucketResult"),
        ("HTTP/1.1 200 OK\n", "<ListBucketResult><Cont", "XML is broken"),
        ("HTTP/1.1 301 Moved Permanently\nlocation: http://127.0.0.1:1/\n", "", "s3.region_name"),
        ("HTTP/1.1 400 Bad Request\n", "<Error><Code>InvalidArgument</Code></Error>", "InvalidArgument"),
        ("HTTP/1.1 400 Bad Request\n", "<Error><Code>ExpiredToken</Code></Error>", "access denied"),
        ("HTTP/1.1 503 Slow Down\n", "<Error><Code>SlowDown</Code></Error>", "SlowDown"),
        ("HTTP/1.1 404 Not Found\n", "", "no such bucket"),
        ("nonsense\n", "", "unavailable"),
    ] {
        let server = Server::answering(head, body.as_bytes()).await;
        let error = server.ufs().list("", ListMode::Directory).next_page().await.unwrap_err().to_string();
        assert!(error.contains(part), "{head}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_that_is_not_about_credentials_says_what_it_is_about() {
    let skewed = "<Error><Code>RequestTimeTooSkewed</Code><Message>The difference is too\nlarge.</Message>\
                  <ServerTime>2020-01-02T03:04:05Z</ServerTime></Error>";
    let region = "<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-west-1</Region></Error>";
    let moved = "HTTP/1.1 301 Moved Permanently\nx-amz-bucket-region: eu-west-1\n";
    let long_ago = "HTTP/1.1 403 Forbidden\ndate: Thu, 02 Jan 2020 03:04:05 GMT\n";
    let forbidden = "HTTP/1.1 403 Forbidden\n";
    let (access_denied, archived) =
        ("<Error><Code>AccessDenied</Code></Error>", "<Error><Code>InvalidObjectState</Code></Error>");
    let unknown = "<Error><Code>AuthorizationHeaderMalformed</Code><Region>e u</Region></Error>";
    for (head, body, expected, parts) in [
        (forbidden, skewed, Denial::Clock, ["too large", "ahead of the store's", "NTP"]),
        (long_ago, "<Error><Code>RequestTimeTooSkewed</Code></Error>", Denial::Clock, ["clock", "ahead of", "NTP"]),
        (forbidden, "<Error><Code>RequestTimeTooSkewed</Code></Error>", Denial::Clock, ["403", "clocks", "NTP"]),
        (long_ago, access_denied, Denial::Credentials, ["access denied", "AccessDenied", "s3.credentials"]),
        (forbidden, archived, Denial::Archived, ["archived", "InvalidObjectState", "restore it"]),
        (
            "HTTP/1.1 400 Bad Request\n",
            region,
            Denial::Region,
            ["is in eu-west-1", "s3.region_name is us-east-1", "set s3.region_name=eu-west-1 with `cv mount"],
        ),
        (moved, "", Denial::Region, ["another region", "is in eu-west-1", "s3.region_name is us-east-1"]),
        ("HTTP/1.1 400 Bad Request\n", unknown, Denial::Credentials, ["400", "access denied", "s3.credentials"]),
    ] {
        let server = Server::answering(head, body.as_bytes()).await;
        let options = options(&[
            ("s3.endpoint_url", &server.url),
            ("s3.region_name", "us-east-1"),
            ("s3.credentials.access", "access"),
            ("s3.credentials.secret", "secret"),
        ]);
        let signing = Ufs::open("s3://data", &options, &conf()).unwrap();
        let error = signing.get_bytes("k", "e", 10..14).await.unwrap_err();
        assert!(matches!(error, UfsError::Denied { denial, .. } if denial == expected), "{head}: {error}");
        let text = error.to_string();
        assert!(parts.iter().all(|part| text.contains(part)), "{head}: {text}");
        assert!(expected == Denial::Credentials || !text.contains("credentials"), "{head}: {text}");
        assert!(!text.contains('\n'), "{text}");
        // A HEAD has no document: what it can tell is in its headers.
        let Err(UfsError::Denied { denial, .. }) = signing.head("k").await else { continue };
        let by_headers = match expected {
            Denial::Credentials if head == long_ago => Denial::Clock,
            Denial::Clock if head == forbidden => Denial::Credentials,
            Denial::Archived => Denial::Credentials,
            expected => expected,
        };
        assert_eq!(denial, by_headers, "HEAD: {head}");
        let Err(UfsError::Denied { denial, .. }) = server.ufs().head("k").await else { continue };
        assert_ne!(denial, Denial::Clock, "nothing is signed");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endless_error_document_or_listing_is_cut_off() {
    let server = Server::answering("HTTP/1.1 403 Forbidden\n", &vec![b'x'; 1 << 20]).await;
    assert!(matches!(server.ufs().check().await, Err(UfsError::Denied { .. })));
    let server = Server::answering("HTTP/1.1 200 OK\n", &vec![b' '; 9 << 20]).await;
    let error = server.ufs().check().await.unwrap_err();
    assert!(error.to_string().contains("length limit"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listing_that_gets_no_further_ends() {
    let page = "<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>\
        <Contents><Key>a</Key><Size>1</Size></Contents></ListBucketResult>";
    let server = Server::answering("HTTP/1.1 200 OK\n", page.as_bytes()).await;
    let mut list = server.ufs().list("", ListMode::Recursive);
    assert_eq!(list.next_page().await.unwrap().unwrap().objects.len(), 1);
    let error = list.next_page().await.unwrap_err();
    assert!(matches!(error, UfsError::Malformed { .. }) && error.to_string().contains("no further"), "{error}");
}
