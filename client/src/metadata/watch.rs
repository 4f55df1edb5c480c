//! Takes the master's stream of events in: invalidations in applied order, new tables, and signs of life.
//!
//! Events that have arrived together are applied together, passed on to the sink, and acknowledged once the sink says
//! that it has passed them on: `cv refresh` waits for that acknowledgement. So does the deletion of inodes that have
//! lost their last name, which is acknowledged once those that are open here are held. Changes of strict mounts wait
//! until it has let go of what they made untrue. And whoever freezes blocks for a view waits until all go by the mount
//! table that says so. All of that takes the time that it takes: a kernel may wait for a system call that waits for an
//! event that is yet to come. Meanwhile events are taken in, and signs of life sent. The stream is the lease.
//!
//! Only the master that leads has such a stream. When another one does, the session is taken up there.
//!
//! A stream that is open is a state machine ([`EventStream`]): [`EventStream::next`] waits for what wakes it up, and
//! [`EventStream::step`] takes that in, passes on what is to be passed on, and tells the master how far it has come.

use std::sync::Arc;
use std::time::Duration;

use cavern_conf::backoff;
use cavern_net::master::{StreamFailure, Stubs};
use cavern_proto::master::watch_event::Event;
use cavern_proto::master::{WatchEvent, WatchRequest};
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status, Streaming};

use super::lease::SentMessages;
use super::parts::{Inner, Metadata};
use super::removals::PendingRemovals;
use super::sink::InvalidationSink;
use crate::identity::Identity;

/// Lease until the master has sent its own.
const FIRST_LEASE: Duration = Duration::from_secs(5);
/// For the master to receive the message that the client ends.
const GOODBYE: Duration = Duration::from_millis(500);
/// Attempts without a pause between them, each at the master that the one before named. A group has no more masters,
/// so another one would be asked twice.
const REDIRECTS_MAX: u32 = 5;
/// The master sends a tick as often as this, or four times in a lease. When two of them are overdue it is asked whether
/// it still leads.
const TICK: Duration = Duration::from_secs(1);
/// How often the master is told what is done in mounts, at most: with each tick, and also while events leave no room
/// for one.
const ACTIVITY_PAUSE: Duration = Duration::from_millis(900);
/// Events that are applied together at most.
const BATCH: usize = 1024;
/// When as many wait to be passed on, the next ones do so as well: a sink that is slow, and not stuck, is not flooded.
const FLOOD_PAUSE: Duration = Duration::from_millis(100);
/// Acknowledgements that may wait to be sent: more are superseded by the next.
const ACKNOWLEDGEMENTS: usize = 16;

impl Metadata {
    /// Keeps a stream of events open until `stop`.
    pub(crate) async fn watch(&self, who: Identity, sink: Arc<dyn InvalidationSink>, stop: CancellationToken) {
        let inner = &self.inner;
        let (mut backoff, mut redirects) = (backoff::EVENT_STREAM.begin(), 0);
        // What a stream has yet to hold when it ends is for the next one.
        let mut holding = PendingRefs::new(inner);
        loop {
            let stubs = inner.master.stubs();
            let at = Source { inner, stubs: &stubs, sink: &*sink };
            match at.follow(&who, &mut holding, &stop).await {
                StreamEnd::Refused => {}
                StreamEnd::Broken => backoff.reset(),
                StreamEnd::Elsewhere if redirects < REDIRECTS_MAX => {
                    redirects += 1;
                    continue;
                }
                StreamEnd::Elsewhere => {}
                StreamEnd::Denied => {
                    // Until it is given another certificate, or the master other rules.
                    if stop.run_until_cancelled(tokio::time::sleep(backoff::EVENT_STREAM.longest)).await.is_none() {
                        return;
                    }
                    continue;
                }
                StreamEnd::Stopped => return,
            }
            redirects = 0;
            // A leader that is found ends the pause: until the stream is open there, the lease runs down.
            let next = inner.master.wait_for_leader(&stubs, backoff.next_pause());
            if stop.run_until_cancelled(next).await.is_none() {
                return;
            }
        }
    }
}

