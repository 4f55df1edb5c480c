//! How an exchange with an S3 endpoint fails, and what that means to the caller.

use std::error::Error;
use std::sync::Arc;

use http::StatusCode;

use crate::allowed::not_allowed;
use crate::error::{Request, UfsError, chain};
use crate::s3::credentials::CredentialError;
use crate::s3::listing::error_document;

/// One failed exchange.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// The store answered with a status other than success.
    #[error("{} {}", .status.as_u16(), .status.canonical_reason().unwrap_or("unknown status"))]
    Status {
        status: StatusCode,
        /// `Code` and `Message` of the error document; empty where there is none, as after a HEAD.
        code: String,
        message: String,
    },
    /// No connection, or one that broke.
    #[error("{doing}")]
    Broken {
        doing: &'static str,
        #[source]
        source: Arc<dyn Error + Send + Sync>,
    },
    /// A part of the range, because the object ends there.
    #[error("it has only {length} bytes")]
    Shorter { length: u64 },
    /// A success that is not an answer to what was asked.
    #[error("{0}")]
    MalformedReply(String),
}

impl Failure {
    pub(crate) fn status(status: StatusCode, body: &[u8]) -> Self {
        let (code, message) = error_document(body);
        Self::Status { status, code, message }
    }

    pub(crate) fn broken(doing: &'static str, source: impl Error + Send + Sync + 'static) -> Self {
        Self::Broken { doing, source: Arc::new(source) }
    }

    /// What this means for `request`; `etag` is the version it asked for.
    pub(crate) fn into_ufs(self, request: Request, etag: &str) -> UfsError {
        match self {
            Self::Broken { ref source, .. } => match not_allowed(&**source) {
                Some(refused) => refused,
                None => UfsError::Unavailable { request, reason: chain(&self), source: Some(Arc::new(self)) },
            },
            Self::Shorter { .. } => {
                UfsError::VersionChanged { request, etag: etag.to_owned(), reason: self.to_string() }
            }
            Self::MalformedReply(reason) => UfsError::Malformed { request, reason, source: None },
            Self::Status { status, ref code, ref message } => {
                let mut reason = self.to_string();
                for part in [code, message] {
                    if !part.is_empty() {
                        reason.push_str(": ");
                        reason.push_str(part);
                    }
                }
                classify(status, code, reason, request, etag)
            }
        }
    }
}

fn classify(status: StatusCode, code: &str, reason: String, request: Request, etag: &str) -> UfsError {
    match (status.as_u16(), code) {
        (404, "NoSuchBucket") => UfsError::NoBucket { request },
        // A prefix is never missing, so a LIST that finds nothing has not found the bucket.
        (404, _) if request.operation() == crate::error::Operation::List => UfsError::NoBucket { request },
        (404, _) => UfsError::NotFound { request },
        (412, _) => {
            let reason = "another version has replaced it".to_owned();
            UfsError::VersionChanged { request, etag: etag.to_owned(), reason }
        }
        (416, _) => {
            let reason = "it ends before the range does".to_owned();
            UfsError::VersionChanged { request, etag: etag.to_owned(), reason }
        }
        (400 | 401 | 403, "ExpiredToken" | "InvalidToken" | "TokenRefreshRequired") => {
            UfsError::expired(request, reason)
        }
        (401 | 403, _) | (400, "AuthorizationHeaderMalformed" | "InvalidAccessKeyId") => {
            UfsError::denied(request, reason)
        }
        // Two writes of one key at a time: the second comes again.
        (409, "ConditionalRequestConflict" | "OperationAborted")
        | (400, "RequestTimeout")
        | (408 | 429 | 499 | 500 | 502 | 503 | 504, _) => UfsError::Unavailable { request, reason, source: None },
        (300..=399, _) => {
            let reason = format!("{reason}; the bucket lives elsewhere: check s3.region_name and s3.endpoint_url");
            UfsError::Rejected { request, reason, source: None }
        }
        _ => UfsError::Rejected { request, reason, source: None },
    }
}

/// What a request that could not be signed means: nearly always that there are no credentials.
pub(crate) fn from_signer(error: &reqsign_core::Error, request: Request) -> UfsError {
    if let Some(error) = CredentialError::among(error) {
        return error.into_ufs(request);
    }
    // The signer's own words are left out: they may quote what it has read.
    let reason = "the request cannot be signed with these credentials".to_owned();
    UfsError::denied(request, reason)
}
