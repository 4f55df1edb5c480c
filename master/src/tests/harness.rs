//! A master to test, and the buckets that it lists.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use cavern_conf::{Config, Interval};
use cavern_consensus::clock::Reading;
use cavern_consensus::{Clock, LeaderLease};
use cavern_net::Placement;
use cavern_proto::data::{
    BlockRef, CopyRequest, InspectReply, InspectRequest, PersistReply, PersistRequest, open_request,
};
use cavern_proto::master::{Kind, Mount, Worker, WorkerState, WorkerTable, WriteType};
use cavern_proto::record::command::Command;
use cavern_proto::record::{AttachMount, PutWorker};
use cavern_security::AuditLog;
use cavern_state::Outcome;
use cavern_ufs::MemoryBucket;
use cavern_work::metrics::MasterMetrics;
use cavern_work::mounts::TakeOver;
use cavern_work::mounts::changes::{DetachPolicy, MountPolicy};
use cavern_work::sessions::Before;
use cavern_work::workers::Workers;
use cavern_work::workers::calls::{BlockFiller, Filled, ObjectWriter};
use cavern_work::{Request, WorkError};
use futures::future::BoxFuture;
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

use crate::error::MasterError;
use crate::leader_state::{LeaderState, WorkerClientFactory, WorkerClients};
use crate::server::Master;
use crate::services::Services;

/// Long enough for a busy machine; nothing waits for it unless something is wrong.
pub const PATIENCE: Duration = Duration::from_secs(60);

static BUCKETS: AtomicU64 = AtomicU64::new(0);

/// A bucket that no other test has, and its URI.
pub fn new_bucket() -> (MemoryBucket, String) {
    let name = format!("master-test-{}", BUCKETS.fetch_add(1, Ordering::Relaxed));
    (MemoryBucket::named(&name), format!("memory://{name}"))
}

/// No worker at all.
pub struct NoWorkers;

impl WorkerClientFactory for NoWorkers {
    fn make(&self, _: &Config, _: Arc<Workers>, _: &str, _: LeaderLease) -> WorkerClients {
        WorkerClients { filler: Arc::new(Self), writer: Arc::new(Self), pool: None }
    }
}

impl ObjectWriter for NoWorkers {
    fn placement(&self) -> Result<Arc<Placement>, WorkError> {
        Ok(Arc::default())
    }

    fn reported(&self) -> Result<Vec<Worker>, WorkError> {
        Ok(Vec::new())
    }

    fn persist(&self, _: u64, _: PersistRequest) -> BoxFuture<'_, Result<PersistReply, String>> {
        Box::pin(async { Err("there is no worker".to_owned()) })
    }

    fn free(&self, _: u64, _: Vec<BlockRef>) -> BoxFuture<'_, Result<(), String>> {
        Box::pin(async { Err("there is no worker".to_owned()) })
    }

    fn has(&self, _: u64, _: Vec<BlockRef>) -> BoxFuture<'_, Result<Vec<bool>, String>> {
        Box::pin(async { Err("there is no worker".to_owned()) })
    }

    fn copy(&self, _: u64, _: CopyRequest, _: Duration) -> BoxFuture<'_, Result<(), String>> {
        Box::pin(async { Err("there is no worker".to_owned()) })
    }

    fn inspect(&self, _: u64, _: InspectRequest) -> BoxFuture<'_, Result<InspectReply, String>> {
        Box::pin(async { Err("there is no worker".to_owned()) })
    }
}

impl BlockFiller for NoWorkers {
    fn placement(&self) -> Result<Arc<Placement>, WorkError> {
        Ok(Arc::default())
    }

    fn fill(&self, _: u64, _: Vec<open_request::Item>) -> BoxFuture<'_, Result<Vec<Filled>, String>> {
        Box::pin(async { Err("there is no worker".to_owned()) })
    }

    fn cached(&self, _: u64, _: Vec<BlockRef>) -> BoxFuture<'_, Result<Vec<u64>, String>> {
        Box::pin(async { Err("there is no worker".to_owned()) })
    }
}

/// The clock of a host that somebody sets.
#[derive(Default)]
pub struct HostClock(Arc<AtomicI64>);

impl HostClock {
    /// Sets it forward or back.
    pub fn set_by_hours(&self, hours: i64) {
        self.0.fetch_add(hours * 3_600_000_000_000, Ordering::AcqRel);
    }

