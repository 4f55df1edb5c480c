//! Sources in their order: the best worker, the next ones, the bucket itself.
//!
//! A source that fails gives way to the next at once. A source that is merely slow is overtaken by the next one where
//! hedging allows it; then the first answer wins. The slow request to a worker is left to end in the background. It
//! makes the worker fill its cache with a block of an object, which would stay cold otherwise; and it shows whether the
//! worker answers at all, so that one that does not is left alone. After an answer that the version is gone no source
//! is tried: no other may have it. But for a view, which has no other version: then each may have it still.
//!
//! A block of an fs-mode file has its replicas for sources, and no others. One that failed lately comes last, but is
//! asked: nobody else has the bytes. Whoever reads such a file knows what a failure means, and when to try again.
//!
//! When the bucket cannot be reached, neither by the workers nor from here, or is slow, a read tries all sources again
//! and again until its deadline. What the bucket refuses is final at once.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use cavern_net::{NetError, Route};
use cavern_proto::data::Status;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tokio::time::Instant;

use super::buffers::Purpose;
use super::fetch::{ChunkRequest, Fetched};
use super::hedge::Hedge;
use super::location::BlockLocation;
use super::outage_wait::OutageWaiter;
use super::resources::Core;
use crate::error::ClientError;
use crate::stages::{Stage, Waiting};

/// Workers tried for a block even when it has one replica: the second is the next owner should the first be lost.
const WORKERS_TRIED: usize = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Worker(u64),
    Bucket,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Worker(id) => write!(f, "worker {id}"),
            Self::Bucket => f.write_str("the bucket"),
        }
    }
}

type Running = Pin<Box<dyn Future<Output = (Source, Result<Fetched, ClientError>)> + Send>>;

impl Core {
    /// Gets the wanted chunks from the first source that can give them before `deadline`. Read-ahead tries each source
    /// once.
    pub(super) async fn fetch_from_any(
        self: &Arc<Self>,
        want: &ChunkRequest,
        deadline: Instant,
    ) -> Result<Fetched, ClientError> {
        let mut outage: Option<OutageWaiter<'_>> = None;
        loop {
            match self.try_sources(want, deadline).await {
                Ok(piece) => {
                    if let Some(outage) = outage {
                        outage.end();
                    }
                    return Ok(piece);
                }
                Err(FetchFailure { error, is_transient }) => match &want.at {
                    BlockLocation::Object { object, .. } if is_transient && want.purpose == Purpose::Read => {
                        let waiting = outage.get_or_insert_with(|| self.outages.enter(&object.mount));
                        let _bucket = Stage::Bucket.begin();
                        waiting.wait(error, deadline).await?;
                    }
                    _ => return Err(error),
                },
            }
        }
    }

    async fn try_sources(self: &Arc<Self>, want: &ChunkRequest, deadline: Instant) -> Result<Fetched, FetchFailure> {
        let sources = self.sources(want).into_iter();
        let deadline = deadline.min(Instant::now() + self.limits.read);
        let (asked, causes) = (Vec::new(), Vec::new());
        let mut fallback =
            SourceFallback { core: self, want, deadline, sources, asked, causes, failure: None, is_outage: false };
        match tokio::time::timeout_at(deadline, fallback.run()).await {
            Ok(result) => result,
            Err(_elapsed) => {
                let silent: Vec<String> = fallback.asked.iter().map(|(source, _)| source.to_string()).collect();
                let causes = format!("{} gave no answer within client.read_timeout", silent.join(" and "));
                let is_slow = fallback.asked.iter().any(|(source, _)| *source == Source::Bucket);
                let error = fallback.failed(Some(causes));
                Err(FetchFailure { error, is_transient: fallback.is_outage || is_slow })
            }
        }
    }

    /// Who decides when a read of a block is sent twice: each kind takes as long as it takes, and has its own share.
    pub(super) fn hedge(&self, at: &BlockLocation) -> &Hedge {
        match at {
            BlockLocation::Object { .. } => &self.hedges.object,
            BlockLocation::Replicas(_) => &self.hedges.replica,
        }
    }

