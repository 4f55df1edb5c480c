//! Works intents off: one inode at a time, many inodes at once.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cavern_conf::Failpoint;
use cavern_consensus::Clock;
use cavern_proto::ContentId;
use cavern_proto::data::Status;
use cavern_proto::master::Kind;
use cavern_proto::record::command::Command;
use cavern_proto::record::{
    BeginObjects, DeletionRecord, InodeRecord, IntentRecord, Persisted, PersistedObject, PropagateIntent,
};
use cavern_state::Tables;
use cavern_state::outcome::Beginning;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use super::changing_files::AWAITED_PAUSE;
use super::plan::{self, Portion, Step, Work, Write};
use super::retry_tracker::{FailureKind, Item, Priority, WorkPermit};
use super::{PATIENCE, PAUSES, Persistence, REST, REST_BUSY, REST_EXPEDITED, REST_PART};
use crate::background::Next;
use crate::error::WorkError;
use crate::mounts::OpenMount;

/// Entries of a renamed directory that get intents with one command.
pub const PROPAGATED_MAX: u32 = 500;
/// A worker reports the object that is in the way under a key; so often it is believed.
const ROUNDS: usize = 4;

/// An intent, and what decides whether it is worked off now.
pub(super) struct DueIntent {
    pub inode: u64,
    pub intent: IntentRecord,
    pub priority: Priority,
    /// How long it had not been changed when it was read: what follows is of that moment, and a pass takes its time.
    pub at_rest: Duration,
    /// It is a file that will probably change again: see [`is_unfinished`]. Known of those that may be due otherwise.
    pub is_unfinished: bool,
    /// Its last upload was in vain, and nobody has it open to write to it any more.
    pub is_closed: bool,
}

/// What a pass has seen of an inode that nobody waits for. Its turn may come late: where that is otherwise by then, the
/// inode is looked at again.
#[derive(Clone, Copy)]
pub(super) struct SeenIntent {
    change: u64,
    /// It is due as a file that is closed.
    is_closed: bool,
}

impl SeenIntent {
    fn is_outdated(self, tables: Tables<'_>, inode: u64) -> Result<bool, WorkError> {
        let Some(intent) = tables.intent(inode)? else { return Ok(false) };
        Ok(intent.change != self.change || self.is_closed && is_unfinished(tables, inode)?)
    }
}

/// Whether one look at all intents has begun anything, and how much more it may begin.
#[derive(Default)]
struct Pass {
    is_busy: bool,
    /// Nothing more is begun that nobody waits for.
    is_full: bool,
}

/// How working on an inode ended.
pub(super) enum PersistOutcome {
    /// The bucket has it, or needs nothing.
    Done,
    /// The bucket did as it was asked, and there is more to do.
    Again,
    Later(Duration),
    /// It was written to meanwhile.
    Changing,
    /// It was when some parts of it had been sent, by an upload that began then.
    InVain(Instant),
    Failed(FailureKind, String),
}

impl From<WorkError> for PersistOutcome {
    fn from(error: WorkError) -> Self {
        Self::Failed(FailureKind::Item, error.to_string())
    }
}

impl Persistence {
    /// How long to rest after a look at everything, of which reading took so long and which found something to do or
    /// nothing. What is done is struck off the records, but must be passed over by whoever reads them again.
    pub(super) fn rest(&self, reading: Duration, busy: bool) -> Next {
        let (shortest, rest) = match (self.expedited.is_empty(), busy) {
            (true, false) => (PAUSES.1, REST),
            (true, true) => (PAUSES.1, REST_BUSY),
            (false, _) => (PAUSES.0, REST_EXPEDITED),
        };
        Next::RestFor((self.delay / 4).clamp(PAUSES.0, shortest).max(reading * rest))
    }

    /// Begins to work on all inodes that are due.
    pub(super) async fn persist_due(self: &Arc<Self>) -> Result<Next, WorkError> {
        let (mut reading, mut pass) = (Duration::ZERO, Pass::default());
        let mut after = 0;
        loop {
            let began = Instant::now();
            let page = self.prioritized_intents(after).await?;
            reading += began.elapsed();
            let Some(last) = page.last() else { return Ok(self.rest(reading, pass.is_busy)) };
            after = last.inode;
            for due in page {
                self.start_if_due(due, &mut pass).await;
            }
        }
    }

