//! Proposals. Commands that arrive while entries are on their way share the next one: the number of entries, not of
//! commands, is what costs. While one is applied, the next is synced.
//!
//! A proposer belongs to one leadership. What it is given later goes into no log: whoever decided on it knew the state
//! of that leadership. What was under way when the leadership ended may be applied nevertheless, by a successor.

use std::sync::Arc;

use cavern_conf::Failpoint;
use cavern_proto::NotLeading;
use cavern_proto::record::command::Command as Kind;
use cavern_proto::record::{Command, CommandBatch};
use cavern_state::{Outcome, TypedCommand};
use futures::stream::FuturesOrdered;
use futures::{FutureExt, StreamExt};
use openraft::errors::ClientWriteError;
use openraft::impls::ProgressResponder;
use openraft::raft::ClientWriteResult;
use prost::Message;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

use super::observe;
use super::state_machine::Raft;
use super::types::{Batch, LeaderId, Types};
use crate::clock::Clock;
use crate::error::{ConsensusError, Result};
use crate::metrics::ConsensusMetrics;

/// Commands that wait for their entry at most; proposers beyond wait themselves.
const QUEUE: usize = 1024;
/// Entries under way at a time.
const UNDER_WAY: usize = 2;
/// Commands and bytes of one entry at most.
const BATCH_COMMANDS: usize = 256;
const BATCH_BYTES: usize = 4 << 20;

type Answer = Result<Outcome, Failure>;

/// The part of the commands under way that whoever proposes some may have.
pub type ProposalPermit = Arc<OwnedSemaphorePermit>;

/// Whom to answer what became of a command.
struct Asker {
    answer: oneshot::Sender<Answer>,
    /// The command has a part of it until then.
    _room: Option<ProposalPermit>,
}

impl Asker {
    fn answer(self, answer: Answer) {
        // Who has gone does not miss it.
        let _ = self.answer.send(answer);
    }
}

/// Why a command has no outcome.
#[derive(Clone)]
enum Failure {
    /// Another master leads, or none; it is in no log.
    NotLeading(NotLeading),
    /// It may be applied nevertheless.
    Unknown(String),
}

impl From<Failure> for ConsensusError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::NotLeading(answer) => Self::NotLeading(answer),
            Failure::Unknown(reason) => Self::Unavailable(reason),
        }
    }
}

/// Puts commands into the log. Cheap to clone.
#[derive(Clone)]
pub struct Proposer {
    queue: mpsc::Sender<(Command, Asker)>,
}

impl Proposer {
    /// A proposer and the task that serves it, which ends when the last clone is dropped.
    pub(super) fn new(
        raft: Raft,
        lead: LeaderId,
        clock: Arc<Clock>,
        metrics: ConsensusMetrics,
    ) -> (Self, impl Future<Output = ()> + Send + use<>) {
        let (queue, waiting) = mpsc::channel(QUEUE);
        (Self { queue }, serve(raft, lead, waiting, clock, metrics))
    }

    /// Returns what the command did, once it is on disk and applied. A caller that gives up waiting does not undo it.
    ///
    /// # Errors
    /// [`ConsensusError::NotLeading`] when this master leads no more and the command was not put into the log;
    /// [`ConsensusError::Unavailable`] when nothing can be committed: it may still be applied later.
    pub async fn propose<C: TypedCommand>(&self, command: C) -> Result<C::Outcome> {
        let answer = self.enqueue(command.into_kind(), None).await?;
        Ok(C::outcome(received(answer).await?)?)
    }

    /// Returns what several commands did, which are applied in their order, though others may come in between.
    ///
    /// # Errors
    /// As [`Self::propose`]: any of them may have been applied.
    pub async fn propose_all<C: TypedCommand>(&self, commands: impl IntoIterator<Item = C>) -> Result<Vec<C::Outcome>> {
        self.begin_all(commands.into_iter().collect(), None).await?.await
    }

