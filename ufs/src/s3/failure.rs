//! How an exchange with an S3 endpoint fails, and what that means to the caller.

use std::error::Error;
use std::sync::Arc;

use cavern_conf::{Interval, host};
use http::header::DATE;
use http::{HeaderMap, StatusCode};
use reqsign_core::time::Timestamp;

use crate::allowed::not_allowed;
use crate::error::{Denial, Operation, Request, UfsError, chain};
use crate::s3::listing::{element, error_document};

/// Characters of the code and of the message of a store that are shown.
const SHOWN_MAX: usize = 500;
/// A store takes no request that was signed so long ago, or for a time so far ahead.
const CLOCK_TOLERANCE_S: u64 = 15 * 60;
/// Longer names are no regions.
const REGION_MAX: usize = 40;
/// What to do about an object in an archive.
const RESTORE: &str = "restore it in the bucket, or give it another storage class, and read it again";

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
        /// Where the bucket is, if the answer says so.
        region: Option<String>,
        /// Seconds by which this host's clock is behind the store's; negative when it is ahead.
        behind_s: Option<i64>,
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
    pub(crate) fn status(status: StatusCode, headers: &HeaderMap, body: &[u8]) -> Self {
        let (mut code, message) = error_document(body);
        if code.is_empty() {
            // Azure says it so after a HEAD as well.
            let header = headers.get("x-ms-error-code").and_then(|value| value.to_str().ok());
            code = header.unwrap_or_default().to_owned();
        }
        let (region, behind_s) = (region_of(headers, body), behind_s(headers, body));
        Self::Status { status, code, message, region, behind_s }
    }

    pub(crate) fn broken(doing: &'static str, source: impl Error + Send + Sync + 'static) -> Self {
        Self::Broken { doing, source: Arc::new(source) }
    }

    /// What this means for `request`; `etag` is the version it asked for.
    pub(crate) fn into_ufs(self, request: Request, etag: &str) -> UfsError {
        match self {
            Self::Broken { ref source, .. } => match not_allowed(&**source) {
                Some(refused) => refused,
                None => UfsError::Unavailable { request, reason: chain(&self) },
            },
            Self::Shorter { .. } => UfsError::version_changed(request, etag, self.to_string()),
            Self::MalformedReply(reason) => UfsError::Malformed { request, reason },
            Self::Status { status, ref code, ref message, ref region, behind_s } => {
                let mut reason = self.to_string();
                for part in [code, message] {
                    if !part.is_empty() {
                        reason.push_str(": ");
                        // The store's own words, on one line whatever they are.
                        reason.extend(part.chars().take(SHOWN_MAX).map(|c| if c.is_control() { ' ' } else { c }));
                    }
                }
                let is_redirect = status.is_redirection();
                match (status.as_u16(), code.as_str()) {
                    (403, "RequestTimeTooSkewed") => clock_is_off(request, reason, behind_s),
                    // The answer to a HEAD has no code, and Azure's says no more.
                    (403, "" | "AuthenticationFailed")
                        if (request.operation() == Operation::Head || !code.is_empty())
                            && behind_s.is_some_and(|behind| behind.unsigned_abs() > CLOCK_TOLERANCE_S) =>
                    {
                        clock_is_off(request, reason, behind_s)
                    }
                    (403, "InvalidObjectState") => UfsError::denied_for(Denial::Archived, request, reason, RESTORE),
                    (_, code) if is_redirect || code == "AuthorizationHeaderMalformed" => match region {
                        Some(region) => is_elsewhere(request, &reason, region),
                        None => classify(status, code, reason, request, etag),
                    },
                    (_, code) => classify(status, code, reason, request, etag),
                }
            }
        }
    }
}

/// That a request cannot be made of what the store or the caller named.
pub(crate) fn senseless(error: http::Error, asked: &Request) -> UfsError {
    Failure::MalformedReply(error.to_string()).into_ufs(asked.clone(), "")
}

