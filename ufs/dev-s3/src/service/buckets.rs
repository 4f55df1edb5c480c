//! Buckets.

use s3s::dto::*;
use s3s::{S3Request, S3Response, S3Result};

use super::backend::Backend;
use super::reply::timestamp;

pub(super) async fn create_bucket(
    backend: &Backend,
    request: S3Request<CreateBucketInput>,
) -> S3Result<S3Response<CreateBucketOutput>> {
    let name = request.input.bucket;
    let location = format!("/{name}");
    backend.blocking(move |store| store.create_bucket(&name)).await?;
    Ok(S3Response::new(CreateBucketOutput { location: Some(location) }))
}

pub(super) async fn head_bucket(
    backend: &Backend,
    request: S3Request<HeadBucketInput>,
) -> S3Result<S3Response<HeadBucketOutput>> {
    backend.bucket(&request.input.bucket)?;
    Ok(S3Response::new(HeadBucketOutput::default()))
}

pub(super) async fn list_buckets(
    backend: &Backend,
    _request: S3Request<ListBucketsInput>,
) -> S3Result<S3Response<ListBucketsOutput>> {
    let buckets = backend.store.buckets();
    let listed = buckets.iter().map(|bucket| Bucket {
        name: Some(bucket.name().to_owned()),
        creation_date: Some(timestamp(bucket.created_s())),
        ..Default::default()
    });
    let output = ListBucketsOutput { buckets: Some(listed.collect()), ..Default::default() };
    Ok(S3Response::new(output))
}

pub(super) async fn delete_bucket(
    backend: &Backend,
    request: S3Request<DeleteBucketInput>,
) -> S3Result<S3Response<DeleteBucketOutput>> {
    backend.blocking(move |store| store.delete_bucket(&request.input.bucket)).await?;
    Ok(S3Response::new(DeleteBucketOutput::default()))
}

/// Every region's name is accepted; the store says `us-east-1`, which S3 writes as an empty location.
pub(super) async fn get_bucket_location(
    backend: &Backend,
    request: S3Request<GetBucketLocationInput>,
) -> S3Result<S3Response<GetBucketLocationOutput>> {
    backend.bucket(&request.input.bucket)?;
    Ok(S3Response::new(GetBucketLocationOutput::default()))
}

/// Never switched on.
pub(super) async fn get_bucket_versioning(
    backend: &Backend,
    request: S3Request<GetBucketVersioningInput>,
) -> S3Result<S3Response<GetBucketVersioningOutput>> {
    backend.bucket(&request.input.bucket)?;
    Ok(S3Response::new(GetBucketVersioningOutput::default()))
}
