//! What a leader has workers do, as long as it leads: one that does not know it any more has nothing done. Its
//! successor may have decided otherwise.

use std::sync::Arc;
use std::time::Duration;

use cavern_consensus::LeaderLease;
use cavern_net::Placement;
use cavern_proto::data::{BlockRef, CopyRequest, InspectReply, InspectRequest, PersistReply, PersistRequest};
use cavern_proto::master::Worker;
use futures::future::BoxFuture;

use super::calls::ObjectWriter;
use crate::error::WorkError;

/// The workers, for a leader as long as it leads.
pub struct Fenced {
    pub workers: Arc<dyn ObjectWriter>,
    pub lease: LeaderLease,
}

impl Fenced {
    /// Does it if this master leads.
    fn do_as_leader<'a, T: Send + 'a>(
        &'a self,
        work: impl FnOnce(&'a dyn ObjectWriter) -> BoxFuture<'a, Result<T, String>>,
    ) -> BoxFuture<'a, Result<T, String>> {
        match self.lease.check() {
            Ok(()) => work(&*self.workers),
            Err(error) => Box::pin(async move { Err(error.to_string()) }),
        }
    }
}

impl ObjectWriter for Fenced {
    fn placement(&self) -> Result<Arc<Placement>, WorkError> {
        self.workers.placement()
    }

    fn reported(&self) -> Result<Vec<Worker>, WorkError> {
        self.workers.reported()
    }

    fn persist(&self, worker: u64, request: PersistRequest) -> BoxFuture<'_, Result<PersistReply, String>> {
        self.do_as_leader(|workers| workers.persist(worker, request))
    }

    fn arrives_within(&self) -> Duration {
        self.workers.arrives_within()
    }

    fn free(&self, worker: u64, blocks: Vec<BlockRef>) -> BoxFuture<'_, Result<(), String>> {
        self.do_as_leader(|workers| workers.free(worker, blocks))
    }

    fn has(&self, worker: u64, blocks: Vec<BlockRef>) -> BoxFuture<'_, Result<Vec<bool>, String>> {
        self.workers.has(worker, blocks)
    }

    fn copy(&self, worker: u64, request: CopyRequest, within: Duration) -> BoxFuture<'_, Result<(), String>> {
        self.do_as_leader(|workers| workers.copy(worker, request, within))
    }

    fn inspect(&self, worker: u64, request: InspectRequest) -> BoxFuture<'_, Result<InspectReply, String>> {
        self.do_as_leader(|workers| workers.inspect(worker, request))
    }
}
