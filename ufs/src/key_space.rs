//! Where the keys of a mount are, in one spelling for all URIs and options that lead there: so it can be checked
//! whether two mounts have keys in common.
//!
//! This is not the [`store_id`](crate::Ufs::store_id), by which blocks are named for good: it takes for one what is
//! most likely one. To take two stores for one costs somebody a prefix of its own; to take one for two may cost data.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use cavern_proto::{Scheme, StoreUri};

use crate::azblob::AzblobOptions;
use crate::error::UfsError;
use crate::gs::{GOOGLE, GsOptions};
use crate::s3::S3Options;

/// A store, and a prefix in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeySpace {
    store: String,
    /// Empty, or ending in `/`.
    prefix: String,
}

impl KeySpace {
    /// The place that a URI leads to. *Blocking* for `file://`, whose links are followed on this host.
    ///
    /// # Errors
    /// [`UfsError::Invalid`] for a URI or an option that is wrong.
    pub fn of(uri: &str, options: &HashMap<String, String>) -> Result<Self, UfsError> {
        Ok(match StoreUri::parse(uri)? {
            StoreUri::Bucket { scheme: Scheme::S3, name, prefix } => {
                let options = S3Options::parse(options, |name| std::env::var(name).ok())?;
                let endpoint = options.endpoint.as_deref().map_or_else(|| AWS.to_owned(), server);
                Self { store: format!("s3://{endpoint}/{name}"), prefix }
            }
            StoreUri::Bucket { scheme: Scheme::Gs, name, prefix } => {
                // Its buckets can be asked for by the protocol of S3 as well.
                let endpoint = GsOptions::parse(options)?.endpoint;
                let endpoint = endpoint.as_deref().map_or_else(|| server(GOOGLE), server);
                Self { store: format!("s3://{endpoint}/{name}"), prefix }
            }
            StoreUri::Bucket { scheme: Scheme::Azblob, name, prefix } => {
                let account = AzblobOptions::parse(options)?.account_url;
                let (_, account) = account.split_once("://").unwrap_or_default();
                let (host, account) = account.split_once('/').unwrap_or((account, ""));
                Self { store: format!("azblob://{}/{account}/{name}", server(host)), prefix }
            }
            StoreUri::File { directory } => {
                let real = std::fs::canonicalize(&directory);
                let real = real.map_or(directory, |real| real.to_string_lossy().into_owned());
                Self { store: "file://".to_owned(), prefix: format!("{}/", real.trim_end_matches('/')) }
            }
            StoreUri::Bucket { name, prefix, .. } => Self { store: format!("memory://{name}"), prefix },
        })
    }

    /// Whether some key can be at both.
    pub fn overlaps(&self, other: &Self) -> bool {
        let (one, other_prefix) = (&self.prefix, &other.prefix);
        self.store == other.store && (one.starts_with(other_prefix) || other_prefix.starts_with(one))
    }

    /// Whether both are in one bucket, or on one host's file system.
    pub fn has_store_of(&self, other: &Self) -> bool {
        self.store == other.store
    }
}

/// Buckets of AWS have names that are unique across its regions and ways in.
const AWS: &str = "amazonaws.com";
const AWS_CHINA: &str = "amazonaws.com.cn";

