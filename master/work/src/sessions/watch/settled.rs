//! Which mount table clients go by. What a table says to be frozen is changed by nobody who goes by it; so whoever has
//! frozen something waits until all do.
//!
//! A client that is cut off believes nothing, but goes on writing to workers that it reaches, as it has begun. So one
//! whose lease ends meanwhile is one of which nobody knows what it writes, and so is one that does not answer.

use std::time::Duration;

use super::{State, WatchHub};
use crate::error::WorkError;

/// For how many leases clients are waited for: one that is on its way to another stream has one for that.
const LEASES: u32 = 2;

impl State {
    /// Whether all clients go by the mount table of an epoch, and none may come that does not.
    fn go_by(&self, epoch: u64, lease: Duration) -> bool {
        self.started.elapsed() >= lease
            && self.broken.is_empty()
            && self.sessions.values().all(|session| session.epochs.mounts >= epoch)
    }
}

impl WatchHub {
    /// The client of a session goes by the mount table of this epoch, and writes nothing that was begun with an earlier
    /// one.
    pub fn mounts_settled(&self, session: u64, epoch: u64) {
        let before = self.state.lock().sessions.get_mut(&session).map(|known| {
            // It is said again with every sign of life.
            std::mem::replace(&mut known.epochs.mounts, epoch)
        });
        if before.is_some_and(|before| before != epoch) {
            self.progress.notify_waiters();
        }
    }

    /// Returns when every client goes by the mount table of an epoch, those that are on their way to another stream
    /// included.
    ///
    /// # Errors
    /// [`WorkError::Refused`] when one does not say so within two leases, or its lease ends meanwhile: it may be
    /// writing to what is frozen.
    pub async fn wait_settled(&self, epoch: u64) -> Result<(), WorkError> {
        let lapses = self.state.lock().lapses;
        let look = |state: &State| match state.lapses == lapses {
            true => state.go_by(epoch, self.lease).then_some(Ok(())),
            false => Some(Err(WorkError::Refused(
                "the lease of a client has ended meanwhile (see the log of the master that leads), and it may still \
                 write to what is to be frozen: try again when it is back, or its process has ended"
                    .to_owned(),
            ))),
        };
        if let Some(found) = self.wait_for(self.lease * LEASES, look).await {
            return found;
        }
        let state = self.state.lock();
        let late = state.sessions.values().filter(|session| session.epochs.mounts < epoch);
        let mut names: Vec<String> = late.map(|session| format!("client {}", session.client)).collect();
        if names.is_empty() {
            names.push("a client without a stream".to_owned());
        }
        Err(WorkError::Refused(format!(
            "{} did not say in time that it writes to nothing that is to be frozen: end it, or try again when it \
             answers",
            names.join(", ")
        )))
    }
}