    /// Puts several commands into the log, and returns when they have their places, so that what is proposed after them
    /// is applied after them. `room` is given back when the last of them is answered.
    pub async fn begin_all<C: TypedCommand>(
        &self,
        commands: Vec<C>,
        room: Option<ProposalPermit>,
    ) -> Result<impl Future<Output = Result<Vec<C::Outcome>>> + Send + use<C>> {
        let mut waiting = Vec::new();
        for command in commands {
            waiting.push(self.enqueue(command.into_kind(), room.clone()).await?);
        }
        Ok(async move {
            let mut outcomes = Vec::with_capacity(waiting.len());
            for answer in waiting {
                outcomes.push(C::outcome(received(answer).await?)?);
            }
            Ok(outcomes)
        })
    }

    async fn enqueue(&self, kind: Kind, room: Option<ProposalPermit>) -> Result<oneshot::Receiver<Answer>> {
        let (answer, receive) = oneshot::channel();
        self.queue
            .send((Command { command: Some(kind) }, Asker { answer, _room: room }))
            .await
            .map_err(|_| stopped())?;
        Ok(receive)
    }
}

async fn received(answer: oneshot::Receiver<Answer>) -> Result<Outcome> {
    Ok(answer.await.map_err(|_| stopped())??)
}

fn stopped() -> ConsensusError {
    ConsensusError::Unavailable("the master is stopping, or leads no more".into())
}

async fn serve(
    raft: Raft,
    lead: LeaderId,
    mut waiting: mpsc::Receiver<(Command, Asker)>,
    clock: Arc<Clock>,
    metrics: ConsensusMetrics,
) {
    let mut under_way = FuturesOrdered::new();
    let mut observed = raft.metrics();
    // A leadership that is over says nothing more of what was under way, unless a successor does.
    let is_over =
        observe::until(&mut observed, |metrics| metrics.vote.leader_id != lead || metrics.running_state.is_err());
    tokio::pin!(is_over);
    loop {
        // In this order, so that a simulation has one course.
        let first = tokio::select! {
            biased;
            _ = &mut is_over => {
                while under_way.next().now_or_never().flatten().is_some() {}
                return;
            }
            Some(()) = under_way.next(), if !under_way.is_empty() => continue,
            first = waiting.recv(), if under_way.len() < UNDER_WAY => first,
        };
        let Some((command, asker)) = first else { break };
        let mut bytes = command.encoded_len();
        let (mut commands, mut askers) = (vec![command], vec![asker]);
        while commands.len() < BATCH_COMMANDS && bytes < BATCH_BYTES {
            let Ok((command, asker)) = waiting.try_recv() else { break };
            bytes += command.encoded_len();
            commands.push(command);
            askers.push(asker);
        }
        metrics.commands.inc_by(commands.len() as u64);
        metrics.batch_commands.observe(commands.len() as f64);
        let batch = Batch(CommandBatch { commands, now_ns: clock.now_ns() });
        let (responder, written) = ProgressResponder::complete_only();
        match raft.write(batch).with_leader(lead).responder(responder).await {
            Ok(()) => under_way.push_back(answer_all(written, askers)),
            Err(error) => refuse_all(askers, &Failure::Unknown(error.to_string())),
        }
    }
    loop {
        tokio::select! {
            biased;
            answered = under_way.next() => if answered.is_none() { return },
            _ = &mut is_over => return,
        }
    }
}

async fn answer_all<E>(written: impl Future<Output = Result<ClientWriteResult<Types>, E>>, askers: Vec<Asker>) {
    let result = written.await;
    Failpoint::EntryAnswered.pass();
    match result {
        Ok(Ok(response)) => {
            for (asker, outcome) in askers.into_iter().zip(response.data.0) {
                asker.answer(Ok(outcome));
            }
        }
        Ok(Err(error)) => refuse_all(askers, &explain(&error)),
        Err(_stopped) => refuse_all(askers, &Failure::Unknown("the master is stopping".into())),
    }
}

fn refuse_all(askers: Vec<Asker>, reason: &Failure) {
    for asker in askers {
        asker.answer(Err(reason.clone()));
    }
}

fn explain(error: &ClientWriteError<Types>) -> Failure {
    match error {
        ClientWriteError::ForwardToLeader(forward) => Failure::NotLeading(observe::forwarded(forward)),
        ClientWriteError::PreconditionFailed(_) => Failure::NotLeading(NotLeading { leader: None }),
        other => Failure::Unknown(other.to_string()),
    }
}
