//! Takes what others changed in the bucket of an fs-mode mount into its namespace.
//!
//! Each directory is listed and compared with what is noted of the objects in it. A listing is old when it arrives, and
//! this cluster writes to the bucket as well; so nothing is believed from a listing alone. Of each name that differs
//! the object is claimed, as for writing it, and asked for once more: while it is claimed, nothing of ours changes it.
//! What the bucket says then is put into the log, where it is held against the state once more
//! (`state/posix/external.rs`).
//!
//! A run that does not change anything asks the same questions, and applies the command to a transaction that is not
//! written.

use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cavern_proto::master::{Kind, RefreshFate, RefreshItem, RefreshProgress};
use cavern_proto::record::{AdoptListing, ImportExternalChange, ListedEntry};
use cavern_state::{Directory, Transaction, import_external_change};
use futures::stream::{self, FuturesUnordered};
use futures::{FutureExt, StreamExt};
use tokio::sync::mpsc;

use super::{Persistence, object_tag};
use crate::error::{WorkError, if_there};
use crate::mounts::OpenMount;

/// Directories that are compared at a time, and names of each that are asked for once more.
const DIRECTORIES: usize = 16;
const NAMES: usize = 8;
/// How often progress is reported, unless so many names are to be reported.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);
const ITEMS: usize = 500;

/// Whether a refresh changes anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefreshMode {
    Apply,
    DryRun,
}

/// What became of a directory.
struct Visited {
    directory: Directory,
    found: Vec<(RefreshFate, String)>,
    counts: RefreshProgress,
    children: Vec<u64>,
    /// The bucket has nothing there, and all but so many of its entries are gone.
    vanished: Option<u64>,
}

/// Reports how far a refresh has come.
struct ProgressReporter<'a> {
    answers: &'a mpsc::Sender<Result<RefreshProgress, WorkError>>,
    run: RefreshMode,
    progress: RefreshProgress,
    last_report: tokio::time::Instant,
}

impl ProgressReporter<'_> {
    fn add(&mut self, fate: RefreshFate, path: String) {
        let progress = &mut self.progress;
        let counter = match fate {
            RefreshFate::Nothing => return,
            RefreshFate::Added => &mut progress.added,
            RefreshFate::Changed => &mut progress.changed,
            RefreshFate::Removed => &mut progress.removed,
            RefreshFate::Conflict => &mut progress.conflicts,
            RefreshFate::Pending => &mut progress.pending,
        };
        *counter += 1;
        if is_reported(fate, self.run) {
            progress.items.push(RefreshItem { fate: fate as i32, path });
        }
    }

    async fn report(&mut self) {
        if self.last_report.elapsed() >= PROGRESS_INTERVAL || self.progress.items.len() >= ITEMS {
            self.last_report = tokio::time::Instant::now();
            let items = std::mem::take(&mut self.progress.items);
            let _ = self.answers.send(Ok(RefreshProgress { items, ..self.progress.clone() })).await;
        }
    }
}

impl Persistence {
    /// Compares a directory, or one name in it, with the bucket.
    pub async fn refresh(
        self: &Arc<Self>,
        top: u64,
        name: Option<Bytes>,
        recursive: bool,
        run: RefreshMode,
        answers: &mpsc::Sender<Result<RefreshProgress, WorkError>>,
    ) -> Result<RefreshProgress, WorkError> {
        let last_report = tokio::time::Instant::now();
        let mut reporter = ProgressReporter { answers, run, progress: RefreshProgress::default(), last_report };
        if let Some(name) = name {
            let directory = self.lookups.reader.directory(top).await?;
            let mount = self.lookups.mounts.get(directory.mount_id)?;
            let there = self.lookups.listings.ask_now(&mount, &directory, &name).await?;
            reporter.progress.entries = 1;
            let (fate, path) = self.settle(&mount, &directory, &name, there, run).await?;
            reporter.add(fate, path);
            self.list_what_is_new(&mount, &reporter);
            return Ok(reporter.progress);
        }
        let (mut waiting, mut running) = (vec![top], FuturesUnordered::new());
        let (mut vanished, mut failure, mut mount) = (BTreeMap::new(), None, None);
        loop {
            while running.len() < DIRECTORIES
                && let Some(directory) = waiting.pop()
            {
                running.push(self.visit(directory, run).boxed());
            }
            match running.next().await {
                None => break,
                Some(Err(error)) => failure = failure.or(Some(error)),
                Some(Ok(None)) => {}
                Some(Ok(Some(visited))) => {
                    let Visited { directory, found, counts, children, vanished: left } = visited;
                    reporter.progress.directories += 1;
                    reporter.progress.entries += counts.entries;
                    reporter.progress.hidden += counts.hidden;
                    reporter.progress.added += counts.added;
                    found.into_iter().for_each(|(fate, path)| reporter.add(fate, path));
                    mount = Some(directory.mount_id);
                    if let Some(left) = left {
                        // The deepest come last.
                        vanished.insert((directory.path.len(), directory.inode), left);
                    }
                    if recursive {
                        waiting.extend(children);
                    }
                    reporter.report().await;
                }
            }
        }
        self.remove_vanished(vanished, &mut reporter).await?;
        if let Some(mount) = mount {
            self.list_what_is_new(&*self.lookups.mounts.get(mount)?, &reporter);
        }
        failure.map_or(Ok(reporter.progress), Err)
    }

