//! The way to the master that leads: which of them that is, deadlines, retries, and a circuit breaker.
//!
//! A cluster has one master or a group of them, of which one leads and answers. A call begins at the master that is
//! thought to lead. It is tried again only when no answer came: the connection was refused or broke, or the master said
//! that it does not lead, and perhaps who does. It is never tried again when the leader answered with an error. A call
//! that waits makes its master suspect, and a probe asks who leads: if another one does, the call is made again there.
//!
//! When a call has used up its time without reaching anyone, the breaker opens: later calls fail at once, so that what
//! is cached can be served at full speed, while the probe asks until a master answers again. Who has nothing cached
//! waits for that, as long as a call may take; and he asks again where a master answers that it cannot now.

use std::error::Error as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cavern_conf::Config;
use cavern_conf::backoff::{self, Backoff};
use cavern_proto::{NotLeading, StatusDetail};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::breaker::{Breaker, Level};
use self::members::{MASTERS_MAX, Members, Origin};
use self::stubs::KEEP_ALIVE;
use crate::error::NetError;

mod breaker;
mod channel;
mod command;
mod members;
mod probe;
mod streams;
mod stubs;

pub use self::channel::{channel, connected};
pub use self::streams::StreamFailure;
pub use self::stubs::Stubs;

/// The least pause, however often the probe is answered meanwhile.
const PAUSE_LEAST: Duration = backoff::MASTER.first;
/// A request that waits for as long makes its master suspect: longer than nearly all of them take, shorter than an
/// election. It is suspected again each time it has waited twice as long.
pub const SUSPECT_AFTER: Duration = Duration::from_millis(500);
/// What a person is told of masters of which none leads, and of one that is silent.
const NO_LEADER: &str = "no master leads at the moment: a majority of them must be running";
const NO_ANSWER: &str = "it does not answer";
/// In how many steps a silence is measured.
const SILENCE_STEPS: u32 = 16;

/// The masters' services behind one reconnecting channel per master. Cheap to clone.
#[derive(Clone)]
pub struct MasterChannel {
    inner: Arc<Inner>,
}

struct Inner {
    masters: Members,
    /// The last that was said to be, of which the members are known.
    group_epoch: AtomicU64,
    timeout: Duration,
    breaker: Breaker,
    tasks: TaskTracker,
    stop: CancellationToken,
}

/// How long a question waits for a master that cannot answer it now.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RetryPolicy {
    /// Not at all once that is known: there is something cached that will do.
    OneAttempt,
    /// As long as a call may take: only a master's answer will do.
    UntilDeadline,
}

/// Why the attempts of a call came to nothing.
#[derive(Default)]
struct Failures {
    /// Of the last one to which no answer came.
    cause: String,
    /// Some master said that it does not lead, and nobody was found who does.
    is_unled: bool,
    /// Masters asked since the last pause.
    asked: Vec<u64>,
}

impl Failures {
    fn cause(self) -> String {
        match (self.is_unled, self.cause.as_str()) {
            (true, "") => NO_LEADER.to_owned(),
            (true, cause) => format!("{NO_LEADER} ({cause})"),
            (false, _) => self.cause,
        }
    }
}

impl std::fmt::Debug for MasterChannel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MasterChannel").field("masters", &self.inner.masters.addresses()).finish_non_exhaustive()
    }
}

impl MasterChannel {
    /// Makes the channels, inside a tokio runtime; they connect when first used.
    pub fn new(config: &Config) -> Result<Self, NetError> {
        Self::with(config, KEEP_ALIVE)
    }

    fn with(config: &Config, keep_alive: Duration) -> Result<Self, NetError> {
        Ok(Self {
            inner: Arc::new(Inner {
                masters: Members::new(config, keep_alive)?,
                timeout: config.client.metadata_timeout.get(),
                group_epoch: AtomicU64::new(0),
                breaker: Breaker::default(),
                tasks: TaskTracker::new(),
                stop: CancellationToken::new(),
            }),
        })
    }

