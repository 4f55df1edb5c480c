//! What is behind the devices of an open view: their bytes, put together of parts of files and zeros.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use cavern_conf::process::LogLimit;
use cavern_net::{MasterChannel, WorkerPool};
use cavern_proto::BlockId;
use cavern_proto::master::{Extent, View};
use cavern_proto::view_file::BLOCK_BYTES;
use quick_cache::Weighter;
use quick_cache::sync::Cache;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};

use super::ahead::{Ahead, UNDER_WAY_BYTES};
use super::table::{TablePage, ViewTable, piece};
use crate::error::ClientError;
use crate::mounts::MountView;
use crate::read::{BlockFile, BlockReader, Files, OpenFile};
use crate::stats::Stats;

/// Pages of tables that are decoded, of 4 KiB as a rule, and what they take in memory at most.
const PAGES: usize = 512;
const PAGES_BYTES: u64 = 16 << 20;
/// Large files that are read, or were a moment ago.
const HANDLES: usize = 256;
/// Files of fs-mode mounts, large ones, of which it is known where their blocks are; and blocks of all of them.
const LOCATED: usize = 256;
const LOCATED_BLOCKS: u64 = 1 << 18;
/// Blocks that were opened on this host.
const OPENED: usize = 1 << 14;

/// A large file that is read, and whether somebody has used it since the last look.
pub(super) type ReadHandle = (Arc<OpenFile>, Arc<AtomicBool>);

/// By what an entry of a cache counts.
#[derive(Clone)]
pub(super) struct BySize;

impl<K> Weighter<K, Arc<TablePage>> for BySize {
    fn weight(&self, _: &K, page: &Arc<TablePage>) -> u64 {
        page.weight()
    }
}

impl<K> Weighter<K, Arc<[Extent]>> for BySize {
    fn weight(&self, _: &K, blocks: &Arc<[Extent]>) -> u64 {
        blocks.len() as u64 + 1
    }
}

/// What all views that are open share.
pub(super) struct ViewParts {
    pub master: MasterChannel,
    pub files: Files,
    pub pool: Arc<WorkerPool>,
    pub stats: Arc<Stats>,
    /// By view and number.
    pub pages: Cache<(u32, usize), Arc<TablePage>, BySize>,
    /// By view, device, and the block that the run begins at.
    pub handles: Cache<(u32, u32, u32), ReadHandle>,
    /// By view and inode.
    pub located: Cache<(u32, u64), Arc<[Extent]>, BySize>,
    /// By view and block.
    pub opened: Cache<(u32, BlockId), BlockFile>,
    /// Blocks of runs that may be brought.
    pub ahead: Arc<Semaphore>,
    /// By view.
    pub failures: LogLimit<u32>,
}

impl ViewParts {
    pub(super) fn new(master: MasterChannel, files: Files, pool: Arc<WorkerPool>, stats: Arc<Stats>) -> Self {
        let (handles, opened) = (Cache::new(HANDLES), Cache::new(OPENED));
        let pages = Cache::with_weighter(PAGES, PAGES_BYTES, BySize);
        let located = Cache::with_weighter(LOCATED, LOCATED_BLOCKS, BySize);
        let ahead = Arc::new(Semaphore::new((UNDER_WAY_BYTES / BLOCK_BYTES) as usize));
        let failures = LogLimit::default();
        Self { master, files, pool, stats, pages, handles, located, opened, ahead, failures }
    }
}

/// The devices of a view.
pub(super) struct Devices {
    pub view: View,
    /// The mount whose objects, or blocks, it has.
    pub mount: Arc<MountView>,
    pub cluster_id: String,
    pub parts: Arc<ViewParts>,
    pub table: Arc<ViewTable>,
    /// Of blocks of files of an fs-mode mount, and under which version they are buffered.
    pub reader: BlockReader,
    pub version: u64,
    pub ahead: Ahead,
}

impl Devices {
    pub(super) fn new(view: View, mount: Arc<MountView>, table: ViewTable, parts: Arc<ViewParts>) -> Self {
        let (cluster_id, reader) = (parts.pool.cluster_id(), parts.files.reader());
        let version = if mount.is_fs_mode() { reader.begin_version().number } else { 0 };
        Self { view, mount, cluster_id, parts, table: Arc::new(table), reader, version, ahead: Ahead::default() }
    }

    /// Bytes of a device; they count from 1.
    pub(super) fn bytes(&self, device: u16) -> Option<u64> {
        let blocks = self.view.device_blocks.get(usize::from(device).checked_sub(1)?)?;
        Some(u64::from(*blocks) * BLOCK_BYTES)
    }

