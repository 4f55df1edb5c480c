//! `s3://`: any endpoint that speaks the S3 protocol.
//!
//! Requests are spoken by us, so that every key reaches the store byte for byte, spelt as it is signed
//! ([`signing::spelled`]): listings in [`listing`], HEADs in [`head`], GETs in [`read`], all changes in [`write`]. All
//! are signed with the same credentials and travel over the same [`transport`]; GETs have connections of their own.
//! [`vending`] is about keys that masters get for others, and [`keys`] about what they and those others have in common.

mod connections;
pub(crate) mod credentials;
pub(crate) mod failure;
mod head;
mod keys;
pub(crate) mod listing;
pub(crate) mod options;
pub(crate) mod read;
pub(crate) mod shared_files;
pub(crate) mod signing;
pub(crate) mod transport;
mod vending;
pub(crate) mod write;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use cavern_conf::schema;
use cavern_proto::s3_options::ENDPOINT;
use cavern_proto::{Capabilities, Scheme};
use futures::{FutureExt, TryFutureExt};
use http::Request as HttpRequest;
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;

use crate::error::{Denial, Operation, Request, UfsError};
use crate::object::{ListMode, ObjectMeta};
use crate::s3::credentials::Provider;
use crate::s3::failure::{Failure, behind_s, senseless};
pub use crate::s3::keys::{KeyError, KeyProvider, KeyRight, VendedKeys};
pub(crate) use crate::s3::options::S3Options;
pub use crate::s3::options::{changed_options, is_vended, vended_options};
pub use crate::s3::shared_files::found_options;
use crate::s3::signing::{DaySigner, spelled};
use crate::s3::transport::Transport;
pub use crate::s3::vending::{KeyStatus, KeyVendor};
use crate::shared_store::SharedStore;
use crate::store::{Answer, Body, ChangeRequest, ListRequest, ObjectStore, StorePage};

/// A page of a thousand keys of 1,024 bytes, each byte percent-encoded, takes half of this.
const LISTING_BYTES: usize = 8 << 20;

pub(crate) struct S3Store {
    transport: Transport,
    /// `None` for unsigned requests.
    credentials: Option<Provider>,
    signer: DaySigner,
    /// The credentials are lent, and may list below a prefix only.
    is_lent: bool,
    bucket: String,
    /// That requests are signed for.
    region: String,
    /// URL of the bucket, without a `/` at the end.
    bucket_url: String,
    label: Arc<str>,
}

/// The store of this bucket, and what it shares with other handles on it. Where the keys of its mount are vended,
/// requests are signed with those of the lender, if there is one.
pub(crate) fn open(
    bucket: &str,
    options: &HashMap<String, String>,
    conf: &schema::Ufs,
    lender: Option<&KeyProvider>,
) -> Result<(S3Store, Arc<SharedStore>), UfsError> {
    let options = S3Options::parse(options, |name| std::env::var(name).ok())?;
    let shared = SharedStore::of_bucket(bucket, &options, conf);
    let endpoint = options.endpoint.clone();
    let endpoint = endpoint.unwrap_or_else(|| format!("https://s3.{}.amazonaws.com", options.region));
    // A certificate's wildcard covers one label, so such a bucket cannot be in the host name.
    let is_virtual_host = !options.path_style && !bucket.contains('.');
    let bucket_url = match (is_virtual_host, endpoint.split_once("://")) {
        (true, Some((scheme, host))) => format!("{scheme}://{bucket}.{host}"),
        _ => format!("{endpoint}/{}", spelled(bucket)),
    };
    let transport = shared.transport(ENDPOINT, &endpoint, &bucket_url, conf)?;
    let lender = lender.filter(|_| options.vended.is_some());
    let credentials = match lender {
        Some(lender) => Some(Provider::lent(lender, conf)),
        None => Provider::new(&options, conf, &shared.credentials)?,
    };
    let is_lent = lender.is_some();
    let signer = DaySigner::new(&options.region);
    let (label, bucket) = (shared.label.clone(), bucket.to_owned());
    let region = options.region;
    Ok((S3Store { transport, credentials, signer, is_lent, bucket, region, bucket_url, label }, shared))
}

