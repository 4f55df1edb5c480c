//! Takes the master's stream of events in: invalidations in applied order, new tables, and signs of life.
//!
//! Events that have arrived together are applied together, passed on to the sink, and acknowledged once the sink says
//! that it has passed them on: `cv refresh` waits for that acknowledgement. So does the deletion of inodes that have
//! lost their last name, which is acknowledged once those that are open here are held. Changes of strict mounts wait
//! until it has let go of what they made untrue. All of that takes the time that it takes: a kernel may wait for a
//! system call that waits for an event that is yet to come. Meanwhile events are taken in, and signs of life sent. The
//! stream is the lease.
//!
//! Only the master that leads has such a stream. When another one does, the session is taken up there.

use std::sync::Arc;
use std::time::Duration;

use cavern_conf::backoff;
use cavern_net::master::{StreamFailure, Stubs};
use cavern_proto::master::watch_event::Event;
use cavern_proto::master::{EntryChanged, WatchEvent, WatchRequest};
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status, Streaming};

use super::changed_contents::ChangedContents;
use super::lease::SentMessages;
use super::removals::PendingRemovals;
use super::{Inner, InvalidationSink};
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
/// Events that are applied together at most.
const BATCH: usize = 1024;
/// When as many wait to be passed on, the next ones do so as well: a sink that is slow, and not stuck, is not flooded.
const FLOOD_PAUSE: Duration = Duration::from_millis(100);
/// Acknowledgements that may wait to be sent: more are superseded by the next.
const ACKNOWLEDGEMENTS: usize = 16;

/// Keeps a stream open until `stop`.
pub(super) async fn run(inner: Arc<Inner>, who: Identity, sink: Arc<dyn InvalidationSink>, stop: CancellationToken) {
    let (mut backoff, mut redirects) = (backoff::EVENT_STREAM.begin(), 0);
    let mut removed = PendingRemovals::default();
    loop {
        let stubs = inner.master.stubs();
        match follow(&inner, &stubs, &who, &*sink, &mut removed, &stop).await {
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

enum Wakeup {
    /// Some have come, this one first.
    Events(WatchEvent),
    /// It is time to ask the kernel for what was removed.
    PendingRemovals,
    /// All is held that must be.
    Held,
    /// The sink has answered.
    PassedOn,
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
struct PendingHolds<'i> {
    inner: &'i Inner,
    /// Removals may have been missed: whatever is open is looked at.
    everything: bool,
    /// Inodes that have lost their last name, or are referred to without one.
    unlinked: Vec<u64>,
    work: Option<BoxFuture<'i, ()>>,
}

impl<'i> PendingHolds<'i> {
    fn new(inner: &'i Inner) -> Self {
        Self { inner, everything: false, unlinked: Vec::new(), work: None }
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
                        inner.reclaim_holds().await;
                    }
                    inner.hold_all(unlinked).await;
                };
                work.boxed()
            });
            work.await;
            self.work = None;
        }
    }
}

/// Completes with what is being said.
async fn said(remembering: &mut Option<BoxFuture<'_, ()>>) {
    if let Some(remembering) = remembering {
        remembering.await;
    }
}

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

