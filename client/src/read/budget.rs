//! The memory budget of the process: every buffer of a read is charged to it until the last reference is dropped.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::ClientError;
use crate::stats::Stats;

/// What a buffer costs at least: bookkeeping of many tiny buffers counts too.
const CHARGE_MIN_BYTES: u64 = 4 * 1024;
const KIB: u64 = 1024;

/// Counts in KiB, so that the semaphore's count cannot overflow.
#[derive(Debug)]
pub(super) struct Budget {
    free: Arc<Semaphore>,
    total_kib: u32,
    stats: Arc<Stats>,
}

/// A part of the budget; given back on drop.
#[derive(Debug)]
pub(super) struct Charge {
    permit: OwnedSemaphorePermit,
    stats: Arc<Stats>,
}

impl Budget {
    pub(super) fn new(bytes: u64, stats: Arc<Stats>) -> Self {
        let total_kib = u32::try_from(bytes / KIB).unwrap_or(u32::MAX).clamp(4, u32::MAX >> 4);
        Self { free: Arc::new(Semaphore::new(total_kib as usize)), total_kib, stats }
    }

    /// `None` when that much is not free now. More than the whole budget counts as the whole budget.
    pub(super) fn try_charge(&self, bytes: u64) -> Option<Charge> {
        let permit = self.free.clone().try_acquire_many_owned(self.kib(bytes)).ok()?;
        Some(self.charge_of(permit))
    }

    /// Waits until that much is free, first come, first served.
    pub(super) async fn charge(&self, bytes: u64, wait: Duration) -> Result<Charge, ClientError> {
        let acquired = tokio::time::timeout(wait, self.free.clone().acquire_many_owned(self.kib(bytes))).await;
        match acquired {
            Ok(Ok(permit)) => Ok(self.charge_of(permit)),
            Ok(Err(_closed)) => Err(ClientError::Shutdown),
            Err(_elapsed) => Err(ClientError::Memory { waited_ms: wait.as_millis() as u64 }),
        }
    }

    fn kib(&self, bytes: u64) -> u32 {
        u32::try_from(bytes.max(CHARGE_MIN_BYTES).div_ceil(KIB)).unwrap_or(u32::MAX).min(self.total_kib)
    }

    fn charge_of(&self, permit: OwnedSemaphorePermit) -> Charge {
        self.stats.budget_used_bytes.inc_by(permit.num_permits() as i64 * KIB as i64);
        Charge { permit, stats: self.stats.clone() }
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
        let budget = Budget::new(64 * KIB, stats.clone());
        let buffer = budget.try_charge(60 * KIB).unwrap().hold(vec![7u8; 60 * 1024]);
        assert!(budget.try_charge(5 * KIB).is_none());
        let slice = buffer.slice(..1);
        drop(buffer);
        assert_eq!(stats.budget_used_bytes.get(), 60 * 1024);
        let waited = budget.charge(8 * KIB, Duration::from_millis(1)).await;
        assert!(matches!(waited, Err(ClientError::Memory { .. })));
        drop(slice);
        assert!(
            budget.charge(1 << 40, Duration::from_secs(1)).await.is_ok(),
            "the whole budget is enough for anything"
        );
        assert_eq!(stats.budget_used_bytes.get(), 0);
    }
}
