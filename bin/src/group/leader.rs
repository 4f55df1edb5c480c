//! The master that leads, asked by a command.
//!
//! A command outlives its master. Where no answer comes, or the master leads no more, the one that does is looked for
//! and asked the same again, for as long as a call may take (`client.metadata_timeout`). So each request here is one
//! that may be sent twice: it reads, or does nothing the second time, or has an id (`new_request_id`).

use std::time::Duration;

use bytes::Bytes;
use cavern_conf::{Config, host};
use cavern_net::master::Stubs;
use cavern_proto::{NotLeading, StatusMark};
use tokio::time::Instant;
use tonic::{Response, Status};

use crate::error::CliError;

/// Between two looks for a leader.
const PAUSE: Duration = Duration::from_millis(100);

/// The id of a request: whoever sends it again with the same id is told what the first one did.
pub fn new_request_id() -> Bytes {
    Bytes::copy_from_slice(&host::random_id())
}

/// See the module.
pub struct Leader {
    config: Config,
    stubs: Stubs,
}

impl Leader {
    pub async fn connect(config: Config) -> Result<Self, CliError> {
        let stubs = Stubs::connect(&config).await?;
        Ok(Self { config, stubs })
    }

    /// The stubs of the master that led last.
    pub fn into_stubs(self) -> Stubs {
        self.stubs
    }

    /// Asks for one answer, as [`Self::ask`] does.
    pub async fn call<T>(
        &mut self,
        mut request: impl AsyncFnMut(Stubs) -> Result<Response<T>, Status>,
    ) -> Result<T, CliError> {
        self.ask(async |master: Stubs| request(master).await.map(Response::into_inner)).await
    }

    /// Asks until a master that leads has answered.
    ///
    /// # Errors
    /// What it answered; or that none did for `client.metadata_timeout`.
    pub async fn ask<T>(&mut self, mut request: impl AsyncFnMut(Stubs) -> Result<T, Status>) -> Result<T, CliError> {
        let patience = self.config.client.metadata_timeout.get();
        let mut alone_since: Option<Instant> = None;
        loop {
            let asked = Instant::now();
            let status = match request(self.stubs.clone()).await {
                Ok(answer) => return Ok(answer),
                Err(status) if is_unanswered(&status) => status,
                Err(status) => return Err(status.into()),
            };
            // One that has worked on it for so long led until now.
            let since = *alone_since.get_or_insert_with(Instant::now);
            let since = if asked.elapsed() > patience { Instant::now() } else { since };
            alone_since = Some(since);
            loop {
                if since.elapsed() >= patience {
                    return Err(status.into());
                }
                tokio::time::sleep(PAUSE).await;
                // One that cannot be reached yet is tried again.
                if let Ok(stubs) = Stubs::connect(&self.config).await {
                    self.stubs = stubs;
                    break;
                }
            }
        }
    }
}

/// Whether it is not known what became of a request, or nothing did.
pub fn is_unanswered(status: &Status) -> bool {
    std::error::Error::source(status).is_some()
        || NotLeading::from_status(status).is_some()
        || StatusMark::Unanswered.is_on(status)
}
