//! Why a request to a store failed, by what the caller can do about it.

use std::borrow::Cow;
use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use cavern_proto::{Scheme, StoreUriError};

/// Which request failed: the operation, the store and the key.
#[derive(Clone, Debug)]
pub struct Request(Arc<Parts>);

#[derive(Debug)]
struct Parts {
    operation: Operation,
    store: Arc<str>,
    key: String,
}

cavern_conf::named_values! {
    /// The requests that this crate sends, named as logs and metrics spell them.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Operation {
        List = "LIST",
        Head = "HEAD",
        Get = "GET",
        Put = "PUT",
        /// A multipart upload: its beginning, a part, its end, and giving it up.
        Begin = "CREATE MULTIPART",
        Part = "UPLOAD PART",
        Complete = "COMPLETE MULTIPART",
        Abort = "ABORT MULTIPART",
        Delete = "DELETE",
        /// Within the bucket, whole or a part of an upload.
        Copy = "COPY",
        CopyPart = "COPY PART",
    }
}

impl Request {
    pub(crate) fn new(operation: Operation, store: &Arc<str>, key: &str) -> Self {
        Self(Arc::new(Parts { operation, store: store.clone(), key: key.to_owned() }))
    }

    pub fn operation(&self) -> Operation {
        self.0.operation
    }

    /// The key, or the prefix of a listing.
    pub fn key(&self) -> &str {
        &self.0.key
    }

    /// What says where the store is, which is named by its URI.
    fn place(&self) -> &'static str {
        Scheme::of(&self.0.store).map_or("its URI", Scheme::place)
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} \"{}\" in {}", self.0.operation.name(), self.0.key.escape_debug(), self.0.store)
    }
}

/// What a store denies a request for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Denial {
    /// The credentials, or what they allow.
    #[error("access denied")]
    Credentials,
    /// Credentials that have expired.
    #[error("access denied")]
    Expired,
    /// The time at which it was signed: the clock of this host is off.
    #[error("the clocks of this host and of the store differ")]
    Clock,
    /// The region that it was signed for, or sent to.
    #[error("the bucket is in another region")]
    Region,
    /// The storage class of the object: it must be restored before it can be read.
    #[error("the object is archived")]
    Archived,
}

/// Every way in which a store can fail. Each names the request, the cause and what to do next; none ever contains a
/// credential.
#[derive(Clone, Debug, thiserror::Error)]
pub enum UfsError {
    /// The object is gone. The caller's metadata is out of date.
    #[error("{request}: there is no such object")]
    NotFound { request: Request },

    /// The object is there, but it is not the version that was asked for. The caller's metadata is out of date.
    #[error("{request}: the version asked for is not there any more: {reason}")]
    VersionChanged { request: Request, etag: String, reason: String },

    /// The store does not let the request pass. Retrying does not help.
    #[error("{request}: {denial}: {reason}; {remedy}")]
    Denied { request: Request, denial: Denial, reason: String, remedy: Cow<'static, str> },

    /// There is no such bucket (or directory) at this endpoint. Retrying does not help.
    #[error("{request}: there is no such bucket; check the name and {}", .request.place())]
    NoBucket { request: Request },

    /// The store cannot be reached, broke off, or says that it is overloaded. Retried here already; may heal.
    #[error(
        "{request}: the store is unavailable: {reason}; check {}, the network and the store's health", .request.place()
    )]
    Unavailable { request: Request, reason: String },

    /// The store did not answer, or did not go on, in time. Retried here already; may heal.
    #[error(
        "{request}: {what} took longer than {limit:?}; check the network and the store's health, or raise {setting}"
    )]
    Deadline { request: Request, what: &'static str, limit: Duration, setting: &'static str },

    /// The body ended before the end of the range. Retried here already.
    #[error("{request}: the store sent {received} of {expected} bytes")]
    ShortBody { request: Request, expected: u64, received: u64 },

    /// The store's reply makes no sense, for instance bytes of another range than was asked for.
    #[error("{request}: the store's answer cannot be used: {reason}; check that {} leads to a store", .request.place())]
    Malformed { request: Request, reason: String },

    /// The store keeps no object whose key is the beginning of another's path, and has such a one. Retrying helps once
    /// that is deleted.
    #[error("{request}: an object above or below the key is in its way: {reason}; delete it, or choose another name")]
    Obstructed { request: Request, reason: String },

    /// The store refused for another reason. Retrying does not help.
    #[error("{request}: the store refused: {reason}")]
    Rejected { request: Request, reason: String },

    /// It would take more memory than there is for it. Retrying does not help.
    #[error("{request}: {reason}; {remedy}")]
    Oversized { request: Request, reason: String, remedy: &'static str },

    /// A URI or an option is wrong. Nothing was sent.
    #[error("{what}: {reason}; {remedy}")]
    Invalid { what: String, reason: String, remedy: String },

    /// A mount leads where the configuration of this process lets none lead. Nothing was sent.
    #[error("{what}: {reason}; {remedy}")]
    NotAllowed { what: String, reason: String, remedy: String },
}

