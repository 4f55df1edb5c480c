//! The way to the master: every address of the configuration, deadlines, retries, and a circuit breaker.
//!
//! A call is tried again only when no answer came (connection refused or broken), never when the master answered with
//! an error. When a call has used up its time without reaching anyone, the breaker opens: later calls fail at once, so
//! that what is cached can be served at full speed, while a probe asks until a master answers again. Who has nothing
//! cached waits for that, as long as a call may take; and he asks again where a master answers that it cannot now.

use std::error::Error as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use cavern_conf::Config;
use cavern_proto::master::ListWorkersRequest;
use cavern_proto::master::cluster_client::ClusterClient;
use cavern_proto::master::namespace_client::NamespaceClient;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::transport::{Channel, Endpoint};

use self::breaker::{Breaker, Level};
use crate::error::NetError;

mod breaker;

/// Longest message taken from a master; pages of a listing are far smaller.
const MESSAGE_BYTES_MAX: usize = 64 << 20;
/// Between pings. A connection on which one stays unanswered for this long is given up.
const KEEP_ALIVE: Duration = Duration::from_secs(2);
/// The same where nothing else could be asked.
const PATIENT_KEEP_ALIVE: Duration = Duration::from_secs(5);
/// Pause before a call is tried again, doubling up to the second.
pub const PAUSE_FIRST: Duration = Duration::from_millis(20);
const PAUSE_MOST: Duration = Duration::from_millis(500);
/// What a probe waits for an answer, and between probes.
const PROBE_WAIT: Duration = Duration::from_secs(1);
const PROBE_PAUSE: Duration = Duration::from_millis(200);
/// What the first ones wait. So many without an answer, at least, and one of every master, distinguish a silent master
/// from a connection that broke; together they take less than half of a lease, after which the master is suspected, so
/// that no caller waits when the lease is over.
const FIRST_PROBES: [Duration; 2] = [Duration::from_millis(250), Duration::from_millis(500)];

/// The master's services behind one reconnecting channel per master. Cheap to clone.
#[derive(Clone)]
pub struct MasterChannel {
    inner: Arc<Inner>,
}

struct Inner {
    masters: Vec<Stubs>,
    addresses: String,
    /// The one that answered last.
    preferred: AtomicUsize,
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

/// The stubs of one master, to call directly or inside a call of [`MasterChannel`].
#[derive(Clone, Debug)]
pub struct Stubs {
    pub namespace: NamespaceClient<Channel>,
    pub cluster: ClusterClient<Channel>,
}

impl Stubs {
    fn new(channel: Channel) -> Self {
        Self {
            namespace: NamespaceClient::new(channel.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX),
            cluster: ClusterClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX),
        }
    }

    /// Connects to the first master that answers: for commands, whose calls take as long as they take unless the
    /// master does not even answer pings.
    ///
    /// # Errors
    /// [`NetError::MasterUnavailable`] says what became of each, in their order.
    pub async fn connect(config: &Config) -> Result<Self, NetError> {
        let mut failures = Vec::new();
        for address in &config.cluster.masters {
            let endpoint = endpoint(address, config.client.connect_timeout.get(), PATIENT_KEEP_ALIVE)?;
            match endpoint.connect().await {
                Ok(channel) => return Ok(Self::new(channel)),
                Err(error) => failures.push(innermost(&error)),
            }
        }
        Err(NetError::MasterUnavailable { masters: config.cluster.masters.join(", "), cause: failures.join("; ") })
    }
}

fn endpoint(address: &str, connect_timeout: Duration, keep_alive: Duration) -> Result<Endpoint, NetError> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|error| NetError::Invalid(format!("cluster.masters: \"{address}\": {error}")))?;
    Ok(endpoint
        .connect_timeout(connect_timeout)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(keep_alive)
        .keep_alive_while_idle(true))
}

impl std::fmt::Debug for MasterChannel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MasterChannel").field("masters", &self.inner.addresses).finish_non_exhaustive()
    }
}

