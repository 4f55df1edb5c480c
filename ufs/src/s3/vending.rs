//! Keys that are vended: short-lived ones, which are good for nothing but the prefix of a mount.
//!
//! Masters have the credentials of a mount, and with them take on a role for workers and clients ([`KeyVendor`]), with
//! a session policy ([`policy`]) that leaves of its rights what is within the prefix. Workers and clients ask a master
//! for keys ([`KeyProvider`](super::keys::KeyProvider)) and renew them as any that end.
//!
//! Such keys may list below the prefix only. A store then refuses a request for an object that is not there, since
//! whoever may not list all of the bucket is not to learn that; a listing of the very key tells the two apart.

mod policy;

use std::collections::HashMap;
use std::sync::Arc;

use cavern_conf::schema;
use cavern_proto::{Scheme, StoreUri};

use super::credentials::{Provider, Renewing, Scope};
use super::keys::{KeyError, KeyRight, VendedKeys};
use super::options::S3Options;
use crate::error::UfsError;
use crate::shared_store::SharedStore;

/// Has STS give out keys for the prefix of a mount. They are renewed in the middle of their life, by one request for
/// all who ask. Cheap to clone.
#[derive(Clone)]
pub struct KeyVendor {
    read: Renewing,
    write: Renewing,
    /// Where others that are opened find both.
    _shared: Arc<SharedStore>,
}

cavern_conf::debug_only!(KeyVendor { read });

/// Until when keys of each right last that were given out, in nanoseconds since the Unix epoch, and what the last
/// attempt to get some failed of, if it did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyStatus {
    pub read_until_ns: Option<i64>,
    pub write_until_ns: Option<i64>,
    pub last_error: Option<String>,
}

impl KeyVendor {
    /// The vendor of a mount's keys; `None` where they are not vended. Nothing is sent.
    ///
    /// # Errors
    /// [`UfsError::Invalid`] for a URI or an option that is wrong, where nothing says who gives out the role, and for a
    /// prefix whose policy is longer than STS takes.
    pub fn open(uri: &str, options: &HashMap<String, String>, conf: &schema::Ufs) -> Result<Option<Self>, UfsError> {
        let StoreUri::Bucket { scheme: Scheme::S3, name: bucket, prefix } = StoreUri::parse(uri)? else {
            return Ok(None);
        };
        let options = S3Options::parse(options, |name| std::env::var(name).ok())?;
        let Some(vended) = &options.vended else { return Ok(None) };
        let shared = SharedStore::of_bucket(&bucket, &options, conf);
        let keys = |right| {
            let policy = policy::of(&vended.role.arn, &bucket, &prefix, right)?;
            Provider::vended(&options, &vended.role, Scope { policy, life: vended.life }, conf, &shared.credentials)
        };
        let (read, write) = (keys(KeyRight::Read)?, keys(KeyRight::Write)?);
        Ok(Some(Self { read, write, _shared: shared }))
    }

    /// Keys that have half of their life before them, or less where STS gives no others now.
    ///
    /// # Errors
    /// [`KeyError`] names STS, the role and the cause.
    pub async fn keys(&self, right: KeyRight) -> Result<VendedKeys, KeyError> {
        let keys = match right {
            KeyRight::Read => &self.read,
            KeyRight::Write => &self.write,
        };
        keys.lasting().await
    }

    /// How the keys fare.
    pub fn status(&self) -> KeyStatus {
        let (read, write) = (self.read.status(), self.write.status());
        KeyStatus { read_until_ns: read.0, write_until_ns: write.0, last_error: read.1.or(write.1) }
    }
}
