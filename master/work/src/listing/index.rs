//! The index of a mount: flat listings of parts of its keys, many at a time, and the difference to the namespace, page
//! by page.
//!
//! It begins with one range of all keys. While the store gives more for more requests ([`width`]), a range that is
//! being listed is cut: at the directories that it has, if there are several, else in the middle of what is left of its
//! key space ([`split`]). How deep the directories are makes no difference, nor how many keys each has. The pages of a
//! range are taken in by their order, and ranges in any ([`range`]); each page says all about the keys between two of
//! them ([`page`]). So an index adds what is missing, replaces what differs and takes away what the bucket does not
//! have, and programs read meanwhile.
//!
//! How far each range is, is noted with its pages, so a master that leads next goes on with all of them. Directories
//! that lie in one range as a whole are marked as listed when they have been passed; those that were cut, at the end.
//! What was asked later than a page wins ([`run`]); directories that are being listed are left to that.
//!
//! Nothing is taken away before all ranges are listed, and together are one listing in order. A store that lists in no
//! order, or from the beginning only, has all keys listed in one stream, from the beginning after each failure of the
//! master.

mod page;
mod range;
mod run;
mod split;
mod width;

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use cavern_conf::backoff;
use cavern_proto::record::command::Command;
use cavern_proto::record::{IndexRange, IndexRecord, ListingGroup, PutIndex};
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use futures::{FutureExt as _, StreamExt as _};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::page::{Absent, Path, paths_above};
use self::range::{Beside, Context, Failure, Range, Taken};
use self::width::StreamWidth;
use super::{INDEX_REMEDY, Listings};
use crate::background::{BackgroundTask, Next, Pace};
use crate::error::WorkError;
use crate::mounts::OpenMount;

pub use self::run::IndexRun;

/// Ranges of one index at most, those that are done included.
const RANGES_MAX: usize = 1024;
/// Memory that a page takes at least, as it is counted.
const PAGE_BYTES: usize = 1 << 20;
/// Paths of one command that marks directories.
const MARKS: usize = 100;

/// A range, after a page of it.
type Advance = BoxFuture<'static, (Box<Range>, Result<Taken, Failure>)>;

/// The ranges of an index that runs.
struct Running {
    context: Context,
    began: Instant,
    /// Entries that were noted then.
    began_entries: u64,
    waiting: VecDeque<Box<Range>>,
    listed: FuturesUnordered<Advance>,
    /// Requests for more than next pages that are under way.
    asked_beside: usize,
    width: StreamWidth,
    /// Entries and hidden keys of each range so far, and about how many entries it will have.
    counts: BTreeMap<u32, Counts>,
    next_number: u32,
    /// Where keys were cut, and where ranges went on that this master has not begun.
    cuts: Vec<String>,
    /// What ranges have found absent.
    absent: Vec<Absent>,
    /// Directories were left to others before this master led, and it is not known which.
    has_left_alone: bool,
    /// The directories of the mount were asked for.
    knows_directories: bool,
    /// Bytes of the largest page.
    page_bytes: usize,
    /// What the last index has counted; 0 for the first.
    before: u64,
}

/// An index whose ranges are all done.
struct End {
    context: Context,
    entries: u64,
    hidden: u64,
    /// With the time since when each has had all names of its pages.
    cut_directories: Vec<(Path, i64)>,
    ranges: usize,
    took: Duration,
}

#[derive(Clone, Copy, Default)]
struct Counts {
    entries: u64,
    hidden: u64,
    expected: Option<f64>,
    is_done: bool,
}

/// The index of a mount.
struct Indexing {
    listings: Listings,
    mount: Arc<OpenMount>,
    /// `None` before it begins, or goes on from what is noted.
    running: Option<Running>,
    has_failed: bool,
    /// Nobody else may begin.
    is_claimed: bool,
}

impl Drop for Indexing {
    fn drop(&mut self) {
        self.release(None);
    }
}

impl Indexing {
    /// The index is over: others may begin one. It is shown with so many entries and hidden keys, if it has come to its
    /// end.
    fn release(&mut self, counted: Option<(u64, u64)>) {
        if !std::mem::take(&mut self.is_claimed) {
            return;
        }
        let mut indexes = self.listings.0.indexes.lock();
        indexes.remove(&self.mount.id());
        match counted {
            Some((entries, hidden)) => self.mount.set_index(false, entries, hidden, 0),
            // Whatever there is of the index.
            None => self.mount.health.lock().status.indexing = false,
        }
    }

