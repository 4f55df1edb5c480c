//! How a store is started.

use std::path::PathBuf;

/// Keys that the store takes when no others are given.
pub const DEFAULT_ACCESS_KEY: &str = "cavern";
/// See [`DEFAULT_ACCESS_KEY`].
pub const DEFAULT_SECRET_KEY: &str = "cavern-secret";

/// How to start the store.
#[derive(Clone, Debug)]
pub struct DevS3Config {
    /// Directory of everything that is stored; created if need be. One running store per root.
    pub root: PathBuf,
    /// S3 port, host:port; port 0 takes a free one.
    pub listen: String,
    /// Counters, metrics and fault rules, host:port of the loopback interface; without it there is no such port. Its
    /// token is in the file `admin-token` below the root, a new one for each start.
    pub admin_listen: Option<String>,
    pub access_key: String,
    pub secret_key: String,
    /// File to which a line is appended per request.
    pub request_log: Option<PathBuf>,
}

impl DevS3Config {
    /// A store under `root` on a free port of the loopback interface, with the default keys and no second port.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self {
            root: root.into(),
            listen: "127.0.0.1:0".to_owned(),
            admin_listen: None,
            access_key: DEFAULT_ACCESS_KEY.to_owned(),
            secret_key: DEFAULT_SECRET_KEY.to_owned(),
            request_log: None,
        }
    }
}
