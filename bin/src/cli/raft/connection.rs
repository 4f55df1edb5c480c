//! The way to one master, and to the one that leads.

use std::time::Duration;

use cavern_conf::{Config, backoff};
use cavern_net::MasterChannel;
use cavern_net::master::{Stubs, innermost};
use cavern_security::Transport;
use tokio::time::Instant;
use tonic::{Code, Response, Status};

use crate::error::CliError;

/// An election takes a part of this.
pub const ELECTION_PATIENCE: Duration = Duration::from_secs(10);

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
    pub async fn connect(&self, address: &str) -> Result<Stubs, String> {
        Stubs::connect(address, self.wait, &self.transport).await
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

/// Sends a request to the master that leads, once; it begins at the one that led last. `None` when no answer came: it
/// may be done.
pub async fn ask_leader<T>(
    masters: &MasterChannel,
    request: impl AsyncFnMut(Stubs) -> Result<Response<T>, Status>,
) -> Result<Option<T>, CliError> {
    Ok(masters.ask_once(ELECTION_PATIENCE, request).await?.map(Response::into_inner))
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
pub async fn until_answered(
    mut attempt: impl AsyncFnMut(Attempt) -> Result<Option<()>, CliError>,
) -> Result<(), CliError> {
    let (mut backoff, mut deadline) = (backoff::MASTER.begin(), None::<Instant>);
    loop {
        let which = if deadline.is_some() { Attempt::Again } else { Attempt::First };
        let error = match attempt(which).await {
            Ok(Some(())) => return Ok(()),
            Ok(None) => CliError::Unreachable(
                "the connection to the master broke, and it is not known what was done: see `cv raft status`".into(),
            ),
            Err(error @ CliError::Unreachable(_)) if which == Attempt::Again => error,
            Err(error) => return Err(error),
        };
        let deadline = *deadline.get_or_insert_with(|| Instant::now() + ELECTION_PATIENCE);
        if !backoff.wait_before(deadline).await {
            return Err(error);
        }
    }
}
