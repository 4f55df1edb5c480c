//! Faults on purpose, for tests of whatever stands above a store.

use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::{FutureExt, StreamExt, future};

use crate::error::{Operation, Request, UfsError};
use crate::object::ObjectMeta;
use crate::store::{Answer, Body, ByteStream, ChangeRequest, ListRequest, Requests, StorePage};

/// What goes wrong, counted over all requests of one handle, so that a test is the same every time.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Every n-th request fails as if the store were overloaded.
    pub fail_every: Option<NonZeroU64>,
    /// Every n-th body ends after half of its first piece.
    pub cut_every: Option<NonZeroU64>,
    /// Every answer comes this much later.
    pub delay: Duration,
}

pub(crate) struct FaultInjecting {
    pub inner: Arc<dyn Requests>,
    pub store: Arc<str>,
    pub faults: Faults,
    pub requests: AtomicU64,
    pub bodies: AtomicU64,
}

fn is_due(counter: &AtomicU64, every: Option<NonZeroU64>) -> bool {
    every.is_some_and(|every| (counter.fetch_add(1, Ordering::Relaxed) + 1).is_multiple_of(every.get()))
}

impl FaultInjecting {
    async fn interfere(&self, operation: Operation, key: &str) -> Result<(), UfsError> {
        if !self.faults.delay.is_zero() {
            tokio::time::sleep(self.faults.delay).await;
        }
        if is_due(&self.requests, self.faults.fail_every) {
            let request = Request::new(operation, &self.store, key);
            return Err(UfsError::Unavailable { request, reason: "an injected fault".to_owned(), source: None });
        }
        Ok(())
    }
}

impl Requests for FaultInjecting {
    fn list<'a>(&'a self, request: ListRequest<'a>) -> Answer<'a, StorePage> {
        async move {
            self.interfere(Operation::List, request.prefix).await?;
            self.inner.list(request).await
        }
        .boxed()
    }

    fn head<'a>(&'a self, key: &'a str) -> Answer<'a, ObjectMeta> {
        async move {
            self.interfere(Operation::Head, key).await?;
            self.inner.head(key).await
        }
        .boxed()
    }

    fn get<'a>(&'a self, key: &'a str, etag: &'a str, range: Range<u64>) -> Answer<'a, Body> {
        async move {
            self.interfere(Operation::Get, key).await?;
            let body = self.inner.get(key, etag, range).await?;
            if !is_due(&self.bodies, self.faults.cut_every) {
                return Ok(body);
            }
            let halved = body.stream.take(1).map(|item| item.map(|bytes| bytes.slice(..bytes.len() / 2)));
            let halved = halved.filter(|item| future::ready(!matches!(item, Ok(bytes) if bytes.is_empty())));
            Ok(Body { etag: body.etag, stream: ByteStream::new(halved) })
        }
        .boxed()
    }

    fn change<'a>(&'a self, request: ChangeRequest<'a>) -> Answer<'a, String> {
        async move {
            self.interfere(request.operation(), request.key).await?;
            self.inner.change(request).await
        }
        .boxed()
    }
}
