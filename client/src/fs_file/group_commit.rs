//! Work that many ask for at once, done once for all who waited when it began.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Mutex;

use crate::error::ClientError;

/// Rounds of the same work, one at a time. Whoever asks while one is under way is served by the next: what he has done
/// before he asked may have come too late for this one.
pub(super) struct GroupCommit {
    begun: AtomicU64,
    last: Mutex<Finished>,
}

struct Finished {
    /// Of the rounds that have begun.
    number: u64,
    result: Result<(), ClientError>,
}

impl Default for GroupCommit {
    fn default() -> Self {
        Self { begun: AtomicU64::new(0), last: Mutex::new(Finished { number: 0, result: Ok(()) }) }
    }
}

impl GroupCommit {
    /// Gives the result of a round that begins after this was called: of somebody else's, or of `work`.
    pub(super) async fn join_round(
        &self,
        work: impl Future<Output = Result<(), ClientError>>,
    ) -> Result<(), ClientError> {
        let before = self.begun.load(Ordering::Acquire);
        let mut last = self.last.lock().await;
        if last.number > before {
            return last.result.clone();
        }
        let number = self.begun.fetch_add(1, Ordering::AcqRel) + 1;
        let result = work.await;
        *last = Finished { number, result: result.clone() };
        result
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use futures::poll;
    use tokio::sync::Semaphore;

    use super::*;

    #[tokio::test]
    async fn whoever_asks_while_a_round_is_under_way_shares_the_next_one() {
        let (rounds, go, count) = (GroupCommit::default(), Semaphore::new(0), AtomicU32::new(0));
        let work = || async {
            let number = count.fetch_add(1, Ordering::Relaxed) + 1;
            go.acquire().await.expect("it is open").forget();
            match number {
                2 => Err(ClientError::OutcomeUnknown { cause: "the second".into() }),
                _ => Ok(()),
            }
        };
        let mut first = Box::pin(rounds.join_round(work()));
        assert!(poll!(&mut first).is_pending());
        let mut others = [(); 3].map(|()| Box::pin(rounds.join_round(work())));
        for other in &mut others {
            assert!(poll!(other).is_pending(), "answered before anything was done for it");
        }
        go.add_permits(1);
        assert!(first.await.is_ok());
        for other in &mut others {
            assert!(poll!(other).is_pending(), "answered by a round that began before it asked");
        }
        go.add_permits(1);
        for other in others {
            assert!(matches!(other.await, Err(ClientError::OutcomeUnknown { .. })));
        }
        assert_eq!(count.load(Ordering::Relaxed), 2);
        go.add_permits(1);
        assert!(rounds.join_round(work()).await.is_ok());
    }

    #[tokio::test]
    async fn a_round_that_is_given_up_serves_nobody() {
        let (rounds, count) = (GroupCommit::default(), AtomicU32::new(0));
        let mut given_up = Box::pin(rounds.join_round(std::future::pending()));
        assert!(poll!(&mut given_up).is_pending());
        let work = async {
            count.fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        let mut next = Box::pin(rounds.join_round(work));
        assert!(poll!(&mut next).is_pending());
        drop(given_up);
        assert!(next.await.is_ok());
        assert_eq!(count.load(Ordering::Relaxed), 1);
    }
}
