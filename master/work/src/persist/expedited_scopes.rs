//! Who waits for which parts of the namespace.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

use super::scope::Scope;

/// What somebody waits for.
pub(super) struct ExpeditedScope {
    pub scope: Scope,
    /// Number of the last change.
    pub up_to: u64,
    pub since: Instant,
}

/// All that are waited for.
pub(super) struct ExpeditedScopes {
    list: Mutex<Vec<Arc<ExpeditedScope>>>,
    /// Changes when one begins.
    begun: watch::Sender<()>,
}

impl Default for ExpeditedScopes {
    fn default() -> Self {
        Self { list: Mutex::default(), begun: watch::Sender::new(()) }
    }
}

impl ExpeditedScopes {
    pub(super) fn add(&self, scope: Arc<ExpeditedScope>) {
        self.list.lock().push(scope);
        self.begun.send_replace(());
    }

    pub(super) fn remove(&self, scope: &Arc<ExpeditedScope>) {
        self.list.lock().retain(|other| !Arc::ptr_eq(other, scope));
    }

    /// Those of now.
    pub(super) fn current(&self) -> Vec<Arc<ExpeditedScope>> {
        self.list.lock().clone()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.list.lock().is_empty()
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<()> {
        self.begun.subscribe()
    }
}
