//! Questions about something that takes long, asked again and again, also over the restart of a master.

use std::time::Duration;

use cavern_net::master::Stubs;
use tokio::time::Instant;
use tonic::{Response, Status};

use super::connect::ClusterArgs;
use crate::console;
use crate::error::CliError;

/// Between two questions, and how often a line reports the answer where no bar is drawn.
pub const POLL_PERIOD: Duration = Duration::from_millis(200);
pub const LINE_PERIOD: Duration = Duration::from_secs(2);
/// How long a master may take to answer one question; one that is only slow is asked again.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long no master may answer: a restart, or until somebody starts it again.
const MASTER_PATIENCE: Duration = Duration::from_secs(300);

/// Whoever asks.
pub struct Follower {
    pub cluster: ClusterArgs,
    pub connection: Stubs,
    /// What goes on with the next master, as a sentence begins with it.
    pub what: &'static str,
}

impl Follower {
    /// The answer of the first master that gives one: each has `timeout` for it, all together [`MASTER_PATIENCE`].
    ///
    /// # Errors
    /// What a master says, or that none has answered for so long; `goes_on` says what becomes of it then.
    pub async fn ask<T>(
        &mut self,
        timeout: Duration,
        goes_on: &str,
        mut request: impl AsyncFnMut(Stubs) -> Result<Response<T>, Status>,
    ) -> Result<T, CliError> {
        let mut away: Option<Instant> = None;
        loop {
            let cause = match tokio::time::timeout(timeout, request(self.connection.clone())).await {
                Ok(Ok(answer)) => {
                    if away.is_some() {
                        console::remark("a master answers again");
                    }
                    return Ok(answer.into_inner());
                }
                Ok(Err(status)) => match CliError::from(status) {
                    CliError::Unreachable(cause) => cause,
                    error => return Err(error),
                },
                Err(_) => format!("the master does not answer within {} s", timeout.as_secs()),
            };
            let since = *away.get_or_insert_with(|| {
                console::remark(format_args!("{cause}; waiting for a master, {} goes on when there is one", self.what));
                Instant::now()
            });
            if since.elapsed() >= MASTER_PATIENCE {
                return Err(CliError::Unreachable(format!(
                    "no master has answered for {} s ({cause}): {} {goes_on}",
                    MASTER_PATIENCE.as_secs(),
                    self.what
                )));
            }
            tokio::time::sleep(POLL_PERIOD).await;
            // One that cannot be reached yet is tried again with the next round.
            if let Ok(connection) = self.cluster.connect().await {
                self.connection = connection;
            }
        }
    }
}
