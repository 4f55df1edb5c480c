//! What `cv fsck` finds: where the tables of the masters contradict themselves, what workers or what buckets have.
//!
//! - [`namespace`](self::namespace): names and inodes, links, counts, and files that the bucket lacks without a record.
//! - [`blocks`](self::blocks): blocks of files against the lists of them, and against what workers have; with `deep`
//!   against each other and their objects.
//! - [`workers`](self::workers): what workers have that no file has, and their cached blocks.
//! - [`backlog`](self::backlog): what is to be written or deleted, and has failed for longer than it may take.
//! - [`bucket`](self::bucket): a listing against the records of objects, which are in the same order.
//! - [`views`](self::views): the object of each view, and the blocks that only views have.
//! - [`mend`](self::mend): what is done about it.
//!
//! **Nothing is found that is only under way.** Tables are read as they were at one moment, in which commands have left
//! no work half done. What they are compared with is of another moment, so the tables are read again after it, and what
//! an intent, a deletion, a copy or a writer says to be under way is left alone. And nothing is told at the first look:
//! it is made once more when [`Fsck::settle`] has passed, and has to find the same. An object that is just being
//! replaced, or a block that moves, is by then another one.
//!
//! **Bounded.** Records are read in pages, and between two pages this rests as long as the last one took. What is found
//! waits for its second look in a list of [`SUSPECTS`], which is worked off whenever it is full. A worker that does not
//! answer [`SILENCES`] times is asked no more.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod backlog;
mod blocks;
mod bucket;
mod mend;
mod namespace;
mod views;
mod workers;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use cavern_consensus::Proposer;
use cavern_proto::ROOT_INODE;
use cavern_proto::master::{Finding, FindingKind, FsckProgress, FsckRequest, WriteType};
use cavern_state::Tables;
use cavern_work::WorkError;
use cavern_work::mounts::OpenMount;
use cavern_work::namespace::Lookups;
use cavern_work::persist::{Persistence, Scope};
use cavern_work::repair::Repair;
use cavern_work::workers::calls::ObjectWriter;
use tokio::sync::mpsc;
use tokio::time::Instant;

/// Records of one page.
const PAGE: usize = 1000;
/// Findings that wait for their second look.
const SUSPECTS: usize = 10_000;
/// Findings that are looked at once more together.
const AGAIN: usize = 500;
/// Sentences about what could not be looked at; of more, only that there are.
const MISSED: usize = 1000;
/// Questions to a worker that it has not answered, so that it is asked no more.
const SILENCES: u32 = 3;
/// How often progress is told of, at least.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

/// Where progress goes.
pub type Answers = mpsc::Sender<Result<FsckProgress, WorkError>>;

/// Fs-mode mounts that can be used, by their ids.
type Mounted = HashMap<u32, Arc<OpenMount>>;
/// Where some records end, how many they are, and what was found in them.
type Page<K> = (Option<K>, usize, Vec<Finding>);

/// What a leader compares with. Cheap to clone.
#[derive(Clone)]
pub struct Fsck {
    pub lookups: Lookups,
    pub proposer: Proposer,
    pub writer: Arc<dyn ObjectWriter>,
    pub persistence: Arc<Persistence>,
    pub repair: Arc<Repair>,
    pub cluster_id: Arc<str>,
    /// Between two looks: longer than sessions and workers are believed to be there that are not.
    pub settle: Duration,
}

/// One run.
struct Run<'a> {
    fsck: &'a Fsck,
    request: FsckRequest,
    scope: Scope,
    mounts: Arc<Mounted>,
    answers: &'a Answers,
    progress: FsckProgress,
    /// What could not be looked at, each once.
    missed: BTreeSet<String>,
    suspects: Vec<Finding>,
    /// When the last of them was found.
    found_at: Instant,
    /// How often workers have not answered.
    silences: HashMap<u64, u32>,
    /// What quotas go by is counted anew.
    counts_anew: bool,
    reported_at: Instant,
}

/// What a finding is about, and so how it is looked for once more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Subject {
    Inode,
    Name,
    Block,
    Replica,
    Object,
    Intent,
    Deletion,
    Worker,
    View,
}

