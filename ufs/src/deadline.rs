//! Deadlines of one attempt.
//!
//! - The answer to a request (for LIST and HEAD all of it, for GET its head) must come within `ufs.request_timeout`.
//! - The answer to a request that sends a body, or has bytes copied, may take longer, by `ufs.io_timeout` per
//!   [`STRIDE`] begun.
//! - A body must gain [`STRIDE`] bytes, or reach its end, per `ufs.io_timeout` of waiting. So a store that drips a byte
//!   a second is as late as one that is silent, and the time that the reader itself takes is not counted against the
//!   store.

use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;
use futures::{FutureExt, StreamExt, stream};
use tokio::time::{Instant, timeout};

use crate::error::{Operation, Request, UfsError};
use crate::object::ObjectMeta;
use crate::store::{Answer, Body, ByteStream, ChangeRequest, ListRequest, ObjectStore, StorePage};

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

impl<S: ObjectStore> TimeLimited<S> {
    async fn answer_in_time<T>(&self, operation: Operation, key: &str, answer: Answer<'_, T>) -> Result<T, UfsError> {
        self.answer_within(self.request_timeout, operation, key, answer).await
    }

    async fn answer_within<T>(
        &self,
        limit: Duration,
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
                setting: "ufs.request_timeout",
            }),
        }
    }
}

impl<S: ObjectStore> ObjectStore for TimeLimited<S> {
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
                late,
            };
            Ok(Body { etag: body.etag, stream: ByteStream::new(stream::unfold(paced, StallTimeout::next)) })
        }
        .boxed()
    }

    /// The body, if there is one, is a part of what the answer waits for, and so is what the store copies.
    fn change<'a>(&'a self, request: ChangeRequest<'a>) -> Answer<'a, String> {
        let bytes = request.handled_bytes();
        let body = if bytes > 0 { body_limit(bytes, self.io_timeout) } else { Duration::ZERO };
        let limit = self.request_timeout + body;
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
    late: UfsError,
}

impl StallTimeout {
    async fn next(mut self) -> Option<(Result<Bytes, UfsError>, Self)> {
        let stream = self.stream.as_mut()?;
        // What is there already costs neither a timer nor a look at the clock.
        let item = match stream.next().now_or_never() {
            Some(item) => item,
            None => {
                let began = Instant::now();
                match timeout(self.left, stream.next()).await {
                    Ok(item) => {
                        self.left = self.left.saturating_sub(began.elapsed());
                        item
                    }
                    Err(_) => Some(Err(self.late.clone())),
                }
            }
        };
        let item = item?;
        match &item {
            Ok(bytes) => {
                self.gained += bytes.len() as u64;
                if self.gained >= STRIDE {
                    self.gained = 0;
                    self.left = self.limit;
                }
            }
            Err(_) => self.stream = None,
        }
        Some((item, self))
    }
}