    /// Begins to work on an inode if it is due. Those that nobody waits for have a part of the turns only. One of them
    /// waits for its turn, and the rest of the pass is passed over, so that nothing that is awaited comes behind it.
    async fn start_if_due(self: &Arc<Self>, due: DueIntent, pass: &mut Pass) {
        let comes_first = due.priority != Priority::Normal || self.is_overdue(due.intent.first_ns);
        if !comes_first && (pass.is_full || !self.is_due(&due)) || self.is_left_alone(&due) {
            return;
        }
        let DueIntent { inode, intent: IntentRecord { mount_id, change, .. }, priority, .. } = due;
        let seen = SeenIntent { change, is_closed: !due.is_unfinished && due.at_rest < self.delay };
        let Some(turn) = self.retries.begin(&Item::Inode(inode), mount_id, priority) else { return };
        let makes_way = !comes_first && self.yields_to_clients();
        let background = if comes_first { None } else { self.background_permit(makes_way).await };
        if !comes_first && background.is_none() {
            pass.is_full = true;
            return;
        }
        let Ok(all) = self.permits.clone().acquire_owned().await else { return };
        self.metrics.busy_uploads.inc_by(u64::from(makes_way));
        let persistence = self.clone();
        self.tasks.spawn(async move {
            let seen = background.is_some().then_some(seen);
            persistence.process_intent(inode, mount_id, priority, &turn, seen).await;
            drop((all, background));
        });
        pass.is_busy = true;
    }

    /// What is needed to work on something that nobody waits for: where it makes way for clients, if it is to be had
    /// soon; at once, if somebody waits, or begins to, for what may come behind it.
    async fn background_permit(&self, makes_way: bool) -> Option<OwnedSemaphorePermit> {
        let mut begun = self.expedited.begun.subscribe();
        let permits = if makes_way { self.busy_permits.clone() } else { self.background_permits.clone() };
        let is_awaited = !self.expedited.is_empty();
        if is_awaited {
            return permits.try_acquire_owned().ok();
        }
        tokio::select! {
            permit = permits.acquire_owned() => permit.ok(),
            _begun = begun.changed() => None,
            () = tokio::time::sleep(PAUSES.1), if makes_way => None,
        }
    }

    /// Whether what nobody waits for has been at rest for long enough.
    fn is_due(&self, due: &DueIntent) -> bool {
        let rest = if due.is_unfinished { self.delay } else { self.rest_of_closed() };
        due.at_rest >= rest && !self.recent.is_recent(due.inode, Instant::now())
    }

    /// Whether the last upload of a file was in vain, and the next one would probably be as well.
    fn is_left_alone(&self, due: &DueIntent) -> bool {
        self.changing.waits(due.inode, due.priority, due.is_closed.then_some(due.at_rest), Instant::now())
    }

    /// How long a file that is closed is left alone.
    pub(super) fn rest_of_closed(&self) -> Duration {
        self.delay / REST_PART
    }

    /// Whether what has been to be done since then waits for nothing any longer.
    pub(super) fn is_overdue(&self, since_ns: i64) -> bool {
        age(self.lookups.reader.clock(), since_ns) >= self.delay * PATIENCE
    }

    /// Why an inode has not been brought to its bucket for longer than that may take, if it has been tried in vain.
    pub fn stuck_intent(&self, inode: u64, intent: &IntentRecord) -> Option<String> {
        let error = self.is_overdue(intent.first_ns).then(|| self.retries.error(&Item::Inode(inode)));
        error.flatten().map(|(_, error)| error)
    }

    /// Why an object that is to be deleted is still there after longer than that may take, if it has been tried in
    /// vain.
    pub fn stuck_deletion(&self, mount_id: u32, key: &str, deletion: &DeletionRecord) -> Option<String> {
        let item = Item::Key(mount_id, key.to_owned());
        let error = self.is_overdue(deletion.since_ns).then(|| self.retries.error(&item));
        error.flatten().map(|(_, error)| error)
    }

    /// Works on an inode until there is nothing more to do for now; in the background what nobody waits for, and what
    /// has not waited for long, as it was seen.
    pub(super) async fn process_intent(
        &self,
        inode: u64,
        mount_id: u32,
        pace: Priority,
        turn: &WorkPermit,
        background: Option<SeenIntent>,
    ) {
        loop {
            // Where the log does not take anything at the moment, whatever is begun anew finds things as they are.
            match self.step(inode, mount_id, pace, background).await.unwrap_or_else(PersistOutcome::from) {
                PersistOutcome::Done => {
                    self.changing.forget(inode);
                    return turn.succeeded();
                }
                PersistOutcome::Again => turn.succeeded(),
                PersistOutcome::Later(pause) => return turn.later(pause),
                PersistOutcome::Changing if self.expedited.is_empty() => return turn.later(self.delay),
                // It may be what somebody waits for, perhaps since a moment ago.
                PersistOutcome::Changing => return turn.later(self.delay.min(AWAITED_PAUSE)),
                PersistOutcome::InVain(began) => {
                    self.changing.add(inode, pace, began, Instant::now());
                    return turn.later(self.delay.min(AWAITED_PAUSE));
                }
                PersistOutcome::Failed(blame, error) => {
                    self.metrics.failures.inc();
                    tracing::debug!(inode, mount = mount_id, "not persisted: {error}");
                    return turn.failed(blame, &error);
                }
            }
        }
    }

