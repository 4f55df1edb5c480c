//! Whom the state machine notifies of changes: the sessions of the term, while there is one.

use std::sync::Arc;

use parking_lot::RwLock;

use super::WatchHub;
use crate::raft::ChangeListener;
use crate::state::Changes;

/// See the module.
#[derive(Default)]
pub struct CurrentSessions(RwLock<Option<Arc<WatchHub>>>);

impl CurrentSessions {
    pub fn set(&self, hub: Option<Arc<WatchHub>>) {
        *self.0.write() = hub;
    }
}

impl ChangeListener for CurrentSessions {
    fn changed(&self, changes: Changes) -> u64 {
        self.0.read().as_ref().map_or(0, |hub| hub.changed(changes))
    }

    fn replaced(&self) {
        if let Some(hub) = &*self.0.read() {
            hub.replaced();
        }
    }
}
