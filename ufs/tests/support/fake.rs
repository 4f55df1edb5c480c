//! A store in memory that verifies the signature over the path as it was sent, and fails as a test wants.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use cavern_conf::schema;
use cavern_ufs::Ufs;
use parking_lot::Mutex;
use percent_encoding::percent_decode_str;
use reqsign_core::hash::{hex_hmac_sha256, hex_sha256, hmac_sha256};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

use super::options;

const SECRET: &str = "fake-secret";

#[derive(Clone, Default)]
pub struct Object {
    pub body: Vec<u8>,
    pub etag: String,
    /// Without `x-amz-meta-`.
    pub metadata: BTreeMap<String, String>,
}

#[derive(Default)]
pub struct State {
    /// By key, as it was spelt before it was sent.
    pub objects: BTreeMap<String, Object>,
    pub uploads: BTreeMap<String, Object>,
    versions: u64,
    /// Beginnings of request lines: each once, what is asked for is done, and the answer lost.
    pub lost: Vec<&'static str>,
    /// Time that a completion takes, in which blanks are sent.
    pub completion: Duration,
    /// Documents that are sent in place of the next completions, under the status 200.
    pub refusals: Vec<&'static str>,
    /// Request lines of all that came, and of those whose signature is of another path.
    pub asked: Vec<String>,
    pub mismatches: Vec<String>,
}

/// A server that answers once on each connection. It ends when it is dropped.
pub(super) struct Server {
    pub url: String,
    task: JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Server {
    pub async fn start<E>(exchange: impl Fn(TcpStream) -> E + Send + 'static) -> Self
    where
        E: Future<Output = std::io::Result<()>> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let task = tokio::spawn(async move {
            let mut exchanges = JoinSet::new();
            while let Ok((socket, _)) = listener.accept().await {
                exchanges.spawn(exchange(socket));
            }
        });
        Self { url, task }
    }
}

pub struct Fake {
    pub url: String,
    pub state: Arc<Mutex<State>>,
    _server: Server,
}

impl Fake {
    pub async fn start() -> Self {
        let state = Arc::new(Mutex::new(State::default()));
        let shared = state.clone();
        let server = Server::start(move |socket| exchange(socket, shared.clone())).await;
        Self { url: server.url.clone(), state, _server: server }
    }

    pub fn ufs(&self, conf: &schema::Ufs) -> Ufs {
        let options = options(&[
            ("s3.endpoint_url", &self.url),
            ("s3.credentials.access", "fake"),
            ("s3.credentials.secret", SECRET),
        ]);
        Ufs::open("s3://data", &options, conf).unwrap()
    }

    /// How many request lines began so.
    pub fn count(&self, line: &str) -> usize {
        self.state.lock().asked.iter().filter(|asked| asked.starts_with(line)).count()
    }
}

pub(super) struct Asked {
    pub method: String,
    pub path: String,
    pub query: String,
    headers: HashMap<String, String>,
    pub body: Vec<u8>,
}

/// Status, headers and body.
pub(super) type Reply = (u16, String, Vec<u8>);

fn reply(status: u16, code: &str) -> Reply {
    (status, String::new(), format!("<Error><Code>{code}</Code></Error>").into_bytes())
}

impl Asked {
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }

    pub fn argument(&self, name: &str) -> Option<&str> {
        self.query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))
    }

    fn metadata(&self) -> BTreeMap<String, String> {
        self.named("x-amz-meta-")
    }

    /// The headers whose names begin so, without that.
    pub fn named(&self, prefix: &str) -> BTreeMap<String, String> {
        let named = self.headers.iter().filter_map(|(name, value)| Some((name.strip_prefix(prefix)?, value)));
        named.map(|(name, value)| (name.to_owned(), value.clone())).collect()
    }

    /// Whether the signature is that of this path and this query, as they were sent.
    fn is_signed(&self) -> bool {
        let part = |name: &str| {
            let from = self.header("authorization").split_once(name).map_or("", |(_, rest)| rest);
            from.split(',').next().unwrap_or_default()
        };
        let (credential, names, signature) = (part("Credential="), part("SignedHeaders="), part("Signature="));
        let mut pairs: Vec<&str> = self.query.split('&').collect();
        pairs.sort_unstable();
        let mut request = format!("{}\n{}\n{}\n", self.method, self.path, pairs.join("&"));
        for name in names.split(';') {
            writeln!(request, "{name}:{}", self.header(name).trim()).unwrap();
        }
        write!(request, "\n{names}\n{}", self.header("x-amz-content-sha256")).unwrap();
        let (_, scope) = credential.split_once('/').unwrap_or_default();
        let text =
            format!("AWS4-HMAC-SHA256\n{}\n{scope}\n{}", self.header("x-amz-date"), hex_sha256(request.as_bytes()));
        let first = format!("AWS4{SECRET}").into_bytes();
        let key = scope.split('/').fold(first, |key, part| hmac_sha256(&key, part.as_bytes()));
        signature == hex_hmac_sha256(&key, text.as_bytes())
    }
}