    async fn step(
        &self,
        inode: u64,
        mount_id: u32,
        pace: Priority,
        background: Option<SeenIntent>,
    ) -> Result<PersistOutcome, WorkError> {
        let Some(mount) = WorkError::if_found(self.lookups.mounts.get(mount_id))? else {
            let forget = Persisted { inode, change: u64::MAX, ..Persisted::default() };
            self.proposer.propose(Command::Persisted(forget)).await?;
            return Ok(PersistOutcome::Done);
        };
        let (seen, cluster) = (mount.clone(), self.cluster_id.clone());
        let planned = self.lookups.reader.read(move |tables| {
            if background.map_or(Ok(false), |background| background.is_outdated(tables, inode))? {
                return Ok(None);
            }
            plan::plan(tables, &cluster, inode, &seen.mount, seen.ufs.prefix()).map(Some)
        });
        let Some(planned) = planned.await? else { return Ok(PersistOutcome::Later(PAUSES.0)) };
        match planned {
            Err(unfit) => Ok(PersistOutcome::Failed(FailureKind::NeedsOperator, unfit)),
            Ok(Step::None) => Ok(PersistOutcome::Done),
            Ok(Step::Propagate) => {
                let propagate = PropagateIntent { inode, limit: PROPAGATED_MAX };
                self.proposer.propose(Command::PropagateIntent(propagate)).await?;
                Failpoint::RenamePropagated.pass();
                Ok(PersistOutcome::Again)
            }
            Ok(Step::KeyOccupied { key, owner }) => self.relocate_origin(&mount, inode, &key, owner, pace).await,
            Ok(Step::Write(mut work)) => {
                // A worker that is nearly full must get rid of what it has.
                work.is_background = background.is_some() && !self.lacks_room.load(Ordering::Relaxed);
                self.write_objects(&mount, *work).await
            }
        }
    }

    async fn write_objects(&self, mount: &OpenMount, mut work: Work) -> Result<PersistOutcome, WorkError> {
        // All keys until all is confirmed: what gets one of the names meanwhile is written over what is written now.
        let claims = work.writes.iter().map(|write| self.retries.claim(work.mount_id, &write.key));
        let Some(_claims) = claims.collect::<Option<Vec<_>>>() else {
            // One is being deleted, or written for the inode that had the name before.
            return Ok(PersistOutcome::Later(PAUSES.0));
        };
        // The first worker of a block is the one that is asked for it.
        let placement = self.writer.placement()?;
        for extent in &mut work.content.extents {
            extent.workers.sort_by_key(|worker| !placement.is_live(*worker));
        }
        let writes = !work.writes.is_empty();
        for portion in work.portions() {
            if let Some(end) = self.write_portion(mount, &work, portion).await? {
                return Ok(end);
            }
        }
        if writes {
            self.recent.add(work.inode, Instant::now());
        }
        Ok(PersistOutcome::Done)
    }

    /// Gives the end, if this is not done.
    async fn write_portion(
        &self,
        mount: &OpenMount,
        work: &Work,
        portion: Portion,
    ) -> Result<Option<PersistOutcome>, WorkError> {
        let new: Vec<String> =
            portion.writes.iter().filter(|write| write.is_new).map(|write| write.key.clone()).collect();
        if !new.is_empty() {
            let begin = BeginObjects { inode: work.inode, keys: new };
            match self.proposer.propose(begin).await? {
                Beginning::Began { is_named: false } => return Ok(Some(PersistOutcome::Done)),
                Beginning::OutOfDate => return Ok(Some(PersistOutcome::Again)),
                Beginning::Began { is_named: true } => {}
            }
        }
        Failpoint::ObjectNoted.pass();
        let (mut objects, mut failed) = (Vec::new(), None);
        for write in &portion.writes {
            match self.write(mount, work, write.clone()).await {
                Ok(etag) => {
                    let object = Some(work.content.object(etag));
                    objects.push(PersistedObject { key: write.key.clone(), object });
                }
                Err(end) => {
                    failed = Some(end);
                    break;
                }
            }
        }
        Failpoint::ObjectWritten.pass();
        self.confirm(work.inode, portion, objects, failed).await
    }

