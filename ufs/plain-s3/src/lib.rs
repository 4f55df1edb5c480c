//! A plain S3 client: it signs a request, sends it and answers what came back. `cv local seed` fills buckets with it,
//! and tests, of the embedded store and end to end, use it as a second opinion that shares no code with what they test.
//!
//! Keys reach the server byte for byte (`a/../b`, `//`, a trailing `/`), since the path is escaped and sent as it is.
//! There are no retries and no deadlines: who needs them has `cavern-ufs`. Only `http://` endpoints, path style.

use std::fmt::Write as _;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::TryStreamExt as _;
use http::header::{CONTENT_LENGTH, ETAG, RANGE};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Frame;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use reqsign_aws_v4::{Credential, RequestSigner};
use reqsign_core::{Context, SignRequest as _};
use thiserror::Error;
use tokio::fs::File;
use tokio_util::io::ReaderStream;

/// What the embedded store and most others take when the client does not care.
const REGION: &str = "us-east-1";
/// Read from a file at a time.
const FILE_PIECE_BYTES: usize = 1 << 20;

type Body = BoxBody<Bytes, io::Error>;

/// Why a request has no good answer.
#[derive(Debug, Error)]
pub enum PlainS3Error {
    #[error("{0} is no endpoint of this client: write it as http://host:port")]
    Endpoint(String),
    #[error("{endpoint}: {cause}")]
    Connection { endpoint: String, cause: String },
    /// The server's own words are in `body`.
    #[error("{method} /{bucket}/{key}: {status} {body}")]
    Refused { method: Method, bucket: String, key: String, status: StatusCode, body: String },
}

/// What came back.
#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Answer {
    /// The ETag without its quotes; empty when there is none.
    pub fn etag(&self) -> &str {
        self.headers.get(ETAG).and_then(|etag| etag.to_str().ok()).unwrap_or_default().trim_matches('"')
    }
}

/// A client of one endpoint with one pair of keys. Cheap to clone; clones share connections.
#[derive(Clone)]
pub struct PlainS3 {
    authority: String,
    signer: Arc<RequestSigner>,
    keys: Credential,
    client: Client<HttpConnector, Body>,
}

impl PlainS3 {
    /// A client of `endpoint` (`http://host:port`); connects when first used.
    ///
    /// # Errors
    /// `Endpoint` when that is something else.
    pub fn new(endpoint: &str, access_key: &str, secret_key: &str) -> Result<Self, PlainS3Error> {
        let authority = endpoint.strip_prefix("http://").map(|rest| rest.trim_end_matches('/'));
        let authority = authority
            .filter(|authority| !authority.is_empty() && !authority.contains('/'))
            .filter(|authority| HeaderValue::from_str(authority).is_ok())
            .ok_or_else(|| PlainS3Error::Endpoint(endpoint.to_owned()))?;
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        Ok(Self {
            authority: authority.to_owned(),
            signer: Arc::new(RequestSigner::new("s3", REGION)),
            keys: Credential {
                access_key_id: access_key.to_owned(),
                secret_access_key: secret_key.to_owned(),
                ..Credential::default()
            },
            client: Client::builder(TokioExecutor::new()).build(connector),
        })
    }

    /// Makes a bucket; one that is already ours is a success.
    pub async fn create_bucket(&self, bucket: &str) -> Result<(), PlainS3Error> {
        match self.send(Method::PUT, bucket, "", "", HeaderMap::new(), Bytes::new()).await {
            Err(PlainS3Error::Refused { status: StatusCode::CONFLICT, body, .. })
                if body.contains("BucketAlreadyOwnedByYou") =>
            {
                Ok(())
            }
            answer => answer.map(|_| ()),
        }
    }

    /// Stores an object; answers its ETag.
    pub async fn put(&self, bucket: &str, key: &str, content: impl Into<Bytes>) -> Result<String, PlainS3Error> {
        let answer = self.send(Method::PUT, bucket, key, "", HeaderMap::new(), content.into()).await?;
        Ok(answer.etag().to_owned())
    }

