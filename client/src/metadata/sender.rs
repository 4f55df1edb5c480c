//! The way of operations to the master: calls over one stream, several ahead of their answers.
//!
//! The master applies the changes of a stream in the order in which they were sent, and answers in that order; so the
//! answers can be taken into the caches as they come. When the stream breaks, what has no answer is sent again on the
//! next one, under its numbers: the log says what (`log/state.rs`).
//!
//! The same holds when another master leads. What was sent to the one before may be in the log that the next one has:
//! whether it was made is known when the next one has answered it under its number, and not before.

use std::sync::Arc;
use std::time::Duration;

use cavern_conf::{Failpoint, backoff};
use cavern_net::NetError;
use cavern_net::master::{SUSPECT_AFTER, Stubs};
use cavern_proto::master::{MutateReply, MutateRequest};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Status, Streaming};

use super::log::{AHEAD, StreamEnd, Verdict, unknown};
use super::parts::{Inner, Metadata};
use crate::error::ClientError;

/// Between two attempts.
const PAUSE: Duration = backoff::CHANGE_STREAM.first;
/// Between two questions whether a master that owes an answer still leads.
const SUSPECTED_AGAIN: Duration = Duration::from_secs(2);
/// What the master says at the end of a stream whose session is over is waited for so long.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// A directory in which nothing was changed for so long is let go of.
const IDLE: Duration = Duration::from_secs(60);

impl Verdict {
    fn of(error: &ClientError) -> Self {
        match error {
            ClientError::Net(NetError::Master { code: tonic::Code::FailedPrecondition, .. }) => Self::NotMade,
            ClientError::Invalid(_) | ClientError::Net(NetError::Master { code: tonic::Code::Unimplemented, .. }) => {
                Self::Refused
            }
            _ => Self::Unknown,
        }
    }
}

struct Connection {
    /// Of the master that has it.
    stubs: Arc<Stubs>,
    requests: mpsc::Sender<MutateRequest>,
    replies: Streaming<MutateReply>,
    /// When the master is suspected, unless it answers; while it is to answer anything.
    suspect_at: Option<Instant>,
}

/// Sends the log's operations to the master that leads.
struct Sender {
    inner: Arc<Inner>,
    /// Of the last connection.
    session: u64,
    connection: Option<Connection>,
    /// When it is looked for directories to let go of.
    idle_at: Instant,
}

impl Metadata {
    /// Sends what changes until `stop`. What the process before has left comes first: [`Self::replayed`] knows of it
    /// when this has been called, and before anything is sent.
    pub(crate) fn send_changes(&self, stop: CancellationToken) -> impl Future<Output = ()> + Send + use<> {
        let inner = self.inner.clone();
        inner.go_on();
        async move {
            let sender =
                Sender { inner: inner.clone(), session: 0, connection: None, idle_at: Instant::now() + IDLE / 4 };
            let _stopped = stop.run_until_cancelled(sender.run()).await;
            inner.log.close();
        }
    }
}

impl Sender {
    async fn run(mut self) {
        let inner = self.inner.clone();
        let log = &inner.log;
        loop {
            self.expire();
            let is_ready = self.follow_session().await;
            inner.release_gathered();
            let (has_work, is_idle) = {
                let state = log.lock();
                (state.has_work(Instant::now()), state.is_idle())
            };
            if self.connection.is_none() && has_work && !(is_ready && self.connect().await) {
                sleep(PAUSE).await;
                continue;
            }
            if is_ready {
                self.send();
            }
            let (due, deadline) = self.next_look(is_ready);
            let stubs = self.connection.as_ref().map(|connection| connection.stubs.clone());
            let suspect_at = self.connection.as_ref().and_then(|connection| connection.suspect_at);
            tokio::select! {
                reply = next(&mut self.connection) => {
                    if let Err(status) = self.receive_reply(reply) {
                        self.broken(StreamEnd::Broken, stubs.as_deref(), &status);
                        sleep(PAUSE).await;
                    }
                }
                () = moved(&inner, stubs.as_deref()) => {
                    self.broken(StreamEnd::Broken, None, &Status::unavailable("another master leads"));
                }
                () = sleep_until(suspect_at.unwrap_or_else(Instant::now)), if suspect_at.is_some() => self.suspect(),
                () = log.filled.notified() => {}
                () = inner.open.inodes.left.notified() => {}
                () = sleep_until(self.idle_at) => {
                    log.return_idle(IDLE);
                    self.idle_at = Instant::now() + IDLE / 4;
                }
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {}
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {}
                () = sleep(PAUSE), if !is_ready && !is_idle => {}
            }
        }
    }

