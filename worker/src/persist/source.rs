//! The bytes of a file, from its blocks here and at other workers, and from the object that has what no block has.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use cavern_conf::host;
use cavern_proto::BlockId;
use cavern_proto::data::{BlockRef, Range as WireRange, Status, query_reply};
use cavern_ufs::{Ufs, UfsError};

use super::Uploads;
use super::peers::READ_BYTES;
use super::plan::{Origin, Plan, PlannedBlock};
use crate::fill::BlockSource;
use crate::memory::Share;
use crate::request_error::{Refusal, blocking};
use crate::store::{DataStore, DataTarget, StoreError, Touch};

/// What fails when a thread does.
const READING: &str = "reading the blocks";
/// Blocks asked about in one request.
const QUERY_BLOCKS: usize = 1000;
/// Of a file of many blocks so many are looked at for each part that is sent, on average.
const LOOK_BLOCKS: usize = 128;
/// Blocks of other workers are looked at once for so many parts.
const LOOK_PARTS: u32 = 16;
/// A file system may keep times to some milliseconds only. A file that was written to less than this ago could be
/// written to again without a change of its time.
const SETTLED: Duration = Duration::from_millis(20);
/// A file is waited for so often to come to rest, for [`SETTLED`] each time.
const ROUNDS: usize = 10;

/// Which file of a block it is, when it was last written to, and where it ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Stamp {
    incarnation: u64,
    modified_ns: i64,
    end: u32,
}

/// Where a block is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum BlockLocation {
    Local(DataTarget),
    Remote(u64),
}

/// Blocks of other workers, by their worker, each with its index.
type RemoteBlocks = BTreeMap<u64, Vec<(u32, BlockRef)>>;

/// A file whose blocks have been found, and were at rest.
pub(super) struct Source<'a> {
    uploads: &'a Uploads,
    block_size: u64,
    /// By index.
    blocks: BTreeMap<u32, (&'a PlannedBlock, BlockLocation)>,
    stamps: Vec<Stamp>,
    /// What has the bytes that no block has.
    object: Option<(&'a Ufs, &'a Origin)>,
}

/// Why it is not known whether the blocks are at rest.
struct LookError {
    /// The indexes of blocks that another worker says it has not, or of which it says nothing; none of those here.
    blocks: Vec<u32>,
    worker: u64,
    refusal: Refusal,
}

impl From<Refusal> for LookError {
    fn from(refusal: Refusal) -> Self {
        Self { blocks: Vec::new(), worker: 0, refusal }
    }
}

impl<'a> Source<'a> {
    /// Finds every block: here, or at the first of its workers that has it. One that is here but whose replica here was
    /// given up is not what the file has. Whether they are at rest is not known yet.
    pub(super) fn find(
        uploads: &'a Uploads,
        ufs: &'a Ufs,
        plan: &'a Plan,
        planned: &'a [PlannedBlock],
    ) -> Result<Self, Refusal> {
        let mut blocks = BTreeMap::new();
        for block in planned {
            let target = BlockSource::parse_data(block.block.clone())?;
            let own_id = uploads.parts.membership.worker_id();
            let data = &uploads.parts.stores.data;
            let is_here = block.workers.contains(&own_id) && data.get(&target.id, Touch::None).is_here();
            let place = match block.workers.iter().find(|worker| **worker != own_id) {
                _ if is_here => BlockLocation::Local(target),
                Some(worker) => BlockLocation::Remote(*worker),
                None => return Err(missing(&target.id)),
            };
            blocks.insert(block.block.index, (block, place));
        }
        let object = plan.origin.as_ref().map(|origin| (ufs, origin));
        Ok(Self { uploads, block_size: plan.block_size, blocks, stamps: Vec::new(), object })
    }

