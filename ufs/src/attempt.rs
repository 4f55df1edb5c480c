//! One attempt of a request: its turn, its deadlines, what is counted of it, and the length of its body.
//!
//! - **Turn.** The requests in flight have one limit per store and process, shared by every handle of that store. A
//!   permit is held from before the request until the body has been read or dropped, so a reader that sits on an open
//!   body counts against the limit. The wait for one is bounded too, by `ufs.request_timeout`.
//! - **Answer.** That to a request (for LIST and HEAD all of it, for GET its head) must come within
//!   `ufs.request_timeout`. That to a request that sends a body, or has bytes copied or parts put together, may take
//!   longer, by `ufs.io_timeout` per [`STRIDE`] begun. A part counts with the 5 MiB that it has at least: a store may
//!   take minutes to put an object together, and sends blanks meanwhile.
//! - **Pace.** A body must gain [`STRIDE`] bytes, or reach its end, per `ufs.io_timeout` of waiting. So a store that
//!   drips a byte a second is as late as one that is silent, and the time that the reader itself takes is not counted
//!   against the store.
//! - **Length.** A body is exactly its range, or it ends in an error: never silently short, never long.

use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures::{Stream, StreamExt};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, Sleep, sleep_until, timeout};

use crate::error::{Operation, Request, UfsError};
use crate::fault::Injected;
use crate::metrics::{InFlight, StoreMetrics};
use crate::object::ObjectMeta;
use crate::shared_store::SharedStore;
use crate::store::{Answer, Body, ByteStream, ChangeRequest, ListRequest, ObjectStore, StorePage};

/// Bytes that a body must gain per `io_timeout`.
const STRIDE: u64 = 1 << 20;

/// Longest time that a body of this many bytes may keep us waiting in one attempt.
pub(crate) fn body_limit(bytes: u64, io_timeout: Duration) -> Duration {
    let strides = u32::try_from(bytes / STRIDE + 1).unwrap_or(u32::MAX);
    io_timeout.saturating_mul(strides)
}

/// The requests of a store, each sent once.
#[derive(Clone)]
pub(crate) struct Attempts {
    pub store: Arc<dyn ObjectStore>,
    pub shared: Arc<SharedStore>,
    pub request_timeout: Duration,
    pub io_timeout: Duration,
    /// What goes wrong on purpose.
    pub faults: Option<Arc<Injected>>,
}

/// What an attempt holds until all of it is over.
struct Turn {
    _permit: OwnedSemaphorePermit,
    _in_flight: InFlight,
}

impl Attempts {
    pub(crate) async fn list(&self, request: ListRequest<'_>) -> Result<StorePage, UfsError> {
        let sent = self.send(Operation::List, request.prefix, 0, || self.store.list(request));
        sent.await.map(|(page, _turn)| page)
    }

    pub(crate) async fn head(&self, key: &str) -> Result<ObjectMeta, UfsError> {
        let sent = self.send(Operation::Head, key, 0, || self.store.head(key));
        sent.await.map(|(object, _turn)| object)
    }

    /// The id of the version of a key that has this ETag.
    pub(crate) async fn version_of(&self, key: &str, etag: &str) -> Result<Option<String>, UfsError> {
        let sent = self.send(Operation::List, key, 0, || self.store.version_of(key, etag));
        sent.await.map(|(id, _turn)| id)
    }

    /// Of what is there now, or of the version of this id.
    pub(crate) async fn get(
        &self,
        key: &str,
        etag: &str,
        id: Option<&str>,
        range: Range<u64>,
    ) -> Result<Body, UfsError> {
        let expected = range.end - range.start;
        let sent = self.send(Operation::Get, key, 0, || match id {
            Some(id) => self.store.get_version(id, key, etag, range),
            None => self.store.get(key, etag, range),
        });
        let (Body { etag, mut stream }, turn) = sent.await?;
        if let Some(faults) = &self.faults {
            stream = faults.cut(stream);
        }
        let held = PermittedBody {
            stream: Some(stream),
            request: Request::new(Operation::Get, &self.shared.label, key),
            expected,
            received: 0,
            pace: Pace::new(self.io_timeout),
            metrics: self.shared.metrics.clone(),
            _turn: turn,
        };
        Ok(Body { etag, stream: ByteStream::new(held) })
    }

    /// The body, if there is one, is a part of what the answer waits for, and so is what the store copies or puts
    /// together.
    pub(crate) async fn change(&self, request: ChangeRequest<'_>) -> Result<String, UfsError> {
        let handled = request.handled_bytes();
        let sent = self.send(request.operation(), request.key, handled, || self.store.change(request));
        let (changed, _turn) = sent.await?;
        self.shared.metrics.written_bytes.inc_by(request.body_bytes());
        Ok(changed)
    }

