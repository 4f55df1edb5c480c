//! Keys that are vended: short-lived ones, which are good for nothing but the prefix of a mount.
//!
//! Masters have the credentials of a mount, and with them take on a role for workers and clients ([`KeyVendor`]), with
//! a session policy ([`policy`]) that leaves of its rights what is within the prefix. Workers and clients ask a master
//! for keys ([`KeyLender`]) and renew them as any that end.
//!
//! Such keys may list below the prefix only. A store then refuses a request for an object that is not there, since
//! whoever may not list all of the bucket is not to learn that; a listing of the very key tells the two apart.

mod policy;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use cavern_conf::schema;
use cavern_proto::StoreUri;
use futures::FutureExt;
use futures::future::BoxFuture;

use super::credentials::{CredentialError, Provider, Renewing, Scope};
use super::{S3Options, shared_store};
use crate::error::UfsError;
use crate::shared_store::SharedStore;

/// What keys allow within the prefix of their mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyRight {
    Read,
    Write,
}

/// Keys that end.
#[derive(Clone, PartialEq, Eq)]
pub struct VendedKeys {
    pub access: String,
    pub secret: String,
    pub session_token: String,
    /// In nanoseconds since the Unix epoch.
    pub expires_ns: i64,
}

impl fmt::Debug for VendedKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VendedKeys").field("expires_ns", &self.expires_ns).finish_non_exhaustive()
    }
}

/// Why there are no keys. None of the texts has any part of one.
#[derive(Clone, Debug, thiserror::Error)]
pub enum KeyError {
    /// Whoever gives them does not answer, or not now.
    #[error("{0}")]
    Unavailable(String),
    /// Whoever gives them has none for us.
    #[error("{0}")]
    Refused(String),
}

impl From<CredentialError> for KeyError {
    fn from(error: CredentialError) -> Self {
        match error {
            CredentialError::Unavailable(reason) => Self::Unavailable(reason),
            CredentialError::Refused(reason) => Self::Refused(reason),
            CredentialError::NotAllowed(error) => Self::Refused(error.to_string()),
        }
    }
}

/// Asks somebody for keys.
type Ask = Arc<dyn Fn() -> BoxFuture<'static, Result<VendedKeys, KeyError>> + Send + Sync>;

/// Who is asked for keys by a process that has none of its own. Cheap to clone.
#[derive(Clone)]
pub struct KeyLender {
    name: Arc<str>,
    ask: Ask,
}

impl fmt::Debug for KeyLender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyLender").field("name", &self.name).finish_non_exhaustive()
    }
}

impl KeyLender {
    /// `name` is the subject of sentences in messages. `ask` is called once for all who wait, and has ten seconds.
    pub fn new<F>(name: &str, ask: impl Fn() -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<VendedKeys, KeyError>> + Send + 'static,
    {
        Self { name: name.into(), ask: Arc::new(move || ask().boxed()) }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn ask(&self) -> BoxFuture<'static, Result<VendedKeys, KeyError>> {
        (self.ask)()
    }
}

/// Has STS give out keys for the prefix of a mount. They are renewed in the middle of their life, by one request for
/// all who ask. Cheap to clone.
#[derive(Clone)]
pub struct KeyVendor {
    read: Renewing,
    write: Renewing,
    /// Where others that are opened find both.
    _shared: Arc<SharedStore>,
}

impl fmt::Debug for KeyVendor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyVendor").field("read", &self.read).finish_non_exhaustive()
    }
}

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
        let StoreUri::S3 { bucket, prefix } = StoreUri::parse(uri)? else { return Ok(None) };
        let options = S3Options::parse(options, |name| std::env::var(name).ok())?;
        let Some(vended) = &options.vended else { return Ok(None) };
        let shared = shared_store(&bucket, &options, conf);
        let keys = |right| {
            let policy = policy::of(&vended.role.arn, &bucket, &prefix, right)?;
            Provider::vended(&options, &vended.role, Scope { policy, life: vended.life }, conf, &shared)
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
        Ok(keys.lasting().await?)
    }

    /// How the keys fare.
    pub fn status(&self) -> KeyStatus {
        let (read, write) = (self.read.status(), self.write.status());
        KeyStatus { read_until_ns: read.0, write_until_ns: write.0, last_error: read.1.or(write.1) }
    }
}
