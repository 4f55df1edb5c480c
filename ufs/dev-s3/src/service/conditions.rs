//! Conditional requests (RFC 9110, section 13.2.2).

use hyper::HeaderMap;
use hyper::header::ETAG;
use s3s::dto::{ETagCondition, Timestamp};
use s3s::{S3Error, S3ErrorCode, S3Result, s3_error};

use super::reply::{etag, timestamp};
use crate::store::{Object, PutCondition};

/// Conditions of a read, or of the source of a copy.
#[derive(Default)]
pub(super) struct ReadConditions {
    pub if_match: Option<ETagCondition>,
    pub if_none_match: Option<ETagCondition>,
    pub if_modified_since: Option<Timestamp>,
    pub if_unmodified_since: Option<Timestamp>,
}

impl ReadConditions {
    /// 412 or 304 where a condition does not hold. A condition on the ETag outweighs the one on time of the same sense.
    pub fn check(&self, object: &Object) -> S3Result<()> {
        let modified = timestamp(object.modified_s);
        match (&self.if_match, &self.if_unmodified_since) {
            (Some(condition), _) if !names(condition, object) => return Err(s3_error!(PreconditionFailed)),
            (None, Some(since)) if modified > *since => return Err(s3_error!(PreconditionFailed)),
            _ => {}
        }
        match (&self.if_none_match, &self.if_modified_since) {
            (Some(condition), _) if names(condition, object) => Err(not_modified(object)),
            (None, Some(since)) if modified <= *since => Err(not_modified(object)),
            _ => Ok(()),
        }
    }
}

fn names(condition: &ETagCondition, object: &Object) -> bool {
    condition.as_etag().is_none_or(|wanted| wanted.value() == object.etag)
}

fn not_modified(object: &Object) -> S3Error {
    let mut error = S3Error::new(S3ErrorCode::NotModified);
    let mut headers = HeaderMap::new();
    // An ETag is hexadecimal digits, so it is a header value.
    if let Ok(value) = etag(&object.etag).to_http_header() {
        headers.insert(ETAG, value);
    }
    error.set_headers(headers);
    error
}

/// Conditions of a write on what the key stands for.
pub(super) fn of_put(
    if_match: Option<&ETagCondition>,
    if_none_match: Option<&ETagCondition>,
) -> S3Result<PutCondition> {
    if if_none_match.is_some_and(|condition| !condition.is_any()) {
        return Err(s3_error!(NotImplemented, "If-None-Match of a write takes only *."));
    }
    let must_have_etag = if_match.map(|condition| condition.as_etag().map_or("*", |etag| etag.value()).to_owned());
    Ok(PutCondition { must_be_absent: if_none_match.is_some(), must_have_etag })
}
