//! The memory budget for answers and payloads, and who has how much of it.
//!
//! All connections share it. A tenant (a client identity, where connections are secured) has at most its own part of it
//! in use, so that clients that take no answers, or finish no write, leave the rest to others.
//!
//! Requests that wait, and long messages that are not all here, have a budget of their own: if they took of that for
//! answers, those that wait could use up what they wait for.

use std::sync::Arc;

use futures::future::OptionFuture;
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};

/// The memory for answers and payloads.
#[derive(Clone, Debug)]
pub struct Budget {
    /// In KiB.
    pub all: Arc<Semaphore>,
    /// The tenant's part.
    own: Option<Arc<Semaphore>>,
    /// Most that is had at a time, in KiB.
    pub kib: u32,
}

/// Memory of the budget; it is given back when this is dropped.
#[derive(Debug)]
pub struct Share {
    all: OwnedSemaphorePermit,
    own: Option<OwnedSemaphorePermit>,
}

impl Share {
    /// Joins another one of the same connection.
    pub fn merge(&mut self, other: Self) {
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
pub fn kib_for_requests(kib: u32) -> u32 {
    (kib / REQUESTS_PART).max(1)
}

/// The part of a budget of so many KiB that one tenant may use.
pub fn part_of_tenant(kib: u32) -> usize {
    (kib - kib / 4) as usize
}

impl Budget {
    /// Of so many KiB.
    pub fn new(kib: u32) -> Self {
        Self { all: Arc::new(Semaphore::new(kib as usize)), own: None, kib }
    }

    /// The part of a tenant, of so many KiB.
    pub fn within(&self, part: Option<(&Arc<Semaphore>, usize)>) -> Self {
        let kib = part.map_or(self.kib, |(_, kib)| u32::try_from(kib).unwrap_or(u32::MAX).min(self.kib));
        Self { all: self.all.clone(), own: part.map(|(own, _)| own.clone()), kib }
    }

    /// What so many bytes take; what is more than all of it takes all of it.
    fn kib(&self, bytes: usize) -> u32 {
        u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX).min(self.kib)
    }

    /// Room for so many bytes, if there is some now.
    pub fn try_take(&self, bytes: usize) -> Option<Share> {
        let kib = self.kib(bytes);
        let own = self.own.clone().map(|own| own.try_acquire_many_owned(kib)).transpose().ok()?;
        Some(Share { all: self.all.clone().try_acquire_many_owned(kib).ok()?, own })
    }

    /// Room for so many bytes, once there is some: nothing of what all share is held while the tenant has too much.
    pub async fn take(self, bytes: usize) -> Result<Share, AcquireError> {
        let kib = self.kib(bytes);
        let own = OptionFuture::from(self.own.map(|own| own.acquire_many_owned(kib))).await.transpose()?;
        Ok(Share { all: self.all.acquire_many_owned(kib).await?, own })
    }
}

/// Requests of a connection that take no more than this take nothing of the budget.
pub const FREE_BYTES: usize = 128 << 10;

/// What the requests of a connection take of the memory for requests while they wait.
///
/// A frame is handled when what it takes is free, or it has a share of the budget; until then it is awaited, and
/// nothing behind it is looked at. If it begins to wait for a disk or a bucket it takes along what it has, and gives
/// that back with its answer.
pub struct RequestMemory {
    pub budget: Budget,
    /// For the frame that is next or handled now.
    pub share: Option<Share>,
    /// What the frame that is handled now takes while it waits, in bytes.
    pub cost: usize,
    /// What those take that wait and have no share, in bytes.
    free_used: usize,
}

/// What one request takes while it waits.
pub struct RequestShare {
    /// Without one it is among those that take nothing of the budget.
    share: Option<Share>,
    cost: usize,
}

impl RequestMemory {
    pub fn new(budget: Budget) -> Self {
        Self { budget, share: None, cost: 0, free_used: 0 }
    }

    /// Whether the next frame may take so much while it waits, since that is free, or it has a share of the budget.
    pub fn admits(&mut self, bytes: usize) -> bool {
        self.free_used + bytes <= FREE_BYTES || self.has_share_of(bytes)
    }

    /// Whether the next frame has a share of the budget, or gets one of so many bytes now.
    pub fn has_share_of(&mut self, bytes: usize) -> bool {
        if self.share.is_none() {
            self.share = self.budget.try_take(bytes);
        }
        self.share.is_some()
    }

    /// What the request that is handled now takes along, since it begins to wait.
    pub fn take_along(&mut self) -> RequestShare {
        let taken = RequestShare { share: self.share.take(), cost: self.cost };
        if taken.share.is_none() {
            self.free_used += taken.cost;
        }
        taken
    }

    /// A request waits no more.
    pub fn give_back(&mut self, taken: &RequestShare) {
        if taken.share.is_none() {
            self.free_used -= taken.cost;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use cavern_security::{Identity, Limit, Role, Tenant, TenantConnection, TenantLimits, Tenants};

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
            walks: 0,
            writers: 0,
            messages: 0,
        };
        let tenants = Tenants::new(limits);
        let budget = Budget::new(KIB);
        let all = budget.all.clone();
        let [one, other] = ["one", "other"].map(|name| connection(name, &tenants));
        let of = |tenant: Option<&Tenant>| budget.within(tenant.map(|tenant| (&tenant.room, room)));
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
