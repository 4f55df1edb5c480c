//! The listener and its connections.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cavern_conf::process::{self, Metrics, bind_open_tcp};
use cavern_security::{HttpAccess, HttpServer};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use s3s::service::S3ServiceBuilder;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::config::DevS3Config;
use crate::error::DevS3Error;
use crate::faults::FaultPlane;
use crate::request_log::RequestLog;
use crate::service::{Backend, on_blocking_thread};
use crate::shared::Shared;
use crate::stats::{Stats, StatsSnapshot};
use crate::store::Store;
use crate::sts::Keys;
use crate::{admin, exchange};

/// Connections at a time; more wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 4096;
/// From accepting a connection, or the end of an answer, to the end of the next request's header.
const HEADER_TIMEOUT: Duration = Duration::from_secs(120);
/// What requests in flight get when the store stops.
const DRAIN: Duration = Duration::from_secs(5);

/// Starts stores.
pub struct DevS3;

/// A store that runs in this process. Dropping it stops it without waiting.
pub struct Running {
    addr: SocketAddr,
    admin_addr: Option<SocketAddr>,
    shared: Arc<Shared>,
    stop: DropGuard,
    tasks: Vec<JoinHandle<()>>,
}

impl DevS3 {
    /// Reads what is under the root, binds the ports and serves.
    ///
    /// # Errors
    /// [`DevS3Error::Process`] where a port is taken, [`DevS3Error::AdminReach`], [`DevS3Error::RootInUse`],
    /// [`DevS3Error::InvalidFault`], [`DevS3Error::Security`], [`DevS3Error::Io`].
    pub async fn start(config: DevS3Config) -> Result<Running, DevS3Error> {
        let listener = bind_open_tcp(&config.listen, "--listen").await?;
        let addr = listener.local_addr().map_err(DevS3Error::io("bind", config.listen.as_ref()))?;
        let admin = match &config.admin_listen {
            Some(listen) => {
                let server = HttpServer::bind(listen).await?;
                if !server.local_addr().ip().is_loopback() {
                    return Err(DevS3Error::AdminReach(listen.clone()));
                }
                Some(server)
            }
            None => None,
        };
        let (root, has_admin) = (config.root, admin.is_some());
        let (store, access) = on_blocking_thread(move || {
            let store = Arc::new(Store::open(&root)?);
            let access = has_admin.then(|| HttpAccess::local(&root.join(admin::TOKEN))).transpose()?;
            Ok((store, access))
        })
        .await?;
        let mut builder = S3ServiceBuilder::new(Backend { store: Arc::clone(&store) });
        let keys = Keys::new(config.access_key, config.secret_key, Arc::clone(&store));
        builder.set_auth(keys.clone());
        builder.set_access(keys.clone());
        builder.set_route(keys.clone());
        let shared = Arc::new(Shared {
            store,
            stats: Stats::default(),
            faults: FaultPlane::default(),
            log: config.request_log.as_deref().map(RequestLog::open).transpose()?,
            s3: builder.build(),
            keys,
        });
        let stop = CancellationToken::new();
        let (served, stopped) = (Arc::clone(&shared), stop.clone());
        let mut tasks = vec![tokio::spawn(async move {
            let serve = |stream: TcpStream, _: SocketAddr| serve(stream, Arc::clone(&served), stopped.clone());
            process::serve_connections(listener, MAX_CONNECTIONS, DRAIN, &stopped, serve).await;
        })];
        let admin_addr = admin.as_ref().map(HttpServer::local_addr);
        if let Some((admin, access)) = admin.zip(access) {
            let metrics = Metrics::new("dev-s3");
            admin::register(&metrics, &shared);
            let router = admin::router(Arc::clone(&shared));
            tasks.push(tokio::spawn(admin.serve(access, router, metrics, || Ok(()), stop.clone())));
        }
        Ok(Running { addr, admin_addr, shared, stop: stop.drop_guard(), tasks })
    }
}

impl Running {
    /// Address of the S3 port.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Address of the port for counters and faults.
    pub fn admin_addr(&self) -> Option<SocketAddr> {
        self.admin_addr
    }

    /// The S3 endpoint, as `http://127.0.0.1:9000`.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Buckets and objects, past the protocol: nothing done here is counted.
    pub fn store(&self) -> &Arc<Store> {
        &self.shared.store
    }

    /// Fault rules.
    pub fn faults(&self) -> &FaultPlane {
        &self.shared.faults
    }

    /// Sessions that begin from now on live for so many seconds at most, whatever they are asked for.
    pub fn set_session_life(&self, seconds: u64) {
        self.shared.keys.set_life_max(seconds);
    }

    /// Requests and bytes so far.
    pub fn stats(&self) -> StatsSnapshot {
        self.shared.stats.snapshot()
    }

    /// Sets the counters to 0.
    pub fn reset_stats(&self) {
        self.shared.stats.reset();
    }

    /// Stops: no more requests are taken, those in flight get five seconds, those that hang are let go.
    pub async fn stop(self) {
        drop(self.stop);
        for task in self.tasks {
            if let Err(error) = task.await {
                tracing::error!(%error, "a task of the object store failed");
            }
        }
    }
}

/// Serves one connection until the client closes it, a fault ends it, or the store stops.
async fn serve(stream: TcpStream, shared: Arc<Shared>, stop: CancellationToken) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "cannot set TCP_NODELAY");
    }
    let reset = Arc::new(AtomicBool::new(false));
    let service = service_fn(|request| {
        Box::pin(exchange::answer(Arc::clone(&shared), request, Arc::clone(&reset), stop.clone()))
    });
    let mut connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service);
    let mut stopping = false;
    let result = loop {
        tokio::select! {
            result = poll_fn(|context| connection.poll_without_shutdown(context)) => break result,
            () = stop.cancelled(), if !stopping => {
                stopping = true;
                std::pin::Pin::new(&mut connection).graceful_shutdown();
            }
        }
    };
    if let Err(error) = result {
        tracing::debug!(%error, "a connection ended early");
    }
    let mut stream = connection.into_parts().io.into_inner();
    if reset.load(Ordering::Relaxed) {
        // Closing a socket with a linger time of zero sends RST.
        let _ = stream.set_zero_linger();
    } else {
        let _ = stream.shutdown().await;
    }
}