    /// When something is due to be sent, if it can be, and when somebody has waited for too long.
    fn next_look(&self, is_ready: bool) -> (Option<Instant>, Option<Instant>) {
        let is_over = self.connection.as_ref().is_some_and(|connection| connection.requests.is_closed());
        let state = self.inner.log.lock();
        (state.due().filter(|_| is_ready && !is_over), state.deadline())
    }

    /// Answers those whose time is up.
    fn expire(&self) {
        let inner = &self.inner;
        let (over, is_unanswered) = inner.log.lock().expire(Instant::now(), inner.change_timeout);
        inner.log.finish(over);
        if is_unanswered {
            inner.master.suspect();
        }
    }

    /// It is not known what became of the calls that were sent: only another session is notified of what they may still
    /// change.
    fn give_up(&mut self, cause: &str) {
        self.inner.lease.abandon();
        self.inner.log.end_delegations();
        self.connection = None;
        let done = self.inner.log.lock().give_up(cause);
        self.inner.log.finish(done);
    }

    /// Whether there is a session to send in.
    async fn follow_session(&mut self) -> bool {
        let session = self.inner.lease.session();
        if session == 0 || self.inner.master.is_given_up() {
            return false;
        }
        if session != self.session {
            self.take_in_last_words().await;
        }
        let ended = self.inner.log.lock().follow(session);
        if let Some(done) = ended {
            self.connection = None;
            self.inner.log.finish(done);
        }
        self.session = session;
        true
    }

    /// The session is over, and the master may have said what became of the calls in it: as a rule that it did not make
    /// them, which go on in the next one then.
    async fn take_in_last_words(&mut self) {
        let until = Instant::now() + LAST_WORDS;
        while self.inner.log.lock().awaits_answer() {
            let Ok(reply) = timeout_at(until, next(&mut self.connection)).await else { return };
            if let Err(status) = self.receive_reply(reply) {
                let error = ClientError::from(NetError::from(status));
                // What became of them otherwise nobody knows.
                if let verdict @ Verdict::NotMade = Verdict::of(&error) {
                    self.end_stream(StreamEnd::Broken, verdict, &error);
                }
                return;
            }
        }
    }

    async fn connect(&mut self) -> bool {
        let (requests, waiting) = mpsc::channel(AHEAD);
        let inner = self.inner.clone();
        let stubs = Arc::new(inner.master.stubs());
        let mut namespace = stubs.namespace.clone();
        let opening = inner.master.open(&stubs, namespace.mutate(ReceiverStream::new(waiting)));
        let deadline = inner.log.lock().deadline();
        let opened = match deadline {
            Some(deadline) => timeout_at(deadline, opening).await,
            None => Ok(opening.await),
        };
        match opened {
            Ok(Some(Ok(replies))) => {
                let replies = replies.into_inner();
                self.connection = Some(Connection { stubs, requests, replies, suspect_at: None });
            }
            Ok(Some(Err(status))) => self.broken(StreamEnd::NotOpened, Some(&stubs), &status),
            // Nothing was sent yet.
            Ok(None) => {}
            Err(_elapsed) => self.inner.master.suspect(),
        }
        self.connection.is_some()
    }

