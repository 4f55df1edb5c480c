//! The journal of a mount is kept by a worker of this host, too: when supervisor and daemon die at the same moment, it
//! has what was answered made ([`replay`]). The daemon hands it over when it begins to serve, and again whenever that
//! worker has ended.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cavern_client::{Client, Identity, Journal, Replayed};
use cavern_conf::{Config, backoff};
use cavern_net::journals::{Ask, Hello, JournalGuard, hand_over};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info, warn};

use crate::error::FuseError;
use crate::mount_journal::recorded_mount;

/// A worker that is there answers at once.
const ANSWER_WAIT: Duration = Duration::from_secs(5);
/// A daemon that has outlived its supervisor may still have the journal, for a moment.
const DAEMON_WAIT: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// For all of a replay: a process that takes longer is of no use, and another one may be.
const REPLAY_WAIT: Duration = Duration::from_secs(40);

/// Has a worker keep the journal, until this is stopped.
pub(crate) async fn run(client: Arc<Client>, journal: Arc<Journal>, parent: OwnedFd, who: Identity) {
    let mut backoff = backoff::JOURNAL_HANDOVER.begin();
    loop {
        // From before the look, so that no worker is missed that comes meanwhile.
        let other_workers = client.pool().workers_changed();
        if let Some((worker, mut kept)) = offer(&client, &journal, &parent, &who).await {
            debug!(worker, "a worker of this host keeps the journal of the mount");
            kept.ended().await;
            debug!(worker, "the worker that kept the journal of the mount has ended");
            backoff.reset();
        }
        // One of this host may be among those that have just come.
        let _at_once = timeout(backoff.next_pause(), other_workers).await;
    }
}

async fn offer(client: &Client, journal: &Journal, parent: &OwnedFd, who: &Identity) -> Option<(u64, JournalGuard)> {
    let hello = Hello {
        ask: Ask::Keep.into(),
        cluster_id: client.pool().cluster_id(),
        place: who.place.clone(),
        name: who.name.clone(),
    };
    for worker in client.workers().workers().iter().filter(|worker| !worker.socket_path.is_empty()) {
        let handed = hand_over(Path::new(&worker.socket_path), &hello, journal.memory(), parent.as_fd());
        match timeout(ANSWER_WAIT, handed).await {
            Ok(Ok(kept)) => return Some((worker.id, kept)),
            // Of another host, mostly.
            Ok(Err(cause)) => debug!(worker = worker.id, %cause, "does not keep the journal of the mount"),
            Err(_late) => debug!(worker = worker.id, "does not say whether it keeps the journal of the mount"),
        }
    }
    None
}

/// Makes what a mount had answered whose processes are dead. Its journal is the standard input.
///
/// # Errors
/// It is not all made, and may be by another attempt.
pub async fn replay(config: Config, _stop: CancellationToken) -> Result<(), FuseError> {
    // Whoever stops the worker waits for this.
    let journal = take_over().await.map_err(FuseError::Journal)?;
    if journal.is_ended() {
        return Ok(());
    }
    let mount_point = recorded_mount(&journal).map(|record| record.mount_point).unwrap_or_default();
    let name = format!("{}:{mount_point} (replay)", rustix::system::uname().nodename().to_string_lossy());
    let Ok(replayed) = timeout(REPLAY_WAIT, cavern_client::replay(&config, &name, journal)).await else {
        return Err(FuseError::Journal(io::ErrorKind::TimedOut.into()));
    };
    match replayed? {
        Replayed::Made { left, refused } => {
            for error in &refused {
                error!(mount_point, "something that the mount had answered is lost: {error}");
            }
            info!(mount_point, changes = left.changes, files = left.files, "what the mount had answered is made");
        }
        Replayed::SessionOver(left) if left == Default::default() => {
            info!(mount_point, "the session of the mount is over, and nothing was left to be made");
        }
        Replayed::SessionOver(left) => error!(
            mount_point,
            changes = left.changes,
            files = left.files,
            "the session of the mount is over: up to so many changes that it had answered are lost, and the length of \
             so many files that were being written"
        ),
    }
    Ok(())
}

async fn take_over() -> io::Result<Arc<Journal>> {
    let deadline = Instant::now() + DAEMON_WAIT;
    loop {
        let memory = io::stdin().as_fd().try_clone_to_owned()?;
        match Journal::take_over(memory) {
            Err(cause) if cause.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                sleep(LOOK_EVERY).await;
            }
            Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => {
                warn!("another process has the journal of the mount");
                return Err(cause);
            }
            taken => return taken,
        }
    }
}
