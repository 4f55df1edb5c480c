//! PutObject, and the reception of bodies in general.
//!
//! A body is taken in batches. A batch is hashed and written on a blocking thread while the next one is received, so an
//! upload holds two batches of memory, and a small object costs one hop to another thread in all.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
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
use s3s::checksum::ChecksumHasher;
use s3s::crypto::{Checksum as _, Crc32, Crc32c, Crc64Nvme, Sha1, Sha256};
use s3s::dto::{PutObjectInput, PutObjectOutput, StreamingBlob};
use s3s::{S3Request, S3Response, S3Result, TrailingHeaders, s3_error};
use tokio::task::JoinHandle;

use super::backend::{Backend, on_blocking_thread};
use super::conditions;
use super::reply::{attributes_of, etag};
use crate::error::DevS3Error;
use crate::store::{self, Attributes, Draft, Store};

/// Bytes that are hashed and written in one go.
const BATCH: usize = 1 << 20;

/// Largest object or part that one request can make, as in S3.
const PUT_MAX: i64 = 5 << 30;

/// Algorithms of additional checksums, by the name that their header ends in.
const ALGORITHMS: [&str; 5] = ["crc32", "crc32c", "crc64nvme", "sha1", "sha256"];

pub(super) async fn put_object(
    backend: &Backend,
    request: S3Request<PutObjectInput>,
) -> S3Result<S3Response<PutObjectOutput>> {
    let S3Request { mut input, headers, trailing_headers, .. } = request;
    let bucket = backend.bucket(&input.bucket)?;
    let condition = conditions::of_put(input.if_match.as_ref(), input.if_none_match.as_ref())?;
    let expected = Expected::of(&headers, trailing_headers, input.content_md5.take());
    let intake = Intake::new(&backend.store, &expected);
    let body = input.body.take();
    let intake = intake.receive(body, input.content_length).await?;
    let mut attributes = attributes_of!(input);
    attributes.content_encoding = attributes.content_encoding.filter(|encoding| encoding != "aws-chunked");
    let key = input.key;
    let object = on_blocking_thread(move || {
        let received = intake.finish(&expected)?;
        let attributes = Attributes { checksums: received.checksums, ..attributes };
        let version = store::Version { etag: store::hex(&received.md5), attributes };
        bucket.commit(received.draft, &key, version, &condition)
    })
    .await?;
    let checksums = object.attributes().map(|attributes| attributes.checksums.clone()).unwrap_or_default();
    let output = PutObjectOutput {
        e_tag: Some(etag(&object.etag)),
        checksum_crc32: checksums.get("crc32").cloned(),
        checksum_crc32c: checksums.get("crc32c").cloned(),
        checksum_crc64nvme: checksums.get("crc64nvme").cloned(),
        checksum_sha1: checksums.get("sha1").cloned(),
        checksum_sha256: checksums.get("sha256").cloned(),
        ..Default::default()
    };
    Ok(S3Response::new(output))
}

/// What a client says about its body: in headers before it, or in trailers after it.
pub(super) struct Expected {
    /// In base64.
    md5: Option<String>,
    headers: BTreeMap<&'static str, String>,
    trailing: Vec<&'static str>,
    trailers: Option<TrailingHeaders>,
}

impl Expected {
    pub fn of(headers: &HeaderMap, trailers: Option<TrailingHeaders>, md5: Option<String>) -> Self {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let trailer = text("x-amz-trailer").unwrap_or_default();
        let mut expected = Self { md5, headers: BTreeMap::new(), trailing: Vec::new(), trailers };
        for algorithm in ALGORITHMS {
            let name = header_of(algorithm);
            if let Some(value) = text(&name) {
                expected.headers.insert(algorithm, value.to_owned());
            } else if trailer.split(',').any(|trailer| trailer.trim().eq_ignore_ascii_case(&name)) {
                expected.trailing.push(algorithm);
            }
        }
        expected
    }

    fn has(&self, algorithm: &str) -> bool {
        self.headers.contains_key(algorithm) || self.trailing.contains(&algorithm)
    }