impl Subject {
    fn of(finding: &Finding) -> Self {
        match finding.kind() {
            FindingKind::DanglingName => Self::Name,
            FindingKind::BlockIndex if finding.worker != 0 => Self::Replica,
            FindingKind::MissingBlock
            | FindingKind::WrongLength
            | FindingKind::UnreadableBlock
            | FindingKind::TooFewReplicas
            | FindingKind::BlockIndex
            | FindingKind::BlockWithoutFile
            | FindingKind::DamagedBlock => Self::Block,
            FindingKind::MissingObject
            | FindingKind::ChangedObject
            | FindingKind::UnknownObject
            | FindingKind::ObjectIndex => Self::Object,
            FindingKind::StuckIntent => Self::Intent,
            FindingKind::StuckDeletion => Self::Deletion,
            FindingKind::StrayBlock => Self::Worker,
            FindingKind::MissingView => Self::View,
            _ => Self::Inode,
        }
    }
}

impl Fsck {
    /// Compares what lies at and below a path; gives what is left to be told.
    ///
    /// # Errors
    /// [`WorkError::NotFound`] for a path that leads nowhere, and whatever keeps this master from reading its tables.
    pub async fn run(&self, request: FsckRequest, answers: &Answers) -> Result<FsckProgress, WorkError> {
        let scope = self.persistence.scope(&request.path).await?;
        let now = Instant::now();
        let mut run = Run {
            fsck: self,
            request,
            scope,
            mounts: Arc::default(),
            answers,
            progress: FsckProgress::default(),
            missed: BTreeSet::new(),
            suspects: Vec::new(),
            silences: HashMap::new(),
            counts_anew: false,
            found_at: now,
            reported_at: now,
        };
        run.open_mounts()?;
        Box::pin(run.check_namespace()).await?;
        Box::pin(run.check_blocks()).await?;
        Box::pin(run.check_backlog()).await?;
        Box::pin(run.check_buckets()).await?;
        if run.scope.inode == ROOT_INODE {
            Box::pin(run.check_views()).await?;
            Box::pin(run.check_strays()).await?;
        }
        Box::pin(run.confirm()).await?;
        if run.scope.inode == ROOT_INODE && run.request.deep {
            Box::pin(run.check_cached()).await?;
        }
        Ok(run.progress)
    }
}

