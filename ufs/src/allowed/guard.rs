//! Whom the connections of an S3 store may lead to.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::vec;

use cavern_conf::{AllowedEndpoint, schema};
use futures::future::{BoxFuture, ready};
use futures::{FutureExt, TryFutureExt};
use http::Uri;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::dns::{GaiResolver, Name};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tower::{BoxError, Service};

use super::address::reserved;
use crate::error::UfsError;

/// Whom the connections of one store may lead to; the resolver of its connector, too. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Guard(Arc<Limits>);

struct Limits {
    /// The setting that names the endpoint.
    setting: &'static str,
    /// As messages name it.
    endpoint: String,
    port: u16,
    /// The host that requests go to, which has the bucket's name in it where that belongs there.
    host: String,
    /// The endpoint is listed: its host may lead anywhere.
    is_listed: bool,
    /// Addresses that are listed.
    addresses: Vec<IpAddr>,
}

/// An address as the connector takes it for one: anything else is looked up.
fn literal(host: &str) -> Option<IpAddr> {
    host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host).parse().ok()
}

fn place(url: &str) -> (String, u16) {
    let uri: Uri = url.parse().unwrap_or_default();
    let default_port = if uri.scheme_str() == Some("https") { 443 } else { 80 };
    (uri.host().unwrap_or_default().to_owned(), uri.port_u16().unwrap_or(default_port))
}

impl Guard {
    /// For the endpoint that a setting names; `url` is where requests go, which may have a bucket's name in its host.
    pub(crate) fn new(setting: &'static str, endpoint: &str, url: &str, conf: &schema::Ufs) -> Self {
        let (named, port) = place(endpoint);
        let (host, _) = place(url);
        // What cannot be read is refused with the configuration.
        let listed: Vec<_> = conf.endpoints.iter().filter_map(|entry| AllowedEndpoint::parse(entry).ok()).collect();
        Self(Arc::new(Limits {
            setting,
            endpoint: endpoint.to_owned(),
            port,
            host,
            is_listed: listed.iter().any(|entry| entry.names(&named, port)),
            addresses: listed.iter().filter_map(|entry| entry.address(port)).collect(),
        }))
    }

    /// For what the host's own surroundings name, and no mount: it may be at any address.
    pub(crate) fn of_own_host(url: &str) -> Self {
        let (host, port) = place(url);
        let (endpoint, addresses) = (url.to_owned(), Vec::new());
        Self(Arc::new(Limits { setting: "", endpoint, port, host, is_listed: true, addresses }))
    }

    /// Refuses a host that is an address which may not be reached: no resolver is asked about one.
    fn check_literal(&self, host: &str) -> Result<(), UfsError> {
        match literal(host) {
            Some(address) => self.admit(host, vec![SocketAddr::new(address, self.0.port)]).map(drop),
            None => Ok(()),
        }
    }

    /// Those of a host's addresses that may be connected to: one at least.
    fn admit(&self, host: &str, mut found: Vec<SocketAddr>) -> Result<Vec<SocketAddr>, UfsError> {
        let Limits { setting, endpoint, port, host: own, is_listed, addresses } = &*self.0;
        if *is_listed && host == own {
            return Ok(found);
        }
        let first = found.first().copied();
        found.retain(|address| reserved(address.ip()).is_none() || addresses.contains(&address.ip().to_canonical()));
        let refused = first.filter(|_| found.is_empty()).map(|first| first.ip());
        let Some((first, what)) = refused.and_then(|first| Some((first, reserved(first)?))) else { return Ok(found) };
        let leads = match literal(host) {
            Some(_) => format!("{first} is {what}"),
            None => format!("{host} leads to {first}, {what}"),
        };
        let (host, _) = if host == own { place(endpoint) } else { (host.to_owned(), 0) };
        Err(UfsError::NotAllowed {
            what: format!("{setting} {endpoint}"),
            reason: format!("{leads}, which no process connects to unless that is allowed"),
            remedy: format!(
                "if it is meant, add \"{host}:{port}\" to ufs.endpoints in the configuration of all masters, workers \
                 and clients, and start them again"
            ),
        })
    }
}

impl Service<Name> for Guard {
    type Response = vec::IntoIter<SocketAddr>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let guard = self.clone();
        async move {
            let found = GaiResolver::new().call(name.clone()).await?.collect();
            Ok(guard.admit(name.as_str(), found)?.into_iter())
        }
        .boxed()
    }
}

/// Makes connections where a guard lets them lead. Cheap to clone.
#[derive(Clone)]
pub(crate) struct GuardedConnector {
    guard: Guard,
    tcp: HttpConnector<Guard>,
}

impl GuardedConnector {
    /// `set` may set whatever the connections need.
    pub(crate) fn new(guard: Guard, set: impl FnOnce(&mut HttpConnector<Guard>)) -> Self {
        let mut tcp = HttpConnector::new_with_resolver(guard.clone());
        set(&mut tcp);
        Self { guard, tcp }
    }
}

impl Service<Uri> for GuardedConnector {
    type Response = TokioIo<TcpStream>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.tcp.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, to: Uri) -> Self::Future {
        match self.guard.check_literal(to.host().unwrap_or_default()) {
            Ok(()) => self.tcp.call(to).map_err(Into::into).boxed(),
            Err(refused) => ready(Err(refused.into())).boxed(),
        }
    }
}

