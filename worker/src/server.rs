//! The data plane: frames of `cavern_proto::frame` over TCP, with TLS where the configuration has it, and over a Unix
//! socket with descriptors.

mod block_access;
mod connection;
mod cores;
mod frame_buffer;
mod inspect;
mod limits;
mod listen;
mod outgoing;
mod pacing;
mod requests;
mod roles;
mod upload;
mod writes;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cavern_conf::process::LogLimit;
use cavern_proto::data::{Evicted, evicted};
use cavern_proto::frame::{FrameKind, encode_frame};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{broadcast, mpsc};
use tokio_util::sync::CancellationToken;

pub use self::connection::Admission;
use self::connection::Shared;
pub use self::cores::Cores;
pub use self::limits::tenants;
pub use self::requests::Service;
use crate::error::WorkerError;
use crate::local_peers::{LocalPeers, bind_unix};
use crate::store::Eviction;

/// Notices about evictions that a slow connection may miss without falling behind.
const EVICTION_FRAMES: usize = 64;
/// Evictions are gathered for this long, so that a burst of them is one frame.
const EVICTION_DELAY: Duration = Duration::from_millis(50);
/// Blocks in one such frame at most.
const EVICTIONS_PER_FRAME: usize = 4096;

/// The data plane of a worker, bound and not serving yet.
#[derive(Debug)]
pub struct Server {
    tcp: TcpListener,
    address: SocketAddr,
    /// For clients of this host, with those that may connect.
    unix: Option<(UnixListener, LocalPeers)>,
    socket_path: PathBuf,
}

impl Server {
    /// Binds the TCP port and the Unix socket; a socket file that nobody serves is replaced. Where no clients of this
    /// host are to be handed files, there are no `peers`, and nothing is at the path of the socket.
    ///
    /// # Errors
    /// Either is taken or not allowed, or the socket's path is too long for the kernel.
    pub async fn bind(listen: &str, socket: &Path, peers: Option<LocalPeers>) -> Result<Self, WorkerError> {
        let tcp = cavern_conf::process::bind_tcp(listen, "worker.listen").await?;
        let address = tcp.local_addr().map_err(|source| WorkerError::Listen { address: listen.to_owned(), source })?;
        let unix = bind_unix(socket, peers.unwrap_or_default()).await?;
        let unix = peers.map(|peers| (unix, peers));
        if unix.is_none() {
            // Clients would try again and again.
            let _ = std::fs::remove_file(socket);
        }
        Ok(Self { tcp, address, unix, socket_path: socket.to_owned() })
    }

    /// Where TCP clients are served, with the true port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where clients of this host are served, if they are.
    pub fn socket_path(&self) -> &Path {
        &self.socket_path
    }

    /// Serves on these threads, which are to outlive what they have begun, until `stop`; then answers what is in
    /// flight, for a few seconds at most, and returns. The socket file is removed. `evictions` is what the store says
    /// about evicted blocks.
    pub async fn serve(
        self,
        service: Arc<Service>,
        admission: Admission,
        evictions: mpsc::Receiver<Eviction>,
        cores: Arc<Cores>,
        stop: CancellationToken,
    ) {
        let (frames, _) = broadcast::channel(EVICTION_FRAMES);
        let shared = Arc::new(Shared {
            service,
            admission,
            refusals: LogLimit::default(),
            refused_connections: LogLimit::default(),
            evictions: frames.clone(),
            stop: stop.clone(),
        });
        tokio::join!(
            listen::accept(self.tcp, self.unix, shared, cores),
            stop.run_until_cancelled(broadcast_evictions(evictions, frames)),
        );
        // Nobody else could have bound it meanwhile: binding replaces only what nobody serves.
        let _ = std::fs::remove_file(&self.socket_path);
    }
}

/// Makes frames of what the store evicted.
async fn broadcast_evictions(mut evictions: mpsc::Receiver<Eviction>, frames: broadcast::Sender<Bytes>) {
    let mut batch = Vec::new();
    while evictions.recv_many(&mut batch, EVICTIONS_PER_FRAME).await > 0 {
        tokio::time::sleep(EVICTION_DELAY).await;
        while batch.len() < EVICTIONS_PER_FRAME
            && let Ok(more) = evictions.try_recv()
        {
            batch.push(more);
        }
        let blocks = batch.drain(..).map(|eviction| evicted::Block {
            content_id: Bytes::copy_from_slice(eviction.id.content.as_bytes()),
            index: eviction.id.index,
            incarnation: eviction.incarnation,
        });
        let frame = encode_frame(FrameKind::Evicted, 0, &Evicted { blocks: blocks.collect() }, 0);
        // Without connections there is no client to notify.
        let _ = frames.send(frame.into());
    }
}

#[cfg(test)]
mod bench;
#[cfg(test)]
mod tests;