impl Run<'_> {
    fn open_mounts(&mut self) -> Result<(), WorkError> {
        let (fsck, mut mounted) = (self.fsck, Mounted::new());
        let all = &fsck.lookups.mounts;
        for mount in all.all_recorded()?.into_iter().filter(|mount| mount.write_type() == WriteType::FsMode) {
            match all.get(mount.id) {
                Ok(open) => drop(mounted.insert(mount.id, open)),
                Err(error) => self.miss(format!("the mount {} cannot be used: {error}", mount.path)),
            }
        }
        self.mounts = Arc::new(mounted);
        Ok(())
    }

    async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(Tables<'_>) -> Result<T, WorkError> + Send + 'static,
    ) -> Result<T, WorkError> {
        self.fsck.lookups.reader.read(read).await
    }

    /// Looks at records page by page, each page from where the one before ended.
    async fn look_at_pages<K: Send + 'static>(
        &mut self,
        look: impl Fn(Tables<'_>, Option<K>) -> Result<Page<K>, WorkError> + Clone + Send + 'static,
    ) -> Result<(), WorkError> {
        let mut after: Option<K> = None;
        loop {
            let (began, look, from) = (Instant::now(), look.clone(), after.take());
            let (last, count, found) = self.read(move |tables| look(tables, from)).await?;
            self.looked_at(count, found, began).await?;
            if last.is_none() {
                return Ok(());
            }
            after = last;
        }
    }

    /// Begins with something else.
    fn step(&mut self, what: &str) {
        what.clone_into(&mut self.progress.step);
    }

    /// Something cannot be looked at.
    fn miss(&mut self, what: String) {
        let what = if self.missed.len() < MISSED { what } else { "more was not looked at, or repaired".to_owned() };
        if self.missed.insert(what.clone()) {
            self.progress.missed.push(what);
        }
    }

    /// So many records were looked at since then; rests as long as that took.
    async fn looked_at(&mut self, records: usize, found: Vec<Finding>, began: Instant) -> Result<(), WorkError> {
        let took = began.elapsed();
        // A worker may say any number.
        self.progress.looked_at = self.progress.looked_at.saturating_add(records as u64);
        if !found.is_empty() {
            self.suspects.extend(found);
            self.found_at = Instant::now();
        }
        self.progress.suspects = self.suspects.len() as u64;
        if self.suspects.len() >= SUSPECTS {
            Box::pin(self.confirm()).await?;
        }
        self.report().await;
        tokio::time::sleep(took).await;
        Ok(())
    }

    /// Tells how far it is, if there is news or it is time.
    async fn report(&mut self) {
        let has_news = !self.progress.findings.is_empty() || !self.progress.missed.is_empty();
        if has_news || self.reported_at.elapsed() >= PROGRESS_INTERVAL {
            self.tell().await;
        }
    }

    async fn tell(&mut self) {
        self.reported_at = Instant::now();
        let news = self.progress.clone();
        self.progress.findings.clear();
        self.progress.missed.clear();
        // Who is gone does not miss it.
        let _gone = self.answers.send(Ok(news)).await;
    }

    /// Looks once more at what was found, when what was under way must have ended, and tells of what is still so.
    async fn confirm(&mut self) -> Result<(), WorkError> {
        let suspects = std::mem::take(&mut self.suspects);
        if suspects.is_empty() {
            return Ok(());
        }
        let step = std::mem::replace(&mut self.progress.step, "what was found, once more".to_owned());
        self.tell().await;
        tokio::time::sleep_until(self.found_at + self.fsck.settle + self.fsck.writer.arrives_within()).await;
        let mut rest = &suspects[..];
        while let Some(first) = rest.first() {
            let subject = Subject::of(first);
            let alike = rest.iter().take(AGAIN).take_while(|finding| Subject::of(finding) == subject).count();
            let (before, others) = rest.split_at(alike);
            rest = others;
            let mut found = self.look_again(subject, before).await?;
            // Whatever fails about it now.
            let without_cause = |finding: &Finding| Finding { cause: String::new(), ..finding.clone() };
            let known: HashSet<Finding> = before.iter().map(without_cause).collect();
            found.retain(|finding| known.contains(&without_cause(finding)));
            for mut finding in self.within(found).await? {
                if self.request.repair {
                    match self.mend(&finding).await {
                        Ok(done) => finding.repaired = done,
                        Err(error) => self.miss(format!("{} is not repaired: {error}", finding.path)),
                    }
                }
                self.progress.findings.push(finding);
            }
            self.report().await;
        }
        (self.progress.step, self.progress.suspects) = (step, 0);
        Ok(())
    }

    async fn look_again(&mut self, subject: Subject, before: &[Finding]) -> Result<Vec<Finding>, WorkError> {
        match subject {
            Subject::Inode => self.inodes_again(before).await,
            Subject::Name => self.names_again(before).await,
            Subject::Block => {
                let mut blocks: Vec<_> = before.iter().map(|finding| (finding.inode, finding.index)).collect();
                blocks.dedup();
                let mut found = self.judge_blocks(blocks.clone()).await?;
                found.extend(self.kept_again(blocks).await?);
                Ok(found)
            }
            Subject::Replica => self.replicas_again(before).await,
            Subject::Object => self.objects_again(before).await,
            Subject::Intent => self.intents_again(before).await,
            Subject::Deletion => self.deletions_again(before).await,
            Subject::View => Ok(self.judge_views().await?.1),
            Subject::Worker => {
                let workers: BTreeSet<u64> = before.iter().map(|finding| finding.worker).collect();
                let mut found = Vec::new();
                for worker in workers {
                    found.extend(self.orphans_at(worker).await);
                }
                Ok(found)
            }
        }
    }

    /// Those that are about something in the scope.
    async fn within(&self, found: Vec<Finding>) -> Result<Vec<Finding>, WorkError> {
        let top = self.scope.inode;
        if top == ROOT_INODE {
            return Ok(found);
        }
        self.read(move |tables| {
            let mut within = Vec::new();
            for finding in found {
                if is_within(tables, top, &finding)? {
                    within.push(finding);
                }
            }
            Ok(within)
        })
        .await
    }
}

/// Whether a finding is about something at or below an inode. Objects without one are looked for below it alone, and
/// directories in a loop lie nowhere.
fn is_within(tables: Tables<'_>, top: u64, finding: &Finding) -> Result<bool, WorkError> {
    if finding.inode == 0 || finding.inode == top {
        return Ok(true);
    }
    if finding.kind() == FindingKind::ParentLoop {
        return Ok(false);
    }
    let Some(record) = tables.inode(finding.inode)? else { return Ok(false) };
    if tables.is_below(record.parent, top)? {
        return Ok(true);
    }
    for name in tables.names(finding.inode, &record) {
        if tables.is_below(name?.0, top)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// A finding about an inode, as its path shows it.
fn of_inode(tables: Tables<'_>, kind: FindingKind, inode: u64, detail: String) -> Result<Finding, WorkError> {
    let path = match kind {
        // It has no end.
        FindingKind::ParentLoop => format!("inode {inode}"),
        _ => tables.shown(inode)?,
    };
    let mount_id = tables.inode(inode)?.map_or(0, |record| record.mount_id);
    Ok(Finding { kind: kind as i32, path, inode, mount_id, detail, ..Finding::default() })
}
