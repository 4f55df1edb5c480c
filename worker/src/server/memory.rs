//! The memory budget for answers and payloads, and who has how much of it.
//!
//! All connections share it. A tenant (a client identity, where connections are secured) has at most its own part of it
//! in use, so that clients that take no answers, or finish no write, leave the rest to others.
//!
//! Requests that wait, and long messages that are not all here, have a budget of their own: if they took of that for
//! answers, those that wait could use up what they wait for.

use std::pin::Pin;
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

/// A share of the memory budget, when there is one.
pub(super) type PendingShare = Pin<Box<dyn Future<Output = Result<Share, AcquireError>> + Send>>;

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

/// Requests of a connection that take no more than this take nothing of the budget.
pub(super) const FREE_BYTES: usize = 128 << 10;

/// What the requests of a connection take of the memory for requests while they wait.
///
/// A frame is handled when what it takes is free, or it has a share of the budget; until then it is awaited, and
/// nothing behind it is looked at. If it begins to wait for a disk or a bucket it takes along what it has, and gives
/// that back with its answer.
pub(super) struct RequestMemory {
    budget: Budget,
    /// For the frame that is next or handled now.
    share: Option<Share>,
    /// The next frame waits for it.
    awaited: Option<PendingShare>,
    /// What the frame that is handled now takes while it waits, in bytes.
    pub cost: usize,
    /// What those take that wait and have no share, in bytes.
    free_used: usize,
}

/// What one request takes while it waits.
pub(super) struct RequestShare {
    /// Without one it is among those that take nothing of the budget.
    share: Option<Share>,
    cost: usize,
}

impl RequestMemory {
    pub(super) fn new(budget: Budget) -> Self {
        Self { budget, share: None, awaited: None, cost: 0, free_used: 0 }
    }

    /// Whether the next frame may take so much while it waits; if not, it waits for a share.
    pub(super) fn admits(&mut self, bytes: usize) -> bool {
        self.free_used + bytes <= FREE_BYTES || self.has_share_of(bytes)
    }

    /// Whether the next frame has a share of the budget; if not, it waits for one of so many bytes.
    pub(super) fn has_share_of(&mut self, bytes: usize) -> bool {
        if self.share.is_none() {
            self.share = self.budget.try_take(bytes);
        }
        if self.share.is_none() {
            self.awaited = Some(Box::pin(self.budget.clone().take(bytes)));
        }
        self.share.is_some()
    }

    /// Whether the next frame waits for a share.
    pub(super) fn is_awaited(&self) -> bool {
        self.awaited.is_some()
    }

    /// Returns when the next frame has the share that it waits for, or, which is false, will never have it; waits for
    /// ever when it does not wait.
    pub(super) async fn granted(&mut self) -> bool {
        let granted = match &mut self.awaited {
            Some(share) => share.await,
            None => std::future::pending().await,
        };
        self.awaited = None;
        self.share = granted.ok();
        self.share.is_some()
    }

    /// What the request that is handled now takes along, since it begins to wait.
    pub(super) fn take_along(&mut self) -> RequestShare {
        let taken = RequestShare { share: self.share.take(), cost: self.cost };
        if taken.share.is_none() {
            self.free_used += taken.cost;
        }
        taken
    }

    /// A request waits no more.
    pub(super) fn give_back(&mut self, taken: &RequestShare) {
        if taken.share.is_none() {
            self.free_used -= taken.cost;
        }
    }

    /// The frame has been handled: it does not wait, or has taken its share along.
    pub(super) fn end_frame(&mut self) {
        self.share = None;
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
