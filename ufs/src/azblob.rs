//! `azblob://`: containers of Azure Blob Storage.
//!
//! An object is a block blob. An upload in parts has no request at its beginning: its parts are blocks that nobody
//! sees, named after an id made here, which also carries the metadata to the end, where the blocks become the blob.
//! Nothing takes blocks away that were left; the service does after a week, or when the blob is written.
//!
//! Names are keys, but for what Azure takes for another name (it leaves out dots at the end of a component, and `\` is
//! `/`) and control characters: such a blob is hidden, and such a key refused.

mod change;
mod listing;
mod options;
mod signing;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use cavern_conf::schema;
use cavern_proto::azblob_options::ENDPOINT;
use cavern_proto::{Capabilities, Scheme};
use futures::FutureExt;
use http::header::{ETAG, IF_MATCH};
use http::request::Builder;
use http::{Request as HttpRequest, Response, StatusCode};
use hyper::body::Incoming;
use reqsign_core::time::Timestamp;

use self::options::Access;
pub(crate) use self::options::AzblobOptions;
use crate::error::{Denial, Operation, Request, UfsError};
use crate::object::ObjectMeta;
use crate::s3::failure::{Failure, behind_s, senseless};
use crate::s3::listing::{described_by_head, header_text};
use crate::s3::read::{pinned, ranged};
use crate::s3::signing::spelled;
use crate::s3::transport::Transport;
use crate::s3::{KeyError, if_match, whole};
use crate::shared_store::SharedStore;
use crate::store::{Answer, Body, ChangeRequest, ListRequest, ObjectStore, StorePage};

/// A page of a thousand names of 1,024 characters, each escaped, with what is said of each blob.
const LISTING_BYTES: usize = 24 << 20;
/// The version of the protocol; names that XML cannot carry are percent-encoded since 2021-02-12.
const VERSION: &str = "2023-11-03";
/// Metadata; a name there has no hyphen, and ours no underscore.
const METADATA: &str = "x-ms-meta-";

pub(crate) struct AzblobStore {
    transport: Transport,
    access: Access,
    /// URL of the container, without a `/` at the end.
    container_url: String,
    label: Arc<str>,
}

/// The store of this container, for what is below a prefix, and what it shares with other handles on it.
pub(crate) fn open(
    container: &str,
    prefix: &str,
    options: &HashMap<String, String>,
    conf: &schema::Ufs,
) -> Result<(AzblobStore, Arc<SharedStore>), UfsError> {
    if let Some(reason) = unusable(prefix) {
        return Err(UfsError::invalid(format!("azblob://{container}/{prefix}"), reason, "choose another prefix"));
    }
    let options = AzblobOptions::parse(options)?;
    let container_url = format!("{}/{container}", options.account_url);
    let store_id = format!("azblob+{container_url}");
    let label = format!("azblob://{container} at {}", options.account_url);
    let shared = SharedStore::of(&store_id, &label, conf.concurrency);
    let transport = shared.transport(ENDPOINT, &options.account_url, &container_url, conf)?;
    let access = options.access(conf)?;
    let label = shared.label.clone();
    Ok((AzblobStore { transport, access, container_url, label }, shared))
}

/// Why a key is no name of a blob.
fn unusable(key: &str) -> Option<&'static str> {
    if key.split('/').any(|component| component.ends_with('.')) {
        return Some("no component of a blob's name ends in a dot, which Azure leaves out");
    }
    let is_odd = |c: char| c.is_control() || c == '\\';
    key.chars().any(is_odd).then_some("no name of a blob has control characters or `\\`, which Azure takes for `/`")
}

impl AzblobStore {
    fn asked(&self, operation: Operation, key: &str) -> Request {
        Request::new(operation, &self.label, key)
    }

