//! A part of a mount's keys that one stream lists, page by page.
//!
//! Each page is in the namespace before the next one is asked for, in the command that says how far the range is.
//! What is absent goes at the end of all ranges: only then is it known that all keys came in order. Until then, and
//! while objects wait for their place or for a check, the range is noted to be where that began: who goes on with it
//! lists those pages again.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cavern_conf::backoff;
use cavern_proto::record::{ApplyListing, IndexRange, ListingGroup};
use cavern_ufs::{ListPage, Lister, ObjectMeta, RangeLister, RangePage, UfsError};
use futures::{FutureExt as _, StreamExt as _, stream};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::page::{self, Absent, Bounds, Frames, Known, PageChanges, Path};
use super::run::{IndexRun, PageInFlight, Side};
use super::split::{fraction, midpoint, reach};
use crate::error::WorkError;
use crate::listing::{CheckReason, Listings, PORTION, portions};
use crate::mounts::OpenMount;

/// Pages without a difference that follow each other and are not noted.
const UNNOTED: u32 = 16;
/// Keys behind a cut that both who lists up to it and who lists from there on are asked for.
const COMPARED: usize = 16;
/// Directories that are looked into for one with several below it.
const DEPTH: usize = 8;
/// Memory for an object of a page, beside its key and ETag: as it came, as it is compared, and on its way to the log.
const OBJECT_BYTES: usize = 1000;
/// How often key and ETag are in memory.
const COPIES: usize = 6;
/// Memory for what is absent in a directory, beside the names, and for each name of its path.
const ABSENT_BYTES: usize = 256;
const ABSENT_NAME_BYTES: usize = 64;

/// What all ranges of an index have.
#[derive(Clone)]
pub(super) struct Context {
    pub listings: Listings,
    pub mount: Arc<OpenMount>,
    pub run: Arc<IndexRun>,
    /// Ranges that rest are to end.
    pub stop: CancellationToken,
}

/// What is asked for beside a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Beside {
    Nothing,
    /// Directories, to cut the range at them.
    Directories,
    /// What lies behind this, to cut the range there.
    Behind(String),
}

/// What a page came to.
#[derive(Debug)]
pub(super) struct Taken {
    /// Keys that came, and how long they took.
    pub keys: u64,
    pub waited: Duration,
    /// About the memory that the page took.
    pub bytes: usize,
    pub is_done: bool,
    /// Where it is to be cut.
    pub cuts: Cuts,
}

/// Where a range is to be cut, behind its position.
#[derive(Debug)]
pub(super) enum Cuts {
    None,
    At(Vec<String>),
    /// There; what was asked for is the first page behind it.
    Before(String, Fetched),
}

/// Why there is no page.
#[derive(Debug)]
pub(super) enum Failure {
    /// It can be asked for again.
    Bucket(WorkError),
    /// The log did not take it: the index goes on from what is noted.
    Log(WorkError),
    /// The store does not list in order, or not from where it is told to.
    Unsuitable,
    /// The mount is gone.
    Gone,
}

/// An answer of the store.
pub(super) struct Fetched {
    page: ListPage,
    is_last: bool,
    in_flight: PageInFlight,
}

impl std::fmt::Debug for Fetched {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fetched").field("keys", &self.page.objects.len()).field("is_last", &self.is_last).finish()
    }
}

/// Where pages come from.
enum Source {
    Part(RangeLister),
    /// All of the mount, in order or sorted.
    Whole(Box<Lister>),
}

/// How far a range was.
struct Reached {
    position: String,
    entries: u64,
    hidden: u64,
}

pub(super) struct Range {
    pub number: u32,
    pub bounds: Bounds,
    /// What lies up to this key was listed.
    pub position: String,
    /// What lies up to this key was listed before the last page.
    page_before: String,
    /// Where it is noted to be, while something of what was listed is not settled.
    held_at: Option<Reached>,
    frames: Frames,
    left_alone: bool,
    /// What it has found absent.
    pub absent: Vec<Absent>,
    /// Objects at an edge of the range that are to be checked.
    at_edge: Vec<(Path, Bytes)>,
    source: Source,
    ahead: Option<Fetched>,
    /// Its keys were all listed.
    is_listed: bool,
    /// Failures in a row.
    pub failures: u32,
    /// Pages since it began, or was cut.
    pub pages: u32,
    unnoted: u32,
    /// Nothing was found behind this key.
    pub empty_behind: Option<String>,
    /// It has asked for more than its next page.
    pub asks_beside: bool,
}

