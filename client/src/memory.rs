//! The memory budget of the process, `client.memory_budget`: every buffer that is read, uploaded or written behind is
//! charged to it until the last reference is dropped.
//!
//! Who waits for memory says how much, so that those who keep buffers for later know to let go of them.
//!
//! Nobody may wait for memory who holds some: all of it could be held by those who wait for more, none of whom would
//! ever go on. There are two exceptions. What is read to be put together has a part that is set apart. And an upload,
//! whose share is a fraction of the budget, reads what it needs of the old object: so nobody waits for more than what
//! shares leave. What is written behind never waits for memory, nor reads an object.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::ClientError;
use crate::stats::Stats;

/// What a buffer costs at least: bookkeeping of many tiny buffers counts too.
pub(crate) const CHARGE_MIN_BYTES: u64 = 4 * 1024;
const KIB: u64 = 1024;
/// The fraction of a budget that a share of it is at most.
const SHARE_MAX: u32 = 4;

/// Counts in KiB, so that the semaphore's count cannot overflow.
pub(crate) struct MemoryBudget {
    free: Arc<Semaphore>,
    total_kib: u32,
    /// What is waited for.
    wanted_kib: AtomicU64,
    /// Lets go of as many bytes as are wanted, as far as they are kept for later.
    make_room: OnceLock<Box<dyn Fn(u64) + Send + Sync>>,
    stats: Arc<Stats>,
}

/// As much of a budget as one use of it may have at a time.
pub(crate) struct MemoryShare {
    budget: Arc<MemoryBudget>,
    free: Arc<Semaphore>,
    total_kib: u32,
}

/// One who waits for memory; counted until dropped.
pub(crate) struct MemoryWaiter<'a> {
    budget: &'a MemoryBudget,
    kib: u32,
}

/// A part of the budget; given back on drop.
#[derive(Debug)]
pub(crate) struct Charge {
    permit: OwnedSemaphorePermit,
    /// Of the share, if it was taken from one.
    share: Option<OwnedSemaphorePermit>,
    stats: Arc<Stats>,
}

impl MemoryBudget {
    pub(crate) fn new(bytes: u64, stats: Arc<Stats>) -> Self {
        Self::of_kib(u32::try_from(bytes / KIB).unwrap_or(u32::MAX).clamp(4, u32::MAX >> 4), stats)
    }

    fn of_kib(total_kib: u32, stats: Arc<Stats>) -> Self {
        let free = Arc::new(Semaphore::new(total_kib as usize));
        Self { free, total_kib, wanted_kib: AtomicU64::new(0), make_room: OnceLock::new(), stats }
    }

    /// Two budgets in place of one: the second one has `bytes` bytes, or its fraction `1 / SHARE_MAX` if that is less.
    pub(crate) fn set_apart(self, bytes: u64) -> (Self, Self) {
        let apart = u32::try_from(bytes / KIB).unwrap_or(u32::MAX).min(self.total_kib / SHARE_MAX).max(1);
        (Self::of_kib(self.total_kib - apart, self.stats.clone()), Self::of_kib(apart, self.stats))
    }

    /// A share of `bytes` bytes, or of `1 / SHARE_MAX` of the budget if that is less.
    pub(crate) fn share(self: &Arc<Self>, bytes: u64) -> MemoryShare {
        let total_kib = u32::try_from(bytes / KIB).unwrap_or(u32::MAX).min(self.total_kib / SHARE_MAX);
        MemoryShare { budget: self.clone(), free: Arc::new(Semaphore::new(total_kib as usize)), total_kib }
    }

    /// Has whoever keeps buffers for later asked to let go of them when memory is short. Once.
    pub(crate) fn when_short(&self, make_room: impl Fn(u64) + Send + Sync + 'static) {
        let is_first = self.make_room.set(Box::new(make_room)).is_ok();
        debug_assert!(is_first, "somebody keeps buffers already");
    }

    /// `None` when that much is not free now. More than the whole budget counts as the whole budget.
    pub(crate) fn try_charge(&self, bytes: u64) -> Option<Charge> {
        let permit = self.free.clone().try_acquire_many_owned(self.kib(bytes)).ok()?;
        Some(self.charge_of(permit))
    }

