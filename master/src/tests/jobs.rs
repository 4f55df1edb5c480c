//! Jobs: loads against workers that only count, exports against those that make objects of the names of blocks.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cavern_conf::Config;
use cavern_consensus::LeaderLease;
use cavern_net::Placement;
use cavern_proto::block_id::block_length;
use cavern_proto::data::{BlockRef, open_request};
use cavern_proto::master::{
    AccessMode, AttributePolicy, Job, JobKind, JobState, Mount, Worker, WorkerState, WorkerTable,
};
use cavern_work::workers::Workers;
use cavern_work::workers::calls::{BlockFiller, Failure, Filled};
use cavern_work::{Request, WorkError};
use futures::future::BoxFuture;
use parking_lot::Mutex;

use super::harness::{NoWorkers, TestMaster, eventually, mount_request, new_bucket};
use crate::leader_state::{WorkerClientFactory, WorkerClients};

/// Keys and indexes of blocks.
type Blocks = HashSet<(String, u32)>;

/// Two workers. The first request of each fails; keys that contain `bad` always do.
#[derive(Clone, Default)]
struct Counting {
    filled: Arc<Mutex<HashMap<u64, Blocks>>>,
    requests: Arc<AtomicU32>,
}

impl WorkerClientFactory for Counting {
    fn make(&self, _: &Config, _: Arc<Workers>, _: &str, _: LeaderLease) -> WorkerClients {
        WorkerClients { filler: Arc::new(self.clone()), writer: Arc::new(NoWorkers), pool: None }
    }
}

impl BlockFiller for Counting {
    fn placement(&self) -> Result<Arc<Placement>, WorkError> {
        let worker = |id| Worker { id, capacity_bytes: 1, state: WorkerState::Live as i32, ..Worker::default() };
        Ok(Arc::new(Placement::new(&WorkerTable { epoch: 1, workers: vec![worker(1), worker(2)] })))
    }

