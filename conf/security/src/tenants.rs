//! The clients of a secured cluster, as a process sees them: each identity is a tenant, which has a bounded part of
//! what the process is made of, goes on no faster than its rate, and is counted.
//!
//! Only those of the role `client` are tenants: masters and workers do what the cluster needs, and admins look at it
//! while a client floods it. Where connections are not secured nobody has an identity, and anybody could have another
//! address: there are no tenants then.

mod activity_tracker;
mod metrics;
mod mount_rates;
mod rate;

use std::collections::HashMap;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Semaphore;

use self::activity_tracker::ActivityTracker;
use crate::identity::{Identity, Role};

pub use metrics::TenantCollector;
pub use mount_rates::{MountRates, RateCharge};
pub use rate::Rate;

/// Tenants that are remembered although they have no connection; the counts of others go to those of all others.
const REMEMBERED: usize = 1000;

/// A number of things at once, and the setting that it comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    pub most: usize,
    pub setting: &'static str,
}

/// What each tenant has.
#[derive(Clone, Copy, Debug)]
pub struct TenantLimits {
    pub connections: Limit,
    /// Calls at once, those that wait for their turn too.
    pub calls: Limit,
    /// Units (operations, bytes) in a second; 0 for any number.
    pub per_second: Limit,
    /// Calls that are worked on at a time: others wait, for those of their own tenant only.
    pub turns: usize,
    /// Its part of what all share, in whatever that is counted.
    pub room: usize,
    /// Its part of what requests that wait share, apart from the above: what they ask for may come out of that.
    pub requests: usize,
    /// Threads that wait for a disk for it at a time; as many again for syncs, which are slow.
    pub disk_turns: usize,
    /// Answers in parts that are made or taken at a time: others wait, as above.
    pub streams: usize,
    /// Of these, parts that are made at a time.
    pub parts: usize,
    /// Walks through all that is below a directory at a time: others wait, as above.
    pub walks: usize,
    /// Streams of changes that are open at a time.
    pub writers: usize,
    /// Kibibytes of long messages that have begun and are not complete: others wait, as above.
    pub messages: usize,
}

/// All tenants. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Tenants(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    limits: TenantLimits,
    known: Mutex<HashMap<Identity, Arc<Tenant>>>,
    /// Tenants that there have been.
    numbers: AtomicU64,
    /// Who changes something.
    changes: Arc<ActivityTracker>,
    /// Of tenants that are not remembered any more.
    forgotten: Counts,
}

/// One client identity.
#[derive(Debug)]
pub struct Tenant {
    identity: Identity,
    number: u64,
    changes: Arc<ActivityTracker>,
    limits: TenantLimits,
    connections: AtomicUsize,
    calls: AtomicUsize,
    pub rate: Rate,
    /// Of seconds, each of which can be taken once: for what is to be rare.
    pub seconds: Rate,
    /// In mounts, besides.
    pub mount_rates: MountRates,
    /// [`TenantLimits::turns`].
    pub turns: Arc<Semaphore>,
    /// [`TenantLimits::room`].
    pub room: Arc<Semaphore>,
    /// [`TenantLimits::requests`].
    pub requests: Arc<Semaphore>,
    /// [`TenantLimits::disk_turns`].
    pub disk_turns: Arc<Semaphore>,
    /// As many.
    pub sync_turns: Arc<Semaphore>,
    /// [`TenantLimits::streams`].
    pub streams: Arc<Semaphore>,
    /// [`TenantLimits::parts`].
    pub parts: Semaphore,
    /// [`TenantLimits::walks`].
    pub walks: Arc<Semaphore>,
    /// [`TenantLimits::writers`].
    pub writers: Arc<Semaphore>,
    /// [`TenantLimits::messages`].
    pub messages: Arc<Semaphore>,
    pub counts: Counts,
}

/// What a tenant has done, and what was done to it.
#[derive(Debug, Default)]
pub struct Counts {
    operations: AtomicU64,
    bytes: AtomicU64,
    waited_ns: AtomicU64,
    refused: AtomicU64,
}

impl Counts {
    pub fn add_operations(&self, operations: usize) {
        self.operations.fetch_add(operations as u64, Ordering::Relaxed);
    }

    pub fn add_bytes(&self, bytes: usize) {
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Waits for the rate, if that takes any time.
    pub async fn wait(&self, wait: Duration) {
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
            self.add_wait(wait);
        }
    }

