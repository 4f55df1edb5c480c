//! Who may see the pages of an HTTP port.
//!
//! Where connections are secured the port speaks TLS, and nothing else. `/healthz` is for everybody, since supervisors
//! and load balancers have nothing to show; with `security.open_metrics` so is `/metrics`. Everything else, also what
//! is not there, is for whoever brings the token of `security.http_token`, or the certificate of a viewer, an operator
//! or an admin.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use cavern_conf::process::{LogLimit, Metrics};
use cavern_conf::schema;
use prometheus_client::metrics::counter::Counter;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use super::local::LocalGuard;
use super::token::TokenFile;
use super::{HEALTH, METRICS};
use crate::audit::{AuditLog, Audited};
use crate::error::SecurityError;
use crate::handshake::{PeerStream, take_leave};
use crate::identity::Identity;
use crate::transport::{Tls, Transport};

/// The first byte of a connection of TLS: a record of a handshake.
const HANDSHAKE: u8 = 22;
/// For whoever begins with anything else.
const IN_CLEAR: &str = "this port speaks TLS: ask for https://\n";
/// Bytes of a path that the audit log has.
const PATH_SHOWN: usize = 200;

/// Who may see the pages of an HTTP port. Cheap to clone.
#[derive(Clone, Debug)]
pub struct HttpAccess(pub(super) Access);

#[derive(Clone, Debug)]
pub(super) enum Access {
    Everybody,
    Local(Arc<LocalGuard>),
    Secured(Arc<Guard>),
}

#[derive(Debug)]
pub(super) struct Guard {
    tls: Arc<Tls>,
    token: Option<TokenFile>,
    open_metrics: bool,
    audit: AuditLog,
    refused: Counter,
    /// Who was refused.
    refusals: LogLimit<Option<Identity>>,
}

/// Who is at the other end of a connection.
#[derive(Clone, Debug)]
pub(super) struct Peer {
    pub address: SocketAddr,
    /// `None` for one that has shown no certificate.
    pub identity: Option<Identity>,
}

/// Why a page is not shown.
#[derive(Debug, thiserror::Error)]
enum Denial {
    #[error(
        "this page takes the token of security.http_token (Authorization: Bearer), or the certificate of a viewer, an \
         operator or an admin"
    )]
    Nothing,
    #[error("the token is not that of security.http_token")]
    WrongToken,
    #[error(
        "{0} may not see this page: it takes a certificate of the role viewer, operator or admin, or the token of \
         security.http_token"
    )]
    OtherRole(Identity),
}

impl HttpAccess {
    /// Everybody, in clear.
    pub fn open() -> Self {
        Self(Access::Everybody)
    }

    /// Programs of this host, in clear, that bring the token of a file (`Authorization: Bearer`) and are no page of a
    /// browser. The token is a new one, which only the owner of the file can read. *Blocking*.
    ///
    /// # Errors
    /// [`SecurityError::Unwritable`]
    pub fn local(token: &Path) -> Result<Self, SecurityError> {
        Ok(Self(Access::Local(Arc::new(LocalGuard::create(token)?))))
    }

    /// What `[security]` asks for. Refusals are in the audit log.
    ///
    /// # Errors
    /// The token's file cannot be used.
    pub fn of(security: &schema::Security, transport: &Transport, audit: &AuditLog) -> Result<Self, SecurityError> {
        let Transport::Tls(tls) = transport else { return Ok(Self::open()) };
        let path = Some(&security.http_token).filter(|path| !path.as_os_str().is_empty());
        Ok(Self(Access::Secured(Arc::new(Guard {
            tls: tls.clone(),
            token: path.map(|path| TokenFile::open(path)).transpose()?,
            open_metrics: security.open_metrics,
            audit: audit.clone(),
            refused: Counter::default(),
            refusals: LogLimit::default(),
        }))))
    }

    pub(super) fn register_metrics(&self, metrics: &Metrics) {
        let refused = match &self.0 {
            Access::Everybody => return,
            Access::Local(guard) => &guard.refused,
            Access::Secured(guard) => &guard.refused,
        };
        let help = "Requests at the HTTP port that were refused, and connections";
        metrics.register("http_requests_refused", help, refused.clone());
    }
}

