//! Programs that are not ours: standard S3 clients and another S3 server. `bin/setup --tests` installs them.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use crate::http::http_request;

/// A command whose environment says nothing about credentials, certificates, proxies or configuration of object stores.
pub fn outside_command(program: impl AsRef<Path>) -> Command {
    let mut command = Command::new(program.as_ref());
    for (key, _) in std::env::vars_os() {
        let name = key.to_string_lossy().to_lowercase();
        if ["aws_", "rclone_", "python"].iter().any(|prefix| name.starts_with(prefix)) || name.ends_with("_proxy") {
            command.env_remove(&key);
        }
    }
    command.stdin(Stdio::null());
    command
}

/// A script of `tests/`, to be run by the Python that has what `tests/requirements.txt` names.
pub fn python(script: &str) -> Command {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| std::env::home_dir().map(|home| home.join(".cache"))).expect("a home directory");
    let python = cache.join("cavern/venv/bin/python");
    assert!(python.exists(), "{} is missing: run bin/setup --tests", python.display());
    let mut command = outside_command(python);
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(script));
    command
}

/// A store of another protocol than S3's with one bucket, in memory; ends with its value, or with the test's process.
/// `bin/setup --stores` installs them.
pub struct OutsideStore {
    /// `http://host:port`.
    pub endpoint: String,
    process: Child,
}

impl OutsideStore {
    /// Serves an empty bucket: `azurite` or `fake-gcs-server`.
    #[track_caller]
    pub fn serve(store: &str, bucket: &str) -> Self {
        let mut command = python("outside_store.py");
        // The pipe is closed when nobody needs the store any more, however that comes.
        command.args([store, bucket]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().expect("a pipe")).read_line(&mut line).unwrap();
        let endpoint = line.trim().to_owned();
        assert!(endpoint.starts_with("http://"), "{store} does not start: run bin/setup --stores");
        Self { endpoint, process }
    }
}

impl Drop for OutsideStore {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        // It is gone already if this fails.
        let _ = self.process.wait();
    }
}

/// The S3 server of moto with one bucket; ends with its value, or with the test's process.
pub struct Moto {
    /// `http://host:port`.
    pub endpoint: String,
    process: Child,
}

impl Moto {
    /// Serves every file below `directory` as an object of `bucket`; they are kept in memory.
    #[track_caller]
    pub fn serve(bucket: &str, directory: &Path) -> Self {
        let mut command = python("moto_s3.py");
        // The pipe is closed when nobody needs the server any more, however that comes.
        command.arg(bucket).arg(directory).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().expect("a pipe")).read_line(&mut line).unwrap();
        let ready: Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("moto_s3.py: {error}: {line}"));
        let endpoint = ready["endpoint"].as_str().expect("an address").to_owned();
        Self { endpoint, process }
    }

    /// The options (`-c`) that reach it.
    pub fn bucket_options(&self) -> Vec<String> {
        vec![
            format!("s3.endpoint_url={}", self.endpoint),
            "s3.region_name=us-east-1".to_owned(),
            "s3.credentials.access=any".to_owned(),
            "s3.credentials.secret=any-secret".to_owned(),
        ]
    }

    /// Requests of one kind since the start or the last [`Self::reset_requests`]: GET and HEAD (of objects), LIST,
    /// BUCKET.
    #[track_caller]
    pub fn requests(&self, kind: &str) -> u64 {
        self.counts("GET")[kind].as_u64().unwrap_or(0)
    }

    #[track_caller]
    pub fn reset_requests(&self) {
        self.counts("DELETE");
    }

    #[track_caller]
    fn counts(&self, method: &str) -> Value {
        let answer = http_request(method, &format!("{}/_requests", self.endpoint), "").unwrap();
        serde_json::from_str(&answer.body).unwrap_or_else(|error| panic!("{error} in {answer:?}"))
    }
}

impl Drop for Moto {
    fn drop(&mut self) {
        // It is gone already if one of these fails.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
