//! What is here, for a master that compares it with what is to be here (`cv fsck`).

use std::io;
use std::time::Duration;

use cavern_proto::data::{
    CachePlace, InspectReply, InspectRequest, OrphanBlock, Status, inspect_reply, inspect_request,
};
use futures::StreamExt as _;

use super::requests::Service;
use crate::fill::BlockSource;
use crate::orphan_blocks::LookError;
use crate::request_error::{Refusal, blocking};
use crate::store::{DataStore, DataTarget, StoreError, Touch};

/// Blocks of one request.
const BLOCKS_MAX: usize = 1000;
/// Blocks that no file has, of one answer.
const ORPHANS_MAX: usize = 1000;
/// Read of a block at a time.
const READ_BYTES: u32 = 1 << 20;
/// Blocks that no file has are freed when two looks have found them, half of their rest apart: within twice that, or a
/// while later where a look has come to nothing.
const RESTS: u32 = 3;

impl Service {
    /// Says what is here.
    ///
    /// # Errors
    /// Nothing of the request can be answered. What is wrong with a block, its item says.
    pub(super) async fn inspect(&self, request: InspectRequest) -> Result<InspectReply, Refusal> {
        let InspectRequest { blocks, orphans, rest_ms, verify } = request;
        if blocks.len() > BLOCKS_MAX {
            return Err(Refusal::bad_request(format!(
                "{} blocks in one request, {BLOCKS_MAX} are the most",
                blocks.len()
            )));
        }
        let mut reply = InspectReply { status: Status::Ok.into(), ..InspectReply::default() };
        for block in blocks {
            reply.blocks.push(self.inspect_block(block).await.unwrap_or_else(Into::into));
        }
        if orphans {
            Box::pin(self.list_orphans(rest_ms, &mut reply)).await?;
        }
        if let Some(place) = verify {
            self.verify_cached(place, &mut reply).await?;
        }
        Ok(reply)
    }

    async fn inspect_block(&self, asked: inspect_request::Block) -> Result<inspect_reply::Block, Refusal> {
        let inspect_request::Block { block, read, key, etag } = asked;
        let target = BlockSource::parse_data(block.unwrap_or_default())?;
        let data = self.parts.stores.data.clone();
        let crc = blocking("reading a block", move || checksum(&data, &target, read)).await?;
        let mut answer = inspect_reply::Block { status: Status::Ok.into(), crc, ..inspect_reply::Block::default() };
        if read > 0 && !key.is_empty() {
            answer.object_crc = Box::pin(self.checksum_of_object(&target, &key, &etag, read)).await?;
        }
        Ok(answer)
    }

    /// CRC32C of what an object has in the place of a block.
    async fn checksum_of_object(&self, target: &DataTarget, key: &str, etag: &str, read: u32) -> Result<u32, Refusal> {
        let ufs = self.parts.mounts.ufs_for(target.mount_id, key).await?;
        let start = target.start();
        let mut pieces = ufs.get(key, etag, start..start + u64::from(read)).await?;
        let mut crc = 0;
        while let Some(piece) = pieces.next().await {
            crc = crc32c::crc32c_append(crc, &piece?);
        }
        Ok(crc)
    }

    async fn list_orphans(&self, rest_ms: u64, reply: &mut InspectReply) -> Result<(), Refusal> {
        let Some(orphans) = &self.orphans else { return Ok(()) };
        let rest = if rest_ms == 0 { orphans.rest.saturating_mul(RESTS) } else { Duration::from_millis(rest_ms) };
        // What is there from before its start the worker still frees, unless it keeps all of that.
        if rest_ms == 0 && orphans.since.elapsed() < rest && !self.parts.membership.past().is_lost {
            return Ok(());
        }
        let unknown = |error: LookError| {
            Refusal::new(Status::UfsUnavailable, format!("which blocks files have is not known: {error}"))
        };
        let found = orphans.find(rest).await.map_err(unknown)?.unwrap_or_default();
        reply.orphan_blocks = found.len() as u64;
        let named = found.into_iter().take(ORPHANS_MAX);
        reply.orphans.extend(named.map(|((id, incarnation), bytes)| OrphanBlock {
            block: id.to_string(),
            incarnation,
            bytes,
        }));
        Ok(())
    }

    async fn verify_cached(&self, place: CachePlace, reply: &mut InspectReply) -> Result<(), Refusal> {
        let cache = self.parts.stores.cache.clone();
        let verify = move || cache.verify_some(place.directory as usize, place.key.to_vec());
        let verified = blocking("comparing cached blocks", verify).await?;
        reply.verified = verified.blocks;
        reply.damaged = verified.damaged.iter().map(ToString::to_string).collect();
        reply.next = verified.next.map(|(directory, key)| CachePlace {
            directory: u32::try_from(directory).unwrap_or(u32::MAX),
            key: key.into(),
        });
        Ok(())
    }
}

/// CRC32C of the first bytes of a block. One whose file is not that of such a block, or is gone though it is open, is
/// told apart from one that cannot be read. *Blocking*.
fn checksum(data: &DataStore, target: &DataTarget, read: u32) -> Result<u32, StoreError> {
    let failed = |source| StoreError::Io { action: "reading a data block", source };
    let block = match data.find(target, Touch::None) {
        Err(StoreError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            return Err(StoreError::NoSuchBlock);
        }
        Err(StoreError::Io { source, .. }) if source.kind() == io::ErrorKind::InvalidData => {
            return Err(StoreError::Mismatch(source.to_string()));
        }
        found => found?,
    };
    let (end, length) = (block.end().map_err(failed)?, block.length());
    if end > length {
        return Err(StoreError::Mismatch(format!("the file has {end} bytes where the block has {length}")));
    }
    if !block.path().try_exists().map_err(failed)? {
        return Err(StoreError::NoSuchBlock);
    }
    let (mut crc, mut at) = (0, 0);
    let mut buffer = vec![0; read.min(READ_BYTES) as usize];
    while at < read {
        let part = &mut buffer[..(read - at).min(READ_BYTES) as usize];
        block.read(at, part).map_err(failed)?;
        crc = crc32c::crc32c_append(crc, part);
        at += part.len() as u32;
    }
    Ok(crc)
}
