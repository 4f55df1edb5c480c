//! A body is exactly its range, or it ends in an error: never silently short, never long.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures::{FutureExt, StreamExt, stream};

use crate::error::{Operation, Request, UfsError};
use crate::object::ObjectMeta;
use crate::store::{Answer, Body, ByteStream, ChangeRequest, ListRequest, Requests, StorePage};

pub(crate) struct Exact<S> {
    pub inner: S,
    pub store: Arc<str>,
}

impl<S: Requests> Requests for Exact<S> {
    fn list<'a>(&'a self, request: ListRequest<'a>) -> Answer<'a, StorePage> {
        self.inner.list(request)
    }

    fn head<'a>(&'a self, key: &'a str) -> Answer<'a, ObjectMeta> {
        self.inner.head(key)
    }

    fn get<'a>(&'a self, key: &'a str, etag: &'a str, range: Range<u64>) -> Answer<'a, Body> {
        async move {
            let expected = range.end - range.start;
            let body = self.inner.get(key, etag, range).await?;
            let counted = Counted {
                stream: Some(body.stream),
                request: Request::new(Operation::Get, &self.store, key),
                expected,
                received: 0,
            };
            Ok(Body { etag: body.etag, stream: ByteStream::new(stream::unfold(counted, Counted::next)) })
        }
        .boxed()
    }

    fn change<'a>(&'a self, request: ChangeRequest<'a>) -> Answer<'a, String> {
        self.inner.change(request)
    }
}

struct Counted {
    /// `None` after the last byte or an error.
    stream: Option<ByteStream>,
    request: Request,
    expected: u64,
    received: u64,
}

impl Counted {
    async fn next(mut self) -> Option<(Result<Bytes, UfsError>, Self)> {
        let stream = self.stream.as_mut()?;
        let item = match stream.next().await {
            Some(Ok(bytes)) => {
                self.received += bytes.len() as u64;
                if self.received <= self.expected {
                    return Some((Ok(bytes), self));
                }
                let reason = format!("it sent more than the {} bytes of the range", self.expected);
                Err(UfsError::Malformed { request: self.request.clone(), reason, source: None })
            }
            Some(Err(error)) => Err(error),
            None if self.received == self.expected => return None,
            None => Err(UfsError::ShortBody {
                request: self.request.clone(),
                expected: self.expected,
                received: self.received,
            }),
        };
        self.stream = None;
        Some((item, self))
    }
}
