//! Keys that are vended, and who is asked for some: what masters and those who get such keys have in common.

use std::sync::Arc;

use futures::FutureExt;
use futures::future::BoxFuture;

use crate::error::UfsError;

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

cavern_conf::debug_only!(VendedKeys { expires_ns });

/// Why there are no keys, or other credentials. None of the texts quotes an answer that could hold some, or what was
/// sent with a request for them.
#[derive(Clone, Debug, thiserror::Error)]
pub enum KeyError {
    /// Whoever gives them does not answer, or not now.
    #[error("{0}")]
    Unavailable(String),
    /// Whoever gives them has none for us.
    #[error("{0}")]
    Refused(String),
    /// Nobody was asked, as the configuration of this process has it.
    #[error(transparent)]
    NotAllowed(UfsError),
}

/// Asks somebody for keys.
type Ask = Arc<dyn Fn() -> BoxFuture<'static, Result<VendedKeys, KeyError>> + Send + Sync>;

/// Who is asked for keys by a process that has none of its own. Cheap to clone.
#[derive(Clone)]
pub struct KeyProvider {
    name: Arc<str>,
    ask: Ask,
}

cavern_conf::debug_only!(KeyProvider { name });

impl KeyProvider {
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