impl MasterChannel {
    /// Makes the channels, inside a tokio runtime; they connect when first used.
    pub fn new(config: &Config) -> Result<Self, NetError> {
        let masters = config.cluster.masters.iter().map(|address| {
            let endpoint = endpoint(address, config.client.connect_timeout.get(), KEEP_ALIVE)?;
            Ok(Stubs::new(endpoint.connect_lazy()))
        });
        let masters = masters.collect::<Result<Vec<_>, NetError>>()?;
        if masters.is_empty() {
            return Err(NetError::Invalid("cluster.masters names no master".to_owned()));
        }
        Ok(Self {
            inner: Arc::new(Inner {
                masters,
                addresses: config.cluster.masters.join(", "),
                preferred: AtomicUsize::new(0),
                timeout: config.client.metadata_timeout.get(),
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

    /// The same, but tried for up to `wait`. Fails at once only while the circuit breaker is open. For a call that
    /// answers a stream, the deadline covers the time to its beginning.
    pub async fn call_within<T, F>(
        &self,
        name: &'static str,
        wait: Duration,
        request: impl Fn(Stubs) -> F,
    ) -> Result<T, NetError>
    where
        F: Future<Output = Result<tonic::Response<T>, tonic::Status>>,
    {
        self.try_until(name, Level::Open, wait, request).await
    }

    /// As `call_within`, for as long as the breaker is better than `worst`.
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
        let (mut pause, mut cause) = (PAUSE_FIRST, None);
        loop {
            let chosen = inner.preferred.load(Ordering::Relaxed);
            let attempt = request(inner.masters[chosen % inner.masters.len()].clone());
            let answer = tokio::select! {
                answer = tokio::time::timeout_at(deadline, attempt) => answer,
                cause = inner.breaker.reaching(worst) => return Err(inner.unavailable(cause)),
            };
            match answer {
                Ok(Ok(response)) => {
                    inner.breaker.close();
                    return Ok(response.into_inner());
                }
                Ok(Err(status)) if status.source().is_none() => {
                    inner.breaker.close();
                    return Err(status.into());
                }
                Ok(Err(status)) => {
                    self.suspect();
                    let next = (chosen + 1) % inner.masters.len();
                    let _raced = inner.preferred.compare_exchange(chosen, next, Ordering::Relaxed, Ordering::Relaxed);
                    cause = Some(innermost(&status));
                }
                Err(_elapsed) => {
                    // Perhaps the master is well and the bucket behind it slow: the probe finds out.
                    self.suspect();
                    inner.breaker.exhausted(match &cause {
                        Some(cause) => cause.clone(),
                        None => format!("{name} got no answer within {} ms", wait.as_millis()),
                    });
                    return Err(NetError::MasterDeadline { call: name, waited_ms: wait.as_millis() as u64 });
                }
            }
            if Instant::now() + pause >= deadline || inner.stop.is_cancelled() {
                let cause = cause.unwrap_or_default();
                inner.breaker.open(&cause);
                return Err(inner.unavailable(cause));
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = inner.breaker.next_close() => {}
                cause = inner.breaker.reaching(worst) => return Err(inner.unavailable(cause)),
            }
            pause = (pause * 2).min(PAUSE_MOST);
        }
    }

    /// The stubs of the master that answered last, for streams; report how they end with `note_answer` and `suspect`.
    pub fn stubs(&self) -> Stubs {
        let inner = &self.inner;
        inner.masters[inner.preferred.load(Ordering::Relaxed) % inner.masters.len()].clone()
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
        let mut pause = PAUSE_FIRST;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.try_until(name, worst, left, &request).await {
                Err(error) if patience == RetryPolicy::UntilDeadline && error.is_transient() => {
                    self.wait_after(error, &mut pause, deadline).await?;
                }
                answer => return answer,
            }
        }
    }

    /// Waits until another attempt may go better: until a master answers again, or for a pause that doubles. Gives the
    /// failure back when the deadline comes first.
    pub async fn wait_after<E>(&self, failure: E, pause: &mut Duration, deadline: Instant) -> Result<(), E> {
        let may_end = Instant::now() + *pause;
        if may_end >= deadline || self.inner.stop.is_cancelled() {
            return Err(failure);
        }
        *pause = (*pause * 2).min(PAUSE_MOST);
        if !self.is_given_up() {
            tokio::time::sleep_until(may_end).await;
            return Ok(());
        }
        match tokio::time::timeout_at(deadline, self.inner.breaker.closing()).await {
            Ok(()) => Ok(()),
            Err(_elapsed) => Err(failure),
        }
    }

    /// What the end of a stream means whose beginning was a call.
    pub fn broken(&self, status: tonic::Status) -> NetError {
        if status.source().is_none() {
            return status.into();
        }
        self.suspect();
        self.inner.unavailable(innermost(&status))
    }

    /// The master gave a sign of life.
    pub fn note_answer(&self) {
        self.inner.breaker.close();
    }

    /// The master missed a sign of life: probes until one comes.
    pub fn suspect(&self) {
        let inner = self.inner.clone();
        if inner.breaker.suspect() && !inner.stop.is_cancelled() {
            self.inner.tasks.spawn(async move { inner.probe().await });
        }
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
        NetError::MasterUnavailable { masters: self.addresses.clone(), cause }
    }

    /// Asks one master after the other until one answers.
    async fn probe(&self) {
        let known_after = FIRST_PROBES.len().max(self.masters.len());
        for (failed, chosen) in (0..self.masters.len()).cycle().enumerate() {
            let mut cluster = self.masters[chosen].cluster.clone();
            let wait = FIRST_PROBES.get(failed).copied().unwrap_or(PROBE_WAIT);
            let asked = tokio::time::timeout(wait, cluster.list_workers(ListWorkersRequest {}));
            let answer = tokio::select! {
                answer = asked => answer,
                () = self.stop.cancelled() => return,
            };
            let cause = match answer {
                Ok(Err(status)) if status.source().is_some() => innermost(&status),
                Ok(_) => {
                    self.preferred.store(chosen, Ordering::Relaxed);
                    self.breaker.close();
                    tracing::info!("the master answers again");
                    return;
                }
                Err(_elapsed) => "it does not answer".to_owned(),
            };
            let is_known = failed + 1 >= known_after;
            self.breaker.probe_failed(&cause, is_known);
            tokio::select! {
                () = tokio::time::sleep(if is_known { PROBE_PAUSE } else { PAUSE_FIRST }) => {}
                () = self.stop.cancelled() => return,
            }
        }
    }
}

impl From<tonic::Status> for NetError {
    /// The status as the master's own answer.
    fn from(status: tonic::Status) -> Self {
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
