//! A connection of a tenant reads and writes no faster than the rate of the tenant (`worker.client_bytes_per_second`).
//!
//! What a request asks for counts when it is taken. Until that is paid for, the connections of the tenant take no
//! further frame: what the client has sent stays in its connection, which tells it to send no more, and nothing of what
//! the clients share is held meanwhile.
//!
//! Where a mount has a rate for the client (`cv mount --client NAME=bytes=…`), a request to read in it waits by itself,
//! and those of other mounts go on. What was written is on the connection already: all that comes behind waits for it.

use std::sync::Arc;
use std::time::Duration;

use cavern_security::{Rate, Tenant, TenantConnection};
use tokio::time::Instant;

/// Keeps a connection within the rate of its tenant.
#[derive(Debug)]
pub(super) struct Pacing {
    /// `None` for whoever is no tenant.
    tenant: Option<TenantConnection>,
    /// That of the mount of the request which is looked at, if it has one.
    mount: Option<Arc<Rate>>,
    /// When the last write in a mount with a rate is paid for.
    written: Option<Instant>,
}

impl Pacing {
    pub(super) fn new(tenant: Option<TenantConnection>) -> Self {
        Self { tenant, mount: None, written: None }
    }

    pub(super) fn tenant(&self) -> Option<&Arc<Tenant>> {
        self.tenant.as_deref()
    }

    /// Until when no further frame is taken, if the tenant is too fast.
    pub(super) fn pause(&mut self) -> Option<Instant> {
        let (wait, now) = (self.tenant.as_ref()?.rate.wait(), Instant::now());
        let until = self.written.take().unwrap_or(now).max(now + wait);
        (until > now).then_some(until)
    }

    /// A pause has been made.
    pub(super) fn paused(&self, pause: Duration) {
        if let Some(tenant) = &self.tenant {
            tenant.counts.add_wait(pause);
        }
    }

    /// A request is looked at, in a mount in which the tenant may have so many bytes in a second, if they are bounded.
    pub(super) fn comes_to(&mut self, mount: Option<(u32, u64)>) {
        let tenant = self.tenant.as_ref();
        self.mount = mount.and_then(|(id, per_second)| tenant?.mount_rates.of(id, per_second));
    }

    /// A request is taken, with what it reads: how long it has to wait for what was read and written in its mount.
    pub(super) fn charge(&self, bytes: usize) -> Duration {
        if let Some(tenant) = &self.tenant {
            tenant.rate.take(bytes as u64);
            tenant.counts.add_bytes(bytes);
        }
        self.mount.as_ref().map_or(Duration::ZERO, |rate| rate.take(bytes as u64))
    }

    /// Charges a request for what it writes, for which the connection waits.
    pub(super) fn charge_write(&mut self, bytes: usize) {
        self.charge(bytes);
        self.written = self.mount.as_ref().map(|rate| Instant::now() + rate.wait());
    }

    /// A frame is taken.
    pub(super) fn count(&self) {
        if let Some(tenant) = &self.tenant {
            tenant.counts.add_operations(1);
        }
    }
}
