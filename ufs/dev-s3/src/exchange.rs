//! One request from its arrival to the last byte of its answer: counted, subjected to the fault rules, logged.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use hyper::header::{CONNECTION, CONTENT_LENGTH, HeaderValue, RANGE};
use hyper::{Method, Request, Response, StatusCode};
use s3s::{Body, S3Error, S3ErrorCode, StdError};
use tokio_util::sync::CancellationToken;

use crate::faults::FaultKind;
use crate::operation::{Operation, Target};
use crate::shared::Shared;
use crate::store::ListQuery;

/// Why a connection was ended on purpose.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Ended {
    #[error("a fault rule resets the connection")]
    Reset,
    #[error("a fault rule cuts the body short")]
    ShortBody,
    #[error("the store stops")]
    Stopping,
    #[error("the request could not be answered")]
    Unanswerable(#[source] StdError),
}

/// Answers one request. An error makes the connection close without an answer.
pub(crate) async fn answer(
    shared: Arc<Shared>,
    request: Request<Incoming>,
    reset: Arc<AtomicBool>,
    stop: CancellationToken,
) -> Result<Response<Answer>, Ended> {
    let uri = request.uri();
    let is_copy = request.headers().contains_key("x-amz-copy-source");
    let target = Target::of(request.method(), uri.path(), uri.query(), is_copy);
    let has_body = request.method() != Method::HEAD;
    let is_sent_body = !request.body().is_end_stream();
    shared.stats.request(target.operation);
    let range = shared.log.as_ref().and_then(|_| request.headers().get(RANGE).cloned());
    let mut entry = Entry { shared: Arc::clone(&shared), target, range, status: 0, bytes: 0, open: true };

    let verdict = shared.faults.judge(&entry.target);
    if !verdict.latency.is_zero() {
        tokio::time::sleep(verdict.latency).await;
    }
    let obstructed = match verdict.failure {
        Some(FaultKind::Tree) => obstruction(&shared, &entry.target),
        _ => None,
    };
    if obstructed.is_some() || verdict.failure.is_some_and(|failure| failure != FaultKind::Tree) {
        shared.stats.fault();
    }
    let response = match verdict.failure {
        Some(FaultKind::Reset) => {
            reset.store(true, Ordering::Relaxed);
            return Err(Ended::Reset);
        }
        Some(FaultKind::Unavailable) => refusal(S3ErrorCode::SlowDown),
        Some(FaultKind::Denied) => refusal(S3ErrorCode::AccessDenied),
        Some(FaultKind::ClockOff) => refusal(S3ErrorCode::RequestTimeTooSkewed),
        Some(FaultKind::Hang) => {
            tokio::select! {
                () = shared.faults.cleared_since(&verdict) => {}
                () = stop.cancelled() => return Err(Ended::Stopping),
            }
            shared.s3.call(request.map(Body::from)).await.map_err(StdError::from)
        }
        Some(FaultKind::Tree | FaultKind::ShortBody) | None => match obstructed {
            Some(code) => conflict(code),
            None => shared.s3.call(request.map(Body::from)).await.map_err(StdError::from),
        },
    };
    let mut response = response.map_err(Ended::Unanswerable)?;

    entry.status = response.status().as_u16();
    if response.status().is_client_error() || response.status().is_server_error() {
        shared.stats.error();
        if is_sent_body {
            // It may not have been read: then the connection ends, and whoever sent it is not to use it again.
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
    }
    let size = response.body().size_hint().exact();
    let mut remaining = size.filter(|_| has_body);
    let mut cut = false;
    if verdict.failure == Some(FaultKind::ShortBody) && has_body {
        // The header keeps the full length, whatever becomes of the body.
        if let (Some(size), false) = (size, response.headers().contains_key(CONTENT_LENGTH)) {
            response.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from(size));
        }
        cut = size != Some(0);
        remaining = remaining.map(|size| size / 2);
    }
    if remaining == Some(0) || !has_body {
        entry.close();
    }
    Ok(response.map(|body| Answer { body, entry, remaining, cut, flushed: false }))
}

/// The code of the refusal, if a request would make an object above or below another one.
fn obstruction(shared: &Shared, target: &Target) -> Option<&'static str> {
    let makes_object =
        matches!(target.operation, Operation::PutObject | Operation::CopyObject | Operation::CompleteMultipartUpload);
    let bucket = shared.store.bucket(&target.bucket).ok().filter(|_| makes_object)?;
    let key = target.key.trim_end_matches('/');
    let mut above = key.match_indices('/').map(|(at, _)| &key[..at]).chain((key != target.key).then_some(key));
    if above.any(|above| bucket.object(above).is_ok()) {
        return Some("ObjectParentIsFile");
    }
    let below = ListQuery { prefix: &format!("{key}/"), limit: 1, ..ListQuery::default() };
    (key == target.key && !bucket.list(&below).objects.is_empty()).then_some("ExistingObjectIsDirectory")
}

fn conflict(code: &'static str) -> Result<Response<Body>, StdError> {
    let mut error = S3Error::with_message(S3ErrorCode::Custom(code.into()), "Another object is in the way.");
    error.set_status_code(StatusCode::CONFLICT);
    Ok(error.to_http_response()?)
}

fn refusal(code: S3ErrorCode) -> Result<Response<Body>, StdError> {
    let error = S3Error::with_message(code, "A fault rule refuses this request.");
    Ok(error.to_http_response()?)
}

/// What is logged of a request when it is over.
struct Entry {
    shared: Arc<Shared>,
    target: Target,
    range: Option<HeaderValue>,
    status: u16,
    bytes: u64,
    open: bool,
}

impl Entry {
    fn sent(&mut self, bytes: u64) {
        self.bytes += bytes;
        self.shared.stats.sent(bytes);
    }

    fn close(&mut self) {
        if !std::mem::take(&mut self.open) {
            return;
        }
        if let Some(log) = &self.shared.log {
            let range = self.range.as_ref().and_then(|range| range.to_str().ok());
            log.append(&self.target, range, self.status, self.bytes);
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.close();
    }
}

/// An answer's body, counted, and cut where a rule says so.
pub(crate) struct Answer {
    body: Body,
    entry: Entry,
    /// Bytes that may still be sent; `None` where the length is unknown.
    remaining: Option<u64>,
    /// End the connection after `remaining`.
    cut: bool,
    /// Before the connection is cut, hyper got a chance to send what it has.
    flushed: bool,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = StdError;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, StdError>>> {
        let this = self.get_mut();
        if this.cut && this.remaining == Some(0) {
            if !std::mem::replace(&mut this.flushed, true) {
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            return Poll::Ready(Some(Err(Ended::ShortBody.into())));
        }
        let frame = std::task::ready!(Pin::new(&mut this.body).poll_frame(context));
        let Some(Ok(frame)) = frame else {
            this.entry.close();
            return Poll::Ready(frame);
        };
        let frame = match frame.into_data() {
            Ok(mut data) => {
                if let (true, Some(remaining)) = (this.cut, this.remaining) {
                    data.truncate(remaining as usize);
                }
                this.entry.sent(data.len() as u64);
                if let Some(remaining) = &mut this.remaining {
                    *remaining = remaining.saturating_sub(data.len() as u64);
                    if *remaining == 0 {
                        this.entry.close();
                    }
                } else if this.cut {
                    this.remaining = Some(0);
                }
                Frame::data(data)
            }
            Err(frame) => frame,
        };
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        !self.cut && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        if self.cut { SizeHint::default() } else { self.body.size_hint() }
    }
}