    /// What was said; trailers are known once the body was read to its end.
    fn checksum(&self, algorithm: &str) -> Option<String> {
        let in_trailer = || {
            let name = header_of(algorithm);
            let value = |map: &HeaderMap| map.get(&name).and_then(|value| value.to_str().ok()).map(str::to_owned);
            self.trailers.as_ref()?.read(value).flatten()
        };
        self.headers.get(algorithm).cloned().or_else(in_trailer)
    }
}

fn header_of(algorithm: &str) -> String {
    format!("x-amz-checksum-{algorithm}")
}

/// A body being received.
pub(super) struct Intake {
    store: Arc<Store>,
    /// Made with the first batch.
    draft: Option<Draft>,
    batch: Vec<Bytes>,
    md5: Md5,
    checksums: Box<ChecksumHasher>,
}

/// A body that was received whole.
pub(super) struct Received {
    pub draft: Draft,
    pub md5: [u8; 16],
    /// Those that were asked for, by algorithm, in base64.
    pub checksums: BTreeMap<String, String>,
}

impl Intake {
    pub fn new(store: &Arc<Store>, expected: &Expected) -> Self {
        let checksums = ChecksumHasher {
            crc32: expected.has("crc32").then(Crc32::new),
            crc32c: expected.has("crc32c").then(Crc32c::new),
            crc64nvme: expected.has("crc64nvme").then(Crc64Nvme::new),
            sha1: expected.has("sha1").then(Sha1::new),
            sha256: expected.has("sha256").then(Sha256::new),
        };
        let (store, checksums) = (Arc::clone(store), Box::new(checksums));
        Self { store, draft: None, batch: Vec::new(), md5: Md5::new(), checksums }
    }

    /// Takes the bytes `range` of a file for a body.
    pub fn from_file(store: &Arc<Store>, mut source: &File, range: Range<u64>) -> Result<Received, DevS3Error> {
        let expected = Expected::of(&HeaderMap::new(), None, None);
        let mut intake = Self::new(store, &expected);
        let read_failed = || DevS3Error::io("read", Path::new("the source of a copy"));
        source.seek(SeekFrom::Start(range.start)).map_err(read_failed())?;
        let mut rest = source.take(range.end - range.start);
        loop {
            let mut piece = Vec::with_capacity(BATCH);
            if rest.by_ref().take(BATCH as u64).read_to_end(&mut piece).map_err(read_failed())? == 0 {
                return intake.finish(&expected);
            }
            intake.batch.push(piece.into());
            intake.absorb()?;
        }
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
        let mut draft = match self.draft.take() {
            Some(draft) => draft,
            None => self.store.draft()?,
        };
        for data in mem::take(&mut self.batch) {
            self.md5.update(&data);
            self.checksums.update(&data);
            draft.write(&data)?;
        }
        self.draft = Some(draft);
        Ok(())
    }

    /// Writes what is left and holds the body against what was said of it.
    pub fn finish(mut self, expected: &Expected) -> Result<Received, DevS3Error> {
        self.absorb()?;
        let draft = match self.draft {
            Some(draft) => draft,
            None => self.store.draft()?,
        };
        let md5: [u8; 16] = self.md5.finalize().into();
        if expected.md5.as_ref().is_some_and(|wanted| *wanted != BASE64_STANDARD.encode(md5)) {
            return Err(DevS3Error::BadDigest("Content-MD5"));
        }
        let found = self.checksums.finalize();
        let found = [
            found.checksum_crc32,
            found.checksum_crc32c,
            found.checksum_crc64nvme,
            found.checksum_sha1,
            found.checksum_sha256,
        ];
        let mut checksums = BTreeMap::new();
        for (algorithm, found) in ALGORITHMS.into_iter().zip(found) {
            let Some(found) = found else { continue };
            if expected.checksum(algorithm).as_ref() != Some(&found) {
                return Err(DevS3Error::BadDigest(algorithm));
            }
            checksums.insert(algorithm.to_owned(), found);
        }
        Ok(Received { draft, md5, checksums })
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
