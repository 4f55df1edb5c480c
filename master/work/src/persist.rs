//! Persistence of fs-mode mounts: the leader compares what their buckets are to have with what they have, and has
//! workers carry out the difference. None of it is on the path of a command; all that it decides goes through the log.
//!
//! - [`intents`](self::intents): inodes with changes that the bucket lacks. A file that is closed is written when it
//!   has not changed for a tenth of `master.persist_delay` ([`REST_PART`]). One that is open or empty is left alone for
//!   all of it, since it will change again, and so is one that was written a moment ago, longer each time
//!   ([`recent_uploads`](self::recent_uploads)); for [`PATIENCE`] times that at most. A large one that is written to
//!   during its upload waits for longer ([`changing_files`](self::changing_files)). While clients make many changes
//!   ([`client_load`](self::client_load)) few are written at a time, unless workers run out of room. An object that is
//!   new under its key is noted before it is written; what was written is confirmed by the number of the change.
//! - [`deletions`](self::deletions): objects that belong to no inode any more. Content comes first: a key is given up
//!   only when the object under the new key has been confirmed.
//! - [`key_conflicts`](self::key_conflicts): stores where of the keys `a` and `a/b` there can be one only. There the
//!   old key is given up first.
//! - [`origins`](self::origins): objects that have what no block of a file has. Nobody else writes over them.
//! - [`expedite`](self::expedite): parts of the namespace that somebody waits for. Nothing of them waits for a delay.
//! - [`lost`](self::lost): files that cannot be written, since their workers have lost blocks of them.
//! - [`drop_clean_blocks`](self::drop_clean_blocks): blocks of files that the bucket has, dropped where a worker is
//!   nearly full.
//! - [`garbage_collection`](self::garbage_collection): blocks of workers that no file has any more.
//!
//! **One thing at a time under a key.** Whoever writes or deletes an object claims its key first. What a request of an
//! earlier master, or of one whose answer was lost, may still do in the store is fended off by the store: each request
//! names the version that it replaces.
//!
//! What fails is tried again for ever, with pauses that grow ([`cavern_conf::backoff::PERSIST`]); while a whole bucket
//! fails, one request at a time asks whether it is back.

mod backlog;
mod changing_files;
mod client_load;
mod deletions;
mod drop_clean_blocks;
mod expedite;
mod expedited_scopes;
mod garbage_collection;
pub mod intents;
mod key_conflicts;
mod lost;
pub mod metadata;
mod object_tag;
mod origins;
pub mod plan;
mod recent_uploads;
pub mod refresh;
mod retry_tracker;
mod scope;
mod status;
mod tasks;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cavern_conf::schema;
use cavern_consensus::Proposer;
use cavern_proto::master::{Entry, Kind, MountBacklog};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

pub use self::backlog::Backlog;
use self::backlog::Throughput;
use self::changing_files::ChangingFiles;
use self::client_load::ClientLoad;
use self::expedited_scopes::ExpeditedScopes;
use self::recent_uploads::RecentUploads;
use self::retry_tracker::RetryTracker;
pub use self::scope::Scope;
use crate::background::TaskGroup;
use crate::error::WorkError;
use crate::metrics::PersistMetrics;
use crate::namespace::{Lookups, components};
use crate::workers::calls::ObjectWriter;

/// A file that never comes to rest, or whose master is never at rest, is written when its oldest change is so many
/// delays old.
const PATIENCE: u32 = 10;
/// A closed file that has not changed for this part of the delay is at rest: names are given, attributes set and other
/// names linked right after a close.
const REST_PART: u32 = 10;
/// This part of what may be under way at a time is kept for what somebody waits for.
const AWAITED_PART: usize = 8;
/// Records read at a time.
const PAGE: usize = 500;
/// Bounds of the pause after a look at all records.
const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(250));
/// The pause is at least so many times as long as reading the records took: when nothing was to be done, when something
/// was, and while somebody waits for it.
const REST: u32 = 50;
const REST_BUSY: u32 = 10;
const REST_EXPEDITED: u32 = 1;

/// What persistence works with.
pub struct Persistence {
    lookups: Lookups,
    proposer: Proposer,
    writer: Arc<dyn ObjectWriter>,
    cluster_id: Arc<str>,
    /// How long a changed file is left alone that is open or empty, and one that has just been written.
    delay: Duration,
    /// Objects written and deleted at a time.
    permits: Arc<Semaphore>,
    /// Of these, those of files that nobody waits for: who begins to wait finds some free.
    background_permits: Arc<Semaphore>,
    /// The same of files that are begun while clients make many changes.
    busy_permits: Arc<Semaphore>,
    recent: RecentUploads,
    changing: ChangingFiles,
    retries: RetryTracker,
    expedited: ExpeditedScopes,
    demand: ClientLoad,
    /// A worker is nearly full.
    lacks_room: AtomicBool,
    throughput: Throughput,
    /// By mount, as they were measured last.
    backlogs: Mutex<Vec<MountBacklog>>,
    metrics: PersistMetrics,
    tasks: TaskGroup,
}

impl Persistence {
    pub fn new(
        lookups: Lookups,
        proposer: Proposer,
        writer: Arc<dyn ObjectWriter>,
        cluster_id: Arc<str>,
        conf: &schema::Master,
        metrics: PersistMetrics,
    ) -> Arc<Self> {
        let delay = conf.persist_delay.get();
        let permits = |count: usize| Arc::new(Semaphore::new(count.clamp(1, Semaphore::MAX_PERMITS)));
        Arc::new(Self {
            lookups,
            proposer,
            writer,
            cluster_id,
            delay,
            permits: permits(conf.persist_concurrency),
            background_permits: permits(conf.persist_concurrency - conf.persist_concurrency / AWAITED_PART),
            busy_permits: permits(conf.persist_busy_concurrency),
            recent: RecentUploads::new(delay, delay * PATIENCE),
            changing: ChangingFiles::new(delay),
            retries: RetryTracker::default(),
            expedited: ExpeditedScopes::default(),
            demand: ClientLoad::default(),
            lacks_room: AtomicBool::new(false),
            throughput: Throughput::default(),
            backlogs: Mutex::default(),
            metrics,
            tasks: TaskGroup::default(),
        })
    }

    /// What a path leads to.
    ///
    /// # Errors
    /// [`WorkError::NotFound`] for a path that leads nowhere.
    pub async fn scope(&self, path: &str) -> Result<Scope, WorkError> {
        let names = components(path)?;
        let Entry { attr, mount_id, .. } = self.lookups.resolve(&format!("/{}", names.join("/"))).await?;
        let attr = attr.unwrap_or_default();
        if attr.kind() != Kind::Directory && mount_id == 0 {
            return Err(WorkError::Invalid(format!("{path} is in no mount")));
        }
        Ok(Scope { inode: attr.inode, mount_id })
    }

    /// Clients make so many changes.
    pub fn clients_changed(&self, changes: usize) {
        self.demand.add(changes);
    }

    /// Whether what nobody waits for makes way: files are written few at a time, and nothing is deleted.
    pub fn yields_to_clients(&self) -> bool {
        self.demand.is_high() && !self.lacks_room.load(Ordering::Relaxed)
    }

    /// Stops, and waits for what is under way to be given up: it is done again after a restart.
    pub async fn shutdown(&self) {
        self.tasks.shutdown().await;
    }
}
