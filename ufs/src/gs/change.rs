//! Requests that change a bucket.

use bytes::{Bytes, BytesMut};
use cavern_conf::host;
use http::header::{CONTENT_TYPE, ETAG};
use http::request::Builder;
use http::{HeaderMap, Request as HttpRequest};
use serde_json::json;

use super::reply::{GENERATION, generation};
use super::{GsStore, encoded};
use crate::error::{Request, UfsError};
use crate::object::{Metadata, Precondition};
use crate::s3::listing::{element, error_document, header_text, unquoted};
use crate::s3::whole;
use crate::s3::write::{ANSWER_BYTES, completion, made_etag};
use crate::store::{Change, ChangeRequest, CopySource};

/// Condition of a change, as its query has it.
fn condition(replaces: Precondition<'_>) -> String {
    match replaces {
        Precondition::Anything => String::new(),
        Precondition::Nothing => "&ifGenerationMatch=0".to_owned(),
        Precondition::Version(generation) => format!("&ifGenerationMatch={}", encoded(generation)),
    }
}

impl GsStore {
    pub(super) async fn send_change(&self, request: ChangeRequest<'_>) -> Result<String, UfsError> {
        let asked = self.asked(request.operation(), request.key);
        match request.change {
            Change::Put { body, metadata, replaces } => self.put(&asked, body, metadata, replaces).await,
            Change::Begin { metadata } => {
                let mut begin = HttpRequest::post(self.xml_url(&asked, "uploads"));
                for (name, value) in metadata {
                    begin = begin.header(format!("x-goog-meta-{name}"), value);
                }
                let (_, document) = self.answered(begin, Bytes::new(), &asked, "").await?;
                let id = element(&document, &["InitiateMultipartUploadResult", "UploadId"]);
                id.filter(|id| !id.is_empty()).ok_or_else(|| UfsError::lacking(&asked, "UploadId"))
            }
            Change::Part { upload, number, body } => {
                let url = self.xml_url(&asked, &format!("partNumber={number}&uploadId={}", encoded(upload)));
                let (headers, _) = self.answered(HttpRequest::put(url), body.clone(), &asked, "").await?;
                made_etag(&asked, &headers)
            }
            Change::Complete { upload, parts, .. } => self.complete(&asked, upload, parts).await,
            Change::Abort { upload } => {
                let url = self.xml_url(&asked, &format!("uploadId={}", encoded(upload)));
                self.answered(HttpRequest::delete(url), Bytes::new(), &asked, "").await.map(|_| String::new())
            }
            Change::Delete { replaces } => {
                let url = format!("{}?prettyPrint=false{}", self.object_url(request.key), condition(replaces));
                match self.answered(HttpRequest::delete(url), Bytes::new(), &asked, replaces.version()).await {
                    Ok(_) => Ok(String::new()),
                    // It may say so of an object that is not there.
                    Err(changed @ UfsError::VersionChanged { .. }) => match self.stat(request.key).await {
                        Err(UfsError::NotFound { .. }) => Err(UfsError::NotFound { request: asked }),
                        _ => Err(changed),
                    },
                    Err(error) => Err(error),
                }
            }
            Change::Copy { source, metadata } => self.copy(&asked, source, metadata).await,
            Change::CopyPart { .. } => {
                let reason = "Google Cloud Storage copies whole objects only".to_owned();
                Err(UfsError::Rejected { request: asked, reason })
            }
        }
    }

    /// The URL of a key in the XML interface.
    fn xml_url(&self, asked: &Request, query: &str) -> String {
        format!("{}/{}/{}?{query}", self.endpoint, self.bucket, encoded(asked.key()))
    }

    /// The answer to a request, whole.
    pub(super) async fn answered(
        &self,
        unsigned: Builder,
        body: Bytes,
        asked: &Request,
        etag: &str,
    ) -> Result<(HeaderMap, Bytes), UfsError> {
        let (parts, body) = self.exchange(unsigned, body, asked, etag).await?.into_parts();
        let document = whole(body, ANSWER_BYTES, "the answer", &|| asked.clone()).await?;
        Ok((parts.headers, document))
    }

