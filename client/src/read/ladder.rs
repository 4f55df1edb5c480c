//! The ladder of sources: the best worker, the next ones, the bucket itself.
//!
//! A source that fails gives way to the next at once. A source that is merely slow is overtaken by the next one where
//! hedging allows it; then the first answer wins and the other request is cancelled. An answer that the version is
//! gone ends the climb: no other source may have it.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use cavern_proto::data::Status;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tokio::time::Instant;

use super::Core;
use super::buffers::Purpose;
use super::fetch::{Piece, Want};
use crate::error::ClientError;
use crate::wire::Route;

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

type Running<'a> = Pin<Box<dyn Future<Output = (Source, Result<Piece, ClientError>)> + Send + 'a>>;

impl Core {
    /// Gets the wanted chunks from the first source that can give them before `deadline`.
    pub(super) async fn obtain(&self, want: &Want, deadline: Instant) -> Result<Piece, ClientError> {
        let mut climb = Climb { core: self, want, deadline, sources: self.sources(want).into_iter(), causes: vec![] };
        match tokio::time::timeout_at(deadline, climb.run()).await {
            Ok(result) => result,
            Err(_elapsed) => {
                climb.causes.push("the deadline passed (client.read_timeout)".to_owned());
                Err(climb.failed())
            }
        }
    }

    /// Best first. A worker on this host goes before others that hold the block as well.
    fn sources(&self, want: &Want) -> Vec<Source> {
        let replicas = want.object.mount.replicas();
        let placement = self.pool.placement();
        let candidates = placement.candidates(want.object.content, want.index, replicas.max(WORKERS_TRIED));
        let mut workers: Vec<u64> = candidates.iter().collect();
        if replicas > 1 {
            let holders = replicas.min(workers.len());
            workers[..holders].sort_by_key(|worker| self.pool.known_route(*worker) != Route::Local);
        }
        workers.into_iter().map(Source::Worker).chain([Source::Bucket]).collect()
    }
}

struct Climb<'a> {
    core: &'a Core,
    want: &'a Want,
    deadline: Instant,
    sources: std::vec::IntoIter<Source>,
    /// Why sources failed, in the order in which they did.
    causes: Vec<String>,
}

impl<'a> Climb<'a> {
    async fn run(&mut self) -> Result<Piece, ClientError> {
        let mut running = FuturesUnordered::new();
        running.extend(self.start_next().map(|(_, attempt)| attempt));
        let mut hedge = match self.want.purpose {
            Purpose::Read => self.core.hedge.delay().map(|delay| Instant::now() + delay),
            Purpose::Readahead => None,
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
                        return Ok(piece);
                    }
                    Err(error) if error.is_version_gone() => return Err(error),
                    // Another source would need the same memory.
                    Err(error @ (ClientError::Memory { .. } | ClientError::Shutdown)) => return Err(error),
                    Err(error) => {
                        self.causes.push(format!("{source}: {error}"));
                        if is_bucket_trouble(&error) && self.want.object.mount.replicas() == 1 {
                            // A worker that does not hold the block would have to ask the same bucket.
                            self.skip_workers();
                        }
                        if running.is_empty() {
                            match self.start_next() {
                                Some((_, attempt)) => running.push(attempt),
                                None if matches!(&error, ClientError::Ufs(_)) && error.errno() != EIO => {
                                    return Err(error);
                                }
                                None => return Err(self.failed()),
                            }
                        }
                    }
                },
                () = timer, if hedge.is_some() => {
                    hedge = None;
                    if self.sources.len() > 0
                        && self.core.hedge.permit()
                        && let Some((source, attempt)) = self.start_next()
                    {
                        self.core.stats.hedges.inc();
                        hedged = Some(source);
                        running.push(attempt);
                    }
                }
                else => return Err(self.failed()),
            }
        }
    }

    /// Begins with the next source that is not left alone.
    fn start_next(&mut self) -> Option<(Source, Running<'a>)> {
        let (core, want) = (self.core, self.want);
        for source in self.sources.by_ref() {
            let left = self.deadline.saturating_duration_since(Instant::now());
            match source {
                Source::Worker(worker) => match core.pool.admit(worker) {
                    Some(attempt) => {
                        let wait = left.min(core.worker_timeout).max(Duration::from_millis(1));
                        let attempt = core.try_worker(want, worker, attempt, wait);
                        return Some((source, Box::pin(async move { (source, attempt.await) })));
                    }
                    None => self.causes.push(format!("{source}: left alone after it failed")),
                },
                Source::Bucket => {
                    let attempt = core.try_bucket(want, left);
                    return Some((source, Box::pin(async move { (source, attempt.await.map(Piece::Buffer)) })));
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

    fn failed(&self) -> ClientError {
        let causes = match self.causes.is_empty() {
            true => "no source".to_owned(),
            false => self.causes.join("; "),
        };
        ClientError::Read { key: self.want.object.key.to_string(), causes }
    }
}

/// Whether a worker is well but did not get the bytes from the bucket.
fn is_bucket_trouble(error: &ClientError) -> bool {
    matches!(
        error,
        ClientError::WorkerStatus { status: Status::Denied | Status::UfsUnavailable | Status::Deadline, .. }
    )
}

const EIO: i32 = rustix::io::Errno::IO.raw_os_error();
