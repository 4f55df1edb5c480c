//! The probe: finds the master that leads, once a call or a stream had no answer from the one that did.
//!
//! The preferred master is asked first and alone: mostly it is well, and what it was asked for is slow. When it has not
//! answered at once, all are asked, each on its own, so that one that hangs keeps nobody waiting. Only a leader answers
//! the question; what the others say leads to masters that were not known yet.

use std::error::Error as _;
use std::time::Duration;

use cavern_proto::NotLeading;
use cavern_proto::master::ListWorkersRequest;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tokio::time::{Instant, sleep, timeout};

use super::stubs::Stubs;
use super::{Inner, NO_ANSWER, NO_LEADER, PAUSE_LEAST, innermost};

/// What the first question waits for its answer, what others wait until it is known that no master leads, and what
/// they wait from then on. The first two together take less than half of a lease, after which the master is suspected,
/// so that no caller waits when the lease is over.
const FIRST_WAIT: Duration = Duration::from_millis(250);
const EARLY_WAIT: Duration = Duration::from_millis(500);
const LATER_WAIT: Duration = Duration::from_secs(1);
/// So many questions to the first one without an answer, at least, and one to every other, distinguish silent masters
/// from a connection that broke.
const FIRST_FAILURES: usize = 2;
/// Between two questions to the same master, once it is known that none leads. An election takes a second or two, and
/// whoever wins it is to be found soon; an outage takes as long as it takes.
const ELECTION: Duration = Duration::from_secs(5);
const ELECTION_PAUSE: Duration = Duration::from_millis(50);
const OUTAGE_PAUSE: Duration = Duration::from_millis(200);

impl Inner {
    /// Asks until a master answers that leads, to this or to anybody else's question.
    pub(super) async fn probe(&self) {
        let begun = Instant::now();
        let first = self.masters.preferred();
        let found = self.masters.confirmed_since(first.origin);
        tokio::pin!(found);
        let first_member = first.origin.member;
        let (mut asked, mut failed, mut first_failures) = (vec![first_member], Vec::new(), 0);
        let mut questions = FuturesUnordered::new();
        questions.push(self.ask(first, Duration::ZERO, FIRST_WAIT));
        loop {
            let (stubs, answer) = tokio::select! {
                Some(answer) = questions.next() => answer,
                () = &mut found => return,
                () = self.stop.cancelled() => return,
            };
            let member = stubs.origin.member;
            let cause = match answer {
                Ok(()) => {
                    self.answered(stubs.origin);
                    tracing::info!("the master at {} answers", stubs.address());
                    return;
                }
                Err(cause) => cause,
            };
            first_failures += usize::from(member == first_member);
            if !failed.contains(&member) {
                failed.push(member);
            }
            let masters = self.masters.all();
            let is_known =
                first_failures >= FIRST_FAILURES && masters.iter().all(|stubs| failed.contains(&stubs.origin.member));
            self.breaker.probe_failed(&cause, is_known);
            for other in masters {
                if !asked.contains(&other.origin.member) {
                    asked.push(other.origin.member);
                    questions.push(self.ask(other, Duration::ZERO, EARLY_WAIT));
                }
            }
            let (pause, wait) = match is_known {
                false => (PAUSE_LEAST, EARLY_WAIT),
                true if begun.elapsed() < ELECTION => (ELECTION_PAUSE, LATER_WAIT),
                true => (OUTAGE_PAUSE, LATER_WAIT),
            };
            questions.push(self.ask(stubs, pause, wait));
        }
    }

    /// Asks one master what only a leader answers; otherwise says why it did not.
    async fn ask(&self, stubs: Stubs, pause: Duration, wait: Duration) -> (Stubs, Result<(), String>) {
        if !pause.is_zero() {
            sleep(pause).await;
        }
        let mut cluster = stubs.cluster.clone();
        let answer = match timeout(wait, cluster.list_workers(ListWorkersRequest {})).await {
            Err(_elapsed) => Err(NO_ANSWER.to_owned()),
            Ok(Ok(_)) => Ok(()),
            Ok(Err(status)) => match NotLeading::from_status(&status) {
                Some(NotLeading { leader }) => {
                    leader.and_then(|leader| self.masters.learn(&leader));
                    Err(NO_LEADER.to_owned())
                }
                None if status.source().is_some() => Err(innermost(&status)),
                None => Ok(()),
            },
        };
        (stubs, answer)
    }
}
