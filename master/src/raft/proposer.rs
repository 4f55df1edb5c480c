//! Proposals. Commands that arrive while entries are on their way share the next one: openraft syncs one append after
//! the other, so the number of entries, not of commands, is what costs. While one is applied, the next is synced.

use std::sync::Arc;

use cavern_conf::Failpoint;
use cavern_proto::record::command::Command as Kind;
use cavern_proto::record::{Command, CommandBatch};
use futures::StreamExt;
use futures::stream::FuturesOrdered;
use openraft::error::ClientWriteError;
use openraft::raft::ClientWriteResponse;
use prost::Message;
use tokio::sync::{mpsc, oneshot};

use super::types::{Batch, Node, NodeId, Raft, Types};
use crate::MasterError;
use crate::clock::Clock;
use crate::metrics::RaftMetrics;
use crate::state::Outcome;

/// Commands that wait for their entry at most; proposers beyond wait themselves.
const QUEUE: usize = 1024;
/// Entries under way at a time.
const UNDER_WAY: usize = 2;
/// Commands and bytes of one entry at most.
const BATCH_COMMANDS: usize = 256;
const BATCH_BYTES: usize = 4 << 20;

type Answer = Result<Outcome, String>;

/// Puts commands into the log. Cheap to clone.
#[derive(Clone)]
pub struct Proposer {
    queue: mpsc::Sender<(Command, oneshot::Sender<Answer>)>,
}

impl Proposer {
    /// A proposer and the task that serves it, which ends when the last clone is dropped.
    pub fn new(raft: Raft, clock: Arc<Clock>, metrics: RaftMetrics) -> (Self, impl Future<Output = ()> + Send) {
        let (queue, waiting) = mpsc::channel(QUEUE);
        (Self { queue }, serve(raft, waiting, clock, metrics))
    }

    /// Returns what the command did, once it is on disk and applied. A caller that gives up waiting does not undo it.
    ///
    /// # Errors
    /// [`MasterError::Consensus`] while nothing can be committed; the command may still be applied later.
    pub async fn propose(&self, kind: Kind) -> Result<Outcome, MasterError> {
        received(self.enqueue(kind).await?).await
    }

    /// The same for several commands, which are applied in their order, though others may come in between.
    ///
    /// # Errors
    /// As [`Self::propose`]: any of them may have been applied.
    pub async fn propose_all(&self, kinds: impl IntoIterator<Item = Kind>) -> Result<Vec<Outcome>, MasterError> {
        self.begin_all(kinds.into_iter().collect()).await?.await
    }

    /// The same; returns when they have their places, so that what is proposed after them is applied after them.
    pub async fn begin_all(
        &self,
        kinds: Vec<Kind>,
    ) -> Result<impl Future<Output = Result<Vec<Outcome>, MasterError>> + Send + use<>, MasterError> {
        let mut waiting = Vec::new();
        for kind in kinds {
            waiting.push(self.enqueue(kind).await?);
        }
        Ok(async move {
            let mut outcomes = Vec::with_capacity(waiting.len());
            for answer in waiting {
                outcomes.push(received(answer).await?);
            }
            Ok(outcomes)
        })
    }

    async fn enqueue(&self, kind: Kind) -> Result<oneshot::Receiver<Answer>, MasterError> {
        let (answer, receive) = oneshot::channel();
        self.queue.send((Command { command: Some(kind) }, answer)).await.map_err(|_| stopped())?;
        Ok(receive)
    }
}

async fn received(answer: oneshot::Receiver<Answer>) -> Result<Outcome, MasterError> {
    answer.await.map_err(|_| stopped())?.map_err(MasterError::Consensus)
}

fn stopped() -> MasterError {
    MasterError::Consensus("the master is stopping".into())
}

async fn serve(
    raft: Raft,
    mut waiting: mpsc::Receiver<(Command, oneshot::Sender<Answer>)>,
    clock: Arc<Clock>,
    metrics: RaftMetrics,
) {
    let mut under_way = FuturesOrdered::new();
    loop {
        let first = tokio::select! {
            first = waiting.recv(), if under_way.len() < UNDER_WAY => first,
            Some(()) = under_way.next(), if !under_way.is_empty() => continue,
        };
        let Some((command, answer)) = first else { break };
        let mut bytes = command.encoded_len();
        let (mut commands, mut answers) = (vec![command], vec![answer]);
        while commands.len() < BATCH_COMMANDS && bytes < BATCH_BYTES {
            let Ok((command, answer)) = waiting.try_recv() else { break };
            bytes += command.encoded_len();
            commands.push(command);
            answers.push(answer);
        }
        metrics.proposed(commands.len());
        match raft.client_write_ff(Batch(CommandBatch { commands, now_ns: clock.now_ns() })).await {
            Ok(result) => under_way.push_back(answer_all(result, answers)),
            Err(error) => refuse_all(answers, &error.to_string()),
        }
    }
    while under_way.next().await.is_some() {}
}

type Written = Result<ClientWriteResponse<Types>, ClientWriteError<NodeId, Node>>;

async fn answer_all<E>(result: impl Future<Output = Result<Written, E>>, answers: Vec<oneshot::Sender<Answer>>) {
    let result = result.await;
    Failpoint::EntryAnswered.pass();
    match result {
        Ok(Ok(response)) => {
            for (answer, outcome) in answers.into_iter().zip(response.data.0) {
                let _ = answer.send(Ok(outcome));
            }
        }
        Ok(Err(error)) => refuse_all(answers, &explain(&error)),
        Err(_stopped) => refuse_all(answers, "the master is stopping"),
    }
}

fn refuse_all(answers: Vec<oneshot::Sender<Answer>>, reason: &str) {
    for answer in answers {
        let _ = answer.send(Err(reason.to_owned()));
    }
}

fn explain(error: &ClientWriteError<NodeId, Node>) -> String {
    match error {
        ClientWriteError::ForwardToLeader(forward) => match forward.leader_id {
            Some(leader) => format!("this master does not lead, master {leader} does"),
            None => "no master leads at the moment".to_owned(),
        },
        other => other.to_string(),
    }
}