/// How a stream ends, or is not opened.
enum StreamEnd {
    /// No stream could be opened.
    Refused,
    /// A stream was open and broke.
    Broken,
    /// Another master leads, and is preferred now.
    Elsewhere,
    /// This client may have no session.
    Denied,
    Stopped,
}

/// Whose stream it is, and of which master.
#[derive(Clone, Copy)]
struct Source<'s> {
    inner: &'s Inner,
    stubs: &'s Stubs,
    sink: &'s dyn InvalidationSink,
}

impl Source<'_> {
    /// Opens a stream, and follows it to its end.
    async fn follow(&self, who: &Identity, holding: &mut PendingRefs<'_>, stop: &CancellationToken) -> StreamEnd {
        let Self { inner, stubs, .. } = *self;
        let (messages, requests) = mpsc::channel(ACKNOWLEDGEMENTS);
        let Identity { name: client, place } = who.clone();
        let (session, knows_inodes) = (inner.lease.session(), inner.lease.had_session());
        let (applied_seq, has_changed) = if session == 0 { (0, false) } else { inner.lease.to_go_on() };
        let first =
            WatchRequest { client, place, session, knows_inodes, applied_seq, has_changed, ..WatchRequest::default() };
        if messages.try_send(first).is_err() {
            return StreamEnd::Refused;
        }
        let mut cluster = stubs.cluster.clone();
        let sent = SentMessages::new();
        let opening = inner.master.open(stubs, cluster.watch(ReceiverStream::new(requests)));
        let Some(opened) = stop.run_until_cancelled(timeout(FIRST_LEASE, opening)).await else {
            return StreamEnd::Stopped;
        };
        let events = match opened {
            Ok(Some(Ok(response))) => response.into_inner(),
            Ok(Some(Err(status))) if matches!(status.code(), Code::PermissionDenied | Code::Unauthenticated) => {
                return denied(inner, who, session, &status);
            }
            Ok(Some(Err(status))) => {
                tracing::debug!("the master at {} refuses the event stream: {status}", stubs.address());
                return failed(inner, stubs, &status, StreamEnd::Refused);
            }
            Ok(None) => return StreamEnd::Elsewhere,
            Err(_elapsed) => {
                inner.master.suspect();
                return StreamEnd::Refused;
            }
        };
        let acknowledged = Acknowledged { messages, sent, told: None, told_at: Instant::now(), activity_at: None };
        let mut stream = EventStream {
            at: *self,
            events,
            session,
            lease: FIRST_LEASE,
            position: Position::default(),
            invalidating: SinkProgress::default(),
            passing_on: SinkProgress::default(),
            holding,
            remembering: None,
            acknowledged,
        };
        loop {
            let wakeup = stream.next(stop).await;
            if let Some(end) = stream.step(wakeup, stop).await {
                return end;
            }
        }
    }
}

enum Wakeup {
    /// These have come, and with them, perhaps, the end of the stream, with what the master said.
    Events(Vec<WatchEvent>, Option<Option<Status>>),
    /// It is time to ask the kernel for what was removed, all is held that must be, or the sink has answered.
    Progress,
    Ended(StreamEnd),
}

/// How far a stream has come.
#[derive(Debug, Default)]
struct Position {
    has_begun: bool,
    /// The last event.
    last: u64,
    /// What was missed may have been acknowledged to those who did it: nothing is believed before it is taken in.
    missed_up_to: u64,
    /// What may be acknowledged.
    settled: u64,
}

/// What the master is told.
struct Acknowledged {
    messages: mpsc::Sender<WatchRequest>,
    sent: SentMessages,
    /// What it was told last, and when: how far events are settled and let go of, and the mount table.
    told: Option<(u64, u64, u64)>,
    told_at: Instant,
    /// When it was told last what is done in mounts.
    activity_at: Option<Instant>,
}

/// The stream of the session's events, and how far it has come.
struct EventStream<'s, 'i> {
    at: Source<'s>,
    events: Streaming<WatchEvent>,
    /// From which it goes on; 0 for none.
    session: u64,
    lease: Duration,
    position: Position,
    invalidating: SinkProgress,
    passing_on: SinkProgress,
    holding: &'s mut PendingRefs<'i>,
    /// What is being said of what is cached here.
    remembering: Option<BoxFuture<'s, ()>>,
    acknowledged: Acknowledged,
}