    fn send(&mut self) {
        let (inner, Some(connection)) = (&self.inner, &mut self.connection) else { return };
        // There is room for all calls but some that a process before has left, which are sent with later ones. A stream
        // that is over says so by its answer.
        while let Ok(permit) = connection.requests.try_reserve() {
            let Some(outgoing) = inner.log.next_request(inner.names.recent.mark()) else { break };
            inner.lease.changes_in(self.session);
            permit.send(outgoing.request);
            if outgoing.has_answered {
                Failpoint::WriteBackSent.pass();
            }
            connection.suspect_at.get_or_insert_with(|| Instant::now() + SUSPECT_AFTER);
        }
    }

    /// The master owes an answer for some time: asks whether it still leads, and again after a while.
    fn suspect(&mut self) {
        self.inner.master.suspect();
        if let Some(connection) = &mut self.connection {
            connection.suspect_at = Some(Instant::now() + SUSPECTED_AGAIN);
        }
    }

    /// Hands out the results of the first call.
    fn receive_reply(&mut self, reply: Result<MutateReply, Status>) -> Result<(), Status> {
        let reply = reply?;
        let (call, owes_more) = {
            let mut state = self.inner.log.lock();
            (state.take_answered(), state.awaits_answer())
        };
        let Some(call) = call else { return Err(Status::internal("an answer to nothing")) };
        if call.has_answered() {
            Failpoint::WriteBackMade.pass();
        }
        if let Some(connection) = &mut self.connection {
            self.inner.master.note_answer(&connection.stubs);
            connection.suspect_at = owes_more.then(|| Instant::now() + SUSPECT_AFTER);
        }
        let (changes, results) = (call.operations.len(), reply.results.len());
        if results != changes {
            let cause = format!("the master gave {results} results for {changes} changes");
            self.inner.log.finish(unknown(call.operations, &cause));
            self.give_up(&cause);
            return Ok(());
        }
        self.inner.apply_results(call, reply, self.session);
        Ok(())
    }

    /// There is no stream any more. `stubs`: of the master that said so.
    fn broken(&mut self, end: StreamEnd, stubs: Option<&Stubs>, status: &Status) {
        if let Some(stubs) = stubs {
            self.inner.master.stream_failed(stubs, status);
        }
        let error = ClientError::from(NetError::from(status.clone()));
        self.end_stream(end, Verdict::of(&error), &error);
    }

    fn end_stream(&mut self, end: StreamEnd, verdict: Verdict, error: &ClientError) {
        self.connection = None;
        tracing::debug!("the stream of changes is over, and is opened again soon: {error}");
        let done = self.inner.log.lock().broken(end, verdict, error, Instant::now());
        let refused =
            done.iter().flatten().filter(|(operation, _)| operation.must_deliver && !operation.mutation.is_write_back);
        for (operation, _) in refused {
            let inode = operation.inodes.first().copied().unwrap_or_default();
            tracing::warn!(
                "the master refuses a change of inode {inode} (0: of any) that it is owed, and is asked no more: what \
                 that gives up stays held until this session ends; see whether the master has this version: {error}"
            );
        }
        match done {
            Some(done) => drop(self.inner.log.finish(done)),
            None => self.give_up(&error.to_string()),
        }
    }
}

/// The next answer; an error when the stream is over. Waits for ever where there is none.
async fn next(connection: &mut Option<Connection>) -> Result<MutateReply, Status> {
    match connection {
        Some(connection) => match connection.replies.message().await {
            Ok(Some(reply)) => Ok(reply),
            Ok(None) => Err(Status::unavailable("the master has ended the stream")),
            Err(status) => Err(status),
        },
        None => std::future::pending().await,
    }
}

/// Completes when the stream is to be opened at another master. Waits for ever where there is none.
async fn moved(inner: &Inner, stubs: Option<&Stubs>) {
    match stubs {
        Some(stubs) => inner.master.moved_from(stubs).await,
        None => std::future::pending().await,
    }
}
