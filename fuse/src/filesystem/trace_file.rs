//! The file `.cv/trace`: what slow requests waited for, and its texts that are open.

use std::sync::Arc;
use std::time::Duration;

use super::handles::Handles;
use crate::trace::Trace;

/// A text is made when the file is opened, and stays what it is until that is closed.
pub struct TraceFile {
    pub requests: Arc<Trace>,
    /// By the number of the handle.
    pub open: Handles<String>,
}

impl TraceFile {
    /// `above`: requests that take less leave nothing behind.
    pub fn new(above: Duration) -> Self {
        Self { requests: Arc::new(Trace::new(above)), open: Handles::default() }
    }
}
