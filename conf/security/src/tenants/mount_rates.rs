//! How fast a tenant goes on in the mounts whose rules say so.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::{Rate, Tenant};

/// Mounts in which a tenant owes nothing are remembered up to this number.
const REMEMBERED: usize = 64;

/// The rates of one tenant.
#[derive(Debug, Default)]
pub struct MountRates(Mutex<HashMap<u32, Arc<Rate>>>);

impl MountRates {
    /// The rate in a mount by its rules as they are now; `None` where it is 0, which stands for any number. What was
    /// taken before counts as long as the rate is the same.
    pub fn of(&self, mount_id: u32, per_second: u64) -> Option<Arc<Rate>> {
        if per_second == 0 {
            return None;
        }
        let mut known = self.0.lock();
        if let Some(rate) = known.get(&mount_id)
            && rate.per_second() == per_second
        {
            return Some(rate.clone());
        }
        if known.len() >= REMEMBERED {
            known.retain(|_, rate| !rate.wait().is_zero());
        }
        let rate = Arc::new(Rate::new(per_second));
        known.insert(mount_id, rate.clone());
        Some(rate)
    }

    /// Whether something is not paid for yet.
    pub(super) fn are_overdrawn(&self) -> bool {
        self.0.lock().values().any(|rate| !rate.wait().is_zero())
    }
}

/// What one call owes for what it has done in a mount: it is answered when that is paid for.
#[derive(Debug)]
pub struct RateCharge {
    tenant: Arc<Tenant>,
    /// Operations that the call is about.
    operations: AtomicUsize,
    pending: Mutex<Option<PendingCharge>>,
}

#[derive(Debug)]
struct PendingCharge {
    mount_id: u32,
    /// `None` where there is none.
    rate: Option<Arc<Rate>>,
    operations: u64,
    until: Instant,
}

impl RateCharge {
    pub fn of(tenant: Arc<Tenant>) -> Self {
        Self { tenant, operations: AtomicUsize::new(1), pending: Mutex::new(None) }
    }

    pub fn tenant(&self) -> &Tenant {
        &self.tenant
    }

    /// The call is about so many things more than one.
    pub fn is_about_more(&self, more: usize) {
        self.operations.fetch_add(more, Ordering::Relaxed);
    }

    /// The call does something in this mount, by whose rules there are so many operations in a second. It counts in the
    /// first mount, and in no other.
    pub fn is_in(&self, mount_id: u32, per_second: u64) {
        let mut pending = self.pending.lock();
        if pending.is_none() {
            let rate = self.tenant.mount_rates.of(mount_id, per_second);
            let operations = self.operations.load(Ordering::Relaxed) as u64;
            let wait = rate.as_ref().map_or(Duration::ZERO, |rate| rate.take(operations));
            *pending = Some(PendingCharge { mount_id, rate, operations, until: Instant::now() + wait });
        }
    }

    /// How long it has to wait from now on.
    pub fn wait(&self) -> Duration {
        let now = Instant::now();
        self.pending.lock().as_ref().map_or(Duration::ZERO, |pending| pending.until.saturating_duration_since(now))
    }

    /// It is not answered, and owes nothing: gives the mount, and how many operations are allowed in it.
    pub fn give_up(&self) -> Option<(u32, u64)> {
        let PendingCharge { mount_id, rate, operations, .. } = self.pending.lock().take()?;
        let rate = rate?;
        rate.give_back(operations);
        Some((mount_id, rate.per_second()))
    }
}
