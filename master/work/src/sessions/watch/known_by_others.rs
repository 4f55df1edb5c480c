//! What other sessions may know of a directory that one of them wants to hold.

use cavern_state::InodeLocation;

use super::{Session, WatchHub};

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
    /// What other sessions than this one may know of a directory; `None` when that may be something that is in it, or
    /// is not. Whoever has let go of what it knew up to the event `announced` knows no attributes.
    pub(in crate::sessions) fn known_by_others(
        &self,
        (directory, location): (u64, &InodeLocation),
        session: u64,
        announced: Option<u64>,
    ) -> Option<KnownByOthers> {
        let state = self.looked();
        // Clients of an earlier term may not be back.
        if state.started.elapsed() < self.lease || state.watches.is_known_by_others(directory, session) {
            return None;
        }
        // Others have yet to say what they have open, after they were told to forget the rest.
        let is_open = |(id, known): (&u64, &Session)| *id != session && known.acknowledged < known.epochs.reset_seq;
        if state.sessions.iter().any(is_open) {
            return None;
        }
        let knows_still = |other: u64| {
            let let_go = state.sessions.get(&other).map(|known| known.epochs.let_go);
            other != session && (announced.is_none() || let_go < announced)
        };
        let mut has_attributes = false;
        let is_known = state.watches.of_inode(directory, location, |other| has_attributes |= knows_still(other));
        let inodes = state.watches.inodes_of_others(session, INODES_MAX).filter(|_| is_known)?;
        Some(KnownByOthers { has_attributes, inodes })
    }
}
