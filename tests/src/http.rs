//! The little HTTP that the tests need to ask `/metrics`, `/healthz` and the admin port of the object store.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

const TIMEOUT: Duration = Duration::from_secs(10);

/// What came back.
#[derive(Debug)]
pub struct HttpAnswer {
    pub status: u16,
    /// The first line, and the headers.
    pub head: String,
    pub body: String,
}

/// `GET http://host:port/path`.
pub fn http_get(url: &str) -> io::Result<HttpAnswer> {
    http_request("GET", url, "")
}

/// One request on a connection of its own; a body is sent as JSON.
pub fn http_request(method: &str, url: &str, body: &str) -> io::Result<HttpAnswer> {
    http_request_with(method, url, "", body)
}

/// The same with further headers, each with its end of line.
pub fn http_request_with(method: &str, url: &str, more: &str, body: &str) -> io::Result<HttpAnswer> {
    let rest = url.strip_prefix("http://").ok_or(io::ErrorKind::InvalidInput)?;
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    exchange(connect(host)?, method, host, path, more, body)
}

fn connect(host: &str) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(host)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    Ok(stream)
}

/// `more`: further headers, each with its end of line.
fn exchange(
    mut stream: impl Read + Write,
    method: &str,
    host: &str,
    path: &str,
    more: &str,
    body: &str,
) -> io::Result<HttpAnswer> {
    // Version 1.0: the answer is not chunked, and its end is the end of the connection.
    let head = format!("{method} /{path} HTTP/1.0\r\nHost: {host}\r\nContent-Type: application/json\r\n{more}");
    write!(stream, "{head}Content-Length: {}\r\n\r\n{body}", body.len())?;
    stream.flush()?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    let answer = String::from_utf8_lossy(&answer);
    let (head, body) = answer.split_once("\r\n\r\n").ok_or(io::ErrorKind::UnexpectedEof)?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).ok_or(io::ErrorKind::InvalidData)?;
    Ok(HttpAnswer { status, head: head.to_owned(), body: body.to_owned() })
}

/// Asks the HTTP ports of a secured cluster, as `etc/prometheus-secured.yml` has it.
#[derive(Clone, Debug, Default)]
pub struct Https {
    /// Whom it believes.
    pub authority: PathBuf,
    pub token: Option<String>,
    /// A certificate and its key.
    pub certificate: Option<[PathBuf; 2]>,
}

impl Https {
    /// `GET https://address/path`, of a server that is called `cavern`.
    pub fn get(&self, address: &str, path: &str) -> io::Result<HttpAnswer> {
        let name = "cavern".try_into().map_err(io::Error::other)?;
        let connection = ClientConnection::new(self.config()?, name).map_err(io::Error::other)?;
        let stream = StreamOwned::new(connection, connect(address)?);
        let token = self.token.as_ref().map(|token| format!("Authorization: Bearer {token}\r\n"));
        exchange(stream, "GET", address, path.trim_start_matches('/'), &token.unwrap_or_default(), "")
    }

    fn config(&self) -> io::Result<Arc<ClientConfig>> {
        let read = |path: &Path| -> io::Result<Vec<CertificateDer<'static>>> {
            let certificates = CertificateDer::pem_file_iter(path).map_err(io::Error::other)?;
            certificates.collect::<Result<_, _>>().map_err(io::Error::other)
        };
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(read(&self.authority)?);
        let provider = Arc::new(ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = config.map_err(io::Error::other)?.with_root_certificates(roots);
        let config = match &self.certificate {
            None => config.with_no_client_auth(),
            Some([certificate, key]) => {
                let key = PrivateKeyDer::from_pem_file(key).map_err(io::Error::other)?;
                config.with_client_auth_cert(read(certificate)?, key).map_err(io::Error::other)?
            }
        };
        Ok(Arc::new(config))
    }
}
