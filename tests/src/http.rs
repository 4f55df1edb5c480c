//! The little HTTP that the tests need to ask `/metrics`, `/healthz` and the admin port of the object store.

use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(10);

/// What came back.
#[derive(Debug)]
pub struct HttpAnswer {
    pub status: u16,
    pub body: String,
}

/// `GET http://host:port/path`.
pub fn http_get(url: &str) -> io::Result<HttpAnswer> {
    http_request("GET", url, "")
}

/// One request on a connection of its own; a body is sent as JSON.
pub fn http_request(method: &str, url: &str, body: &str) -> io::Result<HttpAnswer> {
    let rest = url.strip_prefix("http://").ok_or(io::ErrorKind::InvalidInput)?;
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    let mut stream = TcpStream::connect(host)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    // Version 1.0: the answer is not chunked, and its end is the end of the connection.
    write!(
        stream,
        "{method} /{path} HTTP/1.0\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: \
         {}\r\n\r\n{body}",
        body.len()
    )?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    let answer = String::from_utf8_lossy(&answer);
    let (head, body) = answer.split_once("\r\n\r\n").ok_or(io::ErrorKind::UnexpectedEof)?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).ok_or(io::ErrorKind::InvalidData)?;
    Ok(HttpAnswer { status, body: body.to_owned() })
}
