//! Channels to masters: in the clear, or over TLS to whoever shows that it is one.

use std::io;
use std::sync::Arc;

use cavern_security::{ClientStream, Role, Tls, Transport};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tonic::transport::{Channel, Endpoint, Error, Uri};
use tower::service_fn;

/// A channel that connects when it is first used, and again when it breaks.
pub fn channel(endpoint: &Endpoint, transport: &Transport) -> Channel {
    match transport {
        Transport::Plain => endpoint.connect_lazy(),
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
        Transport::Plain => endpoint.connect().await,
        Transport::Tls(tls) => {
            let tls = tls.clone();
            endpoint.connect_with_connector(service_fn(move |uri| connect(tls.clone(), uri))).await
        }
    }
}

async fn connect(tls: Arc<Tls>, uri: Uri) -> io::Result<TokioIo<ClientStream>> {
    let address = uri.authority().ok_or_else(|| io::Error::other("an address without a host"))?;
    let stream = TcpStream::connect(address.as_str()).await?;
    stream.set_nodelay(true)?;
    Ok(TokioIo::new(tls.connect(stream, Role::Master).await?))
}