    /// The URL of a key, or of the container for an empty one, as it is asked for.
    fn url(&self, key: &str, query: &str) -> String {
        let mut url = self.container_url.clone();
        if !key.is_empty() {
            url.push_str(&format!("/{}", spelled(key)));
        }
        let sas = if let Access::Sas(sas) = &self.access { sas.as_str() } else { "" };
        let mut separator = '?';
        for part in [query, sas].into_iter().filter(|part| !part.is_empty()) {
            url.push(separator);
            url.push_str(part);
            separator = '&';
        }
        url
    }

    /// The URL of a request about an object.
    fn object_url(&self, asked: &Request, query: &str) -> Result<String, UfsError> {
        match unusable(asked.key()) {
            None if !asked.key().is_empty() => Ok(self.url(asked.key(), query)),
            reason => {
                let reason = reason.unwrap_or("it names no blob").to_owned();
                Err(UfsError::Rejected { request: asked.clone(), reason })
            }
        }
    }

    /// A request as it is sent.
    async fn authorized(
        &self,
        unsigned: Builder,
        body: Bytes,
        asked: &Request,
    ) -> Result<HttpRequest<Bytes>, UfsError> {
        let unsigned =
            unsigned.header("x-ms-version", VERSION).header("x-ms-date", Timestamp::now().format_http_date());
        let (mut parts, body) = unsigned.body(body).map_err(|error| senseless(error, asked))?.into_parts();
        let authorized = match &self.access {
            Access::Key(key) => key
                .sign(&mut parts, body.len())
                .map_err(|()| KeyError::Refused("the request cannot be signed with the key of the account".to_owned())),
            Access::Bearer(bearer) => bearer.authorize(&mut parts.headers).await,
            Access::None(reason) => Err(KeyError::Refused((*reason).to_owned())),
            Access::Anonymous | Access::Sas(_) => Ok(()),
        };
        authorized.map_err(|error| self.denied(error.into_ufs(asked.clone())))?;
        Ok(HttpRequest::from_parts(parts, body))
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
        let (status, code) = match &failure {
            Failure::Status { status, code, .. } => (*status, code.clone()),
            _ => (StatusCode::OK, String::new()),
        };
        let error = failure.into_ufs(asked.clone(), etag);
        match (code.as_str(), error) {
            ("ContainerNotFound" | "ContainerBeingDeleted", _) => UfsError::NoBucket { request: asked.clone() },
            ("BlobAlreadyExists", _) => UfsError::version_changed(asked.clone(), etag, "there is one already"),
            // Its blocks were used or taken away: an upload that is not there any more.
            ("InvalidBlockList", _) => UfsError::NotFound { request: asked.clone() },
            ("BlobArchived" | "BlobBeingRehydrated", UfsError::Rejected { request, reason, .. }) => {
                let remedy = "give it an online access tier, and read it again";
                UfsError::denied_for(Denial::Archived, request, reason, remedy)
            }
            ("PendingCopyOperation", UfsError::Rejected { request, reason }) => {
                UfsError::Unavailable { request, reason }
            }
            // A lease, and no version, is in the way.
            (code, UfsError::VersionChanged { request, .. }) if code.starts_with("Lease") => {
                let reason = format!("{} {code}: somebody holds a lease on the blob", status.as_u16());
                UfsError::Rejected { request, reason }
            }
            (_, UfsError::Denied { request, reason, .. })
                if status == StatusCode::UNAUTHORIZED && self.access.give_up() =>
            {
                UfsError::Unavailable { request, reason: format!("{reason}: another token is fetched") }
            }
            (_, error) => self.denied(error),
        }
    }

    /// An error, with what the access comes from.
    fn denied(&self, error: UfsError) -> UfsError {
        match error {
            UfsError::Denied { request, denial: denial @ (Denial::Credentials | Denial::Expired), reason, .. } => {
                let giver = self.access.giver();
                let remedy = format!("check {giver}, and that it may list, read and write blobs of this container");
                UfsError::denied_for(denial, request, reason, remedy)
            }
            error => error,
        }
    }