    /// Begins as many requests as there may be, and takes in what the next one answers. A failure is returned when
    /// nothing is under way: what is has locks, and goes on with the next step only.
    async fn step(&mut self) -> Result<Next, WorkError> {
        if self.has_failed {
            match self.listings.0.mounts.get(self.mount.id()) {
                // The options that it was begun with failed, and are others by now.
                Ok(current) if !Arc::ptr_eq(&self.mount, &current) => {
                    self.stop().await;
                    self.mount = current;
                }
                Ok(_) => {}
                Err(error) => {
                    self.stop().await;
                    return if error.is_not_found() { Ok(Next::End) } else { Err(error) };
                }
            }
        }
        self.has_failed = true;
        if self.running.is_none() {
            self.running = self.listings.begin_index(&self.mount).await?;
        }
        let Some(running) = &mut self.running else {
            self.release(None);
            return Ok(Next::End);
        };
        if let Err(error) = running.check_size() {
            self.stop().await;
            return Err(error);
        }
        let taken = match running.next().await {
            Some((range, taken)) => running.take(range, taken).await,
            None => match running.complete().await {
                Ok(end) => return self.finish(&end).await,
                Err(failure) => Err(failure),
            },
        };
        match taken {
            Ok(()) => self.has_failed = false,
            Err(Failure::Bucket(error)) if self.is_idle() => return Err(error),
            // The others go on.
            Err(Failure::Bucket(_)) => {}
            Err(Failure::Log(error)) => {
                self.stop().await;
                return Err(error);
            }
            Err(Failure::Unsuitable) => {
                self.stop().await;
                let why = "the store cannot list parts of the prefix in order: it is listed in one stream";
                self.listings.index_anew(&self.mount, true, why).await?;
            }
            Err(Failure::Gone) => return Ok(Next::End),
        }
        Ok(Next::More)
    }

    fn is_idle(&self) -> bool {
        self.running.as_ref().is_none_or(|running| running.listed.is_empty())
    }

    /// Records that the mount is indexed, or begins once more where there was no room for all that is absent.
    async fn finish(&mut self, end: &End) -> Result<Next, WorkError> {
        if end.context.run.lacks_room() {
            self.running = None;
            let why = "more names are gone than master.index_memory has room for: it is indexed again";
            self.listings.index_anew(&self.mount, false, why).await?;
            return Ok(Next::More);
        }
        self.listings.finish_index(end).await?;
        self.release(Some((end.entries, end.hidden)));
        Ok(Next::End)
    }

    /// Has it go on from what is noted, once what is under way is over.
    async fn stop(&mut self) {
        if let Some(mut running) = self.running.take() {
            running.context.stop.cancel();
            while running.listed.next().await.is_some() {}
        }
    }
}

impl Running {
    /// The next range of which a page was taken in, or failed to be; `None` when all are done.
    async fn next(&mut self) -> Option<(Box<Range>, Result<Taken, Failure>)> {
        while self.listed.len() + self.asked_beside < self.width.current()
            && let Some(mut range) = self.waiting.pop_front()
        {
            let beside = self.beside(&range);
            range.asks_beside = beside != Beside::Nothing;
            self.asked_beside += usize::from(range.asks_beside);
            let context = self.context.clone();
            let advance = async move {
                let rested = context.stop.run_until_cancelled(range::rest(range.failures)).await;
                let taken = match rested {
                    Some(()) => range.advance(&context, beside).await,
                    None => Err(Failure::Gone),
                };
                (range, taken)
            };
            self.listed.push(advance.boxed());
        }
        let (range, taken) = self.listed.next().await?;
        self.asked_beside -= usize::from(range.asks_beside);
        Some((range, taken))
    }

    /// What is to be asked for beside the next page of a range: where it can be cut, if there may be more requests than
    /// ranges.
    fn beside(&mut self, range: &Range) -> Beside {
        let asked = self.listed.len() + self.asked_beside;
        let has_room = asked + self.waiting.len() + 1 < self.width.current();
        if !has_room || range.pages == 0 || !range.is_part() || self.counts.len() >= RANGES_MAX {
            return Beside::Nothing;
        }
        if !self.knows_directories {
            self.knows_directories = true;
            return Beside::Directories;
        }
        range.middle().map_or(Beside::Nothing, Beside::Behind)
    }

