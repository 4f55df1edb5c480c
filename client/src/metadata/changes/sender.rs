//! The way of changes to the master: calls over one stream, several ahead of their answers.
//!
//! The master applies the changes of a stream in the order in which they were sent, and answers in that order; so the
//! answers can be taken into the caches as they come. When the stream breaks, what has no answer is sent again on the
//! next one, under its numbers. Calls that may have been made already come before all others, since they were sent
//! before them. They stay until they are answered or the session is over, also when nobody waits for the answer any
//! more.
//!
//! The same holds when another master leads. What was sent to the one before may be in the log that the next one has:
//! whether it was made is known when the next one has answered it under its number, and not before.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use cavern_conf::{Failpoint, backoff};
use cavern_net::NetError;
use cavern_net::master::{SUSPECT_AFTER, Stubs};
use cavern_proto::bounded::MAX_KEPT_RESULTS;
use cavern_proto::master::{MutateReply, MutateRequest};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::super::Inner;
use super::super::recent_invalidations::Mark;
use super::super::replay::EarlierCall;
use super::{Pending, numbered};
use crate::error::ClientError;
use crate::journal::Journal;

/// Calls under way at a time. Changes gather while all are.
const AHEAD: usize = 3;
/// Changes that were answered and whose results the master is to keep, as many as the journal has slots: with those
/// under way far fewer than it would, and fewer bytes.
const ASKED_AGAIN_MAX: u64 = MAX_KEPT_RESULTS / 32;
/// Between two attempts.
const PAUSE: Duration = backoff::CHANGE_STREAM.first;
/// Between two questions whether a master that owes an answer still leads.
const SUSPECTED_AGAIN: Duration = Duration::from_secs(2);

/// What the end of a stream says about the changes that it left without an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verdict {
    /// None was made: the session is not (yet) alive there.
    NotMade,
    /// They may have been made.
    Unknown,
    /// Those of the first call were not made, nor ever will be.
    Refused,
}

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

/// Changes with numbers.
struct Call {
    changes: Vec<Pending>,
    /// Of the first change.
    first: u64,
    mark: Mark,
    /// On the stream that there is.
    is_sent: bool,
    /// On one that broke.
    was_sent: bool,
}

impl Call {
    fn may_be_made(&self) -> bool {
        self.is_sent || self.was_sent
    }

    fn last(&self) -> u64 {
        self.first + self.changes.len() as u64 - 1
    }

    /// Whether some had their answer before.
    fn has_answered(&self) -> bool {
        self.changes.iter().any(|pending| pending.is_answered)
    }

