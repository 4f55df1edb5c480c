//! Questions about something that takes long, asked again and again, also over the restart of a master.

use std::time::Duration;

use cavern_net::MasterChannel;
use cavern_net::master::Stubs;
use tokio::time::Instant;
use tonic::{Response, Status};

use crate::console;
use crate::error::CliError;

/// Between two questions, and how often a line reports the answer where no bar is drawn.
pub const POLL_PERIOD: Duration = Duration::from_millis(200);
pub const LINE_PERIOD: Duration = Duration::from_secs(2);
/// How long a master may take to answer one question; one that is only slow is asked again.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long no master may answer: a restart, or until somebody starts it again. Each attempt meanwhile looks for one as
/// long as any command does.
const MASTER_PATIENCE: Duration = Duration::from_secs(300);

/// Whoever asks.
pub struct Follower {
    pub masters: MasterChannel,
    /// What goes on with the next master, as a sentence begins with it.
    pub what: &'static str,
}

impl Follower {
    /// The answer of the first master that gives one: each attempt has `answer_timeout` for it, all together
    /// [`MASTER_PATIENCE`].
    ///
    /// # Errors
    /// What a master says, or that none has answered for so long; `goes_on` says what becomes of it then.
    pub async fn ask<T>(
        &self,
        answer_timeout: Duration,
        goes_on: &str,
        request: impl AsyncFn(Stubs) -> Result<Response<T>, Status>,
    ) -> Result<T, CliError> {
        let mut away: Option<Instant> = None;
        loop {
            let asked = self.masters.ask_unary(async |master: Stubs| {
                let answer = request(master).await;
                // Said now: another master is looked for before the call fails.
                if let Err(status) = &answer
                    && let CliError::Unreachable(cause) = CliError::from(status.clone())
                {
                    self.away_since(&mut away, &cause);
                }
                answer
            });
            let answer = tokio::time::timeout(answer_timeout, asked).await;
            let cause = match answer {
                Ok(Ok(answer)) => {
                    if away.is_some() {
                        console::remark("a master answers again");
                    }
                    return Ok(answer);
                }
                Ok(Err(error)) => match CliError::from(error) {
                    CliError::Unreachable(cause) => cause,
                    error => return Err(error),
                },
                Err(_late) => format!("the master does not answer within {} s", answer_timeout.as_secs()),
            };
            if self.away_since(&mut away, &cause).elapsed() >= MASTER_PATIENCE {
                return Err(CliError::Unreachable(format!(
                    "no master has answered for {} s ({cause}): {} {goes_on}",
                    MASTER_PATIENCE.as_secs(),
                    self.what
                )));
            }
            tokio::time::sleep(POLL_PERIOD).await;
        }
    }

    /// Since when no master answers, which is said at the first failure.
    fn away_since(&self, away: &mut Option<Instant>, cause: &str) -> Instant {
        *away.get_or_insert_with(|| {
            console::remark(format_args!("{cause}; waiting for a master, {} goes on when there is one", self.what));
            Instant::now()
        })
    }
}
