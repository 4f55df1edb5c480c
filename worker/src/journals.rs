//! The journals of mounts of this host: kept beside the processes that serve a mount, and replayed when all of them are
//! dead and have left something to be made.
//!
//! See [`cavern_net::journals`] for how they are handed over. A journal is known by the number of its file, so another
//! process that serves the same mount hands over the same one. The supervisor's death is seen by a descriptor of its
//! process, that of whoever serves by the end of its connection: a daemon that dies alone has a successor. What is
//! replayed is the business of a process of its own, `cv fuse --replay`, which has the journal as its standard input,
//! and locks it. That may die, too, or find no master: another one begins, for some time. Blocks that no file has are
//! not freed meanwhile.

use std::collections::HashMap;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use cavern_conf::backoff;
use cavern_conf::process::LogLimit;
use cavern_net::journals::{self, Ask, Hello};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, fcntl_get_seals, fstat};
use tokio::net::{UnixListener, UnixStream};
use tokio::process::Command;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;
use tracing::{debug, error, warn};

use crate::local_peers::LocalPeers;
use crate::membership::Membership;
use crate::metrics::WorkerMetrics;

/// Journals that are kept at a time: mounts of one host.
const JOURNALS_MAX: usize = 64;
/// Connections at a time; more are closed at once.
const CONNECTIONS_MAX: usize = 256;
/// Whoever connects says at once what for.
const HELLO_WAIT: Duration = Duration::from_secs(5);
/// How often it is looked whether a supervisor is dead, while nobody serves its mount.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Processes that replay at a time.
const REPLAYS: usize = 8;
/// A journal that could not be replayed for so long is given up: while no master leads, no session ends.
const GIVE_UP: Duration = Duration::from_secs(600);
/// One process ends by itself before this.
const REPLAY_MOST: Duration = Duration::from_secs(60);
/// When the worker stops, replays that run get so long; then they go on without it.
const STOP_WAIT: Duration = Duration::from_secs(5);

/// This executable, also when its file has been replaced.
const OWN: &str = "/proc/self/exe";

/// Which file of memory a journal is: device and inode.
type Number = (u64, u64);

/// The journals of mounts of this host.
#[derive(Debug)]
pub struct Journals {
    kept: Mutex<HashMap<Number, Arc<Journal>>>,
    /// The arguments of a process that replays the journal which is its standard input.
    replay: Vec<OsString>,
    membership: Arc<Membership>,
    metrics: WorkerMetrics,
    /// Journals of mounts whose processes are dead.
    orphaned: AtomicUsize,
    /// Lines of the log about them: whoever is let at the socket hands over journals, and dies.
    deaths: LogLimit<()>,
    retries: LogLimit<()>,
    running: Semaphore,
    tasks: TaskTracker,
    stop: CancellationToken,
}

#[derive(Debug)]
struct Journal {
    memory: OwnedFd,
    /// Its process.
    supervisor: OwnedFd,
    place: String,
    name: String,
    /// The connections of those who serve the mount have a token of this each.
    serving: TaskTracker,
    /// Nothing is left of it.
    gone: CancellationToken,
}

impl Journal {
    fn is_supervisor_dead(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&self.supervisor, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
    }

    /// Whether it says that nothing of it is left to be made.
    fn is_ended(&self) -> bool {
        journals::is_ended(self.memory.as_fd()).unwrap_or_default()
    }
}

impl Journals {
    /// `replay`: the arguments with which this executable replays a journal; without any nothing is kept.
    pub fn new(
        replay: Vec<OsString>,
        membership: Arc<Membership>,
        metrics: WorkerMetrics,
        stop: CancellationToken,
    ) -> Arc<Self> {
        Arc::new(Self {
            kept: Mutex::default(),
            replay,
            membership,
            metrics,
            orphaned: AtomicUsize::new(0),
            deaths: LogLimit::default(),
            retries: LogLimit::default(),
            running: Semaphore::new(REPLAYS),
            tasks: TaskTracker::new(),
            stop,
        })
    }

