//! Requests in flight: one limit per store and process, shared by every handle of that store.
//!
//! A permit is held from before the request until the body has been read or dropped, so a reader that sits on an open
//! body counts against the limit. The wait for a permit is bounded too (by `ufs.request_timeout`), like every other
//! wait.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use futures::{FutureExt, StreamExt};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::error::{Operation, Request, UfsError};
use crate::object::ObjectMeta;
use crate::store::{Answer, Body, ByteStream, ChangeRequest, ListRequest, Requests, StorePage};

pub(crate) struct ConcurrencyLimited<S> {
    pub inner: S,
    pub store: Arc<str>,
    pub permits: Arc<Semaphore>,
    pub wait: Duration,
}

impl<S: Requests> ConcurrencyLimited<S> {
    async fn permit(&self, operation: Operation, key: &str) -> Result<OwnedSemaphorePermit, UfsError> {
        // A free permit costs no timer.
        if let Ok(permit) = self.permits.clone().try_acquire_owned() {
            return Ok(permit);
        }
        match timeout(self.wait, self.permits.clone().acquire_owned()).await {
            Ok(Ok(permit)) => Ok(permit),
            // The semaphore is never closed, so this is the timeout.
            Ok(Err(_)) | Err(_) => Err(UfsError::Deadline {
                request: Request::new(operation, &self.store, key),
                what: "the wait for other requests to this store",
                limit: self.wait,
                setting: "ufs.concurrency",
            }),
        }
    }
}

impl<S: Requests> Requests for ConcurrencyLimited<S> {
    fn list<'a>(&'a self, request: ListRequest<'a>) -> Answer<'a, StorePage> {
        async move {
            let _permit = self.permit(Operation::List, request.prefix).await?;
            self.inner.list(request).await
        }
        .boxed()
    }

    fn head<'a>(&'a self, key: &'a str) -> Answer<'a, ObjectMeta> {
        async move {
            let _permit = self.permit(Operation::Head, key).await?;
            self.inner.head(key).await
        }
        .boxed()
    }

    fn get<'a>(&'a self, key: &'a str, etag: &'a str, range: Range<u64>) -> Answer<'a, Body> {
        async move {
            let permit = self.permit(Operation::Get, key).await?;
            let Body { etag, stream } = self.inner.get(key, etag, range).await?;
            // The closure owns the permit for as long as the stream lives.
            let stream = stream.map(move |item| {
                let _held = &permit;
                item
            });
            Ok(Body { etag, stream: ByteStream::new(stream) })
        }
        .boxed()
    }

    fn change<'a>(&'a self, request: ChangeRequest<'a>) -> Answer<'a, String> {
        async move {
            let _permit = self.permit(request.operation(), request.key).await?;
            self.inner.change(request).await
        }
        .boxed()
    }
}