impl EventStream<'_, '_> {
    /// Waits until there is something to do.
    async fn next(&mut self, stop: &CancellationToken) -> Wakeup {
        let Source { inner, stubs, .. } = self.at;
        // In a session only.
        let due = self.holding.removed.due().filter(|_| self.position.has_begun);
        let told_mounts = self.acknowledged.told.map(|(_, _, mounts)| mounts);
        tokio::select! {
            event = next_event(inner, &mut self.events, self.lease) => match event {
                Ok(event) => self.gather(event),
                Err(status) => Wakeup::Ended(self.broken(status.as_ref())),
            },
            // The session goes on there.
            () = inner.master.moved_from(stubs) => Wakeup::Ended(StreamEnd::Elsewhere),
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => Wakeup::Progress,
            () = self.holding.run_pending(), if !self.holding.is_done() => Wakeup::Progress,
            () = self.invalidating.answered(), if self.invalidating.asked.is_some() => Wakeup::Progress,
            () = self.passing_on.answered(), if self.passing_on.asked.is_some() => Wakeup::Progress,
            () = said(&mut self.remembering), if self.remembering.is_some() => {
                self.remembering = None;
                Wakeup::Progress
            }
            () = inner.tables.settles_beyond(told_mounts.unwrap_or_default()), if told_mounts.is_some() => {
                Wakeup::Progress
            }
            () = inner.lease.abandoned() => Wakeup::Ended(self.broken(None)),
            () = stop.cancelled() => {
                end_session(&self.acknowledged.messages, &mut self.events).await;
                Wakeup::Ended(StreamEnd::Stopped)
            }
        }
    }

    /// What has arrived with an event.
    fn gather(&mut self, first: WatchEvent) -> Wakeup {
        let mut batch = vec![first];
        while batch.len() < BATCH {
            match self.events.next().now_or_never() {
                Some(Some(Ok(event))) => batch.push(event),
                Some(end) => return Wakeup::Events(batch, Some(end.and_then(Result::err))),
                None => break,
            }
        }
        Wakeup::Events(batch, None)
    }

    fn broken(&self, status: Option<&Status>) -> StreamEnd {
        let Source { inner, stubs, .. } = self.at;
        match status {
            Some(status) => failed(inner, stubs, status, StreamEnd::Broken),
            None => {
                inner.master.suspect();
                StreamEnd::Broken
            }
        }
    }

    /// Does what can be done now; gives the end of the stream, when it has come.
    async fn step(&mut self, wakeup: Wakeup, stop: &CancellationToken) -> Option<StreamEnd> {
        let (events, broken) = match wakeup {
            Wakeup::Events(events, broken) => (events, broken),
            Wakeup::Progress => (Vec::new(), None),
            Wakeup::Ended(end) => return Some(end),
        };
        let is_asked = events.iter().any(|event| matches!(event.event, Some(Event::Tick(_))));
        self.apply_events(events);
        let Source { inner, sink, .. } = self.at;
        let referred = stop.run_until_cancelled(inner.find_referenced(&mut self.holding.removed, sink)).await?;
        self.holding.unlinked.extend(referred);
        self.pass_on().await;
        self.acknowledge(is_asked);
        broken.map(|status| self.broken(status.as_ref()))
    }

    fn apply_events(&mut self, events: Vec<WatchEvent>) {
        let Source { inner, stubs, sink } = self.at;
        let Some(newest) = events.last() else { return };
        inner.master.note_answer(stubs);
        inner.master.note_group(newest.group_epoch, &newest.masters);
        (self.position.has_begun, self.position.last) = (true, newest.seq);
        let sent_at = self.acknowledged.sent.received(newest.heard);
        for event in events {
            match &event.event {
                Some(Event::Reset(reset)) => {
                    self.lease = lease_of(reset.lease_ms);
                    self.holding.everything = true;
                    self.holding.removed.restart(event.seq);
                }
                Some(Event::Resumed(resumed)) => {
                    self.lease = lease_of(resumed.lease_ms);
                    self.holding.everything |= resumed.session != self.session;
                    self.position.missed_up_to = resumed.missed_up_to;
                    self.remembering = Some(inner.restore_watches(resumed.session).boxed());
                }
                Some(Event::Unlinked(inode)) => {
                    self.holding.unlinked.push(*inode);
                    self.holding.removed.add(*inode, event.seq, Instant::now());
                }
                _ => {}
            }
            if inner.apply_event(sink, event) {
                self.invalidating.given += 1;
                self.passing_on.given += 1;
            }
        }
        if self.position.last >= self.position.missed_up_to {
            inner.lease.extend(sent_at, self.lease);
        }
        inner.lease.applied(self.position.last);
        inner.delegations_arrive(self.position.last);
    }