    /// Lets requests that lost end by themselves.
    fn finish_in_background(&self, mut running: FuturesUnordered<Running>) {
        self.in_background(self.background.stop.clone(), async move {
            while running.next().await.is_some() {}
            Ok(())
        });
    }

    /// Best first. A worker on this host goes before others that hold the block as well.
    fn sources(&self, want: &ChunkRequest) -> Vec<Source> {
        let (object, index) = match &want.at {
            BlockLocation::Object { object, index } => (object, *index),
            BlockLocation::Replicas(block) => {
                let mut workers = block.workers.clone();
                workers.sort_by_key(|worker| self.pool.rests(*worker));
                return workers.into_iter().map(Source::Worker).collect();
            }
        };
        let replicas = object.mount.replicas();
        let placement = self.pool.placement();
        let candidates = placement.candidates(object.content, index, replicas.max(WORKERS_TRIED));
        let mut workers: Vec<u64> = candidates.iter().collect();
        if replicas > 1 {
            let holders = replicas.min(workers.len());
            workers[..holders].sort_by_key(|worker| self.pool.known_route(*worker) != Route::Local);
        }
        workers.into_iter().map(Source::Worker).chain([Source::Bucket]).collect()
    }
}

/// All sources were tried, and none gave the bytes.
struct FetchFailure {
    error: ClientError,
    /// The bucket could not be reached, or did not answer in time: another attempt may go better.
    is_transient: bool,
}

impl From<ClientError> for FetchFailure {
    fn from(error: ClientError) -> Self {
        Self { error, is_transient: false }
    }
}

struct SourceFallback<'a> {
    core: &'a Arc<Core>,
    want: &'a ChunkRequest,
    deadline: Instant,
    sources: std::vec::IntoIter<Source>,
    /// Sources that have not answered yet. The wait for one ends with the first answer: who lost goes on for nobody.
    asked: Vec<(Source, Waiting)>,
    /// Why sources were of no use, in the order in which they were not.
    causes: Vec<String>,
    /// The last failure of a worker that may pass, if there is such a one, else the last one.
    failure: Option<ClientError>,
    /// The bucket could not be reached from here, or did not answer.
    is_outage: bool,
}

