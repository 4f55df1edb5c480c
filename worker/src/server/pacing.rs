//! A connection of a tenant reads and writes no faster than the rate of the tenant (`worker.client_bytes_per_second`).
//!
//! What a request asks for counts when it is taken. Until that is paid for, the connections of the tenant take no
//! further frame: what the client has sent stays in its connection, which tells it to send no more, and nothing of what
//! the clients share is held meanwhile.

use std::sync::Arc;

use cavern_security::{Tenant, TenantConnection};
use tokio::time::Instant;

/// See the module.
#[derive(Debug)]
pub(super) struct Pacing {
    /// `None` for whoever is no tenant.
    tenant: Option<TenantConnection>,
    /// The pause that is made, and when it began.
    pause: Option<(Instant, Instant)>,
}

impl Pacing {
    pub(super) fn new(tenant: Option<TenantConnection>) -> Self {
        Self { tenant, pause: None }
    }

    pub(super) fn tenant(&self) -> Option<&Arc<Tenant>> {
        self.tenant.as_deref()
    }

    /// Whether a pause is made.
    pub(super) fn is_paused(&self) -> bool {
        self.pause.is_some()
    }

    /// Begins a pause, if the tenant is too fast; whether one is made.
    pub(super) fn begin_pause(&mut self) -> bool {
        let Some(tenant) = &self.tenant else { return false };
        let wait = tenant.rate.wait();
        if !wait.is_zero() && self.pause.is_none() {
            let now = Instant::now();
            self.pause = Some((now, now + wait));
        }
        self.pause.is_some()
    }

    /// Returns when the pause is over; never where none is made.
    pub(super) async fn pause(&self) {
        match self.pause {
            Some((_, until)) => tokio::time::sleep_until(until).await,
            None => std::future::pending().await,
        }
    }

    pub(super) fn end_pause(&mut self) {
        if let (Some((since, _)), Some(tenant)) = (self.pause.take(), &self.tenant) {
            tenant.counts.add_wait(since.elapsed());
        }
    }

    /// A request is taken, with what it reads or writes.
    pub(super) fn charge(&self, bytes: usize) {
        if let Some(tenant) = &self.tenant {
            tenant.rate.take(bytes as u64);
            tenant.counts.add_bytes(bytes);
        }
    }

    /// A frame is taken.
    pub(super) fn count(&self) {
        if let Some(tenant) = &self.tenant {
            tenant.counts.add_operations(1);
        }
    }
}
