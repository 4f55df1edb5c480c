//! Checksums that clients send with a body, in headers before it or in trailers after it. They are verified, not kept.

use hyper::HeaderMap;
use s3s::TrailingHeaders;
use s3s::checksum::ChecksumHasher;
use s3s::crypto::{Checksum as _, Crc32, Crc32c, Crc64Nvme, Sha1, Sha256};

use crate::error::DevS3Error;

const CRC32: &str = "x-amz-checksum-crc32";
const CRC32C: &str = "x-amz-checksum-crc32c";
const CRC64NVME: &str = "x-amz-checksum-crc64nvme";
const SHA1: &str = "x-amz-checksum-sha1";
const SHA256: &str = "x-amz-checksum-sha256";

/// The checksums of a body that is being received.
#[derive(Default)]
pub(super) struct Checksums {
    headers: HeaderMap,
    trailers: Option<TrailingHeaders>,
    hasher: ChecksumHasher,
}

impl Checksums {
    /// Those that the headers of a request have, or announce as trailers.
    pub fn expected(headers: HeaderMap, trailers: Option<TrailingHeaders>) -> Self {
        let announced = headers.get("x-amz-trailer").and_then(|names| names.to_str().ok()).unwrap_or_default();
        let has = |name: &str| {
            headers.contains_key(name) || announced.split(',').any(|other| other.trim().eq_ignore_ascii_case(name))
        };
        let hasher = ChecksumHasher {
            crc32: has(CRC32).then(Crc32::new),
            crc32c: has(CRC32C).then(Crc32c::new),
            crc64nvme: has(CRC64NVME).then(Crc64Nvme::new),
            sha1: has(SHA1).then(Sha1::new),
            sha256: has(SHA256).then(Sha256::new),
        };
        Self { headers, trailers, hasher }
    }

    pub fn update(&mut self, data: &[u8]) {
        self.hasher.update(data);
    }

    /// Holds the body, which was read to its end, against what was said of it.
    ///
    /// # Errors
    /// A checksum is another one, or was announced and did not come.
    pub fn verify(self) -> Result<(), DevS3Error> {
        let Self { headers, trailers, hasher } = self;
        let found = hasher.finalize();
        for (name, found) in [
            (CRC32, found.checksum_crc32),
            (CRC32C, found.checksum_crc32c),
            (CRC64NVME, found.checksum_crc64nvme),
            (SHA1, found.checksum_sha1),
            (SHA256, found.checksum_sha256),
        ] {
            let Some(found) = found else { continue };
            let matches = |said: &HeaderMap| said.get(name).map(|said| *said == found);
            let in_trailers = || trailers.as_ref()?.read(matches).flatten();
            if matches(&headers).or_else(in_trailers) != Some(true) {
                return Err(DevS3Error::BadDigest(name));
            }
        }
        Ok(())
    }
}