    /// One unary call, tried until it is answered, it is known that no master answers, or `client.metadata_timeout` has
    /// passed: for what is asked again, or has another source. An answer that is an error is not tried again.
    pub async fn try_call<T, F>(&self, name: &'static str, request: impl Fn(Stubs) -> F) -> Result<T, NetError>
    where
        F: Future<Output = Result<tonic::Response<T>, tonic::Status>>,
    {
        self.call_as(name, RetryPolicy::OneAttempt, self.deadline(), request).await
    }

    /// One call, tried for up to `wait`, for as long as the breaker is better than `worst`. For a call that answers a
    /// stream, the deadline covers the time to its beginning.
    async fn try_until<T, F>(
        &self,
        name: &'static str,
        worst: Level,
        wait: Duration,
        request: impl Fn(Stubs) -> F,
    ) -> Result<T, NetError>
    where
        F: Future<Output = Result<tonic::Response<T>, tonic::Status>>,
    {
        let inner = &self.inner;
        if let Some(cause) = inner.breaker.cause_at(worst) {
            return Err(inner.unavailable(cause));
        }
        let deadline = Instant::now() + wait;
        let (mut backoff, mut failures) = (backoff::MASTER.begin(), Failures::default());
        loop {
            let stubs = inner.masters.preferred();
            let origin = stubs.origin;
            // On the heap: it would be there three times in the future of each call, which is kept small.
            let attempt = self.attend(origin, Box::pin(request(stubs)));
            let answer = tokio::select! {
                answer = tokio::time::timeout_at(deadline, attempt) => answer,
                cause = inner.breaker.reaching(worst) => return Err(inner.unavailable(cause)),
            };
            let status = match answer {
                Ok(Some(Ok(response))) => {
                    inner.answered(origin);
                    return Ok(response.into_inner());
                }
                Ok(Some(Err(status))) => status,
                // Another master leads: it is preferred now.
                Ok(None) => continue,
                Err(_elapsed) => return Err(self.exhausted(name, wait, origin, failures)),
            };
            failures.asked.push(origin.member);
            match NotLeading::from_status(&status) {
                Some(NotLeading { leader }) => {
                    let is_named = leader.is_some_and(|leader| inner.masters.follow(origin, &leader));
                    // Masters that name each other, or one that is gone, are asked again after a pause, as those are
                    // that name nobody.
                    if is_named && !failures.asked.iter().any(|member| inner.masters.is_preferred(*member)) {
                        continue;
                    }
                    failures.is_unled = true;
                }
                None if status.source().is_none() => {
                    inner.answered(origin);
                    return Err(status.into());
                }
                None => failures.cause = innermost(&status),
            }
            self.suspect();
            inner.masters.rotate(origin);
            let pause = backoff.next_pause_before(deadline).filter(|_| !inner.stop.is_cancelled());
            let Some(pause) = pause else {
                let cause = failures.cause();
                inner.breaker.open(&cause);
                return Err(inner.unavailable(cause));
            };
            tokio::select! {
                () = inner.wait_for_leader(origin, pause) => {}
                cause = inner.breaker.reaching(worst) => return Err(inner.unavailable(cause)),
            }
            failures.asked.clear();
        }
    }

    /// The time of a call is up while it waits for an answer.
    fn exhausted(&self, name: &'static str, wait: Duration, origin: Origin, failures: Failures) -> NetError {
        let inner = &self.inner;
        let is_led = inner.breaker.is_healthy() && inner.masters.is_confirmed(origin);
        // Perhaps the master is well and the bucket behind it slow: the probe finds out.
        self.suspect();
        let waited_ms = wait.as_millis() as u64;
        if failures.is_unled && !is_led {
            let cause = failures.cause();
            inner.breaker.exhausted(cause.clone());
            return inner.unavailable(cause);
        }
        inner.breaker.exhausted(match failures.cause.as_str() {
            "" => format!("{name} got no answer within {waited_ms} ms"),
            cause => cause.to_owned(),
        });
        NetError::MasterDeadline { call: name, waited_ms }
    }

    /// Waits for the answer to a request, and suspects the master while there is none; `None` once another one is found
    /// to lead. A master that is stopped, or cut off, neither answers nor breaks the connection for some time.
    async fn attend<T>(&self, origin: Origin, request: impl Future<Output = T>) -> Option<T> {
        let moved = self.inner.masters.moved_from(origin);
        tokio::pin!(request, moved);
        let mut patience = SUSPECT_AFTER;
        loop {
            tokio::select! {
                biased;
                answer = &mut request => return Some(answer),
                () = &mut moved => return None,
                () = tokio::time::sleep(patience) => self.suspect(),
            }
            patience = patience.saturating_mul(2);
        }
    }

    /// Whether the last that is known of the master are probes without an answer: callers that have something cached
    /// should not wait.
    pub fn is_silent(&self) -> bool {
        self.inner.breaker.is_silent()
    }

    /// Whether calls fail at once, until a probe finds a master that answers.
    pub fn is_given_up(&self) -> bool {
        self.inner.breaker.open_cause().is_some()
    }

    /// Completes with the cause when no master has given an answer for `wait`, whoever was asked. That is counted in
    /// steps, so that the time in which this process was stopped is none of the masters' silence.
    pub async fn silent_for(&self, wait: Duration) -> String {
        let breaker = &self.inner.breaker;
        'suspected: loop {
            breaker.reaching(Level::Suspect).await;
            for _ in 0..SILENCE_STEPS {
                tokio::select! {
                    () = tokio::time::sleep(wait / SILENCE_STEPS) => {}
                    () = breaker.healed() => continue 'suspected,
                }
            }
            tokio::select! {
                cause = breaker.reaching(Level::Silent) => return cause,
                () = breaker.healed() => {}
            }
        }
    }

    /// Completes when a master has answered, after which nothing is known to be wrong.
    pub async fn answering(&self) {
        self.inner.breaker.healed().await;
    }

    /// `host:port` of each master that is known.
    pub fn addresses(&self) -> String {
        self.inner.masters.addresses()
    }

    /// `client.metadata_timeout`.
    pub fn timeout(&self) -> Duration {
        self.inner.timeout
    }