    /// Notes what became of a page.
    async fn take(&mut self, mut range: Box<Range>, taken: Result<Taken, Failure>) -> Result<(), Failure> {
        let (now, busy) = (Instant::now(), self.listed.len());
        let taken = match taken {
            Ok(taken) => taken,
            Err(Failure::Bucket(error)) => {
                if range::is_refusal(&error) {
                    self.width.refused(busy, now);
                }
                range.failures += 1;
                self.waiting.push_back(range);
                return Err(Failure::Bucket(error));
            }
            Err(failure) => return Err(failure),
        };
        range.failures = 0;
        if !taken.waited.is_zero() {
            self.width.answered(taken.keys, taken.waited, busy, now);
        }
        if taken.bytes > self.page_bytes {
            self.page_bytes = taken.bytes;
            self.width.limit(streams(&self.context.listings, self.page_bytes));
        }
        let room = RANGES_MAX.saturating_sub(self.counts.len()).min(2 * self.width.current());
        let behind = range.cut_by(&self.context, taken.cuts, self.next_number, room);
        if !behind.is_empty() {
            let all = behind.iter().map(|behind| behind.record(false));
            let noted: Vec<IndexRange> = all.chain([range.record(false)]).collect();
            self.context.propose(Vec::new(), noted, self.context.now_ns()).await.map_err(Failure::Log)?;
        }
        self.count(&range, taken.is_done);
        for range in behind {
            self.next_number = self.next_number.max(range.number + 1);
            self.cuts.push(range.bounds.after.clone());
            self.count(&range, false);
            self.waiting.push_back(Box::new(range));
        }
        if taken.is_done {
            self.absent.append(&mut range.absent);
        } else {
            self.waiting.push_back(range);
        }
        self.show();
        Ok(())
    }

    /// Takes away what all ranges together have found absent; with what is left to be noted.
    async fn complete(&mut self) -> Result<End, Failure> {
        self.context.check_order(self.width.current()).await?;
        self.context.take_away(std::mem::take(&mut self.absent)).await.map_err(Failure::Log)?;
        Ok(End {
            context: self.context.clone(),
            entries: self.entries(),
            hidden: self.hidden(),
            cut_directories: self.cut_directories(),
            ranges: self.counts.len(),
            took: self.began.elapsed(),
        })
    }

    fn count(&mut self, range: &Range, is_done: bool) {
        let (entries, hidden, expected) = (range.entries(), range.hidden(), range.expected());
        self.counts.insert(range.number, Counts { entries, hidden, expected, is_done });
    }

    fn entries(&self) -> u64 {
        self.counts.values().map(|counts| counts.entries).sum()
    }

    fn hidden(&self) -> u64 {
        self.counts.values().map(|counts| counts.hidden).sum()
    }

    /// About how many entries there will be: as many as the last index had, or what the ranges lead to expect. 0 where
    /// nothing tells.
    fn expected(&self) -> u64 {
        let entries = self.entries();
        if self.before > 0 {
            return self.before.max(entries);
        }
        let known = |counts: &Counts| if counts.is_done { Some(counts.entries as f64) } else { counts.expected };
        let sizes: Vec<f64> = self.counts.values().filter_map(known).collect();
        // A range without an end is taken to be as the others are; at least half of them must be known.
        if sizes.len() * 2 <= self.counts.len() {
            return 0;
        }
        let mean = sizes.iter().sum::<f64>() / sizes.len() as f64;
        ((mean * self.counts.len() as f64) as u64).max(entries)
    }

    fn show(&self) {
        let counted = (self.entries(), self.hidden());
        let seconds = self.began.elapsed().as_secs_f64().max(0.001);
        let rate = counted.0.saturating_sub(self.began_entries) as f64 / seconds;
        self.context.mount.set_index_progress(counted, self.expected(), self.listed.len(), rate as u64);
    }

    /// A store may list for ever.
    fn check_size(&self) -> Result<(), WorkError> {
        let Context { listings, mount, .. } = &self.context;
        let most = listings.0.index_entries;
        if self.entries() + self.hidden() <= most {
            return Ok(());
        }
        let error = WorkError::Ufs(mount.ufs.too_many(most, INDEX_REMEDY));
        mount.failed(&error);
        Err(error)
    }

    /// Directories that were cut, the root among them, as far as all ranges have them complete.
    fn cut_directories(&self) -> Vec<(Path, i64)> {
        if self.has_left_alone {
            return Vec::new();
        }
        let run = &self.context.run;
        let above = self.cuts.iter().flat_map(|cut| paths_above(cut));
        let paths: HashSet<Path> = above.chain([Path::new()]).collect();
        let complete = paths.into_iter().filter(|path| !run.is_left_alone(path));
        complete.map(|path| (path.clone(), run.part_since(&path))).collect()
    }
}