impl Guard {
    /// Shakes hands. The caller bounds the time.
    pub async fn accept(&self, mut stream: TcpStream, address: SocketAddr) -> io::Result<(PeerStream, Peer)> {
        let mut first = [0];
        if stream.peek(&mut first).await? == 1 && first[0] != HANDSHAKE {
            let length = IN_CLEAR.len();
            let head = format!("HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: {length}\r\n");
            stream.write_all(format!("{head}Connection: close\r\n\r\n{IN_CLEAR}").as_bytes()).await?;
            take_leave(stream).await;
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it does not speak TLS"));
        }
        let stream = self.tls.accept_anybody(stream).await?;
        let identity = stream.certificate().ok().map(|certificate| certificate.identity().clone());
        Ok((stream, Peer { address, identity }))
    }

    /// A connection was not secured.
    pub fn count_connection(&self, address: SocketAddr, error: &io::Error) {
        self.refused.inc();
        if let Some(suppressed) = self.refusals.admit(None) {
            tracing::warn!(%address, suppressed, "an HTTP connection is refused: {error}");
        }
    }

    /// The answer to a request that is refused.
    pub fn refuse(&self, peer: &Peer, method: &Method, path: &str, headers: &HeaderMap) -> Option<Response> {
        let denial = self.check(peer.identity.as_ref(), path, headers).err()?;
        self.refused.inc();
        if let Some(suppressed) = self.refusals.admit(peer.identity.clone()) {
            let shown = path.char_indices().nth(PATH_SHOWN).map_or(path, |(end, _)| &path[..end]);
            tracing::warn!(address = %peer.address, suppressed, path = shown, "refused: {denial}");
            self.audit.record(Audited {
                identity: peer.identity.as_ref(),
                peer: &peer.address,
                operation: "Http",
                subject: &format!("{method} {shown}"),
                result: Err(&denial.to_string()),
                suppressed,
            });
        }
        Some(denial.into_response())
    }

    fn check(&self, identity: Option<&Identity>, path: &str, headers: &HeaderMap) -> Result<(), Denial> {
        if path == HEALTH || path == METRICS && self.open_metrics {
            return Ok(());
        }
        if identity.is_some_and(|identity| identity.role.is_of_person()) {
            return Ok(());
        }
        match (presented(headers), identity) {
            (Some(given), _) if self.token.as_ref().is_some_and(|token| token.is(given)) => Ok(()),
            (Some(_), _) => Err(Denial::WrongToken),
            (None, Some(identity)) => Err(Denial::OtherRole(identity.clone())),
            (None, None) => Err(Denial::Nothing),
        }
    }
}

/// The token of a request. What is said in another way is a wrong one.
pub(super) fn presented(headers: &HeaderMap) -> Option<&[u8]> {
    const SCHEME: &[u8] = b"bearer ";
    let mut said = headers.get_all(header::AUTHORIZATION).iter();
    let first = said.next()?.as_bytes();
    let is_bearer = first.get(..SCHEME.len()).is_some_and(|scheme| scheme.eq_ignore_ascii_case(SCHEME));
    Some(if is_bearer && said.next().is_none() { first[SCHEME.len()..].trim_ascii() } else { &[] })
}

impl IntoResponse for Denial {
    fn into_response(self) -> Response {
        let text = format!("{self}\n");
        let challenge = match self {
            Self::Nothing => "Bearer realm=\"cavern\"",
            Self::WrongToken => "Bearer realm=\"cavern\", error=\"invalid_token\"",
            Self::OtherRole(_) => return (StatusCode::FORBIDDEN, text).into_response(),
        };
        (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, challenge)], text).into_response()
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn a_token_is_said_in_one_way() {
        let headers = |said: &[&str]| {
            let mut headers = HeaderMap::new();
            for value in said {
                headers.append(header::AUTHORIZATION, HeaderValue::from_str(value).unwrap());
            }
            headers
        };
        assert_eq!(presented(&headers(&[])), None);
        for right in ["Bearer abc", "bearer abc", "BEARER  abc "] {
            assert_eq!(presented(&headers(&[right])), Some(&b"abc"[..]), "{right}");
        }
        for wrong in [&["Basic abc"][..], &["abc"], &["Bearer"], &[""], &["Bearer abc", "Bearer abc"]] {
            assert_eq!(presented(&headers(wrong)), Some(&b""[..]), "{wrong:?}");
        }
    }
}
