//! The memory budget of the process: every buffer of a read is charged to it until the last reference is dropped.
//!
//! Who waits for memory says how much, so that those who keep buffers for later know to let go of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::ClientError;
use crate::stats::Stats;

/// What a buffer costs at least: bookkeeping of many tiny buffers counts too.
pub(super) const CHARGE_MIN_BYTES: u64 = 4 * 1024;
const KIB: u64 = 1024;

/// Counts in KiB, so that the semaphore's count cannot overflow.
#[derive(Debug)]
pub(super) struct MemoryBudget {
    free: Arc<Semaphore>,
    total_kib: u32,
    /// What is waited for.
    wanted_kib: AtomicU64,
    stats: Arc<Stats>,
}

/// One who waits for memory; counted until dropped.
#[derive(Debug)]
pub(super) struct MemoryWaiter<'a> {
    budget: &'a MemoryBudget,
    kib: u32,
}

/// A part of the budget; given back on drop.
#[derive(Debug)]
pub(super) struct Charge {
    permit: OwnedSemaphorePermit,
    stats: Arc<Stats>,
}

impl MemoryBudget {
    pub(super) fn new(bytes: u64, stats: Arc<Stats>) -> Self {
        let total_kib = u32::try_from(bytes / KIB).unwrap_or(u32::MAX).clamp(4, u32::MAX >> 4);
        let free = Arc::new(Semaphore::new(total_kib as usize));
        Self { free, total_kib, wanted_kib: AtomicU64::new(0), stats }
    }

    /// `None` when that much is not free now. More than the whole budget counts as the whole budget.
    pub(super) fn try_charge(&self, bytes: u64) -> Option<Charge> {
        let permit = self.free.clone().try_acquire_many_owned(self.kib(bytes)).ok()?;
        Some(self.charge_of(permit))
    }

    /// Begins to wait for that much; to be called before others are asked to let go of memory, so that what they come
    /// to keep from now on is not kept.
    pub(super) fn want(&self, bytes: u64) -> MemoryWaiter<'_> {
        let kib = self.kib(bytes);
        self.wanted_kib.fetch_add(u64::from(kib), Ordering::SeqCst);
        MemoryWaiter { budget: self, kib }
    }

    /// Bytes that are waited for; 0 while everybody has what he needs.
    pub(super) fn wanted_bytes(&self) -> u64 {
        self.wanted_kib.load(Ordering::SeqCst) * KIB
    }

    fn kib(&self, bytes: u64) -> u32 {
        u32::try_from(bytes.max(CHARGE_MIN_BYTES).div_ceil(KIB)).unwrap_or(u32::MAX).min(self.total_kib)
    }

    fn charge_of(&self, permit: OwnedSemaphorePermit) -> Charge {
        self.stats.budget_used_bytes.inc_by(permit.num_permits() as i64 * KIB as i64);
        Charge { permit, stats: self.stats.clone() }
    }
}

impl MemoryWaiter<'_> {
    /// Waits until that much is free, first come, first served.
    pub(super) async fn charge(self, wait: Duration) -> Result<Charge, ClientError> {
        let budget = self.budget;
        match tokio::time::timeout(wait, budget.free.clone().acquire_many_owned(self.kib)).await {
            Ok(Ok(permit)) => Ok(budget.charge_of(permit)),
            Ok(Err(_closed)) => Err(ClientError::Shutdown),
            Err(_elapsed) => Err(ClientError::Memory { waited_ms: wait.as_millis() as u64 }),
        }
    }
}

impl Drop for MemoryWaiter<'_> {
    fn drop(&mut self) {
        self.budget.wanted_kib.fetch_sub(u64::from(self.kib), Ordering::SeqCst);
    }
}

impl Charge {
    /// Ties the charge to a buffer.
    pub(super) fn hold(self, bytes: impl AsRef<[u8]> + Send + 'static) -> Bytes {
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
            "the whole budget is enough for anything"
        );
        assert_eq!(stats.budget_used_bytes.get(), 0);
    }
}