impl Range {
    /// The part between two keys that nothing is known of, or as much as is noted of it.
    pub(super) fn new(context: &Context, noted: &IndexRange) -> Self {
        let IndexRange { number, after, upto, position, entries, hidden, left_alone, .. } = noted.clone();
        Self {
            number,
            bounds: Bounds { after, upto: Some(upto).filter(|upto| !upto.is_empty()) },
            page_before: String::new(),
            held_at: None,
            frames: Frames::at(&position, entries, hidden),
            left_alone,
            absent: Vec::new(),
            at_edge: Vec::new(),
            source: Source::Part(context.mount.ufs.list_behind(&context.full_key(&position))),
            ahead: None,
            is_listed: false,
            failures: 0,
            pages: 0,
            unnoted: 0,
            empty_behind: None,
            asks_beside: false,
            position,
        }
    }

    /// All keys, in one stream.
    pub(super) fn whole(context: &Context) -> Self {
        let source = Source::Whole(Box::new(context.listings.list_all(&context.mount)));
        Self { source, ..Self::new(context, &IndexRange::default()) }
    }

    /// As it is noted.
    pub(super) fn record(&self, done: bool) -> IndexRange {
        let (position, entries, hidden) = match &self.held_at {
            Some(held) if !done => (&held.position, held.entries, held.hidden),
            _ => (&self.position, self.frames.entries, self.frames.hidden),
        };
        IndexRange {
            number: self.number,
            after: self.bounds.after.clone(),
            upto: self.bounds.upto.clone().unwrap_or_default(),
            position: position.clone(),
            entries,
            hidden,
            done,
            left_alone: self.left_alone || self.frames.are_left_alone(),
        }
    }

    pub(super) fn entries(&self) -> u64 {
        self.frames.entries
    }

    pub(super) fn hidden(&self) -> u64 {
        self.frames.hidden
    }

    /// Whether it can be cut: what is listed as a whole cannot.
    pub(super) fn is_part(&self) -> bool {
        matches!(self.source, Source::Part(_))
    }

    /// Cuts off what lies behind a key, which must be behind the position; with the first page of that, if it is known.
    fn cut(&mut self, context: &Context, at: String, number: u32, ahead: Option<Fetched>) -> Self {
        let upto = self.bounds.upto.replace(at.clone()).unwrap_or_default();
        let noted = IndexRange { number, after: at.clone(), upto, position: at, ..IndexRange::default() };
        let mut behind = Self::new(context, &noted);
        behind.empty_behind = self.empty_behind.take();
        if let Some(fetched) = ahead {
            if let Some(last) = fetched.page.objects.last() {
                behind.source = Source::Part(context.mount.ufs.list_behind(&last.key));
            }
            behind.ahead = Some(fetched);
        }
        self.pages = 0;
        behind
    }

    /// Cuts it as a page has told; with the parts behind it, at most `room`, whose numbers begin with `number`.
    pub(super) fn cut_by(&mut self, context: &Context, cuts: Cuts, number: u32, room: usize) -> Vec<Self> {
        match cuts {
            Cuts::None => Vec::new(),
            Cuts::At(places) => {
                let stride = places.len().div_ceil(room.max(1)).max(1);
                let places = places.into_iter().step_by(stride).take(room).collect::<Vec<_>>();
                // The last one first: each is cut off from what is left.
                let numbered = places.into_iter().rev().zip(number..);
                numbered.map(|(at, number)| self.cut(context, at, number, None)).collect()
            }
            Cuts::Before(at, fetched) => {
                let upto = self.bounds.upto.as_ref().map(|upto| context.full_key(upto));
                let first = fetched.page.objects.first().map(|object| &object.key);
                let is_found = first.is_some_and(|first| upto.as_ref().is_none_or(|upto| first <= upto));
                // An empty page may be followed by others.
                let is_known = first.is_some() || fetched.is_last;
                if is_found && room > 0 {
                    return vec![self.cut(context, at, number, Some(fetched))];
                }
                if is_known && !is_found {
                    self.empty_behind = Some(at);
                }
                Vec::new()
            }
        }
    }

