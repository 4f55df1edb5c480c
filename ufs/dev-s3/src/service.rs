//! The S3 operations, one file per group. Everything not implemented here is answered `NotImplemented` by `s3s`.

mod backend;
mod buckets;
mod checksums;
mod conditions;
mod copy;
mod delete;
mod download;
mod listing;
mod multipart;
mod reply;
mod upload;

use s3s::dto::*;
use s3s::{S3, S3Request, S3Response, S3Result};

pub(crate) use self::backend::{Backend, on_blocking_thread};
pub(crate) use self::reply::timestamp;

/// Has each operation answered by the function of its name in a file of this folder, which gets the input and those
/// fields of the request that are named after it.
macro_rules! operations {
    ($($file:ident::$operation:ident($input:ident $(, $more:ident)*) -> $output:ident;)+) => {
        #[async_trait::async_trait]
        impl S3 for Backend {
            $(
                async fn $operation(&self, request: S3Request<$input>) -> S3Result<S3Response<$output>> {
                    Ok(S3Response::new($file::$operation(self, request.input $(, request.$more)*).await?))
                }
            )+
        }
    };
}

operations! {
    buckets::create_bucket(CreateBucketInput) -> CreateBucketOutput;
    buckets::head_bucket(HeadBucketInput) -> HeadBucketOutput;
    buckets::list_buckets(ListBucketsInput) -> ListBucketsOutput;
    buckets::delete_bucket(DeleteBucketInput) -> DeleteBucketOutput;
    buckets::get_bucket_location(GetBucketLocationInput) -> GetBucketLocationOutput;
    buckets::get_bucket_versioning(GetBucketVersioningInput) -> GetBucketVersioningOutput;
    listing::list_objects(ListObjectsInput) -> ListObjectsOutput;
    listing::list_objects_v2(ListObjectsV2Input) -> ListObjectsV2Output;
    listing::list_object_versions(ListObjectVersionsInput) -> ListObjectVersionsOutput;
    download::get_object(GetObjectInput) -> GetObjectOutput;
    download::head_object(HeadObjectInput) -> HeadObjectOutput;
    upload::put_object(PutObjectInput, headers, trailing_headers) -> PutObjectOutput;
    copy::copy_object(CopyObjectInput) -> CopyObjectOutput;
    copy::upload_part_copy(UploadPartCopyInput) -> UploadPartCopyOutput;
    delete::delete_object(DeleteObjectInput) -> DeleteObjectOutput;
    delete::delete_objects(DeleteObjectsInput) -> DeleteObjectsOutput;
    multipart::create_multipart_upload(CreateMultipartUploadInput) -> CreateMultipartUploadOutput;
    multipart::upload_part(UploadPartInput, headers, trailing_headers) -> UploadPartOutput;
    multipart::complete_multipart_upload(CompleteMultipartUploadInput) -> CompleteMultipartUploadOutput;
    multipart::abort_multipart_upload(AbortMultipartUploadInput) -> AbortMultipartUploadOutput;
    multipart::list_parts(ListPartsInput) -> ListPartsOutput;
    multipart::list_multipart_uploads(ListMultipartUploadsInput) -> ListMultipartUploadsOutput;
}
