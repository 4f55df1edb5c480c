//! What is between the masters, and below them: a network that delays and loses messages and falls apart, disks that
//! take their time, fail, and forget what was not synced, and clocks that are wrong.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use cavern_proto::raft::raft_server::RaftServer;
use cavern_state::Database;
use futures::FutureExt;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use rocksdb::WriteBatch;
use tokio::task::{AbortHandle, JoinHandle, yield_now};
use tokio::time::{Instant, sleep};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{Service as _, http};
use tonic::transport::Channel;

use super::history::History;
use super::runtime::Chance;
use super::service::Service;
use crate::error::ConsensusError;
use crate::types::NodeId;

/// After this a message that was lost is known to be: the connection is.
const LOST: Duration = Duration::from_secs(2);

type BoxError = Box<dyn Error + Send + Sync>;

tokio::task_local! {
    static HOST: Arc<Host>;
}

/// Everything of one run.
pub struct World {
    pub chance: Mutex<Chance>,
    pub links: Mutex<Links>,
    pub history: Mutex<History>,
    /// What the masters that run answer other masters with.
    servers: Mutex<BTreeMap<NodeId, Server>>,
    begin: Instant,
}

/// A process that listens.
type Server = (Arc<Host>, RaftServer<Service>);

/// How the network is. Clients have numbers, too, from [`Links::CLIENTS`] on.
#[derive(Debug, Default)]
pub struct Links {
    /// From whom to whom nothing goes.
    pub cut: BTreeSet<(NodeId, NodeId)>,
    /// Messages of a thousand that are lost.
    pub lost: u64,
    /// Most that a message takes, in milliseconds.
    pub slowest: u64,
}

impl Links {
    pub const CLIENTS: NodeId = 100;
}

impl World {
    pub fn new(seed: u64) -> Arc<Self> {
        let links = Links { slowest: 3, ..Links::default() };
        Arc::new(Self {
            chance: Mutex::new(Chance::new(seed)),
            links: Mutex::new(links),
            history: Mutex::default(),
            servers: Mutex::default(),
            begin: Instant::now(),
        })
    }

    pub fn begin(&self) -> Instant {
        self.begin
    }

    /// Since the begin, in milliseconds.
    pub fn now_ms(&self) -> u64 {
        self.begin.elapsed().as_millis() as u64
    }

    /// Returns when a message is there.
    ///
    /// # Errors
    /// When it is lost.
    pub async fn carry(&self, from: NodeId, to: NodeId) -> Result<(), Status> {
        let (took, is_lost) = {
            let (mut chance, links) = (self.chance.lock(), self.links.lock());
            let took = chance.millis(0, links.slowest);
            (took, chance.permille(links.lost))
        };
        sleep(took).await;
        if is_lost || self.links.lock().cut.contains(&(from, to)) {
            sleep(LOST).await;
            return Err(Status::unavailable("the message was lost"));
        }
        Ok(())
    }

    pub fn open(&self, host: Arc<Host>, service: Service) {
        self.servers.lock().insert(host.id, (host, RaftServer::new(service)));
    }

    /// The process is gone.
    pub fn close(&self, id: NodeId) {
        let closed = self.servers.lock().remove(&id);
        drop(closed);
    }

    async fn call(
        &self,
        from: NodeId,
        to: NodeId,
        request: http::Request<Body>,
    ) -> Result<http::Response<Body>, BoxError> {
        self.carry(from, to).await?;
        let server = self.servers.lock().get(&to).cloned();
        let (host, mut server) = server.ok_or_else(|| Status::unavailable("nobody listens there"))?;
        let answer = host.spawn(async move { server.call(request).await }).await;
        let answer = answer.map_err(|_killed| Status::unavailable("the connection broke"))?;
        let answer = answer.map_err(|never| match never {})?;
        self.carry(to, from).await?;
        Ok(answer)
    }
}

/// One life of one master: its tasks end with it.
pub struct Host {
    pub id: NodeId,
    pub world: Arc<World>,
    pub begin: Instant,
    /// How fast its clock runs.
    pub pace: f64,
    pub disk: Mutex<Disk>,
    tasks: Mutex<Vec<AbortHandle>>,
}

/// The disk of a master.
#[derive(Clone, Debug, Default)]
pub struct Disk {
    directory: PathBuf,
    /// Most that a sync takes, in milliseconds.
    pub slowest: u64,
    /// No write succeeds any more.
    pub is_broken: bool,
    /// It says that it has synced, and has not.
    pub lies: bool,
    /// The file that RocksDB logs to, and how much of it would survive a loss of power.
    synced: Option<(PathBuf, u64)>,
}

impl Disk {
    pub fn new(directory: PathBuf) -> Self {
        Self { directory, slowest: 1, ..Self::default() }
    }

    /// Everything that was written survives.
    pub fn note_synced(&mut self) {
        self.synced = newest_log(&self.directory);
    }

