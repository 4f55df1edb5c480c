//! What clients know: it is registered before they are told, so that they are notified of what changes, and looked at
//! when one of them wants to hold a directory.

use cavern_state::InodeLocation;
use tokio::time::Instant;

use super::{Session, WatchHub, WatchRegistry};

/// Inodes that other sessions know by themselves and that are looked at, whether they are in the directory.
const INODES_MAX: usize = 4096;

/// What others may know, of nothing that has a name in the directory.
pub(in crate::sessions) struct KnownByOthers {
    /// The directory's attributes.
    pub has_attributes: bool,
    /// Inodes, wherever they are.
    pub inodes: Vec<u64>,
}

impl WatchHub {
    /// A session (0 for whoever keeps nothing) is about to be answered what a name leads to, or that it is not there:
    /// call it before the read that decides so. The session is notified of what changes afterwards.
    pub fn watch_name(&self, session: u64, directory: u64, name: &[u8]) {
        self.register(session, |watches| watches.watch_name(session, directory, name));
    }

    /// Registers a watch of all that is in a directory.
    pub fn watch_directory(&self, session: u64, directory: u64) {
        self.register(session, |watches| watches.watch_directory(session, directory));
    }

    /// Registers a watch of the names before this one, in a directory that is being listed for the first time.
    pub fn watch_names_before(&self, session: u64, directory: u64, before: &[u8]) {
        self.register(session, |watches| watches.watch_names_before(session, directory, before));
    }

    /// Registers watches of directories of which any names may be known, and that others are not there.
    pub fn watch_directories(&self, session: u64, directories: impl IntoIterator<Item = u64>) {
        let mut state = self.state.lock();
        for directory in directories {
            state.watches.watch_directory(session, directory);
            state.watches.watch_many_names(session, directory);
        }
    }

    /// Registers watches of inodes, whatever their names are.
    pub fn watch_inodes(&self, session: u64, inodes: impl IntoIterator<Item = u64>) {
        self.register(session, |watches| inodes.into_iter().for_each(|inode| watches.watch_inode(session, inode)));
    }

    fn register(&self, session: u64, register: impl FnOnce(&mut WatchRegistry)) {
        if session != 0 {
            register(&mut self.state.lock().watches);
        }
    }

    /// A session has said all that its client knows. What else its kernel believes it does not for longer than a lease.
    pub fn watches_restored(&self, session: u64) {
        if let Some(session) = self.state.lock().sessions.get_mut(&session) {
            session.settles_at = Some(Instant::now() + self.lease);
        }
    }

    /// Whether clients of an earlier term may not be back.
    pub(in crate::sessions) fn is_young(&self) -> bool {
        self.looked().started.elapsed() < self.lease
    }

    /// What other sessions than this one may know of a directory of a mount; `None` when that may be something that is
    /// in it, or is not. Whoever has let go of what it knew up to the event `announced` knows no attributes, and
    /// nothing whoever the mount is not there for, and was not a lease ago, whatever he says that he knows.
    pub(in crate::sessions) fn known_by_others(
        &self,
        (directory, mount_id, location): (u64, u32, &InodeLocation),
        session: u64,
        announced: Option<u64>,
    ) -> Option<KnownByOthers> {
        let state = self.looked();
        let has_new_rules = state.has_new_rules(mount_id, self.lease);
        let is_other = |other: u64| other != session && (has_new_rules || self.may_see(&state, mount_id, other));
        // Clients of an earlier term may not be back.
        if state.started.elapsed() < self.lease || state.watches.is_known_by(directory, is_other) {
            return None;
        }
        // Others have yet to say what they have open, after they were told to forget the rest.
        let is_open = |(id, known): (&u64, &Session)| !known.has_forgotten() && is_other(*id);
        if state.sessions.iter().any(is_open) {
            return None;
        }
        let knows_still = |other: u64| {
            let let_go = state.sessions.get(&other).map(|known| known.epochs.let_go);
            (announced.is_none() || let_go < announced) && is_other(other)
        };
        let mut has_attributes = false;
        let is_known = state.watches.of_inode(directory, location, |other| has_attributes |= knows_still(other));
        let inodes = state.watches.inodes_known_by(is_other, INODES_MAX).filter(|_| is_known)?;
        Some(KnownByOthers { has_attributes, inodes })
    }
}
