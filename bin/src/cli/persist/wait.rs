//! Waits until the bucket has what was in the namespace when the wait began, also over the restart of a master.

use std::time::Duration;

use cavern_net::MasterChannel;
use cavern_net::master::Stubs;
use cavern_proto::master::{PersistStatus, PersistStatusRequest};
use tokio::time::Instant;
use tonic::Response;

use super::BacklogView;
use crate::cli::connect::ask_patiently;
use crate::console::{self, Progress};
use crate::error::CliError;

/// How often the backlog is asked for, and how often a line reports it where no bar is drawn.
const POLL_PERIOD: Duration = Duration::from_millis(200);
const LINE_PERIOD: Duration = Duration::from_secs(2);
/// How long a master may take to answer one question.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// The same of the first, before which clients are waited for: for some of their leases.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(120);

pub struct Wait {
    pub masters: MasterChannel,
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
        let mut progress = if self.json { Progress::hidden() } else { Progress::new()? };
        let settling = timeout.map_or(SETTLE_TIMEOUT, |timeout| timeout.min(SETTLE_TIMEOUT));
        let first = self.ask(0, settling).await?;
        // What is changed from here on is not waited for.
        let up_to = first.change;
        let mut view = BacklogView::new(&self.path, first);
        let mut most = 0;
        let mut said = Instant::now();
        while view.left() > 0 {
            most = most.max(view.left());
            let text =
                format!("{} of {most}, {} left{}", most - view.left(), console::size(view.bytes), error_of(&view));
            progress.show(Some((most - view.left(), most)), text)?;
            if progress.is_hidden() && said.elapsed() >= LINE_PERIOD {
                said = Instant::now();
                self.say(&view)?;
            }
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
        self.say(&view)
    }

    fn say(&self, view: &BacklogView) -> Result<(), CliError> {
        if self.json { console::json_line(view) } else { console::line(view.line()) }
    }

    /// The backlog of changes up to a number.
    async fn ask(&self, up_to_change: u64, answer_timeout: Duration) -> Result<PersistStatus, CliError> {
        // Clients bring what they have answered, and one that is cut off is waited for.
        let settle = up_to_change == 0;
        let request = PersistStatusRequest { path: self.path.clone(), up_to_change, settle };
        let ask = async |mut master: Stubs| master.cluster.get_persist_status(request.clone()).await;
        ask_patiently(&self.masters, answer_timeout, "persistence", ask).await.map(Response::into_inner)
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