    /// Where its middle may be; `None` where it cannot be told, or cut.
    pub(super) fn middle(&self) -> Option<String> {
        let end = self.empty_behind.as_deref().or(self.bounds.upto.as_deref());
        midpoint(&self.position, end, reach(&self.page_before, &self.position)).filter(|_| self.is_part())
    }

    /// About how many entries it will have had at its end; `None` where there is nothing to go by.
    pub(super) fn expected(&self) -> Option<f64> {
        let listed = fraction(&self.bounds.after, self.bounds.upto.as_deref(), &self.position)?;
        (listed > 0.0).then(|| self.entries() as f64 / listed)
    }

    /// Takes the next page in, or what is left to do at the end.
    pub(super) async fn advance(&mut self, context: &Context, beside: Beside) -> Result<Taken, Failure> {
        let began = Instant::now();
        let mut taken = Taken { keys: 0, waited: Duration::ZERO, bytes: 0, is_done: false, cuts: Cuts::None };
        if !self.is_listed {
            let asked = context.ask_beside(&self.position, beside);
            let (fetched, asked) = tokio::join!(fetch(&mut self.source, &mut self.ahead, context), asked);
            (taken.waited, taken.cuts) = (began.elapsed(), asked?);
            let fetched = fetched?;
            taken.keys = fetched.page.objects.len() as u64;
            taken.bytes = fetched.page.objects.iter().map(memory_of).sum();
            Box::pin(self.take_in(context, fetched)).await?;
        }
        if self.is_listed {
            taken.cuts = Cuts::None;
            Box::pin(self.finish(context)).await?;
            taken.is_done = true;
        }
        self.pages += 1;
        self.keep_what_is_ahead(&mut taken.cuts);
        Ok(taken)
    }

    /// Forgets cuts that the page has passed.
    fn keep_what_is_ahead(&self, cuts: &mut Cuts) {
        let (position, upto) = (&self.position, self.bounds.upto.as_deref());
        let is_ahead = |at: &str| at > position.as_str() && upto.is_none_or(|upto| at < upto);
        match cuts {
            Cuts::None => {}
            Cuts::At(places) => places.retain(|at| is_ahead(at)),
            Cuts::Before(at, _) if !is_ahead(at.as_str()) => *cuts = Cuts::None,
            Cuts::Before(..) => {}
        }
    }

    async fn take_in(&mut self, context: &Context, fetched: Fetched) -> Result<(), Failure> {
        let Fetched { mut page, is_last, in_flight } = fetched;
        if page.restarts {
            self.begin_anew(context);
        }
        let prefix = context.mount.ufs.prefix();
        let full_upto = self.bounds.upto.as_ref().map(|upto| context.full_key(upto));
        let within =
            full_upto.as_ref().map_or(page.objects.len(), |upto| page.objects.partition_point(|o| o.key <= *upto));
        let beyond = page.objects.split_off(within);
        let is_end = is_last || !beyond.is_empty();
        let last = page.objects.last().and_then(|object| object.key.strip_prefix(prefix));
        let last = last.unwrap_or(&self.position).to_owned();
        if self.is_part() {
            let end = is_end.then_some(last.as_str());
            Box::pin(self.compare_borders(context, (&page.objects, &beyond), end)).await?;
        }
        let upto = if is_end { self.bounds.upto.clone() } else { Some(last.clone()) };
        let (entries, hidden) = (self.frames.entries, self.frames.hidden);
        self.frames.hidden += page.hidden;
        if !is_end && upto.as_ref() == Some(&self.position) {
            return Ok(());
        }
        let before = Reached { position: std::mem::replace(&mut self.position, last), entries, hidden };
        self.page_before.clone_from(&before.position);
        let windows = self.frames.cut(&self.bounds, &before.position, (prefix, page.objects), upto.as_deref());
        self.is_listed = is_end;
        self.apply(context, windows, in_flight.asked_ns, before).await
    }

