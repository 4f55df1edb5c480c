//! The way to one master, whether it leads or not.

use std::time::Duration;

use cavern_conf::Config;
use cavern_net::master::{Stubs, innermost};
use cavern_security::Transport;
use tonic::{Code, Status};

use crate::error::CliError;

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
