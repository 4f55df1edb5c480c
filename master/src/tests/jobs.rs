//! Jobs: loads against workers that only count, exports against those that make objects of the names of blocks.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cavern_conf::Config;
use cavern_net::Placement;
use cavern_proto::data::open_request;
use cavern_proto::master::{JobKind, JobState, Mount, Worker, WorkerState, WorkerTable};
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
    fn make(&self, _: &Config, _: Arc<Workers>, _: &str, _: u64) -> WorkerClients {
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
