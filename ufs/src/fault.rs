//! Faults on purpose, for tests of whatever stands above a store.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::{StreamExt, future};

use crate::error::{Request, UfsError};
use crate::store::ByteStream;

/// What goes wrong, counted over all requests of one handle, so that a test is the same every time.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Every n-th request fails as if the store were overloaded.
    pub fail_every: Option<NonZeroU64>,
    /// Every n-th body ends after half of its first piece.
    pub cut_every: Option<NonZeroU64>,
    /// Every answer comes this much later.
    pub delay: Duration,
}

/// Faults in force, and what they have been counted over.
#[derive(Default)]
pub(crate) struct Injected {
    pub faults: Faults,
    pub requests: AtomicU64,
    pub bodies: AtomicU64,
}

fn is_due(counter: &AtomicU64, every: Option<NonZeroU64>) -> bool {
    every.is_some_and(|every| (counter.fetch_add(1, Ordering::Relaxed) + 1).is_multiple_of(every.get()))
}

impl Injected {
    pub(crate) async fn interfere(&self, request: impl FnOnce() -> Request) -> Result<(), UfsError> {
        if !self.faults.delay.is_zero() {
            tokio::time::sleep(self.faults.delay).await;
        }
        if is_due(&self.requests, self.faults.fail_every) {
            let reason = "an injected fault".to_owned();
            return Err(UfsError::Unavailable { request: request(), reason });
        }
        Ok(())
    }

    pub(crate) fn cut(&self, body: ByteStream) -> ByteStream {
        if !is_due(&self.bodies, self.faults.cut_every) {
            return body;
        }
        let halved = body.take(1).map(|item| item.map(|bytes| bytes.slice(..bytes.len() / 2)));
        ByteStream::new(halved.filter(|item| future::ready(!matches!(item, Ok(bytes) if bytes.is_empty()))))
    }
}