    /// Begins to wait for that much, or for what a share leaves if that is less. Whoever keeps buffers for later lets
    /// go of them, and does not keep what comes from now on.
    pub(crate) fn want(&self, bytes: u64) -> MemoryWaiter<'_> {
        let kib = self.kib(bytes).min(self.total_kib - self.total_kib / SHARE_MAX);
        self.wanted_kib.fetch_add(u64::from(kib), Ordering::SeqCst);
        // For all who wait, not for this one alone: he may be the one for whom a buffer was spared.
        self.make_room(self.wanted_bytes());
        MemoryWaiter { budget: self, kib }
    }

    fn make_room(&self, bytes: u64) {
        if let Some(make_room) = self.make_room.get() {
            make_room(bytes);
        }
    }

    /// Bytes that are waited for; 0 while everybody has what he needs.
    pub(crate) fn wanted_bytes(&self) -> u64 {
        self.wanted_kib.load(Ordering::SeqCst) * KIB
    }

    fn kib(&self, bytes: u64) -> u32 {
        u32::try_from(bytes.max(CHARGE_MIN_BYTES).div_ceil(KIB)).unwrap_or(u32::MAX).min(self.total_kib)
    }

    fn charge_of(&self, permit: OwnedSemaphorePermit) -> Charge {
        self.stats.budget_used_bytes.inc_by(permit.num_permits() as i64 * KIB as i64);
        Charge { permit, share: None, stats: self.stats.clone() }
    }
}

impl MemoryShare {
    /// `None` when that much is not free of the share now, or of the budget even without what is kept for later.
    pub(crate) fn try_charge(&self, bytes: u64) -> Option<Charge> {
        let share = self.free.clone().try_acquire_many_owned(self.budget.kib(bytes)).ok()?;
        let mut charge = self.budget.try_charge(bytes).or_else(|| {
            self.budget.make_room(self.budget.wanted_bytes() + bytes);
            self.budget.try_charge(bytes)
        })?;
        charge.share = Some(share);
        Some(charge)
    }

    /// Waits until that much is free, first come, first served. More than the whole share counts as the whole share.
    pub(crate) async fn charge(&self, bytes: u64) -> Result<Charge, ClientError> {
        let kib = self.budget.kib(bytes).min(self.total_kib);
        let share = self.free.clone().acquire_many_owned(kib).await.map_err(|_closed| ClientError::Shutdown)?;
        let bytes = u64::from(kib) * KIB;
        let mut charge = match self.budget.try_charge(bytes) {
            Some(charge) => charge,
            None => self.budget.want(bytes).granted().await?,
        };
        charge.share = Some(share);
        Ok(charge)
    }
}

impl MemoryWaiter<'_> {
    /// Waits until that much is free, first come, first served.
    pub(crate) async fn charge(self, wait: Duration) -> Result<Charge, ClientError> {
        let elapsed = |_| ClientError::Memory { waited_ms: wait.as_millis() as u64 };
        tokio::time::timeout(wait, self.granted()).await.map_err(elapsed)?
    }

    async fn granted(self) -> Result<Charge, ClientError> {
        let permit = self.budget.free.clone().acquire_many_owned(self.kib).await;
        permit.map(|permit| self.budget.charge_of(permit)).map_err(|_closed| ClientError::Shutdown)
    }
}

impl Drop for MemoryWaiter<'_> {
    fn drop(&mut self) {
        self.budget.wanted_kib.fetch_sub(u64::from(self.kib), Ordering::SeqCst);
    }
}

impl Charge {
    /// Bytes that are paid for.
    pub(crate) fn bytes(&self) -> u64 {
        self.permit.num_permits() as u64 * KIB
    }

    /// Takes another charge in, of the same budget and share.
    pub(crate) fn merge(&mut self, mut other: Self) {
        if let Some(all) = other.permit.split(other.permit.num_permits()) {
            self.permit.merge(all);
        }
        if let (Some(share), Some(all)) = (&mut self.share, other.share.take()) {
            share.merge(all);
        }
    }

