//! HEADs of objects.

use bytes::Bytes;
use http::{Request as HttpRequest, StatusCode};

use super::S3Store;
use super::listing::described_by_head;
use crate::error::{Operation, Request, UfsError};
use crate::object::ObjectMeta;

impl S3Store {
    pub(super) async fn stat(&self, key: &str) -> Result<ObjectMeta, UfsError> {
        let asked = || Request::new(Operation::Head, &self.label, key);
        let request = self.signed(HttpRequest::head(self.object_url(key)).body(Bytes::new()), &asked).await?;
        let response = self.transport.send(request).await.map_err(|failure| failure.into_ufs(asked(), ""))?;
        if response.status() != StatusCode::OK {
            let reason = format!("it answered {}", response.status().as_u16());
            return Err(UfsError::Malformed { request: asked(), reason });
        }
        let metadata_name = |name: &str| Some(name.strip_prefix("x-amz-meta-")?.to_owned());
        let described = described_by_head(key, response.headers(), metadata_name);
        described.ok_or_else(|| UfsError::lacking(&asked(), "Content-Length"))
    }
}
