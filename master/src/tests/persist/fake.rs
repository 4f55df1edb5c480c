//! Workers that make objects of the names of blocks.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use cavern_conf::Config;
use cavern_consensus::LeaderLease;
use cavern_net::Placement;
use cavern_proto::data::{
    BlockRef, CopyRequest, InspectReply, InspectRequest, OrphanBlock, PersistReply, PersistRequest, Status,
    inspect_reply, open_request,
};
use cavern_proto::master::{DiskReport, Worker, WorkerState, WorkerTable};
use cavern_ufs::{Metadata, Precondition, Ufs, UfsError};
use cavern_work::WorkError;
use cavern_work::workers::Workers;
use cavern_work::workers::calls::{BlockFiller, Failure, Filled, ObjectWriter};
use futures::future::BoxFuture;
use parking_lot::Mutex;

use super::bench::BLOCK;
use crate::leader_state::{WorkerClientFactory, WorkerClients};
use crate::tests::harness::placement_of;

/// What workers say of blocks, by worker and index: a status, and a checksum.
type Said = HashMap<(u64, u32), (Status, u32)>;

/// Workers that make objects of the names of blocks, and fail as a test configures them to.
#[derive(Clone)]
pub struct Fake {
    pub ufs: Ufs,
    /// Of a hundred requests so many fail.
    pub trouble: Arc<AtomicU32>,
    pub dice: Arc<AtomicU64>,
    /// All requests fail, as if the bucket were away.
    pub is_away: Arc<AtomicU32>,
    /// All requests are refused.
    pub is_denied: Arc<AtomicU32>,
    /// Requests are carried out, and their answers are lost.
    pub is_lost: Arc<AtomicU32>,
    pub written: Arc<Mutex<Vec<String>>>,
    pub freed: Arc<Mutex<Vec<(u64, u32)>>>,
    pub live: Arc<Mutex<Vec<(u64, WorkerState)>>>,
    /// Workers, and indexes of blocks that they have lost.
    pub lost: Arc<Mutex<Vec<(u64, u32)>>>,
    /// Of blocks that they are asked about. Others are there, and as their objects are.
    pub said: Arc<Mutex<Said>>,
    /// Workers, and blocks that no file has.
    pub orphans: Arc<Mutex<Vec<(u64, String)>>>,
    /// Bytes of a disk of worker 1, and of the blocks on it.
    pub disk: Arc<Mutex<(u64, u64)>>,
    /// Keys, indexes and lengths of blocks that were filled.
    pub filled: Arc<Mutex<Vec<(String, u32, u32)>>>,
    /// Milliseconds that a write may take to become an object when its worker is gone.
    pub arrives_within: Arc<AtomicU64>,
    /// Held while a test lets nothing be filled.
    pub fills: Arc<tokio::sync::RwLock<()>>,
    /// Held while a test lets nothing be written, and how many requests to write there are.
    pub writes: Arc<tokio::sync::RwLock<()>>,
    pub under_way: Arc<AtomicU32>,
    /// While it is not 0, files are written to when so many bytes of them have been sent.
    pub sent_bytes: Arc<AtomicU64>,
    /// Keys that were to be written, and whether nobody waited for it.
    pub asked: Arc<Mutex<Vec<(String, bool)>>>,
}

impl Fake {
    pub fn new(uri: &str) -> Self {
        let conf = cavern_conf::schema::Ufs { retries: 0, ..Default::default() };
        Self {
            ufs: Ufs::open(uri, &Default::default(), &conf).unwrap(),
            trouble: Arc::default(),
            dice: Arc::new(AtomicU64::new(1)),
            is_away: Arc::default(),
            is_denied: Arc::default(),
            is_lost: Arc::default(),
            written: Arc::default(),
            freed: Arc::default(),
            said: Arc::default(),
            orphans: Arc::default(),
            disk: Arc::default(),
            filled: Arc::default(),
            arrives_within: Arc::default(),
            fills: Arc::default(),
            writes: Arc::default(),
            under_way: Arc::default(),
            sent_bytes: Arc::default(),
            asked: Arc::default(),
            lost: Arc::default(),
            live: Arc::new(Mutex::new(vec![(1, WorkerState::Live)])),
        }
    }

