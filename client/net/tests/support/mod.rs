//! Masters in this process that answer as they are told. They know no namespace: what they say when they lead is an
//! empty message, which is a valid one of every type.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::collections::HashMap;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::{BufMut, Bytes, BytesMut};
use cavern_conf::{Config, Interval};
use cavern_proto::raft::{Group, Member};
use cavern_proto::{NotLeading, StatusDetail};
use http_body_util::{BodyExt, Full};
use parking_lot::Mutex;
use prost::Message;
use tokio::sync::watch;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;

/// What a master does with a call that only the leader answers.
#[derive(Clone, Debug)]
pub enum Role {
    Leads,
    /// Answers everything but the probe's question so much later.
    LeadsSlowly(Duration),
    /// Names the one that leads, or nobody.
    Follows(Option<String>),
    /// Takes calls, and answers none until it has another role.
    Hangs,
    /// Refuses what it is asked, as the leader's own answer.
    Refuses(tonic::Code),
    /// Does not know what becomes of what it is asked.
    StopsLeading,
}

/// A master at an address of its own.
pub struct FakeMaster {
    address: String,
    state: Arc<State>,
    server: tokio::task::JoinHandle<()>,
}

struct State {
    role: watch::Sender<Role>,
    /// `None`: of a version that has no groups.
    group: Mutex<Option<Group>>,
    counts: Mutex<HashMap<String, usize>>,
}

impl FakeMaster {
    pub fn start(role: Role) -> Self {
        let incoming = TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = incoming.local_addr().unwrap().to_string();
        let state = State { role: watch::Sender::new(role), group: Mutex::default(), counts: Mutex::default() };
        let state = Arc::new(state);
        let server = Server::builder()
            .add_service(Answers::<Namespace>::of(&state))
            .add_service(Answers::<Cluster>::of(&state))
            .add_service(Answers::<Raft>::of(&state))
            .serve_with_incoming(incoming);
        let server = tokio::spawn(async move { server.await.unwrap() });
        Self { address, state, server }
    }

    pub fn address(&self) -> String {
        self.address.clone()
    }

    pub fn is_now(&self, role: Role) {
        self.state.role.send_replace(role);
    }

    /// What it says of its group: its own id, the leader's, and the members.
    pub fn has_group(&self, node_id: u64, leader: u64, members: &[(u64, String)]) {
        let members = members.iter().map(|(node_id, address)| Member {
            node_id: *node_id,
            address: address.clone(),
            votes: true,
            ..Member::default()
        });
        let group = Group { node_id, leader, members: members.collect(), ..Group::default() };
        *self.state.group.lock() = Some(group);
    }

    /// How often a call was made.
    pub fn count(&self, call: &str) -> usize {
        self.state.counts.lock().get(call).copied().unwrap_or(0)
    }
}

impl Drop for FakeMaster {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl State {
    async fn answer(&self, call: &str) -> Result<Vec<u8>, Status> {
        *self.counts.lock().entry(call.to_owned()).or_default() += 1;
        if call == "GetGroup" {
            let group = self.group.lock().clone();
            return group.map(|group| group.encode_to_vec()).ok_or_else(|| Status::unimplemented("no groups"));
        }
        let mut roles = self.role.subscribe();
        let role = roles.wait_for(|role| !matches!(role, Role::Hangs)).await.unwrap().clone();
        match role {
            Role::LeadsSlowly(pause) if call != "ListWorkers" => {
                tokio::time::sleep(pause).await;
                Ok(Vec::new())
            }
            Role::Leads | Role::LeadsSlowly(_) => Ok(Vec::new()),
            Role::Follows(leader) => Err(NotLeading { leader }.to_status()),
            Role::Refuses(code) => Err(Status::new(code, "refused")),
            Role::StopsLeading => Err(StatusDetail::Unanswered.to_status("it leads no more".to_owned())),
            Role::Hangs => unreachable!("it has another role"),
        }
    }
}

/// One of the services of a master.
struct Answers<S> {
    state: Arc<State>,
    service: std::marker::PhantomData<fn() -> S>,
}

pub struct Namespace;
pub struct Cluster;
pub struct Raft;

impl NamedService for Answers<Namespace> {
    const NAME: &'static str = "cavern.master.v1.Namespace";
}
impl NamedService for Answers<Cluster> {
    const NAME: &'static str = "cavern.master.v1.Cluster";
}
impl NamedService for Answers<Raft> {
    const NAME: &'static str = "cavern.raft.v1.Raft";
}

impl<S> Answers<S> {
    fn of(state: &Arc<State>) -> Self {
        Self { state: state.clone(), service: std::marker::PhantomData }
    }
}

impl<S> Clone for Answers<S> {
    fn clone(&self) -> Self {
        Self::of(&self.state)
    }
}

type Answer = Pin<Box<dyn Future<Output = Result<http::Response<Body>, Infallible>> + Send>>;

impl<S> Service<http::Request<Body>> for Answers<S> {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Answer;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Answer {
        let state = self.state.clone();
        Box::pin(async move {
            let call = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
            Ok(match state.answer(&call).await {
                Ok(message) => answered(&message),
                Err(status) => status.into_http(),
            })
        })
    }
}

/// One message, and the status that ends it.
fn answered(message: &[u8]) -> http::Response<Body> {
    let mut frame = BytesMut::new();
    frame.put_u8(0);
    frame.put_u32(u32::try_from(message.len()).unwrap());
    frame.put_slice(message);
    let mut trailers = http::HeaderMap::new();
    trailers.insert("grpc-status", http::HeaderValue::from_static("0"));
    let body = Full::<Bytes>::new(frame.freeze()).with_trailers(async move { Some(Ok(trailers)) });
    let mut response = http::Response::new(Body::new(body));
    response.headers_mut().insert("content-type", http::HeaderValue::from_static("application/grpc"));
    response
}

/// An address at which nobody listens: its port is taken until the test ends.
pub fn nobody() -> String {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = socket.local_addr().unwrap().to_string();
    std::mem::forget(socket);
    address
}

pub fn config(masters: &[String], timeout: Duration) -> Config {
    let mut config = Config::default();
    config.cluster.masters = masters.to_vec();
    config.client.metadata_timeout = Interval::millis(timeout.as_millis() as u64);
    config
}

/// Waits until `condition` holds; fails after twenty seconds.
pub async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
