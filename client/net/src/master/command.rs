//! The way of a command to the master that leads.
//!
//! A command has no time to learn who leads from its failures, and its calls take as long as they take. So it asks the
//! masters first, in the order of the configuration, and follows what they say. That is a hint and no more: one that
//! was stopped for a while says that it leads when it does not. So whoever waits for an answer, or is told that there
//! is none, has the probe ask all of them at once, and goes to the one that answers as a leader.
//!
//! A command outlives its master: the next one is asked the same again, for as long as a call may take. So each request
//! is one that may be sent twice: it reads, or does nothing the second time, or has an id, or looks first whether it is
//! done already.

use std::collections::VecDeque;
use std::error::Error as _;
use std::time::Duration;

use cavern_conf::Config;
use cavern_conf::backoff::{self, Backoff};
use cavern_proto::raft::GetGroupRequest;
use cavern_proto::{NotLeading, StatusDetail};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tonic::{Code, Response, Status};

use super::members::{MASTERS_MAX, Origin};
use super::stubs::{PATIENT_KEEP_ALIVE, Stubs};
use super::{Inner, MasterChannel, NO_ANSWER, NO_LEADER, innermost};
use crate::error::NetError;

/// For a master to say who leads, which it does without asking anybody.
const GROUP_WAIT: Duration = Duration::from_secs(1);

/// What a master says when it is asked who leads.
enum LeaderAnswer {
    Here,
    At(Box<Stubs>),
    /// Nobody that it knows of, and why it says so.
    Nowhere(String),
    /// There is no master to be asked.
    Unreachable(String),
}

impl MasterChannel {
    /// The masters as a command asks them, whose calls take as long as they take unless the master does not even answer
    /// pings. Inside a tokio runtime; they are connected to when they are first asked.
    ///
    /// # Errors
    /// [`NetError::Invalid`] names an address of the configuration that is none, or a file of `[security]` that is not
    /// usable.
    pub fn for_command(config: &Config) -> Result<Self, NetError> {
        Self::with(config, PATIENT_KEEP_ALIVE)
    }

    /// The masters as a command asks them, with calls that begin at the master that leads. Tries for
    /// `client.metadata_timeout` while none does, and not again where none can be reached.
    ///
    /// # Errors
    /// Those of `for_command`; [`NetError::MasterUnavailable`] says what became of each master, in their order.
    pub async fn connect(config: &Config) -> Result<Self, NetError> {
        let masters = Self::for_command(config)?;
        let first = masters.inner.masters.preferred().origin;
        // One that stands still keeps nobody waiting who finds that another one leads.
        let found = masters.attend(first, masters.inner.find_leader(masters.deadline())).await;
        found.unwrap_or(Ok(()))?;
        Ok(masters)
    }

    /// Calls begin at the master at an address, until another one is found to lead.
    pub fn begin_at(&self, address: &str) {
        if let Some(stubs) = self.inner.masters.at(address) {
            self.inner.masters.prefer(stubs.origin);
        }
    }

    /// Asks until a master that leads has answered. What it asks may be more than one call, or a stream.
    ///
    /// # Errors
    /// What it answered; [`NetError::MasterUnavailable`] when none did for `client.metadata_timeout`.
    pub async fn ask<T>(&self, mut request: impl AsyncFnMut(Stubs) -> Result<T, Status>) -> Result<T, NetError> {
        let (inner, patience) = (&self.inner, self.inner.timeout);
        let (mut backoff, mut failing_since) = (backoff::MASTER.begin(), None::<Instant>);
        loop {
            let (asked, stubs) = (Instant::now(), inner.masters.preferred());
            let origin = stubs.origin;
            let status = match self.attend(origin, Box::pin(request(stubs))).await {
                Some(Ok(answer)) => {
                    inner.answered(origin);
                    return Ok(answer);
                }
                Some(Err(status)) => status,
                // Another master leads: it is preferred now.
                None => continue,
            };
            let cause = match NotLeading::from_status(&status) {
                Some(_) => NO_LEADER.to_owned(),
                None if status.source().is_some() => innermost(&status),
                None if StatusDetail::Unanswered.is_on(&status) => status.message().to_owned(),
                None => {
                    inner.answered(origin);
                    return Err(status.into());
                }
            };
            // One that has worked on it for so long led until now.
            if asked.elapsed() > patience {
                failing_since = None;
                backoff.reset();
            }
            let deadline = *failing_since.get_or_insert_with(Instant::now) + patience;
            if !self.find_again(origin, &mut backoff, deadline).await {
                return Err(inner.unavailable(cause));
            }
        }
    }

