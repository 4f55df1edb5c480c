//! What all handles of one store share within a process: the limit of requests in flight and the counters.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Weak};

use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::metrics::StoreMetrics;

static STORES: LazyLock<Mutex<HashMap<String, Weak<SharedStore>>>> = LazyLock::new(Mutex::default);

pub(crate) struct SharedStore {
    pub permits: Arc<Semaphore>,
    pub metrics: Arc<StoreMetrics>,
}

impl SharedStore {
    /// The shared part of the store of this id; `concurrency` counts when nobody holds it yet.
    pub(crate) fn of(store_id: &str, concurrency: usize) -> Arc<Self> {
        let mut stores = STORES.lock();
        if let Some(shared) = stores.get(store_id).and_then(Weak::upgrade) {
            return shared;
        }
        stores.retain(|_, shared| shared.strong_count() > 0);
        let permits = Arc::new(Semaphore::new(concurrency.clamp(1, Semaphore::MAX_PERMITS)));
        let shared = Arc::new(Self { permits, metrics: Arc::new(StoreMetrics::of(store_id)) });
        stores.insert(store_id.to_owned(), Arc::downgrade(&shared));
        shared
    }
}