/// The error of a [`Guard`] among the causes of one, if it is there.
pub(crate) fn not_allowed(error: &(dyn std::error::Error + 'static)) -> Option<UfsError> {
    let mut next = Some(error);
    while let Some(cause) = next {
        if let Some(error @ UfsError::NotAllowed { .. }) = cause.downcast_ref::<UfsError>() {
            return Some(error.clone());
        }
        next = cause.source();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guard(endpoint: &str, listed: &[&str]) -> Guard {
        let endpoints = listed.iter().map(|entry| (*entry).to_owned()).collect();
        let conf = schema::Ufs { endpoints, ..schema::Ufs::default() };
        Guard::new("s3.endpoint_url", endpoint, &format!("{endpoint}/bucket"), &conf)
    }

    /// As the connector does it, without a connection.
    async fn reach(guard: &Guard) -> Result<Vec<IpAddr>, UfsError> {
        let host = guard.0.host.clone();
        guard.check_literal(&host)?;
        if let Some(address) = literal(&host) {
            return Ok(vec![address]);
        }
        match guard.clone().call(host.parse().unwrap()).await {
            Ok(found) => Ok(found.map(|address| address.ip()).collect()),
            Err(error) => Err(not_allowed(&*error).expect("a name that leads somewhere")),
        }
    }

    #[tokio::test]
    async fn no_spelling_leads_to_this_host_or_its_link() {
        for endpoint in [
            "http://127.0.0.1:9000",
            "https://127.8.8.8",
            "http://169.254.169.254",
            "http://0.0.0.0:9000",
            "http://[::1]:9000",
            "http://[fe80::1]",
            "http://[::ffff:127.0.0.1]",
            "http://[::ffff:a9fe:a9fe]",
            "http://localhost:9000",
            // The system's resolver makes addresses of these.
            "http://2130706433",
            "http://0x7f.1",
            "http://0177.0.0.1",
            "http://127.1",
            "http://0:9000",
        ] {
            let refused = reach(&guard(endpoint, &[])).await.unwrap_err().to_string();
            assert!(refused.contains(endpoint) && refused.contains("ufs.endpoints"), "{endpoint}: {refused}");
        }
        for endpoint in ["http://10.0.0.1:9000", "https://192.168.7.7", "http://[fd00::7]:9000"] {
            assert!(reach(&guard(endpoint, &[])).await.is_ok(), "{endpoint}");
        }
    }

    #[tokio::test]
    async fn what_is_listed_is_reached_and_nothing_beside_it() {
        for (endpoint, listed) in [
            ("http://127.0.0.1:9000", "127.0.0.1:9000"),
            ("http://127.0.0.1:9000", "http://127.0.0.1:9000"),
            ("http://127.0.0.1:9000", "127.0.0.1"),
            ("http://localhost:9000", "localhost"),
            ("http://localhost:9000", "127.0.0.1"),
            ("http://[::ffff:127.0.0.1]:9000", "127.0.0.1:9000"),
            ("http://[::1]", "::1"),
        ] {
            let reached = reach(&guard(endpoint, &[listed])).await;
            assert!(reached.is_ok_and(|reached| !reached.is_empty()), "{endpoint} with {listed}");
        }
        for (endpoint, listed) in [
            ("http://127.0.0.1:9001", "127.0.0.1:9000"),
            ("http://127.0.0.1:9000", "https://127.0.0.1"),
            ("http://127.0.0.2:9000", "127.0.0.1"),
            ("http://127.0.0.1:9000", "localhost"),
            ("http://localhost:9000", "localhost:9001"),
            ("http://169.254.169.254", "127.0.0.1"),
        ] {
            assert!(reach(&guard(endpoint, &[listed])).await.is_err(), "{endpoint} with {listed}");
        }
    }

    #[tokio::test]
    async fn what_the_host_itself_names_is_reached_and_nothing_beside_it() {
        for url in ["http://169.254.169.254/latest", "http://[fd00:ec2::254]", "http://localhost:80/x"] {
            let guard = Guard::of_own_host(url);
            assert!(reach(&guard).await.is_ok_and(|reached| !reached.is_empty()), "{url}");
            assert!(guard.check_literal("127.0.0.2").is_err(), "{url}");
        }
    }

    #[test]
    fn what_is_made_of_a_name_is_looked_at_again() {
        let guard = guard("http://2130706433", &[]);
        // The bucket's name before the host's, and the host as a library spells it.
        for host in ["127.0.0.1", "[::1]", "169.254.169.254"] {
            assert!(guard.check_literal(host).is_err(), "{host}");
        }
        guard.check_literal("10.0.0.1").unwrap();
    }

    #[test]
    fn of_a_names_addresses_those_that_may_be_reached_are_left() {
        let guard = guard("http://store:9000", &[]);
        let found = ["127.0.0.1:0", "10.0.0.1:0", "[::1]:0"].map(|address| address.parse().unwrap());
        assert_eq!(guard.admit("store", found.to_vec()).unwrap(), found[1..2]);
        let refused = guard.admit("store", vec![found[0], found[2]]).unwrap_err().to_string();
        assert!(refused.contains("store leads to 127.0.0.1, a loopback address"), "{refused}");
        assert!(refused.contains("add \"store:9000\" to ufs.endpoints"), "{refused}");
        assert_eq!(guard.admit("store", vec![]).unwrap(), []);
    }
}
