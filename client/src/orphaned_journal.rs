//! What a mount leaves behind when all of its processes die at once: its journal, which the worker of the host keeps.
//!
//! A process that mounts nothing takes up the session as a successor would. It sends what was answered and is not made,
//! under its numbers, returns the directories delegated to the session, and commits what was written. The session is
//! left to end as that of any dead client. The process may die, too: another one does the same, and finds in the
//! journal how far this one came. Only while the session lasts: when that is over others may have changed what it is
//! about.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cavern_conf::Config;
use cavern_net::NetError;
use cavern_net::journals::wait_for_replays;
use futures::future::join_all;
use tokio::time::timeout;
use tracing::{debug, info, warn};

use crate::error::ClientError;
use crate::fs_file::FsFile;
use crate::identity::Identity;
use crate::journal::{Journal, Unreplayed};
use crate::metadata::NoSink;
use crate::session::{Client, Predecessor};

/// Whoever mounts at the place of a dead mount waits so long for what that has left behind: for several attempts, and
/// for less than those wait who start a process.
const REPLAYS_WAIT: Duration = Duration::from_secs(15);
/// After so long a log says what is waited for.
const REPLAYS_NOTICE: Duration = Duration::from_secs(1);

/// What became of what a mount had left behind.
#[derive(Debug)]
pub enum Replayed {
    /// It is made, but for what was refused.
    Made { left: Unreplayed, refused: Vec<ClientError> },
    /// The session is over: it never will be.
    SessionOver(Unreplayed),
}

/// Makes what a mount had answered whose processes are dead. To be called by a process that ends afterwards. Bounded by
/// some `client.metadata_timeout`.
///
/// # Errors
/// It is not all made, and may be by another attempt as long as the session lasts.
pub async fn replay(config: &Config, name: &str, journal: Arc<Journal>) -> Result<Replayed, ClientError> {
    let (left, session) = (journal.left(), journal.session().0);
    // Without a place: what has begun there meanwhile is not to end.
    let who = Identity::from(name);
    let predecessor = Predecessor { journal: Arc::clone(&journal), open: Vec::new(), begin: Box::new(|_| {}) };
    let kept = Some(Arc::clone(&journal));
    let client = Client::connect_with(config, who, Arc::new(NoSink), kept, Some(predecessor)).await?;
    let result = client.replay_in(session).await?;
    journal.end();
    match result {
        // The session ends with its lease, or by whoever mounts at its place: to that one it is over, with its locks,
        // when its own begins. One that says goodbye ends a moment after that.
        Some(refused) => Ok(Replayed::Made { left, refused }),
        None => {
            client.shutdown().await;
            Ok(Replayed::SessionOver(left))
        }
    }
}

impl Client {
    /// Waits until the workers of this host have nothing left to replay of a place. Bounded by [`REPLAYS_WAIT`].
    pub(crate) async fn await_replays(&self, place: &str) {
        let membership = self.workers();
        let with_sockets = membership.workers().iter().filter(|worker| !worker.socket_path.is_empty());
        join_all(with_sockets.map(|worker| await_replay(worker.id, Path::new(&worker.socket_path), place))).await;
    }

    /// Makes what is left in the journal, in this session alone; gives what was refused, or `None` when the session is
    /// over.
    async fn replay_in(&self, session: u64) -> Result<Option<Vec<ClientError>>, ClientError> {
        let is_over = || self.metadata().session() != session;
        if is_over() {
            return Ok(None);
        }
        self.metadata().stop_write_back();
        let mut failed = self.metadata().failed_replays().await;
        if is_over() {
            return Ok(None);
        }
        let recovered = self.contents().recover().await;
        failed.extend(recovered.errors);
        let (mut refused, mut unfinished): (Vec<_>, Vec<_>) = failed.into_iter().partition(is_final);
        // Many at a time; what is left says why.
        self.contents().commit_all().await;
        for file in recovered.files.iter().filter(|file| !file.is_committed()) {
            let Err(error) = FsFile::commit(file).await else { continue };
            // What the master never takes is given up.
            if is_final(&error) || file.is_committed() { refused.push(error) } else { unfinished.push(error) }
        }
        if is_over() {
            return Ok(None);
        }
        match unfinished.into_iter().next() {
            Some(error) => Err(error),
            None => Ok(Some(refused)),
        }
    }
}

async fn await_replay(worker: u64, socket: &Path, place: &str) {
    let replay = wait_for_replays(socket, place);
    tokio::pin!(replay);
    let mut waited = timeout(REPLAYS_NOTICE, &mut replay).await;
    if waited.is_err() {
        info!(worker, "the worker of this host is waited for: it may have what the mount before had answered last");
        waited = timeout(REPLAYS_WAIT - REPLAYS_NOTICE, replay).await;
    }
    match waited {
        Ok(Ok(())) => {}
        // Of another host, mostly.
        Ok(Err(cause)) => debug!(worker, %cause, "has nothing to replay"),
        Err(_late) => warn!(
            worker,
            "the worker of this host does not answer in time: what the mount before had answered last may be lost"
        ),
    }
}

/// Whether another attempt would come to the same.
fn is_final(error: &ClientError) -> bool {
    match error {
        ClientError::NotFound(_) | ClientError::Stale(_) | ClientError::Invalid(_) | ClientError::Refused { .. } => {
            true
        }
        ClientError::Net(NetError::Master { code, .. }) => *code == tonic::Code::NotFound,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_master_refuses_is_asked_for_once() {
        let refused = ClientError::Refused { errno: 28, reason: "full".to_owned() };
        assert!(is_final(&refused) && is_final(&ClientError::Stale("gone".to_owned())));
        let unknown = ClientError::OutcomeUnknown { cause: "late".to_owned() };
        assert!(!is_final(&unknown) && !is_final(&ClientError::NoWorkers));
    }
}