    /// Of a call that begins now.
    pub fn deadline(&self) -> Instant {
        Instant::now() + self.inner.timeout
    }

    /// As `try_call`, but waits for a master that cannot be reached now, or cannot answer now, for as long as a call
    /// may take: for what has no answer but the master's.
    pub async fn call_patiently<T, F>(&self, name: &'static str, request: impl Fn(Stubs) -> F) -> Result<T, NetError>
    where
        F: Future<Output = Result<tonic::Response<T>, tonic::Status>>,
    {
        self.call_as(name, RetryPolicy::UntilDeadline, self.deadline(), request).await
    }

    /// As `try_call` or as `call_patiently`, with a deadline that a longer piece of work has.
    pub async fn call_as<T, F>(
        &self,
        name: &'static str,
        patience: RetryPolicy,
        deadline: Instant,
        request: impl Fn(Stubs) -> F,
    ) -> Result<T, NetError>
    where
        F: Future<Output = Result<tonic::Response<T>, tonic::Status>>,
    {
        let worst = match patience {
            RetryPolicy::OneAttempt => Level::Silent,
            RetryPolicy::UntilDeadline => Level::Open,
        };
        let mut backoff = backoff::MASTER.begin();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.try_until(name, worst, left, &request).await {
                Err(error) if patience == RetryPolicy::UntilDeadline && error.is_transient() => {
                    self.wait_after(error, &mut backoff, deadline).await?;
                }
                answer => return answer,
            }
        }
    }

    /// Waits until another attempt may go better: until a master answers again, or for a pause. Gives the failure back
    /// when the deadline comes first.
    pub async fn wait_after<E>(&self, failure: E, backoff: &mut Backoff, deadline: Instant) -> Result<(), E> {
        let pause = backoff.next_pause_before(deadline).filter(|_| !self.inner.stop.is_cancelled());
        let Some(pause) = pause else { return Err(failure) };
        if !self.is_given_up() {
            tokio::time::sleep(pause).await;
            return Ok(());
        }
        match tokio::time::timeout_at(deadline, self.inner.breaker.closing()).await {
            Ok(()) => Ok(()),
            Err(_elapsed) => Err(failure),
        }
    }

    /// The master missed a sign of life: probes until one comes, of this or of another master.
    pub fn suspect(&self) {
        let inner = self.inner.clone();
        if inner.breaker.suspect() && !inner.stop.is_cancelled() {
            self.inner.tasks.spawn(async move { inner.probe().await });
        }
    }

    /// The masters are those of this epoch, as the leader says; 0 where it says nothing. `masters` is where they are,
    /// as long as the leader has not been told that this is known. Who knows all of them finds a leader when those of
    /// the configuration are gone.
    pub fn note_group(&self, epoch: u64, masters: &[String]) {
        for master in masters.iter().take(MASTERS_MAX) {
            // One that is no address is written down there.
            let _known = self.inner.masters.learn(master);
        }
        // One that comes without its masters is known already, or its masters are not.
        if epoch != 0 && !masters.is_empty() {
            self.inner.group_epoch.store(epoch, Ordering::Relaxed);
        }
    }

    /// Of which the masters are known, for the leader.
    pub fn group_epoch(&self) -> u64 {
        self.inner.group_epoch.load(Ordering::Relaxed)
    }

    /// Stops probing. Calls in flight end with their next failure.
    pub async fn shutdown(&self) {
        self.inner.stop.cancel();
        self.inner.tasks.close();
        self.inner.tasks.wait().await;
    }
}

impl Inner {
    fn unavailable(&self, cause: String) -> NetError {
        NetError::MasterUnavailable { masters: self.masters.addresses(), cause }
    }

    /// Waits for a pause, or until a leader is found, whichever it is.
    async fn wait_for_leader(&self, since: Origin, pause: Duration) {
        let least = PAUSE_LEAST.min(pause);
        tokio::time::sleep(least).await;
        let _paused = tokio::time::timeout(pause - least, self.masters.confirmed_since(since)).await;
    }

    /// A master answered as only a leader does.
    fn answered(&self, origin: Origin) {
        if self.breaker.is_healthy() && self.masters.is_confirmed(origin) {
            return;
        }
        // In this order: a confirmation ends the probe, and whoever suspects a master after `close` starts another.
        if self.masters.confirm(origin) {
            self.breaker.close();
        }
    }
}

impl From<tonic::Status> for NetError {
    /// The status as the master's own answer. That it does not lead is none.
    fn from(status: tonic::Status) -> Self {
        if let Some(NotLeading { leader }) = NotLeading::from_status(&status) {
            let masters = leader.unwrap_or_else(|| "this cluster".to_owned());
            return Self::MasterUnavailable { masters, cause: NO_LEADER.to_owned() };
        }
        if StatusDetail::Gone.is_on(&status) {
            return Self::Gone(status.message().to_owned());
        }
        Self::Master { code: status.code(), message: status.message().to_owned() }
    }
}

/// The innermost cause of an error: "connection refused" says more than "transport error".
pub fn innermost(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}