    fn fill(&self, worker: u64, items: Vec<open_request::Item>) -> BoxFuture<'_, Result<Vec<Filled>, String>> {
        Box::pin(async move {
            if self.requests.fetch_add(1, Ordering::Relaxed) == 0 {
                return Err("the connection broke".to_owned());
            }
            let fill = |item: open_request::Item| {
                let block = item.block.unwrap();
                if block.key.contains("bad") {
                    return Filled::Failed { reason: "no such object".into(), failure: Failure::Final };
                }
                let is_new = self.filled.lock().entry(worker).or_default().insert((block.key, block.index));
                Filled::Present { fetched_bytes: if is_new { u64::from(item.want[0].length) } else { 0 } }
            };
            Ok(items.into_iter().map(fill).collect())
        })
    }

    fn cached(&self, worker: u64, blocks: Vec<BlockRef>) -> BoxFuture<'_, Result<Vec<u64>, String>> {
        Box::pin(async move {
            let filled = self.filled.lock();
            let filled = filled.get(&worker);
            let bytes = |block: BlockRef| {
                let length = block_length(block.object_length, block.block_size, block.index);
                let is_here = filled.is_some_and(|filled| filled.contains(&(block.key, block.index)));
                if is_here { u64::from(length) } else { 0 }
            };
            Ok(blocks.into_iter().map(bytes).collect())
        })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_fills_every_block_where_it_belongs_and_counts_what_failed() {
    let filler = Counting::default();
    let dir = Arc::new(tempfile::tempdir().unwrap());
    let master = TestMaster::with(Config::default(), dir, Arc::new(filler.clone())).await.unwrap();
    let (bucket, uri) = new_bucket();
    for number in 0..50 {
        bucket.put(&format!("d{}/f{number}", number % 3), vec![0; 1000]);
    }
    bucket.put("large", vec![0; (2 << 20) + 1]);
    bucket.put("empty", "");
    let request = Mount { block_size: 1 << 20, ..mount_request("/m", &uri) };
    master.services().mount_bucket(request, false).await.unwrap();

    let jobs = &master.services().jobs;
    let job = jobs.submit_once(&Request::default(), JobKind::Load, "/m", 0).await.unwrap();
    eventually(|| async { jobs.get(job.id).await.unwrap().state() != JobState::Running }).await;
    let done = jobs.get(job.id).await.unwrap();
    assert_eq!(done.state(), JobState::Done, "{}", done.last_error);
    let bytes = 50 * 1000 + (2 << 20) + 1;
    assert_eq!((done.files_total, done.files_done, done.walked), (52, 52, true));
    assert_eq!((done.bytes_total, done.bytes_done, done.bytes_fetched), (bytes, bytes, bytes));
    let per_worker: Vec<usize> = filler.filled.lock().values().map(HashSet::len).collect();
    assert_eq!(per_worker.iter().sum::<usize>(), 50 + 3);
    assert!(per_worker.len() == 2 && per_worker.iter().all(|count| *count > 0), "{per_worker:?}");

    bucket.put("d0/bad", "1");
    master.refresh("/m").await;
    let again = jobs.submit_once(&Request::default(), JobKind::Load, "/m/d0", 0).await.unwrap();
    eventually(|| async { jobs.get(again.id).await.unwrap().state() != JobState::Running }).await;
    let failed = jobs.get(again.id).await.unwrap();
    assert_eq!((failed.state(), failed.errors, failed.bytes_fetched), (JobState::Failed, 1, 0));
    assert!(failed.last_error.contains("bad"), "{}", failed.last_error);
    assert!(jobs.submit_once(&Request::default(), JobKind::Load, "/nowhere", 0).await.is_err());
    assert!(jobs.get(99).await.unwrap_err().is_not_found());
    assert_eq!(jobs.list().await.unwrap().len(), 2);

    let master = master.restart().await;
    assert_eq!(master.services().jobs.get(again.id).await.unwrap(), failed);
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_are_loaded_and_looked_at_without_a_job() {
    let filler = Counting::default();
    let dir = Arc::new(tempfile::tempdir().unwrap());
    let master = TestMaster::with(Config::default(), dir, Arc::new(filler.clone())).await.unwrap();
    let (bucket, uri) = new_bucket();
    for name in ["d/a", "d/b", "e/c"] {
        bucket.put(name, vec![0; 1000]);
    }
    bucket.put("e/large", vec![0; (1 << 20) + 1]);
    let request = Mount { block_size: 1 << 20, ..mount_request("/m", &uri) };
    master.services().mount_bucket(request, false).await.unwrap();

    let jobs = &master.services().jobs;
    let work = async |kind, paths: &[&str]| {
        let (answers, _taken) = tokio::sync::mpsc::channel(1);
        jobs.load_files(kind, paths.iter().map(|path| (*path).to_owned()).collect(), &answers).await
    };
    let counts = |job: &Job| (job.files_total, job.files_done, job.bytes_total, job.bytes_done, job.errors);
    let all = ["/m/d", "/m/e/c", "/m/e/large"];
    let bytes = 3000 + (1 << 20) + 1;
    let cold = work(JobKind::Check, &all).await.unwrap();
    assert_eq!((counts(&cold), cold.state()), ((4, 0, bytes, 0, 0), JobState::Done));
    assert!(filler.filled.lock().is_empty(), "a check loads nothing");

    // One that is nowhere is an error, and the others are loaded.
    let loaded = work(JobKind::Load, &["/m/e/c", "/m/nowhere", "/m/d"]).await.unwrap();
    assert_eq!((counts(&loaded), loaded.state()), ((3, 3, 3000, 3000, 1), JobState::Failed));
    assert!(loaded.last_error.contains("/m/nowhere"), "{}", loaded.last_error);
    let half = work(JobKind::Check, &all).await.unwrap();
    assert_eq!(counts(&half), (4, 3, bytes, 3000, 0));
    let rest = work(JobKind::Load, &all).await.unwrap();
    assert_eq!((counts(&rest), rest.bytes_fetched), ((4, 4, bytes, bytes, 0), bytes - 3000));
    assert_eq!(counts(&work(JobKind::Check, &["/m"]).await.unwrap()), (4, 4, bytes, bytes, 0));

    for kind in [JobKind::Export, JobKind::Unspecified] {
        assert!(matches!(work(kind, &all).await, Err(WorkError::Invalid(_))), "{kind:?}");
    }
    assert!(jobs.submit_once(&Request::default(), JobKind::Check, "/m", 0).await.is_err());
    assert!(jobs.list().await.unwrap().is_empty(), "none of it is a job");

    // Names alone.
    let job = jobs.submit_once(&Request::default(), JobKind::LoadMetadata, "/m", 0).await.unwrap();
    eventually(|| async { jobs.get(job.id).await.unwrap().state() != JobState::Running }).await;
    let listed = jobs.get(job.id).await.unwrap();
    assert_eq!(
        (counts(&listed), listed.state(), listed.kind()),
        ((4, 4, 0, 0, 0), JobState::Done, JobKind::LoadMetadata)
    );
    master.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_loaded_is_asked_for_by_listings_alone() {
    let dir = Arc::new(tempfile::tempdir().unwrap());
    let master = TestMaster::with(Config::default(), dir, Arc::new(Counting::default())).await.unwrap();
    let (bucket, uri) = new_bucket();
    let keys: Vec<String> = (0..40).map(|number| format!("flat/{number:02}")).collect();
    for key in &keys {
        bucket.put(key, "1");
    }
    // A listing of several pages, of a bucket that keeps attributes.
    bucket.list_in_shards(1, 10);
    let (attributes, access_mode) = (AttributePolicy::Keep as i32, AccessMode::ReadWrite as i32);
    let request = Mount { attributes, access_mode, ..mount_request("/m", &uri) };
    let mount = master.services().mount_bucket(request, false).await.unwrap();
    let ufs = master.services().mounts.get(mount.id).unwrap().ufs.clone();
    let before = ufs.stats().heads;
    let jobs = &master.services().jobs;
    let (answers, _taken) = tokio::sync::mpsc::channel(1);
    let paths: Vec<String> = keys.iter().map(|key| format!("/m/{key}")).collect();
    let loaded = jobs.load_files(JobKind::Load, paths, &answers).await.unwrap();
    assert_eq!((loaded.files_done, loaded.errors, loaded.state()), (40, 0, JobState::Done));
    let job = jobs.submit_once(&Request::default(), JobKind::Load, "/m/flat/07", 0).await.unwrap();
    eventually(|| async { jobs.get(job.id).await.unwrap().state() == JobState::Done }).await;
    assert_eq!(ufs.stats().heads, before);
    // For clients it is asked what the bucket keeps.
    assert!(master.services().lookups.resolve("/m/flat/07").await.is_ok());
    assert!(ufs.stats().heads > before);
    master.stop().await;
}