    /// Fills a buffer from a device as far as that takes no waiting: says how many bytes that are. The device counts as
    /// its table counts it, from 0, and has the whole range.
    pub(super) fn fill_now(self: &Arc<Self>, device: u32, offset: u64, buffer: &mut [u8]) -> usize {
        let mut done = 0;
        while done < buffer.len() {
            let (at, end) = (offset + done as u64, offset + buffer.len() as u64);
            let Ok(page) = self.find_page(device, at) else { break };
            let found = piece(page.as_deref(), device, at..end);
            let mut length = found.bytes as usize;
            match found.run {
                None => buffer[done..done + length].fill(0),
                Some((run, from)) => {
                    self.note(device, &run);
                    let Ok((bytes, part)) = self.part(run, from, found.bytes) else { break };
                    length = bytes as usize;
                    if !self.read_part_now(device, &run, &part, &mut buffer[done..done + length]) {
                        break;
                    }
                }
            }
            done += length;
        }
        done
    }

    /// Fills a buffer with all bytes of a range of a device, which count from 1.
    ///
    /// # Errors
    /// [`ClientError::View`] names the file that cannot be read: then what is in the buffer is nothing.
    pub(super) async fn fill(
        self: &Arc<Self>,
        device: u16,
        mut offset: u64,
        mut rest: &mut [u8],
        deadline: Instant,
    ) -> Result<(), ClientError> {
        let Some(device) = self.holding(device, offset, rest.len()) else {
            return Err(self.failed(format!("device {device} has no {} bytes at {offset}", rest.len())));
        };
        loop {
            let done = self.fill_now(device, offset, rest);
            offset += done as u64;
            rest = &mut rest[done..];
            if rest.is_empty() {
                return Ok(());
            }
            let page = match self.find_page(device, offset) {
                Ok(page) => page,
                Err(number) => self.load_page(number).await?,
            };
            let found = piece(page.as_deref(), device, offset..offset + rest.len() as u64);
            let mut length = found.bytes as usize;
            match found.run {
                None => rest[..length].fill(0),
                Some((run, from)) => {
                    let unreadable = |error| self.unreadable(&run, from..from + found.bytes, error);
                    let part = self.part(run, from, found.bytes);
                    let (bytes, part) = part.map_err(|cause| unreadable(self.failed(cause.to_owned())))?;
                    length = bytes as usize;
                    // On the heap: it would make the future of each read large.
                    let read = Box::pin(self.read_part(device, &run, &part, &mut rest[..length], deadline));
                    let silent = |_elapsed| Err(self.failed("nobody has answered in time".to_owned()));
                    timeout_at(deadline, read).await.unwrap_or_else(silent).map_err(unreadable)?;
                }
            }
            offset += length as u64;
            rest = &mut rest[length..];
        }
    }

    /// The device as its table counts it, if it has such a range.
    pub(super) fn holding(&self, device: u16, offset: u64, length: usize) -> Option<u32> {
        let end = offset.checked_add(length as u64)?;
        (end <= self.bytes(device)?).then(|| u32::from(device) - 1)
    }

    /// Something of the view is not as it should be.
    pub(super) fn failed(&self, cause: String) -> ClientError {
        ClientError::View { view: self.view.name.clone(), cause }
    }

    /// The page that may have a byte of a device, if any has; else the number of the one that must be read.
    fn find_page(&self, device: u32, at: u64) -> Result<Option<Arc<TablePage>>, usize> {
        let Some(number) = self.table.find(device, at) else { return Ok(None) };
        let key = (self.view.id, number);
        if let Some(page) = self.parts.pages.get(&key) {
            return Ok(Some(page));
        }
        let page = Arc::new(self.table.load_now(number).ok_or(number)?);
        self.parts.pages.insert(key, page.clone());
        Ok(Some(page))
    }

    /// A page; `None` behind the last one.
    pub(super) async fn load_page(&self, number: usize) -> Result<Option<Arc<TablePage>>, ClientError> {
        let key = (self.view.id, number);
        if let Some(page) = self.parts.pages.get(&key) {
            return Ok(Some(page));
        }
        let table = self.table.clone();
        let loaded = tokio::task::spawn_blocking(move || table.load(number)).await;
        let page = loaded.map_err(|_stopped| ClientError::Shutdown)?.map_err(|cause| self.failed(cause))?;
        let page = page.map(Arc::new);
        page.iter().for_each(|page| self.parts.pages.insert(key, page.clone()));
        Ok(page)
    }
}
