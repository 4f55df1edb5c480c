//! HTTP for the S3 requests: the connections of a store. GETs of objects have connections of their own
//! ([`super::connections`]).
//!
//! It sends a URI as it is. The usual client library normalizes URLs, which turns the key `a/../b` into `b`; here every
//! key reaches the server byte for byte. A status other than success becomes a [`Failure`], redirects included: a
//! signed request does not survive one.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bytes::Bytes;
use futures::{Stream, StreamExt};
use http::header::{CONTENT_LENGTH, CONTENT_RANGE};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_rustls::HttpsConnectorBuilder;
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rustls::RootCertStore;

use crate::allowed::{Guard, GuardedConnector};
use crate::error::UfsError;
use crate::s3::connections::{Connections, Connector, DrivenBody};
use crate::s3::failure::Failure;

/// Of an error document at most this much is read.
const ERROR_DOCUMENT_BYTES: usize = 64 << 10;

/// Each connection has a receive buffer that grows to this, busy or idle: what a worker reads at a time, and no more,
/// since there are hundreds of connections. Headers must fit as well.
const RECEIVE_BYTES: usize = 128 << 10;

/// Servers and balancers drop idle connections after a minute or so; we are first.
const IDLE: Duration = Duration::from_secs(45);

/// The host's certificate authorities, read when the first https endpoint is opened. Without any, such an endpoint
/// fails with "unknown issuer".
static ROOTS: LazyLock<Arc<RootCertStore>> = LazyLock::new(|| {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    Arc::new(roots)
});

#[derive(Clone)]
pub(crate) struct Transport {
    client: Client<Connector, Full<Bytes>>,
    gets: Connections,
}

impl Transport {
    /// `connect_timeout` is for TCP alone (looking up the name and TLS fall under the deadline of the request);
    /// `connections` is how many idle ones are kept.
    pub(crate) fn new(
        connect_timeout: Duration,
        connections: usize,
        is_https: bool,
        guard: Guard,
    ) -> Result<Self, UfsError> {
        let tcp = GuardedConnector::new(guard, |tcp| {
            tcp.enforce_http(false);
            tcp.set_nodelay(true);
            tcp.set_connect_timeout(Some(connect_timeout));
            tcp.set_keepalive(Some(IDLE));
        });
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let tls = tls
            .map_err(|error| UfsError::invalid("TLS", error.to_string(), "this is a fault of the build: report it"))?;
        let roots = if is_https { ROOTS.clone() } else { Arc::new(RootCertStore::empty()) };
        let tls = tls.with_root_certificates(roots).with_no_client_auth();
        let connector = HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1();
        let connector = connector.wrap_connector(tcp);
        let gets = Connections::new(connector.clone(), connections, IDLE, RECEIVE_BYTES);
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .pool_max_idle_per_host(connections)
            .http1_max_buf_size(RECEIVE_BYTES)
            .build(connector);
        Ok(Self { client, gets })
    }

    /// Sends a request; the answer is a success, with its body still to come.
    pub(crate) async fn send(&self, mut request: Request<Bytes>) -> Result<Response<Incoming>, Failure> {
        // Of an empty body the library says nothing, and stores ask for its length (411).
        if request.body().is_empty() && matches!(*request.method(), Method::PUT | Method::POST) {
            request.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from_static("0"));
        }
        let response = self.client.request(request.map(Full::new)).await.map_err(|error| {
            let doing = if error.is_connect() { "cannot connect" } else { "the connection broke" };
            Failure::broken(doing, error)
        })?;
        if !response.status().is_success() {
            let (head, body) = response.into_parts();
            return Err(Failure::status(head.status, &head.headers, &read_error(body.into_data_stream()).await));
        }
        Ok(response)
    }

    /// Sends the GET of the bytes from the first to the last of an object; the answer is a success, with its body still
    /// to come.
    pub(crate) async fn get(
        &self,
        request: Request<Bytes>,
        range: (u64, u64),
    ) -> Result<Response<DrivenBody>, Failure> {
        let response = self.gets.send(request.map(Full::new)).await?;
        if !response.status().is_success() {
            let (head, body) = response.into_parts();
            return Err(Failure::status(head.status, &head.headers, &read_error(body).await));
        }
        check_range(range, response.status(), response.headers())?;
        Ok(response)
    }
}

/// The document of an error; empty if it cannot be read, since the status says the most.
async fn read_error(mut body: impl Stream<Item = Result<Bytes, hyper::Error>> + Unpin) -> Vec<u8> {
    let mut document = Vec::new();
    while let Some(piece) = body.next().await {
        match piece {
            Ok(piece) if document.len() + piece.len() <= ERROR_DOCUMENT_BYTES => document.extend_from_slice(&piece),
            Ok(_) | Err(_) => return Vec::new(),
        }
    }
    document
}

/// Whether an answer has the bytes that were asked for: a server that ignores the range must not have its first bytes
/// taken for others.
fn check_range((first, last): (u64, u64), status: StatusCode, headers: &HeaderMap) -> Result<(), Failure> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let is_all = status == StatusCode::OK
        && first == 0
        && text(CONTENT_LENGTH).and_then(|length| length.parse().ok()) == last.checked_add(1);
    let part = text(CONTENT_RANGE).filter(|_| status == StatusCode::PARTIAL_CONTENT).and_then(ends_of_part);
    match part {
        _ if is_all => return Ok(()),
        Some((begin, end)) if (begin, end) == (first, last) => return Ok(()),
        // S3 cuts a range off at the end of the object.
        Some((begin, end)) if begin == first && end < last => return Err(Failure::Shorter { length: end + 1 }),
        _ => {}
    }
    let got = text(CONTENT_RANGE).unwrap_or("none");
    Err(Failure::MalformedReply(format!(
        "bytes {first}-{last} were asked for, and it answered {} with Content-Range {got:?}",
        status.as_u16()
    )))
}

/// First and last byte of `bytes FIRST-LAST/TOTAL`.
fn ends_of_part(content_range: &str) -> Option<(u64, u64)> {
    let (part, _total) = content_range.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = part.split_once('-')?;
    Some((first.parse().ok()?, last.parse().ok()?))
}
