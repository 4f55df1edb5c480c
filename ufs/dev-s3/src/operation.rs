//! Which S3 operation a request is, determined from its method, path and query before anything else is done, so that
//! faults, counters and the request log speak of requests that were never answered, too.

use hyper::Method;
use percent_encoding::percent_decode_str;

macro_rules! operations {
    ($($name:ident => $kind:ident),+ $(,)?) => {
        /// One S3 operation.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Operation { $($name),+ }

        impl Operation {
            /// Every operation; the position of one is `self as usize`.
            pub const ALL: &'static [Operation] = &[$(Operation::$name),+];

            /// Its name in the S3 API.
            pub fn name(self) -> &'static str {
                match self { $(Operation::$name => stringify!($name)),+ }
            }

            /// The coarse kind that tests count.
            pub fn kind(self) -> Kind {
                match self { $(Operation::$name => Kind::$kind),+ }
            }
        }
    };
}

operations! {
    GetObject => Get,
    HeadObject => Head,
    ListObjects => List,
    ListObjectsV2 => List,
    ListObjectVersions => List,
    PutObject => Put,
    UploadPart => Put,
    CopyObject => Copy,
    UploadPartCopy => Copy,
    DeleteObject => Delete,
    DeleteObjects => Delete,
    CreateMultipartUpload => Multipart,
    CompleteMultipartUpload => Multipart,
    AbortMultipartUpload => Multipart,
    ListParts => Multipart,
    ListMultipartUploads => Multipart,
    ListBuckets => Bucket,
    CreateBucket => Bucket,
    HeadBucket => Bucket,
    DeleteBucket => Bucket,
    GetBucketLocation => Bucket,
    AssumeRole => Other,
    Other => Other,
}

cavern_conf::named_values! {
    /// Coarse kinds of operations, under whose names requests are counted. `Get` and `Head` are of objects, `Put` is of
    /// objects and parts.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Kind {
        Get = "GET",
        Head = "HEAD",
        List = "LIST",
        Put = "PUT",
        Copy = "COPY",
        Delete = "DELETE",
        Multipart = "MULTIPART",
        Bucket = "BUCKET",
        Other = "OTHER",
    }
}

/// What a request is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    pub operation: Operation,
    pub bucket: String,
    pub key: String,
}

impl Target {
    /// Reads the target from a path-style request. `is_copy` says whether the request has an `x-amz-copy-source`
    /// header.
    pub fn of(method: &Method, path: &str, query: Option<&str>, is_copy: bool) -> Self {
        let path = percent_decode_str(path).decode_utf8_lossy();
        let path = path.strip_prefix('/').unwrap_or(&path);
        let (bucket, key) = path.split_once('/').unwrap_or((path, ""));
        let has = |name: &str| {
            query
                .is_some_and(|query| query.split('&').any(|pair| pair.split('=').next().is_some_and(|key| key == name)))
        };
        let operation = match (bucket.is_empty(), key.is_empty()) {
            (true, _) if method == Method::GET => Operation::ListBuckets,
            (true, _) if method == Method::POST => Operation::AssumeRole,
            (true, _) => Operation::Other,
            (false, true) => bucket_operation(method, &has),
            (false, false) => object_operation(method, &has, is_copy),
        };
        Self { operation, bucket: bucket.to_owned(), key: key.to_owned() }
    }
}

fn bucket_operation(method: &Method, has: &dyn Fn(&str) -> bool) -> Operation {
    match *method {
        Method::GET if has("location") => Operation::GetBucketLocation,
        Method::GET if has("uploads") => Operation::ListMultipartUploads,
        Method::GET if has("list-type") => Operation::ListObjectsV2,
        Method::GET if has("versions") => Operation::ListObjectVersions,
        Method::GET if has("acl") || has("policy") || has("versioning") => Operation::Other,
        Method::GET => Operation::ListObjects,
        Method::HEAD => Operation::HeadBucket,
        Method::PUT => Operation::CreateBucket,
        Method::DELETE => Operation::DeleteBucket,
        Method::POST if has("delete") => Operation::DeleteObjects,
        _ => Operation::Other,
    }
}

fn object_operation(method: &Method, has: &dyn Fn(&str) -> bool, is_copy: bool) -> Operation {
    match *method {
        Method::GET if has("uploadId") => Operation::ListParts,
        Method::GET if has("acl") || has("tagging") || has("attributes") => Operation::Other,
        Method::GET => Operation::GetObject,
        Method::HEAD => Operation::HeadObject,
        Method::PUT if has("uploadId") && is_copy => Operation::UploadPartCopy,
        Method::PUT if has("uploadId") => Operation::UploadPart,
        Method::PUT if has("acl") || has("tagging") => Operation::Other,
        Method::PUT if is_copy => Operation::CopyObject,
        Method::PUT => Operation::PutObject,
        Method::DELETE if has("uploadId") => Operation::AbortMultipartUpload,
        Method::DELETE if has("tagging") => Operation::Other,
        Method::DELETE => Operation::DeleteObject,
        Method::POST if has("uploads") => Operation::CreateMultipartUpload,
        Method::POST if has("uploadId") => Operation::CompleteMultipartUpload,
        _ => Operation::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operation(method: Method, path: &str, query: &str) -> Operation {
        Target::of(&method, path, (!query.is_empty()).then_some(query), false).operation
    }

    #[test]
    fn requests_are_told_apart() {
        assert_eq!(operation(Method::GET, "/", ""), Operation::ListBuckets);
        assert_eq!(operation(Method::POST, "/", ""), Operation::AssumeRole);
        assert_eq!(operation(Method::GET, "/b", "list-type=2&prefix=x"), Operation::ListObjectsV2);
        assert_eq!(operation(Method::GET, "/b/", "prefix=uploads"), Operation::ListObjects);
        assert_eq!(operation(Method::GET, "/b?", "uploads"), Operation::ListMultipartUploads);
        assert_eq!(operation(Method::GET, "/b", "prefix=k&versions="), Operation::ListObjectVersions);
        assert_eq!(operation(Method::HEAD, "/b/k", ""), Operation::HeadObject);
        assert_eq!(operation(Method::PUT, "/b/k", "partNumber=1&uploadId=2"), Operation::UploadPart);
        assert_eq!(operation(Method::POST, "/b/k", "uploads="), Operation::CreateMultipartUpload);
        assert_eq!(operation(Method::PATCH, "/b/k", ""), Operation::Other);
        assert_eq!(Target::of(&Method::PUT, "/b/k", None, true).operation, Operation::CopyObject);
    }

    #[test]
    fn keys_are_decoded_and_keep_their_slashes() {
        let target = Target::of(&Method::GET, "/b//a%20b/%2e%2e/%C3%A9/", None, false);
        assert_eq!((target.bucket.as_str(), target.key.as_str()), ("b", "/a b/../é/"));
    }
}
