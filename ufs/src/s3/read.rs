//! GETs of objects, spoken by us: they are what a cache does most, and most of them are short.

use std::fmt::Write as _;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures::Stream;
use http::header::{ETAG, HOST, IF_MATCH, RANGE};
use http::request::Builder;
use http::uri::Uri;
use http::{HeaderName, HeaderValue, Request as HttpRequest};
use percent_encoding::utf8_percent_encode;

use super::connections::DrivenBody;
use super::failure::{Failure, senseless};
use super::listing::{QUERY, header_text, unquoted};
use super::transport::Transport;
use super::{S3Store, if_match};
use crate::error::{Operation, Request, UfsError};
use crate::store::{Body, ByteStream};

impl S3Store {
    /// Of what is there now, or of the version of this id. The range is not empty.
    pub(super) async fn open(
        &self,
        key: &str,
        etag: &str,
        id: Option<&str>,
        range: Range<u64>,
    ) -> Result<Body, UfsError> {
        let asked = || Request::new(Operation::Get, &self.label, key);
        let mut url = self.object_url(key);
        if let Some(id) = id {
            // Writing to a String cannot fail.
            let _ = write!(url, "?versionId={}", utf8_percent_encode(id, QUERY));
        }
        let unsigned = ranged(url, &range).map_err(|error| senseless(error, &asked()))?;
        let unsigned = if etag.is_empty() { unsigned } else { unsigned.header(IF_MATCH, if_match(etag)) };
        let request = self.signed(unsigned.body(Bytes::new()), &asked).await?;
        let failed = |failure: Failure, asked: Request| failure.into_ufs(asked, etag);
        pinned(&self.transport, request, &range, etag, ETAG, asked(), failed).await
    }
}

/// The GET of a range, still without a condition and credentials.
pub(crate) fn ranged(url: String, range: &Range<u64>) -> http::Result<Builder> {
    let uri = Uri::try_from(url)?;
    let host = uri.authority().map_or("", |authority| authority.as_str()).to_owned();
    Ok(HttpRequest::get(uri).header(HOST, host).header(RANGE, range_header(range)))
}

/// Sends the GET of a range of the version `etag`, or of any. The header `version` of the answer says of which it is;
/// what a failed exchange means is up to the store.
pub(crate) async fn pinned(
    transport: &Transport,
    request: HttpRequest<Bytes>,
    range: &Range<u64>,
    etag: &str,
    version: HeaderName,
    asked: Request,
    failed: impl FnOnce(Failure, Request) -> UfsError,
) -> Result<Body, UfsError> {
    let answer = match transport.get(request, (range.start, range.end - 1)).await {
        Ok(answer) => answer,
        Err(failure) => return Err(failed(failure, asked)),
    };
    let answered = unquoted(header_text(answer.headers(), version)).to_owned();
    // A server that ignores the condition must not slip another version in.
    if !etag.is_empty() && !answered.is_empty() && answered != etag {
        let reason = format!("the store answered with the version {answered:?}");
        return Err(UfsError::version_changed(asked, etag, reason));
    }
    let pieces = BodyStream { body: answer.into_body(), request: asked };
    Ok(Body { etag: answered, stream: ByteStream::new(pieces) })
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