    async fn list_page(&self, request: ListRequest<'_>) -> Result<StorePage, UfsError> {
        let asked = self.asked(Operation::List, request.prefix);
        let unsigned = HttpRequest::get(self.url("", &listing::query(&request)));
        let response = self.exchange(unsigned, Bytes::new(), &asked, "").await?;
        let behind_s = behind_s(response.headers(), &[]);
        let document = whole(response.into_body(), LISTING_BYTES, "the listing", &|| asked.clone()).await?;
        let mut page = listing::parse(&document).map_err(|reason| UfsError::Malformed { request: asked, reason })?;
        page.behind_s = behind_s;
        let listed = page.page.objects.len() + page.page.prefixes.len();
        page.page.objects.retain(|object| unusable(&object.key).is_none());
        page.page.prefixes.retain(|prefix| unusable(prefix).is_none());
        page.page.hidden += (listed - page.page.objects.len() - page.page.prefixes.len()) as u64;
        Ok(page)
    }

    async fn stat(&self, key: &str) -> Result<ObjectMeta, UfsError> {
        let asked = self.asked(Operation::Head, key);
        let unsigned = HttpRequest::head(self.object_url(&asked, "")?);
        let response = self.exchange(unsigned, Bytes::new(), &asked, "").await?;
        // A hierarchical namespace has directories, which listings leave out as well.
        if header_text(response.headers(), "x-ms-resource-type") == "directory" {
            return Err(UfsError::NotFound { request: asked });
        }
        let described = described_by_head(key, response.headers(), metadata_name);
        described.ok_or_else(|| UfsError::lacking(&asked, "Content-Length"))
    }

    async fn open_range(&self, key: &str, etag: &str, range: Range<u64>) -> Result<Body, UfsError> {
        let asked = self.asked(Operation::Get, key);
        let unsigned = ranged(self.object_url(&asked, "")?, &range).map_err(|error| senseless(error, &asked))?;
        let unsigned = if etag.is_empty() { unsigned } else { unsigned.header(IF_MATCH, if_match(etag)) };
        let request = self.authorized(unsigned, Bytes::new(), &asked).await?;
        let failed = |failure: Failure, asked: Request| self.failed(failure, &asked, etag);
        pinned(&self.transport, request, &range, etag, ETAG, asked, failed).await
    }
}

/// The name of what a header has that is metadata.
fn metadata_name(header: &str) -> Option<String> {
    Some(header.strip_prefix(METADATA)?.replace('_', "-"))
}

impl ObjectStore for AzblobStore {
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
        Scheme::Azblob.capabilities()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_no_path_leads_to_is_refused() {
        for key in ["a", "a//b", "/a", "a/", " a ", "..a", "a..b", "ü/.hidden", "%2e"] {
            assert_eq!(unusable(key), None, "{key}");
        }
        for key in ["..", ".", "a.", "a/../b", "a./b", "../a", "a\u{7}", "a\nb", "a\\b", "\u{81}"] {
            assert!(unusable(key).is_some(), "{key:?}");
        }
    }

    #[test]
    fn a_signature_in_the_query_is_in_no_message() {
        let options = [("azblob.account", "acct"), ("azblob.credentials.sas", "?sv=1&sig=hush%3D")];
        let options = options.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let (store, shared) = open("data", "p/", &options, &schema::Ufs::default()).unwrap();
        assert_eq!(store.url("a b", "comp=x"), "https://acct.blob.core.windows.net/data/a%20b?comp=x&sv=1&sig=hush%3D");
        assert_eq!(store.url("", ""), "https://acct.blob.core.windows.net/data?sv=1&sig=hush%3D");
        assert_eq!(shared.store_id, "azblob+https://acct.blob.core.windows.net/data");
        assert!(!store.access.giver().contains("hush"));
        assert!(matches!(open("data", "p./", &options, &schema::Ufs::default()), Err(UfsError::Invalid { .. })));
    }
}
