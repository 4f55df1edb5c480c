//! What stands before each service: whoever calls has shown that it may, and the audit log has what it did.

use std::convert::Infallible;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use cavern_conf::process::LogLimit;
use cavern_security::{AuditLog, Audited, Identity, RateCharge, Role};
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::NamedService;
use tonic::{Code, Status};

use super::messages::Messages;
use super::peer::Peer;
use super::{limits, roles};

/// A service whose callers have shown that they may call it.
#[derive(Clone)]
pub struct Guarded<S> {
    service: S,
    audit: AuditLog,
    lines: Arc<Lines>,
}

/// How many lines about each identity there are: it could have the audit log rotated away, with what it has done.
#[derive(Default)]
struct Lines {
    /// Who was refused.
    refusals: LogLimit<Identity>,
    /// Who was given what it asked for, by operation, so that none of them hides another.
    done: LogLimit<(Identity, Arc<str>)>,
}

impl<S> Guarded<S> {
    pub fn new(service: S, audit: AuditLog) -> Self {
        Self { service, audit, lines: Arc::default() }
    }
}

impl<S: NamedService> NamedService for Guarded<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<http::Request<Body>> for Guarded<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<http::Response<Body>, Infallible>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.service.poll_ready(cx)
    }

    fn call(&mut self, mut request: http::Request<Body>) -> Self::Future {
        let Some(peer) = request.extensions().get::<Peer>() else {
            return refuse(Status::unauthenticated("it is not known where the call comes from"));
        };
        let path = request.uri().path();
        if !peer.secured {
            return self.answer(request);
        }
        let Some(identity) = peer.identity.get() else {
            return refuse(Status::unauthenticated("the connection has no identity"));
        };
        if let Err(refusal) = roles::check_role(path, identity) {
            if let Some(suppressed) = self.lines.refusals.admit(identity.clone()) {
                tracing::warn!(peer = %peer.address, suppressed, "refused: {}", refusal.message());
                let call = AuditedCall::new(self.audit.clone(), self.lines.clone(), peer.clone(), roles::method(path));
                call.record(Err(refusal.message()), suppressed);
            }
            return refuse(refusal);
        }
        let tenant = match peer.tenant() {
            Ok(tenant) => tenant.cloned(),
            Err(reason) => return refuse(Status::resource_exhausted(reason.to_string())),
        };
        if let Some(most) = roles::message_max(path, identity) {
            request = request.map(|body| Body::new(Messages::new(body, most, tenant.as_ref())));
        }
        let Some(tenant) = tenant else { return self.answer(request) };
        let call = match tenant.call() {
            Ok(call) => call,
            Err(reason) => return refuse(Status::resource_exhausted(reason.to_string())),
        };
        // The generated services are always ready.
        let mut own = self.clone();
        Box::pin(async move {
            let mut request = request;
            let path = request.uri().path().to_owned();
            let charge = Arc::new(RateCharge::of(tenant));
            request.extensions_mut().insert(charge.clone());
            let answer = async move { own.answer(request).await.unwrap_or_else(|never| match never {}) };
            Ok(limits::make(&charge, &path, call, answer).await)
        })
    }
}

impl<S> Guarded<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    /// Has the service answer, and the audit log what came of it.
    fn answer(&mut self, mut request: http::Request<Body>) -> BoxFuture<http::Response<Body>, Infallible> {
        let Some(peer) = request.extensions().get::<Peer>().filter(|_| self.audit.is_on()) else {
            return Box::pin(self.service.call(request));
        };
        let call =
            AuditedCall::new(self.audit.clone(), self.lines.clone(), peer.clone(), roles::method(request.uri().path()));
        request.extensions_mut().insert(call.clone());
        let answering = self.service.call(request);
        Box::pin(async move {
            let answer = answering.await?;
            // A call that succeeds has its status behind what it answers.
            let status = Status::from_header_map(answer.headers());
            let was_denied = status.as_ref().is_some_and(|status| status.code() == Code::PermissionDenied);
            let result = status.as_ref().map_or(Ok(()), |status| Err(status.message()));
            if (roles::is_audited(&call.operation) || was_denied)
                && let Some(suppressed) = call.admit(&call.operation, result.is_ok())
            {
                call.record(result, suppressed);
            }
            Ok(answer)
        })
    }
}

fn refuse(refusal: Status) -> BoxFuture<http::Response<Body>, Infallible> {
    Box::pin(async move { Ok(refusal.into_http()) })
}

/// A call that may get a line in the audit log: among the extensions of a request where there is such a log.
#[derive(Clone)]
pub struct AuditedCall {
    audit: AuditLog,
    lines: Arc<Lines>,
    peer: Peer,
    operation: Arc<str>,
    subject: Arc<OnceLock<String>>,
}

impl AuditedCall {
    fn new(audit: AuditLog, lines: Arc<Lines>, peer: Peer, operation: &str) -> Self {
        Self { audit, lines, peer, operation: operation.into(), subject: Arc::default() }
    }

