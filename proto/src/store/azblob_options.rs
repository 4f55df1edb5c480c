//! Names of the options of `azblob://` mounts; their meaning is in `ufs/src/azblob/options.rs`.

pub const ACCOUNT: &str = "azblob.account";
pub const ENDPOINT: &str = "azblob.endpoint_url";
pub const KEY: &str = "azblob.credentials.key";
pub const SAS: &str = "azblob.credentials.sas";
pub const SOURCE: &str = "azblob.credentials.source";
pub const ANONYMOUS: &str = "azblob.anonymous";

pub const ALL: [&str; 6] = [ACCOUNT, ENDPOINT, KEY, SAS, SOURCE, ANONYMOUS];

/// Those whose values are no secrets.
pub(super) const SHOWN: [&str; 4] = [ACCOUNT, ENDPOINT, SOURCE, ANONYMOUS];

/// All that say whose the requests are.
pub const CREDENTIALS: [&str; 4] = [KEY, SAS, SOURCE, ANONYMOUS];
