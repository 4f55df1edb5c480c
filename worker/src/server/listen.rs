//! Accepting connections, TCP and Unix alike, up to a bound, and finding out who is at their other ends.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use cavern_conf::backoff;
use cavern_net::Socket;
use cavern_security::{HandshakeSlot, HandshakeSlots, TenantConnection, TlsSocket, Transport};
use tokio::net::{TcpListener, UnixListener};
use tokio::task::JoinSet;
use tracing::warn;

use super::connection::{Connection, FRAME_TIMEOUT, Shared};
use super::cores::{CoreSlot, Cores};
use super::limits;
use super::outgoing::Outgoing;
use super::pacing::Pacing;
use super::roles::Peer;
use crate::local_peers::LocalPeers;

/// Connections at a time; more are closed at once, and their clients go to another worker.
const MAX_CONNECTIONS: usize = 4096;
/// Of those, connections whose handshake is not done: the oldest make way for others.
const MAX_HANDSHAKES: usize = 512;
/// What connections get to end in when the worker stops, beyond their own patience.
const END_TIMEOUT: Duration = Duration::from_secs(6);

/// Accepts and serves until the worker stops; then waits for the connections to end.
pub(super) async fn accept(
    tcp: TcpListener,
    unix: Option<(UnixListener, LocalPeers)>,
    shared: Arc<Shared>,
    cores: Arc<Cores>,
) {
    let mut connections = JoinSet::new();
    let metrics = shared.service.parts.metrics.clone();
    let handshakes = HandshakeSlots::new(MAX_HANDSHAKES);
    let is_secured = matches!(shared.admission.transport, Transport::Tls(_));
    loop {
        let accepted = tokio::select! {
            () = shared.stop.cancelled() => break,
            Some(_) = connections.join_next() => {
                metrics.connections.set(connections.len() as i64);
                continue;
            }
            accepted = tcp.accept() => accepted.and_then(|(stream, address)| {
                stream.set_nodelay(true)?;
                Ok((Socket::Tcp(stream), is_secured.then(|| address.ip())))
            }),
            accepted = accept_local(unix.as_ref()) => accepted.map(|stream| (stream, None)),
        };
        match accepted {
            Ok(_) if connections.len() >= MAX_CONNECTIONS => metrics.connections_refused.inc(),
            Ok((Socket::Unix(stream), _)) if !unix.as_ref().is_some_and(|(_, peers)| peers.admits(&stream)) => {
                metrics.connections_refused.inc()
            }
            Ok((socket, unknown)) => {
                let place = unknown.map(|address| handshakes.take(address));
                let slot = cores.slot();
                let runtime = slot.runtime();
                connections.spawn_on(serve(socket, place, shared.clone(), slot), &runtime);
                metrics.connections.set(connections.len() as i64);
                continue;
            }
            Err(error) => {
                warn!(%error, "cannot accept a connection");
                tokio::time::sleep(backoff::ACCEPT.first).await;
                continue;
            }
        };
    }
    drop((tcp, unix));
    let ended = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(END_TIMEOUT, ended).await.is_err() {
        connections.shutdown().await;
    }
}

/// Accepts a client of this host; never, where none are served.
async fn accept_local(unix: Option<&(UnixListener, LocalPeers)>) -> io::Result<Socket> {
    match unix {
        Some((listener, _)) => listener.accept().await.map(|(stream, _)| Socket::Unix(stream)),
        None => std::future::pending().await,
    }
}

/// Serves a connection on the thread of its slot, once it is known who is at the other end.
async fn serve(socket: Socket, place: Option<HandshakeSlot>, shared: Arc<Shared>, slot: CoreSlot) {
    let from = socket.peer();
    match shared.stop.run_until_cancelled(admitted(socket, place, &shared)).await {
        Some(Ok((socket, peer, tenant))) => {
            Connection::new(socket, (peer, from), Pacing::new(tenant), shared, slot).serve().await;
        }
        Some(Err(error)) => {
            shared.service.parts.metrics.connections_refused.inc();
            if let Some(suppressed) = shared.refused_connections.admit(()) {
                warn!(from, suppressed, "a connection is refused: {error}");
            }
        }
        None => {}
    }
}

/// Finds out who it is, and whether he may have one more connection, as long as it has its place among those of whom
/// nothing is known.
async fn admitted(
    socket: Socket,
    place: Option<HandshakeSlot>,
    shared: &Shared,
) -> io::Result<(Socket, Peer, Option<TenantConnection>)> {
    let Some(mut place) = place else {
        let (socket, peer) = secured(socket, &shared.admission.transport).await?;
        return Ok((socket, peer, None));
    };
    let admit = async {
        let (socket, peer) = secured(socket, &shared.admission.transport).await?;
        match peer.identity().and_then(|identity| shared.admission.tenants.admit(identity)).transpose() {
            Ok(tenant) => Ok((socket, peer, tenant)),
            Err(reason) => {
                let outgoing = Outgoing::new(shared.service.spares.clone());
                limits::turn_away(&socket, outgoing, &reason).await;
                Err(io::Error::other(reason))
            }
        }
    };
    tokio::select! {
        admitted = admit => admitted,
        () = place.displaced() => {
            Err(io::Error::other("others came before it had shown who it is, and all places are taken"))
        }
    }
}

/// Shakes hands, where connections are secured.
async fn secured(socket: Socket, transport: &Transport) -> io::Result<(Socket, Peer)> {
    match (socket.into_current_runtime()?, transport) {
        (Socket::Tcp(stream), Transport::Tls(tls)) => {
            let late = |_| io::Error::new(io::ErrorKind::TimedOut, "it has not been secured in time");
            let socket = tokio::time::timeout(FRAME_TIMEOUT, TlsSocket::accept(tls, stream)).await.map_err(late)??;
            let peer = Peer::Known(socket.peer().clone());
            Ok((Socket::Tls(Box::new(socket)), peer))
        }
        (socket, Transport::Tls(_)) => Ok((socket, Peer::SameHost)),
        (socket, Transport::Plain) => Ok((socket, Peer::Anybody)),
    }
}