    /// That of a master on this host.
    pub fn clock(&self) -> Clock {
        let set_by = self.0.clone();
        Clock::new(move || {
            let reading = Reading::now();
            Reading { wall_ns: reading.wall_ns + set_by.load(Ordering::Acquire), ..reading }
        })
    }
}

/// Requests as they come from callers that know of no ids.
impl Services {
    pub async fn mount_bucket(&self, wanted: Mount, check_only: bool) -> Result<Mount, WorkError> {
        let policy = if check_only { MountPolicy::Check } else { MountPolicy::Record };
        self.mount_changes
            .mount_once(&Request::default(), wanted, policy(TakeOver::Never))
            .await
            .map(|(mount, _)| mount)
    }

    pub async fn unmount_bucket(&self, path: &str, unwritten: DetachPolicy) -> Result<Mount, WorkError> {
        self.mount_changes.unmount_once(&Request::default(), path, unwritten).await
    }
}

/// A session that was there before.
pub fn session_before(session: u64, is_recorded: bool) -> Before<'static> {
    Before { session, is_recorded, ..Before::default() }
}

/// One master in a directory of its own.
pub struct TestMaster {
    pub dir: Arc<TempDir>,
    pub master: Master,
    pub config: Config,
    pub metrics: MasterMetrics,
    term: Arc<LeaderState>,
}

impl TestMaster {
    pub async fn new() -> Self {
        Self::with(Config::default(), Arc::new(tempfile::tempdir().unwrap()), Arc::new(NoWorkers)).await.unwrap()
    }

    pub async fn with(
        config: Config,
        dir: Arc<TempDir>,
        fillers: Arc<dyn WorkerClientFactory + Send + Sync>,
    ) -> Result<Self, MasterError> {
        Self::at(config, dir, fillers, Clock::default()).await
    }

    /// The same with another clock than the host's.
    pub async fn at(
        config: Config,
        dir: Arc<TempDir>,
        fillers: Arc<dyn WorkerClientFactory + Send + Sync>,
        clock: Clock,
    ) -> Result<Self, MasterError> {
        let grpc = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        // Boxed, since each test holds the future of a whole start.
        Box::pin(Self::listening(grpc, config, dir, fillers, clock)).await
    }

    /// Puts workers 1 to `count` into the table: blocks are committed at no others.
    pub async fn register_workers(&self, count: u8) {
        for number in 1..=count {
            let worker = Worker { data_address: format!("worker{number}:1"), ..Worker::default() };
            let put = PutWorker { uuid: vec![number; 16].into(), worker: Some(worker), ..PutWorker::default() };
            self.services().proposer.propose(Command::PutWorker(put)).await.unwrap();
        }
    }

    /// Records a mount as it is: nobody looks at its bucket, nor at other mounts.
    pub async fn attach(&self, mount: Mount) -> Mount {
        let services = self.services();
        let mounts_epoch = services.mounts.table().unwrap().0;
        let attach = AttachMount { mount: Some(mount), mounts_epoch };
        match services.proposer.propose(Command::AttachMount(attach)).await.unwrap() {
            Outcome::Mount(mount) => *mount,
            other => panic!("{other:?}"),
        }
    }

    async fn listening(
        grpc: tokio::net::TcpListener,
        mut config: Config,
        dir: Arc<TempDir>,
        fillers: Arc<dyn WorkerClientFactory + Send + Sync>,
        clock: Clock,
    ) -> Result<Self, MasterError> {
        config.master.data_dir = dir.path().join("master");
        config.cluster.masters = vec![grpc.local_addr().unwrap().to_string()];
        config.ufs.retries = 0;
        config.ufs.file_roots = vec!["/".into()];
        config.ufs.retry_backoff = Interval::millis(1);
        let (metrics, stop) = (MasterMetrics::default(), CancellationToken::new());
        let own = metrics.clone();
        let started = Master::start(config.clone(), grpc, fillers, clock, own, AuditLog::default(), stop);
        let master = started.await?.expect("nobody stops it");
        let term = master.election.term().expect("the only master leads");
        Ok(Self { dir, master, config, metrics, term })
    }

    pub fn services(&self) -> &Services {
        &self.term.services
    }

    /// Stops it in an orderly way.
    pub async fn stop(self) {
        self.end().await;
    }

    /// The same, for another on the same directory.
    pub async fn end(self) -> (Arc<TempDir>, Config) {
        let Self { dir, master, config, term, .. } = self;
        drop(term);
        master.stop().await;
        (dir, config)
    }

    /// Stops it and starts another on the same directory.
    pub async fn restart(self) -> Self {
        self.restart_at(Clock::default()).await
    }