/// The server of an endpoint (`scheme://host[:port]` in lower case, without a default port). The scheme is left out: a
/// port speaks one of the two, and the two default ports are two ways into one server.
fn server(endpoint: &str) -> String {
    let authority = endpoint.split_once("://").map_or(endpoint, |(_, authority)| authority);
    let is_port = |port: &&str| !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    let (host, port) = match authority.rsplit_once(':').filter(|(_, port)| is_port(port)) {
        Some((host, port)) => (host, format!(":{port}")),
        None => (authority, String::new()),
    };
    let host = host.trim_end_matches('.');
    for aws in [AWS, AWS_CHINA] {
        let is_s3 = |name: &str| name.split('.').any(|label| label == "s3" || label.starts_with("s3-"));
        if host.strip_suffix(aws).and_then(|name| name.strip_suffix('.')).is_some_and(is_s3) {
            return aws.to_owned();
        }
    }
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    let host = match address.map(|address| address.to_canonical()) {
        Ok(IpAddr::V4(address)) if address.is_loopback() || address == Ipv4Addr::UNSPECIFIED => "localhost".to_owned(),
        Ok(IpAddr::V6(address)) if address.is_loopback() || address == Ipv6Addr::UNSPECIFIED => "localhost".to_owned(),
        Ok(address) => address.to_string(),
        Err(_) if host.ends_with(".localhost") => "localhost".to_owned(),
        Err(_) => host.to_owned(),
    };
    format!("{host}{port}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s3(uri: &str, endpoint: &str) -> KeySpace {
        let options = [("s3.endpoint_url".to_owned(), endpoint.to_owned())].into();
        KeySpace::of(uri, &options).unwrap()
    }

    #[test]
    fn spellings_of_one_endpoint_are_one_place() {
        let one = |spellings: &[&str]| {
            let places: Vec<_> = spellings.iter().map(|endpoint| s3("s3://b/p", endpoint)).collect();
            for (place, spelling) in places.iter().zip(spellings) {
                assert_eq!(*place, places[0], "{spelling}");
            }
            places[0].clone()
        };
        let h = one(&["http://h", "HTTP://H:80/", "https://h.:443", "http://h."]);
        let ported = one(&["http://h:9000", "https://H:9000/", "http://h.:09000"]);
        let here = one(&["http://127.0.0.1:9", "http://localhost:9", "http://[::1]:9", "http://127.1.2.3:9/"]);
        let six = one(&["http://[2001:db8::1]:9", "http://[2001:DB8:0::1]:9"]);
        let aws = one(&[
            "",
            "https://s3.amazonaws.com",
            "http://s3.eu-west-1.amazonaws.com:80",
            "https://s3-us-west-2.amazonaws.com",
            "https://s3.dualstack.eu-west-1.amazonaws.com.",
            "https://b.s3.eu-west-1.amazonaws.com/",
        ]);
        let all = [h, ported, here, six, aws, s3("s3://b/p", "http://h:9001"), s3("s3://c/p", "http://h")];
        for (number, place) in all.iter().enumerate() {
            assert!(all[..number].iter().all(|other| !other.overlaps(place)), "{place:?}");
        }
        let hosted = |style: &str| {
            let options = [("s3.endpoint_url", "http://h"), ("s3.force.path.style", style)];
            KeySpace::of("s3://b", &options.map(|(key, value)| (key.to_owned(), value.to_owned())).into()).unwrap()
        };
        assert_eq!(hosted("true"), hosted("false"));
    }

    #[test]
    fn a_bucket_of_google_is_one_place_whichever_protocol_leads_there() {
        let gs = KeySpace::of("gs://b/p", &HashMap::new()).unwrap();
        assert!(gs.overlaps(&s3("s3://b/p/q", "https://storage.googleapis.com")));
        assert!(
            !gs.overlaps(&s3("s3://b/p", "")) && !gs.has_store_of(&s3("s3://c/p", "https://storage.googleapis.com"))
        );
        let azblob = |account: &str, endpoint: &str| {
            let options =
                [("azblob.account", account), ("azblob.endpoint_url", endpoint), ("azblob.anonymous", "true")];
            KeySpace::of("azblob://c", &options.map(|(key, value)| (key.to_owned(), value.to_owned())).into()).unwrap()
        };
        assert_eq!(azblob("acct", ""), azblob("acct", "https://acct.blob.core.windows.net:443/"));
        assert_eq!(azblob("acct", "http://127.0.0.1:1"), azblob("acct", "http://localhost:1"));
        assert_ne!(azblob("acct", "http://h:1"), azblob("other", "http://h:1"));
    }

    #[test]
    fn prefixes_overlap_name_by_name() {
        let place = |uri: &str| KeySpace::of(uri, &HashMap::new()).unwrap();
        for (one, other, expected) in [
            ("memory://m", "memory://m/a", true),
            ("memory://m/a/", "memory://m/a", true),
            ("memory://m/a", "memory://m/a/b", true),
            ("memory://m/a/b", "memory://m/a/bc", false),
            ("memory://m/a", "memory://n/a", false),
            ("s3://m/a%20b", "s3://m/a b", false),
        ] {
            let (one, other) = (place(one), place(other));
            assert_eq!((one.overlaps(&other), other.overlaps(&one)), (expected, expected), "{one:?} {other:?}");
        }
    }

    #[test]
    fn links_to_a_directory_are_that_directory() {
        let top = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(top.path().join("tree/below")).unwrap();
        std::os::unix::fs::symlink("tree", top.path().join("link")).unwrap();
        let place = |below: &str| KeySpace::of(&format!("file://{}/{below}", top.path().display()), &HashMap::new());
        let (tree, link, below) = (place("tree").unwrap(), place("link/").unwrap(), place("link/below").unwrap());
        assert_eq!(tree, link);
        assert!(tree.overlaps(&below) && !below.overlaps(&place("tree/bel").unwrap()));
        assert!(KeySpace::of("file:///", &HashMap::new()).unwrap().overlaps(&tree));
    }
}