impl S3Store {
    async fn list_page(&self, request: ListRequest<'_>) -> Result<StorePage, UfsError> {
        let asked = || Request::new(Operation::List, &self.label, request.prefix);
        let (behind_s, document) = self.listed(&listing::query(&request), &asked).await?;
        let page = listing::parse(&document);
        let page = page.map_err(|reason| Failure::MalformedReply(reason).into_ufs(asked(), ""))?;
        Ok(StorePage { behind_s, ..page })
    }

    /// The document that answers a listing, and by how much this host's clock is behind.
    async fn listed(&self, query: &str, asked: &impl Fn() -> Request) -> Result<(Option<i64>, Bytes), UfsError> {
        let url = format!("{}?{query}", self.list_url());
        let request = self.signed(HttpRequest::get(url).body(Bytes::new()), asked).await?;
        let response = self.transport.send(request).await.map_err(|failure| failure.into_ufs(asked(), ""))?;
        let behind_s = behind_s(response.headers(), &[]);
        Ok((behind_s, whole(response.into_body(), LISTING_BYTES, "the listing", asked).await?))
    }

    async fn find_version(&self, key: &str, etag: &str) -> Result<Option<String>, UfsError> {
        let asked = || Request::new(Operation::List, &self.label, key);
        let (_, document) = self.listed(&listing::versions_query(key), &asked).await?;
        // Whoever does not know what was asked for may answer something else.
        let found = listing::find_version(&document, key, etag);
        found.map_err(|reason| UfsError::Rejected { request: asked(), reason })
    }

    /// A request as it is sent: signed, where requests are.
    async fn signed(
        &self,
        unsigned: http::Result<HttpRequest<Bytes>>,
        asked: &impl Fn() -> Request,
    ) -> Result<HttpRequest<Bytes>, UfsError> {
        let (mut parts, body) = unsigned.map_err(|error| senseless(error, &asked()))?.into_parts();
        if let Some(provider) = &self.credentials {
            let credential = provider.credential().await.map_err(|error| error.into_ufs(asked()))?;
            // The signer's own words are left out: they may quote what it has read.
            let unsigned =
                |_| UfsError::denied(asked(), "the request cannot be signed with these credentials".to_owned());
            self.signer.sign(&mut parts, &credential).await.map_err(unsigned)?;
        }
        Ok(HttpRequest::from_parts(parts, body))
    }

    /// An error of a request as it is for these options. Where other credentials can be had for some that have
    /// expired, it may be sent again. Whoever gave the credentials is named, and the region of the signature.
    fn denied(&self, error: UfsError) -> UfsError {
        let UfsError::Denied { request, denial, reason, remedy } = error else { return error };
        match (denial, &self.credentials) {
            (Denial::Credentials | Denial::Expired, Some(Provider::Renewing(renewing))) => {
                if denial == Denial::Expired && renewing.give_up() {
                    return UfsError::Unavailable { request, reason: format!("{reason}: others are fetched") };
                }
                let remedy =
                    format!("check what {} gives, and that it may list and read this bucket", renewing.giver());
                UfsError::denied_for(denial, request, reason, remedy)
            }
            (Denial::Region, _) => {
                let reason = format!("{reason}, and s3.region_name is {} here", self.region);
                UfsError::Denied { request, denial, reason, remedy }
            }
            // Without a signature the time does not matter.
            (Denial::Clock, None) => UfsError::denied(request, reason),
            _ => UfsError::Denied { request, denial, reason, remedy },
        }
    }

