//! What all handles of one bucket share within a process beside what those of any store do: the connections, and
//! fetched credentials.

use std::sync::{Arc, OnceLock};

use super::credentials::SharedCredentials;
use super::transport::Transport;
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

    /// Its connections; they are made by whoever asks first.
    pub(crate) fn transport(&self, make: impl FnOnce() -> Result<Transport, UfsError>) -> Result<Transport, UfsError> {
        match self.transport.get() {
            Some(transport) => Ok(transport.clone()),
            None => {
                let transport = make()?;
                Ok(self.transport.get_or_init(|| transport).clone())
            }
        }
    }
}