/// For whoever gave a key pair.
const CHECK_KEY_PAIR: &str = "check s3.credentials.access and s3.credentials.secret (or the environment's AWS_ \
                              variables) and that their owner may list and read this bucket";

impl UfsError {
    /// [`Self::Denied`], to credentials of which no more is known.
    pub(crate) fn denied(request: Request, reason: String) -> Self {
        Self::denied_for(Denial::Credentials, request, reason, CHECK_KEY_PAIR)
    }

    /// [`Self::Denied`], to credentials that have expired.
    pub(crate) fn expired(request: Request, reason: String) -> Self {
        Self::denied_for(Denial::Expired, request, reason, CHECK_KEY_PAIR)
    }

    /// [`Self::Denied`], with the next step for whoever runs the cluster.
    pub(crate) fn denied_for(
        denial: Denial,
        request: Request,
        reason: String,
        remedy: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self::Denied { request, denial, reason, remedy: remedy.into() }
    }

    /// [`Self::VersionChanged`], where the version `etag` was asked for.
    pub(crate) fn version_changed(request: Request, etag: &str, reason: impl Into<String>) -> Self {
        Self::VersionChanged { request, etag: etag.to_owned(), reason: reason.into() }
    }

    /// [`Self::Malformed`], of an answer that lacks something.
    pub(crate) fn lacking(request: &Request, what: &str) -> Self {
        Self::Malformed { request: request.clone(), reason: format!("its answer has no {what}") }
    }

    /// True when the object is gone or replaced: the bucket is well, the caller's metadata is out of date.
    pub fn is_metadata_outdated(&self) -> bool {
        matches!(self, Self::NotFound { .. } | Self::VersionChanged { .. })
    }

    /// True when the same request may succeed if it is sent again.
    pub fn is_temporary(&self) -> bool {
        self.sort().1
    }

    /// True when the store does not copy this, and will not.
    pub fn refuses_copy(&self) -> bool {
        let (Self::Denied { request, .. } | Self::Rejected { request, .. }) = self else { return false };
        matches!(request.operation(), Operation::Copy | Operation::CopyPart)
    }

    /// True when the store could not be reached, or did not answer in time: the same request will do as soon as it can.
    pub fn is_outage(&self) -> bool {
        matches!(self, Self::Unavailable { .. } | Self::Deadline { .. })
    }

    /// A word for metrics, one per variant.
    pub fn kind(&self) -> &'static str {
        self.sort().0
    }

    /// The word for each variant, and whether it is temporary.
    fn sort(&self) -> (&'static str, bool) {
        match self {
            Self::NotFound { .. } => ("not_found", false),
            Self::VersionChanged { .. } => ("version_changed", false),
            Self::Denied { .. } => ("denied", false),
            Self::NoBucket { .. } => ("no_bucket", false),
            Self::Unavailable { .. } => ("unavailable", true),
            Self::Deadline { .. } => ("deadline", true),
            Self::ShortBody { .. } => ("short_body", true),
            Self::Malformed { .. } => ("malformed", true),
            Self::Obstructed { .. } => ("obstructed", false),
            Self::Rejected { .. } => ("rejected", false),
            Self::Oversized { .. } => ("oversized", false),
            Self::Invalid { .. } => ("invalid", false),
            Self::NotAllowed { .. } => ("not_allowed", false),
        }
    }

    pub(crate) fn invalid(what: impl Into<String>, reason: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::Invalid { what: what.into(), reason: reason.into(), remedy: remedy.into() }
    }
}

impl From<StoreUriError> for UfsError {
    fn from(StoreUriError { what, reason, remedy }: StoreUriError) -> Self {
        Self::invalid(what, reason, remedy)
    }
}

/// The chain of an error and its sources in one line, each part once.
pub(crate) fn chain(error: &(dyn Error + 'static)) -> String {
    let mut line = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        let text = source.to_string();
        if !line.contains(&text) {
            line.push_str(": ");
            line.push_str(&text);
        }
        next = source.source();
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_what_says_where_its_store_is() {
        for (store, place) in [("s3://b at http://h", "s3.endpoint_url"), ("file:///d", "the directory")] {
            let request = || Request::new(Operation::List, &store.into(), "");
            let missing = UfsError::NoBucket { request: request() }.to_string();
            assert!(missing.contains(&format!("check the name and {place}")), "{missing}");
            let down = UfsError::Unavailable { request: request(), reason: "refused".to_owned() };
            assert!(down.to_string().contains(&format!("refused; check {place}, the network")), "{down}");
        }
    }
}
