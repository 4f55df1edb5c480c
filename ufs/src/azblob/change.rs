//! Requests that change a container.

use std::fmt::Write as _;
use std::time::Duration;

use bytes::Bytes;
use cavern_conf::host;
use http::header::IF_MATCH;
use http::request::Builder;
use http::{HeaderMap, Request as HttpRequest};
use percent_encoding::{percent_decode_str, utf8_percent_encode};
use reqsign_core::hash::base64_encode;

use super::{AzblobStore, METADATA};
use crate::error::{Request, UfsError};
use crate::object::{Metadata, Precondition};
use crate::s3::if_match;
use crate::s3::listing::{QUERY, header_text};
use crate::s3::write::{made_etag, on_condition};
use crate::store::{Change, ChangeRequest, CopySource};

/// A copy that is not done at once is looked at again after this, doubled each time up to that.
const LOOK: Duration = Duration::from_millis(50);
const LOOK_MAX: Duration = Duration::from_secs(2);

/// An upload: its name, and what its blob will have beside its bytes. In its id the two are apart by a `?`.
struct Upload<'a> {
    name: &'a str,
    metadata: Metadata,
}

impl<'a> Upload<'a> {
    /// The id of a new one.
    fn begin(metadata: &Metadata) -> String {
        let mut id = host::unique_name() + "?";
        for (name, value) in metadata {
            // Writing to a String cannot fail.
            let _ = write!(id, "{name}={}&", utf8_percent_encode(value, QUERY));
        }
        id
    }

    fn of(id: &'a str) -> Self {
        let (name, pairs) = id.split_once('?').unwrap_or((id, ""));
        let decoded = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
        let pairs = pairs.split('&').filter_map(|pair| pair.split_once('='));
        Self { name, metadata: pairs.map(|(name, value)| (name.to_owned(), decoded(value))).collect() }
    }

    /// The name of a block: all of a blob are of one length.
    fn block(&self, number: u32) -> String {
        base64_encode(format!("{}{number:05}", self.name).as_bytes())
    }
}

fn with_metadata(request: Builder, metadata: &Metadata) -> Builder {
    let add = |request: Builder, (name, value): (&String, &String)| {
        request.header(format!("{METADATA}{}", name.replace('-', "_")), value)
    };
    metadata.iter().fold(request, add)
}

impl AzblobStore {
    pub(super) async fn send_change(&self, request: ChangeRequest<'_>) -> Result<String, UfsError> {
        let asked = self.asked(request.operation(), request.key);
        let put = |query: &str| Ok::<_, UfsError>(HttpRequest::put(self.object_url(&asked, query)?));
        match request.change {
            Change::Put { body, metadata, replaces } => {
                let unsent = with_metadata(put("")?.header("x-ms-blob-type", "BlockBlob"), metadata);
                let headers =
                    self.sent(on_condition(unsent, replaces), body.clone(), &asked, replaces.version()).await?;
                made_etag(&asked, &headers)
            }
            Change::Begin { metadata } => self.object_url(&asked, "").map(|_| Upload::begin(metadata)),
            Change::Part { upload, number, body } => {
                let block = Upload::of(upload).block(number);
                let query = format!("comp=block&blockid={}", utf8_percent_encode(&block, QUERY));
                self.sent(put(&query)?, body.clone(), &asked, "").await?;
                Ok(block)
            }
            Change::Complete { upload, parts, replaces } => {
                let mut blocks = String::from("<?xml version=\"1.0\" encoding=\"utf-8\"?><BlockList>");
                for block in parts {
                    // Writing to a String cannot fail.
                    let _ = write!(blocks, "<Uncommitted>{block}</Uncommitted>");
                }
                blocks.push_str("</BlockList>");
                let unsent = with_metadata(put("comp=blocklist")?, &Upload::of(upload).metadata);
                let headers =
                    self.sent(on_condition(unsent, replaces), blocks.into(), &asked, replaces.version()).await?;
                made_etag(&asked, &headers)
            }
            // The service takes its blocks away by itself.
            Change::Abort { .. } => Ok(String::new()),
            Change::Delete { replaces } => self.delete(&asked, replaces).await,
            Change::Copy { source, metadata: Some(metadata) } if source.key == request.key => {
                let unsent = with_metadata(put("comp=metadata")?, metadata).header(IF_MATCH, if_match(source.etag));
                let headers = self.sent(unsent, Bytes::new(), &asked, source.etag).await?;
                made_etag(&asked, &headers)
            }
            Change::Copy { source, metadata } => self.copy(&asked, source, metadata).await,
            Change::CopyPart { .. } => {
                let reason = "Azure copies whole blobs only with these credentials".to_owned();
                Err(UfsError::Rejected { request: asked, reason })
            }
        }
    }