/// Requests that there is memory for, when a page takes so much.
fn streams(listings: &Listings, page_bytes: usize) -> usize {
    let memory = usize::try_from(listings.0.index_memory).unwrap_or(usize::MAX);
    (memory / 4 * 3 / page_bytes.max(PAGE_BYTES)).clamp(1, listings.0.index_streams)
}

impl Listings {
    /// Indexes a mount in the background, unless that was done before, or goes on with what was begun.
    pub fn start_index(&self, mount: Arc<OpenMount>) {
        if let Some(indexing) = self.claim_index(mount) {
            self.spawn_index(indexing);
        }
    }

    /// Compares all of a cache-mode mount with its bucket in the background, unless it is being indexed.
    ///
    /// # Errors
    /// [`WorkError::Refused`] for an fs-mode mount, and that the log takes no proposals.
    pub async fn restart_index(&self, mount: Arc<OpenMount>) -> Result<(), WorkError> {
        let id = mount.id();
        if mount.is_fs_mode() {
            let index = self.0.reader.read(move |tables| Ok(tables.index(id)?)).await?;
            return match index {
                Some(index) if index.finished_ns == 0 => Ok(()),
                _ => Err(WorkError::Refused(format!(
                    "the namespace says what is in {}, and its prefix was indexed when it was mounted: `cv refresh {}` \
                     takes in what others have changed there",
                    mount.mount.path, mount.mount.path
                ))),
            };
        }
        // Whoever asks may go away meanwhile: nobody indexes it then.
        let Some(indexing) = self.claim_index(mount) else { return Ok(()) };
        let before = self.0.reader.read(move |tables| Ok(tables.index(id)?)).await?.unwrap_or_default();
        if before.began_ns == 0 && before.finished_ns != 0 {
            self.put_index(id, IndexRecord { began_ns: self.0.reader.clock().now_ns(), one_stream: false, ..before })
                .await?;
        }
        self.spawn_index(indexing);
        Ok(())
    }

    /// The index of a mount that nobody indexes; others that ask get none.
    fn claim_index(&self, mount: Arc<OpenMount>) -> Option<Indexing> {
        let mut indexes = self.0.indexes.lock();
        if indexes.contains_key(&mount.id()) {
            return None;
        }
        indexes.insert(mount.id(), None);
        mount.set_index(true, 0, 0, 0);
        Some(Indexing { listings: self.clone(), mount, running: None, has_failed: false, is_claimed: true })
    }

    fn spawn_index(&self, indexing: Indexing) {
        let name = format!("index {}", indexing.mount.mount.path);
        let task = BackgroundTask::new(name, Pace::after(backoff::INDEX.first)).with_backoff(backoff::INDEX);
        self.0.background.start(&self.0.tasks, task, indexing, |indexing| indexing.step().boxed());
    }

    pub(super) async fn put_index(&self, mount_id: u32, index: IndexRecord) -> Result<(), WorkError> {
        self.0.proposer.propose(Command::PutIndex(PutIndex { mount_id, index: Some(index) })).await?;
        Ok(())
    }

    /// Begins the index of a mount, or goes on from what is noted of it; `None` when it is done.
    async fn begin_index(&self, mount: &Arc<OpenMount>) -> Result<Option<Running>, WorkError> {
        let id = mount.id();
        let read = self.0.reader.read(move |tables| Ok((tables.index(id)?, tables.index_ranges(id)?)));
        let (index, noted) = read.await?;
        let mut index = index.unwrap_or_default();
        if index.began_ns == 0 && index.finished_ns != 0 {
            mount.set_index(true, index.entries, index.hidden_keys, 0);
            return Ok(None);
        }
        let is_new = index.began_ns == 0;
        if is_new {
            index.began_ns = self.0.reader.clock().now_ns().max(1);
        }
        let absent_max = usize::try_from(self.0.index_memory / 4).unwrap_or(usize::MAX);
        let run = Arc::new(IndexRun::new(index.began_ns, absent_max));
        self.0.indexes.lock().insert(id, Some(run.clone()));
        // Whoever has asked before, and does not know of this index, is waited for.
        drop(mount.gate.write().await);
        if is_new {
            self.put_index(id, index).await?;
        }
        let can = mount.ufs.capabilities();
        let is_one_stream = index.one_stream || !can.start_after || !can.ordered_listings;
        let stop = CancellationToken::new();
        let context = Context { listings: self.clone(), mount: mount.clone(), run, stop };
        let now = Instant::now();
        let mut running = Running {
            width: StreamWidth::new(streams(self, PAGE_BYTES), now),
            began: now,
            began_entries: noted.iter().map(|range| range.entries).sum(),
            waiting: VecDeque::new(),
            listed: FuturesUnordered::new(),
            asked_beside: 0,
            counts: BTreeMap::new(),
            next_number: 0,
            cuts: Vec::new(),
            absent: Vec::new(),
            has_left_alone: noted.iter().any(|range| range.left_alone),
            knows_directories: !noted.is_empty(),
            page_bytes: PAGE_BYTES,
            before: index.entries,
            context,
        };
        if is_one_stream {
            running.waiting.push_back(Box::new(Range::whole(&running.context)));
        } else {
            let first = [IndexRange::default()];
            running.go_on(if noted.is_empty() { &first[..] } else { &noted[..] });
        }
        running.show();
        Ok(Some(running))
    }