    /// Stores `length` bytes of a file, without holding them in memory; answers the ETag.
    pub async fn put_file(&self, bucket: &str, key: &str, file: File, length: u64) -> Result<String, PlainS3Error> {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_LENGTH, length.into());
        let pieces = ReaderStream::with_capacity(file, FILE_PIECE_BYTES).map_ok(Frame::data);
        let body = BodyExt::boxed(StreamBody::new(pieces));
        Ok(self.exchange(Method::PUT, bucket, key, "", headers, body).await?.etag().to_owned())
    }

    /// A whole object.
    pub async fn get(&self, bucket: &str, key: &str) -> Result<Bytes, PlainS3Error> {
        Ok(self.send(Method::GET, bucket, key, "", HeaderMap::new(), Bytes::new()).await?.body)
    }

    /// Bytes `first..=last` of an object.
    pub async fn get_range(&self, bucket: &str, key: &str, first: u64, last: u64) -> Result<Bytes, PlainS3Error> {
        let mut headers = HeaderMap::new();
        if let Ok(range) = HeaderValue::from_str(&format!("bytes={first}-{last}")) {
            headers.insert(RANGE, range);
        }
        Ok(self.send(Method::GET, bucket, key, "", headers, Bytes::new()).await?.body)
    }

    /// Removes an object; one that is not there is a success, as S3 has it.
    pub async fn delete(&self, bucket: &str, key: &str) -> Result<(), PlainS3Error> {
        self.send(Method::DELETE, bucket, key, "", HeaderMap::new(), Bytes::new()).await.map(|_| ())
    }

    /// Path and query of a presigned GET of an object: whoever has them may send it, with any headers, for `lasting`
    /// (in whole seconds).
    pub async fn presigned(&self, bucket: &str, key: &str, lasting: Duration) -> Result<String, PlainS3Error> {
        let parts = self.signed(Method::GET, bucket, key, "", HeaderMap::new(), Some(lasting)).await?;
        Ok(parts.uri.path_and_query().map(ToString::to_string).unwrap_or_default())
    }

    /// Any request: `key` unescaped and empty for the bucket itself, `query` as it goes over the wire, its parameters
    /// sorted.
    ///
    /// # Errors
    /// `Refused` with any status but success, `Connection` when nothing came back.
    pub async fn send(
        &self,
        method: Method,
        bucket: &str,
        key: &str,
        query: &str,
        headers: HeaderMap,
        body: Bytes,
    ) -> Result<Answer, PlainS3Error> {
        let body = Full::new(body).map_err(|never| match never {}).boxed();
        self.exchange(method, bucket, key, query, headers, body).await
    }

    async fn exchange(
        &self,
        method: Method,
        bucket: &str,
        key: &str,
        query: &str,
        headers: HeaderMap,
        body: Body,
    ) -> Result<Answer, PlainS3Error> {
        let parts = self.signed(method.clone(), bucket, key, query, headers, None).await?;
        let request = Request::from_parts(parts, body);
        let response = self.client.request(request).await.map_err(|error| self.broken(&error))?;
        let (parts, body) = response.into_parts();
        let body = body.collect().await.map_err(|error| self.broken(&error))?.to_bytes();
        if parts.status.is_success() {
            return Ok(Answer { status: parts.status, headers: parts.headers, body });
        }
        Err(PlainS3Error::Refused {
            method,
            bucket: bucket.to_owned(),
            key: key.to_owned(),
            status: parts.status,
            body: String::from_utf8_lossy(&body).into_owned(),
        })
    }

    /// The head of a request with its signature: among the headers, or for `lasting` in the query.
    async fn signed(
        &self,
        method: Method,
        bucket: &str,
        key: &str,
        query: &str,
        headers: HeaderMap,
        lasting: Option<Duration>,
    ) -> Result<Parts, PlainS3Error> {
        let path = format!("/{}/{}", escape(bucket), escape(key));
        let path = if key.is_empty() { path.trim_end_matches('/').to_owned() } else { path };
        let target = if query.is_empty() { path } else { format!("{path}?{query}") };
        let request = Request::builder().method(method).uri(format!("http://{}{target}", self.authority));
        let (mut parts, ()) = request.body(()).map_err(|error| self.broken(&error))?.into_parts();
        parts.headers = headers;
        let signed = self.signer.sign_request(&Context::new(), &mut parts, Some(&self.keys), lasting).await;
        signed.map_err(|error| self.broken(&error))?;
        Ok(parts)
    }

    fn broken(&self, error: &dyn std::error::Error) -> PlainS3Error {
        PlainS3Error::Connection { endpoint: self.authority.clone(), cause: causes(error) }
    }
}

