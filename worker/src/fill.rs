//! Fills: missing chunks are fetched from the bucket, each once for all who ask.
//!
//! A request names chunks. Those that are missing and not yet on their way are grouped into contiguous *runs* of at
//! most `fill_size_max`; each run is one ranged GET with `If-Match`, the first of them in the task of the request, the
//! others in tasks of their own. Chunks that another run is bringing are waited for there. The body is streamed: a
//! chunk becomes visible, and those who wait for it go on, as soon as it is written, long before its run ends.
//!
//! A run belongs to nobody. When all who asked have gone (deadline, cancel, closed connection) it stops at its next
//! chunk, or before it has begun; when it fails, all requests that wait get the error, and nothing is remembered: the
//! next request tries again.

mod origin;
mod populate;
mod run;
mod source;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use cavern_conf::schema;
use cavern_proto::BlockId;
use cavern_proto::chunk::{CHUNK_BYTES, chunk_range};
use cavern_proto::data::Status;
use cavern_ufs::Ufs;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use run::DiskPace;
pub use source::{BlockSource, ObjectBlock};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use crate::parts::WorkerParts;
use crate::request_error::{Refusal, on_disk};
use crate::store::{CachedBlock, Lookup, Touch};

/// A block that is dropped while it is filled is begun anew this often.
const MAX_ROUNDS: usize = 3;

/// How far a run is.
#[derive(Clone, Debug)]
struct Progress {
    /// Chunks of the run below this index can be read.
    ready: u32,
    end: Option<Result<(), Refusal>>,
}

/// One GET on its way.
#[derive(Debug)]
struct Run {
    chunks: Range<u32>,
    progress: watch::Sender<Progress>,
    /// Up to which chunk each of those needs it who wait for a part: nobody is woken for less. They become more only
    /// under the lock of `Fills::runs`.
    needs: Mutex<Vec<u32>>,
}

impl Run {
    /// Chunks below this one can be read.
    fn reached(&self, ready: u32) {
        self.progress.send_if_modified(|progress| {
            let before = std::mem::replace(&mut progress.ready, ready);
            self.needs.lock().iter().any(|need| before < *need && *need <= ready)
        });
    }
}

/// One who waits for the chunks of a run below `need`.
struct RunWaiter {
    run: Arc<Run>,
    need: u32,
}

impl RunWaiter {
    /// For the chunks of the run that lie in `wanted`.
    fn new(run: &Arc<Run>, wanted: &[Range<u32>]) -> Self {
        let own = &run.chunks;
        let within = wanted.iter().filter(|range| range.start < own.end && range.end > own.start);
        let need = within.map(|range| range.end.min(own.end)).max().unwrap_or(own.start);
        run.needs.lock().push(need);
        Self { run: run.clone(), need }
    }

    /// Waits until they can be read, or the run has ended.
    async fn wait(&self) -> Result<(), Refusal> {
        let mut progress = self.run.progress.subscribe();
        match progress.wait_for(|progress| progress.ready >= self.need || progress.end.is_some()).await {
            Ok(progress) if progress.ready >= self.need => Ok(()),
            Ok(progress) => progress.end.clone().unwrap_or(Ok(())),
            // The task ended without a word: the process is stopping.
            Err(_) => Err(Refusal::stopping()),
        }
    }
}

impl Drop for RunWaiter {
    fn drop(&mut self) {
        let mut needs = self.run.needs.lock();
        if let Some(place) = needs.iter().position(|need| *need == self.need) {
            needs.swap_remove(place);
        }
    }
}

/// A run that the request drives by which it was begun: a task of its own would have to be woken, and to wake the
/// request's in turn. When the request is given up before the run has ended, the run becomes such a task.
struct LedRun {
    /// `None` after the end.
    fetch: Option<BoxFuture<'static, ()>>,
    tasks: TaskTracker,
}

impl LedRun {
    async fn drive(&mut self) {
        if let Some(fetch) = &mut self.fetch {
            fetch.await;
            self.fetch = None;
        }
    }
}

impl Drop for LedRun {
    fn drop(&mut self) {
        if let (Some(fetch), Ok(runtime)) = (self.fetch.take(), Handle::try_current()) {
            self.tasks.spawn_on(fetch, &runtime);
        }
    }
}

