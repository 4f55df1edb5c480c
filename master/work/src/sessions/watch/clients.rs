//! Whose sessions there are: who has opened them, what is there for their clients, and what these say that they do.

use cavern_proto::master::{ClientActivity, ClientStatus};
use cavern_security::Identity;

use super::{State, WatchHub};
use crate::error::WorkError;

/// Mounts that a client may say something of.
const ACTIVE_MOUNTS_MAX: usize = 256;

impl WatchHub {
    /// Sessions of before this master led, as they are recorded, and whose they are: nobody else takes them up, or
    /// speaks for them.
    pub fn know_owners(&self, owners: impl IntoIterator<Item = (u64, Identity)>) {
        let mut state = self.state.lock();
        owners.into_iter().for_each(|(session, owner)| state.owners.set(session, &owner));
    }

    /// Whose a session is, where connections are secured.
    pub fn owner_of(&self, session: u64) -> Option<Identity> {
        self.state.lock().owners.get(session).cloned()
    }

    /// Whether a session is that of whoever asks ([`Owners::check`](super::Owners::check)); 0 is nobody's.
    ///
    /// # Errors
    /// [`WorkError::Denied`] when it is somebody else's.
    pub fn check_owner(&self, session: u64, asker: Option<&Identity>) -> Result<(), WorkError> {
        asker.map_or(Ok(()), |_| self.state.lock().owners.check(session, "", asker))
    }

    /// Whether a mount is there for the client of a session.
    pub(super) fn may_see(&self, state: &State, mount_id: u32, session: u64) -> bool {
        self.changes.visible.may_see(mount_id, state.owners.get(session))
    }

    /// What a person may call a session. Its number is nobody else's business.
    pub fn describe(&self, session: u64) -> String {
        match self.state.lock().sessions.get(&session) {
            Some(known) => format!("the client {}", known.client),
            None => "a client that is cut off".to_owned(),
        }
    }

    /// The client of a session says what it has read and written.
    pub fn has_done(&self, session: u64, mut activity: ClientActivity) {
        let ClientActivity { mount_ids, reads, read_bytes, writes, written_bytes } = &mut activity;
        mount_ids.truncate(ACTIVE_MOUNTS_MAX);
        mount_ids.shrink_to_fit();
        for counts in [reads, read_bytes, writes, written_bytes] {
            counts.truncate(ACTIVE_MOUNTS_MAX);
            // What is kept is not as large as what was said.
            counts.shrink_to_fit();
        }
        if let Some(session) = self.state.lock().sessions.get_mut(&session) {
            session.activity = activity;
        }
    }

    /// The clients that have a stream now, and what they have said of what they do.
    pub fn clients(&self) -> Vec<ClientStatus> {
        let state = self.state.lock();
        let clients = state.sessions.iter().map(|(id, session)| ClientStatus {
            session: *id,
            client: session.client.clone(),
            identity: state.owners.get(*id).map_or_else(String::new, |owner| owner.name.clone()),
            activity: Some(session.activity.clone()),
        });
        clients.collect()
    }
}
