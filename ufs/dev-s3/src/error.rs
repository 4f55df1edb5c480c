//! Everything that can go wrong in the embedded store. `service::reply` maps these to S3 error codes, and nothing else
//! does.

use std::io;
use std::path::{Path, PathBuf};

/// An error of the embedded object store.
#[derive(Debug, thiserror::Error)]
pub enum DevS3Error {
    #[error(transparent)]
    Process(#[from] cavern_conf::process::ProcessError),

    #[error(transparent)]
    Security(#[from] cavern_security::SecurityError),

    #[error("--admin-listen {0} is for other hosts, and the port is for this one alone: use 127.0.0.1 or [::1]")]
    AdminReach(String),

    #[error("{} is in use by another object store; stop that one or choose another --root", root.display())]
    RootInUse { root: PathBuf },

    #[error("cannot {action} {}: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },

    #[error("fault rule refused: {0}")]
    InvalidFault(String),

    #[error("key space refused: {0}")]
    InvalidKeySpace(String),

    #[error("bucket {0:?} is listed more often than its profile allows")]
    SlowDown(String),

    #[error("bucket {0:?} does not exist")]
    NoSuchBucket(String),

    #[error("bucket {0:?} exists already")]
    BucketExists(String),

    #[error("bucket {0:?} still holds objects")]
    BucketNotEmpty(String),

    #[error("bucket name {0:?} is not allowed: 3 to 63 characters of a-z, 0-9, '.' and '-'")]
    InvalidBucketName(String),

    #[error("key {0:?} does not exist")]
    NoSuchKey(String),

    #[error("of key {key:?} there is no version {version:?}")]
    NoSuchVersion { key: String, version: String },

    #[error("the key is empty or longer than 1024 bytes")]
    InvalidKey,

    #[error("multipart upload {0:?} does not exist")]
    NoSuchUpload(String),

    #[error("part {0} is missing or its ETag is another one")]
    InvalidPart(u32),

    #[error("parts must be listed in ascending order")]
    InvalidPartOrder,

    #[error("part {number} has {size} bytes; every part but the last needs at least 5 MiB")]
    PartTooSmall { number: u32, size: u64 },

    #[error("the condition does not hold: {0}")]
    Precondition(&'static str),

    #[error("the body does not match its {0}")]
    BadDigest(&'static str),
}

impl DevS3Error {
    /// For `map_err` on file-system calls.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { action, path, source }
    }
}
