//! The beginning of a secured connection: its end for whoever is refused, and what went wrong in words.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use rustls::{AlertDescription, CertificateError, Connection, Error, OtherError};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsStream;
use tokio_util::sync::WaitForCancellationFutureOwned;

use crate::peers::PeerCertificate;

/// Whoever is refused gets so long to read why, and may send so much meanwhile.
const FAREWELL: Duration = Duration::from_secs(1);
const FAREWELL_BYTES: u64 = 256 << 10;

/// A connection over TLS, of either side, that ends when the certificate of the other one does not hold any more. That
/// the server refuses its certificate a client is told by the first read, in words.
#[derive(Debug)]
pub struct PeerStream {
    stream: TlsStream<TcpStream>,
    /// `None` where the other side has shown no certificate.
    shown: Option<Shown>,
}

#[derive(Debug)]
struct Shown {
    certificate: PeerCertificate,
    refused: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl PeerStream {
    pub(crate) fn new(stream: TlsStream<TcpStream>, certificate: Option<PeerCertificate>) -> Self {
        let shown = certificate.map(|certificate| Shown { refused: Box::pin(certificate.refusal()), certificate });
        Self { stream, shown }
    }

    /// What the other side has shown.
    ///
    /// # Errors
    /// It has shown nothing.
    pub fn certificate(&self) -> io::Result<&PeerCertificate> {
        let shown = self.shown.as_ref().map(|shown| &shown.certificate);
        shown.ok_or_else(|| io::Error::other("the other side has shown no certificate"))
    }

    /// The socket, and what is secured over it.
    ///
    /// # Errors
    /// As [`Self::certificate`].
    pub(crate) fn into_parts(self) -> io::Result<(TcpStream, Connection, PeerCertificate)> {
        let certificate = self.certificate()?.clone();
        let (stream, connection) = match self.stream {
            TlsStream::Client(stream) => {
                let (stream, connection) = stream.into_inner();
                (stream, connection.into())
            }
            TlsStream::Server(stream) => {
                let (stream, connection) = stream.into_inner();
                (stream, connection.into())
            }
        };
        Ok((stream, connection, certificate))
    }

    /// # Errors
    /// The certificate of the other side does not hold any more.
    fn check(&self) -> io::Result<()> {
        self.shown.as_ref().map_or(Ok(()), |shown| shown.certificate.check())
    }

    /// What waits for the socket waits for the end of the certificate as well.
    fn or_refused<T>(&mut self, cx: &mut Context<'_>, outcome: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if outcome.is_pending()
            && let Some(shown) = &mut self.shown
            && shown.refused.as_mut().poll(cx).is_ready()
        {
            shown.certificate.check()?;
        }
        outcome
    }
}

impl AsyncRead for PeerStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.check()?;
        let read = Pin::new(&mut this.stream).poll_read(cx, buffer);
        let read = if matches!(this.stream, TlsStream::Client(_)) { read.map_err(explained) } else { read };
        this.or_refused(cx, read)
    }
}

impl AsyncWrite for PeerStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.check()?;
        let written = Pin::new(&mut this.stream).poll_write(cx, bytes);
        this.or_refused(cx, written)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.check()?;
        let written = Pin::new(&mut this.stream).poll_write_vectored(cx, slices);
        this.or_refused(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.check()?;
        let flushed = Pin::new(&mut this.stream).poll_flush(cx);
        this.or_refused(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
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
