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
    pub list: Mutex<Vec<Arc<ExpeditedScope>>>,
    /// Changes when one begins.
    pub begun: watch::Sender<()>,
}

impl Default for ExpeditedScopes {
    fn default() -> Self {
        Self { list: Mutex::default(), begun: watch::Sender::new(()) }
    }
}