    fn roll(&self) -> u64 {
        let step = |seed: u64| Some(seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f));
        self.dice.fetch_update(Ordering::AcqRel, Ordering::Acquire, step).unwrap() >> 33
    }

    /// The words for the blocks of a file that is to be written.
    async fn blocks(&self, request: &PersistRequest) -> Result<Vec<String>, UfsError> {
        let mut blocks = vec![HOLE.to_owned(); request.length.div_ceil(BLOCK) as usize];
        if request.origin_bytes > 0 {
            let words = self.words(&request.origin_key, &request.origin_etag).await?;
            let valid = request.origin_bytes.div_ceil(BLOCK) as usize;
            for (block, word) in blocks.iter_mut().zip(words).take(valid) {
                *block = word;
            }
        }
        for (index, generation) in request.indexes.iter().zip(&request.generations) {
            blocks[*index as usize] = written(request.inode, *generation);
        }
        Ok(blocks)
    }

    /// Whether the first worker of a block does not have it.
    fn lacks_a_block(&self, request: &PersistRequest) -> bool {
        let (lost, mut workers) = (self.lost.lock(), request.workers.iter());
        let mut blocks = request.indexes.iter().zip(&request.copies);
        blocks.any(|(index, copies)| {
            let first = workers.by_ref().take(*copies as usize).copied().collect::<Vec<u64>>()[0];
            lost.contains(&(first, *index))
        })
    }

    /// The words for the blocks of an object in one version.
    pub async fn words(&self, key: &str, etag: &str) -> Result<Vec<String>, UfsError> {
        let size = self.ufs.head(key).await?.size;
        let object = self.ufs.get_bytes(key, etag, 0..size).await?;
        let word = |block: &[u8]| String::from_utf8_lossy(block).trim().to_owned();
        Ok(object.chunks(BLOCK as usize).map(word).collect())
    }

    async fn write(&self, request: PersistRequest) -> Result<PersistReply, String> {
        let answer = |status: Status, etag: String| {
            Ok(PersistReply { status: status.into(), message: "on purpose".to_owned(), etag, sent_bytes: 0 })
        };
        let sent_bytes = self.sent_bytes.load(Ordering::Acquire);
        if sent_bytes > 0 {
            return Ok(PersistReply { status: Status::Changed.into(), sent_bytes, ..PersistReply::default() });
        }
        // What it lacks it finds out by itself.
        if self.lacks_a_block(&request) {
            return answer(Status::NoSuchBlock, String::new());
        }
        if self.is_away.load(Ordering::Acquire) > 0 {
            return answer(Status::UfsUnavailable, String::new());
        }
        if self.is_denied.load(Ordering::Acquire) > 0 {
            return answer(Status::Denied, String::new());
        }
        let trouble = self.roll() % 100 < u64::from(self.trouble.load(Ordering::Acquire));
        let fate = if trouble { self.roll() % 4 } else { 9 };
        tokio::time::sleep(Duration::from_micros(self.roll() % 2000)).await;
        match fate {
            0 => return Err("the worker went away before".to_owned()),
            1 => return answer(Status::Changed, String::new()),
            _ => {}
        }
        let blocks = match self.blocks(&request).await {
            Ok(blocks) => blocks,
            Err(UfsError::VersionChanged { .. } | UfsError::NotFound { .. }) => {
                return answer(Status::NotFound, String::new());
            }
            Err(error) => return Err(error.to_string()),
        };
        let body = body(&request.inline, &blocks);
        let metadata: Metadata = request.metadata.into_iter().map(|item| (item.name, item.value)).collect();
        let replaces =
            if request.replaces.is_empty() { Precondition::Nothing } else { Precondition::Version(&request.replaces) };
        let put = self.ufs.put(&request.key, &body, &metadata, replaces).await;
        tokio::time::sleep(Duration::from_micros(self.roll() % 2000)).await;
        if fate == 2 || self.is_lost.load(Ordering::Acquire) > 0 {
            return Err("the worker went away after".to_owned());
        }
        self.written.lock().push(request.key.clone());
        match put {
            Ok(etag) => answer(Status::Ok, etag),
            Err(UfsError::VersionChanged { .. } | UfsError::NotFound { .. }) => {
                let there = self.ufs.head(&request.key).await.map(|there| there.etag).unwrap_or_default();
                answer(Status::VersionChanged, there)
            }
            Err(error) => Err(error.to_string()),
        }
    }
}

/// What stands for the content of a file: a word in each block.
pub fn body(inline: &[u8], blocks: &[String]) -> Bytes {
    let width = BLOCK as usize;
    let text: String = blocks.iter().map(|word| format!("{word:width$}")).collect();
    if inline.is_empty() { text.into() } else { Bytes::copy_from_slice(inline) }
}

/// What stands for a block that was written.
pub fn written(inode: u64, generation: u32) -> String {
    format!("{inode}.{generation}")
}

/// What stands for a hole.
pub const HOLE: &str = "-";

impl WorkerClientFactory for Fake {
    fn make(&self, _: &Config, _: Arc<Workers>, _: &str, _: LeaderLease) -> WorkerClients {
        WorkerClients { filler: Arc::new(self.clone()), writer: Arc::new(self.clone()), pool: None }
    }
}

