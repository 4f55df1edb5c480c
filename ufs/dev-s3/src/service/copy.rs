//! CopyObject and UploadPartCopy.

use s3s::dto::*;
use s3s::{S3Request, S3Response, S3Result, s3_error};

use super::backend::Backend;
use super::conditions::ReadConditions;
use super::reply::{etag, timestamp};
use super::upload::Intake;
use crate::error::DevS3Error;
use crate::store::{Attributes, PutCondition, Version};

/// The kernel copies, so a copy keeps its source's ETag, also that of a multipart upload.
pub(super) async fn copy_object(
    backend: &Backend,
    request: S3Request<CopyObjectInput>,
) -> S3Result<S3Response<CopyObjectOutput>> {
    let input = request.input;
    let (source_bucket, source_key) = source(&input.copy_source)?;
    let target = backend.bucket(&input.bucket)?;
    let (object, file) = backend.bucket(&source_bucket)?.open(&source_key)?;
    let conditions = ReadConditions {
        if_match: input.copy_source_if_match,
        if_none_match: input.copy_source_if_none_match,
        if_modified_since: input.copy_source_if_modified_since,
        if_unmodified_since: input.copy_source_if_unmodified_since,
    };
    copy_conditions(&conditions, &object)?;
    let replace = input.metadata_directive.is_some_and(|directive| directive.as_str() == MetadataDirective::REPLACE);
    if !replace && source_bucket == input.bucket && source_key == input.key {
        return Err(s3_error!(InvalidRequest, "An object can be copied to itself only with new metadata."));
    }
    let stored = object.attributes().cloned().unwrap_or_default();
    let attributes = if replace {
        Attributes {
            content_type: input.content_type,
            cache_control: input.cache_control,
            content_disposition: input.content_disposition,
            content_encoding: input.content_encoding,
            content_language: input.content_language,
            metadata: input.metadata.unwrap_or_default().into_iter().collect(),
            checksums: stored.checksums,
        }
    } else {
        stored
    };
    let version = Version { etag: object.etag.clone(), attributes };
    let key = input.key;
    let work = move |store: &crate::store::Store| {
        let mut draft = store.draft()?;
        draft.append(&file, 0, object.size)?;
        target.commit(draft, &key, version, &PutCondition::default())
    };
    let copied = backend.blocking(work).await?;
    let result = CopyObjectResult {
        e_tag: Some(etag(&copied.etag)),
        last_modified: Some(timestamp(copied.modified_s)),
        ..Default::default()
    };
    Ok(S3Response::new(CopyObjectOutput { copy_object_result: Some(result), ..Default::default() }))
}

pub(super) async fn upload_part_copy(
    backend: &Backend,
    request: S3Request<UploadPartCopyInput>,
) -> S3Result<S3Response<UploadPartCopyOutput>> {
    let input = request.input;
    let number = super::multipart::part_number(input.part_number)?;
    let (source_bucket, source_key) = source(&input.copy_source)?;
    let target = backend.bucket(&input.bucket)?;
    let (object, file) = backend.bucket(&source_bucket)?.open(&source_key)?;
    let conditions = ReadConditions {
        if_match: input.copy_source_if_match,
        if_none_match: input.copy_source_if_none_match,
        if_modified_since: input.copy_source_if_modified_since,
        if_unmodified_since: input.copy_source_if_unmodified_since,
    };
    copy_conditions(&conditions, &object)?;
    let range = match input.copy_source_range.as_deref() {
        None => 0..object.size,
        Some(text) => {
            let range = Range::parse(text)
                .map_err(|_| s3_error!(InvalidArgument, "x-amz-copy-source-range must be bytes=FIRST-LAST."))?;
            range.check(object.size)?
        }
    };
    let (key, id) = (input.key, input.upload_id);
    let store = std::sync::Arc::clone(&backend.store);
    let work = move |_: &crate::store::Store| {
        let received = Intake::from_file(&store, &file, range)?;
        target.put_part(&key, &id, number, received.draft, received.md5)
    };
    let part_etag = backend.blocking(work).await?;
    let result = CopyPartResult {
        e_tag: Some(etag(&part_etag)),
        last_modified: Some(timestamp(crate::store::now_s())),
        ..Default::default()
    };
    Ok(S3Response::new(UploadPartCopyOutput { copy_part_result: Some(result), ..Default::default() }))
}

fn source(source: &CopySource) -> S3Result<(String, String)> {
    match source {
        CopySource::Bucket { bucket, key, .. } => Ok((bucket.to_string(), key.to_string())),
        _ => Err(s3_error!(NotImplemented, "A copy's source must be given as BUCKET/KEY.")),
    }
}

/// As for a read, but where that is answered 304 a copy is answered 412.
fn copy_conditions(conditions: &ReadConditions, object: &crate::store::Object) -> S3Result<()> {
    conditions.check(object).map_err(|_| DevS3Error::Precondition("x-amz-copy-source-if-*").into())
}
