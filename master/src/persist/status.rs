//! How far the buckets are behind.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cavern_proto::master::{Kind, PersistStatus};
use cavern_proto::record::IntentRecord;
use parking_lot::Mutex;

use super::ledger::Item;
use super::{PAGE, Persistence, REST};
use crate::MasterError;
use crate::lookup::components;
use crate::state::Tables;

/// The rate is that of so many seconds.
const WINDOW: Duration = Duration::from_secs(10);
/// How often the gauges are set, at most.
const MEASURE: Duration = Duration::from_secs(5);

/// What was written lately.
#[derive(Default)]
pub(super) struct Throughput(Mutex<VecDeque<(Instant, u64, u64)>>);

impl Throughput {
    pub(super) fn add(&self, bytes: u64) {
        let now = Instant::now();
        let mut recent = self.0.lock();
        match recent.back_mut() {
            Some((began, files, sum)) if began.elapsed() < Duration::from_millis(250) => {
                *files += 1;
                *sum += bytes;
            }
            _ => recent.push_back((now, 1, bytes)),
        }
        while recent.front().is_some_and(|(began, _, _)| began.elapsed() > WINDOW) {
            recent.pop_front();
        }
    }

    /// Files and bytes per second.
    fn rate(&self) -> (u64, u64) {
        let recent = self.0.lock();
        let recent = recent.iter().filter(|(began, _, _)| began.elapsed() <= WINDOW);
        let (files, bytes) = recent.fold((0, 0), |(files, bytes), (_, more, sum)| (files + more, bytes + sum));
        (files / WINDOW.as_secs(), bytes / WINDOW.as_secs())
    }
}

/// A part of the namespace.
#[derive(Clone, Debug)]
struct Scope {
    inode: u64,
    /// 0 above all mounts.
    mount_id: u32,
    /// The keys in it begin with this; a file's key is all of it.
    key: String,
}

/// Sums up a backlog.
#[derive(Default)]
struct Backlog {
    files: u64,
    bytes: u64,
    deletions: u64,
    oldest_ns: i64,
    error: Option<(Instant, String)>,
}

impl Backlog {
    fn older(&mut self, ns: i64) {
        if self.oldest_ns == 0 || ns < self.oldest_ns {
            self.oldest_ns = ns;
        }
    }

    fn failed(&mut self, error: Option<(Instant, String)>) {
        if let Some((at, _)) = &error
            && self.error.as_ref().is_none_or(|(last, _)| last < at)
        {
            self.error = error;
        }
    }
}

impl Persistence {
    /// What the buckets lack of a path and of what lies below it. With `up_to`, of changes up to that number only.
    ///
    /// # Errors
    /// [`MasterError::NotFound`] for a path that leads nowhere.
    pub async fn status(self: &Arc<Self>, path: &str, up_to: u64) -> Result<PersistStatus, MasterError> {
        let names = components(path)?;
        let entry = self.lookups.resolve(&format!("/{}", names.join("/"))).await?;
        let attr = entry.attr.unwrap_or_default();
        let scope = Scope { inode: attr.inode, mount_id: entry.mount_id, key: entry.key };
        if attr.kind() != Kind::Directory && scope.mount_id == 0 {
            return Err(MasterError::Invalid(format!("{path} is in no mount")));
        }
        let (backlog, change) = self.measure(scope, up_to).await?;
        let (files_per_second, bytes_per_second) = self.throughput.rate();
        let age_ns = match backlog.oldest_ns {
            0 => 0,
            oldest => self.lookups.listings.clock().now_ns().saturating_sub(oldest).max(0),
        };
        Ok(PersistStatus {
            files: backlog.files,
            bytes: backlog.bytes,
            deletions: backlog.deletions,
            oldest_age_ms: age_ns / 1_000_000,
            last_error: backlog.error.map(|(_, error)| error).unwrap_or_default(),
            files_per_second,
            bytes_per_second,
            change,
        })
    }

    /// Keeps the gauges up to date.
    pub(super) async fn keep_measuring(self: &Arc<Self>) {
        loop {
            let began = Instant::now();
            let scope = Scope { inode: cavern_proto::ROOT_INODE, mount_id: 0, key: String::new() };
            match self.measure(scope, u64::MAX).await {
                Ok((backlog, _)) => self.metrics.set_backlog(
                    backlog.files,
                    backlog.bytes,
                    backlog.deletions,
                    match backlog.oldest_ns {
                        0 => Duration::ZERO,
                        oldest => {
                            let age = self.lookups.listings.clock().now_ns().saturating_sub(oldest);
                            Duration::from_nanos(u64::try_from(age).unwrap_or(0))
                        }
                    },
                ),
                Err(error) => tracing::warn!("the backlog of persistence cannot be measured: {error}"),
            }
            tokio::time::sleep(MEASURE.max(began.elapsed() * REST)).await;
        }
    }

