//! Whom the state machine notifies of changes: the sessions of the term, while there is one. On every master the last
//! changes are remembered, for sessions that go on when it comes to lead.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::WatchHub;
use super::recent::RecentChanges;
use crate::raft::ChangeListener;
use crate::state::Changes;

/// See the module.
#[derive(Default)]
pub struct CurrentSessions(Mutex<Current>);

#[derive(Default)]
struct Current {
    recent: RecentChanges,
    hub: Option<Arc<WatchHub>>,
}

/// What is remembered, and stays as it is as long as this is there.
pub(super) struct Remembered<'a>(MutexGuard<'a, Current>);

impl CurrentSessions {
    /// From now on these sessions are notified; the changes before are those that the masters remember.
    pub fn set(&self, hub: Option<Arc<WatchHub>>) {
        let mut current = self.0.lock();
        if let Some(hub) = &hub {
            hub.begin_after(current.recent.last());
        }
        current.hub = hub;
    }

    pub(super) fn remembered(&self) -> Remembered<'_> {
        Remembered(self.0.lock())
    }
}

impl Remembered<'_> {
    pub(super) fn changes(&self) -> &RecentChanges {
        &self.0.recent
    }
}

impl ChangeListener for CurrentSessions {
    fn changed(&self, changes: Changes) -> u64 {
        let mut current = self.0.lock();
        current.recent.add(&changes);
        current.hub.as_ref().map_or(0, |hub| hub.changed(changes))
    }

    fn replaced(&self) {
        let mut current = self.0.lock();
        current.recent.clear();
        if let Some(hub) = &current.hub {
            hub.replaced();
        }
    }
}