    /// Compares what lies behind the cuts that the range begins and ends at with what the ranges beside it have listed
    /// there. A page has keys within it and beyond it; the one that ends it comes with its last key.
    async fn compare_borders(
        &self,
        context: &Context,
        (within, beyond): (&[ObjectMeta], &[ObjectMeta]),
        end: Option<&str>,
    ) -> Result<(), Failure> {
        let (run, Bounds { after, upto }) = (&context.run, &self.bounds);
        let mut differing = Vec::new();
        let begins = !after.is_empty() && self.position == *after;
        if begins && !run.meets(after, Side::From, first_keys(within.iter().chain(beyond))) {
            differing.push(after);
        }
        if let (Some(last), Some(upto)) = (end, upto) {
            run.note_last(upto, last);
            if !run.meets(upto, Side::UpTo, first_keys(beyond)) {
                differing.push(upto);
            }
        }
        for cut in differing {
            match context.continues(cut).await {
                Ok(true) => {}
                Ok(false) => return Err(Failure::Unsuitable),
                // It is asked again at the end.
                Err(Failure::Bucket(_)) => {}
                Err(failure) => return Err(failure),
            }
        }
        Ok(())
    }

    /// A listing in no order begins anew, sorted.
    fn begin_anew(&mut self, context: &Context) {
        for absent in std::mem::take(&mut self.absent) {
            release(&context.run, &absent);
        }
        self.at_edge.clear();
        (self.frames, self.position, self.held_at) = (Frames::at("", 0, 0), String::new(), None);
    }

    /// Puts what a page says into the namespace.
    async fn apply(
        &mut self,
        context: &Context,
        windows: Vec<page::DirectoryWindow>,
        asked_ns: i64,
        before: Reached,
    ) -> Result<(), Failure> {
        let Context { listings, mount, run, .. } = context;
        let _gate = mount.gate.read().await;
        let _step = run.step.read().await;
        let mut listing: HashSet<u64> = listings.0.flights.lock().keys().copied().collect();
        listing.extend(run.failed_since(asked_ns));
        let known = Known {
            root: mount.mount.root_inode,
            asked_ns,
            began_ns: run.began_ns,
            bounds: self.bounds.clone(),
            listing,
            newer: run.checked_since(asked_ns),
        };
        let all = windows.iter().filter(|window| window.is_all());
        let whole: HashSet<Path> = all.map(|window| window.path.clone()).collect();
        let parts = windows.iter().filter(|window| !window.is_whole);
        let parts: Vec<(Path, i64)> = parts.map(|window| (window.path.clone(), window.since_ns)).collect();
        let (id, read_ns) = (mount.id(), context.now_ns());
        let compared = listings.0.reader.read(move |tables| {
            if tables.mount(id)?.is_none() { Ok(None) } else { page::changes(tables, &known, windows).map(Some) }
        });
        let Some(changes) = compared.await.map_err(Failure::Log)? else { return Err(Failure::Gone) };
        let PageChanges { groups, absent, mut left_alone, found, added, at_edge } = changes;
        let mut paths = HashSet::new();
        for absent in absent {
            paths.insert(absent.path.clone());
            let (noted, is_complete) = note(run, absent);
            if !is_complete {
                left_alone.insert(noted.path.clone());
            }
            if !noted.is_empty() {
                self.absent.push(noted);
            }
        }
        // What is made with this page is made at this time.
        let now_ns = context.now_ns();
        let since = |path: &[Bytes]| match found.contains(path) {
            true => read_ns,
            false if added.contains(path) => now_ns,
            false => 0,
        };
        self.frames.note(&left_alone, &paths, since);
        for (path, since_ns) in parts {
            run.note_part(&path, if since_ns == 0 { since(&path) } else { since_ns });
        }
        for path in &left_alone {
            run.leave_alone(path);
            self.left_alone |= !whole.contains(path);
        }
        self.at_edge.extend(at_edge);
        // Names whose place is behind the last key came with it: the last page is listed again until the range is done.
        let is_settled =
            !self.is_listed && self.absent.is_empty() && self.at_edge.is_empty() && !self.frames.hold_back();
        self.held_at = if is_settled { None } else { Some(self.held_at.take().unwrap_or(before)) };
        self.unnoted += 1;
        if groups.is_empty() && self.unnoted < UNNOTED {
            return Ok(());
        }
        self.unnoted = 0;
        let noted = if self.is_part() { vec![self.record(false)] } else { Vec::new() };
        context.propose(groups, noted, now_ns).await.map_err(Failure::Log)
    }