    /// Of those who still wait.
    fn deadline(&self) -> Option<Instant> {
        self.changes.iter().filter(|pending| pending.asker.is_some()).map(|pending| pending.deadline).min()
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

/// See the module.
pub(super) struct Sender {
    inner: Arc<Inner>,
    /// The numbers are those of this session.
    session: u64,
    /// Every change up to this number has been answered.
    answered: u64,
    /// Numbers up to this one were used by a process before.
    used: u64,
    calls: VecDeque<Call>,
    connection: Option<Connection>,
}

impl Sender {
    pub(super) fn new(inner: Arc<Inner>) -> Self {
        let mut sender = Self { inner, session: 0, answered: 0, used: 0, calls: VecDeque::new(), connection: None };
        if let Some(journal) = sender.inner.journal.clone() {
            sender.go_on(&journal);
        }
        sender
    }

    /// Begins with what the process before has left.
    fn go_on(&mut self, journal: &Arc<Journal>) {
        (self.session, self.used) = journal.session();
        let (calls, unsent) = self.inner.earlier_changes(journal);
        self.inner.changes.push_front(unsent);
        self.inner.let_go_of_all();
        self.answered = calls.first().map_or(self.used, |call| call.first - 1);
        let mark = self.inner.recent.mark();
        let call = |EarlierCall { first, changes, .. }| Call { changes, first, mark, is_sent: false, was_sent: true };
        self.calls = calls.into_iter().map(call).collect();
        if journal.epoch() > 0 {
            Failpoint::ReplayBegun.pass();
        }
    }

    pub(super) async fn run(mut self) {
        let inner = self.inner.clone();
        loop {
            self.fill();
            self.expire();
            let is_ready = self.follow_session();
            if self.connection.is_none() && !self.calls.is_empty() && !(is_ready && self.connect().await) {
                sleep(PAUSE).await;
                continue;
            }
            if is_ready {
                self.send();
            }
            let deadline = self.deadline();
            let due = inner.changes.due().filter(|_| self.calls.len() < AHEAD);
            let stubs = self.connection.as_ref().map(|connection| connection.stubs.clone());
            let suspect_at = self.connection.as_ref().and_then(|connection| connection.suspect_at);
            tokio::select! {
                reply = next(&mut self.connection) => {
                    if let Err(status) = self.take_in(reply) {
                        self.broken(stubs.as_deref(), &status);
                        sleep(PAUSE).await;
                    }
                }
                () = moved(&inner, stubs.as_deref()) => {
                    self.broken(None, &Status::unavailable("another master leads"));
                }
                () = sleep_until(suspect_at.unwrap_or_else(Instant::now)), if suspect_at.is_some() => self.suspect(),
                () = inner.changes.filled.notified() => {}
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {}
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {}
                () = sleep(PAUSE), if !is_ready && !self.calls.is_empty() => {}
            }
        }
    }

    /// Makes calls of what waits.
    fn fill(&mut self) {
        while self.calls.len() < AHEAD {
            let changes = self.inner.changes.take();
            if changes.is_empty() {
                break;
            }
            self.number(changes);
        }
    }

    fn number(&mut self, changes: Vec<Pending>) {
        let first = self.calls.back().map_or(self.answered, Call::last).max(self.used) + 1;
        let mark = self.inner.recent.mark();
        self.calls.push_back(Call { changes, first, mark, is_sent: false, was_sent: false });
    }

    /// Gives those that were never sent their numbers anew, without some of them perhaps.
    fn renumber(&mut self, mut keep: impl FnMut(Vec<Pending>) -> Vec<Pending>) {
        let sent = self.calls.iter().take_while(|call| call.may_be_made()).count();
        for call in self.calls.split_off(sent) {
            let changes = keep(call.changes);
            if !changes.is_empty() {
                self.number(changes);
            }
        }
    }

    fn deadline(&self) -> Option<Instant> {
        self.calls.iter().filter_map(Call::deadline).chain(self.inner.changes.deadline()).min()
    }

    /// Answers those whose time is up.
    fn expire(&mut self) {
        let now = Instant::now();
        if self.deadline().is_none_or(|deadline| deadline > now) {
            return;
        }
        let (mut late, askers) = self.inner.changes.take_late(now);
        for asker in askers {
            let _gone = asker.send(Err(self.inner.late(self.inner.change_timeout)));
        }
        self.renumber(|changes| {
            let (of_call, rest): (Vec<_>, Vec<_>) = changes.into_iter().partition(|pending| pending.is_over(now));
            late.extend(of_call);
            rest
        });
        for pending in late {
            let _gone = pending.answer(Err(self.inner.late(self.inner.change_timeout)));
        }
        let of_sent = self.calls.iter_mut().flat_map(|call| &mut call.changes).filter(|pending| pending.is_late(now));
        let mut unanswered = false;
        for pending in of_sent {
            unanswered = true;
            // Somebody else may wait in its place.
            pending.room = None;
            let waited = self.inner.change_timeout.as_millis();
            let cause = format!("the master did not answer within {waited} ms");
            if let Some(asker) = pending.asker.take() {
                let _gone = asker.send(Err(ClientError::OutcomeUnknown { cause }));
            }
        }
        if unanswered {
            self.inner.master.suspect();
        }
    }

    /// It is not known what became of the calls that were sent: only another session is notified of what they may still
    /// change.
    fn give_up(&mut self, cause: &str) {
        self.inner.lease.abandon();
        self.inner.held.end();
        self.connection = None;
        self.answer_unknown(cause);
    }

    fn answer_unknown(&mut self, cause: &str) {
        while let Some(call) = self.calls.pop_front_if(|call| call.may_be_made()) {
            unknown(call.changes, cause);
        }
    }

    /// Whether there is a session to send in. The numbers of one that is over mean nothing in the next.
    fn follow_session(&mut self) -> bool {
        let session = self.inner.lease.session();
        if session == 0 || self.inner.master.is_given_up() {
            return false;
        }
        if session != self.session {
            self.connection = None;
            self.answer_unknown("the session with the master has ended meanwhile");
            (self.session, self.answered, self.used) = (session, 0, 0);
            self.renumber(|changes| changes);
        }
        true
    }

    async fn connect(&mut self) -> bool {
        let (requests, waiting) = mpsc::channel(AHEAD);
        let inner = self.inner.clone();
        let stubs = Arc::new(inner.master.stubs());
        let mut namespace = stubs.namespace.clone();
        let opening = inner.master.open(&stubs, namespace.mutate(ReceiverStream::new(waiting)));
        let opened = match self.deadline() {
            Some(deadline) => timeout_at(deadline, opening).await,
            None => Ok(opening.await),
        };
        match opened {
            Ok(Some(Ok(replies))) => {
                let replies = replies.into_inner();
                self.connection = Some(Connection { stubs, requests, replies, suspect_at: None });
            }
            Ok(Some(Err(status))) => self.broken(Some(&stubs), &status),
            // Nothing was sent yet.
            Ok(None) => {}
            Err(_elapsed) => self.inner.master.suspect(),
        }
        self.connection.is_some()
    }

    fn send(&mut self) {
        let Some(connection) = &mut self.connection else { return };
        if !self.calls.is_empty() {
            self.inner.lease.changes_in(self.session);
        }
        for call in self.calls.iter_mut().filter(|call| !call.is_sent) {
            let mut answered = self.answered;
            let mutations: Vec<_> =
                call.changes.iter().zip(call.first..).map(|(pending, seq)| numbered(pending, seq)).collect();
            if let Some(journal) = &self.inner.journal {
                journal.note_changes(self.session, call.last());
                if !call.was_sent {
                    let noted = call.changes.iter_mut().zip(&mutations);
                    noted.for_each(|(one, mutation)| one.note(journal, self.session, mutation));
                }
                answered = acknowledged(answered, journal.first_unanswered());
            }
            let request = MutateRequest { session: self.session, answered, mutations };
            // There is room for all calls but some that a process before has left, which are sent with later ones. A
            // stream that is over says so by its answer.
            if connection.requests.try_send(request).is_err() {
                break;
            }
            call.is_sent = true;
            if call.has_answered() {
                Failpoint::AnswersSent.pass();
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
    fn take_in(&mut self, reply: Result<MutateReply, Status>) -> Result<(), Status> {
        let reply = reply?;
        let Some(call) = self.calls.pop_front_if(|call| call.is_sent) else {
            return Err(Status::internal("an answer to nothing"));
        };
        if call.has_answered() {
            Failpoint::AnswersMade.pass();
        }
        let owes_more = self.calls.front().is_some_and(|call| call.is_sent);
        if let Some(connection) = &mut self.connection {
            self.inner.master.note_answer(&connection.stubs);
            connection.suspect_at = owes_more.then(|| Instant::now() + SUSPECT_AFTER);
        }
        self.answered = call.last();
        if reply.results.len() != call.changes.len() {
            let (changes, results) = (call.changes.len(), reply.results.len());
            let cause = format!("the master gave {results} results for {changes} changes");
            unknown(call.changes, &cause);
            self.give_up(&cause);
            return Ok(());
        }
        self.inner.answer_changes(call.changes, reply, call.mark, self.session);
        Ok(())
    }

    /// The stream is over, or could not be opened. `stubs`: of the master that said so.
    ///
    /// A master that says that it does not lead says nothing of what was sent to it while it led: its successor may
    /// have that in its log, so the verdict is unknown. If it says so to the opening of a stream, nothing was sent on
    /// that stream yet, and no call is marked: each is as unknown as earlier streams have left it.
    fn broken(&mut self, stubs: Option<&Stubs>, status: &Status) {
        self.connection = None;
        if let Some(stubs) = stubs {
            self.inner.master.stream_failed(stubs, status);
        }
        let error = ClientError::from(NetError::from(status.clone()));
        let verdict = Verdict::of(&error);
        for call in &mut self.calls {
            call.was_sent |= call.is_sent && verdict == Verdict::Unknown;
            call.is_sent = false;
        }
        tracing::debug!(calls = self.calls.len(), "sent again soon: {error}");
        match verdict {
            Verdict::Refused => self.refused(&error),
            // Now it is known that they were not made, and an asker that was answered before (`OutcomeUnknown`) does
            // not count on them.
            Verdict::NotMade => {
                let is_due = |pending: &Pending| pending.asker.is_some() || pending.is_owed;
                self.renumber(|changes| changes.into_iter().filter(is_due).collect())
            }
            Verdict::Unknown => {}
        }
    }

    /// What was sent after the first call has not been looked at.
    fn refused(&mut self, error: &ClientError) {
        match self.calls.front() {
            Some(first) if first.was_sent => self.give_up(&error.to_string()),
            Some(_) => {
                let refused = self.calls.pop_front().map_or_else(Vec::new, |call| call.changes);
                for pending in refused {
                    let _gone = pending.answer(Err(error.clone()));
                }
                self.renumber(|changes| changes);
            }
            None => {}
        }
    }
}

/// Up to which change the master need not keep results, of those up to `answered`. What the kernel has no answer to, it
/// may ask a process after this one for, unless so much was changed meanwhile that the master would take no more.
fn acknowledged(answered: u64, first_unanswered: Option<u64>) -> u64 {
    let has_answer = first_unanswered.map_or(answered, |first| answered.min(first.saturating_sub(1)));
    has_answer.max(answered.saturating_sub(ASKED_AGAIN_MAX))
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

fn unknown(changes: Vec<Pending>, cause: &str) {
    for pending in changes {
        let _gone = pending.answer(Err(ClientError::OutcomeUnknown { cause: cause.to_owned() }));
    }
}

#[cfg(test)]
mod tests {
    use cavern_proto::bounded::{MAX_CHANGES, MAX_KEPT_RESULT_BYTES, MAX_REASON_BYTES};
    use cavern_proto::master::{Attr, MutationResult};
    use prost::Message;

    use super::*;

    /// Bytes of a result with its key, at the most: a reason, or the inodes that a change touches. Only those of
    /// `SetHolds` may be longer, which are few.
    fn most_bytes_of_a_result() -> u64 {
        let reason = "x".repeat(MAX_REASON_BYTES + '…'.len_utf8());
        let refused = MutationResult { errno: 133, reason, unlisted: u64::MAX, ..MutationResult::default() };
        let attr = Attr {
            inode: u64::MAX,
            size: u64::MAX,
            mtime_ns: -1,
            ctime_ns: -1,
            atime_ns: -1,
            btime_ns: Some(-1),
            version: u64::MAX,
            allocated: Some(u64::MAX),
            mode: u32::MAX,
            uid: u32::MAX,
            gid: u32::MAX,
            nlink: u32::MAX,
            rdev: u32::MAX,
            generation: u32::MAX,
            next_generation: u32::MAX,
            ..Attr::default()
        };
        let made = MutationResult { inode: u64::MAX, attributes: vec![attr; 16], ..MutationResult::default() };
        let key = 2 * size_of::<u64>();
        (key + refused.encoded_len().max(made.encoded_len())) as u64
    }

    #[test]
    fn the_master_never_has_to_keep_more_results_than_it_would() {
        assert_eq!(acknowledged(100, None), 100);
        assert_eq!([1, 50, 101].map(|first| acknowledged(100, Some(first))), [0, 49, 100]);
        let mut most = 0;
        for answered in [0, 1, ASKED_AGAIN_MAX, ASKED_AGAIN_MAX + 1, 10 * MAX_KEPT_RESULTS] {
            // The kernel has been waiting for the first change ever since.
            let last = answered + (AHEAD * MAX_CHANGES) as u64;
            most = most.max(last - acknowledged(answered, Some(1)));
        }
        assert!((ASKED_AGAIN_MAX..MAX_KEPT_RESULTS / 2).contains(&most), "{most}");
        let bytes = most * most_bytes_of_a_result();
        assert!(bytes < MAX_KEPT_RESULT_BYTES, "{bytes}");
    }
}
