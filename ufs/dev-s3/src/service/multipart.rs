//! Multipart uploads.

use hyper::HeaderMap;
use s3s::dto::*;
use s3s::{S3Result, TrailingHeaders, s3_error};

use super::backend::{Backend, on_blocking_thread};
use super::checksums::Checksums;
use super::conditions;
use super::reply::{attributes_of, etag, timestamp};
use super::upload::Intake;

/// Entries on a page of parts or uploads at most.
const PAGE_MAX: i32 = 1000;
/// Highest number of a part.
const PART_NUMBER_MAX: u32 = 10_000;

pub(super) fn part_number(number: PartNumber) -> S3Result<u32> {
    let number = u32::try_from(number).ok().filter(|number| (1..=PART_NUMBER_MAX).contains(number));
    number.ok_or_else(|| s3_error!(InvalidArgument, "Part numbers go from 1 to {PART_NUMBER_MAX}."))
}

pub(super) async fn create_multipart_upload(
    backend: &Backend,
    input: CreateMultipartUploadInput,
) -> S3Result<CreateMultipartUploadOutput> {
    let attributes = attributes_of!(input);
    let bucket = backend.bucket(&input.bucket)?;
    let key = input.key.clone();
    let id = on_blocking_thread(move || bucket.create_upload(&key, attributes)).await?;
    let output = CreateMultipartUploadOutput {
        bucket: Some(input.bucket),
        key: Some(input.key),
        upload_id: Some(id),
        ..Default::default()
    };
    Ok(output)
}

pub(super) async fn upload_part(
    backend: &Backend,
    input: UploadPartInput,
    headers: HeaderMap,
    trailers: Option<TrailingHeaders>,
) -> S3Result<UploadPartOutput> {
    let number = part_number(input.part_number)?;
    let bucket = backend.bucket(&input.bucket)?;
    let intake = Intake::new(&backend.store, Checksums::expected(headers, trailers));
    let intake = intake.receive(input.body, input.content_length).await?;
    let (key, id, content_md5) = (input.key, input.upload_id, input.content_md5);
    let part_etag = on_blocking_thread(move || {
        let received = intake.finish(content_md5.as_deref())?;
        bucket.put_part(&key, &id, number, received.draft, received.md5)
    })
    .await?;
    Ok(UploadPartOutput { e_tag: Some(etag(&part_etag)), ..Default::default() })
}

pub(super) async fn complete_multipart_upload(
    backend: &Backend,
    input: CompleteMultipartUploadInput,
) -> S3Result<CompleteMultipartUploadOutput> {
    let bucket = backend.bucket(&input.bucket)?;
    let condition = conditions::of_put(input.if_match.as_ref(), input.if_none_match.as_ref())?;
    let mut parts = Vec::new();
    for part in input.multipart_upload.and_then(|upload| upload.parts).unwrap_or_default() {
        let (Some(number), Some(part_etag)) = (part.part_number, part.e_tag) else {
            return Err(s3_error!(MalformedXML, "Every part needs a PartNumber and an ETag."));
        };
        parts.push((part_number(number)?, part_etag.into_value()));
    }
    if parts.is_empty() {
        return Err(s3_error!(MalformedXML, "An upload needs at least one part."));
    }
    let (key, id) = (input.key.clone(), input.upload_id);
    let object = on_blocking_thread(move || bucket.complete_upload(&key, &id, &parts, &condition)).await?;
    let output = CompleteMultipartUploadOutput {
        location: Some(format!("/{}/{}", input.bucket, input.key)),
        bucket: Some(input.bucket),
        key: Some(input.key),
        e_tag: Some(etag(&object.etag)),
        ..Default::default()
    };
    Ok(output)
}

pub(super) async fn abort_multipart_upload(
    backend: &Backend,
    input: AbortMultipartUploadInput,
) -> S3Result<AbortMultipartUploadOutput> {
    let bucket = backend.bucket(&input.bucket)?;
    on_blocking_thread(move || bucket.abort_upload(&input.key, &input.upload_id)).await?;
    Ok(AbortMultipartUploadOutput::default())
}

pub(super) async fn list_parts(backend: &Backend, input: ListPartsInput) -> S3Result<ListPartsOutput> {
    let limit = input.max_parts.unwrap_or(PAGE_MAX).clamp(0, PAGE_MAX);
    let after = u32::try_from(input.part_number_marker.unwrap_or(0)).unwrap_or(0);
    let bucket = backend.bucket(&input.bucket)?;
    let (parts, truncated) = bucket.list_parts(&input.key, &input.upload_id, after, limit as usize)?;
    let last = parts.last().map(|part| part.number as i32);
    let parts = parts.into_iter().map(|part| Part {
        part_number: Some(part.number as i32),
        size: Some(part.size as i64),
        e_tag: Some(etag(&part.etag)),
        last_modified: Some(timestamp(part.modified_s)),
        ..Default::default()
    });
    let output = ListPartsOutput {
        bucket: Some(input.bucket),
        key: Some(input.key),
        upload_id: Some(input.upload_id),
        max_parts: Some(limit),
        part_number_marker: input.part_number_marker,
        next_part_number_marker: last.filter(|_| truncated),
        is_truncated: Some(truncated),
        parts: Some(parts.collect()),
        ..Default::default()
    };
    Ok(output)
}

/// The delimiter is not supported: uploads are listed one by one.
pub(super) async fn list_multipart_uploads(
    backend: &Backend,
    input: ListMultipartUploadsInput,
) -> S3Result<ListMultipartUploadsOutput> {
    if input.delimiter.as_ref().is_some_and(|delimiter| !delimiter.is_empty()) {
        return Err(s3_error!(NotImplemented, "A listing of uploads takes no delimiter."));
    }
    let limit = input.max_uploads.unwrap_or(PAGE_MAX).clamp(0, PAGE_MAX);
    let bucket = backend.bucket(&input.bucket)?;
    let prefix = input.prefix.as_deref().unwrap_or_default();
    let after =
        (input.key_marker.as_deref().unwrap_or_default(), input.upload_id_marker.as_deref().unwrap_or_default());
    let page = bucket.list_uploads(prefix, after, limit as usize);
    let last = page.uploads.last().filter(|_| page.truncated);
    let output = ListMultipartUploadsOutput {
        next_key_marker: last.map(|upload| upload.key.clone()),
        next_upload_id_marker: last.map(|upload| upload.id.clone()),
        bucket: Some(input.bucket),
        prefix: input.prefix,
        key_marker: input.key_marker,
        upload_id_marker: input.upload_id_marker,
        max_uploads: Some(limit),
        is_truncated: Some(page.truncated),
        uploads: Some(
            page.uploads
                .into_iter()
                .map(|upload| MultipartUpload {
                    key: Some(upload.key),
                    upload_id: Some(upload.id),
                    initiated: Some(timestamp(upload.initiated_s)),
                    ..Default::default()
                })
                .collect(),
        ),
        ..Default::default()
    };
    Ok(output)
}
