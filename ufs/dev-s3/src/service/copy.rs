//! CopyObject and UploadPartCopy.

use std::sync::Arc;

use s3s::dto::*;
use s3s::{S3Result, s3_error};

use super::backend::{Backend, on_blocking_thread};
use super::conditions::ReadConditions;
use super::reply::{attributes_of, etag, timestamp};
use super::upload::Intake;
use crate::error::DevS3Error;
use crate::store::{PutCondition, Version};

/// The source of a copy, opened, if it is as the request wants it.
macro_rules! opened_source {
    ($backend:ident, $input:ident) => {{
        let (bucket, key) = source(&$input.copy_source)?;
        let (object, content) = $backend.bucket(bucket)?.open(key)?;
        let conditions = ReadConditions {
            if_match: $input.copy_source_if_match,
            if_none_match: $input.copy_source_if_none_match,
            if_modified_since: $input.copy_source_if_modified_since,
            if_unmodified_since: $input.copy_source_if_unmodified_since,
        };
        // Where a read is answered 304, a copy is answered 412.
        let refused = |_| DevS3Error::Precondition("x-amz-copy-source-if-*");
        conditions.check(&object).map_err(refused)?;
        (object, content)
    }};
}

/// The kernel copies, so a copy keeps its source's ETag, also that of a multipart upload.
pub(super) async fn copy_object(backend: &Backend, input: CopyObjectInput) -> S3Result<CopyObjectOutput> {
    let target = backend.bucket(&input.bucket)?;
    let (object, content) = opened_source!(backend, input);
    let replace = input.metadata_directive.is_some_and(|directive| directive.as_str() == MetadataDirective::REPLACE);
    let (source_bucket, source_key) = source(&input.copy_source)?;
    if !replace && source_bucket == input.bucket && source_key == input.key {
        return Err(s3_error!(InvalidRequest, "An object can be copied to itself only with new metadata."));
    }
    let stored = object.attributes().cloned().unwrap_or_default();
    let attributes = if replace { attributes_of!(input) } else { stored };
    let version = Version { etag: object.etag.clone(), attributes };
    let key = input.key;
    let store = Arc::clone(&backend.store);
    let work = move || {
        let mut draft = store.draft()?;
        content.append_to(&mut draft, object.size)?;
        target.commit(draft, &key, version, &PutCondition::default())
    };
    let copied = on_blocking_thread(work).await?;
    let result = CopyObjectResult {
        e_tag: Some(etag(&copied.etag)),
        last_modified: Some(timestamp(copied.modified_s)),
        ..Default::default()
    };
    Ok(CopyObjectOutput { copy_object_result: Some(result), ..Default::default() })
}

pub(super) async fn upload_part_copy(backend: &Backend, input: UploadPartCopyInput) -> S3Result<UploadPartCopyOutput> {
    let number = super::multipart::part_number(input.part_number)?;
    let target = backend.bucket(&input.bucket)?;
    let (object, content) = opened_source!(backend, input);
    let range = match input.copy_source_range.as_deref() {
        None => 0..object.size,
        Some(text) => {
            let range = Range::parse(text)
                .map_err(|_| s3_error!(InvalidArgument, "x-amz-copy-source-range must be bytes=FIRST-LAST."))?;
            range.check(object.size)?
        }
    };
    let (key, id) = (input.key, input.upload_id);
    let store = Arc::clone(&backend.store);
    let work = move || {
        let received = Intake::from_content(&store, &content, range)?;
        target.put_part(&key, &id, number, received.draft, received.md5)
    };
    let part_etag = on_blocking_thread(work).await?;
    let result = CopyPartResult {
        e_tag: Some(etag(&part_etag)),
        last_modified: Some(timestamp(crate::store::now_s())),
        ..Default::default()
    };
    Ok(UploadPartCopyOutput { copy_part_result: Some(result), ..Default::default() })
}

/// Bucket and key.
fn source(source: &CopySource) -> S3Result<(&str, &str)> {
    match source {
        CopySource::Bucket { bucket, key, .. } => Ok((&**bucket, &**key)),
        _ => Err(s3_error!(NotImplemented, "A copy's source must be given as BUCKET/KEY.")),
    }
}
