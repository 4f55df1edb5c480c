//! What all requests share.

use std::sync::Arc;

use s3s::service::S3Service;

use crate::faults::FaultPlane;
use crate::request_log::RequestLog;
use crate::stats::Stats;
use crate::store::Store;
use crate::sts::Keys;

/// One for each store that runs.
pub(crate) struct Shared {
    pub store: Arc<Store>,
    pub stats: Stats,
    pub faults: FaultPlane,
    pub log: Option<RequestLog>,
    pub s3: S3Service,
    pub keys: Keys,
}
