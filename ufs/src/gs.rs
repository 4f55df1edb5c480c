//! `gs://`: Google Cloud Storage.
//!
//! Objects are asked for by its JSON interface, which has their names as they are; a version is named by its
//! *generation*, which reads and writes carry as their condition. Uploads in parts are the XML interface's alone. It
//! speaks of them as S3 does, copies nothing into a part, and knows no condition for their end, so that
//! [`Ufs`](crate::Ufs) looks at the object before it ends one.
//!
//! Bytes are asked for as they are kept (`Accept-Encoding: gzip`): those of an object with the content encoding `gzip`
//! would be unpacked on the way otherwise, and have another length than listings say.

mod change;
mod options;
mod reply;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use cavern_conf::schema;
use cavern_proto::gs_options::{ENDPOINT, KEY};
use cavern_proto::{Capabilities, Scheme};
use futures::FutureExt;
use http::header::{ACCEPT_ENCODING, HeaderName};
use http::request::Builder;
use http::{Request as HttpRequest, Response, StatusCode};
use hyper::body::Incoming;
use percent_encoding::{PercentEncode, utf8_percent_encode};

use self::options::Credentials;
pub(crate) use self::options::{GOOGLE, GsOptions};
use self::reply::GENERATION;
use crate::error::{Operation, Request, UfsError};
use crate::object::{ListMode, ObjectMeta};
use crate::s3::failure::{Failure, behind_s, senseless};
use crate::s3::listing::QUERY;
use crate::s3::read::{pinned, ranged};
use crate::s3::transport::Transport;
use crate::s3::whole;
use crate::shared_store::SharedStore;
use crate::store::{Answer, Body, ChangeRequest, ListRequest, ObjectStore, StorePage};
use crate::token::{Bearer, Source, google};

/// A page of a thousand names of 1,024 bytes, each byte escaped by six, fits.
const LISTING_BYTES: usize = 8 << 20;
/// What is wanted of an object, and of a listing.
const OBJECT: &str = "name,size,generation,updated,metadata";
const PAGE: &str = "nextPageToken,prefixes,items(name,size,generation,updated)";

pub(crate) struct GsStore {
    transport: Transport,
    /// `None` for requests that bear no token.
    bearer: Option<Bearer>,
    bucket: String,
    /// `scheme://host[:port]`.
    endpoint: String,
    label: Arc<str>,
}

/// The store of this bucket, and what it shares with other handles on it.
pub(crate) fn open(
    bucket: &str,
    options: &HashMap<String, String>,
    conf: &schema::Ufs,
) -> Result<(GsStore, Arc<SharedStore>), UfsError> {
    let options = GsOptions::parse(options)?;
    let endpoint = options.endpoint.unwrap_or_else(|| GOOGLE.to_owned());
    let (store_id, label) = (format!("gs+{endpoint}/{bucket}"), format!("gs://{bucket} at {endpoint}"));
    let shared = SharedStore::of(&store_id, &label, conf.concurrency);
    let transport = shared.transport(ENDPOINT, &endpoint, &endpoint, conf)?;
    let bearer = match options.credentials {
        Credentials::Anonymous => None,
        Credentials::Key(file) => Some(file.bearer(KEY, conf)),
        Credentials::Found(Source::Environment) => Some(google::of_environment(conf)),
        Credentials::Found(Source::Instance) => Some(google::of_instance(conf)),
    };
    let (bucket, label) = (bucket.to_owned(), shared.label.clone());
    Ok((GsStore { transport, bearer, bucket, endpoint, label }, shared))
}

fn encoded(text: &str) -> PercentEncode<'_> {
    utf8_percent_encode(text, QUERY)
}

impl GsStore {
    fn asked(&self, operation: Operation, key: &str) -> Request {
        Request::new(operation, &self.label, key)
    }

    fn objects_url(&self) -> String {
        format!("{}/storage/v1/b/{}/o", self.endpoint, self.bucket)
    }

    fn object_url(&self, key: &str) -> String {
        format!("{}/{}", self.objects_url(), encoded(key))
    }

    /// A request as it is sent.
    async fn authorized(
        &self,
        unsigned: Builder,
        body: Bytes,
        asked: &Request,
    ) -> Result<HttpRequest<Bytes>, UfsError> {
        // The URL of such an object would be that of its bucket, or of the listing.
        if asked.operation() != Operation::List && matches!(asked.key(), "" | "." | "..") {
            let reason = "no object has such a name".to_owned();
            return Err(UfsError::Rejected { request: asked.clone(), reason });
        }
        let mut request = unsigned.body(body).map_err(|error| senseless(error, asked))?;
        if let Some(bearer) = &self.bearer {
            let authorized = bearer.authorize(request.headers_mut()).await;
            authorized.map_err(|error| self.denied(error.into_ufs(asked.clone())))?;
        }
        Ok(request)
    }