    /// Blocks as the first of their workers that has them does, whatever is here; what no block has is zeros.
    pub(super) async fn open_elsewhere(
        uploads: &'a Uploads,
        block_size: u64,
        planned: &'a [PlannedBlock],
    ) -> Result<Self, Refusal> {
        let place = |block: &'a PlannedBlock| {
            let worker = block.workers.first().ok_or_else(|| Refusal::bad_request("a block without workers"))?;
            Ok((block.block.index, (block, BlockLocation::Remote(*worker))))
        };
        let blocks = planned.iter().map(place).collect::<Result<_, Refusal>>()?;
        Self { uploads, block_size, blocks, stamps: Vec::new(), object: None }.settled().await
    }

    /// All bytes of a file of one block that is here and at rest, which are on its disk then: by one turn of a thread
    /// that may wait for that, since changing threads is much of what a small file costs. `None` for any other file.
    /// The memory is that of the thread until then, whether or not anybody still waits for it.
    pub(super) async fn take_at_once(&self, length: u64, memory: Share) -> Result<(Option<Bytes>, Share), Refusal> {
        let mut blocks = self.blocks.iter();
        let (Some((0, (_, BlockLocation::Local(target)))), None) = (blocks.next(), blocks.next()) else {
            return Ok((None, memory));
        };
        let Ok(capacity) = usize::try_from(length) else { return Ok((None, memory)) };
        if self.object.is_some() || length > self.block_size {
            return Ok((None, memory));
        }
        let (data, here) = (self.uploads.parts.stores.data.clone(), [(0u32, *target)]);
        let take = move || -> Result<Option<Bytes>, StoreError> {
            let found = look_here(&data, &here)?;
            if !found.iter().all(|(_, stamp)| is_settled(stamp)) {
                return Ok(None);
            }
            let [(_, target)] = &here;
            data.sync(std::slice::from_ref(target))?;
            let mut bytes = BytesMut::zeroed(capacity);
            data.read(target, 0, &mut bytes)?;
            Ok((look_here(&data, &here)? == found).then(|| bytes.freeze()))
        };
        blocking(READING, move || take().map(|bytes| (bytes, memory))).await
    }

    /// Waits until the blocks are at rest.
    pub(super) async fn settled(mut self) -> Result<Self, Refusal> {
        let mut rounds = 0;
        while rounds < ROUNDS {
            self.stamps = match self.look().await {
                Ok(stamps) => stamps,
                Err(error) => {
                    self.try_next_workers(error)?;
                    continue;
                }
            };
            if self.stamps.iter().all(is_settled) {
                return Ok(self);
            }
            rounds += 1;
            tokio::time::sleep(SETTLED).await;
        }
        Err(changed())
    }

    /// Blocks that a worker has not are looked for at the next of their workers; where there is none, its answer
    /// stands.
    fn try_next_workers(&mut self, LookError { blocks, worker, refusal }: LookError) -> Result<(), Refusal> {
        let own_id = self.uploads.parts.membership.worker_id();
        for index in &blocks {
            let Some((block, place)) = self.blocks.get_mut(index) else { continue };
            let mut rest = block.workers.iter().skip_while(|of| **of != worker).skip(1);
            match rest.find(|worker| **worker != own_id) {
                Some(next) => *place = BlockLocation::Remote(*next),
                None => return Err(refusal),
            }
        }
        if blocks.is_empty() { Err(refusal) } else { Ok(()) }
    }

    /// Whether every block is the file that it was, and has not been written to.
    pub(super) async fn check_untouched(&self) -> Result<(), Refusal> {
        let stamps = self.look().await.map_err(|error| error.refusal)?;
        if stamps == self.stamps { Ok(()) } else { Err(changed()) }
    }

    /// How many parts are sent between two looks at all blocks, so that looking takes little of the time.
    pub(super) fn parts_per_look(&self) -> u32 {
        let is_elsewhere = self.blocks.values().any(|(_, place)| matches!(place, BlockLocation::Remote(_)));
        parts_per_look(self.blocks.len(), is_elsewhere)
    }

    /// Whether an upload is known to be in vain before all of it has been sent.
    ///
    /// # Errors
    /// The file has been written to, or a block of it is gone.
    pub(super) async fn check_meanwhile(&self) -> Result<(), Refusal> {
        match self.check_untouched().await {
            Err(refusal) if matches!(refusal.status, Status::Changed | Status::NoSuchBlock) => Err(refusal),
            // Whoever does not answer now may do so when all has been sent.
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Where the files of the blocks end, in the order of their indexes.
    pub(super) fn ends(&self) -> impl Iterator<Item = u32> + '_ {
        self.stamps.iter().map(|stamp| stamp.end)
    }

    /// Returns when the blocks are on the disks of their workers: no loss of power takes from the file what the bucket
    /// has got of it.
    pub(super) async fn sync(&self) -> Result<(), Refusal> {
        let (here, elsewhere) = self.by_place();
        let here: Vec<DataTarget> = here.into_iter().map(|(_, target)| target).collect();
        let data = self.uploads.parts.stores.data.clone();
        blocking(READING, move || data.sync(&here)).await?;
        for (worker, blocks) in elsewhere {
            for blocks in blocks.chunks(QUERY_BLOCKS) {
                let blocks = blocks.iter().map(|(_, block)| block.clone()).collect();
                self.uploads.peers.sync(worker, blocks).await?;
            }
        }
        Ok(())
    }

    /// The blocks that are here, and those that each other worker has; with their indexes.
    fn by_place(&self) -> (Vec<(u32, DataTarget)>, RemoteBlocks) {
        let (mut here, mut elsewhere) = (Vec::new(), RemoteBlocks::new());
        for (index, (block, place)) in &self.blocks {
            match place {
                BlockLocation::Local(target) => here.push((*index, *target)),
                BlockLocation::Remote(worker) => {
                    elsewhere.entry(*worker).or_default().push((*index, block.block.clone()))
                }
            }
        }
        (here, elsewhere)
    }

    /// The stamps of all blocks, in the order of their indexes.
    async fn look(&self) -> Result<Vec<Stamp>, LookError> {
        let mut stamps = BTreeMap::new();
        let (here, elsewhere) = self.by_place();
        if !here.is_empty() {
            let data = self.uploads.parts.stores.data.clone();
            stamps.extend(blocking(READING, move || look_here(&data, &here)).await?);
        }
        for (worker, blocks) in elsewhere {
            for blocks in blocks.chunks(QUERY_BLOCKS) {
                stamps.extend(self.look_there(worker, blocks).await?);
            }
        }
        Ok(stamps.into_values().collect())
    }

    async fn look_there(&self, worker: u64, blocks: &[(u32, BlockRef)]) -> Result<Vec<(u32, Stamp)>, LookError> {
        let asked = blocks.iter().map(|(_, block)| block.clone()).collect();
        let answered = self.uploads.peers.query(worker, asked).await;
        let items = answered.map_err(|refusal| LookError {
            blocks: blocks.iter().map(|(index, _)| *index).collect(),
            worker,
            refusal,
        })?;
        let of_items = blocks.iter().zip(&items);
        let lacked: Vec<&(u32, BlockRef)> =
            of_items.clone().filter(|(_, item)| !item.known).map(|(it, _)| it).collect();
        if let Some((_, first)) = lacked.first() {
            let refusal = BlockId::of(first).map_or_else(changed, |id| missing(&id));
            return Err(LookError { blocks: lacked.iter().map(|(index, _)| *index).collect(), worker, refusal });
        }
        let stamp = |item: &query_reply::Item| {
            let query_reply::Item { incarnation, modified_ns, end, .. } = *item;
            Stamp { incarnation, modified_ns, end }
        };
        Ok(of_items.map(|((index, _), item)| (*index, stamp(item))).collect())
    }

    /// Ranges of a part of the file that no block has, and the origin does.
    fn gaps(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let end = range.end.min(self.object.map_or(0, |(_, origin)| origin.bytes));
        let (mut gaps, mut at) = (Vec::new(), range.start);
        let first = u32::try_from(range.start / self.block_size).unwrap_or(u32::MAX);
        for index in self.blocks.range(first..).map(|(index, _)| *index) {
            let start = u64::from(index) * self.block_size;
            if start >= end {
                break;
            }
            if at < start {
                gaps.push(at..start);
            }
            at = start + self.block_size;
        }
        if at < end {
            gaps.push(at..end);
        }
        gaps
    }

    async fn read_origin(&self, range: Range<u64>, into: &mut [u8]) -> Result<(), Refusal> {
        let Some((ufs, origin)) = self.object else { return Ok(()) };
        let read = ufs.get_bytes(&origin.key, &origin.etag, range).await;
        let bytes = read.map_err(|error| match error {
            // Not the key that is written to: the asker must distinguish the two.
            UfsError::VersionChanged { .. } | UfsError::NotFound { .. } => {
                Refusal::new(Status::NotFound, error.to_string())
            }
            error => error.into(),
        })?;
        into.copy_from_slice(&bytes);
        Ok(())
    }

    /// Bytes of the file; holes are zeros.
    pub(super) async fn read(&self, start: u64, length: u64) -> Result<Bytes, Refusal> {
        let capacity = usize::try_from(length).map_err(|_| Refusal::bad_request("a part that no memory holds"))?;
        let mut bytes = BytesMut::zeroed(capacity);
        let end = start + length;
        // Indexes are those of a file of at most 2^32 blocks.
        let first = u32::try_from(start / self.block_size).unwrap_or(u32::MAX);
        let last = u32::try_from(end.saturating_sub(1) / self.block_size).unwrap_or(u32::MAX);
        for (index, (block, place)) in self.blocks.range(first..=last) {
            let block_start = u64::from(*index) * self.block_size;
            let from = start.max(block_start);
            let to = end.min(block_start + self.block_size);
            // Within a block, which has less than 2^32 bytes, and within the part.
            let within = (from - block_start) as u32..(to - block_start) as u32;
            let at = (from - start) as usize;
            match place {
                BlockLocation::Local(target) => {
                    let (data, target) = (self.uploads.parts.stores.data.clone(), *target);
                    let mut piece = bytes.split_off(at);
                    let rest = piece.split_off(within.len());
                    let read = move || data.read(&target, within.start, &mut piece).map(|()| piece);
                    bytes.unsplit(blocking(READING, read).await?);
                    bytes.unsplit(rest);
                }
                BlockLocation::Remote(worker) => {
                    self.read_there(*worker, &block.block, within, &mut bytes[at..]).await?
                }
            }
        }
        for gap in self.gaps(start..end) {
            let within = (gap.start - start) as usize..(gap.end - start) as usize;
            self.read_origin(gap, &mut bytes[within]).await?;
        }
        Ok(bytes.freeze())
    }

    async fn read_there(
        &self,
        worker: u64,
        block: &BlockRef,
        range: Range<u32>,
        into: &mut [u8],
    ) -> Result<(), Refusal> {
        let mut at = 0;
        while at < range.len() {
            let length = (range.len() - at).min(READ_BYTES as usize);
            let piece = WireRange { offset: range.start + at as u32, length: length as u32 };
            let bytes = self.uploads.peers.read(worker, block.clone(), piece).await?;
            into[at..at + length].copy_from_slice(&bytes);
            at += length;
        }
        Ok(())
    }
}

