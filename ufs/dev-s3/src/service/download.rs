//! GetObject and HeadObject.
//!
//! The body of a small answer is read with one `pread` where the request is handled: from the page cache that costs
//! less than handing it to another thread. A large one is read piece by piece on the blocking threads, one piece ahead
//! of the connection: a client that does not read holds two pieces of memory and no thread.

use std::io;
use std::ops::Range as Bytes64;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures::Stream;
use hyper::HeaderMap;
use hyper::header::{CONTENT_RANGE, HeaderValue};
use s3s::dto::*;
use s3s::stream::{ByteStream, RemainingLength};
use s3s::{Body, S3Error, S3ErrorCode, S3Result, StdError};
use tokio::task::JoinHandle;

use super::backend::Backend;
use super::conditions::ReadConditions;
use super::reply::{etag, timestamp};
use crate::error::DevS3Error;
use crate::store;

/// Answers up to this size are read at once.
const INLINE_MAX: u64 = 256 << 10;
/// Pieces of larger answers.
const PIECE: u64 = 512 << 10;

const DEFAULT_CONTENT_TYPE: &str = "binary/octet-stream";

/// The conditions of a read, which all its inputs have alike.
macro_rules! conditions_of {
    ($input:ident) => {
        ReadConditions {
            if_match: $input.if_match,
            if_none_match: $input.if_none_match,
            if_modified_since: $input.if_modified_since,
            if_unmodified_since: $input.if_unmodified_since,
        }
    };
}

/// An answer to a read, of whichever kind: what it says of the object, or of a part of it.
macro_rules! described {
    ($output:ident, $object:expr, $part:expr) => {{
        let object: &store::Object = $object;
        let part: Option<Bytes64<u64>> = $part;
        let length = part.as_ref().map_or(object.size, |part| part.end - part.start);
        let attributes = object.attributes().cloned().unwrap_or_default();
        $output {
            accept_ranges: Some("bytes".to_owned()),
            content_length: Some(length as i64),
            content_range: part.map(|part| content_range(&part, object.size)),
            e_tag: Some(etag(&object.etag)),
            last_modified: Some(timestamp(object.modified_s)),
            content_type: Some(attributes.content_type.unwrap_or_else(|| DEFAULT_CONTENT_TYPE.to_owned())),
            cache_control: attributes.cache_control,
            content_disposition: attributes.content_disposition,
            content_encoding: attributes.content_encoding,
            content_language: attributes.content_language,
            metadata: (!attributes.metadata.is_empty()).then(|| attributes.metadata.into_iter().collect()),
            ..Default::default()
        }
    }};
}

pub(super) async fn get_object(backend: &Backend, input: GetObjectInput) -> S3Result<GetObjectOutput> {
    let bucket = backend.bucket(&input.bucket)?;
    let (object, content) = match &input.version_id {
        Some(version) => bucket.open_version(&input.key, version)?,
        None => bucket.open(&input.key)?,
    };
    conditions_of!(input).check(&object)?;
    let part = selected(input.range, object.size)?;
    let range = part.clone().unwrap_or(0..object.size);
    let body = if range.end - range.start <= INLINE_MAX {
        let data = content.read(range).map_err(DevS3Error::io("read", input.key.as_ref()))?;
        StreamingBlob::from(Body::from(data))
    } else {
        StreamingBlob::new(ContentStream::new(content, range))
    };
    let described = described!(GetObjectOutput, &object, part);
    Ok(GetObjectOutput { body: Some(body), version_id: bucket.shown_version(&object), ..described })
}

pub(super) async fn head_object(backend: &Backend, input: HeadObjectInput) -> S3Result<HeadObjectOutput> {
    let bucket = backend.bucket(&input.bucket)?;
    let object = match &input.version_id {
        Some(version) => bucket.version(&input.key, version)?,
        None => bucket.object(&input.key)?,
    };
    conditions_of!(input).check(&object)?;
    let part = selected(input.range, object.size)?;
    let described = described!(HeadObjectOutput, &object, part);
    Ok(HeadObjectOutput { version_id: bucket.shown_version(&object), ..described })
}

/// The bytes that a Range header selects; 416 where there are none.
fn selected(range: Option<Range>, size: u64) -> S3Result<Option<Bytes64<u64>>> {
    let Some(range) = range else { return Ok(None) };
    // `Range::check` takes a suffix of an empty object for satisfiable; S3 does not.
    let bytes = range.check(size).ok().filter(|bytes| !bytes.is_empty());
    let refuse = || {
        let mut error = S3Error::new(S3ErrorCode::InvalidRange);
        let mut headers = HeaderMap::new();
        if let Ok(value) = HeaderValue::try_from(format!("bytes */{size}")) {
            headers.insert(CONTENT_RANGE, value);
        }
        error.set_headers(headers);
        error
    };
    bytes.map(Some).ok_or_else(refuse)
}

fn content_range(part: &Bytes64<u64>, size: u64) -> String {
    format!("bytes {}-{}/{size}", part.start, part.end - 1)
}

/// A range of an object, read one piece ahead.
struct ContentStream {
    content: Arc<store::Content>,
    /// What is neither read nor being read.
    rest: Bytes64<u64>,
    /// What is not yet handed out.
    remaining: u64,
    reading: Option<JoinHandle<io::Result<Bytes>>>,
}

impl ContentStream {
    fn new(content: store::Content, range: Bytes64<u64>) -> Self {
        let remaining = range.end - range.start;
        let mut stream = Self { content: Arc::new(content), rest: range, remaining, reading: None };
        stream.read_ahead();
        stream
    }

    fn read_ahead(&mut self) {
        if self.rest.is_empty() {
            return;
        }
        let piece = self.rest.start..self.rest.end.min(self.rest.start + PIECE);
        self.rest.start = piece.end;
        let content = Arc::clone(&self.content);
        self.reading = Some(tokio::task::spawn_blocking(move || content.read(piece)));
    }
}

impl Stream for ContentStream {
    type Item = Result<Bytes, StdError>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        let Some(reading) = &mut this.reading else { return Poll::Ready(None) };
        let read = ready!(Pin::new(reading).poll(context));
        this.reading = None;
        match read {
            Ok(Ok(data)) => {
                this.remaining -= data.len() as u64;
                this.read_ahead();
                Poll::Ready(Some(Ok(data)))
            }
            Ok(Err(error)) => Poll::Ready(Some(Err(error.into()))),
            Err(error) => Poll::Ready(Some(Err(error.into()))),
        }
    }
}

impl ByteStream for ContentStream {
    fn remaining_length(&self) -> RemainingLength {
        RemainingLength::new_exact(self.remaining as usize)
    }
}
