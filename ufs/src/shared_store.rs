//! What all handles of one store share within a process: the limit of requests in flight, the counters, the
//! connections and fetched credentials.

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, LazyLock, OnceLock, Weak};

use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::metrics::StoreMetrics;
use crate::s3::{SharedCredentials, Transport};

static STORES: LazyLock<Mutex<HashMap<String, Weak<SharedStore>>>> = LazyLock::new(Mutex::default);

pub(crate) struct SharedStore {
    /// Names the store globally.
    pub store_id: String,
    /// The store as error messages name it.
    pub label: Arc<str>,
    pub permits: Arc<Semaphore>,
    pub metrics: Arc<StoreMetrics>,
    /// Connections of an S3 store.
    pub transport: OnceLock<Transport>,
    /// What the handles of an S3 store have fetched to sign with.
    pub credentials: Mutex<Vec<SharedCredentials>>,
    /// It has refused to copy, and that was logged.
    pub refuses_copies: AtomicBool,
}

impl SharedStore {
    /// The shared part of the store of this id; `label` and `concurrency` count when nobody holds it yet.
    pub(crate) fn of(store_id: &str, label: &str, concurrency: usize) -> Arc<Self> {
        let mut stores = STORES.lock();
        if let Some(shared) = stores.get(store_id).and_then(Weak::upgrade) {
            return shared;
        }
        stores.retain(|_, shared| shared.strong_count() > 0);
        let shared = Arc::new(Self {
            store_id: store_id.to_owned(),
            label: label.into(),
            permits: Arc::new(Semaphore::new(concurrency.clamp(1, Semaphore::MAX_PERMITS))),
            metrics: Arc::new(StoreMetrics::of(store_id)),
            transport: OnceLock::new(),
            credentials: Mutex::default(),
            refuses_copies: AtomicBool::new(false),
        });
        stores.insert(store_id.to_owned(), Arc::downgrade(&shared));
        shared
    }
}