async fn follow(
    inner: &Inner,
    stubs: &Stubs,
    who: &Identity,
    sink: &dyn InvalidationSink,
    removed: &mut PendingRemovals,
    stop: &CancellationToken,
) -> StreamEnd {
    let (acknowledge, requests) = mpsc::channel(ACKNOWLEDGEMENTS);
    let Identity { name: client, place } = who.clone();
    let (session, knows_inodes) = (inner.lease.session(), inner.lease.had_session());
    let (applied_seq, has_changed) = if session == 0 { (0, false) } else { inner.lease.to_go_on() };
    let first =
        WatchRequest { client, place, session, knows_inodes, applied_seq, has_changed, ..WatchRequest::default() };
    if acknowledge.try_send(first).is_err() {
        return StreamEnd::Refused;
    }
    let mut cluster = stubs.cluster.clone();
    let mut sent = SentMessages::new();
    let opening = inner.master.open(stubs, cluster.watch(ReceiverStream::new(requests)));
    let Some(opened) = stop.run_until_cancelled(timeout(FIRST_LEASE, opening)).await else {
        return StreamEnd::Stopped;
    };
    let mut events = match opened {
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
    let mut lease = FIRST_LEASE;
    let (mut has_begun, mut last, mut acknowledged) = (false, 0, 0);
    let (mut letting_go, mut passing_on) = (SinkProgress::default(), SinkProgress::default());
    // What the master was told last, and when.
    let (mut told, mut told_at) = (None, Instant::now());
    // What was missed may have been acknowledged to those who did it: nothing is believed before it is taken in.
    let mut missed_up_to = 0;
    let mut holding = PendingHolds::new(inner);
    let mut remembering: Option<BoxFuture<'_, ()>> = None;
    let moved = inner.master.moved_from(stubs);
    tokio::pin!(moved);
    loop {
        // In a session only.
        let due = removed.due().filter(|_| has_begun);
        let turn = tokio::select! {
            event = next_event(inner, &mut events, lease) => match event {
                Ok(event) => Some(Wakeup::Events(event)),
                Err(Some(status)) => return failed(inner, stubs, &status, StreamEnd::Broken),
                Err(None) => None,
            },
            // The session goes on there.
            () = &mut moved => return StreamEnd::Elsewhere,
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => Some(Wakeup::PendingRemovals),
            () = holding.run_pending(), if !holding.is_done() => Some(Wakeup::Held),
            () = letting_go.answered(), if letting_go.asked.is_some() => Some(Wakeup::PassedOn),
            () = passing_on.answered(), if passing_on.asked.is_some() => Some(Wakeup::PassedOn),
            () = said(&mut remembering), if remembering.is_some() => {
                remembering = None;
                continue;
            }
            () = inner.lease.abandoned() => None,
            () = stop.cancelled() => {
                end_session(&acknowledge, &mut events).await;
                return StreamEnd::Stopped;
            }
        };
        let Some(turn) = turn else { break };
        let (mut batch, mut broken) = (Vec::new(), None);
        if let Wakeup::Events(first) = turn {
            inner.master.note_answer(stubs);
            batch.push(first);
        }
        let has_events = !batch.is_empty();
        has_begun |= has_events;
        while has_events && batch.len() < BATCH {
            match events.next().now_or_never() {
                Some(Some(Ok(event))) => batch.push(event),
                Some(end) => {
                    broken = Some(end.and_then(Result::err));
                    break;
                }
                None => break,
            }
        }
        let heard = batch.last().map(|event| event.heard);
        let is_asked = batch.iter().any(|event| matches!(event.event, Some(Event::Tick(_))));
        if let Some(event) = batch.last() {
            inner.master.note_group(event.group_epoch, &event.masters);
        }
        last = batch.last().map_or(last, |event| event.seq);
        for event in batch {
            match &event.event {
                Some(Event::Reset(_)) => {
                    holding.everything = true;
                    removed.restart(event.seq);
                }
                Some(Event::Resumed(resumed)) => {
                    holding.everything |= resumed.session != session;
                    missed_up_to = resumed.missed_up_to;
                    remembering = Some(inner.remember(resumed.session).boxed());
                }
                Some(Event::Unlinked(inode)) => {
                    inner.staying.end(*inode);
                    inner.forget_contents(ChangedContents::Of(*inode));
                    holding.unlinked.push(*inode);
                    removed.add(*inode, event.seq, Instant::now());
                }
                _ => {}
            }
            if apply(inner, sink, event, &mut lease) {
                letting_go.given += 1;
                passing_on.given += 1;
            }
        }
        if let Some(heard) = heard {
            let sent_at = sent.received(heard);
            if last >= missed_up_to {
                inner.lease.extend(sent_at, lease);
            }
            inner.lease.applied(last);
            inner.flush_pending_unlocks();
        }
        match stop.run_until_cancelled(inner.find_referenced(removed, sink)).await {
            None => continue,
            Some(referred) => holding.unlinked.extend(referred),
        }
        letting_go.ask(last, || sink.let_go());
        passing_on.ask(last, || sink.barrier());
        if passing_on.given >= BATCH {
            let _stuck = timeout(FLOOD_PAUSE, passing_on.answered()).await;
            passing_on.ask(last, || sink.barrier());
        }
        // What is open must be held before its removal is acknowledged. Until then the last acknowledgement is a sign
        // of life.
        if holding.is_done() {
            acknowledged = removed.settled(passing_on.kept_up_to);
        }
        let to_tell = Some((acknowledged, letting_go.kept_up_to));
        if is_asked || told != to_tell || told_at.elapsed() >= lease / 8 {
            sent.push();
            // A full queue holds acknowledgements that a later one supersedes; a closed one ends the stream anyway.
            let message = WatchRequest {
                acknowledged_seq: acknowledged,
                let_go_seq: letting_go.kept_up_to,
                group_epoch: inner.master.group_epoch(),
                ..WatchRequest::default()
            };
            if acknowledge.try_send(message).is_err() {
                sent.pop();
            }
            (told, told_at) = (to_tell, Instant::now());
        }
        match broken {
            Some(Some(status)) => return failed(inner, stubs, &status, StreamEnd::Broken),
            Some(None) => break,
            None => {}
        }
    }
    inner.master.suspect();
    StreamEnd::Broken
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

/// Applies one event to the cache and hands it to the sink; true when the sink has something to pass on.
fn apply(inner: &Inner, sink: &dyn InvalidationSink, event: WatchEvent, lease: &mut Duration) -> bool {
    match event.event {
        Some(Event::Reset(reset)) => {
            *lease = Duration::from_millis(u64::from(reset.lease_ms)).max(Duration::from_millis(100));
            inner.tables.set_cluster_id(&reset.cluster_id);
            inner.tables.everything_changed();
            let before = inner.lease.session();
            inner.lease.begin(reset.session);
            if before == reset.session && inner.holds_directories {
                // What is cached of them goes, and the master has it that they are held.
                inner.let_go_of_all();
            } else {
                inner.held.end();
            }
            if let Some(journal) = &inner.journal {
                journal.note_session(reset.session);
            }
            inner.recent.reset();
            inner.cache.clear();
            inner.directories.clear();
            inner.all_contents_changed(reset.session);
            inner.lease.restart(reset.session, event.seq);
            inner.locks.ask_again();
            inner.stats.watch_resets.inc();
            inner.stats.metadata_entries.set(0);
            sink.reset();
            true
        }
        Some(Event::Resumed(resumed)) => {
            *lease = Duration::from_millis(u64::from(resumed.lease_ms)).max(Duration::from_millis(100));
            let before = inner.lease.session();
            inner.tables.everything_changed();
            inner.lease.begin(resumed.session);
            if let Some(journal) = &inner.journal {
                journal.note_session(resumed.session);
            }
            // Answers to what was asked before are not kept: nobody watches over them.
            inner.recent.reset();
            if resumed.session != before {
                inner.open.all_changed(resumed.session);
                inner.held.end();
            }
            // The master is told what is cached and open here, and not what was.
            inner.forget_contents(ChangedContents::All);
            if inner.lease.resume(resumed.session) {
                inner.locks.ask_again();
            }
            inner.stats.watch_resumptions.inc();
            sink.resumed();
            false
        }
        Some(Event::Entry(changed)) => {
            inner.entry_changed(&changed);
            inner.stats.invalidations.inc();
            let kept = inner.directories.get(changed.parent).is_none_or(|directory| !directory.is_strict());
            sink.entry(changed.parent, &changed.name, changed.old_inode, changed.new_inode, kept);
            true
        }
        Some(Event::InodeChanged(inode)) => {
            inner.recent.inode(inode);
            inner.cache.forget_inode(inode);
            inner.content_changed(inode);
            if let Some(directory) = inner.directories.get(inode) {
                directory.drop_pages();
            }
            inner.stats.invalidations.inc();
            sink.inode(inode);
            true
        }
        // Nothing that the kernel has is another by that. It must not be waited for either: it may have pages of a
        // write that waits for this.
        Some(Event::LayoutChanged(inode)) => {
            inner.content_changed(inode);
            false
        }
        Some(Event::WorkersEpoch(epoch)) => {
            inner.tables.workers_changed(epoch);
            false
        }
        Some(Event::MountsEpoch(epoch)) => {
            inner.tables.mounts_changed(epoch);
            false
        }
        Some(Event::Unlinked(inode)) => {
            inner.recent.inode(inode);
            inner.cache.forget_inode(inode);
            false
        }
        Some(Event::Recall(directory)) => {
            inner.recalled(directory);
            false
        }
        Some(Event::LockGranted(waiter)) => {
            inner.locks.granted(waiter, inner.lease.session());
            false
        }
        Some(Event::Tick(_)) | None => false,
    }
}

impl Inner {
    /// Somebody else has had a name lead elsewhere.
    fn entry_changed(&self, changed: &EntryChanged) {
        self.forget_node(changed.parent, &changed.name, changed.old_inode);
        if let Some(directory) = self.directories.get(changed.parent) {
            directory.foreign_change(&changed.name, changed.new_inode != 0);
        }
    }

    /// Forgets a name, the inode that it led to (0 for none), and the listing that has it.
    pub(super) fn forget_entry(&self, parent: u64, name: &[u8], old_inode: u64) {
        self.forget_node(parent, name, old_inode);
        if let Some(directory) = self.directories.get(parent) {
            directory.forget_listing();
        }
    }

    pub(super) fn forget_node(&self, parent: u64, name: &[u8], old_inode: u64) {
        self.recent.entry(parent, name, old_inode);
        self.cache.forget_name(parent, name);
        if old_inode != 0 {
            self.cache.forget_inode(old_inode);
            self.directories.forget(old_inode);
        }
    }
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
