//! The HTTP port of a process: `/metrics` and `/healthz`, and what routes the process itself adds, for whom
//! [`HttpAccess`] lets in.
//!
//! Connections are bounded in number and in the time that they may take to send a request; when there are as many as
//! there may be, an old one makes way for a new one ([`HandshakeSlots`]), so that peers that send garbage or nothing
//! keep no health check out.

mod access;
mod local;
mod token;

use std::net::SocketAddr;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::{HeaderMap, Request, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use cavern_conf::process::{Metrics, MetricsFormat, ProcessError, bind_tcp, serve_connections, warn_if_others_reach};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use access::Access;

use crate::handshake_slots::HandshakeSlots;

pub use access::HttpAccess;
pub(crate) use token::TokenFile;

/// The pages that every process has.
const METRICS: &str = "/metrics";
const HEALTH: &str = "/healthz";
/// The setting that an address comes from.
const KEY: &str = "http_listen";
/// Connections at a time; for more the oldest make way.
const MAX_CONNECTIONS: usize = 256;
/// For a handshake, and from one request to the end of the next one's header.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);
/// What requests in flight get when the process stops.
const DRAIN: Duration = Duration::from_secs(2);

/// A bound HTTP port that does not serve yet.
#[derive(Debug)]
pub struct HttpServer {
    listener: TcpListener,
    address: SocketAddr,
}

impl HttpServer {
    /// Binds `listen` (host:port; port 0 takes a free one).
    ///
    /// # Errors
    /// As [`bind_tcp`], naming the key `http_listen`.
    pub async fn bind(listen: &str) -> Result<Self, ProcessError> {
        let listener = bind_tcp(listen, KEY).await?;
        let address = listener.local_addr().map_err(|source| ProcessError::Bind {
            address: listen.to_owned(),
            key: KEY.to_owned(),
            source,
        })?;
        Ok(Self { listener, address })
    }

    /// The server of a port that was bound before.
    ///
    /// # Errors
    /// The descriptor is no socket that listens.
    pub fn of(listener: OwnedFd) -> std::io::Result<Self> {
        let listener = std::net::TcpListener::from(listener);
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Ok(Self { listener: TcpListener::from_std(listener)?, address })
    }

    /// The socket, for a process that goes on after this one.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// Where the server listens, with the true port.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Serves whom `access` lets in until `stop`, then lets requests in flight finish for at most two seconds, and
    /// returns.
    ///
    /// `/metrics` prints `metrics` in the form that is asked for; `/healthz` answers 200 with `{"status":"ok"}`, or 503
    /// with `{"status":"failing","reason":…}` when `health` returns a reason. `health` is called on an async thread: it
    /// must not block. `router` must not define these two paths itself.
    pub async fn serve(
        self,
        access: HttpAccess,
        router: Router,
        metrics: Arc<Metrics>,
        health: impl Fn() -> Result<(), String> + Send + Sync + 'static,
        stop: CancellationToken,
    ) {
        if matches!(access.0, Access::Everybody) {
            warn_if_others_reach(self.address, KEY);
        }
        access.register_metrics(&metrics);
        let health = Arc::new(health);
        let router = router
            .route(METRICS, get(move |headers: HeaderMap| std::future::ready(metrics_page(&metrics, &headers))))
            .route(HEALTH, get(move || std::future::ready(health_page(health()))));
        // More are not kept waiting: the oldest make way.
        let (places, stopping) = (HandshakeSlots::new(MAX_CONNECTIONS), stop.clone());
        let serve = move |stream: TcpStream, peer: SocketAddr| {
            let (router, stop) = (router.clone(), stopping.clone());
            let (mut place, access) = (places.take(peer.ip()), access.0.clone());
            async move {
                tokio::select! {
                    () = serve_connection(stream, peer, access, router, stop) => {}
                    () = place.displaced() => tracing::debug!(%peer, "an HTTP connection makes way"),
                }
            }
        };
        serve_connections(self.listener, usize::MAX, DRAIN, &stop, serve).await;
    }
}

async fn serve_connection(
    stream: TcpStream,
    address: SocketAddr,
    access: Access,
    router: Router,
    stop: CancellationToken,
) {
    let guard = match access {
        Access::Everybody => return exchange(stream, |_| None, router, stop).await,
        Access::Local(guard) => {
            let port = stream.local_addr().map_or(0, |address| address.port());
            let refuse = move |request: &Request<Incoming>| guard.refuse(port, request.uri().path(), request.headers());
            return exchange(stream, refuse, router, stop).await;
        }
        Access::Secured(guard) => guard,
    };
    let late = |_| std::io::Error::new(std::io::ErrorKind::TimedOut, "it has not been secured in time");
    let accept = async { tokio::time::timeout(HEADER_TIMEOUT, guard.accept(stream, address)).await.map_err(late)? };
    match stop.run_until_cancelled(accept).await {
        Some(Ok((stream, peer))) => {
            let refuse = move |request: &Request<Incoming>| {
                guard.refuse(&peer, request.method(), request.uri().path(), request.headers())
            };
            exchange(stream, refuse, router, stop).await;
        }
        Some(Err(error)) => guard.count_connection(address, &error),
        None => {}
    }
}

/// Answers the requests of a connection. `refuse` has the answer to one whose page is not shown.
async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    refuse: impl Fn(&Request<Incoming>) -> Option<Response>,
    router: Router,
    stop: CancellationToken,
) {
    let pages = TowerToHyperService::new(router);
    let service = service_fn(move |request: Request<Incoming>| {
        let refusal = refuse(&request);
        let pages = pages.clone();
        async move {
            match refusal {
                Some(refusal) => Ok(refusal),
                None => pages.call(request).await,
            }
        }
    });
    let mut protocol = http1::Builder::new();
    protocol.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT);
    let connection = protocol.serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    let result = tokio::select! {
        result = connection.as_mut() => result,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        tracing::debug!(%error, "an HTTP connection ended early");
    }
}