impl BlockFiller for Fake {
    fn placement(&self) -> Result<Arc<Placement>, WorkError> {
        let worker = |id: u64| Worker { id, capacity_bytes: 1, state: WorkerState::Live as i32, ..Worker::default() };
        Ok(Arc::new(Placement::new(&WorkerTable { epoch: 1, workers: vec![worker(1), worker(2)] })))
    }

    fn fill(&self, _: u64, items: Vec<open_request::Item>) -> BoxFuture<'_, Result<Vec<Filled>, String>> {
        Box::pin(async move {
            let _turn = self.fills.read().await;
            let mut answers = Vec::new();
            for item in items {
                let (block, length) = (item.block.unwrap(), item.want[0].length);
                let there = self.ufs.head(&block.key).await.map(|there| there.etag).unwrap_or_default();
                answers.push(if there == block.etag {
                    self.filled.lock().push((block.key, block.index, length));
                    Filled::Present { fetched_bytes: u64::from(length) }
                } else {
                    Filled::Failed { reason: "no such version".into(), failure: Failure::Replaced }
                });
            }
            Ok(answers)
        })
    }

    fn cached(&self, _: u64, blocks: Vec<BlockRef>) -> BoxFuture<'_, Result<Vec<u64>, String>> {
        Box::pin(async move {
            let filled = self.filled.lock();
            let bytes = |block: BlockRef| {
                let of_block = filled.iter().find(|(key, index, _)| *key == block.key && *index == block.index);
                of_block.map_or(0, |(_, _, length)| u64::from(*length))
            };
            Ok(blocks.into_iter().map(bytes).collect())
        })
    }
}

impl ObjectWriter for Fake {
    fn placement(&self) -> Result<Arc<Placement>, WorkError> {
        Ok(placement_of(&self.live.lock()))
    }

    fn reported(&self) -> Result<Vec<Worker>, WorkError> {
        let (capacity_bytes, data_bytes) = *self.disk.lock();
        let disks = vec![DiskReport { capacity_bytes, data_bytes, healthy: true, ..DiskReport::default() }];
        Ok(vec![Worker { id: 1, state: WorkerState::Live as i32, disks, ..Worker::default() }])
    }

    fn persist(&self, _: u64, request: PersistRequest) -> BoxFuture<'_, Result<PersistReply, String>> {
        Box::pin(async move {
            self.asked.lock().push((request.key.clone(), request.background));
            self.under_way.fetch_add(1, Ordering::AcqRel);
            let turn = self.writes.read().await;
            let reply = self.write(request).await;
            drop(turn);
            self.under_way.fetch_sub(1, Ordering::AcqRel);
            reply
        })
    }

    fn arrives_within(&self) -> Duration {
        Duration::from_millis(self.arrives_within.load(Ordering::Acquire))
    }

    fn has(&self, worker: u64, blocks: Vec<BlockRef>) -> BoxFuture<'_, Result<Vec<bool>, String>> {
        let lost = self.lost.lock();
        let has = |block: &BlockRef| !lost.contains(&(worker, block.index));
        let has = blocks.iter().map(has).collect();
        Box::pin(async { Ok(has) })
    }

    fn inspect(&self, worker: u64, request: InspectRequest) -> BoxFuture<'_, Result<InspectReply, String>> {
        let said = self.said.lock().clone();
        let blocks = request.blocks.into_iter().map(|asked| {
            let index = asked.block.unwrap_or_default().index;
            let sum = u32::from(asked.read > 0);
            let (status, crc) = said.get(&(worker, index)).copied().unwrap_or((Status::Ok, sum));
            let object_crc = if asked.key.is_empty() { 0 } else { sum };
            let message = "on purpose".to_owned();
            inspect_reply::Block { status: status.into(), message, crc, object_crc }
        });
        let mut reply = InspectReply { status: Status::Ok.into(), blocks: blocks.collect(), ..InspectReply::default() };
        if request.orphans {
            let there = self.orphans.lock().clone();
            let there = there.into_iter().filter(|(of, _)| *of == worker);
            let orphan = |(_, block)| OrphanBlock { block, incarnation: 1, bytes: 1 };
            reply.orphans = there.map(orphan).collect();
            reply.orphan_blocks = reply.orphans.len() as u64;
        }
        Box::pin(async { Ok(reply) })
    }

    fn copy(&self, _: u64, _: CopyRequest, _: Duration) -> BoxFuture<'_, Result<(), String>> {
        Box::pin(async { Err("nothing is copied here".to_owned()) })
    }

    fn free(&self, worker: u64, blocks: Vec<BlockRef>) -> BoxFuture<'_, Result<(), String>> {
        self.freed.lock().extend(blocks.iter().map(|block| (worker, block.index)));
        Box::pin(async { Ok(()) })
    }
}
