//! Pages for programs of this host that can read a file of its user's.
//!
//! Whoever reaches a loopback port is any user of the host, or any page that a browser of the host shows: such a page
//! may send requests there, and may have its own name lead there to read the answers (DNS rebinding). So a request
//! brings the token in the file, addresses this host by a name that nobody else can give it, and comes from no page.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use cavern_conf::process::LogLimit;
use prometheus_client::metrics::counter::Counter;

use super::access::presented;
use crate::error::SecurityError;
use crate::key_wrapping::random_bytes;

/// What this host calls itself.
const NAMES: [&str; 3] = ["localhost", "127.0.0.1", "[::1]"];

/// Who may see the pages.
#[derive(Debug)]
pub(super) struct LocalGuard {
    /// Compared in constant time.
    token: blake3::Hash,
    pub refused: Counter,
    refusals: LogLimit<()>,
}

/// Why a page is not shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum Denial {
    #[error("this port is that of localhost, 127.0.0.1 and [::1]: send one of them with the port as the Host header")]
    Host,
    #[error("pages of a browser may not use this port: send no Origin header")]
    Origin,
    #[error("this port takes the token in the file that was made at its start (Authorization: Bearer)")]
    Token,
}

impl LocalGuard {
    /// Makes a new token, in a file in the place of a former one. *Blocking*.
    pub fn create(path: &Path) -> Result<Self, SecurityError> {
        let unwritable = |source| SecurityError::Unwritable { path: path.to_owned(), source };
        let random = random_bytes().map_err(|reason| unwritable(io::Error::other(reason)))?;
        let token = blake3::Hash::from_bytes(random).to_hex();
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(unwritable(error)),
            _ => {}
        }
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(unwritable)?;
        writeln!(file, "{token}").map_err(unwritable)?;
        let token = blake3::hash(token.as_bytes());
        Ok(Self { token, refused: Counter::default(), refusals: LogLimit::default() })
    }

    /// The answer to a request at this port that is refused.
    pub fn refuse(&self, port: u16, path: &str, headers: &HeaderMap) -> Option<Response> {
        let denial = self.check(port, headers).err()?;
        self.refused.inc();
        if let Some(suppressed) = self.refusals.admit(()) {
            tracing::warn!(suppressed, path, "refused: {denial}");
        }
        let status = if denial == Denial::Token { StatusCode::UNAUTHORIZED } else { StatusCode::FORBIDDEN };
        Some((status, format!("{denial}\n")).into_response())
    }

    fn check(&self, port: u16, headers: &HeaderMap) -> Result<(), Denial> {
        let mut hosts = headers.get_all(header::HOST).iter();
        let host = hosts.next().and_then(|host| host.to_str().ok()).ok_or(Denial::Host)?;
        let name = host.strip_suffix(&format!(":{port}")).ok_or(Denial::Host)?;
        if hosts.next().is_some() || !NAMES.iter().any(|own| own.eq_ignore_ascii_case(name)) {
            return Err(Denial::Host);
        }
        if headers.contains_key(header::ORIGIN) {
            return Err(Denial::Origin);
        }
        match presented(headers) {
            Some(given) if blake3::hash(given) == self.token => Ok(()),
            _ => Err(Denial::Token),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use axum::http::{HeaderName, HeaderValue};

    use super::*;

    #[test]
    fn requests_bring_the_token_and_name_this_host_and_no_page() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        fs::write(&path, "of an earlier run").unwrap();
        let guard = LocalGuard::create(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let token = fs::read_to_string(&path).unwrap().trim().to_owned();
        assert_eq!(token.len(), 64);
        let bearer = format!("Bearer {token}");
        let check = |said: &[(HeaderName, &str)]| {
            let mut headers = HeaderMap::new();
            for (name, value) in said {
                headers.append(name, HeaderValue::from_str(value).unwrap());
            }
            guard.check(9001, &headers)
        };
        let authorized = (header::AUTHORIZATION, bearer.as_str());
        for host in ["localhost:9001", "LocalHost:9001", "127.0.0.1:9001", "[::1]:9001"] {
            assert_eq!(check(&[(header::HOST, host), authorized.clone()]), Ok(()), "{host}");
        }
        for host in
            ["", "localhost", "localhost:9002", "evil.example:9001", "127.0.0.1.nip.io:9001", "x:localhost:9001"]
        {
            assert_eq!(check(&[(header::HOST, host), authorized.clone()]), Err(Denial::Host), "{host}");
        }
        let host = (header::HOST, "localhost:9001");
        assert_eq!(check(std::slice::from_ref(&authorized)), Err(Denial::Host));
        assert_eq!(check(&[host.clone(), host.clone(), authorized.clone()]), Err(Denial::Host));
        for origin in ["null", "http://localhost:9001", "https://evil.example"] {
            let said = [host.clone(), (header::ORIGIN, origin), authorized.clone()];
            assert_eq!(check(&said), Err(Denial::Origin), "{origin}");
        }
        assert_eq!(check(std::slice::from_ref(&host)), Err(Denial::Token));
        for wrong in ["Bearer ", "Bearer of an earlier run", token.as_str()] {
            assert_eq!(check(&[host.clone(), (header::AUTHORIZATION, wrong)]), Err(Denial::Token), "{wrong}");
        }
        let again = LocalGuard::create(&path).unwrap();
        assert_ne!(again.token, guard.token);
    }
}