impl State {
    fn answer(&mut self, asked: &Asked) -> Reply {
        if !asked.is_signed() {
            self.mismatches.push(format!("{} {}?{}", asked.method, asked.path, asked.query));
            return reply(403, "SignatureDoesNotMatch");
        }
        let Some(key) = asked.path.strip_prefix("/data/") else { return self.list() };
        let key = percent_decode_str(key).decode_utf8().unwrap().into_owned();
        let there = self.objects.get(&key).cloned();
        match (asked.header("if-none-match"), asked.header("if-match"), &there) {
            ("*", _, Some(_)) => return reply(412, "PreconditionFailed"),
            (_, etag, Some(there)) if !etag.is_empty() && etag != there.etag => {
                return reply(412, "PreconditionFailed");
            }
            (_, etag, None) if !etag.is_empty() => return reply(404, "NoSuchKey"),
            _ => {}
        }
        let upload = asked.argument("uploadId").map(str::to_owned);
        match (asked.method.as_str(), upload) {
            ("HEAD" | "GET", _) => there.map_or(reply(404, "NoSuchKey"), |object| found(asked, object)),
            ("PUT", upload) => self.put(asked, key, upload),
            ("POST", None) => {
                self.versions += 1;
                let id = format!("u{}", self.versions);
                self.uploads.insert(id.clone(), Object { metadata: asked.metadata(), ..Object::default() });
                let body =
                    format!("<InitiateMultipartUploadResult><UploadId>{id}</UploadId></InitiateMultipartUploadResult>");
                (200, String::new(), body.into_bytes())
            }
            ("POST", Some(id)) => match self.uploads.remove(&id) {
                None => reply(404, "NoSuchUpload"),
                Some(object) => {
                    let etag = self.store(key, object);
                    let body =
                        format!("<CompleteMultipartUploadResult><ETag>{etag}</ETag></CompleteMultipartUploadResult>");
                    (200, String::new(), body.into_bytes())
                }
            },
            ("DELETE", Some(id)) => self.uploads.remove(&id).map_or(reply(404, "NoSuchUpload"), |_| gone()),
            ("DELETE", None) => {
                self.objects.remove(&key);
                gone()
            }
            _ => reply(405, "MethodNotAllowed"),
        }
    }

    /// All keys, whatever was asked for.
    fn list(&self) -> Reply {
        let mut body = String::from("<ListBucketResult><IsTruncated>false</IsTruncated>");
        for (key, object) in &self.objects {
            let key = key.replace('&', "&amp;").replace('<', "&lt;");
            write!(body, "<Contents><Key>{key}</Key><Size>{}</Size></Contents>", object.body.len()).unwrap();
        }
        (200, String::new(), (body + "</ListBucketResult>").into_bytes())
    }

    fn put(&mut self, asked: &Asked, key: String, upload: Option<String>) -> Reply {
        let source = asked.header("x-amz-copy-source");
        let mut object = Object { body: asked.body.clone(), metadata: asked.metadata(), ..Object::default() };
        if let Some(source) = source.strip_prefix("/data/") {
            let source = percent_decode_str(source).decode_utf8().unwrap();
            let Some(from) = self.objects.get(&*source) else { return reply(404, "NoSuchKey") };
            if asked.header("x-amz-copy-source-if-match") != from.etag {
                return reply(412, "PreconditionFailed");
            }
            object.body.clone_from(&from.body);
            if asked.header("x-amz-metadata-directive") != "REPLACE" {
                object.metadata.clone_from(&from.metadata);
            }
        }
        let etag = match upload {
            None => self.store(key, object),
            Some(id) => match self.uploads.get_mut(&id) {
                None => return reply(404, "NoSuchUpload"),
                Some(upload) => {
                    upload.body.extend(object.body);
                    "\"part\"".to_owned()
                }
            },
        };
        let body = match (source.is_empty(), asked.argument("partNumber")) {
            (true, _) => String::new(),
            (false, None) => format!("<CopyObjectResult><ETag>{etag}</ETag></CopyObjectResult>"),
            (false, Some(_)) => format!("<CopyPartResult><ETag>{etag}</ETag></CopyPartResult>"),
        };
        (200, format!("etag: {etag}\r\n"), body.into_bytes())
    }