    /// Sends a request, in its turn, for which the store handles so many bytes before it can answer.
    async fn send<'a, T>(
        &self,
        operation: Operation,
        key: &str,
        handled_bytes: u64,
        send: impl FnOnce() -> Answer<'a, T>,
    ) -> Result<(T, Turn), UfsError> {
        let permit = self.permit(operation, key).await?;
        let metrics = &self.shared.metrics;
        let turn = Turn { _permit: permit, _in_flight: InFlight::begin(metrics) };
        let answer = async {
            if let Some(faults) = &self.faults {
                faults.interfere(|| Request::new(operation, &self.shared.label, key)).await?;
            }
            send().await
        };
        let (limit, setting) = match handled_bytes {
            0 => (self.request_timeout, "ufs.request_timeout"),
            bytes => (self.request_timeout + body_limit(bytes, self.io_timeout), "ufs.io_timeout"),
        };
        let punctual = async {
            let late = |_| Err(self.late(operation, key, "the answer", limit, setting));
            timeout(limit, answer).await.unwrap_or_else(late)
        };
        Ok((metrics.of(operation).measure(punctual).await?, turn))
    }

    async fn permit(&self, operation: Operation, key: &str) -> Result<OwnedSemaphorePermit, UfsError> {
        let permits = &self.shared.permits;
        // A free permit costs no timer.
        if let Ok(permit) = permits.clone().try_acquire_owned() {
            return Ok(permit);
        }
        match timeout(self.request_timeout, permits.clone().acquire_owned()).await {
            Ok(Ok(permit)) => Ok(permit),
            // The semaphore is never closed, so this is the timeout.
            Ok(Err(_)) | Err(_) => {
                let what = "the wait for other requests to this store";
                Err(self.late(operation, key, what, self.request_timeout, "ufs.concurrency"))
            }
        }
    }

    fn late(
        &self,
        operation: Operation,
        key: &str,
        what: &'static str,
        limit: Duration,
        setting: &'static str,
    ) -> UfsError {
        UfsError::Deadline { request: Request::new(operation, &self.shared.label, key), what, limit, setting }
    }
}

/// The body of an answer, while it is read.
struct PermittedBody {
    /// `None` after an error.
    stream: Option<ByteStream>,
    request: Request,
    /// Bytes of the range, and of it so far.
    expected: u64,
    received: u64,
    pace: Pace,
    metrics: Arc<StoreMetrics>,
    _turn: Turn,
}

impl PermittedBody {
    /// The next piece, if it is still within the range.
    fn piece(&mut self, bytes: Bytes) -> Result<Bytes, UfsError> {
        let length = bytes.len() as u64;
        self.received += length;
        if self.received > self.expected {
            let reason = format!("it sent more than the {} bytes of the range", self.expected);
            return Err(UfsError::Malformed { request: self.request.clone(), reason });
        }
        self.pace.gain(length);
        self.metrics.bytes.inc_by(length);
        Ok(bytes)
    }

    /// What the end of the stream means.
    fn end(&self) -> Option<Result<Bytes, UfsError>> {
        let Self { request, expected, received, .. } = self;
        let (expected, received) = (*expected, *received);
        (received < expected).then(|| Err(UfsError::ShortBody { request: request.clone(), expected, received }))
    }

    fn late(&self) -> UfsError {
        UfsError::Deadline {
            request: self.request.clone(),
            what: "the next MiB of the body",
            limit: self.pace.limit,
            setting: "ufs.io_timeout",
        }
    }
}

impl Stream for PermittedBody {
    type Item = Result<Bytes, UfsError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        let Some(stream) = &mut this.stream else { return Poll::Ready(None) };
        let polled = stream.poll_next_unpin(cx);
        if polled.is_ready() {
            this.pace.has_come();
        }
        let item = match polled {
            Poll::Ready(Some(Ok(bytes))) => Some(this.piece(bytes)),
            Poll::Ready(Some(Err(error))) => Some(Err(error)),
            Poll::Ready(None) => this.end(),
            Poll::Pending if this.pace.is_late(cx) => Some(Err(this.late())),
            Poll::Pending => return Poll::Pending,
        };
        if let Some(Err(error)) = &item {
            this.metrics.of(Operation::Get).failed(error);
            this.stream = None;
        }
        Poll::Ready(item)
    }
}

/// How long the pieces of a body may be waited for.
struct Pace {
    limit: Duration,
    /// Waiting time left for the current stride.
    left: Duration,
    /// Bytes of the current stride.
    gained: u64,
    /// Since when the next piece is waited for.
    waits_since: Option<Instant>,
    /// Set when a piece is waited for first. It may ring early: it is not set anew for each piece.
    alarm: Option<Pin<Box<Sleep>>>,
}

impl Pace {
    fn new(limit: Duration) -> Self {
        Self { limit, left: limit, gained: 0, waits_since: None, alarm: None }
    }

    /// Whether the wait for the next piece has been too long; if not, its end wakes the task.
    fn is_late(&mut self, cx: &mut Context<'_>) -> bool {
        // What is there already costs neither a timer nor a look at the clock.
        let until = *self.waits_since.get_or_insert_with(Instant::now) + self.left;
        let alarm = self.alarm.get_or_insert_with(|| Box::pin(sleep_until(until)));
        while alarm.as_mut().poll(cx).is_ready() {
            if Instant::now() >= until {
                return true;
            }
            alarm.as_mut().reset(until);
        }
        false
    }

    /// The wait is over.
    fn has_come(&mut self) {
        if let Some(since) = self.waits_since.take() {
            self.left = self.left.saturating_sub(since.elapsed());
        }
    }

    fn gain(&mut self, bytes: u64) {
        self.gained += bytes;
        if self.gained >= STRIDE {
            self.gained = 0;
            self.left = self.limit;
        }
    }
}
