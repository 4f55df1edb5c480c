//! Accepting connections for gRPC, up to a bound, from peers that speak HTTP/2, over TLS where connections are secured.
//!
//! The library notices a peer that falls silent, by its pings, but only one that has said hello. Until then this does:
//! the handshake must be done, and the preface here, in time, or the connection is closed. A peer that opens
//! connections and says nothing has few of them, and not for long: when there are many, the oldest make way.
//!
//! A client that has shown its identity has so many connections at a time. Of one more the calls are refused, with the
//! reason, and it keeps its place among those of whom nothing is known.

use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use cavern_conf::backoff;
use cavern_conf::process::LogLimit;
use cavern_security::{HandshakeSlot, HandshakeSlots, PeerStream, Protocol, Tenants, Transport};
use futures::{Stream, stream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Sleep;
use tonic::transport::server::Connected;

use crate::service::{Peer, PeerAddress};

/// Connections at a time, if the limit of descriptors allows twice that; more are closed at once. Every client and
/// worker has a few.
const CONNECTIONS_MAX: u64 = 32_768;
/// Of those, connections whose peer has not shown yet who it is, or, in the clear, that it speaks HTTP/2; and those of
/// clients that have too many. The oldest make way for others.
const UNKNOWN_MAX: usize = 1024;
/// Bytes with which every HTTP/2 connection begins.
const PREFACE_BYTES: usize = 24;
/// How long they may take.
const PREFACE_TIMEOUT: Duration = Duration::from_secs(10);

/// Connections as they come. `descriptor_limit` is that of the process.
pub fn incoming(
    listener: TcpListener,
    transport: Transport,
    tenants: Tenants,
    descriptor_limit: u64,
) -> impl Stream<Item = Result<Incoming, Infallible>> {
    let places = usize::try_from((descriptor_limit / 2).clamp(1, CONNECTIONS_MAX)).unwrap_or(1);
    let unknown = HandshakeSlots::new(UNKNOWN_MAX.min(places.div_ceil(4)));
    let acceptor = Acceptor {
        listener,
        transport,
        tenants,
        places: Arc::new(Semaphore::new(places)),
        unknown,
        refusals: Arc::default(),
    };
    stream::unfold(acceptor, |acceptor| async move {
        let next = accept(&acceptor).await;
        Some((Ok(next), acceptor))
    })
}

/// Where connections come in.
struct Acceptor {
    listener: TcpListener,
    transport: Transport,
    tenants: Tenants,
    places: Arc<Semaphore>,
    unknown: HandshakeSlots,
    refusals: Arc<LogLimit<()>>,
}

async fn accept(acceptor: &Acceptor) -> Incoming {
    loop {
        let accepted = acceptor.listener.accept().await.and_then(|(stream, address)| {
            stream.set_nodelay(true)?;
            Ok((stream, address))
        });
        match accepted {
            Ok((stream, address)) => {
                // Whoever has to make way does so before long.
                let unknown = acceptor.unknown.take(address.ip());
                match acceptor.places.clone().try_acquire_owned() {
                    Ok(place) => return Incoming::new(stream, acceptor, (place, unknown), PREFACE_TIMEOUT),
                    Err(_) => tracing::debug!("too many connections: one more is closed"),
                }
            }
            Err(error) => {
                tracing::warn!("cannot accept a connection: {error}");
                tokio::time::sleep(backoff::ACCEPT.first).await;
            }
        }
    }
}

/// One connection, and its place among those that are allowed.
pub struct Incoming {
    wire: Wire,
    peer: Peer,
    /// While the preface is not complete: the bytes that are here, and the end of patience.
    silence: Option<(usize, Pin<Box<Sleep>>)>,
    tenants: Tenants,
    /// Until it is known who it is.
    unknown: Option<HandshakeSlot>,
    refusals: Arc<LogLimit<()>>,
    _place: OwnedSemaphorePermit,
}

type Handshake = Pin<Box<dyn Future<Output = io::Result<PeerStream>> + Send>>;

enum Wire {
    Plain(TcpStream),
    /// The handshake is not done.
    Accepting(Handshake),
    Tls(Box<PeerStream>),
    /// It has failed.
    Refused,
}

impl Incoming {
    fn new(
        stream: TcpStream,
        acceptor: &Acceptor,
        (place, unknown): (OwnedSemaphorePermit, HandshakeSlot),
        patience: Duration,
    ) -> Self {
        let Acceptor { transport, tenants, refusals, .. } = acceptor;
        let secured = matches!(transport, Transport::Tls(_));
        let address = PeerAddress(stream.peer_addr().ok());
        let wire = match transport {
            Transport::Plain => Wire::Plain(stream),
            Transport::Tls(tls) => {
                let tls = tls.clone();
                Wire::Accepting(Box::pin(async move { tls.accept(stream, Protocol::Grpc).await }))
            }
        };
        let peer = Peer { address, secured, ..Peer::default() };
        let silence = Some((0, Box::pin(tokio::time::sleep(patience))));
        Self {
            wire,
            peer,
            silence,
            tenants: tenants.clone(),
            unknown: Some(unknown),
            refusals: refusals.clone(),
            _place: place,
        }
    }

    /// The stream, when the handshake is done.
    fn poll_stream(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Pin<&mut (dyn Duplex + Unpin)>>> {
        if let Wire::Accepting(accept) = &mut self.wire {
            let Poll::Ready(shaken) = accept.as_mut().poll(cx) else { return self.poll_end(cx).map(Err) };
            let identified = shaken.and_then(|stream| Ok((stream.certificate()?.clone(), stream)));
            self.wire = match identified {
                Ok((certificate, stream)) => {
                    let identity = certificate.identity().clone();
                    // It is done once.
                    if let Some(tenant) = self.tenants.admit(&identity) {
                        match &tenant {
                            Ok(_) => self.unknown = None,
                            Err(reason) => tracing::debug!(peer = %self.peer.address, "a client is refused: {reason}"),
                        }
                        let _ = self.peer.tenant.set(tenant);
                    } else {
                        self.unknown = None;
                    }
                    let _ = self.peer.identity.set(identity);
                    let _ = self.peer.certificate.set(certificate);
                    Wire::Tls(Box::new(stream))
                }
                Err(error) => {
                    if let Some(suppressed) = self.refusals.admit(()) {
                        tracing::info!(peer = %self.peer.address, suppressed, "a connection is refused: {error}");
                    }
                    self.wire = Wire::Refused;
                    return Poll::Ready(Err(error));
                }
            };
        }
        let stream: &mut (dyn Duplex + Unpin) = match &mut self.wire {
            Wire::Plain(stream) => stream,
            Wire::Tls(stream) => stream,
            Wire::Accepting(_) | Wire::Refused => return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into())),
        };
        Poll::Ready(Ok(Pin::new(stream)))
    }

    /// Ready when the peer has said too little for too long, or has to make way for another.
    fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        if let Some((_, patience)) = &mut self.silence
            && patience.as_mut().poll(cx).is_ready()
        {
            let late = io::Error::new(io::ErrorKind::TimedOut, "the peer did not begin to speak HTTP/2");
            return Poll::Ready(late);
        }
        match &mut self.unknown {
            Some(place) => place.poll_displaced(cx).map(|()| io::Error::other("others came, and all places are taken")),
            None => Poll::Pending,
        }
    }
}