    /// Asks with one unary call until a master that leads has answered.
    pub async fn ask_unary<T>(
        &self,
        mut request: impl AsyncFnMut(Stubs) -> Result<Response<T>, Status>,
    ) -> Result<T, NetError> {
        self.ask(async |master: Stubs| request(master).await.map(Response::into_inner)).await
    }

    /// After a failure: waits until another attempt may go better, and prefers the master that leads then. False when
    /// the deadline comes first. One that cannot be reached yet is tried again.
    async fn find_again(&self, failed: Origin, backoff: &mut Backoff, deadline: Instant) -> bool {
        let inner = &self.inner;
        self.suspect();
        while let Some(pause) = backoff.next_pause_before(deadline) {
            inner.wait_for_leader(failed, pause).await;
            tokio::select! {
                biased;
                // What the probe has found is certain.
                () = inner.masters.confirmed_since(failed) => return true,
                found = inner.find_leader(deadline) => if found.is_ok() {
                    return true;
                },
                // Each master that stands still takes a part of the time.
                () = sleep_until(deadline) => return false,
            }
        }
        false
    }
}

impl Inner {
    /// Prefers the master that leads, as the masters say. Asks all of them once, and again until the deadline.
    async fn find_leader(&self, deadline: Instant) -> Result<(), NetError> {
        let mut backoff = backoff::MASTER.begin();
        loop {
            let mut said: Vec<(Stubs, String)> = Vec::new();
            let mut is_any_reached = false;
            let mut to_ask = VecDeque::from(self.masters.all());
            while let Some(stubs) = to_ask.pop_front() {
                let is_asked = said.iter().any(|(asked, _)| asked.address() == stubs.address());
                if is_asked || said.len() >= MASTERS_MAX {
                    continue;
                }
                let lead = self.ask_who_leads(&stubs).await;
                is_any_reached |= !matches!(lead, LeaderAnswer::Unreachable(_));
                let answer = match lead {
                    LeaderAnswer::Here => {
                        self.masters.prefer(stubs.origin);
                        return Ok(());
                    }
                    LeaderAnswer::At(leader) => {
                        let answer = format!("says that the one at {} leads", leader.address());
                        to_ask.push_front(*leader);
                        answer
                    }
                    LeaderAnswer::Nowhere(answer) | LeaderAnswer::Unreachable(answer) => answer,
                };
                said.push((stubs, answer));
            }
            let pause = backoff.next_pause_before(deadline).filter(|_| is_any_reached);
            let Some(pause) = pause else { return Err(self.unled(&said, is_any_reached)) };
            sleep(pause).await;
        }
    }

    fn unled(&self, said: &[(Stubs, String)], is_any_reached: bool) -> NetError {
        let each: Vec<String> = match said {
            [(_, only)] => vec![only.clone()],
            several => several.iter().map(|(stubs, answer)| format!("{}: {answer}", stubs.address())).collect(),
        };
        let each = each.join("; ");
        self.unavailable(if is_any_reached { format!("{NO_LEADER} ({each})") } else { each })
    }

    async fn ask_who_leads(&self, stubs: &Stubs) -> LeaderAnswer {
        let (mut raft, wait) = (stubs.raft.clone(), self.masters.connect_timeout() + GROUP_WAIT);
        let group = match timeout(wait, raft.get_group(GetGroupRequest {})).await {
            Ok(Ok(group)) => group.into_inner(),
            // A master of a version that has no groups is the only one.
            Ok(Err(status)) if status.code() == Code::Unimplemented => return LeaderAnswer::Here,
            // Nobody that can be spoken to: one side speaks TLS and the other does not, or refuses a certificate.
            Ok(Err(status)) if status.source().is_some() => return LeaderAnswer::Unreachable(innermost(&status)),
            Ok(Err(status)) => return LeaderAnswer::Nowhere(status.message().to_owned()),
            Err(_elapsed) => return LeaderAnswer::Nowhere(NO_ANSWER.to_owned()),
        };
        if group.leader == 0 {
            let reason = if group.node_id == 0 { "has no place in a cluster yet" } else { "knows no leader" };
            return LeaderAnswer::Nowhere(reason.to_owned());
        }
        if group.leader == group.node_id {
            return LeaderAnswer::Here;
        }
        let leader = group.members.iter().find(|member| member.node_id == group.leader);
        match leader.and_then(|leader| self.masters.at(&leader.address)) {
            Some(leader) => LeaderAnswer::At(Box::new(leader)),
            None => LeaderAnswer::Nowhere(format!("says that master {} leads, and not where that is", group.leader)),
        }
    }
}
