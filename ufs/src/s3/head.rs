//! HEADs of objects.

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, ETAG, LAST_MODIFIED};
use http::{HeaderMap, HeaderName, Request as HttpRequest, StatusCode};
use reqsign_core::time::Timestamp;

use super::S3Store;
use super::failure::Failure;
use super::listing::{nanoseconds, unquoted};
use crate::error::{Operation, Request, UfsError};
use crate::object::ObjectMeta;

impl S3Store {
    pub(super) async fn stat(&self, key: &str) -> Result<ObjectMeta, UfsError> {
        let asked = || Request::new(Operation::Head, &self.label, key);
        let senseless = |reason: String| Failure::MalformedReply(reason).into_ufs(asked(), "");
        let request = self.signed(HttpRequest::head(self.object_url(key)).body(Bytes::new()), &asked).await?;
        let response = self.transport.send(request).await.map_err(|failure| failure.into_ufs(asked(), ""))?;
        if response.status() != StatusCode::OK {
            return Err(senseless(format!("it answered {}", response.status().as_u16())));
        }
        described(key, response.headers()).ok_or_else(|| senseless("its answer has no Content-Length".to_owned()))
    }
}

/// The object that an answer describes; `None` where it does not say how long it is.
fn described(key: &str, headers: &HeaderMap) -> Option<ObjectMeta> {
    let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let metadata = headers.iter().filter_map(|(name, value)| {
        let name = name.as_str().strip_prefix("x-amz-meta-")?;
        Some((name.to_owned(), value.to_str().ok()?.to_owned()))
    });
    Some(ObjectMeta {
        key: key.to_owned(),
        size: text(CONTENT_LENGTH).parse().ok()?,
        etag: unquoted(text(ETAG)).to_owned(),
        mtime_ns: Timestamp::parse_rfc2822(text(LAST_MODIFIED)).map_or(0, nanoseconds),
        metadata: metadata.collect(),
    })
}
