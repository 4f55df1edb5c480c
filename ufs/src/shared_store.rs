//! What all handles of one store share within a process, for as long as one of them has it: the limit of requests in
//! flight, the counters, the connections, and fetched credentials.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock, Weak};

use cavern_conf::schema;
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::allowed::Guard;
use crate::error::UfsError;
use crate::metrics::StoreMetrics;
use crate::s3::credentials::SharedCredentials;
use crate::s3::options::S3Options;
use crate::s3::transport::Transport;
use crate::versions::KeptVersions;

/// By their ids.
static STORES: Mutex<BTreeMap<String, Weak<SharedStore>>> = Mutex::new(BTreeMap::new());

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
    transport: OnceLock<Transport>,
    pub credentials: SharedCredentials,
}

impl SharedStore {
    /// The shared part of the store of this id; `label` and `concurrency` count when nobody holds it yet.
    pub(crate) fn of(store_id: &str, label: &str, concurrency: usize) -> Arc<Self> {
        let mut all = STORES.lock();
        if let Some(shared) = all.get(store_id).and_then(Weak::upgrade) {
            return shared;
        }
        all.retain(|_, shared| shared.strong_count() > 0);
        let shared = Arc::new(Self {
            store_id: store_id.to_owned(),
            label: label.into(),
            permits: Arc::new(Semaphore::new(concurrency.clamp(1, Semaphore::MAX_PERMITS))),
            metrics: Arc::new(StoreMetrics::new(store_id)),
            refuses_copies: AtomicBool::new(false),
            versions: KeptVersions::default(),
            transport: OnceLock::new(),
            credentials: SharedCredentials::default(),
        });
        all.insert(store_id.to_owned(), Arc::downgrade(&shared));
        shared
    }

    /// That of a bucket of S3.
    pub(crate) fn of_bucket(bucket: &str, options: &S3Options, conf: &schema::Ufs) -> Arc<Self> {
        let label = format!("s3://{bucket} at {}", options.identity());
        Self::of(&options.store_id(bucket), &label, conf.concurrency)
    }

    /// Its connections, which go to `url` for the endpoint that the option `setting` has; they are made by whoever asks
    /// first.
    pub(crate) fn transport(
        &self,
        setting: &'static str,
        endpoint: &str,
        url: &str,
        conf: &schema::Ufs,
    ) -> Result<Transport, UfsError> {
        if let Some(transport) = self.transport.get() {
            return Ok(transport.clone());
        }
        let guard = Guard::new(setting, endpoint, url, conf);
        let transport = Transport::new(conf.connect_timeout.get(), conf.concurrency, url.starts_with("https:"), guard)?;
        Ok(self.transport.get_or_init(|| transport).clone())
    }
}