    /// It waited for its rate.
    pub fn add_wait(&self, wait: Duration) {
        self.waited_ns.fetch_add(u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    pub fn add_refusal(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    fn add(&self, other: &Self) {
        let pairs = [
            (&self.operations, &other.operations),
            (&self.bytes, &other.bytes),
            (&self.waited_ns, &other.waited_ns),
            (&self.refused, &other.refused),
        ];
        for (own, other) in pairs {
            own.fetch_add(other.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
}

/// A tenant has all that it may have at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverLimit {
    identity: Identity,
    what: &'static str,
    limit: Limit,
}

impl fmt::Display for OverLimit {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { identity, what, limit: Limit { most, setting } } = self;
        write!(out, "{identity} has {most} {what} already, as many as {setting} allows: end some of its processes")?;
        write!(out, ", give hosts certificates of their own, or raise {setting}")
    }
}

impl std::error::Error for OverLimit {}

impl Tenants {
    pub fn new(limits: TenantLimits) -> Self {
        Self(Arc::new(Shared {
            limits,
            known: Mutex::default(),
            numbers: AtomicU64::new(0),
            changes: Arc::default(),
            forgotten: Counts::default(),
        }))
    }

    /// A connection of this identity; `None` for whoever is no tenant.
    ///
    /// # Errors
    /// It has as many as it may have.
    pub fn admit(&self, identity: &Identity) -> Option<Result<TenantConnection, OverLimit>> {
        if identity.role != Role::Client {
            return None;
        }
        let tenant = self.tenant(identity);
        let limit = tenant.limits.connections;
        Some(match enter(&tenant.connections, limit.most) {
            true => Ok(TenantConnection(tenant)),
            false => {
                tenant.counts.add_refusal();
                Err(OverLimit { identity: identity.clone(), what: "connections", limit })
            }
        })
    }

    fn tenant(&self, identity: &Identity) -> Arc<Tenant> {
        let Shared { limits, known, numbers, changes, forgotten } = &*self.0;
        let mut known = known.lock();
        if let Some(tenant) = known.get(identity) {
            return tenant.clone();
        }
        if known.len() >= REMEMBERED {
            // Whoever has nothing under way, and owes nothing, is the same when he comes back.
            known.retain(|_, tenant| {
                let rates = [&tenant.rate, &tenant.seconds];
                let owes = rates.iter().any(|rate| !rate.wait().is_zero()) || tenant.mount_rates.are_overdrawn();
                let is_used = owes || Arc::strong_count(tenant) > 1;
                if !is_used {
                    forgotten.add(&tenant.counts);
                }
                is_used
            });
        }
        let tenant = Arc::new(Tenant {
            identity: identity.clone(),
            number: numbers.fetch_add(1, Ordering::Relaxed),
            changes: changes.clone(),
            limits: *limits,
            connections: AtomicUsize::new(0),
            calls: AtomicUsize::new(0),
            rate: Rate::new(limits.per_second.most as u64),
            seconds: Rate::new(1),
            mount_rates: MountRates::default(),
            turns: Arc::new(Semaphore::new(limits.turns)),
            room: Arc::new(Semaphore::new(limits.room)),
            requests: Arc::new(Semaphore::new(limits.requests)),
            disk_turns: Arc::new(Semaphore::new(limits.disk_turns)),
            sync_turns: Arc::new(Semaphore::new(limits.disk_turns)),
            streams: Arc::new(Semaphore::new(limits.streams)),
            parts: Semaphore::new(limits.parts),
            walks: Arc::new(Semaphore::new(limits.walks)),
            writers: Arc::new(Semaphore::new(limits.writers)),
            messages: Arc::new(Semaphore::new(limits.messages)),
            counts: Counts::default(),
        });
        known.insert(identity.clone(), tenant.clone());
        tenant
    }
}

/// Counts one more, unless there are as many as there may be.
fn enter(count: &AtomicUsize, most: usize) -> bool {
    let more = |now: usize| (now < most).then_some(now + 1);
    count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
}

impl Tenant {
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    pub fn limits(&self) -> &TenantLimits {
        &self.limits
    }

    /// It has had so many operations done beside those that waited for its rate: later calls wait for them.
    pub fn charge(&self, operations: usize) {
        self.counts.add_operations(operations);
        self.rate.take(operations as u64);
    }

    /// It changes something now: whether others have in the last second.
    pub fn record_change(&self) -> bool {
        self.changes.record(self.number)
    }

    /// One more call, until what is returned is dropped.
    ///
    /// # Errors
    /// It has as many as it may have.
    pub fn call(self: &Arc<Self>) -> Result<TenantCall, OverLimit> {
        let limit = self.limits.calls;
        if enter(&self.calls, limit.most) {
            return Ok(TenantCall(self.clone()));
        }
        self.counts.add_refusal();
        Err(OverLimit { identity: self.identity.clone(), what: "calls under way", limit })
    }
}

/// A connection of a tenant, until this is dropped.
#[derive(Debug)]
pub struct TenantConnection(Arc<Tenant>);

impl Deref for TenantConnection {
    type Target = Arc<Tenant>;

    fn deref(&self) -> &Arc<Tenant> {
        &self.0
    }
}

impl Drop for TenantConnection {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A call of a tenant, until this is dropped.
#[derive(Debug)]
pub struct TenantCall(Arc<Tenant>);

impl Drop for TenantCall {
    fn drop(&mut self) {
        self.0.calls.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
