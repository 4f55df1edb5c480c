//! Waits until the bucket has what was in the namespace when the wait began, also over the restart of a master.

use std::time::Duration;

use cavern_net::master::Stubs;
use cavern_proto::master::{PersistStatus, PersistStatusRequest};
use tokio::time::Instant;

use super::BacklogView;
use crate::cli::follow::{ANSWER_TIMEOUT, Follower, LINE_PERIOD, POLL_PERIOD};
use crate::console::{self, Progress};
use crate::error::CliError;

/// How long a master may take for the first answer, before which clients are waited for: for some of their leases.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(120);

pub struct Wait {
    pub follower: Follower,
    pub path: String,
    pub json: bool,
}

impl Wait {
    /// Waits, for `timeout` at most.
    ///
    /// # Errors
    /// The time is over, nothing is left but files that have lost blocks, there is no such path, or no master answered
    /// for long.
    pub async fn run(self, timeout: Option<Duration>) -> Result<(), CliError> {
        let began = Instant::now();
        let mut progress = Progress::new_unless(self.json)?;
        let settling = timeout.map_or(SETTLE_TIMEOUT, |timeout| timeout.min(SETTLE_TIMEOUT));
        let first = self.ask(0, settling).await?;
        // What is changed from here on is not waited for.
        let up_to = first.change;
        let mut view = BacklogView::new(&self.path, first);
        let mut most = 0;
        while view.left() > 0 {
            most = most.max(view.left());
            let text =
                format!("{} of {most}, {} left{}", most - view.left(), console::size(view.bytes), error_of(&view));
            progress.show_or_say(Some((most - view.left(), most)), text, LINE_PERIOD, || view.say(self.json))?;
            if view.lost_files == view.left() {
                drop(progress);
                return Err(CliError::Failed(lost_only(&view)));
            }
            if timeout.is_some_and(|timeout| began.elapsed() >= timeout) {
                drop(progress);
                return Err(CliError::Failed(format!(
                    "the time is over; {}; `cv persist status {}` tells how it goes on",
                    view.line(),
                    self.path
                )));
            }
            tokio::time::sleep(POLL_PERIOD).await;
            let status = self.ask(up_to, ANSWER_TIMEOUT).await?;
            view = BacklogView::new(&self.path, status);
        }
        drop(progress);
        view.say(self.json)
    }

    /// The backlog of changes up to a number, or of those that there are now.
    async fn ask(&self, up_to_change: u64, timeout: Duration) -> Result<PersistStatus, CliError> {
        // Clients bring what they have answered, and one that is cut off is waited for.
        let settle = up_to_change == 0;
        let request = PersistStatusRequest { path: self.path.clone(), up_to_change, settle };
        let ask = async |mut master: Stubs| master.cluster.get_persist_status(request.clone()).await;
        self.follower.ask(timeout, "goes on when one is started", ask).await
    }
}

/// Why waiting any longer makes no sense.
fn lost_only(view: &BacklogView) -> String {
    let files = match view.lost_files {
        1 => "1 file has".to_owned(),
        files => format!("{files} files have"),
    };
    let more = match view.lost_files.saturating_sub(view.lost.len() as u64) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!(
        "{files} lost blocks before the bucket had them, and nothing else is left to be written: {}{more}. The workers \
         of these blocks are there and have not got them. `cv persist retry PATH` tries once more; `cv persist drop \
         PATH` takes the file back to the version that the bucket has, or fills the lost blocks with zeros",
        view.lost.join(", ")
    )
}

fn error_of(view: &BacklogView) -> String {
    if view.last_error.is_empty() { String::new() } else { format!(", {}", view.last_error) }
}