    /// Has the names at the end of the range checked, and notes that it is done, unless names are to be taken away:
    /// until they are, who leads next has to find them again.
    async fn finish(&mut self, context: &Context) -> Result<(), Failure> {
        if let Some(upto) = self.bounds.upto.clone() {
            self.at_edge.extend(self.frames.held_back());
            context.check_edge(&upto, &self.at_edge).await?;
        }
        self.at_edge.clear();
        if self.is_part() {
            let noted = vec![self.record(self.absent.is_empty())];
            context.propose(Vec::new(), noted, context.now_ns()).await.map_err(Failure::Log)?;
        }
        Ok(())
    }
}

/// The next page of a range.
async fn fetch(source: &mut Source, ahead: &mut Option<Fetched>, context: &Context) -> Result<Fetched, Failure> {
    if let Some(fetched) = ahead.take() {
        return Ok(fetched);
    }
    let Context { listings, mount, run, .. } = context;
    let in_flight = run.begin_page(context.now_ns());
    match source {
        Source::Part(lister) => context.fetched(lister, in_flight).await,
        Source::Whole(lister) => {
            let page = listings.next_page(mount, lister).await.map_err(Failure::Bucket)?;
            Ok(Fetched { is_last: page.is_none(), page: page.unwrap_or_default(), in_flight })
        }
    }
}

impl Context {
    pub(super) fn now_ns(&self) -> i64 {
        self.listings.0.reader.clock().now_ns()
    }

    /// The key of the bucket, with the mount's prefix. That of no key is none.
    fn full_key(&self, key: &str) -> String {
        if key.is_empty() { String::new() } else { format!("{}{key}", self.mount.ufs.prefix()) }
    }

    async fn fetched(&self, lister: &mut RangeLister, in_flight: PageInFlight) -> Result<Fetched, Failure> {
        let Self { listings, mount, .. } = self;
        let began = Instant::now();
        match listings.sent(mount, lister.next_page()).await.map_err(Failure::Bucket)? {
            RangePage::Unsuitable => Err(Failure::Unsuitable),
            RangePage::Keys { page, is_last } => {
                listings.0.metrics.pages.inc();
                listings.0.metrics.page_seconds.observe(began.elapsed().as_secs_f64());
                Ok(Fetched { page, is_last, in_flight })
            }
        }
    }

    /// What is asked for beside a page. That it cannot be had is no failure of the range.
    async fn ask_beside(&self, position: &str, beside: Beside) -> Result<Cuts, Failure> {
        let cuts = match beside {
            Beside::Nothing => return Ok(Cuts::None),
            Beside::Directories => Box::pin(self.directories(position)).await.map(Cuts::At).map_err(Failure::Bucket),
            Beside::Behind(at) => {
                let mut lister = self.mount.ufs.list_behind(&self.full_key(&at));
                let in_flight = self.run.begin_page(self.now_ns());
                self.fetched(&mut lister, in_flight).await.map(|fetched| Cuts::Before(at, fetched))
            }
        };
        match cuts {
            Err(Failure::Bucket(_)) => Ok(Cuts::None),
            cuts => cuts,
        }
    }

    /// Directories behind a position: those of the first directory that has several.
    async fn directories(&self, position: &str) -> Result<Vec<String>, WorkError> {
        let prefix = self.mount.ufs.prefix();
        let mut directory = prefix.to_owned();
        for _ in 0..DEPTH {
            let mut lister = self.listings.list(&self.mount, &directory);
            let Some(page) = self.listings.next_page(&self.mount, &mut lister).await? else { break };
            match &page.prefixes[..] {
                // Its own object may be beside it.
                [only] if page.objects.len() <= 1 => directory.clone_from(only),
                several => {
                    let names = several.iter().filter_map(|name| name.strip_prefix(prefix));
                    return Ok(names.filter(|name| *name > position).map(str::to_owned).collect());
                }
            }
        }
        Ok(Vec::new())
    }

