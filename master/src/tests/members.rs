//! Several masters in one process, each with a directory and an address of its own.

use std::sync::Arc;

use cavern_conf::{Config, schema};
use cavern_consensus::Clock;
use cavern_proto::raft::raft_client::RaftClient;
use cavern_proto::raft::{GetGroupRequest, Group, TransferLeadershipRequest};
use cavern_security::AuditLog;
use cavern_work::metrics::MasterMetrics;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use super::harness::{NoWorkers, eventually, mount_request, new_bucket};
use crate::error::MasterError;
use crate::leader_state::LeaderState;
use crate::server::Master;

/// One of several masters, or its place in a directory while it does not run.
pub struct Member {
    pub dir: TempDir,
    pub address: String,
    pub running: Option<Master>,
    pub settings: schema::Master,
    /// Of all its lives.
    pub metrics: MasterMetrics,
}

impl Member {
    fn config(&self, masters: &[String]) -> Config {
        let mut config = Config { master: self.settings.clone(), ..Config::default() };
        config.cluster.masters = masters.to_vec();
        config.master.advertise.clone_from(&self.address);
        config.master.data_dir = self.dir.path().join("master");
        config.ufs.retries = 0;
        config
    }

    /// Starts it at its address; the task ends when it is ready.
    pub async fn start(&self, masters: &[String]) -> JoinHandle<Result<Option<Master>, MasterError>> {
        self.start_until(masters, CancellationToken::new()).await
    }

    /// The same, unless it is stopped before.
    pub async fn start_until(
        &self,
        masters: &[String],
        stop: CancellationToken,
    ) -> JoinHandle<Result<Option<Master>, MasterError>> {
        let grpc = bind(&self.address).await;
        let (config, clock, metrics) = (self.config(masters), Clock::default(), self.metrics.clone());
        let audit = AuditLog::default();
        tokio::spawn(async move { Master::start(config, grpc, Arc::new(NoWorkers), clock, metrics, audit, stop).await })
    }

    pub async fn calls(&self) -> RaftClient<Channel> {
        RaftClient::connect(format!("http://{}", self.address)).await.unwrap()
    }

    pub async fn group(&self) -> Group {
        self.calls().await.get_group(GetGroupRequest {}).await.unwrap().into_inner()
    }

    pub fn term(&self) -> Option<Arc<LeaderState>> {
        self.running.as_ref()?.election.term()
    }
}

/// A free port stays free for a while: nobody else is given it at once.
async fn bind(address: &str) -> TcpListener {
    let mut bound = None;
    eventually(|| {
        let attempt = std::net::TcpListener::bind(address).ok();
        if let Some(listener) = attempt {
            listener.set_nonblocking(true).unwrap();
            bound = Some(TcpListener::from_std(listener).unwrap());
        }
        let is_bound = bound.is_some();
        async move { is_bound }
    })
    .await;
    bound.unwrap()
}

pub fn member() -> Member {
    member_with(schema::Master::default())
}

fn member_with(settings: schema::Master) -> Member {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap().to_string();
    let (dir, metrics) = (tempfile::tempdir().unwrap(), MasterMetrics::default());
    Member { dir, address, running: None, settings, metrics }
}

/// A group of that many masters.
pub async fn group(count: usize) -> Vec<Member> {
    group_with(count, schema::Master::default()).await
}

/// The same with other settings than the default.
pub async fn group_with(count: usize, settings: schema::Master) -> Vec<Member> {
    started((0..count).map(|_| member_with(settings.clone())).collect()).await
}

/// These, as a group.
pub async fn started(mut members: Vec<Member>) -> Vec<Member> {
    let masters = addresses(&members);
    let mut starting = Vec::new();
    for member in &members {
        starting.push(member.start(&masters).await);
    }
    for (member, started) in members.iter_mut().zip(starting) {
        member.running = started.await.unwrap().unwrap();
    }
    members
}

pub fn addresses(members: &[Member]) -> Vec<String> {
    members.iter().map(|member| member.address.clone()).collect()
}

/// Which of them leads, once one does.
pub async fn leader(members: &[Member]) -> usize {
    let mut leads = None;
    eventually(|| {
        leads = members.iter().position(|member| member.term().is_some());
        std::future::ready(leads.is_some())
    })
    .await;
    leads.unwrap()
}

/// Has one of them lead. On a busy machine others may be elected meanwhile: it is tried until it does.
pub async fn have_lead(members: &[Member], next: usize) {
    let node_id = members[next].group().await.node_id;
    eventually(|| async {
        let leading = members.iter().find(|member| member.term().is_some());
        if let Some(leading) = leading.filter(|_| members[next].term().is_none()) {
            let _refused = leading.calls().await.transfer_leadership(TransferLeadershipRequest { node_id }).await;
        }
        members[next].term().is_some()
    })
    .await;
}

pub async fn stop(members: Vec<Member>) {
    // The leader last: nobody else needs to be elected for a moment.
    let (leaders, others): (Vec<_>, Vec<_>) = members.into_iter().partition(|member| member.term().is_some());
    for member in others.into_iter().chain(leaders) {
        if let Some(master) = member.running {
            master.stop().await;
        }
    }
}

/// How many mounts, which stand for anything, a master that leads has applied.
pub async fn mounts(member: &Member) -> usize {
    let term = member.term().unwrap();
    term.services.lookups.reader.read(|tables| Ok(tables.mounts()?.len())).await.unwrap()
}

pub async fn mount(member: &Member, path: &str) {
    let request = mount_request(path, &new_bucket().1);
    member.term().unwrap().services.mount_bucket(request, false).await.unwrap();
}
