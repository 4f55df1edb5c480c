//! Entries of `ufs.endpoints`: where buckets may be although that leads to the host that connects, or to its link.

use std::net::IpAddr;

use crate::rules::{Port, is_host_port};

/// A host, with one of its ports or with all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllowedEndpoint {
    host: String,
    port: Option<u16>,
}

impl AllowedEndpoint {
    /// Reads `HOST`, `HOST:PORT` or `http[s]://HOST[:PORT]`.
    ///
    /// # Errors
    /// The sentence for whoever wrote something else.
    pub fn parse(text: &str) -> Result<Self, String> {
        let wrong = || format!("\"{text}\" is no endpoint: write HOST, HOST:PORT or a URL, as \"http://minio1:9000\"");
        let (rest, default_port) = match text.split_once("://") {
            Some(("http", rest)) => (rest.strip_suffix('/').unwrap_or(rest), Some(80)),
            Some(("https", rest)) => (rest.strip_suffix('/').unwrap_or(rest), Some(443)),
            Some(_) => return Err(wrong()),
            None => (text, None),
        };
        // An IPv6 address may stand alone without brackets.
        if default_port.is_none() && rest.parse::<std::net::Ipv6Addr>().is_ok() {
            return Ok(Self { host: canonical_host(rest), port: None });
        }
        if is_host_port(rest, Port::Given) {
            let (host, port) = rest.rsplit_once(':').ok_or_else(wrong)?;
            return Ok(Self { host: canonical_host(host), port: port.parse().ok() });
        }
        // Any port makes it one.
        match is_host_port(&format!("{rest}:1"), Port::Given) {
            true => Ok(Self { host: canonical_host(rest), port: default_port }),
            false => Err(wrong()),
        }
    }

    /// Whether it names this host and port, which may be spelled in another way.
    pub fn names(&self, host: &str, port: u16) -> bool {
        self.has_port(port) && self.host == canonical_host(host)
    }

    /// Its address, if its host is one, for connections to this port.
    pub fn address(&self, port: u16) -> Option<IpAddr> {
        self.host.parse().ok().filter(|_| self.has_port(port))
    }

    fn has_port(&self, port: u16) -> bool {
        self.port.is_none_or(|own| own == port)
    }
}

/// One spelling of a host: an address without brackets, IPv4 as such; a name in lower case without a dot at its end.
fn canonical_host(host: &str) -> String {
    let plain = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    match plain.parse::<IpAddr>() {
        Ok(address) => address.to_canonical().to_string(),
        Err(_) => plain.strip_suffix('.').unwrap_or(plain).to_ascii_lowercase(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_names_its_host_however_that_is_spelled() {
        for (entry, host, port) in [
            ("minio1", "MINIO1", 9000),
            ("minio1", "minio1.", 80),
            ("minio1.:9000", "minio1", 9000),
            ("http://minio1", "minio1", 80),
            ("https://minio1/", "minio1", 443),
            ("http://minio1:9000/", "minio1", 9000),
            ("127.0.0.1", "127.0.0.1", 1),
            ("127.0.0.1:9000", "[::ffff:127.0.0.1]", 9000),
            ("::1", "[::1]", 9000),
            ("[::1]", "[0:0::1]", 9000),
            ("[::1]:9000", "[::1]", 9000),
            ("http://[::1]:9000", "[::1]", 9000),
        ] {
            assert!(AllowedEndpoint::parse(entry).unwrap().names(host, port), "{entry} {host}:{port}");
        }
        for (entry, host, port) in [
            ("minio1:9000", "minio1", 9001),
            ("http://minio1", "minio1", 443),
            ("minio1", "minio10", 80),
            ("minio1", "x.minio1", 80),
            ("127.0.0.1", "127.0.0.2", 80),
            ("127.0.0.1", "localhost", 80),
        ] {
            assert!(!AllowedEndpoint::parse(entry).unwrap().names(host, port), "{entry} {host}:{port}");
        }
        let address = |entry: &str| AllowedEndpoint::parse(entry).unwrap().address(9000);
        assert_eq!(address("127.0.0.1:9000"), Some([127, 0, 0, 1].into()));
        assert_eq!((address("127.0.0.1:9001"), address("minio1")), (None, None));
    }

    #[test]
    fn what_is_no_endpoint_is_refused_with_what_would_be() {
        for text in [
            "",
            "*",
            "a b",
            "h:0",
            "h:99999",
            "h:",
            "ftp://h",
            "http://",
            "http://h/path",
            "http://u@h",
            "u:p@h",
            "[::1",
            "10.0.0.0/8",
        ] {
            let refused = AllowedEndpoint::parse(text).unwrap_err();
            assert!(refused.contains("HOST:PORT"), "{text}: {refused}");
        }
    }
}
