//! One stream of a session: what its client says, and the events that it is sent.

use std::sync::atomic::{AtomicU64, Ordering};

use cavern_proto::master::{WatchEvent, WatchRequest};
use cavern_work::sessions::{SessionStream, StreamId};
use futures::StreamExt;
use tokio::sync::mpsc;
use tonic::{Status, Streaming};

use crate::services::Services;

pub(super) struct SessionService {
    services: Services,
    stream: StreamId,
    /// Messages of the client, of which the first came before this.
    received: AtomicU64,
    /// Of which the client knows the masters.
    known_group: AtomicU64,
}

impl SessionService {
    pub fn new(services: Services, stream: StreamId) -> Self {
        Self { services, stream, received: AtomicU64::new(1), known_group: AtomicU64::new(0) }
    }

    /// Serves the client until one of the two has gone.
    pub async fn serve(
        self,
        incoming: Streaming<WatchRequest>,
        events: SessionStream,
        answers: mpsc::Sender<Result<WatchEvent, Status>>,
    ) {
        tokio::select! {
            () = self.listen(incoming) => {}
            () = self.send_events(events, &answers) => {}
            () = self.services.stop.cancelled() => {}
        }
    }

    async fn listen(&self, mut incoming: Streaming<WatchRequest>) {
        let (watch, session) = (&self.services.watch, self.stream.session);
        // An error ends the stream as its end does.
        while let Some(Ok(message)) = incoming.next().await {
            // First of all: in a stream that is not the session's last nothing is said of it any more.
            if !watch.acknowledge(self.stream, message.acknowledged_seq, message.invalidated_seq) {
                return;
            }
            if message.ends {
                return watch.end(session);
            }
            if message.mounts_settled != 0 {
                watch.mounts_settled(session, message.mounts_settled);
            }
            if let Some(activity) = message.activity {
                watch.has_done(session, activity);
            }
            if self.known_group.swap(message.group_epoch, Ordering::Relaxed) != message.group_epoch {
                watch.knows_group(session, message.group_epoch);
            }
            self.received.fetch_add(1, Ordering::Release);
        }
    }

    async fn send_events(&self, mut session: SessionStream, answers: &mpsc::Sender<Result<WatchEvent, Status>>) {
        let Services { consensus, lease, .. } = &self.services;
        // The first came before this master was known to lead last: the door has looked.
        let mut heard = 1;
        while let Some(events) = session.next().await {
            for event in events.iter().flat_map(|events| events.iter()) {
                heard = heard_while_leading(heard, &self.received, || lease.holds());
                let known = self.known_group.load(Ordering::Relaxed);
                let (group_epoch, masters) = consensus.masters_unless_known(known);
                let event = WatchEvent { heard, group_epoch, masters, ..event.clone() };
                if answers.send(Ok(event)).await.is_err() {
                    return;
                }
            }
        }
    }
}

/// How many messages of a client a master has heard while it led, of which it says that it has: the client's lease runs
/// from the last of them. One that leads no more may still apply what it had, and have others told; what it has heard
/// meanwhile extends nothing, since a later leader waits for the leases from before its term only.
fn heard_while_leading(before: u64, received: &AtomicU64, leads: impl FnOnce() -> bool) -> u64 {
    // In this order: these were here when it led.
    let received = received.load(Ordering::Acquire);
    if leads() { received } else { before }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_heard_after_the_lead_extends_no_lease() {
        let received = AtomicU64::new(3);
        assert_eq!(heard_while_leading(1, &received, || true), 3);
        assert_eq!(heard_while_leading(3, &AtomicU64::new(9), || false), 3);
        // One that comes while it is looked at counts the next time.
        let late = || {
            received.store(4, Ordering::Release);
            true
        };
        assert_eq!(heard_while_leading(3, &received, late), 3);
    }
}
