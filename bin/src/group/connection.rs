//! The way to one master, and to the one that leads.

use std::time::Duration;

use cavern_conf::Config;
use cavern_net::master::{connected, innermost};
use cavern_proto::NotLeading;
use cavern_proto::raft::Group;
use cavern_proto::raft::raft_client::RaftClient;
use cavern_security::Transport;
use tokio::time::Instant;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use super::leader::is_unanswered;
use crate::console;
use crate::error::CliError;

/// Between pings, and how long one may stay unanswered: taking a master in may last long, silence must not.
const KEEP_ALIVE: Duration = Duration::from_secs(2);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(5);
/// An election takes a part of this.
pub const ELECTION_PATIENCE: Duration = Duration::from_secs(10);
pub const ELECTION_POLL: Duration = Duration::from_millis(100);

/// How masters are connected to, each by itself.
#[derive(Clone)]
pub struct Dial {
    /// To be connected; for an answer there is as long again.
    pub wait: Duration,
    transport: Transport,
}

impl Dial {
    /// As a configuration has it.
    ///
    /// # Errors
    /// A file of `[security]` is not usable.
    pub fn of(config: &Config) -> Result<Self, CliError> {
        let transport = Transport::of(config).map_err(|error| CliError::Usage(error.to_string()))?;
        Ok(Self { wait: config.client.connect_timeout.get(), transport })
    }

    /// How connections are made.
    pub fn transport(&self) -> &Transport {
        &self.transport
    }

    /// Connects to the master at an address.
    ///
    /// # Errors
    /// The cause, as the system has it.
    pub async fn connect(&self, address: &str) -> Result<RaftClient<Channel>, String> {
        let endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(|error| innermost(&error))?;
        let endpoint = endpoint
            .connect_timeout(self.wait)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(KEEP_ALIVE_TIMEOUT);
        let channel = connected(&endpoint, &self.transport).await;
        channel.map(RaftClient::new).map_err(|error| innermost(&error))
    }
}

/// Why a master did not answer a question that any of them answers.
pub fn cause(status: &Status) -> String {
    match (status.code(), std::error::Error::source(status)) {
        (Code::Unimplemented, _) => "it is of a version that knows no groups of masters".to_owned(),
        (_, Some(source)) => innermost(source),
        _ if status.message().is_empty() => format!("{:?}", status.code()),
        _ => status.message().to_owned(),
    }
}

/// What a command says of a master that it needs.
pub fn unreachable(address: &str, cause: &str) -> CliError {
    CliError::Unreachable(format!("the master at {address} does not answer ({cause}): is it running?"))
}

/// Sends a request to the master that leads, whoever that is by then: one that does not has done nothing of it, and
/// names the leader. Begins with the one at `first`. `None` when no answer came: it may be done.
pub async fn ask_leader<T>(
    first: String,
    dial: &Dial,
    request: impl AsyncFn(&mut RaftClient<Channel>) -> Result<tonic::Response<T>, Status>,
) -> Result<Option<T>, CliError> {
    let deadline = Instant::now() + ELECTION_PATIENCE;
    let mut address = first;
    loop {
        let mut client = dial.connect(&address).await.map_err(|cause| unreachable(&address, &cause))?;
        let status = match request(&mut client).await {
            Ok(reply) => return Ok(Some(reply.into_inner())),
            Err(status) => status,
        };
        let Some(NotLeading { leader }) = NotLeading::from_status(&status) else {
            return if is_unanswered(&status) { Ok(None) } else { Err(status.into()) };
        };
        if Instant::now() > deadline {
            return Err(status.into());
        }
        // Two that name each other do not agree yet, either.
        tokio::time::sleep(ELECTION_POLL).await;
        address = leader.unwrap_or(address);
    }
}

/// Says who may not know a master that was taken in.
pub fn remark_unaware(group: &Group) {
    if !group.unaware.is_empty() {
        console::remark(format_args!(
            "these have not said that they know the new master, and may not find it should the others fail now: {}. \
             They are told again each second; restart what stays without a connection",
            group.unaware.join(", ")
        ));
    }
}

/// What becomes of an attempt at a change of the group, of which the answer may be lost.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Attempt {
    First,
    /// An earlier one had no answer: what is found may be its work.
    Again,
}

/// Makes attempts until one is answered, or fails; after the first that was not, until the next leader is known, and a
/// while longer.
pub async fn until_answered<T>(
    mut attempt: impl AsyncFnMut(Attempt) -> Result<Option<T>, CliError>,
) -> Result<T, CliError> {
    let mut deadline: Option<Instant> = None;
    loop {
        let which = if deadline.is_some() { Attempt::Again } else { Attempt::First };
        let error = match attempt(which).await {
            Ok(Some(done)) => return Ok(done),
            Ok(None) => CliError::Unreachable(
                "the connection to the master broke, and it is not known what was done: see `cv raft status`".into(),
            ),
            Err(error @ CliError::Unreachable(_)) if which == Attempt::Again => error,
            Err(error) => return Err(error),
        };
        if Instant::now() > *deadline.get_or_insert_with(|| Instant::now() + ELECTION_PATIENCE) {
            return Err(error);
        }
        tokio::time::sleep(ELECTION_POLL).await;
    }
}
