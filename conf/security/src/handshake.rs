//! The beginning of a secured connection: its end for whoever is refused, and what went wrong in words.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::certificate::CertificateInfo;
use crate::identity::Identity;
use crate::transport::Tls;
use rustls::{AlertDescription, CertificateError, ClientConnection, Error, OtherError};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

/// Whoever is refused gets so long to read why, and may send so much meanwhile.
const FAREWELL: Duration = Duration::from_secs(1);
const FAREWELL_BYTES: u64 = 256 << 10;

/// The connection of a client. That the server refuses its certificate it is told by the first read, in words.
#[derive(Debug)]
pub struct ClientStream(pub(crate) TlsStream<TcpStream>);

impl ClientStream {
    /// Who the server is.
    ///
    /// # Errors
    /// As [`Tls::peer`].
    pub fn peer(&self) -> io::Result<Identity> {
        Tls::peer(self.0.get_ref().1)
    }

    /// What the certificate of the server says.
    ///
    /// # Errors
    /// It has shown none that can be read.
    pub fn certificate(&self) -> io::Result<CertificateInfo> {
        let certificates = self.0.get_ref().1.peer_certificates();
        let first = certificates.and_then(|certificates| certificates.first());
        let first = first.ok_or_else(|| io::Error::other("the server has shown no certificate"))?;
        CertificateInfo::of(first).map_err(io::Error::other)
    }

    pub(crate) fn into_inner(self) -> (TcpStream, ClientConnection) {
        self.0.into_inner()
    }
}

impl AsyncRead for ClientStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buffer).map_err(explained)
    }
}

impl AsyncWrite for ClientStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

/// Closes a connection whose handshake has failed. The other side has been sent the reason: if it were closed with
/// bytes that nobody has read, the system would throw that away.
pub(crate) async fn take_leave(mut stream: TcpStream) {
    let leave = async {
        stream.shutdown().await?;
        tokio::io::copy(&mut (&mut stream).take(FAREWELL_BYTES), &mut tokio::io::sink()).await
    };
    // Whoever has gone needs no farewell.
    let _ = tokio::time::timeout(FAREWELL, leave).await;
}

/// An error of a handshake, or of what follows, in words that say what to do.
pub(crate) fn explained(error: io::Error) -> io::Error {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
        Some(inner) => failure(inner),
        None if error.kind() == io::ErrorKind::UnexpectedEof => {
            io::Error::new(error.kind(), "the other side closed the connection before it was secured")
        }
        None => error,
    }
}

pub(crate) fn failure(error: &Error) -> io::Error {
    use AlertDescription as Alert;
    let text = match error {
        Error::AlertReceived(
            alert @ (Alert::CertificateRequired
            | Alert::BadCertificate
            | Alert::UnsupportedCertificate
            | Alert::CertificateRevoked
            | Alert::CertificateExpired
            | Alert::CertificateUnknown
            | Alert::UnknownCA
            // Of an authority that has the name of the right one, and another key.
            | Alert::DecryptError
            | Alert::AccessDenied),
        ) => format!(
            "the other side refuses the certificate of this process ({alert:?}): see what `cv cert show` says of \
             security.certificate, and the log of the other side"
        ),
        Error::AlertReceived(Alert::NoApplicationProtocol) | Error::NoApplicationProtocol => {
            "the other side speaks another protocol (ALPN): is it the port that was meant, of the same version of cv?"
                .to_owned()
        }
        Error::AlertReceived(alert) => format!("the other side ended the connection ({alert:?})"),
        Error::InvalidCertificate(CertificateError::Other(OtherError(reason))) => {
            format!("the certificate of the other side is refused: {reason}")
        }
        Error::InvalidCertificate(reason) => format!("the certificate of the other side is refused: {reason}"),
        Error::NoCertificatesPresented => "the other side shows no certificate".to_owned(),
        Error::InvalidMessage(_) => {
            "the other side does not speak TLS: has it a [security] section in its configuration?".to_owned()
        }
        Error::DecryptError => "what arrived was changed on its way".to_owned(),
        other => other.to_string(),
    };
    io::Error::new(io::ErrorKind::InvalidData, text)
}
