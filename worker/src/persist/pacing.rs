//! Uploads that nobody waits for make way for clients: while the worker serves some, they have so many bytes a second
//! (`worker.background_upload_rate`), and without them as many as there are.
//!
//! Clients of this host write and read through descriptors, and all that the worker sees of that are the blocks that
//! they make and open. So it serves clients as long as somebody has asked for anything within [`SERVED`].

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cavern_proto::frame::FrameKind;
use cavern_security::Rate;
use tokio::time::Instant;

/// So long after a request clients are still being served.
const SERVED: Duration = Duration::from_millis(500);
/// A piece of an upload waits no longer. With many uploads and a low rate, each would miss its deadline otherwise.
const LONGEST_WAIT: Duration = Duration::from_secs(4);

/// Knows whether clients are served, and how much uploads may send meanwhile.
#[derive(Debug)]
pub struct UploadPacing {
    began: Instant,
    /// When a client asked for something last: milliseconds after the beginning, and one more; 0 for never.
    asked_ms: AtomicU64,
    rate: Rate,
}

impl UploadPacing {
    /// With so many bytes in a second; 0 for any number.
    pub(crate) fn new(bytes_per_second: u64) -> Self {
        Self { began: Instant::now(), asked_ms: AtomicU64::new(0), rate: Rate::new(bytes_per_second) }
    }

    /// A frame has arrived: clients whose files are read and written come first.
    pub(crate) fn note(&self, kind: FrameKind) {
        // Masters have blocks filled, and everybody asks what is here.
        if !matches!(kind, FrameKind::Read | FrameKind::Open | FrameKind::Reserve | FrameKind::Write | FrameKind::Sync)
        {
            return;
        }
        let now = self.now_ms();
        // All cores have it in their caches, but for the first request of a millisecond.
        if self.asked_ms.load(Ordering::Relaxed) != now {
            self.asked_ms.store(now, Ordering::Relaxed);
        }
    }

    /// How long to wait before so many bytes are sent that nobody waits for.
    pub(super) fn take(&self, bytes: u64) -> Duration {
        if !self.serves_clients() {
            return Duration::ZERO;
        }
        // What waits for the longest is not counted, lest what comes later waits for it for as long again.
        if self.rate.wait() >= LONGEST_WAIT { LONGEST_WAIT } else { self.rate.take(bytes).min(LONGEST_WAIT) }
    }

    fn serves_clients(&self) -> bool {
        let asked = self.asked_ms.load(Ordering::Relaxed);
        asked != 0 && u128::from(self.now_ms().saturating_sub(asked)) < SERVED.as_millis()
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX).saturating_add(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn uploads_are_slow_while_clients_are_served_and_only_then() {
        const MIB: u64 = 1 << 20;
        let pacing = UploadPacing::new(8 * MIB);
        let sum = |pieces: u64| (0..pieces).map(|_| pacing.take(MIB)).max().unwrap();
        assert_eq!(sum(100), Duration::ZERO, "nobody is served");
        pacing.note(FrameKind::Persist);
        pacing.note(FrameKind::Query);
        assert_eq!(sum(100), Duration::ZERO, "what masters ask for is for nobody");
        pacing.note(FrameKind::Reserve);
        let waited = sum(17);
        assert!(waited > Duration::from_millis(1700) && waited <= Duration::from_secs(2), "{waited:?}");
        assert_eq!(sum(1000), LONGEST_WAIT, "no deadline is missed");
        tokio::time::advance(SERVED).await;
        assert_eq!(sum(100), Duration::ZERO, "whoever was served has gone");
        tokio::time::advance(LONGEST_WAIT).await;
        pacing.note(FrameKind::Write);
        assert_eq!(pacing.take(MIB), Duration::ZERO, "what came beyond the rate has been paid for");
    }
}
