//! Requests that change a bucket, with their metadata and conditions.

use std::fmt::Write as _;

use bytes::Bytes;
use http::header::{ETAG, IF_MATCH, IF_NONE_MATCH};
use http::request::Builder;
use http::{HeaderMap, HeaderValue, Method, Request as HttpRequest, StatusCode};
use percent_encoding::utf8_percent_encode;

use super::failure::Failure;
use super::listing::{QUERY, element, error_document, header_text, unquoted};
use super::signing::spelled;
use super::{S3Store, if_match, whole};
use crate::error::{Request, UfsError};
use crate::object::{Metadata, Precondition};
use crate::store::{Change, ChangeRequest, CopySource};

/// Answers to changes are short.
pub(crate) const ANSWER_BYTES: usize = 64 << 10;

/// The parts of an answer that say what was made.
struct WriteReply {
    etag: String,
    document: Bytes,
}

impl S3Store {
    pub(super) async fn send_change(&self, request: ChangeRequest<'_>) -> Result<String, UfsError> {
        let asked = || Request::new(request.operation(), &self.label, request.key);
        let replaces = replaces_of(&request.change);
        let mut answer = self.exchange(&request, &asked).await?;
        if replaces != Precondition::Anything
            && matches!(&answer, Err(Failure::Status { status: StatusCode::NOT_IMPLEMENTED, .. }))
        {
            // A store that does not know conditions of writes is written to without.
            let unconditional = ChangeRequest { change: request.change.unconditional(), ..request };
            answer = self.exchange(&unconditional, &asked).await?;
        }
        let made = answer.and_then(|reply| made(&request.change, reply));
        made.map_err(|failure| failure.into_ufs(asked(), replaces.version()))
    }

    /// One exchange; the inner result is what the store had to say.
    async fn exchange(
        &self,
        request: &ChangeRequest<'_>,
        asked: &impl Fn() -> Request,
    ) -> Result<Result<WriteReply, Failure>, UfsError> {
        let (method, query, body, metadata) = spoken(&request.change);
        let copied = copied_of(&request.change);
        let url = format!("{}{query}", self.object_url(request.key));
        let unsigned = HttpRequest::builder().method(method).uri(url);
        let mut unsigned = on_condition(unsigned, replaces_of(&request.change));
        if let Some((source, bytes)) = copied {
            let from = format!("/{}/{}", spelled(&self.bucket), spelled(source.key));
            unsigned = unsigned.header("x-amz-copy-source", from);
            unsigned = unsigned.header("x-amz-copy-source-if-match", if_match(source.etag));
            if bytes.is_none() && metadata.is_some() {
                unsigned = unsigned.header("x-amz-metadata-directive", HeaderValue::from_static("REPLACE"));
            }
            if let Some((first, last)) = bytes {
                unsigned = unsigned.header("x-amz-copy-source-range", format!("bytes={first}-{last}"));
            }
        }
        for (name, value) in metadata.into_iter().flatten() {
            unsigned = unsigned.header(format!("x-amz-meta-{name}"), value);
        }
        let request = self.signed(unsigned.body(body), asked).await?;
        let response = match self.transport.send(request).await {
            Ok(response) => response,
            Err(failure) => return Ok(Err(failure)),
        };
        let etag = unquoted(header_text(response.headers(), ETAG)).to_owned();
        let document = whole(response.into_body(), ANSWER_BYTES, "the answer", asked).await?;
        Ok(Ok(WriteReply { etag, document }))
    }
}

/// The ETag of what was made, as the head of the answer has it.
pub(crate) fn made_etag(asked: &Request, headers: &HeaderMap) -> Result<String, UfsError> {
    match unquoted(header_text(headers, ETAG)) {
        "" => Err(UfsError::lacking(asked, "ETag")),
        etag => Ok(etag.to_owned()),
    }
}

/// A write that the store makes only if there is what it replaces.
pub(crate) fn on_condition(request: Builder, replaces: Precondition<'_>) -> Builder {
    match replaces {
        Precondition::Anything => request,
        Precondition::Nothing => request.header(IF_NONE_MATCH, HeaderValue::from_static("*")),
        Precondition::Version(etag) => request.header(IF_MATCH, if_match(etag)),
    }
}

fn replaces_of<'a>(change: &Change<'a>) -> Precondition<'a> {
    match change {
        Change::Put { replaces, .. } | Change::Complete { replaces, .. } | Change::Delete { replaces } => *replaces,
        Change::Begin { .. }
        | Change::Part { .. }
        | Change::Abort { .. }
        | Change::Copy { .. }
        | Change::CopyPart { .. } => Precondition::Anything,
    }
}

