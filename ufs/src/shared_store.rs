//! What all handles of one store share within a process: the limit of requests in flight, and the counters.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use tokio::sync::Semaphore;

use crate::metrics::StoreMetrics;
use crate::registry::Registry;
use crate::versions::KeptVersions;

static STORES: Registry<SharedStore> = Registry::new();

pub(crate) struct SharedStore {
    /// Names the store globally.
    pub store_id: String,
    /// The store as error messages name it.
    pub label: Arc<str>,
    pub permits: Arc<Semaphore>,
    pub metrics: Arc<StoreMetrics>,
    /// It has refused to copy, and that was logged.
    pub refuses_copies: AtomicBool,
    pub versions: KeptVersions,
}

impl SharedStore {
    /// The shared part of the store of this id; `label` and `concurrency` count when nobody holds it yet.
    pub(crate) fn of(store_id: &str, label: &str, concurrency: usize) -> Arc<Self> {
        STORES.of(store_id, || Self {
            store_id: store_id.to_owned(),
            label: label.into(),
            permits: Arc::new(Semaphore::new(concurrency.clamp(1, Semaphore::MAX_PERMITS))),
            metrics: Arc::new(StoreMetrics::new(store_id)),
            refuses_copies: AtomicBool::new(false),
            versions: KeptVersions::default(),
        })
    }
}
