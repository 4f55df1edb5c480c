//! Small reads at random over the network: whole parts of 4 KiB with checksums of their own, in place of whole chunks.
//!
//! A random reader of a large file finds next to nothing in buffers, so that a chunk for every 4 KiB would be sent,
//! checked and kept in vain. What is read in parts is for the reader alone and goes into no buffer.

use std::ops::Range;

use bytes::Bytes;
use cavern_net::Route;
use cavern_proto::chunk::widen_to_parts;
use tokio::time::Instant;

use super::{EAGER_BYTES, OpenFile};
use crate::error::ClientError;
use crate::mounts::ObjectVersion;
use crate::read::buffers::{BufferKey, ChunkLookup, Purpose};
use crate::read::fetch::{ChunkRequest, Fetched};
use crate::read::location::BlockLocation;
use crate::read::readahead::Pattern;
use crate::read::span::Span;

/// More than this at a time is nearly a chunk, which whoever comes next may find in a buffer.
const PART_READ_BYTES: usize = 64 << 10;

impl OpenFile {
    /// The parts to ask for, when whole chunks would be asked for in vain: of a large file that is read at random, over
    /// the network, little is wanted of which nothing is on its way.
    pub(super) fn parts_to_read(&self, object: &ObjectVersion, span: &Span, pattern: Pattern) -> Option<Range<u32>> {
        if pattern != Pattern::Random || object.length <= EAGER_BYTES {
            return None;
        }
        let parts = widen_to_parts(&span.bytes, object.block_length(span.index));
        if parts.len() > PART_READ_BYTES
            || !self.core.buffers.lack(BufferKey::of_object(object, span.index), span.chunks())
        {
            return None;
        }
        let owner = self.core.pool.placement().candidates(object.content, span.index, 1).first()?;
        (self.core.pool.known_route(owner) == Route::Remote).then_some(parts)
    }

    /// Fetches parts for this reader only: `None` when they can be read through a descriptor now.
    pub(super) async fn read_parts(
        &self,
        object: &ObjectVersion,
        span: &Span,
        parts: Range<u32>,
        deadline: Instant,
    ) -> Result<Option<Bytes>, ClientError> {
        let at = BlockLocation::of_object(object, span.index);
        let key = at.key();
        let want = ChunkRequest { part: Some(parts.clone()), ..ChunkRequest::new(at, span.chunks()) };
        match self.core.fetch_from_any(&want, deadline).await? {
            Fetched::Local(descriptor) => {
                self.remember(span.index, &descriptor);
                Ok(None)
            }
            Fetched::Parts(bytes) => Ok(Some(span.of(&bytes, parts.start))),
            Fetched::Buffer(bytes) => {
                // The source knows no parts: what it gave is there for others, as if it had been asked for.
                if let ChunkLookup::Missing(claim) = self.core.buffers.gather(key, span.chunks(), Purpose::Read)
                    && claim.chunks() == span.chunks()
                {
                    self.core.keep(claim, &bytes);
                }
                Ok(Some(span.of_chunks(&bytes)))
            }
        }
    }
}