impl SourceFallback<'_> {
    async fn run(&mut self) -> Result<Fetched, FetchFailure> {
        let mut running = FuturesUnordered::new();
        running.extend(self.start_next().map(|(_, attempt)| attempt));
        let mut hedge = match self.want.purpose {
            Purpose::Read if self.can_be_hedged() => self.hedge().delay().map(|delay| Instant::now() + delay),
            Purpose::Read | Purpose::Readahead => None,
        };
        let mut hedged = None;
        loop {
            let timer = async {
                match hedge {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                Some((source, result)) = running.next() => match result {
                    Ok(piece) => {
                        if hedged == Some(source) {
                            self.core.stats.hedges_won.inc();
                        }
                        let is_overtaken = |asked: &Source| matches!(asked, Source::Worker(_)) && *asked != source;
                        if self.asked.iter().any(|(asked, _)| is_overtaken(asked)) {
                            self.core.finish_in_background(running);
                        }
                        return Ok(piece);
                    }
                    Err(error) if error.is_version_gone() && !self.want.at.is_pinned() => return Err(error.into()),
                    // Another source would need the same memory.
                    Err(error @ (ClientError::Memory { .. } | ClientError::Shutdown)) => return Err(error.into()),
                    Err(error) => {
                        self.causes.push(error.to_string());
                        if error.is_transient_at_worker()
                            || !self.failure.as_ref().is_some_and(ClientError::is_transient_at_worker)
                        {
                            self.failure = Some(error.clone());
                        }
                        self.asked.retain(|(asked, _)| *asked != source);
                        self.is_outage |= matches!(&error, ClientError::Ufs(error) if error.is_outage());
                        if is_bucket_trouble(&error) && self.has_one_owner() {
                            // A worker that does not hold the block would have to ask the same bucket.
                            self.skip_workers();
                        }
                        if running.is_empty() {
                            match self.start_next() {
                                Some((_, attempt)) => running.push(attempt),
                                None if matches!(&error, ClientError::Ufs(_)) && error.errno() != EIO => {
                                    return Err(error.into());
                                }
                                None => {
                                    return Err(FetchFailure { error: self.failed(None), is_transient: self.is_outage });
                                }
                            }
                        }
                    }
                },
                () = timer, if hedge.is_some() => {
                    hedge = None;
                    if self.can_be_hedged()
                        && self.hedge().permit()
                        && let Some((source, attempt)) = self.start_next()
                    {
                        self.core.stats.hedges.inc();
                        hedged = Some(source);
                        running.push(attempt);
                    }
                }
                else => return Err(self.failed(None).into()),
            }
        }
    }

    /// Begins with the next source that is not left alone.
    fn start_next(&mut self) -> Option<(Source, Running)> {
        let (core, want) = (self.core.clone(), self.want.clone());
        for source in self.sources.by_ref() {
            let left = self.deadline.saturating_duration_since(Instant::now());
            match source {
                Source::Worker(worker) => {
                    let attempt = core.pool.admit(worker);
                    let is_of_object = want.at.is_of_object();
                    if attempt.is_none() && is_of_object {
                        self.causes.push(format!("{source}: left alone after it failed"));
                        continue;
                    }
                    let wait = left.min(core.limits.worker).max(Duration::from_millis(1));
                    let stage = match core.pool.known_route(worker) {
                        Route::Local if is_of_object => Stage::Descriptor,
                        _ => Stage::Network,
                    };
                    self.asked.push((source, stage.begin()));
                    let tried = async move { (source, core.try_worker(&want, worker, attempt, wait).await) };
                    return Some((source, Box::pin(tried)));
                }
                Source::Bucket => {
                    self.asked.push((source, Stage::Bucket.begin()));
                    let tried = async move { (source, core.try_bucket(&want, left).await.map(Fetched::Buffer)) };
                    return Some((source, Box::pin(tried)));
                }
            }
        }
        None
    }

    fn skip_workers(&mut self) {
        while let Some(Source::Worker(_)) = self.sources.as_slice().first() {
            self.sources.next();
        }
    }

    /// Whether there is a source to be asked beside one that is slow. A replica that failed lately is none: it is asked
    /// when all others have failed.
    fn can_be_hedged(&self) -> bool {
        match (&self.want.at, self.sources.as_slice().first()) {
            (BlockLocation::Replicas(_), Some(Source::Worker(worker))) => !self.core.pool.rests(*worker),
            (_, next) => next.is_some(),
        }
    }

    fn hedge(&self) -> &Hedge {
        self.core.hedge(&self.want.at)
    }

    /// Whether one worker alone is to have the block, an object's.
    fn has_one_owner(&self) -> bool {
        matches!(&self.want.at, BlockLocation::Object { object, .. } if object.mount.replicas() == 1)
    }

    /// What all of the failures are, and what came last; of an fs-mode file the one that says most.
    fn failed(&self, last: Option<String>) -> ClientError {
        if let Some(error) = self.failure.as_ref().filter(|_| !self.want.at.is_of_object()) {
            return error.clone();
        }
        let causes: Vec<String> = self.causes.iter().cloned().chain(last).collect();
        let causes = if causes.is_empty() { "no source".to_owned() } else { causes.join("; ") };
        ClientError::Read { key: self.want.at.file(), causes }
    }
}

/// Whether a worker is well but did not get the bytes from the bucket.
fn is_bucket_trouble(error: &ClientError) -> bool {
    matches!(
        error,
        ClientError::Net(NetError::WorkerStatus {
            status: Status::Denied | Status::UfsUnavailable | Status::Deadline,
            ..
        })
    )
}

const EIO: i32 = rustix::io::Errno::IO.raw_os_error();