/// Where an answer says that the bucket is. What can be no region counts as nothing.
fn region_of(headers: &HeaderMap, body: &[u8]) -> Option<String> {
    let header = headers.get("x-amz-bucket-region").and_then(|value| value.to_str().ok().map(str::to_owned));
    let is_region = |region: &String| {
        (1..=REGION_MAX).contains(&region.len()) && region.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
    };
    header.or_else(|| element(body, &["Error", "Region"])).filter(is_region)
}

/// By how many seconds this host's clock is behind the store's, by what an answer tells.
pub(crate) fn behind_s(headers: &HeaderMap, body: &[u8]) -> Option<i64> {
    let in_body = element(body, &["Error", "ServerTime"]).and_then(|time| time.trim().parse::<Timestamp>().ok());
    let date = || Timestamp::parse_rfc2822(headers.get(DATE)?.to_str().ok()?).ok();
    let theirs = in_body.or_else(date)?.as_second();
    Some(theirs - host::wall_ns() / 1_000_000_000)
}

fn clock_is_off(request: Request, mut reason: String, behind_s: Option<i64>) -> UfsError {
    let minutes = behind_s.map_or(0, |seconds| seconds.unsigned_abs() / 60);
    if minutes > 0 {
        let off = Interval::millis(minutes * 60_000);
        let side = if behind_s > Some(0) { "behind" } else { "ahead of" };
        reason.push_str(&format!("; this host's clock is {off} {side} the store's"));
    }
    UfsError::denied_for(Denial::Clock, request, reason, "set the clock of this host, for instance with NTP")
}

fn is_elsewhere(request: Request, reason: &str, region: &str) -> UfsError {
    let reason = format!("{reason}; the bucket is in {region}");
    let remedy = format!(
        "set s3.region_name={region} with `cv mount -c` or `cv mount update -c`, and check s3.endpoint_url if it names \
         a region"
    );
    UfsError::denied_for(Denial::Region, request, reason, remedy)
}

fn classify(status: StatusCode, code: &str, reason: String, request: Request, etag: &str) -> UfsError {
    match (status.as_u16(), code) {
        (404, "NoSuchBucket") => UfsError::NoBucket { request },
        // A prefix is never missing, so a LIST that finds nothing has not found the bucket.
        (404, _) if request.operation() == crate::error::Operation::List => UfsError::NoBucket { request },
        (404, _) => UfsError::NotFound { request },
        (412, _) => UfsError::version_changed(request, etag, "another version has replaced it"),
        (416, _) => UfsError::version_changed(request, etag, "it ends before the range does"),
        (400 | 401 | 403, "ExpiredToken" | "InvalidToken" | "TokenRefreshRequired") => {
            UfsError::expired(request, reason)
        }
        // Two writes of one key at a time: the second comes again. Google's words for a busy bucket.
        (409, "ConditionalRequestConflict" | "OperationAborted")
        | (403, "rateLimitExceeded" | "userRateLimitExceeded")
        | (400, "RequestTimeout")
        | (408 | 429 | 499 | 500 | 502 | 503 | 504, _) => UfsError::Unavailable { request, reason },
        (401 | 403, _) | (400, "AuthorizationHeaderMalformed" | "InvalidAccessKeyId") => {
            UfsError::denied(request, reason)
        }
        // MinIO's words, and those of gateways to file systems.
        (
            400 | 409,
            "XMinioParentIsObject"
            | "XMinioObjectExistsAsDirectory"
            | "ObjectParentIsFile"
            | "ExistingObjectIsDirectory",
        ) => UfsError::Obstructed { request, reason },
        (300..=399, _) => {
            let reason = format!("{reason}; the bucket lives elsewhere: check s3.region_name and s3.endpoint_url");
            UfsError::Rejected { request, reason }
        }
        _ => UfsError::Rejected { request, reason },
    }
}