    fn store(&mut self, key: String, object: Object) -> String {
        self.versions += 1;
        let etag = format!("\"v{}\"", self.versions);
        self.objects.insert(key, Object { etag: etag.clone(), ..object });
        etag
    }
}

fn gone() -> Reply {
    (204, String::new(), Vec::new())
}

fn found(asked: &Asked, object: Object) -> Reply {
    let mut headers = format!("etag: {}\r\nlast-modified: Fri, 02 Jan 2026 03:04:05 GMT\r\n", object.etag);
    for (name, value) in &object.metadata {
        write!(headers, "x-amz-meta-{name}: {value}\r\n").unwrap();
    }
    let range = asked.header("range").strip_prefix("bytes=").and_then(|range| range.split_once('-'));
    let Some((first, last)) = range else { return (200, headers, object.body) };
    write!(headers, "content-range: bytes {first}-{last}/{}\r\n", object.body.len()).unwrap();
    let (first, last): (usize, usize) = (first.parse().unwrap(), last.parse().unwrap());
    (206, headers, object.body[first..=last].to_vec())
}

pub(super) async fn read(socket: &mut TcpStream) -> std::io::Result<Asked> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(socket.read_u8().await?);
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let mut lines = head.lines();
    let mut line = lines.next().unwrap_or_default().split(' ');
    let method = line.next().unwrap_or_default().to_owned();
    let target = line.next().unwrap_or_default();
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let (path, query) = (path.to_owned(), query.to_owned());
    let headers = lines.filter_map(|line| line.split_once(':'));
    let headers: HashMap<_, _> = headers.map(|(n, v)| (n.to_lowercase(), v.trim().to_owned())).collect();
    let length = headers.get("content-length").map_or(0, |length| length.parse().unwrap());
    let mut body = vec![0; length];
    socket.read_exact(&mut body).await?;
    Ok(Asked { method, path, query, headers, body })
}

async fn exchange(mut socket: TcpStream, state: Arc<Mutex<State>>) -> std::io::Result<()> {
    let asked = read(&mut socket).await?;
    let line = format!("{} {}?{}", asked.method, asked.path, asked.query);
    let is_completion = asked.method == "POST" && asked.argument("uploadId").is_some();
    let (completion, refusal) = {
        let mut state = state.lock();
        state.asked.push(line.clone());
        let refusal = if is_completion && !state.refusals.is_empty() { Some(state.refusals.remove(0)) } else { None };
        (state.completion, refusal)
    };
    if let Some(document) = refusal {
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", document.len());
        return socket.write_all(format!("{head}{document}").as_bytes()).await;
    }
    if is_completion && !completion.is_zero() {
        let head = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n";
        let _ = socket.write_all(head.as_bytes()).await;
        let end = tokio::time::Instant::now() + completion;
        while tokio::time::Instant::now() < end {
            let _ = socket.write_all(b"1\r\n \r\n").await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let (_, _, body) = state.lock().answer(&asked);
        let body = String::from_utf8(body).unwrap();
        return socket.write_all(format!("{:x}\r\n{body}\r\n0\r\n\r\n", body.len()).as_bytes()).await;
    }
    let reply = {
        let mut state = state.lock();
        let reply = state.answer(&asked);
        if let Some(at) = state.lost.iter().position(|lost| line.starts_with(lost)) {
            state.lost.remove(at);
            return Ok(());
        }
        reply
    };
    send(&mut socket, &asked, reply).await
}

pub(super) async fn send(socket: &mut TcpStream, asked: &Asked, (status, headers, body): Reply) -> std::io::Result<()> {
    let length = if status == 204 { String::new() } else { format!("content-length: {}\r\n", body.len()) };
    let head = format!("HTTP/1.1 {status} X\r\n{length}connection: close\r\n{headers}\r\n");
    socket.write_all(head.as_bytes()).await?;
    if asked.method != "HEAD" {
        socket.write_all(&body).await?;
    }
    Ok(())
}