    /// Whether all ranges together are one listing, as far as each of them was in order.
    pub(super) async fn check_order(&self, streams: usize) -> Result<(), Failure> {
        let ask = |cut: String| {
            let context = self.clone();
            async move { context.continues(&cut).await }.boxed()
        };
        let mut asked = stream::iter(self.run.unmet()).map(ask).buffer_unordered(streams.max(1));
        while let Some(continues) = asked.next().await {
            if !continues? {
                return Err(Failure::Unsuitable);
            }
        }
        Ok(())
    }

    /// Whether the store lists the same behind a cut for whoever begins there and whoever begins behind the last key
    /// before it, asked now.
    async fn continues(&self, cut: &str) -> Result<bool, Failure> {
        let last = self.run.last_before(cut);
        let (here, before) = tokio::try_join!(self.keys_behind(cut, cut), self.keys_behind(&last, cut))?;
        let is_met = here.is_empty() && before.is_empty() || here.iter().any(|key| before.contains(key));
        if is_met {
            self.run.met(cut);
        }
        Ok(is_met)
    }

    /// The first keys behind a cut, of a listing that begins behind a key which is no later.
    async fn keys_behind(&self, after: &str, cut: &str) -> Result<Vec<String>, Failure> {
        let mut lister = self.mount.ufs.list_behind(&self.full_key(after));
        let cut = self.full_key(cut);
        loop {
            let Fetched { page, is_last, .. } = self.fetched(&mut lister, self.run.begin_page(self.now_ns())).await?;
            let keys = first_keys(page.objects.iter().filter(|object| object.key > cut));
            if is_last || !keys.is_empty() {
                return Ok(keys);
            }
        }
    }

    /// Puts changes and progress into the log, in one command if they are few. What they make is made at this time.
    pub(super) async fn propose(
        &self,
        groups: Vec<ListingGroup>,
        ranges: Vec<IndexRange>,
        now_ns: i64,
    ) -> Result<(), WorkError> {
        let (mount_id, index_began_ns) = (self.mount.id(), self.run.began_ns);
        let mut commands: Vec<ApplyListing> = portions(groups)
            .into_iter()
            .map(|groups| ApplyListing { mount_id, groups, now_ns, index_began_ns, ranges: Vec::new() })
            .collect();
        match commands.last_mut() {
            Some(last) => last.ranges = ranges,
            None if ranges.is_empty() => return Ok(()),
            None => commands.push(ApplyListing { mount_id, groups: Vec::new(), now_ns, index_began_ns, ranges }),
        }
        self.listings.propose_portions(commands).await.map(drop)
    }

    /// Takes away what pages have found absent, but for names that were checked since, and marks directories that are
    /// complete with that, unless others list them, or have since.
    pub(super) async fn take_away(&self, absent: Vec<Absent>) -> Result<(), WorkError> {
        let Self { listings, mount, run, .. } = self;
        let mut absent = absent.into_iter().peekable();
        while absent.peek().is_some() {
            let _gate = mount.gate.read().await;
            let _step = run.step.read().await;
            let listing: HashSet<u64> = listings.0.flights.lock().keys().copied().collect();
            let (mut groups, mut size) = (Vec::new(), 0);
            while size < PORTION
                && let Some(next) = absent.next()
            {
                size += 1 + next.remove.len() + next.replace.len();
                let left = release(run, &next);
                if listing.contains(&next.inode) || run.failed_since(next.observed_ns).contains(&next.inode) {
                    run.leave_alone(&next.path);
                    continue;
                }
                let Absent { path, inode, observed_ns, mut remove, mut replace, listed_ns } = next;
                remove.retain(|name| left.contains(name));
                replace.retain(|entry| left.contains(&entry.name));
                let (directory, expect_inode, upsert) = (path, inode, replace);
                groups.push(ListingGroup { directory, remove, upsert, listed_ns, expect_inode, observed_ns });
            }
            self.propose(groups, Vec::new(), self.now_ns()).await?;
        }
        Ok(())
    }