    /// Asks the sink how far it has passed on what it was given.
    async fn pass_on(&mut self) {
        let (sink, last) = (self.at.sink, self.position.last);
        self.invalidating.ask(last, || sink.invalidated());
        self.passing_on.ask(last, || sink.barrier());
        if self.passing_on.given >= BATCH {
            let _stuck = timeout(FLOOD_PAUSE, self.passing_on.answered()).await;
            self.passing_on.ask(last, || sink.barrier());
        }
        // What is open must be held before its removal is acknowledged. Until then the last acknowledgement is a sign
        // of life.
        if self.holding.is_done() {
            self.position.settled = self.holding.removed.settled(self.passing_on.kept_up_to);
        }
    }

    /// Tells the master, if it asks, if there is news, or as a sign of life.
    fn acknowledge(&mut self, is_asked: bool) {
        let Source { inner, .. } = self.at;
        let to_tell = (self.position.settled, self.invalidating.kept_up_to, inner.tables.settled());
        let acknowledged = &mut self.acknowledged;
        if !is_asked && acknowledged.told == Some(to_tell) && acknowledged.told_at.elapsed() < self.lease / 8 {
            return;
        }
        acknowledged.sent.push();
        let (acknowledged_seq, invalidated_seq, mounts_settled) = to_tell;
        let group_epoch = inner.master.group_epoch();
        let is_due = acknowledged.activity_at.is_none_or(|at| at.elapsed() >= ACTIVITY_PAUSE);
        let activity = is_due.then(|| inner.tables.mounts().activity());
        if is_due {
            acknowledged.activity_at = Some(Instant::now());
        }
        // A full queue holds acknowledgements that a later one supersedes; a closed one ends the stream anyway.
        let message = WatchRequest {
            acknowledged_seq,
            invalidated_seq,
            group_epoch,
            activity,
            mounts_settled,
            ..WatchRequest::default()
        };
        if acknowledged.messages.try_send(message).is_err() {
            acknowledged.sent.pop();
        }
        (acknowledged.told, acknowledged.told_at) = (Some(to_tell), Instant::now());
    }
}

/// A lease as the master says it.
fn lease_of(lease_ms: u32) -> Duration {
    Duration::from_millis(u64::from(lease_ms)).max(Duration::from_millis(100))
}

/// Completes with what is being said.
async fn said(remembering: &mut Option<BoxFuture<'_, ()>>) {
    if let Some(remembering) = remembering {
        remembering.await;
    }
}

/// Up to which event the sink has kept one of its promises.
#[derive(Default)]
struct SinkProgress {
    /// Events that it was given since it was asked last.
    given: usize,
    /// The last event before the question that it has not answered yet.
    asked: Option<(u64, BoxFuture<'static, ()>)>,
    kept_up_to: u64,
}

impl SinkProgress {
    /// Asks of the events up to `last`, unless an answer is waited for.
    fn ask(&mut self, last: u64, question: impl FnOnce() -> BoxFuture<'static, ()>) {
        if self.asked.is_some() {
            return;
        }
        if std::mem::take(&mut self.given) > 0 {
            self.asked = Some((last, question()));
            let _waits = self.answered().now_or_never();
        } else {
            self.kept_up_to = last;
        }
    }