    /// Directories that were added are listed by now, or will be in the background.
    fn list_what_is_new(&self, mount: &OpenMount, reporter: &ProgressReporter<'_>) {
        if reporter.run == RefreshMode::Apply
            && reporter.progress.added > 0
            && let Ok(mount) = self.lookups.mounts.get(mount.id())
        {
            self.lookups.listings.start_existing(mount);
        }
    }

    async fn visit(&self, inode: u64, run: RefreshMode) -> Result<Option<Visited>, WorkError> {
        let listings = &self.lookups.listings;
        let directory = WorkError::if_found(self.lookups.reader.directory(inode).await)?;
        let Some(directory) = directory else { return Ok(None) };
        let mount = self.lookups.mounts.get(directory.mount_id)?;
        let (mut counts, mut found, mut is_absent) = (RefreshProgress::default(), Vec::new(), false);
        if directory.record.listed_ns == 0 {
            if run == RefreshMode::Apply {
                let listed = listings.start(inode)?.ended().await?;
                (counts.added, counts.hidden) = (listed.added, listed.hidden);
            }
        } else if let Some(mut comparison) = listings.compare(&mount, &directory) {
            while let Some(differences) = comparison.next().await? {
                let settle = stream::iter(differences).map(|difference| {
                    let (mount, directory) = (&mount, &directory);
                    async move { self.settle(mount, directory, &difference.name, difference.there, run).await }
                });
                let settled: Vec<_> = settle.buffer_unordered(NAMES).collect().await;
                for one in settled {
                    let (fate, path) = one?;
                    // Of most changed names nothing but the number is reported.
                    let path = if is_reported(fate, run) { path } else { String::new() };
                    found.extend((fate != RefreshFate::Nothing).then_some((fate, path)));
                }
            }
            counts.hidden = comparison.hidden();
            is_absent = !comparison.exists() && !directory.is_mount_root();
        }
        let read = self.lookups.reader.read(move |tables| {
            let (mut children, mut entries) = (Vec::new(), 0);
            tables.scan::<()>(inode, None, |_, dentry| {
                entries += 1;
                if dentry.kind() == Kind::Directory {
                    children.push(dentry.inode);
                }
                Ok(ControlFlow::Continue(()))
            })?;
            Ok((children, entries))
        });
        let children;
        (children, counts.entries) = read.await?;
        let removed = found.iter().filter(|(fate, _)| *fate == RefreshFate::Removed).count() as u64;
        let left = if run == RefreshMode::DryRun { counts.entries.saturating_sub(removed) } else { counts.entries };
        Ok(Some(Visited { directory, found, counts, children, vanished: is_absent.then_some(left) }))
    }

    /// Removes directories of which the bucket has nothing any more, those that lie deepest first.
    async fn remove_vanished(
        &self,
        vanished: BTreeMap<(usize, u64), u64>,
        reporter: &mut ProgressReporter<'_>,
    ) -> Result<(), WorkError> {
        let mut gone: HashMap<u64, u64> = HashMap::new();
        for ((_, inode), left) in vanished.into_iter().rev() {
            if left > gone.get(&inode).copied().unwrap_or_default() {
                continue;
            }
            let directory = WorkError::if_found(self.lookups.reader.directory(inode).await)?;
            let Some(directory) = directory else { continue };
            let above = directory.record.parent;
            let parent = self.lookups.reader.directory(above).await?;
            let mount = self.lookups.mounts.get(directory.mount_id)?;
            let (fate, path) = match reporter.run {
                RefreshMode::Apply => {
                    self.settle(&mount, &parent, &directory.record.name, None, RefreshMode::Apply).await?
                }
                // It is not empty yet.
                RefreshMode::DryRun => {
                    let has_intent = self.lookups.reader.read(move |tables| Ok(tables.intent(inode)?)).await?.is_some();
                    let fate = if has_intent { RefreshFate::Nothing } else { RefreshFate::Removed };
                    (fate, shown(&mount, &parent, &directory.record.name))
                }
            };
            reporter.add(fate, path);
            if fate == RefreshFate::Removed {
                *gone.entry(above).or_default() += 1;
                if reporter.run == RefreshMode::Apply {
                    // An object of the same name was hidden by it.
                    let name = &directory.record.name;
                    let there = self.lookups.listings.ask_now(&mount, &parent, name).await?;
                    let (fate, path) = self.settle(&mount, &parent, name, there, RefreshMode::Apply).await?;
                    reporter.add(fate, path);
                }
            }
            reporter.report().await;
        }
        Ok(())
    }

