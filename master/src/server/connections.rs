//! Serving the connections that come in, each on the runtime that its peer deserves.

use std::pin::pin;
use std::time::Duration;

use futures::{Stream, StreamExt as _};
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::body::Body;
use tonic::codegen::Service as _;
use tonic::service::Routes;

use super::incoming::Incoming;
use crate::service::{LowPriorityThreads, PeerRuntime, PriorityRuntimes};

/// Connections that send nothing but must be alive are asked so often.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// Calls of one connection at a time.
const STREAMS_MAX: u32 = 1024;

/// Takes connections until it is stopped, and returns when all of them have ended.
pub async fn serve(
    incoming: impl Stream<Item = Incoming> + Send,
    routes: Routes,
    (runtimes, _until_the_end): (PriorityRuntimes, LowPriorityThreads),
    stop: CancellationToken,
) {
    let connections = TaskTracker::new();
    {
        // Nobody can connect any more when this has ended.
        let mut incoming = pin!(incoming);
        while let Some(Some(connection)) = stop.run_until_cancelled(incoming.next()).await {
            let runtime = runtimes.of_peer(connection.peer().clone());
            let serving = serve_connection(connection, routes.clone(), runtime.clone(), stop.clone());
            runtime.spawn(connections.track_future(serving));
        }
    }
    connections.close();
    connections.wait().await;
}

/// Answers the calls of a connection.
async fn serve_connection(connection: Incoming, routes: Routes, runtime: PeerRuntime, stop: CancellationToken) {
    let own = runtime.clone();
    let service = service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(own.peer().clone());
        request.extensions_mut().insert(own.clone());
        // The generated services are always ready.
        routes.clone().call(request)
    });
    let mut protocol = http2::Builder::new(runtime.clone());
    protocol.timer(TokioTimer::new()).keep_alive_interval(KEEPALIVE).max_concurrent_streams(STREAMS_MAX);
    let mut serving = pin!(protocol.serve_connection(TokioIo::new(connection), service));
    let served = tokio::select! {
        served = serving.as_mut() => served,
        () = stop.cancelled() => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    if let Err(error) = served {
        tracing::debug!(peer = %runtime.peer().address, "a connection has ended: {error}");
    }
}
