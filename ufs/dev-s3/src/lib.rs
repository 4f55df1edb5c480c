//! The embedded object store: `cv dev-s3 --root DIR --listen ADDR`.
//!
//! It speaks the S3 protocol over objects kept as files, for laptops (`cv local` without a bucket), for tests and as
//! the benchmarks' plain object store. It is exact where clients rely on S3: order and paging of listings, ETags,
//! ranges, conditions, multipart uploads, signatures, and sessions of STS (`AssumeRole`) with their policies. A second
//! port, off unless asked for, shows counters and takes fault rules from whoever has its token, and rules for buckets
//! of very many objects that take no room ([`store::KeySpaceRule`]). It is no store for data that matters: nothing is
//! synced to disk, and there is one pair of keys, which takes on any role.
//!
//! Where it differs from S3:
//! - no ACLs, tags, policies, lifecycle rules: such requests are answered `NotImplemented`;
//! - versions are kept where the second port says so, until the store stops; they are listed in one page, and none is
//!   deleted by its id;
//! - `x-amz-checksum-*` of objects and parts, in headers and trailers, are verified and not kept: no answer has them,
//!   and that of a whole multipart upload is not looked at;
//! - a Range header that is malformed or names several ranges is answered 400 (S3 ignores it), and an `If-Match` takes
//!   one ETag or `*`;
//! - a copy keeps its source's ETag, also that of a multipart upload; a sparse object's ETag is not an MD5;
//! - any region's name is taken; creating a bucket again is answered 409;
//! - of two conditional writes of one key at once one fails with 412, where S3 may say 409.
//!
//! `s3s` logs every refused request, a 404 included, as an error: a process that runs the store wants `s3s=off` among
//! its log directives. Failures of the store itself are logged under this crate's name.
//!
//! One request goes through these rooms: `server` (connections) → `exchange` (faults, counters, log) → the `s3s` crate
//! (signature, XML) → `sts` (what a session may do) → `service` (the S3 operations) → `store` (files and index).
//!
//! ```no_run
//! # async fn example() -> Result<(), cavern_dev_s3::DevS3Error> {
//! use cavern_dev_s3::{DevS3, DevS3Config};
//!
//! let s3 = DevS3::start(DevS3Config::new("/tmp/bucket-root")).await?;
//! s3.store().create_bucket("images")?;
//! s3.store().put("images", "a/1.jpg", b"...")?;
//! println!("{} {}", s3.endpoint(), s3.stats().requests);
//! s3.stop().await;
//! # Ok(()) }
//! ```

mod admin;
mod config;
mod error;
mod exchange;
mod faults;
mod operation;
mod policy;
mod request_log;
mod server;
mod service;
mod shared;
mod stats;
pub mod store;
mod sts;

use cavern_conf::process;
use tokio_util::sync::CancellationToken;

pub use config::{DEFAULT_ACCESS_KEY, DEFAULT_SECRET_KEY, DevS3Config};
pub use error::DevS3Error;
pub use faults::{FaultKind, FaultPlane, FaultRule};
pub use operation::{Kind, Operation};
pub use server::{DevS3, Running};
pub use stats::StatsSnapshot;

/// Runs the store as a process does: starts it, prints `cv dev-s3 ready s3=http://… http=…`, serves until `stop` and
/// lets requests in flight finish.
///
/// # Errors
/// Those of [`DevS3::start`].
pub async fn run(config: DevS3Config, stop: CancellationToken) -> Result<(), DevS3Error> {
    let running = DevS3::start(config).await?;
    let mut endpoints = vec![("s3", running.endpoint())];
    if let Some(admin) = running.admin_addr() {
        endpoints.push(("http", admin.to_string()));
    }
    process::ready("dev-s3", &endpoints);
    stop.cancelled().await;
    running.stop().await;
    Ok(())
}
