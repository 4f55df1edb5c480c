//! PutObject, and the reception of bodies in general.
//!
//! A body is taken in batches. A batch is hashed and written on a blocking thread while the next one is received, so an
//! upload holds two batches of memory, and a small object costs one hop to another thread in all.

use std::mem;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use futures::StreamExt;
use hyper::HeaderMap;
use md5::{Digest, Md5};
use s3s::dto::{PutObjectInput, PutObjectOutput, StreamingBlob};
use s3s::{S3Result, TrailingHeaders, s3_error};
use tokio::task::JoinHandle;

use super::backend::{Backend, on_blocking_thread};
use super::checksums::Checksums;
use super::conditions;
use super::reply::{attributes_of, etag};
use crate::error::DevS3Error;
use crate::store::{self, Draft, Store};

/// Bytes that are hashed and written in one go.
const BATCH: usize = 1 << 20;

/// Largest object or part that one request can make, as in S3.
const PUT_MAX: i64 = 5 << 30;

pub(super) async fn put_object(
    backend: &Backend,
    input: PutObjectInput,
    headers: HeaderMap,
    trailers: Option<TrailingHeaders>,
) -> S3Result<PutObjectOutput> {
    let bucket = backend.bucket(&input.bucket)?;
    let condition = conditions::of_put(input.if_match.as_ref(), input.if_none_match.as_ref())?;
    let intake = Intake::new(&backend.store, Checksums::expected(headers, trailers));
    let intake = intake.receive(input.body, input.content_length).await?;
    let mut attributes = attributes_of!(input);
    attributes.content_encoding = attributes.content_encoding.filter(|encoding| encoding != "aws-chunked");
    let (key, content_md5) = (input.key, input.content_md5);
    let object = on_blocking_thread(move || {
        let received = intake.finish(content_md5.as_deref())?;
        let version = store::Version { etag: store::hex(&received.md5), attributes };
        bucket.commit(received.draft, &key, version, &condition)
    })
    .await?;
    Ok(PutObjectOutput { e_tag: Some(etag(&object.etag)), ..Default::default() })
}

/// A body being received.
pub(super) struct Intake {
    store: Arc<Store>,
    /// Made with the first batch.
    draft: Option<Draft>,
    batch: Vec<Bytes>,
    md5: Md5,
    checksums: Box<Checksums>,
}

/// A body that was received whole.
pub(super) struct Received {
    pub draft: Draft,
    pub md5: [u8; 16],
}

impl Intake {
    pub fn new(store: &Arc<Store>, checksums: Checksums) -> Self {
        let (store, checksums) = (Arc::clone(store), Box::new(checksums));
        Self { store, draft: None, batch: Vec::new(), md5: Md5::new(), checksums }
    }

    /// Takes the bytes `range` of an object for a body.
    pub fn from_content(
        store: &Arc<Store>,
        content: &store::Content,
        range: Range<u64>,
    ) -> Result<Received, DevS3Error> {
        let mut intake = Self::new(store, Checksums::default());
        for start in range.clone().step_by(BATCH) {
            let piece = start..range.end.min(start + BATCH as u64);
            let piece = content.read(piece).map_err(DevS3Error::io("read", Path::new("the source of a copy")))?;
            intake.batch.push(piece);
            intake.absorb()?;
        }
        intake.finish(None)
    }

    /// Receives `body` to its end. The last batch is still to be written, which [`Intake::finish`] does.
    pub async fn receive(self, body: Option<StreamingBlob>, length: Option<i64>) -> S3Result<Self> {
        if length.is_some_and(|length| length > PUT_MAX) {
            return Err(s3_error!(EntityTooLarge, "One request can make at most 5 GiB; use a multipart upload."));
        }
        let Some(mut body) = body else { return Ok(self) };
        let mut turn = Turn::Idle(self);
        let (mut batch, mut batched) = (Vec::new(), 0);
        while let Some(data) = body.next().await {
            let data = data.map_err(|error| {
                s3_error!(IncompleteBody, "The body did not arrive whole and as it was signed: {error}")
            })?;
            batched += data.len();
            batch.push(data);
            if batched >= BATCH {
                let mut intake = turn.over().await?;
                intake.batch = mem::take(&mut batch);
                batched = 0;
                turn = Turn::Writing(tokio::task::spawn_blocking(move || intake.absorb().map(|()| intake)));
            }
        }
        let mut intake = turn.over().await?;
        intake.batch = batch;
        Ok(intake)
    }

    /// Hashes and writes the batch.
    fn absorb(&mut self) -> Result<(), DevS3Error> {
        let mut draft = self.draft.take().map_or_else(|| self.store.draft(), Ok)?;
        for data in mem::take(&mut self.batch) {
            self.md5.update(&data);
            self.checksums.update(&data);
            draft.write(&data)?;
        }
        self.draft = Some(draft);
        Ok(())
    }

    /// Writes what is left, and holds the body against its MD5 (in base64), if that was said, and its checksums.
    pub fn finish(mut self, content_md5: Option<&str>) -> Result<Received, DevS3Error> {
        self.absorb()?;
        let draft = self.draft.map_or_else(|| self.store.draft(), Ok)?;
        let md5: [u8; 16] = self.md5.finalize().into();
        if content_md5.is_some_and(|wanted| wanted != BASE64_STANDARD.encode(md5)) {
            return Err(DevS3Error::BadDigest("Content-MD5"));
        }
        self.checksums.verify()?;
        Ok(Received { draft, md5 })
    }
}

/// Who has the intake.
enum Turn {
    Idle(Intake),
    /// A blocking thread, for one batch.
    Writing(JoinHandle<Result<Intake, DevS3Error>>),
}

impl Turn {
    /// Waits for the batch that is being written.
    async fn over(self) -> Result<Intake, DevS3Error> {
        match self {
            Turn::Idle(intake) => Ok(intake),
            Turn::Writing(task) => task.await.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic())),
        }
    }
}
