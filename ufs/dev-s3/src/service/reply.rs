//! From the store's values to S3's: error codes, ETags, times.

use std::time::{Duration, UNIX_EPOCH};

use s3s::dto::{ETag, Timestamp};
use s3s::{S3Error, S3ErrorCode};

use crate::error::DevS3Error;

impl From<DevS3Error> for S3Error {
    fn from(error: DevS3Error) -> Self {
        let code = match &error {
            DevS3Error::NoSuchBucket(_) => S3ErrorCode::NoSuchBucket,
            DevS3Error::BucketExists(_) => S3ErrorCode::BucketAlreadyOwnedByYou,
            DevS3Error::BucketNotEmpty(_) => S3ErrorCode::BucketNotEmpty,
            DevS3Error::InvalidBucketName(_) => S3ErrorCode::InvalidBucketName,
            DevS3Error::NoSuchKey(_) => S3ErrorCode::NoSuchKey,
            DevS3Error::NoSuchVersion { .. } => S3ErrorCode::NoSuchVersion,
            DevS3Error::InvalidKey => S3ErrorCode::KeyTooLongError,
            DevS3Error::NoSuchUpload(_) => S3ErrorCode::NoSuchUpload,
            DevS3Error::InvalidPart(_) => S3ErrorCode::InvalidPart,
            DevS3Error::InvalidPartOrder => S3ErrorCode::InvalidPartOrder,
            DevS3Error::PartTooSmall { .. } => S3ErrorCode::EntityTooSmall,
            DevS3Error::Precondition(_) => S3ErrorCode::PreconditionFailed,
            DevS3Error::BadDigest(_) => S3ErrorCode::BadDigest,
            DevS3Error::SlowDown(_) => S3ErrorCode::SlowDown,
            DevS3Error::Process(_)
            | DevS3Error::Security(_)
            | DevS3Error::AdminReach(_)
            | DevS3Error::RootInUse { .. }
            | DevS3Error::Io { .. }
            | DevS3Error::InvalidFault(_)
            | DevS3Error::InvalidKeySpace(_) => {
                tracing::error!(%error, "the object store failed");
                S3ErrorCode::InternalError
            }
        };
        S3Error::with_message(code, error.to_string())
    }
}

/// What an input says that is kept with an object, which all that make one say alike.
macro_rules! attributes_of {
    ($input:ident) => {
        $crate::store::Attributes {
            content_type: $input.content_type,
            cache_control: $input.cache_control,
            content_disposition: $input.content_disposition,
            content_encoding: $input.content_encoding,
            content_language: $input.content_language,
            metadata: $input.metadata.unwrap_or_default().into_iter().collect(),
        }
    };
}
pub(super) use attributes_of;

/// An ETag as S3 sends it.
pub(super) fn etag(value: &str) -> ETag {
    ETag::Strong(value.to_owned())
}

/// Seconds since the epoch as S3's time.
pub(crate) fn timestamp(seconds: i64) -> Timestamp {
    Timestamp::from(UNIX_EPOCH + Duration::from_secs(seconds.max(0) as u64))
}
