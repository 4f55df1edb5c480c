//! What Cavern asks of a store: requests, three that read and one for everything that changes a bucket, and what it can
//! do. Each kind of store is an [`ObjectStore`]: S3 as this crate speaks it, directory trees, buckets in memory. One
//! that another library speaks is added as one more.
//!
//! A request is sent by [`Attempts`](crate::attempt::Attempts), which see to its turn, its deadlines, its counters and
//! the length of its body; and above them by [`Retrying`](crate::retry::Retrying), which sends it again, and has a
//! broken body go on where it stopped.

use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use cavern_proto::Capabilities;
use futures::FutureExt as _;
use futures::future::{self, BoxFuture};
use futures::stream::{BoxStream, Stream};

use crate::error::{Operation, UfsError};
use crate::object::{ListMode, ListPage, Metadata, ObjectMeta, Precondition};

pub(crate) type Answer<'a, T> = BoxFuture<'a, Result<T, UfsError>>;

/// Keys of one LIST at most; what S3 allows.
pub(crate) const PAGE_KEYS: usize = 1000;
/// All parts of an upload but the last have so much at least.
const PART_MIN_BYTES: u64 = 5 << 20;

#[derive(Clone, Copy, Debug)]
pub(crate) struct ListRequest<'a> {
    pub prefix: &'a str,
    pub mode: ListMode,
    /// Keys up to this one are left out; of a store that [can](Capabilities::start_after) do that. One that is asked
    /// for the keys from a given one on may list that one as well.
    pub start_after: Option<&'a str>,
    /// Where the last page said that the next begins.
    pub token: Option<&'a str>,
    pub limit: usize,
}

#[derive(Debug, Default)]
pub(crate) struct StorePage {
    pub page: ListPage,
    /// Token of the next page.
    pub next: Option<String>,
    /// Seconds by which this host's clock is behind the store's, where its answer tells the time.
    pub behind_s: Option<i64>,
}

/// The answer to a GET.
pub(crate) struct Body {
    /// The version that the bytes belong to, without quotes; empty where the store does not say.
    pub etag: String,
    pub stream: ByteStream,
}

/// A request that changes a bucket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChangeRequest<'a> {
    pub key: &'a str,
    pub change: Change<'a>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Change<'a> {
    /// Answers the object's ETag.
    Put {
        body: &'a Bytes,
        metadata: &'a Metadata,
        replaces: Precondition<'a>,
    },
    /// Answers the id of the upload.
    Begin {
        metadata: &'a Metadata,
    },
    /// Answers the part's ETag. Numbers begin with 1.
    Part {
        upload: &'a str,
        number: u32,
        body: &'a Bytes,
    },
    /// Answers the object's ETag. `parts` are the ETags of all parts, in order.
    Complete {
        upload: &'a str,
        parts: &'a [String],
        replaces: Precondition<'a>,
    },
    Abort {
        upload: &'a str,
    },
    Delete {
        replaces: Precondition<'a>,
    },
    /// Answers the object's ETag. Its metadata are those of the source, unless there are others.
    Copy {
        source: CopySource<'a>,
        metadata: Option<&'a Metadata>,
    },
    /// Answers the part's ETag.
    CopyPart {
        upload: &'a str,
        number: u32,
        source: CopySource<'a>,
        /// The first and the last byte.
        bytes: (u64, u64),
    },
}

/// A version of an object of the same bucket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CopySource<'a> {
    pub key: &'a str,
    pub etag: &'a str,
    /// Bytes of the object.
    pub length: u64,
}

impl Change<'_> {
    /// This request, whatever is under the key.
    pub(crate) fn unconditional(self) -> Self {
        let replaces = Precondition::Anything;
        match self {
            Self::Put { body, metadata, .. } => Self::Put { body, metadata, replaces },
            Self::Complete { upload, parts, .. } => Self::Complete { upload, parts, replaces },
            Self::Delete { .. } => Self::Delete { replaces },
            other => other,
        }
    }
}

