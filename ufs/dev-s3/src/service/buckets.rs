//! Buckets.

use std::sync::Arc;

use s3s::S3Result;
use s3s::dto::*;

use super::backend::{Backend, on_blocking_thread};
use super::reply::timestamp;

pub(super) async fn create_bucket(backend: &Backend, input: CreateBucketInput) -> S3Result<CreateBucketOutput> {
    let name = input.bucket;
    let location = format!("/{name}");
    let store = Arc::clone(&backend.store);
    on_blocking_thread(move || store.create_bucket(&name)).await?;
    Ok(CreateBucketOutput { location: Some(location) })
}

pub(super) async fn head_bucket(backend: &Backend, input: HeadBucketInput) -> S3Result<HeadBucketOutput> {
    backend.bucket(&input.bucket)?;
    Ok(HeadBucketOutput::default())
}

pub(super) async fn list_buckets(backend: &Backend, _input: ListBucketsInput) -> S3Result<ListBucketsOutput> {
    let buckets = backend.store.buckets();
    let listed = buckets.iter().map(|bucket| Bucket {
        name: Some(bucket.name().to_owned()),
        creation_date: Some(timestamp(bucket.created_s())),
        ..Default::default()
    });
    let output = ListBucketsOutput { buckets: Some(listed.collect()), ..Default::default() };
    Ok(output)
}

pub(super) async fn delete_bucket(backend: &Backend, input: DeleteBucketInput) -> S3Result<DeleteBucketOutput> {
    let store = Arc::clone(&backend.store);
    on_blocking_thread(move || store.delete_bucket(&input.bucket)).await?;
    Ok(DeleteBucketOutput::default())
}

/// Every region's name is accepted; the store says `us-east-1`, which S3 writes as an empty location.
pub(super) async fn get_bucket_location(
    backend: &Backend,
    input: GetBucketLocationInput,
) -> S3Result<GetBucketLocationOutput> {
    backend.bucket(&input.bucket)?;
    Ok(GetBucketLocationOutput::default())
}

/// The second port switches it.
pub(super) async fn get_bucket_versioning(
    backend: &Backend,
    input: GetBucketVersioningInput,
) -> S3Result<GetBucketVersioningOutput> {
    let keeps_versions = backend.bucket(&input.bucket)?.keeps_versions();
    let enabled = || BucketVersioningStatus::from_static(BucketVersioningStatus::ENABLED);
    Ok(GetBucketVersioningOutput { status: keeps_versions.then(enabled), ..Default::default() })
}