/// All of its calls have the peer among their extensions.
impl Connected for Incoming {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

/// Both directions.
trait Duplex: AsyncRead + AsyncWrite {}

impl<S: AsyncRead + AsyncWrite> Duplex for S {}

impl AsyncRead for Incoming {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = ready!(self.poll_stream(cx))?.poll_read(cx, buffer);
        if let Some((seen, _)) = &mut self.silence {
            *seen += buffer.filled().len() - before;
            if *seen >= PREFACE_BYTES {
                self.silence = None;
                if !self.peer.secured {
                    self.unknown = None;
                }
            }
        }
        if read.is_pending() { self.poll_end(cx).map(Err) } else { read }
    }
}

impl AsyncWrite for Incoming {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.poll_stream(cx))?.poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_stream(cx))?.poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        match &self.wire {
            Wire::Plain(stream) => stream.is_write_vectored(),
            // As TLS streams have it.
            _ => true,
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_stream(cx))?.poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.wire {
            // There is nothing to end in good order.
            Wire::Accepting(_) | Wire::Refused => Poll::Ready(Ok(())),
            _ => ready!(self.poll_stream(cx))?.poll_shutdown(cx),
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::StreamExt as _;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;
    use crate::service::tenants;

    fn nobody() -> Tenants {
        tenants(&cavern_conf::schema::Master::default())
    }

    #[tokio::test]
    async fn there_are_only_so_many_and_a_place_is_given_back() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut incoming = Box::pin(incoming(listener, Transport::Plain, nobody(), 2));
        let _first = TcpStream::connect(address).await.unwrap();
        let accepted = incoming.next().await.unwrap().unwrap();
        let mut second = TcpStream::connect(address).await.unwrap();
        let refused = async {
            assert_eq!(second.read(&mut [0; 1]).await.unwrap_or(0), 0, "closed without a word");
        };
        tokio::select! {
            _ = incoming.next() => panic!("there was no place"),
            () = refused => {}
        }
        drop(accepted);
        let _third = TcpStream::connect(address).await.unwrap();
        incoming.next().await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_peer_that_says_too_little_is_given_up_and_one_that_began_is_not() {
        for (said, ends) in [(0, true), (PREFACE_BYTES - 1, true), (PREFACE_BYTES, false)] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let mut peer = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let acceptor = Acceptor {
                listener,
                transport: Transport::Plain,
                tenants: nobody(),
                places: Arc::new(Semaphore::new(1)),
                unknown: HandshakeSlots::new(1),
                refusals: Arc::default(),
            };
            let patience = Duration::from_millis(200);
            let (stream, address) = acceptor.listener.accept().await.unwrap();
            let places = (acceptor.places.clone().try_acquire_owned().unwrap(), acceptor.unknown.take(address.ip()));
            let mut accepted = Incoming::new(stream, &acceptor, places, patience);
            peer.write_all(&vec![b'P'; said]).await.unwrap();
            let mut all = Vec::new();
            let read = tokio::time::timeout(patience * 5, accepted.read_to_end(&mut all)).await;
            match read {
                Ok(Err(error)) => assert!(ends && error.kind() == io::ErrorKind::TimedOut, "{said}: {error}"),
                Ok(Ok(_)) => panic!("{said}: nobody closed it"),
                Err(_) => assert!(!ends, "{said}: no end"),
            }
            assert_eq!(all.len(), said);
        }
    }
}
