//! The way to read the tables: all that one read sees is of one moment, and no other master has acknowledged anything
//! newer by then; and the clock by which it is judged.

use std::sync::Arc;
use std::time::Duration;

use cavern_consensus::{Clock, LeaderLease};
use cavern_state::{Database, Directory, Tables};

use crate::error::WorkError;

/// Reads what has been applied. Cheap to clone.
#[derive(Clone)]
pub struct StateReader {
    database: Arc<Database>,
    clock: Arc<Clock>,
    lease: LeaderLease,
}

impl StateReader {
    pub fn new(database: Arc<Database>, clock: Arc<Clock>, lease: LeaderLease) -> Self {
        Self { database, clock, lease }
    }

    /// Runs `read` with the tables on the blocking pool. All that it reads is of one moment, after the call.
    ///
    /// # Errors
    /// Those of `read`, and [`WorkError::Consensus`] when somebody else may have led at that moment.
    pub async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(Tables<'_>) -> Result<T, WorkError> + Send + 'static,
    ) -> Result<T, WorkError> {
        self.lease.read(self.database.clone(), read).await
    }

    /// A directory with its place in the namespace.
    ///
    /// # Errors
    /// [`WorkError::Gone`], and those of [`Self::read`].
    pub async fn directory(&self, inode: u64) -> Result<Directory, WorkError> {
        self.read(move |tables| Ok(tables.directory(inode)?)).await?.ok_or(WorkError::Gone(inode))
    }

    /// Reads a few records, which are in memory as a rule: they are read here and now, and on the blocking pool only if
    /// they are not. So `look` may be called twice.
    pub async fn look<T: Send + 'static>(
        &self,
        look: impl Fn(Tables<'_>) -> Result<T, WorkError> + Send + 'static,
    ) -> Result<T, WorkError> {
        let found = {
            let snapshot = self.database.raw().snapshot();
            look(Tables::at(&self.database, &snapshot).in_memory())
        };
        match found {
            Err(error) if error.needs_disk() => self.read(look).await,
            found => {
                self.lease.check()?;
                found
            }
        }
    }

    /// Whether this master still leads.
    pub fn lease(&self) -> &LeaderLease {
        &self.lease
    }

    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Age in milliseconds of a listing that was complete at `listed_ns`; -1 when there never was one.
    pub fn age_ms(&self, listed_ns: i64) -> i64 {
        if listed_ns == 0 {
            return -1;
        }
        let age_ns = self.clock.age_ns(listed_ns);
        // From the future: of a master that did not record its clock. Nothing is known about such a listing's age.
        if age_ns < 0 { i64::MAX / 1_000_000 } else { age_ns / 1_000_000 }
    }

    /// Whether a listing is at least as old as `limit`.
    pub fn is_older(&self, listed_ns: i64, limit: Duration) -> bool {
        let age = u64::try_from(self.age_ms(listed_ns)).unwrap_or(u64::MAX);
        u128::from(age) >= limit.as_millis()
    }
}