    /// Has another index begin now, in one stream if so.
    async fn index_anew(&self, mount: &OpenMount, in_one_stream: bool, why: &str) -> Result<(), WorkError> {
        let id = mount.id();
        let index = self.0.reader.read(move |tables| Ok(tables.index(id)?)).await?.unwrap_or_default();
        tracing::info!(mount = mount.mount.path, "{why}");
        let (began_ns, one_stream) = (self.0.reader.clock().now_ns().max(1), in_one_stream || index.one_stream);
        self.put_index(id, IndexRecord { began_ns, one_stream, ..index }).await
    }

    /// Marks the directories that were cut, and records that the mount is indexed.
    async fn finish_index(&self, end: &End) -> Result<(), WorkError> {
        let End { context: Context { mount, run, .. }, entries, hidden, .. } = end;
        let path = &mount.mount.path;
        self.mark_cut_directories(end).await?;
        if *hidden > 0 {
            tracing::warn!(
                mount = path,
                hidden,
                "some keys cannot be file names and are not shown (see docs/semantics.md)"
            );
        }
        let finished_ns = self.0.reader.clock().now_ns().max(run.began_ns);
        let index = IndexRecord { finished_ns, entries: *entries, hidden_keys: *hidden, ..IndexRecord::default() };
        self.put_index(mount.id(), index).await?;
        let (ranges, seconds) = (end.ranges, end.took.as_secs());
        tracing::info!(mount = path, entries, ranges, seconds, "the index is complete");
        Ok(())
    }

    async fn mark_cut_directories(&self, end: &End) -> Result<(), WorkError> {
        let Context { mount, run, .. } = &end.context;
        let (root, began_ns) = (mount.mount.root_inode, run.began_ns);
        let mut paths = end.cut_directories.clone();
        while !paths.is_empty() {
            let now = paths.split_off(paths.len().saturating_sub(MARKS));
            let _gate = mount.gate.read().await;
            let listing: HashSet<u64> = self.0.flights.lock().keys().copied().collect();
            let groups = self.0.reader.read(move |tables| {
                let mut groups = Vec::new();
                for (path, since_ns) in now {
                    let Some(inode) = page::directory_at(tables, root, &path)? else { continue };
                    let Some(record) = tables.inode(inode)? else { continue };
                    let is_same = record.mtime_ns <= since_ns;
                    if is_same && record.listed_ns < began_ns && !listing.contains(&inode) {
                        groups.push(ListingGroup {
                            directory: path,
                            listed_ns: began_ns,
                            expect_inode: inode,
                            observed_ns: began_ns,
                            ..ListingGroup::default()
                        });
                    }
                }
                Ok(groups)
            });
            end.context.propose(groups.await?, Vec::new(), end.context.now_ns()).await?;
        }
        Ok(())
    }
}

impl Running {
    /// Goes on with ranges as they are noted.
    fn go_on(&mut self, noted: &[IndexRange]) {
        for noted in noted {
            self.next_number = self.next_number.max(noted.number + 1);
            let range = Range::new(&self.context, noted);
            let run = &self.context.run;
            if noted.done && !noted.upto.is_empty() {
                run.note_last(&noted.upto, &noted.position);
            }
            // Directories that are open at the position of a range are cut by that, too.
            let cuts = [Some(&noted.after), Some(&noted.position).filter(|_| !noted.done)];
            for cut in cuts.into_iter().flatten().filter(|cut| !cut.is_empty()) {
                paths_above(cut).for_each(|path| run.note_part(&path, run.began_ns));
                self.cuts.push(cut.clone());
            }
            self.count(&range, noted.done);
            if !noted.done {
                self.waiting.push_back(Box::new(range));
            }
        }
    }
}