    /// Has names checked of which keys may lie on both sides of the end of a range: those that the namespace has, and
    /// objects that the range has met.
    async fn check_edge(&self, upto: &str, met: &[(Path, Bytes)]) -> Result<(), Failure> {
        let (root, cut, met) = (self.mount.mount.root_inode, upto.to_owned(), met.to_vec());
        let names = self.listings.0.reader.read(move |tables| {
            let mut names: HashSet<(u64, Bytes)> = HashSet::new();
            for path in page::paths_above(&cut) {
                let Some(directory) = page::directory_at(tables, root, &path)? else { break };
                let prefix: String = path.iter().map(|name| format!("{}/", String::from_utf8_lossy(name))).collect();
                let rest = cut.strip_prefix(prefix.as_str()).unwrap_or_default();
                for name in page::names_at_edge(rest) {
                    if tables.dentry(directory, &name)?.is_some() {
                        names.insert((directory, name));
                    }
                }
            }
            for (path, name) in met {
                if let Some(directory) = page::directory_at(tables, root, &path)? {
                    names.insert((directory, name));
                }
            }
            Ok(names)
        });
        let mut names: Vec<_> = names.await.map_err(Failure::Log)?.into_iter().collect();
        names.sort();
        for (directory, name) in names {
            match self.listings.refresh_name(directory, &name, CheckReason::Unknown).await {
                Err(error) if error.is_of_bucket() || matches!(error, WorkError::Overloaded(_)) => {
                    return Err(Failure::Bucket(error));
                }
                // The directory has gone meanwhile.
                Err(error) if error.is_not_found() => {}
                checked => checked.map_err(Failure::Log)?,
            }
        }
        Ok(())
    }
}

/// Notes names that are to be taken away; without those that there is no room for, and whether there was room for all.
fn note(run: &IndexRun, mut absent: Absent) -> (Absent, bool) {
    let (inode, names) = (absent.inode, absent.remove.len() + absent.replace.len());
    let has_room = run.reserve(absent.bytes());
    absent.remove.retain(|name| has_room && run.note_absent(inode, name));
    absent.replace.retain(|entry| has_room && run.note_absent(inode, &entry.name));
    let is_complete = has_room && names == absent.remove.len() + absent.replace.len();
    if !is_complete {
        absent.listed_ns = 0;
    }
    if has_room && absent.is_empty() {
        run.free(absent.bytes());
    }
    (absent, is_complete)
}

/// Forgets noted names; with those that are still to be taken away.
fn release(run: &IndexRun, absent: &Absent) -> HashSet<Bytes> {
    run.free(absent.bytes());
    let names = absent.remove.iter().chain(absent.replace.iter().map(|entry| &entry.name));
    names.filter(|name| run.take_absent(absent.inode, name)).cloned().collect()
}

impl Absent {
    /// Memory beside that of the names that are noted. Another number of them makes no difference.
    fn bytes(&self) -> usize {
        ABSENT_BYTES + self.path.iter().map(|name| ABSENT_NAME_BYTES + name.len()).sum::<usize>()
    }

    /// There is nothing left to do.
    fn is_empty(&self) -> bool {
        self.remove.is_empty() && self.replace.is_empty() && self.listed_ns == 0
    }
}

fn first_keys<'a>(objects: impl IntoIterator<Item = &'a ObjectMeta>) -> Vec<String> {
    objects.into_iter().take(COMPARED).map(|object| object.key.clone()).collect()
}

fn memory_of(object: &ObjectMeta) -> usize {
    OBJECT_BYTES + COPIES * (object.key.len() + object.etag.len())
}

/// How long a range rests after a failure.
pub(super) async fn rest(failures: u32) {
    if let Some(before) = failures.checked_sub(1) {
        tokio::time::sleep(backoff::INDEX.pause(before)).await;
    }
}

/// Whether the store is busy, or away: there are fewer requests to be sent.
pub(super) fn is_refusal(error: &WorkError) -> bool {
    matches!(error, WorkError::Ufs(UfsError::Unavailable { .. } | UfsError::Deadline { .. }))
}
