//! Google Cloud Storage in memory, as its documentation has it: objects by the JSON interface with conditions by
//! generation, uploads in parts by the XML interface without, and tokens for the assertions of a service account.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;

use cavern_conf::schema;
use cavern_ufs::Ufs;
use parking_lot::Mutex;
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};
use tokio::net::TcpStream;

use super::fake::{Asked, Reply, Server, read, send};
use super::options;

#[derive(Clone, Default)]
pub struct Object {
    body: Vec<u8>,
    generation: u64,
    metadata: BTreeMap<String, String>,
}

#[derive(Default)]
struct Upload {
    metadata: BTreeMap<String, String>,
    parts: BTreeMap<u32, Vec<u8>>,
}

#[derive(Default)]
pub struct State {
    pub objects: BTreeMap<String, Object>,
    uploads: BTreeMap<String, Upload>,
    generation: u64,
    /// How many tokens were given out; the last one is good.
    pub tokens: u64,
    /// Tokens that were given out are good no more.
    pub are_tokens_refused: bool,
    /// Request lines of all that came.
    pub asked: Vec<String>,
}

pub struct Gcs {
    pub url: String,
    pub state: Arc<Mutex<State>>,
    _server: Server,
}

impl Gcs {
    pub async fn start() -> Self {
        let state = Arc::new(Mutex::new(State { generation: 1_700_000_000_000_000, ..State::default() }));
        let shared = state.clone();
        let server = Server::start(move |socket| exchange(socket, shared.clone())).await;
        Self { url: server.url.clone(), state, _server: server }
    }

    /// The key of a service account whose tokens are given out here.
    pub fn key(&self) -> String {
        let pem = include_str!("../../src/token/google/test_key.pem");
        let tokens = format!("{}/token", self.url);
        json!({ "type": "service_account", "client_email": "a@p.iam", "private_key": pem, "token_uri": tokens })
            .to_string()
    }

    pub fn ufs(&self, conf: &schema::Ufs) -> Ufs {
        let options = options(&[("gs.endpoint_url", &self.url), ("gs.credentials.key", &self.key())]);
        Ufs::open("gs://data", &options, conf).unwrap()
    }
}

fn error(status: u16, reason: &str) -> Reply {
    let body =
        json!({ "error": { "code": status, "message": format!("it is {reason}"), "errors": [{ "reason": reason }] } });
    (status, String::new(), body.to_string().into_bytes())
}

fn ok(body: &Value) -> Reply {
    (200, String::new(), body.to_string().into_bytes())
}

fn decoded(text: &str) -> String {
    percent_decode_str(text).decode_utf8().unwrap().into_owned()
}

fn described(key: &str, object: &Object) -> Value {
    json!({
        "name": key,
        "size": object.body.len().to_string(),
        "generation": object.generation.to_string(),
        "updated": "2026-01-02T03:04:05.678Z",
        "metadata": object.metadata,
    })
}

impl State {
    fn store(&mut self, key: &str, body: Vec<u8>, metadata: BTreeMap<String, String>) -> u64 {
        self.generation += 1;
        self.objects.insert(key.to_owned(), Object { body, generation: self.generation, metadata });
        self.generation
    }

    /// The refusal of a condition on what is under a key.
    fn refused(&self, asked: &Asked, key: &str) -> Option<Reply> {
        let wanted = asked.argument("ifGenerationMatch")?;
        let there = self.objects.get(key).map_or(0, |object| object.generation).to_string();
        (wanted != there).then(|| error(412, "conditionNotMet"))
    }

    fn answer(&mut self, asked: &Asked) -> Reply {
        if matches!(asked.method.as_str(), "POST" | "PUT") && asked.header("content-length").is_empty() {
            return error(411, "required");
        }
        if asked.path == "/token" {
            let form = String::from_utf8_lossy(&asked.body).into_owned();
            assert!(form.contains("assertion=") && form.contains("jwt-bearer"), "{form}");
            self.tokens += 1;
            self.are_tokens_refused = false;
            return ok(&json!({ "access_token": format!("token-{}", self.tokens), "expires_in": 3600 }));
        }
        if self.are_tokens_refused || asked.header("authorization") != format!("Bearer token-{}", self.tokens) {
            return error(401, "authError");
        }
        if let Some(rest) = asked.path.strip_prefix("/storage/v1/b/data/o") {
            return self.json(asked, rest.trim_start_matches('/'));
        }
        match (asked.path.as_str(), asked.path.strip_prefix("/data/")) {
            ("/upload/storage/v1/b/data/o", _) => self.insert(asked),
            (_, Some(key)) => self.xml(asked, &decoded(key)),
            _ => error(404, "notFound"),
        }
    }