    /// The same with another clock than the host's.
    pub async fn restart_at(self, clock: Clock) -> Self {
        let (dir, config) = self.end().await;
        Self::at(config, dir, Arc::new(NoWorkers), clock).await.unwrap()
    }

    /// The same at the same address, for clients that are connected.
    pub async fn restart_in_place(self) -> Self {
        let address = self.master.address.clone();
        let (dir, config) = self.end().await;
        let bind = async {
            loop {
                match tokio::net::TcpListener::bind(&address).await {
                    Ok(grpc) => return grpc,
                    Err(_in_use) => tokio::time::sleep(Duration::from_millis(5)).await,
                }
            }
        };
        let grpc = tokio::time::timeout(PATIENCE, bind).await.expect("the address is free again");
        Self::listening(grpc, config, dir, Arc::new(NoWorkers), Clock::default()).await.unwrap()
    }

    pub async fn mount(&self, path: &str, uri: &str) -> Mount {
        self.services().mount_bucket(mount_request(path, uri), false).await.unwrap()
    }

    /// Waits for the end of a mount's index.
    pub async fn indexed(&self, mount: &Mount) {
        let id = mount.id;
        eventually(|| async move {
            let index = self.services().lookups.reader.read(move |tables| Ok(tables.index(id)?)).await.unwrap();
            index.is_some_and(|index| index.began_ns == 0)
        })
        .await;
    }

    /// Every path below a directory, listing what was not listed, with size and ETag of files (`None` for directories).
    pub async fn tree(&self, path: &str) -> Tree {
        let lookups = &self.services().lookups;
        let top = lookups.resolve(path).await.unwrap().attr.unwrap();
        let mut tree = Tree::new();
        let mut waiting = vec![(top.inode, String::new())];
        while let Some((inode, above)) = waiting.pop() {
            let listed = lookups.reader.read(move |tables| Ok(tables.inode(inode)?.unwrap().listed_ns)).await.unwrap();
            if listed == 0 {
                match lookups.listings.start(inode).unwrap().ended().await {
                    Err(error) if error.is_not_found() => continue,
                    result => result.unwrap(),
                };
            }
            let (entries, end) =
                lookups.reader.read(move |tables| Ok(tables.page(inode, None, usize::MAX)?)).await.unwrap();
            assert!(end);
            for (name, inode, record) in entries {
                let path = format!("{above}{}", std::str::from_utf8(&name).unwrap());
                if record.kind() == Kind::Directory {
                    waiting.push((inode, format!("{path}/")));
                    tree.insert(path, None);
                } else {
                    tree.insert(path, Some((record.size, cavern_state::records::etag(&record))));
                }
            }
        }
        tree
    }

    pub async fn refresh(&self, path: &str) {
        use cavern_proto::master::namespace_server::Namespace;
        use futures::StreamExt;
        let request = cavern_proto::master::RefreshRequest { path: path.to_owned(), recursive: true, dry_run: false };
        let mut progress = self.services().refresh(tonic::Request::new(request)).await.unwrap().into_inner();
        let mut last = None;
        while let Some(message) = progress.next().await {
            last = Some(message.unwrap());
        }
        assert!(last.unwrap().done);
    }
}

pub type Tree = BTreeMap<String, Option<(u64, String)>>;

pub fn mount_request(path: &str, uri: &str) -> Mount {
    Mount { path: path.into(), uri: uri.into(), write_type: WriteType::CacheMode as i32, ..Mount::default() }
}

pub fn name(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

/// Polls a condition until it holds.
pub async fn eventually<F: Future<Output = bool>>(mut holds: impl FnMut() -> F) {
    let poll = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, poll).await.expect("the condition never came to hold");
}

/// A worker table with nothing but ids and states.
pub fn placement_of(workers: &[(u64, WorkerState)]) -> Arc<Placement> {
    let worker = |(id, state): &(u64, WorkerState)| Worker { id: *id, state: *state as i32, ..Worker::default() };
    Arc::new(Placement::new(&WorkerTable { epoch: 1, workers: workers.iter().map(worker).collect() }))
}

/// A number that a variable of the environment has.
pub fn number_from_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("{name}={value} is no number")))
}

/// A counter, by its name without what all of them begin with.
#[track_caller]
pub fn metric(metrics: &MasterMetrics, name: &str) -> u64 {
    let text = metrics.registry.encode().unwrap();
    let value =
        text.lines().find_map(|line| line.strip_prefix("cavern_master_")?.strip_prefix(name)?.strip_prefix(' '));
    value.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
}
