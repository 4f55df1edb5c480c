//! The bucket behind a cluster: objects, request counters, faults.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use cavern_plain_s3::PlainS3;
use serde_json::Value;
use tokio::runtime::Runtime;
use tokio::time::timeout;

use crate::http::{HttpAnswer, http_request_with};

const TIMEOUT: Duration = Duration::from_secs(60);

/// The embedded object store of a cluster. Every call waits for its answer and panics when it is not a good one.
pub struct S3 {
    pub endpoint: String,
    pub access_key: String,
    pub secret_key: String,
    admin: S3Admin,
    /// Whether clients ask twice for what is slow to come.
    hedged: bool,
    client: PlainS3,
    runtime: Runtime,
}

/// The port for statistics and faults, if the store has one.
#[derive(Clone, Debug, Default)]
pub struct S3Admin {
    /// `http://host:port`, or empty.
    pub url: String,
    /// The file of its token, a new one after each start; stores of earlier versions take none.
    pub token: Option<PathBuf>,
}

impl S3 {
    /// `hedged` unless clients never ask twice: then requests cannot be counted.
    pub fn new(endpoint: &str, admin: S3Admin, access_key: &str, secret_key: &str, hedged: bool) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        Self {
            endpoint: endpoint.to_owned(),
            access_key: access_key.to_owned(),
            secret_key: secret_key.to_owned(),
            admin,
            hedged,
            client: PlainS3::new(endpoint, access_key, secret_key).unwrap(),
            runtime,
        }
    }

    /// The same store with another secret key.
    pub(crate) fn with_secret_key(&self, secret_key: &str) -> Self {
        Self::new(&self.endpoint, self.admin.clone(), &self.access_key, secret_key, self.hedged)
    }

    /// The client, for requests that have no method here.
    pub fn client(&self) -> &PlainS3 {
        &self.client
    }

    /// Runs a request to its end.
    #[track_caller]
    pub fn run<T>(&self, request: impl Future<Output = Result<T, cavern_plain_s3::PlainS3Error>>) -> T {
        self.runtime.block_on(async { timeout(TIMEOUT, request).await.expect("S3 answers in time") }).unwrap()
    }

    #[track_caller]
    pub fn create_bucket(&self, bucket: &str) {
        self.run(self.client.create_bucket(bucket));
    }

    /// Stores an object; answers its ETag.
    #[track_caller]
    pub fn put(&self, bucket: &str, key: &str, content: impl Into<Bytes>) -> String {
        self.run(self.client.put(bucket, key, content))
    }

    #[track_caller]
    pub fn get(&self, bucket: &str, key: &str) -> Bytes {
        self.run(self.client.get(bucket, key))
    }

    #[track_caller]
    pub fn delete(&self, bucket: &str, key: &str) {
        self.run(self.client.delete(bucket, key));
    }

    /// An object of `size` zero bytes that takes no room.
    #[track_caller]
    pub fn put_sparse(&self, bucket: &str, key: &str, size: u64) {
        self.change("POST", &format!("sparse?bucket={bucket}&key={key}&size={size}"), "");
    }

    /// Gives a bucket, made if need be, objects by rule, of which nothing is kept: a JSON object as `POST
    /// /_dev/key-space` takes it.
    #[track_caller]
    pub fn set_key_space(&self, bucket: &str, rule: &Value) {
        self.change("POST", &format!("key-space?bucket={bucket}"), &rule.to_string());
    }

    /// Has the listings of a bucket served as late, and as often, as a JSON object says: as `POST /_dev/list-profile`
    /// takes it.
    #[track_caller]
    pub fn set_list_profile(&self, bucket: &str, profile: &Value) {
        self.change("POST", &format!("list-profile?bucket={bucket}"), &profile.to_string());
    }

    /// Has a bucket keep versions of objects that are replaced or deleted.
    #[track_caller]
    pub fn keep_versions(&self, bucket: &str) {
        self.change("POST", &format!("versions?bucket={bucket}&keep=true"), "");
    }

    /// What the store has counted since its start or the last reset, as its admin port gives it.
    #[track_caller]
    pub fn stats(&self) -> Value {
        let answer = self.ask("GET", "stats", "");
        assert_eq!(answer.status, 200, "{}", answer.body);
        serde_json::from_str(&answer.body).unwrap()
    }

    /// Requests of one kind: GET and HEAD (of objects), LIST, PUT, COPY, DELETE, MULTIPART, BUCKET, OTHER.
    ///
    /// GETs can be counted in a cluster with [`crate::COUNTED`] only: elsewhere a read that a busy machine delays is
    /// sent twice, and their number says how busy it was.
    #[track_caller]
    pub fn requests(&self, kind: &str) -> u64 {
        assert!(
            !self.hedged || kind != "GET",
            "reads are hedged here: count GETs in a cluster with the configuration COUNTED"
        );
        let stats = self.stats();
        stats["kinds"][kind].as_u64().unwrap_or_else(|| panic!("no kind {kind} in {stats}"))
    }

    /// Bytes of all answers' bodies. Like GETs, for a cluster with [`crate::COUNTED`] only.
    #[track_caller]
    pub fn bytes_out(&self) -> u64 {
        assert!(!self.hedged, "reads are hedged here: count bytes in a cluster with the configuration COUNTED");
        self.stats()["bytes_out"].as_u64().unwrap()
    }

    #[track_caller]
    pub fn reset_stats(&self) {
        self.change("POST", "stats/reset", "");
    }

    /// Adds a fault rule: a JSON object as `POST /_dev/faults` takes it.
    #[track_caller]
    pub fn add_fault(&self, rule: &Value) {
        self.change("POST", "faults", &rule.to_string());
    }

    /// Sessions of its STS that begin from now on live for so many seconds at most, whatever they are asked for.
    #[track_caller]
    pub fn limit_sessions(&self, seconds: u64) {
        self.change("POST", &format!("sessions?seconds={seconds}"), "");
    }

    /// How often a role was asked for.
    #[track_caller]
    pub fn assumed_roles(&self) -> u64 {
        self.stats()["operations"]["AssumeRole"].as_u64().unwrap()
    }

    #[track_caller]
    pub fn clear_faults(&self) {
        self.change("DELETE", "faults", "");
    }

    #[track_caller]
    fn ask(&self, method: &str, path: &str, body: &str) -> HttpAnswer {
        let token = self.admin.token.as_ref().map(|token| fs::read_to_string(token).unwrap());
        let header = token.map(|token| format!("Authorization: Bearer {}\r\n", token.trim())).unwrap_or_default();
        http_request_with(method, &format!("{}/_dev/{path}", self.admin.url), &header, body).unwrap()
    }

    #[track_caller]
    fn change(&self, method: &str, path: &str, body: &str) {
        let answer = self.ask(method, path, body);
        assert!((200..300).contains(&answer.status), "{method} {path}: {} {}", answer.status, answer.body);
    }
}
