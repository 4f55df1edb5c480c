//! Channels to masters: in the clear, or over TLS to whoever shows that it is one.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use cavern_security::{PeerStream, Role, Tls, Transport};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, Join, ReadBuf};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tonic::transport::{Channel, Endpoint, Error, Uri};
use tower::service_fn;

use crate::error::TLS_ALERT;

/// A channel that connects when it is first used, and again when it breaks.
pub fn channel(endpoint: &Endpoint, transport: &Transport) -> Channel {
    match transport {
        Transport::Plain => endpoint.connect_with_connector_lazy(service_fn(connect_plain)),
        Transport::Tls(tls) => {
            let tls = tls.clone();
            endpoint.connect_with_connector_lazy(service_fn(move |uri| connect(tls.clone(), uri)))
        }
    }
}

/// A channel that is connected.
///
/// # Errors
/// Those of the connection; with TLS also what either side finds wrong with the other's certificate.
pub async fn connected(endpoint: &Endpoint, transport: &Transport) -> Result<Channel, Error> {
    match transport {
        Transport::Plain => endpoint.connect_with_connector(service_fn(connect_plain)).await,
        Transport::Tls(tls) => {
            let tls = tls.clone();
            endpoint.connect_with_connector(service_fn(move |uri| connect(tls.clone(), uri))).await
        }
    }
}

async fn connect(tls: Arc<Tls>, uri: Uri) -> io::Result<TokioIo<PeerStream>> {
    Ok(TokioIo::new(tls.connect(dial(&uri).await?, Role::Master).await?))
}

async fn connect_plain(uri: Uri) -> io::Result<TokioIo<Join<PlainReader, OwnedWriteHalf>>> {
    let (stream, writer) = dial(&uri).await?.into_split();
    Ok(TokioIo::new(tokio::io::join(PlainReader { stream, has_begun: false }, writer)))
}

async fn dial(uri: &Uri) -> io::Result<TcpStream> {
    let address = uri.authority().ok_or_else(|| io::Error::other("an address without a host"))?;
    let stream = TcpStream::connect(address.as_str()).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// What comes over a connection in the clear. A master that wants TLS says so by its first byte, with which no frame of
/// HTTP/2 begins that it may send; the error says it in words.
#[derive(Debug)]
struct PlainReader {
    stream: OwnedReadHalf,
    /// Something has been read.
    has_begun: bool,
}

impl AsyncRead for PlainReader {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buffer))?;
        if !std::mem::replace(&mut self.has_begun, true) && buffer.filled().get(before) == Some(&TLS_ALERT) {
            let text = "the master speaks TLS: is [security] missing in the configuration here?";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, text)));
        }
        Poll::Ready(Ok(()))
    }
}
