//! Names of the options of `gs://` mounts; their meaning is in `ufs/src/gs/options.rs`.

pub const ENDPOINT: &str = "gs.endpoint_url";
pub const KEY: &str = "gs.credentials.key";
pub const SOURCE: &str = "gs.credentials.source";
pub const ANONYMOUS: &str = "gs.anonymous";

pub const ALL: [&str; 4] = [ENDPOINT, KEY, SOURCE, ANONYMOUS];

/// Those whose values are no secrets.
pub(super) const SHOWN: [&str; 3] = [ENDPOINT, SOURCE, ANONYMOUS];

/// All that say whose the requests are.
pub const CREDENTIALS: [&str; 3] = [KEY, SOURCE, ANONYMOUS];
