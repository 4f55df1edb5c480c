//! GETs of objects, spoken by us: they are what a cache does most, and most of them are short.

use std::fmt::Write as _;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures::Stream;
use http::header::{ETAG, HOST, IF_MATCH, RANGE};
use http::uri::Uri;
use http::{HeaderValue, Request as HttpRequest};

use super::connections::DrivenBody;
use super::failure::Failure;
use super::listing::unquoted;
use super::{S3Store, if_match};
use crate::error::{Operation, Request, UfsError};
use crate::store::{Body, ByteStream};

impl S3Store {
    /// The range is not empty.
    pub(super) async fn open(&self, key: &str, etag: &str, range: Range<u64>) -> Result<Body, UfsError> {
        let asked = || Request::new(Operation::Get, &self.label, key);
        let senseless = |error: http::Error| Failure::MalformedReply(error.to_string()).into_ufs(asked(), "");
        let uri: Uri =
            self.object_url(key).try_into().map_err(|error: http::uri::InvalidUri| senseless(error.into()))?;
        let host = uri.authority().map_or("", |authority| authority.as_str());
        let mut unsigned = HttpRequest::get("/").header(HOST, host).header(RANGE, range_header(&range));
        if !etag.is_empty() {
            unsigned = unsigned.header(IF_MATCH, if_match(etag));
        }
        let request = self.signed(unsigned.uri(uri).body(Bytes::new()), &asked).await?;
        let answer = self.transport.get(request, (range.start, range.end - 1)).await;
        let answer = answer.map_err(|failure| failure.into_ufs(asked(), etag))?;
        let answered = answer.headers().get(ETAG).and_then(|etag| etag.to_str().ok()).unwrap_or_default();
        let answered = unquoted(answered).to_owned();
        // A server that ignores If-Match must not slip another version in.
        if !etag.is_empty() && !answered.is_empty() && answered != etag {
            let reason = format!("the store answered with the version {answered:?}");
            return Err(UfsError::VersionChanged { request: asked(), etag: etag.to_owned(), reason });
        }
        let pieces = BodyStream { body: answer.into_body(), request: asked() };
        Ok(Body { etag: answered, stream: ByteStream::new(pieces) })
    }
}

fn range_header(range: &Range<u64>) -> HeaderValue {
    let mut text = String::with_capacity(48);
    // Writing to a String cannot fail.
    let _ = write!(text, "bytes={}-{}", range.start, range.end - 1);
    HeaderValue::try_from(text).unwrap_or(HeaderValue::from_static("bytes=0-"))
}

/// The body of an answer, piece by piece, uncopied.
struct BodyStream {
    body: DrivenBody,
    request: Request,
}

impl Stream for BodyStream {
    type Item = Result<Bytes, UfsError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Self { body, request } = &mut *self;
        Pin::new(body)
            .poll_next(cx)
            .map_err(|error| Failure::broken("the body broke off", error).into_ufs(request.clone(), ""))
    }
}
