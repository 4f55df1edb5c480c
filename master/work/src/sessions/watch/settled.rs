//! Which mount table clients go by. What a table says to be frozen is changed by nobody who goes by it; so whoever has
//! frozen something waits until all do.
//!
//! A client that is cut off believes nothing, but goes on writing to workers that it reaches, as it has begun. So one
//! whose lease ends meanwhile is one of which nobody knows what it writes, and so is one that does not answer. One that
//! may change nothing in the mount is waited for, since that may be new to it, and keeps nothing from being frozen.

use std::time::Duration;

use cavern_security::Identity;

use super::{Session, State, WatchHub};
use crate::error::WorkError;

/// For how many leases clients are waited for: one that is on its way to another stream has one for that.
const LEASES: u32 = 2;

impl State {
    /// Whether all clients of sessions that count go by the mount table of an epoch, and none may come that does not.
    fn go_by(&self, epoch: u64, lease: Duration, counts: impl Fn(u64) -> bool) -> bool {
        let is_late = |session: &Session| session.epochs.mounts < epoch;
        self.started.elapsed() >= lease
            && !self.broken.keys().any(|session| counts(*session))
            && !self.sessions.iter().any(|(id, session)| is_late(session) && counts(*id))
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
    /// included; after two leases when every client does that may change the mount.
    ///
    /// # Errors
    /// [`WorkError::Refused`] when one of these does not say so by then, or its lease ends meanwhile: it may be writing
    /// to what is frozen.
    pub async fn wait_settled(&self, mount_id: u32, epoch: u64) -> Result<(), WorkError> {
        let may_write = |owner: Option<&Identity>| self.changes.visible.may_change(mount_id, owner);
        let lapses = |state: &State| {
            let of_writers = state.lapses.iter().filter(|(owner, _)| may_write(owner.as_ref()));
            of_writers.map(|(_, lapses)| lapses).sum::<u64>()
        };
        let before = lapses(&self.state.lock());
        let look = |state: &State| match lapses(state) == before {
            true => state.go_by(epoch, self.lease, |_| true).then_some(Ok(())),
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
        let counts = |session: u64| may_write(state.owners.get(session));
        if state.go_by(epoch, self.lease, counts) {
            return Ok(());
        }
        let late = state.sessions.iter().filter(|(id, session)| session.epochs.mounts < epoch && counts(**id));
        let mut names: Vec<String> = late.map(|(_, session)| format!("client {}", session.client)).collect();
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
