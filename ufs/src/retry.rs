//! Retries of what is temporary: `ufs.retries` more attempts, each after a pause.
//!
//! The pause before attempt n is drawn from the upper half of `retry_backoff · 2ⁿ`, at most `retry_backoff_max`
//! ([`cavern_conf::backoff`]). Refusals (404, 403, 412, …) are final at once. Where somebody waits for the answer, an
//! outage is waited for beyond that ([`crate::Ufs::patient`]).
//!
//! A body that breaks off goes on where it stopped, and the retries of one GET count together over its whole life. The
//! second request is pinned to the version whose bytes were already handed out: to the caller's ETag, or, where the
//! caller named none, to the one the store answered with; without either, a broken body cannot be continued and is an
//! error. One that may be of a version which the bucket keeps begins, and goes on, with that where the current object
//! is another one by then.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cavern_conf::backoff::Profile;
use futures::{StreamExt, stream};
use tokio::time::Instant;

use crate::attempt::Attempts;
use crate::error::{Denial, Operation, Request, UfsError};
use crate::object::ObjectMeta;
use crate::store::{Body, ByteStream, ChangeRequest, ListRequest, StorePage};
use crate::versions::VersionScope;

/// The requests of a store, each sent until it is answered or has failed for good. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Retrying {
    pub attempts: Arc<Attempts>,
    /// More attempts after the first one.
    pub retries: u32,
    pub pauses: Profile,
    /// How long a call tries again while the store cannot be reached, however many attempts that takes.
    pub patience: Duration,
}

/// What became of a call so far.
struct Failures {
    attempts: u32,
    began: Instant,
}

impl Failures {
    fn none() -> Self {
        Self { attempts: 0, began: Instant::now() }
    }
}

impl Retrying {
    /// Counts a failed attempt and waits, or gives the error back when it is final.
    async fn survive(&self, error: UfsError, failed: &mut Failures) -> Result<(), UfsError> {
        let is_waited_for = || error.is_outage() && failed.began.elapsed() < self.patience;
        if !error.is_temporary() || failed.attempts >= self.retries && !is_waited_for() {
            return Err(error);
        }
        self.attempts.shared.metrics.retries.inc();
        tokio::time::sleep(self.pauses.pause(failed.attempts)).await;
        failed.attempts = failed.attempts.saturating_add(1);
        Ok(())
    }

    /// Sends a request until it is answered, or has failed for good.
    async fn answered<T, F>(&self, failed: &mut Failures, send: impl Fn() -> F) -> Result<T, UfsError>
    where
        F: Future<Output = Result<T, UfsError>>,
    {
        loop {
            match send().await {
                Ok(answer) => return Ok(answer),
                Err(error) => self.survive(error, failed).await?,
            }
        }
    }

    pub(crate) async fn list(&self, request: ListRequest<'_>) -> Result<StorePage, UfsError> {
        self.answered(&mut Failures::none(), || self.attempts.list(request)).await
    }

    pub(crate) async fn head(&self, key: &str) -> Result<ObjectMeta, UfsError> {
        self.answered(&mut Failures::none(), || self.attempts.head(key)).await
    }

    pub(crate) async fn get(
        &self,
        key: &str,
        etag: &str,
        range: Range<u64>,
        scope: VersionScope,
    ) -> Result<Body, UfsError> {
        let mut resuming = Resuming {
            store: self.clone(),
            key: key.to_owned(),
            etag: etag.to_owned(),
            scope,
            id: None,
            rest: range,
            stream: None,
            failed: Failures::none(),
        };
        let body = resuming.open().await?;
        if etag.is_empty() {
            resuming.etag.clone_from(&body.etag);
        }
        resuming.stream = Some(body.stream);
        Ok(Body { etag: body.etag, stream: ByteStream::new(stream::unfold(resuming, Resuming::next)) })
    }

    /// The id of a version that is not the current one any more; `None` where the store has none, or does not tell.
    async fn version_of(&self, key: &str, etag: &str) -> Result<Option<Arc<str>>, UfsError> {
        let versions = &self.attempts.shared.versions;
        if etag.is_empty() || versions.are_absent() {
            return Ok(None);
        }
        match self.answered(&mut Failures::none(), || self.attempts.version_of(key, etag)).await {
            Ok(id) => Ok(id.map(|id| versions.found(key, etag, id))),
            Err(
                refused @ (UfsError::Denied { denial: Denial::Credentials, .. }
                | UfsError::Rejected { .. }
                | UfsError::NoBucket { .. }),
            ) => {
                versions.are_refused(&refused);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// A condition may fail because an earlier attempt was carried out although its answer was lost: `write.rs` finds
    /// out.
    pub(crate) async fn change(&self, request: ChangeRequest<'_>) -> Result<String, UfsError> {
        self.answered(&mut Failures::none(), || self.attempts.change(request)).await
    }
}

struct Resuming {
    store: Retrying,
    key: String,
    etag: String,
    scope: VersionScope,
    /// Of the version, if it is not the current one.
    id: Option<Arc<str>>,
    /// What has not been handed out yet.
    rest: Range<u64>,
    /// `None` after the end.
    stream: Option<ByteStream>,
    failed: Failures,
}

impl Resuming {
    async fn next(mut self) -> Option<(Result<Bytes, UfsError>, Self)> {
        loop {
            let error = match self.stream.as_mut()?.next().await {
                Some(Ok(bytes)) => {
                    self.rest.start += bytes.len() as u64;
                    return Some((Ok(bytes), self));
                }
                None => return None,
                Some(Err(error)) => error,
            };
            // Frees the connection and the permit before the pause.
            self.stream = None;
            match self.resume(error).await {
                Ok(stream) => self.stream = Some(stream),
                Err(error) => return Some((Err(error), self)),
            }
        }
    }

    async fn resume(&mut self, error: UfsError) -> Result<ByteStream, UfsError> {
        if self.etag.is_empty() {
            return Err(error);
        }
        self.store.survive(error, &mut self.failed).await?;
        Ok(self.open().await?.stream)
    }

    /// The rest, as far as nothing was handed out of another version.
    async fn open(&mut self) -> Result<Body, UfsError> {
        if self.scope == VersionScope::Current {
            return self.ask().await;
        }
        if self.id.is_none() {
            self.id = self.store.attempts.shared.versions.known(&self.key, &self.etag);
        }
        let gone = match self.ask().await {
            Err(gone) if gone.is_metadata_outdated() => gone,
            answer => return answer,
        };
        self.store.attempts.shared.versions.gone(&self.key, &self.etag);
        self.id = self.store.version_of(&self.key, &self.etag).await?;
        let Some(id) = self.id.clone() else { return Err(gone) };
        match self.ask().await {
            Err(cause) if !cause.is_temporary() => {
                let asked = Request::new(Operation::Get, &self.store.attempts.shared.label, &self.key);
                let reason = format!("the bucket keeps it as version {id}, which cannot be read: {cause}");
                Err(UfsError::version_changed(asked, &self.etag, reason))
            }
            answer => answer,
        }
    }

    async fn ask(&mut self) -> Result<Body, UfsError> {
        let (store, key, etag, id, rest) = (&self.store, &self.key, &self.etag, self.id.as_deref(), &self.rest);
        store.answered(&mut self.failed, || store.attempts.get(key, etag, id, rest.clone())).await
    }
}