    /// The power fails: of what was not synced, only the first part is there afterwards. The database must be closed.
    pub fn lose_power(&mut self, chance: &mut Chance) {
        let Some((newest, length)) = newest_log(&self.directory) else { return };
        let synced = self.synced.as_ref().filter(|(path, _)| *path == newest).map_or(0, |(_, length)| *length);
        let kept = synced + chance.below(length.saturating_sub(synced) + 1);
        let file = std::fs::File::options().write(true).open(&newest).expect("the log of the database");
        file.set_len(kept.min(length)).expect("the log of the database is cut");
    }
}

/// The file that RocksDB logs to, and its length.
fn newest_log(directory: &Path) -> Option<(PathBuf, u64)> {
    let files = std::fs::read_dir(cavern_state::current::directory(directory).ok()?).ok()?;
    let paths = files.filter_map(|file| Some(file.ok()?.path()));
    let newest = paths.filter(|path| path.extension().is_some_and(|extension| extension == "log")).max()?;
    let length = std::fs::metadata(&newest).ok()?.len();
    Some((newest, length))
}

impl Host {
    pub fn new(world: &Arc<World>, id: NodeId, pace: f64, disk: Disk) -> Arc<Self> {
        let (disk, tasks) = (Mutex::new(disk), Mutex::default());
        Arc::new(Self { id, world: world.clone(), begin: world.begin, pace, disk, tasks })
    }

    /// The host on which this runs, if that is simulated.
    pub fn current() -> Option<Arc<Self>> {
        HOST.try_with(Clone::clone).ok()
    }

    /// Does something on it, at once.
    pub fn within<T>(self: &Arc<Self>, work: impl FnOnce() -> T) -> T {
        HOST.sync_scope(self.clone(), work)
    }

    /// Runs a task on it.
    pub fn spawn<F>(self: &Arc<Self>, task: F) -> JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        let handle = tokio::spawn(HOST.scope(self.clone(), task));
        let mut tasks = self.tasks.lock();
        if tasks.len() >= 64 && tasks.len().is_power_of_two() {
            tasks.retain(|task| !task.is_finished());
        }
        tasks.push(handle.abort_handle());
        handle
    }

    /// Ends all that runs on it, at once, wherever it is.
    pub async fn kill(&self) {
        self.world.close(self.id);
        loop {
            let tasks = std::mem::take(&mut *self.tasks.lock());
            if tasks.is_empty() {
                return;
            }
            tasks.iter().for_each(AbortHandle::abort);
            while tasks.iter().any(|task| !task.is_finished()) {
                yield_now().await;
            }
        }
    }

    /// Between two steps of taking a snapshot in, of which there are so many more.
    pub async fn between_steps(&self, left: usize) {
        if left == 2 {
            self.world.history.lock().installations.0 += 1;
        }
        let pause = self.world.chance.lock().millis(0, 300);
        sleep(pause).await;
    }

    /// A pause of the process, now and then.
    pub async fn stand_still(&self) {
        let pause = {
            let mut chance = self.world.chance.lock();
            chance.permille(20).then(|| chance.millis(1, 1500))
        };
        if let Some(pause) = pause {
            sleep(pause).await;
        }
    }

    /// The way to another master.
    pub fn way_to(self: Arc<Self>, address: &str) -> Transport {
        let to = address.strip_prefix("master-").and_then(|rest| rest.split(':').next()?.parse().ok());
        Transport::Simulated { world: self.world.clone(), from: self.id, to: to.unwrap_or(0) }
    }

    /// Writes, and returns when it is on disk.
    pub async fn write_synced(&self, database: &Database, batch: WriteBatch) -> Result<(), ConsensusError> {
        let broken = || ConsensusError::Unavailable("the disk is broken".into());
        let (took, lies) = {
            let (mut chance, disk) = (self.world.chance.lock(), self.disk.lock());
            if disk.is_broken {
                return Err(broken());
            }
            (chance.millis(0, disk.slowest), disk.lies)
        };
        database.write(batch)?;
        sleep(took).await;
        let mut disk = self.disk.lock();
        if disk.is_broken {
            return Err(broken());
        }
        if !lies {
            disk.note_synced();
        }
        Ok(())
    }
}

/// The address of a master.
pub fn address(id: NodeId) -> String {
    format!("master-{id}:1")
}

/// What carries calls between masters in tests.
#[derive(Clone)]
pub enum Transport {
    Network(Channel),
    Simulated { world: Arc<World>, from: NodeId, to: NodeId },
}

impl tonic::codegen::Service<http::Request<Body>> for Transport {
    type Response = http::Response<Body>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Self::Response, BoxError>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        match self {
            Self::Network(channel) => channel.poll_ready(context).map_err(Into::into),
            Self::Simulated { .. } => Poll::Ready(Ok(())),
        }
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        match self {
            Self::Network(channel) => channel.call(request).map(|answer| answer.map_err(Into::into)).boxed(),
            Self::Simulated { world, from, to } => {
                let (world, from, to) = (world.clone(), *from, *to);
                async move { world.call(from, to, request).await }.boxed()
            }
        }
    }
}