    /// Sends a request that asks for the version `etag`, or for any.
    async fn exchange(
        &self,
        unsigned: Builder,
        body: Bytes,
        asked: &Request,
        etag: &str,
    ) -> Result<Response<Incoming>, UfsError> {
        let request = self.authorized(unsigned, body, asked).await?;
        self.transport.send(request).await.map_err(|failure| self.failed(failure, asked, etag))
    }

    /// What a failed exchange means.
    fn failed(&self, failure: Failure, asked: &Request, etag: &str) -> UfsError {
        let is_token_refused =
            matches!(&failure, Failure::Status { status, .. } if *status == StatusCode::UNAUTHORIZED);
        match failure.into_ufs(asked.clone(), etag) {
            UfsError::Denied { request, reason, .. }
                if is_token_refused && self.bearer.as_ref().is_some_and(Bearer::give_up) =>
            {
                UfsError::Unavailable { request, reason: format!("{reason}: another token is fetched") }
            }
            // What is made needs nothing to be there but the bucket.
            UfsError::NotFound { request } if matches!(request.operation(), Operation::Put | Operation::Begin) => {
                UfsError::NoBucket { request }
            }
            error => self.denied(error),
        }
    }

    /// An error, with who gave the token.
    fn denied(&self, error: UfsError) -> UfsError {
        let UfsError::Denied { request, denial, reason, .. } = error else { return error };
        let giver = self.bearer.as_ref().map_or("nobody, as gs.anonymous says,", Bearer::giver);
        let remedy = format!("check what {giver} gives, and that it may list, read and write objects of this bucket");
        UfsError::denied_for(denial, request, reason, remedy)
    }

    async fn list_page(&self, request: ListRequest<'_>) -> Result<StorePage, UfsError> {
        let asked = self.asked(Operation::List, request.prefix);
        let mut url = format!(
            "{}?maxResults={}&prefix={}&fields={}",
            self.objects_url(),
            request.limit,
            encoded(request.prefix),
            encoded(PAGE)
        );
        if request.mode == ListMode::Directory {
            url.push_str("&delimiter=%2F");
        }
        if let Some(after) = request.start_after {
            url.push_str(&format!("&startOffset={}", encoded(after)));
        }
        if let Some(token) = request.token {
            url.push_str(&format!("&pageToken={}", encoded(token)));
        }
        let response = self.exchange(HttpRequest::get(url), Bytes::new(), &asked, "").await?;
        let behind_s = behind_s(response.headers(), &[]);
        let document = whole(response.into_body(), LISTING_BYTES, "the listing", &|| asked.clone()).await?;
        let malformed = |reason| UfsError::Malformed { request: asked, reason };
        Ok(StorePage { behind_s, ..reply::page(&document).map_err(malformed)? })
    }

    async fn stat(&self, key: &str) -> Result<ObjectMeta, UfsError> {
        let asked = self.asked(Operation::Head, key);
        let url = format!("{}?fields={}", self.object_url(key), encoded(OBJECT));
        let (_, document) = self.answered(HttpRequest::get(url), Bytes::new(), &asked, "").await?;
        let reason = "its answer describes no object".to_owned();
        reply::object(&document).ok_or(UfsError::Malformed { request: asked, reason })
    }

    async fn open_range(&self, key: &str, etag: &str, range: Range<u64>) -> Result<Body, UfsError> {
        let asked = self.asked(Operation::Get, key);
        let condition = if etag.is_empty() { String::new() } else { format!("&ifGenerationMatch={}", encoded(etag)) };
        let url = format!("{}?alt=media{condition}", self.object_url(key));
        let unsigned = ranged(url, &range).map_err(|error| senseless(error, &asked))?;
        let request = self.authorized(unsigned.header(ACCEPT_ENCODING, "gzip"), Bytes::new(), &asked).await?;
        let failed = |failure: Failure, asked: Request| self.failed(failure, &asked, etag);
        let version = HeaderName::from_static(GENERATION);
        pinned(&self.transport, request, &range, etag, version, asked, failed).await
    }
}

impl ObjectStore for GsStore {
    fn list<'a>(&'a self, request: ListRequest<'a>) -> Answer<'a, StorePage> {
        self.list_page(request).boxed()
    }

    fn head<'a>(&'a self, key: &'a str) -> Answer<'a, ObjectMeta> {
        self.stat(key).boxed()
    }

    fn get<'a>(&'a self, key: &'a str, etag: &'a str, range: Range<u64>) -> Answer<'a, Body> {
        self.open_range(key, etag, range).boxed()
    }

    fn change<'a>(&'a self, request: ChangeRequest<'a>) -> Answer<'a, String> {
        self.send_change(request).boxed()
    }

    fn capabilities(&self) -> Capabilities {
        Scheme::Gs.capabilities()
    }
}
