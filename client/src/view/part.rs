//! Reading a part of a run: bytes of the object that the file is, or of a block of a file of an fs-mode mount, which
//! `block` reads where that takes waiting.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cavern_proto::block_id::block_length;
use cavern_proto::master::Attr;
use cavern_proto::{BlockId, ContentId};
use tokio::time::Instant;

use super::devices::Devices;
use super::table::TableRun;
use crate::error::ClientError;
use crate::metadata::Node;
use crate::mounts::ObjectVersion;
use crate::read::span::{Span, spans};
use crate::read::{BufferKey, EAGER_BYTES, OpenFile, TrustedFile};

/// Consecutive bytes of a file that are in one place, and in one block.
#[derive(Debug)]
pub(super) enum FilePart {
    /// Neither a block nor an object has them.
    Zeros,
    /// Bytes of the object from this one on.
    Object(u64),
    /// In the block of this generation.
    Block(u32, Span),
}

impl Devices {
    /// What up to so many bytes of a run begin with, `from` bytes behind its beginning, and how many of them that are.
    /// The error says why there are none.
    pub(super) fn part(&self, run: TableRun<'_>, from: u64, bytes: u64) -> Result<(u64, FilePart), &'static str> {
        let end = run.file.offset.checked_add(from).and_then(|at| at.checked_add(bytes));
        let end = end.filter(|end| *end <= run.file.whole_size()).ok_or("the run is more than its file has")?;
        // No part crosses the end of a block: what is read of an object would have to be put together first.
        let at = end - bytes;
        let span = spans(at..end, self.mount.block_size(), u64::MAX).next().ok_or("it has no bytes")?;
        let end = at + span.length() as u64;
        if run.file.inode == 0 || self.view.imported && run.file.is_whole {
            return Ok((end - at, FilePart::Object(at)));
        }
        if self.view.imported {
            return Err("the view is imported, and no object has all of the file");
        }
        if let Some(generation) = self.generation(&run, span.index) {
            return Ok((end - at, FilePart::Block(generation, span)));
        }
        let object = if run.has_object() { run.object_length() } else { 0 };
        let valid = run.file.valid.unwrap_or(object).min(object);
        Ok(if at < valid { (end.min(valid) - at, FilePart::Object(at)) } else { (end - at, FilePart::Zeros) })
    }

    /// The generation of a block of a file; `None` where there is no block.
    pub(super) fn generation(&self, run: &TableRun<'_>, index: u32) -> Option<u32> {
        let first = run.file.offset / self.mount.block_size();
        let place = usize::try_from(u64::from(index).checked_sub(first)?).ok()?;
        run.file.generations.get(place)?.checked_sub(1)
    }

    /// Fills a buffer with a part where nobody has to be waited for.
    pub(super) fn read_part_now(&self, device: u32, run: &TableRun<'_>, part: &FilePart, buffer: &mut [u8]) -> bool {
        let files = &self.parts.files;
        let at = match part {
            FilePart::Zeros => {
                buffer.fill(0);
                return true;
            }
            FilePart::Block(generation, span) => {
                let key = self.block_key(run, *generation, span.index);
                let file = self.parts.opened.get(&(self.view.id, key.block));
                return self.is_frozen(run, *generation)
                    && files.read_block_now(key, span, TrustedFile::Frozen(file), buffer)
                    && self.is_frozen(run, *generation);
            }
            FilePart::Object(at) => *at,
        };
        let (length, wanted) = (run.object_length(), buffer.len());
        if length > EAGER_BYTES {
            // Its own read-ahead is told of it.
            let file = self.handle(device, run);
            return file.is_ok_and(|file| file.read_now(at, buffer) == Some(wanted));
        }
        let (bytes, block_size) = (at..at + wanted as u64, self.mount.block_size());
        let content = self.content(run).filter(|_| bytes.end <= length);
        let (Some(content), Some(span)) = (content, spans(bytes, block_size, u64::MAX).next()) else { return false };
        let block = BlockId { content, index: span.index };
        let key = BufferKey { block, version: 0, length: block_length(length, block_size, span.index) };
        span.length() == wanted && files.read_block_now(key, &span, TrustedFile::OfObject, buffer)
    }

    /// Fills a buffer with a part.
    pub(super) async fn read_part(
        &self,
        device: u32,
        run: &TableRun<'_>,
        part: &FilePart,
        buffer: &mut [u8],
        deadline: Instant,
    ) -> Result<(), ClientError> {
        match part {
            FilePart::Zeros => {
                buffer.fill(0);
                Ok(())
            }
            FilePart::Object(at) => self.read_object(device, run, *at, buffer).await,
            FilePart::Block(generation, span) => {
                self.read_block(device, run, *generation, span, buffer, deadline).await
            }
        }
    }

    /// A small object comes as a whole: whoever reads a part of it reads the rest soon.
    pub(super) async fn read_object(
        &self,
        device: u32,
        run: &TableRun<'_>,
        at: u64,
        buffer: &mut [u8],
    ) -> Result<(), ClientError> {
        let file = if run.object_length() > EAGER_BYTES { self.handle(device, run)? } else { self.open_object(run)? };
        if run.object_length() <= EAGER_BYTES {
            file.make_present().await?;
        }
        self.copy(&file.read_object(at, buffer.len()).await?, buffer)
    }

    /// All that was asked for, or an error.
    pub(super) fn copy(&self, bytes: &[u8], buffer: &mut [u8]) -> Result<(), ClientError> {
        if bytes.len() != buffer.len() {
            return Err(self.failed(format!("{} bytes came instead of {}", bytes.len(), buffer.len())));
        }
        buffer.copy_from_slice(bytes);
        Ok(())
    }

    /// The object of a run, as it was frozen.
    pub(super) fn object(&self, run: &TableRun<'_>) -> Result<ObjectVersion, ClientError> {
        let nameless = || self.failed(format!("no object has a name as {}", run.file.name.escape_ascii()));
        let key = run.file.object_key(run.directory).ok_or_else(nameless)?;
        let object = ObjectVersion::new(self.mount.clone(), &key, &run.file.object_etag(), run.object_length())?;
        Ok(ObjectVersion { is_pinned: true, ..object })
    }

    /// Names the object, without making it anew each time.
    fn content(&self, run: &TableRun<'_>) -> Option<ContentId> {
        if let Some(content) = run.content.get() {
            return Some(*content);
        }
        let object = self.object(run).ok()?;
        Some(*run.content.get_or_init(|| object.content))
    }

    fn open_object(&self, run: &TableRun<'_>) -> Result<Arc<OpenFile>, ClientError> {
        let attr = Attr { inode: run.file.inode, ..Attr::default() };
        let node = Arc::new(Node::nameless(&attr, Some(self.mount.clone())));
        Ok(self.parts.files.open_object(node, self.object(run)?))
    }

    /// The object of a run for all who read it, with its read-ahead.
    fn handle(&self, device: u32, run: &TableRun<'_>) -> Result<Arc<OpenFile>, ClientError> {
        let (handles, key) = (&self.parts.handles, (self.view.id, device, run.first));
        if let Some((file, is_used)) = handles.get(&key) {
            is_used.store(true, Ordering::Relaxed);
            return Ok(file);
        }
        let file = self.open_object(run)?;
        handles.insert(key, (file.clone(), Arc::new(AtomicBool::new(true))));
        Ok(file)
    }

    /// What a failure to read bytes of a run is told as: all that a person needs to find the file.
    pub(super) fn unreadable(&self, run: &TableRun<'_>, bytes: Range<u64>, error: ClientError) -> ClientError {
        let prefix = self.mount.ufs().map(|ufs| ufs.prefix().to_owned()).unwrap_or_default();
        let directory = run.directory.strip_prefix(prefix.as_str()).unwrap_or(run.directory);
        let (mount, name) = (self.mount.path().trim_end_matches('/'), String::from_utf8_lossy(&run.file.name));
        let key = match run.file.inode {
            0 => run.file.object_key(run.directory).unwrap_or_default(),
            inode => format!("inode {inode}"),
        };
        let first = run.file.offset.saturating_add(bytes.start);
        let last = first.saturating_add(bytes.end - bytes.start).saturating_sub(1);
        let cause = cause_of(error);
        self.failed(format!("{key} ({mount}/{directory}{name}, bytes {first}-{last}) cannot be read: {cause}"))
    }
}

/// What an error says, without whatever it is told of.
pub(super) fn cause_of(error: ClientError) -> String {
    match error {
        ClientError::Read { causes: cause, .. } | ClientError::View { cause, .. } => cause,
        error => error.to_string(),
    }
}