    async fn measure(self: &Arc<Self>, scope: Scope, up_to: u64) -> Result<(Backlog, u64), MasterError> {
        let persistence = self.clone();
        self.lookups.listings.read(move |tables| persistence.sum_up(tables, &scope, up_to)).await
    }

    /// Reads all of the backlog. *Blocking*.
    fn sum_up(&self, tables: Tables<'_>, scope: &Scope, up_to: u64) -> Result<(Backlog, u64), MasterError> {
        // Before the rest: what comes meanwhile has a higher number.
        let change = tables.counters()?.change;
        let mut backlog = Backlog::default();
        let mut within = Within { scope, known: HashMap::new() };
        let mut buckets = Vec::new();
        let mut after = 0;
        loop {
            let page = tables.intents(after, PAGE)?;
            let Some((last, _)) = page.last() else { break };
            after = *last;
            for (inode, intent) in page {
                if intent.first_change > up_to || !within.has(tables, inode, &intent)? {
                    continue;
                }
                backlog.files += 1;
                backlog.bytes += unwritten_bytes(tables, inode)?;
                backlog.older(intent.first_ns);
                backlog.failed(self.ledger.error(&Item::Inode(inode)));
                if !buckets.contains(&intent.mount_id) {
                    buckets.push(intent.mount_id);
                }
            }
        }
        let mut after: Option<(u32, String)> = None;
        loop {
            let page = tables.deletions(after.as_ref().map(|(mount, key)| (*mount, key.as_str())), PAGE)?;
            let Some(last) = page.last() else { break };
            after = Some((last.mount_id, last.key.clone()));
            for doomed in page {
                let is_below = scope.mount_id == doomed.mount_id && doomed.key.starts_with(&scope.key);
                // What is kept for those who have a nameless file open goes when they close it.
                if let Some(inode) = tables.origin_of(doomed.mount_id, &doomed.key)?
                    && tables.is_held(inode)?
                    && tables.inode(inode)?.is_some_and(|record| record.unlinked)
                {
                    continue;
                }
                if doomed.record.first_change > up_to || !(is_below || within.has_mount(tables, doomed.mount_id)?) {
                    continue;
                }
                backlog.deletions += 1;
                backlog.older(doomed.record.since_ns);
                backlog.failed(self.ledger.error(&Item::Key(doomed.mount_id, doomed.key)));
            }
        }
        for mount_id in buckets {
            backlog.failed(self.ledger.bucket_error(mount_id));
        }
        Ok((backlog, change))
    }
}

/// Bytes of a file that its objects do not have.
fn unwritten_bytes(tables: Tables<'_>, inode: u64) -> Result<u64, MasterError> {
    let Some(record) = tables.inode(inode)?.filter(|record| record.kind() == Kind::File) else { return Ok(0) };
    let objects = tables.objects(inode)?;
    let is_written = objects.iter().any(|(_, object)| !object.etag.is_empty() && object.version == record.version);
    Ok(if is_written { 0 } else { record.size })
}

/// Tells what lies in a scope.
struct Within<'s> {
    scope: &'s Scope,
    /// Directories that were asked about before.
    known: HashMap<u64, bool>,
}

impl Within<'_> {
    fn has(&mut self, tables: Tables<'_>, inode: u64, intent: &IntentRecord) -> Result<bool, MasterError> {
        let top = self.scope.inode;
        // What is to be handed on to a directory concerns all that lies in it.
        if inode == top || (intent.spread && tables.is_below(top, inode)?) {
            return Ok(true);
        }
        let Some(record) = tables.inode(inode)? else { return Ok(false) };
        for (parent, _) in tables.names(inode, &record)? {
            let is_below = match self.known.get(&parent) {
                Some(known) => *known,
                None => tables.is_below(parent, top)?,
            };
            self.known.insert(parent, is_below);
            if is_below {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether a whole mount lies in a scope above all mounts.
    fn has_mount(&self, tables: Tables<'_>, mount_id: u32) -> Result<bool, MasterError> {
        if self.scope.mount_id != 0 {
            return Ok(false);
        }
        let Some(mount) = tables.mount(mount_id)? else { return Ok(false) };
        tables.is_below(mount.root_inode, self.scope.inode)
    }
}
