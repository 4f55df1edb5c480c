//! The memory budget for answers and payloads, and who has how much of it.
//!
//! All connections share it. A tenant (a client identity, where connections are secured) has at most its own part of it
//! in use, so that clients that take no answers, or finish no write, leave the rest to others.
//!
//! Requests that wait, and long messages that are not all here, have a budget of their own: if they took of that for
//! answers, those that wait could use up what they wait for.

use std::sync::Arc;

use cavern_security::Tenant;
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};

/// See the module; of one connection.
#[derive(Clone, Debug)]
pub(super) struct Budget {
    all: Arc<Semaphore>,
    /// The tenant's part.
    own: Option<Arc<Semaphore>>,
    /// Most that is had at a time.
    kib: u32,
}

/// Memory of the budget; it is given back when this is dropped.
#[derive(Debug)]
pub(super) struct Share {
    all: OwnedSemaphorePermit,
    own: Option<OwnedSemaphorePermit>,
}

impl Share {
    /// Joins another one of the same connection.
    pub(super) fn merge(&mut self, other: Self) {
        self.all.merge(other.all);
        match (&mut self.own, other.own) {
            (Some(own), Some(other)) => own.merge(other),
            (own, other) => *own = own.take().or(other),
        }
    }
}

/// Share of the memory for answers and payloads that requests may take besides.
const REQUESTS_PART: u32 = 4;

/// KiB for requests, beside so many for answers and payloads.
pub(super) fn kib_for_requests(kib: u32) -> u32 {
    (kib / REQUESTS_PART).max(1)
}

/// The part of a budget of so many KiB that one tenant may use.
pub(super) fn part_of_tenant(kib: u32) -> usize {
    (kib - kib / 4) as usize
}

impl Budget {
    /// Of `kib` for answers and payloads, which `all` has.
    pub(super) fn new(all: Arc<Semaphore>, kib: u32, tenant: Option<&Tenant>) -> Self {
        Self::within(all, kib, tenant.map(|tenant| (tenant.room.clone(), tenant.limits().room)))
    }

    /// Of `kib` for requests, which `all` has.
    pub(super) fn of_requests(all: Arc<Semaphore>, kib: u32, tenant: Option<&Tenant>) -> Self {
        Self::within(all, kib, tenant.map(|tenant| (tenant.requests.clone(), tenant.limits().requests)))
    }

    fn within(all: Arc<Semaphore>, kib: u32, part: Option<(Arc<Semaphore>, usize)>) -> Self {
        match part {
            Some((own, part)) => Self { all, own: Some(own), kib: u32::try_from(part).unwrap_or(u32::MAX).min(kib) },
            None => Self { all, own: None, kib },
        }
    }

    /// What so many bytes take; what is more than all of it takes all of it.
    fn kib(&self, bytes: usize) -> u32 {
        u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX).min(self.kib)
    }

    /// Room for so many bytes, if there is some now.
    pub(super) fn try_take(&self, bytes: usize) -> Option<Share> {
        let kib = self.kib(bytes);
        let own = match &self.own {
            Some(own) => Some(own.clone().try_acquire_many_owned(kib).ok()?),
            None => None,
        };
        Some(Share { all: self.all.clone().try_acquire_many_owned(kib).ok()?, own })
    }

    /// Room for so many bytes, once there is some: nothing of what all share is held while the tenant has too much.
    pub(super) async fn take(self, bytes: usize) -> Result<Share, AcquireError> {
        let kib = self.kib(bytes);
        let own = match self.own {
            Some(own) => Some(own.acquire_many_owned(kib).await?),
            None => None,
        };
        Ok(Share { all: self.all.acquire_many_owned(kib).await?, own })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use cavern_security::{Identity, Limit, Role, TenantConnection, TenantLimits, Tenants};

    use super::*;

    const KIB: u32 = 400;

    fn connection(name: &str, tenants: &Tenants) -> TenantConnection {
        tenants.admit(&Identity::new("c", Role::Client, name).unwrap()).unwrap().unwrap()
    }

    #[tokio::test]
    async fn one_tenant_leaves_some_to_others() {
        let some = Limit { most: 10, setting: "x" };
        let per_second = Limit { most: 0, setting: "x" };
        let room = part_of_tenant(KIB);
        let limits = TenantLimits {
            connections: some,
            calls: some,
            per_second,
            turns: 1,
            room,
            requests: 1,
            disk_turns: 1,
            streams: 0,
            parts: 0,
            writers: 0,
            messages: 0,
        };
        let tenants = Tenants::new(limits);
        let all = Arc::new(Semaphore::new(KIB as usize));
        let [one, other] = ["one", "other"].map(|name| connection(name, &tenants));
        let of = |tenant: Option<&Tenant>| Budget::new(all.clone(), KIB, tenant);
        let mut held = of(Some(&one)).try_take(200 << 10).unwrap();
        held.merge(of(Some(&one)).try_take(100 << 10).unwrap());
        assert!(of(Some(&one)).try_take(1).is_none());
        assert!(of(Some(&other)).try_take(100 << 10).is_some(), "another has what is left");
        assert!(of(None).try_take(100 << 10).is_some());
        let waits = tokio::spawn(of(Some(&one)).take(10 << 20));
        assert!(
            tokio::time::timeout(Duration::from_millis(20), async {
                while all.available_permits() == 100 {
                    tokio::task::yield_now().await;
                }
            })
            .await
            .is_err()
        );
        drop(held);
        let most = waits.await.unwrap().unwrap();
        assert_eq!(all.available_permits(), KIB as usize - room, "what is too much takes all that it may have");
        drop(most);
        assert_eq!(all.available_permits(), KIB as usize);
    }
}