/// What is copied, and which bytes of it if not all.
fn copied_of<'a>(change: &Change<'a>) -> Option<(CopySource<'a>, Option<(u64, u64)>)> {
    match change {
        Change::Copy { source, .. } => Some((*source, None)),
        Change::CopyPart { source, bytes, .. } => Some((*source, Some(*bytes))),
        _ => None,
    }
}

/// The document that ends an upload.
pub(crate) fn completion(parts: &[String]) -> Bytes {
    let mut document = String::from("<CompleteMultipartUpload>");
    for (number, etag) in (1..).zip(parts) {
        // An ETag is a name of the store's own making; what XML would not carry is no ETag.
        let etag = etag.replace('&', "&amp;").replace('<', "&lt;");
        let _ = write!(document, "<Part><PartNumber>{number}</PartNumber><ETag>\"{etag}\"</ETag></Part>");
    }
    document.push_str("</CompleteMultipartUpload>");
    document.into()
}

/// Method, query, body and metadata of a change.
fn spoken<'a>(change: &Change<'a>) -> (Method, String, Bytes, Option<&'a Metadata>) {
    let of_upload = |upload: &str| format!("uploadId={}", utf8_percent_encode(upload, QUERY));
    match *change {
        Change::Put { body, metadata, .. } => (Method::PUT, String::new(), body.clone(), Some(metadata)),
        Change::Begin { metadata } => (Method::POST, "?uploads=".to_owned(), Bytes::new(), Some(metadata)),
        Change::Part { upload, number, body } => {
            (Method::PUT, format!("?partNumber={number}&{}", of_upload(upload)), body.clone(), None)
        }
        Change::Complete { upload, parts, .. } => {
            (Method::POST, format!("?{}", of_upload(upload)), completion(parts), None)
        }
        Change::Abort { upload } => (Method::DELETE, format!("?{}", of_upload(upload)), Bytes::new(), None),
        Change::Delete { .. } => (Method::DELETE, String::new(), Bytes::new(), None),
        Change::Copy { metadata, .. } => (Method::PUT, String::new(), Bytes::new(), metadata),
        Change::CopyPart { upload, number, .. } => {
            (Method::PUT, format!("?partNumber={number}&{}", of_upload(upload)), Bytes::new(), None)
        }
    }
}

/// What the answer to a change says was made.
fn made(change: &Change<'_>, reply: WriteReply) -> Result<String, Failure> {
    let named = |name: Option<String>, what: &str| {
        name.filter(|name| !name.is_empty()).ok_or_else(|| Failure::MalformedReply(format!("its answer has no {what}")))
    };
    match change {
        Change::Put { .. } | Change::Part { .. } => named(Some(reply.etag), "ETag"),
        Change::Begin { .. } => {
            named(element(&reply.document, &["InitiateMultipartUploadResult", "UploadId"]), "UploadId")
        }
        Change::Complete { .. } | Change::Copy { .. } | Change::CopyPart { .. } => {
            // The store says 200 before it has made the object, so as to keep the connection alive.
            let (code, _) = error_document(&reply.document);
            if !code.is_empty() {
                return Err(Failure::status(status_of(&code), &HeaderMap::new(), &reply.document));
            }
            let result = match change {
                Change::Copy { .. } => "CopyObjectResult",
                Change::CopyPart { .. } => "CopyPartResult",
                _ => "CompleteMultipartUploadResult",
            };
            let etag = element(&reply.document, &[result, "ETag"]);
            named(etag.map(|etag| unquoted(etag.trim()).to_owned()), "ETag")
        }
        Change::Abort { .. } | Change::Delete { .. } => Ok(String::new()),
    }
}

/// The status that an error has which comes under that of a success.
fn status_of(code: &str) -> StatusCode {
    match code {
        "PreconditionFailed" => StatusCode::PRECONDITION_FAILED,
        "NoSuchUpload" | "NoSuchKey" => StatusCode::NOT_FOUND,
        "AccessDenied" => StatusCode::FORBIDDEN,
        "ConditionalRequestConflict" | "OperationAborted" => StatusCode::CONFLICT,
        "InvalidPart" | "InvalidPartOrder" | "EntityTooSmall" | "InvalidRequest" => StatusCode::BAD_REQUEST,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}