    /// Completes with the answer. May be dropped and called again.
    async fn answered(&mut self) {
        if let Some((last, answer)) = &mut self.asked {
            answer.await;
            self.kept_up_to = *last;
            self.asked = None;
        }
    }
}

/// What must be held before anything more is acknowledged.
struct PendingRefs<'i> {
    inner: &'i Inner,
    /// Of which the kernel has yet to be asked.
    removed: PendingRemovals,
    /// Removals may have been missed: whatever is open is looked at.
    everything: bool,
    /// Inodes that have lost their last name, or are referred to without one.
    unlinked: Vec<u64>,
    work: Option<BoxFuture<'i, ()>>,
}

impl<'i> PendingRefs<'i> {
    fn new(inner: &'i Inner) -> Self {
        Self { inner, removed: PendingRemovals::default(), everything: false, unlinked: Vec::new(), work: None }
    }

    fn is_done(&self) -> bool {
        self.work.is_none() && !self.everything && self.unlinked.is_empty()
    }

    /// Completes when nothing is left to be held. May be dropped and called again.
    async fn run_pending(&mut self) {
        while !self.is_done() {
            let (inner, everything, unlinked) = (self.inner, &mut self.everything, &mut self.unlinked);
            let work = self.work.get_or_insert_with(|| {
                let (everything, unlinked) = (std::mem::take(everything), std::mem::take(unlinked));
                let work = async move {
                    if everything {
                        inner.reclaim_refs().await;
                    }
                    inner.add_refs(unlinked).await;
                };
                work.boxed()
            });
            work.await;
            self.work = None;
        }
    }
}

/// What becomes of a stream that ended with a status: `otherwise`, unless that names the leader.
fn failed(inner: &Inner, stubs: &Stubs, status: &Status, otherwise: StreamEnd) -> StreamEnd {
    match inner.master.stream_failed(stubs, status) {
        StreamFailure::Redirected => StreamEnd::Elsewhere,
        StreamFailure::NoLeader | StreamFailure::Broken => otherwise,
        StreamFailure::Answered => {
            inner.master.suspect();
            otherwise
        }
    }
}

/// A session that is that of another identity now is given up for one of its own; otherwise there is none. What has no
/// place is about that session alone, as the replay of what a dead mount left is: another attempt, with the right
/// certificate, may have it.
fn denied(inner: &Inner, who: &Identity, session: u64, status: &Status) -> StreamEnd {
    if session != 0 && !who.place.is_empty() {
        tracing::warn!("the session is given up: {}", status.message());
        inner.lease.give_up();
        return StreamEnd::Broken;
    }
    if inner.lease.deny(status) {
        tracing::error!("the master refuses a session: {}", status.message());
    }
    StreamEnd::Denied
}

/// Ends the session, so that nobody waits for this client any longer: the master ends the stream when it knows.
async fn end_session(acknowledge: &mpsc::Sender<WatchRequest>, events: &mut Streaming<WatchEvent>) {
    let goodbye = async {
        if acknowledge.send(WatchRequest { ends: true, ..WatchRequest::default() }).await.is_ok() {
            while let Some(Ok(_event)) = events.next().await {}
        }
    };
    // Otherwise the lease has to end.
    let _late = timeout(GOODBYE, goodbye).await;
}

/// The next event. An error when the stream broke, with what the master said, or was silent for the whole lease.
async fn next_event(
    inner: &Inner,
    events: &mut Streaming<WatchEvent>,
    lease: Duration,
) -> Result<WatchEvent, Option<Status>> {
    let overdue = two_ticks(lease);
    for wait in [overdue, lease.saturating_sub(overdue)] {
        match timeout(wait, events.next()).await {
            Ok(Some(Ok(event))) => return Ok(event),
            Ok(Some(Err(status))) => {
                tracing::debug!("the event stream broke: {status}");
                return Err(Some(status));
            }
            Ok(None) => return Err(None),
            Err(_elapsed) => inner.master.suspect(),
        }
    }
    Err(None)
}

/// For how long the stream is silent when it lacks two ticks, with a little for the way.
fn two_ticks(lease: Duration) -> Duration {
    (lease / 4).min(TICK) * 21 / 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_ticks_are_missed_well_before_the_lease_is_over() {
        let overdue = [500, 1000, 5000, 60_000].map(|lease| two_ticks(Duration::from_millis(lease)).as_millis());
        assert_eq!(overdue, [262, 525, 2100, 2100]);
    }
}