    /// Puts what was done into the log.
    async fn confirm(
        &self,
        inode: u64,
        portion: Portion,
        objects: Vec<PersistedObject>,
        failed: Option<PersistOutcome>,
    ) -> Result<Option<PersistOutcome>, WorkError> {
        // With one object missing, nothing is given up, and the bucket is behind still.
        let (change, gone) = if failed.is_none() { (portion.change, portion.gone) } else { (0, Vec::new()) };
        if failed.is_none() || !objects.is_empty() {
            let persisted = Persisted { inode, change, objects, gone };
            self.proposer.propose(Command::Persisted(persisted)).await?;
            Failpoint::ObjectConfirmed.pass();
        }
        Ok(failed)
    }

    /// Has a worker write one object; gives its ETag.
    pub(super) async fn write(
        &self,
        mount: &OpenMount,
        work: &Work,
        mut write: Write,
    ) -> Result<String, PersistOutcome> {
        if let Err(refusal) = mount.check_claimant() {
            mount.failed(&refusal);
            return Err(PersistOutcome::Failed(FailureKind::Denied, refusal.to_string()));
        }
        let worker = self.choose(work, &write)?;
        for _ in 0..ROUNDS {
            let (request, began) = (work.content.request(work, &write), Instant::now());
            let reply = self.writer.persist(worker, request).await;
            let reply = reply.map_err(|error| PersistOutcome::Failed(FailureKind::Item, error))?;
            let failed = |blame: FailureKind| {
                let message = if reply.message.is_empty() { reply.status().as_str_name() } else { &reply.message };
                PersistOutcome::Failed(blame, message.to_owned())
            };
            match reply.status() {
                Status::Ok => {
                    mount.succeeded();
                    self.metrics.uploads.inc();
                    self.metrics.upload_bytes.inc_by(work.content.length);
                    self.throughput.add(work.content.length);
                    return Ok(reply.etag);
                }
                // The namespace says what is under the key: what is there goes.
                Status::VersionChanged if write.replaces != reply.etag => write.replaces = reply.etag,
                Status::VersionChanged => {
                    return Err(self.clear_the_way(mount, work.inode, &write.key, &reply.message).await?);
                }
                Status::Changed if reply.sent_bytes > 0 => return Err(PersistOutcome::InVain(began)),
                Status::Changed => return Err(PersistOutcome::Changing),
                Status::NotFound => return Err(self.recognize_own_upload(mount, work, &reply.message).await?),
                Status::NoSuchBlock => return Err(self.recognize_lost(work, &reply.message).await?),
                status @ (Status::UfsUnavailable | Status::Denied) => {
                    mount.failed(&WorkError::Refused(reply.message.clone()));
                    return Err(failed(if status == Status::Denied {
                        FailureKind::Denied
                    } else {
                        FailureKind::Bucket
                    }));
                }
                _ => return Err(failed(FailureKind::Item)),
            }
        }
        Err(PersistOutcome::Changing)
    }

    /// A live worker: one that has the first block, or else any, the same for the same object.
    fn choose(&self, work: &Work, write: &Write) -> Result<u64, PersistOutcome> {
        let placement = self.writer.placement()?;
        let is_live = |worker: &u64| placement.is_live(*worker);
        let holder = work.content.extents.first().and_then(|first| first.workers.iter().copied().find(is_live));
        let any = || {
            let content = ContentId::of_object(&self.cluster_id, &write.key, "", 0, 1);
            placement.candidates(content, 0, 1).first()
        };
        let chosen = holder.or_else(any);
        chosen.ok_or_else(|| PersistOutcome::Failed(FailureKind::Item, "no worker is live: start one".to_owned()))
    }
}

/// How long ago something was. Of what is from the future, written by a master that did not record its clock, no age is
/// known: it does not wait.
pub(super) fn age(clock: &Clock, ns: i64) -> Duration {
    u64::try_from(clock.age_ns(ns)).map_or(Duration::MAX, Duration::from_nanos)
}

/// Whether an inode is a file that will probably change again: somebody has it open to write to it, or it was just made
/// and nothing has been written to it.
pub(super) fn is_unfinished(tables: Tables<'_>, inode: u64) -> Result<bool, WorkError> {
    let is_file = |record: &InodeRecord| record.kind() == Kind::File && !record.unlinked;
    let Some(record) = tables.inode(inode)?.filter(is_file) else { return Ok(false) };
    Ok(record.size == 0 || tables.is_written_by_others(inode, 0)?)
}
