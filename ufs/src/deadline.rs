//! Deadlines of one attempt.
//!
//! - The answer to a request (for LIST and HEAD all of it, for GET its head) must come within `ufs.request_timeout`.
//! - The answer to a request that sends a body, or has bytes copied or parts put together, may take longer, by
//!   `ufs.io_timeout` per [`STRIDE`] begun. A part counts with the 5 MiB that it has at least: a store may take minutes
//!   to put an object together, and sends blanks meanwhile.
//! - A body must gain [`STRIDE`] bytes, or reach its end, per `ufs.io_timeout` of waiting. So a store that drips a byte
//!   a second is as late as one that is silent, and the time that the reader itself takes is not counted against the
//!   store.

use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures::{FutureExt, Stream, StreamExt};
use tokio::time::{Instant, Sleep, sleep_until, timeout};

use crate::error::{Operation, Request, UfsError};
use crate::object::ObjectMeta;
use crate::store::{Answer, Body, ByteStream, ChangeRequest, ListRequest, Requests, StorePage};

/// Bytes that a body must gain per `io_timeout`.
pub(crate) const STRIDE: u64 = 1 << 20;

/// Longest time that a body of this many bytes may keep us waiting in one attempt.
pub(crate) fn body_limit(bytes: u64, io_timeout: Duration) -> Duration {
    let strides = u32::try_from(bytes / STRIDE + 1).unwrap_or(u32::MAX);
    io_timeout.saturating_mul(strides)
}

pub(crate) struct TimeLimited<S> {
    pub inner: S,
    pub store: std::sync::Arc<str>,
    pub request_timeout: Duration,
    pub io_timeout: Duration,
}

impl<S: Requests> TimeLimited<S> {
    async fn answer_in_time<T>(&self, operation: Operation, key: &str, answer: Answer<'_, T>) -> Result<T, UfsError> {
        self.answer_within((self.request_timeout, "ufs.request_timeout"), operation, key, answer).await
    }

    async fn answer_within<T>(
        &self,
        (limit, setting): (Duration, &'static str),
        operation: Operation,
        key: &str,
        answer: Answer<'_, T>,
    ) -> Result<T, UfsError> {
        match timeout(limit, answer).await {
            Ok(answer) => answer,
            Err(_) => Err(UfsError::Deadline {
                request: Request::new(operation, &self.store, key),
                what: "the answer",
                limit,
                setting,
            }),
        }
    }
}

impl<S: Requests> Requests for TimeLimited<S> {
    fn list<'a>(&'a self, request: ListRequest<'a>) -> Answer<'a, StorePage> {
        self.answer_in_time(Operation::List, request.prefix, self.inner.list(request)).boxed()
    }

    fn head<'a>(&'a self, key: &'a str) -> Answer<'a, ObjectMeta> {
        self.answer_in_time(Operation::Head, key, self.inner.head(key)).boxed()
    }

    fn get<'a>(&'a self, key: &'a str, etag: &'a str, range: Range<u64>) -> Answer<'a, Body> {
        async move {
            let body = self.answer_in_time(Operation::Get, key, self.inner.get(key, etag, range)).await?;
            let late = UfsError::Deadline {
                request: Request::new(Operation::Get, &self.store, key),
                what: "the next MiB of the body",
                limit: self.io_timeout,
                setting: "ufs.io_timeout",
            };
            let paced = StallTimeout {
                stream: Some(body.stream),
                limit: self.io_timeout,
                left: self.io_timeout,
                gained: 0,
                waits_since: None,
                alarm: None,
                late,
            };
            Ok(Body { etag: body.etag, stream: ByteStream::new(paced) })
        }
        .boxed()
    }

    /// The body, if there is one, is a part of what the answer waits for, and so is what the store copies or puts
    /// together.
    fn change<'a>(&'a self, request: ChangeRequest<'a>) -> Answer<'a, String> {
        let limit = match request.handled_bytes() {
            0 => (self.request_timeout, "ufs.request_timeout"),
            bytes => (self.request_timeout + body_limit(bytes, self.io_timeout), "ufs.io_timeout"),
        };
        self.answer_within(limit, request.operation(), request.key, self.inner.change(request)).boxed()
    }
}

struct StallTimeout {
    /// `None` after an error.
    stream: Option<ByteStream>,
    limit: Duration,
    /// Waiting time left for the current stride.
    left: Duration,
    /// Bytes of the current stride.
    gained: u64,
    /// Since when the next piece is waited for.
    waits_since: Option<Instant>,
    /// Set when a piece is waited for first. It may ring early: it is not set anew for each piece.
    alarm: Option<Pin<Box<Sleep>>>,
    late: UfsError,
}

impl StallTimeout {
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
}

impl Stream for StallTimeout {
    type Item = Result<Bytes, UfsError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        let Some(stream) = &mut this.stream else { return Poll::Ready(None) };
        let item = match stream.poll_next_unpin(cx) {
            Poll::Ready(item) => item,
            Poll::Pending if this.is_late(cx) => Some(Err(this.late.clone())),
            Poll::Pending => return Poll::Pending,
        };
        if let Some(since) = this.waits_since.take() {
            this.left = this.left.saturating_sub(since.elapsed());
        }
        match &item {
            Some(Ok(bytes)) => {
                this.gained += bytes.len() as u64;
                if this.gained >= STRIDE {
                    this.gained = 0;
                    this.left = this.limit;
                }
            }
            Some(Err(_)) => this.stream = None,
            None => {}
        }
        Poll::Ready(item)
    }
}