    fn json(&mut self, asked: &Asked, rest: &str) -> Reply {
        if rest.is_empty() {
            return self.list(asked);
        }
        if let Some((source, target)) = rest.split_once("/rewriteTo/b/data/o/") {
            return self.rewrite(asked, &decoded(source), &decoded(target));
        }
        let key = decoded(rest);
        let Some(object) = self.objects.get(&key).cloned() else { return error(404, "notFound") };
        if let Some(refused) = self.refused(asked, &key) {
            return refused;
        }
        match (asked.method.as_str(), asked.argument("alt")) {
            ("DELETE", _) => {
                self.objects.remove(&key);
                (204, String::new(), Vec::new())
            }
            ("GET", Some("media")) => media(asked, &object),
            ("GET", _) => ok(&described(&key, &object)),
            _ => error(405, "methodNotAllowed"),
        }
    }

    fn list(&self, asked: &Asked) -> Reply {
        let argument = |name: &str| asked.argument(name).map(decoded).unwrap_or_default();
        let (prefix, delimiter, token) = (argument("prefix"), argument("delimiter"), argument("pageToken"));
        let limit: usize = argument("maxResults").parse().unwrap();
        let mut entries = BTreeMap::new();
        for (key, object) in &self.objects {
            let Some(rest) = key.strip_prefix(&prefix) else { continue };
            let group = (!delimiter.is_empty()).then(|| rest.find(&delimiter)).flatten();
            match group {
                Some(at) => entries.insert(key[..=prefix.len() + at].to_owned(), None),
                None => entries.insert(key.clone(), Some(object)),
            };
        }
        entries.retain(|entry, _| *entry > token);
        let mut page = json!({ "kind": "storage#objects" });
        if entries.len() > limit {
            let last = entries.keys().nth(limit - 1).unwrap().clone();
            page["nextPageToken"] = json!(last);
            entries.retain(|entry, _| *entry <= last);
        }
        let items: Vec<_> = entries.iter().filter_map(|(key, object)| Some(described(key, (*object)?))).collect();
        let prefixes: Vec<_> = entries.iter().filter(|(_, object)| object.is_none()).map(|(entry, _)| entry).collect();
        page["items"] = json!(items);
        page["prefixes"] = json!(prefixes);
        ok(&page)
    }

    fn insert(&mut self, asked: &Asked) -> Reply {
        let boundary = asked.header("content-type").split_once("boundary=").unwrap().1.to_owned();
        let marks = format!("--{boundary}");
        let find = |from: usize, what: &[u8]| {
            from + asked.body[from..].windows(what.len()).position(|window| window == what).unwrap()
        };
        let head = find(0, b"\r\n\r\n") + 4;
        let end = find(head, format!("\r\n{marks}").as_bytes());
        let description: Value = serde_json::from_slice(&asked.body[head..end]).unwrap();
        let body = find(end, b"\r\n\r\n") + 4;
        let tail = format!("\r\n{marks}--\r\n");
        assert!(asked.body.ends_with(tail.as_bytes()));
        let body = asked.body[body..asked.body.len() - tail.len()].to_vec();
        let key = description["name"].as_str().unwrap().to_owned();
        if let Some(refused) = self.refused(asked, &key) {
            return refused;
        }
        let metadata = serde_json::from_value(description["metadata"].clone()).unwrap();
        let generation = self.store(&key, body, metadata);
        ok(&json!({ "generation": generation.to_string() }))
    }