fn look_here(data: &DataStore, blocks: &[(u32, DataTarget)]) -> Result<Vec<(u32, Stamp)>, StoreError> {
    let look = |(index, target): &(u32, DataTarget)| {
        let (incarnation, modified_ns, end) = data.last_write(target)?;
        Ok((*index, Stamp { incarnation, modified_ns, end }))
    };
    blocks.iter().map(look).collect()
}

/// Whether a file's time would show another write. One from the future shows nothing, and is taken as it is.
fn is_settled(stamp: &Stamp) -> bool {
    let now_ns = host::wall_ns();
    let settled = i64::try_from(SETTLED.as_nanos()).unwrap_or(i64::MAX);
    stamp.modified_ns > now_ns || now_ns - stamp.modified_ns >= settled
}

/// With so many blocks, some of them perhaps at other workers.
fn parts_per_look(blocks: usize, is_elsewhere: bool) -> u32 {
    let parts = u32::try_from(blocks / LOOK_BLOCKS).unwrap_or(u32::MAX).saturating_add(1);
    parts.max(if is_elsewhere { LOOK_PARTS } else { 1 })
}

fn missing(id: &BlockId) -> Refusal {
    Refusal::new(Status::NoSuchBlock, format!("block {id} is nowhere to be found"))
}

fn changed() -> Refusal {
    Refusal::new(Status::Changed, "the file was written to while it was read")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_are_a_small_part_of_the_work() {
        assert_eq!([0, 1, 127].map(|blocks| parts_per_look(blocks, false)), [1; 3], "before each part");
        assert_eq!([1, 127].map(|blocks| parts_per_look(blocks, true)), [LOOK_PARTS; 2]);
        for blocks in [128, 10_000, 1 << 20] {
            for is_elsewhere in [false, true] {
                assert!(blocks / parts_per_look(blocks, is_elsewhere) as usize <= LOOK_BLOCKS, "{blocks} blocks");
            }
        }
    }
}