fn metrics_page(metrics: &Metrics, headers: &HeaderMap) -> Response {
    let accept: Vec<&str> = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok()).collect();
    let format = MetricsFormat::accepted(&accept.join(","));
    match metrics.page(format) {
        Ok(page) => ([(header::CONTENT_TYPE, format.content_type())], page).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("cannot print the metrics: {error}")).into_response(),
    }
}

fn health_page(health: Result<(), String>) -> Response {
    let (status, body) = match health {
        Ok(()) => (StatusCode::OK, serde_json::json!({ "status": "ok" })),
        Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, serde_json::json!({ "status": "failing", "reason": reason })),
    };
    (status, [(header::CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);

    async fn say(address: SocketAddr, request: &[u8]) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(request).await.unwrap();
        let mut reply = Vec::new();
        tokio::time::timeout(PATIENCE, stream.read_to_end(&mut reply)).await.unwrap().unwrap();
        String::from_utf8(reply).unwrap()
    }

    const CLOSE: &str = "Connection: close\r\n\r\n";

    async fn fetch(address: SocketAddr, path: &str) -> String {
        say(address, format!("GET {path} HTTP/1.1\r\nHost: x\r\n{CLOSE}").as_bytes()).await
    }

    #[tokio::test]
    async fn pages_health_and_an_orderly_end() {
        let server = HttpServer::bind("127.0.0.1:0").await.unwrap();
        let address = server.local_addr();
        let stop = CancellationToken::new();
        let healthy = Arc::new(AtomicBool::new(true));
        let seen = healthy.clone();
        let health = move || if seen.load(Ordering::Relaxed) { Ok(()) } else { Err("disk \"a\" lost".to_owned()) };
        let extra = Router::new().route("/extra", get(|| std::future::ready("here")));
        let task = tokio::spawn(server.serve(HttpAccess::open(), extra, Metrics::new("test"), health, stop.clone()));

        let metrics = fetch(address, "/metrics").await;
        assert!(metrics.starts_with("HTTP/1.1 200") && metrics.contains("text/plain; version=0.0.4"), "{metrics}");
        assert!(metrics.contains("# TYPE process_cpu_seconds_total counter\n") && !metrics.contains("# EOF"));
        let accept = "Accept: text/plain;q=0.5\r\nAccept: application/openmetrics-text;version=1.0.0\r\n";
        let metrics = say(address, format!("GET /metrics HTTP/1.1\r\nHost: x\r\n{accept}{CLOSE}").as_bytes()).await;
        assert!(metrics.contains("application/openmetrics-text; version=1.0.0"), "{metrics}");
        assert!(metrics.contains("# UNIT process_cpu_seconds seconds\n") && metrics.ends_with("# EOF\n"), "{metrics}");
        assert!(fetch(address, "/extra").await.ends_with("here"));
        assert!(fetch(address, "/nowhere").await.starts_with("HTTP/1.1 404"));
        assert!(fetch(address, "/healthz").await.starts_with("HTTP/1.1 200"));
        healthy.store(false, Ordering::Relaxed);
        let failing = fetch(address, "/healthz").await;
        assert!(failing.starts_with("HTTP/1.1 503") && failing.contains(r#""reason":"disk \"a\" lost""#), "{failing}");

        // Garbage is answered or cut off, and a connection that says nothing does not hold the end up.
        assert!(say(address, b"\x16\x03\x01\x02\x00 nonsense\r\n\r\n").await.starts_with("HTTP/1.1 400"));
        let silent = TcpStream::connect(address).await.unwrap();
        stop.cancel();
        tokio::time::timeout(PATIENCE, task).await.unwrap().unwrap();
        drop(silent);
        assert!(TcpStream::connect(address).await.is_err());
    }

    #[tokio::test]
    async fn connections_that_say_nothing_keep_nobody_out() {
        let server = HttpServer::bind("127.0.0.1:0").await.unwrap();
        let (address, stop) = (server.local_addr(), CancellationToken::new());
        let serving = server.serve(HttpAccess::open(), Router::new(), Metrics::new("test"), || Ok(()), stop.clone());
        let task = tokio::spawn(serving);
        let mut silent = Vec::new();
        for _ in 0..2 * MAX_CONNECTIONS {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(b"GET /healthz HTTP/1.1\r\n").await.unwrap();
            silent.push(stream);
        }
        let answered = tokio::time::timeout(HEADER_TIMEOUT / 2, fetch(address, "/healthz")).await;
        assert!(answered.expect("nobody has answered").starts_with("HTTP/1.1 200"));
        stop.cancel();
        tokio::time::timeout(PATIENCE, task).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_taken_port_is_refused() {
        let server = HttpServer::bind("127.0.0.1:0").await.unwrap();
        let error = HttpServer::bind(&server.local_addr().to_string()).await.unwrap_err();
        assert!(matches!(error, ProcessError::AddressInUse { .. }), "{error}");
        assert!(error.to_string().contains("http_listen"));
    }
}