    /// What a refused request for an object means: keys that are lent are refused one that is not there as well.
    async fn explained(&self, error: UfsError, key: &str) -> UfsError {
        let UfsError::Denied { denial: Denial::Credentials, request, .. } = &error else { return error };
        if !self.is_lent {
            return error;
        }
        let asked = ListRequest { prefix: key, mode: ListMode::Recursive, start_after: None, token: None, limit: 1 };
        match self.list_page(asked).await {
            Ok(StorePage { page, .. })
                if page.hidden == 0 && page.objects.first().is_none_or(|object| object.key != key) =>
            {
                UfsError::NotFound { request: request.clone() }
            }
            _ => error,
        }
    }

    /// The URL that lists: a path-style bucket as it is, a host of its own with the root path.
    fn list_url(&self) -> String {
        match self.bucket_url.split_once("://") {
            Some((_, rest)) if !rest.contains('/') => format!("{}/", self.bucket_url),
            _ => self.bucket_url.clone(),
        }
    }

    fn object_url(&self, key: &str) -> String {
        format!("{}/{}", self.bucket_url, spelled(key))
    }
}

/// All of an answer that has so many bytes at most; `what` names it in an error.
pub(crate) async fn whole(
    body: Incoming,
    bytes_max: usize,
    what: &str,
    asked: &impl Fn() -> Request,
) -> Result<Bytes, UfsError> {
    let broken = |error: Box<dyn std::error::Error + Send + Sync>| UfsError::Unavailable {
        request: asked(),
        reason: format!("{what} broke off: {error}"),
    };
    Ok(Limited::new(body, bytes_max).collect().await.map_err(broken)?.to_bytes())
}

/// An ETag as a header carries it.
pub(crate) fn if_match(etag: &str) -> String {
    if etag.starts_with("W/") { etag.to_owned() } else { format!("\"{etag}\"") }
}

impl ObjectStore for S3Store {
    fn list<'a>(&'a self, request: ListRequest<'a>) -> Answer<'a, StorePage> {
        self.list_page(request).map_err(|error| self.denied(error)).boxed()
    }

    fn head<'a>(&'a self, key: &'a str) -> Answer<'a, ObjectMeta> {
        let explain = move |error| async move { Err(self.denied(self.explained(error, key).await)) };
        self.stat(key).or_else(explain).boxed()
    }

    fn get<'a>(&'a self, key: &'a str, etag: &'a str, range: Range<u64>) -> Answer<'a, Body> {
        let explain = move |error| async move { Err(self.denied(self.explained(error, key).await)) };
        self.open(key, etag, None, range).or_else(explain).boxed()
    }

    fn version_of<'a>(&'a self, key: &'a str, etag: &'a str) -> Answer<'a, Option<String>> {
        self.find_version(key, etag).map_err(|error| self.denied(error)).boxed()
    }

    fn get_version<'a>(&'a self, id: &'a str, key: &'a str, etag: &'a str, range: Range<u64>) -> Answer<'a, Body> {
        self.open(key, etag, Some(id), range).map_err(|error| self.denied(error)).boxed()
    }

    fn change<'a>(&'a self, request: ChangeRequest<'a>) -> Answer<'a, String> {
        self.send_change(request).map_err(|error| self.denied(error)).boxed()
    }

    fn capabilities(&self) -> Capabilities {
        // Directory buckets list in no order, and from the beginning only.
        let ordered_listings = !self.bucket.ends_with("--x-s3");
        Capabilities { ordered_listings, start_after: ordered_listings, ..Scheme::S3.capabilities() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ufs::Ufs;

    #[tokio::test]
    async fn directory_buckets_promise_no_order() {
        for (uri, is_ordered) in [("s3://train", true), ("s3://train--use1-az4--x-s3/p", false)] {
            let ufs = Ufs::open(uri, &HashMap::new(), &schema::Ufs::default()).unwrap();
            let (ordered_listings, start_after) = (is_ordered, is_ordered);
            let expected = Capabilities { ordered_listings, start_after, ..Scheme::S3.capabilities() };
            assert_eq!(ufs.capabilities(), expected);
        }
    }
}
