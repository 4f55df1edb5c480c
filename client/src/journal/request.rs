//! The request of a kernel that a task works for. Changes that the task asks for are kept for a successor until the
//! kernel has its answer: it asks for the same again otherwise, and must get the answer that it would have had.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::task::futures::TaskLocalFuture;

use super::ChangeSlot;

tokio::task_local! {
    static REQUEST: Arc<RequestContext>;
}

/// The request of a kernel that a task works for.
#[derive(Debug)]
pub struct RequestContext {
    unique: u64,
    kept: Mutex<Vec<Arc<ChangeSlot>>>,
    /// This request as a process before had it.
    earlier: Mutex<Option<Arc<RequestContext>>>,
}

impl RequestContext {
    /// `unique` names the request; the kernel uses no number twice.
    pub fn new(unique: u64) -> Arc<Self> {
        Arc::new(Self { unique, kept: Mutex::default(), earlier: Mutex::default() })
    }

    /// Runs a task for this request.
    pub fn scope<F: Future>(self: Arc<Self>, task: F) -> TaskLocalFuture<Arc<Self>, F> {
        REQUEST.scope(self, task)
    }

    /// That of the task that runs.
    pub(crate) fn current() -> Option<Arc<Self>> {
        REQUEST.try_with(Arc::clone).ok()
    }

    pub(crate) fn unique(&self) -> u64 {
        self.unique
    }

    /// A change that was made for it.
    pub(crate) fn keep(&self, slot: Arc<ChangeSlot>) {
        self.kept.lock().push(slot);
    }

    /// What was kept for it before is kept on.
    pub(crate) fn go_on_from(&self, earlier: Arc<Self>) {
        *self.earlier.lock() = Some(earlier);
    }
}