    /// Whether a journal waits to be replayed, or is.
    pub fn are_replayed(&self) -> bool {
        self.orphaned.load(Ordering::Acquire) > 0
    }

    /// Serves until the worker stops; then waits a while for what is being replayed. The socket's file is removed.
    pub async fn serve(self: Arc<Self>, listener: UnixListener, path: PathBuf) {
        let mut connections = JoinSet::new();
        loop {
            let accepted = tokio::select! {
                () = self.stop.cancelled() => break,
                Some(_ended) = connections.join_next() => continue,
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, _)) if connections.len() < CONNECTIONS_MAX && LocalPeers::default().admits(&stream) => {
                    let journals = Arc::clone(&self);
                    connections.spawn(async move { journals.connected(stream).await });
                }
                Ok(_refused) => {}
                Err(error) => {
                    warn!(%error, "cannot accept a connection for journals");
                    sleep(backoff::ACCEPT.first).await;
                }
            }
        }
        drop(listener);
        let _ = std::fs::remove_file(path);
        self.tasks.close();
        self.tasks.wait().await;
        connections.shutdown().await;
    }

    async fn connected(self: Arc<Self>, mut stream: UnixStream) {
        let Ok(received) = timeout(HELLO_WAIT, journals::receive(&stream)).await else { return };
        let (hello, descriptors) = match received {
            Ok(received) => received,
            Err(cause) => {
                debug!(%cause, "a connection for journals is refused");
                let _gone = journals::refuse(stream, &cause.to_string()).await;
                return;
            }
        };
        match hello.ask() {
            Ask::Keep => match self.keep(hello, descriptors) {
                Ok(serving) => {
                    if journals::answer_kept(&mut stream).await.is_ok() {
                        journals::ended(&mut stream).await;
                    }
                    drop(serving);
                }
                Err(reason) => {
                    debug!(reason, "a journal is refused");
                    let _gone = journals::refuse(stream, &reason).await;
                }
            },
            Ask::Wait => {
                let asked = tokio::select! {
                    () = self.nothing_left_of(&hello.place) => true,
                    () = journals::ended(&mut stream) => false,
                };
                if asked {
                    let _gone = journals::answer_done(&mut stream).await;
                }
            }
            Ask::Nothing => _ = journals::refuse(stream, "it asks for nothing").await,
        }
    }

    /// Completes when no mount of this place is dead whose journal is still to be replayed.
    async fn nothing_left_of(&self, place: &str) {
        let next = || {
            let kept = self.kept.lock();
            kept.values().find(|journal| journal.place == place && journal.is_supervisor_dead()).cloned()
        };
        while let Some(journal) = next() {
            journal.gone.cancelled().await;
        }
    }

    /// Keeps a journal, or knows it already.
    fn keep(self: &Arc<Self>, hello: Hello, descriptors: Vec<OwnedFd>) -> Result<TaskTrackerToken, String> {
        let Ok([memory, supervisor]) = <[OwnedFd; 2]>::try_from(descriptors) else {
            return Err("a journal and a supervisor are two descriptors".to_owned());
        };
        let own = self.membership.now().1;
        if hello.cluster_id.is_empty() || hello.cluster_id != own {
            return Err(format!("this worker is of cluster \"{own}\", not of \"{}\"", hello.cluster_id));
        }
        let number = number_of(&memory).ok_or("this is no journal of a mount")?;
        if !is_process(&supervisor) {
            return Err("this is no descriptor of a process".to_owned());
        }
        let mut kept = self.kept.lock();
        if let Some(journal) = kept.get(&number) {
            return Ok(journal.serving.token());
        }
        if self.replay.is_empty() || self.stop.is_cancelled() || kept.len() >= JOURNALS_MAX {
            return Err("this worker takes no more journals".to_owned());
        }
        let Hello { place, name, .. } = hello;
        let (serving, gone) = (TaskTracker::new(), CancellationToken::new());
        // So that it can be waited for; there are new tokens all the same.
        serving.close();
        let token = serving.token();
        let journal = Arc::new(Journal { memory, supervisor, place, name, serving, gone });
        kept.insert(number, Arc::clone(&journal));
        self.metrics.journals.set(kept.len() as i64);
        drop(kept);
        debug!(mount = journal.name, "the journal of a mount is kept");
        let journals = Arc::clone(self);
        self.tasks.spawn(async move {
            journals.follow(&journal).await;
            let mut kept = journals.kept.lock();
            kept.remove(&number);
            journals.metrics.journals.set(kept.len() as i64);
            drop(kept);
            journal.gone.cancel();
        });
        Ok(token)
    }

    /// Waits until all who served the mount are dead, and has replayed what they have left.
    async fn follow(&self, journal: &Journal) {
        let dead = async {
            loop {
                journal.serving.wait().await;
                if journal.is_supervisor_dead() {
                    return;
                }
                // The next who serves the mount is about to come.
                sleep(LOOK_EVERY).await;
            }
        };
        tokio::select! {
            biased;
            () = self.stop.cancelled() => return,
            () = dead => {}
        }
        if journal.is_ended() {
            return;
        }
        self.orphaned.fetch_add(1, Ordering::AcqRel);
        self.replay(journal).await;
        self.orphaned.fetch_sub(1, Ordering::AcqRel);
    }

    async fn replay(&self, journal: &Journal) {
        let mount = &journal.name;
        if let Some(suppressed) = self.deaths.admit(()) {
            warn!(mount, suppressed, "all processes of a mount are dead: what it had answered is made");
        }
        let (begun, mut backoff) = (Instant::now(), backoff::REPLAY.begin());
        loop {
            let how = match self.replay_once(journal).await {
                Ok(()) => return,
                Err(_how) if journal.is_ended() => return,
                Err(how) => how.to_string(),
            };
            if begun.elapsed() >= GIVE_UP {
                error!(mount, how, "what the mount had answered last cannot be made, and is lost");
                return;
            }
            if let Some(suppressed) = self.retries.admit(()) {
                warn!(mount, how, suppressed, "what the mount had answered is not all made: once more");
            }
            if self.stop.run_until_cancelled(backoff.wait()).await.is_none() {
                warn!(mount, "the worker stops: what the mount had answered last is lost, unless it is being made");
                return;
            }
        }
    }

    /// Has a process replay a journal.
    async fn replay_once(&self, journal: &Journal) -> io::Result<()> {
        let Some(Ok(_one)) = self.stop.run_until_cancelled(self.running.acquire()).await else {
            return Err(io::Error::other("the worker stops"));
        };
        let mut command = Command::new(OWN);
        command.args(&self.replay).stdin(Stdio::from(journal.memory.try_clone()?)).stdout(Stdio::null());
        // It is a client: that of the configuration, where the worker was given a certificate of its own.
        command.env_remove("CV_SECURITY__CERTIFICATE").env_remove("CV_SECURITY__KEY");
        // An interrupt at the terminal is for the worker, which waits for it.
        command.process_group(0);
        let mut child = command.spawn()?;
        self.metrics.replays.inc();
        let stopped = async {
            self.stop.cancelled().await;
            sleep(STOP_WAIT).await;
        };
        tokio::select! {
            status = child.wait() => match status? {
                status if status.success() => Ok(()),
                status => Err(io::Error::other(status.to_string())),
            },
            () = sleep(REPLAY_MOST) => {
                child.start_kill()?;
                let status = child.wait().await?;
                Err(io::Error::other(format!("it took too long: {status}")))
            }
            () = stopped => Err(io::Error::other("it goes on without the worker")),
        }
    }
}

/// Which file it is; `None` where that is no journal in a file of memory.
fn number_of(memory: &OwnedFd) -> Option<Number> {
    let stat = fstat(memory).ok()?;
    let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    // Only files of memory have seals.
    let is_memory = is_file && fcntl_get_seals(memory).is_ok();
    (is_memory && journals::is_journal(memory.as_fd())).then_some((stat.st_dev, stat.st_ino))
}

fn is_process(descriptor: &OwnedFd) -> bool {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", descriptor.as_raw_fd()));
    info.is_ok_and(|info| info.lines().any(|line| line.starts_with("Pid:")))
}

#[cfg(test)]
mod tests;