    /// Looks at one name, and takes in what the bucket has there.
    async fn settle(
        &self,
        mount: &OpenMount,
        directory: &Directory,
        name: &Bytes,
        there: Option<ListedEntry>,
        run: RefreshMode,
    ) -> Result<(RefreshFate, String), WorkError> {
        let path = shown(mount, directory, name);
        let taken = self.taken(mount, directory, name, there).await?;
        if self.would_become(&taken).await? == RefreshFate::Nothing {
            return Ok((RefreshFate::Nothing, path));
        }
        let Ok(text) = std::str::from_utf8(name) else { return Ok((RefreshFate::Nothing, path)) };
        let key = format!("{}{text}", directory.key_prefix(mount.ufs.prefix()).unwrap_or_default());
        let claims = (self.retries.claim(mount.id(), &key), self.retries.claim(mount.id(), &format!("{key}/")));
        let (Some(_file), Some(_directory)) = claims else { return Ok((RefreshFate::Pending, path)) };
        let there = self.lookups.listings.ask_now(mount, directory, name).await?;
        let taken = self.taken(mount, directory, name, there).await?;
        let inode = taken.inode;
        let fate = match run {
            RefreshMode::DryRun => self.would_become(&taken).await?,
            RefreshMode::Apply => self.proposer.propose(taken).await?,
        };
        if fate == RefreshFate::Conflict && self.is_own(mount, &key, inode).await? {
            return Ok((RefreshFate::Pending, path));
        }
        Ok((fate, path))
    }

    /// What a name is compared with, as the state has it now.
    async fn taken(
        &self,
        mount: &OpenMount,
        directory: &Directory,
        name: &Bytes,
        there: Option<ListedEntry>,
    ) -> Result<ImportExternalChange, WorkError> {
        let key_prefix = directory.key_prefix(mount.ufs.prefix()).unwrap_or_default();
        let (inode, looked_up) = (directory.inode, name.clone());
        let key = format!("{key_prefix}{}", String::from_utf8_lossy(name));
        let read = self.lookups.reader.read(move |tables| {
            let Some(dentry) = tables.dentry(inode, &looked_up)? else { return Ok((0, String::new())) };
            let slash = if dentry.kind() == Kind::Directory { "/" } else { "" };
            let note = tables.object(dentry.inode, &format!("{key}{slash}"))?.unwrap_or_default();
            Ok((dentry.inode, note.etag))
        });
        let (known, etag) = read.await?;
        let listing = self.lookups.listings.default_attributes().of(AdoptListing {
            mount_id: mount.id(),
            directory: directory.inode,
            key_prefix,
            entries: there.into_iter().collect(),
            now_ns: self.lookups.reader.clock().now_ns(),
            ..AdoptListing::default()
        });
        Ok(ImportExternalChange {
            listing: Some(listing),
            path: directory.path.iter().flat_map(|name| [name, &b"/"[..]].concat()).collect(),
            name: name.clone(),
            inode: known,
            etag,
        })
    }

    async fn would_become(&self, taken: &ImportExternalChange) -> Result<RefreshFate, WorkError> {
        let taken = taken.clone();
        let read = self.lookups.reader.read(move |tables| {
            let mut transaction = Transaction::new(tables.database())?;
            Ok(import_external_change(&mut transaction, &taken)?)
        });
        read.await
    }

    /// Whether an object was written for an inode by this cluster: its confirmation was lost, and it is written again.
    async fn is_own(&self, mount: &OpenMount, key: &str, inode: u64) -> Result<bool, WorkError> {
        let object = if_there(mount.ufs.head(key).await)?;
        Ok(object.is_some_and(|object| object_tag::read(&object, &self.cluster_id, inode).is_some()))
    }
}

/// Whether names of this fate are reported one by one.
fn is_reported(fate: RefreshFate, run: RefreshMode) -> bool {
    run == RefreshMode::DryRun || fate == RefreshFate::Conflict
}

/// A name's path in the namespace, as readable as it can be.
fn shown(mount: &OpenMount, directory: &Directory, name: &[u8]) -> String {
    let names = directory.path.iter().map(|name| &**name).chain([name]);
    names.fold(mount.mount.path.clone(), |path, name| format!("{path}/{}", String::from_utf8_lossy(name)))
}