/// Turns of whoever asks for what waits for a disk, if they are bounded, and until when one is waited for.
pub type DiskTurns<'a> = (Option<&'a Arc<Semaphore>>, Instant);

/// A block with the chunks that were asked for, and the bytes that had to be fetched for it.
#[derive(Debug)]
pub struct Filled {
    pub block: Arc<CachedBlock>,
    pub fetched_bytes: u64,
}

/// The fill engine of a worker.
#[derive(Debug)]
pub struct Fills {
    parts: WorkerParts,
    runs: Mutex<HashMap<BlockId, Vec<Arc<Run>>>>,
    gets: Semaphore,
    chunks_per_run: u32,
    disk: DiskPace,
    tasks: TaskTracker,
}

impl Fills {
    pub fn new(parts: WorkerParts, conf: &schema::Worker) -> Self {
        let size_max = conf.fill_size_max.bytes().min(u64::from(parts.memory.kib) * 1024);
        let chunks = u32::try_from(size_max / u64::from(CHUNK_BYTES)).unwrap_or(u32::MAX);
        Self {
            parts,
            runs: Mutex::default(),
            gets: Semaphore::new(conf.fill_concurrency.max(1)),
            chunks_per_run: chunks.max(1),
            disk: DiskPace::default(),
            tasks: TaskTracker::new(),
        }
    }

    /// Makes chunks of a block readable: verifies those that are here, fetches those that are not.
    ///
    /// Dropping the future gives up the request; fetches that others wait for go on.
    ///
    /// # Errors
    /// Why the chunks cannot be had.
    pub async fn ensure(
        self: &Arc<Self>,
        source: &Arc<ObjectBlock>,
        wanted: &[Range<u32>],
        touch: Touch,
        turns: DiskTurns<'_>,
    ) -> Result<Filled, Refusal> {
        let mut fetched_bytes = 0;
        for _ in 0..MAX_ROUNDS {
            let block = self.open(source, touch, turns).await?;
            self.verify(&block, wanted, turns).await?;
            if wanted.iter().all(|range| block.has(range.clone())) {
                return Ok(Filled { block, fetched_bytes });
            }
            let bucket = self.bucket_of(source).await;
            let ufs = bucket.inspect_err(|_| self.parts.stores.cache.forget_if_empty(&block))?;
            let (own, theirs) = self.plan(&block, wanted);
            let mut led = None;
            for asker in &own {
                let (fills, block, source, ufs, run) =
                    (self.clone(), block.clone(), source.clone(), ufs.clone(), asker.run.clone());
                fetched_bytes += bytes_of(&run.chunks, source.length);
                let fetch = Box::pin(async move { fills.fetch_run(run, block, source, ufs).await });
                match led {
                    None => led = Some(LedRun { fetch: Some(fetch), tasks: self.tasks.clone() }),
                    Some(_) => drop(self.tasks.spawn(fetch)),
                }
            }
            if let Some(mut led) = led {
                led.drive().await;
            }
            let waits = own.iter().chain(&theirs).map(RunWaiter::wait);
            futures::future::try_join_all(waits).await?;
            if wanted.iter().all(|range| block.has(range.clone())) {
                return Ok(Filled { block, fetched_bytes });
            }
        }
        Err(Refusal::new(Status::Overloaded, "the block was dropped again and again while it was filled"))
    }

    /// The bucket that an object is in.
    ///
    /// # Errors
    /// Its mount cannot be used, or the content id is not that of the object named.
    async fn bucket_of(&self, source: &ObjectBlock) -> Result<Ufs, Refusal> {
        let ufs = self.parts.mounts.ufs_for(source.mount_id, &source.key).await?;
        if source.is_of(ufs.store_id()) {
            return Ok(ufs);
        }
        Err(Refusal::bad_request("the content id is not that of the key, version and bucket named"))
    }