    async fn put(
        &self,
        asked: &Request,
        body: &Bytes,
        metadata: &Metadata,
        replaces: Precondition<'_>,
    ) -> Result<String, UfsError> {
        let url = format!(
            "{}/upload/storage/v1/b/{}/o?uploadType=multipart&fields=generation{}",
            self.endpoint,
            self.bucket,
            condition(replaces)
        );
        // Nobody can have put this into the body.
        let boundary = host::unique_name();
        let description = json!({ "name": asked.key(), "metadata": metadata });
        let head = format!(
            "--{boundary}\r\ncontent-type: application/json; charset=UTF-8\r\n\r\n{description}\r\n--{boundary}\r\n\
             content-type: application/octet-stream\r\n\r\n"
        );
        let tail = format!("\r\n--{boundary}--\r\n");
        let mut related = BytesMut::with_capacity(head.len() + body.len() + tail.len());
        for part in [head.as_bytes(), &body[..], tail.as_bytes()] {
            related.extend_from_slice(part);
        }
        let unsigned = HttpRequest::post(url).header(CONTENT_TYPE, format!("multipart/related; boundary={boundary}"));
        let (_, document) = self.answered(unsigned, related.freeze(), asked, replaces.version()).await?;
        generation(&document, "").ok_or_else(|| UfsError::lacking(asked, "generation"))
    }

    /// Ends an upload, whatever is there.
    async fn complete(&self, asked: &Request, upload: &str, parts: &[String]) -> Result<String, UfsError> {
        let url = self.xml_url(asked, &format!("uploadId={}", encoded(upload)));
        let unsigned = HttpRequest::post(url).header(CONTENT_TYPE, "application/xml");
        let (headers, document) = self.answered(unsigned, completion(parts), asked, "").await?;
        // What takes long may be answered before it has been done.
        let (code, message) = error_document(&document);
        if !code.is_empty() {
            let reason = format!("the upload was not completed: {code}: {message}");
            return Err(UfsError::Unavailable { request: asked.clone(), reason });
        }
        let made = header_text(&headers, GENERATION);
        if !made.is_empty() {
            return Ok(made.to_owned());
        }
        let etag = element(&document, &["CompleteMultipartUploadResult", "ETag"]).unwrap_or_default();
        let url = format!("{}/{}/{}", self.endpoint, self.bucket, encoded(asked.key()));
        let (headers, _) = self.answered(HttpRequest::head(url), Bytes::new(), asked, "").await?;
        let (there, made) = (header_text(&headers, ETAG), header_text(&headers, GENERATION));
        if made.is_empty() {
            return Err(UfsError::lacking(asked, GENERATION));
        }
        if unquoted(there) != unquoted(etag.trim()) {
            return Err(UfsError::version_changed(asked.clone(), "", "another version has replaced it"));
        }
        Ok(made.to_owned())
    }

    /// A version that has been replaced is not copied, even where the bucket keeps it. What takes long is asked for
    /// until it is done.
    async fn copy(
        &self,
        asked: &Request,
        source: CopySource<'_>,
        metadata: Option<&Metadata>,
    ) -> Result<String, UfsError> {
        // Nor does it take the place of what has come since.
        let is_same = source.key == asked.key();
        let replaces = if is_same { Precondition::Version(source.etag) } else { Precondition::Anything };
        let url = format!(
            "{}/rewriteTo/b/{}/o/{}?ifSourceGenerationMatch={}&fields={}{}",
            self.object_url(source.key),
            self.bucket,
            encoded(asked.key()),
            encoded(source.etag),
            encoded("done,rewriteToken,resource(generation)"),
            condition(replaces)
        );
        let description = metadata.map_or(Bytes::new(), |metadata| json!({ "metadata": metadata }).to_string().into());
        let mut token = String::new();
        loop {
            let rest = if token.is_empty() { String::new() } else { format!("&rewriteToken={}", encoded(&token)) };
            let mut unsigned = HttpRequest::post(format!("{url}{rest}"));
            if metadata.is_some() {
                unsigned = unsigned.header(CONTENT_TYPE, "application/json");
            }
            let (_, document) = self.answered(unsigned, description.clone(), asked, source.etag).await?;
            if let Some(made) = generation(&document, "/resource") {
                return Ok(made);
            }
            let answer: serde_json::Value = serde_json::from_slice(&document).unwrap_or_default();
            match answer.get("rewriteToken").and_then(serde_json::Value::as_str) {
                Some(next) if next != token => token = next.to_owned(),
                _ => return Err(UfsError::lacking(asked, "generation")),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_are_generations() {
        assert_eq!(condition(Precondition::Anything), "");
        assert_eq!(condition(Precondition::Nothing), "&ifGenerationMatch=0");
        assert_eq!(condition(Precondition::Version("17&x")), "&ifGenerationMatch=17%26x");
    }
}