impl ChangeRequest<'_> {
    pub(crate) fn operation(&self) -> Operation {
        match self.change {
            Change::Put { .. } => Operation::Put,
            Change::Begin { .. } => Operation::Begin,
            Change::Part { .. } => Operation::Part,
            Change::Complete { .. } => Operation::Complete,
            Change::Abort { .. } => Operation::Abort,
            Change::Delete { .. } => Operation::Delete,
            Change::Copy { .. } => Operation::Copy,
            Change::CopyPart { .. } => Operation::CopyPart,
        }
    }

    /// What is sent beside the headers.
    pub(crate) fn body_bytes(&self) -> u64 {
        match self.change {
            Change::Put { body, .. } | Change::Part { body, .. } => body.len() as u64,
            _ => 0,
        }
    }

    /// What the store has to handle before it can answer.
    pub(crate) fn handled_bytes(&self) -> u64 {
        match self.change {
            Change::Copy { source, .. } => source.length,
            Change::CopyPart { bytes: (first, last), .. } => last - first + 1,
            Change::Complete { parts, .. } => parts.len() as u64 * PART_MIN_BYTES,
            _ => self.body_bytes(),
        }
    }
}

/// Each request is one attempt, and may be given up at any time; [`UfsError::is_temporary`] tells what may be tried
/// again.
pub(crate) trait ObjectStore: Send + Sync + 'static {
    /// One page, at most of the limit. Its entries are in the order of keys, if the store can do that. A key that the
    /// store could not be asked for as it is counts as hidden.
    fn list<'a>(&'a self, request: ListRequest<'a>) -> Answer<'a, StorePage>;
    /// With the metadata, if the store keeps any.
    fn head<'a>(&'a self, key: &'a str) -> Answer<'a, ObjectMeta>;
    /// The range is never empty. `etag` is empty when any version will do.
    fn get<'a>(&'a self, key: &'a str, etag: &'a str, range: Range<u64>) -> Answer<'a, Body>;
    /// The id of the newest version under a key that has this ETag, which is not empty; `None` where there is none, and
    /// of a store that keeps no versions.
    fn version_of<'a>(&'a self, _key: &'a str, _etag: &'a str) -> Answer<'a, Option<String>> {
        future::ready(Ok(None)).boxed()
    }
    /// As `get`, of a version that `version_of` has named.
    fn get_version<'a>(&'a self, _id: &'a str, key: &'a str, etag: &'a str, range: Range<u64>) -> Answer<'a, Body> {
        self.get(key, etag, range)
    }
    /// Answers what [`Change`] says, or an empty text.
    fn change<'a>(&'a self, request: ChangeRequest<'a>) -> Answer<'a, String>;

    /// What it can do: it is not asked for more.
    fn capabilities(&self) -> Capabilities;
}

/// The bytes of a range, in order, in pieces as they arrive from the network. Ends after exactly the range, or with
/// one error as its last item. Dropping it gives the request up.
pub struct ByteStream(BoxStream<'static, Result<Bytes, UfsError>>);

impl ByteStream {
    pub(crate) fn new(stream: impl Stream<Item = Result<Bytes, UfsError>> + Send + 'static) -> Self {
        Self(Box::pin(stream))
    }
}

impl Stream for ByteStream {
    type Item = Result<Bytes, UfsError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.as_mut().poll_next(cx)
    }
}

impl std::fmt::Debug for ByteStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ByteStream")
    }
}

#[cfg(test)]
pub(crate) mod model {
    //! What any listing of a set of keys must return, for tests of the stores.

    use std::collections::BTreeSet;

    use super::*;

    /// The entries of a whole listing, prefixes and keys in one order.
    pub(crate) fn entries(keys: &BTreeSet<String>, prefix: &str, mode: ListMode) -> Vec<String> {
        let entry = |key: &String| {
            let rest = key.strip_prefix(prefix)?;
            match (mode, rest.find('/')) {
                (ListMode::Directory, Some(at)) => Some(key[..prefix.len() + at + 1].to_owned()),
                _ => Some(key.clone()),
            }
        };
        keys.iter().filter_map(entry).collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// The entries of a listing of a store, page by page; every page but the last is full.
    pub(crate) async fn listed(store: &dyn ObjectStore, prefix: &str, mode: ListMode, limit: usize) -> Vec<String> {
        let mut entries = Vec::new();
        let mut token: Option<String> = None;
        loop {
            let answer = store
                .list(ListRequest { prefix, mode, start_after: None, token: token.as_deref(), limit })
                .await
                .unwrap();
            let objects = answer.page.objects.into_iter().map(|object| object.key);
            let mut page: Vec<String> = objects.chain(answer.page.prefixes).collect();
            page.sort();
            assert!(page.len() == limit || answer.next.is_none(), "{} of {limit}", page.len());
            entries.append(&mut page);
            match answer.next {
                Some(next) => token = Some(next),
                None => return entries,
            }
        }
    }
}