    /// The block, made if need be. The file of a new block of one chunk is made here, as that chunk is written: both
    /// take less than the way to another thread and back.
    async fn open(
        &self,
        source: &ObjectBlock,
        touch: Touch,
        (turns, until): DiskTurns<'_>,
    ) -> Result<Arc<CachedBlock>, Refusal> {
        let (id, length, mount_id, cache) = (source.id, source.length, source.mount_id, &self.parts.stores.cache);
        let block = match cache.get(&id, Touch::None) {
            Lookup::Open(block) => block,
            Lookup::Absent if length <= CHUNK_BYTES => cache.create(&id, length, mount_id, touch)?,
            Lookup::Absent | Lookup::Closed | Lookup::Other => {
                let cache = cache.clone();
                on_disk(turns, until, move || cache.create(&id, length, mount_id, touch)).await??
            }
        };
        if block.length() != length {
            return Err(Refusal::bad_request("the content id stands for another block"));
        }
        Ok(block)
    }

    async fn verify(
        &self,
        block: &Arc<CachedBlock>,
        wanted: &[Range<u32>],
        (turns, until): DiskTurns<'_>,
    ) -> Result<(), Refusal> {
        let doubtful = {
            let state = block.state();
            let in_doubt = |index: &u32| state.present.contains(*index) && !state.verified.contains(*index);
            wanted.iter().any(|range| range.clone().any(|index| in_doubt(&index)))
        };
        if !doubtful {
            return Ok(());
        }
        let (cache, block, wanted) = (self.parts.stores.cache.clone(), block.clone(), wanted.to_vec());
        let check = move || wanted.into_iter().try_for_each(|range| cache.verify(&block, range));
        Ok(on_disk(turns, until, check).await??)
    }

    /// Which runs bring the chunks that are missing: new ones, to be spawned at once, and those of others.
    fn plan(&self, block: &CachedBlock, wanted: &[Range<u32>]) -> (Vec<RunWaiter>, Vec<RunWaiter>) {
        let (mut own, mut theirs) = (Vec::<RunWaiter>::new(), Vec::<RunWaiter>::new());
        let mut runs = self.runs.lock();
        let under_way = runs.entry(*block.id()).or_default();
        let before = under_way.len();
        let mut missing: Vec<u32> = {
            let state = block.state();
            let chunks = wanted.iter().flat_map(|range| range.clone());
            // What is present but in doubt is verified in the next round, not fetched.
            chunks.filter(|index| !state.present.contains(*index)).collect()
        };
        missing.sort_unstable();
        missing.dedup();
        let mut fresh: Vec<Range<u32>> = Vec::new();
        for index in missing {
            if let Some(run) = under_way[..before].iter().find(|run| run.chunks.contains(&index)) {
                if !theirs.iter().any(|asker| Arc::ptr_eq(&asker.run, run)) {
                    theirs.push(RunWaiter::new(run, wanted));
                }
                continue;
            }
            match fresh.last_mut() {
                Some(last) if last.end == index && last.len() < self.chunks_per_run as usize => last.end += 1,
                _ => fresh.push(index..index + 1),
            }
        }
        for chunks in fresh {
            let progress = watch::Sender::new(Progress { ready: chunks.start, end: None });
            let run = Arc::new(Run { chunks, progress, needs: Mutex::default() });
            own.push(RunWaiter::new(&run, wanted));
            under_way.push(run);
        }
        if under_way.is_empty() {
            runs.remove(block.id());
        }
        (own, theirs)
    }

    /// Takes a run off the list, so that nobody joins it any more. With `only_if_abandoned` only when nobody waits for
    /// it; says whether it was taken off.
    fn retire(&self, id: &BlockId, run: &Arc<Run>, only_if_abandoned: bool) -> bool {
        let mut runs = self.runs.lock();
        if only_if_abandoned && !run.needs.lock().is_empty() {
            return false;
        }
        if let Some(under_way) = runs.get_mut(id) {
            under_way.retain(|other| !Arc::ptr_eq(other, run));
            if under_way.is_empty() {
                runs.remove(id);
            }
        }
        true
    }

    /// Waits for the runs that are on their way, after the last request has ended.
    pub async fn finish(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }
}

/// Bytes of a range of chunks of a block.
fn bytes_of(chunks: &Range<u32>, length: u32) -> u64 {
    let end = chunk_range(chunks.end.saturating_sub(1), length).end;
    u64::from(end.saturating_sub(chunk_range(chunks.start, length).start))
}

#[cfg(test)]
mod tests;
