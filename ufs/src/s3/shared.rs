//! What all handles of one bucket share within a process beside what those of any store do: the connections, and
//! fetched credentials.

use std::sync::{Arc, OnceLock};

use cavern_conf::schema;

use super::credentials::SharedCredentials;
use super::transport::Transport;
use crate::allowed::Guard;
use crate::error::UfsError;
use crate::registry::Registry;

static BUCKETS: Registry<SharedBucket> = Registry::new();

#[derive(Default)]
pub(crate) struct SharedBucket {
    transport: OnceLock<Transport>,
    pub(super) credentials: SharedCredentials,
}

impl SharedBucket {
    /// That of the store of this id.
    pub(crate) fn of(store_id: &str) -> Arc<Self> {
        BUCKETS.of(store_id, Self::default)
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