/// All but unreserved characters and `/` as `%XX`, as S3 wants the path of a canonical request.
fn escape(text: &str) -> String {
    text.bytes().fold(String::with_capacity(text.len()), |mut escaped, byte| {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => escaped.push(byte.into()),
            // Writing to a String cannot fail.
            _ => drop(write!(escaped, "%{byte:02X}")),
        }
        escaped
    })
}

fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(source) = cause {
        text = format!("{text}: {source}");
        cause = source.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use cavern_dev_s3::{DevS3, DevS3Config};

    use super::*;

    #[tokio::test]
    async fn objects_come_back_under_the_very_key() {
        let root = tempfile::tempdir().unwrap();
        let mut config = DevS3Config::new(root.path());
        config.access_key = "AK".into();
        config.secret_key = "secret/+=".into();
        let server = DevS3::start(config).await.unwrap();
        let s3 = PlainS3::new(&server.endpoint(), "AK", "secret/+=").unwrap();
        s3.create_bucket("bucket").await.unwrap();
        s3.create_bucket("bucket").await.unwrap();
        let keys = ["a", "a/b", "a/../b", "x//y", "tail/", "sp ace", "pct%2Fé+ü&=?#", "./dot", "~-_.!*'()"];
        for key in keys {
            assert!(!s3.put("bucket", key, key).await.unwrap().is_empty());
        }
        for key in keys {
            assert_eq!(s3.get("bucket", key).await.unwrap(), key);
        }
        let long = root.path().join("long");
        std::fs::write(&long, vec![7; 3_000_001]).unwrap();
        s3.put_file("bucket", "long", File::open(&long).await.unwrap(), 3_000_001).await.unwrap();
        assert!(s3.get("bucket", "long").await.unwrap() == vec![7; 3_000_001]);
        assert_eq!(s3.get_range("bucket", "sp ace", 1, 3).await.unwrap(), "p a");
        s3.delete("bucket", "a").await.unwrap();
        let gone = s3.get("bucket", "a").await.unwrap_err();
        assert!(matches!(gone, PlainS3Error::Refused { status: StatusCode::NOT_FOUND, .. }), "{gone}");
        let wrong = PlainS3::new(&server.endpoint(), "AK", "other").unwrap().get("bucket", "a/b").await.unwrap_err();
        assert!(matches!(wrong, PlainS3Error::Refused { status: StatusCode::FORBIDDEN, .. }), "{wrong}");
        server.stop().await;
    }

    #[test]
    fn paths_are_escaped_once_and_slashes_stay() {
        assert_eq!(escape("a/../b c+%é"), "a/../b%20c%2B%25%C3%A9");
    }

    #[test]
    fn endpoints_of_another_kind_are_refused() {
        for endpoint in ["https://h:1", "h:1", "http://", "http://h/path", "http://h\n"] {
            assert!(matches!(PlainS3::new(endpoint, "a", "b"), Err(PlainS3Error::Endpoint(_))), "{endpoint}");
        }
    }
}
