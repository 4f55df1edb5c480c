//! What only the leader does, as one object that begins and ends with its lead: what runs all the time (`upkeep`,
//! `expiry`, persistence and repair), and what the log says was begun and is not over: jobs, indexes, and taking in
//! what buckets had before.

mod expiry;
mod upkeep;

use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::MasterError;
use crate::metrics::MasterMetrics;
use crate::recovery::HighWater;
use crate::service::Services;
use crate::state::{Database, Tables};
#[cfg(test)]
pub use upkeep::{COUNT_STEP, REAP_STEP};

/// The lead of this master.
pub struct Leadership {
    services: Services,
    background: TaskTracker,
    stop: CancellationToken,
}

impl Leadership {
    /// Begins with everything that the state says is to be done.
    pub async fn begin(
        services: &Services,
        database: Arc<Database>,
        metrics: &MasterMetrics,
        high_water: HighWater,
    ) -> Result<Self, MasterError> {
        let (background, stop) = (TaskTracker::new(), services.stop.child_token());
        services.jobs.resume().await?;
        services.persistence.start();
        services.repair.start();
        for mount in Tables::new(&database).mounts()? {
            match services.mounts.get(mount.id) {
                Ok(open) if open.is_fs_mode() => services.lookups.listings.start_existing(open),
                Ok(open) => services.lookups.listings.start_index(open),
                Err(error) => tracing::error!(mount = mount.path, "the mount cannot be used: {error}"),
            }
        }
        let time = upkeep::keep_time(services.clone(), metrics.clone(), database.clone(), high_water, stop.clone());
        background.spawn(time);
        background.spawn(upkeep::keep_reaping(services.clone(), database, stop.clone()));
        background.spawn(expiry::keep_expiring(services.clone(), metrics.expiry.clone(), stop.clone()));
        Ok(Self { services: services.clone(), background, stop })
    }

    /// Ends it, for good: the next process goes on with what is left. Nothing of it is under way when this returns.
    pub async fn end(self) {
        let Self { services, background, stop } = self;
        stop.cancel();
        services.jobs.shutdown().await;
        services.persistence.shutdown().await;
        services.repair.shutdown().await;
        services.lookups.listings.shutdown().await;
        background.close();
        background.wait().await;
    }
}