    /// How many lines were left out before one that is to be written now; `None` when that is to be left out as well.
    /// What whoever operates the cluster has done is all told.
    pub fn admit(&self, operation: &str, is_done: bool) -> Option<u64> {
        match self.identity() {
            None => Some(0),
            Some(identity) if matches!(identity.role, Role::Operator | Role::Admin | Role::Master) && is_done => {
                Some(0)
            }
            Some(identity) if is_done => self.lines.done.admit((identity.clone(), operation.into())),
            Some(identity) => self.lines.refusals.admit(identity.clone()),
        }
    }

    /// Says what it is about, once.
    pub fn is_about(&self, subject: impl FnOnce() -> String) {
        self.subject.get_or_init(subject);
    }

    /// That of a request, if there is an audit log.
    pub fn of<T>(request: &tonic::Request<T>) -> Option<Self> {
        request.extensions().get().cloned()
    }

    fn identity(&self) -> Option<&Identity> {
        self.peer.identity.get()
    }

    fn record(&self, result: Result<(), &str>, suppressed: u64) {
        self.record_as(&self.operation, self.subject.get().map_or("", String::as_str), result, suppressed);
    }

    /// Something that was done by the call, and is no call of its own; behind so many lines that were left out.
    pub fn record_as(&self, operation: &str, subject: &str, result: Result<(), &str>, suppressed: u64) {
        self.record_all([(operation, subject, result, suppressed)]);
    }

    /// Several of that: operation, subject and result of each, and the lines left out before it.
    pub fn record_all<'a>(&self, done: impl IntoIterator<Item = (&'a str, &'a str, Result<(), &'a str>, u64)>) {
        let (identity, peer) = (self.identity(), &self.peer.address);
        let audited = done.into_iter();
        self.audit.record_all(audited.map(|(operation, subject, result, suppressed)| Audited {
            identity,
            peer,
            operation,
            subject,
            result,
            suppressed,
        }));
    }

    /// Whether names that are removed have a line.
    pub fn has_deletes(&self) -> bool {
        self.audit.has_deletes()
    }
}

/// What a call is about, for the audit log. Says it once.
pub fn is_about<T>(request: &tonic::Request<T>, subject: impl FnOnce(&T) -> String) {
    if let Some(call) = request.extensions().get::<AuditedCall>() {
        call.is_about(|| subject(request.get_ref()));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;
    use std::future::{Ready, ready};
    use std::time::Duration;

    use super::*;

    /// Refuses to vend keys, and does all else.
    #[derive(Clone)]
    struct Vendor;

    impl Service<http::Request<Body>> for Vendor {
        type Response = http::Response<Body>;
        type Error = Infallible;
        type Future = Ready<Result<http::Response<Body>, Infallible>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, request: http::Request<Body>) -> Self::Future {
            ready(Ok(match roles::method(request.uri().path()) {
                "VendKeys" => Status::failed_precondition("none are vended").into_http(),
                _ => http::Response::new(Body::empty()),
            }))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn no_client_has_the_audit_log_rotated_away() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("audit");
        let mut guarded = Guarded::new(Vendor, AuditLog::open(path.to_str().unwrap()).unwrap());
        let mut ask = async |role, method: &str, times: usize| {
            let peer = Peer { secured: true, ..Peer::default() };
            peer.identity.set(Identity::new("c", role, "n").unwrap()).unwrap();
            for _ in 0..times {
                let mut request = http::Request::new(Body::empty());
                *request.uri_mut() = format!("/cavern.master.v1.Cluster/{method}").parse().unwrap();
                request.extensions_mut().insert(peer.clone());
                guarded.call(request).await.unwrap();
            }
        };
        for _second in 0..2 {
            for method in ["VendKeys", "GetCredentials"] {
                ask(Role::Client, method, 50).await;
                ask(Role::Worker, method, 5).await;
            }
            ask(Role::Operator, "Mount", 50).await;
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        // Lines by who asked for what, and those that they say were left out.
        let mut told: BTreeMap<(String, String), (usize, u64)> = BTreeMap::new();
        for line in fs::read_to_string(&path).unwrap().lines() {
            let line: serde_json::Value = serde_json::from_str(line).unwrap();
            let text = |field: &str| line[field].as_str().unwrap().to_owned();
            let (lines, left_out) = told.entry((text("identity"), text("operation"))).or_default();
            *lines += 1;
            *left_out += line["suppressed"].as_u64().unwrap_or_default();
        }
        let told = |role: &str, operation: &str| told[&(format!("cavern://c/{role}/n"), operation.to_owned())];
        for method in ["VendKeys", "GetCredentials"] {
            assert_eq!(told("client", method), (20, 40), "{method}");
            assert_eq!(told("worker", method), (10, 0), "{method}");
        }
        assert_eq!(told("operator", "Mount"), (100, 0));
    }
}