    fn rewrite(&mut self, asked: &Asked, source: &str, target: &str) -> Reply {
        let Some(object) = self.objects.get(source).cloned() else { return error(404, "notFound") };
        if object.generation.to_string() != asked.argument("ifSourceGenerationMatch").unwrap() {
            return error(412, "conditionNotMet");
        }
        if let Some(refused) = self.refused(asked, target) {
            return refused;
        }
        // The first answer to what is large says that it takes longer.
        if object.body.len() > 1 << 20 && asked.argument("rewriteToken").is_none() {
            return ok(&json!({ "done": false, "rewriteToken": "more" }));
        }
        let description: Value = serde_json::from_slice(&asked.body).unwrap_or_default();
        let metadata = match description.get("metadata") {
            Some(given) => serde_json::from_value(given.clone()).unwrap(),
            None => object.metadata,
        };
        let generation = self.store(target, object.body, metadata);
        ok(&json!({ "done": true, "resource": { "generation": generation.to_string() } }))
    }

    fn xml(&mut self, asked: &Asked, key: &str) -> Reply {
        let id = asked.argument("uploadId").map(decoded);
        match (asked.method.as_str(), id) {
            ("POST", None) if asked.query == "uploads" => {
                self.generation += 1;
                let id = format!("u{}", self.generation);
                let upload = Upload { metadata: asked.named("x-goog-meta-"), parts: BTreeMap::new() };
                self.uploads.insert(id.clone(), upload);
                let body =
                    format!("<InitiateMultipartUploadResult><UploadId>{id}</UploadId></InitiateMultipartUploadResult>");
                (200, String::new(), body.into_bytes())
            }
            ("PUT", Some(id)) => match self.uploads.get_mut(&id) {
                Some(upload) => {
                    let number = asked.argument("partNumber").unwrap().parse().unwrap();
                    upload.parts.insert(number, asked.body.clone());
                    (200, format!("etag: \"part-{number}\"\r\n"), Vec::new())
                }
                None => (404, String::new(), b"<Error><Code>NoSuchUpload</Code></Error>".to_vec()),
            },
            ("POST", Some(id)) => match self.uploads.remove(&id) {
                Some(Upload { metadata, parts }) => {
                    let made = self.store(key, parts.into_values().flatten().collect(), metadata);
                    let body = format!(
                        "<CompleteMultipartUploadResult><ETag>\"{made}\"</ETag></CompleteMultipartUploadResult>"
                    );
                    (200, String::new(), body.into_bytes())
                }
                None => (404, String::new(), b"<Error><Code>NoSuchUpload</Code></Error>".to_vec()),
            },
            ("DELETE", Some(id)) => match self.uploads.remove(&id) {
                Some(_) => (204, String::new(), Vec::new()),
                None => (404, String::new(), b"<Error><Code>NoSuchUpload</Code></Error>".to_vec()),
            },
            ("HEAD", None) => match self.objects.get(key) {
                Some(object) => {
                    let generation = object.generation;
                    (200, format!("etag: \"{generation}\"\r\nx-goog-generation: {generation}\r\n"), Vec::new())
                }
                None => (404, String::new(), Vec::new()),
            },
            _ => (405, String::new(), b"<Error><Code>MethodNotAllowed</Code></Error>".to_vec()),
        }
    }
}

fn media(asked: &Asked, object: &Object) -> Reply {
    let (first, last) = asked.header("range").strip_prefix("bytes=").unwrap().split_once('-').unwrap();
    let (first, last): (usize, usize) = (first.parse().unwrap(), last.parse().unwrap());
    let length = object.body.len();
    if first >= length {
        return (416, String::new(), Vec::new());
    }
    let last = last.min(length - 1);
    let mut headers = format!("x-goog-generation: {}\r\n", object.generation);
    write!(headers, "content-range: bytes {first}-{last}/{length}\r\n").unwrap();
    (206, headers, object.body[first..=last].to_vec())
}

async fn exchange(mut socket: TcpStream, state: Arc<Mutex<State>>) -> std::io::Result<()> {
    let asked = read(&mut socket).await?;
    let reply = {
        let mut state = state.lock();
        state.asked.push(format!("{} {}?{}", asked.method, asked.path, asked.query));
        state.answer(&asked)
    };
    send(&mut socket, &asked, reply).await
}