    /// The head of the answer to a request.
    async fn sent(&self, unsigned: Builder, body: Bytes, asked: &Request, etag: &str) -> Result<HeaderMap, UfsError> {
        Ok(self.exchange(unsigned, body, asked, etag).await?.into_parts().0.headers)
    }

    async fn delete(&self, asked: &Request, replaces: Precondition<'_>) -> Result<String, UfsError> {
        let unsent = on_condition(HttpRequest::delete(self.object_url(asked, "")?), replaces);
        match self.sent(unsent, Bytes::new(), asked, replaces.version()).await {
            Ok(_) => Ok(String::new()),
            // It also says so of a blob that is not there.
            Err(changed @ UfsError::VersionChanged { .. }) => match self.stat(asked.key()).await {
                Err(UfsError::NotFound { .. }) => Err(UfsError::NotFound { request: asked.clone() }),
                _ => Err(changed),
            },
            Err(error) => Err(error),
        }
    }

    async fn copy(
        &self,
        asked: &Request,
        source: CopySource<'_>,
        metadata: Option<&Metadata>,
    ) -> Result<String, UfsError> {
        let unsent = HttpRequest::put(self.object_url(asked, "")?)
            .header("x-ms-copy-source", self.url(source.key, ""))
            .header("x-ms-source-if-match", if_match(source.etag));
        let unsent = metadata.into_iter().fold(unsent, with_metadata);
        let mut headers = self.sent(unsent, Bytes::new(), asked, source.etag).await?;
        let copy = header_text(&headers, "x-ms-copy-id").to_owned();
        let mut pause = LOOK;
        loop {
            match header_text(&headers, "x-ms-copy-status") {
                _ if header_text(&headers, "x-ms-copy-id") != copy => {
                    return Err(UfsError::version_changed(asked.clone(), "", "another version has replaced it"));
                }
                "pending" => {}
                "failed" | "aborted" => {
                    let reason = format!("the copy ended: {}", header_text(&headers, "x-ms-copy-status-description"));
                    return Err(UfsError::Rejected { request: asked.clone(), reason });
                }
                _ => return made_etag(asked, &headers),
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LOOK_MAX);
            headers = self.sent(HttpRequest::head(self.object_url(asked, "")?), Bytes::new(), asked, "").await?;
        }
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::super::metadata_name;
    use super::*;
    use crate::s3::listing::described_by_head;

    #[test]
    fn an_uploads_id_carries_its_metadata() {
        let metadata: Metadata = [("cavern-write", "a&b=?c"), ("mode", "33188"), ("odd", "")]
            .map(|(n, v)| (n.to_owned(), v.to_owned()))
            .into();
        let id = Upload::begin(&metadata);
        let upload = Upload::of(&id);
        assert_eq!((upload.metadata.clone(), upload.name.len()), (metadata, 32));
        assert_eq!(Upload::of(&Upload::begin(&Metadata::new())).metadata, Metadata::new());
        let blocks = [1, 10_000].map(|number| upload.block(number));
        assert!(blocks[0] != blocks[1] && blocks[0].len() == blocks[1].len(), "{blocks:?}");
        // Azure takes 64 bytes before they are encoded.
        assert!(blocks[0].len() <= 64usize.div_ceil(3) * 4);
    }

    #[test]
    fn names_of_metadata_have_no_hyphen_there() {
        let metadata = [("cavern-write".to_owned(), "w".to_owned())].into();
        let (parts, ()) = with_metadata(HttpRequest::put("http://h/x"), &metadata).body(()).unwrap().into_parts();
        assert_eq!(parts.headers["x-ms-meta-cavern_write"], "w");
        let mut headers = parts.headers;
        headers.insert("content-length", HeaderValue::from_static("5"));
        let head = described_by_head("k", &headers, metadata_name);
        assert_eq!(head.unwrap().metadata, metadata);
    }
}