    /// Ties the charge to a buffer.
    pub(crate) fn hold(self, bytes: impl AsRef<[u8]> + Send + 'static) -> Bytes {
        Bytes::from_owner(Charged { bytes, _charge: self })
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.stats.budget_used_bytes.dec_by(self.permit.num_permits() as i64 * KIB as i64);
    }
}

struct Charged<B> {
    bytes: B,
    _charge: Charge,
}

impl<B: AsRef<[u8]>> AsRef<[u8]> for Charged<B> {
    fn as_ref(&self) -> &[u8] {
        self.bytes.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn buffers_are_charged_until_their_last_reference_goes() {
        let stats = Arc::new(Stats::default());
        let budget = MemoryBudget::new(64 * KIB, stats.clone());
        let buffer = budget.try_charge(60 * KIB).unwrap().hold(vec![7u8; 60 * 1024]);
        assert!(budget.try_charge(5 * KIB).is_none());
        let slice = buffer.slice(..1);
        drop(buffer);
        assert_eq!(stats.budget_used_bytes.get(), 60 * 1024);
        let waiting = budget.want(8 * KIB);
        assert_eq!(budget.wanted_bytes(), 8 * KIB);
        assert!(matches!(waiting.charge(Duration::from_millis(1)).await, Err(ClientError::Memory { .. })));
        assert_eq!(budget.wanted_bytes(), 0);
        drop(slice);
        assert!(
            budget.want(1 << 40).charge(Duration::from_secs(1)).await.is_ok(),
            "what shares leave is enough for anything"
        );
        assert_eq!(stats.budget_used_bytes.get(), 0);
    }

    #[tokio::test]
    async fn a_share_leaves_the_rest_to_others_and_has_what_is_kept_for_later_given_up() {
        let budget = Arc::new(MemoryBudget::new(64 * KIB, Arc::new(Stats::default())));
        let kept = Arc::new(parking_lot::Mutex::new(budget.try_charge(60 * KIB)));
        budget.when_short({
            let kept = kept.clone();
            move |_wanted| drop(kept.lock().take())
        });
        let share = budget.share(1 << 40);
        assert!(share.try_charge(17 * KIB).is_none() && kept.lock().is_some(), "a quarter of the budget");
        let charge = share.try_charge(16 * KIB).unwrap();
        assert!(kept.lock().is_none());
        assert!(share.try_charge(4 * KIB).is_none());
        let rest = budget.try_charge(48 * KIB).unwrap();
        assert!(budget.try_charge(4 * KIB).is_none());
        drop(charge);
        *kept.lock() = budget.try_charge(16 * KIB);
        let charge = share.charge(1 << 40).await.unwrap();
        assert_eq!(charge.bytes(), 16 * KIB, "the whole share is enough for anything");
        assert!(kept.lock().is_none());
        drop((rest, charge));
    }

    #[tokio::test]
    async fn whoever_holds_a_share_can_wait_for_more() {
        let budget = Arc::new(MemoryBudget::new(64 * KIB, Arc::new(Stats::default())));
        let share = budget.share(1 << 40);
        let held = share.charge(1 << 40).await.unwrap();
        for bytes in [49 * KIB, 1 << 40] {
            assert_eq!(budget.want(bytes).charge(Duration::from_secs(1)).await.unwrap().bytes(), 48 * KIB);
        }
        drop(held);
    }

    #[test]
    fn what_is_set_apart_is_no_part_of_the_rest() {
        let stats = Arc::new(Stats::default());
        let (rest, apart) = MemoryBudget::new(64 * KIB, stats.clone()).set_apart(8 * KIB);
        let (all, other) = (rest.try_charge(56 * KIB).unwrap(), apart.try_charge(8 * KIB).unwrap());
        assert!(rest.try_charge(4 * KIB).is_none() && apart.try_charge(4 * KIB).is_none());
        assert_eq!(stats.budget_used_bytes.get(), 64 * 1024);
        drop((all, other));
    }
}
